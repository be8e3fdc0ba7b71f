"""Engines' configurations as the rules about vLLM's flags see them, and what the rules find."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from pydantic import ValidationError

from kvferry.errors import KVFerryError
from kvferry.integrations.vllm.connector_configs import CONNECTOR, ConnectorConfig
from kvferry.integrations.vllm.preflight import READERS
from kvferry.integrations.vllm.refused_flags import check_flags

PARALLEL = {
    "prefill_context_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "data_parallel_size": 1,
    "data_parallel_index": 0,
    "nnodes_within_dp": 1,
}
MODEL = {"is_hybrid": False, "is_attention_free": False, "use_mla": False, "multimodal_config": None, "model": "m"}
CACHE = {
    "mamba_cache_mode": "none",
    "cache_dtype": "auto",
    "prefix_caching_hash_algo": "sha256_cbor",
    "enable_prefix_caching": True,
}


def refused_lines(make: Callable[[], object]) -> list[str]:
    """Return the lines of the error with which vLLM's configuration ends; none where it is made."""
    try:
        make()
    except ValidationError as error:
        [only] = error.errors()
        return str(only["ctx"]["error"]).splitlines()
    except KVFerryError as error:
        return str(error).splitlines()
    return []


def flag_errors(
    name: str = CONNECTOR,
    settings: dict[str, Any] | None = None,
    role: str = "kv_producer",
    engine_id: str = "engine",
    **changes: Any,
) -> list[KVFerryError]:
    """Return what is refused of an engine whose parallel, model or cache configuration, or itself, has ``changes``."""
    parts = [{key: changes.pop(key, value) for key, value in part.items()} for part in (PARALLEL, MODEL, CACHE)]
    parallel, model, cache = (SimpleNamespace(**part) for part in parts)
    engine = {"num_prefill_lookahead_tokens": 0, "speculative_config": None} | changes
    config: Any = SimpleNamespace(parallel_config=parallel, model_config=model, cache_config=cache, **engine)
    given = {"host_bytes": 1} if name != CONNECTOR and settings is None else settings or {}
    found = READERS[name](given)
    check_flags(config, ConnectorConfig(name, given, role, engine_id), found)
    return found.errors
