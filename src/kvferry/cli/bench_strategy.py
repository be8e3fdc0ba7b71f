"""``kvferry bench transport --strategy``: short runs of merged and of split heads, directly and by way of stages."""

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from kvferry.cli.head_moves import MERGE, SPLIT, HeadMove, Plans
from kvferry.cli.transport_measurement import Mover, allocate, huge_share, open_movers
from kvferry.errors import Reason, TransportError
from kvferry.execution.executor import WAIT_SECONDS
from kvferry.execution.part_requests import PartCourier
from kvferry.execution.read import GuardedRead, Load, Phase
from kvferry.execution.scratch import Scratch
from kvferry.execution.stage import Stage
from kvferry.execution.transfer_costs import Packing, Strategist
from kvferry.plan.staging.scatter import cut
from kvferry.plan.staging.staged_plan import PARTS_PER_STAGE, GatherPlan, ScatterPlan
from kvferry.plan.staging.strategy import (
    DEFAULT_STAGE_BYTES,
    Choice,
    Prediction,
    Strategy,
    predict_direct,
    predict_staged,
)

LEAST_GAIN = 3.0
"""Of merged heads over NIXL, which pays most for a descriptor."""
WITHIN = 2.0
LONGEST_SECONDS = 60.0
MOVES = {"merge": (MERGE, (Strategy.DIRECT, Strategy.SCATTER)), "split": (SPLIT, tuple(Strategy))}
"""The ways that are tried. A source cannot make the short runs of merged heads longer."""


@dataclass(frozen=True, eq=False)
class Case:
    """One move over one transport: the choice, and every way that is tried."""

    name: str
    transport: str
    move: HeadMove
    choice: Choice
    ways: Mapping[Strategy, Plans]
    packing_bytes: int


def run_load(reads: Sequence[GuardedRead], scratch: Scratch) -> float:
    """Carry a load out and return its seconds, guard words and copies included."""
    started_at = time.perf_counter()
    load = Load("bench", lambda: reads, time.monotonic() + LONGEST_SECONDS)
    while load.phase is not Phase.DONE:
        if not load.advance(scratch, time.monotonic()):
            # As the executor does: who spins keeps the thread that carries messages from running.
            time.sleep(WAIT_SECONDS)
    seconds = time.perf_counter() - started_at
    if load.error is not None:
        raise load.error
    return seconds


def measure_strategies(
    names: Sequence[str], num_bytes: int, repeat: int, packing_bytes: int = DEFAULT_STAGE_BYTES
) -> dict[str, Any]:
    """Return for each move and transport the choice, and every way measured and predicted.

    ``packing_bytes`` is the stage of the other process, which packs.
    """
    source, local = allocate(2 * num_bytes, True), allocate(2 * num_bytes, True)
    stage, scratch, courier = Stage(DEFAULT_STAGE_BYTES), Scratch(num_words=8), PartCourier("bench")
    moves = {name: HeadMove(num_bytes, source, local, sizes) for name, (sizes, _) in MOVES.items()}
    others = [stage.region, scratch.region]
    with open_movers(names, num_bytes, local, True, others, packing_bytes) as (movers, _):
        strategist = Strategist(stage)
        cases = [
            _case(name, move, movers[transport], strategist, courier)
            for name, move in moves.items()
            for transport in movers
        ]
        prepare = {
            (case, way): partial(case.move.reads, movers[case.transport], plans, stage, courier)
            for case in cases
            for way, plans in case.ways.items()
        }
        local[:] = 0
        for (case, way), reads in prepare.items():
            run_load(reads(), scratch)
            if not case.move.is_exact():
                what = f"{way} over {case.transport} did not move the bytes exactly."
                raise TransportError(Reason.TRANSFER_FAILED, what)
        seconds: dict[tuple[Case, Strategy], list[float]] = {key: [] for key in prepare}
        for _ in range(repeat):
            for key, reads in prepare.items():
                seconds[key].append(run_load(reads(), scratch))
        courier.close()
        rows = [_row(case, {way: seconds[case, way] for way in case.ways}) for case in cases]
        return {"repeat": repeat, "huge_share": huge_share(local), "packing_bytes": packing_bytes, "rows": rows}


def _case(name: str, move: HeadMove, mover: Mover, strategist: Strategist, courier: PartCourier) -> Case:
    plans = move.plans(mover)
    assert mover.packing is not None
    packer = mover.packing.packer
    packing = Packing(packer.stage_bytes, partial(courier.time_an_answer, packer))
    choice = strategist.choice(plans[0], mover.transport, mover.peer, packing)
    assert choice is not None
    scatter = next(each for each in (choice.chosen, *choice.rejected) if each.strategy is Strategy.SCATTER)
    every: dict[Strategy, Plans] = {
        Strategy.DIRECT: dict.fromkeys(plans),
        Strategy.SCATTER: {plan: ScatterPlan(plan, scatter.gap_bytes) for plan in plans},
        Strategy.GATHER: {plan: GatherPlan(plan) for plan in plans},
    }
    transport = mover.transport.capabilities.name
    return Case(name, transport, move, choice, {way: every[way] for way in MOVES[name][1]}, packer.stage_bytes)


def _row(case: Case, seconds: Mapping[Strategy, Sequence[float]]) -> dict[str, Any]:
    measured = {way: statistics.median(values) for way, values in seconds.items()}
    predicted = {way: _predict(way, case) for way in case.ways}
    return {
        "move": case.name,
        "bytes": case.move.num_bytes,
        "transport": case.transport,
        "chosen": str(case.choice.chosen.strategy),
        "ways": {
            str(way): {
                "descriptors": predicted[way].num_descriptors,
                "parts": predicted[way].num_parts,
                "predicted_ms": predicted[way].seconds * 1e3,
                "measured_ms": measured[way] * 1e3,
                "spread_ms": [min(seconds[way]) * 1e3, max(seconds[way]) * 1e3],
            }
            for way in case.ways
        },
        "costs": {field: getattr(case.choice.costs, field) for field in case.choice.costs.__slots__},
    }


def _predict(way: Strategy, case: Case) -> Prediction:
    plans, request = case.ways[way], case.move.request
    if way is Strategy.DIRECT:
        return predict_direct([plan.lower([request]) for plan in plans], case.choice.costs)
    parts = [part for staged in plans.values() if staged is not None for part in staged.parts([request])]
    is_packed = way is Strategy.GATHER
    rounds = list(cut([(0, part) for part in parts], case.packing_bytes // PARTS_PER_STAGE)) if is_packed else []
    return predict_staged(way, parts, case.choice.costs, len(rounds))


def judge_strategies(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the targets with what was measured."""
    verdicts = []
    for row in rows:
        over, chosen = row["transport"], row["chosen"]
        measured = {way: figures["measured_ms"] for way, figures in row["ways"].items()}
        is_merge_over_nixl = over == "nixl" and row["move"] == "merge"
        others = {"direct"} if is_merge_over_nixl else measured.keys() - {chosen}
        rejected = min(others, key=lambda way: measured[way])
        least, gain = LEAST_GAIN if is_merge_over_nixl else 1.0, measured[rejected] / measured[chosen]
        verdicts.append(_verdict(f"{row['move']} over {over}: {rejected} / {chosen}", gain, least, gain >= least))
        for way, figures in row["ways"].items():
            ratio = figures["predicted_ms"] / figures["measured_ms"]
            what = f"{row['move']} over {over}: {way} predicted / measured"
            verdicts.append(_verdict(what, ratio, WITHIN, 1 / WITHIN <= ratio <= WITHIN))
    return verdicts


def _verdict(what: str, measured: float, target: float, met: bool) -> dict[str, Any]:
    return {"what": what, "measured": measured, "target": target, "met": met}


def report_strategies(
    names: Sequence[str], num_bytes: int, repeat: int, json_output: bool, packing_bytes: int = DEFAULT_STAGE_BYTES
) -> None:
    """Measure and print, as a table or one JSON object."""
    report = measure_strategies(names, num_bytes, repeat, packing_bytes)
    report["targets"] = judge_strategies(report["rows"])
    if json_output:
        print(json.dumps(report, indent=2))
        return
    table = Table("move", "MiB", "transport", "way", "descriptors", "predicted ms", "measured ms", "")
    for row in report["rows"]:
        for way, figures in row["ways"].items():
            times = [f"{figures[kind]:.2f}" for kind in ("predicted_ms", "measured_ms")]
            note = "chosen" if way == row["chosen"] else ""
            move = [row["move"], f"{row['bytes'] / (1 << 20):.0f}", row["transport"], way]
            table.add_row(*move, str(figures["descriptors"]), *times, note)
    console = Console()
    console.print(table)
    for verdict in report["targets"]:
        console.print(f"{verdict['what']}: {verdict['measured']:.2f}, {'met' if verdict['met'] else 'missed'}")
