"""The scheduler's part for prompts that come from other engines: it finds the hold of each, and orders its load.

The parameters of a request name a prompt that a prefill engine holds; or a router's transfer, whose prefill engine a
bootstrap server names. From there on both are one thing: a remote hold, its block sizes, and an order to announce
blocks.
"""

import logging
import time
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.handoff.handshake import compare_adapters
from kvferry.handoff.holds import handle_of_transfer, transfer_of
from kvferry.handoff.remote_holds import RemoteHold
from kvferry.handoff.wire.bootstrap import BootstrapQueries, Offer, query
from kvferry.integrations.vllm.scheduler.blocks import blocks_to_load, check_cached_windows
from kvferry.integrations.vllm.scheduler.params import (
    EngineState,
    HoldParams,
    TransferParams,
    check_adapter_is_said,
    check_prompt,
    check_signature,
    names_transfer,
    parse_params,
    parse_transfer_params,
    prompt_digest,
    read_params,
)
from kvferry.integrations.vllm.step import AnnouncedPrompt, PromptLoad
from kvferry.peer_log import PeerLog

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = PeerLog(logging.getLogger(__name__))

LOOK_SECONDS = 0.5
"""After so long an engine without requests looks whether a query has taken too long, or may begin."""
TURN_ANSWER_SECONDS = 1.0
"""How long a request waits to hear whether a decode engine still holds the conversation so far."""
TURN_SECONDS = 5.0
"""How long the load of a conversation so far may take: the engine can compute it."""
LATE_SECONDS = 10.0
"""How long the ranks of a prefill engine may not know a prompt that they learn of with their engine's next step."""


class _Held(msgspec.Struct, frozen=True):
    """A request whose parameters name a hold."""

    params: HoldParams
    is_trusted: bool
    """Whether a trusted key has signed the parameters."""

    @property
    def hold(self) -> RemoteHold:
        return self.params.hold(is_trusted=self.is_trusted)

    @property
    def block_sizes(self) -> Sequence[int]:
        return self.params.kvferry.block_sizes


class _Transfer(msgspec.Struct, frozen=True):
    """A request of a router's transfer, and the offer of its prefill engine once that is known."""

    params: TransferParams
    offer: Offer | None = None
    is_trusted: bool = False
    """Whether a trusted key has signed the offer."""

    @property
    def hold(self) -> RemoteHold | None:
        if self.offer is None:
            return None
        control, handle = self.offer.control, handle_of_transfer(self.params.transfer_id)
        return RemoteHold(self.offer.engine_id, control.epoch, control.host, control.port, handle, self.is_trusted)

    @property
    def block_sizes(self) -> Sequence[int]:
        return () if self.offer is None else self.offer.block_sizes


class _Turn(NamedTuple):
    """A request that goes on from ``num_tokens`` which a decode engine holds, if that engine answers in time."""

    num_tokens: int
    answer_by: float


class Destination:
    """Finds the holds of this engine's requests, keeps their leases, and orders loads.

    ``wake`` wakes the engine once a bootstrap query has ended for which a request's release waits.
    """

    def __init__(self, state: EngineState, wake: Callable[[], None]) -> None:
        self._state = state
        self._wake = wake
        self._expected: dict[str, _Held | _Transfer | KVFerryError] = {}
        self._turns: dict[str, _Turn] = {}
        self._to_release: dict[str, _Transfer] = {}
        self._has_answers = False
        self._look_at = 0.0
        self._queries = BootstrapQueries(partial(query, trust=state.trust), state.trust.keys, self._note_answer)

    # New requests.

    def expect(self, request: "Request", params: Mapping[str, Any]) -> None:
        """A new request names its prefill engine: renew the lease of its hold from now on, once the hold is known.

        Wrong parameters fail the request's load.
        """
        request_id = request.request_id
        try:
            if names_transfer(params, request_id):
                self._expected[request_id] = _Transfer(parse_transfer_params(params, request_id))
                self.is_ready(request_id)
            else:
                self._expect_hold(request_id, self._parse(params, request_id))
        except KVFerryError as error:
            self._expected[request_id] = error.without_traceback()
            if error.reason is Reason.PROTOCOL_MISMATCH:
                self._say_versions(read_params(params, request_id), request_id)

    def expect_turn(self, request: "Request", params: Mapping[str, Any]) -> None:
        """A new request for a decode engine may name that engine's hold of the conversation so far: load from there.

        Where that cannot be, the engine computes the prompt.
        """
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
        self._turns[request_id] = _Turn(num_tokens, time.monotonic() + TURN_ANSWER_SECONDS)
        self._expect_hold(request_id, parsed)

    def is_expected(self, request_id: str) -> bool:
        """Return whether the request names a prefill engine."""
        return request_id in self._expected

    def is_ready(self, request_id: str) -> bool:
        """Return whether the prefill engine of an expected request is known, or the error that fails its load; of a
        turn whether the engine that holds the conversation has answered, or will not in time.
        """
        expected = self._expected[request_id]
        if isinstance(expected, _Transfer) and expected.offer is None:
            expected = self._expected[request_id] = self._found(request_id, expected)
        if isinstance(expected, _Transfer):
            return expected.offer is not None
        turn, leases = self._turns.get(request_id), self._state.leases
        if turn is None or leases.is_lost(request_id) or leases.is_renewed(request_id):
            return True
        return time.monotonic() >= turn.answer_by

    def num_tokens_of_turn(self, request_id: str) -> int | None:
        """Return how many tokens of the conversation are held for an expected turn; None for any other request."""
        turn = self._turns.get(request_id)
        return None if turn is None else turn.num_tokens

    def is_gone(self, request_id: str) -> bool:
        """Return whether the hold of an expected turn has ended, or its engine has not answered in time."""
        leases = self._state.leases
        return request_id in self._turns and (leases.is_lost(request_id) or not leases.is_renewed(request_id))

    def block_sizes(self, request_id: str) -> Sequence[int]:
        """Return the prefill engine's block sizes by cache group; none where they are not known."""
        expected = self._expected.get(request_id)
        return expected.block_sizes if isinstance(expected, _Held | _Transfer) else ()

    def hold_of(self, request_id: str) -> RemoteHold | None:
        """Return the remote hold of an expected request; None while the hold is not known."""
        expected = self._expected.get(request_id)
        return expected.hold if isinstance(expected, _Held | _Transfer) else None

    def check_adapter(self, request: "Request") -> None:
        """Refuse to load where the weights of the prompt's adapter are not known here, or not said by the prefill
        engine: the source of a router's transfer compares them. Raises :class:`HandoffError`: unknown-weights.
        """
        has_adapter = self._state.adapters.of(request).read is not None
        expected = self._expected.get(request.request_id)
        if has_adapter and isinstance(expected, _Held):
            check_adapter_is_said(expected.params, request.request_id)

    # Loads.

    def order(self, request: "Request", tokens: tuple[int, int], block_ids: Sequence[Sequence[int]]) -> PromptLoad:
        """Return the order to announce the blocks of these tokens, half-open; the lease's loss ends the load early.

        Raises :class:`KVFerryError` where they cannot be loaded.
        """
        state, request_id = self._state, request.request_id
        expected = self._expected[request_id]
        if isinstance(expected, KVFerryError):
            raise expected.without_traceback()
        hold, sizes = expected.hold, expected.block_sizes
        assert hold is not None, "the engine gives blocks to a request that is ready"
        first_token, end_token = tokens
        digest = self._check(expected, request, end_token)
        check_cached_windows(state.groups, sizes, state.caches_prefixes)
        blocks = blocks_to_load(state.groups, sizes, tokens, block_ids)
        state.leases.running_lease(request_id)
        adapter = state.adapters.of(request).adapter
        is_late = isinstance(expected, _Held) and expected.params.kvferry.is_late
        is_turn = request_id in self._turns
        return PromptLoad(
            request_id,
            min(TURN_SECONDS, state.settings.load_timeout_seconds) if is_turn else state.settings.load_timeout_seconds,
            hold,
            end_token - first_token,
            blocks,
            announced=AnnouncedPrompt(transfer_of(hold.handle), end_token, digest, adapter.digest),
            source_block_sizes=tuple(sizes),
            late_seconds=LATE_SECONDS if is_late else 0.0,
            is_optional=is_turn,
        )

    def finish(self, request_id: str) -> None:
        """The request is done with its remote hold: release the hold, now or once the prefill engine is known, when no
        other sample of the request uses it. Unknown requests are ignored.
        """
        expected = self._expected.pop(request_id, None)
        self._turns.pop(request_id, None)
        if isinstance(expected, _Transfer) and expected.offer is None:
            self._to_release[request_id] = expected
        elif expected is not None:
            self._state.leases.finish(request_id)

    def refuse_expected(self, error_of: Callable[[str], KVFerryError], loading: Container[str]) -> None:
        """The prompts of all expected requests are out of date: fail those that are not ``loading``, each with its
        error. Ranks may still use the holds of the others.
        """
        for request_id in [each for each in self._expected if each not in loading]:
            turn = self._turns.get(request_id)
            self.finish(request_id)
            self._expected[request_id] = error_of(request_id)
            if turn is not None:
                self._turns[request_id] = turn

    def fail(self, request_id: str) -> None:
        """A load has failed in a rank: its prefill engine may have been restarted, so ask for it again."""
        expected = self._expected.get(request_id)
        if isinstance(expected, _Transfer):
            self._queries.forget(expected.params.remote_bootstrap_addr, expected.params.remote_engine_id)

    # Once per engine step.

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

    @property
    def has_pending_work(self) -> bool:
        """Whether the next step has something to do although the engine has no request; any thread may ask."""
        is_due = self._has_answers or time.monotonic() >= self._look_at
        return bool(self._to_release) and is_due

    @property
    def waits(self) -> bool:
        """Whether a peer is to answer before a request, or the release of an ended one, can go on."""
        waits_for_offers = any(isinstance(each, _Transfer) and each.offer is None for each in self._expected.values())
        return bool(self._to_release) or waits_for_offers or not all(map(self.is_ready, self._turns))

    def _note_answer(self) -> None:
        """A query has ended, on its thread."""
        self._has_answers = True
        if self._to_release:
            self._wake()

    def _found(self, request_id: str, expected: _Transfer) -> _Transfer | KVFerryError:
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

    def _expect_hold(self, request_id: str, parsed: HoldParams) -> None:
        # With keys only signed parameters are expected.
        expected = self._expected[request_id] = _Held(parsed, is_trusted=self._state.trust.keys is not None)
        self._state.leases.arrive(request_id, expected.hold, parsed.kvferry.lease_seconds)

    def _parse(self, params: Mapping[str, Any], request_id: str) -> HoldParams:
        """Return the hold that the parameters name, signed where there are keys. Raises :class:`HandoffError`."""
        parsed = parse_params(params, request_id)
        if (keys := self._state.trust.keys) is not None:
            check_signature(parsed, keys, request_id)
        return parsed

    def _check(self, expected: _Held | _Transfer, request: "Request", end_token: int) -> str:
        """Return the digest of the prompt; refuse a hold of another prompt, or one whose adapter has other weights
        there, in both logs. The source of a router's transfer compares both. Raises :class:`KVFerryError`.
        """
        if isinstance(expected, _Transfer):
            return prompt_digest(request, end_token)
        state, ours = self._state, self._state.adapters.of(request).adapter
        try:
            compare_adapters(ours.name, expected.params.kvferry.adapter, ours.digest)
            return check_prompt(expected.params, request, end_token)
        except KVFerryError as error:
            state.leases.say_refused(expected.hold, state.engine_id, error)
            raise

    def _say_versions(self, named: HoldParams, request_id: str) -> None:
        """Tell a prefill engine the versions of both; with keys only one whose parameters a trusted key has signed."""
        if (keys := self._state.trust.keys) is not None:
            try:
                check_signature(named, keys, request_id)
            except KVFerryError:  # a client has made them up, and names where to connect
                return
        where = named.remote_host, named.remote_port
        self._state.leases.say_versions(*where, self._state.engine_id, is_trusted=keys is not None)


def _other_conversation(request_id: str, num_tokens: int, num_prompt_tokens: int) -> HandoffError:
    return HandoffError(
        Reason.INVALID_REQUEST,
        f"the {num_prompt_tokens} tokens of {request_id} do not go on from the {num_tokens} tokens of the last turn.",
        "Send the whole conversation, with the answer as the decode engine gave it.",
    )
