"""Components of Mamba and linear-attention states, from the shapes of one rank's page.

A page is what one layer keeps of one sequence: the last inputs of a short convolution, then a recurrent state.

* The convolution keeps ``state_len`` taps of each of its channels, and its channels are *segments* side by side: x, B
  and C for Mamba2, q, k and v for gated delta nets. A rank holds a part of each segment, never a part of their
  concatenation, so every segment is a component of its own, whose heads are the segment's global channels and whose
  channels are the taps. Taking a rank's channels for one range of the whole is what scrambles states between engines
  of different tensor-parallel sizes.
* The recurrent state is split by head.

Where vLLM 0.32 splits (``mamba_mixer2.py``, ``mamba_utils.py``): every segment evenly, with one exception. B and C
have one part a group. Where the groups do not divide by the ranks, there must be exactly one, and it is duplicated:
vLLM counts as many groups as ranks (``extra_groups_for_head_shards``) and loads the one group into each rank. More
groups than one that do not divide are refused by vLLM, and here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvferry.layout.component import Component, HeadRange, require
from kvferry.layout.dense import heads_of_rank

MAX_PADDING_SHARE = 0.25
"""Padding that is moved with a state, as a share of the state's bytes."""


class ConvOrder(StrEnum):
    """The memory order of a convolution's state in a page (``VLLM_SSM_CONV_STATE_LAYOUT``)."""

    SD = "SD"
    """``[state_len, dim]``: the channels of a tap lie together. What vLLM takes by default."""
    DS = "DS"
    """``[dim, state_len]``: the taps of a channel lie together."""


@dataclass(frozen=True, slots=True)
class ConvSegment:
    """A segment of a convolution's channels: the global ones this rank holds, of how many."""

    name: str
    held: HeadRange
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePages:
    """Where a group's pages lie: each layer's page of block 0 from the region's start, and bytes between blocks."""

    layers: Sequence[str]
    layer_offsets: Sequence[int]
    block_stride: int
    region: int = 0


def mamba1_segments(intermediate_size: int, tp_rank: int, tp_size: int) -> tuple[ConvSegment, ...]:
    """Return the one segment of Mamba1, also that of a short convolution.

    >>> mamba1_segments(64, 1, 2)
    (ConvSegment(name='x', held=32:64, total=64),)
    """
    return (_even("x", intermediate_size, 1, tp_rank, tp_size),)


def mamba2_segments(
    intermediate_size: int, num_groups: int, state_size: int, tp_rank: int, tp_size: int
) -> tuple[ConvSegment, ...]:
    """Return the segments of Mamba2: x, and B and C of ``num_groups * state_size`` channels.

    >>> [(part.name, part.held) for part in mamba2_segments(64, 2, 8, 1, 2)]
    [('x', 32:64), ('B', 8:16), ('C', 8:16)]
    >>> [(part.name, part.held) for part in mamba2_segments(64, 1, 8, 1, 2)]
    [('x', 32:64), ('B', 0:8), ('C', 0:8)]
    >>> mamba2_segments(64, 2, 8, 0, 4)
    Traceback (most recent call last):
        ...
    kvferry.errors.LayoutError: 2 groups cannot be dealt to 4 ranks. Use as many ranks as divide them. [invalid-layout]
    """
    what = f"{num_groups} groups cannot be dealt to {tp_size} ranks."
    require(num_groups == 1 or num_groups % tp_size == 0, what, "Use as many ranks as divide them.")
    grouped = [(name, num_groups, state_size) for name in ("B", "C")]
    if num_groups == 1:
        shared = tuple(ConvSegment(name, HeadRange(0, state_size), state_size) for name, _, _ in grouped)
    else:
        shared = tuple(_even(name, count, size, tp_rank, tp_size) for name, count, size in grouped)
    return (_even("x", intermediate_size, 1, tp_rank, tp_size), *shared)


def gated_delta_segments(
    num_key_heads: int, key_head_size: int, num_value_heads: int, value_head_size: int, tp_rank: int, tp_size: int
) -> tuple[ConvSegment, ...]:
    """Return the segments of a gated delta net (Qwen3-Next, Kimi): q, k and v.

    >>> [(part.name, part.held, part.total) for part in gated_delta_segments(2, 4, 4, 8, 1, 2)]
    [('q', 4:8, 8), ('k', 4:8, 8), ('v', 16:32, 32)]
    """
    return (
        _even("q", num_key_heads, key_head_size, tp_rank, tp_size),
        _even("k", num_key_heads, key_head_size, tp_rank, tp_size),
        _even("v", num_value_heads, value_head_size, tp_rank, tp_size),
    )


def _even(name: str, num_parts: int, part_size: int, tp_rank: int, tp_size: int) -> ConvSegment:
    """Split evenly, never replicate: vLLM divides here where it replicates attention heads."""
    require(num_parts >= tp_size, f"segment {name!r}: {num_parts} parts cannot be dealt to {tp_size} ranks.")
    held = heads_of_rank(num_parts, tp_rank, tp_size)
    return ConvSegment(name, HeadRange(held.start * part_size, held.end * part_size), num_parts * part_size)


def conv_components(
    pages: StatePages,
    segments: Sequence[ConvSegment],
    *,
    state_len: int,
    order: ConvOrder,
    itemsize: int,
) -> tuple[Component, ...]:
    """Return one component ``conv.NAME`` for each segment of a convolution.

    It begins with the page. ``state_len`` is the number of taps, in vLLM the kernel's size less one
    and the speculative tokens more.

    >>> pages = StatePages(layers=["0"], layer_offsets=[0], block_stride=4096)
    >>> conv_components(pages, mamba2_segments(64, 1, 8, 1, 2), state_len=3, order=ConvOrder.SD, itemsize=2)[1]
    conv.B LBNCH: base + 64 + b*4096 + n*4096 + c*96 + h*2
    """
    dim = sum(len(segment.held) for segment in segments)
    channel = itemsize if order is ConvOrder.SD else state_len * itemsize
    tap = dim * itemsize if order is ConvOrder.SD else itemsize
    components, first = [], 0
    for segment in segments:
        components.append(
            _component(
                pages,
                name=f"conv.{segment.name}",
                heads=(segment.held,),
                total_heads=segment.total,
                num_channels=state_len,
                itemsize=itemsize,
                head_stride=channel,
                channel_stride=tap,
                page_offset=first * channel,
            )
        )
        first += len(segment.held)
    return tuple(components)


def recurrent_component(
    pages: StatePages,
    held: HeadRange,
    total_heads: int,
    *,
    num_channels: int,
    itemsize: int,
    page_offset: int,
) -> Component:
    """Return a dense state ``[heads, num_channels]`` that begins ``page_offset`` bytes into a page.

    ``num_channels`` is everything that a head keeps: ``head_dim * state_size`` for Mamba2; Mamba1 has
    ``intermediate_size`` heads of ``state_size``.

    >>> pages = StatePages(layers=["0"], layer_offsets=[0], block_stride=4096)
    >>> recurrent_component(pages, HeadRange(2, 4), 4, num_channels=64, itemsize=4, page_offset=288)
    ssm LBNHC: base + 288 + b*4096 + n*4096 + h*256 + c*4
    """
    return _component(
        pages,
        name="ssm",
        heads=(held,),
        total_heads=total_heads,
        num_channels=num_channels,
        itemsize=itemsize,
        head_stride=num_channels * itemsize,
        channel_stride=itemsize,
        page_offset=page_offset,
    )


def padding_components(pages: StatePages, begin: int, end: int, tp_rank: int, tp_size: int) -> tuple[Component, ...]:
    """Return the padding from byte ``begin`` of a page to its ``end``: one component, or none.

    With it the pages of neighbouring layers are one run where both engines have the same. Of much padding there is
    none: its bytes would cost more than the runs that they join.

    >>> pages = StatePages(layers=["0"], layer_offsets=[0], block_stride=4096)
    >>> padding_components(pages, 4000, 4096, 1, 2)
    (padding LBNHC: base + 4000 + b*4096 + n*4096 + h*96 + c*1,)
    >>> padding_components(pages, 400, 4096, 1, 2), padding_components(pages, 4096, 4096, 1, 2)
    ((), ())
    """
    if not 0 < end - begin <= begin * MAX_PADDING_SHARE:
        return ()
    component = _component(
        pages,
        name="padding",
        heads=(HeadRange(tp_rank, tp_rank + 1),),
        total_heads=tp_size,
        num_channels=end - begin,
        itemsize=1,
        head_stride=end - begin,
        channel_stride=1,
        page_offset=begin,
        is_padding=True,
    )
    return (component,)


def _component(
    pages: StatePages,
    *,
    name: str,
    heads: tuple[HeadRange, ...],
    total_heads: int,
    num_channels: int,
    itemsize: int,
    head_stride: int,
    channel_stride: int,
    page_offset: int,
    is_padding: bool = False,
) -> Component:
    return Component(
        name=name,
        layers=tuple(pages.layers),
        layer_offsets=tuple(offset + page_offset for offset in pages.layer_offsets),
        heads=heads,
        total_heads=total_heads,
        num_channels=num_channels,
        itemsize=itemsize,
        block_stride=pages.block_stride,
        head_stride=head_stride,
        # A block is one state and so one "token".
        token_stride=pages.block_stride,
        channel_stride=channel_stride,
        region=pages.region,
        is_padding=is_padding,
    )
