"""Loads of one destination rank: it asks source ranks for their writes, and learns when the engine may have the blocks.

:class:`SourceEngines` find the ranks of a prefill engine by a handshake, :class:`Introductions` make this rank known to
them. An :class:`AwaitedLoad`, a job of the transfer thread, announces the blocks of one request and takes the reports
of its sources; :class:`kvferry.handoff.destination.DestinationLoad` decides each of its steps. The :class:`Announcer`
has all loads of the rank, and the fences that keep late bytes out.
"""

import hashlib
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from kvferry.errors import HandoffError, KVFerryError, Reason, open_port
from kvferry.execution.digests import PER_ADVANCE, Integrity, PartCells, PartDigests, check_computes
from kvferry.execution.executor import JobResult, Phase, clock
from kvferry.execution.peers import OwnRank, Peers
from kvferry.handoff.destination import LATE_REPORT_SECONDS, DestinationLoad, Step
from kvferry.handoff.handshake import decode_shards, fetch_directory, tell_refusal
from kvferry.handoff.messages import (
    FIRST_WEIGHTS,
    MAX_ANNOUNCED_BLOCKS,
    MAX_QUESTION_BYTES,
    Announce,
    Announced,
    Answer,
    Bounded,
    Directory,
    EndPoint,
    Identity,
    Introduce,
    Noted,
    Question,
    Refusal,
    Revoke,
    Revoked,
    WriteFailed,
    WriteKey,
    Written,
    encode,
)
from kvferry.handoff.remote_holds import RemoteHold
from kvferry.handoff.source import Part, announced_blocks
from kvferry.handoff.wire.client import BackgroundCall, BackgroundCalls, Exchange, unexpected_error
from kvferry.handoff.wire.trust import THIS_MACHINE, Trust, is_loopback
from kvferry.layout.shard import HOST_DEVICE, Shard
from kvferry.peer_log import PeerLog
from kvferry.plan.match import GroupBlocks, of_rank, refuse_incomplete, selector_of
from kvferry.plan.planner import PairPlan, Planner
from kvferry.transport.protocol import ProcessIdentity, is_on_this_host

logger = PeerLog(logging.getLogger(__name__))

MAX_ENGINES = 1024
MAX_DIRECTORY_BYTES = 256 << 20
"""Of the directories of all engines that a rank remembers, and again of those that it does not yet know to be of use:
each may have as many as an answer."""
TOKEN_BYTES, SECRET_BYTES = 7, 32
MAX_SOURCES = 4096
"""Source ranks to which this rank remembers its introduction."""
NUMBER_BITS = 62
"""Of the random number of a load, which only its source ranks learn."""


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
    """One request, the same for all of its sources. ``deadline`` is on the monotonic clock.

    ``engine_epoch`` is that in which this rank's engine knows the source's engine.
    """

    job_id: str
    transfer_id: str
    num_tokens: int
    prompt_digest: str
    deadline: float
    engine_epoch: int
    adapter: str = ""
    late_seconds: float = 0.0
    """How long the sources may not know a hold of their engine yet."""


# Returns the sources of a request, or None while their handshake runs.
FindSources = Callable[[], Sequence[SourceRank] | None]
Event = Written | WriteFailed | tuple[int, Announce | Revoke, Answer | None]
"""A report of a source; or the index of a source, a question to it, and its answer, None where it came too late."""


class Compares(NamedTuple):
    """How much a rank compares of what it loads. Where ``is_required`` is false, nothing is compared with an engine
    that computes no digests, such as one whose cache is not comparable.
    """

    wanted: Integrity
    is_required: bool = True


NOTHING_COMPARED = Compares(Integrity.OFF)


class SourceEngine:
    """A prefill engine in one epoch, as one decode rank knows it: its directory, and the plans from its ranks.

    ``compares`` says how much of what they write is compared. Raises :class:`PlanError` (unsupported) where this rank
    could not compare it, and as :meth:`Planner.proved_plans`.
    """

    def __init__(self, directory: Directory, shard: Shard, compares: Compares) -> None:
        self._sources = decode_shards(directory)
        self._planner = Planner(self._sources, shard)
        self._directory, self._shard, self._compares = directory, shard, compares
        self._shards = tuple(entry.shard for entry in directory.ranks)
        self.num_bytes = _num_bytes(directory)
        self._cells: dict[PairPlan, PartCells | None] = {}
        for plan in self._planner.proved_plans(0):
            self._cells_of(plan)

    def sources(self, transfer_id: str, blocks: Sequence[GroupBlocks]) -> list[SourceRank]:
        """Return the source ranks that write a request to this rank, each with its part.

        ``blocks`` are those of every cache group of the model; other ranks load the groups that this rank's pipeline
        stage does not have. Source blocks are not used. Raises as the constructor.
        """
        blocks = of_rank(blocks, self._shard)
        refuse_incomplete(blocks, self._shard)
        ranks = []
        for plan in self.plans(transfer_id):
            index = plan.assignment.source_index
            entry = self._directory.ranks[index]
            part, cells = Part(plan, announced_blocks(plan, blocks)), self._cells_of(plan)
            ranks.append(
                SourceRank(index, entry.answers_at, part, self._shards, self._directory.version, entry.process, cells)
            )
        return ranks

    def plans(self, transfer_id: str) -> tuple[PairPlan, ...]:
        """Return the proved plans of the ranks that write a request. Raises as the constructor."""
        return self._planner.proved_plans(selector_of(transfer_id))

    def check_parameters(self, engine_id: str, block_sizes: Sequence[int]) -> None:
        """Refuse what the parameters of a request say, where the engine says otherwise: its id, and its block sizes by
        cache group. Raises :class:`HandoffError` (wrong-parameters).
        """
        if engine_id != self._directory.engine_id:
            raise HandoffError(
                Reason.WRONG_PARAMETERS,
                f"the request's parameters name engine {engine_id!r} at the address of {self._directory.engine_id!r}.",
                "Check that the router copies the prefill engine's kv_transfer_params whole.",
            )
        said = {str(index): size for index, size in enumerate(block_sizes)}
        for shard in self._sources:
            for group in shard.groups:
                if group.block_size != said.get(group.name):
                    raise HandoffError(
                        Reason.WRONG_PARAMETERS,
                        f"the request's parameters say block sizes {list(block_sizes)} of engine "
                        f"{self._directory.engine_id!r}, whose cache group {group.name} has blocks of "
                        f"{group.block_size} tokens.",
                        "Check that the router copies the prefill engine's kv_transfer_params whole.",
                    )

    def _cells_of(self, plan: PairPlan) -> PartCells | None:
        """Return the cells of a write that are compared; None where none are."""
        if plan not in self._cells:
            self._cells[plan] = self._compared(plan)
        return self._cells[plan]

    def _compared(self, plan: PairPlan) -> PartCells | None:
        computed = Integrity(self._directory.ranks[plan.assignment.source_index].digests)
        wanted, is_required = self._compares
        if wanted is Integrity.OFF:
            return None
        if computed is Integrity.OFF and not is_required:
            engine_id = self._directory.engine_id
            told = "kvferry: what engine %s writes is not compared: the engine computes no digests."
            logger.warning(told, engine_id, peer=engine_id)
            return None
        check_computes(computed, wanted)
        return PartCells(plan, wanted, at_source=False)


def _num_bytes(directory: Directory) -> int:
    """Return the bytes of a directory's shards and end points."""
    return sum(len(part) for entry in directory.ranks for part in (entry.shard, *entry.end_points.values()))


class SourceEngines:
    """The source engines of one decode rank. Handshakes run on other threads.

    ``compares`` says how much of what is written is compared.
    """

    def __init__(
        self,
        shard: Shard,
        identity: Identity,
        sender: str,
        timeout_seconds: float,
        trust: Trust = THIS_MACHINE,
        compares: Compares = NOTHING_COMPARED,
    ) -> None:
        self._trust = trust
        self._compares = compares
        self._weights_version = FIRST_WEIGHTS
        self._shard = shard
        self._identity = identity
        self._sender = sender
        self._timeout_seconds = timeout_seconds
        self._engines: dict[tuple[str, int, int], SourceEngine] = {}
        self._has_ended = threading.Event()
        # By this rank's weights too: a handshake that runs during a reset compares with those of before.
        self._handshakes: BackgroundCalls[tuple[str, int, int, str], Directory]
        self._handshakes = BackgroundCalls("handshake", self._has_ended.set)
        self._refusals: BackgroundCalls[tuple[str, int, int], None] = BackgroundCalls("refusal")
        self._suspects: queue.SimpleQueue[tuple[str, int, int]] = queue.SimpleQueue()

    def get(self, hold: RemoteHold) -> SourceEngine | None:
        """Return the engine, or None while its handshake runs.

        Raises the error of the handshake or of the plan in every request that waits for it, and for
        :data:`kvferry.handoff.wire.client.FAILURE_SECONDS`; a later request tries again.
        """
        self._drop_suspects()
        self._drop_surplus()
        key = hold.engine
        if key in self._engines:
            self._engines[key] = self._engines.pop(key)  # to the end: used last
            return self._engines[key]
        weights_version = self._weights_version
        handshake = self._handshakes.get((*key, weights_version), lambda: self._fetch(hold, weights_version))
        if handshake is None:
            return None
        engine = self._build(handshake, hold)
        self._handshakes.forget((*key, weights_version))
        self._make_room(hold, engine.num_bytes)
        self._engines[key] = engine
        if weights_version != self._weights_version:
            # The reset, on another thread, may not have seen the engine.
            self._engines.pop(key, None)
            return None
        return engine

    def suspect(self, hold: RemoteHold) -> None:
        """A transfer from this engine failed: the next request handshakes anew. Any thread may call it."""
        self._suspects.put(hold.engine)

    def forget_all(self, weights_version: str) -> None:
        """Compare every engine anew, since the weights of this rank are of this version now. Any thread may call it."""
        self._weights_version = weights_version
        for key in list(self._engines):
            self._suspects.put(key)

    def _drop_suspects(self) -> None:
        while not self._suspects.empty():
            self._engines.pop(self._suspects.get_nowait(), None)

    def _drop_surplus(self) -> None:
        """Fail the largest of the directories beyond :data:`MAX_DIRECTORY_BYTES` for which no request has come yet,
        once a handshake has ended.
        """
        if not self._has_ended.is_set():
            return
        self._has_ended.clear()
        sizes = {handshake: _num_bytes(handshake.result()) for handshake in self._handshakes.with_results()}
        num_bytes = sum(sizes.values())
        for handshake in sorted(sizes, key=sizes.__getitem__, reverse=True)[:-1]:
            if num_bytes <= MAX_DIRECTORY_BYTES:
                return
            num_bytes -= sizes[handshake]
            no_room = HandoffError(
                Reason.INVALID_REQUEST,
                f"the directory, of {sizes[handshake]} bytes, was the largest of more than {MAX_DIRECTORY_BYTES} bytes "
                "of engines for which no request has come.",
                "Check the hosts that this engine is told to ask: no engine needs so many.",
            )
            handshake.fail(no_room)

    def _build(self, handshake: BackgroundCall[Directory], hold: RemoteHold) -> SourceEngine:
        """Return the engine. Its handshake keeps the error of an engine that cannot be."""
        try:
            return SourceEngine(handshake.result(), self._shard, self._compares)
        except KVFerryError as error:
            self._tell_refusal(handshake, hold, error)
            handshake.fail(error)
            raise
        except Exception as error:
            # Kept as well: else every request would make the same plan again, and fail.
            logger.exception("kvferry: a plan failed unexpectedly")
            refused = unexpected_error("plan", error)
            handshake.fail(refused)
            raise refused from error

    def _tell_refusal(self, handshake: BackgroundCall[Directory], hold: RemoteHold, error: KVFerryError) -> None:
        """Tell the engine why it cannot be loaded from, on another thread."""
        try:
            directory = handshake.result()
        except KVFerryError:  # the handshake itself failed, or the engine was told before
            return
        kept = error.without_traceback()
        told = hold.host, hold.port, self._sender, directory.version, directory.epoch, kept, self._trust
        self._refusals.get(hold.engine, lambda: tell_refusal(*told, is_trusted=hold.is_trusted))

    def _fetch(self, hold: RemoteHold, weights_version: str) -> Directory:
        return fetch_directory(
            hold.host,
            hold.port,
            self._sender,
            hold.epoch,
            self._identity,
            self._timeout_seconds,
            weights_version,
            self._trust,
            is_trusted=hold.is_trusted,
        )

    def _make_room(self, hold: RemoteHold, num_bytes: int) -> None:
        """Forget earlier epochs of an engine that comes with so many bytes, and beyond :data:`MAX_ENGINES` and
        :data:`MAX_DIRECTORY_BYTES` the engines that were used longest ago.
        """
        for key in [key for key in self._engines if key[:2] == hold.engine[:2]]:
            self._engines.pop(key, None)
        num_bytes += sum(each.num_bytes for each in self._engines.values())
        while self._engines and (len(self._engines) >= MAX_ENGINES or num_bytes > MAX_DIRECTORY_BYTES):
            key, oldest = next(iter(self._engines.items()))
            num_bytes -= oldest.num_bytes
            self._engines.pop(key, None)


def refuse_loopback(answers_at: EndPoint, where: EndPoint, *, is_on_one_host: bool) -> None:
    """Refuse a prefill rank, at ``where``, that could not report to a decode rank. Raises :class:`HandoffError`
    (peer-unreachable).
    """
    if is_loopback(answers_at.host) and not is_on_one_host:
        raise HandoffError(
            Reason.PEER_UNREACHABLE,
            f"this rank answers at {answers_at.host}, where no other host reaches it, and the prefill rank at "
            f"{where.host}:{where.port} is on another host.",
            'Set "host" (and "advertised_host") of this engine to an address that the prefill engine reaches.',
        )


class Introductions:
    """The introductions of one rank, which takes reports at ``answers_at``; ``send`` sends one to a source rank."""

    def __init__(self, rank: OwnRank, answers_at: EndPoint, send: Callable[[EndPoint, Introduce], None]) -> None:
        self.registration = 0
        """How often the rank's memory was registered anew."""
        self._rank, self._answers_at, self._send = rank, answers_at, send
        self._end_points = rank.end_points
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._answers: Bounded[EndPoint, Answer | None] = Bounded(MAX_SOURCES)

    def is_introduced(
        self, where: EndPoint, sources: tuple[bytes, ...], version: int, process: ProcessIdentity | None = None
    ) -> bool:
        """Return whether a source rank knows this rank; introduce this rank if not. Raises its :class:`HandoffError`.

        ``sources`` are the encoded shards of all ranks of its engine, which speaks ``version``. A ``process`` of
        another host could not report to a rank at loopback: :class:`HandoffError` (peer-unreachable).
        """
        if process is not None:
            refuse_loopback(self._answers_at, where, is_on_one_host=is_on_this_host(process))
        if where not in self._answers:
            introduction = self._introduction(where, sources, version)
            self._answers[where] = None
            self._send(where, introduction)
        answer = self._answers[where]
        if isinstance(answer, Refusal):
            del self._answers[where]
            raise answer.error()
        return isinstance(answer, Noted)

    def token(self, where: EndPoint) -> int:
        """Return the number by which a source rank, and no other one, knows this rank's introduction."""
        of_source = hashlib.blake2b(msgspec.msgpack.encode(where), digest_size=TOKEN_BYTES, key=self._secret)
        return int.from_bytes(of_source.digest()) or 1

    def forget(self, where: EndPoint) -> None:
        """The source has forgotten this rank: introduce this rank anew."""
        self._answers.pop(where, None)

    def renew(self, end_points: dict[str, bytes]) -> None:
        """The rank's memory was registered anew: introduce this rank to everybody again."""
        self.registration += 1
        self._end_points = end_points
        self._answers.clear()

    def note_answer(self, exchange: Exchange, question: Introduce) -> None:
        """Take a source's answer to an introduction, None where it came too late."""
        where = EndPoint(exchange.host, exchange.port, question.epoch)
        answer = exchange.answer
        if not isinstance(answer, Noted | Refusal):
            answer = Refusal.of(unreachable(where))
        if where in self._answers and question.registration == self.registration:
            self._answers[where] = answer

    def _introduction(self, where: EndPoint, sources: tuple[bytes, ...], version: int) -> Introduce:
        introduction = Introduce(
            version=version,
            epoch=where.epoch,
            receiver=self._rank.name,
            identity=self._rank.identity,
            sources=sources,
            shard=self._rank.shard,
            end_points=self._end_points,
            answers_at=self._answers_at,
            registration=self.registration,
            token=self.token(where),
        )
        if (num_bytes := len(encode(introduction))) > MAX_QUESTION_BYTES:
            raise HandoffError(
                Reason.UNSUPPORTED,
                f"the introduction, with the shards of {len(sources)} source ranks, takes {num_bytes} bytes; "
                f"a question has at most {MAX_QUESTION_BYTES}.",
                "Run the prefill engine with fewer ranks.",
            )
        return introduction


class AwaitedLoad:
    """One load at its destination; done once the engine may have the blocks."""

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
        self._load: DestinationLoad | None = None
        self._created_at = time.monotonic()
        self._written: dict[int, Written] = {}
        self._transports: dict[int, str] = {}
        self._announcements: dict[int, Announce] = {}
        self._announced_at: dict[int, float] = {}
        self._answered_at: dict[int, float] = {}
        self._registrations: dict[int, int] = {}
        self._done_at: dict[int, float] = {}
        self._digests: dict[int, PartDigests] = {}
        self._comparing: dict[int, Iterator[int]] = {}
        self._num_compared_bytes = 0
        self._compare_seconds = 0.0

    def advance(self, now: float) -> bool:
        """Take reports and answers of sources, then carry out the steps that are due."""
        self._announcer.collect()
        load = self._load
        if load is None:
            return self._prepare(now)
        moved = self._read_inbox(load) or self._compare(load)
        for step, index in load.due(now):
            source = self._sources[index]
            match step:
                case Step.ANNOUNCE:
                    # The announcement to the source before this one may have been refused.
                    moved |= load.error is None and self._announce(load, source)
                case Step.ASK_AGAIN:
                    self._announcer.ask(source.answers_at, self._announcements[index], self._key.number, index)
                case Step.REVOKE:
                    question = Revoke(source.answers_at.epoch, self._key)
                    self._announcer.ask(source.answers_at, question, self._key.number, index)
                case Step.CHECK_ALIVE:
                    self._check_alive(load, source)
                case Step.FENCE:
                    self._fence(load, source)
        if load.error is not None and self.error is None:
            self.error, self.given_up_at, self.phase = load.error, now, Phase.STOPPING
        if load.is_over:
            self._end()
            return True
        return moved

    def is_ending(self, now: float) -> bool:
        """Return whether the load is past its deadline or being stopped."""
        return self.phase is Phase.STOPPING or now >= self._request.deadline

    def cancel(self, error: KVFerryError) -> None:
        if self._load is not None:
            self._load.fail(error)
        elif self.phase is not Phase.DONE:
            self.error = error.without_traceback()
            self._end()

    def result(self, finished_at: float) -> JobResult:
        """Return how the load ended, with bytes and seconds of its sources' reports. Its wait includes the prefill."""
        committed = list(self._written.values()) if self.error is None else []
        phases = self._phases(finished_at) if self.error is None else None
        return JobResult(
            job_id=self.job_id,
            error=self.error,
            num_bytes=sum(event.num_bytes for event in committed),
            num_descriptors=sum(event.num_descriptors for event in committed),
            num_sources=len(self._sources),
            transport=",".join(sorted({event.transport for event in committed})),
            wait_seconds=finished_at - self._created_at,
            transfer_seconds=max((event.seconds.move for event in committed), default=0.0),
            num_compared_bytes=self._num_compared_bytes,
            compare_seconds=self._compare_seconds,
            finished_at=finished_at,
            phases=phases,
            events=self._events(finished_at, phases) if self._announcer.keeps_events else None,
        )

    def fenced(self, error: KVFerryError) -> None:
        """Nothing lands any more of what was announced before to sources that a fence keeps out."""
        if self._load is None:
            return
        for index in self._registrations:
            if self._is_behind_fence(index, is_broken=self._load.is_broken(index)):
                self._load.fenced(index, error)

    def is_announced_in(self, registration: int) -> bool:
        """Return whether the load goes on, and a source knows of blocks in this registration of the rank's memory."""
        goes_on = self._load is not None and self._load.error is None and self.phase is not Phase.DONE
        return goes_on and registration in self._registrations.values()

    def _is_behind_fence(self, index: int, *, is_broken: bool) -> bool:
        """Return whether a fence has closed what a source was told of, and keeps out what may land of it."""
        registration = self._registrations.get(index)
        is_closed = registration is not None and self._announcer.is_closed(registration)
        return is_closed and self._announcer.is_kept_out(self._sources[index], is_broken=is_broken)

    def _check_alive(self, load: DestinationLoad, source: SourceRank) -> None:
        if self._announcer.peers.has_ended(source.process):
            transport = self._transports.get(source.index, "")
            may_land = not self._announcer.transports.ends_with_process(transport)
            load.ended(source.index, _died(source), may_land=may_land)
        elif self._announcer.peers.refuses(source.answers_at):
            load.fail(unreachable(source.answers_at))

    def _fence(self, load: DestinationLoad, source: SourceRank) -> None:
        where = f"{source.answers_at.host}:{source.answers_at.port}"
        if source.index not in load.may_land:
            # The fence for another source of this load has done.
            return
        is_broken = load.is_broken(source.index)
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

    def _events(self, finished_at: float, phases: dict[str, float] | None) -> dict[str, Any]:
        """Return when each source, by index, got its announcement and reported "done", the time of the commit, and the
        seconds of each phase.
        """
        return {
            "clock": clock(),
            "write": self._key.name,
            "transfer_id": self._request.transfer_id,
            "ordered_at": self._created_at,
            "announced_at": {str(index): announced_at for index, announced_at in self._announced_at.items()},
            "done_at": {str(index): done_at for index, done_at in self._done_at.items()},
            "committed_at": finished_at if self.error is None else None,
            "phases": phases,
        }

    def _phases(self, committed_at: float) -> dict[str, float]:
        """Return the seconds of each phase, of the source that was done last; together they are those of the load.

        The source's own clock says how long its phases took; ``announce`` is what is left of the time between
        announcement and "done": the way there and back.
        """
        if not self._done_at:
            return {"find": committed_at - self._created_at}
        last = max(self._done_at, key=self._done_at.__getitem__)
        announced_at, done_at, source = self._announced_at[last], self._done_at[last], self._written[last].seconds
        return {
            "find": announced_at - self._created_at,
            "announce": done_at - announced_at - (source.post + source.move + source.confirm),
            "post": source.post,
            "move": source.move,
            "confirm": source.confirm + committed_at - done_at,
        }

    def _prepare(self, now: float) -> bool:
        if self.phase is Phase.DONE:
            return True
        try:
            if now >= self._request.deadline:
                raise HandoffError(
                    Reason.DEADLINE_EXCEEDED,
                    f"no blocks could be announced for {self.job_id} within {now - self._created_at:.1f} s.",
                    "Check the prefill engine; load_timeout_seconds sets the limit.",
                )
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
        self._load = DestinationLoad(
            self.job_id,
            self._request.transfer_id,
            expected,
            {source.index: source.answers_at for source in sources},
            self._request.deadline,
            self._announcer.fence_seconds,
        )
        return True

    def _announce(self, load: DestinationLoad, source: SourceRank) -> bool:
        """Announce the blocks to a source that knows this rank; return whether the source is dealt with."""
        try:
            num_blocks = sum(len(blocks.block_ids) for blocks in source.part.announced)
            if num_blocks > MAX_ANNOUNCED_BLOCKS:
                raise HandoffError(
                    Reason.UNSUPPORTED,
                    f"{self.job_id} has {num_blocks} blocks to announce to one rank; an announcement has at most "
                    f"{MAX_ANNOUNCED_BLOCKS}.",
                    "Use larger blocks.",
                )
            if not self._announcer.peers.meet(source.process):
                raise _died(source)
            introductions = self._announcer.introductions
            if not introductions.is_introduced(source.answers_at, source.engine, source.version, source.process):
                return False
        except KVFerryError as error:
            load.refused(source.index, error)
            return True
        load.announcing(source.index)
        self._announced_at[source.index] = time.monotonic()
        self._registrations[source.index] = self._announcer.num_fences
        announcement = self._announcements[source.index] = self._announcement(source)
        self._announcer.ask(source.answers_at, announcement, self._key.number, source.index)
        return True

    def _announcement(self, source: SourceRank) -> Announce:
        return Announce(
            epoch=source.answers_at.epoch,
            engine_epoch=self._request.engine_epoch,
            key=self._key,
            registration=self._announcer.num_fences,
            token=self._announcer.introductions.token(source.answers_at),
            transfer_id=self._request.transfer_id,
            num_tokens=self._request.num_tokens,
            prompt_digest=self._request.prompt_digest,
            blocks=source.part.announced,
            digest=source.part.digest,
            seconds=max(0.001, self._request.deadline - time.monotonic()),
            integrity=(Integrity.OFF if source.cells is None else source.cells.wanted).value,
            adapter=self._request.adapter,
            late_seconds=self._request.late_seconds,
        )

    def _read_inbox(self, load: DestinationLoad) -> bool:
        moved = False
        while not self.inbox.empty():
            moved = True
            event = self.inbox.get_nowait()
            if isinstance(event, Written | WriteFailed):
                self._note_report(load, event)
            else:
                self._note_answer(load, *event)
        return moved

    def _note_report(self, load: DestinationLoad, report: Written | WriteFailed) -> None:
        if isinstance(report, Written):
            self._note_written(load, report)
        elif report.may_land:
            self._note_broken(load, report.source_index, report.error())
        else:
            load.refused(report.source_index, report.error())

    def _note_written(self, load: DestinationLoad, event: Written) -> None:
        """The part has landed; where this rank compares digests, the part counts once they agree."""
        index = event.source_index
        if not load.landed(index, event.digest):
            return
        self._written[index] = event
        self._done_at[index] = time.monotonic()
        if index in self._digests:
            self._comparing[index] = self._digests[index].compare(event.digests)
        else:
            load.done(index, event.digest)

    def _note_broken(self, load: DestinationLoad, index: int, error: KVFerryError) -> None:
        if self._is_behind_fence(index, is_broken=True):
            # What may land lands nowhere, and no other fence is needed.
            load.refused(index, error)
        else:
            load.broke(index, error, fence_at=self._announcer.next_fence_at)

    def _compare(self, load: DestinationLoad) -> bool:
        """Compare some of what has landed, for as long as other jobs may wait; return whether there was any."""
        if load.error is not None:
            return False
        for index, comparing in self._comparing.items():
            started, num_bytes = time.monotonic(), 0
            try:
                while num_bytes < PER_ADVANCE:
                    num_bytes += next(comparing)
            except StopIteration:
                load.done(index, self._written[index].digest)
                del self._comparing[index]
            except KVFerryError as error:
                load.fail(error)
            self._num_compared_bytes += num_bytes
            self._compare_seconds += time.monotonic() - started
            return True
        return False

    def _note_answer(
        self, load: DestinationLoad, index: int, question: Announce | Revoke, answer: Answer | None
    ) -> None:
        where = self._sources[index].answers_at
        if isinstance(question, Revoke):
            load.still_writing(index, time.monotonic())
        if isinstance(answer, Announced):
            self._note_announced(load, index, answer)
        elif isinstance(answer, Revoked) and answer.is_quiet:
            load.quiet(index)
        elif isinstance(answer, Revoked) and answer.may_land:
            broken = HandoffError(
                Reason.TRANSFER_FAILED,
                f"a write of the prefill rank at {where.host}:{where.port} has failed.",
                "Send the prompt again; the prefill engine's log says why it failed.",
            )
            self._note_broken(load, index, broken)
        elif answer is None and isinstance(question, Announce) and index in self._transports:
            # The source has taken the announcement: an answer to the question whether it is done came too late.
            load.answered(index, time.monotonic())
        elif answer is None or (isinstance(answer, Refusal) and answer.reason == Reason.PEER_UNREACHABLE):
            load.fail(unreachable(where))
        elif isinstance(answer, Refusal):
            # It must still acknowledge that it writes nothing; where another process answers, it cannot.
            load.fail(answer.error())
            if answer.reason == Reason.UNKNOWN_REQUEST:
                self._announcer.introductions.forget(where)

    def _note_announced(self, load: DestinationLoad, index: int, answer: Announced) -> None:
        # The first answer alone names the transport.
        self._transports.setdefault(index, answer.transport)
        self._answered_at.setdefault(index, time.monotonic())
        if answer.over is not None and (answer.over.key, answer.over.source_index) == (self._key, index):
            if isinstance(answer.over, Written) and index not in self._written:
                self._tell_if_late(index, answer.over)
            self._note_report(load, answer.over)
        else:
            load.answered(index, time.monotonic())

    def _tell_if_late(self, index: int, report: Written) -> None:
        """Log that a report was asked for which its source had sent in vain."""
        seconds = time.monotonic() - self._answered_at[index]
        seconds -= report.seconds.post + report.seconds.move + report.seconds.confirm
        if seconds >= LATE_REPORT_SECONDS:
            where = "{0.host}:{0.port}".format(self._sources[index].answers_at)
            told = "kvferry: the report of the prefill rank at %s has not come, and %s has waited for it for %.1f s. %s"
            logger.warning(told, where, self.job_id, seconds, self._announcer.remedy, peer=where)

    def _end(self) -> None:
        self.phase = Phase.DONE
        self._announcer.forget(self._key.number)


class Announcer:
    """All loads of one rank. A source may take ``answer_seconds`` to answer.

    Reports come to ``answers_at``. A fence keeps a source out that does not confirm within ``fence_seconds`` that it
    has stopped. With ``keeps_events`` the result of each load has events.

    The server's thread calls :meth:`answer`, the engine's thread :meth:`announce`; the other methods are for loads, on
    the transfer thread.
    """

    def __init__(
        self,
        rank: OwnRank,
        answers_at: EndPoint,
        answer_seconds: float,
        fence_seconds: float,
        *,
        keeps_events: bool = False,
    ) -> None:
        self._rank, self._answers_at, self._answer_seconds = rank, answers_at, answer_seconds
        self.transports, self.fence_seconds = rank.transports, fence_seconds
        self.keeps_events = keeps_events
        self.peers = Peers(rank.client.trust)
        self.introductions = Introductions(rank, answers_at, self._send)
        self._loads: dict[int, AwaitedLoad] = {}
        self._unclosed: set[int] = set()
        self.next_fence_at = 0.0
        """Before it no fence keeps out what a source that lives has sent: memory is registered anew each time."""
        self._closing: int | None = None
        """The registration that a fence closes once the loads that were announced in it are over."""
        self._fenced_from = self._fence_next = ""
        self._pending: dict[tuple[str, int, Announce | Revoke], tuple[int, int]] = {}

    @property
    def epoch(self) -> int:
        return self._answers_at.epoch

    @property
    def remedy(self) -> str:
        """What to open where reports do not come."""
        return open_port(self._answers_at.port, self._answers_at.host)

    @property
    def num_fences(self) -> int:
        """How many fences there were."""
        return self.introductions.registration

    def announce(self, request: Announcement, find_sources: FindSources) -> None:
        """Submit a load to the executor, which returns its result."""
        self._rank.executor.submit(self.load(request, find_sources))

    def load(self, request: Announcement, find_sources: FindSources) -> AwaitedLoad:
        """Return a load, a job of the transfer thread."""
        # Unguessable: whoever forged a source's report would have blocks given back that the source still writes.
        key = WriteKey(self._rank.name, self.epoch, secrets.randbits(NUMBER_BITS) or 1)
        load = self._loads[key.number] = AwaitedLoad(request, key, find_sources, self)
        return load

    def answer(self, question: Question) -> Answer:
        """Take a source's report. Raises :class:`HandoffError` for another question, and for another rank or epoch."""
        if not isinstance(question, Written | WriteFailed):
            raise HandoffError(
                Reason.UNSUPPORTED,
                f"a {type(question).__name__} is not for a rank that loads.",
                "Ask the prefill engine's own port.",
            )
        named = question.key
        if (named.receiver, named.receiver_epoch) != (self._rank.name, self.epoch):
            raise HandoffError(
                Reason.PEER_CHANGED,
                f"the message is for {named.receiver} in epoch {named.receiver_epoch}; this rank is {self._rank.name} "
                f"in epoch {self.epoch}.",
                "The decode engine was restarted: send the prompt again.",
            )
        if load := self._loads.get(named.number):
            load.inbox.put(question)
            self._rank.executor.wake()
        return Noted(self.epoch)

    # For loads.

    def ask(self, where: EndPoint, question: Announce | Revoke, number: int, index: int) -> None:
        """Ask a source; :meth:`collect` puts its answer into the load's inbox."""
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
        return registration < self.num_fences and registration not in self._unclosed and registration != self._closing

    def fence(self, where: str) -> None:
        """Register this rank's memory anew, for all that is announced from now on, and close the former registration
        once the loads that were announced in it are over: each has a deadline. It may take some seconds.

        The loads of other sources go on meanwhile; writes of this rank's own fail when the registration closes.
        """
        if self._closing is not None:
            self._fence_next = where
            return
        self._closing, self._fenced_from = self.num_fences, where
        self.introductions.renew(self.transports.renew())
        self.next_fence_at = time.monotonic() + self.fence_seconds
        num_loads = sum(load.is_announced_in(self._closing) for load in list(self._loads.values()))
        told = "kvferry: a fence: this rank's memory is registered anew, and closed to %s once %d other loads are over."
        logger.warning(told, where, num_loads)
        self._close_former()

    def _close_former(self) -> None:
        """Close the former registration, unless loads that were announced in it go on; then the blocks behind it are
        free.
        """
        # A copy: the engine's thread adds loads meanwhile.
        if self._closing is None or any(load.is_announced_in(self._closing) for load in list(self._loads.values())):
            return
        closed, self._closing = self._closing, None
        if holes := self.transports.close_former():
            self._unclosed.add(closed)
            logger.error(
                "kvferry: the fence has holes, and the quarantined blocks stay until this engine is restarted: %s.",
                "; ".join(holes),
            )
        else:
            for load in list(self._loads.values()):
                load.fenced(_fenced(self._fenced_from))
        where, self._fence_next = self._fence_next, ""
        if where:
            self.fence(where)

    def collect(self) -> None:
        """Put the answers that have come into the inboxes of their loads."""
        self._close_former()
        for exchange in self._rank.client.collect():
            if isinstance(exchange.question, Introduce):
                self.introductions.note_answer(exchange, exchange.question)
            elif isinstance(exchange.question, Announce | Revoke):
                number, index = self._pending.pop((exchange.host, exchange.port, exchange.question), (0, 0))
                if load := self._loads.get(number):
                    load.inbox.put((index, exchange.question, exchange.answer))

    def forget(self, number: int) -> None:
        """Forget a load, which is over."""
        self._loads.pop(number, None)
        self._close_former()


def unreachable(where: EndPoint) -> HandoffError:
    """Return the error of a source rank that does not answer."""
    return HandoffError(
        Reason.PEER_UNREACHABLE,
        f"the prefill rank at {where.host}:{where.port} does not answer.",
        f"Check that the prefill engine runs. {open_port(where.port, where.host)}",
    )


def _died(source: SourceRank) -> HandoffError:
    where = source.answers_at
    return HandoffError(
        Reason.PEER_DIED,
        f"the process of the prefill rank at {where.host}:{where.port} has ended.",
        "Send the prompt again once a prefill engine runs; the prefill engine's log may say why it ended.",
    )


def _fenced(where: str) -> HandoffError:
    return HandoffError(
        Reason.FENCED,
        f"this rank has closed its memory and registered it anew, since bytes of the prefill rank at {where} might "
        "have landed there.",
        "Send the prompt again.",
    )
