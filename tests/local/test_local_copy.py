"""Copies within a process: blocks go from one engine's ranks to a slab, and from there to another engine's ranks."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvferry.errors import HandoffError, PlanError, Reason, VerificationError
from kvferry.execution import executor as executor_module
from kvferry.execution import local_copy
from kvferry.execution.device import HOST, OVER, DeviceOrder
from kvferry.execution.executor import Executor, JobResult, Phase
from kvferry.execution.local_copy import Copying, HostCopying, LocalCopy, LocalRoute, copy_blocks
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import CacheKind, Shard
from kvferry.layout.slab import slab_shard
from kvferry.plan.block_copies import BlockCopies, block_copies
from kvferry.plan.match import GroupBlocks
from kvferry.plan.planner import StridedCopy

from ..support.dense import Content, shard_for
from ..support.oracle import Arena, OracleMismatch, RankMemory, check_moved, strided_memory
from ..waits import wait_until

LAYERS = ["0", "1", "2"]
BLOCK_SIZE = 4


@dataclass(frozen=True)
class Ranks:
    """The ranks of an engine: ``tp`` for each stage of a pipeline."""

    tp: int = 1
    pp: int = 1
    layout: NamedLayout = NamedLayout.BHLNC
    content: Content = Content.FUSED
    kind: CacheKind = CacheKind.ATTENTION
    heads: int = 4
    window: int = 0

    def shards(self) -> list[Shard]:
        """Return the shards by pipeline stage and tensor-parallel rank."""
        cut = len(LAYERS) - 1 if self.pp == 2 else len(LAYERS)
        stages = [LAYERS[:cut], LAYERS[cut:]][: self.pp]
        return [
            shard_for(
                layers=layers,
                num_kv_heads=1 if self.kind is CacheKind.MLA else self.heads,
                head_size=8,
                itemsize=2,
                block_size=BLOCK_SIZE,
                num_blocks=12,
                layout=self.layout,
                content=self.content,
                kind=self.kind,
                window=self.window,
                tp_rank=rank,
                tp_size=self.tp,
                pp_rank=stage,
                pp_size=self.pp,
            )
            for stage, layers in enumerate(stages)
            for rank in range(self.tp)
        ]


class Copies(Arena):
    """An engine that stores, a slab, and an engine that loads; each rank is a process of its own, with its own jobs."""

    order: DeviceOrder = HOST
    copying: Callable[[Sequence[BlockCopies]], Copying] = HostCopying

    def __init__(self, stores: Ranks, loads: Ranks, engine_blocks: int = 1, selector: int = 0) -> None:
        super().__init__(1 << 18)
        self.sources = [self.placed(shard) for shard in stores.shards()]
        self.destinations = [self.placed(shard) for shard in loads.shards()]
        shards = [rank.shard for rank in self.sources]
        self.slab = strided_memory(self, slab_shard(shards, {"full": 7}, engine_blocks=engine_blocks))
        self.selector, self.engine_blocks = selector, engine_blocks
        self.store_routes = [LocalRoute(shards, self.slab.shard, own=[rank]) for rank in range(len(shards))]
        self.load_routes = [LocalRoute([self.slab.shard], rank.shard, own=[0]) for rank in self.destinations]
        self.executor = Executor(order=self.order)
        self.stored: list[JobResult] = []
        self.loaded: list[JobResult] = []

    def placed(self, shard: Shard) -> RankMemory:
        """Return the memory of a rank of an engine."""
        return strided_memory(self, shard)

    def blocks(self, source: Sequence[int], destination: Sequence[int]) -> GroupBlocks:
        """Return whole blocks; the engine's ids come in rows of ``engine_blocks``."""
        longer = max(len(source), len(destination))
        return GroupBlocks(
            group="full",
            first_token=0,
            last_token=longer * BLOCK_SIZE,
            source_block_ids=source,
            destination_block_ids=destination,
        )

    def move(self, rows: npt.NDArray[np.uint64]) -> None:
        """Store blocks 7, 2, 3, 11 as slab blocks, then load them as blocks 9, 10, 1, 4."""
        slab_ids = [5, 0, 6, 1][: 4 // self.engine_blocks]
        self.stored = self.run(self.store_routes, self.blocks([7, 2, 3, 11], slab_ids), is_load=False)
        self.loaded = self.run(self.load_routes, self.blocks(slab_ids, [9, 10, 1, 4]), is_load=True)
        assert [result.error for result in (*self.stored, *self.loaded)] == [None] * (
            len(self.sources) + len(self.destinations)
        )

    def run(self, routes: Sequence[LocalRoute], blocks: GroupBlocks, *, is_load: bool) -> list[JobResult]:
        for rank, route in enumerate(routes):
            given = f"{rank}", route, self.selector, [blocks], OVER, self.copying
            self.executor.submit(LocalCopy(*given, fills_blocks=is_load))
        results: list[JobResult] = []
        while len(results) < len(routes):
            found = self.executor.collect(10.0)
            assert found, "a copy does not end"
            results += found
        return sorted(results, key=lambda result: int(result.job_id))

    def check(self) -> None:
        """Compare every byte of the destinations by the oracle's labels."""
        request = self.blocks([7, 2, 3, 11], [9, 10, 1, 4])
        check_moved(self, self.sources, self.destinations, [request], np.empty((0, 3), dtype=np.uint64))


@pytest.fixture(params=["one by one", "gathered", "gathered in parts"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy in every way, whatever the size of a block."""
    monkeypatch.setattr(local_copy, "BLOCK_BY_BLOCK_FROM", 1 if request.param == "one by one" else 1 << 40)
    monkeypatch.setattr(local_copy, "GATHER_BYTES", 1 if request.param == "gathered in parts" else 1 << 18)


@pytest.fixture
def opened() -> Iterator[list[Copies]]:
    found: list[Copies] = []
    yield found
    for copies in found:
        copies.executor.close()


MLA = CacheKind.MLA
CASES = {
    "tp1-to-tp2": (Ranks(), Ranks(tp=2)),
    "tp2-to-tp1": (Ranks(tp=2, layout=NamedLayout.LBNHC), Ranks(layout=NamedLayout.BHLNC)),
    "tp4-to-tp2-other-layouts": (Ranks(tp=4, layout=NamedLayout.BLHNC), Ranks(tp=2, layout=NamedLayout.LBNHC)),
    "pp2-to-pp1": (Ranks(pp=2), Ranks()),
    "pp2-tp2-to-tp1": (Ranks(tp=2, pp=2, layout=NamedLayout.LBHNC), Ranks(layout=NamedLayout.BLHNC)),
    "tp1-to-pp2": (Ranks(), Ranks(pp=2)),
    "replicated": (Ranks(tp=4, heads=2), Ranks(tp=2, heads=2)),
    "to-replicas": (Ranks(heads=2), Ranks(tp=4, heads=2)),
    "mla-tp2-to-tp1": (Ranks(tp=2, kind=MLA, layout=NamedLayout.LBNHC), Ranks(kind=MLA, layout=NamedLayout.LBNHC)),
    "mla-tp1-to-tp2": (Ranks(kind=MLA), Ranks(tp=2, kind=MLA)),
    "cpu-attention": (
        Ranks(tp=2, content=Content.TRANSPOSED_KEYS),
        Ranks(content=Content.TRANSPOSED_KEYS, layout=NamedLayout.LBHNC),
    ),
}


@pytest.mark.parametrize("selector", [0, 3])
@pytest.mark.parametrize("case", CASES)
def test_stored_blocks_are_loaded_byte_by_byte(case: str, selector: int, way: None, opened: list[Copies]) -> None:
    stores, loads = CASES[case]
    opened.append(copies := Copies(stores, loads, selector=selector))
    copies.check()
    group = copies.slab.shard.groups[0]
    block_bytes = sum(part.total_heads * part.num_channels * part.itemsize for part in group.components)
    stored = 4 * BLOCK_SIZE * len(LAYERS) * block_bytes
    assert sum(result.num_bytes for result in copies.stored) == stored, "what several ranks hold is stored once"


@pytest.mark.parametrize("case", ["tp1-to-tp2", "pp2-to-pp1", "mla-tp1-to-tp2"])
def test_a_stored_block_of_several_engine_blocks(case: str, way: None, opened: list[Copies]) -> None:
    opened.append(copies := Copies(*CASES[case], engine_blocks=2))
    copies.check()


def test_the_engine_runs_python_while_a_large_block_is_copied() -> None:
    """The engine's thread and the copying thread share the interpreter's lock."""
    block_bytes, num_blocks = 1 << 20, 16
    memory = np.ones(2 * block_bytes * num_blocks, dtype=np.uint8)
    half = memory.ctypes.data + block_bytes * num_blocks
    ids = np.arange(num_blocks, dtype=np.int64)
    one = StridedCopy(memory.ctypes.data, half, block_bytes)
    turns, ends, interval = 0, threading.Event(), sys.getswitchinterval()

    def engine() -> None:
        nonlocal turns
        while not ends.is_set():
            turns += 1
            time.sleep(0)

    sys.setswitchinterval(1000)  # no thread is made to give the lock away
    thread = threading.Thread(target=engine)
    try:
        thread.start()
        time.sleep(0.01)
        before, end = turns, time.monotonic() + 10
        # The system may give the other thread no core during one copy.
        while turns == before and time.monotonic() < end:
            assert sum(copy_blocks(BlockCopies(one, block_bytes, block_bytes, ids, ids))) == block_bytes * num_blocks
        during = turns - before
    finally:
        ends.set()
        sys.setswitchinterval(interval)
        thread.join()
    assert during > 0


def test_the_oracle_sees_a_rank_that_has_not_stored_its_part(opened: list[Copies]) -> None:
    opened.append(copies := Copies(Ranks(tp=2), Ranks()))
    copies.store_routes[1] = copies.store_routes[0]
    with pytest.raises(OracleMismatch):
        copies.check()


def test_replicas_take_turns(opened: list[Copies]) -> None:
    """A rank without a part ends at once, with no byte."""
    opened.append(copies := Copies(Ranks(tp=2, kind=MLA), Ranks(kind=MLA)))
    shares = []
    for copies.selector in range(4):
        copies.move(np.empty((0, 3), dtype=np.uint64))
        shares.append([result.num_bytes > 0 for result in copies.stored])
    assert shares == [[True, False], [False, True]] * 2


def test_copies_that_do_not_prove_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(plan: Any, requests: Any) -> list[BlockCopies]:
        return [*right(plan, requests)[1:]]

    right = block_copies
    arena = Arena(1 << 18)
    own = strided_memory(arena, Ranks(content=Content.APART, layout=NamedLayout.LBNHC).shards()[0]).shard
    slab = strided_memory(arena, slab_shard([own], {"full": 7})).shard
    LocalRoute([own], slab, own=[0])
    monkeypatch.setattr(local_copy, "block_copies", wrong)
    with pytest.raises(VerificationError) as caught:
        LocalRoute([own], slab, own=[0])
    assert caught.value.reason is Reason.BYTES_MISSING


@pytest.mark.parametrize(
    ("more", "reason"),
    [({"group": "other"}, Reason.INVALID_REQUEST), ({"source_block_ids": [12]}, Reason.INVALID_REQUEST)],
)
def test_a_wrong_request_fails_its_job_alone(more: dict[str, Any], reason: Reason, opened: list[Copies]) -> None:
    opened.append(copies := Copies(Ranks(), Ranks()))
    given = {"group": "full", "source_block_ids": [1], "destination_block_ids": [1], **more}
    blocks = GroupBlocks(first_token=0, last_token=BLOCK_SIZE, **given)
    [result] = copies.run(copies.store_routes, blocks, is_load=False)
    assert isinstance(result.error, PlanError)
    assert result.error.reason is reason
    assert result.num_bytes == 0
    copies.check()


@dataclass
class Recorded:
    """Copies that note when a block is copied, and wait for leave."""

    names: list[str] = field(default_factory=list)
    may_go: threading.Event = field(default_factory=threading.Event)

    def route(self, name: str, num_blocks: int) -> Any:
        """Return a route whose copies have blocks of as many bytes as a job copies at a time."""
        memory = np.zeros(64, dtype=np.uint8)
        one = StridedCopy(memory.ctypes.data, memory.ctypes.data + 32, 8)
        ids = np.zeros(num_blocks, dtype=np.int64)

        class Route:
            def copies(_, selector: int, blocks: Any) -> list[Any]:
                return [(self, name, BlockCopies(one, 8, 8, ids, ids))]

        return Route()

    def pieces(self, copies: Any) -> Iterator[int]:
        _, name, parts = copies
        for _ in parts.source_blocks:
            assert self.may_go.wait(10.0)
            self.names.append(name)
            yield local_copy.BYTES_PER_ADVANCE


class Mark:
    """A device that has not come so far until it is told."""

    over = False

    def is_over(self) -> bool:
        return self.over

    def wait(self) -> None:
        raise AssertionError("the transfer thread does not wait for a device")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Recorded, Executor]]:
    record = Recorded()
    monkeypatch.setattr(local_copy, "copy_blocks", record.pieces)
    monkeypatch.setattr(LocalCopy, "result", lambda self, _: JobResult(self.job_id, self.error))
    executor = Executor()
    yield record, executor
    record.may_go.set()
    executor.close()


def collect(executor: Executor, number: int) -> list[JobResult]:
    results: list[JobResult] = []
    end = time.monotonic() + 10
    while len(results) < number and time.monotonic() < end:
        results += executor.collect(0.1)
    return results


def test_loads_go_before_stores_also_in_the_middle_of_a_store(recorded: tuple[Recorded, Executor]) -> None:
    record, executor = recorded
    for name in ("first store", "second store"):
        executor.submit(LocalCopy(name, record.route(name, 3), 0, [], fills_blocks=False))
    time.sleep(0.1)  # the first store waits within its first block
    executor.submit(LocalCopy("load", record.route("load", 2), 0, [], fills_blocks=True))
    record.may_go.set()
    assert [result.job_id for result in collect(executor, 3)] == ["load", "first store", "second store"]
    assert record.names == ["first store", "load", "load", *["first store"] * 2, *["second store"] * 3]


def test_every_store_is_reported_however_many_results_wait(
    recorded: tuple[Recorded, Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine keeps the blocks of a store until it hears of its end, though a store fills none."""
    monkeypatch.setattr(executor_module, "MAX_REPORTS", 2)
    record, executor = recorded
    record.may_go.set()
    names = [f"store {number}" for number in range(5)]
    for name in names:
        executor.submit(LocalCopy(name, record.route(name, 1), 0, [], fills_blocks=False))
    wait_until(lambda: len(record.names) == 5 and not executor._active)
    assert [result.job_id for result in executor.collect()] == names


def test_a_copy_begins_when_the_device_has_come_so_far(recorded: tuple[Recorded, Executor]) -> None:
    record, executor = recorded
    record.may_go.set()
    mark = Mark()
    executor.submit(LocalCopy("late", record.route("late", 1), 0, [], mark, fills_blocks=True))
    executor.submit(LocalCopy("store", record.route("store", 1), 0, [], fills_blocks=False))
    assert [result.job_id for result in collect(executor, 1)] == ["store"]
    assert record.names == ["store"]
    mark.over = True
    assert [result.job_id for result in collect(executor, 1)] == ["late"]


def test_a_copy_that_is_given_up_copies_no_more(recorded: tuple[Recorded, Executor]) -> None:
    record, executor = recorded
    record.may_go.set()
    job = LocalCopy("waits", record.route("waits", 1), 0, [], Mark(), fills_blocks=True)
    executor.submit(job)
    executor.cancel("waits", HandoffError(Reason.ABORTED, "given up."))
    [result] = collect(executor, 1)
    assert result.error is not None
    assert (result.error.reason, record.names, job.phase) == (Reason.ABORTED, [], Phase.DONE)


def test_a_stopped_executor_reports_its_copies_as_failed(opened: list[Copies]) -> None:
    opened.append(copies := Copies(Ranks(), Ranks()))
    waiting = LocalCopy("waits", copies.load_routes[0], 0, [copies.blocks([1], [1])], Mark(), fills_blocks=True)
    copies.executor.submit(waiting)
    copies.executor.close()
    [result] = copies.executor.collect()
    assert result.error is not None
    assert result.error.reason is Reason.CLOSED
