"""Random engines, layouts and requests: exact by the oracle, accepted by verify; wrong ones caught by one of them.

``KVFERRY_CASES`` in the environment says how many cases are drawn, in place of a sample. ``make test-full`` draws
100,000; what is drawn is counted in ``test_drawn_cases.py``.
"""

import dataclasses
import os
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvferry.arrays import Descriptors
from kvferry.errors import Reason, VerificationError
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import Shard
from kvferry.plan.match import GroupBlocks
from kvferry.plan.planner import PairPlan, Planner
from kvferry.plan.proof import verify_destination, verify_pair

from ..support.dense import Content, shard_for
from ..support.oracle import Arena, OracleMismatch, RankMemory, check_moved, strided_memory
from .strategies import Move, moves

Lowered = list[tuple[PairPlan, Descriptors]]
# Drawing two engines is slow on a busy machine.
SLOW = [HealthCheck.too_slow]
CASES = int(os.environ.get("KVFERRY_CASES", "70"))


def lower(move: Move, destination: Shard, selector: int) -> Lowered:
    plans = Planner(move.sources, destination).plans(selector)
    return [(plan, plan.lower(move.of(destination))) for plan in plans]


def in_memory(move: Move) -> tuple[Arena, Move, list[RankMemory], list[RankMemory]]:
    """Return the move with the addresses of real memory."""
    arena = Arena(sum(region.length for shard in (*move.sources, *move.destinations) for region in shard.regions))
    sources = [strided_memory(arena, shard) for shard in move.sources]
    destinations = [strided_memory(arena, shard) for shard in move.destinations]
    placed = Move(tuple(rank.shard for rank in sources), tuple(rank.shard for rank in destinations), move.requests)
    return arena, placed, sources, destinations


def adjacent(rows: np.ndarray) -> set[tuple[int, int]]:
    """Return where one row begins and another ends, on both sides."""
    starts = {(source, destination) for source, destination, _ in rows.tolist()}
    return starts & {(source + length, destination + length) for source, destination, length in rows.tolist()}


def one_by_group(plan: PairPlan, asked: Sequence[GroupBlocks]) -> Iterator[np.ndarray]:
    for group in asked:
        if group.group in plan.groups:
            yield from plan.groups[group.group].lower([group])


@pytest.mark.timeout(max(300, CASES))
@settings(max_examples=CASES, deadline=None, suppress_health_check=SLOW)
@given(moves(), st.integers(0, 100))
def test_any_move_is_exact(move: Move, selector: int) -> None:
    """Destination bytes equal the oracle's, every needed byte is moved once, and nothing else is touched."""
    arena, placed, sources, destinations = in_memory(move)
    moved = []
    for destination in placed.destinations:
        asked, lists = move.of(destination), lower(placed, destination, selector)
        for plan, descriptors in lists:
            verify_pair(descriptors, plan.source, destination, asked, plan.heads)
        verify_destination([(plan.source, rows) for plan, rows in lists], destination, asked)
        moved += [rows for _, rows in lists]
    # For one rank of each case, since it takes as long as all of the above.
    assert not any(adjacent(rows) for plan, _ in lists for rows in one_by_group(plan, asked)), "two could be one"
    check_moved(arena, sources, destinations, move.requests, np.concatenate(moved))


@settings(max_examples=max(40, CASES // 20), deadline=None, suppress_health_check=SLOW)
@given(moves(), st.integers(0, 100), st.randoms(use_true_random=False))
def test_lowering_ignores_the_order_of_requests(move: Move, selector: int, order: random.Random) -> None:
    """A plan depends on the set of pairs of blocks: each position asked for alone, in any order, gives the same."""
    destination = move.destinations[0]
    asked = move.of(destination)
    apart = [part for blocks in asked for part in one_by_one(blocks, destination)]
    order.shuffle(apart)
    for plan in Planner(move.sources, destination).plans(selector):
        straight, permuted = plan.lower(asked), plan.lower(apart)
        assert np.array_equal(by_destination(straight), by_destination(permuted))


def one_by_one(blocks: GroupBlocks, destination: Shard) -> list[GroupBlocks]:
    """Return a request for each destination block."""
    group = destination.group(blocks.group)
    assert group is not None
    covers, begin = group.tokens_per_position, blocks.destination_first_token
    cuts = range(begin + covers * (1 + (blocks.first_token - begin) // covers), blocks.last_token, covers)
    bounds = [blocks.first_token, *cuts, blocks.last_token]
    return [dataclasses.replace(blocks, first_token=first, last_token=last) for first, last in pairwise(bounds)]


def by_destination(rows: Descriptors) -> Descriptors:
    return rows[np.argsort(rows[:, 1], kind="stable")]


def dropped(rows: Descriptors, at: int, by: int) -> Descriptors:
    return np.delete(rows, at, axis=0)


def doubled(rows: Descriptors, at: int, by: int) -> Descriptors:
    return np.concatenate((rows, rows[at : at + 1]))


def shifted_source(rows: Descriptors, at: int, by: int) -> Descriptors:
    rows[at, 0] += np.uint64(by)
    return rows


def shifted_destination(rows: Descriptors, at: int, by: int) -> Descriptors:
    rows[at, 1] += np.uint64(by)
    return rows


def shortened(rows: Descriptors, at: int, by: int) -> Descriptors:
    rows[at, 2] -= min(np.uint64(by), rows[at, 2])
    return rows


def lengthened(rows: Descriptors, at: int, by: int) -> Descriptors:
    rows[at, 2] += np.uint64(by)
    return rows


def source_out_of_region(rows: Descriptors, at: int, by: int) -> Descriptors:
    rows[at, 0] = np.uint64(2**64 - by)
    return rows


def destination_out_of_region(rows: Descriptors, at: int, by: int) -> Descriptors:
    rows[at, 1] = np.uint64(by)
    return rows


FAR = {Reason.OUT_OF_REGION}
REASONS = {
    dropped: {Reason.BYTES_MISSING},
    doubled: {Reason.BYTES_DOUBLED},
    shifted_source: {Reason.WRONG_SOURCE} | FAR,
    shifted_destination: {Reason.BYTES_DOUBLED, Reason.BYTES_FOREIGN, Reason.BYTES_MISSING} | FAR,
    shortened: {Reason.BYTES_MISSING} | FAR,
    lengthened: {Reason.BYTES_DOUBLED, Reason.BYTES_FOREIGN} | FAR,
    source_out_of_region: FAR,
    destination_out_of_region: FAR,
}


@pytest.mark.parametrize("mutate", REASONS, ids=lambda mutate: mutate.__name__)
@settings(max_examples=max(25, CASES // 40), deadline=None, suppress_health_check=SLOW)
@given(move=moves(), at=st.integers(0, 1000), by=st.integers(1, 9), selector=st.integers(0, 7))
def test_verify_rejects(mutate, move: Move, at: int, by: int, selector: int) -> None:  # type: ignore[no-untyped-def]
    destination = move.destinations[at % len(move.destinations)]
    asked, lists = move.of(destination), lower(move, destination, selector)
    moving = [index for index, (_, rows) in enumerate(lists) if len(rows)]
    assume(moving)
    which = moving[at % len(moving)]
    plan, descriptors = lists[which]
    wrong = mutate(descriptors.copy(), at % len(descriptors), by)
    with pytest.raises(VerificationError) as pair_error:
        verify_pair(wrong, plan.source, destination, asked, plan.heads)
    assert pair_error.value.reason in REASONS[mutate]
    together = [(other.source, wrong if index == which else rows) for index, (other, rows) in enumerate(lists)]
    with pytest.raises(VerificationError) as destination_error:
        verify_destination(together, destination, asked)
    assert destination_error.value.reason in REASONS[mutate]


@settings(max_examples=max(40, CASES // 20), deadline=None, suppress_health_check=SLOW)
@given(moves(), st.integers(0, 1000), st.integers(0, 7))
def test_verify_accepts_any_split_of_a_row(move: Move, at: int, selector: int) -> None:
    lists = [(plan, rows) for plan, rows in lower(move, move.destinations[0], selector) if len(rows)]
    assume(lists)
    plan, rows = lists[0]
    source, destination, length = rows[at % len(rows)].tolist()
    assume(length > 1)
    cut = 1 + at % (length - 1)
    halves = [[source, destination, cut], [source + cut, destination + cut, length - cut]]
    split = np.concatenate((np.delete(rows, at % len(rows), axis=0), np.array(halves, dtype=np.uint64)))
    verify_pair(split, plan.source, plan.destination, move.of(plan.destination), plan.heads)


def ranks(tp_size: int, base_address: int, layout: NamedLayout = NamedLayout.BHLNC, spacing: int = 0) -> list[Shard]:
    return [
        shard_for(
            layers=["0", "1", "2"],
            num_kv_heads=4,
            head_size=2,
            itemsize=2,
            block_size=4,
            num_blocks=8,
            layout=layout,
            content=Content.INTERLEAVED,
            tp_rank=rank,
            tp_size=tp_size,
            base_address=base_address + rank * spacing,
        )
        for rank in range(tp_size)
    ]


REQUEST = GroupBlocks(
    group="full", first_token=0, last_token=12, source_block_ids=[3, 5, 0], destination_block_ids=[1, 7, 2]
)


@pytest.mark.parametrize("layout", NamedLayout)
def test_verify_rejects_a_rank_with_other_heads(layout: NamedLayout) -> None:
    """At one address in both processes, so that only the coordinates tell them apart."""
    sources, destination = ranks(2, 1 << 20, layout), ranks(1, 1 << 30)[0]
    first, second = [(plan, plan.lower([REQUEST])) for plan in Planner(sources, destination).plans(0)]
    verify_destination([(first[0].source, first[1]), (second[0].source, second[1])], destination, [REQUEST])
    with pytest.raises(VerificationError) as error:
        verify_destination([(sources[1], first[1]), (sources[0], second[1])], destination, [REQUEST])
    assert error.value.reason is Reason.WRONG_SOURCE


def test_verify_rejects_a_replica_at_another_address() -> None:
    sources, destination = ranks(8, 1 << 20, spacing=1 << 24), ranks(1, 1 << 30)[0]
    lists = [(plan.source, plan.lower([REQUEST])) for plan in Planner(sources, destination).plans(0)]
    chosen = lists[0][0]
    replica = next(rank for rank in sources if rank.groups == chosen.groups and rank.tp_rank != chosen.tp_rank)
    with pytest.raises(VerificationError) as error:
        verify_destination([(replica, lists[0][1]), *lists[1:]], destination, [REQUEST])
    assert error.value.reason is Reason.OUT_OF_REGION


def test_verify_rejects_a_missing_rank() -> None:
    sources, destination = ranks(2, 1 << 20, spacing=1 << 24), ranks(1, 1 << 30)[0]
    plan = Planner(sources, destination).plans(0)[0]
    with pytest.raises(VerificationError) as error:
        verify_destination([(plan.source, plan.lower([REQUEST]))], destination, [REQUEST])
    assert error.value.reason is Reason.BYTES_MISSING


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("length", [1, 2**63, 2**64 - 1])
def test_verify_rejects_a_row_that_runs_out_of_its_region(side: int, length: int) -> None:
    """It begins inside: at the last byte, one byte longer than fits, or long enough to wrap around."""
    (source,), (destination,) = ranks(1, 1 << 20), ranks(1, 1 << 30)
    (plan,) = Planner([source], destination).plans(0)
    region = (source, destination)[side].regions[0]
    rows = plan.lower([REQUEST])
    rows[0, 2] = length if length > 1 else 2
    rows[0, side] = region.base_address + region.length - 1
    with pytest.raises(VerificationError) as error:
        verify_pair(rows, source, destination, [REQUEST], plan.heads)
    assert error.value.reason is Reason.OUT_OF_REGION


def swapped_layers(shard: Shard) -> Shard:
    return _each_component(shard, lambda part: {"layers": (part.layers[1], part.layers[0], *part.layers[2:])})


def swapped_strides(shard: Shard) -> Shard:
    def swapped(part: object) -> dict[str, int]:
        return {"token_stride": part.head_stride, "head_stride": part.token_stride}  # type: ignore[attr-defined]

    return _each_component(shard, swapped)


def swapped_content(shard: Shard) -> Shard:
    (group,) = shard.groups
    key, value = group.components
    pair = (msgspec.structs.replace(key, name="v"), msgspec.structs.replace(value, name="k"))
    return msgspec.structs.replace(shard, groups=(msgspec.structs.replace(group, components=pair),))


def _each_component(shard: Shard, changes) -> Shard:  # type: ignore[no-untyped-def]
    (group,) = shard.groups
    parts = tuple(msgspec.structs.replace(part, **changes(part)) for part in group.components)
    return msgspec.structs.replace(shard, groups=(msgspec.structs.replace(group, components=parts),))


@pytest.mark.parametrize("side", ["source", "destination"])
@pytest.mark.parametrize("declare", [None, swapped_layers, swapped_strides, swapped_content])
def test_the_oracle_catches_a_wrongly_declared_shard(declare, side: str) -> None:  # type: ignore[no-untyped-def]
    """What verify cannot see: it trusts the declared shards."""
    arena = Arena(1 << 14)
    source, destination = (
        strided_memory(arena, ranks(1, 0, layout)[0]) for layout in (NamedLayout.LBHNC, NamedLayout.LBNHC)
    )
    declared = {"source": source.shard, "destination": destination.shard}
    if declare is not None:
        declared[side] = declare(declared[side])
    (plan,) = Planner([declared["source"]], declared["destination"]).plans(0)
    rows = plan.lower([REQUEST])
    verify_pair(rows, plan.source, plan.destination, [REQUEST], plan.heads)
    if declare is None:
        check_moved(arena, [source], [destination], [REQUEST], rows)
        return
    with pytest.raises(OracleMismatch):
        check_moved(arena, [source], [destination], [REQUEST], rows)
