"""The offload connector inside a worker: copies this rank's part of blocks between its cache and the engine's slab.

All ranks map one slab. Which rank copies what they all hold is chosen by the job's id, the same in every rank; a rank
without a part in a job reports at once. A load that fails is reported as failed, a store that fails stores nothing.

A rank on a device pins the slab and lets the device copy. A store begins once the device has done the step that writes
its blocks, a load once all is done that was launched when the load got its blocks; both are reported when the bytes are
there. Blocks of a store stay the request's until then, as on a CPU.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

from kvferry.errors import KVFerryError, LayoutError, Reason
from kvferry.execution.device import HOST, OVER, DeviceOrder, Mark, device_order
from kvferry.execution.device_gather import GatherBuffer, take_buffer
from kvferry.execution.executor import Executor, cores_that_do_not_compute
from kvferry.execution.local_copy import Copying, HostCopying, LocalCopy, LocalRoute, PinnedMemory
from kvferry.integrations.vllm.offload_settings import OffloadSettings
from kvferry.integrations.vllm.offload_step import (
    LoadOrder,
    OffloadStatistics,
    OffloadStep,
    RankReport,
    SlabOrder,
    StoreOrder,
)
from kvferry.integrations.vllm.translate import resolved_layout
from kvferry.integrations.vllm.worker.caches import register_caches
from kvferry.layout.shard import Shard, decode_shard, encode_shard
from kvferry.layout.slab import slab_shard
from kvferry.plan.block_copies import BlockCopies
from kvferry.tiers.slab_memory import SlabMemory
from kvferry.tiers.slab_trial import SlabTrial

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

NOTHING_TO_REPORT = RankReport()


class OffloadWorker:
    """One rank. Every method is called in the engine's thread; the copies run on the transfer thread."""

    def __init__(self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", settings: OffloadSettings) -> None:
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._settings = settings
        self._tp_rank = get_tensor_model_parallel_rank()
        self._pp_rank = get_pp_group().rank_in_group
        self._index = self._pp_rank * vllm_config.parallel_config.tensor_parallel_size + self._tp_rank
        self._order: DeviceOrder = HOST
        self._launched_before: Mark = OVER
        self._shard: Shard | None = None
        self._executor: Executor | None = None
        self._buffer: GatherBuffer | None = None
        self._copies: SlabCopies | None = None
        self._orders: dict[str, StoreOrder | LoadOrder] = {}
        self._refused: set[str] = set()
        self._unfinished: OffloadStep | None = None
        self._report = RankReport()
        self._statistics = OffloadStatistics()

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Prepare the cache, start the transfer thread, and report this rank's shard with the next step.

        On a device, labelled blocks go to pinned memory and back first. Raises :class:`LayoutError` for a cache that
        cannot be stored, :class:`TransportError` (``trial-failed``) for a device whose copies are wrong.
        """
        parts = self._vllm_config, self._kv_cache_config, kv_caches, self._tp_rank, self._pp_rank
        self._shard = shard = register_caches(*parts)
        self._order = order = device_order(region.device for region in shard.regions)
        self._executor = executor = Executor(cores_that_do_not_compute() if order.is_immediate else (), order)
        if not order.is_immediate:
            self._buffer = take_buffer(order)
            layout = resolved_layout(self._vllm_config)
            done = SlabTrial(shard, kv_caches, order, executor, layout, self._buffer).run()
            told = "kvferry: rank %d: %d bytes of labelled blocks went to pinned host memory and back in %.2f s."
            logger.info(told, self._index, done.num_bytes, done.seconds)
        self._report.shards[self._pp_rank, self._tp_rank] = encode_shard(shard)

    # Once per engine step, in this order.

    def begin_step(self, orders: OffloadStep) -> None:
        """The step is about to run, and new blocks have been cleared."""
        if self._unfinished is not None:
            # With a drafter vLLM never ends the steps of the pipeline's earlier stages; their writes are launched now.
            self.finish_step(self._unfinished)
        self._unfinished = orders
        if orders.slab is not None:
            self._open(orders.slab)
        if orders.unmaps and self._copies is not None:
            # Nothing was ordered before all ranks were ready, so no copy runs.
            self._copies.close()
            self._copies = None
        if orders.loads:
            # Launched work may still write the blocks of these loads: an earlier request's step, or the engine's zeros.
            self._launched_before = self._order.mark()

    def start_loads(self, orders: OffloadStep) -> None:
        """Start the step's loads; returns at once."""
        for order in orders.loads:
            self._start(order, self._launched_before)

    def finish_step(self, orders: OffloadStep, *, has_failed: bool = False) -> None:
        """The step has launched all of its writes: start its stores, once. Returns at once.

        Where the step has failed, its blocks do not hold what the scheduler believes, so nothing is stored.
        """
        if self._unfinished is not orders:
            return
        self._unfinished = None
        written = self._order.mark() if orders.stores and not has_failed else OVER
        for order in orders.stores:
            if has_failed:
                self._report.failed[order.job_id] += 1
            else:
                self._start(order, written)

    def take_finished(self, wait_seconds: float = 0.0) -> tuple[set[str], set[str]]:
        """Return the requests whose loads have ended (failed ones included) and those that failed, each once.

        Where there is no result yet, but a copy runs, wait at most ``wait_seconds`` for one.
        """
        failed, self._refused = self._refused, set()
        received = set(failed)
        if self._executor is None:
            return received, failed
        reports = bool(received or self._report.stored or self._report.failed)
        for result in self._executor.collect(wait_seconds if self._orders and not reports else 0.0):
            order = self._orders.pop(result.job_id)
            self._statistics.record(result, "store" if isinstance(order, StoreOrder) else "load")
            if result.error is not None:
                logger.error("kvferry: rank %d failed to copy %s: %s", self._index, result.job_id, result.error)
            if isinstance(order, StoreOrder):
                counter = self._report.stored if result.error is None else self._report.failed
                counter[order.job_id] += 1
                continue
            received.add(order.request_id)
            if result.error is not None:
                failed.add(order.request_id)
        return received, failed

    def take_report(self) -> RankReport | None:
        """Return what this rank has to report since the last call; None where there is nothing."""
        if self._report == NOTHING_TO_REPORT:
            return None
        report, self._report = self._report, RankReport()
        return report

    def take_statistics(self) -> OffloadStatistics | None:
        """Return the statistics since the last call; None where there is no new one."""
        if self._statistics.is_empty():
            return None
        statistics, self._statistics = self._statistics, OffloadStatistics()
        return statistics

    def shutdown(self) -> None:
        """Stop the copies, then unmap the slab; twice is fine. The slab stays mapped where a copy does not end."""
        if self._executor is not None and not self._executor.close():
            logger.warning("kvferry: rank %d keeps the slab mapped: a copy has not ended.", self._index)
            return
        if self._copies is not None:
            self._copies.close()
            self._copies = None

    def _open(self, order: SlabOrder) -> None:
        """Map the slab and report that this rank is ready, or why not: then the engine runs without offload."""
        assert self._shard is not None, "vLLM registers the caches before the first step"
        began_at = time.perf_counter()
        try:
            self._copies = SlabCopies(order, self._index, self._shard, self._order, self._buffer)
        except Exception as error:
            # The engine serves without: no error here is worth its end.
            is_known = isinstance(error, KVFerryError)
            self._report.refused = str(error) if is_known else f"rank {self._index}: {error!r}"
            refused = "kvferry: rank %d cannot copy to the slab, so nothing is offloaded: %s"
            logger.error(refused, self._index, error, exc_info=not is_known)
            return
        self._report.num_ready = 1
        seconds = time.perf_counter() - began_at
        logger.info("kvferry: rank %d mapped the slab and proved its copies in %.3f s", self._index, seconds)

    def _start(self, order: StoreOrder | LoadOrder, after: Mark) -> None:
        copies, executor, is_load = self._copies, self._executor, isinstance(order, LoadOrder)
        if copies is None or executor is None or (isinstance(order, LoadOrder) and order.is_refused):
            if isinstance(order, LoadOrder):
                self._refused.add(order.request_id)
            else:
                self._report.failed[order.job_id] += 1
            return
        kind, route = ("load", copies.loads) if is_load else ("store", copies.stores)
        job_id = f"{kind} {order.job_id}"
        self._orders[job_id] = order
        copy = LocalCopy(job_id, route, order.job_id, order.blocks, after, copies.copying, fills_blocks=is_load)
        executor.submit(copy)


class SlabCopies:
    """The slab as this rank has mapped it, and the proved copies to it (of all ranks) and from it (to this rank).

    A rank on a device also pins it. Raises :class:`KVFerryError` for a slab that is gone or cannot be pinned, or plans
    that do not prove.
    """

    def __init__(
        self, order: SlabOrder, index: int, own: Shard, device: DeviceOrder, buffer: GatherBuffer | None
    ) -> None:
        ranks: Sequence[Shard] = [decode_shard(rank) for rank in order.ranks]
        self._memory = SlabMemory.attach(order.handle)
        self._pinned: PinnedMemory | None = None
        try:
            base_address = self._memory.region.base_address
            slab = slab_shard(ranks, order.num_blocks, engine_blocks=order.engine_blocks, base_address=base_address)
            if slab.regions[0].length > self._memory.region.length:
                raise LayoutError(
                    Reason.INVALID_LAYOUT,
                    f"the blocks take {slab.regions[0].length} bytes of a slab of {self._memory.region.length}.",
                )
            self.stores = LocalRoute(ranks, slab, own=[index])
            self.loads = LocalRoute([slab], own, own=[0])
            if not device.is_immediate:
                self._pinned = PinnedMemory(self._memory.region, device, buffer)
        except BaseException:
            self._memory.close()
            raise

    def copying(self, copies: Sequence[BlockCopies]) -> Copying:
        """Return the copies of a job, not begun: by the processor, or by the device."""
        return HostCopying(copies) if self._pinned is None else self._pinned.copying(copies)

    def close(self) -> None:
        """Unpin and unmap the slab; no copy runs any more."""
        if self._pinned is not None:
            self._pinned.close()
        self._memory.close()
