"""One load: guard words, data, guard words again, over one or more source ranks.

A load advances on the thread that calls :meth:`Load.advance`; it never blocks. It commits only when
every read has completed and every guard word was the expected one before and after.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from kvferry.errors import HandoffError, KVFerryError, Reason, TransportError
from kvferry.execution.scratch import Scratch
from kvferry.transport.protocol import Direction, Peer, Status, Transfer, Transport


@dataclass(frozen=True, slots=True)
class GuardedRead:
    """What one source rank contributes: ``descriptors`` is ``(n, 3)`` source, destination, length."""

    transport: Transport
    peer: Peer
    word_address: int
    expected_word: bytes
    descriptors: np.ndarray

    def __post_init__(self) -> None:
        if self.descriptors.ndim != 2 or self.descriptors.shape[1] != 3:
            raise TransportError(
                Reason.INVALID_REQUEST, f"descriptors must be of shape (n, 3), not {self.descriptors.shape}."
            )

    @property
    def num_bytes(self) -> int:
        """Bytes to be read."""
        return int(self.descriptors[:, 2].sum())


class Phase(Enum):
    """Where a load stands."""

    PREPARING = "preparing"
    GUARD_BEFORE = "reading the guard words before the data"
    DATA = "reading the data"
    GUARD_AFTER = "reading the guard words after the data"
    STOPPING = "stopping its transfers"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class LoadResult:
    """How a load ended: ``error`` is None for a commit. Times are seconds."""

    load_id: str
    error: KVFerryError | None
    num_bytes: int
    num_descriptors: int
    num_sources: int
    transport: str
    wait_seconds: float
    transfer_seconds: float


# Returns the reads of a load, or None while something they need (a handshake) is not there yet.
Prepare = Callable[[], Sequence[GuardedRead] | None]


@dataclass(slots=True)
class Load:
    """A load in progress. ``deadline`` is on the monotonic clock."""

    load_id: str
    prepare: Prepare
    deadline: float
    created_at: float = field(default_factory=time.monotonic)
    phase: Phase = Phase.PREPARING
    error: KVFerryError | None = None
    _reads: Sequence[GuardedRead] = ()
    _is_prepared: bool = False
    _transfers: list[Transfer] = field(default_factory=list)
    _scratch_slots: list[int] = field(default_factory=list)
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
        return LoadResult(
            load_id=self.load_id,
            error=self.error,
            num_bytes=sum(read.num_bytes for read in self._reads),
            num_descriptors=sum(len(read.descriptors) for read in self._reads),
            num_sources=len(self._reads),
            transport=",".join(names),
            wait_seconds=finished_at - self.created_at,
            transfer_seconds=self._transfer_seconds,
        )

    def _step(self, scratch: Scratch) -> bool:
        if self.phase is Phase.PREPARING:
            return self._start(scratch)
        moved = self._poll_transfers()
        if self.phase is not Phase.STOPPING:
            self._raise_failed()
        if any(transfer.status is Status.PENDING for transfer in self._transfers):
            return moved
        if self.phase is Phase.STOPPING:
            return self._finish(scratch)
        if self.phase is Phase.DATA:
            self._transfer_seconds = time.monotonic() - self._data_started_at
            self._submit_words(scratch, Phase.GUARD_AFTER)
            return True
        self._check_words(scratch)
        if self.phase is Phase.GUARD_AFTER:
            return self._finish(scratch)
        self._submit_data()
        return True

    def _start(self, scratch: Scratch) -> bool:
        if not self._is_prepared:
            reads = self.prepare()
            if reads is None:
                return False
            self._reads, self._is_prepared = reads, True
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

    def _submit_data(self) -> None:
        self.phase = Phase.DATA
        self._data_started_at = time.monotonic()
        self._transfers = []
        for read in self._reads:
            self._transfers.append(read.transport.submit(read.peer, Direction.READ, read.descriptors))

    def _poll_transfers(self) -> bool:
        moved = False
        for read, transfer in zip(self._reads, self._transfers, strict=False):
            if transfer.status is not Status.PENDING:
                continue
            bytes_before = transfer.bytes_done
            poll = read.transport.cancel if self.phase is Phase.STOPPING else read.transport.poll
            moved |= poll(transfer) is not Status.PENDING or transfer.bytes_done != bytes_before
        return moved

    def _raise_failed(self) -> None:
        for transfer in self._transfers:
            if transfer.status in (Status.FAILED, Status.CANCELLED):
                raise transfer.error or TransportError(Reason.TRANSFER_FAILED, f"a transfer ended {transfer.status}.")

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
        self.error = self.error or error
        self.phase = Phase.STOPPING

    def _finish(self, scratch: Scratch) -> bool:
        scratch.give_back(self._scratch_slots)
        self._scratch_slots = []
        self.phase = Phase.DONE
        return True

    def _deadline_error(self, now: float) -> HandoffError:
        return HandoffError(
            Reason.DEADLINE_EXCEEDED,
            f"the load of {self.load_id} was still {self.phase.value} after {now - self.created_at:.1f} s.",
            "Check the prefill engine; load_timeout_seconds sets the limit.",
        )
