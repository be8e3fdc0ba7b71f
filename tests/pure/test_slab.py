"""A tier's slab: what engines of one shape store there, engines of any other shape load, byte for byte."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.arrays import Descriptors
from kvferry.cli.plan_report import EngineShape, engine_of
from kvferry.errors import LayoutError, Reason
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import CacheGroup, CacheKind, HeadRange, Region, Shard, TensorScale, TokenShare
from kvferry.layout.slab import slab_shard
from kvferry.layout.states import mamba2_segments
from kvferry.models.families import model_caches
from kvferry.models.groups import (
    AttentionCache,
    LayerCache,
    StateCache,
    form_groups,
    model_shard,
    possible_layout,
    resolve_block_size,
    split_layers,
)
from kvferry.models.groups import RankMemory as ModelRank
from kvferry.plan.match import GroupBlocks, of_rank
from kvferry.plan.planner import Planner
from kvferry.plan.proof import verify_destination

from ..support.dense import Content
from ..support.oracle import Arena, Labels, RankMemory, check_moved, compare, strided_memory
from .arrangements import ask, attention, hybrid
from .strategies import Move, moves

SLAB_BLOCKS = 20


def round_trip(
    sources: Sequence[Shard],
    destinations: Sequence[Shard],
    requests: Sequence[GroupBlocks],
    slab: Shard,
    selector: int = 0,
) -> tuple[list[Descriptors], list[Descriptors]]:
    """Store and load in real memory; each way is proven and compared byte by byte, and then both together."""
    shards = (*sources, *destinations, slab)
    arena = Arena(sum(region.length for shard in shards for region in shard.regions))
    held, filled = ([strided_memory(arena, shard) for shard in ranks] for ranks in (sources, destinations))
    kept = strided_memory(arena, slab)
    stores, loads = through(requests, slab)
    stored = checked_rows(arena, held, [kept], stores, selector)
    loaded = checked_rows(arena, [kept], filled, loads, selector)

    labels = Labels.of([kept], filled, max([1, *(blocks.last_token for blocks in requests)]))
    for digit in range(labels.num_digits):
        arena.buffer[:] = np.random.default_rng(digit).integers(0, 256, len(arena.buffer), dtype=np.uint8)
        for rank, blocks in ((rank, blocks) for rank in held for blocks in stores):
            labels.write(rank, blocks, "source", blocks.last_token, digit)
        for rows in (*stored, *loaded):
            arena.move(rows)
        for rank in filled:
            found = rank.snapshot()
            for blocks in loads:
                labels.write(rank, blocks, "destination", blocks.last_token, digit)
            compare(rank, found)
    return stored, loaded


def begin_of(group: CacheGroup) -> int:
    return min(offset for part in group.components for offset in part.layer_offsets)


def through(requests: Sequence[GroupBlocks], slab: Shard) -> tuple[list[GroupBlocks], list[GroupBlocks]]:
    """Return the requests into the slab and those out of it, in blocks that the slab's groups use from the last.

    Groups that share their blocks use different ones.
    """
    stores, loads = [], []
    lasts: dict[str, int] = {}
    for number, group in enumerate(slab.groups):
        lasts[group.name] = (
            group.num_blocks
            - 1
            - SLAB_BLOCKS * sum(begin_of(other) == begin_of(group) for other in slab.groups[:number])
        )
    for blocks in requests:
        group = slab.group(blocks.group)
        assert group is not None
        last = lasts[blocks.group]
        begin = blocks.first_token - blocks.first_token % group.block_size
        ids = range(last, last - -(-(blocks.last_token - begin) // group.block_size), -1)
        stores.append(dataclasses.replace(blocks, destination_block_ids=[*ids], destination_first_token=begin))
        loads.append(dataclasses.replace(blocks, source_block_ids=[*ids], source_first_token=begin))
    return stores, loads


def checked_rows(
    arena: Arena,
    sources: Sequence[RankMemory],
    destinations: Sequence[RankMemory],
    requests: Sequence[GroupBlocks],
    selector: int,
) -> list[Descriptors]:
    rows: list[Descriptors] = []
    for rank in destinations:
        asked = of_rank(requests, rank.shard)
        plans = Planner([source.shard for source in sources], rank.shard).plans(selector)
        lists = [(plan.source, plan.lower(asked)) for plan in plans]
        verify_destination(lists, rank.shard, asked)
        rows += [found for _, found in lists]
    check_moved(arena, sources, destinations, requests, np.concatenate(rows))
    return rows


def slab_of(ranks: Iterable[Shard], engine_blocks: int = 1) -> Shard:
    ranks = tuple(ranks)
    names = {group.name for rank in ranks for group in rank.groups}
    return slab_shard(ranks, dict.fromkeys(names, SLAB_BLOCKS), engine_blocks=engine_blocks, base_address=1 << 50)


def splits_pages(ranks: Iterable[Shard], engine_blocks: int) -> bool:
    packed = [group for rank in ranks for group in rank.groups if group.components[0].packing]
    return any(engine_blocks > 1 or not group.token_share.is_whole for group in packed)


@settings(max_examples=70, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(moves(), st.integers(1, 2), st.booleans(), st.integers(0, 7))
def test_any_engine_loads_what_any_engine_stored(
    move: Move, engine_blocks: int, is_of_the_source: bool, selector: int
) -> None:
    ranks = move.sources if is_of_the_source else move.destinations
    if splits_pages(ranks, engine_blocks):
        with pytest.raises(LayoutError) as error:
            slab_of(ranks, engine_blocks)
        assert error.value.reason is Reason.SPLIT_ATOM
        return
    round_trip(move.sources, move.destinations, move.requests, slab_of(ranks, engine_blocks), selector)


def engine(caches: Sequence[LayerCache], layout: NamedLayout, tp_size: int, pp_size: int = 1) -> list[Shard]:
    """Return the ranks that vLLM would make of a model of these layers."""
    groups = form_groups({str(layer): cache for layer, cache in enumerate(caches)})
    ranks, first = [], 0
    for pp_rank, num_layers in enumerate(split_layers(len(caches), pp_size)):
        layers = frozenset(map(str, range(first, first + num_layers)))
        first += num_layers
        for tp_rank in range(tp_size):
            memory = ModelRank(
                layout=possible_layout(groups, layout),
                block_size=resolve_block_size(groups, 4, tp_size),
                num_blocks=15,
                tp_rank=tp_rank,
                tp_size=tp_size,
                pp_rank=pp_rank,
                pp_size=pp_size,
            )
            ranks.append(model_shard(groups, layers, memory))
    return ranks


FULL, SLIDES = (AttentionCache(num_kv_heads=4, head_size=3, itemsize=2, window=window) for window in (0, 8))
LATENT = AttentionCache(num_kv_heads=1, head_size=9, itemsize=2, is_latent=True)
MAMBA = StateCache(split=mamba2_segments, sizes=(16, 1, 4), num_heads=8, num_channels=2 * 4, kernel_size=4, itemsize=2)
MODELS = {
    "grouped-query": [FULL] * 4,
    "gemma": [SLIDES, SLIDES, FULL] * 2,
    "granite": [MAMBA, MAMBA, FULL, MAMBA, FULL, FULL],
    "latent": [LATENT] * 3,
}
SHAPES = [(NamedLayout.BHLNC, 2, 1), (NamedLayout.LBNHC, 1, 2), (NamedLayout.BLHNC, 8, 1), (NamedLayout.LBHNC, 1, 1)]


def model_requests(caches: Sequence[LayerCache], sources: Sequence[Shard]) -> list[GroupBlocks]:
    """Ask for 20 tokens of each group, of a window for the last 8 of them, with block ids that no groups share."""
    groups = {group.name: group for rank in sources for group in rank.groups}
    requests = []
    for turn, (name, group) in enumerate(sorted(groups.items())):
        ids = [5 * turn + index for index in (3, 0, 4, 1, 2)]
        if group.kind is CacheKind.STATE:
            requests.append(ask(name, 1, ids[:1], ids[1:2]))
        else:
            requests.append(ask(name, 20, ids, ids[::-1], first_token=12 if group.window else 0))
    return requests


@pytest.mark.parametrize("stored", SHAPES, ids=str)
@pytest.mark.parametrize("loaded", SHAPES, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_models_as_vllm_lays_them_out(
    model: str, stored: tuple[NamedLayout, int, int], loaded: tuple[NamedLayout, int, int]
) -> None:
    caches = MODELS[model]
    sources, destinations = engine(caches, *stored), engine(caches, *loaded)
    round_trip(sources, destinations, model_requests(caches, sources), slab_of(sources))


@pytest.mark.parametrize("model", ["grouped-query", "gemma", "latent"])
def test_a_slab_does_not_depend_on_the_shape_of_the_engine(model: str) -> None:
    slabs = {repr(slab_of(engine(MODELS[model], *shape))) for shape in SHAPES}
    assert len(slabs) == 1


def test_a_slab_does_not_depend_on_the_order_of_the_ranks() -> None:
    """A slab that outlives an engine must have its layers where the next engine looks for them."""
    ranks = engine(MODELS["gemma"], NamedLayout.LBNHC, tp_size=2, pp_size=2)
    assert slab_of(reversed(ranks)) == slab_of(ranks)


def test_a_slab_has_the_scales_of_all_stages() -> None:
    ranks = []
    for stage in range(2):
        rank = attention(0, 1, [str(stage)], pp_rank=stage, pp_size=2)
        scaled = msgspec.structs.replace(rank.groups[0], scales=(TensorScale(str(stage), "k", 0.5 + stage),))
        ranks.append(msgspec.structs.replace(rank, groups=(scaled,)))
    slab = slab_of(ranks)
    assert slab.groups[0].scales == (TensorScale("0", "k", 0.5), TensorScale("1", "k", 1.5))
    for rank in ranks:
        Planner([slab], rank)


def with_common_scale(rank: int, size: int, layout: NamedLayout) -> Shard:
    """Two heads, and beside them, in a region of its own, one page of each layer and block that all heads share."""
    shard = attention(rank, size, ["0", "1"], layout=layout)
    (kv,), (region,) = shard.groups[0].components, shard.regions
    scale = msgspec.structs.replace(kv, name="scale", heads=(HeadRange(0, 1),), total_heads=1, region=1)
    group = msgspec.structs.replace(shard.groups[0], components=(kv, scale))
    return msgspec.structs.replace(shard, groups=(group,), regions=(region, Region(1 << 20, region.length)))


def test_components_with_other_numbers_of_heads_do_not_overlap() -> None:
    sources = [with_common_scale(rank, 2, NamedLayout.BHLNC) for rank in range(2)]
    round_trip(
        sources, [with_common_scale(0, 1, NamedLayout.LBHNC)], [ask("full", 10, [9, 3, 7], [4, 5, 6])], slab_of(sources)
    )


def test_a_latent_is_stored_once() -> None:
    sources = engine(MODELS["latent"], NamedLayout.BHLNC, tp_size=4)
    slab = slab_of(sources)
    requests = [ask("mla", 8, [3, 5], [7, 6])]
    block_bytes = slab.groups[0].components[0].block_stride
    planner = Planner(sources, slab)
    for selector in range(4):
        (plan,) = planner.plans(selector)
        assert plan.source.tp_rank == selector, "the ranks take turns"
        assert plan.lower(requests)[:, 2].tolist() == [block_bytes] * 2


def test_each_replicated_head_is_stored_once() -> None:
    sources = engine(MODELS["grouped-query"], NamedLayout.LBHNC, tp_size=8)
    slab = slab_of(sources)
    plans = Planner(sources, slab).plans(3)
    assert len(plans) == 4
    lengths = np.concatenate([plan.lower([ask("full", 4, [3], [7])])[:, 2] for plan in plans])
    assert lengths.sum() == slab.groups[0].components[0].block_stride


def test_a_rank_of_a_cross_layer_engine_stores_a_block_in_one_descriptor() -> None:
    sources = engine(MODELS["grouped-query"], NamedLayout.BHLNC, tp_size=2)
    plans = Planner(sources, slab_of(sources)).plans(0)
    assert [len(plan.lower([ask("full", 8, [3, 5], [7, 4])])) for plan in plans] == [2, 2]


def test_a_state_takes_one_descriptor_for_each_layer_tap_and_segment() -> None:
    """Three layers, taps and segments each; the recurrent state follows the last tap of the last segment."""
    sources = engine(MODELS["granite"], NamedLayout.BLHNC, tp_size=1)
    (plan,) = Planner(sources, slab_of(sources)).plans(0)
    (rows,) = plan.groups["state"].lower([ask("state", 1, [5], [7])])
    assert len(rows) == 3 * 3 * 3


@pytest.mark.parametrize(
    ("model", "tp_size", "group", "descriptors"),
    [
        ("Qwen3-8B", 1, "full", [1]),
        ("Qwen3-8B", 2, "full", [1, 1]),
        ("DeepSeek-V3", 2, "mla", [1]),
        ("gemma-3-27b-it", 2, "sliding-window-0", [1, 1]),
        ("granite-4.0-h-small", 1, "state-0", [36]),
        ("granite-4.0-h-small", 2, "state-0", [36, 16]),
        ("Qwen3-Next-80B-A3B-Instruct", 2, "state-0", [120, 120]),
    ],
)
def test_descriptors_of_real_models(model: str, tp_size: int, group: str, descriptors: list[int]) -> None:
    """How many each rank needs to store one block; see docs/decisions/order-in-a-slab.md."""
    pytest.importorskip("transformers")
    caches = model_caches(Path(__file__).parents[1] / "model_configs" / f"{model}.json")
    shape = EngineShape(tp_size, NamedLayout.BHLNC, block_size=16)
    ranks = engine_of("prefill", shape, caches).shards(num_blocks=2, base_address=0)
    plans = [plan.groups[group] for plan in Planner(ranks, slab_of(ranks)).plans(0)]
    templates = [[plan.templates(phase) for phase in plan.first_phases()] for plan in plans]
    assert [sum(len(template.runs) for (template,) in phases) for phases in templates] == descriptors


def test_groups_lie_one_behind_the_other() -> None:
    ranks = [hybrid(rank, 2) for rank in range(2)]
    slab = slab_shard(ranks, {"full": 3, "state": 5}, base_address=1 << 30)
    full, state = slab.groups
    first_bytes = [min(part.layer_offsets[0] for part in group.components) for group in slab.groups]
    ends = [group.num_blocks * group.components[0].block_stride for group in slab.groups]
    assert first_bytes == [0, ends[0]]
    assert slab.regions[0].length == sum(ends)
    assert [full.num_blocks, state.num_blocks] == [3, 5]


def test_groups_whose_blocks_have_equal_bytes_share_them() -> None:
    rank, windowed = attention(0, 1, ["0"]), {"kind": CacheKind.SLIDING_WINDOW, "window": 8}
    small = attention(0, 1, ["1"], group_name="small", block_size=2, **windowed)
    window = attention(0, 1, ["2"], group_name="window", **windowed)
    rank = msgspec.structs.replace(rank, groups=(*rank.groups, *small.groups, *window.groups))
    slab = slab_shard([rank], {"full": 3, "small": 7, "window": 2})
    assert [(group.name, group.num_blocks) for group in slab.groups] == [("full", 5), ("small", 7), ("window", 5)]
    block_bytes = [group.components[0].block_stride for group in slab.groups]
    assert block_bytes[0] == block_bytes[2] == 2 * block_bytes[1]
    assert list(map(begin_of, slab.groups)) == [0, 5 * block_bytes[0], 0]
    assert slab.regions[0].length == 5 * block_bytes[0] + 7 * block_bytes[1]


def refusal(ranks: Sequence[Shard], num_blocks: Mapping[str, int]) -> tuple[Reason, str]:
    with pytest.raises(LayoutError) as error:
        slab_shard(ranks, num_blocks)
    return error.value.reason, error.value.message


def test_ranks_of_which_no_slab_can_be_made() -> None:
    rank = attention(0, 1, ["0"])
    assert refusal([rank], {})[0] is Reason.INVALID_LAYOUT
    assert refusal([rank], {"full": 1, "other": 1})[0] is Reason.INVALID_LAYOUT


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"block_size": 8}),
        ({"kind": CacheKind.SLIDING_WINDOW, "window": 8}, {"kind": CacheKind.SLIDING_WINDOW, "window": 9}),
        ({"content": Content.APART}, {"kind": CacheKind.MLA}),
        ({"token_share": TokenShare(0, 2, 1)}, {"token_share": TokenShare(0, 2, 2)}),
    ],
    ids=str,
)
def test_stages_that_differ_make_no_slab(one: dict[str, Any], other: dict[str, Any]) -> None:
    stages = [
        attention(0, 1, [str(stage)], pp_rank=stage, pp_size=2, **each) for stage, each in enumerate((one, other))
    ]
    reason, message = refusal(stages, {"full": 1})
    assert reason is Reason.INVALID_LAYOUT
    assert "differ in kind, window or blocks" in message
