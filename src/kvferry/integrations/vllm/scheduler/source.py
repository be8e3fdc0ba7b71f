"""The scheduler's part for prompts that go to other engines: it holds them, and tells the workers what is final.

A hold is open from the first block of its prompt. The workers learn of a router's transfer step by step, as it is
computed, since a decode engine may have announced its blocks already; of a hold that this engine names in its answer
they learn once, with the step that computes its end. Where a step does not show that blocks are final, they learn of
either after the request's end.
"""

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

from kvferry.errors import KVFerryError
from kvferry.handoff.handshake import NO_ADAPTER, OURS, Adapter
from kvferry.handoff.holds import Hold, is_of_hold, sampling_family
from kvferry.handoff.messages import MAX_IDENTIFIER_LENGTH, Handle
from kvferry.handoff.source import END, Prompt
from kvferry.handoff.wire.bootstrap import BootstrapServer, Offer, id_in_epoch, signed
from kvferry.handoff.wire.trust import in_url
from kvferry.integrations.vllm.refused_flags import is_data_parallel
from kvferry.integrations.vllm.scheduler.blocks import GroupShape, blocks_up_to, has_every_block, has_state, held_blocks
from kvferry.integrations.vllm.scheduler.params import (
    EngineState,
    PromptAdapter,
    answer_params,
    check_own_answers,
    prompt_digest,
    token_ids_of,
)
from kvferry.integrations.vllm.scheduler.router_beacon import FORGOTTEN_SECONDS, RouterBeacon, encode_zmq_address
from kvferry.layout.shard import CacheKind
from kvferry.peer_log import PeerLog

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
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


WHOLE = (CacheKind.ATTENTION, CacheKind.MLA)
"""Kinds whose blocks neither change nor are freed when the engine goes past the prompt."""
NOTICED_SECONDS = 15.0
"""How long a router that asks an engine whether it is ready may still send requests to one that drains."""


class _HeldPrompt(msgspec.Struct):
    """A running request with an open hold, its adapter, and the digest of its prompt's ``num_tokens``.

    ``told_tokens`` is the number of tokens of the prompt that the workers know to be final to its end, 0 before a step
    has computed the end. The prompt of a session grows: then it is told again.
    """

    request: "Request"
    adapter: PromptAdapter
    num_tokens: int = 0
    digest: str = ""
    told_tokens: int = 0

    @property
    def is_told(self) -> bool:
        return self.told_tokens == self.request.num_prompt_tokens

    def known(self) -> Prompt:
        """Return the prompt without blocks; its digest is computed once."""
        if self.num_tokens != self.request.num_prompt_tokens:
            self.num_tokens = self.request.num_prompt_tokens
            self.digest = prompt_digest(self.request, self.num_tokens)
        return Prompt(self.num_tokens, self.digest, {}, 0, self.adapter.adapter)


class Source:
    """Holds prompts for decode engines, tells the workers how far each is computed, and tells routers and decode
    engines this engine's address.
    """

    def __init__(self, state: EngineState, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        self._state = state
        self._is_producer = transfer.is_kv_producer
        self._is_data_parallel = is_data_parallel(vllm_config, state.engine_id)
        self._has_state = has_state(state.groups)
        self._tells_after_the_end = tells_after_the_end(vllm_config, kv_cache_config)
        self._prompts: dict[str, _HeldPrompt] = {}
        self.bootstrap: BootstrapServer | None = None
        self._beacon: RouterBeacon | None = None
        self._beacon_id = ""
        self._is_withdrawn = False

    # The engine's requests.

    def begin(self, request: "Request") -> None:
        """The engine has given blocks to a request whose prompt goes to a decode engine: open its hold.

        A preempted request that begins again keeps its hold, and has other blocks.
        """
        request_id, transfer_id = request.request_id, router_transfer_of(request)
        if (why := self._why_not_held(request, transfer_id)) is not None:
            self._note_unheld(request_id, why)
            return
        try:
            adapter = self._state.adapters.of_computed(request)
        except KVFerryError as error:
            self._refuse(request, error)
            return
        holds = self._state.holds
        with self._state.holds_lock:
            hold = holds.begin(request_id) if transfer_id is None else holds.begin_transfer(transfer_id, request_id)
            drains = holds.is_draining
        if hold is not None:
            if request_id not in self._prompts:
                self._prompts[request_id] = _HeldPrompt(request, adapter)
        elif drains:
            logger.info("kvferry: %s is not held, since this engine drains.", request_id, peer=request_id)
        elif transfer_id is None:  # a transfer may have been released, or another sample of the prompt serves it
            why = "too many prompts are held, a request of this id is still held, or the id is too long"
            self._note_unheld(request_id, why)

    def finish(
        self, request: "Request", block_ids: Sequence[Sequence[int]], is_complete: bool
    ) -> dict[str, Any] | None:
        """Such a request has ended: hold the blocks of a complete prompt, until a decode engine has them.

        Return the parameters that name the hold; None for a router's transfer, and where nothing is held.
        """
        state = self._state
        if (prompt := self._prompts.pop(request.request_id, None)) is None:
            self._drop(request)
            return None
        try:
            prompt.adapter.check()
        except KVFerryError as error:
            self._refuse(request, error)
            return None
        # A request that was preempted may end with an output of before, while its prompt is computed again.
        is_computed = request.num_computed_tokens >= request.num_prompt_tokens and any(block_ids)
        if not is_complete or not is_computed:
            self._drop(request)
            return None
        final = self._final(prompt, block_ids)
        if final is None:
            self._note_unheld(request.request_id, "its state or its window went past the prompt")
            self._drop(request)
            return None
        with state.holds_lock:
            hold = state.holds.hold(request.request_id, time.monotonic())
        if hold is None:
            self._drop(request)
            return None
        state.kept_blocks.keep(hold.handle, block_ids)
        is_late = not prompt.is_told
        if is_late:
            state.step.held.append((hold.transfer_id, final))
        return None if hold.is_transfer else answer_params(hold, final, block_ids, state, is_late=is_late)

    def forget(self, request_id: str) -> None:
        """The open hold of a request has ended."""
        self._prompts.pop(request_id, None)

    # Once per engine step.

    def note_schedule(self, output: "SchedulerOutput") -> None:
        """Tell the workers how far the step computes each prompt, and which blocks it may overwrite."""
        for request_id in output.preempted_req_ids or ():
            prompt, hold = self._prompts.get(request_id), self._open_hold(request_id)
            if prompt is not None and hold is not None:
                prompt.told_tokens = 0
                self._state.step.preempted.append(hold.transfer_id)
        if self._tells_after_the_end:
            return
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            if (prompt := self._prompts.get(request_id)) is not None:
                self._note_progress(prompt, num_scheduled, output)

    # What routers and decode engines learn of this engine.

    def publish(self) -> None:
        """The engine answers handshakes in this epoch from now on: answer bootstrap queries, and register with the
        router that the settings name. Raises :class:`HandoffError` where no decode engine could read the answers.
        """
        state, settings = self._state, self._state.settings
        check_own_answers(state)
        engine_id = id_in_epoch(state.engine_id, state.epoch)
        sizes = tuple(group.block_size for group in state.groups)
        offer = signed(Offer(OURS.oldest, OURS.newest, engine_id, state.answers_at, sizes), state.trust.keys)
        if self.bootstrap is not None:
            self.bootstrap.offer(offer)
        elif self._is_producer and not self._is_data_parallel:
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
        """The engine drains: tell routers of it no longer. Return for how many seconds they may still send to it."""
        self._is_withdrawn = True
        if self._beacon is None:
            return NOTICED_SECONDS
        self._beacon.close()
        return FORGOTTEN_SECONDS

    def close(self) -> None:
        """Stop answering bootstrap queries and stop the beacon; twice is fine."""
        for each in (self._beacon, self.bootstrap):
            if each is not None:
                each.close()

    def _why_not_held(self, request: "Request", transfer_id: str | None) -> str | None:
        if token_ids_of(request) is None:
            return "its prompt has embeddings"
        if transfer_id is not None and self._is_data_parallel:
            return "a router's transfer names no data-parallel rank"
        if transfer_id is None and "transfer_id" in (request.kv_transfer_params or {}):
            return f"its transfer_id is no text of 1 to {MAX_IDENTIFIER_LENGTH} characters, or is the name of a hold"
        return None

    def _refuse(self, request: "Request", error: KVFerryError) -> None:
        """Hold nothing of a prompt; decode ranks that have announced blocks for it are told that it has ended."""
        self._note_unheld(request.request_id, error)
        self._drop(request)

    def _note_unheld(self, request_id: str, why: object) -> None:
        self._state.statistics.count("unheld")
        logger.warning("kvferry: %s is not held: %s.", request_id, why, peer=request_id)

    def _drop(self, request: "Request") -> None:
        self._prompts.pop(request.request_id, None)
        with self._state.holds_lock:
            self._state.holds.drop(request.request_id)
            if (transfer_id := router_transfer_of(request)) is not None:
                self._state.holds.drop_transfer(transfer_id)

    def _open_hold(self, request_id: str) -> Hold | None:
        with self._state.holds_lock:
            return self._state.holds.open_hold(request_id)

    def _note_progress(self, prompt: _HeldPrompt, num_scheduled: int, output: "SchedulerOutput") -> None:
        request, blocks = prompt.request, output.kv_connector_block_state
        num_tokens, num_final = request.num_prompt_tokens, request.num_computed_tokens + num_scheduled
        hold = self._open_hold(request.request_id)
        ids = None if blocks is None else blocks.get_block_ids(request.request_id)
        is_ended = num_final >= num_tokens
        if hold is None or ids is None or not (hold.is_transfer or is_ended):
            return
        try:
            prompt.adapter.check()
        except KVFerryError as error:
            self._refuse(request, error)
            return
        if hold.is_transfer and num_final > num_tokens and not all(each.kind in WHOLE for each in self._state.groups):
            # A state goes past the prompt, and blocks that leave a window are freed.
            self._note_unheld(request.request_id, "the step computes more than the prompt")
            self._drop(request)
            return
        if prompt.is_told:
            return
        known = prompt.known()
        told = Prompt(
            num_tokens,
            known.digest,
            held_blocks(self._state.groups, ids),
            END if is_ended else num_final,
            known.adapter,
        )
        step = self._state.step
        (step.prompts if hold.is_transfer else step.finished).append((hold.transfer_id, told))
        prompt.told_tokens = num_tokens if is_ended else 0

    def _final(self, prompt: _HeldPrompt, block_ids: Sequence[Sequence[int]]) -> Prompt | None:
        """Return what is held of an ended request; None where its state is of later tokens, or a block has left a
        window that the prompt's end needs.
        """
        request, groups = prompt.request, self._state.groups
        num_tokens: int = request.num_prompt_tokens
        if self._has_state and request.num_computed_tokens != num_tokens:
            return None
        known = prompt.known()
        return held_prompt(groups, known.digest, num_tokens, block_ids, known.adapter)


def held_prompt(
    groups: Sequence[GroupShape],
    digest: str,
    num_tokens: int,
    block_ids: Sequence[Sequence[int]],
    adapter: Adapter = NO_ADAPTER,
) -> Prompt | None:
    """Return what is held of a request's first ``num_tokens``; None where a block that a load needs is gone."""
    ids = blocks_up_to(groups, block_ids, num_tokens)
    if not has_every_block(groups, ids, num_tokens):
        return None
    return Prompt(num_tokens, digest, held_blocks(groups, [each.tolist() for each in ids]), END, adapter)


def tells_after_the_end(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> str:
    """Return why a step cannot tell the workers that a prompt's blocks are final, so that they learn it once the
    request has ended; empty where it can.
    """
    if written := written_untold(vllm_config, kv_cache_config):
        return f"vLLM's second model runner {written} in update_requests, before it calls handle_preemptions"
    if vllm_config.parallel_config.pipeline_parallel_size > 1 and vllm_config.speculative_config is not None:
        return "with draft tokens vLLM tells only the last pipeline stage when a step has ended"
    return ""


def written_untold(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> str:
    """Return which blocks the second model runner writes in a step before it tells the connector; empty for none.

    The blocks of a prompt that the step preempts may be among them. Every other write of a step comes with the model,
    behind the connector's ``pre_forward``.
    """
    if not vllm_config.use_v2_model_runner:
        return ""
    if kv_cache_config.needs_kv_cache_zeroing:
        return "clears new blocks (of a model with states, or of caches of several precisions)"
    whole, hashed = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    if vllm_config.cache_config.enable_prefix_caching and whole != hashed:
        # A prefix may end within a block of a group with longer blocks.
        return f"copies blocks of which a prompt has a part (prefixes of {hashed} tokens, blocks of up to {whole})"
    return ""


def router_transfer_of(request: "Request") -> str | None:
    """Return the router's transfer id, the same on both engines; None where there is none that a message can carry."""
    transfer_id = (request.kv_transfer_params or {}).get("transfer_id")
    if isinstance(transfer_id, str) and 0 < len(transfer_id) <= MAX_IDENTIFIER_LENGTH and not is_of_hold(transfer_id):
        return transfer_id
    return None
