"""Prefill and decode engines with kvferry as an application of Ray Serve LLM, on a CPU. See ray.md.

python docs/deploy/ray_app.py /srv/models/model
"""

import sys
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_pd_openai_app

CACHE_BYTES = 256 << 20
NUM_CPUS = 5
"""Ray's CPUs that the application takes: two for each engine, one for the ingress."""


def engine(model: str, role: str, core: int, more: Mapping[str, Any]) -> LLMConfig:
    """Return one engine on a core of its own; ``more`` are arguments of vLLM's."""
    return LLMConfig(
        model_loading_config={"model_id": "model", "model_source": model},
        accelerator_config={"kind": "cpu"},
        placement_group_config={"bundles": [{"CPU": 1}]},
        deployment_config={"num_replicas": 1},
        runtime_env={"env_vars": {"VLLM_CPU_OMP_THREADS_BIND": str(core)}},
        engine_kwargs={
            "enforce_eager": True,
            "kv_cache_memory_bytes": CACHE_BYTES,
            "kv_transfer_config": {"kv_connector": "KVFerryConnector", "kv_role": role},
            **more,
        },
    )


def application(model: str, **more: Any) -> serve.Application:
    """Return the application: an ingress, a decode engine, and a prefill engine behind it."""
    return build_pd_openai_app(
        {
            "prefill_config": engine(model, "kv_producer", 0, more),
            "decode_config": engine(model, "kv_consumer", 1, more),
        }
    )


if __name__ == "__main__":
    ray.init(num_cpus=NUM_CPUS)
    serve.run(application(sys.argv[1]), blocking=True)
