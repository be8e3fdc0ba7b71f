"""Tiny random models for the demo, tests and benchmarks, made on this machine without a download.

The weights are random but deterministic: equal names and library versions give equal folders, so a folder can be kept.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvferry.errors import Reason, SettingsError
from kvferry.models.config import item_size

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MAX_POSITIONS = 8192
VOCABULARY_SIZE = 2048
SETTINGS = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
}
"""Fields of every model's configuration; a recipe may override them."""


@dataclass(frozen=True, slots=True)
class TinyModel:
    """The recipe of a tiny model.

    ``dtype`` is the type of the saved weights. ``num_layers`` (layers whose cache grows with the prompt, so without
    windows and states), ``num_kv_heads`` and ``content_size`` (elements of one token and one KV head in one layer, K
    and V together) give the size of the cache in closed form.

    >>> TINY_MODELS["kv-heavy"].kv_bytes_per_token()
    147456
    """

    name: str
    family: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    content_size: int
    settings: Mapping[str, Any]

    def kv_bytes_per_token(self) -> int:
        """Return the bytes that one token adds to the cache of all layers that keep the whole prompt."""
        return self.num_layers * self.num_kv_heads * self.content_size * item_size(self.dtype)


def _model(
    name: str, family: str, cache: tuple[int, int, int], *, dtype: str = "float32", layers: int, **own: Any
) -> TinyModel:
    """Return a recipe; ``cache`` are ``num_layers``, ``num_kv_heads`` and ``content_size``, ``own`` the settings."""
    settings = {**SETTINGS, "num_hidden_layers": layers, **own}
    return TinyModel(name, family, dtype, *cache, MappingProxyType(settings))


def _qwen3(
    name: str, layers: int, hidden: int, kv_heads: int, head: int, *, dtype: str = "float32", **own: Any
) -> TinyModel:
    own |= {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_key_value_heads": kv_heads, "head_dim": head}
    return _model(name, "qwen3", (layers, kv_heads, 2 * head), dtype=dtype, layers=layers, **own)


def _deepseek_mla(name: str, family: str, **own: Any) -> TinyModel:
    """Return a model whose positions are scaled as in all published models of DeepSeek.

    vLLM's class renames that scaling while it is built.
    """
    return _model(
        name,
        family,
        (4, 1, 512 + 64),
        layers=4,
        moe_intermediate_size=64,
        num_key_value_heads=8,
        kv_lora_rank=512,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": MAX_POSITIONS // 4,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        **own,
    )


def _gemma(name: str, family: str, kinds: str, num_full: int, *, head: int = 64, **own: Any) -> TinyModel:
    """Return a model with layers of several kinds, of which ``num_full`` keep caches of all tokens of their own."""
    own |= {"num_key_value_heads": 4, "head_dim": 64, "sliding_window": 128}
    types = [f"{kind}_attention" for kind in kinds.split()]
    return _model(name, family, (num_full, 4, 2 * head), layers=len(types), layer_types=types, **own)


# The last two of these layers read the caches of earlier ones.
GEMMA_LAYERS = "sliding sliding full sliding full sliding full"
SHARED = {
    "vocab_size_per_layer_input": VOCABULARY_SIZE,
    "hidden_size_per_layer_input": 32,
    "num_kv_shared_layers": 2,
    "tie_word_embeddings": True,
}
_MODELS = (
    _qwen3("qwen3-tiny", layers=8, hidden=256, kv_heads=4, head=64),
    # Of six KV heads three ranks have two each, for which all else is divisible by three too.
    _qwen3("qwen3-six-heads", 6, 384, kv_heads=6, head=64, num_attention_heads=12, vocab_size=2112),
    _qwen3("qwen3-one-head", layers=8, hidden=256, kv_heads=1, head=64),
    # Every other layer is a gated delta net.
    _model(
        "qwen3-next-tiny",
        "qwen3_next",
        (2, 2, 2 * 64),
        layers=4,
        layer_types=["linear_attention", "full_attention"] * 2,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
    ),
    # V2 is dense; V3 has experts in all layers but the first, and compressed queries.
    _deepseek_mla("deepseek-mla-tiny", "deepseek_v2", q_lora_rank=None, first_k_dense_replace=4, topk_method="greedy"),
    _deepseek_mla(
        "deepseek-v3-tiny",
        "deepseek_v3",
        q_lora_rank=128,
        first_k_dense_replace=1,
        topk_method="noaux_tc",
        num_nextn_predict_layers=0,
    ),
    # Two kinds of layers, which form three groups, one of them with fewer layers.
    _gemma("gemma3-tiny", "gemma3_text", "sliding sliding full sliding full", 2, query_pre_attn_scalar=64),
    _gemma("gemma3n-tiny", "gemma3n_text", GEMMA_LAYERS, 2, laurel_rank=16, **SHARED),
    _gemma("gemma4-tiny", "gemma4_text", GEMMA_LAYERS, 2, head=128, global_head_dim=128, **SHARED),
    # Every other layer has a window, and every head an attention sink.
    _model(
        "gpt-oss-tiny",
        "gpt_oss",
        (2, 4, 2 * 64),
        layers=4,
        intermediate_size=128,
        num_key_value_heads=4,
        head_dim=64,
        sliding_window=128,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    _model(
        "granite-tiny",
        "granitemoehybrid",
        (2, 1, 2 * 32),
        layers=5,
        layer_types=["mamba", "mamba", "attention", "mamba", "attention"],
        shared_intermediate_size=512,
        num_key_value_heads=1,
        num_local_experts=0,
        attention_multiplier=32**-0.5,
        mamba_n_heads=8,
        mamba_n_groups=1,
        mamba_d_state=64,
        mamba_d_head=64,
        mamba_d_conv=4,
        mamba_expand=2,
    ),
    _qwen3("kv-heavy", layers=36, hidden=64, kv_heads=8, head=128, dtype="bfloat16"),
    _qwen3("kv-heavy-one-head", layers=36, hidden=64, kv_heads=1, head=128, dtype="bfloat16"),
)
TINY_MODELS = MappingProxyType({model.name: model for model in _MODELS})
"""Every tiny model by name. ``kv-heavy`` has the cache of an 8B model and almost no computation."""


def make_tiny_model(name: str, folder: Path) -> Path:
    """Make the model ``name`` below ``folder``, unless it exists, and return its path.

    The path contains a digest of the recipe. Several processes may call this function at once.
    Raises :class:`SettingsError` for an unknown name. Needs ``transformers``.
    """
    model = find_tiny_model(name)
    recipe = json.dumps([model.name, model.family, model.dtype, dict(model.settings)], sort_keys=True)
    path = folder / f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda draft: _save(model, draft))
    return path


def find_tiny_model(name: str) -> TinyModel:
    """Return the recipe of ``name``.

    >>> find_tiny_model("qwen4-tiny")
    Traceback (most recent call last):
    kvferry.errors.SettingsError: unknown model 'qwen4-tiny'. Use one of: deepseek-mla-tiny, deepseek-v3-tiny, \
gemma3-tiny, gemma3n-tiny, gemma4-tiny, gpt-oss-tiny, granite-tiny, kv-heavy, kv-heavy-one-head, qwen3-next-tiny, \
qwen3-one-head, qwen3-six-heads, qwen3-tiny. [unknown-setting]
    """
    if name in TINY_MODELS:
        return TINY_MODELS[name]
    raise SettingsError(
        Reason.UNKNOWN_SETTING, f"unknown model {name!r}.", f"Use one of: {', '.join(sorted(TINY_MODELS))}."
    )


def write_atomically(path: Path, save: Callable[[Path], None]) -> None:
    draft = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        save(draft)
        draft.chmod(0o755)
        os.rename(draft, path)
    except OSError:
        if not path.exists():  # another process may have made the same folder meanwhile
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _save(model: TinyModel, path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    hide_progress: Any = logging.disable_progress_bar
    make_network: Any = AutoModelForCausalLM.from_config
    hide_progress()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = make_network(_transformers_config(model), dtype=getattr(torch, model.dtype))
        _spread_weights(network)
    network.save_pretrained(path)


def _spread_weights(network: Any) -> None:
    """Enlarge the weights: with the small defaults the logits hardly depend on the context."""
    import torch

    with torch.no_grad():
        for name, weight in network.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)


def _transformers_config(model: TinyModel) -> "PretrainedConfig":
    from transformers import CONFIG_MAPPING

    config_class: Callable[..., PretrainedConfig] = CONFIG_MAPPING[model.family]
    return config_class(**model.settings)
