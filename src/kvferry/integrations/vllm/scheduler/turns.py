"""The next turn of a conversation: a decode engine holds what it has computed, and a prefill engine loads that.

A decode engine has the newest cache of a conversation: of the prompt and of its own answer. With ``turn_seconds`` it
answers a request with ``kv_transfer_params`` of its own, which a router gives to the prefill engine with the next turn.
The held blocks count as free: the engine gives them to other requests when it needs them, and then the hold ends. So a
conversation that does not go on costs nothing, and a turn that finds no hold costs a computation.
See docs/decisions/turn-by-turn.md.
"""

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvferry.handoff.holds import sampling_family
from kvferry.handoff.messages import Handle
from kvferry.integrations.vllm.scheduler.blocks import blocks_up_to, has_state
from kvferry.integrations.vllm.scheduler.engine_state import EngineState
from kvferry.integrations.vllm.scheduler.params import answer_params, prompt_digest, token_ids_of
from kvferry.integrations.vllm.scheduler.source import held_prompt
from kvferry.peer_log import PeerLog

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = PeerLog(logging.getLogger(__name__))


class HeldAnswers:
    """The finished requests of a decode engine, held for the next turns of their conversations; none of them where
    ``turn_seconds`` is 0.
    """

    def __init__(self, state: EngineState, *, drafts: bool, may_be_written_untold: bool) -> None:
        """``may_be_written_untold`` says whether a step may write blocks of a hold that yields before the workers hear
        of it: then nothing is held.
        """
        self._state = state
        self._holds_answers = state.settings.turn_seconds > 0 and not may_be_written_untold
        # A draft that was rejected may have gone into a state, which cannot be cut.
        self._holds_states = not drafts
        self._to_lend: set[Handle] = set()

    def hold(self, request: "Request", block_ids: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """Hold the blocks of a finished request, and return the parameters for the next turn.

        None where they cannot be held: for one of several samples, a prompt with embeddings or an adapter, a state that
        has gone past the last token, an engine that drains, or where too many prompts are held.
        """
        state, name = self._state, request.request_id
        if not self._holds_answers:
            return None
        num_tokens = min(request.num_computed_tokens, request.num_tokens)
        if num_tokens == 0 or sampling_family(name) != name or token_ids_of(request) is None:
            return None
        if request.lora_request is not None:
            return None
        if has_state(state.groups) and not (self._holds_states and request.num_computed_tokens == num_tokens):
            return None
        prompt = held_prompt(state.groups, prompt_digest(request, num_tokens), num_tokens, block_ids)
        if prompt is None:
            return None
        with state.holds_lock:
            hold = state.holds.hold_yielding(name, time.monotonic(), state.settings.turn_seconds)
        if hold is None:
            return None
        listed = [ids.tolist() for ids in blocks_up_to(state.groups, block_ids, num_tokens)]
        state.kept_blocks.keep(hold.handle, listed)
        self._to_lend.add(hold.handle)
        # An asynchronous engine may compute one more step of this request: the workers hear of the hold after it.
        state.step.held.append((hold.transfer_id, prompt))
        answer = answer_params(hold, prompt, listed, state, is_late=True)
        # The next request with these parameters is for a prefill engine.
        return {**answer, "do_remote_prefill": False, "do_remote_decode": True, "remote_num_tokens": num_tokens}

    def yield_used(self) -> None:
        """End the holds of which the engine has just given a block to a request; the caller has the lock of the holds.

        Call it in the step that was scheduled, before the ended holds are taken: ranks end writes out of these blocks
        before that step writes.
        """
        used = self._state.kept_blocks.take_used()
        self._state.holds.yield_blocks(name for name in used if isinstance(name, Handle))

    def lend(self) -> None:
        """Let the engine use the blocks of the held answers; call it when the ended holds are gone.

        Not before the request has given them up: a block that was lent before would be the first one to be used. Not
        kept while they are loaded either: a prefill engine may wait for blocks itself, and renew for long. A write out
        of a block that was used does not count.
        """
        kept = self._state.kept_blocks
        ready = {handle for handle in self._to_lend if kept.are_given_up(handle)}
        for handle in ready:
            kept.lend(handle)
        self._to_lend -= ready

    @property
    def has_pending_work(self) -> bool:
        """Whether the next step lends blocks. An engine whose requests have not given theirs up steps without being
        asked.
        """
        return any(map(self._state.kept_blocks.are_given_up, self._to_lend))

    def forget(self, handle: Handle) -> None:
        """The hold has ended."""
        self._to_lend.discard(handle)
