"""Coalescing, templates, and several groups and regions."""

from itertools import permutations, product

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import CacheGroup, CacheKind, Region, Shard
from kvferry.plan.match import GroupBlocks, TokenRun
from kvferry.plan.planner import MAX_CACHED_PHASES, Planner, StridedCopy, coalesce, merge_rows, place
from kvferry.plan.proof import verify_destination, verify_pair

from ..support.dense import shard_for
from ..support.oracle import Arena, OracleMismatch, check_moved, strided_memory

LOOPS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 40), st.integers(1, 40)), max_size=4).map(tuple)


def moved_bytes(rows: np.ndarray) -> set[tuple[int, int]]:
    """Return every (source byte, destination byte) that the rows copy."""
    return {(source + at, to + at) for source, to, length in rows.tolist() for at in range(length)}


@given(st.integers(1, 5), LOOPS)
def test_coalesce_copies_the_same_bytes_in_fewest_loops(
    run_bytes: int, loops: tuple[tuple[int, int, int], ...]
) -> None:
    copy = StridedCopy(7, 9, run_bytes, loops)
    folded = coalesce(copy)
    assert moved_bytes(folded.expand()) == moved_bytes(copy.expand())
    assert coalesce(folded) == folded
    assert all(count > 1 for count, _, _ in folded.loops)
    assert not any(source == to == folded.run_bytes for _, source, to in folded.loops[:1])


@given(st.integers(1, 4), LOOPS, st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=8))
def test_placing_copies_the_same_bytes(
    run_bytes: int, loops: tuple[tuple[int, int, int], ...], places: list[tuple[int, int]]
) -> None:
    rows = [StridedCopy(source, to, run_bytes, loops).expand() for source, to in places]
    placed = place(run_bytes, loops, np.array(places))
    assert moved_bytes(np.concatenate([copy.expand() for copy in placed])) == moved_bytes(np.concatenate(rows))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 300), st.integers(1, 9)), max_size=12))
def test_merging_copies_the_same_bytes(rows: list[tuple[int, int, int]]) -> None:
    array = np.array(rows, dtype=np.int64).reshape(-1, 3)
    assert moved_bytes(merge_rows(array)) == moved_bytes(array)


def test_a_stretch_of_layers_is_one_loop() -> None:
    """An affine stretch ends exactly where the step changes."""
    places = np.array([[0, 0], [10, 20], [20, 40], [30, 60], [35, 80], [40, 100]])
    copies = place(4, (), places)
    assert [(copy.destination_offset, copy.loops) for copy in copies] == [(0, ((4, 10, 20),)), (80, ((2, 5, 20),))]


def padded(group: CacheGroup, block_stride: int) -> CacheGroup:
    (part,) = group.components
    return msgspec.structs.replace(group, components=(msgspec.structs.replace(part, block_stride=block_stride),))


def hybrid(tp_rank: int, tp_size: int, base_address: int, *, overlaid: bool) -> Shard:
    """Two groups, heads and a latent, in one region that both overlay or in a region each."""
    shape = {"block_size": 4, "num_blocks": 8, "itemsize": 2, "tp_rank": tp_rank, "tp_size": tp_size}
    heads = shard_for(
        layers=["0", "2"], num_kv_heads=2, head_size=6, layout=NamedLayout.BLHNC, base_address=base_address, **shape
    )
    latent = shard_for(
        layers=["1", "3"],
        num_kv_heads=1,
        head_size=12,
        layout=NamedLayout.BLHNC,
        kind=CacheKind.MLA,
        group_name="latent",
        base_address=base_address + (0 if overlaid else heads.regions[0].length),
        **shape,
    )
    if overlaid:
        # As vLLM lays out hybrids: rows of one length, padded, from the same first byte, with block ids of their own.
        row = max(shard.groups[0].components[0].block_stride for shard in (heads, latent))
        groups = tuple(padded(shard.groups[0], row) for shard in (heads, latent))
        return msgspec.structs.replace(heads, regions=(Region(base_address, row * 8),), groups=groups)
    (part,) = latent.groups[0].components
    second = msgspec.structs.replace(latent.groups[0], components=(msgspec.structs.replace(part, region=1),))
    return msgspec.structs.replace(heads, regions=heads.regions + latent.regions, groups=(*heads.groups, second))


@pytest.mark.parametrize("overlaid", [True, False])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4)])
def test_two_groups(prefill: int, decode: int, overlaid: bool) -> None:
    arena = Arena(1 << 17)
    sources = [strided_memory(arena, hybrid(rank, prefill, 0, overlaid=overlaid)) for rank in range(prefill)]
    destinations = [strided_memory(arena, hybrid(rank, decode, 0, overlaid=overlaid)) for rank in range(decode)]
    requests = [
        GroupBlocks(
            group="full", first_token=0, last_token=9, source_block_ids=[2, 3, 4], destination_block_ids=[5, 6, 7]
        ),
        GroupBlocks(
            group="latent", first_token=0, last_token=9, source_block_ids=[7, 6, 5], destination_block_ids=[2, 1, 0]
        ),
    ]
    rows = []
    for destination in destinations:
        plans = Planner([rank.shard for rank in sources], destination.shard).plans(1)
        assert len(plans) == max(1, prefill // decode) or prefill == 4, "the latent comes from a rank that sends heads"
        lists = [(plan.source, plan.lower(requests)) for plan in plans]
        for plan, (_, found) in zip(plans, lists, strict=True):
            verify_pair(found, plan.source, plan.destination, requests, plan.heads)
        verify_destination(lists, destination.shard, requests)
        rows += [found for _, found in lists]
    check_moved(arena, sources, destinations, requests, np.concatenate(rows))
    with pytest.raises(OracleMismatch):
        check_moved(arena, sources, destinations, requests, np.concatenate(rows)[1:])


def test_runs_never_cross_regions() -> None:
    """Regions that happen to touch are registered apart."""
    source, destination = (hybrid(0, 1, base, overlaid=False) for base in (0, 1 << 20))
    (plan,) = Planner([source], destination).plans(0)
    requests = [
        GroupBlocks(group=name, first_token=0, last_token=32, source_block_ids=range(8), destination_block_ids=range(8))
        for name in ("full", "latent")
    ]
    assert len(plan.lower(requests)) == 2


def test_blocks_of_two_sizes_join_where_tokens_are_contiguous() -> None:
    shape = {"layers": ["0"], "num_kv_heads": 2, "head_size": 2, "itemsize": 2, "layout": NamedLayout.LBNHC}
    source = shard_for(block_size=4, num_blocks=8, **shape)
    destination = shard_for(block_size=8, num_blocks=4, base_address=1 << 20, **shape)
    (plan,) = Planner([source], destination).plans(0)
    blocks = GroupBlocks(
        group="full", first_token=1, last_token=31, source_block_ids=range(8), destination_block_ids=range(4)
    )
    assert plan.lower([blocks]).tolist() == [[16, (1 << 20) + 16, 480]]


def test_whole_cache_of_a_layer_outermost_layout_is_one_run() -> None:
    shape = {"layers": ["0", "1"], "num_kv_heads": 2, "head_size": 2, "itemsize": 2, "layout": NamedLayout.LHBNC}
    source = shard_for(block_size=4, num_blocks=8, **shape)
    destination = shard_for(block_size=4, num_blocks=8, base_address=1 << 20, **shape)
    (plan,) = Planner([source], destination).plans(0)
    order = [3, 1, 0, 2, 7, 5, 6, 4]
    blocks = GroupBlocks(
        group="full", first_token=0, last_token=32, source_block_ids=order, destination_block_ids=order
    )
    assert len(plan.lower([blocks])) == 1


def test_blocks_join_exactly_where_they_follow_each_other_on_both_sides() -> None:
    """For every choice of three blocks on each side, in every order."""
    shape = {"layers": ["0"], "num_kv_heads": 1, "head_size": 1, "itemsize": 1, "layout": NamedLayout.BHLNC}
    base = 1 << 20
    source = shard_for(block_size=1, num_blocks=5, **shape)
    destination = shard_for(block_size=1, num_blocks=5, base_address=base, **shape)
    (plan,) = Planner([source], destination).plans(0)
    stride = 2  # a key and a value of a byte each
    for source_ids, destination_ids in product(permutations(range(5), 3), repeat=2):
        blocks = GroupBlocks(
            group="full",
            first_token=0,
            last_token=3,
            source_block_ids=source_ids,
            destination_block_ids=destination_ids,
        )
        joined: list[list[int]] = []
        for to, at in sorted(zip(destination_ids, source_ids, strict=True)):
            if joined and [at * stride, base + to * stride] == [place + joined[-1][2] for place in joined[-1][:2]]:
                joined[-1][2] += stride
            else:
                joined.append([at * stride, base + to * stride, stride])
        assert sorted(plan.lower([blocks]).tolist()) == sorted(joined), (source_ids, destination_ids)


def test_templates_of_many_phases_are_not_kept_for_ever() -> None:
    shape = {"layers": ["0"], "num_kv_heads": 1, "head_size": 1, "itemsize": 2, "layout": NamedLayout.BHLNC}
    source = shard_for(block_size=31, num_blocks=40, **shape)
    destination = shard_for(block_size=32, num_blocks=40, base_address=1 << 20, **shape)
    (plan,) = Planner([source], destination).plans(0)
    group = plan.groups["full"]
    for slot in range(31):
        for count in range(1, 31 - slot):
            group.templates((TokenRun(slot, 0, count),))
    assert 0 < len(group._templates) <= MAX_CACHED_PHASES
    blocks = GroupBlocks(
        group="full", first_token=0, last_token=1200, source_block_ids=range(40), destination_block_ids=range(40)
    )
    verify_pair(plan.lower([blocks]), source, destination, [blocks], plan.heads)
