"""What an engine serves: its model, weights, quantisation and element types."""

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvferry.handoff.messages import Identity
from kvferry.integrations.vllm.settings import Settings
from kvferry.integrations.vllm.translate.weights import weights_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_VOLATILE_CONFIG_KEYS = ("_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype")


def identity_of(vllm_config: "VllmConfig", settings: Settings) -> Identity:
    """Return the identity on which a peer must agree."""
    model = vllm_config.model_config
    text = model.hf_text_config
    return Identity(
        model=settings.model_id or config_digest(model.hf_config.to_dict()),
        weights=settings.model_id or weights_of(str(model.model), model.revision).digest,
        quantization=settings.model_id or quantization_of(model),
        compute_dtype=dtype_name(model.dtype),
        architecture=(model.architectures or ["unknown"])[0],
        kv_dtype=kv_dtype_of(vllm_config),
        num_layers=int(text.num_hidden_layers),
        num_kv_heads=1 if model.use_mla else model.get_total_num_kv_heads(),
        head_size=model.get_head_size(),
    )


def kv_dtype_of(vllm_config: "VllmConfig") -> str:
    """Return the element types of the caches: keys and values, and states where the model has any."""
    cache, model = vllm_config.cache_config, vllm_config.model_config
    names: list[str] = [cache.cache_dtype]
    if model.is_hybrid or model.is_attention_free:
        names += [cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype]
    dtypes = (model.dtype if name == "auto" else name for name in names)
    return "/".join(map(dtype_name, dtypes))


def dtype_name(dtype: object) -> str:
    """Return the name of an element type without its library.

    >>> dtype_name("torch.bfloat16"), dtype_name("fp8_e5m2")
    ('bfloat16', 'fp8_e5m2')
    """
    return str(dtype).removeprefix("torch.")


def quantization_of(model: Any) -> str:
    """Return how the weights are quantised: in the checkpoint, or while they are loaded, which no file records.

    A checkpoint's method is left out: the kernel that runs it, such as ``gptq`` or ``gptq_marlin``, depends on the
    machine.
    """
    is_in_checkpoint = model.model_arch_config.quantization_config is not None
    method = "checkpoint" if is_in_checkpoint else model.quantization or "none"
    details = model.quantization_config
    return method if details is None else f"{method}/{digest(repr(details))}"


def config_digest(config: Mapping[str, Any]) -> str:
    """Return a digest of a model's configuration without the fields that a copy or another library changes."""
    kept = {key: value for key, value in config.items() if key not in _VOLATILE_CONFIG_KEYS}
    return digest(json.dumps(kept, sort_keys=True, default=str))


def digest(text: str) -> str:
    """Return a short digest of a text."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
