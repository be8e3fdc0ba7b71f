"""``KVFerryOffloadConnector``: the class that vLLM builds, once in the scheduler and once in every worker."""

import logging
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvferry.integrations.vllm.engine_core import IdleSteps, RankMonitor
from kvferry.integrations.vllm.offload_settings import OffloadSettings, parse_offload_settings
from kvferry.integrations.vllm.offload_step import OffloadMetrics, OffloadStatistics, OffloadStep
from kvferry.integrations.vllm.plugin import (
    check_and_record_configurations,
    check_layout,
    log_as_vllm_does,
    preferred_layout,
    widen_cpu_attention,
)
from kvferry.integrations.vllm.scheduler.offload import OffloadScheduler, check_offloadable
from kvferry.integrations.vllm.translate import check_supported, resolved_layout
from kvferry.integrations.vllm.versions import check_version, report_version
from kvferry.integrations.vllm.worker.offload import OffloadWorker
from kvferry.units import format_bytes

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

check_version()
# For a vLLM that finds this class by kv_connector_module_path and loads no plugin.
widen_cpu_attention()
check_and_record_configurations()
log_as_vllm_does()
report_version()


class KVFerryOffloadConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps KV blocks of one engine in host memory and further tiers; all work is in the two roles."""

    _scheduler: OffloadScheduler
    _worker: OffloadWorker
    _side: OffloadScheduler | OffloadWorker
    """Whichever of the two this process has."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = parse_offload_settings(self._kv_transfer_config.kv_connector_extra_config)
        check_offloadable(kv_cache_config)
        check_supported(kv_cache_config)
        layout = resolved_layout(vllm_config)
        check_layout(vllm_config, layout)
        self._ranks: RankMonitor | None = None
        self._idle_steps = IdleSteps()
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

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        layout = preferred_layout(vllm_config)
        return None if layout is None else layout.value

    @property
    def requires_kv_delivery(self) -> bool:
        # A request never waits for its blocks to be stored: a preemption may drop what is in flight.
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> "KVConnectorStats | None":
        return OffloadStatistics(data=data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> "KVConnectorPromMetrics | None":
        return OffloadMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: "KVTransferConfig") -> bool:
        # Sleep takes away the memory that is registered. Before 0.33 vLLM does not ask.
        return False

    # In the scheduler.

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        self._scheduler.bind_block_pool(gpu_block_pool)

    def on_new_request(self, request: "Request") -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: "Request", num_external_tokens: int
    ) -> "dict[CacheHitSource, int]":
        return self._scheduler.get_external_cache_hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        self._scheduler.update_connector_output(connector_output)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        return self.role is KVConnectorRole.SCHEDULER and self._scheduler.has_pending_work()

    def has_pending_block_frees(self) -> bool:
        return self._scheduler.has_pending_block_frees()

    def take_events(self) -> "Iterable[KVCacheEvent]":
        return self._scheduler.take_events()

    def reset_cache(self) -> bool | None:
        return self._scheduler.reset_cache()

    # In a worker.

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        self._worker.register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin_step(self._orders)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        self._worker.start_loads(self._orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: the engine runs a request only after its whole load has been reported."""

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
        if self._orders.wait_seconds:
            time.sleep(self._orders.wait_seconds)
        received, failed = self._worker.take_finished(self._idle_steps.wait(computes=self._orders.computes))
        if received:
            self._idle_steps.reset()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.take_report()

    def get_kv_connector_stats(self) -> "KVConnectorStats | None":
        # In the scheduler it is the end of a step.
        return self._side.take_statistics()

    def shutdown(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
        self._side.shutdown()


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
