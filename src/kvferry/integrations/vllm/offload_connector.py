"""``KVFerryOffloadConnector``: the class that vLLM builds, once in the scheduler and once in every worker."""

import logging
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)

from kvferry.integrations.vllm.connector import RoleConnector, checked_layout
from kvferry.integrations.vllm.engine_core import RankMonitor
from kvferry.integrations.vllm.offload_settings import OffloadSettings, parse_offload_settings
from kvferry.integrations.vllm.offload_step import OffloadMetrics, OffloadStep
from kvferry.integrations.vllm.scheduler.offload import OffloadScheduler, check_offloadable
from kvferry.integrations.vllm.worker.offload import OffloadWorker
from kvferry.units import format_bytes

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class KVFerryOffloadConnector(RoleConnector):
    """Keeps KV blocks of one engine in host memory and further tiers."""

    METRICS = OffloadMetrics

    _scheduler: OffloadScheduler
    _worker: OffloadWorker

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = parse_offload_settings(self._kv_transfer_config.kv_connector_extra_config)
        check_offloadable(kv_cache_config)
        layout = checked_layout(vllm_config, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            self._side = self._scheduler = OffloadScheduler(vllm_config, kv_cache_config, settings)
            self._ranks = RankMonitor.of_this_process()
            logger.info("kvferry offload: %s; cache layout %s", _in_words(settings), layout)
        else:
            self._side = self._worker = OffloadWorker(vllm_config, kv_cache_config, settings)

    @property
    def _orders(self) -> OffloadStep:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, OffloadStep)
        return metadata

    @property
    def requires_kv_delivery(self) -> bool:
        # A request never waits for its blocks to be stored: a preemption may drop what is in flight.
        return False

    # In the scheduler.

    def get_external_cache_hit_sources(
        self, request: "Request", num_external_tokens: int
    ) -> "dict[CacheHitSource, int]":
        return self._scheduler.get_external_cache_hit_sources(request, num_external_tokens)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request, block_ids)

    def has_pending_block_frees(self) -> bool:
        return self._scheduler.has_pending_block_frees()

    def take_events(self) -> "Iterable[KVCacheEvent]":
        return self._scheduler.take_events()

    # In a worker.

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin_step(self._orders)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        self._worker.start_loads(self._orders)

    def save_kv_layer(
        self, layer_name: str, kv_layer: "torch.Tensor", attn_metadata: "AttentionMetadata", **kwargs: Any
    ) -> None:
        """Do nothing: whole blocks of all layers are stored after the step."""

    def wait_for_save(self) -> None:
        """Start the step's stores behind the step's writes; wait for nothing.

        vLLM calls this after a step that failed, too: no block of a failed step is stored.
        """
        self._worker.finish_step(self._orders, has_failed=sys.exc_info()[0] is not None)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if sys.exc_info()[0] is not None:
            # With a drafter vLLM does not end a step that failed.
            self._worker.finish_step(self._orders, has_failed=True)
        return super().get_transfer_results(finished_req_ids)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.take_report()


def _in_words(settings: OffloadSettings) -> str:
    """Return the tiers and the size of a stored block for the log.

    >>> _in_words(OffloadSettings(host_bytes=8 << 30, disk_path="/kv", disk_bytes=1 << 40))
    '8.0 GiB of host memory, 1.0 TiB of disk at /kv; a stored block is one block of the engine'
    """
    tiers = [f"{format_bytes(int(settings.host_bytes))} of host memory"]
    if settings.disk_path:
        tiers.append(f"{format_bytes(int(settings.disk_bytes))} of disk at {settings.disk_path}")
    if settings.pool_master:
        tiers.append(f"a pool at {settings.pool_master}, with {format_bytes(int(settings.pool_bytes))} of this engine")
    block = f"{settings.block_size} tokens" if settings.block_size else "one block of the engine"
    return f"{', '.join(tiers)}; a stored block is {block}"
