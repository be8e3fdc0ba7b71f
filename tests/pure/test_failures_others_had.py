"""Failures that users of other systems reported, each driven through what is to prevent it here.

Those that need threads and sockets are in ``tests/local/test_failures_others_had.py``.
"""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

from kvferry.errors import KVFerryError, Reason
from kvferry.integrations.vllm.scheduler.blocks import (
    GroupShape,
    blocks_to_load,
    blocks_up_to,
    has_every_block,
    held_blocks,
)
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import CacheKind
from kvferry.layout.states import ConvOrder
from kvferry.plan.planner import PairPlan, Planner
from kvferry.plan.proof import verify_destination, verify_pair

from ..counted_work import containers_of, lines_of
from ..support.dense import Content
from ..support.oracle import Arena, RankMemory, check_moved, strided_memory
from .arrangements import FULL, STATE, ask, attention, hybrid, moved
from .named_memory import named_memory


@pytest.mark.parametrize(("prefill", "decode"), [(8, 2), (8, 1), (8, 4), (4, 8)])
def test_vllm_52516_replicated_heads_under_heterogeneous_tp_send_all_bytes(prefill: int, decode: int) -> None:
    """VLLM PR #52516: replicated GQA heads, more ranks than heads: a quarter of the bytes went, and it was ready."""
    sources = [attention(rank, prefill, ["0", "1"]) for rank in range(prefill)]
    destinations = [attention(rank, decode, ["0", "1"]) for rank in range(decode)]
    rows = moved(sources, destinations, FULL)
    heads_each = max(1, 2 // decode)
    assert sum(int(part[:, 2].sum()) for part in rows) == decode * heads_each * 3 * 2 * 4 * 6 * 2


def convolution(rank: RankMemory, layer: int, block: int, order: ConvOrder, num_channels: int) -> np.ndarray:
    """Return a layer's convolution of 3 taps as its kernel sees it, channels first; pages begin where groups do."""
    stride, page = rank.shard.groups[1].components[0].block_stride, rank.shard.groups[0].components[0].layer_offsets
    begin = block * stride + page[layer]
    elements = rank.regions[0][begin : begin + num_channels * 6].view(np.uint16)
    return elements.reshape(3, num_channels).T if order is ConvOrder.SD else elements.reshape(num_channels, 3)


def loaded(tp_rank: int, tp_size: int, num_groups: int, layer: int) -> np.ndarray:
    """Return the labels of what vLLM's loader gives a rank: its part of x, its part of B, its part of C."""
    shared = 1 if num_groups == 1 else tp_size
    parts = [(8, tp_size), (3 * num_groups, shared), (3 * num_groups, shared)]
    channels = [
        1000 * segment + np.split(np.arange(width), num_shares)[tp_rank % num_shares]
        for segment, (width, num_shares) in enumerate(parts)
    ]
    return np.concatenate(channels)[:, None] * 9 + np.arange(3) + 3 * layer + 1


@pytest.mark.parametrize("num_groups", [1, 4])
@pytest.mark.parametrize("orders", [*product(ConvOrder, ConvOrder)], ids=str)
@pytest.mark.parametrize(("prefill", "decode"), [(4, 1), (1, 4), (2, 4)])
def test_vllm_53078_conv_state_is_not_scrambled_under_heterogeneous_tp(
    prefill: int, decode: int, orders: tuple[ConvOrder, ConvOrder], num_groups: int
) -> None:
    """VLLM PR #53078: seen only as a moderate drop of accuracy. x, B and C are each split by rank, never together."""
    arena = Arena(1 << 18)
    sources = [strided_memory(arena, hybrid(rank, prefill, orders[0], num_groups)) for rank in range(prefill)]
    destinations = [strided_memory(arena, hybrid(rank, decode, orders[1], num_groups)) for rank in range(decode)]
    for rank, layer in product(range(prefill), range(3)):
        labels = loaded(rank, prefill, num_groups, layer)
        convolution(sources[rank], layer, 5, orders[0], len(labels))[:] = labels
    for destination in destinations:
        for plan in Planner([rank.shard for rank in sources], destination.shard).plans(0):
            arena.move(plan.lower([FULL, STATE]))
    for rank, layer in product(range(decode), range(3)):
        labels = loaded(rank, decode, num_groups, layer)
        assert np.array_equal(convolution(destinations[rank], layer, 2, orders[1], len(labels)), labels)


@pytest.mark.parametrize("wanted", ["full", "state"])
def test_lmcache_2845_attention_is_not_restored_without_the_mamba_state(wanted: str) -> None:
    """LMCache#2845: attention was restored, the Mamba state was not, and 40 % came out garbled.

    A request that leaves out what the destination holds is refused, on both sides of the proof.
    """
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


def test_lmcache_2845_a_state_that_the_prefill_engine_has_lost_is_missed() -> None:
    """LMCache#2845, as the adapter meets it: a list of blocks without the state's. Such a prompt is not held."""
    groups = [GroupShape(CacheKind.ATTENTION, 16), GroupShape(CacheKind.STATE, 1)]
    for state, is_whole in (([], False), ([0], False), ([5], True)):
        assert has_every_block(groups, blocks_up_to(groups, [[9, 8], state], 20), 20) is is_whole


@pytest.mark.parametrize("content", [Content.APART, Content.INTERLEAVED, Content.PLANES, Content.TRANSPOSED_KEYS])
def test_two_widths_of_k_and_v_are_not_treated_as_equal(content: Content) -> None:
    """Heads of V wider than those of K, in memory that the layout's name and the two widths alone divide up."""
    layout = NamedLayout.LBHNC
    widths = {"content": content, "value_head_size": 5, "layout": layout}
    arena = Arena(1 << 16)
    sources, destinations = (
        [
            named_memory(arena, attention(rank, size, ["0", "1"], **widths), layout, content, [("k", 3), ("v", 5)])
            for rank in range(size)
        ]
        for size in (2, 1)
    )
    plans = Planner([rank.shard for rank in sources], destinations[0].shard).plans(0)
    check_moved(arena, sources, destinations, [FULL], np.concatenate([plan.lower([FULL]) for plan in plans]))
    equal = attention(0, 1, ["0", "1"], **{**widths, "value_head_size": 3})
    with pytest.raises(KVFerryError) as error:
        Planner([rank.shard for rank in sources], equal)
    assert error.value.reason is Reason.HEAD_SIZE_MISMATCH


def test_vllm_ascend_8908_10254_look_ahead_blocks_do_not_shift_the_lists() -> None:
    """vllm-ascend#8908, #10254: a window was clipped before the lists were trimmed to the prompt: stale blocks, NaN.

    A window of 9 tokens and a prompt of 18, in lists that look ahead by one block and by two. Block 0 is the null
    block, before the window.
    """
    window = {"kind": CacheKind.SLIDING_WINDOW, "window": 9, "group_name": "0"}
    group = GroupShape(CacheKind.SLIDING_WINDOW, 4, 9)
    up_to = blocks_up_to([group], [[0, 0, 7, 8, 9, 10]], 18)
    held = held_blocks([group], [ids.tolist() for ids in up_to])["0"]
    assert (held.first_token, list(held.block_ids)) == (8, [7, 8, 9])
    [blocks] = blocks_to_load([group], [4], (0, 18), [[0, 0, 3, 2, 1, 5, 6]])
    assert (blocks.first_token, blocks.last_token, blocks.destination_ids.tolist()) == (8, 18, [3, 2, 1])
    blocks = replace(blocks, source_block_ids=held.block_ids, source_first_token=held.first_token)
    (rows,) = moved([attention(0, 1, ["0"], **window)], [attention(0, 1, ["0"], **window)], blocks)
    assert int(rows[:, 2].sum()) == 3 * 4 * 2 * 6 * 2


def large(tokens: int) -> tuple[PairPlan, Any]:
    shape = {"num_kv_heads": 8, "head_size": 64, "block_size": 16, "layout": NamedLayout.BHLNC}
    source, destination = (
        attention(0, 1, [str(layer) for layer in range(28)], **shape, num_blocks=tokens // 16 + 1, base_address=base)
        for base in (1 << 40, 1 << 50)
    )
    (plan,) = Planner([source], destination).plans(0)
    return plan, list(range(tokens // 16, 0, -1))


def test_vllm_33339_one_descriptor_and_not_34000() -> None:
    """vllm#33339: 34000 small descriptors where one would do. 28 layers, 10240 tokens, in descending order at that."""
    plan, ids = large(tokens=10240)
    assert len(plan.lower([ask("full", 10240, ids, ids)])) == 1


def test_vllm_48209_no_python_object_for_each_descriptor() -> None:
    """VLLM PR #48209: 6.5 million Python tuples at the first transfer, which no loop in Python need have made.

    For 100 times the blocks the same lines run, and no more lists or tuples are made.
    """
    lines, containers = [], []
    for tokens in (1024, 102400):
        plan, ids = large(tokens)
        request = ask("full", tokens, ids, np.random.default_rng(0).permutation(ids))
        assert len(plan.lower([request])) > tokens // 17
        lines.append(lines_of(partial(plan.lower, [request])))
        containers.append(containers_of(partial(plan.lower, [request])))
    assert lines[0] == lines[1]
    assert containers[0] == containers[1]
