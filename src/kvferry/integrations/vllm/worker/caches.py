"""What every connector does with an engine's cache once, when a worker starts: checks, huge pages, and the shard."""

import logging
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from kvferry.execution.memory import collapse_to_huge_pages
from kvferry.integrations.vllm.kernels.engine import ask_for_amx, check_engine_kernels
from kvferry.integrations.vllm.translate import fill_scales_in_slots, resolved_layout, shard_of
from kvferry.layout.shard import HOST_DEVICE, Shard

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

_prepared: list[weakref.ref[Any]] = []
"""The compilation settings of engines whose caches are prepared: all connectors of an engine share that object."""


def register_caches(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    kv_caches: Mapping[str, torch.Tensor],
    tp_rank: int,
    pp_rank: int,
) -> Shard:
    """Return this rank's shard; prepare the cache unless another connector of this process has.

    Raises :class:`LayoutError`: kernel-cannot-read-layout, or for a cache that no plan can move.
    """
    engine = vllm_config.compilation_config
    if is_new := all(known() is not engine for known in _prepared):
        check_engine_kernels(vllm_config, kv_cache_config, kv_caches, resolved_layout(vllm_config))
    shard = shard_of(vllm_config, kv_cache_config, kv_caches, tp_rank, pp_rank)
    if is_new:
        if any(region.device == HOST_DEVICE for region in shard.regions):
            ask_for_amx()
        _use_huge_pages(shard)
        fill_scales_in_slots(vllm_config, kv_caches)
        _prepared[:] = [*(known for known in _prepared if known() is not None), weakref.ref(engine)]
    return shard


def _use_huge_pages(shard: Shard) -> None:
    for region in shard.regions:
        if region.device != HOST_DEVICE:
            continue
        reason = collapse_to_huge_pages(region.base_address, region.length)
        if reason is not None:
            logger.info("kvferry: the cache is not put into huge pages: %s", reason)
