"""The connector inside vLLM's scheduler: decides what is held and what is loaded, and speaks for its engine."""

import logging
import secrets
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.execution.guard_words import Held
from kvferry.handoff.epochs import check_epoch
from kvferry.handoff.handshake import check_complete, check_version
from kvferry.handoff.holds import Ended, Ending, Hold, PrefillSide
from kvferry.handoff.messages import (
    PROTOCOL_VERSION,
    Answer,
    Directory,
    DirectoryRequest,
    EndPoint,
    Noted,
    Question,
    RankEntry,
    Release,
    Released,
    Renew,
    Renewed,
    Unquiet,
)
from kvferry.handoff.push.holds import PushHolds
from kvferry.handoff.remote_holds import DecodeSide
from kvferry.handoff.wire.hold_messages import Errands
from kvferry.handoff.wire.server import Listener
from kvferry.integrations.vllm.scheduler.blocks import (
    blocks_to_load,
    check_cached_windows,
    groups_filled_whole,
    has_state,
    num_recomputed,
)
from kvferry.integrations.vllm.scheduler.kept_blocks import HeldBlocks
from kvferry.integrations.vllm.scheduler.params import (
    PrefillEngine,
    RemoteParams,
    answer_params,
    check_prompt,
    leave_last_token,
    parse_params,
    token_ids_of,
)
from kvferry.integrations.vllm.scheduler.set_aside import SetAside
from kvferry.integrations.vllm.settings import Settings, control_port
from kvferry.integrations.vllm.step import MAX_HELD_REQUESTS, LoadOrder, StepMetadata
from kvferry.integrations.vllm.translate.shards import group_shapes, identity_of
from kvferry.integrations.vllm.versions import find_engine_wake

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

SIBLING_LINGER_SECONDS = 0.5
RENEW_SHARE = 0.25
# JSON carries it through routers that know doubles only.
EPOCH_BITS = 53


class SchedulerRole:
    """Both sides of a pull as the scheduler sees them; one instance may hold and read (``kv_both``)."""

    def __init__(
        self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", engine_id: str, settings: Settings
    ) -> None:
        self._settings = settings
        self._groups = group_shapes(kv_cache_config)
        self._has_state = has_state(self._groups)
        self._leaves_last_token = num_recomputed(self._groups) > 0
        self._engine_id = engine_id
        self._tp_size = vllm_config.parallel_config.tensor_parallel_size
        self._num_ranks = self._tp_size * vllm_config.parallel_config.pipeline_parallel_size
        self._identity = identity_of(vllm_config, settings)
        self._caches_prefixes = bool(vllm_config.cache_config.enable_prefix_caching)
        self._epoch = secrets.randbits(EPOCH_BITS)
        self._prefill_side = PrefillSide(self._epoch, MAX_HELD_REQUESTS, settings.lease_seconds)
        self._prefill_lock = threading.Lock()
        self._held_blocks = HeldBlocks()
        self._wake_engine = find_engine_wake()
        self._decode_side = DecodeSide(SIBLING_LINGER_SECONDS, RENEW_SHARE)
        self._decode_lock = threading.Lock()
        self._errands = Errands()
        self._lost: list[str] = []
        self._remote: dict[str, RemoteParams | KVFerryError] = {}
        self._loading: dict[str, Sequence[Sequence[int]]] = {}
        self._set_aside = SetAside(self._held_blocks, self._num_ranks)
        self._step = StepMetadata()
        self._directory: Directory | None = None
        port = control_port(settings.port, vllm_config.parallel_config.data_parallel_index)
        self._before_listening()
        self._listener = Listener(settings.host, port, self._answer, self._keep_up)
        logger.info("kvferry: engine %s listens on %s:%d", engine_id, settings.host, self._listener.port)

    def _before_listening(self) -> None:
        """Prepare what the listener's thread uses."""

    # The engine's requests, as the scheduler meets them.

    def on_new_request(self, request: "Request") -> None:
        """Take note of a request that names a remote hold, so that its lease is renewed while it waits.

        One that is to be held must end where the decode engine goes on.
        """
        params = request.kv_transfer_params
        if not params:
            return
        if params.get("do_remote_decode") and self._leaves_last_token:
            leave_last_token(request)
        if params.get("do_remote_prefill"):
            self._expect(request, params)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many prompt tokens to load. Without effects: the engine may ask again or ignore the answer.

        One token alone is not worth a load: the engine computes the next one anyway.
        """
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill") or not self._is_expected(request.request_id):
            return 0, False
        num_missing = self._num_loadable(request) - num_computed_tokens
        return (num_missing, True) if num_missing > 1 else (0, False)

    def groups_filled_whole(self, request: "Request") -> tuple[int, ...]:
        """Return the cache groups of whose blocks this request's load leaves nothing for the engine to clear."""
        remote = self._remote.get(request.request_id)
        sizes = remote.kvferry.block_sizes if isinstance(remote, RemoteParams) else ()
        return groups_filled_whole(self._groups, sizes)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """The engine has given the request blocks: order the load once, or let the remote hold go."""
        params = request.kv_transfer_params
        if not params:
            return
        if params.get("do_remote_decode"):
            self._begin_hold(request)
        if not params.get("do_remote_prefill") or not self._is_expected(request.request_id):
            return
        params["do_remote_prefill"] = False
        if num_external_tokens == 0:
            self._finish_reading(request.request_id)
            return
        block_ids = self._loading[request.request_id] = blocks.get_block_ids()
        self._step.loads.append(self._load_order(request, block_ids, num_external_tokens))

    def request_finished(
        self, request: "Request", block_ids: Sequence[Sequence[int]], is_complete: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return False, since blocks are held by reference, and what to answer.

        ``is_complete`` tells a finished prompt from an aborted one.
        """
        params = request.kv_transfer_params
        if not params:
            return False, None
        if request.request_id in self._loading:
            self._step.aborted.append(request.request_id)
        else:
            self._finish_reading(request.request_id)
        return False, self._finish_source(request, block_ids, is_complete) if params.get("do_remote_decode") else None

    def bind_block_pool(self, pool: "BlockPool") -> None:
        """Hold blocks by references in this pool."""
        self._held_blocks.bind(pool)

    # Once per engine step.

    def note_schedule(self, output: "SchedulerOutput") -> None:
        """Take note of what the next step computes; a pull needs to know no more than which requests those are."""

    def build_connector_meta(self, scheduled: Iterable[str] = ()) -> StepMetadata:
        """Return this step's orders to the workers; ``scheduled`` are the requests that it computes."""
        now = time.monotonic()
        with self._prefill_lock:
            self._prefill_side.expire(now)
            ended = self._prefill_side.take_ended()
            unfinished = self._prefill_side.unfinished(scheduled)
        for end in ended:
            self._end_hold(end)
        self._step.written = list(dict.fromkeys([*self._step.written, *map(self._held, unfinished)]))
        with self._decode_lock:
            self._run_errands(now)
            lost, self._lost = self._lost, []
        self._step.computes, self._step.answers_at = bool(scheduled), self._answers_at
        self._step.set_aside = self._set_aside.turn(self._loading)
        self._step.lost = [request_id for request_id in lost if request_id in self._loading]
        step, self._step = self._step, StepMetadata()
        return step

    def update_connector_output(self, output: "KVConnectorOutput") -> None:
        """All ranks have reported these loads: their remote holds may end."""
        for request_id in output.finished_recving or ():
            self._loading.pop(request_id, None)
            self._finish_reading(request_id)

    def has_pending_work(self) -> bool:
        """Whether the engine must step although it has no request: to end holds that are over.

        Where the engine cannot be woken, it has to keep stepping while anything is held.
        """
        with self._prefill_lock:
            has_news = self._set_aside.has_news or self._holding.has_ended
            return has_news or (self._wake_engine is None and self._holding.num_held > 0)

    # The engine's place among others.

    def publish(self, ranks: Sequence[RankEntry]) -> None:
        """Serve handshakes with these ranks from now on. Raises as :func:`check_complete`."""
        directory = Directory(PROTOCOL_VERSION, self._engine_id, self._epoch, self._identity, tuple(ranks))
        check_complete(directory, self._num_ranks)
        self._directory = directory

    def shutdown(self) -> None:
        """Close the control end point; twice is fine."""
        self._listener.close()
        self._errands.close()

    @property
    def _answers_at(self) -> EndPoint:
        return EndPoint(self._settings.reachable_host, self._listener.port, self._epoch)

    @property
    def _holding(self) -> PrefillSide | PushHolds:
        """What is held here for others."""
        return self._prefill_side

    def _expect(self, request: "Request", params: Mapping[str, Any]) -> None:
        """Take note of a new request whose prompt comes from another engine."""
        request_id = request.request_id
        try:
            parsed = self._remote[request_id] = parse_params(params, request)
        except KVFerryError as error:
            self._remote[request_id] = error.without_traceback()
            return
        with self._decode_lock:
            self._decode_side.arrive(request_id, parsed.hold, parsed.kvferry.lease_seconds, time.monotonic())

    def _is_expected(self, request_id: str) -> bool:
        """Return whether the request names where its prompt comes from."""
        return request_id in self._remote

    def _num_loadable(self, request: "Request") -> int:
        """Return how many of the prompt's tokens a load can bring; a prompt of one token is computed here."""
        num_tokens: int = request.num_prompt_tokens
        return max(num_tokens - num_recomputed(self._groups), 1)

    def _begin_hold(self, request: "Request") -> None:
        with self._prefill_lock:
            hold = self._prefill_side.begin(request.request_id)
        if hold is None:
            logger.warning(
                "kvferry: %s will not be exported: all %d guard words are taken, a request of this id is "
                "still held, or the id is too long.",
                request.request_id,
                MAX_HELD_REQUESTS,
            )
            return
        self._step.written.append(self._held(hold))

    def _finish_source(
        self, request: "Request", block_ids: Sequence[Sequence[int]], is_complete: bool
    ) -> dict[str, Any] | None:
        """A request that another engine goes on with has finished: hold its blocks, and return what to answer."""
        with self._prefill_lock:
            if not is_complete or token_ids_of(request) is None or not any(block_ids):
                self._prefill_side.drop(request.request_id)
                return None
            if self._has_state and request.num_computed_tokens != request.num_prompt_tokens:
                self._prefill_side.drop(request.request_id)
                logger.warning("kvferry: %s is not exported: its state went past the prompt.", request.request_id)
                return None
            hold = self._prefill_side.export(request.request_id, time.monotonic())
        if hold is None:
            return None
        self._held_blocks.hold(request.request_id, block_ids)
        where, block_sizes = self._answers_at, tuple(group.block_size for group in self._groups)
        ours = self._engine_id, where.host, where.port, self._tp_size, self._epoch
        return answer_params(request, hold, block_ids, PrefillEngine(*ours, self._settings.lease_seconds, block_sizes))

    def _held(self, hold: Hold) -> Held:
        return hold.slot, self._epoch, hold.handle.generation

    def _load_order(
        self, request: "Request", block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> LoadOrder:
        timeout = self._settings.load_timeout_seconds
        remote = self._remote[request.request_id]
        try:
            if isinstance(remote, KVFerryError):
                raise remote.without_traceback()
            num_loadable = self._num_loadable(request)
            check_prompt(remote, request, num_loadable)
            check_cached_windows(self._groups, remote.kvferry.block_sizes, self._caches_prefixes)
            blocks = blocks_to_load(
                self._groups,
                remote.kvferry.block_sizes,
                (num_loadable - num_external_tokens, num_loadable),
                remote.remote_block_ids,
                block_ids,
            )
            with self._decode_lock:
                lease = self._decode_side.running_lease(request.request_id, time.monotonic())
        except KVFerryError as error:
            logger.error("kvferry: %s cannot be loaded: %s", request.request_id, error)
            hold = remote.hold if isinstance(remote, RemoteParams) else None
            return LoadOrder(request.request_id, timeout, hold, error=error)
        timeout = min(timeout, lease.remaining(time.monotonic()))
        hold, slot = remote.hold, remote.kvferry.slot
        return LoadOrder(request.request_id, timeout, hold, slot, num_external_tokens, blocks)

    def _finish_reading(self, request_id: str) -> None:
        if self._remote.pop(request_id, None) is not None:
            self._leave(request_id)

    def _leave(self, request_id: str) -> None:
        """The request is done with its remote hold, which may end."""
        now = time.monotonic()
        with self._decode_lock:
            self._decode_side.finish(request_id, now)
            self._errands.release(self._decode_side.take_releases(now), self._settings.lease_seconds)

    def _run_errands(self, now: float) -> None:
        """Send what is due and take in what was answered; the requests whose holds are lost are kept for a step."""
        self._errands.release(self._decode_side.take_releases(now), self._settings.lease_seconds)
        for outcome in self._errands.collect():
            self._decode_side.renewed(outcome.held, outcome.sent_at, outcome.lease_seconds)
            self._lost += self._decode_side.lost(outcome.lost)
        self._errands.renew(self._decode_side.take_renewals(now), self._settings.lease_seconds)

    def _keep_up(self) -> None:
        """What is due while the engine sleeps or takes a long step, on the listener's thread."""
        now = time.monotonic()
        with self._decode_lock:
            self._run_errands(now)
        with self._prefill_lock:
            self._holding.expire(now)
        self._wake_for_ended()

    def _wake_for_ended(self) -> None:
        with self._prefill_lock:
            has_ended = self._holding.has_ended
        if has_ended and self._wake_engine is not None:
            self._wake_engine()

    def _end_hold(self, ended: Ended) -> None:
        """Order the guard word cleared and let the blocks go.

        In this order: the blocks can be given away in the next step at the earliest, and every
        worker clears the word before it runs this one.
        """
        hold = ended.hold
        self._step.ended.append(hold.slot)
        if hold.is_exported:
            self._held_blocks.free(hold.handle.request_id)
        if ended.ending is Ending.EXPIRED:
            logger.warning(
                "kvferry: nobody read or renewed %s within %g s: its blocks are freed.",
                hold.handle.request_id,
                self._settings.lease_seconds,
            )

    def _answer(self, question: Question) -> Answer:
        """Answer one question, on the listener's thread."""
        if isinstance(question, DirectoryRequest):
            check_version(question.version)
            if self._directory is None:
                raise HandoffError(Reason.PEER_UNREACHABLE, "this engine has not finished starting.", "Ask again.")
            return self._directory
        if isinstance(question, Unquiet):
            check_epoch(question.epoch, self._epoch)
            self._set_aside.note(question.rank, question.number, question.request_ids)
            if self._wake_engine is not None:
                self._wake_engine()
            return Noted(self._epoch)
        if not isinstance(question, Renew | Release):
            raise HandoffError(
                Reason.UNSUPPORTED,
                f"a scheduler does not answer a {type(question).__name__}.",
                "Ask the rank's own port.",
            )
        with self._prefill_lock:
            if isinstance(question, Renew):
                lost = self._holding.renew(question.epoch, question.handles, time.monotonic())
                return Renewed(self._epoch, self._settings.lease_seconds, tuple(lost))
            self._holding.release(question.epoch, question.handles)
        self._wake_for_ended()
        return Released(self._epoch)
