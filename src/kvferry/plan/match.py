"""Which source rank serves which part of a destination rank, on global axes.

Layers are matched by name and heads by global index. Tokens need no match: they are one global axis that each side
splits into blocks and slots later. Everything that no plan can do is refused here, before any request exists.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from kvferry.errors import PlanError, Reason
from kvferry.layout.cache_group import CacheGroup
from kvferry.layout.shard import Shard
from kvferry.layout.strided import Component, HeadRange
from kvferry.plan.coalesce import Offsets
from kvferry.plan.compatibility import check_groups, check_layers


class GroupHeads(msgspec.Struct, frozen=True):
    """Global heads of one cache group."""

    group: str
    heads: tuple[HeadRange, ...]


class Assignment(msgspec.Struct, frozen=True):
    """What one source rank, named by its index, sends to a destination rank. Hashable: plans are cached by it."""

    source_index: int
    heads: tuple[GroupHeads, ...]


class HeadOverlap(NamedTuple):
    """Heads held by both sides: the first's local index on each side, and how many."""

    source_head: int
    destination_head: int
    num_heads: int


def choose_sources(sources: Sequence[Shard], destination: Shard, selector: int) -> tuple[Assignment, ...]:
    """Choose for each layer and head that the destination holds the one source rank that sends it.

    As few ranks as possible are chosen. Among ranks that hold the same, ``selector`` (not negative, the same on both
    sides for one request, such as a stable hash of its id) and the destination's rank choose, so that requests and
    ranks spread evenly. Equal arguments give equal assignments.

    Raises :class:`PlanError` when the peers do not fit or no source holds a needed head (``missing-source``).

    >>> from kvferry.layout.named_layouts import NamedLayout
    >>> from kvferry.layout.shapes import shard_for
    >>> def shard(tp_rank, tp_size):
    ...     return shard_for(layers=["0"], num_kv_heads=2, head_size=64, itemsize=2, block_size=16, num_blocks=10,
    ...         layout=NamedLayout.BHLNC, tp_rank=tp_rank, tp_size=tp_size)
    >>> replicated = [shard(rank, 4) for rank in range(4)]
    >>> [[a.source_index for a in choose_sources(replicated, shard(0, 1), selector)] for selector in (0, 1)]
    [[0, 2], [1, 3]]
    """
    if selector < 0:
        raise PlanError(Reason.INVALID_REQUEST, f"selector is {selector}.", "Use a non-negative hash.")
    check_layers(sources, destination)
    # Replicas come in numbers that divide the ranks, so this loses no balance and bounds the distinct assignments.
    turn = (selector + destination.tp_rank) % len(sources)
    chosen: dict[int, list[GroupHeads]] = {}
    for group in destination.groups:
        for stage in _stages(sources, group):
            held = [(index, found) for index in stage if (found := sources[index].group(group.name))]
            check_groups(held, sources, group, destination)
            for index, heads in _cover(held, group, turn, chosen):
                chosen.setdefault(index, []).append(GroupHeads(group.name, heads))
    return tuple(Assignment(index, tuple(heads)) for index, heads in sorted(chosen.items()))


def _stages(sources: Sequence[Shard], group: CacheGroup) -> list[list[int]]:
    """Return the sources that hold layers of the group, together where they hold the same layers."""
    stages: dict[frozenset[str], list[int]] = {}
    for index, source in enumerate(sources):
        found = source.group(group.name)
        if found is not None and found.layers & group.layers:
            stages.setdefault(found.layers, []).append(index)
    return list(stages.values())


def _cover(
    held: Sequence[tuple[int, CacheGroup]], wanted: CacheGroup, turn: int, chosen: Iterable[int]
) -> list[tuple[int, tuple[HeadRange, ...]]]:
    """Cover the wanted heads greedily: always the ranks that hold most of what is left, one of them by turn."""
    replicas: dict[frozenset[int], list[int]] = {}
    for index, group in held:
        replicas.setdefault(head_set(group.heads), []).append(index)
    left, cover = head_set(wanted.heads), []
    while left:
        best = max(replicas, key=lambda heads: (len(heads & left), -min(heads)))
        if not best & left:
            raise _missing(left, wanted)
        # Fewest ranks: one that sends another group anyway is taken again.
        candidates = [index for index in replicas[best] if index in chosen] or replicas[best]
        cover.append((candidates[turn % len(candidates)], ranges_of(best & left)))
        left -= best
    return cover


def _missing(left: frozenset[int], wanted: CacheGroup) -> PlanError:
    return PlanError(
        Reason.MISSING_SOURCE,
        f"group {wanted.name!r}: no source rank holds heads {list(ranges_of(left))} of {wanted.num_kv_heads}.",
        "Name every rank of the source engine.",
    )


def head_set(heads: Iterable[HeadRange]) -> frozenset[int]:
    """Return the heads of ranges as a set.

    >>> sorted(head_set([HeadRange(0, 2), HeadRange(5, 6)]))
    [0, 1, 5]
    """
    return frozenset(head for held in heads for head in range(held.start, held.end))


def ranges_of(heads: Iterable[int]) -> tuple[HeadRange, ...]:
    """Return a set of heads as ascending ranges.

    >>> ranges_of({5, 0, 1})
    (0:2, 5:6)
    """
    ranges: list[HeadRange] = []
    for head in sorted(heads):
        if ranges and ranges[-1].end == head:
            ranges[-1] = HeadRange(ranges[-1].start, head + 1)
        else:
            ranges.append(HeadRange(head, head + 1))
    return tuple(ranges)


def match_heads(
    source: Sequence[HeadRange], destination: Sequence[HeadRange], wanted: Sequence[HeadRange]
) -> list[HeadOverlap]:
    """Return where the wanted heads lie on both sides, as stretches of consecutive local indices.

    >>> match_heads([HeadRange(0, 4)], [HeadRange(2, 8)], [HeadRange(0, 8)])
    [HeadOverlap(source_head=2, destination_head=0, num_heads=2)]
    """
    overlaps = []
    for source_head, sent in _local(source):
        for destination_head, received in _local(destination):
            for asked in wanted:
                start = max(sent.start, received.start, asked.start)
                end = min(sent.end, received.end, asked.end)
                if start < end:
                    local = source_head + start - sent.start, destination_head + start - received.start
                    overlaps.append(HeadOverlap(*local, end - start))
    return overlaps


def _local(heads: Sequence[HeadRange]) -> list[tuple[int, HeadRange]]:
    """Return each range with the local index of its first head."""
    counts = [0, *(len(held) for held in heads)]
    return [(int(first), held) for first, held in zip(np.cumsum(counts)[:-1], heads, strict=True)]


def match_layers(source: Component, destination: Component) -> Offsets:
    """Return rows of source and destination offset, one for each layer that both hold."""
    offsets = dict(zip(source.layers, source.layer_offsets, strict=True))
    held = zip(destination.layers, destination.layer_offsets, strict=True)
    rows = [(offsets[layer], offset) for layer, offset in held if layer in offsets]
    return np.array(rows, dtype=np.int64).reshape(-1, 2)
