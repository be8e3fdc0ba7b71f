"""Pushes to one destination rank: it introduces itself to source ranks, announces blocks and takes their reports.

:class:`kvferry.handoff.destination.DestinationLoad` decides. An :class:`AwaitedLoad`, a job of the transfer thread, carries
out one push, an :class:`Announcer` all pushes to a rank.
"""

import logging
import queue
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.execution.guard_words import Scratch
from kvferry.execution.introductions import Introductions, unreachable
from kvferry.execution.job import JobResult, Phase, clock
from kvferry.execution.own_rank import OwnRank
from kvferry.execution.peers import Peers
from kvferry.execution.digests import PER_ADVANCE, PartDigests, PartCells
from kvferry.handoff.messages import (
    MAX_ANNOUNCED_BLOCKS,
    Announce,
    Announced,
    Answer,
    EndPoint,
    Introduce,
    Met,
    Noted,
    Written,
    WriteFailed,
    WriteKey,
    Question,
    Refusal,
    Revoke,
    Revoked,
)
from kvferry.handoff.part import Part
from kvferry.handoff.destination import DestinationLoad, Step
from kvferry.layout.shard import HOST_DEVICE
from kvferry.peer_log import PeerLog
from kvferry.plan.digest_cells import Integrity
from kvferry.transport.end_points import ProcessIdentity

logger = PeerLog(logging.getLogger(__name__))

FENCE_SECONDS = 60.0
OF_FAILED_WRITES = frozenset({Reason.TRANSFER_FAILED, Reason.PEER_DIED, Reason.PEER_CHANGED, Reason.UNREGISTERED_RANGE})
"""The reasons with which a write fails in a transport, by which a source of version 9, whose report does not say
whether bytes may still land, is told from one that has written nothing."""
NUMBER_BITS = 62
"""Of the random number of a push, which only its source ranks learn."""


@dataclass(frozen=True, slots=True)
class SourceRank:
    """A source rank of a plan: where it answers, the part that it writes, and all encoded shards of its engine.

    ``version`` is that of the handshake with its engine. ``process`` writes; where it is None, nothing is known of it.
    ``cells`` are those whose digests are compared.
    """

    index: int
    answers_at: EndPoint
    part: Part
    engine: tuple[bytes, ...]
    version: int
    process: ProcessIdentity | None = None
    cells: PartCells | None = None


@dataclass(frozen=True, slots=True)
class Announcement:
    """One request, the same for all of its sources. ``deadline`` is on the monotonic clock."""

    job_id: str
    transfer_id: str
    num_tokens: int
    prompt_digest: str
    deadline: float
    adapter: str = ""
    late_seconds: float = 0.0
    """How long the sources of a held prompt may not know it yet."""


# Returns the sources of a request, or None while their handshake runs.
FindSources = Callable[[], Sequence[SourceRank] | None]
Event = Written | WriteFailed | tuple[int, Announce | Revoke, Answer | None]
"""A report of a source; or the index of a source, a question to it, and its answer, None where it came too late."""


class AwaitedLoad:
    """One push at its destination; done once the engine may have the blocks."""

    fills_blocks = True
    is_for_log = False
    can_wait = False

    def __init__(self, request: Announcement, key: WriteKey, find_sources: FindSources, announcer: "Announcer") -> None:
        self.job_id = request.job_id
        self.phase = Phase.PREPARING
        self.error: KVFerryError | None = None
        self.given_up_at: float | None = None
        self.inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._request, self._key = request, key
        self._find_sources, self._announcer = find_sources, announcer
        self._sources: dict[int, SourceRank] = {}
        self._receiving: DestinationLoad | None = None
        self._created_at = time.monotonic()
        self._pushed: dict[int, Written] = {}
        self._transports: dict[int, str] = {}
        self._announced_at: dict[int, float] = {}
        self._registrations: dict[int, int] = {}
        self._done_at: dict[int, float] = {}
        self._digests: dict[int, PartDigests] = {}
        self._comparing: dict[int, Iterator[int]] = {}
        self._num_compared_bytes = 0
        self._compare_seconds = 0.0

    def advance(self, scratch: Scratch, now: float) -> bool:
        """Take reports and answers of sources, then carry out the steps that are due."""
        self._announcer.collect()
        receiving = self._receiving
        if receiving is None:
            return self._prepare(now)
        moved = self._read_inbox(receiving) or self._compare(receiving)
        for step, index in receiving.due(now):
            source = self._sources[index]
            match step:
                case Step.ANNOUNCE:
                    # The announcement to the source before this one may have been refused.
                    moved |= receiving.error is None and self._announce(receiving, source)
                case Step.REVOKE:
                    question = Revoke(source.answers_at.epoch, self._key)
                    self._announcer.ask(source.answers_at, question, self._key.number, index)
                case Step.CHECK_ALIVE:
                    self._check_alive(receiving, source)
                case Step.FENCE:
                    self._fence(receiving, source)
        if receiving.error is not None and self.error is None:
            self.error, self.given_up_at, self.phase = receiving.error, now, Phase.STOPPING
        if receiving.is_over:
            self._end()
            return True
        return moved

    def fenced(self, error: KVFerryError) -> None:
        """Nothing lands any more of what was announced before to sources that a fence keeps out."""
        if self._receiving is None:
            return
        for index in self._registrations:
            if self._is_behind_fence(index, is_broken=self._receiving.is_broken(index)):
                self._receiving.fenced(index, error)

    def _is_behind_fence(self, index: int, *, is_broken: bool) -> bool:
        """Return whether a fence has closed what a source was told of, and keeps out what may land of it."""
        registration = self._registrations.get(index)
        is_closed = registration is not None and self._announcer.is_closed(registration)
        return is_closed and self._announcer.is_kept_out(self._sources[index], is_broken=is_broken)

    def _check_alive(self, receiving: DestinationLoad, source: SourceRank) -> None:
        if self._announcer.peers.has_ended(source.process):
            transport = self._transports.get(source.index, "")
            may_land = not self._announcer.transports.ends_with_process(transport)
            receiving.ended(source.index, _died(source), may_land=may_land)
        elif self._announcer.peers.refuses(source.answers_at):
            receiving.fail(unreachable(source.answers_at))

    def _fence(self, receiving: DestinationLoad, source: SourceRank) -> None:
        where = f"{source.answers_at.host}:{source.answers_at.port}"
        if source.index not in receiving.may_land:
            # The fence for another source of this push has done.
            return
        is_broken = receiving.is_broken(source.index)
        told = "does not confirm that it writes no more into"
        if is_broken or self._announcer.peers.has_ended(source.process):
            told = "writes no more, but what it has sent may still land in"
        logger.warning("kvferry: the prefill rank at %s %s the blocks of %s.", where, told, self.job_id, peer=where)
        if not self._announcer.is_kept_out(source, is_broken=is_broken):
            logger.warning(
                "kvferry: the blocks of %s stay quarantined: the prefill rank at %s runs on this host, where no fence "
                "keeps its bytes out: end its process%s%s.",
                self.job_id,
                where,
                "" if self._announcer.peers.watches(source.process) else ", then restart this engine",
                "" if is_broken else ", or let it go on",
                peer=where,
            )
        elif self._registrations[source.index] == self._announcer.num_fences:
            self._announcer.fence(where)
        else:
            # Another fence would close other memory than the source was told of.
            self.fenced(_fenced(where))

    def is_ending(self, now: float) -> bool:
        """Return whether the push is past its deadline or being stopped."""
        return self.phase is Phase.STOPPING or now >= self._request.deadline

    def cancel(self, error: KVFerryError) -> None:
        """Give up."""
        if self._receiving is not None:
            self._receiving.fail(error)
        elif self.phase is not Phase.DONE:
            self.error = error.without_traceback()
            self._end()

    def result(self, finished_at: float) -> JobResult:
        """Return how the push ended, with bytes and seconds of its sources' reports. Its wait includes the prefill."""
        committed = list(self._pushed.values()) if self.error is None else []
        return JobResult(
            job_id=self.job_id,
            error=self.error,
            num_bytes=sum(event.num_bytes for event in committed),
            num_staged_bytes=0,
            num_descriptors=sum(event.num_descriptors for event in committed),
            num_sources=len(self._sources),
            transport=",".join(sorted({event.transport for event in committed})),
            way="written" if committed else "",
            wait_seconds=finished_at - self._created_at,
            transfer_seconds=max((event.transfer_seconds for event in committed), default=0.0),
            num_compared_bytes=self._num_compared_bytes,
            compare_seconds=self._compare_seconds,
            events=self._events(finished_at) if self._announcer.keeps_events else None,
        )

    def _events(self, finished_at: float) -> dict[str, Any]:
        """Return when each source, by index, got its announcement and reported "done", and the time of the commit."""
        return {
            "clock": clock(),
            "ordered_at": self._created_at,
            "announced_at": {str(index): announced_at for index, announced_at in self._announced_at.items()},
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
            for source in sources or ():
                if source.cells is not None:
                    self._digests[source.index] = PartDigests(source.cells, source.part.announced, self._key)
        except KVFerryError as error:
            self.cancel(error)
            return True
        if sources is None:
            return False
        self._sources = {source.index: source for source in sources}
        expected = {source.index: source.part.digest for source in sources}
        self._receiving = DestinationLoad(self.job_id, expected, self._request.deadline, self._announcer.fence_seconds)
        return True

    def _announce(self, receiving: DestinationLoad, source: SourceRank) -> bool:
        """Announce the blocks to a source that knows this rank; return whether the source is dealt with."""
        try:
            _check_announced(self._request, source.part)
            if not self._announcer.peers.meet(source.process):
                raise _died(source)
            if not self._announcer.introductions.is_introduced(source.answers_at, source.engine, source.version):
                return False
        except KVFerryError as error:
            receiving.refused(source.index, error)
            return True
        receiving.announcing(source.index)
        self._announced_at[source.index] = time.monotonic()
        self._registrations[source.index] = self._announcer.num_fences
        self._announcer.ask(source.answers_at, self._announcement(source), self._key.number, source.index)
        return True

    def _announcement(self, source: SourceRank) -> Announce:
        return Announce(
            epoch=source.answers_at.epoch,
            key=self._key,
            registration=self._announcer.num_fences,
            transfer_id=self._request.transfer_id,
            num_tokens=self._request.num_tokens,
            prompt_digest=self._request.prompt_digest,
            blocks=source.part.announced,
            digest=source.part.digest,
            seconds=max(0.001, self._request.deadline - time.monotonic()),
            adapter=self._request.adapter,
            integrity=(Integrity.OFF if source.cells is None else source.cells.wanted).value,
            late_seconds=self._request.late_seconds,
            is_sliced=source.cells is not None and source.cells.is_sliced,
            token=self._announcer.introductions.token(source.answers_at),
        )

    def _read_inbox(self, receiving: DestinationLoad) -> bool:
        moved = False
        while not self.inbox.empty():
            moved = True
            event = self.inbox.get_nowait()
            if isinstance(event, Written):
                self._note_pushed(receiving, event)
            elif isinstance(event, WriteFailed):
                self._note_failed(receiving, event)
            else:
                self._note_answer(receiving, *event)
        return moved

    def _note_pushed(self, receiving: DestinationLoad, event: Written) -> None:
        """The part has landed; where this rank compares digests, the part counts once they agree.

        It never counts where the source has not compared the weights of the prompt's adapter.
        """
        index = event.source_index
        if not receiving.landed(index, event.digest):
            return
        self._pushed[index] = event
        self._done_at[index] = time.monotonic()
        if event.adapter != self._request.adapter:
            receiving.fail(_adapter_not_compared(self._request, self._sources[index]))
        elif index in self._digests:
            self._comparing[index] = self._digests[index].compare(event.digests)
        else:
            receiving.done(index, event.digest)

    def _note_failed(self, receiving: DestinationLoad, event: WriteFailed) -> None:
        """The source writes no more; where a write has failed in a connection, the connection may still deliver it."""
        may_land = event.may_land == "yes"
        if event.may_land == "unsaid":
            transport = self._transports.get(event.source_index, "")
            ends = self._announcer.transports.ends_with_process(transport)
            may_land = not ends and event.reason in OF_FAILED_WRITES
        if may_land:
            self._note_broken(receiving, event.source_index, event.error())
        else:
            receiving.refused(event.source_index, event.error())

    def _note_broken(self, receiving: DestinationLoad, index: int, error: KVFerryError) -> None:
        if self._is_behind_fence(index, is_broken=True):
            # What may land lands nowhere, and no other fence is needed.
            receiving.refused(index, error)
        else:
            receiving.broke(index, error, fence_at=self._announcer.next_fence_at)

    def _compare(self, receiving: DestinationLoad) -> bool:
        """Compare some of what has landed, for as long as other jobs may wait; return whether there was any."""
        if receiving.error is not None:
            return False
        for index, comparing in self._comparing.items():
            started, num_bytes = time.monotonic(), 0
            try:
                while num_bytes < PER_ADVANCE:
                    num_bytes += next(comparing)
            except StopIteration:
                receiving.done(index, self._pushed[index].digest)
                del self._comparing[index]
            except KVFerryError as error:
                receiving.fail(error)
            self._num_compared_bytes += num_bytes
            self._compare_seconds += time.monotonic() - started
            return True
        return False

    def _note_answer(
        self, receiving: DestinationLoad, index: int, question: Announce | Revoke, answer: Answer | None
    ) -> None:
        where = self._sources[index].answers_at
        if isinstance(question, Revoke):
            receiving.still_writing(index, time.monotonic())
        if isinstance(answer, Announced):
            self._transports[index] = answer.transport
        elif isinstance(answer, Revoked) and answer.is_quiet:
            receiving.quiet(index)
        elif isinstance(answer, Revoked) and answer.may_land:
            self._note_broken(receiving, index, _broken(where))
        elif answer is None or (isinstance(answer, Refusal) and answer.reason == Reason.PEER_UNREACHABLE):
            receiving.fail(unreachable(where))
        elif isinstance(answer, Refusal):
            # It must still acknowledge that it writes nothing; where another process answers, it cannot.
            receiving.fail(answer.error())
            if answer.reason == Reason.UNKNOWN_REQUEST:
                self._announcer.introductions.forget(where)

    def _end(self) -> None:
        self.phase = Phase.DONE
        self._announcer.forget(self._key.number)


def _check_announced(request: Announcement, part: Part) -> None:
    """Raise :class:`HandoffError` (unsupported) for more blocks than one announcement may have."""
    num_blocks = sum(len(blocks.block_ids) for blocks in part.announced)
    if num_blocks > MAX_ANNOUNCED_BLOCKS:
        raise HandoffError(
            Reason.UNSUPPORTED,
            f"{request.job_id} has {num_blocks} blocks to announce to one rank; an announcement has at most "
            f"{MAX_ANNOUNCED_BLOCKS}.",
            'Use larger blocks, or set "mode" to "pull".',
        )


def _adapter_not_compared(request: Announcement, source: SourceRank) -> HandoffError:
    where = source.answers_at
    return HandoffError(
        Reason.ADAPTER_MISMATCH,
        f"the prefill rank at {where.host}:{where.port} has written {request.job_id} without a look at the weights of "
        "its adapter.",
        "Update kvferry on the prefill engine: an earlier version compares the names of adapters alone.",
    )


def _died(source: SourceRank) -> HandoffError:
    where = source.answers_at
    return HandoffError(
        Reason.PEER_DIED,
        f"the process of the prefill rank at {where.host}:{where.port} has ended.",
        "Send the prompt again once a prefill engine runs; the prefill engine's log may say why it ended.",
    )


def _broken(where: EndPoint) -> HandoffError:
    return HandoffError(
        Reason.TRANSFER_FAILED,
        f"a write of the prefill rank at {where.host}:{where.port} has failed.",
        "Send the prompt again; the prefill engine's log says why it failed.",
    )


def _fenced(where: str) -> HandoffError:
    return HandoffError(
        Reason.FENCED,
        f"this rank has closed its memory and registered it anew, since bytes of the prefill rank at {where} might "
        "have landed there.",
        "Send the prompt again.",
    )


def _no_handshake(request: Announcement, seconds: float) -> HandoffError:
    return HandoffError(
        Reason.DEADLINE_EXCEEDED,
        f"no blocks could be announced for {request.job_id} within {seconds:.1f} s.",
        "Check the prefill engine; load_timeout_seconds sets the limit.",
    )


class Announcer:
    """All pushes to one rank. A source may take ``answer_seconds`` to answer.

    Reports come to ``answers_at``. A fence keeps a source out that does not confirm within ``fence_seconds`` that it
    has stopped; then ``on_fence`` gets the number of fences and the end points of the memory that was registered anew.
    With ``keeps_events`` the result of each push has events.

    The server's thread calls :meth:`answer`, the engine's thread :meth:`announce`; the other methods are for pushes, on
    the transfer thread.
    """

    def __init__(
        self,
        rank: OwnRank,
        answers_at: EndPoint,
        answer_seconds: float,
        *,
        keeps_events: bool = False,
        fence_seconds: float = FENCE_SECONDS,
        on_fence: Callable[[int, dict[str, bytes]], None] = lambda *_: None,
    ) -> None:
        self._rank, self._answers_at, self._answer_seconds = rank, answers_at, answer_seconds
        self.transports, self.fence_seconds = rank.transports, fence_seconds
        self._on_fence = on_fence
        self.keeps_events = keeps_events
        self.peers = Peers(rank.client.trust)
        self.introductions = Introductions(rank, answers_at, self._send)
        self._pushes: dict[int, AwaitedLoad] = {}
        self._unclosed: set[int] = set()
        self.next_fence_at = 0.0
        """Before it no fence keeps out what a source that lives has sent: each fence fails the loads of others."""
        self._pending: dict[tuple[str, int, Announce | Revoke], tuple[int, int]] = {}

    @property
    def epoch(self) -> int:
        """The epoch of this process."""
        return self._answers_at.epoch

    @property
    def num_fences(self) -> int:
        """How many fences there were."""
        return self.introductions.registration

    def announce(self, request: Announcement, find_sources: FindSources) -> None:
        """Submit a push to the executor, which returns its result."""
        self._rank.executor.submit(self.push(request, find_sources))

    def push(self, request: Announcement, find_sources: FindSources) -> AwaitedLoad:
        """Return a push, which a job of the transfer thread must carry on until it is done."""
        # Unguessable: whoever forged a source's report would have blocks given back that the source still writes.
        key = WriteKey(self._rank.name, self.epoch, secrets.randbits(NUMBER_BITS) or 1)
        push = self._pushes[key.number] = AwaitedLoad(request, key, find_sources, self)
        return push

    def answer(self, question: Question) -> Answer:
        """Take a source's report. Raises :class:`HandoffError` for another question, and for another rank or epoch."""
        if not isinstance(question, Written | WriteFailed | Met):
            raise HandoffError(
                Reason.UNSUPPORTED,
                f"a {type(question).__name__} is not for a rank that is pushed to.",
                "Ask the prefill engine's own port.",
            )
        named = question if isinstance(question, Met) else question.key
        if (named.receiver, named.receiver_epoch) != (self._rank.name, self.epoch):
            raise HandoffError(
                Reason.PEER_CHANGED,
                f"the message is for {named.receiver} in epoch {named.receiver_epoch}; this rank is {self._rank.name} "
                f"in epoch {self.epoch}.",
                "The decode engine was restarted: send the prompt again.",
            )
        if isinstance(question, Met):
            self.introductions.note_met(question)
            self._rank.executor.wake()
        elif push := self._pushes.get(question.key.number):
            push.inbox.put(question)
            self._rank.executor.wake()
        return Noted(self.epoch)

    # For pushes.

    def ask(self, where: EndPoint, question: Announce | Revoke, number: int, index: int) -> None:
        """Ask a source; :meth:`collect` puts its answer into the push's inbox."""
        self._pending[where.host, where.port, question] = number, index
        self._send(where, question)

    def _send(self, where: EndPoint, question: Introduce | Announce | Revoke) -> None:
        # The source's engine has named its rank.
        is_trusted = self._rank.client.knows_peers
        self._rank.client.send(where.host, where.port, question, self._answer_seconds, is_trusted=is_trusted)

    def is_kept_out(self, source: SourceRank, *, is_broken: bool) -> bool:
        """Return whether a fence keeps out what may land of a source, which ``is_broken`` if its write has failed.

        It does unless the process lives on this host, where it writes into host memory without any transport of this
        rank's, but after a failed write no more; a GPU's memory stays mapped into it.
        """
        device = self._rank.order.device
        is_in_connections = is_broken and device == HOST_DEVICE
        return (
            is_in_connections or self.peers.is_elsewhere(source.process, device) or self.peers.has_ended(source.process)
        )

    def is_closed(self, registration: int) -> bool:
        """Return whether a fence has closed this rank's memory for what was announced in a registration."""
        return registration < self.num_fences and registration not in self._unclosed

    def fence(self, where: str) -> None:
        """Close this rank's memory for all that was announced in this registration, and introduce the rank anew for
        what comes.

        Pushes in progress fail, and so do writes of this rank's own. It may take some seconds.
        """
        fence = self.transports.fence()
        self.next_fence_at = time.monotonic() + self.fence_seconds
        if fence.holes:
            self._unclosed.add(self.num_fences)
        self.introductions.renew(fence.end_points)
        self._on_fence(self.num_fences, fence.end_points)
        if fence.holes:
            logger.error(
                "kvferry: the fence has holes, and the quarantined blocks stay until this engine is restarted: %s.",
                "; ".join(fence.holes),
            )
            return
        logger.warning("kvferry: a fence: this rank's memory was closed and registered anew; pushes in progress fail.")
        for push in list(self._pushes.values()):
            push.fenced(_fenced(where))

    def collect(self) -> None:
        """Put the answers that have come into the inboxes of their pushes."""
        for exchange in self._rank.client.collect():
            if isinstance(exchange.question, Introduce):
                self.introductions.note_answer(exchange, exchange.question)
            elif isinstance(exchange.question, Announce | Revoke):
                number, index = self._pending.pop((exchange.host, exchange.port, exchange.question), (0, 0))
                if push := self._pushes.get(number):
                    push.inbox.put((index, exchange.question, exchange.answer))

    def forget(self, number: int) -> None:
        """Forget a push, which is over."""
        self._pushes.pop(number, None)
