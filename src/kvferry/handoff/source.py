"""Pushes as the source rank decides them: which tokens are computed, in flight and landed, and which are announced.

Pure: the engine's progress, messages and the time are inputs. A :class:`SourceWrite` is one push. Its tokens lie in
*spans*: all layers of one cache group, or the layers that a push sends together. The engine says up to which token each
span is final; the next batch takes all tokens that are final, announced and not sent, so that a source that falls
behind sends fewer and larger batches, and no queue grows. One batch is in flight at a time: after a preemption two
batches never write the same bytes.

A :class:`SourceWrites` is all pushes of one rank. The transfer id that the router gave both engines joins a prompt and an
announcement, whichever comes first. The first batch of a late announcement takes all tokens computed so far. Not
thread-safe: the caller holds a lock.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.handoff.adapters import NO_ADAPTER, Adapter, compare_adapters
from kvferry.handoff.messages import Bounded, WriteKey
from kvferry.handoff.pull_read import not_held, wrong_parameters
from kvferry.plan.layer_spans import Span

END = 1 << 62
"""Progress of a span whose prompt has been computed to its end, partly filled last block and state included."""


class Need(msgspec.Struct, frozen=True):
    """The announced tokens of a span, half-open. Each batch but the last ends at a multiple of ``multiple_of``.

    A state is token 0 to 1, final only when the prompt has ended: its ``multiple_of`` is larger than any token.
    """

    first_token: int
    end_token: int
    multiple_of: int


class Cut(NamedTuple):
    """The tokens of a span in one batch."""

    span: Span
    first_token: int
    end_token: int


Batch = tuple[Cut, ...]
NOTHING_CHANGED: Mapping[str, int] = MappingProxyType({})


class WriteState(Enum):
    """Where a push stands."""

    OPEN = "pushing"
    STOPPING = "waiting for the batch in flight"
    OVER = "over"


class SourceWrite:
    """One push; ``error`` is None while the push is open and once it is complete. ``may_land`` says whether bytes of
    a batch that failed may land even once the push is over.

    >>> span = Span("full")
    >>> push = SourceWrite("r", {span: Need(0, 40, 16)}, deadline=30.0)
    >>> push.take({span: 39}), push.take({span: END}), push.landed(), push.take({span: END})
    ((Cut(span=Span(group='full', number=0), first_token=0, end_token=32),), (), True, \
(Cut(span=Span(group='full', number=0), first_token=32, end_token=40),))
    >>> push.landed(), push.state.value, push.error
    (True, 'over', None)
    """

    def __init__(self, transfer_id: str, needs: Mapping[Span, Need], deadline: float) -> None:
        self._transfer_id = transfer_id
        self._needs = dict(needs)
        self._deadline = deadline
        self._reached = {span: need.first_token for span, need in needs.items()}
        self._in_flight: Batch = ()
        self._is_void = False
        self.state = WriteState.OPEN
        self.error: KVFerryError | None = None
        self.may_land = False
        self._end_if_complete()

    @property
    def is_writing(self) -> bool:
        """Whether a batch is in flight."""
        return bool(self._in_flight)

    def take(self, final: Mapping[Span, int]) -> Batch:
        """Return the next batch, which is in flight from now on; empty while another one is or none is final."""
        if self.state is not WriteState.OPEN or self._in_flight:
            return ()
        cuts = [Cut(span, begin, self._ready(span, final.get(span, 0))) for span, begin in self._reached.items()]
        self._in_flight = tuple(cut for cut in cuts if cut.end_token > cut.first_token)
        self._is_void = False
        return self._in_flight

    def landed(self, changed: Mapping[str, int] = NOTHING_CHANGED) -> bool:
        """The batch in flight has landed; return whether it counts: not if :meth:`void` was called since.

        Of the groups that have ``changed`` meanwhile, the tokens from these on do not count: they are sent again.
        """
        batch, self._in_flight = self._in_flight, ()
        if not self._is_void:
            for cut in batch:
                end = min(cut.end_token, changed.get(cut.span.group, cut.end_token))
                self._reached[cut.span] = max(cut.first_token, end)
        self._settle()
        return not self._is_void

    def stopped(self, error: KVFerryError | None, *, may_land: bool = False) -> None:
        """The batch in flight has ended without landing whole; no byte of it is written any more.

        Bytes that were written into a connection that broke ``may_land`` nevertheless.
        """
        self._in_flight = ()
        self.may_land |= may_land
        if error is not None:
            self.fail(error)
        self._settle()

    def void(self) -> None:
        """The engine may overwrite the blocks of the batch in flight: send the batch again."""
        self._is_void = True

    def fail(self, error: KVFerryError) -> None:
        """Give up; the first error stays. The push is over once no batch is in flight."""
        if self.state is WriteState.OVER:
            return
        if self.error is None:
            self.error = error.without_traceback()
        self.state = WriteState.STOPPING
        self._settle()

    def tick(self, now: float) -> None:
        """Give up once the deadline has passed."""
        if self.state is WriteState.OPEN and now >= self._deadline:
            self.fail(_late(self._transfer_id))

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return the state as plain data, times relative to ``now``, the error as its reason code."""
        return {
            "state": self.state.value,
            "reached": {f"{span.group}/{span.number}": token for span, token in self._reached.items()},
            "in_flight": len(self._in_flight),
            "error": None if self.error is None else self.error.reason.value,
            "deadline_in": self._deadline - now,
        }

    def _ready(self, span: Span, final: int) -> int:
        need = self._needs[span]
        if final >= END:
            return need.end_token
        return max(self._reached[span], min(final, need.end_token) // need.multiple_of * need.multiple_of)

    def _settle(self) -> None:
        if self.state is WriteState.STOPPING and not self._in_flight:
            self.state = WriteState.OVER
        elif self.state is WriteState.OPEN:
            self._end_if_complete()

    def _end_if_complete(self) -> None:
        if all(self._reached[span] == need.end_token for span, need in self._needs.items()):
            self.state = WriteState.OVER


def no_longer_held() -> HandoffError:
    """Return the error of a prompt that was to be written on request and whose hold has ended."""
    return HandoffError(
        Reason.SOURCE_CHANGED,
        "the prefill engine no longer holds the announced prompt: its hold was released or has expired.",
        "Send the prompt again; if this repeats, raise lease_seconds on the prefill side.",
    )


def _revoked() -> HandoffError:
    return HandoffError(
        Reason.ABORTED,
        "the destination revoked its blocks.",
        "The decode engine's log says why it gave the push up.",
    )


def _late(transfer_id: str) -> HandoffError:
    return HandoffError(
        Reason.DEADLINE_EXCEEDED,
        f"the prompt of {transfer_id} was not pushed within the time that the destination gave.",
        "load_timeout_seconds on the decode side sets the limit.",
    )


def _compare_prompts(prompt: "Prompt", request: "WriteRequest") -> None:
    """Refuse an announcement for another prompt, or for another adapter. Raises :class:`HandoffError`."""
    if (prompt.num_tokens, prompt.digest) != (request.num_tokens, request.prompt_digest):
        raise HandoffError(
            Reason.INVALID_REQUEST,
            f"{request.key.receiver} announced blocks for {request.num_tokens} tokens of {request.transfer_id}, which "
            f"is another prompt here, of {prompt.num_tokens} tokens.",
            "Send the same prompt, template, images and adapter to both engines.",
        )
    compare_adapters(prompt.adapter.name, prompt.adapter.digest, request.adapter)


ANNOUNCED = "an announced prompt"
"""The prompt in errors of a source, which does not know the request of its destination."""
MAX_REMEMBERED = 1 << 16
"""Ended transfers and pushes that are remembered, so that a late message cannot begin them again."""
MAX_REVOKED = 1 << 15
"""Pushes that are remembered as revoked and that nobody has announced."""
MOST_KEPT_TEXT = 200
"""Characters of a refusal that are remembered: a stranger may have :data:`MAX_REMEMBERED` announcements refused."""
REVOKED_SECONDS = 600.0
"""How long the announcement of a push may come after its revocation, and how long no other revocation takes its room:
revocations of pushes that nobody has announced cost a stranger nothing."""


class BlockList(msgspec.Struct, frozen=True):
    """An engine's blocks of one prompt in one cache group; the first block begins at ``first_token``."""

    first_token: int
    block_ids: Sequence[int]


class Prompt(msgspec.Struct, frozen=True):
    """How far an engine has computed one prompt: its blocks by cache group, and the tokens final in every layer.

    ``num_final`` is :data:`kvferry.handoff.source.END` once the prompt has been computed to its end.
    """

    num_tokens: int
    digest: str
    blocks: Mapping[str, BlockList]
    num_final: int
    adapter: Adapter = NO_ADAPTER


class WriteRequest(msgspec.Struct, frozen=True):
    """The announcement of one destination rank. ``deadline`` is on this rank's clock."""

    key: WriteKey
    transfer_id: str
    num_tokens: int
    prompt_digest: str
    needs: Mapping[Span, Need]
    deadline: float
    adapter: str = ""
    known_by: float | None = None
    """When the prompt must be known here, on this rank's clock; None where it may become known until the deadline."""


class Outcome(msgspec.Struct, frozen=True):
    """How a push ended; ``error``, without a traceback, is None for a push that landed whole. ``may_land`` is that of
    :class:`SourceWrite`.
    """

    error: KVFerryError | None
    may_land: bool = False


class SourceWrites:
    """All pushes of one rank.

    >>> sender, key, span = SourceWrites(), WriteKey("d/0", 7, 1), Span("0")
    >>> sender.announce(WriteRequest(key, "x", 32, "p", {span: Need(0, 32, 16)}, deadline=9.0), now=0.0)
    True
    >>> sender.take(key), sender.compute("x", Prompt(32, "p", {}, num_final=16))
    ((), None)
    >>> [cut.end_token for cut in sender.take(key)], sender.landed(key), sender.outcome(key)
    ([16], True, None)
    >>> sender.end("x", HandoffError(Reason.ABORTED, "x was aborted.")), sender.outcome(key).error.reason.value
    (None, 'aborted')
    """

    def __init__(self) -> None:
        self._prompts: dict[str, Prompt] = {}
        self._running: dict[str, Prompt] = {}
        self._done_spans: set[Span] = set()
        self._wanted_spans: set[Span] = set()
        self._pushes: dict[WriteKey, SourceWrite] = {}
        self._requests: dict[WriteKey, WriteRequest] = {}
        self._requests_of: dict[str, set[WriteKey]] = {}
        self._ended: Bounded[str, KVFerryError] = Bounded(MAX_REMEMBERED)
        self._may_return: Bounded[str, KVFerryError] = Bounded(MAX_REMEMBERED)
        # Apart, since pushes that a stranger announces and revokes fill the first and must not let others be forgotten.
        self._outcomes: Bounded[WriteKey, Outcome] = Bounded(MAX_REMEMBERED)
        self._may_land: Bounded[WriteKey, Outcome] = Bounded(MAX_REMEMBERED)
        self._revoked: OrderedDict[WriteKey, float] = OrderedDict()
        """When pushes were revoked that were never announced, the oldest first."""

    @property
    def num_open(self) -> int:
        """Pushes that are not over."""
        return len(self._pushes)

    # The engine's prompts.

    def begin_step(self, prompts: Mapping[str, Prompt]) -> None:
        """The engine begins a step that computes these prompts, layer by layer.

        Only tokens that earlier steps computed here are final so far. Tokens from the engine's prefix cache are not:
        another prompt of this same step may compute their blocks.
        """
        self._done_spans.clear()
        self._wanted_spans.clear()
        self._running = {tid: prompt for tid, prompt in prompts.items() if tid not in self._ended}
        for transfer_id, prompt in self._running.items():
            known = self._prompts.get(transfer_id)
            num_final = 0 if known is None else known.num_final
            self._prompts[transfer_id] = msgspec.structs.replace(prompt, num_final=num_final)
            for key in self._keys_of(transfer_id):
                self._wanted_spans |= self._requests[key].needs.keys()
                self._check_prompt(key)

    def reach(self, span: Span) -> bool:
        """The layers of a span have run in this step, for every prompt; return whether a push needs the span."""
        self._done_spans.add(span)
        return span in self._wanted_spans

    def compute(self, transfer_id: str, prompt: Prompt) -> None:
        """The engine has computed ``prompt.num_final`` tokens of a prompt, in every layer."""
        if transfer_id in self._ended:
            return
        self._running.pop(transfer_id, None)
        self._prompts[transfer_id] = prompt
        for key in self._keys_of(transfer_id):
            self._check_prompt(key)

    def preempt(self, transfer_id: str) -> None:
        """The engine takes the prompt's blocks back and computes the prompt again: batches in flight are void."""
        self._prompts.pop(transfer_id, None)
        self._running.pop(transfer_id, None)
        for key in self._keys_of(transfer_id):
            self._pushes[key].void()

    def end(self, transfer_id: str, error: KVFerryError, *, may_return: bool = False) -> None:
        """The engine frees the prompt's blocks: pushes that still need them fail with ``error``.

        Later announcements fail with it too; where the transfer ``may_return``, only until it does.
        """
        self._prompts.pop(transfer_id, None)
        self._running.pop(transfer_id, None)
        if may_return:
            self._may_return[transfer_id] = error.without_traceback()
        else:
            self._ended.setdefault(transfer_id, error.without_traceback())
        for key in self._keys_of(transfer_id):
            self._pushes[key].void()
            self._pushes[key].fail(error)
            self._record_outcome(key)

    # Messages of destinations.

    def announce(self, request: WriteRequest, now: float) -> bool:
        """Begin a push; return False, and do nothing, for an announcement that is known.

        Raises the :class:`KVFerryError` with which the push or the prompt has ended, such as an earlier revocation's.
        """
        key = request.key
        if key in self._pushes:
            return False
        if (over := self.outcome(key)) is not None:
            if over.error is not None:
                raise over.error.without_traceback()
            return False
        if (ended := self._ended.get(request.transfer_id)) is not None:
            raise ended.without_traceback()
        if self._lacks_prompt(request, now):
            # No word is late here: one that was never held names no hold of this engine.
            raise self._may_return.get(request.transfer_id, wrong_parameters(ANNOUNCED)).without_traceback()
        self._requests[key] = request
        self._requests_of.setdefault(request.transfer_id, set()).add(key)
        self._wanted_spans |= request.needs.keys()
        self._pushes[key] = SourceWrite(request.transfer_id, request.needs, request.deadline)
        self._check_prompt(key)
        self._record_outcome(key)
        return True

    def refuse(self, key: WriteKey, error: KVFerryError) -> None:
        """An announcement was refused with ``error``: it never begins, and its revocation is one of a known push."""
        if key not in self._pushes and self.outcome(key) is None:
            kept = HandoffError(error.reason, error.message[:MOST_KEPT_TEXT], error.remedy[:MOST_KEPT_TEXT])
            self._outcomes[key] = Outcome(kept)

    def revoke(self, key: WriteKey, now: float) -> bool:
        """Stop a push; return whether no byte of it lands any more: no batch is in flight, and none has failed in a
        connection that may still deliver it.

        A push that was never announced is refused from now on; where too many such were revoked lately, this one is
        not, and counts as in flight.
        """
        if (push := self._pushes.get(key)) is not None:
            push.fail(_revoked())
            self._record_outcome(key)
        elif self.outcome(key) is None:
            return self._remember_revoked(key, now)
        over = self.outcome(key)
        return over is not None and not over.may_land

    # The job that writes.

    def take(self, key: WriteKey) -> Batch:
        """Return the next batch of this push, as :meth:`SourceWrite.take`."""
        push, request = self._pushes.get(key), self._requests.get(key)
        prompt = None if request is None else self._prompts.get(request.transfer_id)
        if push is None or prompt is None or request is None:
            return ()
        final = dict.fromkeys(request.needs, prompt.num_final)
        if (running := self._running.get(request.transfer_id)) is not None:
            final |= dict.fromkeys(self._done_spans & final.keys(), running.num_final)
        return push.take(final)

    def is_computed(self, transfer_id: str) -> bool:
        """Return whether the prompt has been computed to its end."""
        prompt = self._prompts.get(transfer_id)
        return prompt is not None and prompt.num_final >= END

    def prompt_of(self, key: WriteKey) -> Prompt | None:
        """Return how far the push's prompt has been computed."""
        request = self._requests.get(key)
        return None if request is None else self._prompts.get(request.transfer_id)

    def awaits_prompt(self, key: WriteKey) -> bool:
        """Return whether an open push has nothing to write, since its prompt is not known."""
        push = self._pushes.get(key)
        return push is not None and not push.is_writing and self.prompt_of(key) is None

    def landed(self, key: WriteKey, changed: Mapping[str, int] = NOTHING_CHANGED) -> bool:
        """The batch in flight has landed, as :meth:`SourceWrite.landed`; return whether it counts."""
        push = self._pushes.get(key)
        counts = push is not None and push.landed(changed)
        self._record_outcome(key)
        return counts

    def stopped(self, key: WriteKey, error: KVFerryError | None, *, may_land: bool = False) -> None:
        """The batch in flight has ended without landing whole, as :meth:`SourceWrite.stopped`."""
        if push := self._pushes.get(key):
            push.stopped(error, may_land=may_land)
            self._record_outcome(key)

    def fail(self, key: WriteKey, error: KVFerryError) -> None:
        """Give a push up."""
        if push := self._pushes.get(key):
            push.fail(error)
            self._record_outcome(key)

    def tick(self, key: WriteKey, now: float) -> None:
        """Give the push up once its deadline has passed, or the time in which its prompt must have become known."""
        if push := self._pushes.get(key):
            if self._lacks_prompt(self._requests[key], now):
                push.fail(self._may_return.get(self._requests[key].transfer_id, not_held(ANNOUNCED)))
            push.tick(now)
            self._record_outcome(key)

    def is_stopping(self, key: WriteKey) -> bool:
        """Return whether the batch in flight must be cancelled."""
        push = self._pushes.get(key)
        return push is not None and push.state is WriteState.STOPPING

    def outcome(self, key: WriteKey) -> Outcome | None:
        """Return how the push ended, once it is over."""
        if key in self._revoked:
            return Outcome(_revoked())
        return self._may_land.get(key) or self._outcomes.get(key)

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return the state as plain data: prompts' final tokens, and each open push with its remaining seconds."""
        return {
            "prompts": {name: prompt.num_final for name, prompt in sorted(self._prompts.items())},
            "pushes": {
                f"{key.receiver} {key.receiver_epoch} {key.number}": push.snapshot(now)
                for key, push in sorted(self._pushes.items())
            },
            "ended": sorted(self._ended),
        }

    def _remember_revoked(self, key: WriteKey, now: float) -> bool:
        """Remember a push that was never announced as revoked, where there is room; return whether there is."""
        if len(self._revoked) >= MAX_REVOKED:
            if now - next(iter(self._revoked.values())) < REVOKED_SECONDS:
                return False
            self._revoked.popitem(last=False)
        self._revoked[key] = now
        return True

    def _lacks_prompt(self, request: WriteRequest, now: float) -> bool:
        """Return whether the prompt should be known by now and is not."""
        return request.known_by is not None and now >= request.known_by and request.transfer_id not in self._prompts

    def _keys_of(self, transfer_id: str) -> list[WriteKey]:
        return list(self._requests_of.get(transfer_id, ()))

    def _check_prompt(self, key: WriteKey) -> None:
        request = self._requests[key]
        prompt = self._prompts.get(request.transfer_id)
        if prompt is None:
            return
        try:
            _compare_prompts(prompt, request)
        except HandoffError as error:
            self._pushes[key].fail(error)
            self._record_outcome(key)

    def _record_outcome(self, key: WriteKey) -> None:
        push = self._pushes.get(key)
        if push is not None and push.state is WriteState.OVER:
            del self._pushes[key]
            self._forget_request(self._requests.pop(key))
            kept = self._may_land if push.may_land else self._outcomes
            kept[key] = Outcome(push.error, push.may_land)

    def _forget_request(self, request: WriteRequest) -> None:
        keys = self._requests_of[request.transfer_id]
        keys.discard(request.key)
        if not keys:
            del self._requests_of[request.transfer_id]
