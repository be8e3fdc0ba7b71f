"""Random models and the shards of their ranks, with several groups of every kind.

A seeded generator chooses the details of a layout; ``strategies.py`` draws the values worth shrinking.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvferry.layout.shard import (
    Atom,
    CacheGroup,
    CacheKind,
    Component,
    HeadRange,
    Region,
    Shard,
    TokenShare,
    heads_of_rank,
)
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
class ComponentShape:
    """The size of a component of attention for one head and token."""

    name: str
    num_channels: int
    itemsize: int


@dataclass(frozen=True)
class GroupModel:
    """A cache group of a model, the same for every engine. ``num_heads``: KV heads, or heads of a recurrent state."""

    name: str
    kind: CacheKind
    layers: tuple[str, ...]
    num_heads: int
    components: tuple[ComponentShape, ...]
    window: int = 0
    packed: bool = False
    family: str = ""
    """Of a state: ``mamba1``, ``mamba2``, ``mamba2-groups`` or ``delta``. Components: convolution, recurrent state."""

    def fits(self, tp_size: int) -> bool:
        """Return whether the group can be split over so many ranks."""
        if self.kind is CacheKind.STATE:
            return self.num_heads % tp_size == 0
        return self.kind is CacheKind.MLA or max(self.num_heads, tp_size) % min(self.num_heads, tp_size) == 0


@dataclass(frozen=True)
class RankShape:
    """A rank's layers, its tensor-parallel rank, and its block size and token share of each group."""

    layers: frozenset[str]
    tp_rank: int
    tp_size: int
    block_sizes: dict[str, int]
    shares: dict[str, TokenShare]


@dataclass(frozen=True)
class EngineLayout:
    """How an engine places its groups in memory.

    ``rows``: a block's bytes are contiguous. ``slots``: a layer's bytes are contiguous, in pages of one size. In both,
    a rank's groups overlay each other. ``apart``: each group has its own region.
    """

    placement: str
    num_blocks: int
    seed: int


def rank_shard(
    model: Sequence[GroupModel], shape: RankShape, layout: EngineLayout, base_address: int, **ranks: int
) -> Shard:
    """Return the shard of one rank. Ranks with equal seeds have equal layouts."""
    generator = random.Random(layout.seed)
    drafts = [(group, draft) for group in model if (draft := _draft(group, shape, layout))]
    stride = max(draft.num_bytes for _, draft in drafts) + generator.choice((0, 0, 3, 16))
    groups, lengths = [], [0] * (len(drafts) if layout.placement == "apart" else 1)
    for index, (group, draft) in enumerate(drafts):
        region = index % len(lengths)
        components, length = _place(draft, layout, stride, region)
        lengths[region] = max(lengths[region], length)
        groups.append(_group(group, shape, layout.num_blocks, components))
    begins = [base_address + sum(lengths[:index]) for index in range(len(lengths))]
    regions = tuple(Region(begin, length) for begin, length in zip(begins, lengths, strict=True))
    return Shard(regions=regions, groups=tuple(groups), **ranks)


def _group(model: GroupModel, shape: RankShape, num_blocks: int, components: Sequence[Component]) -> CacheGroup:
    return CacheGroup(
        name=model.name,
        kind=model.kind,
        block_size=shape.block_sizes[model.name],
        num_blocks=num_blocks,
        components=tuple(components),
        window=model.window,
        token_share=shape.shares[model.name],
    )


@dataclass(frozen=True)
class _Draft:
    """A group's components within one block (``rows``), one page (``slots``) or all memory (``apart``)."""

    components: tuple[Component, ...]
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
    conv, recurrent = model.components
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
    taps = conv_components(pages, segments, state_len=conv.num_channels, order=order, itemsize=conv.itemsize)
    state = recurrent_component(
        pages,
        held,
        model.num_heads,
        num_channels=recurrent.num_channels,
        itemsize=recurrent.itemsize,
        page_offset=conv_bytes + gap,
    )
    tail = padding_components(pages, body, page, shape.tp_rank, shape.tp_size) if generator.random() < 0.75 else ()
    return _Draft((*taps, state, *tail), num_bytes, is_state=True)


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
    placed: list[tuple[ComponentShape, int, dict[str, int]]] = []
    begin = 0
    for component in model.components:
        own = _shuffled(inner[:-1] if model.packed else inner + "C", generator)
        # A packing names the order inside a page, so both engines have the same order.
        own += "" if not model.packed else "NC" if placed else "CN"
        strides, length = _strides(own, {**counts, "C": component.num_channels}, component.itemsize)
        placed.append((component, begin, strides))
        begin += length + generator.choice((0, 0, 0, 2))
    around, num_bytes = _strides(outer, counts, begin)
    components = [
        _component(component, first, {**around, **own}, layers, held, total, model) for component, first, own in placed
    ]
    return _Draft(tuple(components), num_bytes, is_state=False)


def _component(
    component: ComponentShape,
    first: int,
    strides: dict[str, int],
    layers: Sequence[str],
    held: HeadRange,
    total: int,
    model: GroupModel,
) -> Component:
    return Component(
        name=component.name,
        layers=tuple(layers),
        layer_offsets=tuple(first + index * strides.get("L", 0) for index in range(len(layers))),
        heads=(held,),
        total_heads=total,
        num_channels=component.num_channels,
        itemsize=component.itemsize,
        block_stride=strides.get("B", 1),
        head_stride=strides["H"],
        token_stride=strides["N"],
        channel_stride=strides["C"],
        atom=Atom.PAGE if model.packed else Atom.CONTENT,
        packing=PACKING if model.packed else "",
    )


def _strides(order: str, counts: dict[str, int], unit: int) -> tuple[dict[str, int], int]:
    """Return the stride of each axis of a dense array of units, outermost axis first, and the array's length."""
    strides = {}
    for axis in reversed(order):
        strides[axis] = unit
        unit *= counts[axis]
    return strides, unit


def _shuffled(axes: str, generator: random.Random) -> str:
    return "".join(generator.sample(axes, len(axes)))


def _place(draft: _Draft, layout: EngineLayout, stride: int, region: int) -> tuple[list[Component], int]:
    """Return the components in their region and the bytes that they take."""
    if layout.placement == "apart":
        return [msgspec.structs.replace(component, region=region) for component in draft.components], draft.num_bytes
    layer_stride = 0 if layout.placement == "rows" else layout.num_blocks * stride
    placed = []
    for component in draft.components:
        offsets = tuple(offset + index * layer_stride for index, offset in enumerate(component.layer_offsets))
        token_stride = stride if draft.is_state else component.token_stride
        placed.append(
            msgspec.structs.replace(component, layer_offsets=offsets, block_stride=stride, token_stride=token_stride)
        )
    layers = len(draft.components[0].layers) if layout.placement == "slots" else 1
    return placed, layers * layout.num_blocks * stride


def common_tp_sizes(model: Sequence[GroupModel], largest: int) -> list[int]:
    """Return the tensor-parallel sizes that fit every group.

    >>> heads = GroupModel("0", CacheKind.ATTENTION, ("0",), 6, (ComponentShape("kv", 2, 1),))
    >>> common_tp_sizes([heads], 8)
    [1, 2, 3, 6]
    """
    return [size for size in range(1, largest + 1) if all(group.fits(size) for group in model)]


def positions(tokens: int, block_size: int, share: TokenShare) -> int:
    """Return the number of blocks that so many tokens fill on each rank.

    >>> positions(33, 16, TokenShare(0, 2, 1))
    2
    """
    return math.ceil(tokens / (block_size * share.size))
