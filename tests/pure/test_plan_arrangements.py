"""Arrangements of real engines, and failures that users of other systems reported, each with its bytes compared."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from kvferry.errors import KVFerryError, Reason
from kvferry.layout.cache_group import CacheGroup, CacheKind
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shapes import Content, heads_of_rank, shard_for
from kvferry.layout.shard import Region, Shard
from kvferry.layout.state import (
    ConvOrder,
    StatePages,
    conv_components,
    gated_delta_segments,
    mamba2_segments,
    recurrent_component,
)
from kvferry.layout.strided import Component
from kvferry.plan.request import GroupBlocks
from kvferry.plan.transfer_plan import Planner
from kvferry.plan.verify import verify_destination, verify_pair
from kvferry.plan.window import first_token_to_move
from kvferry.testing.oracle import Arena, OracleMismatch, check_moved, strided_memory

BLOCKS = 12
MIB2 = 2 << 20


def moved(sources: Sequence[Shard], destinations: Sequence[Shard], *requests: GroupBlocks) -> list[np.ndarray]:
    """Move in real memory, compare every byte, and return the rows of each pair."""
    arena = Arena(sum(region.length for shard in (*sources, *destinations) for region in shard.regions))
    held = [strided_memory(arena, shard) for shard in sources]
    filled = [strided_memory(arena, shard) for shard in destinations]
    rows = []
    for rank in filled:
        plans = Planner([source.shard for source in held], rank.shard).plans(0)
        lists = [(plan.source, plan.lower(requests)) for plan in plans]
        verify_destination(lists, rank.shard, requests)
        rows += [found for _, found in lists]
    check_moved(arena, held, filled, requests, np.concatenate(rows))
    with pytest.raises(OracleMismatch):
        check_moved(arena, held, filled, requests, np.concatenate(rows)[1:])
    return rows


def ask(group: str, tokens: int, source_ids: Sequence[int], destination_ids: Sequence[int], **more: int) -> GroupBlocks:
    values = {"first_token": 0, **more}
    return GroupBlocks(
        group=group, last_token=tokens, source_block_ids=source_ids, destination_block_ids=destination_ids, **values
    )


def state_group(
    tp_rank: int,
    tp_size: int,
    pages: StatePages,
    order: ConvOrder = ConvOrder.SD,
    name: str = "state",
    num_groups: int = 1,
) -> CacheGroup:
    """Mamba2 with 4 heads of 2 channels and a state of 3: a bfloat16 convolution of 3 taps, a float32 state."""
    segments = mamba2_segments(8, num_groups, 3, tp_rank, tp_size)
    conv = conv_components(pages, segments, state_len=3, order=order, itemsize=2)
    conv_bytes = sum(len(segment.held) for segment in segments) * 3 * 2
    heads = heads_of_rank(4, tp_rank, tp_size)
    state = recurrent_component(pages, heads, 4, num_channels=6, itemsize=4, page_offset=conv_bytes)
    return CacheGroup(name=name, kind=CacheKind.STATE, block_size=1, num_blocks=BLOCKS, components=(*conv, state))


def attention(rank: int, size: int, layers: Sequence[str], **changes: object) -> Shard:
    values: dict[str, object] = {
        "layers": layers,
        "num_kv_heads": 2,
        "head_size": 3,
        "itemsize": 2,
        "block_size": 4,
        "num_blocks": BLOCKS,
        "layout": NamedLayout.BLHNC,
        "group_name": "full",
        "tp_rank": rank,
        "tp_size": size,
    }
    return shard_for(**{**values, **changes})  # type: ignore[arg-type]


def hybrid(tp_rank: int, tp_size: int, order: ConvOrder = ConvOrder.SD, num_groups: int = 1) -> Shard:
    """Lay groups over each other as vLLM does: rows of one length, whose slot l is layer l of each group.

    Global layers 0 to 5 are dealt to the groups in turn, so that no group's local index is a global range.
    """
    full = attention(tp_rank, tp_size, ["0", "2", "4"]).groups[0]
    page = max(full.components[0].layer_offsets[1], 512)
    stride = 3 * page + 32
    offsets = [slot * page for slot in range(3)]
    (kv,) = full.components
    kv = msgspec.structs.replace(kv, layer_offsets=tuple(offsets), block_stride=stride)
    pages = StatePages(layers=["1", "3", "5"], layer_offsets=offsets, block_stride=stride)
    groups = (
        msgspec.structs.replace(full, components=(kv,)),
        state_group(tp_rank, tp_size, pages, order, num_groups=num_groups),
    )
    region = Region(0, BLOCKS * stride)
    return Shard(regions=(region,), groups=groups, tp_rank=tp_rank, tp_size=tp_size)


FULL = ask("full", 10, [9, 3, 7], [4, 5, 6])
STATE = ask("state", 1, [5], [2])


@pytest.mark.parametrize("orders", [(ConvOrder.SD, ConvOrder.SD), (ConvOrder.SD, ConvOrder.DS)], ids=str)
@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4), (4, 4)])
def test_vllm_hybrid_overlay(prefill: int, decode: int, orders: tuple[ConvOrder, ConvOrder]) -> None:
    sources = [hybrid(rank, prefill, orders[0]) for rank in range(prefill)]
    moved(sources, [hybrid(rank, decode, orders[1]) for rank in range(decode)], FULL, STATE)


@pytest.mark.parametrize("num_groups", [1, 4])
@pytest.mark.parametrize("order", ConvOrder)
@pytest.mark.parametrize(("prefill", "decode"), [(4, 1), (1, 4), (2, 4)])
def test_conv_state_scrambled_under_heterogeneous_tp(
    prefill: int, decode: int, order: ConvOrder, num_groups: int
) -> None:
    """vllm#53078: x, B and C are split by rank each on its own; taken as one range they land elsewhere."""
    sources = [hybrid(rank, prefill, order, num_groups) for rank in range(prefill)]
    moved(sources, [hybrid(rank, decode, order, num_groups) for rank in range(decode)], FULL, STATE)


def test_a_state_of_equal_sizes_is_one_descriptor_a_layer() -> None:
    (rows,) = moved([hybrid(0, 1)], [hybrid(0, 1)], ask("full", 0, [], []), STATE)
    assert len(rows) == 3


@pytest.mark.parametrize("wanted", ["full", "state"])
def test_attention_moved_but_mamba_state_not(wanted: str) -> None:
    """LMCache#2845: a request that leaves out what the destination holds is refused, on both sides of the proof."""
    source, destination = hybrid(0, 1), hybrid(0, 1)
    (plan,) = Planner([source], destination).plans(0)
    left_out = [blocks for blocks in (FULL, STATE) if blocks.group == wanted]
    requests = [left_out] if wanted == "state" else [left_out, [FULL, ask("state", 0, [], [])]]
    for request in requests:
        for refuse in (
            lambda request=request: plan.lower(request),
            lambda request=request: verify_pair(np.empty((0, 3), np.uint64), source, destination, request, plan.heads),
            lambda request=request: verify_destination([], destination, request),
        ):
            with pytest.raises(KVFerryError) as error:
                refuse()
            assert error.value.reason is Reason.INVALID_REQUEST
    plan.lower([ask("full", 0, [], []), STATE])


@pytest.mark.parametrize("tokens", [2, 0])
def test_a_state_is_asked_for_as_one_block(tokens: int) -> None:
    (plan,) = Planner([hybrid(0, 1)], hybrid(0, 1)).plans(0)
    ids = [1, 2] if tokens else [1]
    with pytest.raises(KVFerryError) as error:
        plan.lower([FULL, ask("state", tokens, ids, ids)])
    assert error.value.reason is Reason.INVALID_REQUEST


@pytest.mark.parametrize(("prefill", "decode"), [(8, 2), (8, 1), (8, 4), (4, 8)])
def test_replicated_gqa_heads_sent_a_quarter_of_the_bytes(prefill: int, decode: int) -> None:
    """vllm#52516: more ranks than KV heads on the sending side."""
    sources = [attention(rank, prefill, ["0", "1"]) for rank in range(prefill)]
    destinations = [attention(rank, decode, ["0", "1"]) for rank in range(decode)]
    rows = moved(sources, destinations, FULL)
    heads_each = max(1, 2 // decode)
    assert sum(int(part[:, 2].sum()) for part in rows) == decode * heads_each * 3 * 2 * 4 * 6 * 2


def test_two_widths_treated_as_equal() -> None:
    """K and V of unequal width, and the latent and rotary parts of MLA, each a component of its own width."""
    apart = {"content": Content.APART, "value_head_size": 5, "layout": NamedLayout.LBNHC}
    moved([attention(rank, 2, ["0"], **apart) for rank in range(2)], [attention(0, 1, ["0"], **apart)], FULL)
    with pytest.raises(KVFerryError) as error:
        Planner([attention(0, 1, ["0"], **apart)], attention(0, 1, ["0"], **{**apart, "value_head_size": 3}))
    assert error.value.reason is Reason.HEAD_SIZE_MISMATCH


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


def test_look_ahead_blocks_shift_the_lists() -> None:
    """vllm-ascend#8908, #10254: a window of 9 tokens of a prompt of 18, in lists that look ahead.

    Block 0 is the null block: before the window, and never read or written.
    """
    window = {"kind": CacheKind.SLIDING_WINDOW, "window": 9}
    first = first_token_to_move(
        num_computed_tokens=18,
        first_token=0,
        window=9,
        source_block_size=4,
        destination_block_size=4,
        whole_pages=False,
    )
    assert first == 8
    request = ask("full", 18, [0, 0, 7, 8, 9, 10], [0, 0, 3, 2, 1], first_token=first)
    (rows,) = moved([attention(0, 1, ["0"], **window)], [attention(0, 1, ["0"], **window)], request)
    assert int(rows[:, 2].sum()) == 3 * 4 * 2 * 6 * 2


def test_34000_small_descriptors_where_one_would_do() -> None:
    """vllm#33339: 10240 tokens of a model of 28 layers; with whole rows one descriptor, even in descending order."""
    shape = {"num_kv_heads": 8, "head_size": 64, "block_size": 16, "num_blocks": 641, "layout": NamedLayout.BHLNC}
    source, destination = (
        attention(0, 1, [str(layer) for layer in range(28)], **shape, base_address=base) for base in (1 << 40, 1 << 50)
    )
    (plan,) = Planner([source], destination).plans(0)
    ids = list(range(640, 0, -1))
    assert len(plan.lower([ask("full", 10240, ids, ids)])) == 1
