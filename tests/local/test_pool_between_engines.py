"""Two engines of other TP sizes share one pool: what the ranks of one stored, the ranks of the other load."""

import time
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from kvferry.execution.executor import Executor
from kvferry.execution.local_copy import LocalCopy, LocalRoute
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import CacheKind, Shard
from kvferry.layout.slab import slab_shard
from kvferry.plan.match import GroupBlocks
from kvferry.tiers import remote_pool
from kvferry.tiers.host_memory import HostMemory
from kvferry.tiers.protocol import BlockKey
from kvferry.tiers.stack import Stack

from ..support.dense import shard_for
from ..support.offload_state import is_idle, stack_state
from ..support.oracle import Arena, OracleMismatch, check_moved, strided_memory
from ..support.tier_suite import block_keys
from .pool_master import Master, SharedClients, open_pool, skip_without_mooncake, wait_until

pytestmark = pytest.mark.mooncake
ARENA_BYTES, BLOCK_SIZE, NUM_SLOTS = 4 << 20, 4, 8
SOURCE_IDS, DESTINATION_IDS = [5, 1, 3], [2, 4, 0]


def blocks_of(source_ids: Sequence[int], destination_ids: Sequence[int]) -> GroupBlocks:
    return GroupBlocks(
        group="full",
        first_token=0,
        last_token=BLOCK_SIZE * len(source_ids),
        source_block_ids=list(source_ids),
        destination_block_ids=list(destination_ids),
    )


class PoolArena(Arena):
    """Moves three blocks: ranks of one engine, its slab, the pool, the slab of another engine, its ranks."""

    def __init__(self, master: Master, kind: CacheKind, source_tp: int, destination_tp: int) -> None:
        super().__init__(ARENA_BYTES)
        self.wrong_name, self.num_moves = False, 0

        def shard(layout: NamedLayout, rank: int, size: int) -> Shard:
            return shard_for(
                layers=["0", "1", "2"],
                num_kv_heads=4,
                head_size=8,
                itemsize=4,
                block_size=BLOCK_SIZE,
                num_blocks=6,
                layout=layout,
                kind=kind,
                tp_rank=rank,
                tp_size=size,
            )

        self.sources = [strided_memory(self, shard(NamedLayout.LBNHC, rank, source_tp)) for rank in range(source_tp)]
        self.destinations = [
            strided_memory(self, shard(NamedLayout.BLHNC, rank, destination_tp)) for rank in range(destination_tp)
        ]
        self.executor = Executor()
        shards = [[rank.shard for rank in ranks] for ranks in (self.sources, self.destinations)]
        self.slabs = [strided_memory(self, slab_shard(ranks, {"full": NUM_SLOTS})).shard for ranks in shards]
        self.stacks = [Stack(HostMemory(slab), [open_pool(master, slab.regions[0])]) for slab in self.slabs]
        self.stores = [LocalRoute(shards[0], self.slabs[0], [rank]) for rank in range(source_tp)]
        self.loads = [LocalRoute([self.slabs[1]], rank.shard, [0]) for rank in self.destinations]

    def move(self, rows: npt.NDArray[np.uint64]) -> None:
        """Store and load through the pool, with new names each time; the rows of a direct move are not needed."""
        self.num_moves += 1
        first = 1000 * id(self) + 10 * self.num_moves
        keys = block_keys(first, first + 1, first + 2)
        self.store(keys)
        self.load(keys[::-1] if self.wrong_name else keys)

    def store(self, keys: list[BlockKey]) -> None:
        stack = self.stacks[0]
        store = stack.prepare_store("full", keys, num_parts=len(self.stores))
        assert store.keys == keys
        self.run(self.stores, blocks_of(SOURCE_IDS, store.block_ids.tolist()))
        for part in range(len(self.stores)):
            stack.land(store, part)
        wait_until(lambda: stack.poll(time.monotonic()) is None and is_idle(stack), "the blocks are written through")

    def load(self, keys: list[BlockKey]) -> None:
        stack, promise = self.stacks[1], None
        assert not stack._host.look_up(keys).any(), "nothing but the pool has them"
        while promise is None:
            stack.poll(time.monotonic())
            promise = stack.ask("request", {"full": keys}, time.monotonic(), wait_seconds=10.0)
        assert promise.held["full"].all()
        load = stack.begin_load("request", {"full": keys})["full"]
        self.run(self.loads, blocks_of(load.block_ids.tolist(), DESTINATION_IDS))
        stack.complete_load("request")

    def run(self, routes: Sequence[LocalRoute], blocks: GroupBlocks) -> None:
        for number, route in enumerate(routes):
            self.executor.submit(LocalCopy(f"copy {number}", route, 0, [blocks], fills_blocks=True))
        num_done = 0
        while num_done < len(routes):
            results = self.executor.collect(30.0)
            assert [result.error for result in results] == [None] * len(results)
            num_done += len(results)

    def check(self) -> None:
        """Compare every byte of the destinations by the oracle's labels."""
        request = blocks_of(SOURCE_IDS, DESTINATION_IDS)
        check_moved(self, self.sources, self.destinations, [request], np.empty((0, 3), dtype=np.uint64))

    def close(self) -> None:
        for stack in self.stacks:
            stack.close()
        self.executor.close()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Master, SharedClients]]:
    skip_without_mooncake()
    master, clients = Master(tmp_path_factory.mktemp("master")), SharedClients()
    yield master, clients
    clients.close()
    master.kill()


@pytest.fixture
def master(started: tuple[Master, SharedClients], monkeypatch: pytest.MonkeyPatch) -> Master:
    master, clients = started
    monkeypatch.setattr(remote_pool, "PoolStore", clients.open)
    return master


@pytest.mark.parametrize("kind", [CacheKind.ATTENTION, CacheKind.MLA])
@pytest.mark.parametrize(("source_tp", "destination_tp"), [(1, 2), (2, 1), (2, 4)])
def test_blocks_of_one_tp_size_are_loaded_under_another(
    master: Master, kind: CacheKind, source_tp: int, destination_tp: int
) -> None:
    arena = PoolArena(master, kind, source_tp, destination_tp)
    try:
        arena.check()
        first, second = (stack_state(stack, time.monotonic())["lower"]["remote_pool"] for stack in arena.stacks)
        block_bytes = arena.slabs[0].groups[0].components[0].block_stride
        assert first["bytes_down"] == second["bytes_up"] == 3 * arena.num_moves * block_bytes
    finally:
        arena.close()


def test_blocks_with_each_other_s_names_are_noticed(master: Master) -> None:
    """The labels see a wrong block: a test that could not fail would show nothing."""
    arena = PoolArena(master, CacheKind.ATTENTION, 1, 2)
    arena.wrong_name = True
    try:
        with pytest.raises(OracleMismatch):
            arena.check()
    finally:
        arena.close()
