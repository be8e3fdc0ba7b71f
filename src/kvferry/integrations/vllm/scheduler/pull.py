"""The scheduler's parts for pulls: a prefill engine answers with a hold, and a decode engine reads the held blocks."""

import logging
import time
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvferry.errors import KVFerryError
from kvferry.execution.guard_words import Held
from kvferry.handoff.holds import Hold
from kvferry.handoff.remote_holds import RemoteHold
from kvferry.integrations.vllm.scheduler.blocks import blocks_to_load, check_cached_windows, has_state
from kvferry.integrations.vllm.scheduler.params import (
    RemoteParams,
    answer_params,
    check_prompt,
    parse_params,
    token_ids_of,
)
from kvferry.integrations.vllm.scheduler.parts import Destination, EngineState, Source
from kvferry.integrations.vllm.step import PromptLoad
from kvferry.peer_log import PeerLog

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = PeerLog(logging.getLogger(__name__))


class PullSource(Source):
    """Holds finished prompts under guard words, for decode engines that read them."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._has_state = has_state(state.groups)

    def begin(self, request: "Request") -> None:
        """Open a hold, whose guard word the next step sets."""
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
        self._state.step.written.append(self._word(hold))

    def finish(
        self, request: "Request", block_ids: Sequence[Sequence[int]], is_complete: bool
    ) -> dict[str, Any] | None:
        """Hold the blocks of a complete prompt and return the parameters that name the hold."""
        state = self._state
        with state.holds_lock:
            if not is_complete or token_ids_of(request) is None or not any(block_ids):
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
        return answer_params(request, hold, block_ids, state)

    def note_schedule(self, output: "SchedulerOutput") -> None:
        """Add the guard words of the holds that the step writes to its orders."""
        with self._state.holds_lock:
            holds = [self._state.holds.open_hold(request_id) for request_id in output.num_scheduled_tokens]
        words = [self._word(hold) for hold in holds if hold is not None]
        self._state.step.written = list(dict.fromkeys([*self._state.step.written, *words]))

    def _word(self, hold: Hold) -> Held:
        assert hold.slot is not None, "a pull's hold has a guard word"
        return hold.slot, self._state.epoch, hold.handle.generation


class PullDestination(Destination):
    """Takes the remote hold to read from a request's parameters, which have all that a load needs."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._expected: dict[str, RemoteParams | KVFerryError] = {}

    def expect(self, request: "Request", params: Mapping[str, Any]) -> None:
        """Renew the lease of the request's remote hold from now on."""
        request_id = request.request_id
        try:
            parsed = self._expected[request_id] = parse_params(params, request)
        except KVFerryError as error:
            self._expected[request_id] = error.without_traceback()
            return
        self._state.leases.arrive(request_id, parsed.hold, parsed.kvferry.lease_seconds)

    def is_expected(self, request_id: str) -> bool:
        return request_id in self._expected

    def block_sizes(self, request_id: str) -> Sequence[int]:
        expected = self._expected.get(request_id)
        return expected.kvferry.block_sizes if isinstance(expected, RemoteParams) else ()

    def hold_of(self, request_id: str) -> RemoteHold | None:
        expected = self._expected.get(request_id)
        return expected.hold if isinstance(expected, RemoteParams) else None

    def order(self, request: "Request", tokens: tuple[int, int], block_ids: Sequence[Sequence[int]]) -> PromptLoad:
        """Return the order to read these tokens; the loss of the lease ends the read early."""
        state, request_id = self._state, request.request_id
        expected = self._expected[request_id]
        if isinstance(expected, KVFerryError):
            raise expected.without_traceback()
        first_token, end_token = tokens
        check_prompt(expected, request, end_token)
        sizes = expected.kvferry.block_sizes
        check_cached_windows(state.groups, sizes, state.caches_prefixes)
        blocks = blocks_to_load(state.groups, sizes, tokens, expected.remote_block_ids, block_ids)
        state.leases.running_lease(request_id)
        num_tokens, seconds = end_token - first_token, state.settings.load_seconds
        return PromptLoad(request_id, seconds, expected.hold, expected.kvferry.slot, num_tokens, blocks)

    def finish(self, request_id: str) -> None:
        """Release the remote hold once no other sample of the request uses it."""
        if self._expected.pop(request_id, None) is not None:
            self._state.leases.finish(request_id)

    def refuse_expected(self, error_of: Callable[[str], KVFerryError], loading: Container[str]) -> None:
        for request_id in self._expected:
            if request_id not in loading:
                self._expected[request_id] = error_of(request_id)
                self._state.leases.finish(request_id)
