"""Measures how long the plan of one request takes on one core.

    python benchmarks/plan.py --repeats 101 --json plan.json

Each case lowers a plan from Python lists of block ids to the array of descriptors; most cases have a time budget.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kvferry.cli.console import open_console, progress
from kvferry.cli.plan_report import RANK_SPACING, Blocks, EngineShape, block_ids, engine_of
from kvferry.layout.named_layouts import NamedLayout
from kvferry.models.families import alike
from kvferry.models.groups import AttentionCache
from kvferry.plan.match import GroupBlocks
from kvferry.plan.planner import PairPlan, Planner
from kvferry.plan.proof import verify_pair


@dataclass(frozen=True)
class Case:
    """One plan to lower, and its time budget."""

    name: str
    num_layers: int
    num_blocks: int
    prefill: EngineShape
    decode: EngineShape
    budget_s: float | None = None
    first_token: int = 0


@dataclass(frozen=True)
class Timing:
    """The seconds of one case; ``lower_s`` and ``verify_s`` are medians, ``template_s`` is a single run."""

    name: str
    descriptors: int
    lower_s: float
    slowest_s: float
    budget_s: float | None
    within_budget: bool
    template_s: float
    verify_s: float


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _engine(layout: NamedLayout, tp: int = 1, block_size: int = 16) -> EngineShape:
    return EngineShape(tp, layout, block_size)


BHLNC, LBHNC, LBNHC = NamedLayout.BHLNC, NamedLayout.LBHNC, NamedLayout.LBNHC
CASES = (
    Case("BHLNC, 640 scattered blocks", 36, 640, _engine(BHLNC), _engine(BHLNC), 1e-3),
    Case("BHLNC, 640 scattered blocks, TP 2 to 1", 36, 640, _engine(BHLNC, 2), _engine(BHLNC), 1e-3),
    Case("LBHNC, 640 scattered blocks", 36, 640, _engine(LBHNC), _engine(LBHNC), 5e-3),
    Case("LBHNC, 4000 scattered blocks", 28, 4000, _engine(LBHNC), _engine(LBHNC), 25e-3),
    Case("LBNHC, 97 scattered blocks, TP 2 to 1", 36, 97, _engine(LBNHC, 2), _engine(LBNHC), 25e-3),
    Case("LBHNC, block 16 to 32", 36, 640, _engine(LBHNC), _engine(LBHNC, 1, 32)),
    Case("BHLNC, from token 8 on", 36, 640, _engine(BHLNC), _engine(BHLNC), first_token=8),
)
"""All have 8 KV heads of 128 bfloat16 channels. The last two need the slower joining by address."""


def main(
    repeats: Annotated[int, typer.Option(help="Number of runs of each case.", min=3)] = 51,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all measurements to this file.")] = None,
) -> None:
    """Print the table. Exit code 1 if a median is above its budget."""
    timings = []
    with progress("measuring") as announce:
        for case in CASES:
            announce(case.name)
            timings.append(measure(case, repeats))
    print_timings(timings)
    within = all(timing.within_budget for timing in timings)
    if json_path is not None:
        cases = [asdict(timing) for timing in timings]
        json_path.write_text(json.dumps({"within_budget": within, "repeats": repeats, "cases": cases}, indent=2))
    if not within:
        raise typer.Exit(1)


def measure(case: Case, repeats: int) -> Timing:
    """Lower one case ``repeats`` times and return the times."""
    caches = alike(AttentionCache(num_kv_heads=8, head_size=128, itemsize=2), case.num_layers)
    tokens = case.num_blocks * case.prefill.block_size
    num_destination = -(-tokens // case.decode.block_size)
    ids = block_ids(Blocks.SCATTERED, case.num_blocks, num_destination, seed=0)
    prefill, decode = engine_of("prefill", case.prefill, caches), engine_of("decode", case.decode, caches)
    sources = prefill.shards(case.num_blocks + 1, RANK_SPACING)
    destination = decode.shards(num_destination + 1, RANK_SPACING * (case.prefill.num_ranks + 1))[0]

    def request() -> GroupBlocks:
        return GroupBlocks(
            group="full",
            first_token=case.first_token,
            last_token=tokens,
            source_block_ids=ids[0],
            destination_block_ids=ids[1],
        )

    began = time.perf_counter()
    pairs = Planner(sources, destination).plans(0)
    first = [pair.lower([request()]) for pair in pairs]
    template_s = time.perf_counter() - began
    seconds = _seconds(lambda: [pair.lower([request()]) for pair in pairs], repeats)
    median = statistics.median(seconds)
    return Timing(
        name=case.name,
        descriptors=sum(map(len, first)),
        lower_s=median,
        slowest_s=max(seconds),
        budget_s=case.budget_s,
        within_budget=case.budget_s is None or median < case.budget_s,
        template_s=template_s,
        verify_s=statistics.median(_seconds(lambda: _verify(pairs, request()), 3)),
    )


def _verify(pairs: tuple[PairPlan, ...], request: GroupBlocks) -> None:
    for pair in pairs:
        verify_pair(pair.lower([request]), pair.source, pair.destination, [request], pair.heads)


def _seconds(work: Callable[[], object], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return seconds


def print_timings(timings: list[Timing]) -> None:
    """Print one line for each case."""
    table = Table(title="Lowering one request's plan")
    table.add_column("plan")
    for column in ("descriptors", "median", "slowest", "budget", "first time", "verify"):
        table.add_column(column, justify="right")
    for timing in timings:
        budget = _milliseconds(timing.budget_s) if timing.budget_s else "-"
        style = None if timing.within_budget else "red"
        lowered = _milliseconds(timing.lower_s), _milliseconds(timing.slowest_s), budget
        rest = _milliseconds(timing.template_s), _milliseconds(timing.verify_s)
        table.add_row(timing.name, str(timing.descriptors), *lowered, *rest, style=style)
    open_console().print(table)


if __name__ == "__main__":
    typer.run(main)
