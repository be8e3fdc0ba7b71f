"""The connector inside a worker: makes one rank's cache reachable, and moves caches beside the engine's step.

The role does the work that pull and push share; a source part and a destination part, chosen once, do the rest.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import torch
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

from kvferry.errors import HandoffError, KVFerryError, Reason, TransportError
from kvferry.execution.device import HOST, OVER, DeviceOrder, Mark, device_order
from kvferry.execution.executor import Executor, cores_that_do_not_compute
from kvferry.execution.job import JobResult
from kvferry.execution.pair_cells import pushed_digests
from kvferry.execution.registered_memory import RegisteredMemory
from kvferry.execution.source_engines import Compares, SourceEngines
from kvferry.execution.trial import Side, Trial
from kvferry.handoff.holds import lease_lost, weights_changed
from kvferry.handoff.messages import EndPoint, RankEntry, Reopened, StillWriting
from kvferry.handoff.wire.client import Client
from kvferry.integrations.vllm.resets import ROLES
from kvferry.integrations.vllm.scheduler.blocks import group_name
from kvferry.integrations.vllm.settings import Settings, trust_of
from kvferry.integrations.vllm.step import EngineEndPoint, FailedTurns, PromptLoad, RankMetadata, StepMetadata
from kvferry.integrations.vllm.translate.identity import identity_of
from kvferry.integrations.vllm.translate.shards import group_shapes, resolved_layout
from kvferry.integrations.vllm.worker.caches import register_caches
from kvferry.integrations.vllm.worker.memory import memory_of
from kvferry.integrations.vllm.worker.parts import Destination, Rank, Source
from kvferry.integrations.vllm.worker.pull import PullDestination, PullSource
from kvferry.integrations.vllm.worker.push import PushDestination, RankEndPoint, PushSource, make_announcer
from kvferry.integrations.vllm.worker.records import Statistics, TransferLog
from kvferry.layout.group import CacheKind
from kvferry.layout.shard import encode_shard
from kvferry.peer_log import PeerLog
from kvferry.plan.digest_cells import Integrity
from kvferry.plan.layer_spans import LayerSpans
from kvferry.plan.staging.strategy import Strategy
from kvferry.transport.end_points import own_identity
from kvferry.transport.network import Network
from kvferry.transport.registry import open_transports

if TYPE_CHECKING:
    from vllm.config import CompilationConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = PeerLog(logging.getLogger(__name__))

REPORT_SECONDS = 3600.0
"""How long a report to this rank's own engine is sent again until it is acknowledged."""


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
        transfer = vllm_config.kv_transfer_config
        loads = settings.mode == "pull" and (transfer is None or transfer.is_kv_consumer)
        listens_at, reaches = settings.transports_listen_at(loads=loads), settings.transports_reach(loads=loads)
        network = Network(listens_at, self._trust.addresses_named_by_peers, reaches)
        self._open_transports = partial(open_transports, settings.transport, network=network)
        self._transports = self._open_transports()
        self._statistics = Statistics()
        self._log = TransferLog(settings.transfer_log, self._index, resolved_layout(vllm_config))
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
        self._num_reports = 0
        ROLES.add(self)

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Register the engine's cache with the transports and start the parts.

        On a device, labelled blocks go out of the cache and back in each way in which this rank may move them. Raises
        :class:`TransportError` (trial-failed).
        """
        shard = register_caches(self._vllm_config, self._kv_cache_config, kv_caches, self._tp_rank, self._pp_rank)
        self._order = device_order(region.device for region in shard.regions)
        memory = memory_of(shard, self._order, self._settings)
        end_points = self._transports.register(memory.regions)
        cores = set(self._settings.transfer_cores) or cores_that_do_not_compute()
        self._rank = rank = self._start_rank(memory, end_points, cores)
        pushes = self._settings.mode == "push"
        answers_at = self._start_push(rank, memory) if pushes else self._start_pull(rank, memory)
        self._entry = RankEntry(
            tp_rank=self._tp_rank,
            pp_rank=self._pp_rank,
            shard=rank.shard,
            end_points=end_points,
            words_address=0 if memory.words is None else memory.words.address,
            num_words=0 if memory.words is None else len(memory.words.array),
            push_end_point=answers_at if pushes else None,
            process=own_identity(),
            digests=memory.digests,
            held_end_point=None if pushes else answers_at,
        )
        logger.debug("kvferry: rank %d moves\n%r", self._index, shard)
        if not self._order.is_immediate:
            if memory.words is not None:
                self._try(Side(memory, self._transports, end_points), kv_caches, cores)
            if answers_at is not None:
                self._try(Side(replace(memory, words=None), self._transports, end_points), kv_caches, cores)

    def _start_rank(self, memory: RegisteredMemory, end_points: dict[str, bytes], cores: set[int]) -> Rank:
        """Start the transfer thread, and return what the parts share."""
        settings, transfer = self._settings, self._vllm_config.kv_transfer_config
        assert transfer is not None, "a connector without its configuration"
        compares = None
        if memory.integrity is not Integrity.OFF:
            compares = Compares(memory.integrity, memory.compared, settings.requires_digests)
        name, identity = f"{transfer.engine_id}/{self._index}", identity_of(self._vllm_config, settings)
        return Rank(
            name=name,
            shard=encode_shard(memory.shard),
            identity=identity,
            end_points=end_points,
            transports=self._transports,
            executor=Executor(memory.scratch, cores, self._order, self._report_still_writing),
            order=self._order,
            # A pushed cache is written by its sources: this rank connects to none.
            source_engines=SourceEngines(
                memory.shard,
                identity,
                self._transports,
                name,
                settings.handshake_timeout_seconds,
                memory.stage,
                settings.wanted_strategy,
                connects=settings.mode == "pull",
                trust=self._trust,
                compares=compares,
            ),
            client=Client(self._trust),
        )

    def _start_push(self, rank: Rank, memory: RegisteredMemory) -> EndPoint:
        """Make the parts of a rank that pushes and is pushed to; return where it answers."""
        settings, end_point, keeps_events = self._settings, self._open_end_point(), bool(self._settings.transfer_log)
        self._source = PushSource(
            rank,
            end_point,
            LayerSpans(self._layers_that_report()),
            keeps_events,
            memory.digests,
            # Asked in a step: vLLM settles its graphs after the caches.
            why_silent=lambda: why_layers_are_silent(self._vllm_config.compilation_config),
        )
        self._destination = PushDestination(
            rank, end_point, settings.handshake_timeout_seconds, settings.fence_seconds, keeps_events
        )
        return end_point.answers_at

    def _start_pull(self, rank: Rank, memory: RegisteredMemory) -> EndPoint | None:
        """Make the parts of a rank that reads and is read; return where it answers if held prompts may be written."""
        assert memory.words is not None
        self._source = source = PullSource(self._order, memory.words, memory.table)
        if not self._may_write_held:
            self._destination = PullDestination(rank)
            return None
        settings, end_point = self._settings, self._open_end_point()
        source.write_on_request(rank, end_point, pushed_digests(memory.integrity))
        announcer = make_announcer(
            rank,
            end_point,
            settings.handshake_timeout_seconds,
            settings.fence_seconds,
            bool(settings.transfer_log),
            self._note_fence,
        )
        self._destination = PullDestination(rank, announcer, is_forced=settings.held_prompts == "write")
        return end_point.answers_at

    def _open_end_point(self) -> RankEndPoint:
        settings = self._settings
        return RankEndPoint(settings.host, settings.reachable_host, settings.ports_of_ranks, self._trust.keys)

    @property
    def _may_write_held(self) -> bool:
        """Whether this rank may write the prompts that it holds, and peers may write into its cache."""
        slow_reads = [each.capabilities.slow_reads for each in self._transports.transports.values()]
        return self._settings.may_write_held(slow_reads, on_device=not self._order.is_immediate)

    def _note_fence(self, number: int, end_points: dict[str, bytes]) -> None:
        """After a fence, on the transfer thread: peers that read from this rank must learn its new end points."""
        if (engine := self._engine) is None or self._rank is None:
            return
        self._rank.source_engines.connect_anew()
        where = engine.where
        question = Reopened(engine.secret, self._index, number, end_points)
        self._rank.client.tell(where.host, where.port, question, REPORT_SECONDS, is_trusted=True)

    def _try(self, side: Side, kv_caches: Mapping[str, torch.Tensor], cores: set[int]) -> None:
        """Move labelled blocks out of the cache and back: read them, or without guard words write them.

        Raises :class:`TransportError` (trial-failed).
        """
        settings = self._settings
        wanted = Strategy.DIRECT if side.memory.words is None else settings.wanted_strategy
        strategies = list(Strategy) if wanted is None else [wanted]
        layout = resolved_layout(self._vllm_config)
        trial = Trial(side, kv_caches, self._order, self._open_transports, strategies, layout, cores)
        try:
            done = trial.run()
        except TransportError as error:
            if settings.mode == "push" or side.memory.words is not None:
                raise
            remedy = 'Set "held_prompts" to "read": reads have passed the trial, and writes have not.'
            raise TransportError(error.reason, error.message, remedy) from error
        told = "kvferry: rank %d: %d bytes of labelled blocks went out of the cache and back over %s in %.2f s (%s)."
        logger.info(told, self._index, done.num_bytes, done.transport, done.seconds, ", ".join(done.strategies))

    def get_handshake_metadata(self) -> RankMetadata | None:
        """Return this rank's entry of the engine's directory, and its identity."""
        if self._entry is None or self._rank is None:
            return None
        return RankMetadata(msgspec.msgpack.encode(self._entry), self._rank.identity)

    def end_former_epoch(self, names: Sequence[str], weights_version: str) -> None:
        """Clear every guard word, void the transfers of the holds of these ``names``, and compare all prefill engines
        anew with weights of this version. No step runs meanwhile.
        """
        if self._source is not None:
            self._source.end_epoch(names)
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
                self._destination.expect(order, self._launched_before)

    def start_loads(self, orders: StepMetadata) -> None:
        """Start the step's loads; returns at once."""
        for order in orders.loads:
            if order.error is not None:
                self._refuse(order, order.error)
            elif self._destination is not None:
                self._destination.start(order, self._launched_before)
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
                self._log.write_push(result)
                continue
            received.add(result.job_id)
            self._order.wait_for(result.landing)
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
        if self._statistics.is_empty():
            return None
        statistics, self._statistics = self._statistics, Statistics()
        return statistics

    def shutdown(self) -> None:
        """End the holds, stop the jobs, then deregister the memory; twice is fine.

        Where the transfer thread does not stop, a call of a transport hangs: the transports stay open, since two
        threads must not use them at once. The end of the process closes them.
        """
        if self._source is not None:
            self._source.end_holds()
        has_stopped = self._rank is None or self._rank.executor.close()
        if self._source is not None:
            self._source.close()
        if self._rank is not None:
            self._rank.source_engines.close()
            self._rank.client.close()
        if has_stopped:
            self._transports.close()
        else:
            logger.warning("kvferry: the transfer thread does not stop: its transports stay open.")
        self._log.close()

    def _report_still_writing(self, request_ids: frozenset[str]) -> None:
        """Report to the engine, on the transfer thread: it keeps these requests' blocks and fails the requests."""
        if (engine := self._engine) is None or self._rank is None:
            return
        self._num_reports += 1
        # A report names all of them: the engine frees the blocks of a request that a report leaves out. The engine
        # admits no more loads than a report can name.
        question = StillWriting(
            engine.where.epoch, engine.secret, self._index, self._num_reports, tuple(sorted(request_ids))
        )
        where = engine.where
        self._rank.client.tell(where.host, where.port, question, REPORT_SECONDS, is_trusted=True)

    def _layers_that_report(self) -> dict[str, list[str]]:
        """Return the layers for which vLLM calls the connector, by cache group, in the order of computation.

        vLLM does not call it for layers of states. With micro-batches, each of which runs all layers, a call does not
        show that a layer has run for the whole step.
        """
        if self._vllm_config.parallel_config.use_ubatching:
            logger.warning("kvferry: with micro-batches pushes send chunks at the end of a step, not each layer.")
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

    def _account(self, result: JobResult) -> None:
        order = self._orders.pop(result.job_id)
        self._statistics.record(result)
        self._log.write(order, result)
        if result.error is None or self._rank is None or self._destination is None:
            return
        # A read that did not end in time may have lost its connection, which shows only when its transfers end.
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
