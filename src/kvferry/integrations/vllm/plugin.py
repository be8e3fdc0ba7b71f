"""Entry point ``vllm.general_plugins``: registers the connectors, and chooses the layouts of their caches."""

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from kvferry.errors import KVFerryError, LayoutError, Reason, SettingsError
from kvferry.integrations.vllm.connector_configs import connector_configs
from kvferry.integrations.vllm.identity import record_models
from kvferry.integrations.vllm.preflight import check_configuration
from kvferry.integrations.vllm.request_checks import check_requests
from kvferry.integrations.vllm.versions import check_version, replace_once, report_version
from kvferry.integrations.vllm.waiting_workers import make_waits_sleep
from kvferry.layout.named_layouts import NamedLayout

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

CONNECTORS = {
    "KVFerryConnector": "kvferry.integrations.vllm.connector",
    "KVFerryOffloadConnector": "kvferry.integrations.vllm.offload_connector",
}
"""The module of each connector, which has a class of the connector's name."""


def register() -> None:
    """VLLM calls this in every process. Safe to call again."""
    try:
        check_version()
    except KVFerryError as error:
        # An engine without the connectors must start.
        logger.error("kvferry: %s", error)
        refuse_connectors(error)
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name, module in CONNECTORS.items():
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, module, name)
    widen_cpu_attention()
    require_embeddings()
    check_and_record_configurations()
    make_waits_sleep()
    check_requests()
    log_as_vllm_does()
    report_version()


def refuse_connectors(error: KVFerryError) -> None:
    """Make vLLM raise this error where its configuration names a connector of kvferry's, and where it is asked for one.

    This vLLM is unknown. What it does not have is left alone: then vLLM says that it does not know the connector. A
    configuration that cannot be read is left to vLLM, since an engine without the connectors must start.
    """

    def refuse() -> NoReturn:
        raise SettingsError(error.reason, error.message, error.remedy)

    def refusing(finish: Any) -> Any:
        def refuse_or_finish(config: "VllmConfig", *given: Any, **named: Any) -> None:
            found: list[str] = []
            with suppress(Exception):
                found = [each.name for each in connector_configs(config.kv_transfer_config)]
            if not CONNECTORS.keys().isdisjoint(found):
                refuse()
            finish(config, *given, **named)

        return refuse_or_finish

    with suppress(ImportError, AttributeError):
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        KVConnectorFactory._registry.update(dict.fromkeys(CONNECTORS, refuse))
    with suppress(ImportError, AttributeError):
        from vllm.config import VllmConfig

        replace_once(VllmConfig, "__post_init__", refusing)


def check_and_record_configurations() -> None:
    """Make vLLM check its configuration as kvferry does, and record the models, in the last step of making it.

    vLLM itself asks a connector once the weights are loaded, earlier only for full CUDA graphs; by then its model
    classes have changed the configuration. Before the last step a connector that vLLM finds by its module's path has
    not been imported. Safe to call again.
    """
    from vllm.config import VllmConfig

    def checking(verify: Any) -> Any:
        def check_verify_and_record(config: "VllmConfig") -> None:
            check_configuration(config)
            verify(config)
            if any(each.name in CONNECTORS for each in connector_configs(config.kv_transfer_config)):
                record_models(config)

        return check_verify_and_record

    replace_once(VllmConfig, "_verify_kv_transfer_compat", checking)


def require_embeddings() -> None:
    """Let an engine with kvferry's connectors alone refuse images without their embeddings, as any engine does.

    A client may send an embedding in the place of an image. vLLM lets an engine that may load a prompt's cache
    (``kv_consumer``, ``kv_both``) take the image's sizes alone, as if nothing of the prompt were ever computed there.
    See docs/decisions/missing-embeddings.md.
    """
    from vllm.config import VllmConfig

    def requiring(resolve: Any) -> Any:
        def resolve_unless_ours(config: "VllmConfig") -> None:
            """Leave ``enable_mm_embeds`` as the operator has set it, and let no embedding be missing."""
            encoder = config.ec_transfer_config
            named = {each.name for each in connector_configs(config.kv_transfer_config)}
            if not named or not named <= CONNECTORS.keys() or (encoder is not None and encoder.is_ec_consumer):
                resolve(config)
            elif config.model_config is not None and (images := config.model_config.multimodal_config) is not None:
                images.allow_missing_mm_embeddings = False

        return resolve_unless_ours

    replace_once(VllmConfig, "_resolve_mm_embedding_inputs", requiring)


def log_as_vllm_does() -> None:
    """Send kvferry's messages where vLLM's go, at vLLM's level."""
    ours, theirs = logging.getLogger("kvferry"), logging.getLogger("vllm")
    ours.handlers = theirs.handlers
    ours.setLevel(theirs.level)
    ours.propagate = theirs.propagate


def widen_cpu_attention() -> None:
    """Let CPU attention declare every layout that its kernel reads; vLLM declares one.

    It reads a cache by its block and head strides; these layouts keep its (block, head) pages whole.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layouts = (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC, KVCacheLayout.BHLNC)

    def supported_kv_cache_layouts(_cls: type) -> tuple[KVCacheLayout, ...]:
        return layouts

    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(supported_kv_cache_layouts)  # type: ignore[assignment,method-assign]


def preferred_layout(vllm_config: "VllmConfig") -> NamedLayout | None:
    """Return the layout to ask for; None leaves the choice to the engine. ``VLLM_KV_CACHE_LAYOUT`` wins over it.

    ``BHLNC`` keeps a head's bytes of all layers in one run, so that unequal tensor-parallel sizes still need one
    descriptor per block and source rank. ``BLHNC`` is the only cross-layer layout for mixed page shapes.
    """
    model = vllm_config.model_config
    if model.use_mla:
        return None if on_cpu() else NamedLayout.BLHNC
    return NamedLayout.BLHNC if model.is_hybrid else NamedLayout.BHLNC


def check_layout(vllm_config: "VllmConfig", layout: NamedLayout) -> None:
    """Raise :class:`LayoutError` for a layout that the engine's kernels read wrongly; log one that is not preferred."""
    if problem := why_kernel_cannot_read(vllm_config, layout):
        remedy = "Unset VLLM_KV_CACHE_LAYOUT, or set it to LBNHC."
        raise LayoutError(Reason.KERNEL_CANNOT_READ_LAYOUT, f"{problem}.", remedy)
    preferred = preferred_layout(vllm_config)
    if preferred is not None and preferred is not layout:
        logger.warning(
            "kvferry asked for KV cache layout %s and the engine uses %s: either VLLM_KV_CACHE_LAYOUT is set, or the "
            "attention back end (on a CPU without kvferry's plugin: see VLLM_PLUGINS) or the model's page shapes do "
            "not allow it (the engine's log names the valid layouts). Transfers stay correct but may need more "
            "descriptors.",
            preferred,
            layout,
        )


def why_kernel_cannot_read(vllm_config: "VllmConfig", layout: NamedLayout) -> str:
    """Return why the engine's kernels read this layout wrongly; empty where they do not."""
    if not (vllm_config.model_config.use_mla and on_cpu() and layout.is_cross_layer):
        return ""
    return (
        f"layout {layout} was asked for, but the cache write of MLA on a CPU takes dense per-layer pages only "
        "('kvferry doctor --kernels' shows how it fails)"
    )


def on_cpu() -> bool:
    """Return whether this engine computes on a CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())
