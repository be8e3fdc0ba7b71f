"""One push on the receiver's transfer thread: announce the blocks to every source, and wait until all have written."""

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.execution.guard_words import Scratch
from kvferry.execution.job import JobResult, Phase
from kvferry.handoff.messages import (
    MAX_ANNOUNCED_BLOCKS,
    Announce,
    Answer,
    EndPoint,
    Pushed,
    PushFailed,
    PushKey,
    Refusal,
    Revoke,
    Revoked,
)
from kvferry.handoff.push.events import clock
from kvferry.handoff.push.part import Part
from kvferry.handoff.push.receiver import Receiving
from kvferry.handoff.wire.client import known_reason

if TYPE_CHECKING:
    from kvferry.execution.receiver import Receiver

REVOKE_SECONDS = 0.05
"""Between two questions whether a revoked push is quiet."""
WATCH_SECONDS = 1.0
"""Between two looks whether the sources that are waited for still live."""


@dataclass(frozen=True, slots=True)
class SourceRank:
    """A source rank of a plan: where it answers, what it is to write, and all encoded shards of its engine."""

    index: int
    answers_at: EndPoint
    part: Part
    engine: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of all sources of one request. ``deadline`` is on the monotonic clock."""

    job_id: str
    transfer_id: str
    num_tokens: int
    prompt_digest: str
    deadline: float


# Returns the sources of a request, or None while something they need (a handshake) is not there yet.
FindSources = Callable[[], Sequence[SourceRank] | None]
Event = Pushed | PushFailed | tuple[int, Announce | Revoke, Answer | None]
"""What a source says by itself, or its answer (None: there was none in time) to a question."""


class Receipt:
    """Advances one push as its receiver sees it; done once the engine may have the blocks."""

    fills_blocks = True

    def __init__(self, request: Request, key: PushKey, find_sources: FindSources, receiver: "Receiver") -> None:
        self.job_id = request.job_id
        self.phase = Phase.PREPARING
        self.error: KVFerryError | None = None
        self.given_up_at: float | None = None
        self.inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._request, self._key = request, key
        self._find_sources, self._receiver = find_sources, receiver
        self._sources: dict[int, SourceRank] = {}
        self._to_tell: dict[int, SourceRank] = {}
        self._receiving: Receiving | None = None
        self._revoke_at: dict[int, float] = {}
        self._created_at = time.monotonic()
        self._pushed: dict[int, Pushed] = {}
        self._told_at: dict[int, float] = {}
        self._done_at: dict[int, float] = {}
        self._watch_at = 0.0

    def advance(self, scratch: Scratch, now: float) -> bool:
        """Tell sources that have not been told, note what they say, stop them once the push has failed."""
        self._receiver.collect()
        if self._receiving is None:
            return self._prepare(now)
        moved = self._read_inbox(self._receiving)
        self._receiving.tick(now)
        if self._receiving.error is not None:
            self._stop_sources(self._receiving, now)
        else:
            moved |= self._tell(self._receiving)
        self._watch(self._receiving, now)
        if self._receiving.is_over:
            self.error = self._receiving.error
            self._end()
            return True
        return moved

    def is_ending(self, now: float) -> bool:
        """Return whether it is past its deadline or being stopped."""
        return self.phase is Phase.STOPPING or now >= self._request.deadline

    def cancel(self, error: KVFerryError) -> None:
        """Give up."""
        if self._receiving is not None:
            self._receiving.fail(error)
        elif self.phase is not Phase.DONE:
            self.error = error.without_traceback()
            self._end()

    def result(self, finished_at: float) -> JobResult:
        """Return how the push ended; what was written is as its sources say. Waits include the prompt's computing."""
        committed = list(self._pushed.values()) if self.error is None else []
        return JobResult(
            job_id=self.job_id,
            error=self.error,
            num_bytes=sum(event.num_bytes for event in committed),
            num_staged_bytes=0,
            num_descriptors=sum(event.num_descriptors for event in committed),
            num_sources=len(self._sources),
            transport=",".join(sorted({event.transport for event in committed})),
            wait_seconds=finished_at - self._created_at,
            transfer_seconds=max((event.transfer_seconds for event in committed), default=0.0),
            events=self._events(finished_at) if self._receiver.keeps_events else None,
        )

    def _events(self, finished_at: float) -> dict[str, Any]:
        """Return when each source, by index, was told of the blocks, when it said "done", and when that was all."""
        return {
            "clock": clock(),
            "ordered_at": self._created_at,
            "announced_at": {str(index): told_at for index, told_at in self._told_at.items()},
            "done_at": {str(index): done_at for index, done_at in self._done_at.items()},
            "committed_at": finished_at if self.error is None else None,
        }

    def _prepare(self, now: float) -> bool:
        if self.phase is Phase.DONE:
            return True
        try:
            if now >= self._request.deadline:
                raise _no_handshake(self._request, now - self._created_at)
            sources = self._find_sources()
        except KVFerryError as error:
            self.cancel(error)
            return True
        if sources is None:
            return False
        self._sources = {source.index: source for source in sources}
        self._to_tell = dict(self._sources)
        expected = {source.index: source.part.digest for source in sources}
        self._receiving = Receiving(self.job_id, expected, self._request.deadline)
        return True

    def _tell(self, receiving: Receiving) -> bool:
        moved = False
        for index, source in list(self._to_tell.items()):
            try:
                _check_announced(self._request, source.part)
                if not self._receiver.is_introduced(source.answers_at, source.engine):
                    continue
            except KVFerryError as error:
                receiving.refused(index, error)
                return True
            del self._to_tell[index]
            receiving.telling(index)
            self._told_at[index] = time.monotonic()
            self._receiver.ask(source.answers_at, self._announcement(source), self._key.number, index)
            moved = True
        return moved

    def _announcement(self, source: SourceRank) -> Announce:
        return Announce(
            epoch=source.answers_at.epoch,
            key=self._key,
            transfer_id=self._request.transfer_id,
            num_tokens=self._request.num_tokens,
            prompt_digest=self._request.prompt_digest,
            blocks=source.part.announced,
            digest=source.part.digest,
            seconds=max(0.001, self._request.deadline - time.monotonic()),
        )

    def _read_inbox(self, receiving: Receiving) -> bool:
        moved = False
        while not self.inbox.empty():
            moved = True
            event = self.inbox.get_nowait()
            if isinstance(event, Pushed):
                receiving.done(event.source_index, event.digest)
                self._pushed[event.source_index] = event
                self._done_at[event.source_index] = time.monotonic()
            elif isinstance(event, PushFailed):
                error = HandoffError(known_reason(event.reason), event.message, event.remedy)
                receiving.refused(event.source_index, error)
            else:
                self._note_answer(receiving, *event)
        return moved

    def _note_answer(
        self, receiving: Receiving, index: int, question: Announce | Revoke, answer: Answer | None
    ) -> None:
        where = self._sources[index].answers_at
        if isinstance(question, Revoke):
            self._revoke_at[index] = time.monotonic() + REVOKE_SECONDS
        if isinstance(answer, Revoked) and answer.is_quiet:
            receiving.quiet(index)
        elif answer is None or (isinstance(answer, Refusal) and answer.reason == Reason.PEER_UNREACHABLE):
            receiving.fail(_silent(where))
        elif isinstance(answer, Refusal):
            # Whatever else was refused, the source must still say that it writes nothing.
            receiving.fail(HandoffError(known_reason(answer.reason), answer.message, answer.remedy))
            if answer.reason == Reason.PEER_CHANGED:
                receiving.quiet(index)
            elif answer.reason == Reason.UNKNOWN_REQUEST:
                self._receiver.introduce_again(where)

    def _watch(self, receiving: Receiving, now: float) -> None:
        """A source whose process has ended will never say how its push did."""
        if now < self._watch_at:
            return
        self._watch_at = now + WATCH_SECONDS
        for index in receiving.writers:
            where = self._sources[index].answers_at
            if self._receiver.has_ended(where):
                receiving.refused(index, _silent(where))

    def _stop_sources(self, receiving: Receiving, now: float) -> None:
        self.phase = Phase.STOPPING
        self.error = receiving.error
        self.given_up_at = self.given_up_at or now
        for index in receiving.writers:
            if now >= self._revoke_at.get(index, 0.0):
                # Not again before this one has been answered.
                self._revoke_at[index] = float("inf")
                source = self._sources[index]
                self._receiver.ask(
                    source.answers_at, Revoke(source.answers_at.epoch, self._key), self._key.number, index
                )

    def _end(self) -> None:
        self.phase = Phase.DONE
        self._receiver.forget(self._key.number)


def _check_announced(request: Request, part: Part) -> None:
    """Raise :class:`HandoffError` (unsupported) for more blocks than one announcement has."""
    num_blocks = sum(len(blocks.block_ids) for blocks in part.announced)
    if num_blocks > MAX_ANNOUNCED_BLOCKS:
        raise HandoffError(
            Reason.UNSUPPORTED,
            f"{request.job_id} has {num_blocks} blocks to announce to one rank, an announcement has at most "
            f"{MAX_ANNOUNCED_BLOCKS}.",
            'Use larger blocks, or set "mode" to "pull".',
        )


def _silent(where: EndPoint) -> HandoffError:
    return HandoffError(
        Reason.PEER_UNREACHABLE,
        f"the prefill rank at {where.host}:{where.port} does not answer.",
        "Check that the prefill engine runs.",
    )


def _no_handshake(request: Request, seconds: float) -> HandoffError:
    return HandoffError(
        Reason.DEADLINE_EXCEEDED,
        f"no blocks could be announced for {request.job_id} within {seconds:.1f} s.",
        "Check the prefill engine; push_timeout_seconds sets the limit.",
    )
