"""Which engines can push and be pushed to: what of vLLM a push cannot go together with."""

from typing import TYPE_CHECKING

from kvferry.errors import KVFerryError, Reason
from kvferry.integrations.vllm.settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_pushable(vllm_config: "VllmConfig", settings: Settings) -> None:
    """Refuse engines in which a push would not know what its source holds. Raises :class:`KVFerryError`."""
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size > 1:
        raise KVFerryError(
            Reason.UNSUPPORTED, "mode 'push' with data-parallel ranks.", 'Set "mode" to "pull", or run one rank.'
        )
    if vllm_config.use_v2_model_runner:
        raise KVFerryError(
            Reason.UNSUPPORTED,
            "mode 'push' with vLLM's second model runner, which clears new blocks before it tells whose they were.",
            'Set VLLM_USE_V2_MODEL_RUNNER=0, or "mode" to "pull".',
        )
    if settings.push_grain == "layers" and parallel.use_ubatching:
        raise KVFerryError(
            Reason.UNSUPPORTED,
            "push_grain 'layers' where a step is cut into micro-batches, of which each runs a layer by itself.",
            'Set "push_grain" to "chunks".',
        )
