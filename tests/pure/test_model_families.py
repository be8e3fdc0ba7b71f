"""Cache groups of well-known models, as vLLM forms them, and the descriptors of a request.

The configurations are the published ones; tests/adapter/test_models_against_vllm.py compares all of them with vLLM.
"""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.plan_report import Blocks, EngineShape, PlanReport, make_report
from kvferry.errors import LayoutError
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import CacheKind
from kvferry.layout.states import gated_delta_segments, mamba2_segments
from kvferry.models.config import ModelConfig
from kvferry.models.families import BY_HAND, ItemSizes, ModelCaches, caches_of, layer_caches
from kvferry.models.groups import (
    AttentionCache,
    LayerGroup,
    RankMemory,
    StateCache,
    form_groups,
    model_shard,
    split_layers,
)

pytest.importorskip("transformers")

CONFIGS = Path(__file__).parents[1] / "model_configs"
QWEN_NEXT, GRANITE_SMALL, GEMMA = "Qwen3-Next-80B-A3B-Instruct", "granite-4.0-h-small", "gemma-3-27b-it"
HYBRIDS = (GRANITE_SMALL, QWEN_NEXT)
MODELS = (*HYBRIDS, GEMMA, "Qwen3-8B", "Llama-3.1-8B-Instruct", "DeepSeek-V3", "gpt-oss-120b", "Falcon-H1-7B-Instruct")
FULL = {"num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
GRANITE = {
    **FULL,
    "model_type": "granitemoehybrid",
    "hidden_size": 256,
    "layer_types": (["mamba"] * 3 + ["attention"]) * 3,
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}


def caches_from(config: dict[str, Any]) -> ModelCaches:
    return ModelCaches(tuple(layer_caches(ModelConfig(config), ItemSizes(cache=2, state=2))), BY_HAND)


def groups_of(config: dict[str, Any]) -> tuple[LayerGroup, ...]:
    return form_groups(caches_from(config).named())


def published(model: str) -> ModelCaches:
    return caches_of(CONFIGS / f"{model}.json", None, None, None, "bfloat16")


def report_of(model: str, layout: str, tokens: int, prefill_tp: int, decode_tp: int, **more: Any) -> PlanReport:
    engines = [EngineShape(tp, NamedLayout(layout), 16, **more) for tp in (prefill_tp, decode_tp)]
    return make_report(published(model), *engines, tokens, Blocks.SCATTERED)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("Qwen3-8B", {"attention": [36]}),
        ("Llama-3.1-8B-Instruct", {"attention": [32]}),
        ("DeepSeek-V3", {"mla": [61]}),
        (GEMMA, {"sliding-window": [9, 9, 9, 9, 8, 8], "attention": [10]}),
        ("gpt-oss-120b", {"sliding-window": [18], "attention": [18]}),
        (GRANITE_SMALL, {"state": [4] * 9, "attention": [4]}),
        (QWEN_NEXT, {"state": [12] * 3, "attention": [12]}),
    ],
)
def test_groups_of_known_models(model: str, expected: dict[str, list[int]]) -> None:
    caches = published(model)
    groups = form_groups(caches.named())
    found: dict[str, list[int]] = {}
    for group in groups:
        found.setdefault(group.kind.value, []).append(len(group.layers))
    assert found == expected
    layers = sorted(int(layer) for group in groups for layer in group.layers)
    assert layers == list(range(len(caches.layers)))


def test_groups_take_every_so_many_th_layer() -> None:
    groups = groups_of({**FULL, "model_type": "gemma3_text", "sliding_window": 64, "sliding_window_pattern": 3})
    assert [group.layers for group in groups] == [("0", "3", "6", "9"), ("1", "4", "7", "10"), ("2", "5", "8", "11")]
    assert [group.name for group in groups] == ["sliding-window-0", "sliding-window-1", "full"]
    assert [getattr(group.cache, "window", None) for group in groups] == [64, 64, 0]


def test_kinds_of_nearly_equal_number_get_one_group_each() -> None:
    """13 full and 12 sliding layers make two groups of 13, not three of 12; at half as many more they are split."""
    full, slides = (AttentionCache(num_kv_heads=1, head_size=8, itemsize=2, window=window) for window in (0, 16))
    for num_full, expected in ((13, [12, 13]), (17, [12, 17]), (18, [12, 9, 9])):
        caches = dict(enumerate([slides] * 12 + [full] * num_full))
        groups = form_groups({str(layer): cache for layer, cache in caches.items()})
        assert [len(group.layers) for group in groups] == expected


def test_layer_types_go_before_the_pattern() -> None:
    types = ["full_attention"] * 9 + ["sliding_attention"] * 3
    more = {"sliding_window": 64, "sliding_window_pattern": 3, "layer_types": types}
    groups = groups_of({**FULL, "model_type": "gemma3_text", **more})
    assert [(group.kind, len(group.layers)) for group in groups] == [
        (CacheKind.ATTENTION, 3),
        (CacheKind.ATTENTION, 3),
        (CacheKind.ATTENTION, 3),
        (CacheKind.SLIDING_WINDOW, 3),
    ]


CONV = {"kernel_size": 4, "itemsize": 2}


def test_states_are_read_from_their_own_fields() -> None:
    granite = groups_of(GRANITE)[0].cache
    mamba = StateCache(split=mamba2_segments, sizes=(512, 1, 16), num_heads=8, num_channels=64 * 16, **CONV)
    assert granite == mamba
    assert groups_of({**GRANITE, "mamba_d_head": "auto"})[0].cache == granite
    published_cache = form_groups(published(QWEN_NEXT).named())[0].cache
    sizes = (16, 128, 32, 128)
    delta = StateCache(split=gated_delta_segments, sizes=sizes, num_heads=32, num_channels=128 * 128, **CONV)
    assert published_cache == delta


def test_a_granite_of_attention_alone_is_plain() -> None:
    groups = groups_of({**GRANITE, "layer_types": ["attention"] * 12})
    assert [group.kind for group in groups] == [CacheKind.ATTENTION]


@pytest.mark.parametrize("layout", ["BHLNC", "BLHNC", "BLNHC", "LBHNC", "LBNHC", "LHBNC"])
@pytest.mark.parametrize("model", [GEMMA, GRANITE_SMALL])
def test_groups_overlay_one_region_and_never_a_block(model: str, layout: str) -> None:
    """The rules of the layout, from its own numbers: a cross-layer block is a row, others are pages of one layer."""
    caches = published(model)
    groups = form_groups(caches.named())
    mixed, block = model in HYBRIDS, 528 if model in HYBRIDS else 16
    memory = RankMemory(layout=NamedLayout(layout), block_size=block, num_blocks=6, tp_size=2)
    layers = frozenset(caches.named())
    if mixed and layout in ("BHLNC", "LHBNC"):
        with pytest.raises(LayoutError, match=r"Use (BLHNC|LBHNC)"):
            model_shard(groups, layers, memory)
        return
    shard = model_shard(groups, layers, memory)
    page = block * (4 if mixed else 8) * 2 * 128 * 2
    most = max(len(group.layers) for group in groups)
    assert shard.regions[0].length == page * most * memory.num_blocks
    for group in shard.groups:
        first = group.components[0]
        assert min(first.layer_offsets) == 0
        if layout.startswith("B"):
            assert {part.block_stride for part in group.components} == {page * most}
        if layout in ("BLHNC", "BLNHC"):
            assert first.layer_offsets == tuple(page * index for index in range(len(group.layers)))
        if layout in ("LBHNC", "LBNHC"):
            assert first.layer_offsets == tuple(page * memory.num_blocks * index for index in range(len(group.layers)))


def test_an_uneven_rest_goes_to_the_stages_before_the_last() -> None:
    assert [split_layers(number, 4) for number in (8, 9, 10, 11)] == [
        (2, 2, 2, 2),
        (2, 2, 3, 2),
        (2, 3, 3, 2),
        (3, 3, 3, 2),
    ]


@pytest.mark.parametrize("layout", ["BHLNC", "LBHNC"])
@pytest.mark.parametrize("model", MODELS)
def test_every_known_model_is_planned_exactly(model: str, layout: str) -> None:
    report = report_of(model, layout, 1024, 4, 2)
    assert report.failures == ()
    assert report.descriptors > 0


@pytest.mark.parametrize("model", [GEMMA, *HYBRIDS])
def test_hybrids_cross_pipeline_stages(model: str) -> None:
    report = report_of(model, "BLHNC", 1100, 1, 2, pp=2)
    assert report.failures == ()


def test_a_window_moves_only_its_blocks() -> None:
    report = report_of("gpt-oss-120b", "BHLNC", 10240, 1, 1)
    moved = {request.group: request.last_token - request.first_token for request in report.requests}
    assert moved == {"sliding-window": 128, "full": 10240}
    counts = dict(report.pairs[0].groups)
    assert counts["sliding-window"].descriptors == 8
    assert counts["full"].descriptors == 640
    window = next(request for request in report.requests if request.group == "sliding-window")
    assert window.source_ids[:-8].tolist() == [0] * 632
    assert all(window.source_ids[-8:])


def test_cross_layer_hybrids_need_one_descriptor_for_a_block_and_group() -> None:
    """At most one for each block: the padding between Granite's pages of states moves with them."""
    report = report_of(GEMMA, "BHLNC", 4096, 2, 2)
    for pair in report.pairs:
        for name, summary in pair.groups:
            request = next(request for request in report.requests if request.group == name)
            assert summary.descriptors == math.ceil((request.last_token - request.first_token) / 16)
    report = report_of(GRANITE_SMALL, "BLHNC", 5280, 2, 2)
    for pair in report.pairs:
        for name, summary in pair.groups:
            assert summary.descriptors == (10 if name == "full" else 1)


def test_states_that_fill_their_pages_are_one_descriptor() -> None:
    """128 taps of 544 channels and 8 heads of 64 by 16: as many bytes as 4864 tokens of one head of 8."""
    config = {**GRANITE, "num_key_value_heads": 1, "head_dim": 8, "mamba_d_conv": 129}
    assert 2 * (128 * (512 + 2 * 16) + 8 * 64 * 16) == 4864 * 2 * 8 * 2
    engines = [EngineShape(1, NamedLayout.BLHNC, 16)] * 2
    report = make_report(caches_from(config), *engines, 100, Blocks.SCATTERED)
    assert report.prefill.block_size == 4864
    assert [summary.descriptors for _, summary in report.pairs[0].groups] == [1, 1, 1, 1]


def test_a_layout_that_cannot_hold_states_is_replaced_with_a_note() -> None:
    report = report_of(GRANITE_SMALL, "BHLNC", 1024, 1, 1)
    assert report.prefill.layout is NamedLayout.BLHNC
    assert any("layout BHLNC is refused" in note for note in report.prefill.notes())
    assert any("528 tokens instead of 16" in note for note in report.prefill.notes())
    assert report_of(GEMMA, "BHLNC", 64, 1, 1).prefill.notes() == []


def test_block_sizes_follow_the_tensor_parallel_size() -> None:
    """Qwen3-Next at TP 4 replicates its 2 heads and halves its states, so that its blocks are half as long."""
    report = report_of(QWEN_NEXT, "BLHNC", 1088, 4, 2)
    assert (report.prefill.block_size, report.decode.block_size) == (272, 544)
    assert report.failures == ()


def test_the_table_of_models_counts_both_layouts(tmp_path: Path) -> None:
    folder, output = tmp_path / "configs", tmp_path / "models.json"
    folder.mkdir()
    (folder / "Qwen3-8B.json").write_bytes((CONFIGS / "Qwen3-8B.json").read_bytes())
    script = Path(__file__).parents[2] / "benchmarks/plan_models.py"
    command = [sys.executable, str(script), str(folder), "--tokens", "64,128", "--verify", "64", "--json", str(output)]
    subprocess.run(command, check=True, capture_output=True)
    rows = json.loads(output.read_text())
    assert [(row["tokens"], row["cross_layer"], row["per_layer"], row["verified"]) for row in rows] == [
        (64, 16, 16 * 36, True),
        (128, 32, 32 * 36, False),
    ]
