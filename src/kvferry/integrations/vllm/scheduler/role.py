"""The connector inside vLLM's scheduler: decides which prompts are held and loaded, and answers for its engine.

Its source part holds prompts for other engines, its destination part finds the holds of this engine's requests.
"""

import hmac
import logging
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.handoff.handshake import Versions, agree, check_complete, check_rank
from kvferry.handoff.holds import Ended, Ending, Holds, transfer_of, weights_changed
from kvferry.handoff.messages import (
    EPOCH_BITS,
    MAX_IDENTIFIER_LENGTH,
    MAX_REQUESTS_PER_MESSAGE,
    PROTOCOL_VERSION,
    Answer,
    Directory,
    DirectoryRequest,
    Drain,
    Draining,
    EndPoint,
    HandshakeRefused,
    Identity,
    Noted,
    Question,
    RankEntry,
    Release,
    Renew,
    Renewed,
    StillWriting,
)
from kvferry.handoff.remote_holds import LeaseKeeper
from kvferry.handoff.wire.server import Server
from kvferry.integrations.vllm.adapters import hear_of_loads
from kvferry.integrations.vllm.engine_core import LOOK_MOST_SECONDS, Engine, StepWaits, end_former_epoch
from kvferry.integrations.vllm.identity import identity_of
from kvferry.integrations.vllm.scheduler.blocks import (
    Quarantine,
    check_filled_whole,
    groups_filled_whole,
    num_recomputed,
)
from kvferry.integrations.vllm.scheduler.destination import Destination
from kvferry.integrations.vllm.scheduler.params import EngineState, PromptAdapters, leave_last_token
from kvferry.integrations.vllm.scheduler.request_times import RequestTimes
from kvferry.integrations.vllm.scheduler.source import HeldAnswers, Source, written_untold
from kvferry.integrations.vllm.settings import Settings, control_port, trust_of
from kvferry.integrations.vllm.step import (
    MAX_HELD_REQUESTS,
    EngineEndPoint,
    FailedTurns,
    PromptLoad,
    StepMetadata,
)
from kvferry.integrations.vllm.translate import group_shapes, resolved_layout
from kvferry.integrations.vllm.versions import can_name_loaded_groups
from kvferry.integrations.vllm.worker.records import Cause, Statistics
from kvferry.peer_log import PeerLog

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


logger = PeerLog(logging.getLogger(__name__))

SECRET_BYTES = 32
LOCAL_EXECUTORS = (None, "mp", "uni", "external_launcher")
"""vLLM's executors whose ranks are on the scheduler's host, with one node; Ray's may be given as a class or a path."""
MAX_LOADS = MAX_REQUESTS_PER_MESSAGE
"""Loads at a time, quarantined ones included: one report of a rank can name them all."""
STOPPED_SECONDS = 2.0
"""The server's thread looks for holds to end several times a second. After so long without a look this process was
stopped, and could receive no renewal."""
TELL_SECONDS = 1.0
"""An engine without requests steps at most so often to tell its metrics: peers choose how often they are refused."""
PARTS = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "prefill and decode"}


class SchedulerRole:
    """One engine, which may be a prefill and a decode engine at once (``kv_both``)."""

    def __init__(
        self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", engine_id: str, settings: Settings
    ) -> None:
        parallel = vllm_config.parallel_config
        epoch = secrets.randbits(EPOCH_BITS)
        trust = trust_of(settings)
        caches_prefixes = bool(vllm_config.cache_config.enable_prefix_caching)
        if vllm_config.lora_config is not None:
            hear_of_loads()
        self._state = state = EngineState(
            settings=settings,
            engine_id=engine_id,
            epoch=epoch,
            tp_size=parallel.tensor_parallel_size,
            groups=group_shapes(kv_cache_config),
            caches_prefixes=caches_prefixes,
            holds=Holds(epoch, MAX_HELD_REQUESTS, settings.lease_seconds, settings.max_hold_seconds),
            trust=trust,
            leases=LeaseKeeper(settings.lease_seconds, trust),
            adapters=PromptAdapters(caches_prefixes=caches_prefixes),
        )
        self._num_ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        self._num_recomputed = num_recomputed(state.groups)
        self._can_clear_in_part = can_name_loaded_groups()
        self._identity = identity_of(vllm_config, settings)
        self._engine = Engine()
        self._times = RequestTimes(settings.transfer_log) if settings.transfer_log else None
        self._source = Source(state, vllm_config, kv_cache_config)
        self._destination = Destination(state, self._engine.wake)
        self._answers = HeldAnswers(
            state,
            drafts=vllm_config.speculative_config is not None,
            may_be_written_untold=bool(written_untold(vllm_config, kv_cache_config)),
        )
        self._failed_turns: set[str] = set()
        self._answer_waits = StepWaits()
        self._hold_waits = StepWaits(most_seconds=LOOK_MOST_SECONDS)
        self._weights_version = self._engine.weights_version
        self._expired_at = time.monotonic()
        self._loading: dict[str, Sequence[Sequence[int]]] = {}
        self._outdated: set[str] = set()
        self._missing: dict[str, tuple[int, Cause | None]] = {}
        """How many tokens a load was to bring to each request when vLLM last asked, and why none is ordered."""
        self._unnamed: dict[str, int] = {}
        """Requests to a decode engine that name no prefill engine and have not run, with their prompts' tokens."""
        self._counted = dict.fromkeys(("ready", "holds", "in_quarantine", "quarantined_blocks"), 0)
        """What statistics were last told."""
        self._has_untold, self._tell_at = False, 0.0
        """Whether the next step tells metrics that have changed without a step, and when another may."""
        self._quarantine = Quarantine(state.kept_blocks, self._num_ranks)
        self._directory: Directory | None = None
        self._drains_at: float | None = None
        self._secret = secrets.token_bytes(SECRET_BYTES)
        port = control_port(settings, parallel.data_parallel_index)
        self._has_keys = trust.keys is not None
        self._server = Server(settings.host, port, self._answer, self._keep_up, trust.keys)
        state.answers_at = EndPoint(settings.reachable_host, self._server.port, epoch)
        # A host may not reach itself at the address that others are told.
        self._own_host = settings.reachable_host if _may_span_hosts(parallel) else settings.local_host
        assert vllm_config.kv_transfer_config is not None
        self._kv_role = str(vllm_config.kv_transfer_config.kv_role)
        self._traces = vllm_config.observability_config.otlp_traces_endpoint is not None
        self._recomputes = vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
        self._start_line = f"{PARTS[self._kv_role]}, {resolved_layout(vllm_config)}"

    # Calls for requests.

    def on_new_request(self, request: "Request") -> None:
        """Take the prefill engine of a new request, so that its lease is renewed while the request waits.

        A prompt for a decode engine is cut where the decode engine goes on.
        """
        params = request.kv_transfer_params
        if params and not isinstance(params, dict):
            # A client can write anything there (``vllm_xargs``), and vLLM takes all that is there for a dictionary.
            logger.warning("kvferry: the kv_transfer_params of %s are no object and are ignored.", request.request_id)
            params = request.kv_transfer_params = None
        if not params:
            if self._kv_role == "kv_consumer":
                self._unnamed[request.request_id] = request.num_prompt_tokens
            return
        if params.get("do_remote_decode"):
            if self._num_recomputed:
                leave_last_token(request)
            self._state.adapters.avoid_stale_blocks(request)
            if self._engine.can_compute_anew:
                self._destination.expect_turn(request, params)
        if params.get("do_remote_prefill"):
            self._destination.expect(request, params)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many prompt tokens to load; None asks the engine to ask again.

        Without effects: the engine may ask again or ignore the answer. One token alone is not worth a load: the engine
        computes the next one anyway.
        """
        if not self._awaits_load(request):
            return 0, False
        # Loads end by their deadline and make room; quarantined blocks may not.
        is_full = bool(self._loading) and self._num_loads >= MAX_LOADS
        if is_full or not self._destination.is_ready(request.request_id):
            return None, False
        num_missing = self._num_loadable(request) - num_computed_tokens
        if num_missing <= 1:
            self._missing.pop(request.request_id, None)
            return 0, False
        cause = self._why_computed(request)
        self._missing[request.request_id] = num_missing, cause
        return (num_missing, True) if cause is None else (0, False)

    def groups_filled_whole(self, request: "Request") -> tuple[int, ...]:
        """Return the cache groups whose blocks this request's load overwrites whole."""
        return groups_filled_whole(self._state.groups, self._destination.block_sizes(request.request_id))

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """The engine has given the request blocks: order the load once, or release the remote hold."""
        params = request.kv_transfer_params
        if not params:
            return
        if params.get("do_remote_decode"):
            self._source.begin(request)
            if self._times is not None:
                with self._state.holds_lock:
                    hold = self._state.holds.open_hold(request.request_id)
                self._times.begin_hold(request, hold)
        if not self._awaits_load(request):
            return
        if params.get("do_remote_prefill"):
            # A new object: parallel samples in one process share the parameters, and each loads for itself.
            request.kv_transfer_params = {**params, "do_remote_prefill": False}
        if num_external_tokens == 0:
            self._count_computed(request.request_id)
            self._destination.finish(request.request_id)
            return
        block_ids = self._loading[request.request_id] = blocks.get_block_ids()
        order = self._load_order(request, block_ids, num_external_tokens)
        if self._traces:
            order = replace(order, trace_headers=request.trace_headers or {})
        self._state.step.loads.append(order)
        if self._times is not None and order.announced is not None:
            self._times.begin_load(request, order.announced.transfer_id)

    def request_finished(
        self, request: "Request", block_ids: Sequence[Sequence[int]], is_complete: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return False, since blocks are held by reference, and the answer's parameters.

        ``is_complete`` tells a finished prompt from an aborted one.
        """
        params = request.kv_transfer_params
        if not params:
            self._unnamed.pop(request.request_id, None)
            return False, None
        self._missing.pop(request.request_id, None)
        if self._times is not None:
            self._times.end(request)
        if request.request_id in self._loading:
            # The ranks may still fill the blocks: the remote hold stays until they have stopped.
            self._state.step.aborted.append(request.request_id)
        else:
            self._destination.finish(request.request_id)
        if params.get("do_remote_decode"):
            return False, self._source.finish(request, block_ids, is_complete)
        return False, self._answers.hold(request, block_ids) if is_complete else None

    def bind_block_pool(self, pool: "BlockPool") -> None:
        """Keep blocks by references in this pool."""
        self._state.kept_blocks.bind(pool)
        self._state.kept_blocks.allow_resets(self._state.adapters.prefix_cache_is_empty)

    # Once per engine step.

    def build_connector_meta(self, output: "SchedulerOutput") -> StepMetadata:
        """Return the orders to the workers for the step that ``output`` schedules."""
        state = self._state
        self._has_untold = False
        if self._weights_version != self._engine.weights_version:
            self.reset_cache()
        self._source.note_schedule(output)
        self._count_unnamed(output)
        if self._times is not None:
            self._times.begin_step(output.num_scheduled_tokens)
        with state.holds_lock:
            self._answers.yield_used()
            self._expire_holds()
            ended = state.holds.take_ended()
        for each in ended:
            self._end_hold(each)
        self._answers.lend()
        self._destination.turn()
        state.leases.step()
        state.leases.keep()
        step, state.step = state.step, StepMetadata()
        step.computes = bool(output.num_scheduled_tokens)
        step.engine = EngineEndPoint(msgspec.structs.replace(state.answers_at, host=self._own_host), self._secret)
        step.quarantined = self._quarantine.turn(self._loading)
        step.lost = [request_id for request_id in state.leases.take_lost() if request_id in self._loading]
        step.wait_seconds = self._wait(step)
        return step

    def reset_cache(self) -> bool:
        """The weights may have changed: let nobody load what was computed before. A new epoch begins.

        All ranks end their writes before this call returns and before a block is freed.
        Messages and parameters of the former epoch are refused; requests of this engine that wait for a prompt, or load
        one, fail.
        """
        state = self._state
        self._weights_version = self._engine.weights_version
        state.epoch = secrets.randbits(EPOCH_BITS)
        state.answers_at = msgspec.structs.replace(state.answers_at, epoch=state.epoch)
        with state.holds_lock:
            state.holds.reset(state.epoch)
            ended = state.holds.take_ended()
        self._engine.call_workers(end_former_epoch, state.epoch, self._weights_version)
        for each in ended:
            self._end_hold(each)
        state.step.finished, state.step.held, state.step.prompts = [], [], []  # of holds that have just ended
        state.step.outdated += self._loading
        self._outdated |= self._loading.keys()
        self._engine.compute_anew(self._engine.landed_loads)
        self._destination.refuse_expected(weights_changed, self._loading)
        if self._directory is not None:
            self.publish(self._directory.ranks)
        logger.info("kvferry: the cache is reset: %d prompts are no longer held, a new epoch begins.", len(ended))
        return True

    def update_connector_output(self, output: "KVConnectorOutput") -> None:
        """All ranks have reported these loads: their remote holds may end."""
        for request_id in output.failed_recving or ():
            self._destination.fail(request_id)
        if isinstance(output.kv_connector_worker_meta, FailedTurns):
            self._failed_turns |= output.kv_connector_worker_meta.request_ids
        # A rank may have reported a load before it learned of a reset.
        finished = set(output.finished_recving or ())
        anew = ((self._outdated | self._failed_turns) & finished) - set(output.failed_recving or ())
        self._engine.compute_anew(sorted(anew))
        self._outdated -= finished
        self._failed_turns -= finished
        for request_id in finished:
            self._loading.pop(request_id, None)
            self._destination.finish(request_id)
            num_missing, _ = self._missing.pop(request_id, (0, None))
            if request_id in anew or (self._recomputes and request_id in (output.failed_recving or ())):
                self._state.statistics.count("computed_tokens", num_missing, Cause.LOAD_FAILED.value)

    def take_statistics(self) -> Statistics | None:
        """Return the statistics since the last call, at the end of a step; None where there is no new one."""
        if self._times is not None:
            self._times.end_step()
        state, quarantine, before = self._state, self._quarantine, self._counted
        for reason, number in self._server.take_refused().items():
            state.statistics.count("refused_messages", number, reason)
        now = {
            "ready": int(self._is_ready),
            "holds": state.holds.num_holds,
            "in_quarantine": quarantine.num_blocks,
            "quarantined_blocks": quarantine.num_ever_kept,
        }
        if now != before:
            self._counted = now
            state.statistics.set("ready", now["ready"])
            state.statistics.set("holds", now["holds"])
            state.statistics.set("in_quarantine", now["in_quarantine"])
            state.statistics.count("quarantined_blocks", now["quarantined_blocks"] - before["quarantined_blocks"])
        if state.statistics.is_empty():
            return None
        taken, state.statistics = state.statistics, Statistics()
        return taken

    def has_pending_work(self) -> bool:
        """Whether the engine must step although it has no request: to end holds or tell the workers of them.

        Only where the next step does something: the engine sleeps while it waits. Where it cannot be woken, it must
        keep stepping while there are holds; an engine that finishes its work before it ends must not end before the
        holds do.
        """
        with self._state.holds_lock:
            has_news = self._quarantine.has_news or self._destination.has_pending_work or self._state.holds.has_ended
            has_news = has_news or bool(self._state.step.held) or self._answers.has_pending_work or self._has_untold
            must_stay = self._must_stay
        return has_news or must_stay or self._weights_version != self._engine.weights_version

    @property
    def _must_stay(self) -> bool:
        """Whether the engine must neither sleep nor end; the caller has the lock of the holds."""
        return self._engine.stays_awake and (self._state.holds.num_lasting > 0 or self._destination.waits)

    def _wait(self, step: StepMetadata) -> float:
        """Return how long a step waits: not at all where ranks have something to do, or nothing is waited for.

        Peers answer without telling the ranks, and no rank wakes an engine that must not sleep.
        """
        if step.computes or self._loading:
            self._answer_waits.reset()
            self._hold_waits.reset()
            return 0.0
        now = time.monotonic()
        if self._destination.waits:
            return self._answer_waits.wait(progress=None, now=now)
        self._answer_waits.reset()
        with self._state.holds_lock:
            must_stay, progress = self._must_stay, self._state.holds.num_lasting
        return self._hold_waits.wait(progress, now) if must_stay else 0.0

    # Peers.

    def check_ranks(self, identities: Sequence[Identity]) -> None:
        """Compare what this engine's ranks found with what its scheduler found. Raises :class:`HandoffError`."""
        for rank, identity in enumerate(identities):
            check_rank(self._identity, identity, rank)

    def publish(self, ranks: Sequence[RankEntry]) -> None:
        """Answer handshakes with a directory of these ranks from now on. Raises as :func:`check_complete`."""
        state = self._state
        directory = Directory(
            PROTOCOL_VERSION, state.engine_id, state.epoch, self._identity, tuple(ranks), self._weights_version
        )
        check_complete(directory, self._num_ranks)
        if self._directory is None:
            transports = transports_in_words(ranks[0].end_points)
            address = f"{state.answers_at.host}:{state.answers_at.port}"
            keys = "with" if self._has_keys else "without"
            line = "kvferry: %s, %s; engine %s at %s, %s keys"
            logger.info(line, self._start_line, transports, state.engine_id, address, keys)
        self._directory = directory
        self._source.publish()

    def shutdown(self) -> None:
        """Close the control end points; twice is fine."""
        self._source.close()
        self._server.close()
        self._state.leases.close()
        if self._times is not None:
            self._times.close()

    def _awaits_load(self, request: "Request") -> bool:
        """Return whether the request's prompt, or the conversation before this turn, has not been loaded yet."""
        params, request_id = request.kv_transfer_params, request.request_id
        if not params or request_id in self._loading:
            return False
        loads = params.get("do_remote_prefill") or params.get("do_remote_decode")
        return bool(loads) and self._destination.is_expected(request_id)

    def _num_loadable(self, request: "Request") -> int:
        """Return how many of the prompt's tokens a load can bring; a prompt of one token is computed here."""
        of_turn = self._destination.num_tokens_of_turn(request.request_id)
        return max(request.num_prompt_tokens - self._num_recomputed, 1) if of_turn is None else of_turn

    def _why_computed(self, request: "Request") -> Cause | None:
        """Return why this engine computes what a prefill engine, or the engine of the last turn, has computed."""
        if self._destination.is_gone(request.request_id):
            return Cause.HOLD_ENDED
        try:
            self._destination.check_adapter(request)
        except KVFerryError as error:
            logger.warning("kvferry: %s is computed here: %s", request.request_id, error, peer=request.request_id)
            return Cause.ADAPTER
        return None

    def _count_computed(self, request_id: str) -> None:
        """Count the tokens that this engine computes, where there is a cause why it does."""
        num_missing, cause = self._missing.pop(request_id, (0, None))
        if cause is not None:
            self._state.statistics.count("computed_tokens", num_missing, cause.value)

    def _count_unnamed(self, output: "SchedulerOutput") -> None:
        """Count what a decode engine computes of prompts that name no prefill engine, once they run: another connector
        may have loaded the rest.
        """
        for new in output.scheduled_new_reqs if self._unnamed else ():
            num_missing = self._unnamed.pop(new.req_id, 0) - new.num_computed_tokens
            if num_missing > 0:
                self._state.statistics.count("computed_tokens", num_missing, Cause.NO_PARAMETERS.value)

    @property
    def _is_ready(self) -> bool:
        """Whether this engine answers handshakes and does not drain."""
        return self._directory is not None and self._drains_at is None

    @property
    def _num_loads(self) -> int:
        return len(self._loading) + self._quarantine.num_not_loading(self._loading)

    def _load_order(
        self, request: "Request", block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> PromptLoad:
        end_token = self._num_loadable(request)
        is_turn = self._destination.num_tokens_of_turn(request.request_id) is not None
        try:
            if self._num_loads > MAX_LOADS:
                raise HandoffError(
                    Reason.QUARANTINE_FULL,
                    f"the blocks of {MAX_LOADS} failed requests are quarantined: peers may still write into them.",
                    "The log names the requests. Restart this engine if their prefill engines are gone.",
                )
            _check_reportable(request.request_id)
            if not self._can_clear_in_part:
                check_filled_whole(self._state.groups, self._destination.block_sizes(request.request_id))
            order = self._destination.order(request, (end_token - num_external_tokens, end_token), block_ids)
        except KVFerryError as error:
            logger.error("kvferry: %s cannot be loaded: %s", request.request_id, error, peer=request.request_id)
            hold = self._destination.hold_of(request.request_id)
            seconds = self._state.settings.load_timeout_seconds
            order = PromptLoad(request.request_id, seconds, hold, error=error, is_optional=is_turn)
        return order

    def _end_hold(self, ended: Ended) -> None:
        """Order the workers to end their writes, and free the blocks.

        The engine gives the blocks to another request in the next step at the earliest, and every worker carries the
        order out before it runs that step.
        """
        state, hold, name = self._state, ended.hold, ended.handle.request_id
        transfer_id, step = transfer_of(ended.handle), state.step
        if self._times is not None:
            self._times.end_hold(ended)
        is_refused = ended.ending is Ending.REFUSED
        (step.refused_transfers if is_refused else step.ended_transfers).append(transfer_id)
        step.held = [each for each in step.held if each[0] != transfer_id]
        if hold is not None and not hold.is_held:
            self._source.forget(hold.request_id)
        if hold is not None and hold.yields:
            self._answers.forget(hold.handle)
        if ended.was_held:
            state.kept_blocks.free(ended.handle)
        if (hold is None or not hold.yields) and (why := self._why_ended(ended.ending)) is not None:
            state.statistics.count("expired_holds", 1, ended.ending.value)
            logger.warning("kvferry: %s: the blocks of %s are freed.", why, name, peer=name)

    def _why_ended(self, ending: Ending) -> str | None:
        """Return why the engine ended a hold that no decode engine has released."""
        settings = self._state.settings
        match ending:
            case Ending.EXPIRED:
                return f"no decode engine came within the first lease (lease_seconds, {settings.lease_seconds:g} s)"
            case Ending.ABANDONED:
                seconds = self._state.holds.renewed_lease_seconds
                return f"the decode engine has not renewed for {seconds:g} s: it has ended, or its steps do not end"
            case Ending.TOO_OLD:
                return f"the hold reached the greatest age, {settings.max_hold_seconds:g} s"
            case _:
                return None

    # The server's thread.

    def _keep_up(self) -> None:
        """Renew leases and end holds while the engine sleeps or a step takes long."""
        self._state.leases.keep()
        with self._state.holds_lock:
            self._drain_in_time()
            self._expire_holds()
        self._look_for_untold(time.monotonic())
        self._wake_for_news()

    def _look_for_untold(self, now: float) -> None:
        """Let an engine that sleeps tell its metrics, by one step: vLLM takes them with a step's output only."""
        if self._directory is None or now < self._tell_at:
            return  # it starts, or has told a moment ago
        if self._counted["ready"] != self._is_ready or self._server.has_refused:
            self._has_untold, self._tell_at = True, now + TELL_SECONDS

    def _expire_holds(self) -> None:
        """End the holds whose lease is over; the caller has the lock."""
        now = time.monotonic()
        unseen, self._expired_at = now - self._expired_at, now
        if unseen > STOPPED_SECONDS:
            self._state.holds.forgive(unseen)
        self._state.holds.expire(now)

    def _wake_for_news(self) -> None:
        with self._state.holds_lock:
            has_news = self._state.holds.has_ended or self._destination.has_pending_work or self._has_untold
        if has_news or self._weights_version != self._engine.weights_version:
            self._engine.wake()

    def _answer(self, question: Question) -> Answer:
        """Answer one question. Raises :class:`HandoffError` for a question that is refused."""
        match question:
            case DirectoryRequest():
                return self._answer_directory_request(question)
            case HandshakeRefused():
                return self._note_refusal(question)
            case StillWriting():
                return self._answer_still_writing(question)
            case Renew():
                with self._state.holds_lock:
                    lost = self._state.holds.renew(question.epoch, question.handles, time.monotonic())
                return Renewed(self._state.epoch, self._state.holds.renewed_lease_seconds, tuple(lost))
            case Release():
                with self._state.holds_lock:
                    self._state.holds.release(question.epoch, question.handles)
                self._wake_for_news()
                return Noted(self._state.epoch)
            case Drain():
                return self._answer_drain(question)
            case _:
                raise HandoffError(
                    Reason.UNSUPPORTED,
                    f"a scheduler does not answer a {type(question).__name__}.",
                    "Ask the rank's own port.",
                )

    def _answer_directory_request(self, question: DirectoryRequest) -> Directory:
        version = agree(decode=Versions(question.version, question.newest))
        if self._directory is None:
            raise HandoffError(Reason.PEER_UNREACHABLE, "this engine has not finished starting.", "Try again later.")
        return msgspec.structs.replace(self._directory, version=version)

    def _note_refusal(self, question: HandshakeRefused) -> Noted:
        """Log why a decode engine does not load from this engine: nothing else here would say so."""
        # A decode engine compares adapters and prompts before its ranks have part in a load.
        part = "engine" if question.reason in (Reason.ADAPTER_MISMATCH, Reason.INVALID_REQUEST) else "rank"
        what = "a prompt of this prefill engine" if question.reason == Reason.INVALID_REQUEST else "this prefill engine"
        told = "kvferry: decode %s %s refuses %s: %s"
        logger.warning(told, part, question.sender, what, question.error(), peer=question.sender)
        return Noted(self._state.epoch)

    def _answer_drain(self, question: Drain) -> Draining:
        state, holds = self._state, self._state.holds
        if question.begin and self._drains_at is None:
            # What a router sends before it has noticed must not fail.
            seconds = self._source.withdraw()
            self._drains_at = time.monotonic() + seconds
            logger.info("kvferry: no longer ready: prompts are taken for %g s more, then this engine drains.", seconds)
        with state.holds_lock:
            self._drain_in_time()
            drains = holds.is_draining if question.begin else self._drains_at is not None
            num_holds = holds.num_holds
        num_requests = max(state.leases.num_requests, self._engine.num_requests)
        return Draining(state.engine_id, state.epoch, drains, num_holds, num_requests)

    def _drain_in_time(self) -> None:
        """Hold no more prompts once routers have noticed that this engine drains; the caller has the lock."""
        holds = self._state.holds
        if self._drains_at is not None and time.monotonic() >= self._drains_at and not holds.is_draining:
            holds.drain()
            logger.info("kvferry: draining: no more prompts are held; %d are left.", holds.num_holds)

    def _check_secret(self, secret: bytes) -> None:
        """Raise :class:`HandoffError` (permission-denied) for a report that is not of this engine's rank."""
        # The secret names this process; the epoch of a report may be that of before a reset of the cache.
        if not hmac.compare_digest(secret, self._secret):
            raise HandoffError(
                Reason.PERMISSION_DENIED,
                "the report does not carry this engine's secret.",
                "Only this engine's own ranks may report.",
            )

    def _answer_still_writing(self, question: StillWriting) -> Noted:
        self._check_secret(question.secret)
        self._quarantine.note(question.rank, question.number, question.request_ids)
        self._engine.wake()
        return Noted(self._state.epoch)


def _check_reportable(request_id: str) -> None:
    """Refuse an id that no report could name: a rank's whole report would be refused, with all others in it.

    Raises :class:`HandoffError` (invalid-request).
    """
    if len(request_id) > MAX_IDENTIFIER_LENGTH:
        raise HandoffError(
            Reason.INVALID_REQUEST,
            f"the request's id has {len(request_id)} characters, a message carries up to {MAX_IDENTIFIER_LENGTH}.",
            "Send a shorter X-Request-Id.",
        )


def transports_in_words(names: Iterable[str]) -> str:
    """Return the names of the transports for the log, the preferred one first.

    >>> transports_in_words(["cma", "nixl"])
    'cma on this host, else nixl'
    """
    return ", else ".join("cma on this host" if name == "cma" else name for name in names)


def _may_span_hosts(parallel: "ParallelConfig") -> bool:
    """Return whether ranks of the engine may run on other hosts than its scheduler."""
    return parallel.nnodes_within_dp > 1 or parallel.distributed_executor_backend not in LOCAL_EXECUTORS
