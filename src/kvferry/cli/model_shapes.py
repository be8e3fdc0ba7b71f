"""Cache shapes of a model, from its Hugging Face ``config.json``."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.errors import Reason, SettingsError
from kvferry.layout.cache_group import CacheKind

UNSUPPORTED_KEYS = {
    "mamba_d_state": "Mamba layers",
    "ssm_state_size": "Mamba layers",
    "state_size": "Mamba layers",
    "linear_key_head_dim": "linear-attention layers",
    "index_topk": "an indexer cache beside the latent one",
    "num_kv_shared_layers": "layers that share another's cache",
    "is_encoder_decoder": "an encoder",
}
"""What a configuration has when its cache is of a kind that is not planned yet."""


@dataclass(frozen=True)
class ModelShapes:
    """What of a model decides its cache: layers, KV heads, channels of K (and of V) per head, dtype."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str
    kind: CacheKind


def read_model_shapes(path: Path) -> ModelShapes:
    """Return the shapes of the model whose ``config.json``, or folder with one, is given.

    Raises :class:`SettingsError`: ``invalid-setting`` where the file cannot be read or lacks a number, ``unsupported``
    where the model has a cache of another kind.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SettingsError(Reason.INVALID_SETTING, f"{path} is no model configuration: {error}.") from None
    if not isinstance(config, dict):
        raise SettingsError(Reason.INVALID_SETTING, f"{path} holds no JSON object.")
    nested = config.get("text_config")
    return shapes_of({**config, **nested} if isinstance(nested, dict) else config)


def shapes_of(config: Mapping[str, Any]) -> ModelShapes:
    """Return the shapes that a configuration names.

    >>> shapes_of({"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512})
    ModelShapes(num_layers=2, num_kv_heads=2, head_size=64, dtype='bfloat16', kind=<CacheKind.ATTENTION: 'attention'>)
    """
    _refuse_other_kinds(config)
    layers = _number(config, "num_hidden_layers", "n_layer")
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    if config.get("kv_lora_rank"):
        latent = _number(config, "kv_lora_rank") + _number(config, "qk_rope_head_dim")
        return ModelShapes(layers, 1, latent, dtype, CacheKind.MLA)
    heads = _number(config, "num_attention_heads", "n_head")
    kv_heads = 1 if config.get("multi_query") else int(config.get("num_key_value_heads") or heads)
    head_size = config.get("head_dim") or _number(config, "hidden_size", "n_embd") // heads
    return ModelShapes(layers, kv_heads, int(head_size), dtype, CacheKind.ATTENTION)


def _refuse_other_kinds(config: Mapping[str, Any]) -> None:
    found = next((what for key, what in UNSUPPORTED_KEYS.items() if config.get(key)), None)
    kinds = set(config.get("layer_types") or ["full_attention"])
    if found is None and kinds - {"full_attention", "attention"}:
        found = f"layers of the types {', '.join(sorted(kinds))}"
    slides = config.get("sliding_window") and config.get("use_sliding_window", True) and not config.get("layer_types")
    if found is None and slides:
        found = f"a sliding window of {config['sliding_window']} tokens"
    if found is not None:
        raise SettingsError(
            Reason.UNSUPPORTED,
            f"the model has {found}; caches of full attention and MLA are planned.",
            "Give the shapes of its full-attention layers by hand.",
        )


def _number(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and value > 0:
            return value
    what = f"the model's configuration names no {names[0]}."
    raise SettingsError(Reason.INVALID_SETTING, what, "Give the shapes by hand.")
