"""Measures what digests cost a handoff: at the source, at the destination, and in the whole transfer's time.

    python benchmarks/integrity.py --repeat 15 --json integrity.json

Source and destination are memory of this process, and ``cma`` moves bytes from one to the other, on one thread. The
caches are those of ``benchmarks/vllm_handoff.py``. Transfers with ``off``, ``sample`` and ``full`` take turns.
``source`` is the time of one source rank, between its writes. ``compare`` is the time of the destination after the last
byte. ``moved`` is the whole transfer: it has the digests of every source, one after the other, and the comparison, but
no message. Spans of 8 layers are written.
"""

import json
import statistics
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table
from transport_movers import allocate

sys.path.append(str(Path(__file__).parents[1]))

from kvferry.cli.console import open_console, progress
from kvferry.execution.digests import Integrity, PartCells, PartDigests, WrittenDigests
from kvferry.execution.executor import JobResult, Phase
from kvferry.execution.source import Write
from kvferry.handoff.messages import WriteKey
from kvferry.handoff.source import END, BlockList, Part, Prompt, SourceWrites, WriteRequest, announced_blocks
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import Shard
from kvferry.plan.match import GroupBlocks
from kvferry.plan.planner import LayerSpans, PairPlan, Planner
from kvferry.transport.registry import TransportSet, open_transports
from tests.support.dense import Content, shard_for

NUM_LAYERS, HEAD_SIZE, ITEMSIZE = 36, 128, 2
DEADLINE_SECONDS = 60.0
MOST_COST = 0.03
"""The part of a transfer that ``sample`` may take."""


@dataclass(frozen=True, slots=True)
class Case:
    """A cache, and a prompt of it that moves."""

    name: str
    num_heads: int
    tokens: int
    block_size: int
    prefill_tp: int
    content: Content

    @property
    def num_blocks(self) -> int:
        """Blocks of the prompt, which are half of the cache."""
        return -(-self.tokens // self.block_size)


CASES = [
    Case("(a) 8 KV heads, TP 1 to 1", 8, 1500, 128, 1, Content.TRANSPOSED_KEYS),
    Case("(a) as on a GPU", 8, 1500, 128, 1, Content.INTERLEAVED),
    Case("(b) 1 KV head, TP 1 to 1", 1, 4000, 32, 1, Content.TRANSPOSED_KEYS),
    Case("(b) as on a GPU", 1, 4000, 32, 1, Content.INTERLEAVED),
    Case("(c) 8 KV heads, TP 2 to 1", 8, 1500, 128, 2, Content.TRANSPOSED_KEYS),
]


class Rank:
    """One rank's memory in huge pages, filled with random bytes."""

    def __init__(self, case: Case, tp_rank: int, tp_size: int) -> None:
        sizes: dict[str, Any] = {
            "layers": [str(layer) for layer in range(NUM_LAYERS)],
            "num_kv_heads": case.num_heads,
            "head_size": HEAD_SIZE,
            "itemsize": ITEMSIZE,
            "block_size": case.block_size,
            "num_blocks": 2 * case.num_blocks + 1,
            "layout": NamedLayout.BHLNC,
            "content": case.content,
            "tp_rank": tp_rank,
            "tp_size": tp_size,
        }
        length = shard_for(**sizes).regions[0].length
        self.memory = allocate(length, huge=True)
        self.memory[:] = np.random.default_rng(tp_rank).integers(0, 256, length, dtype=np.uint8)
        self.shard: Shard = shard_for(**sizes, base_address=self.memory.ctypes.data)


class Engines:
    """Source ranks and one destination rank of one case, and their writes."""

    def __init__(self, case: Case) -> None:
        self.sources = [Rank(case, rank, case.prefill_tp) for rank in range(case.prefill_tp)]
        self.destination = Rank(case, 0, 1)
        self.transports: TransportSet = open_transports("cma")
        regions = [region for rank in (*self.sources, self.destination) for region in rank.shard.regions]
        self.link = self.transports.connect(self.transports.register(regions))
        while self.link.poll() is None:
            time.sleep(0.001)
        self.planner = Planner([rank.shard for rank in self.sources], self.destination.shard)
        self._generator = np.random.default_rng(7)
        self._case = case
        self._spans = LayerSpans({"full": [str(layer) for layer in range(NUM_LAYERS)]})
        self._number = 0
        self._cells = {
            (plan, kept, at_source): PartCells(plan, kept, at_source=at_source)
            for plan in self.planner.plans(0)
            for kept in (Integrity.SAMPLE, Integrity.FULL)
            for at_source in (True, False)
        }
        for plan in self.planner.plans(0):
            self._spans.plans(plan)

    def blocks(self) -> GroupBlocks:
        """Return the prompt in random blocks."""
        case = self._case
        ids = [self._generator.permutation(np.arange(1, 2 * case.num_blocks + 1))[: case.num_blocks] for _ in range(2)]
        return GroupBlocks(
            group="full",
            first_token=0,
            last_token=case.tokens,
            source_block_ids=ids[0],
            destination_block_ids=ids[1],
        )

    def close(self) -> None:
        """Deregister the memory."""
        self.transports.close()

    def measure(self, integrity: Integrity) -> dict[str, float]:
        """Write a prompt into random blocks, compare, and return the seconds of each part."""
        self._number += 1
        key, blocks = WriteKey("benchmark/0", 1, self._number), self.blocks()
        results, compared, seconds = [], 0.0, 0.0
        for plan in self.planner.plans(0):
            part = Part(plan, announced_blocks(plan, [blocks])).in_spans(self._spans.plans(plan))
            written = None
            if integrity is not Integrity.OFF:
                written = WrittenDigests(PartDigests(self._cells[plan, integrity, True], part.announced, key))
                landed = PartDigests(self._cells[plan, integrity, False], part.announced, key)
            started = time.perf_counter()
            results.append(self._write(plan, part, key, blocks, written))
            ended = time.perf_counter()
            if written is not None:
                for _ in landed.compare(written.encoded()):
                    pass
            compared += time.perf_counter() - ended
            seconds += time.perf_counter() - started
        if error := next((result.error for result in results if result.error is not None), None):
            raise error
        return {
            "source": sum(result.compare_seconds for result in results) / self._case.prefill_tp,
            "compare": compared,
            "moved": seconds,
            "bytes": sum(result.num_bytes for result in results),
            "compared_bytes": sum(result.num_compared_bytes for result in results),
        }

    def _write(
        self, plan: PairPlan, part: Part, key: WriteKey, blocks: GroupBlocks, digests: WrittenDigests | None
    ) -> JobResult:
        """Run one source's write: each span of layers as the engine declares it final."""
        writes, results = SourceWrites(), list[JobResult]()
        deadline = time.monotonic() + DEADLINE_SECONDS
        writes.announce(WriteRequest(key, "x", self._case.tokens, "digest", part.needs, deadline), now=0.0)
        job = Write(
            writes,
            threading.Lock(),
            key,
            part,
            self.link.poll,
            lambda result, *_: results.append(result),
            digests=digests,
        )
        prompt = Prompt(self._case.tokens, "digest", {"full": BlockList(0, blocks.source_ids.tolist())}, END)
        writes.begin_step({"x": prompt})
        for span in self._spans.layers_of:
            writes.reach(span)
            while job.advance(time.monotonic()) and job.phase is not Phase.DONE:
                pass
        while job.phase is not Phase.DONE:
            job.advance(time.monotonic())
        return results[0]


def main(
    repeat: Annotated[int, typer.Option(min=1, help="Rounds; medians are shown.")] = 15,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all measurements to this file.")] = None,
) -> None:
    """Print the cost of each value of ``integrity``."""
    rows = []
    with progress("measuring") as announce:
        for case in CASES:
            announce(case.name)
            rows.append(measure_case(case, repeat))
    console = open_console()
    columns = ("case", "MB", "integrity", "compared", "source ms", "compare ms", "moved ms", "moved / off")
    table = Table(*columns, title="Digests")
    for row in rows:
        off = row["off"]
        for name in ("off", "sample", "full"):
            found = row[name]
            milliseconds = [f"{found[part] * 1e3:.2f}" for part in ("source", "compare", "moved")]
            compared = f"{found['compared_bytes'] / found['bytes']:.2%}"
            ratio = f"{found['ratio']:.3f}"
            table.add_row(row["case"], f"{off['bytes'] / 1e6:.0f}", name, compared, *milliseconds, ratio)
    console.print(table)
    for row in rows:
        cost = row["sample"]["ratio"] - 1
        verdict = "met" if cost <= MOST_COST else "missed"
        console.print(
            f"{row['case']}: sample costs {cost:.1%} of the transfer, at most {MOST_COST:.0%} wanted: {verdict}"
        )
    if json_path is not None:
        json_path.write_text(json.dumps({"repeat": repeat, "rows": rows}, indent=1) + "\n")


def measure_case(case: Case, repeat: int) -> dict[str, Any]:
    """Return the medians of one case, by the value of ``integrity``; ratios are medians of those of single rounds."""
    engines = Engines(case)
    try:
        rounds: list[Mapping[Integrity, dict[str, float]]] = []
        for turn in range(repeat + 2):
            order = [*list(Integrity)[turn % 3 :], *list(Integrity)[: turn % 3]]
            rounds.append({integrity: engines.measure(integrity) for integrity in order})
        measured = rounds[2:]  # the first ones touch memory
        found: dict[str, Any] = {"case": case.name}
        for integrity in Integrity:
            each = [one[integrity] for one in measured]
            medians = {name: statistics.median(one[name] for one in each) for name in each[0]}
            ratios = [one[integrity]["moved"] / one[Integrity.OFF]["moved"] for one in measured]
            found[integrity.value] = {**medians, "ratio": statistics.median(ratios)}
        return found
    finally:
        engines.close()


if __name__ == "__main__":
    typer.run(main)
