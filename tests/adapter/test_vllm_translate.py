"""vLLM's cache tensors as components, from views made as vLLM makes them; no engine runs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.model_executor.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvferry.errors import KVFerryError, Reason
from kvferry.integrations.vllm import translate
from kvferry.layout.shard import Atom, CacheKind, HeadRange

NUM_BLOCKS, BLOCK_SIZE, HEAD_SIZE = 6, 32, 8
PAGE = 2 * BLOCK_SIZE * 2 * HEAD_SIZE * 4  # bytes of two heads
ATTENTION: dict[str, Any] = {
    "block_size": BLOCK_SIZE,
    "num_kv_heads": 2,
    "head_size": HEAD_SIZE,
    "dtype": torch.float32,
}
FULL = FullAttentionSpec(**ATTENTION)
WINDOW = SlidingWindowSpec(**ATTENTION, sliding_window=40, extra_retained_tokens=2)
UNIFORM = UniformTypeKVCacheSpecs(block_size=BLOCK_SIZE, kv_cache_specs={"elsewhere": FULL})
STATE = MambaSpec(
    shapes=((3, 24), (2, 8, 4)), dtypes=(torch.float32, torch.float32), block_size=4096, page_size_padded=PAGE
)


def engine(monkeypatch: pytest.MonkeyPatch, isa: str = "vec", tp_size: int = 2, pp_size: int = 1, **layers: Any) -> Any:
    """Return a configuration of an engine whose attention runs on a CPU with this instruction set."""
    monkeypatch.setattr("vllm.v1.attention.backends.cpu_attn._get_attn_isa", lambda *_: isa)
    backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
    attention = SimpleNamespace(get_attn_backend=lambda: backend, head_size=HEAD_SIZE)
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp_size,
            pipeline_parallel_size=pp_size,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
        ),
        model_config=SimpleNamespace(
            get_total_num_kv_heads=lambda: 4,
            dtype=torch.float32,
            model_arch_config=SimpleNamespace(per_layer_overrides=None),
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(static_forward_context={str(n): attention for n in range(5)} | layers),
        num_prefill_lookahead_tokens=0,
    )


def groups(*named: tuple[list[str], Any]) -> KVCacheConfig:
    return KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(layers, spec) for layers, spec in named])


def block_rows(num_pages: int) -> torch.Tensor:
    return torch.zeros(NUM_BLOCKS * num_pages * PAGE, dtype=torch.int8)


def attention_view(rows: torch.Tensor, page: int) -> torch.Tensor:
    """Return page number ``page`` of every block row, as vLLM's ``BLHNC`` does."""
    shape = (NUM_BLOCKS, 2, BLOCK_SIZE, 2 * HEAD_SIZE)
    strides = (len(rows) // NUM_BLOCKS // 4, PAGE // 8, 2 * HEAD_SIZE, 1)
    return rows.view(torch.float32).as_strided(shape, strides, page * PAGE // 4)


def state_view(rows: torch.Tensor, page: int, num_bytes: int) -> torch.Tensor:
    row = len(rows) // NUM_BLOCKS
    return rows.as_strided((NUM_BLOCKS, 1, 1, num_bytes), (row, num_bytes, num_bytes, 1), page * PAGE)


def test_groups_that_interleave_their_layers_overlay_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers have distinct names, and a shorter group leaves the tail of its block rows alone."""
    rows = block_rows(num_pages=2)
    config = groups((["2", "4"], FULL), (["0", "3"], WINDOW), (["1"], WINDOW))
    caches = {"2": attention_view(rows, 0), "4": attention_view(rows, 1), "0": attention_view(rows, 0)}
    caches |= {"3": attention_view(rows, 1), "1": attention_view(rows, 0)}
    shard = translate.shard_of(engine(monkeypatch), config, caches, tp_rank=1)
    assert [group.name for group in shard.groups] == ["0", "1", "2"]
    assert [group.kind for group in shard.groups] == [CacheKind.ATTENTION] + [CacheKind.SLIDING_WINDOW] * 2
    assert [group.window for group in shard.groups] == [0, 42, 42]
    assert [group.component("k").layers for group in shard.groups] == [("2", "4"), ("0", "3"), ("1",)]
    assert [group.component("k").layer_offsets for group in shard.groups] == [(0, PAGE), (0, PAGE), (0,)]
    assert [list(map(repr, group.component("v").heads)) for group in shard.groups] == [["2:4"]] * 3


def test_a_layer_that_reads_the_cache_of_another_layer_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = block_rows(num_pages=1)
    caches = {"0": attention_view(rows, 0), "1": attention_view(rows, 0)}
    shard = translate.shard_of(engine(monkeypatch), groups((["0"], FULL)), caches, tp_rank=0)
    assert shard.groups[0].layers == {"0"}


def test_a_stage_leaves_out_the_groups_of_which_it_has_no_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage gets all groups, with its own layers: an index names the same group in all of them."""
    config = groups(([], FULL), (["3", "4"], WINDOW), ([], UNIFORM), (["1"], WINDOW))
    rows = block_rows(num_pages=2)
    caches = {"3": attention_view(rows, 0), "4": attention_view(rows, 1), "1": attention_view(rows, 0)}
    vllm_config = engine(monkeypatch, pp_size=3)
    translate.check_supported(config)
    assert [shape.block_size for shape in translate.group_shapes(config)] == [BLOCK_SIZE] * 4
    shard = translate.shard_of(vllm_config, config, caches, tp_rank=1, pp_rank=2)
    assert [(group.name, sorted(group.layers)) for group in shard.groups] == [("1", ["3", "4"]), ("3", ["1"])]
    assert shard.rank_name == "rank tp 1/2 pp 2/3"


def test_a_stage_without_any_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KVFerryError, match="no layer of pipeline stage 1 of 2 has a cache"):
        translate.shard_of(engine(monkeypatch, pp_size=2), groups(([], FULL)), {}, tp_rank=0, pp_rank=1)


@pytest.mark.parametrize("isa", ["vec", "vec16"])
def test_planes_name_the_elements_that_the_kernel_reads(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's views of a page are ``[channel][token]`` keys, then ``[token][channel]`` values."""
    rows = torch.arange(NUM_BLOCKS * PAGE // 4, dtype=torch.float32).view(torch.int8)
    view = attention_view(rows, 0)
    shard = translate.shard_of(engine(monkeypatch, isa), groups((["0"], FULL)), {"0": view}, tp_rank=0)
    page = view[3, 1].reshape(-1)
    keys, values = page[: BLOCK_SIZE * HEAD_SIZE], page[BLOCK_SIZE * HEAD_SIZE :]
    elements = {"k": keys.view(HEAD_SIZE, BLOCK_SIZE).T, "v": values.view(BLOCK_SIZE, HEAD_SIZE)}
    for name, expected in elements.items():
        part = shard.groups[0].component(name)
        offset = part.layer_offsets[0] + 3 * part.block_stride + part.head_stride
        strides = (part.token_stride // 4, part.channel_stride // 4)
        found = rows.view(torch.float32).as_strided((BLOCK_SIZE, HEAD_SIZE), strides, offset // 4)
        assert torch.equal(found, expected)


def test_pages_of_other_instruction_sets_are_atoms(monkeypatch: pytest.MonkeyPatch) -> None:
    caches = {"0": attention_view(block_rows(1), 0)}
    [group] = translate.shard_of(engine(monkeypatch, "amx"), groups((["0"], FULL)), caches, tp_rank=0).groups
    assert [part.atom for part in group.components] == [Atom.PAGE]
    assert group.components[0].packing == "cpu_attn:amx:float32:32"


def test_quantised_pages_move_whole_and_name_their_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE,
        num_kv_heads=2,
        head_size=HEAD_SIZE,
        dtype=torch.uint8,
        kv_quant_mode=KVQuantMode.FP8_PER_TENSOR,
    )
    config = engine(monkeypatch)
    for name, scale in (("0", 0.5), ("1", 2.0)):
        layer = config.compilation_config.static_forward_context[name]
        scaled = SimpleNamespace(**vars(layer), _k_scale_float=scale, _v_scale_float=2 * scale)
        config.compilation_config.static_forward_context[name] = scaled
    rows = block_rows(num_pages=2)
    shape, strides = (NUM_BLOCKS, 2, BLOCK_SIZE, 2 * HEAD_SIZE), (2 * PAGE, PAGE // 8, 2 * HEAD_SIZE, 1)
    caches = {str(page): rows.view(torch.uint8).as_strided(shape, strides, page * PAGE) for page in range(2)}
    translate.check_supported(groups((["0", "1"], spec)))
    [group] = translate.shard_of(config, groups((["0", "1"], spec)), caches, tp_rank=0).groups
    [component] = group.components
    assert (component.atom, component.packing) == (Atom.PAGE, "cpu_attn:vec:uint8:32")
    scales = {(scale.layer, scale.tensor): scale.value for scale in group.scales}
    assert scales == {("0", "k"): 0.5, ("0", "v"): 1.0, ("1", "k"): 2.0, ("1", "v"): 4.0}


def mixer(tp_size: int, *, shared_group: bool) -> Any:
    linear: Any = ColumnParallelLinear if shared_group else MergedColumnParallelLinear
    return SimpleNamespace(
        intermediate_size=16 * tp_size,
        n_groups=tp_size,
        ssm_state_size=4,
        num_heads=2 * tp_size,
        head_dim=8,
        conv1d=linear.__new__(linear),
    )


@pytest.mark.parametrize("order", ["SD", "DS"])
@pytest.mark.parametrize("shared_group", [False, True])
def test_states_lie_in_padded_pages_of_bytes(order: str, shared_group: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The view of a state has no shape: it is in the specification, and the padding is in the strides."""
    monkeypatch.setattr("vllm.model_executor.layers.mamba.mamba_utils.get_conv_state_layout", lambda: order)
    conv_shape = (3, 24) if order == "SD" else (24, 3)
    spec = MambaSpec(shapes=(conv_shape, (2, 8, 4)), dtypes=STATE.dtypes, block_size=4096, page_size_padded=PAGE)
    rows, num_bytes = block_rows(num_pages=2), (3 * 24 + 2 * 8 * 4) * 4
    caches = {"m0": state_view(rows, 0, num_bytes), "m1": state_view(rows, 1, num_bytes)}
    config = engine(monkeypatch, m0=mixer(2, shared_group=shared_group))
    [group] = translate.shard_of(config, groups((["m0", "m1"], spec)), caches, tp_rank=1).groups
    assert (group.kind, group.block_size) == (CacheKind.STATE, 1)
    held = {part.name: (repr(part.heads[0]), part.total_heads) for part in group.components}
    grouped = ("0:4", 4) if shared_group else ("4:8", 8)
    assert held == {"conv.x": ("16:32", 32), "conv.B": grouped, "conv.C": grouped, "ssm": ("2:4", 4)}
    channel, tap = (4, 96) if order == "SD" else (12, 4)
    segment = group.component("conv.C")
    assert (segment.head_stride, segment.channel_stride) == (channel, tap)
    assert segment.layer_offsets == (20 * channel, PAGE + 20 * channel)
    assert group.component("ssm").layer_offsets == (3 * 24 * 4, PAGE + 3 * 24 * 4)
    assert {part.block_stride for part in group.components} == {2 * PAGE}


def refusal(config: Any) -> str:
    with pytest.raises(KVFerryError) as found:
        translate.check_supported(config)
    assert found.value.reason is Reason.UNSUPPORTED
    return str(found.value)


def test_what_works_is_not_refused() -> None:
    translate.check_supported(groups((["0"], FULL), (["1"], WINDOW), (["2"], STATE)))


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (ChunkedLocalAttentionSpec(**ATTENTION, attention_chunk_size=64), "a ChunkedLocalAttentionSpec"),
        (FullAttentionSpec(**ATTENTION, kv_quant_mode=KVQuantMode.NVFP4), "quantised"),
        (
            MambaSpec(shapes=STATE.shapes, dtypes=STATE.dtypes, block_size=64, mamba_cache_mode="align"),
            "--no-enable-prefix",
        ),
        (MambaSpec(shapes=STATE.shapes, dtypes=STATE.dtypes, block_size=64, num_speculative_blocks=1), "draft tokens"),
    ],
)
def test_what_cannot_be_moved_is_refused_at_start(spec: Any, text: str) -> None:
    assert text in refusal(groups((["0"], FULL), (["1"], spec)))


def test_a_view_of_another_shape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    halved = attention_view(block_rows(1), 0)[:, :, : BLOCK_SIZE // 2]
    with pytest.raises(KVFerryError, match="a block size that the attention kernel takes whole"):
        translate.shard_of(engine(monkeypatch), groups((["0"], FULL)), {"0": halved}, tp_rank=0)


@pytest.mark.parametrize(
    ("named", "is_refused"),
    [
        ({"swa_num_key_value_heads": 8}, True),
        ({"num_kv_heads": [4, 8]}, True),
        ({"num_key_value_heads": 4, "swa_num_key_value_heads": 2, "kv_heads": None}, False),
        ({}, False),
    ],
)
def test_one_head_held_is_a_replica_only_if_no_layer_has_more_heads(
    named: dict[str, Any], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At TP 8 a layer of 8 heads has none twice; taken for one of 4, ranks 0 and 1 would be each other's replicas."""
    config = engine(monkeypatch, tp_size=8)
    config.model_config.hf_text_config = SimpleNamespace(**named)
    if not is_refused:
        assert translate._heads(config, CacheKind.ATTENTION, "0", 1, (3, 8)) == (4, HeadRange(1, 2))
        return
    with pytest.raises(KVFerryError, match="holds one KV head, of 4 or") as refused:
        translate._heads(config, CacheKind.ATTENTION, "0", 1, (3, 8))
    assert "--tensor-parallel-size 2" in refused.value.remedy


def test_a_drafter_with_more_heads_than_its_target_is_refused_where_ranks_hold_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = engine(monkeypatch, tp_size=8)
    drafter = SimpleNamespace(get_total_num_kv_heads=lambda: 8)
    config.speculative_config = SimpleNamespace(draft_model_config=drafter)
    with pytest.raises(KVFerryError, match="the drafter's"):
        translate._heads(config, CacheKind.ATTENTION, "0", 1, (3, 8))


@pytest.mark.parametrize(
    ("layer", "num_held", "expected"),
    [
        ("layers.0.attn", 1, (4, HeadRange(1, 2))),
        ("layers.1.attn", 1, (2, HeadRange(0, 1))),
        ("layers.2.attn", 2, (16, HeadRange(6, 8))),
        ("layers.2.attn", 1, None),
        ("layers.0.attn", 2, None),
    ],
)
def test_a_layer_may_have_its_own_number_of_heads(
    layer: str, num_held: int, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of 4 heads, 2 in layer 1 and 16 in layer 2, on rank 3 of 8: vLLM's number says who has a head twice."""
    config = engine(monkeypatch, tp_size=8)
    own: list[dict[str, int]] = [{}, {"total_num_kv_heads": 2}, {"total_num_kv_heads": 16}]
    config.model_config.model_arch_config.per_layer_overrides = own
    if expected is not None:
        assert translate._heads(config, CacheKind.ATTENTION, layer, num_held, (3, 8)) == expected
        return
    with pytest.raises(KVFerryError, match=f"a rank of 8 holds {num_held} KV heads of {layer}, which has"):
        translate._heads(config, CacheKind.ATTENTION, layer, num_held, (3, 8))


def test_the_numbers_of_the_target_s_layers_are_not_those_of_a_drafter_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer 1 of the drafter has 16 heads, where layer 1 of the target has 2."""
    config = engine(monkeypatch, tp_size=8)
    config.model_config.model_arch_config.per_layer_overrides = [{}, {"total_num_kv_heads": 2}]
    config.speculative_config = SimpleNamespace(draft_model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 16))
    found = translate._heads(config, CacheKind.ATTENTION, "draft.layers.1.attn", 2, (3, 8))
    assert found == (16, HeadRange(6, 8))


def test_a_scale_for_each_head_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = FullAttentionSpec(**ATTENTION, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
    config = engine(monkeypatch)
    layers = config.compilation_config.static_forward_context
    layers["0"] = SimpleNamespace(**vars(layers["0"]), _k_scale=torch.ones(2), _k_scale_float=1.0, _v_scale_float=1.0)
    with pytest.raises(KVFerryError, match="an FP8 scale for each of 2 heads"):
        translate.shard_of(config, groups((["0"], spec)), {"0": attention_view(block_rows(1), 0)}, tp_rank=0)


def test_one_head_held_where_the_model_has_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KVFerryError, match="holds one KV head where the model has 4"):
        translate._heads(engine(monkeypatch), CacheKind.ATTENTION, "0", 1, (0, 2))
