"""Layers of vLLM without an engine, to check the kernels that an engine on this machine would choose."""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from kvferry.integrations.vllm.kernels.check import Verdict, compare_layouts
from kvferry.integrations.vllm.kernels.engine import allocate_layers, case_of, make_kernel
from kvferry.layout.named_layouts import NamedLayout

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

LAYER_NAMES = tuple(f"model.layers.{index}.self_attn.attn" for index in range(3))
HEAD_SIZES = (64, 128)
BLOCK_SIZES_ON_CPU, BLOCK_SIZES_ON_GPU = (64, 128), (16, 64)
DTYPES_ON_CPU, DTYPES_ON_GPU = ("float32", "bfloat16"), ("bfloat16",)
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
    dtypes = DTYPES_ON_CPU if on_cpu else DTYPES_ON_GPU
    for dtype in dtypes:
        for head_size, block_size in product(HEAD_SIZES, BLOCK_SIZES_ON_CPU if on_cpu else BLOCK_SIZES_ON_GPU):
            yield from check_attention(dtype, head_size, block_size)
        yield from check_mla(dtype)
    if model is not None:
        yield from check_model(model)


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


def check_model(model: str) -> Iterator[Verdict]:
    """Yield verdicts on the attention of a model, with the sizes, element type and block size of an engine for it."""
    yield from _check(_engine_config(model))


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
