"""``kvferry bench transport --strategy``: a head merge of short runs, directly and by way of a stage."""

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from kvferry.cli.transport_measurement import Bytes, Mover, allocate, huge_share, open_movers
from kvferry.errors import Reason, SettingsError, TransportError
from kvferry.execution.load import GuardedRead, Load, Phase
from kvferry.execution.scratch import WORD_BYTES, Scratch
from kvferry.execution.staging import Stage
from kvferry.execution.transfer_costs import Strategist
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shapes import shard_for
from kvferry.layout.shard import Shard
from kvferry.plan.request import GroupBlocks
from kvferry.plan.staged import ScatterPlan, lowered
from kvferry.plan.strategy import DEFAULT_STAGE_BYTES, Choice, Prediction, Strategy, predict_direct, predict_scatter
from kvferry.plan.transfer_plan import PairPlan, Planner

LAYERS, HEADS, HEAD_SIZE, ITEMSIZE, BLOCK_SIZE, TP_SIZE = 36, 8, 128, 2, 16, 2
TOKEN_BYTES = HEADS * 2 * HEAD_SIZE * ITEMSIZE
BLOCK_BYTES = LAYERS * BLOCK_SIZE * TOKEN_BYTES
LEAST_GAIN = 3.0
WITHIN = 2.0
LONGEST_SECONDS = 60.0


class HeadMerge:
    """Two ranks' caches in the other process, one here, and a request of scattered blocks between them."""

    def __init__(self, num_bytes: int, source: Bytes, local: Bytes) -> None:
        self.num_blocks, self.num_moved = 2 * num_bytes // BLOCK_BYTES, num_bytes // BLOCK_BYTES
        if not self.num_moved:
            what = f"{num_bytes} bytes hold no block of {BLOCK_BYTES}."
            raise SettingsError(Reason.INVALID_SETTING, what, "Give --total more.")
        generator = np.random.default_rng(0)
        self._ids = [generator.permutation(self.num_blocks)[: self.num_moved] for _ in range(2)]
        self._source, self._local = source, local
        shape = (LAYERS, self.num_blocks, BLOCK_SIZE)
        half = self._rank_bytes
        ranks = [source[r * half : (r + 1) * half].reshape(*shape, TOKEN_BYTES // TP_SIZE) for r in range(TP_SIZE)]
        self._wanted = np.concatenate([rank[:, self._ids[0]] for rank in ranks], axis=-1)
        self._cache = local[: TP_SIZE * half].reshape(*shape, TOKEN_BYTES)

    @property
    def _rank_bytes(self) -> int:
        return self.num_blocks * BLOCK_BYTES // TP_SIZE

    @property
    def request(self) -> GroupBlocks:
        """Return all tokens of the blocks that move."""
        return GroupBlocks(
            group="full",
            first_token=0,
            last_token=self.num_moved * BLOCK_SIZE,
            source_block_ids=self._ids[0],
            destination_block_ids=self._ids[1],
        )

    def plans(self, mover: Mover) -> tuple[PairPlan, ...]:
        """Return the plans of both ranks."""
        sources = [
            self._shard(mover.remote_address + rank * self._rank_bytes, rank, TP_SIZE) for rank in range(TP_SIZE)
        ]
        return Planner(sources, self._shard(int(self._local.ctypes.data), 0, 1)).plans(0)

    def _shard(self, address: int, tp_rank: int, tp_size: int) -> Shard:
        return shard_for(
            layers=[str(layer) for layer in range(LAYERS)],
            num_kv_heads=HEADS,
            head_size=HEAD_SIZE,
            itemsize=ITEMSIZE,
            block_size=BLOCK_SIZE,
            num_blocks=self.num_blocks,
            layout=NamedLayout.LBNHC,
            tp_rank=tp_rank,
            tp_size=tp_size,
            base_address=address,
        )

    def reads(self, mover: Mover, scatters: Mapping[PairPlan, ScatterPlan | None], stage: Stage) -> list[GuardedRead]:
        """Return the guarded reads; the word is any of the other process's bytes, which never change."""
        return [
            GuardedRead(
                mover.transport,
                mover.peer,
                mover.remote_address,
                self._source[:WORD_BYTES].tobytes(),
                *lowered(plan, scatter, [self.request]),
                stage,
            )
            for plan, scatter in scatters.items()
        ]

    def is_exact(self) -> bool:
        """Return whether exactly the wanted bytes are here, and forget them."""
        exact = bool((self._cache[:, self._ids[1]] == self._wanted).all())
        untouched = np.setdiff1d(np.arange(self.num_blocks), self._ids[1])
        exact = exact and not self._cache[:, untouched].any()
        self._local[:] = 0
        return exact


def run_load(reads: Sequence[GuardedRead], scratch: Scratch) -> float:
    """Carry a load out and return its seconds, guard words and copies included."""
    started_at = time.perf_counter()
    load = Load("bench", lambda: reads, time.monotonic() + LONGEST_SECONDS)
    while load.phase is not Phase.DONE:
        load.advance(scratch, time.monotonic())
    seconds = time.perf_counter() - started_at
    if load.error is not None:
        raise load.error
    return seconds


def measure_strategies(names: Sequence[str], num_bytes: int, repeat: int) -> dict[str, Any]:
    """Return for each transport the choice, and both ways measured and predicted."""
    source, local = allocate(2 * num_bytes, True), allocate(2 * num_bytes, True)
    stage, scratch = Stage(DEFAULT_STAGE_BYTES), Scratch(num_words=8)
    merge = HeadMerge(num_bytes, source, local)
    with open_movers(names, num_bytes, local, True, [stage.region, scratch.region]) as (movers, _):
        ways = {name: _ways(merge, mover, stage) for name, mover in movers.items()}
        reads = {
            (name, way): merge.reads(movers[name], scatters, stage)
            for name, (_, found) in ways.items()
            for way, scatters in found.items()
        }
        local[:] = 0
        for (name, way), prepared in reads.items():
            run_load(prepared, scratch)
            if not merge.is_exact():
                raise TransportError(Reason.TRANSFER_FAILED, f"{way} over {name} did not move the bytes exactly.")
        seconds: dict[tuple[str, Strategy], list[float]] = {key: [] for key in reads}
        for _ in range(repeat):
            for key, prepared in reads.items():
                seconds[key].append(run_load(prepared, scratch))
        rows = [
            _row(name, merge, *ways[name], {key[1]: seconds[key] for key in reads if key[0] == name}) for name in names
        ]
        moved = merge.num_moved * BLOCK_BYTES
        return {"bytes": moved, "repeat": repeat, "huge_share": huge_share(local), "rows": rows}


Ways = dict[Strategy, dict[PairPlan, ScatterPlan | None]]


def _ways(merge: HeadMerge, mover: Mover, stage: Stage) -> tuple[Choice, Ways]:
    plans = merge.plans(mover)
    choice = Strategist(stage).choice(plans[0], mover.transport, mover.peer)
    assert choice is not None
    direct: dict[PairPlan, ScatterPlan | None] = dict.fromkeys(plans)
    return choice, {
        Strategy.DIRECT: direct,
        Strategy.SCATTER: {plan: ScatterPlan(plan, choice.chosen.gap_bytes) for plan in plans},
    }


def _row(
    name: str, merge: HeadMerge, choice: Choice, ways: Ways, seconds: Mapping[Strategy, Sequence[float]]
) -> dict[str, Any]:
    measured = {way: statistics.median(values) for way, values in seconds.items()}
    predicted = {way: _predict(way, scatters, merge.request, choice) for way, scatters in ways.items()}
    chosen = choice.chosen.strategy
    return {
        "transport": name,
        "chosen": str(chosen),
        "ways": {
            str(way): {
                "descriptors": predicted[way].num_descriptors,
                "predicted_ms": predicted[way].seconds * 1e3,
                "measured_ms": measured[way] * 1e3,
                "spread_ms": [min(seconds[way]) * 1e3, max(seconds[way]) * 1e3],
            }
            for way in ways
        },
        "costs": {field: getattr(choice.costs, field) for field in choice.costs.__slots__},
    }


def _predict(
    way: Strategy, scatters: Mapping[PairPlan, ScatterPlan | None], request: GroupBlocks, choice: Choice
) -> Prediction:
    if way is Strategy.DIRECT:
        return predict_direct([plan.lower([request]) for plan in scatters], choice.costs)
    parts = [part for scatter in scatters.values() if scatter is not None for part in scatter.parts([request])]
    return predict_scatter(parts, choice.costs)


def judge_strategies(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the targets with what was measured."""
    verdicts = []
    for row in rows:
        over, chosen = row["transport"], row["chosen"]
        measured = {way: figures["measured_ms"] for way, figures in row["ways"].items()}
        rejected = "direct" if over == "nixl" else min(measured.keys() - {chosen}, key=lambda way: measured[way])
        least, gain = LEAST_GAIN if over == "nixl" else 1.0, measured[rejected] / measured[chosen]
        verdicts.append(_verdict(f"{over}: {rejected} / {chosen}", gain, least, gain >= least))
        for way, figures in row["ways"].items():
            ratio = figures["predicted_ms"] / figures["measured_ms"]
            what = f"{over}: {way} predicted / measured"
            verdicts.append(_verdict(what, ratio, WITHIN, 1 / WITHIN <= ratio <= WITHIN))
    return verdicts


def _verdict(what: str, measured: float, target: float, met: bool) -> dict[str, Any]:
    return {"what": what, "measured": measured, "target": target, "met": met}


def report_strategies(names: Sequence[str], num_bytes: int, repeat: int, json_output: bool) -> None:
    """Measure and print, as a table or one JSON object."""
    report = measure_strategies(names, num_bytes, repeat)
    report["targets"] = judge_strategies(report["rows"])
    if json_output:
        print(json.dumps(report, indent=2))
        return
    mib = report["bytes"] / (1 << 20)
    table = Table(
        "transport", "way", "descriptors", "predicted ms", "measured ms", "", title=f"{mib:.0f} MiB, TP 2 to 1"
    )
    for row in report["rows"]:
        for way, figures in row["ways"].items():
            times = [f"{figures[kind]:.2f}" for kind in ("predicted_ms", "measured_ms")]
            note = "chosen" if way == row["chosen"] else ""
            table.add_row(row["transport"], way, str(figures["descriptors"]), *times, note)
    console = Console()
    console.print(table)
    for verdict in report["targets"]:
        console.print(f"{verdict['what']}: {verdict['measured']:.2f}, {'met' if verdict['met'] else 'missed'}")
