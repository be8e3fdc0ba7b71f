"""The connector inside vLLM's scheduler where caches are pushed: what differs from a pull."""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvferry.errors import KVFerryError, Reason, SettingsError
from kvferry.handoff.messages import (
    MAX_IDENTIFIER_LENGTH,
    PROTOCOL_VERSION,
    RankEntry,
)
from kvferry.handoff.push.holds import EndedPrompt, PushHolds, handle_of
from kvferry.handoff.push.sender import Prompt
from kvferry.handoff.push.sending import END
from kvferry.handoff.remote_holds import RemoteHold
from kvferry.handoff.wire.bootstrap import Bootstrap, Bootstraps, Offer, life_of
from kvferry.integrations.vllm.scheduler.blocks import (
    blocks_to_fill,
    check_cached_windows,
    groups_filled_whole,
    held_blocks,
)
from kvferry.integrations.vllm.scheduler.params import PushParams, parse_push_params, prompt_digest, token_ids_of
from kvferry.integrations.vllm.scheduler.pushable import check_pushable
from kvferry.integrations.vllm.scheduler.role import SchedulerRole
from kvferry.integrations.vllm.scheduler.router_beacon import RouterBeacon, encode_place
from kvferry.integrations.vllm.settings import Settings
from kvferry.integrations.vllm.step import LoadOrder, PushedPrompt, StepMetadata
from kvferry.layout.group import CacheKind

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class PushedRequest(msgspec.Struct, frozen=True):
    """A request that is to be pushed here, and the engine that pushes it once that is known."""

    params: PushParams
    offer: Offer | None = None

    @property
    def hold(self) -> RemoteHold | None:
        """What the decode side renews and releases."""
        if self.offer is None:
            return None
        control = self.offer.control
        handle = handle_of(self.params.transfer_id)
        return RemoteHold(self.offer.engine_id, control.epoch, control.host, control.port, handle)


class SourceRequest(msgspec.Struct, frozen=True):
    """A running request whose blocks are to be pushed, and the digest of its prompt, which is read once."""

    request: "Request"
    digest: str


class PushSchedulerRole(SchedulerRole):
    """Both sides of a push as the scheduler sees them."""

    def __init__(
        self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", engine_id: str, settings: Settings
    ) -> None:
        check_pushable(vllm_config)
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        self._is_sender = transfer.is_kv_producer
        if settings.router_address and self._is_sender == transfer.is_kv_consumer:
            raise SettingsError(
                Reason.INVALID_SETTING,
                "router_address tells a router of a prefill or of a decode engine, and this is to be both.",
                'Set "kv_role" to "kv_producer" or "kv_consumer".',
            )
        if settings.packs_pushes and not self._is_sender:
            raise SettingsError(
                Reason.INVALID_SETTING,
                f"strategy {settings.strategy!r} is for the engine that pushes, and this one is pushed to.",
                'Set "strategy" on the prefill engine only.',
            )
        super().__init__(vllm_config, kv_cache_config, engine_id, settings)

    def _before_listening(self) -> None:
        self._holds = PushHolds(self._epoch, self._settings.lease_seconds)
        self._pushed: dict[str, PushedRequest | KVFerryError] = {}
        self._sources: dict[str, SourceRequest] = {}
        self._bootstraps = Bootstraps()
        self._bootstrap: Bootstrap | None = None
        self._beacon: RouterBeacon | None = None
        self._to_release: dict[str, PushedRequest] = {}

    # The engine's requests.

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many prompt tokens are pushed; None while it is being asked where from."""
        params = request.kv_transfer_params
        is_pushed = params and params.get("do_remote_prefill") and self._is_expected(request.request_id)
        if is_pushed and not self._find_offer(request.request_id):
            return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def groups_filled_whole(self, request: "Request") -> tuple[int, ...]:
        """Return the cache groups of whose blocks a push leaves nothing for the engine to clear."""
        pushed = self._pushed.get(request.request_id)
        offer = pushed.offer if isinstance(pushed, PushedRequest) else None
        return groups_filled_whole(self._groups, () if offer is None else offer.block_sizes)

    # Once per engine step.

    def note_schedule(self, output: "SchedulerOutput") -> None:
        """Tell the workers how far each prompt is computed when the step has run, and which blocks it may overwrite."""
        for request_id in output.preempted_req_ids or ():
            if (transfer_id := self._holds.transfer_of(request_id)) is not None:
                self._step.preempted.append(transfer_id)
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            if (source := self._sources.get(request_id)) is not None:
                self._note_progress(source, num_scheduled, output)

    def build_connector_meta(self, scheduled: Iterable[str] = ()) -> StepMetadata:
        """Return this step's orders to the workers."""
        with self._prefill_lock:
            self._holds.expire(time.monotonic())
            ended = self._holds.take_ended()
        for end in ended:
            self._end_transfer(end)
        for request_id, pushed in list(self._to_release.items()):
            self._release_unread(request_id, pushed)
        for request_id in [each for each, pushed in self._pushed.items() if _is_sought(pushed)]:
            # Its lease is to be renewed while it waits for its turn, in which it would ask again.
            self._find_offer(request_id)
        return super().build_connector_meta(scheduled)

    def update_connector_output(self, output: "KVConnectorOutput") -> None:
        """All ranks have reported; of an engine from which nothing came it is asked anew which one it is."""
        for request_id in output.failed_recving or ():
            if isinstance(pushed := self._pushed.get(request_id), PushedRequest):
                self._bootstraps.forget(pushed.params.remote_bootstrap_addr)
        super().update_connector_output(output)

    def has_pending_work(self) -> bool:
        """Whether the engine must step although it has no request: to end what is over."""
        return bool(self._to_release) or super().has_pending_work()

    # The engine's place among others.

    def publish(self, ranks: Sequence[RankEntry]) -> None:
        """Serve handshakes with these ranks from now on, and the router's query."""
        super().publish(ranks)
        if self._bootstrap is None:
            self._open_bootstrap()
        if self._settings.router_address and self._beacon is None:
            self._tell_router()

    def _open_bootstrap(self) -> None:
        if not self._is_sender:
            return
        host = self._settings.host
        sizes = tuple(group.block_size for group in self._groups)
        offer = Offer(PROTOCOL_VERSION, self._life, self._answers_at, sizes)
        self._bootstrap = Bootstrap(host, self._settings.bootstrap_port, offer)
        logger.info("kvferry: bootstrap queries are answered on http://%s:%d", host, self._bootstrap.port)

    def _tell_router(self) -> None:
        bootstrap_port = self._listener.port if self._bootstrap is None else self._bootstrap.port
        place = encode_place(self._settings.reachable_host, bootstrap_port, self._listener.port, self._life)
        kind = "P" if self._is_sender else "D"
        router, http = self._settings.router_address, self._settings.http_address
        self._beacon = RouterBeacon(router, kind, http, place, self._tp_size)

    def shutdown(self) -> None:
        """Close the control end points; twice is fine."""
        for each in (self._beacon, self._bootstrap):
            if each is not None:
                each.close()
        super().shutdown()

    @property
    def _life(self) -> str:
        return life_of(self._engine_id, self._epoch)

    def _note_progress(self, source: SourceRequest, num_scheduled: int, output: "SchedulerOutput") -> None:
        request, state = source.request, output.kv_connector_block_state
        ids = None if state is None else state.get_block_ids(request.request_id)
        transfer_id = self._holds.transfer_of(request.request_id)
        if ids is None or transfer_id is None:
            return
        num_tokens: int = request.num_prompt_tokens
        num_final = request.num_computed_tokens + num_scheduled
        if num_final > num_tokens and not all(group.kind in WHOLE for group in self._groups):
            # A state goes past the prompt, and what leaves a window is given back.
            logger.warning("kvferry: %s is not pushed: its prompt is computed with more than one token.", transfer_id)
            with self._prefill_lock:
                self._holds.drop(request.request_id)
            return
        progress = END if num_final >= num_tokens else num_final
        held = held_blocks(self._groups, ids)
        of_prompt = max(0, min(num_final, num_tokens) - request.num_computed_tokens)
        self._step.prompts.append((transfer_id, Prompt(num_tokens, source.digest, held, progress, of_prompt)))

    @property
    def _holding(self) -> PushHolds:
        return self._holds

    def _expect(self, request: "Request", params: Mapping[str, Any]) -> None:
        """Ask where the prompt comes from, so that this is known when the request gets its turn."""
        request_id = request.request_id
        try:
            self._pushed[request_id] = PushedRequest(parse_push_params(params, request_id))
            self._find_offer(request_id)
        except KVFerryError as error:
            self._pushed[request_id] = error.without_traceback()

    def _is_expected(self, request_id: str) -> bool:
        return request_id in self._pushed

    def _begin_hold(self, request: "Request") -> None:
        transfer_id = _transfer_of(request)
        if token_ids_of(request) is None:
            logger.warning("kvferry: %s is not pushed: its prompt is given as embeddings.", request.request_id)
            return
        if transfer_id is None:
            logger.warning(
                "kvferry: %s is not pushed: the router gave it no transfer_id, of up to %d characters.",
                request.request_id,
                MAX_IDENTIFIER_LENGTH,
            )
            return
        with self._prefill_lock:
            begins = self._holds.begin(transfer_id, request.request_id)
        if begins and request.request_id not in self._sources:
            digest = prompt_digest(request, request.num_prompt_tokens)
            self._sources[request.request_id] = SourceRequest(request, digest)

    def _finish_source(self, request: "Request", block_ids: Sequence[Sequence[int]], is_complete: bool) -> None:
        """A request has finished whose blocks are pushed; the receiver needs no answer."""
        self._sources.pop(request.request_id, None)
        with self._prefill_lock:
            is_whole = is_complete and any(block_ids)
            transfer_id = self._holds.hold(request.request_id, time.monotonic()) if is_whole else None
            if transfer_id is not None:
                self._held_blocks.hold(transfer_id, block_ids)
                return
            self._holds.drop(request.request_id)
            if (named := _transfer_of(request)) is not None:
                self._holds.abandon(named)

    def _load_order(
        self, request: "Request", block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> LoadOrder:
        timeout = self._settings.push_timeout_seconds
        pushed = self._pushed[request.request_id]
        try:
            if isinstance(pushed, KVFerryError):
                raise pushed.without_traceback()
            with self._decode_lock:
                self._decode_side.running_lease(request.request_id, time.monotonic())
            hold, offer = pushed.hold, pushed.offer
            assert offer is not None, "its lease begins with the offer"
            num_loadable = self._num_loadable(request)
            tokens = num_loadable - num_external_tokens, num_loadable
            check_cached_windows(self._groups, offer.block_sizes, self._caches_prefixes)
            blocks = blocks_to_fill(self._groups, offer.block_sizes, tokens, block_ids)
            prompt = PushedPrompt(pushed.params.transfer_id, num_loadable, prompt_digest(request, num_loadable))
        except KVFerryError as error:
            logger.error("kvferry: %s cannot be pushed here: %s", request.request_id, error)
            hold = pushed.hold if isinstance(pushed, PushedRequest) else None
            return LoadOrder(request.request_id, timeout, hold, error=error)
        return LoadOrder(request.request_id, timeout, hold, 0, num_external_tokens, blocks, pushed=prompt)

    def _find_offer(self, request_id: str) -> bool:
        """Return whether it is known where the request comes from, or that this cannot be known."""
        pushed = self._pushed[request_id]
        if isinstance(pushed, KVFerryError) or pushed.offer is not None:
            return True
        try:
            offer = self._bootstraps.get(pushed.params.remote_bootstrap_addr, pushed.params.remote_engine_id)
        except KVFerryError as error:
            self._pushed[request_id] = error.without_traceback()
            return True
        if offer is None:
            return False
        found = self._pushed[request_id] = msgspec.structs.replace(pushed, offer=offer)
        assert found.hold is not None
        with self._decode_lock:
            self._decode_side.arrive(request_id, found.hold, self._settings.lease_seconds, time.monotonic())
        return True

    def _finish_reading(self, request_id: str) -> None:
        pushed = self._pushed.pop(request_id, None)
        if isinstance(pushed, PushedRequest) and pushed.offer is None:
            self._to_release[request_id] = pushed
        elif isinstance(pushed, PushedRequest):
            self._leave(request_id)

    def _release_unread(self, request_id: str, pushed: PushedRequest) -> None:
        """Let a transfer go whose request ended before it was known where it comes from."""
        self._pushed[request_id] = pushed
        if self._find_offer(request_id):
            del self._to_release[request_id]
            self._finish_reading(request_id)
        else:
            del self._pushed[request_id]

    def _end_transfer(self, ended: EndedPrompt) -> None:
        """Tell the workers and let the blocks go: they can be given away in the next step at the earliest."""
        self._sources.pop(ended.request_id, None)
        self._step.ended_transfers.append(ended.transfer_id)
        if ended.was_held:
            self._held_blocks.free(ended.transfer_id)
        if ended.has_expired:
            logger.warning(
                "kvferry: nobody took or renewed %s within %g s: its blocks are freed.",
                ended.transfer_id,
                self._settings.lease_seconds,
            )


def _is_sought(pushed: PushedRequest | KVFerryError) -> bool:
    """Return whether it is still being asked where a request comes from."""
    return isinstance(pushed, PushedRequest) and pushed.offer is None


def _transfer_of(request: "Request") -> str | None:
    """Return what the router calls the request on both engines, None for what no message holds."""
    transfer_id = (request.kv_transfer_params or {}).get("transfer_id")
    if isinstance(transfer_id, str) and 0 < len(transfer_id) <= MAX_IDENTIFIER_LENGTH:
        return transfer_id
    return None


WHOLE = (CacheKind.ATTENTION, CacheKind.MLA)
"""Kinds of which nothing changes or leaves when the engine goes past the prompt."""
