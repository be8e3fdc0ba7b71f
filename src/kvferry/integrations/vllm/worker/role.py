"""The connector inside a worker: makes one rank's cache reachable, and moves caches beside the engine's step.

Its source part writes prompts out of the cache, its destination part has others written into it.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import torch
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

from kvferry.errors import HandoffError, KVFerryError, Reason, TransportError
from kvferry.execution.destination import Compares, SourceEngines
from kvferry.execution.device import HOST, OVER, DeviceOrder, Mark, device_order
from kvferry.execution.digests import comparable
from kvferry.execution.executor import Executor, JobResult, cores_that_do_not_compute
from kvferry.execution.trial import Side, Trial
from kvferry.handoff.holds import lease_lost, weights_changed
from kvferry.handoff.messages import RankEntry, StillWriting
from kvferry.handoff.wire.client import Client
from kvferry.integrations.vllm.identity import identity_of
from kvferry.integrations.vllm.resets import ROLES
from kvferry.integrations.vllm.scheduler.blocks import group_name
from kvferry.integrations.vllm.settings import Settings, trust_of
from kvferry.integrations.vllm.step import EngineEndPoint, FailedTurns, PromptLoad, RankMetadata, StepMetadata
from kvferry.integrations.vllm.translate import group_shapes, resolved_layout
from kvferry.integrations.vllm.worker.caches import register_caches
from kvferry.integrations.vllm.worker.handoff import Destination, Rank, RankEndPoint, Source
from kvferry.integrations.vllm.worker.records import Statistics, TransferLog
from kvferry.layout.shard import CacheKind, Shard, encode_shard
from kvferry.peer_log import PeerLog
from kvferry.plan.digest_cells import Integrity
from kvferry.plan.planner import LayerSpans
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
        network = Network(settings.transports_listen_at, self._trust.addresses_named_by_peers)
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
        end_point = RankEndPoint(settings.host, settings.reachable_host, settings.ports_of_ranks, self._trust.keys)
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
        cores = set(settings.transfer_cores) or cores_that_do_not_compute()
        return Rank(
            name=name,
            shard=encode_shard(shard),
            identity=identity,
            end_points=end_points,
            transports=self._transports,
            executor=Executor(cores, self._order, self._report_still_writing),
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

    def _account(self, result: JobResult) -> None:
        order = self._orders.pop(result.job_id)
        self._statistics.record(result)
        self._log.write(order, result)
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
