"""Padding moves, so that runs join, where all ranks have equal padding; otherwise no padding moves."""

import numpy as np
import pytest

from kvferry.arrays import Descriptors
from kvferry.errors import Reason, VerificationError
from kvferry.layout.shard import CacheGroup, CacheKind, Region, Shard
from kvferry.layout.states import ConvOrder, StatePages, conv_components, mamba2_segments, padding_components
from kvferry.plan.match import GroupBlocks
from kvferry.plan.planner import Planner
from kvferry.plan.proof import verify_destination, verify_pair

from ..support.oracle import Arena, OracleMismatch, RankMemory, check_moved, strided_memory

LAYERS, NUM_BLOCKS, TAPS = ("0", "1", "2"), 6, 3
BLOCKS = GroupBlocks(group="states", first_token=0, last_token=1, source_block_ids=[4], destination_block_ids=[2])


def rank(padding: int, tp_rank: int = 0, tp_size: int = 1) -> Shard:
    """Return a rank whose pages of three layers lie side by side in a block, each with so many bytes of padding."""
    segments = mamba2_segments(16, 1, 4, tp_rank, tp_size)
    content = sum(len(segment.held) for segment in segments) * TAPS
    page = content + padding
    pages = StatePages(layers=LAYERS, layer_offsets=[0, page, 2 * page], block_stride=3 * page)
    parts = conv_components(pages, segments, state_len=TAPS, order=ConvOrder.SD, itemsize=1)
    tail = padding_components(pages, content, page, tp_rank, tp_size)
    group = CacheGroup(
        name="states", kind=CacheKind.STATE, block_size=1, num_blocks=NUM_BLOCKS, components=(*parts, *tail)
    )
    region = Region(0, 3 * page * NUM_BLOCKS)
    return Shard(regions=(region,), groups=(group,), tp_rank=tp_rank, tp_size=tp_size)


def in_memory(*shards: Shard) -> tuple[Arena, list[RankMemory]]:
    arena = Arena(1 << 14)
    return arena, [strided_memory(arena, shard) for shard in shards]


def lowered(sources: list[RankMemory], destination: RankMemory) -> list[tuple[Shard, Descriptors]]:
    plans = Planner([source.shard for source in sources], destination.shard).plans(0)
    lists = [(plan.source, plan.lower([BLOCKS])) for plan in plans]
    for plan, (source, rows) in zip(plans, lists, strict=True):
        verify_pair(rows, source, destination.shard, [BLOCKS], plan.heads)
    verify_destination(lists, destination.shard, [BLOCKS])
    return lists


def test_equal_padding_makes_a_block_one_run() -> None:
    arena, (source, destination) = in_memory(rank(12), rank(12))
    [(shard, rows)] = lowered([source], destination)
    assert rows[:, 2].tolist() == [destination.shard.groups[0].components[0].block_stride]
    check_moved(arena, [source], [destination], [BLOCKS], rows)
    for cut in (rows - np.array([0, 0, 1], np.uint64), rows[:0]):
        with pytest.raises(VerificationError) as found:
            verify_destination([(shard, cut)], destination.shard, [BLOCKS])
        assert found.value.reason is Reason.BYTES_MISSING
        with pytest.raises(OracleMismatch):
            check_moved(arena, [source], [destination], [BLOCKS], cut)


@pytest.mark.parametrize(("at_source", "at_destination"), [(12, 10), (12, 0), (0, 12)])
def test_unequal_padding_is_left_alone(at_source: int, at_destination: int) -> None:
    arena, (source, destination) = in_memory(rank(at_source), rank(at_destination))
    [(shard, rows)] = lowered([source], destination)
    assert len(rows) == len(LAYERS)
    check_moved(arena, [source], [destination], [BLOCKS], rows)
    longer = rows + np.array([0, 0, 1], np.uint64)
    if at_destination:
        with pytest.raises(VerificationError) as found:
            verify_destination([(shard, longer)], destination.shard, [BLOCKS])
        assert found.value.reason is Reason.BYTES_FOREIGN
        with pytest.raises(OracleMismatch):
            check_moved(arena, [source], [destination], [BLOCKS], longer)


@pytest.mark.parametrize(("source_size", "destination_size"), [(2, 1), (1, 2), (2, 2)])
def test_padding_of_a_rank_belongs_to_that_rank(source_size: int, destination_size: int) -> None:
    for tp_rank in range(destination_size):
        shards = [rank(6, index, source_size) for index in range(source_size)]
        arena, memories = in_memory(*shards, rank(6, tp_rank, destination_size))
        *sources, destination = memories
        lists = lowered(sources, destination)
        check_moved(arena, sources, [destination], [BLOCKS], np.concatenate([rows for _, rows in lists]))
        if source_size == destination_size:
            assert [len(rows) for _, rows in lists] == [1]


def test_another_rank_of_other_padding_changes_nothing() -> None:
    arena, (first, second, destination) = in_memory(rank(6, 0, 2), rank(5, 1, 2), rank(6, 0, 2))
    [(_, rows)] = lowered([first, second], destination)
    assert len(rows) == 1
    check_moved(arena, [first, second], [destination], [BLOCKS], rows)
