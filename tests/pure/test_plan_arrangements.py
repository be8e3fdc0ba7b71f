"""Arrangements of real engines, each with its bytes compared."""

import msgspec
import pytest

from kvferry.errors import KVFerryError, Reason
from kvferry.layout.shard import CacheGroup, CacheKind, Component, Region, Shard, heads_of_rank
from kvferry.layout.states import (
    ConvOrder,
    StatePages,
    conv_components,
    gated_delta_segments,
    padding_components,
    recurrent_component,
)
from kvferry.plan.planner import Planner

from .arrangements import BLOCKS, FULL, STATE, ask, hybrid, moved, state_group

MIB2 = 2 << 20


@pytest.mark.parametrize("orders", [(ConvOrder.SD, ConvOrder.SD), (ConvOrder.SD, ConvOrder.DS)], ids=str)
@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4), (4, 4)])
def test_vllm_hybrid_overlay(prefill: int, decode: int, orders: tuple[ConvOrder, ConvOrder]) -> None:
    sources = [hybrid(rank, prefill, orders[0]) for rank in range(prefill)]
    moved(sources, [hybrid(rank, decode, orders[1]) for rank in range(decode)], FULL, STATE)


def test_a_state_of_equal_sizes_is_one_descriptor_a_layer() -> None:
    (rows,) = moved([hybrid(0, 1)], [hybrid(0, 1)], ask("full", 0, [], []), STATE)
    assert len(rows) == 3


@pytest.mark.parametrize("tokens", [2, 0])
def test_a_state_is_asked_for_as_one_block(tokens: int) -> None:
    (plan,) = Planner([hybrid(0, 1)], hybrid(0, 1)).plans(0)
    ids = [1, 2] if tokens else [1]
    with pytest.raises(KVFerryError) as error:
        plan.lower([FULL, ask("state", tokens, ids, ids)])
    assert error.value.reason is Reason.INVALID_REQUEST


def padded_stage(layers: list[str], page: int, pp_rank: int = 0, pp_size: int = 1) -> Shard:
    """States of 180 bytes in pages of so many."""
    offsets = [index * page for index in range(len(layers))]
    pages = StatePages(layers=layers, layer_offsets=offsets, block_stride=len(layers) * page)
    group = state_group(0, 1, pages)
    padded = msgspec.structs.replace(group, components=(*group.components, *padding_components(pages, 180, page, 0, 1)))
    region = Region(0, BLOCKS * len(layers) * page)
    return Shard(regions=(region,), groups=(padded,), pp_rank=pp_rank, pp_size=pp_size)


@pytest.mark.parametrize("page", [180, 188])
def test_stages_with_different_padding(page: int) -> None:
    """Padding moves where the stage that holds the layer has the same, and is left alone in the other layers."""
    sources = [padded_stage(["0"], page, 0, 2), padded_stage(["1"], 196, 1, 2)]
    (first, second) = moved(sources, [padded_stage(["0", "1"], 196)], STATE)
    assert (int(first[:, 2].sum()), int(second[:, 2].sum())) == (180, 196)


def plain(name: str, *, heads: int, channels: int, itemsize: int, first: int, layers: int, **changes: int) -> Component:
    """A component of rows ``[slot][head][channel]``, a page a layer, as Ascend's kernels want them."""
    row = heads * channels * itemsize
    values = {"layer_stride": 0, "block_stride": 4 * row, "region": 0, "head_stride": channels * itemsize, **changes}
    return Component(
        name=name,
        layers=tuple(str(layer) for layer in range(layers)),
        layer_offsets=tuple(first + layer * values["layer_stride"] for layer in range(layers)),
        heads=(heads_of_rank(heads, 0, 1),),
        total_heads=heads,
        num_channels=channels,
        itemsize=itemsize,
        block_stride=values["block_stride"],
        head_stride=values["head_stride"],
        token_stride=row,
        channel_stride=itemsize,
        region=values["region"],
    )


def ascend_attention(base: int) -> Shard:
    """K and V apart, each layer's tensor at a multiple of 2 MiB, K wider than V (latent and rotary part of MLA)."""
    parts = tuple(
        plain(name, heads=1, channels=channels, itemsize=2, first=0, layers=2, layer_stride=MIB2, region=region)
        for region, (name, channels) in enumerate((("latent", 16), ("rope", 4)))
    )
    group = CacheGroup(name="full", kind=CacheKind.MLA, block_size=4, num_blocks=BLOCKS, components=parts)
    regions = tuple(Region(base + index * 2 * MIB2, MIB2 + BLOCKS * 4 * 16 * 2) for index in range(2))
    return Shard(regions=regions, groups=(group,))


def test_ascend_attention_apart_and_aligned() -> None:
    """Scattered blocks cost one descriptor for each layer and tensor; both regions stay apart."""
    (rows,) = moved([ascend_attention(0)], [ascend_attention(1 << 40)], FULL)
    assert len(rows) == 2 * 2 * 3


def ascend_columns(tp_rank: int, tp_size: int) -> Shard:
    """One tensor whose rows are blocks: columns of a convolution, then of K, then of V; the state in another region."""
    segments = gated_delta_segments(4, 2, 4, 3, tp_rank, tp_size)
    dim = sum(len(segment.held) for segment in segments)
    heads = heads_of_rank(4, tp_rank, tp_size)
    column = 4 * len(heads) * 3 * 2
    stride = dim * 3 * 2 + 2 * column
    pages = StatePages(layers=["1"], layer_offsets=[0], block_stride=stride)
    conv = conv_components(pages, segments, state_len=3, order=ConvOrder.SD, itemsize=2)
    apart = StatePages(layers=["1"], layer_offsets=[0], block_stride=len(heads) * 6 * 4, region=1)
    state = recurrent_component(apart, heads, 4, num_channels=6, itemsize=4, page_offset=0)
    kv = [
        msgspec.structs.replace(
            plain(name, heads=len(heads), channels=3, itemsize=2, first=dim * 6 + index * column, layers=1),
            heads=(heads,),
            total_heads=4,
            block_stride=stride,
        )
        for index, name in enumerate(("k", "v"))
    ]
    shared = {"num_blocks": BLOCKS}
    groups = (
        CacheGroup(name="full", kind=CacheKind.ATTENTION, block_size=4, components=tuple(kv), **shared),
        CacheGroup(name="state", kind=CacheKind.STATE, block_size=1, components=(*conv, state), **shared),
    )
    regions = Region(0, BLOCKS * stride), Region(1 << 30, BLOCKS * len(heads) * 24)
    return Shard(regions=regions, groups=groups, tp_rank=tp_rank, tp_size=tp_size)


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (4, 2), (2, 4)])
def test_ascend_conv_k_and_v_columns_in_one_tensor(prefill: int, decode: int) -> None:
    sources = [ascend_columns(rank, prefill) for rank in range(prefill)]
    moved(sources, [ascend_columns(rank, decode) for rank in range(decode)], FULL, STATE)
