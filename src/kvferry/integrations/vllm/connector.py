"""What vLLM builds, once in the scheduler and once in every worker: ``KVFerryConnector``, and what both connectors do.

``KVFerryOffloadConnector`` is in :mod:`kvferry.integrations.vllm.offload_connector`.
"""

import sys
import time
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

from kvferry.integrations.vllm.connector_configs import check_engine_id
from kvferry.integrations.vllm.engine_core import IdleSteps, RankMonitor
from kvferry.integrations.vllm.plugin import (
    check_and_record_configurations,
    check_layout,
    log_as_vllm_does,
    preferred_layout,
    widen_cpu_attention,
)
from kvferry.integrations.vllm.scheduler.role import SchedulerRole
from kvferry.integrations.vllm.settings import parse_settings
from kvferry.integrations.vllm.step import RankMetadata, StepMetadata
from kvferry.integrations.vllm.translate import check_supported, decode_rank_entry, resolved_layout
from kvferry.integrations.vllm.versions import cache_hit_source, check_version, report_version
from kvferry.integrations.vllm.worker.records import ObservationMetrics, PrometheusMetrics
from kvferry.integrations.vllm.worker.role import WorkerRole
from kvferry.layout.named_layouts import NamedLayout

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvferry.integrations.vllm.offload_step import OffloadStep
    from kvferry.integrations.vllm.scheduler.offload import OffloadScheduler
    from kvferry.integrations.vllm.worker.offload import OffloadWorker

check_version()
# For a vLLM that finds a connector by kv_connector_module_path and loads no plugin. The call is then in time only where
# the worker shares the engine's process: a worker process has named its layouts, LBHNC alone, before this import.
widen_cpu_attention()
check_and_record_configurations()
log_as_vllm_does()
report_version()

_COMPLETE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


def checked_layout(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> NamedLayout:
    """Return the layout of an engine's caches. Raises for caches and layouts that kvferry cannot move."""
    check_supported(kv_cache_config)
    layout = resolved_layout(vllm_config)
    check_layout(vllm_config, layout)
    return layout


class RoleConnector(KVConnectorBase_V1, SupportsHMA):
    """What both connectors do; all work is in the two roles, of which this process has one.

    A subclass makes the role: ``_side``, which is ``_scheduler`` or ``_worker``. In the scheduler it watches the ranks.
    """

    METRICS: ClassVar[type[ObservationMetrics]]

    _scheduler: "SchedulerRole | OffloadScheduler"
    _worker: "WorkerRole | OffloadWorker"
    _side: "SchedulerRole | OffloadScheduler | WorkerRole | OffloadWorker"
    _ranks: RankMonitor | None = None

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._idle_steps = IdleSteps()

    @property
    @abstractmethod
    def _orders(self) -> "StepMetadata | OffloadStep":
        """What the scheduler has ordered for this step."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        layout = preferred_layout(vllm_config)
        return None if layout is None else layout.value

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> "KVConnectorStats | None":
        return cls.METRICS.OBSERVATIONS(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> "KVConnectorPromMetrics | None":
        return cls.METRICS(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: "KVTransferConfig") -> bool:
        # Sleep takes away memory that is registered, and into which peers may write. Before 0.33 vLLM does not ask.
        return False

    # In the scheduler.

    def on_new_request(self, request: "Request") -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        self._scheduler.update_connector_output(connector_output)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        self._scheduler.bind_block_pool(gpu_block_pool)

    def reset_cache(self) -> bool | None:
        return self._scheduler.reset_cache()

    def has_pending_push_work(self) -> bool:
        return self.role is KVConnectorRole.SCHEDULER and self._scheduler.has_pending_work()

    # In a worker.

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        self._worker.register_kv_caches(kv_caches)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: the engine runs a request only after its whole load has been reported."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._orders.wait_seconds:
            time.sleep(self._orders.wait_seconds)
        received, failed = self._worker.take_finished(self._idle_steps.wait(computes=self._orders.computes))
        if received:
            self._idle_steps.reset()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    # In both.

    def get_kv_connector_stats(self) -> "KVConnectorStats | None":
        # In the scheduler it is the end of a step.
        return self._side.take_statistics()

    def shutdown(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
        self._side.shutdown()


class KVFerryConnector(RoleConnector):
    """Moves KV caches between vLLM engines."""

    METRICS = PrometheusMetrics

    _cache_hit_source = cache_hit_source("P2P")
    _scheduler: SchedulerRole
    _worker: WorkerRole

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = parse_settings(self._kv_transfer_config.kv_connector_extra_config)
        checked_layout(vllm_config, kv_cache_config)
        engine_id = self._kv_transfer_config.engine_id
        assert engine_id is not None
        check_engine_id(engine_id, settings)
        if role is KVConnectorRole.SCHEDULER:
            self._side = self._scheduler = SchedulerRole(vllm_config, kv_cache_config, engine_id, settings)
            self._ranks = RankMonitor.of_this_process()
        else:
            self._side = self._worker = WorkerRole(vllm_config, kv_cache_config, settings)

    @property
    def _orders(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata

    # In the scheduler.

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        # vLLM clears new blocks of the other groups, where needed, at the start of the step that starts the load.
        return self._scheduler.groups_filled_whole(request)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request, block_ids, request.status in _COMPLETE)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        ranks = [rank for key in sorted(metadata) if isinstance(rank := metadata[key], RankMetadata)]
        self._scheduler.check_ranks([rank.identity for rank in ranks])
        self._scheduler.publish([decode_rank_entry(rank.entry) for rank in ranks])

    # In a worker.

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._worker.get_handshake_metadata()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, StepMetadata)
        self._worker.void_transfers(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin_step(self._orders)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        self._worker.end_loads(self._orders)

    def save_kv_layer(
        self, layer_name: str, kv_layer: "torch.Tensor", attn_metadata: "AttentionMetadata", **kwargs: Any
    ) -> None:
        """Let the layer's blocks be written to other engines, out of the cache in place."""
        self._worker.finish_layer(layer_name)

    def wait_for_save(self) -> None:
        """Let peers have the step's blocks once the device has done the step; wait for nothing.

        vLLM calls this after a step that failed, too: blocks of a failed step are published to no peer.
        """
        if sys.exc_info()[0] is None:
            self._worker.finish_step()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.take_failed_turns()
