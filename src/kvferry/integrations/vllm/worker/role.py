"""The connector inside a worker: owns the memory that is read, and runs the loads beside the engine's step."""

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import torch
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

from kvferry.errors import HandoffError, KVFerryError, Reason, TransportError
from kvferry.execution.device import HOST, OVER, DeviceOrder, Mark, device_order
from kvferry.execution.executor import Executor, cores_that_do_not_compute
from kvferry.execution.guard_words import GuardWords, Scratch, StepWords
from kvferry.execution.job import JobResult
from kvferry.execution.memory import collapse_to_huge_pages
from kvferry.execution.read import GuardedRead, Load
from kvferry.execution.receipt import Request, SourceRank
from kvferry.execution.route import Routes
from kvferry.execution.stage import Stage
from kvferry.handoff.holds import lease_lost
from kvferry.handoff.messages import RankEntry, StillWriting
from kvferry.handoff.push.sender import Prompt
from kvferry.handoff.wire.client import Courier
from kvferry.integrations.vllm.settings import Settings
from kvferry.integrations.vllm.step import (
    MAX_HELD_REQUESTS,
    EngineEndPoint,
    LoadOrder,
    PushedPrompt,
    RankMetadata,
    StepMetadata,
)
from kvferry.integrations.vllm.translate.shards import group_shapes, identity_of, resolved_layout, shard_of
from kvferry.integrations.vllm.worker.push import PushWorker
from kvferry.integrations.vllm.worker.statistics import Statistics
from kvferry.integrations.vllm.worker.transfer_log import TransferLog
from kvferry.layout.group import CacheKind
from kvferry.layout.shard import Region
from kvferry.plan.layer_spans import LayerSpans
from kvferry.plan.wire import encode_shard
from kvferry.transport.registry import open_transports

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

SCRATCH_WORDS = 4096
REPORT_SECONDS = 3600.0
"""So long the engine is told again what a rank has to tell it."""


class WorkerRole:
    """One rank: prefill side (guard words over registered memory) and decode side (an executor of loads)."""

    def __init__(self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", settings: Settings) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._settings = settings
        self._tp_rank = get_tensor_model_parallel_rank()
        self._pp_rank = get_pp_group().rank_in_group
        self._rank = self._pp_rank * vllm_config.parallel_config.tensor_parallel_size + self._tp_rank
        self._words = GuardWords(MAX_HELD_REQUESTS)
        self._order: DeviceOrder = HOST
        self._step_words = StepWords(self._words, self._order)
        self._launched_before: Mark = OVER
        self._scratch = Scratch(SCRATCH_WORDS)
        self._transports = open_transports(settings.transport, settings.faults)
        self._statistics = Statistics()
        self._log = TransferLog(settings.transfer_log, self._rank, resolved_layout(vllm_config))
        self._entry: RankEntry | None = None
        self._executor: Executor | None = None
        self._routes: Routes | None = None
        self._orders: dict[str, LoadOrder] = {}
        self._failed: set[str] = set()
        self._push: PushWorker | None = None
        self._prompts: Sequence[tuple[str, Prompt]] = ()
        self._engine: EngineEndPoint | None = None
        self._courier: Courier | None = None
        self._num_reports = 0

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Make the engine's cache reachable and be ready to fill it."""
        shard = shard_of(self._vllm_config, self._kv_cache_config, kv_caches, self._tp_rank, self._pp_rank)
        for region in shard.regions:
            _use_huge_pages(region)
        self._order = device_order(region.device for region in shard.regions)
        self._step_words = StepWords(self._words, self._order)
        words = Region(self._words.address, self._words.array.nbytes)
        stage = None
        if self._settings.scatters:
            stage = Stage(self._settings.stage_bytes, self._order)
        staged = [] if stage is None else [stage.region]
        end_points = self._transports.register([*shard.regions, words, self._scratch.region, *staged])
        identity = identity_of(self._vllm_config, self._settings)
        sender = f"{self._vllm_config.kv_transfer_config.engine_id}/{self._rank}"  # type: ignore[union-attr]
        timeout = self._settings.handshake_timeout_seconds
        strategy = self._settings.wanted_strategy
        self._routes = Routes(shard, identity, self._transports, sender, timeout, stage, strategy)
        self._executor = Executor(self._scratch, self._transfer_cores(), self._order, self._tell_unquiet)
        if self._settings.mode == "push":
            parts = self._transports, self._executor, self._order
            hosts = self._settings.host, self._settings.reachable_host
            spans = LayerSpans(self._layers_that_tell())
            keeps_events = bool(self._settings.transfer_log)
            self._push = PushWorker(
                sender, identity, encode_shard(shard), end_points, parts, hosts, spans, timeout, keeps_events
            )
        self._entry = RankEntry(
            tp_rank=self._tp_rank,
            pp_rank=self._pp_rank,
            shard=encode_shard(shard),
            end_points=end_points,
            words_address=self._words.address,
            num_words=MAX_HELD_REQUESTS,
            push_end_point=None if self._push is None else self._push.answers_at,
        )
        logger.debug("kvferry: rank %d moves\n%r", self._rank, shard)

    def get_handshake_metadata(self) -> RankMetadata | None:
        """Return what peers must know of this rank."""
        return None if self._entry is None else RankMetadata(msgspec.msgpack.encode(self._entry))

    def take_back(self, orders: StepMetadata) -> None:
        """Before the step touches any block: nobody may rely on what it may overwrite."""
        if self._push is not None:
            self._push.take_back(orders)

    def begin_step(self, orders: StepMetadata) -> None:
        """Change guard words, before the step can touch any block."""
        self._engine = orders.engine
        for rank, request_id in orders.quarantined:
            if rank == self._rank and self._executor is not None:
                self._executor.set_aside(request_id)
        self._step_words.begin(orders.ended_slots, orders.written)
        self._prompts = orders.prompts
        if self._push is not None:
            self._push.pusher.begin_step(orders.prompts)
        if orders.loads:
            # What still runs may write the blocks that these loads were given: their last owner's step, or zeros.
            self._launched_before = self._order.mark()
        for order in orders.loads:
            if order.pushed is not None and order.error is None:
                # New blocks have been cleared by now. Before the step computes: the source may be computing too.
                self._receive(order, order.pushed)

    def finish_layer(self, name: str) -> None:
        """The step has launched an attention layer; what it wrote lies in the cache."""
        if self._push is not None:
            self._push.pusher.reach(name)

    def finish_step(self) -> None:
        """Everything that the step writes has been launched."""
        self._step_words.finish()
        if self._push is not None:
            self._push.pusher.compute(self._prompts)

    def start_loads(self, orders: StepMetadata) -> None:
        """Start the step's loads; returns at once."""
        for order in orders.loads:
            if order.error is not None:
                self._refuse(order, order.error)
                continue
            if order.pushed is not None:
                continue
            assert self._executor is not None
            self._orders[order.request_id] = order
            deadline = time.monotonic() + order.timeout_seconds
            self._executor.submit(
                Load(order.request_id, partial(self._prepare, order, self._launched_before), deadline)
            )
        if self._executor is not None:
            for request_id in orders.aborted:
                self._executor.cancel(request_id, aborted(request_id))
            for request_id in orders.lost:
                self._executor.cancel(request_id, lease_lost(request_id))

    def take_finished(self, wait_seconds: float = 0.0) -> tuple[set[str], set[str]]:
        """Return the requests received (failed ones included) and failed since the last call, each once.

        Where there is nothing yet to tell, but something moves, wait so long for it.
        """
        failed, self._failed = self._failed, set()
        received = set(failed)
        seconds = wait_seconds if wait_seconds and not failed and self._orders else 0.0
        for result in self._executor.collect(seconds) if self._executor is not None else ():
            if self._push is not None and result.job_id not in self._orders:
                # A push of this rank's own, of which its receiver has been told.
                self._log.write_push(result)
                continue
            received.add(result.job_id)
            self._order.wait_for(result.landing)
            self._account(result)
            if result.error is not None:
                failed.add(result.job_id)
        for step in self._push.pusher.take_steps() if self._push is not None else ():
            self._log.write_step(step)
        return received, failed

    def take_statistics(self) -> Statistics | None:
        """Return what was measured since the last call."""
        if self._statistics.is_empty():
            return None
        statistics, self._statistics = self._statistics, Statistics()
        return statistics

    def shutdown(self) -> None:
        """Hold nothing any more, stop the loads, then let go of the memory; twice is fine."""
        self._step_words.close()
        if self._executor is not None:
            self._executor.close()
        if self._push is not None:
            self._push.close()
        if self._routes is not None:
            self._routes.close()
        if self._courier is not None:
            self._courier.close()
        self._transports.close()
        self._log.close()

    def _tell_unquiet(self, request_ids: frozenset[str]) -> None:
        """Tell the engine, on the transfer thread, so that it keeps these requests' blocks and fails them."""
        if (engine := self._engine) is None:
            return
        self._courier = self._courier or Courier()
        self._num_reports += 1
        # A report names all of them: the engine frees the blocks of a request that a report leaves out. It admits no
        # more loads than a report can name.
        question = StillWriting(
            engine.where.epoch, engine.secret, self._rank, self._num_reports, tuple(sorted(request_ids))
        )
        self._courier.send(engine.where.host, engine.where.port, question, REPORT_SECONDS)

    def _layers_that_tell(self) -> dict[str, list[str]]:
        """Return the layers that tell when they have run, by cache group, as they are computed.

        Those of states do not, and none does in micro-batches, each of which runs all layers.
        """
        if self._vllm_config.parallel_config.use_ubatching:
            return {}
        groups = self._kv_cache_config.kv_cache_groups
        kinds = group_shapes(self._kv_cache_config)
        return {
            str(index): sorted(group.layer_names, key=layer_place)
            for index, group in enumerate(groups)
            if kinds[index].kind is not CacheKind.STATE and group.layer_names
        }

    def _receive(self, order: LoadOrder, pushed: PushedPrompt) -> None:
        assert self._push is not None
        self._orders[order.request_id] = order
        deadline = time.monotonic() + order.timeout_seconds
        asked = order.request_id, pushed.transfer_id, pushed.num_tokens, pushed.digest, deadline
        self._push.receiver.receive(Request(*asked), partial(self._sources, order, pushed, self._launched_before))

    def _sources(self, order: LoadOrder, pushed: PushedPrompt, launched_before: Mark) -> Sequence[SourceRank] | None:
        assert self._routes is not None
        assert order.hold is not None
        if not launched_before.is_over():
            return None
        engine = self._routes.get(order.hold)
        return None if engine is None else engine.sources(pushed.transfer_id, order.blocks)

    def _prepare(self, order: LoadOrder, launched_before: Mark) -> Sequence[GuardedRead] | None:
        assert self._routes is not None
        assert order.hold is not None
        if not launched_before.is_over():
            return None
        engine = self._routes.get(order.hold)
        return None if engine is None else engine.reads(order.hold, order.slot, order.blocks)

    def _refuse(self, order: LoadOrder, error: KVFerryError) -> None:
        """Report a load that the scheduler, which logged why, could not order."""
        result = JobResult(order.request_id, error)
        self._failed.add(order.request_id)
        self._statistics.record(result)
        self._log.write(order, result)

    def _account(self, result: JobResult) -> None:
        order = self._orders.pop(result.job_id)
        self._statistics.record(result)
        self._log.write(order, result)
        if isinstance(result.error, TransportError) and order.hold is not None and self._routes is not None:
            self._routes.suspect(order.hold)
        if result.error is not None and result.error.reason is not Reason.ABORTED:
            logger.error("kvferry: rank %d failed to load %s: %s", self._rank, result.job_id, result.error)
            if self._push is not None and order.hold is not None:
                self._push.let_go(order.hold)

    def _transfer_cores(self) -> set[int]:
        if self._settings.transfer_cores:
            return set(self._settings.transfer_cores)
        return cores_that_do_not_compute()


def _use_huge_pages(region: Region) -> None:
    if region.device == "cpu":
        reason = collapse_to_huge_pages(region.base_address, region.length)
        if reason is not None:
            logger.info("kvferry: the cache stays in small pages: %s", reason)


def layer_place(name: str) -> list[int]:
    """Return what orders layers as they are computed: the numbers in a layer's name.

    >>> sorted(["model.layers.10.self_attn.attn", "model.layers.9.mixer"], key=layer_place)[0]
    'model.layers.9.mixer'
    """
    return [int(part) for part in name.split(".") if part.isdigit()]


def aborted(request_id: str) -> HandoffError:
    """Return the error of a load whose request the client gave up."""
    return HandoffError(Reason.ABORTED, f"the request {request_id} was aborted.")
