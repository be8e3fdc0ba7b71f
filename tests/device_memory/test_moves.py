"""Any move between caches in device memory, with the product's own routes and transports."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings

from kvferry.arrays import Bytes, Descriptors
from kvferry.layout.shard import Shard
from kvferry.plan.match import GroupBlocks
from kvferry.plan.planner import Planner
from kvferry.transport.protocol import Direction, Status, reach
from kvferry.transport.registry import make

from ..pure.arrangements import FULL, STATE, ask, attention, hybrid
from ..pure.strategies import Move, moves
from ..support.oracle import Arena, RankMemory, check_moved, strided_memory
from . import standin_nixl
from .standin_transport import FACTORY
from .untouchable import DeviceMemory


class DeviceArena(Arena):
    """Caches on the device; a move is made by writes of the product, whatever rows the oracle has."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(0)
        self.memory = DeviceMemory(num_bytes)
        self.buffer: Bytes = self.memory.content
        self.source, self.destination = make(FACTORY), make(FACTORY)
        self.requests: dict[Shard, Sequence[GroupBlocks]] = {}
        self.sources: list[Shard] = []
        self.source.register([self.memory.region])
        self.peer = reach(self.source, self.destination.register([self.memory.region]))

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
            for plan in Planner(self.sources, shard).proved_plans(0):
                transfer = self.source.submit(self.peer, Direction.WRITE, plan.lower(requests))
                while self.source.poll(transfer) is Status.PENDING:
                    pass
                assert transfer.status is Status.DONE, transfer.error

    def close(self) -> None:
        self.source.close()
        self.destination.close()


def check_move(move: Move) -> None:
    shards = [*move.sources, *move.destinations]
    arena = DeviceArena(sum(region.length for shard in shards for region in shard.regions))
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


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
@given(moves())
def test_any_move_on_a_device_is_exact(move: Move) -> None:
    """Drawn engines: prefix hits, windows, states, MLA, replicas, pipelines, other block sizes and layouts."""
    # A route proves its plans on a block of each group, no two of which have the same id.
    assume(all(move_can_be_proved(move, rank) for rank in move.destinations))
    check_move(move)


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 1), (1, 2)])
def test_states_and_attention_of_a_hybrid(prefill: int, decode: int) -> None:
    sides = [tuple(hybrid(rank, size) for rank in range(size)) for size in (prefill, decode)]
    check_move(Move(sides[0], sides[1], (FULL, STATE)))


def test_a_prefix_hit_loads_what_follows_from_device_to_device() -> None:
    standin_nixl.submissions.clear()
    sources = tuple(attention(rank, 2, ["0", "1"]) for rank in range(2))
    request = ask("full", 9, [5, 2, 7], [3, 1, 4], first_token=4)
    check_move(Move(sources, (attention(0, 1, ["0", "1"]),), (request,)))
    assert {each for each in standin_nixl.submissions if "VRAM" in each} == {("WRITE", "VRAM", "VRAM")}
