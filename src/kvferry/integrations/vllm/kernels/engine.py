"""The kernels of a vLLM engine's own layers, and the check of them: when an engine starts, and without an engine.

Without one, layers of usual sizes have the kernels that an engine on this machine would choose.
"""

import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from kvferry.errors import LayoutError, Reason
from kvferry.integrations.vllm.kernels.check import (
    BLOCK_IDS,
    NUM_BLOCKS,
    Kernel,
    KernelCase,
    Outcome,
    Step,
    Verdict,
    compare_layouts,
    random_tensor,
)
from kvferry.integrations.vllm.translate import forget_scales, spec_of
from kvferry.layout.named_layouts import NamedLayout

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)


class _EngineKernel:
    """Layers of an engine with one back end; ``like`` is a tensor of the activations' type, on their device."""

    def __init__(self, layers: Sequence[Any], builder: Any, like: torch.Tensor) -> None:
        self._layers, self._builder, self._like = layers, builder, like
        self._made: dict[tuple[object, ...], tuple[torch.Tensor, ...]] = {}

    def _inputs(self, layer: int, step: Step, *shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        """Return inputs of these shapes for each token, equal for all layouts and different for layers and steps.

        They are kept for reuse: random numbers cost more than the kernels.
        """
        key = (layer, step, shapes)
        if key not in self._made:
            seed = (layer + 1) * 1_000_000 + step.first * 10
            self._made[key] = tuple(
                random_tensor(seed + argument, (step.num_tokens, *shape), self._like)
                for argument, shape in enumerate(shapes)
            )
        return self._made[key]

    def _metadata(self, step: Step, device: torch.device) -> Any:
        return self._builder.build(0, common_metadata(step, device))


class AttentionKernel(_EngineKernel):
    """The cache write and the attention of an engine's ``Attention`` layers."""

    def __init__(self, layers: Sequence[Any], builder: Any, like: torch.Tensor) -> None:
        super().__init__(layers, builder, like)
        self._write_is_part_of_attention = layers[0].get_attn_backend().forward_includes_kv_cache_update
        self._last_cache: dict[int, tuple[object, ...]] = {}

    def write(self, layer: int, cache: torch.Tensor, step: Step) -> None:
        self._renew_scales(layer, cache)
        if self._write_is_part_of_attention:
            self.attend(layer, cache, step)
            return
        module = self._layers[layer]
        _, key, value = self._tokens(layer, step)
        module.impl.do_kv_cache_update(module, key, value, cache, _slot_mapping(step, cache.device))

    def attend(self, layer: int, cache: torch.Tensor, step: Step) -> torch.Tensor:
        self._renew_scales(layer, cache)
        module = self._layers[layer]
        query, key, value = self._tokens(layer, step)
        output = query.new_zeros(step.num_tokens, module.num_heads, module.head_size_v)
        module.impl.forward(module, query, key, value, cache, self._metadata(step, cache.device), output)
        return output

    def _renew_scales(self, layer: int, cache: torch.Tensor) -> None:
        """Make a kernel with scales in the slots renew its views of them for each new cache."""
        if self._last_cache.get(layer) != (identity := (cache.data_ptr(), cache.stride())):
            self._last_cache[layer] = identity
            forget_scales(self._layers[layer])

    def _tokens(self, layer: int, step: Step) -> tuple[torch.Tensor, ...]:
        """Return query, key and value."""
        each = self._layers[layer]
        key, value = (each.num_kv_heads, each.head_size), (each.num_kv_heads, each.head_size_v)
        return self._inputs(layer, step, (each.num_heads, each.head_size), key, value)


class MLAKernel(_EngineKernel):
    """The cache write and the decode of an engine's ``MLAAttention`` layers; prompts are attended without the cache."""

    def write(self, layer: int, cache: torch.Tensor, step: Step) -> None:
        module, slots = self._layers[layer], _slot_mapping(step, cache.device)
        content, key = self._inputs(layer, step, (module.kv_lora_rank,), (1, module.qk_rope_head_dim))
        module.impl.do_kv_cache_update(content, key, cache.squeeze(1), slots, module.kv_cache_dtype, module._k_scale)

    def attend(self, layer: int, cache: torch.Tensor, step: Step) -> torch.Tensor | None:
        if step.num_tokens > 1:
            return None
        module = self._layers[layer]
        shapes = (module.num_heads, module.kv_lora_rank), (module.num_heads, module.qk_rope_head_dim)
        query, metadata = self._inputs(layer, step, *shapes), self._metadata(step, cache.device)
        answer: torch.Tensor = module.impl.forward_mqa(query, cache.squeeze(1), metadata, module)[0]
        return answer


def ask_for_amx() -> None:
    """Ask Linux for AMX in this process, where the processor has AMX.

    vLLM 0.32's attention in bfloat16 uses AMX, but of vLLM only products of matrices ask, and those with small weights
    not for a single token. So a decode engine whose first request is received would end by SIGILL.
    """
    torch.cpu._init_amx()


def make_kernel(vllm_config: "VllmConfig", layer_names: Sequence[str], spec: Any, device: torch.device) -> Kernel:
    """Return the kernel of layers with one back end, from the configuration's forward context."""
    from vllm.config import set_current_vllm_config

    if device.type == "cpu":
        ask_for_amx()
    layers = [vllm_config.compilation_config.static_forward_context[name] for name in layer_names]
    backend = layers[0].get_attn_backend()
    with set_current_vllm_config(vllm_config):
        builder = backend.get_builder_cls()(spec, list(layer_names), vllm_config, device)
    dtype: Any = vllm_config.model_config.dtype
    like = torch.empty(0, dtype=dtype, device=device)
    return MLAKernel(layers, builder, like) if backend.is_mla() else AttentionKernel(layers, builder, like)


def allocate_layers(
    spec: Any, layer_names: Sequence[str], device: torch.device, layout: NamedLayout
) -> list[torch.Tensor]:
    """Return vLLM's own views of ``NUM_BLOCKS`` blocks of these layers, in a new buffer."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, compute_layout_strides
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    order = KVCacheLayout[layout.name]
    names = list(layer_names)
    layer_stride, block_stride, *_ = compute_layout_strides(spec, NUM_BLOCKS, len(names), order)
    size = spec.page_size_bytes * NUM_BLOCKS * len(names)
    tensors = [KVCacheTensor(size=size, layers=names, layer_stride=layer_stride, block_stride=block_stride)]
    views = allocate_kv_cache(KVCacheConfig(NUM_BLOCKS, tensors, [KVCacheGroupSpec(names, spec)]), device, order)
    return [views[name] for name in names]


def case_of(vllm_config: "VllmConfig", layer_name: str, spec: Any) -> KernelCase:
    """Return the case of that layer's kernel, for verdicts."""
    backend = vllm_config.compilation_config.static_forward_context[layer_name].get_attn_backend()
    dtype = str(spec.dtype).removeprefix("torch.")
    return KernelCase(backend.get_name(), dtype, spec.head_size, spec.block_size)


def check_engine_kernels(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    kv_caches: Mapping[str, torch.Tensor],
    layout: NamedLayout,
) -> None:
    """Run the engine's kernels on a few blocks in its cross-layer layout before the engine computes.

    Raises :class:`LayoutError` (kernel-cannot-read-layout).
    """
    if not layout.is_cross_layer:
        return
    began_at = time.perf_counter()
    for verdict in _engine_verdicts(vllm_config, kv_cache_config, kv_caches, layout):
        if verdict.outcome is Outcome.NOT_CHECKED:
            logger.warning("kvferry: the engine's kernel could not be checked. %s", verdict)
        elif verdict.fails:
            raise LayoutError(
                Reason.KERNEL_CANNOT_READ_LAYOUT,
                f"{verdict}; the largest difference is {verdict.difference:.3g}.",
                f"Set VLLM_KV_CACHE_LAYOUT to {layout.per_layer}; 'kvferry doctor --kernels' shows which layouts this "
                "machine's kernels read.",
            )
    logger.info("kvferry: kernels checked on layout %s in %.3f s", layout, time.perf_counter() - began_at)


def _engine_verdicts(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    kv_caches: Mapping[str, torch.Tensor],
    layout: NamedLayout,
) -> Iterator[Verdict]:
    """Yield a verdict for each kind of layer of each group, from its first and its last layer."""
    for group in kv_cache_config.kv_cache_groups:
        kinds: dict[KernelCase, list[str]] = {}
        for name in group.layer_names:
            if _is_checkable(spec_of(group, name), kv_caches[name]):
                kinds.setdefault(case_of(vllm_config, name, spec_of(group, name)), []).append(name)
        for case, members in kinds.items():
            names = list(dict.fromkeys((members[0], members[-1])))
            spec = spec_of(group, names[0])
            device = kv_caches[names[0]].device
            allocate = partial(_allocate_as_engine, kv_cache_config, spec, names, device, layout)
            try:
                kernel = make_kernel(vllm_config, names, spec, device)
            except Exception as error:
                yield Verdict(case, layout, Outcome.NOT_CHECKED, 0.0, f"cannot be run by itself: {error}")
                continue
            try:
                yield from compare_layouts(kernel, case, allocate, (layout,), layout.per_layer)
            finally:
                # The kernels must make their views of the engine's own cache.
                for name in names:
                    forget_scales(vllm_config.compilation_config.static_forward_context[name])


def _allocate_as_engine(
    kv_cache_config: "KVCacheConfig",
    spec: Any,
    layer_names: Sequence[str],
    device: torch.device,
    engine_layout: NamedLayout,
    layout: NamedLayout,
) -> list[torch.Tensor]:
    """Return views with the engine's own strides and offsets in its own layout, dense ones in any other.

    Where blocks are outermost only the buffer's size depends on the number of blocks.
    """
    if layout is not engine_layout:
        return allocate_layers(spec, layer_names, device, layout)
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    tensors = [
        replace(tensor, size=NUM_BLOCKS * tensor.block_stride)
        for tensor in kv_cache_config.kv_cache_tensors
        if not tensor.host_resident
    ]
    few = replace(kv_cache_config, num_blocks=NUM_BLOCKS, kv_cache_tensors=tensors)
    views = allocate_kv_cache(few, device, KVCacheLayout[layout.name])
    return [views[name] for name in layer_names]


def _is_checkable(spec: Any, cache: torch.Tensor) -> bool:
    """Return whether the cache holds keys and values of tokens: no layout makes a kernel read Mamba states wrongly."""
    from vllm.v1.kv_cache_interface import AttentionSpec

    return isinstance(spec, AttentionSpec) and spec.tokens_per_state == 1 and cache.dim() == 4


def _slot_mapping(step: Step, device: torch.device) -> torch.Tensor:
    return torch.tensor(step.slots(), dtype=torch.int64, device=device)


def common_metadata(step: Step, device: torch.device) -> Any:
    """Return vLLM's description of a batch of one request."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, step.num_tokens], dtype=torch.int32)
    lengths = torch.tensor([step.end], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=lengths.to(device),
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=1,
        num_actual_tokens=step.num_tokens,
        max_query_len=step.num_tokens,
        max_seq_len=step.end,
        block_table_tensor=torch.tensor([BLOCK_IDS], dtype=torch.int32, device=device),
        slot_mapping=_slot_mapping(step, device),
        positions=torch.arange(step.first, step.end, device=device),
        is_prefilling=torch.tensor([step.first == 0]),
    )


LAYER_NAMES = tuple(f"model.layers.{index}.self_attn.attn" for index in range(3))
HEAD_SIZES = (64, 128)
NUM_HEADS, NUM_KV_HEADS = 4, 2
MLA_SIZES = MappingProxyType(
    {"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
)
_SMALL = MappingProxyType(
    {
        "vocab_size": 64,
        "hidden_size": 256,
        "intermediate_size": 64,
        "num_hidden_layers": len(LAYER_NAMES),
        "num_attention_heads": NUM_HEADS,
        "max_position_embeddings": 2048,
    }
)
_EXPERTS = MappingProxyType({"n_routed_experts": 4, "first_k_dense_replace": len(LAYER_NAMES)})


def check_samples(model: str | None = None) -> Iterator[Verdict]:
    """Yield verdicts on all layouts: attention of usual sizes, MLA, and the sizes of ``model`` where one is named."""
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    block_sizes, dtypes = ((64, 128), ("float32", "bfloat16")) if on_cpu else ((16, 64), ("bfloat16",))
    for dtype in dtypes:
        for head_size, block_size in product(HEAD_SIZES, block_sizes):
            yield from check_attention(dtype, head_size, block_size)
        yield from check_mla(dtype)
    if model is not None:
        yield from _check(_engine_config(model))


def check_attention(dtype: str, head_size: int, block_size: int) -> Iterator[Verdict]:
    """Yield verdicts on grouped-query attention; ``block_size`` in tokens."""
    recipe = {"num_key_value_heads": NUM_KV_HEADS, "head_dim": head_size}
    with _small_model("Qwen3ForCausalLM", "qwen3", recipe) as path:
        yield from _check(_engine_config(path, dtype=dtype, block_size=block_size))


def check_mla(dtype: str) -> Iterator[Verdict]:
    """Yield verdicts on multi-head latent attention, with the block size that the back end needs.

    On a processor with AMX, vLLM takes AMX_MLA, which ends engines in float32: there one must ask for CPU_MLA.
    """
    recipe = {"num_key_value_heads": NUM_HEADS, **MLA_SIZES, **_EXPERTS}
    backend = {"attention_backend": "CPU_MLA"} if dtype == "float32" else {}
    with _small_model("DeepseekV2ForCausalLM", "deepseek_v2", recipe) as path:
        yield from _check(_engine_config(path, dtype=dtype, **backend))


def main() -> None:
    """Write verdicts to the file named first, one JSON object a line; a second argument is a model."""
    torch.set_num_threads(1)
    path, *model = sys.argv[1:]
    with Path(path).open("wb") as file:
        for verdict in check_samples(*model):
            file.write(msgspec.json.encode(verdict) + b"\n")
            file.flush()


@contextmanager
def _small_model(architecture: str, model_type: str, recipe: Mapping[str, Any]) -> Iterator[str]:
    """Yield a folder with the configuration of a model, which needs no weights."""
    with tempfile.TemporaryDirectory(prefix="kvferry-kernels-") as folder:
        config = {"architectures": [architecture], "model_type": model_type, **_SMALL, **recipe}
        Path(folder, "config.json").write_text(json.dumps(config))
        yield folder


def _engine_config(model: str, **arguments: Any) -> "VllmConfig":
    from vllm.engine.arg_utils import EngineArgs

    made = EngineArgs(model=model, skip_tokenizer_init=True, enforce_eager=True, **arguments).create_engine_config()
    made.cache_config.kv_cache_layout = NamedLayout.LBHNC.value  # some builders look at it
    return made


def _check(vllm_config: "VllmConfig") -> Iterator[Verdict]:
    device = torch.device(vllm_config.device_config.device or "cpu")
    layers = _make_layers(vllm_config)
    spec = layers[0].get_kv_cache_spec(vllm_config)
    kernel = make_kernel(vllm_config, LAYER_NAMES, spec, device)
    allocate = partial(allocate_layers, spec, LAYER_NAMES, device)
    yield from compare_layouts(kernel, case_of(vllm_config, LAYER_NAMES[0], spec), allocate, tuple(NamedLayout))


def _make_layers(vllm_config: "VllmConfig") -> list[Any]:
    """Return layers as a model would make them: vLLM chooses their back end by the default element type."""
    from vllm.config import set_current_vllm_config

    model = vllm_config.model_config
    make = _make_mla if model.use_mla else _make_attention
    default = torch.get_default_dtype()
    dtype: Any = model.dtype
    torch.set_default_dtype(dtype)
    try:
        with set_current_vllm_config(vllm_config):
            return [make(model, cache_config=vllm_config.cache_config, prefix=name) for name in LAYER_NAMES]
    finally:
        torch.set_default_dtype(default)


def _make_attention(model: "ModelConfig", **arguments: Any) -> Any:
    from vllm.model_executor.layers.attention import Attention

    head_size = model.get_head_size()
    num_heads = model.hf_text_config.num_attention_heads
    return Attention(num_heads, head_size, head_size**-0.5, model.get_total_num_kv_heads(), **arguments)


def _make_mla(model: "ModelConfig", **arguments: Any) -> Any:
    from vllm.model_executor.layers.attention import MLAAttention

    text = model.hf_text_config
    sizes = {name: getattr(text, name) for name in MLA_SIZES}
    width = text.num_attention_heads * (text.qk_nope_head_dim + text.v_head_dim)
    projection: Any = torch.nn.Linear(text.kv_lora_rank, width, bias=False)
    scale = (text.qk_nope_head_dim + text.qk_rope_head_dim) ** -0.5
    return MLAAttention(text.num_attention_heads, scale, kv_b_proj=projection, **sizes, **arguments)


if __name__ == "__main__":
    main()
