"""Any move between caches in device memory, by every strategy, with the product's own jobs and transports."""

import time
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvferry.arrays import Bytes, Descriptors
from kvferry.execution.job import Phase
from kvferry.execution.read import Read
from kvferry.execution.route import Route
from kvferry.execution.stage import Stage
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import Shard
from kvferry.plan.request import GroupBlocks
from kvferry.plan.staging.strategy import Strategy
from kvferry.testing.oracle import Arena, RankMemory, check_moved, strided_memory
from kvferry.transport.protocol import Direction, Status, reach
from kvferry.transport.registry import Link, make

from ..pure.arrangements import FULL, STATE, ask, attention, hybrid
from ..pure.strategies import Move, moves
from . import device, standin_nixl
from .device import ImmediateOrder
from .standin_transport import FACTORY
from .untouchable import DeviceMemory

STAGE_BYTES = 1 << 16


class DeviceArena(Arena):
    """Caches on the device; a move is made by jobs or writes of the product, whatever rows the oracle has."""

    def __init__(self, num_bytes: int, by: str) -> None:
        super().__init__(0)
        self.memory = DeviceMemory(num_bytes)
        self.buffer: Bytes = self.memory.content
        self.by = by
        self.source, self.destination = make(FACTORY), make(FACTORY)
        self.scratch, self.stage = Scratch(16), Stage(STAGE_BYTES, ImmediateOrder())
        self.requests: dict[Shard, Sequence[GroupBlocks]] = {}
        self.sources: list[Shard] = []
        self.ends = self.source.register([self.memory.region])
        ours = self.destination.register([self.memory.region, self.stage.region])
        self.link = Link("nixl", self.destination, reach(self.destination, self.ends))
        self.back = Link("nixl", self.source, reach(self.source, ours))

    def placed(self, shard: Shard) -> RankMemory:
        """Return memory of a rank, whose regions the product knows by their addresses on the device."""
        rank = strided_memory(self, shard)
        shift = self.memory.region.base_address - int(self.buffer.ctypes.data)
        regions = tuple(
            msgspec.structs.replace(region, base_address=region.base_address + shift, device=self.memory.region.device)
            for region in rank.shard.regions
        )
        return RankMemory(msgspec.structs.replace(rank.shard, regions=regions), rank.regions, rank.views)

    def move(self, rows: Descriptors) -> None:
        for shard, requests in self.requests.items():
            if self.by == "write":
                self._write(shard, requests)
            else:
                self._read(shard, requests, Strategy(self.by))

    def _read(self, shard: Shard, requests: Sequence[GroupBlocks], strategy: Strategy) -> None:
        links = dict.fromkeys(range(len(self.sources)), self.link)
        route = Route(self.sources, shard, links, self.stage, strategy)
        assert route.is_ready()
        read = Read("a", lambda: [route.read(plan, requests) for plan in route.own_plans(0)], time.monotonic() + 60)
        while read.phase is not Phase.DONE:
            read.advance(self.scratch, time.monotonic())
        assert read.error is None, read.error

    def _write(self, shard: Shard, requests: Sequence[GroupBlocks]) -> None:
        route = Route(self.sources, shard, dict.fromkeys(range(len(self.sources)), self.back))
        assert route.is_ready()
        for plan in route.own_plans(0):
            transfer = self.source.submit(self.back.peer, Direction.WRITE, plan.lower(requests))
            while self.source.poll(transfer) is Status.PENDING:
                pass
            assert transfer.status is Status.DONE, transfer.error

    def close(self) -> None:
        self.stage.close()
        self.source.close()
        self.destination.close()


def check_move(move: Move, by: str) -> None:
    shards = [*move.sources, *move.destinations]
    arena = DeviceArena(sum(region.length for shard in shards for region in shard.regions), by)
    sources, destinations = ([arena.placed(shard) for shard in side] for side in (move.sources, move.destinations))
    arena.sources = [rank.shard for rank in sources]
    arena.requests = {rank.shard: move.of(rank.shard) for rank in destinations}
    try:
        check_moved(arena, sources, destinations, move.requests, np.empty((0, 3), np.uint64))
    finally:
        arena.close()


def move_can_be_proved(move: Move, rank: Shard) -> bool:
    names = {group.name for group in rank.groups}
    blocks = [group.num_blocks for side in (*move.sources, rank) for group in side.groups if group.name in names]
    return min(blocks) >= len(names)


WAYS = ["direct", "scatter", "write"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
@given(moves(), st.sampled_from(WAYS))
def test_any_move_on_a_device_is_exact_by_every_strategy(move: Move, by: str) -> None:
    """Drawn engines: prefix hits, windows, states, MLA, replicas, pipelines, other block sizes and layouts."""
    # A route proves its plans on a block of each group, no two of which have the same id.
    assume(all(move_can_be_proved(move, rank) for rank in move.destinations))
    check_move(move, by)


@pytest.mark.parametrize("by", WAYS)
@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 1), (1, 2)])
def test_states_and_attention_of_a_hybrid(prefill: int, decode: int, by: str) -> None:
    sides = [tuple(hybrid(rank, size) for rank in range(size)) for size in (prefill, decode)]
    check_move(Move(sides[0], sides[1], (FULL, STATE)), by)


@pytest.mark.parametrize("by", WAYS)
def test_a_prefix_hit_loads_what_follows(by: str) -> None:
    sources = tuple(attention(rank, 2, ["0", "1"]) for rank in range(2))
    request = ask("full", 9, [5, 2, 7], [3, 1, 4], first_token=4)
    check_move(Move(sources, (attention(0, 1, ["0", "1"]),), (request,)), by)


def test_scatter_uses_a_stage_and_launches_on_the_device() -> None:
    standin_nixl.submissions.clear()
    before = device.num_merged
    sources = tuple(attention(rank, 2, ["0", "1"], layout=NamedLayout.LBNHC) for rank in range(2))
    request = ask("full", 12, [5, 2, 7], [3, 1, 4])
    check_move(Move(sources, (attention(0, 1, ["0", "1"], layout=NamedLayout.LBNHC),), (request,)), "scatter")
    assert device.num_merged > before
    data = [kinds for kinds in standin_nixl.submissions if "VRAM" in kinds]
    assert data
    assert set(data) == {("READ", "VRAM", "VRAM")}
