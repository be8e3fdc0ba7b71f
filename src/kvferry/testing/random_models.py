"""Random models and the memory of their ranks, for the strategies: every kind of group, several to a shard.

Details of a layout come from a seeded generator; what is worth shrinking is drawn by
:mod:`kvferry.testing.strategies`.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvferry.layout.component import Atom, Component, HeadRange, heads_of_rank
from kvferry.layout.group import CacheGroup, CacheKind, TokenShare
from kvferry.layout.shard import Region, Shard
from kvferry.layout.states import (
    ConvOrder,
    ConvSegment,
    StatePages,
    conv_components,
    gated_delta_segments,
    mamba1_segments,
    mamba2_segments,
    padding_components,
    recurrent_component,
)

PACKING = "kernel:packed"


@dataclass(frozen=True)
class Part:
    """A component of attention: what of it each head and token keeps."""

    name: str
    num_channels: int
    itemsize: int


@dataclass(frozen=True)
class GroupModel:
    """A cache group of a model, whatever the engine. ``num_heads`` are KV heads, or those of a recurrent state."""

    name: str
    kind: CacheKind
    layers: tuple[str, ...]
    num_heads: int
    parts: tuple[Part, ...]
    window: int = 0
    packed: bool = False
    family: str = ""
    """Of a state: ``mamba1``, ``mamba2``, ``delta``. The parts of a state are the convolution's and the recurrent."""

    def fits(self, tp_size: int) -> bool:
        """Return whether so many ranks can share the group out."""
        if self.kind is CacheKind.STATE:
            return self.num_heads % tp_size == 0
        return self.kind is CacheKind.MLA or max(self.num_heads, tp_size) % min(self.num_heads, tp_size) == 0


@dataclass(frozen=True)
class RankShape:
    """What a rank is: its layers, its place among the tensor-parallel ranks, and of each group blocks and tokens."""

    layers: frozenset[str]
    tp_rank: int
    tp_size: int
    block_sizes: dict[str, int]
    shares: dict[str, TokenShare]


@dataclass(frozen=True)
class EngineLayout:
    """How an engine lays out its groups.

    ``rows``: a block's bytes together. ``slots``: a layer's together, in pages of one size. In both, a rank's groups
    overlay each other. ``apart``: each group in a region of its own.
    """

    placement: str
    num_blocks: int
    seed: int


def rank_shard(
    model: Sequence[GroupModel], shape: RankShape, layout: EngineLayout, base_address: int, **ranks: int
) -> Shard:
    """Return the shard of one rank. Ranks of equal seeds lay out their groups alike."""
    generator = random.Random(layout.seed)
    drafts = [(group, draft) for group in model if (draft := _draft(group, shape, layout))]
    stride = max(draft.num_bytes for _, draft in drafts) + generator.choice((0, 0, 3, 16))
    groups, lengths = [], [0] * (len(drafts) if layout.placement == "apart" else 1)
    for index, (group, draft) in enumerate(drafts):
        region = index % len(lengths)
        parts, length = _place(draft, layout, stride, region)
        lengths[region] = max(lengths[region], length)
        groups.append(_group(group, shape, layout.num_blocks, parts))
    begins = [base_address + sum(lengths[:index]) for index in range(len(lengths))]
    regions = tuple(Region(begin, length) for begin, length in zip(begins, lengths, strict=True))
    return Shard(regions=regions, groups=tuple(groups), **ranks)


def _group(model: GroupModel, shape: RankShape, num_blocks: int, parts: Sequence[Component]) -> CacheGroup:
    return CacheGroup(
        name=model.name,
        kind=model.kind,
        block_size=shape.block_sizes[model.name],
        num_blocks=num_blocks,
        components=tuple(parts),
        window=model.window,
        token_share=shape.shares[model.name],
    )


@dataclass(frozen=True)
class _Draft:
    """A group's components within one block (``rows``), one page (``slots``) or all memory (``apart``)."""

    parts: tuple[Component, ...]
    num_bytes: int
    is_state: bool


def _draft(model: GroupModel, shape: RankShape, layout: EngineLayout) -> _Draft | None:
    layers = [layer for layer in model.layers if layer in shape.layers]
    generator = random.Random(f"{layout.seed} {model.name}")
    generator.shuffle(layers)
    if not layers:
        return None
    axes = {"rows": "L", "slots": "", "apart": generator.choice(("LB", "BL"))}[layout.placement]
    counts = {"L": len(layers), "B": layout.num_blocks, "N": shape.block_sizes[model.name]}
    if model.kind is CacheKind.STATE:
        return _state_draft(model, shape, layers, axes, counts, generator)
    return _attention_draft(model, shape, layers, axes, counts, generator)


def _state_draft(
    model: GroupModel,
    shape: RankShape,
    layers: Sequence[str],
    axes: str,
    counts: dict[str, int],
    generator: random.Random,
) -> _Draft:
    conv, recurrent = model.parts
    segments = _segments(model, shape.tp_rank, shape.tp_size)
    held = heads_of_rank(model.num_heads, shape.tp_rank, shape.tp_size)
    conv_bytes = sum(len(segment.held) for segment in segments) * conv.num_channels * conv.itemsize
    gap = generator.choice((0, 0, 5))
    body = conv_bytes + gap + len(held) * recurrent.num_channels * recurrent.itemsize
    page = body + generator.choice((0, 2, 8))
    strides, num_bytes = _strides(axes, counts, page)
    pages = StatePages(
        layers=layers,
        layer_offsets=[index * strides.get("L", 0) for index in range(len(layers))],
        block_stride=strides.get("B", page),
    )
    order = generator.choice(list(ConvOrder))
    parts = conv_components(pages, segments, state_len=conv.num_channels, order=order, itemsize=conv.itemsize)
    state = recurrent_component(
        pages,
        held,
        model.num_heads,
        num_channels=recurrent.num_channels,
        itemsize=recurrent.itemsize,
        page_offset=conv_bytes + gap,
    )
    tail = padding_components(pages, body, page, shape.tp_rank, shape.tp_size) if generator.random() < 0.75 else ()
    return _Draft((*parts, state, *tail), num_bytes, is_state=True)


def _segments(model: GroupModel, tp_rank: int, tp_size: int) -> tuple[ConvSegment, ...]:
    if model.family == "mamba1":
        return mamba1_segments(model.num_heads, tp_rank, tp_size)
    if model.family == "mamba2":
        return mamba2_segments(model.num_heads * 2, 1, 3, tp_rank, tp_size)
    if model.family == "mamba2-groups":
        return mamba2_segments(model.num_heads * 2, model.num_heads, 2, tp_rank, tp_size)
    return gated_delta_segments(model.num_heads, 2, model.num_heads, 3, tp_rank, tp_size)


def _attention_draft(
    model: GroupModel,
    shape: RankShape,
    layers: Sequence[str],
    axes: str,
    counts: dict[str, int],
    generator: random.Random,
) -> _Draft:
    everywhere = model.kind is CacheKind.MLA
    total = 1 if everywhere else model.num_heads
    held = HeadRange(0, 1) if everywhere else heads_of_rank(total, shape.tp_rank, shape.tp_size)
    counts = {**counts, "H": len(held)}
    order = _shuffled(axes + ("H" if model.packed else "HN"), generator)
    cut = generator.randrange(len(order) + 1)
    outer, inner = order[:cut], order[cut:] + ("N" if model.packed else "")
    parts: list[tuple[Part, int, dict[str, int]]] = []
    begin = 0
    for part in model.parts:
        own = _shuffled(inner[:-1] if model.packed else inner + "C", generator)
        # A packing names the inside of a page, which is therefore alike on both engines.
        own += "" if not model.packed else "NC" if parts else "CN"
        strides, length = _strides(own, {**counts, "C": part.num_channels}, part.itemsize)
        parts.append((part, begin, strides))
        begin += length + generator.choice((0, 0, 0, 2))
    around, num_bytes = _strides(outer, counts, begin)
    components = [_component(part, first, {**around, **own}, layers, held, total, model) for part, first, own in parts]
    return _Draft(tuple(components), num_bytes, is_state=False)


def _component(
    part: Part,
    first: int,
    strides: dict[str, int],
    layers: Sequence[str],
    held: HeadRange,
    total: int,
    model: GroupModel,
) -> Component:
    return Component(
        name=part.name,
        layers=tuple(layers),
        layer_offsets=tuple(first + index * strides.get("L", 0) for index in range(len(layers))),
        heads=(held,),
        total_heads=total,
        num_channels=part.num_channels,
        itemsize=part.itemsize,
        block_stride=strides.get("B", 1),
        head_stride=strides["H"],
        token_stride=strides["N"],
        channel_stride=strides["C"],
        atom=Atom.PAGE if model.packed else Atom.CONTENT,
        packing=PACKING if model.packed else "",
    )


def _strides(order: str, counts: dict[str, int], unit: int) -> tuple[dict[str, int], int]:
    """Return the stride of each axis of a dense array of such units, outermost first, and its length."""
    strides = {}
    for axis in reversed(order):
        strides[axis] = unit
        unit *= counts[axis]
    return strides, unit


def _shuffled(axes: str, generator: random.Random) -> str:
    return "".join(generator.sample(axes, len(axes)))


def _place(draft: _Draft, layout: EngineLayout, stride: int, region: int) -> tuple[list[Component], int]:
    """Return the components in their region and how far they reach."""
    if layout.placement == "apart":
        return [msgspec.structs.replace(part, region=region) for part in draft.parts], draft.num_bytes
    layer_stride = 0 if layout.placement == "rows" else layout.num_blocks * stride
    placed = []
    for part in draft.parts:
        offsets = tuple(offset + index * layer_stride for index, offset in enumerate(part.layer_offsets))
        token_stride = stride if draft.is_state else part.token_stride
        placed.append(
            msgspec.structs.replace(part, layer_offsets=offsets, block_stride=stride, token_stride=token_stride)
        )
    layers = len(draft.parts[0].layers) if layout.placement == "slots" else 1
    return placed, layers * layout.num_blocks * stride


def common_tp_sizes(model: Sequence[GroupModel], largest: int) -> list[int]:
    """Return the tensor-parallel sizes that fit every group.

    >>> heads = GroupModel("0", CacheKind.ATTENTION, ("0",), 6, (Part("kv", 2, 1),))
    >>> common_tp_sizes([heads], 8)
    [1, 2, 3, 6]
    """
    return [size for size in range(1, largest + 1) if all(group.fits(size) for group in model)]


def positions(tokens: int, block_size: int, share: TokenShare) -> int:
    """Return how many blocks so many tokens fill on each rank.

    >>> positions(33, 16, TokenShare(0, 2, 1))
    2
    """
    return math.ceil(tokens / (block_size * share.size))
