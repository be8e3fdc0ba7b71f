"""Components of Mamba and linear-attention states, from the shapes of one rank's page.

A page holds one sequence's state of one layer: the last inputs of a short convolution, then a recurrent state.

* The convolution keeps ``state_len`` taps of each of its channels. The channels are *segments* side by side: x, B and C
  for Mamba2, q, k and v for gated delta nets. A rank holds a range of each segment, never a range of the
  concatenation, so every segment is a component of its own: the component's heads are the segment's global channels,
  the component's channels are the taps. A plan that takes a rank's channels for one range of the whole scrambles
  states between engines of different tensor-parallel sizes.
* The recurrent state is split by head.

vLLM 0.32 (``mamba_mixer2.py``, ``mamba_utils.py``) splits every segment evenly, with one exception. B and C have
``num_groups`` groups. Where the ranks do not divide the groups, there must be exactly one group, and every rank holds
it: vLLM counts as many groups as ranks (``extra_groups_for_head_shards``) and loads the one group into each rank. vLLM
refuses several groups that the ranks do not divide, and so does this module.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvferry.layout.shard import Component, HeadRange, heads_of_rank, require

MAX_PADDING_SHARE = 0.25
"""The most padding that moves with a state, as a share of the state's bytes."""


class ConvOrder(StrEnum):
    """The memory order of a convolution's state in a page (``VLLM_SSM_CONV_STATE_LAYOUT``)."""

    SD = "SD"
    """``[state_len, dim]``: the channels of a tap are contiguous. vLLM's default."""
    DS = "DS"
    """``[dim, state_len]``: the taps of a channel are contiguous."""


@dataclass(frozen=True, slots=True)
class ConvSegment:
    """A segment of a convolution's channels: the global channels that this rank holds, of ``total``."""

    name: str
    held: HeadRange
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePages:
    """Where a group's pages lie: the offset of each layer's page of block 0, and the bytes from block to block."""

    layers: Sequence[str]
    layer_offsets: Sequence[int]
    block_stride: int
    region: int = 0


def mamba1_segments(intermediate_size: int, tp_rank: int, tp_size: int) -> tuple[ConvSegment, ...]:
    """Return the one segment of Mamba1 or of a short convolution.

    >>> mamba1_segments(64, 1, 2)
    (ConvSegment(name='x', held=32:64, total=64),)
    """
    return (_split_evenly("x", intermediate_size, 1, tp_rank, tp_size),)


def mamba2_segments(
    intermediate_size: int, num_groups: int, state_size: int, tp_rank: int, tp_size: int
) -> tuple[ConvSegment, ...]:
    """Return the segments of Mamba2: x, and B and C of ``num_groups * state_size`` channels.

    >>> [(segment.name, segment.held) for segment in mamba2_segments(64, 2, 8, 1, 2)]
    [('x', 32:64), ('B', 8:16), ('C', 8:16)]
    >>> [(segment.name, segment.held) for segment in mamba2_segments(64, 1, 8, 1, 2)]
    [('x', 32:64), ('B', 0:8), ('C', 0:8)]
    >>> mamba2_segments(64, 2, 8, 0, 4)
    Traceback (most recent call last):
        ...
    kvferry.errors.LayoutError: 2 groups cannot be split over 4 ranks. Use ranks that divide them. [invalid-layout]
    """
    message = f"{num_groups} groups cannot be split over {tp_size} ranks."
    require(num_groups == 1 or num_groups % tp_size == 0, message, "Use ranks that divide them.")
    grouped = [(name, num_groups, state_size) for name in ("B", "C")]
    if num_groups == 1:
        shared = tuple(ConvSegment(name, HeadRange(0, state_size), state_size) for name, _, _ in grouped)
    else:
        shared = tuple(_split_evenly(name, count, size, tp_rank, tp_size) for name, count, size in grouped)
    return (_split_evenly("x", intermediate_size, 1, tp_rank, tp_size), *shared)


def gated_delta_segments(
    num_key_heads: int, key_head_size: int, num_value_heads: int, value_head_size: int, tp_rank: int, tp_size: int
) -> tuple[ConvSegment, ...]:
    """Return the segments of a gated delta net (Qwen3-Next, Kimi): q, k and v.

    >>> [(segment.name, segment.held, segment.total) for segment in gated_delta_segments(2, 4, 4, 8, 1, 2)]
    [('q', 4:8, 8), ('k', 4:8, 8), ('v', 16:32, 32)]
    """
    return (
        _split_evenly("q", num_key_heads, key_head_size, tp_rank, tp_size),
        _split_evenly("k", num_key_heads, key_head_size, tp_rank, tp_size),
        _split_evenly("v", num_value_heads, value_head_size, tp_rank, tp_size),
    )


def _split_evenly(name: str, num_heads: int, head_size: int, tp_rank: int, tp_size: int) -> ConvSegment:
    """Split a segment of ``num_heads * head_size`` channels by head. Attention heads may be replicated, these never."""
    require(num_heads >= tp_size, f"segment {name!r}: {num_heads} heads cannot be split over {tp_size} ranks.")
    held = heads_of_rank(num_heads, tp_rank, tp_size)
    return ConvSegment(name, HeadRange(held.start * head_size, held.end * head_size), num_heads * head_size)


def conv_components(
    pages: StatePages,
    segments: Sequence[ConvSegment],
    *,
    state_len: int,
    order: ConvOrder,
    itemsize: int,
) -> tuple[Component, ...]:
    """Return one component ``conv.NAME`` for each segment of a convolution, which begins where the page begins.

    ``state_len`` is the number of taps: in vLLM the kernel's size, less one, plus the speculative tokens.

    >>> pages = StatePages(layers=["0"], layer_offsets=[0], block_stride=4096)
    >>> conv_components(pages, mamba2_segments(64, 1, 8, 1, 2), state_len=3, order=ConvOrder.SD, itemsize=2)[1]
    conv.B LBNCH: base + 64 + b*4096 + n*4096 + c*96 + h*2
    """
    dim = sum(len(segment.held) for segment in segments)
    channel, tap = (itemsize, dim * itemsize) if order is ConvOrder.SD else (state_len * itemsize, itemsize)
    first_channels = itertools.accumulate((len(segment.held) for segment in segments), initial=0)
    return tuple(
        _component(
            pages,
            first * channel,
            name=f"conv.{segment.name}",
            heads=(segment.held,),
            total_heads=segment.total,
            num_channels=state_len,
            itemsize=itemsize,
            head_stride=channel,
            channel_stride=tap,
        )
        for segment, first in zip(segments, first_channels, strict=False)
    )


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

    ``num_channels`` counts all numbers of one head: ``head_dim * state_size`` for Mamba2; Mamba1 has
    ``intermediate_size`` heads of ``state_size`` numbers.

    >>> pages = StatePages(layers=["0"], layer_offsets=[0], block_stride=4096)
    >>> recurrent_component(pages, HeadRange(2, 4), 4, num_channels=64, itemsize=4, page_offset=288)
    ssm LBNHC: base + 288 + b*4096 + n*4096 + h*256 + c*4
    """
    return _component(
        pages,
        page_offset,
        name="ssm",
        heads=(held,),
        total_heads=total_heads,
        num_channels=num_channels,
        itemsize=itemsize,
        head_stride=num_channels * itemsize,
        channel_stride=itemsize,
    )


def padding_components(pages: StatePages, begin: int, end: int, tp_rank: int, tp_size: int) -> tuple[Component, ...]:
    """Return the padding from byte ``begin`` of a page to its ``end``: one component, or none.

    Where both engines have the same padding, it makes the pages of neighbouring layers one run. Above
    ``MAX_PADDING_SHARE`` there is no component: moving the padding would cost more than the longer runs gain.

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
        begin,
        name="padding",
        heads=(HeadRange(tp_rank, tp_rank + 1),),
        total_heads=tp_size,
        num_channels=end - begin,
        itemsize=1,
        head_stride=end - begin,
        channel_stride=1,
        is_padding=True,
    )
    return (component,)


def _component(pages: StatePages, page_offset: int, **fields: Any) -> Component:
    """Return a component of which the first element lies ``page_offset`` bytes into each page."""
    return Component(
        layers=tuple(pages.layers),
        layer_offsets=tuple(offset + page_offset for offset in pages.layer_offsets),
        block_stride=pages.block_stride,
        # A block is one state and so one "token".
        token_stride=pages.block_stride,
        region=pages.region,
        **fields,
    )
