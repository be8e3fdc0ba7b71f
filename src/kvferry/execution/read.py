"""Drives pulls: carries out the actions of :class:`kvferry.handoff.pull_read.PullRead` and reports landings to it."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvferry.errors import KVFerryError, PlanError, Reason, TransportError
from kvferry.execution.device import OVER, Mark
from kvferry.execution.digests import Comparison
from kvferry.execution.guard_words import Scratch
from kvferry.execution.job import JobResult, Phase
from kvferry.execution.stage import Stage
from kvferry.handoff.pull_read import Action, PullRead, State
from kvferry.plan.staging.scatter import NOTHING, Merge, Numbered, StagedBlocks, cut_rounds, join_merges, stage_offsets
from kvferry.transport.protocol import Direction, Status, Transfer
from kvferry.transport.registry import Link

COMPARED_PER_ADVANCE = 16 << 20
"""A job compares about so many bytes at a time: then another job may go first."""
_PHASES = {
    State.PREPARING: Phase.PREPARING,
    State.BETWEEN_ROUNDS: Phase.BETWEEN_ROUNDS,
    State.STOPPING: Phase.STOPPING,
    State.COMMITTED: Phase.DONE,
    State.FAILED: Phase.DONE,
}


class Guard(NamedTuple):
    """Where a source keeps the guard word of a hold, and the word that says that the source still holds the blocks."""

    address: int
    word: bytes


@dataclass(frozen=True, slots=True)
class RankRead:
    """The read of one source rank: ``descriptors``, ``(n, 3)`` source, destination and length, and ``parts``.

    ``parts`` are read into ``stage`` and copied from there into the cache. A read without a ``guard`` is believed as it
    lands: its source is memory that this process keeps unchanged until the read has ended, such as a tier's. With a
    ``comparison`` the source's digests are read too, into ``digests``, and compared before the read is believed.
    """

    link: Link
    descriptors: np.ndarray
    parts: Sequence[StagedBlocks] = ()
    stage: Stage | None = None
    guard: Guard | None = None
    comparison: Comparison | None = None
    digests: Stage | None = None

    def __post_init__(self) -> None:
        if self.descriptors.ndim != 2 or self.descriptors.shape[1] != 3:
            raise TransportError(
                Reason.INVALID_REQUEST,
                f"descriptors must be of shape (n, 3), not {self.descriptors.shape}.",
                "Take them from a plan's lower().",
            )
        if self.parts and self.stage is None:
            raise TransportError(
                Reason.INVALID_REQUEST,
                "a read has parts to be staged, but no stage.",
                "Give the read a stage.",
            )

    @property
    def num_bytes(self) -> int:
        """Bytes that the read brings into the cache."""
        return int(self.descriptors[:, 2].sum()) + sum(part.num_bytes for part in self.parts)


# Returns the reads of a job, one for each source rank, or None while a handshake or a connection is under way.
Prepare = Callable[[], Sequence[RankRead] | None]


class Read:
    """A read in progress: a pull, or a copy within this process. ``deadline`` is on the monotonic clock.

    Until ``word_by`` sources may not have set their guard words yet.

    Bytes that go through the stage come in rounds of as much as the stage has room for; each round is copied into the
    cache while the next one is read. Digests are compared while the guard words after the data are read, unless bytes
    are still to be copied.
    """

    fills_blocks = True
    is_for_log = False
    can_wait = False

    def __init__(self, job_id: str, prepare: Prepare, deadline: float, word_by: float = 0.0) -> None:
        self.job_id = job_id
        self._created_at = time.monotonic()
        self._pull = PullRead(job_id, self._created_at, deadline, word_by)
        self._prepare = prepare
        self._reads: Sequence[RankRead] | None = None
        self._transfers: list[tuple[Link, Transfer]] = []
        self._scratch_slots: list[int] = []
        self._rounds: deque[list[Numbered]] = deque()
        self._merges: list[Merge] = []
        self._landing: Mark = OVER
        self._copies: deque[Mark] = deque()
        self._has_read_directly = False
        self._is_staged = False
        self._digests_begin = 0
        self._digests: dict[int, np.ndarray] = {}
        self._comparing: Iterator[int] | None = None
        self._is_compared = False
        self._mismatch: KVFerryError | None = None
        self._num_descriptors = 0
        self._num_compared_bytes = 0
        self._moving_since: float | None = None
        self._transfer_seconds = 0.0
        self._compare_seconds = 0.0

    @property
    def phase(self) -> Phase:
        """What the pull waits for."""
        return _PHASES.get(self._pull.state, Phase.MOVING)

    @property
    def error(self) -> KVFerryError | None:
        """Why the pull was given up."""
        return self._pull.error

    @property
    def given_up_at(self) -> float | None:
        """When the pull was given up."""
        return self._pull.given_up_at

    def advance(self, scratch: Scratch, now: float) -> bool:
        """Make bounded progress; return whether there was any."""
        self._pull.tick(now)
        was_stopping = self._pull.state is State.STOPPING
        try:
            return self._step(scratch, now)
        except KVFerryError as error:
            self._pull.fail(error, now)
            return not was_stopping

    def is_ending(self, now: float) -> bool:
        """Return whether the pull is past its deadline or being stopped."""
        return self._pull.is_ending(now)

    def cancel(self, error: KVFerryError) -> None:
        """Give the pull up; it is done once its transfers have ended."""
        self._pull.fail(error, time.monotonic())

    def result(self, finished_at: float) -> JobResult:
        """Return how the pull ended."""
        reads = self._reads or ()
        committed = reads if self.error is None else ()
        return JobResult(
            job_id=self.job_id,
            error=self.error,
            num_bytes=sum(read.num_bytes for read in committed),
            num_staged_bytes=sum(part.num_bytes for read in committed for part in read.parts),
            num_compared_bytes=self._num_compared_bytes,
            num_descriptors=self._num_descriptors,
            num_sources=len(reads),
            transport=",".join(sorted({read.link.name for read in reads})),
            way="read" if reads else "",
            wait_seconds=finished_at - self._created_at,
            transfer_seconds=self._transfer_seconds,
            compare_seconds=self._compare_seconds,
            landing=self._landing,
        )

    def _step(self, scratch: Scratch, now: float) -> bool:
        if self._pull.state is State.PREPARING:
            return self._begin(scratch)
        if self._pull.state is State.BETWEEN_ROUNDS:
            return self._begin_round()
        moved, is_stopping = self._poll_transfers(), self._pull.state is State.STOPPING
        if not is_stopping:
            self._raise_failed()
        if any(transfer.status is Status.PENDING for _, transfer in self._transfers):
            is_last = self._pull.state is State.WORDS_AFTER and not self._is_staged
            return (is_last and self._compare()) or moved
        if is_stopping:
            return moved if self._is_copying() else self._carry_out(self._pull.quiet(), scratch)
        match self._pull.state:
            case State.DATA:
                self._note_moved()
                return self._carry_out(self._pull.data_read(), scratch)
            case State.COPYING:
                if self._is_copying():
                    return False
                self._note_moved()
                if self._compare():
                    return True
                if self._mismatch is not None:
                    raise self._mismatch
                return self._carry_out(self._pull.copied(), scratch)
            case _:
                state, words = self._pull.state, [scratch.word(slot) for slot in self._scratch_slots]
                self._carry_out(self._pull.words_read(words, now), scratch)
                # No progress where the source is still writing: the words are read again, but not at once.
                return self._pull.state is not state

    def _carry_out(self, actions: Sequence[Action], scratch: Scratch) -> bool:
        for action in actions:
            match action:
                case Action.READ_WORDS:
                    self._submit_words(scratch)
                case Action.READ_DATA:
                    if not self._has_read_directly:
                        self._begin_round()
                case Action.COPY_ROUND:
                    self._put_in_place()
                case Action.COMMIT | Action.GIVE_BACK:
                    self._finish(scratch)
                case Action.STOP | Action.AWAIT_COPIES:
                    pass  # each step polls transfers and copies
        return bool(actions)

    def _begin(self, scratch: Scratch) -> bool:
        if self._reads is None:
            self._reads = self._prepare()
            if self._reads is None:
                return False
            self._rounds = self._cut()
            self._is_staged = bool(self._rounds)
        guards = self._guards
        if not scratch.has_room(len(guards)) or not self._has_room_for_digests():
            return False
        self._scratch_slots = scratch.take(len(guards))
        words = [guard.word for _, guard in guards]
        moved = self._carry_out(self._pull.begin(words, max(1, len(self._rounds))), scratch)
        # While the words come.
        self._digests = self._digests_read()
        return moved

    @property
    def _guards(self) -> list[tuple[Link, Guard]]:
        return [(read.link, read.guard) for read in self._reads or () if read.guard is not None]

    def _submit_words(self, scratch: Scratch) -> None:
        self._transfers = []
        for (link, guard), slot in zip(self._guards, self._scratch_slots, strict=True):
            scratch.clear(slot)
            self._submit(link, scratch.descriptor(slot, guard.address))

    def _submit(self, link: Link, rows: np.ndarray) -> None:
        self._transfers.append((link, link.transport.submit(link.peer, Direction.READ, rows)))

    def _cut(self) -> deque[list[Numbered]]:
        parts = [(number, part) for number, read in enumerate(self._reads or ()) for part in read.parts]
        return deque(cut_rounds(parts, self._stage.round_bytes)) if parts else deque()

    @property
    def _stage(self) -> Stage:
        return next(read.stage for read in self._reads or () if read.stage is not None)

    def _begin_round(self) -> bool:
        """Read the direct descriptors, with the first round, and one round into the stage, once the stage has room."""
        staged: list[tuple[int, np.ndarray]] = []
        if self._rounds:
            begins, num_bytes = stage_offsets(self._rounds[0])
            begin = self._stage.take(id(self), num_bytes)
            if begin is None:
                return False
            staged = self._staged_reads([begin + each for each in begins])
        self._pull.round_begun()
        self._moving_since = time.monotonic()
        self._transfers = []
        for number, read in enumerate(self._reads or ()):
            lists = [] if self._has_read_directly else [read.descriptors]
            lists += [rows for owner, rows in staged if owner == number]
            self._num_descriptors += sum(map(len, lists))
            if not self._has_read_directly and number in self._digests:
                # With the data: a transfer of their own would cost another wait.
                lists.append(self._digests[number])
            # Direct descriptors are not copied: they may be many thousands of rows.
            self._submit(read.link, lists[0] if len(lists) == 1 else np.concatenate([NOTHING, *lists]))
        if not self._has_read_directly:
            self._has_read_directly = True
            for _, _, comparison in self._compared_reads:
                comparison.prepare()
        return True

    def _has_room_for_digests(self) -> bool:
        """Take memory for the digests of all reads; return whether there was enough."""
        compared = self._compared_reads
        num_bytes = sum(comparison.num_bytes for _, _, comparison in compared)
        if not num_bytes:
            return True
        memory = compared[0][1]
        if num_bytes > memory.region.length:
            raise PlanError(
                Reason.UNSUPPORTED,
                f"the digests of {self.job_id} have {num_bytes} bytes, the limit is {memory.region.length}.",
                'Set "integrity" to "sample" on this engine.',
            )
        begin = memory.take(id(self), num_bytes)
        if begin is not None:
            self._digests_begin = begin
        return begin is not None

    @property
    def _compared_reads(self) -> list[tuple[int, Stage, Comparison]]:
        return [
            (number, read.digests, read.comparison)
            for number, read in enumerate(self._reads or ())
            if read.comparison is not None and read.digests is not None
        ]

    def _digests_read(self) -> dict[int, np.ndarray]:
        """Return the descriptors of the digests, by the index of their source."""
        begin, found = self._digests_begin, {}
        for number, memory, comparison in self._compared_reads:
            found[number] = comparison.rows(memory.region.base_address + begin)
            begin += comparison.num_bytes
        return found

    def _compared(self) -> Iterator[int]:
        """Compare the cache with the digests that were read, some cells at a time; yield how many bytes."""
        begin = self._digests_begin
        for _, memory, comparison in self._compared_reads:
            words = np.asarray(memory.memory)[begin : begin + comparison.num_bytes].view(np.uint64)
            yield from comparison.compare(words)
            begin += comparison.num_bytes

    def _compare(self) -> bool:
        """Go on comparing, for as long as other jobs may wait; return whether there was anything left to compare.

        A mismatch counts once the guard words are right: a source that has changed has other bytes.
        """
        if self._is_compared:
            return False
        if self._comparing is None:
            self._comparing = self._compared()
        started, compared = time.monotonic(), 0
        try:
            while compared < COMPARED_PER_ADVANCE:
                compared += next(self._comparing)
        except StopIteration:
            self._is_compared = True
        except KVFerryError as error:
            self._is_compared, self._mismatch = True, error
        self._num_compared_bytes += compared
        self._compare_seconds += time.monotonic() - started
        return True

    def _note_moved(self) -> None:
        """Bytes have come or were copied: count the time, once."""
        if self._moving_since is not None:
            self._transfer_seconds += time.monotonic() - self._moving_since
            self._moving_since = None

    def _staged_reads(self, begins: Sequence[int]) -> list[tuple[int, np.ndarray]]:
        """Return the reads of a round, each with the index of its source, and keep the copies that follow."""
        base = np.array([0, self._stage.region.base_address, 0], dtype=np.int64)
        lists: list[tuple[int, np.ndarray]] = []
        merges: list[Merge] = []
        for begin, (number, part) in zip(begins, self._rounds[0], strict=True):
            lists.append((number, (part.reads(begin) + base).view(np.uint64)))
            merges += part.merges(begin)
        self._merges = join_merges(merges)
        return lists

    def _put_in_place(self) -> None:
        """Start to copy the round from the stage into the cache."""
        if not self._merges:
            return
        self._moving_since = time.monotonic()
        self._landing = self._stage.put_in_place(self._merges)
        if self._stage.is_on_host:
            self._copies.append(self._landing)
        self._merges = []
        self._rounds.popleft()
        self._stage.give_back(id(self), after=self._landing)

    def _is_copying(self) -> bool:
        """Return whether copies into the cache have not ended. Raises the error of a failed copy, once."""
        while self._copies and self._copies[0].is_over():
            copied = self._copies.popleft()
            if self._pull.state is not State.STOPPING:
                copied.wait()
        return bool(self._copies)

    def _poll_transfers(self) -> bool:
        moved, is_stopping = False, self._pull.state is State.STOPPING
        for link, transfer in self._transfers:
            if transfer.status is not Status.PENDING:
                continue
            bytes_before = transfer.bytes_done
            poll = link.transport.cancel if is_stopping else link.transport.poll
            moved |= poll(transfer) is not Status.PENDING or transfer.bytes_done != bytes_before
        return moved

    def _raise_failed(self) -> None:
        for _, transfer in self._transfers:
            if transfer.status in (Status.FAILED, Status.CANCELLED):
                raise transfer.error or TransportError(
                    Reason.TRANSFER_FAILED,
                    f"a transfer ended {transfer.status}.",
                    "Check that the source of the blocks, a prefill engine or a tier, still runs.",
                )

    def _finish(self, scratch: Scratch) -> None:
        scratch.give_back(self._scratch_slots)
        self._scratch_slots = []
        for read in self._reads or ():
            for memory in (read.stage, read.digests):
                if memory is not None:
                    memory.give_back(id(self))
