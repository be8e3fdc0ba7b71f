"""What source and destination have in common: layers, components, heads, and the tokens of a request.

Layers and components are matched by name, heads by global index: :func:`choose_sources` assigns source ranks to the
heads that a destination rank needs. Caches between which no plan exists are refused there, before any request arrives.

Tokens are one global axis, of which each rank holds a share. Blocks and shares of both sides cut the tokens of a
request; :func:`block_pairs` pairs what is left.
"""

import zlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.arrays import Flags, Integers, Offsets
from kvferry.errors import PlanError, Reason
from kvferry.layout.shard import Atom, CacheGroup, CacheKind, Component, HeadRange, Shard, TokenShare

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
    >>> from kvferry.models.groups import AttentionCache, RankMemory, form_groups, model_shard
    >>> groups = form_groups(dict.fromkeys("0", AttentionCache(num_kv_heads=2, head_size=64, itemsize=2)))
    >>> def shard(rank, size):
    ...     memory = RankMemory(layout=NamedLayout.BHLNC, block_size=16, num_blocks=10, tp_rank=rank, tp_size=size)
    ...     return model_shard(groups, frozenset("0"), memory)
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


# The tokens of a request.

SAMPLE_BLOCKS = 3

BlockIds = Sequence[int] | npt.NDArray[np.integer]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class GroupBlocks:
    """Tokens ``first_token`` up to ``last_token`` (half-open, global) of one request in one cache group.

    Each list of ids names consecutive blocks in token order; its first block begins at the list's ``*_first_token``. A
    position of a list holds the tokens of one block times the context-parallel size; where that size is above 1, a list
    begins at a multiple of these tokens. Blocks before the first token, such as a sliding window's null blocks, are
    never read or written. A state is "token" 0 to 1 of one block in each engine.

    A decode engine that already has 32 tokens names only the blocks to fill:

    >>> GroupBlocks(group="full", first_token=32, last_token=50, source_block_ids=[9, 8, 7, 6],
    ...     destination_block_ids=[4, 3], destination_first_token=32).num_tokens
    18
    """

    group: str
    first_token: int
    last_token: int
    source_block_ids: BlockIds
    destination_block_ids: BlockIds
    source_first_token: int = 0
    destination_first_token: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "source_block_ids", _as_ids(self.source_block_ids, self.group))
        object.__setattr__(self, "destination_block_ids", _as_ids(self.destination_block_ids, self.group))
        begin = max(self.source_first_token, self.destination_first_token)
        if (
            min(self.source_first_token, self.destination_first_token) < 0
            or not begin <= self.first_token <= self.last_token
        ):
            raise PlanError(
                Reason.INVALID_REQUEST,
                f"group {self.group!r}: the request has tokens {self.first_token} to {self.last_token}, its blocks "
                f"begin at token {self.source_first_token} (source) and {self.destination_first_token} (destination).",
                "Name the blocks from the first requested token on.",
            )

    @property
    def source_ids(self) -> Integers:
        """The source's block ids as an array."""
        return np.asarray(self.source_block_ids)

    @property
    def destination_ids(self) -> Integers:
        """The destination's block ids as an array."""
        return np.asarray(self.destination_block_ids)

    @property
    def num_tokens(self) -> int:
        """The number of requested tokens."""
        return self.last_token - self.first_token


def refuse_incomplete(requests: Sequence[GroupBlocks], destination: Shard) -> None:
    """Raise unless the requests name every group that the destination holds.

    An engine takes tokens without their state for a whole cache. So a request also names a group of which it wants no
    tokens, with ``first_token == last_token``, and a request for tokens includes the state.
    """
    wanted = {group.name: 0 for group in destination.groups}
    named = {blocks.group for blocks in requests}
    if unknown := sorted(named - wanted.keys()):
        raise PlanError(
            Reason.INVALID_REQUEST, f"cache group {unknown[0]!r} does not exist; there are {sorted(wanted)}."
        )
    if requests and (missing := sorted(wanted.keys() - named)):
        raise PlanError(
            Reason.INVALID_REQUEST,
            f"cache group {missing[0]!r} of {destination.rank_name} is left out of the request.",
            "Name every group; for no tokens, set the last token to the first.",
        )
    for blocks in requests:
        wanted[blocks.group] += blocks.num_tokens
    states = [group.name for group in destination.groups if group.kind is CacheKind.STATE]
    without_state = next((name for name in states if not wanted[name]), None)
    if without_state is not None and any(wanted.values()):
        raise PlanError(
            Reason.INVALID_REQUEST,
            f"the request has tokens, but not the state of group {without_state!r}.",
            "Name the block of the last state in each engine.",
        )


def of_rank(requests: Sequence[GroupBlocks], rank: Shard) -> Sequence[GroupBlocks]:
    """Return the requests of the rank's groups: a pipeline stage may hold no layer of a cache group."""
    if rank.pp_size == 1:
        return requests
    held = {group.name for group in rank.groups}
    return [blocks for blocks in requests if blocks.group in held]


def first_token_to_move(
    *,
    num_computed_tokens: int,
    first_token: int,
    window: int,
    source_block_size: int,
    destination_block_size: int,
) -> int:
    """Return the first token to move of a group that keeps only a window.

    ``num_computed_tokens`` counts the prompt's tokens that the decode engine treats as computed, not the tokens that
    fit into its list of blocks: the list may end with look-ahead blocks of speculative decoding, and counting those
    would move the window past tokens that the decode engine still needs. ``first_token`` is the first token that the
    decode engine lacks. Block sizes are in global tokens: the tokens of a block times the context-parallel size.

    The next token attends to itself and to the ``window - 1`` tokens before it, so no earlier token is needed. The
    result is rounded down to the first block that exists in both engines: an engine frees only blocks that lie wholly
    before the window. Whole blocks thus stay whole at no cost, and no null block is reached.

    >>> clip = dict(first_token=0, window=100, source_block_size=16, destination_block_size=16)
    >>> first_token_to_move(num_computed_tokens=1000, **clip)
    896
    >>> first_token_to_move(num_computed_tokens=50, **clip)
    0
    >>> first_token_to_move(num_computed_tokens=1000, **{**clip, "destination_block_size": 64})
    896
    """
    needed = max(first_token, num_computed_tokens - window + 1)
    if needed >= num_computed_tokens:
        return num_computed_tokens
    real = max(needed // size * size for size in (source_block_size, destination_block_size))
    return max(real, first_token)


def sample_requests(sources: Sequence[Shard], destination: Shard) -> list[GroupBlocks]:
    """Return requests of up to ``SAMPLE_BLOCKS`` blocks of each group that the destination holds.

    A planner proves its plans with this sample before any request waits. Groups overlay each other in memory, so no two
    groups get the same block id. Ids descend. Raises :class:`PlanError`: ``group-mismatch`` where no source holds a
    group, ``unsupported`` for fewer blocks than groups.
    """
    held = [_held_by_all(sources, group) for group in destination.groups]
    fewest = min(min(group.num_blocks for group in groups) for groups in held)
    num_blocks = min(SAMPLE_BLOCKS, fewest // len(held))
    if num_blocks == 0:
        what = f"{len(held)} cache groups share {fewest} blocks, too few for a proof with separate blocks for each."
        raise PlanError(Reason.UNSUPPORTED, what, "Give the KV caches more memory.")
    return [_request(groups, turn * num_blocks, num_blocks) for turn, groups in enumerate(held)]


def _held_by_all(sources: Sequence[Shard], wanted: CacheGroup) -> list[CacheGroup]:
    held = [found for source in sources if (found := source.group(wanted.name))]
    if not held:
        raise PlanError(
            Reason.GROUP_MISMATCH,
            f"the prefill engine has no cache group {wanted.name!r}.",
            SAME_LAYERS,
        )
    return [wanted, *held]


def _request(groups: Sequence[CacheGroup], first_id: int, num_blocks: int) -> GroupBlocks:
    is_state = groups[0].kind is CacheKind.STATE
    num_blocks = 1 if is_state else num_blocks
    ids = range(first_id + num_blocks - 1, first_id - 1, -1)
    return GroupBlocks(
        group=groups[0].name,
        first_token=0,
        last_token=num_blocks * min(group.tokens_per_position for group in groups),
        source_block_ids=ids,
        destination_block_ids=ids,
    )


def _as_ids(ids: BlockIds, group: str) -> Integers:
    """Return a copy as int64. Raises for anything but a flat list of integers."""
    array = np.array(ids)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise PlanError(
            Reason.INVALID_REQUEST,
            f"group {group!r}: the block ids have type {array.dtype} and shape {array.shape}.",
            "Pass block ids as a flat list of integers.",
        )
    return array.astype(np.int64)


class TokenRun(NamedTuple):
    """Consecutive tokens within one block of the source and one of the destination: the first slots, the number."""

    source_slot: int
    destination_slot: int
    num_tokens: int


Phase = tuple[TokenRun, ...]
"""All tokens that one pair of blocks has in common. Most requests have one phase, some a few."""


class BlockPairs(NamedTuple):
    """Pairs of source and destination blocks with the same phase."""

    phase: Phase
    source_blocks: Integers
    destination_blocks: Integers


def block_pairs(blocks: GroupBlocks, source: CacheGroup, destination: CacheGroup) -> list[BlockPairs]:
    """Cut the tokens that source and destination hold at the block boundaries of both; group the pairs by phase.

    Where block sizes, token shares and slots agree, a partly filled last block moves whole: the request owns the block
    in both engines, and whole pages need only one phase and make the longest runs.

    Raises :class:`PlanError` (``invalid-request``) for tokens outside the blocks and for unknown ids.
    """
    _check_request(blocks, source, destination)
    first, last = blocks.first_token, blocks.last_token
    if first == last:
        return []
    tokens_each = source.tokens_per_position
    apart = (blocks.source_first_token - blocks.destination_first_token) % tokens_each
    alike = source.block_size == destination.block_size and source.token_share == destination.token_share
    if not alike or apart:
        return _in_phases(blocks, last, source, destination)
    last += -(last - blocks.source_first_token) % tokens_each
    if (first - blocks.source_first_token) % tokens_each:
        return _in_phases(blocks, last, source, destination)
    starts = np.arange(first, last, tokens_each, dtype=np.int64)
    source_positions = (starts - blocks.source_first_token) // tokens_each
    destination_positions = (starts - blocks.destination_first_token) // tokens_each
    return [
        BlockPairs(
            (TokenRun(0, 0, source.block_size),),
            _ids("source", source_positions, blocks.source_ids, source),
            _ids("destination", destination_positions, blocks.destination_ids, destination),
        )
    ]


def refuse_twice(requests: Sequence[GroupBlocks], destination: CacheGroup) -> None:
    """Raise unless the requests fill each destination block at most once."""
    filled = np.sort(np.concatenate([_filled_blocks(blocks, destination.tokens_per_position) for blocks in requests]))
    twice = filled[1:][filled[1:] == filled[:-1]]
    if len(twice):
        raise PlanError(
            Reason.INVALID_REQUEST,
            f"group {destination.name!r}: destination block {int(twice[0])} would be filled twice.",
            "Name each destination block once.",
        )


def _filled_blocks(blocks: GroupBlocks, tokens_each: int) -> Integers:
    """Return the destination blocks that hold the request's tokens."""
    if blocks.num_tokens == 0:
        return blocks.destination_ids[:0]
    first = (blocks.first_token - blocks.destination_first_token) // tokens_each
    last = (blocks.last_token - 1 - blocks.destination_first_token) // tokens_each
    return blocks.destination_ids[first : last + 1]


def _check_request(blocks: GroupBlocks, source: CacheGroup, destination: CacheGroup) -> None:
    if destination.kind is CacheKind.STATE and blocks.num_tokens:
        lists = len(blocks.source_ids), len(blocks.destination_ids)
        if (blocks.first_token, blocks.last_token, *lists) != (0, 1, 1, 1):
            raise PlanError(
                Reason.INVALID_REQUEST,
                f"group {blocks.group!r} holds states: the request has tokens {blocks.first_token} to "
                f"{blocks.last_token} of {lists[0]} source blocks and {lists[1]} destination blocks.",
                "Request token 0 to 1 and name the one block of the last state in each engine.",
            )
    for side, group, begin in (
        ("source", source, blocks.source_first_token),
        ("destination", destination, blocks.destination_first_token),
    ):
        tokens_each = group.tokens_per_position
        if not group.token_share.is_whole and begin % tokens_each:
            raise PlanError(
                Reason.INVALID_REQUEST,
                f"group {blocks.group!r}: the {side} blocks begin at token {begin}, no multiple of {tokens_each}.",
                "Begin the list with a block that begins on the first context-parallel rank.",
            )


class _TokenRuns(NamedTuple):
    """Runs of tokens within one block of the source and one of the destination, in token order."""

    source_position: Integers
    source_slot: Integers
    destination_position: Integers
    destination_slot: Integers
    num_tokens: Integers


def _in_phases(blocks: GroupBlocks, last: int, source: CacheGroup, destination: CacheGroup) -> list[BlockPairs]:
    runs = _token_runs(blocks, last, source, destination)
    if not len(runs.num_tokens):
        return []
    first_of_pair = _changes(runs.source_position, runs.destination_position)
    starts = np.flatnonzero(first_of_pair)
    source_blocks = _ids("source", runs.source_position[starts], blocks.source_ids, source)
    destination_blocks = _ids("destination", runs.destination_position[starts], blocks.destination_ids, destination)
    phases, phase_of_pair = _phases(runs, first_of_pair, starts)
    order = np.argsort(phase_of_pair, kind="stable")
    members = np.split(order, np.cumsum(np.bincount(phase_of_pair))[:-1])
    return [
        BlockPairs(phase, source_blocks[member], destination_blocks[member])
        for phase, member in zip(phases, members, strict=True)
    ]


def _phases(runs: _TokenRuns, first_of_pair: Flags, starts: Integers) -> tuple[list[Phase], Integers]:
    """Return the distinct phases of the pairs of blocks that begin at ``starts``, and each pair's index into them."""
    pair = np.cumsum(first_of_pair) - 1
    within = np.arange(len(pair), dtype=np.int64) - starts[pair]
    columns = np.stack((runs.source_slot, runs.destination_slot, runs.num_tokens), axis=1)
    table = np.zeros((len(starts), int(within.max()) + 1, 3), dtype=np.int64)
    table[pair, within] = columns
    distinct, phase_of_pair = np.unique(table.reshape(len(starts), -1), axis=0, return_inverse=True)
    # Pairs with fewer runs than others end in runs of no tokens.
    rows = distinct.reshape(len(distinct), -1, 3).tolist()
    return [tuple(TokenRun(*run) for run in row if run[2]) for row in rows], phase_of_pair.reshape(-1)


def _token_runs(blocks: GroupBlocks, last: int, source: CacheGroup, destination: CacheGroup) -> _TokenRuns:
    """Return the longest runs of tokens that both source and destination hold."""
    sides = ((source, blocks.source_first_token), (destination, blocks.destination_first_token))
    starts = _run_starts(sides, blocks.first_token, last)
    lengths = np.diff(starts, append=last)
    held = np.logical_and.reduce([_holds(group, starts) for group, _ in sides])
    starts, lengths = starts[held], lengths[held]
    (source_position, source_slot), (destination_position, destination_slot) = (
        _locate(group, starts - begin) for group, begin in sides
    )
    runs = _TokenRuns(source_position, source_slot, destination_position, destination_slot, lengths)
    both_split = not source.token_share.is_whole and not destination.token_share.is_whole
    return _join(runs) if both_split and len(lengths) else runs


def _join(runs: _TokenRuns) -> _TokenRuns:
    """Join runs that are consecutive in the blocks of both source and destination, though not on the token axis."""
    ends = runs.source_slot + runs.num_tokens, runs.destination_slot + runs.num_tokens
    breaks = _changes(runs.source_position, runs.destination_position)
    breaks[1:] |= (ends[0][:-1] != runs.source_slot[1:]) | (ends[1][:-1] != runs.destination_slot[1:])
    starts = np.flatnonzero(breaks)
    places = [column[starts] for column in runs[:4]]
    return _TokenRuns(places[0], places[1], places[2], places[3], np.add.reduceat(runs.num_tokens, starts))


def _changes(left: Integers, right: Integers) -> Flags:
    """Return which rows differ from the row before in either column; the first row counts as different."""
    changed = np.ones(len(left), dtype=np.bool_)
    changed[1:] = (np.diff(left) != 0) | (np.diff(right) != 0)
    return changed


def _run_starts(sides: Sequence[tuple[CacheGroup, int]], first: int, last: int) -> Integers:
    """Return the first token of each run: the request's first token, and every later boundary of a block or share."""
    boundaries = [np.array([first], dtype=np.int64)]
    for group, begin in sides:
        step = group.block_size if group.token_share.is_whole else group.token_share.interleave
        boundaries.append(np.arange(first + -(first - begin) % step, last, step, dtype=np.int64))
    return np.unique(np.concatenate(boundaries))


def _holds(group: CacheGroup, tokens: Integers) -> Flags:
    share = group.token_share
    return np.equal(tokens // share.interleave % share.size, share.rank)


def _locate(group: CacheGroup, tokens: Integers) -> tuple[Integers, Integers]:
    """Return position in the list of blocks and slot of tokens that are counted from the list's first token."""
    share = group.token_share
    local = tokens // (share.interleave * share.size) * share.interleave + tokens % share.interleave
    position, slot = np.divmod(local, group.block_size)
    return position, slot


def _ids(side: str, positions: Integers, ids: Integers, group: CacheGroup) -> Integers:
    """Return the block ids at ascending positions of a list."""
    first, last = int(positions[0]), int(positions[-1])
    if last >= len(ids):
        raise PlanError(
            Reason.INVALID_REQUEST,
            f"group {group.name!r}: the tokens need {last + 1} {side} blocks, the request names {len(ids)}.",
            "Name every block that the request fills.",
        )
    used = ids[first : last + 1]
    if int(used.min()) < 0 or int(used.max()) >= group.num_blocks:
        wrong = used[(used < 0) | (used >= group.num_blocks)][0]
        raise PlanError(
            Reason.INVALID_REQUEST,
            f"group {group.name!r}: {side} block {wrong} does not exist; there are {group.num_blocks}.",
            "Name blocks of the engine that the plan is for.",
        )
    return used[positions - first]
