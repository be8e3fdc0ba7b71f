"""A rank of a receiver among its sources: introduces itself, announces blocks, hears how pushes end."""

from itertools import count

from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.execution.executor import Executor
from kvferry.execution.receipt import FindSources, Receipt, Request
from kvferry.handoff.bounded import Bounded
from kvferry.handoff.messages import (
    MAX_QUESTION_BYTES,
    PROTOCOL_VERSION,
    Announce,
    Answer,
    EndPoint,
    Identity,
    Introduce,
    Introduced,
    Noted,
    Pushed,
    PushFailed,
    PushKey,
    Question,
    Refusal,
    Revoke,
    encode,
)
from kvferry.handoff.wire.addresses import nothing_listens
from kvferry.handoff.wire.background import AllBeside, Beside
from kvferry.handoff.wire.client import Courier, Parcel, known_reason

KNOCK_SECONDS = 0.2
KNOCK_AGAIN_SECONDS = 0.5
"""So old an answer may be whether a source lives, for all pushes that wait for it."""
MAX_SOURCES = 4096
"""So many source ranks are remembered as having been introduced to."""


class Receiver:
    """All pushes to one rank. A source, which answers on a thread of its own, may take ``answer_seconds`` to do so.

    With ``keeps_events`` the result of each has events.

    :meth:`answer` is for the listener's thread, :meth:`receive` for the engine's; the rest is for receipts, on the
    transfer thread.
    """

    def __init__(
        self,
        name: str,
        identity: Identity,
        shard: bytes,
        end_points: dict[str, bytes],
        answers_at: EndPoint,
        executor: Executor,
        courier: Courier,
        answer_seconds: float,
        keeps_events: bool = False,
    ) -> None:
        self._name, self._identity = name, identity
        self._shard, self._end_points, self._answers_at = shard, end_points, answers_at
        self._executor, self._courier = executor, courier
        self._answer_seconds = answer_seconds
        self.keeps_events = keeps_events
        self._numbers = count(1)
        self._receipts: dict[int, Receipt] = {}
        self._introductions: Bounded[EndPoint, Answer | None] = Bounded(MAX_SOURCES)
        self._knocks: AllBeside[EndPoint, bool] = AllBeside("knock")
        self._asked: dict[tuple[str, int, Announce | Revoke], tuple[int, int]] = {}

    @property
    def epoch(self) -> int:
        """The life of this process."""
        return self._answers_at.epoch

    def receive(self, request: Request, find_sources: FindSources) -> None:
        """Start a push; its result comes back from the executor."""
        key = PushKey(self._name, self.epoch, next(self._numbers))
        receipt = self._receipts[key.number] = Receipt(request, key, find_sources, self)
        self._executor.submit(receipt)

    def answer(self, question: Question) -> Answer:
        """Take note of what a source says. Raises :class:`HandoffError` for what is not for this rank."""
        if not isinstance(question, Pushed | PushFailed):
            raise HandoffError(
                Reason.UNSUPPORTED,
                f"a {type(question).__name__} is not for a rank that is pushed to.",
                "Ask the prefill engine's own port.",
            )
        key = question.key
        if (key.receiver, key.receiver_epoch) != (self._name, self.epoch):
            raise HandoffError(
                Reason.PEER_CHANGED,
                f"the message is for {key.receiver} in epoch {key.receiver_epoch}; here is {self._name} in epoch "
                f"{self.epoch}.",
                "The decode engine was restarted: send the prompt again.",
            )
        if receipt := self._receipts.get(key.number):
            receipt.inbox.put(question)
            self._executor.wake()
        return Noted(self.epoch)

    # For receipts.

    def is_introduced(self, where: EndPoint, sources: tuple[bytes, ...]) -> bool:
        """Return whether a source rank knows this one; introduce it if not. Raises :class:`HandoffError` if refused.

        ``sources`` are the encoded shards of all ranks of its engine.
        """
        if where not in self._introductions:
            introduction = self._introduction(where, sources)
            self._introductions[where] = None
            self._courier.send(where.host, where.port, introduction, self._answer_seconds)
        answer = self._introductions[where]
        if isinstance(answer, Refusal):
            del self._introductions[where]
            raise HandoffError(known_reason(answer.reason), answer.message, answer.remedy)
        return isinstance(answer, Introduced)

    def introduce_again(self, where: EndPoint) -> None:
        """The source does not know this rank any more: introduce it anew for the next push."""
        self._introductions.pop(where, None)

    def ask(self, where: EndPoint, question: Announce | Revoke, number: int, index: int) -> None:
        """Ask a source; the answer comes into the receipt's inbox."""
        self._asked[where.host, where.port, question] = number, index
        self._courier.send(where.host, where.port, question, self._answer_seconds)

    def has_ended(self, where: EndPoint) -> bool:
        """Return whether its host has said that nothing listens there: a rank stops writing before it stops listening.

        The host is asked beside: this is its last answer, and where that is old the next one is on its way.
        """
        knock = self._knock(where)
        if knock is None:
            return False
        if knock.is_older(KNOCK_AGAIN_SECONDS):
            self._knocks.forget(where)
            self._knock(where)
        try:
            return knock.result()
        except KVFerryError:
            # Whatever kept the host from being asked proves nothing.
            return False

    def _knock(self, where: EndPoint) -> Beside[bool] | None:
        return self._knocks.get(where, lambda: nothing_listens(where.host, where.port, KNOCK_SECONDS))

    def collect(self) -> None:
        """Hand out the answers that have come."""
        for parcel in self._courier.collect():
            if isinstance(parcel.question, Introduce):
                self._note_introduction(parcel, parcel.question)
            elif isinstance(parcel.question, Announce | Revoke):
                number, index = self._asked.pop((parcel.host, parcel.port, parcel.question), (0, 0))
                if receipt := self._receipts.get(number):
                    receipt.inbox.put((index, parcel.question, parcel.answer))

    def forget(self, number: int) -> None:
        """A push is over."""
        self._receipts.pop(number, None)

    def _introduction(self, where: EndPoint, sources: tuple[bytes, ...]) -> Introduce:
        introduction = Introduce(
            version=PROTOCOL_VERSION,
            epoch=where.epoch,
            receiver=self._name,
            identity=self._identity,
            sources=sources,
            shard=self._shard,
            end_points=self._end_points,
            answers_at=self._answers_at,
        )
        if (num_bytes := len(encode(introduction))) > MAX_QUESTION_BYTES:
            raise HandoffError(
                Reason.UNSUPPORTED,
                f"what the {len(sources)} ranks of the prefill engine hold takes {num_bytes} bytes to repeat, a "
                f"question has at most {MAX_QUESTION_BYTES}.",
                'Set "mode" to "pull", or run the prefill engine with fewer ranks.',
            )
        return introduction

    def _note_introduction(self, parcel: Parcel, question: Introduce) -> None:
        where = EndPoint(parcel.host, parcel.port, question.epoch)
        answer = parcel.answer
        if not isinstance(answer, Introduced | Refusal):
            answer = Refusal(
                Reason.PEER_UNREACHABLE.value,
                f"{where.host}:{where.port} did not answer.",
                "Check that the prefill engine runs, and that its host can be reached from here.",
            )
        if where in self._introductions:
            self._introductions[where] = answer
