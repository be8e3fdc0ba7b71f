"""Routes within one process: a slab keeps a block of one engine for another, without guard words and handshakes."""

import time
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from kvferry.execution.executor import Executor
from kvferry.execution.job import JobResult
from kvferry.execution.read import Read
from kvferry.execution.route import Route
from kvferry.execution.stage import Stage
from kvferry.layout.dense import shard_for
from kvferry.layout.group import CacheKind
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import Region, Shard
from kvferry.layout.slab import slab_shard
from kvferry.plan.request import GroupBlocks
from kvferry.plan.staging.strategy import Strategy
from kvferry.testing.oracle import Arena, OracleMismatch, RankMemory, check_moved, strided_memory
from kvferry.transport.memcpy import MemcpyTransport
from kvferry.transport.registry import Link

ARENA_BYTES, BLOCK_SIZE, LAYERS = 1 << 20, 4, ["0", "1"]


def shard(kind: CacheKind, layout: NamedLayout, tp_rank: int, tp_size: int) -> Shard:
    return shard_for(
        layers=LAYERS,
        num_kv_heads=4,
        head_size=8,
        itemsize=4,
        block_size=BLOCK_SIZE,
        num_blocks=6,
        layout=layout,
        kind=kind,
        tp_rank=tp_rank,
        tp_size=tp_size,
    )


def one_block(source_id: int, destination_id: int) -> GroupBlocks:
    return GroupBlocks(
        group="full",
        first_token=0,
        last_token=BLOCK_SIZE,
        source_block_ids=[source_id],
        destination_block_ids=[destination_id],
    )


class SlabArena(Arena):
    """Moves block 5 of an engine of two ranks to block 2 of an engine of four, through block 1 of a slab."""

    def __init__(self, kind: CacheKind, strategy: Strategy, stored_ranks: Sequence[int] = (0, 1)) -> None:
        super().__init__(ARENA_BYTES)
        self.sources = [strided_memory(self, shard(kind, NamedLayout.LBNHC, rank, 2)) for rank in range(2)]
        self.slab = strided_memory(self, slab_shard([rank.shard for rank in self.sources], {"full": 3}))
        self.destinations = [strided_memory(self, shard(kind, NamedLayout.BLHNC, rank, 4)) for rank in range(4)]
        self.transport, scratch, stage = MemcpyTransport(), Scratch(num_words=1), Stage(1 << 16)
        memory = Region(self.buffer.ctypes.data, ARENA_BYTES)
        peer = self.transport.connect(self.transport.register([memory, stage.region])).peer
        assert peer is not None
        own_memory = Link("memcpy", self.transport, peer)
        shards = [rank.shard for rank in self.sources]
        self.stores = [Route(shards, self.slab.shard, {rank: own_memory}) for rank in stored_ranks]
        self.loads = [
            Route([self.slab.shard], rank.shard, {0: own_memory}, stage, strategy) for rank in self.destinations
        ]
        self.stage, self.executor = stage, Executor(scratch)

    def move(self, rows: npt.NDArray[np.uint64]) -> None:
        """Store, then load; the rows of a direct move are not needed."""
        stored = self.run(self.stores, one_block(5, 1))
        loaded = self.run(self.loads, one_block(1, 2))
        assert [result.error for result in (*stored, *loaded)] == [None] * (len(self.stores) + 4)
        self.num_bytes = [sum(result.num_bytes for result in results) for results in (stored, loaded)]
        self.num_staged = sum(result.num_staged_bytes for result in loaded)

    def run(self, routes: Sequence[Route], blocks: GroupBlocks) -> list[JobResult]:
        for number, route in enumerate(routes):
            assert route.is_ready(), "memory of this process needs no connection"
            reads = [route.read(plan, [blocks]) for plan in route.own_plans(0)]
            self.executor.submit(Read(f"copy {number}", lambda reads=reads: reads, time.monotonic() + 30))  # type: ignore[misc]
        results: list[JobResult] = []
        while len(results) < len(routes):
            results += self.executor.collect(30.0)
        return results

    def check(self) -> None:
        """Compare every byte of the destinations by the oracle's labels."""
        request, ranks = one_block(5, 2), self.destinations
        check_moved(self, self.sources, ranks, [request], np.empty((0, 3), dtype=np.uint64))

    def close(self) -> None:
        self.executor.close()
        self.stage.close()
        self.transport.close()


@pytest.fixture
def arenas() -> Iterator[list[SlabArena]]:
    opened: list[SlabArena] = []
    yield opened
    for arena in opened:
        arena.close()


def block_bytes(rank: RankMemory) -> int:
    return rank.shard.regions[0].length // rank.shard.groups[0].num_blocks


@pytest.mark.parametrize("strategy", Strategy)
@pytest.mark.parametrize("kind", [CacheKind.ATTENTION, CacheKind.MLA])
def test_a_block_is_stored_from_two_ranks_and_loaded_by_four(
    kind: CacheKind, strategy: Strategy, arenas: list[SlabArena]
) -> None:
    arena = SlabArena(kind, strategy)
    arenas.append(arena)
    arena.check()
    loaded = sum(map(block_bytes, arena.destinations))
    assert arena.num_bytes == [block_bytes(arena.slab), loaded], "replicas are stored once and loaded by each rank"
    assert arena.num_staged == (loaded if strategy is Strategy.SCATTER else 0)


def test_a_rank_stores_its_own_part_alone(arenas: list[SlabArena]) -> None:
    arena = SlabArena(CacheKind.ATTENTION, Strategy.DIRECT, stored_ranks=[1])
    arenas.append(arena)
    with pytest.raises(OracleMismatch):
        arena.check()
    assert arena.num_bytes[0] == block_bytes(arena.slab) // 2
