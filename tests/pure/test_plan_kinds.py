"""Plans and refusals for token shares, windows, scales, samples, and layers of one engine only."""

import math
from functools import partial
from itertools import product

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import Reason
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import (
    CacheGroup,
    CacheKind,
    HeadRange,
    Region,
    Shard,
    TensorScale,
    TokenShare,
    decode_shard,
    encode_shard,
)
from kvferry.layout.states import ConvOrder, StatePages, conv_components, gated_delta_segments, mamba2_segments
from kvferry.plan.match import (
    GroupBlocks,
    canonical,
    choose_sources,
    common,
    count,
    first_token_to_move,
    sample_requests,
    without,
)
from kvferry.plan.planner import Planner
from kvferry.plan.proof import verify_destination, verify_pair

from ..support.dense import shard_for
from .refusals import refused

SHARES = st.builds(
    lambda size, rank, interleave: TokenShare(rank % size, size, interleave if size > 1 else 1),
    *[st.integers(1, 6)] * 3,
)
RANGES = st.lists(st.integers(0, 30), max_size=8, unique=True).map(
    lambda heads: canonical([HeadRange(head, head + 1) for head in heads])
)


def rank(index: int = 0, size: int = 1, base: int = 0, **changes: object) -> Shard:
    values: dict[str, object] = {
        "layers": ["0", "1"],
        "num_kv_heads": 2,
        "head_size": 4,
        "itemsize": 2,
        "block_size": 4,
        "num_blocks": 8,
        "layout": NamedLayout.BHLNC,
        "tp_rank": index,
        "tp_size": size,
        "base_address": base + (index << 32),
    }
    return shard_for(**{**values, **changes})  # type: ignore[arg-type]


def shared(share: TokenShare, **changes: object) -> Shard:
    """A rank of a latent cache that holds a share of the tokens."""
    return rank(share.rank, share.size, kind=CacheKind.MLA, token_share=share, **changes)


def group_of(shard: Shard, **changes: object) -> Shard:
    (group,) = shard.groups
    return msgspec.structs.replace(shard, groups=(msgspec.structs.replace(group, **changes),))


@settings(deadline=None)
@given(SHARES, SHARES)
def test_shares_meet_where_a_token_lies_in_both(one: TokenShare, other: TokenShare) -> None:
    period = math.lcm(one.size * one.interleave, other.size * other.interleave)
    held = [
        {token for token in range(period) if token // share.interleave % share.size == share.rank}
        for share in (one, other)
    ]
    assert one.overlaps(other) is bool(held[0] & held[1])


@pytest.mark.parametrize("interleave", [1, 2])
@pytest.mark.parametrize(("source_size", "destination_size"), [(2, 4), (4, 2), (2, 6), (6, 2), (3, 3)])
def test_tokens_of_shares_join_only_where_they_follow_each_other_on_both_sides(
    source_size: int, destination_size: int, interleave: int
) -> None:
    """Where one side's share holds a part of the other's, tokens that are neighbours here lie apart there."""
    sources = [shared(TokenShare(at, source_size, interleave)) for at in range(source_size)]
    tokens = {"group": "full", "first_token": 0, "last_token": 48}
    blocks = GroupBlocks(
        **tokens,
        source_block_ids=range(-(-48 // (4 * source_size))),
        destination_block_ids=range(-(-48 // (4 * destination_size))),
    )
    for at in range(destination_size):
        destination = shared(TokenShare(at, destination_size, interleave), base=1 << 48)
        plans = Planner(sources, destination).plans(0)
        verify_destination([(plan.source, plan.lower([blocks])) for plan in plans], destination, [blocks])


@settings(deadline=None)
@given(RANGES, RANGES)
def test_ranges_are_sets(one: tuple[HeadRange, ...], other: tuple[HeadRange, ...]) -> None:
    def heads(ranges: tuple[HeadRange, ...]) -> set[int]:
        return {head for held in ranges for head in range(held.start, held.end)}

    assert heads(common(one, other)) == heads(one) & heads(other)
    assert heads(without(one, other)) == heads(one) - heads(other)
    assert count(one) == len(heads(one))
    assert canonical(common(one, other)) == common(one, other)


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": CacheKind.SLIDING_WINDOW},
        {"window": 8},
        {"kind": CacheKind.STATE},
        {"kind": CacheKind.STATE, "block_size": 1, "token_share": TokenShare(0, 2, 1)},
        {"token_share": TokenShare(0, 2, 3)},
        {"token_share": TokenShare(0, 2**16, 1), "block_size": 65},
        {"scales": (TensorScale("9", "k", 0.5),)},
        {"scales": (TensorScale("0", "k", 0.0),)},
        {"scales": (TensorScale("0", "k", math.nan),)},
        {"scales": (TensorScale("0", "k", 0.5), TensorScale("0", "k", 0.5))},
    ],
    ids=str,
)
def test_groups_that_cannot_exist(changes: dict[str, object]) -> None:
    refused(Reason.INVALID_LAYOUT, lambda: group_of(rank(), **changes))


@pytest.mark.parametrize("values", [(2, 2, 1), (-1, 2, 1), (0, 2, 0), (0, 1, 4), (0, 2**40, 1)], ids=str)
def test_shares_that_cannot_exist(values: tuple[int, int, int]) -> None:
    refused(Reason.INVALID_LAYOUT, lambda: TokenShare(*values))


@pytest.mark.parametrize(
    "build",
    [
        lambda: mamba2_segments(64, 2, 8, 0, 4),
        lambda: gated_delta_segments(2, 4, 4, 4, 0, 4),
        lambda: shard_for(
            layers=["0"],
            num_kv_heads=1,
            head_size=1,
            itemsize=1,
            block_size=1,
            num_blocks=1,
            layout=NamedLayout.BHLNC,
            kind=CacheKind.STATE,
        ),
    ],
)
def test_states_that_cannot_exist(build: object) -> None:
    """Where vLLM replicates KV heads it divides groups and linear-attention heads."""
    refused(Reason.INVALID_LAYOUT, build)


@pytest.mark.parametrize("order", ConvOrder)
def test_conv_components_are_views_of_the_tensor(order: ConvOrder) -> None:
    segments = gated_delta_segments(2, 2, 4, 3, 1, 2)
    dim, taps = sum(len(segment.held) for segment in segments), 3
    shape = (taps, dim) if order is ConvOrder.SD else (dim, taps)
    tensor = np.arange(dim * taps).reshape(shape)
    pages = StatePages(layers=["0"], layer_offsets=[0], block_stride=dim * taps)
    parts = conv_components(pages, segments, state_len=taps, order=order, itemsize=1)
    channels = tensor.T if order is ConvOrder.SD else tensor
    found = [
        [part.layer_offsets[0] + head * part.head_stride + tap * part.channel_stride for tap in range(taps)]
        for part in parts
        for head in range(part.num_heads)
    ]
    assert found == channels.tolist()


def test_every_share_is_needed_and_replicas_are_chosen_within_one() -> None:
    """8 ranks of a latent cache in 2 shares of 4 replicas: a destination with all tokens needs one of each share."""
    sources = [rank(index, 8, kind=CacheKind.MLA, token_share=TokenShare(index % 2, 2, 1)) for index in range(8)]
    destination = rank(kind=CacheKind.MLA, base=1 << 50)
    for selector in range(8):
        chosen = [part.source_index for part in choose_sources(sources, destination, selector)]
        assert {index % 2 for index in chosen} == {0, 1}
        assert len(chosen) == 2
    only = [shard for shard in sources if shard.groups[0].token_share.rank == 0]
    refused(Reason.MISSING_SOURCE, lambda: Planner(only, destination))
    same_share = rank(kind=CacheKind.MLA, token_share=TokenShare(0, 2, 1), base=1 << 50)
    assert len(Planner(only, same_share).plans(0)) == 1


def test_sources_with_different_splits_of_tokens() -> None:
    sources = [shared(TokenShare(0, 2, 1)), shared(TokenShare(1, 2, 2))]
    refused(Reason.GROUP_MISMATCH, lambda: Planner(sources, rank(kind=CacheKind.MLA)))


def test_packed_pages_of_other_shares_are_refused() -> None:
    sources = [rank(packing="amx", token_share=TokenShare(index, 2, 1)) for index in range(2)]
    refused(Reason.SPLIT_ATOM, lambda: Planner(sources, rank(packing="amx")))


@pytest.mark.parametrize("side", ["source", "destination"])
def test_lists_that_begin_within_a_position_of_all_ranks(side: str) -> None:
    shares = [shared(TokenShare(index, 2, 2)) for index in range(2)]
    whole = rank(kind=CacheKind.MLA, base=1 << 50)
    sources, destination = (shares, whole) if side == "source" else ([whole], shares[0])
    plans = Planner(sources, destination).plans(0)
    for begin, fits in ((8, True), (4, False)):
        blocks = GroupBlocks(
            group="full",
            first_token=8,
            last_token=16,
            source_block_ids=range(8),
            destination_block_ids=range(8),
            **{f"{side}_first_token": begin},
        )
        if fits:
            verify_destination([(plan.source, plan.lower([blocks])) for plan in plans], destination, [blocks])
            continue
        for plan in plans:
            refused(Reason.INVALID_REQUEST, partial(plan.lower, [blocks]))
            nothing = np.empty((0, 3), dtype=np.uint64)
            refused(
                Reason.INVALID_REQUEST, partial(verify_pair, nothing, plan.source, destination, [blocks], plan.heads)
            )


def test_equal_shares_move_whole_blocks() -> None:
    """Dealt out token by token on both sides alike, a block still moves as one run."""
    share = TokenShare(1, 4, 1)
    (plan,) = Planner([shared(share)], shared(share, base=1 << 50)).plans(0)
    blocks = GroupBlocks(
        group="full", first_token=0, last_token=40, source_block_ids=[5, 1, 3], destination_block_ids=[0, 4, 2]
    )
    assert len(plan.lower([blocks])) == 3


@pytest.mark.parametrize(
    ("source", "destination", "named"),
    [
        ({"k": 0.5}, {"k": 0.25}, ("0.5", "0.25")),
        ({"k": 0.5}, {}, ("0.5", "none")),
        ({"k": 0.5, "v": 1.0}, {"k": 0.5, "v": 2.0}, ("1.0", "2.0")),
    ],
    ids=str,
)
def test_scales_that_differ_are_refused(
    source: dict[str, float], destination: dict[str, float], named: tuple[str, str]
) -> None:
    both = [
        group_of(rank(), scales=tuple(TensorScale("1", tensor, value) for tensor, value in scales.items()))
        for scales in (source, destination)
    ]
    message = refused(Reason.MODEL_MISMATCH, lambda: Planner(both[:1], both[1]))
    assert all(value in message for value in named)
    Planner(both[:1], both[0])
    assert decode_shard(encode_shard(both[0])) == both[0]


def test_windows_that_differ_are_refused() -> None:
    one, other = (rank(kind=CacheKind.SLIDING_WINDOW, window=window) for window in (8, 9))
    refused(Reason.MODEL_MISMATCH, lambda: Planner([one], other))


def clip(computed: int, first: int, window: int, sizes: tuple[int, int]) -> int:
    return first_token_to_move(
        num_computed_tokens=computed,
        first_token=first,
        window=window,
        source_block_size=sizes[0],
        destination_block_size=sizes[1],
    )


@pytest.mark.parametrize("sizes", [(4, 4), (2, 4), (6, 4)])
def test_clipping_a_window(sizes: tuple[int, int]) -> None:
    """Everything the next token attends to is moved, and nothing of a block that lies before the window."""
    for computed, window in product(range(0, 40), (1, 3, 8, 100)):
        for first in range(computed + 1):
            found = clip(computed, first, window, sizes)
            attended = range(max(first, computed - window + 1, 0), computed)
            assert found <= min(attended, default=computed)
            if attended:
                given_back = max(attended[0] // size * size for size in sizes)
                assert found >= max(given_back, first)
            else:
                assert found == computed


def test_layers_of_one_engine_only() -> None:
    """Refused, unless the destination is a stage, which holds only some."""
    stages = [rank(layers=["2"], pp_rank=1, pp_size=2), rank(layers=["0", "1"], pp_size=2)]
    refused(Reason.LAYER_MISMATCH, lambda: Planner(stages, rank()))
    refused(Reason.LAYER_MISMATCH, lambda: Planner(stages, rank(layers=["0", "1", "2", "3"])))
    (plan,) = Planner(stages, rank(layers=["1"], pp_rank=1, pp_size=3, base=1 << 50)).plans(0)
    assert plan.assignment.source_index == 1


def test_a_rank_that_sends_anyway_is_taken_again() -> None:
    """What all ranks hold comes from those that must send what only they hold, whatever the order of components."""

    def hybrid(index: int, size: int) -> Shard:
        segments = mamba2_segments(8, 1, 2, index, size)
        pages = StatePages(layers=["0"], layer_offsets=[0], block_stride=1024)
        parts = conv_components(pages, segments, state_len=2, order=ConvOrder.SD, itemsize=2)
        group = CacheGroup(name="s", kind=CacheKind.STATE, block_size=1, num_blocks=4, components=parts[::-1])
        return Shard(regions=(Region(index << 32, 4096),), groups=(group,), tp_rank=index, tp_size=size)

    sources = [hybrid(index, 8) for index in range(8)]
    for selector, index in product(range(8), range(4)):
        assert len(choose_sources(sources, hybrid(index, 4), selector)) == 2


def test_samples_use_blocks_of_their_own() -> None:
    full, window = rank(), rank(kind=CacheKind.SLIDING_WINDOW, window=4, group_name="window", layers=["2"])
    both = msgspec.structs.replace(full, groups=(*full.groups, *window.groups))
    found = sample_requests([both], both)
    ids = np.concatenate([blocks.source_ids for blocks in found])
    assert len(set(ids.tolist())) == len(ids) == 6
    few = msgspec.structs.replace(
        both, groups=tuple(msgspec.structs.replace(group, num_blocks=1) for group in both.groups)
    )
    refused(Reason.UNSUPPORTED, lambda: sample_requests([few], few))
    refused(Reason.GROUP_MISMATCH, lambda: sample_requests([full], both))
