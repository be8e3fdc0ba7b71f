"""Lets an engine with kvferry's connectors refuse images, sound and video without their embeddings, as any engine does.

A client may send an embedding in the place of an image. vLLM lets an engine that may load a prompt's cache
(``kv_consumer``, ``kv_both``) take the image's sizes alone, as if nothing of the prompt were ever computed there. See
docs/decisions/missing-embeddings.md.
"""

from collections.abc import Collection
from functools import wraps
from typing import TYPE_CHECKING

from kvferry.integrations.vllm.connector_configs import connector_configs

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

_MARK = "_kvferry_requires_embeddings"


def require_embeddings(connectors: Collection[str]) -> None:
    """Let each configuration of an engine that has only these connectors require embeddings. Safe to call again."""
    from vllm.config import VllmConfig

    resolve = VllmConfig._resolve_mm_embedding_inputs
    if hasattr(resolve, _MARK):
        return

    @wraps(resolve)
    def resolve_unless_ours(config: "VllmConfig") -> None:
        """Leave ``enable_mm_embeds`` as the operator has set it, and let no embedding be missing."""
        transfer, encoder = config.kv_transfer_config, config.ec_transfer_config
        is_sent_embeddings = encoder is not None and encoder.is_ec_consumer
        if transfer is None or is_sent_embeddings or not _has_only(connectors, transfer):
            resolve(config)
            return
        if config.model_config is not None and (images := config.model_config.multimodal_config) is not None:
            images.allow_missing_mm_embeddings = False

    setattr(resolve_unless_ours, _MARK, True)
    VllmConfig._resolve_mm_embedding_inputs = resolve_unless_ours  # type: ignore[method-assign,assignment]


def _has_only(connectors: Collection[str], transfer: "KVTransferConfig") -> bool:
    """Return whether an engine has no other connectors than these."""
    named = {each.name for each in connector_configs(transfer)}
    return bool(named) and named <= set(connectors)
