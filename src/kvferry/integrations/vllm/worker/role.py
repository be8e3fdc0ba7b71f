"""The connector inside a worker: makes one rank's cache reachable, and moves caches beside the engine's step.

Its source part writes prompts out of the cache, its destination part has others written into it.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

from kvferry.errors import HandoffError, KVFerryError, Reason, TransportError
from kvferry.execution.destination import Announcement, Announcer, Compares, SourceEngines, SourceRank
from kvferry.execution.device import HOST, OVER, DeviceOrder, Mark, device_order
from kvferry.execution.digests import Integrity, comparable
from kvferry.execution.executor import Executor, JobResult, cores_that_compute, cores_that_do_not_compute
from kvferry.execution.peers import OwnRank
from kvferry.execution.source import Writer
from kvferry.execution.trial import Side, Trial
from kvferry.handoff.holds import TRANSFER_GENERATION, engine_drains, lease_lost, weights_changed
from kvferry.handoff.messages import (
    EPOCH_BITS,
    Answer,
    EndPoint,
    Question,
    RankEntry,
    Release,
    StillWriting,
    WriteFailed,
    Written,
)
from kvferry.handoff.source import Prompt
from kvferry.handoff.wire.client import Client
from kvferry.handoff.wire.server import Server
from kvferry.handoff.wire.trust import Keys
from kvferry.integrations.vllm.engine_core import ROLES
from kvferry.integrations.vllm.identity import identity_of
from kvferry.integrations.vllm.scheduler.blocks import group_name
from kvferry.integrations.vllm.settings import Settings, trust_of
from kvferry.integrations.vllm.step import (
    EngineEndPoint,
    FailedTurns,
    PromptLoad,
    RankMetadata,
    StepMetadata,
)
from kvferry.integrations.vllm.translate import group_shapes, resolved_layout
from kvferry.integrations.vllm.worker.caches import register_caches
from kvferry.integrations.vllm.worker.computing import watch_computing
from kvferry.integrations.vllm.worker.records import LoadTraces, Statistics, TransferLog
from kvferry.layout.shard import CacheKind, Shard, encode_shard
from kvferry.peer_log import PeerLog
from kvferry.plan.planner import LayerSpans
from kvferry.transport.network import Network
from kvferry.transport.protocol import own_identity
from kvferry.transport.registry import open_transports

if TYPE_CHECKING:
    from vllm.config import CompilationConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True)
class Rank(OwnRank):
    """One rank, which the role and its parts share."""

    source_engines: SourceEngines


class RankEndPoint:
    """The control end point of a rank: its source part answers announcements, its destination part reports."""

    def __init__(
        self,
        host: str,
        reachable_host: str,
        ports: range,
        keys: Keys | None,
        upkeep: Callable[[], None] = lambda: None,
    ) -> None:
        self.writer: Writer | None = None
        self.announcer: Announcer | None = None
        self.server = Server(host, ports, self._answer, upkeep, keys)
        self.answers_at = EndPoint(reachable_host, self.server.port, secrets.randbits(EPOCH_BITS))

    def close(self) -> None:
        """Stop answering; twice is fine."""
        self.server.close()

    def _answer(self, question: Question) -> Answer:
        part = self.announcer if isinstance(question, Written | WriteFailed) else self.writer
        assert part is not None, "no peer knows this end point before both parts are there"
        return part.answer(question)


class Source:
    """Writes this rank's computed blocks into the blocks that destination ranks announce."""

    def __init__(
        self,
        rank: Rank,
        end_point: RankEndPoint,
        spans: LayerSpans,
        digests: Integrity,
        *,
        keeps_events: bool,
        why_silent: Callable[[], str],
    ) -> None:
        self._end_point = end_point
        self._prompts: Sequence[tuple[str, Prompt]] = ()
        self.writer = end_point.writer = Writer(
            rank,
            end_point.answers_at.epoch,
            spans,
            keeps_events=keeps_events,
            digests=digests,
            why_silent=why_silent,
        )

    def void_transfers(self, orders: StepMetadata) -> None:
        """Void the writes out of blocks that the step may overwrite, before the step writes any block: vLLM may clear
        or copy into blocks that it has given away, and those of a hold that yields may be among them.
        """
        self.writer.engine = None if orders.engine is None else orders.engine.where
        self.writer.preempt(orders.preempted)
        self.writer.end(orders.ended_transfers)
        self.writer.end(orders.refused_transfers, engine_drains)

    def begin_step(self, orders: StepMetadata) -> None:
        """The step is about to run: tell the writer what earlier steps have computed, and which prompts the step
        computes layer by layer.
        """
        if orders.held:
            self.writer.hold(orders.held)
        self._prompts = [*orders.prompts, *orders.finished]
        self.writer.begin_step(orders.prompts)

    def finish_layer(self, name: str) -> None:
        """The step has launched an attention layer: let a span of which it was the last be written."""
        self.writer.reach(name)

    def finish_step(self) -> None:
        """The step has launched all of its writes: let the tokens that it has computed be written."""
        self.writer.compute(self._prompts)

    def take_steps(self) -> Sequence[Mapping[str, Any]]:
        """Return the steps for the transfer log that have ended since the last call."""
        return self.writer.take_steps()

    def close(self) -> None:
        """Stop answering, once the executor has stopped; where a write has not ended yet, the end point answers until
        the end of the process.
        """
        if self.writer.is_quiet:
            self._end_point.close()
        self.writer.close()


class Destination:
    """Announces the blocks of a load to the source ranks, and waits until all have written their parts."""

    def __init__(
        self, rank: Rank, end_point: RankEndPoint, answer_seconds: float, fence_seconds: float, *, keeps_events: bool
    ) -> None:
        self._rank = rank
        self._answer_seconds = answer_seconds
        self._num_fences = 0
        self.announcer = end_point.announcer = Announcer(
            rank, end_point.answers_at, answer_seconds, fence_seconds, keeps_events=keeps_events
        )

    def take_num_fences(self) -> int:
        """Return how many fences there were since the last call."""
        before, self._num_fences = self._num_fences, self.announcer.num_fences
        return self._num_fences - before

    def load(self, order: PromptLoad, launched_before: Mark) -> None:
        """Announce the blocks, which sources may fill once ``launched_before`` is over."""
        assert order.announced is not None
        assert order.hold is not None
        announced = order.announced
        announcement = Announcement(
            order.request_id,
            announced.transfer_id,
            announced.num_tokens,
            announced.digest,
            time.monotonic() + order.timeout_seconds,
            order.hold.epoch,
            announced.adapter,
            order.late_seconds,
        )
        self.announcer.announce(announcement, partial(self._sources, order, launched_before))

    def fail(self, order: PromptLoad) -> None:
        """The load has failed in this rank: release a router's transfer, so that the loads of this engine's other ranks
        fail too instead of waiting for the prompt.
        """
        if (hold := order.hold) is not None and hold.handle.generation == TRANSFER_GENERATION:
            release, seconds = Release(hold.epoch, (hold.handle,)), self._answer_seconds
            self._rank.client.tell(hold.host, hold.port, release, seconds, is_trusted=hold.is_trusted)

    def _sources(self, order: PromptLoad, launched_before: Mark) -> Sequence[SourceRank] | None:
        assert order.hold is not None
        assert order.announced is not None
        if not launched_before.is_over():
            return None
        engine = self._rank.source_engines.get(order.hold)
        if engine is None:
            return None
        if order.hold.handle.generation != TRANSFER_GENERATION:  # of a transfer the engine itself has offered both
            engine.check_parameters(order.hold.engine_id, order.source_block_sizes)
        return engine.sources(order.announced.transfer_id, order.blocks)


logger = PeerLog(logging.getLogger(__name__))

REPORT_SECONDS = 3600.0
"""How long a report to this rank's own engine is sent again until it is acknowledged."""
TELL_SECONDS = 1.0
"""How often a rank lets its engine tell metrics: peers choose how often they are refused."""


class WorkerRole:
    """One rank of an engine, which may be source and destination at once."""

    def __init__(self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", settings: Settings) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._settings = settings
        self._tp_rank = get_tensor_model_parallel_rank()
        self._pp_rank = get_pp_group().rank_in_group
        self._index = self._pp_rank * vllm_config.parallel_config.tensor_parallel_size + self._tp_rank
        self._trust = trust_of(settings)
        network = Network(settings.transports_listen_at, self._trust.addresses_named_by_peers)
        self._open_transports = partial(open_transports, settings.transport, network=network)
        self._transports = self._open_transports()
        self._statistics = Statistics()
        self._log = TransferLog(settings.transfer_log, self._index, resolved_layout(vllm_config))
        self._traces = LoadTraces(self._index)
        self._order: DeviceOrder = HOST
        self._launched_before: Mark = OVER
        self._entry: RankEntry | None = None
        self._rank: Rank | None = None
        self._source: Source | None = None
        self._destination: Destination | None = None
        self._orders: dict[str, PromptLoad] = {}
        self._refused: list[PromptLoad] = []
        self._outdated: set[str] = set()
        self._failed_turns: set[str] = set()
        self._engine: EngineEndPoint | None = None
        self._end_point: RankEndPoint | None = None
        self._report_lock = threading.Lock()
        self._num_reports, self._still_writing, self._tell_at = 0, frozenset[str](), 0.0
        ROLES.add(self)

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Register the engine's cache with the transports and start the parts.

        On a device, labelled blocks are written out of the cache and back first. Raises :class:`TransportError`
        (trial-failed).
        """
        settings = self._settings
        shard = register_caches(self._vllm_config, self._kv_cache_config, kv_caches, self._tp_rank, self._pp_rank)
        self._order = device_order(region.device for region in shard.regions)
        computed = comparable(shard, settings.wanted_integrity, is_required=settings.requires_digests)
        end_points = self._transports.register(shard.regions)
        self._rank = rank = self._start_rank(shard, end_points, computed)
        keeps_events = bool(settings.transfer_log)
        end_point = self._end_point = RankEndPoint(
            settings.host, settings.reachable_host, settings.ports_of_ranks, self._trust.keys, self._look_for_untold
        )
        self._source = Source(
            rank,
            end_point,
            LayerSpans(self._layers_that_report()),
            computed,
            keeps_events=keeps_events,
            # Asked in a step: vLLM settles its graphs after the caches.
            why_silent=lambda: why_layers_are_silent(self._vllm_config.compilation_config),
        )
        self._destination = Destination(
            rank, end_point, settings.handshake_timeout_seconds, settings.fence_seconds, keeps_events=keeps_events
        )
        self._entry = RankEntry(
            tp_rank=self._tp_rank,
            pp_rank=self._pp_rank,
            shard=rank.shard,
            end_points=end_points,
            answers_at=end_point.answers_at,
            process=own_identity(),
            digests=computed.value,
        )
        logger.debug("kvferry: rank %d moves\n%r", self._index, shard)
        if not self._order.is_immediate:
            self._try(Side(shard, self._transports, end_points), kv_caches, computed)

    def _start_rank(self, shard: Shard, end_points: dict[str, bytes], computed: Integrity) -> Rank:
        """Start the transfer thread, and return what the parts share."""
        settings, transfer = self._settings, self._vllm_config.kv_transfer_config
        assert transfer is not None, "a connector without its configuration"
        name, identity = f"{transfer.engine_id}/{self._index}", identity_of(self._vllm_config, settings)
        return Rank(
            name=name,
            shard=encode_shard(shard),
            identity=identity,
            end_points=end_points,
            transports=self._transports,
            executor=self._start_executor(),
            order=self._order,
            source_engines=SourceEngines(
                shard,
                identity,
                name,
                settings.handshake_timeout_seconds,
                self._trust,
                Compares(computed, is_required=settings.requires_digests),
            ),
            client=Client(self._trust),
        )

    def _start_executor(self) -> Executor:
        """Start the transfer thread: on a CPU off the cores that compute, and on these, too, while they are idle."""
        if not self._order.is_immediate:
            return Executor((), self._order, self._report_still_writing)
        cores, compute_cores = cores_that_do_not_compute(), cores_that_compute()
        executor = Executor(cores, self._order, self._report_still_writing, compute_cores)
        watch_computing(executor.computing)
        return executor

    def _try(self, side: Side, kv_caches: Mapping[str, torch.Tensor], computed: Integrity) -> None:
        """Write labelled blocks out of the cache and back. Raises :class:`TransportError` (trial-failed)."""
        layout = resolved_layout(self._vllm_config)
        done = Trial(side, kv_caches, self._order, self._open_transports, layout, computed).run()
        told = "kvferry: rank %d: %d bytes of labelled blocks went out of the cache and back over %s in %.2f s."
        logger.info(told, self._index, done.num_bytes, done.transport, done.seconds)

    def get_handshake_metadata(self) -> RankMetadata | None:
        """Return this rank's entry of the engine's directory, and its identity."""
        if self._entry is None or self._rank is None:
            return None
        return RankMetadata(msgspec.msgpack.encode(self._entry), self._rank.identity)

    def end_former_epoch(self, epoch: int, weights_version: str) -> None:
        """End all that was held or announced before, and compare all prefill engines anew with weights of this version.
        The engine is in ``epoch`` now; no step runs meanwhile.
        """
        if self._source is not None:
            self._source.writer.end_epoch(epoch)
        if self._rank is not None:
            self._rank.source_engines.forget_all(weights_version)

    # Once per engine step, in this order.

    def void_transfers(self, orders: StepMetadata) -> None:
        """Void transfers out of blocks that the step may overwrite, before the step writes any block."""
        if self._source is not None:
            self._source.void_transfers(orders)

    def begin_step(self, orders: StepMetadata) -> None:
        """The step is about to run, and new blocks have been cleared."""
        self._engine = orders.engine
        if self._rank is None or self._source is None or self._destination is None:
            return
        for rank, request_id in orders.quarantined:
            if rank == self._index:
                self._rank.executor.quarantine(request_id)
        self._source.begin_step(orders)
        if orders.loads:
            # Launched work may still write the blocks of these loads: an earlier request's step, or the engine's zeros.
            self._launched_before = self._order.mark()
        for order in orders.loads:
            if order.error is None:
                self._orders[order.request_id] = order
                self._traces.begin(order)
                self._destination.load(order, self._launched_before)

    def end_loads(self, orders: StepMetadata) -> None:
        """Refuse loads that could not be ordered, and end those whose requests or holds have ended; returns at once."""
        for order in orders.loads:
            if order.error is not None:
                self._refuse(order, order.error)
        if self._rank is None:
            return
        for request_id in orders.aborted:
            self._rank.executor.cancel(request_id, aborted(request_id))
        for request_id in orders.lost:
            self._rank.executor.cancel(request_id, lease_lost(request_id))
        # A load may have ended, and not been collected, while the engine was paused for new weights.
        self._outdated |= self._orders.keys() & set(orders.outdated)
        for request_id in orders.outdated:
            self._rank.executor.cancel(request_id, weights_changed(request_id))

    def finish_layer(self, name: str) -> None:
        """The step has launched an attention layer with its cache write."""
        if self._source is not None:
            self._source.finish_layer(name)

    def finish_step(self) -> None:
        """The step has launched all of its writes."""
        if self._source is not None:
            self._source.finish_step()

    def take_finished(self, wait_seconds: float = 0.0) -> tuple[set[str], set[str]]:
        """Return the requests received (failed ones included) and failed since the last call, each once.

        Where there is no result yet, but a load runs, wait at most ``wait_seconds`` for one.
        """
        received: set[str] = set()
        failed: set[str] = set()
        for order in self._refused:
            received.add(order.request_id)
            (self._failed_turns if order.is_optional else failed).add(order.request_id)
        self._refused.clear()
        seconds = wait_seconds if wait_seconds and not received and self._orders else 0.0
        for result in self._rank.executor.collect(seconds) if self._rank is not None else ():
            if result.job_id not in self._orders:
                # A write of this rank, which has reported it to the destination.
                if result.error is not None:
                    self._statistics.count("failed_writes", 1, result.error.reason.value)
                self._log.write_one(result)
                continue
            received.add(result.job_id)
            if result.job_id in self._outdated:
                self._outdated.discard(result.job_id)
                result = replace(result, error=result.error or weights_changed(result.job_id))
            is_optional = self._orders[result.job_id].is_optional
            self._account(result)
            if result.error is not None:
                (self._failed_turns if is_optional else failed).add(result.job_id)
        for step in self._source.take_steps() if self._source is not None else ():
            self._log.write_step(step)
        return received, failed

    def take_failed_turns(self) -> FailedTurns | None:
        """Return the optional loads that have failed since the last call, though they count as received; None where
        there is none.
        """
        failed, self._failed_turns = self._failed_turns, set()
        return FailedTurns(frozenset(failed)) if failed else None

    def take_statistics(self) -> Statistics | None:
        """Return the statistics since the last call; None where there is no new one."""
        if self._destination is not None:
            self._statistics.count("fences", self._destination.take_num_fences())
        if self._end_point is not None:
            for reason, number in self._end_point.server.take_refused().items():
                self._statistics.count("refused_messages", number, reason)
        if self._statistics.is_empty():
            return None
        statistics, self._statistics = self._statistics, Statistics()
        return statistics

    def shutdown(self) -> None:
        """Stop the jobs, then deregister the memory; twice is fine.

        Where the transfer thread does not stop, a call of a transport hangs: the transports stay open, since two
        threads must not use them at once. The end of the process closes them.
        """
        has_stopped = self._rank is None or self._rank.executor.close()
        if self._source is not None:
            self._source.close()
        if self._rank is not None:
            self._rank.client.close()
        if has_stopped:
            self._transports.close()
        else:
            logger.warning("kvferry: the transfer thread does not stop: its transports stay open.")
        self._log.close()

    def _report_still_writing(self, request_ids: frozenset[str]) -> None:
        """Report to the engine, on the transfer thread: it keeps these requests' blocks and fails the requests."""
        with self._report_lock:
            self._still_writing = request_ids
            self._report(REPORT_SECONDS)

    def _look_for_untold(self) -> None:
        """Let an engine that sleeps take a step, which tells what this rank's end point has refused: on its thread, by
        the last report once more.
        """
        now = time.monotonic()
        if self._end_point is not None and self._end_point.server.has_refused and now >= self._tell_at:
            self._tell_at = now + TELL_SECONDS
            with self._report_lock:
                self._report(TELL_SECONDS)

    def _report(self, seconds: float) -> None:
        """Send the report for so many seconds, unless it is acknowledged; the caller has the lock."""
        if (engine := self._engine) is None or self._rank is None:
            return
        self._num_reports += 1
        # A report names all of them: the engine frees the blocks of a request that a report leaves out. The engine
        # admits no more loads than a report can name.
        question = StillWriting(
            engine.where.epoch, engine.secret, self._index, self._num_reports, tuple(sorted(self._still_writing))
        )
        where = engine.where
        self._rank.client.tell(where.host, where.port, question, seconds, is_trusted=True)

    def _layers_that_report(self) -> dict[str, list[str]]:
        """Return the layers for which vLLM calls the connector, by cache group, in the order of computation.

        vLLM does not call it for layers of states. With micro-batches, each of which runs all layers, a call does not
        show that a layer has run for the whole step.
        """
        if self._vllm_config.parallel_config.use_ubatching:
            logger.warning("kvferry: with micro-batches chunks are written at the end of a step, not each layer.")
            return {}
        groups = self._kv_cache_config.kv_cache_groups
        kinds = group_shapes(self._kv_cache_config)
        return {
            group_name(index): sorted(group.layer_names, key=computation_order)
            for index, group in enumerate(groups)
            if kinds[index].kind is not CacheKind.STATE and group.layer_names
        }

    def _refuse(self, order: PromptLoad, error: KVFerryError) -> None:
        """Report a load as failed that the scheduler could not order; the scheduler has logged why."""
        result = JobResult(order.request_id, error)
        self._refused.append(order)
        self._statistics.record(result)
        self._log.write(order, result)
        self._traces.end(order, result)

    def _account(self, result: JobResult) -> None:
        order = self._orders.pop(result.job_id)
        if result.phases is not None:
            next_step = time.monotonic() - result.finished_at
            result = replace(result, phases={**result.phases, "next_step": next_step})
        self._statistics.record(result)
        self._log.write(order, result)
        self._traces.end(order, result)
        if result.error is None or self._rank is None or self._destination is None:
            return
        is_suspect = isinstance(result.error, TransportError) or result.error.reason is Reason.DEADLINE_EXCEEDED
        if is_suspect and order.hold is not None:
            self._rank.source_engines.suspect(order.hold)
        if result.error.reason is not Reason.ABORTED:
            logger.error(
                "kvferry: rank %d failed to load %s: %s", self._index, result.job_id, result.error, peer=result.job_id
            )
            self._destination.fail(order)


def computation_order(name: str) -> list[int]:
    """Return a sort key for the order of computation: the numbers in a layer's name.

    >>> sorted(["model.layers.10.self_attn.attn", "model.layers.9.mixer"], key=computation_order)[0]
    'model.layers.9.mixer'
    """
    return [int(part) for part in name.split(".") if part.isdigit()]


def why_layers_are_silent(compilation: "CompilationConfig") -> str:
    """Return why vLLM calls no ``save_kv_layer`` after a layer of a step, from its settings as they are by then."""
    if compilation.cudagraph_mode is not None and compilation.cudagraph_mode.has_full_cudagraphs():
        return f"a CUDA graph replays whole steps (cudagraph_mode {compilation.cudagraph_mode.name})"
    if compilation.cudagraph_mode and not compilation.splitting_ops_contain_attention():
        return "attention is inside vLLM's CUDA graphs (splitting_ops does not name it, as with fuse_attn_quant)"
    return "vLLM's attention did not call save_kv_layer"


def aborted(request_id: str) -> HandoffError:
    """Return the error of a load whose request the client gave up."""
    return HandoffError(Reason.ABORTED, f"the request {request_id} was aborted.")
