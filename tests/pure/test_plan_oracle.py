"""Moves between every small pair of engines, checked by labels in real memory."""

from itertools import product

import numpy as np
import pytest

from kvferry.arrays import Bytes
from kvferry.layout.named_layouts import NamedLayout
from kvferry.plan.match import GroupBlocks, choose_sources
from kvferry.plan.planner import PairPlan

from ..support.dense import Content, shard_for
from ..support.oracle import Arena, Labels, OracleMismatch, RankMemory, compare
from .named_memory import named_memory

TP_SIZES = (1, 2, 4, 8, 16)
ENGINES = list(product(TP_SIZES, NamedLayout))
TOKENS, BLOCK_SIZE = 4, 2
REQUEST = GroupBlocks(
    group="full", first_token=0, last_token=TOKENS, source_block_ids=[2, 0], destination_block_ids=[0, 1]
)
Engine = tuple[RankMemory, ...]


def engine(arena: Arena, num_kv_heads: int, tp_size: int, layout: NamedLayout) -> Engine:
    ranks = []
    for rank in range(tp_size):
        shard = shard_for(
            layers=["0", "1"],
            num_kv_heads=num_kv_heads,
            head_size=1,
            itemsize=2,
            block_size=BLOCK_SIZE,
            num_blocks=3,
            layout=layout,
            tp_rank=rank,
            tp_size=tp_size,
        )
        ranks.append(named_memory(arena, shard, layout, Content.FUSED, [("kv", 2)]))
    return tuple(ranks)


class Engines:
    """All engines of one model in one arena, sources labelled, and what each destination should hold afterwards."""

    def __init__(self, num_kv_heads: int) -> None:
        self.arena = Arena(1 << 16)
        self.sources = {key: engine(self.arena, num_kv_heads, *key) for key in ENGINES}
        self.destinations = {key: engine(self.arena, num_kv_heads, *key) for key in ENGINES}
        labels = Labels.of(self.sources[ENGINES[0]], [], TOKENS)
        assert labels.num_digits == 1
        self.arena.buffer[:] = np.random.default_rng(0).integers(0, 256, len(self.arena.buffer), dtype=np.uint8)
        for rank in (rank for ranks in self.sources.values() for rank in ranks):
            labels.write(rank, REQUEST, "source", TOKENS)
        self.before = self.arena.buffer.copy()
        for rank in (rank for ranks in self.destinations.values() for rank in ranks):
            labels.write(rank, REQUEST, "destination", TOKENS)
        self.expected = {key: [rank.snapshot() for rank in ranks] for key, ranks in self.destinations.items()}
        self.arena.buffer[:] = self.before

    def move_and_compare(self, source: tuple[int, NamedLayout], destination: tuple[int, NamedLayout]) -> None:
        sources = [rank.shard for rank in self.sources[source]]
        for turn, (rank, wanted) in enumerate(
            zip(self.destinations[destination], self.expected[destination], strict=True)
        ):
            # Not by a Planner, which would plan for the first turn besides.
            chosen = choose_sources(sources, rank.shard, turn)
            lists = [PairPlan(sources[one.source_index], rank.shard, one).lower([REQUEST]) for one in chosen]
            self.arena.move(np.concatenate(lists))
            self._compare(rank, wanted, source, destination)
        assert np.array_equal(self.reset(destination), self.before), "a byte outside the destination changed"

    def _compare(self, rank: RankMemory, wanted: list[Bytes], *pair: tuple[int, NamedLayout]) -> None:
        try:
            compare(rank, wanted)
        except OracleMismatch as error:
            raise OracleMismatch(f"{pair}: {error}") from None

    def reset(self, destination: tuple[int, NamedLayout]) -> Bytes:
        """Put a destination back as it was and return the whole buffer."""
        for rank in self.destinations[destination]:
            for region in rank.regions:
                begin = region.ctypes.data - self.arena.buffer.ctypes.data
                region[:] = self.before[begin : begin + len(region)]
        return self.arena.buffer


@pytest.fixture(scope="module", params=[1, 2, 4, 8], ids=lambda heads: f"heads{heads}")
def engines(request: pytest.FixtureRequest) -> Engines:
    return Engines(request.param)


@pytest.mark.parametrize("layout", NamedLayout)
@pytest.mark.parametrize("tp_size", TP_SIZES)
def test_every_pair_of_engines(engines: Engines, tp_size: int, layout: NamedLayout) -> None:
    for destination in ENGINES:
        engines.move_and_compare((tp_size, layout), destination)
