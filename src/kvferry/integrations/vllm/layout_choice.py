"""Which KV cache layout the connector asks the engine for, and which it refuses to run with."""

import logging
from typing import TYPE_CHECKING

from kvferry.errors import LayoutError, Reason
from kvferry.layout.named_layouts import NamedLayout

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvferry.integrations.vllm.offload_settings import OffloadSettings
    from kvferry.integrations.vllm.settings import Settings

logger = logging.getLogger(__name__)

# CPU attention reads a cache by its block and head strides; these layouts keep its (block, head) pages whole.
CPU_ATTENTION_LAYOUTS = (NamedLayout.LBHNC, NamedLayout.BLHNC, NamedLayout.BHLNC)


def widen_cpu_attention() -> None:
    """Let CPU attention declare every layout that its kernel reads; vLLM declares one."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layouts = tuple(KVCacheLayout[layout.name] for layout in CPU_ATTENTION_LAYOUTS)

    def supported_kv_cache_layouts(_cls: type) -> tuple[KVCacheLayout, ...]:
        return layouts

    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(supported_kv_cache_layouts)  # type: ignore[assignment,method-assign]


def preferred_layout(vllm_config: "VllmConfig", settings: "Settings | OffloadSettings") -> NamedLayout | None:
    """Return the layout to ask for; None leaves the choice to the engine.

    ``BHLNC`` keeps a head's bytes of all layers in one run, so that unequal tensor-parallel sizes still need one
    descriptor per block and source rank. ``BLHNC`` is the only cross-layer layout for mixed page shapes.
    """
    if settings.layout:
        return NamedLayout.parse(settings.layout)
    model = vllm_config.model_config
    if model.use_mla:
        return None if on_cpu() else NamedLayout.BLHNC
    return NamedLayout.BLHNC if model.is_hybrid else NamedLayout.BHLNC


def check_layout(vllm_config: "VllmConfig", layout: NamedLayout, settings: "Settings | OffloadSettings") -> None:
    """Raise :class:`LayoutError` for a layout that the engine's kernels read wrongly; log one that is not preferred."""
    if vllm_config.model_config.use_mla and on_cpu() and layout.is_cross_layer:
        raise LayoutError(
            Reason.KERNEL_CANNOT_READ_LAYOUT,
            f"layout {layout} was asked for, but the cache write of MLA on a CPU takes dense per-layer pages only "
            "('kvferry doctor --kernels' shows how it fails).",
            "Unset VLLM_KV_CACHE_LAYOUT and the layout setting, or set LBNHC.",
        )
    preferred = preferred_layout(vllm_config, settings)
    if preferred is not None and preferred is not layout:
        logger.warning(
            "kvferry asked for KV cache layout %s and the engine uses %s: either VLLM_KV_CACHE_LAYOUT is set, or the "
            "attention back end (on a CPU without kvferry's plugin: see VLLM_PLUGINS) or the model's page shapes do "
            "not allow it (the engine's log names the valid layouts). Transfers stay correct but may need more "
            "descriptors.",
            preferred,
            layout,
        )


def on_cpu() -> bool:
    """Return whether this engine computes on a CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())
