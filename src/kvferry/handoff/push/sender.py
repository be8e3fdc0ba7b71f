"""Pushes as the source rank decides them: what is computed, what is on its way, what has landed, who wants it.

Pure: the engine's progress, messages and the time are inputs. A :class:`Sending` is one push. What is wanted of it
lies in *spans*: the tokens of one cache group, in all layers or in the layers that go together. The engine says how far
each span is final; what is final, wanted and not on its way goes with the next batch, so that a source that falls
behind sends fewer and larger batches, and nothing queues up. One batch is on its way at a time: after a preemption two
never write the same bytes.

A :class:`Sender` is all pushes of one rank. A prompt and an announcement meet by the transfer id that the router gave
both engines, in either order. An announcement that comes late catches up on what was computed before. Not thread-safe:
the caller holds a lock.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.handoff.bounded import Bounded
from kvferry.handoff.messages import PushKey
from kvferry.plan.layer_spans import Span

END = 1 << 62
"""Progress of a span whose prompt has been computed to its end, partly filled last block and state included."""


class Need(msgspec.Struct, frozen=True):
    """Tokens wanted of a span, half-open. But for the last, batches end at tokens that are a ``multiple_of``.

    A state is token 0 to 1, and there only when the prompt has ended: its ``multiple_of`` is larger than it.
    """

    first_token: int
    end_token: int
    multiple_of: int


class Cut(NamedTuple):
    """Tokens of a span that go with one batch."""

    span: Span
    first_token: int
    end_token: int


Batch = tuple[Cut, ...]


class PushState(Enum):
    """Where a push stands."""

    OPEN = "pushing"
    STOPPING = "waiting for what is on its way"
    OVER = "over"


class Sending:
    """``error`` is None for a push that is open or complete.

    >>> span = Span("full")
    >>> push = Sending("r", {span: Need(0, 40, 16)}, deadline=30.0)
    >>> push.take({span: 39}), push.take({span: END}), push.landed(), push.take({span: END})
    ((Cut(span=Span(group='full', number=0), first_token=0, end_token=32),), (), None, \
(Cut(span=Span(group='full', number=0), first_token=32, end_token=40),))
    >>> push.landed(), push.state.value, push.error
    (None, 'over', None)
    """

    def __init__(self, transfer_id: str, needs: Mapping[Span, Need], deadline: float) -> None:
        self._transfer_id = transfer_id
        self._needs = dict(needs)
        self._deadline = deadline
        self._reached = {span: need.first_token for span, need in needs.items()}
        self._on_its_way: Batch = ()
        self._is_void = False
        self.state = PushState.OPEN
        self.error: KVFerryError | None = None
        self._end_if_complete()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is being written."""
        return not self._on_its_way

    def take(self, final: Mapping[Span, int]) -> Batch:
        """Return what is final and wanted and goes now; empty while something else is on its way."""
        if self.state is not PushState.OPEN or self._on_its_way:
            return ()
        cuts = [Cut(span, begin, self._ready(span, final.get(span, 0))) for span, begin in self._reached.items()]
        self._on_its_way = tuple(cut for cut in cuts if cut.end_token > cut.first_token)
        self._is_void = False
        return self._on_its_way

    def landed(self) -> None:
        """What was on its way has landed; it counts unless its source changed meanwhile."""
        batch, self._on_its_way = self._on_its_way, ()
        if not self._is_void:
            self._reached |= {cut.span: cut.end_token for cut in batch}
        self._settle()

    def stopped(self, error: KVFerryError | None) -> None:
        """What was on its way has ended without landing whole; nothing of it is written any more."""
        self._on_its_way = ()
        if error is not None:
            self.fail(error)
        self._settle()

    def void(self) -> None:
        """The blocks that are being read may be overwritten: what is on its way is to be sent again."""
        self._is_void = True

    def fail(self, error: KVFerryError) -> None:
        """Give up, for the first reason there is. Over once nothing is on its way."""
        if self.state is PushState.OVER:
            return
        if self.error is None:
            self.error = error.without_traceback()
        self.state = PushState.STOPPING
        self._settle()

    def tick(self, now: float) -> None:
        """Give up once the deadline has passed."""
        if self.state is PushState.OPEN and now >= self._deadline:
            self.fail(_late(self._transfer_id))

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return the state as plain data, times relative to ``now``, the error as its reason code."""
        return {
            "state": self.state.value,
            "reached": {f"{span.group}/{span.number}": token for span, token in self._reached.items()},
            "on_its_way": len(self._on_its_way),
            "error": None if self.error is None else self.error.reason.value,
            "deadline_in": self._deadline - now,
        }

    def _ready(self, span: Span, final: int) -> int:
        need = self._needs[span]
        if final >= END:
            return need.end_token
        return max(self._reached[span], min(final, need.end_token) // need.multiple_of * need.multiple_of)

    def _settle(self) -> None:
        if self.state is PushState.STOPPING and not self._on_its_way:
            self.state = PushState.OVER
        elif self.state is PushState.OPEN:
            self._end_if_complete()

    def _end_if_complete(self) -> None:
        if all(self._reached[span] == need.end_token for span, need in self._needs.items()):
            self.state = PushState.OVER


def _late(transfer_id: str) -> HandoffError:
    return HandoffError(
        Reason.DEADLINE_EXCEEDED,
        f"the prompt of {transfer_id} was not pushed within the time that the receiver gave.",
        "push_timeout_seconds on the decode side sets the limit.",
    )


MAX_REMEMBERED = 1 << 16
"""Ended transfers and pushes that are remembered, so that a late message cannot begin them again."""


class BlockList(msgspec.Struct, frozen=True):
    """An engine's blocks of one prompt in one cache group, from the one that begins at ``first_token`` on."""

    first_token: int
    block_ids: Sequence[int]


class Prompt(msgspec.Struct, frozen=True):
    """What an engine has computed of one prompt: blocks by cache group, and tokens that are final in every layer.

    ``num_final`` is :data:`kvferry.handoff.push.sender.END` once the prompt has been computed to its end.
    """

    num_tokens: int
    digest: str
    blocks: Mapping[str, BlockList]
    num_final: int


class PushRequest(msgspec.Struct, frozen=True):
    """What one rank of a receiver has announced to this rank. ``deadline`` is on the sender's clock."""

    key: PushKey
    transfer_id: str
    num_tokens: int
    prompt_digest: str
    needs: Mapping[Span, Need]
    deadline: float


class Over(msgspec.Struct, frozen=True):
    """How a push ended; ``error``, without a traceback, is None where everything has landed."""

    error: KVFerryError | None


class Sender:
    """All pushes of one rank.

    >>> side, key, span = Sender(), PushKey("d/0", 7, 1), Span("0")
    >>> side.announce(PushRequest(key, "x", 32, "p", {span: Need(0, 32, 16)}, deadline=9.0))
    True
    >>> side.take(key), side.compute("x", Prompt(32, "p", {}, num_final=16))
    ((), None)
    >>> [cut.end_token for cut in side.take(key)], side.landed(key), side.outcome(key)
    ([16], None, None)
    >>> side.end("x", HandoffError(Reason.ABORTED, "x was aborted.")), side.outcome(key).error.reason.value
    (None, 'aborted')
    """

    def __init__(self) -> None:
        self._prompts: dict[str, Prompt] = {}
        self._running: dict[str, Prompt] = {}
        self._done_spans: set[Span] = set()
        self._wanted_spans: set[Span] = set()
        self._pushes: dict[PushKey, Sending] = {}
        self._requests: dict[PushKey, PushRequest] = {}
        self._requests_of: dict[str, set[PushKey]] = {}
        self._ended: Bounded[str, KVFerryError] = Bounded(MAX_REMEMBERED)
        self._over: Bounded[PushKey, Over] = Bounded(MAX_REMEMBERED)

    @property
    def num_open(self) -> int:
        """Pushes that are not over."""
        return len(self._pushes)

    # The engine's prompts.

    def begin_step(self, prompts: Mapping[str, Prompt]) -> None:
        """The engine begins a step that computes these prompts, layer by layer.

        Final so far is what former steps have computed here. Not what the engine took from its prefix cache: it names
        blocks there that another prompt of this very step computes.
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
        """The layers of a span have run in this step, for every prompt in it; return whether somebody wants them."""
        self._done_spans.add(span)
        return span in self._wanted_spans

    def compute(self, transfer_id: str, prompt: Prompt) -> None:
        """The engine has computed so much of a prompt, in every layer."""
        if transfer_id in self._ended:
            return
        self._running.pop(transfer_id, None)
        self._prompts[transfer_id] = prompt
        for key in self._keys_of(transfer_id):
            self._check_prompt(key)

    def preempt(self, transfer_id: str) -> None:
        """The engine takes the prompt's blocks back and computes it again: what is on its way is void."""
        self._prompts.pop(transfer_id, None)
        self._running.pop(transfer_id, None)
        for key in self._keys_of(transfer_id):
            self._pushes[key].void()

    def end(self, transfer_id: str, error: KVFerryError) -> None:
        """The prompt's blocks are given back: whoever still waits for them waits in vain."""
        self._prompts.pop(transfer_id, None)
        self._running.pop(transfer_id, None)
        self._ended.setdefault(transfer_id, error.without_traceback())
        for key in self._keys_of(transfer_id):
            self._pushes[key].void()
            self._pushes[key].fail(error)
            self._sort_out(key)

    # The receivers' messages.

    def introduce(self, receiver: str, epoch: int) -> None:
        """A rank of a receiver has started, again perhaps: pushes to its former self end."""
        error = HandoffError(Reason.PEER_CHANGED, f"{receiver} was restarted.", "Send the prompt again.")
        for key in [key for key in self._pushes if key.receiver == receiver and key.receiver_epoch != epoch]:
            self._pushes[key].fail(error)
            self._sort_out(key)

    def announce(self, request: PushRequest) -> bool:
        """Blocks are ready: return whether that is new. Announcing them again changes nothing.

        Raises why the push, revoked before perhaps, or the prompt has ended.
        """
        key = request.key
        if key in self._pushes:
            return False
        if key in self._over:
            if (error := self._over[key].error) is not None:
                raise error.without_traceback()
            return False
        if (ended := self._ended.get(request.transfer_id)) is not None:
            raise ended.without_traceback()
        self._requests[key] = request
        self._requests_of.setdefault(request.transfer_id, set()).add(key)
        self._wanted_spans |= request.needs.keys()
        self._pushes[key] = Sending(request.transfer_id, request.needs, request.deadline)
        self._check_prompt(key)
        self._sort_out(key)
        return True

    def revoke(self, key: PushKey) -> bool:
        """Write no more; return whether all is quiet. One that was never announced never will be."""
        error = HandoffError(
            Reason.ABORTED, "the receiver revoked its blocks.", "The decode engine's log says why it gave the push up."
        )
        push = self._pushes.get(key)
        if push is not None:
            push.fail(error)
            self._sort_out(key)
        elif key not in self._over:
            self._over.setdefault(key, Over(error))
        return key not in self._pushes

    # The pusher.

    def take(self, key: PushKey) -> Batch:
        """Return what goes now of this push."""
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

    def prompt_of(self, key: PushKey) -> Prompt | None:
        """Return what has been computed of the prompt that the push is of."""
        request = self._requests.get(key)
        return None if request is None else self._prompts.get(request.transfer_id)

    def landed(self, key: PushKey) -> None:
        """What was on its way has landed."""
        if push := self._pushes.get(key):
            push.landed()
            self._sort_out(key)

    def stopped(self, key: PushKey, error: KVFerryError | None) -> None:
        """What was on its way will not land; nothing of it is written any more."""
        if push := self._pushes.get(key):
            push.stopped(error)
            self._sort_out(key)

    def fail(self, key: PushKey, error: KVFerryError) -> None:
        """Give a push up."""
        if push := self._pushes.get(key):
            push.fail(error)
            self._sort_out(key)

    def tick(self, key: PushKey, now: float) -> None:
        """Give the push up if it is late."""
        if push := self._pushes.get(key):
            push.tick(now)
            self._sort_out(key)

    def is_stopping(self, key: PushKey) -> bool:
        """Return whether what is on its way is to be cancelled."""
        push = self._pushes.get(key)
        return push is not None and push.state is PushState.STOPPING

    def outcome(self, key: PushKey) -> Over | None:
        """Return how the push ended, once it is over."""
        return self._over.get(key)

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

    def _keys_of(self, transfer_id: str) -> list[PushKey]:
        return list(self._requests_of.get(transfer_id, ()))

    def _check_prompt(self, key: PushKey) -> None:
        request = self._requests[key]
        prompt = self._prompts.get(request.transfer_id)
        if prompt is None or (prompt.num_tokens, prompt.digest) == (request.num_tokens, request.prompt_digest):
            return
        self._pushes[key].fail(
            HandoffError(
                Reason.INVALID_REQUEST,
                f"{key.receiver} wants {request.num_tokens} tokens of {request.transfer_id}, which is another prompt "
                f"of {prompt.num_tokens} here.",
                "Send the same prompt, template, images and cache_salt to both engines, which have each adapter under "
                "one name and path.",
            )
        )
        self._sort_out(key)

    def _sort_out(self, key: PushKey) -> None:
        push = self._pushes.get(key)
        if push is not None and push.state is PushState.OVER:
            del self._pushes[key]
            self._forget_request(self._requests.pop(key))
            self._over.setdefault(key, Over(push.error))

    def _forget_request(self, request: PushRequest) -> None:
        keys = self._requests_of[request.transfer_id]
        keys.discard(request.key)
        if not keys:
            del self._requests_of[request.transfer_id]
