"""The scheduler's parts for pulls: a prefill engine answers with a hold, and a decode engine reads the held blocks."""

import logging
import time
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.execution.guard_words import Held
from kvferry.execution.on_request import transfer_id_of
from kvferry.handoff.adapters import compare_adapters
from kvferry.handoff.guard_word import HeldPrompt, guard_word
from kvferry.handoff.handshake import TELLS_SINCE
from kvferry.handoff.holds import Hold
from kvferry.handoff.remote_holds import RemoteHold
from kvferry.integrations.vllm.scheduler.blocks import (
    blocks_to_load,
    check_cached_windows,
    guarded_blocks,
    has_state,
)
from kvferry.integrations.vllm.scheduler.params import (
    RemoteParams,
    answer_params,
    check_adapter_is_said,
    check_own_answers,
    check_prompt,
    check_signature,
    parse_params,
    prompt_digest,
    read_params,
    token_ids_of,
)
from kvferry.integrations.vllm.scheduler.parts import Destination, EngineState, Source
from kvferry.integrations.vllm.scheduler.prompt_adapters import PromptAdapter
from kvferry.integrations.vllm.step import PromptLoad, AnnouncedPrompt
from kvferry.peer_log import PeerLog

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = PeerLog(logging.getLogger(__name__))

TURN_ANSWER_SECONDS = 1.0
"""How long a request waits to hear whether a decode engine still holds the conversation so far."""


class _Prompt(msgspec.Struct):
    """A request with an open hold: its adapter, the digest of its prompt's ``num_tokens``, and the word that a step has
    set.
    """

    request: "Request"
    adapter: PromptAdapter
    num_tokens: int = 0
    digest: str = ""
    word: bytes = b""


class _Turn(NamedTuple):
    """A request that goes on from ``num_tokens`` which a decode engine holds, if that engine answers in time."""

    num_tokens: int
    answer_by: float


class PullSource(Source):
    """Holds finished prompts under guard words, for decode engines that read them.

    The step that computes a prompt's end sets the guard word: then all blocks of the prompt are known. Until then, and
    after a preemption, the slot is cleared.

    Where an engine ``may_pack_pages``, the tokens that a request generates change the page of the prompt's last tokens,
    and so its digests: with digests, the word of such a request comes with the step after its end.
    """

    def __init__(self, state: EngineState, *, may_pack_pages: bool) -> None:
        self._state = state
        self._has_state = has_state(state.groups)
        self._waits_for_ends = state.keeps_digests and may_pack_pages
        self._prompts: dict[str, _Prompt] = {}

    def begin(self, request: "Request") -> None:
        """Open a hold; a preempted request that begins again keeps its hold, and has other blocks."""
        try:
            adapter = self._state.adapters.of_computed(request)
        except KVFerryError as error:
            self._refuse(request.request_id, error)
            return
        with self._state.holds_lock:
            hold, drains = self._state.holds.begin(request.request_id), self._state.holds.is_draining
        if hold is None and drains:
            told = "kvferry: %s is not held, since this engine drains."
            logger.info(told, request.request_id, peer=request.request_id)
            return
        if hold is None:
            logger.warning(
                "kvferry: %s is not held for a decode engine: all guard words are taken, a request of this id is still "
                "held, or the id is too long.",
                request.request_id,
                peer=request.request_id,
            )
            return
        self._prompts[request.request_id] = _Prompt(request, adapter)

    def finish(
        self, request: "Request", block_ids: Sequence[Sequence[int]], is_complete: bool
    ) -> dict[str, Any] | None:
        """Hold the blocks of a complete prompt and return the parameters that name the hold."""
        state = self._state
        prompt = self._prompts.pop(request.request_id, None)
        if prompt is None:
            return None
        try:
            prompt.adapter.check()
        except KVFerryError as error:
            self._refuse(request.request_id, error)
            return None
        # A request that was preempted may end with an output of before, while its prompt is computed again.
        is_computed = request.num_computed_tokens >= request.num_prompt_tokens and any(block_ids)
        with state.holds_lock:
            if not is_complete or not is_computed or token_ids_of(request) is None:
                state.holds.drop(request.request_id)
                return None
            if self._has_state and request.num_computed_tokens != request.num_prompt_tokens:
                state.holds.drop(request.request_id)
                told = "kvferry: %s is not held: its state went past the prompt."
                logger.warning(told, request.request_id, peer=request.request_id)
                return None
            hold = state.holds.hold(request.request_id, time.monotonic())
        if hold is None:
            return None
        state.kept_blocks.keep(hold.handle.request_id, block_ids)
        held_prompt = self._held_prompt(prompt, block_ids)
        held = state.held(hold, held_prompt)
        is_late = held.word != prompt.word
        if is_late:
            state.step.late[hold.handle] = held
        return answer_params(hold, held_prompt, block_ids, state, is_late=is_late, adapter=prompt.adapter.adapter)

    def note_schedule(self, output: "SchedulerOutput") -> None:
        """Add the guard words of the prompts that the step computes to their end; clear those of preempted requests."""
        for request_id in output.preempted_req_ids or ():
            self._withdraw(request_id)
        blocks = output.kv_connector_block_state
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            prompt = self._prompts.get(request_id)
            if prompt is None or prompt.word or blocks is None or token_ids_of(prompt.request) is None:
                continue
            request = prompt.request
            if request.num_computed_tokens + num_scheduled < request.num_prompt_tokens:
                continue
            if self._waits_for_ends and request.max_tokens > 1:
                continue
            hold, block_ids = self._open_hold(request_id), blocks.get_block_ids(request_id)
            if hold is not None and block_ids is not None:
                held = self._state.held(hold, self._held_prompt(prompt, block_ids))
                prompt.word = held.word
                self._state.step.written.append(held)

    def publish(self) -> None:
        check_own_answers(self._state)

    def _refuse(self, request_id: str, error: KVFerryError) -> None:
        """Hold nothing of a prompt."""
        logger.warning("kvferry: %s is not held: %s", request_id, error, peer=request_id)
        self._prompts.pop(request_id, None)
        with self._state.holds_lock:
            self._state.holds.drop(request_id)

    def _withdraw(self, request_id: str) -> None:
        prompt, hold = self._prompts.get(request_id), self._open_hold(request_id)
        if prompt is not None and hold is not None and hold.slot is not None:
            prompt.word = b""
            self._state.step.ended_slots.append(hold.slot)

    def _open_hold(self, request_id: str) -> Hold | None:
        with self._state.holds_lock:
            return self._state.holds.open_hold(request_id)

    def _held_prompt(self, prompt: _Prompt, block_ids: Sequence[Sequence[int]]) -> HeldPrompt:
        num_tokens: int = prompt.request.num_prompt_tokens
        if prompt.num_tokens != num_tokens:
            prompt.num_tokens, prompt.digest = num_tokens, prompt_digest(prompt.request, num_tokens)
        return self._state.held_prompt(prompt.digest, num_tokens, block_ids)


class PullDestination(Destination):
    """Takes the remote hold to read from a request's parameters, which have all that a load needs."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._expected: dict[str, RemoteParams | KVFerryError] = {}
        self._turns: dict[str, _Turn] = {}

    def expect(self, request: "Request", params: Mapping[str, Any]) -> None:
        """Renew the lease of the request's remote hold from now on."""
        request_id = request.request_id
        try:
            self._expected[request_id] = parsed = self._parse(params, request_id)
        except KVFerryError as error:
            self._expected[request_id] = error.without_traceback()
            if error.reason is Reason.PROTOCOL_MISMATCH:
                self._say_versions(read_params(params, request_id), request_id)
            return
        self._state.leases.arrive(request_id, self._hold(parsed), parsed.kvferry.lease_seconds)

    def expect_turn(self, request: "Request", params: Mapping[str, Any]) -> None:
        if not params.get("remote_block_ids"):
            return
        request_id, state = request.request_id, self._state
        try:
            parsed = self._parse(params, request_id)
            num_tokens = parsed.kvferry.num_tokens
            if num_tokens >= request.num_prompt_tokens:
                raise _other_conversation(request_id, num_tokens, request.num_prompt_tokens)
            check_prompt(parsed, request, num_tokens)
            check_cached_windows(state.groups, parsed.kvferry.block_sizes, state.caches_prefixes)
        except KVFerryError as error:
            told = "kvferry: %s computes what a decode engine may have: %s"
            logger.info(told, request_id, error, peer=request_id)
            return
        self._expected[request_id] = parsed
        self._turns[request_id] = _Turn(num_tokens, time.monotonic() + TURN_ANSWER_SECONDS)
        state.leases.arrive(request_id, self._hold(parsed), parsed.kvferry.lease_seconds)

    def num_tokens_of_turn(self, request_id: str) -> int | None:
        turn = self._turns.get(request_id)
        return None if turn is None else turn.num_tokens

    def is_gone(self, request_id: str) -> bool:
        leases = self._state.leases
        return request_id in self._turns and (leases.is_lost(request_id) or not leases.is_renewed(request_id))

    def is_ready(self, request_id: str) -> bool:
        turn, leases = self._turns.get(request_id), self._state.leases
        if turn is None or leases.is_lost(request_id) or leases.is_renewed(request_id):
            return True
        return time.monotonic() >= turn.answer_by

    @property
    def waits(self) -> bool:
        return not all(map(self.is_ready, self._turns))

    def is_expected(self, request_id: str) -> bool:
        return request_id in self._expected

    def block_sizes(self, request_id: str) -> Sequence[int]:
        expected = self._expected.get(request_id)
        return expected.kvferry.block_sizes if isinstance(expected, RemoteParams) else ()

    def hold_of(self, request_id: str) -> RemoteHold | None:
        expected = self._expected.get(request_id)
        return self._hold(expected) if isinstance(expected, RemoteParams) else None

    def check_adapter(self, request: "Request") -> None:
        """Refuse to load where the weights of the prompt's adapter are not known, or not known from the prefill engine.

        Parameters of an engine of an earlier version look like those from which a client has taken what says the
        weights. Raises :class:`HandoffError`: unknown-weights, permission-denied.
        """
        has_adapter = self._state.adapters.of(request).read is not None
        expected = self._expected.get(request.request_id)
        if has_adapter and isinstance(expected, RemoteParams):
            check_adapter_is_said(expected, request.request_id, has_keys=self._state.trust.keys is not None)

    def order(self, request: "Request", tokens: tuple[int, int], block_ids: Sequence[Sequence[int]]) -> PromptLoad:
        """Return the order to read these tokens; the loss of the lease ends the read early."""
        state, request_id = self._state, request.request_id
        expected = self._expected[request_id]
        if isinstance(expected, KVFerryError):
            raise expected.without_traceback()
        self._check_adapter(expected, request)
        first_token, end_token = tokens
        hold, ferry = self._hold(expected), expected.kvferry
        sizes = ferry.block_sizes
        try:
            digest = check_prompt(expected, request, end_token)
            check_cached_windows(state.groups, sizes, state.caches_prefixes)
            source_ids = guarded_blocks(state.groups, sizes, expected.remote_block_ids, end_token)
            blocks = blocks_to_load(state.groups, sizes, tokens, source_ids, block_ids)
        except HandoffError as error:
            if error.reason is Reason.INVALID_REQUEST and ferry.newest >= TELLS_SINCE:
                state.leases.say_refused(hold, state.engine_id, error)
            raise
        prompt = HeldPrompt(digest, end_token, sizes, source_ids)
        held = Held(ferry.slot, guard_word(hold.engine_id, hold.epoch, hold.handle, prompt))
        state.leases.running_lease(request_id)
        num_tokens, seconds = end_token - first_token, state.settings.load_seconds
        # Adapters are compared above: the source knows that of the word's prompt.
        pushed = AnnouncedPrompt(transfer_id_of(held.word), end_token, digest)
        return PromptLoad(request_id, seconds, hold, held, num_tokens, blocks, pushed=pushed, is_late=ferry.is_late)

    def finish(self, request_id: str) -> None:
        """Release the remote hold once no other sample of the request uses it."""
        if self._expected.pop(request_id, None) is not None:
            self._turns.pop(request_id, None)
            self._state.leases.finish(request_id)

    def refuse_expected(self, error_of: Callable[[str], KVFerryError], loading: Container[str]) -> None:
        for request_id in self._expected:
            if request_id not in loading:
                self._expected[request_id] = error_of(request_id)
                self._state.leases.finish(request_id)

    def _parse(self, params: Mapping[str, Any], request_id: str) -> RemoteParams:
        """Return the hold that the parameters name, signed where there are keys. Raises :class:`HandoffError`."""
        parsed = parse_params(params, request_id)
        if (keys := self._state.trust.keys) is not None:
            check_signature(parsed, keys, request_id)
        return parsed

    def _say_versions(self, named: RemoteParams, request_id: str) -> None:
        """Tell a prefill engine the versions of both; with keys only one whose parameters a trusted key has signed."""
        if (keys := self._state.trust.keys) is not None:
            try:
                check_signature(named, keys, request_id)
            except KVFerryError:  # a client has made them up, and names where to connect
                return
        where = named.remote_host, named.remote_port
        self._state.leases.say_versions(*where, self._state.engine_id, is_trusted=keys is not None)

    def _check_adapter(self, expected: RemoteParams, request: "Request") -> None:
        """Refuse a prompt whose adapter has other weights there, in both logs. Raises :class:`KVFerryError`."""
        state, ours = self._state, self._state.adapters.of(request).adapter
        try:
            compare_adapters(ours.name, expected.kvferry.adapter, ours.digest)
        except KVFerryError as error:
            state.leases.say_refused(self._hold(expected), state.engine_id, error)
            raise

    def _hold(self, expected: RemoteParams) -> RemoteHold:
        # With keys only signed parameters are expected.
        return expected.hold(is_trusted=self._state.trust.keys is not None)


def _other_conversation(request_id: str, num_tokens: int, num_prompt_tokens: int) -> HandoffError:
    return HandoffError(
        Reason.INVALID_REQUEST,
        f"the {num_prompt_tokens} tokens of {request_id} do not go on from the {num_tokens} tokens of the last turn.",
        "Send the whole conversation, with the answer as the decode engine gave it.",
    )
