"""Which source rank serves which part of a destination rank, on global axes.

Layers are matched by name, components by name and heads by global index. Tokens need no match: they are one global
axis, of which each rank holds a share that it splits into blocks and slots later. Everything that no plan can do is
refused here, before any request exists.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from kvferry.arrays import Offsets
from kvferry.errors import PlanError, Reason
from kvferry.layout.component import Component, HeadRange
from kvferry.layout.group import CacheGroup, TokenShare
from kvferry.layout.shard import Shard
from kvferry.plan.compatibility import check_groups, check_layers, check_shares
from kvferry.plan.head_ranges import Ranges, canonical, common, count, without


class ComponentHeads(msgspec.Struct, frozen=True):
    """Global heads of one component of one cache group."""

    group: str
    component: str
    heads: tuple[HeadRange, ...]


class Assignment(msgspec.Struct, frozen=True):
    """What one source rank, named by its index, sends to a destination rank. Hashable: plans are cached by it."""

    source_index: int
    parts: tuple[ComponentHeads, ...]


@dataclass(frozen=True)
class _Task:
    """Heads of one component that ranks with equal layers and token shares have to send between them."""

    group: str
    wanted: Component
    share: TokenShare
    replicas: Mapping[Ranges, Sequence[int]]
    """Source ranks by the wanted heads that they hold."""

    @property
    def choice(self) -> int:
        """How many ranks there are to choose from, where there are fewest."""
        return min(map(len, self.replicas.values()), default=0)


def choose_sources(sources: Sequence[Shard], destination: Shard, selector: int) -> tuple[Assignment, ...]:
    """Choose for each layer, head and token share that the destination needs the one source rank that sends it.

    As few ranks as possible are chosen: one that sends something else anyway comes first. Among ranks that hold the
    same, ``selector`` (not negative, the same on both sides for one request, such as a stable hash of its id) and the
    destination's rank choose, so that requests and ranks spread evenly. Equal arguments give equal assignments.

    Raises :class:`PlanError` when the peers do not fit or no source holds what is needed (``missing-source``).

    >>> from kvferry.layout.named_layouts import NamedLayout
    >>> from kvferry.testing.dense_shards import shard_for
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
    chosen: dict[int, list[ComponentHeads]] = {}
    # What only few ranks hold comes first, so that what many hold comes from one of these.
    for task in sorted(_tasks(sources, destination), key=lambda task: task.choice):
        for index, heads in _cover(task, turn, chosen):
            chosen.setdefault(index, []).append(ComponentHeads(task.group, task.wanted.name, heads))
    return tuple(Assignment(index, _merged(parts, destination)) for index, parts in sorted(chosen.items()))


def _tasks(sources: Sequence[Shard], destination: Shard) -> Iterator[_Task]:
    for group in destination.groups:
        for stage in _stages(sources, group):
            held = [(index, found) for index in stage if (found := sources[index].group(group.name))]
            check_groups(held, sources, group, destination)
            check_shares([found for _, found in held], group)
            shares = sorted(
                {(found.token_share.rank, found.token_share) for _, found in held}, key=lambda pair: pair[0]
            )
            for _, share in shares:
                if share.overlaps(group.token_share):
                    holders = [(index, found) for index, found in held if found.token_share == share]
                    tasks = [_task(group, component, share, holders) for component in group.components]
                    # Padding that no source has alike is nobody's task.
                    yield from (task for task in tasks if task.replicas or not task.wanted.is_padding)


def _task(group: CacheGroup, wanted: Component, share: TokenShare, held: Sequence[tuple[int, CacheGroup]]) -> _Task:
    replicas: dict[Ranges, list[int]] = {}
    for index, found in held:
        component = next((part for part in found.components if part.is_like(wanted)), None)
        overlap = common(component.heads, wanted.heads) if component is not None else ()
        if overlap:
            replicas.setdefault(overlap, []).append(index)
    return _Task(group.name, wanted, share, replicas)


def _stages(sources: Sequence[Shard], group: CacheGroup) -> list[list[int]]:
    """Return the sources that hold layers of the group, together where they hold the same layers."""
    stages: dict[frozenset[str], list[int]] = {}
    for index, source in enumerate(sources):
        found = source.group(group.name)
        if found is not None and found.layers & group.layers:
            stages.setdefault(found.layers, []).append(index)
    return list(stages.values())


def _cover(task: _Task, turn: int, chosen: Container[int]) -> list[tuple[int, Ranges]]:
    """Cover the wanted heads greedily: always the ranks that hold most of what is left, one of them by turn."""
    left, cover = canonical(task.wanted.heads), []
    while left:
        best = max(task.replicas, key=lambda heads: (count(common(heads, left)), -heads[0].start), default=())
        sent = common(best, left)
        if not sent:
            raise _missing(task, left)
        # Fewest ranks: one that sends something else anyway is taken again.
        candidates = [index for index in task.replicas[best] if index in chosen] or task.replicas[best]
        cover.append((candidates[turn % len(candidates)], sent))
        left = without(left, sent)
    return cover


def _merged(parts: Sequence[ComponentHeads], destination: Shard) -> tuple[ComponentHeads, ...]:
    """Return the parts in the destination's order, one for each component."""
    heads: dict[tuple[str, str], Ranges] = {}
    for part in parts:
        # A rank belongs to one stage and has one share, so that its parts never name a component twice.
        heads[part.group, part.component] = part.heads
    order = [(group.name, component.name) for group in destination.groups for component in group.components]
    return tuple(ComponentHeads(*key, heads[key]) for key in order if key in heads)


def _missing(task: _Task, left: Ranges) -> PlanError:
    share = "" if task.share.is_whole else f" in {task.share!r}"
    return PlanError(
        Reason.MISSING_SOURCE,
        f"group {task.group!r}, component {task.wanted.name!r}: no source rank holds heads {list(left)} of "
        f"{task.wanted.total_heads}{share}.",
        "Name every rank of the source engine.",
    )


def match_layers(source: Component, destination: Component) -> Offsets:
    """Return rows of source and destination offset, one for each layer that both hold."""
    offsets = dict(zip(source.layers, source.layer_offsets, strict=True))
    held = zip(destination.layers, destination.layer_offsets, strict=True)
    rows = [(offsets[layer], offset) for layer, offset in held if layer in offsets]
    return np.array(rows, dtype=np.int64).reshape(-1, 2)
