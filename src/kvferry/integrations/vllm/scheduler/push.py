"""The scheduler's parts for pushes: a prefill engine writes a prompt's blocks, a decode engine announces its own."""

import logging
import time
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

from kvferry.errors import HandoffError, KVFerryError, Reason, SettingsError
from kvferry.handoff.holds import handle_of_transfer
from kvferry.handoff.messages import MAX_IDENTIFIER_LENGTH
from kvferry.handoff.source import END, Prompt
from kvferry.handoff.remote_holds import RemoteHold
from kvferry.handoff.versions import OURS
from kvferry.handoff.wire.addresses import in_url
from kvferry.handoff.wire.bootstrap import BootstrapQueries, BootstrapServer, Offer, id_in_epoch, query, signed
from kvferry.integrations.vllm.scheduler.blocks import blocks_to_load, check_cached_windows, held_blocks
from kvferry.integrations.vllm.scheduler.params import TransferParams, parse_push_params, prompt_digest, token_ids_of
from kvferry.integrations.vllm.scheduler.parts import Destination, EngineState, Source
from kvferry.integrations.vllm.scheduler.prompt_adapters import PromptAdapter
from kvferry.integrations.vllm.scheduler.router_beacon import FORGOTTEN_SECONDS, RouterBeacon, encode_zmq_address
from kvferry.integrations.vllm.step import PromptLoad, AnnouncedPrompt
from kvferry.layout.group import CacheKind
from kvferry.peer_log import PeerLog

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = PeerLog(logging.getLogger(__name__))

WHOLE = (CacheKind.ATTENTION, CacheKind.MLA)
"""Kinds whose blocks neither change nor are freed when the engine goes past the prompt."""

LOOK_SECONDS = 0.5
"""After so long an engine without requests looks whether a query has taken too long, or may begin."""


class _Running(msgspec.Struct, frozen=True):
    """A running request whose blocks are pushed, the digest of its prompt, which is computed once, and its adapter."""

    request: "Request"
    digest: str
    adapter: PromptAdapter


class PushSource(Source):
    """Tells the workers how far each prompt is computed, and tells routers and decode engines this engine's address."""

    def __init__(self, state: EngineState, vllm_config: "VllmConfig") -> None:
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        self._state = state
        self._is_producer = transfer.is_kv_producer
        if state.settings.router_address and self._is_producer == transfer.is_kv_consumer:
            raise SettingsError(
                Reason.INVALID_SETTING,
                "router_address registers a prefill or a decode engine with a router, and this engine is both.",
                'Set "kv_role" to "kv_producer" or "kv_consumer".',
            )
        self._running: dict[str, _Running] = {}
        self.bootstrap: BootstrapServer | None = None
        self._beacon: RouterBeacon | None = None
        self._beacon_id = ""
        self._is_withdrawn = False

    def begin(self, request: "Request") -> None:
        """Open a hold under the router's transfer id."""
        transfer_id = _transfer_of(request)
        if token_ids_of(request) is None:
            logger.warning(
                "kvferry: %s is not pushed: its prompt has embeddings.", request.request_id, peer=request.request_id
            )
            return
        if transfer_id is None:
            logger.warning(
                "kvferry: %s is not pushed: the router gave it no transfer_id of 1 to %d characters.",
                request.request_id,
                MAX_IDENTIFIER_LENGTH,
                peer=request.request_id,
            )
            return
        try:
            adapter = self._state.adapters.of_computed(request)
        except KVFerryError as error:
            self._refuse(request.request_id, transfer_id, error)
            return
        with self._state.holds_lock:
            hold = self._state.holds.begin_transfer(transfer_id, request.request_id)
        if hold is not None and request.request_id not in self._running:
            digest = prompt_digest(request, request.num_prompt_tokens)
            self._running[request.request_id] = _Running(request, digest, adapter)

    def finish(self, request: "Request", block_ids: Sequence[Sequence[int]], is_complete: bool) -> None:
        """Hold the blocks of a complete prompt until the push has ended; the decode engine needs no answer."""
        request_id, holds = request.request_id, self._state.holds
        self._running.pop(request_id, None)
        with self._state.holds_lock:
            hold = holds.hold(request_id, time.monotonic()) if is_complete and any(block_ids) else None
            if hold is None:
                holds.drop(request_id)
                if (transfer_id := _transfer_of(request)) is not None:
                    holds.drop_transfer(transfer_id)
        if hold is not None:
            self._state.kept_blocks.keep(hold.handle.request_id, block_ids)

    def note_schedule(self, output: "SchedulerOutput") -> None:
        """Tell the workers how far the step computes each prompt, and which blocks it may overwrite."""
        for request_id in output.preempted_req_ids or ():
            if (transfer_id := self._transfer_served_by(request_id)) is not None:
                self._state.step.preempted.append(transfer_id)
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            if (running := self._running.get(request_id)) is not None:
                self._note_progress(running, num_scheduled, output)

    def forget(self, request_id: str) -> None:
        """The transfer of a request has ended."""
        self._running.pop(request_id, None)

    def publish(self) -> None:
        """Answer bootstrap queries, and register with the router that the settings name."""
        state, settings = self._state, self._state.settings
        engine_id = id_in_epoch(state.engine_id, state.epoch)
        sizes = tuple(group.block_size for group in state.groups)
        offer = Offer(OURS.oldest, engine_id, state.answers_at, sizes, newest=OURS.newest, compares_adapters=True)
        offer = signed(offer, state.trust.keys)
        if self.bootstrap is not None:
            self.bootstrap.offer(offer)
        elif self._is_producer:
            self.bootstrap = BootstrapServer(settings.host, settings.bootstrap_port, offer)
            here = in_url(settings.host)
            logger.info("kvferry: bootstrap queries are answered on http://%s:%d", here, self.bootstrap.port)
        if self._beacon is not None and not self._is_withdrawn and self._beacon_id != engine_id:
            self._beacon.close()
            self._beacon = None
        if self._beacon is None and settings.router_address:
            self._beacon_id = engine_id
            control_port = state.answers_at.port
            bootstrap_port = control_port if self.bootstrap is None else self.bootstrap.port
            zmq_address = encode_zmq_address(settings.reachable_host, bootstrap_port, control_port, engine_id)
            kind = "P" if self._is_producer else "D"
            self._beacon = RouterBeacon(
                settings.router_address, kind, settings.http_address, zmq_address, state.tp_size
            )

    def withdraw(self) -> float:
        self._is_withdrawn = True
        if self._beacon is None:
            return super().withdraw()
        self._beacon.close()
        return FORGOTTEN_SECONDS

    def close(self) -> None:
        """Stop answering bootstrap queries and stop the beacon."""
        for each in (self._beacon, self.bootstrap):
            if each is not None:
                each.close()

    def _transfer_served_by(self, request_id: str) -> str | None:
        with self._state.holds_lock:
            hold = self._state.holds.open_hold(request_id)
        return None if hold is None else hold.handle.request_id

    def _refuse(self, request_id: str, transfer_id: str, error: KVFerryError) -> None:
        """Push nothing of a prompt; decode ranks that have announced blocks for it are told that it has ended."""
        logger.warning("kvferry: %s is not pushed: %s", transfer_id, error, peer=transfer_id)
        self._running.pop(request_id, None)
        with self._state.holds_lock:
            self._state.holds.drop(request_id)
            self._state.holds.drop_transfer(transfer_id)

    def _note_progress(self, running: _Running, num_scheduled: int, output: "SchedulerOutput") -> None:
        request, blocks, groups = running.request, output.kv_connector_block_state, self._state.groups
        ids = None if blocks is None else blocks.get_block_ids(request.request_id)
        transfer_id = self._transfer_served_by(request.request_id)
        if ids is None or transfer_id is None:
            return
        try:
            running.adapter.check()
        except KVFerryError as error:
            self._refuse(request.request_id, transfer_id, error)
            return
        num_tokens: int = request.num_prompt_tokens
        num_final = request.num_computed_tokens + num_scheduled
        if num_final > num_tokens and not all(group.kind in WHOLE for group in groups):
            # A state goes past the prompt, and blocks that leave a window are freed.
            logger.warning(
                "kvferry: %s is not pushed: the step computes more than the prompt.", transfer_id, peer=transfer_id
            )
            with self._state.holds_lock:
                self._state.holds.drop(request.request_id)
            return
        progress = END if num_final >= num_tokens else num_final
        held = held_blocks(groups, ids)
        prompt = Prompt(num_tokens, running.digest, held, progress, running.adapter.adapter)
        self._state.step.prompts.append((transfer_id, prompt))


class _Expected(msgspec.Struct, frozen=True):
    """A request whose prompt is pushed here, and the offer of the prefill engine once it is known."""

    params: TransferParams
    offer: Offer | None = None
    is_trusted: bool = False
    """Whether a trusted key has signed the offer."""

    @property
    def hold(self) -> RemoteHold | None:
        """The hold that this engine renews and releases."""
        if self.offer is None:
            return None
        control = self.offer.control
        handle = handle_of_transfer(self.params.transfer_id)
        return RemoteHold(self.offer.engine_id, control.epoch, control.host, control.port, handle, self.is_trusted)


class PushDestination(Destination):
    """Asks bootstrap servers which engine pushes a request's prompt."""

    def __init__(self, state: EngineState, wake: Callable[[], None]) -> None:
        self._state = state
        self._wake = wake
        self._expected: dict[str, _Expected | KVFerryError] = {}
        self._to_release: dict[str, _Expected] = {}
        self._has_answers = False
        self._look_at = 0.0
        self._queries = BootstrapQueries(partial(query, trust=state.trust), state.trust.keys, self._note_answer)

    @property
    def has_pending_work(self) -> bool:
        is_due = self._has_answers or time.monotonic() >= self._look_at
        return bool(self._to_release) and is_due

    @property
    def waits(self) -> bool:
        expected = self._expected.values()
        return bool(self._to_release) or any(isinstance(each, _Expected) and each.offer is None for each in expected)

    def expect(self, request: "Request", params: Mapping[str, Any]) -> None:
        """Ask for the prefill engine now, so that it is known when the request is scheduled."""
        request_id = request.request_id
        try:
            self._expected[request_id] = _Expected(parse_push_params(params, request_id))
        except KVFerryError as error:
            self._expected[request_id] = error.without_traceback()
        else:
            self.is_ready(request_id)

    def is_expected(self, request_id: str) -> bool:
        return request_id in self._expected

    def is_ready(self, request_id: str) -> bool:
        expected = self._expected[request_id]
        if isinstance(expected, _Expected) and expected.offer is None:
            expected = self._expected[request_id] = self._found(request_id, expected)
        return isinstance(expected, KVFerryError) or expected.offer is not None

    def block_sizes(self, request_id: str) -> Sequence[int]:
        expected = self._expected.get(request_id)
        offer = expected.offer if isinstance(expected, _Expected) else None
        return () if offer is None else offer.block_sizes

    def hold_of(self, request_id: str) -> RemoteHold | None:
        expected = self._expected.get(request_id)
        return expected.hold if isinstance(expected, _Expected) else None

    def check_adapter(self, request: "Request") -> None:
        """Refuse to load where the weights of the adapter are not known, or not compared by the prefill engine.

        Raises :class:`HandoffError` (unknown-weights).
        """
        has_adapter = self._state.adapters.of(request).read is not None
        expected = self._expected.get(request.request_id)
        offer = expected.offer if isinstance(expected, _Expected) else None
        if has_adapter and offer is not None and not offer.compares_adapters:
            raise HandoffError(
                Reason.UNKNOWN_WEIGHTS,
                f"the prefill engine of {request.request_id} does not compare the weights of adapters.",
                "Update kvferry on the prefill engine: an earlier version compares the names alone.",
            )

    def order(self, request: "Request", tokens: tuple[int, int], block_ids: Sequence[Sequence[int]]) -> PromptLoad:
        """Return the order to announce the blocks of these tokens."""
        state, request_id = self._state, request.request_id
        expected = self._expected[request_id]
        if isinstance(expected, KVFerryError):
            raise expected.without_traceback()
        assert expected.offer is not None, "the engine gives blocks to a request that is ready"
        state.leases.running_lease(request_id)
        first_token, end_token = tokens
        sizes = expected.offer.block_sizes
        check_cached_windows(state.groups, sizes, state.caches_prefixes)
        blocks = blocks_to_load(state.groups, sizes, tokens, None, block_ids)
        adapter = state.adapters.of(request).adapter
        digest = prompt_digest(request, end_token)
        prompt = AnnouncedPrompt(expected.params.transfer_id, end_token, digest, adapter.digest)
        num_tokens = end_token - first_token
        timeout = state.settings.load_seconds
        return PromptLoad(request_id, timeout, expected.hold, None, num_tokens, blocks, pushed=prompt)

    def finish(self, request_id: str) -> None:
        """Release the transfer, now or once the prefill engine is known."""
        expected = self._expected.pop(request_id, None)
        if isinstance(expected, _Expected) and expected.offer is None:
            self._to_release[request_id] = expected
        elif isinstance(expected, _Expected):
            self._state.leases.finish(request_id)

    def refuse_expected(self, error_of: Callable[[str], KVFerryError], loading: Container[str]) -> None:
        for request_id in [each for each in self._expected if each not in loading]:
            self.finish(request_id)
            self._expected[request_id] = error_of(request_id)

    def fail(self, request_id: str) -> None:
        """Query the bootstrap address of a failed load again: its prefill engine may have been restarted."""
        expected = self._expected.get(request_id)
        if isinstance(expected, _Expected):
            self._queries.forget(expected.params.remote_bootstrap_addr, expected.params.remote_engine_id)

    def turn(self) -> None:
        """Take answers to bootstrap queries: they start leases of waiting requests and release ended transfers."""
        # First: what comes from now on asks for another step.
        self._has_answers, self._look_at = False, time.monotonic() + LOOK_SECONDS
        for request_id, expected in list(self._to_release.items()):
            found = self._found(request_id, expected)
            if isinstance(found, KVFerryError) or found.offer is not None:
                del self._to_release[request_id]
                self._state.leases.finish(request_id)
        for request_id in list(self._expected):
            self.is_ready(request_id)

    def _note_answer(self) -> None:
        """A query has ended, on its thread."""
        self._has_answers = True
        if self._to_release:
            self._wake()

    def _found(self, request_id: str, expected: _Expected) -> _Expected | KVFerryError:
        """Return the request with its offer, or the query's error; before the answer, ``expected`` unchanged."""
        params = expected.params
        try:
            offer = self._queries.get(params.remote_bootstrap_addr, params.remote_engine_id)
        except KVFerryError as error:
            return error.without_traceback()
        if offer is None:
            return expected
        found = msgspec.structs.replace(expected, offer=offer, is_trusted=self._state.trust.keys is not None)
        assert found.hold is not None
        self._state.leases.arrive(request_id, found.hold, self._state.settings.lease_seconds)
        return found


def check_pushable(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
    """Refuse engines in which a source cannot know its final blocks. Raises :class:`KVFerryError` (unsupported)."""
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    assert transfer is not None
    # vLLM tells a data-parallel rank of a dense model that it is alone; only the engine's id shows the rank.
    engine_id = str(transfer.engine_id)
    suffix = f"_dp{parallel.data_parallel_index}"
    if parallel.data_parallel_size > 1 or engine_id.endswith(suffix):
        raise KVFerryError(
            Reason.UNSUPPORTED,
            f"mode 'push' with data-parallel ranks (the engine's id is {engine_id!r}).",
            f'Set "mode" to "pull", or run an engine for each rank, with an id that does not end in {suffix}.',
        )
    is_source = transfer.is_kv_producer and vllm_config.use_v2_model_runner
    if is_source and (writes := _written_untold(vllm_config, kv_cache_config)):
        raise KVFerryError(
            Reason.UNSUPPORTED,
            f"mode 'push' on a prefill engine with vLLM's second model runner, which {writes} in update_requests, "
            "before it calls handle_preemptions: a push of a prompt that the step preempts could send those bytes. "
            "What is missing is a call of the connector before update_requests.",
            'Set VLLM_USE_V2_MODEL_RUNNER=0, or "mode" to "pull".',
        )
    if parallel.pipeline_parallel_size > 1 and vllm_config.speculative_config is not None:
        raise KVFerryError(
            Reason.UNSUPPORTED,
            "mode 'push' with pipeline stages and draft tokens: vLLM tells only the last stage when a step has ended.",
            'Run without speculative decoding or with one stage, or set "mode" to "pull".',
        )


def _written_untold(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> str:
    """Return which blocks the second model runner writes in a step before it tells the connector; empty for none.

    The blocks of a prompt that the step preempts may be among them. Every other write of a step comes with the model,
    behind the connector's ``pre_forward``.
    """
    if kv_cache_config.needs_kv_cache_zeroing:
        return "clears new blocks (of a model with states, or of caches of several precisions)"
    whole, hashed = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    if vllm_config.cache_config.enable_prefix_caching and whole != hashed:
        # A prefix may end within a block of a group with longer blocks.
        return f"copies blocks of which a prompt has a part (prefixes of {hashed} tokens, blocks of up to {whole})"
    return ""


def _transfer_of(request: "Request") -> str | None:
    """Return the router's transfer id, the same on both engines; None where it is missing or too long for a message."""
    transfer_id = (request.kv_transfer_params or {}).get("transfer_id")
    if isinstance(transfer_id, str) and 0 < len(transfer_id) <= MAX_IDENTIFIER_LENGTH:
        return transfer_id
    return None
