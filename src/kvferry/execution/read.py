"""One load: guard words, data, guard words again, over one or more source ranks.

A load advances on the thread that calls :meth:`Load.advance`; it never blocks. It commits only when
every read has completed and every guard word was the expected one before and after.

What goes by way of a stage comes in rounds, as much at a time as the stage has room for: read, guard words again, and
only then copied into the cache, while the next round is read.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

import numpy as np

from kvferry.errors import HandoffError, KVFerryError, Reason, TransportError
from kvferry.execution.device import OVER, Mark
from kvferry.execution.scratch import Scratch
from kvferry.execution.stage import Stage
from kvferry.plan.staging.scatter import NOTHING, Merge, Numbered, StagedPart, cut, joined, placed
from kvferry.transport.protocol import Direction, Peer, Status, Transfer, Transport


@dataclass(frozen=True, slots=True)
class GuardedRead:
    """What one source rank contributes: ``descriptors`` is ``(n, 3)`` source, destination, length.

    ``parts`` are read into ``stage`` and copied from there.
    """

    transport: Transport
    peer: Peer
    word_address: int
    expected_word: bytes
    descriptors: np.ndarray
    parts: Sequence[StagedPart] = ()
    stage: Stage | None = None

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
                "parts to be staged come without a stage.",
                "Name the stage that they go through.",
            )

    @property
    def num_bytes(self) -> int:
        """Bytes to be read."""
        return int(self.descriptors[:, 2].sum()) + sum(part.num_bytes for part in self.parts)


class Phase(Enum):
    """Where a load stands."""

    PREPARING = "preparing"
    STAGE = "waiting for room in the stage"
    GUARD_BEFORE = "reading the guard words before the data"
    DATA = "reading the data"
    GUARD_AFTER = "reading the guard words after the data"
    LANDING = "copying from the stage into the cache"
    STOPPING = "stopping its transfers"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class LoadResult:
    """How a load ended: ``error`` is None for a commit. Times are seconds.

    ``num_bytes`` are those committed, of which ``num_staged_bytes`` came by way of the stage: none of a load that
    failed, whatever of it had landed. ``num_descriptors`` counts what transports were asked for.
    """

    load_id: str
    error: KVFerryError | None
    num_bytes: int
    num_staged_bytes: int
    num_descriptors: int
    num_sources: int
    transport: str
    wait_seconds: float
    transfer_seconds: float
    landing: Mark = OVER
    """Behind the last copy into the cache, on a GPU: the engine's stream must wait for it."""
    timeline: Callable[[], Mapping[str, Any]] | None = None
    """Of a push, where it was asked for: says when what happened, ready for JSON."""


def refused(load_id: str, error: KVFerryError) -> LoadResult:
    """Return how a load ended that was never begun."""
    return LoadResult(load_id, error, 0, 0, 0, 0, "", 0.0, 0.0)


# Returns the reads of a load, or None while something they need (a handshake, a connection) is not there yet.
Prepare = Callable[[], Sequence[GuardedRead] | None]


@dataclass(slots=True)
class Load:
    """A load in progress. ``deadline`` is on the monotonic clock."""

    fills_blocks: ClassVar[bool] = True
    load_id: str
    prepare: Prepare
    deadline: float
    created_at: float = field(default_factory=time.monotonic)
    phase: Phase = Phase.PREPARING
    error: KVFerryError | None = None
    given_up_at: float | None = None
    _reads: Sequence[GuardedRead] = ()
    _is_prepared: bool = False
    _transfers: list[Transfer] = field(default_factory=list)
    _scratch_slots: list[int] = field(default_factory=list)
    _rounds: deque[list[Numbered]] = field(default_factory=deque)
    _merges: list[Merge] = field(default_factory=list)
    _landing: Mark = OVER
    _copies: deque[Mark] = field(default_factory=deque)
    _has_read_directly: bool = False
    _num_descriptors: int = 0
    _data_started_at: float = 0.0
    _transfer_seconds: float = 0.0

    def advance(self, scratch: Scratch, now: float) -> bool:
        """Make bounded progress; return whether anything moved."""
        if self.phase not in (Phase.STOPPING, Phase.DONE) and now >= self.deadline:
            self._fail(self._deadline_error(now))
        was_stopping = self.phase is Phase.STOPPING
        try:
            return self._step(scratch)
        except KVFerryError as error:
            self._fail(error)
            return not was_stopping

    def is_ending(self, now: float) -> bool:
        """Return whether it is past its deadline or being stopped."""
        return self.phase is Phase.STOPPING or now >= self.deadline

    def cancel(self, error: KVFerryError) -> None:
        """Give up; the load is done once its transfers are quiet."""
        if self.phase is not Phase.DONE:
            self._fail(error)

    def result(self, finished_at: float) -> LoadResult:
        """Return how it ended."""
        names = sorted({read.transport.capabilities.name for read in self._reads})
        committed = self._reads if self.error is None else ()
        return LoadResult(
            load_id=self.load_id,
            error=self.error,
            num_bytes=sum(read.num_bytes for read in committed),
            num_staged_bytes=sum(part.num_bytes for read in committed for part in read.parts),
            num_descriptors=self._num_descriptors,
            num_sources=len(self._reads),
            transport=",".join(names),
            wait_seconds=finished_at - self.created_at,
            transfer_seconds=self._transfer_seconds,
            landing=self._landing,
        )

    def _step(self, scratch: Scratch) -> bool:
        if self.phase is Phase.PREPARING:
            return self._start(scratch)
        if self.phase is Phase.STAGE:
            return self._begin_round()
        if self.phase is Phase.LANDING:
            if self._is_copying():
                return False
            self._transfer_seconds += time.monotonic() - self._data_started_at
            return self._finish(scratch)
        moved = self._poll_transfers()
        if self.phase is not Phase.STOPPING:
            self._raise_failed()
        if self._is_moving():
            return moved
        if self.phase is Phase.STOPPING:
            return self._finish(scratch)
        if self.phase is Phase.DATA:
            self._transfer_seconds += time.monotonic() - self._data_started_at
            self._submit_words(scratch, Phase.GUARD_AFTER)
            return True
        if self.phase is Phase.GUARD_BEFORE and self._is_being_written(scratch):
            self._submit_words(scratch, Phase.GUARD_BEFORE)
            return False
        self._check_words(scratch)
        if self.phase is Phase.GUARD_AFTER:
            self._put_in_place()
            # The words after one round are those before the next, which begins when other loads have had their turn.
            self.phase = Phase.STAGE if self._rounds else Phase.LANDING
            return True
        self.phase = Phase.STAGE
        self._begin_round()
        return True

    def _start(self, scratch: Scratch) -> bool:
        if not self._is_prepared:
            reads = self.prepare()
            if reads is None:
                return False
            self._reads, self._is_prepared = reads, True
            self._rounds = self._cut()
        if not scratch.has_room(len(self._reads)):
            return False
        self._scratch_slots = scratch.take(len(self._reads))
        self._submit_words(scratch, Phase.GUARD_BEFORE)
        return True

    def _submit_words(self, scratch: Scratch, phase: Phase) -> None:
        self.phase = phase
        self._transfers = []
        for read, slot in zip(self._reads, self._scratch_slots, strict=True):
            scratch.clear(slot)
            descriptor = scratch.descriptor(slot, read.word_address)
            self._transfers.append(read.transport.submit(read.peer, Direction.READ, descriptor))

    def _cut(self) -> deque[list[Numbered]]:
        parts = [(number, part) for number, read in enumerate(self._reads) for part in read.parts]
        return deque(cut(parts, self._stage.round_bytes)) if parts else deque()

    @property
    def _stage(self) -> Stage:
        return next(read.stage for read in self._reads if read.stage is not None)

    def _begin_round(self) -> bool:
        """Read what is left to be read directly, and into the stage as much as a round has, once there is room."""
        staged: list[tuple[int, np.ndarray]] = []
        if self._rounds:
            begins, num_bytes = placed(self._rounds[0])
            begin = self._stage.take(id(self), num_bytes)
            if begin is None:
                return False
            staged = self._staged_reads([begin + each for each in begins])
        self.phase = Phase.DATA
        self._data_started_at = time.monotonic()
        self._transfers = []
        for number, read in enumerate(self._reads):
            lists = [] if self._has_read_directly else [read.descriptors]
            lists += [rows for owner, rows in staged if owner == number]
            # What goes directly is handed on as it is: it may be many thousands of rows.
            rows = lists[0] if len(lists) == 1 else np.concatenate([NOTHING, *lists])
            self._num_descriptors += len(rows)
            self._transfers.append(read.transport.submit(read.peer, Direction.READ, rows))
        self._has_read_directly = True
        return True

    def _staged_reads(self, begins: Sequence[int]) -> list[tuple[int, np.ndarray]]:
        """Return the reads of a round's pieces and whose they are, and keep the copies that are to follow."""
        base = np.array([0, self._stage.region.base_address, 0], dtype=np.int64)
        lists: list[tuple[int, np.ndarray]] = []
        merges: list[Merge] = []
        for begin, (number, piece) in zip(begins, self._rounds[0], strict=True):
            lists.append((number, (piece.reads(begin) + base).view(np.uint64)))
            merges += piece.merges(begin)
        self._merges = joined(merges)
        return lists

    def _put_in_place(self) -> None:
        """Copy what the stage holds into the cache: the source was its source until all had come."""
        self._data_started_at = time.monotonic()
        if not self._merges:
            return
        self._landing = self._stage.put_in_place(self._merges)
        if self._stage.is_on_host:
            self._copies.append(self._landing)
        self._merges = []
        self._rounds.popleft()
        self._stage.give_back(id(self), after=self._landing)

    def _is_copying(self) -> bool:
        """Return whether bytes still come into the cache from the stage. Raises what went wrong with a copy, once."""
        while self._copies and self._copies[0].is_over():
            copied = self._copies.popleft()
            if self.phase is not Phase.STOPPING:
                copied.wait()
        return bool(self._copies)

    def _poll_transfers(self) -> bool:
        moved = False
        for read, transfer in zip(self._reads, self._transfers, strict=False):
            if transfer.status is not Status.PENDING:
                continue
            bytes_before = transfer.bytes_done
            poll = read.transport.cancel if self.phase is Phase.STOPPING else read.transport.poll
            moved |= poll(transfer) is not Status.PENDING or transfer.bytes_done != bytes_before
        return moved

    def _is_moving(self) -> bool:
        """Return whether this phase still waits for transfers, or for copies of a load that is given up."""
        if any(transfer.status is Status.PENDING for transfer in self._transfers):
            return True
        return self.phase is Phase.STOPPING and self._is_copying()

    def _raise_failed(self) -> None:
        for transfer in self._transfers:
            if transfer.status in (Status.FAILED, Status.CANCELLED):
                raise transfer.error or TransportError(
                    Reason.TRANSFER_FAILED,
                    f"a transfer ended {transfer.status}.",
                    "Check that the prefill engine runs.",
                )

    def _is_being_written(self, scratch: Scratch) -> bool:
        """Return whether a source's last step has not ended on its device: the words must be read again."""
        reads = zip(self._reads, self._scratch_slots, strict=True)
        return any(scratch.is_being_written(slot, read.expected_word) for read, slot in reads)

    def _check_words(self, scratch: Scratch) -> None:
        for read, slot in zip(self._reads, self._scratch_slots, strict=True):
            if scratch.word(slot) != read.expected_word:
                when = "before" if self.phase is Phase.GUARD_BEFORE else "while"
                raise HandoffError(
                    Reason.SOURCE_CHANGED,
                    f"the prefill engine stopped holding the blocks of {self.load_id} {when} they were read.",
                    "Send the prompt again; if this repeats, raise lease_seconds on the prefill side.",
                )

    def _fail(self, error: KVFerryError) -> None:
        if self.error is None:
            self.error, self.given_up_at = error.without_traceback(), time.monotonic()
        self.phase = Phase.STOPPING

    def _finish(self, scratch: Scratch) -> bool:
        scratch.give_back(self._scratch_slots)
        self._scratch_slots = []
        for read in self._reads:
            if read.stage is not None:
                read.stage.give_back(id(self))
        self.phase = Phase.DONE
        return True

    def _deadline_error(self, now: float) -> HandoffError:
        return HandoffError(
            Reason.DEADLINE_EXCEEDED,
            f"the load of {self.load_id} was still {self.phase.value} after {now - self.created_at:.1f} s.",
            "Check the prefill engine; load_timeout_seconds sets the limit.",
        )
