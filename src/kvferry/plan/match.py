"""Assignment of source ranks to the heads that a destination rank needs, on global axes.

Layers and components are matched by name, heads by global index. Tokens need no match: they are one global axis, of
which each rank holds a share; ``block_pairs`` splits that share into blocks and slots. Caches between which no plan
exists are refused here, before any request arrives.
"""

import zlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import msgspec
import numpy as np

from kvferry.arrays import Offsets
from kvferry.errors import PlanError, Reason
from kvferry.layout.shard import Atom, CacheGroup, Component, HeadRange, Shard, TokenShare

Ranges = tuple[HeadRange, ...]
"""Ascending ranges with gaps between them: a canonical form, so that equal sets are equal values."""


class HeadOverlap(NamedTuple):
    """Heads that source and destination hold: the local index of the first head in each, and the number."""

    source_head: int
    destination_head: int
    num_heads: int


def canonical(heads: Sequence[HeadRange]) -> Ranges:
    """Return disjoint ranges, which may be in any order, as a set.

    >>> canonical([HeadRange(4, 6), HeadRange(0, 2), HeadRange(2, 3)])
    (0:3, 4:6)
    """
    ranges: list[HeadRange] = []
    for held in sorted(heads, key=lambda held: held.start):
        if ranges and ranges[-1].end == held.start:
            ranges[-1] = HeadRange(ranges[-1].start, held.end)
        else:
            ranges.append(held)
    return tuple(ranges)


def count(heads: Sequence[HeadRange]) -> int:
    """Return the number of heads in the ranges.

    >>> count([HeadRange(0, 2), HeadRange(5, 6)])
    3
    """
    return sum(len(held) for held in heads)


def common(left: Sequence[HeadRange], right: Sequence[HeadRange]) -> Ranges:
    """Return the intersection.

    >>> common([HeadRange(0, 4), HeadRange(6, 8)], [HeadRange(3, 7)])
    (3:4, 6:7)
    """
    bounds = [(max(one.start, other.start), min(one.end, other.end)) for one in left for other in right]
    return canonical([HeadRange(start, end) for start, end in bounds if start < end])


def without(left: Sequence[HeadRange], right: Sequence[HeadRange]) -> Ranges:
    """Return the heads of ``left`` that are not in ``right``.

    >>> without([HeadRange(0, 8)], [HeadRange(3, 4), HeadRange(6, 8)])
    (0:3, 4:6)
    """
    rest = list(left)
    for taken in right:
        before = [(held.start, min(held.end, taken.start)) for held in rest]
        bounds = before + [(max(held.start, taken.end), held.end) for held in rest]
        rest = [HeadRange(start, end) for start, end in bounds if start < end]
    return canonical(rest)


def match_heads(
    source: Sequence[HeadRange], destination: Sequence[HeadRange], wanted: Sequence[HeadRange]
) -> list[HeadOverlap]:
    """Return the local indices of the wanted heads in source and destination, as stretches of consecutive heads.

    >>> match_heads([HeadRange(0, 4)], [HeadRange(2, 8)], [HeadRange(0, 8)])
    [HeadOverlap(source_head=2, destination_head=0, num_heads=2)]
    """
    overlaps = []
    for source_head, sent in _local(source):
        for destination_head, received in _local(destination):
            for both in common(common([sent], [received]), wanted):
                local = source_head + both.start - sent.start, destination_head + both.start - received.start
                overlaps.append(HeadOverlap(*local, len(both)))
    return overlaps


def _local(heads: Sequence[HeadRange]) -> list[tuple[int, HeadRange]]:
    """Return each range with the local index of its first head."""
    counts = [0, *(len(held) for held in heads)]
    return [(int(first), held) for first, held in zip(np.cumsum(counts)[:-1], heads, strict=True)]


EVERY_RANK = "Name every rank of the source engine."


class ComponentHeads(msgspec.Struct, frozen=True):
    """Global heads of one component of one cache group."""

    group: str
    component: str
    heads: tuple[HeadRange, ...]


class Assignment(msgspec.Struct, frozen=True):
    """The heads that one source rank sends to a destination rank. Hashable, since plans are cached by assignment."""

    source_index: int
    components: tuple[ComponentHeads, ...]


@dataclass(frozen=True)
class _Need:
    """Heads of one component that the destination needs from source ranks with equal layers and token share."""

    group: str
    wanted: Component
    share: TokenShare
    replicas: Mapping[Ranges, Sequence[int]]
    """Source ranks by the wanted heads that they hold."""

    @property
    def num_candidates(self) -> int:
        """The smallest number of ranks that hold the same wanted heads."""
        return min(map(len, self.replicas.values()), default=0)


def selector_of(name: str) -> int:
    """Return the ``selector`` of a request, by a name that it has in both engines."""
    return zlib.crc32(name.encode())


def choose_sources(sources: Sequence[Shard], destination: Shard, selector: int) -> tuple[Assignment, ...]:
    """Choose one source rank for each layer, head and token share that the destination needs.

    The choice takes as few ranks as possible: a rank that sends other heads anyway comes first. Among ranks that hold
    the same heads, ``selector`` and the destination's rank choose, so that the load spreads evenly over requests and
    ranks. ``selector`` is not negative and equal in both engines for one request (:func:`selector_of`). Equal arguments
    give equal assignments.

    Raises :class:`PlanError` when the caches do not fit together or no source holds the needed heads
    (``missing-source``).

    >>> from kvferry.layout.named_layouts import NamedLayout
    >>> from kvferry.layout.dense import shard_for
    >>> def shard(tp_rank, tp_size):
    ...     return shard_for(layers=["0"], num_kv_heads=2, head_size=64, itemsize=2, block_size=16, num_blocks=10,
    ...         layout=NamedLayout.BHLNC, tp_rank=tp_rank, tp_size=tp_size)
    >>> replicated = [shard(rank, 4) for rank in range(4)]
    >>> [[a.source_index for a in choose_sources(replicated, shard(0, 1), selector)] for selector in (0, 1)]
    [[0, 2], [1, 3]]
    """
    if selector < 0:
        raise PlanError(Reason.INVALID_REQUEST, f"selector is {selector}.", "Use a non-negative hash.")
    _check_layers(sources, destination)
    # The number of replicas divides the number of ranks: the remainder keeps the balance and bounds the assignments.
    choice = (selector + destination.tp_rank) % len(sources)
    chosen: dict[int, list[ComponentHeads]] = {}
    # Heads with few candidates come first, so that their ranks also serve the heads with many.
    for need in sorted(_needs(sources, destination), key=lambda need: need.num_candidates):
        for index, heads in _cover(need, choice, chosen):
            chosen.setdefault(index, []).append(ComponentHeads(need.group, need.wanted.name, heads))
    return tuple(Assignment(index, _merged(components, destination)) for index, components in sorted(chosen.items()))


def _needs(sources: Sequence[Shard], destination: Shard) -> Iterator[_Need]:
    for group in destination.groups:
        for stage in _stages(sources, group):
            held = [(index, found) for index in stage if (found := sources[index].group(group.name))]
            for index, found in held:
                between = f"group {group.name!r} between {sources[index].rank_name} and {destination.rank_name}"
                _check_group(found, group, between)
            _check_shares([found for _, found in held], group)
            shares = sorted(
                {(found.token_share.rank, found.token_share) for _, found in held}, key=lambda pair: pair[0]
            )
            for _, share in shares:
                if share.overlaps(group.token_share):
                    members = [(index, found) for index, found in held if found.token_share == share]
                    needs = [_need(group, component, share, members) for component in group.components]
                    # Padding without equal padding at a source does not move.
                    yield from (need for need in needs if need.replicas or not need.wanted.is_padding)


def _need(group: CacheGroup, wanted: Component, share: TokenShare, held: Sequence[tuple[int, CacheGroup]]) -> _Need:
    replicas: dict[Ranges, list[int]] = {}
    for index, found in held:
        component = next((component for component in found.components if component.is_like(wanted)), None)
        overlap = common(component.heads, wanted.heads) if component is not None else ()
        if overlap:
            replicas.setdefault(overlap, []).append(index)
    return _Need(group.name, wanted, share, replicas)


def _stages(sources: Sequence[Shard], group: CacheGroup) -> list[list[int]]:
    """Return the indices of the sources that hold layers of the group, one list for each set of layers."""
    stages: dict[frozenset[str], list[int]] = {}
    for index, source in enumerate(sources):
        found = source.group(group.name)
        if found is not None and found.layers & group.layers:
            stages.setdefault(found.layers, []).append(index)
    return list(stages.values())


def _cover(need: _Need, choice: int, chosen: Container[int]) -> list[tuple[int, Ranges]]:
    """Cover the wanted heads greedily with the ranks that hold most of the remaining ones; ``choice`` selects among
    replicas.
    """
    left, cover = canonical(need.wanted.heads), []
    while left:
        best = max(need.replicas, key=lambda heads: (count(common(heads, left)), -heads[0].start), default=())
        sent = common(best, left)
        if not sent:
            raise _missing(need, left)

        candidates = [index for index in need.replicas[best] if index in chosen] or need.replicas[best]
        cover.append((candidates[choice % len(candidates)], sent))
        left = without(left, sent)
    return cover


def _merged(components: Sequence[ComponentHeads], destination: Shard) -> tuple[ComponentHeads, ...]:
    """Return the components in the destination's order."""
    # A rank has one stage and one token share, so each component occurs once.
    heads = {(component.group, component.component): component.heads for component in components}
    order = [(group.name, component.name) for group in destination.groups for component in group.components]
    return tuple(ComponentHeads(*key, heads[key]) for key in order if key in heads)


def _missing(need: _Need, left: Ranges) -> PlanError:
    share = "" if need.share.is_whole else f" in {need.share!r}"
    return PlanError(
        Reason.MISSING_SOURCE,
        f"group {need.group!r}, component {need.wanted.name!r}: no source rank holds heads {list(left)} of "
        f"{need.wanted.total_heads}{share}.",
        EVERY_RANK,
    )


def match_layers(source: Component, destination: Component) -> Offsets:
    """Return rows of source and destination offset, one for each common layer."""
    offsets = dict(zip(source.layers, source.layer_offsets, strict=True))
    held = zip(destination.layers, destination.layer_offsets, strict=True)
    rows = [(offsets[layer], offset) for layer, offset in held if layer in offsets]
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


# Caches between which no plan exists.

SAME_CACHE = "Serve the same model with the same --quantization, --dtype and --kv-cache-dtype on both engines."
SAME_LAYERS = (
    "Give both engines the same model, the same --speculative-config or none (a draft model has layers of its own), "
    "and --disable-hybrid-kv-cache-manager on both or on neither."
)


def _check_layers(sources: Sequence[Shard], destination: Shard) -> None:
    """Raise unless the sources hold the destination's groups and layers, each layer in one pipeline stage."""
    if not sources:
        _refuse(Reason.MISSING_SOURCE, "there are no source ranks.", EVERY_RANK)
    for group in destination.groups:
        stages = {found.layers for source in sources if (found := source.group(group.name))}
        if not stages:
            _refuse_groups(sources, destination)
        held = frozenset[str]().union(*stages)
        if group.layers - held:
            _refuse_layers(group, held, f"no source has layers {_some(group.layers - held)}")
        if destination.pp_size == 1 and held - group.layers:
            _refuse_layers(group, held, f"only the sources have layers {_some(held - group.layers)}")
        if sum(map(len, stages)) != len(held):
            _refuse(
                Reason.LAYER_MISMATCH, f"group {group.name!r}: source ranks hold overlapping, unequal sets of layers."
            )
    unknown = {group.name for source in sources for group in source.groups}
    unknown -= {group.name for group in destination.groups}
    if destination.pp_size == 1 and unknown:
        _refuse_groups(sources, destination)


def _check_shares(held: Sequence[CacheGroup], wanted: CacheGroup) -> None:
    """Raise unless the sources, which hold the same layers, split tokens alike and hold all needed tokens."""
    splits = {group.token_share.split for group in held}
    if len(splits) > 1:
        _refuse(
            Reason.GROUP_MISMATCH,
            f"group {wanted.name!r}: the sources split tokens by different (size, interleave) {sorted(splits)}.",
        )
    size, interleave = splits.pop()
    ranks = {group.token_share.rank for group in held}
    shares = (TokenShare(rank, size, interleave) for rank in range(size) if rank not in ranks)
    missing = next((share for share in shares if share.overlaps(wanted.token_share)), None)
    if missing is not None:
        _refuse(
            Reason.MISSING_SOURCE,
            f"group {wanted.name!r}: no source rank holds the tokens of {missing!r}.",
            EVERY_RANK,
        )


def _check_group(source: CacheGroup, destination: CacheGroup, between: str) -> None:
    """Raise unless both groups have the same components, scales and kind."""
    if source.kind is not destination.kind:
        _refuse(
            Reason.GROUP_MISMATCH, f"{between}: cache kinds {source.kind} and {destination.kind} differ.", SAME_LAYERS
        )
    if source.window != destination.window:
        windows = f"{source.window} and {destination.window}"
        _refuse(Reason.MODEL_MISMATCH, f"{between}: windows of {windows} tokens differ.")
    _check_scales(source, destination, between)
    components = {component.name: component for component in source.components if not component.is_padding}
    needed = [component for component in destination.components if not component.is_padding]
    wanted = {component.name for component in needed}
    if components.keys() != wanted:
        _refuse(
            Reason.SPLIT_ATOM,
            f"{between}: the components {sorted(components)} and {sorted(wanted)} differ.",
            "Describe K and V as separate components in both engines.",
        )
    for component in needed:
        where = f"{between}, component {component.name!r}"
        _check_component(components[component.name], component, where)
        if component.atom is Atom.PAGE:
            _check_pages(source, destination, where)


def _check_pages(source: CacheGroup, destination: CacheGroup, where: str) -> None:
    if source.block_size != destination.block_size:
        _refuse(
            Reason.BLOCK_SIZE_MISMATCH,
            f"{where}: packed pages of {source.block_size} and {destination.block_size} tokens differ.",
            "Start both engines with the same --block-size.",
        )
    if source.token_share.split != destination.token_share.split:
        _refuse(
            Reason.SPLIT_ATOM,
            f"{where}: packed pages hold {source.token_share!r} and {destination.token_share!r} of the tokens.",
            "Start both engines with one context-parallel size and interleave.",
        )


def _check_scales(source: CacheGroup, destination: CacheGroup, between: str) -> None:
    """Raise unless the common layers are quantised with the same scales."""
    shared = source.layers & destination.layers
    sent, received = (
        {(scale.layer, scale.tensor): scale.value for scale in group.scales if scale.layer in shared}
        for group in (source, destination)
    )
    differing = min(
        (name for name in sent.keys() | received.keys() if sent.get(name) != received.get(name)), default=None
    )
    if differing is not None:
        layer, tensor = differing
        values = f"{sent.get(differing, 'none')} and {received.get(differing, 'none')}"
        _refuse(Reason.MODEL_MISMATCH, f"{between}: layer {layer!r} has {tensor!r} scales of {values}.")


def _check_component(source: Component, destination: Component, where: str) -> None:
    for what, reason, sent, received in (
        ("numbers of heads", Reason.MODEL_MISMATCH, source.total_heads, destination.total_heads),
        ("item sizes in bytes", Reason.DTYPE_MISMATCH, source.itemsize, destination.itemsize),
        ("numbers of channels", Reason.HEAD_SIZE_MISMATCH, source.num_channels, destination.num_channels),
    ):
        if sent != received:
            _refuse(reason, f"{where}: {what} {sent} and {received} differ.")
    if source.packing != destination.packing:
        _refuse(
            Reason.PACKING_MISMATCH,
            f"{where}: pages are packed as {source.packing or 'plain'!r} and {destination.packing or 'plain'!r}.",
            "Run both engines on one kind of processor with the same --dtype and --block-size.",
        )


def _refuse(reason: Reason, message: str, remedy: str = SAME_CACHE) -> NoReturn:
    raise PlanError(reason, message, remedy)


def _refuse_groups(sources: Sequence[Shard], destination: Shard) -> NoReturn:
    sent = sorted({group.name for source in sources for group in source.groups})
    received = sorted(group.name for group in destination.groups)
    _refuse(
        Reason.GROUP_MISMATCH, f"the sources have cache groups {sent}, the destination has {received}.", SAME_LAYERS
    )


def _refuse_layers(group: CacheGroup, held: frozenset[str], what: str) -> NoReturn:
    counts = f"the sources have {len(held)}, the destination has {len(group.layers)}"
    _refuse(Reason.LAYER_MISMATCH, f"group {group.name!r}: {what} ({counts}).", SAME_LAYERS)


def _some(names: Iterable[str]) -> str:
    """Return the first names of many."""
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")
