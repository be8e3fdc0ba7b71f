"""What an engine's models are, recorded once, before vLLM builds any of them.

vLLM's model classes change the configuration while they are built, in the workers only: ``deepseek_v2.py`` renames the
scaling of positions, ``falcon_h1.py`` adds a field, layers of attention choose the type of the cache. So the scheduler
and its workers would read other values from one object, and an engine whose worker shares the scheduler's process
other values than one with processes of workers. The record is made in the process that makes the engine's
configuration, and travels to all others inside it.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvferry.errors import Reason, SettingsError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_VOLATILE_CONFIG_KEYS = ("_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype")
_RECORD = "_kvferry_record"
LLAMA4_LONG_TOKENS = 32768
"""Llama 4 scales queries by position where ``--max-model-len`` is greater, unless it is told otherwise."""


@dataclass(frozen=True, slots=True)
class RecordedModel:
    """What the configuration of one model of an engine says.

    ``config`` is a digest of the model's Hugging Face configuration with the operator's changes. ``positions`` says
    which of two scalings by position an engine's other options have chosen; empty for a model that has one.
    ``kv_dtype`` names the element types of the caches: keys and values, and states where the model has any.
    """

    config: str
    positions: str
    architectures: tuple[str, ...]
    quantization: str
    compute_dtype: str
    kv_dtype: str
    num_layers: int
    num_kv_heads: int
    head_size: int


def record_models(vllm_config: "VllmConfig") -> None:
    """Record the engine's model and its drafter, each once: a model that has a record may have been built since."""
    drafter = getattr(vllm_config.speculative_config, "draft_model_config", None)
    for model in (vllm_config.model_config, drafter):
        if model is not None and _RECORD not in vars(model):
            vars(model)[_RECORD] = _record(vllm_config, model)


def recorded(model: "ModelConfig") -> RecordedModel:
    """Return the record of one of an engine's models. Raises :class:`SettingsError` (unsupported) without one."""
    found: RecordedModel | None = vars(model).get(_RECORD)
    if found is None:
        raise SettingsError(
            Reason.UNSUPPORTED,
            f"the model {model.model} was not recorded when vLLM made the engine's configuration: vLLM had not loaded "
            "kvferry by then.",
            "Let vLLM load kvferry's plugin: leave VLLM_PLUGINS unset, or name kvferry in it.",
        )
    return found


def dtype_name(dtype: object) -> str:
    """Return the name of an element type without its library.

    >>> dtype_name("torch.bfloat16"), dtype_name("fp8_e5m2")
    ('bfloat16', 'fp8_e5m2')
    """
    return str(dtype).removeprefix("torch.")


def digest(text: str) -> str:
    """Return a short digest of a text."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _record(vllm_config: "VllmConfig", model: "ModelConfig") -> RecordedModel:
    return RecordedModel(
        config=_config_digest(model.hf_config.to_dict()),
        positions=_positions(model),
        architectures=tuple(model.architectures or ["unknown"]),
        quantization=_quantization(model),
        compute_dtype=dtype_name(model.dtype),
        kv_dtype=_kv_dtype(vllm_config, model),
        num_layers=int(model.hf_text_config.num_hidden_layers),
        num_kv_heads=1 if model.use_mla else model.get_total_num_kv_heads(),
        head_size=model.get_head_size(),
    )


def _positions(model: "ModelConfig") -> str:
    """Return which of two scalings the options have chosen: of the tables of LongRoPE, or of Llama 4's queries."""
    text, limit = model.hf_text_config, 0
    if text.model_type == "llama4_text":
        return f", attn-temperature-tuning {'on' if _tunes_temperature(model) else 'off'}"
    for rope in _rope_parameters(text):
        if rope.get("rope_type") == "longrope":
            limit = int(rope.get("original_max_position_embeddings") or text.original_max_position_embeddings)
    if not limit:
        return ""
    return f", max-model-len {'above' if model.max_model_len > limit else 'up to'} {limit}"


def _tunes_temperature(model: "ModelConfig") -> bool:
    """Decide as ``llama4.py`` does: the configuration of generation and its overrides come before the length."""
    generation = {**model.try_get_generation_config(), **model.override_generation_config}
    return bool(generation.get("attn_temperature_tuning", model.max_model_len > LLAMA4_LONG_TOKENS))


def _rope_parameters(text: Any) -> list[Mapping[str, Any]]:
    """Return the positions' parameters: one object, or one for each kind of layer."""
    found = getattr(text, "rope_parameters", None) or {}
    each = [value for value in found.values() if isinstance(value, Mapping)]
    return each or [found]


def _kv_dtype(vllm_config: "VllmConfig", model: "ModelConfig") -> str:
    cache = vllm_config.cache_config
    names: list[str] = [cache.cache_dtype]
    if model.is_hybrid or model.is_attention_free:
        names += [cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype]
    dtypes = (model.dtype if name == "auto" else name for name in names)
    return "/".join(map(dtype_name, dtypes))


def _quantization(model: "ModelConfig") -> str:
    """Return how the weights are quantised: in the checkpoint, or while they are loaded, which no file records.

    A checkpoint's method is left out: the kernel that runs it, such as ``gptq`` or ``gptq_marlin``, depends on the
    machine.
    """
    is_in_checkpoint = model.model_arch_config.quantization_config is not None
    method = "checkpoint" if is_in_checkpoint else model.quantization or "none"
    details = model.quantization_config
    return method if details is None else f"{method}/{digest(repr(details))}"


def _config_digest(config: Mapping[str, Any]) -> str:
    """Return a digest of a model's configuration without the fields that a copy or another library changes."""
    kept = {key: value for key, value in config.items() if key not in _VOLATILE_CONFIG_KEYS}
    return digest(json.dumps(kept, sort_keys=True, default=str))
