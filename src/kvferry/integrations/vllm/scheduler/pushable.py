"""Which engines can push and be pushed to: what of vLLM a push cannot go together with."""

from typing import TYPE_CHECKING

from kvferry.errors import KVFerryError, Reason

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_pushable(vllm_config: "VllmConfig") -> None:
    """Refuse engines in which a push would not know what its source holds. Raises :class:`KVFerryError`."""
    parallel = vllm_config.parallel_config
    # A rank of a dense model is told that it is alone; its engine's id tells that it is not.
    engine_id = str(getattr(vllm_config.kv_transfer_config, "engine_id", None))
    suffix = f"_dp{parallel.data_parallel_index}"
    if parallel.data_parallel_size > 1 or engine_id.endswith(suffix):
        raise KVFerryError(
            Reason.UNSUPPORTED,
            f"mode 'push' with data-parallel ranks (the engine's id is {engine_id!r}).",
            f'Set "mode" to "pull", or run an engine for each rank, with an id that does not end in {suffix}.',
        )
    if vllm_config.use_v2_model_runner:
        raise KVFerryError(
            Reason.UNSUPPORTED,
            "mode 'push' with vLLM's second model runner, which clears new blocks before it tells whose they were.",
            'Set VLLM_USE_V2_MODEL_RUNNER=0, or "mode" to "pull".',
        )
    if parallel.pipeline_parallel_size > 1 and vllm_config.speculative_config is not None:
        raise KVFerryError(
            Reason.UNSUPPORTED,
            "mode 'push' with pipeline stages and draft tokens: vLLM tells the last stage only when a step has ended.",
            'Run without speculative decoding or with one stage, or set "mode" to "pull".',
        )
