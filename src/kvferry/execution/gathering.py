"""What one source packs for a load: part by part asked for, read into the cache, and its word read after it.

Two parts are under way at a time, so that the source packs one while the other is read. Time and answers are inputs;
nothing here waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np

from kvferry.errors import HandoffError, Reason
from kvferry.execution.scratch import Scratch
from kvferry.plan.staging.scatter import Merge, StagedPart, gathered_rounds
from kvferry.transport.protocol import Descriptors, Direction, Peer, Status, Transfer, Transport

WINDOW = 2
"""Parts under way at a time."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.002, 0.05
"""Between two requests for a part for which there was no room."""
SILENCE_SECONDS = 1.0
"""After so long without an answer the source's guard word is read: a transport knows when a peer has died."""
MAX_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class PartPlace:
    """Where a part lies at the source, and the word that says so as long as it does."""

    address: int
    word_address: int
    word: bytes


class NoRoom(Enum):
    """The source has no room for a part now."""

    NOW = "now"


class PartSource(Protocol):
    """Who packs. None of the methods waits."""

    name: str
    part_bytes: int
    """A part has at most so many bytes, or one block."""

    def ask(self, number: int, num_done: int, packs: Sequence[Merge], num_bytes: int, timeout_seconds: float) -> None:
        """Ask for a part; the parts before ``num_done`` are no longer needed."""

    def answer(self, number: int) -> PartPlace | NoRoom | None:
        """Return what was answered last about a part, once, None without an answer. Raises what was refused."""

    def close(self) -> None:
        """Nothing more is asked or read; twice is fine."""


class _Phase(Enum):
    ASKING = "asking"
    ASKED = "asked"
    DATA = "reading"
    WORD = "reading the word"
    DONE = "done"


@dataclass(slots=True)
class _Part:
    number: int
    packs: Sequence[Merge]
    reads: np.ndarray
    num_bytes: int
    scratch_slot: int
    phase: _Phase = _Phase.ASKING
    ask_at: float = 0.0
    pause: float = FIRST_PAUSE_SECONDS
    probe_at: float = 0.0
    num_attempts: int = 0
    place: PartPlace | None = None
    transfer: Transfer | None = None


class Gathering:
    """The parts of one source in one load.

    ``word_address`` and ``expected_word`` are the hold's. The caller takes ``WINDOW`` scratch slots and gets them back
    once it :attr:`is_over`. :meth:`advance` raises what ends the load; then :meth:`stop` until it returns True.
    """

    def __init__(
        self,
        link: tuple[Transport, Peer],
        source: PartSource,
        hold: tuple[int, bytes],
        parts: Sequence[StagedPart],
        scratch: tuple[Scratch, Sequence[int]],
        deadline: float,
    ) -> None:
        self._transport, self._peer = link
        self._source, self._deadline = source, deadline
        self._word_address, self._expected_word = hold
        self._scratch, slots = scratch
        self._free_slots = list(slots)
        self._parts = gathered_rounds(parts, source.part_bytes)
        self._under_way: list[_Part] = []
        self._num_begun = 0
        self._is_exhausted = False
        self.num_descriptors = 0

    @property
    def is_over(self) -> bool:
        """Whether everything has arrived."""
        return self._is_exhausted and not self._under_way

    @property
    def state(self) -> str:
        """What it waits for, for an error message."""
        waiting = [f"part {part.number} {part.phase.value}" for part in self._under_way]
        return f"{self._source.name} packs for it: {', '.join(waiting) or 'all read'}"

    def advance(self, now: float) -> bool:
        """Make bounded progress; return whether anything moved."""
        moved = self._begin_parts()
        for part in self._under_way:
            moved |= self._advance_part(part, now)
        # In order, since the source is told up to where the reader is done.
        while self._under_way and self._under_way[0].phase is _Phase.DONE:
            self._free_slots.append(self._under_way.pop(0).scratch_slot)
        if self.is_over:
            self._source.close()
        return moved

    def stop(self) -> bool:
        """Stop what is being read; return whether all is quiet, and then give back what the source keeps."""
        pending = [part.transfer for part in self._under_way if part.transfer is not None]
        statuses = [self._transport.cancel(each) if each.status is Status.PENDING else each.status for each in pending]
        if Status.PENDING in statuses:
            return False
        self._source.close()
        return True

    def _begin_parts(self) -> bool:
        moved = False
        while not self._is_exhausted and self._free_slots:
            following = next(self._parts, None)
            if following is None:
                self._is_exhausted = True
                break
            self._under_way.append(_Part(self._num_begun, *following, self._free_slots.pop()))
            self._num_begun += 1
            moved = True
        return moved

    def _advance_part(self, part: _Part, now: float) -> bool:
        if part.phase is _Phase.ASKING:
            return self._ask(part, now)
        if part.phase is _Phase.ASKED:
            return self._take_answer(part, now)
        if part.phase is _Phase.DONE or not self._is_landed(part):
            return False
        if part.phase is _Phase.DATA:
            assert part.place is not None
            self._read_word(part, part.place.word_address)
            part.phase = _Phase.WORD
            return True
        self._check_part(part)
        return True

    def _ask(self, part: _Part, now: float) -> bool:
        if now < part.ask_at:
            return False
        num_done = self._under_way[0].number
        self._source.ask(part.number, num_done, part.packs, part.num_bytes, max(self._deadline - now, 0.001))
        part.phase, part.probe_at = _Phase.ASKED, now + SILENCE_SECONDS
        return True

    def _take_answer(self, part: _Part, now: float) -> bool:
        if part.transfer is not None and not self._is_probed(part, now):
            return False
        answer = self._source.answer(part.number)
        if answer is None:
            if now >= part.probe_at:
                self._read_word(part, self._word_address)
            return False
        if isinstance(answer, NoRoom):
            part.phase, part.ask_at = _Phase.ASKING, now + part.pause
            part.pause = min(2 * part.pause, LONGEST_PAUSE_SECONDS)
            return False
        part.place, part.phase = answer, _Phase.DATA
        rows = (part.reads + np.array([answer.address, 0, 0], dtype=np.int64)).view(np.uint64)
        self.num_descriptors += len(rows)
        part.transfer = self._transport.submit(self._peer, Direction.READ, rows)
        return True

    def _is_landed(self, part: _Part) -> bool:
        """Return whether what is being read has arrived. Raises what became of it otherwise."""
        assert part.transfer is not None
        if part.transfer.status is Status.PENDING:
            self._transport.poll(part.transfer)
        if part.transfer.status in (Status.FAILED, Status.CANCELLED):
            raise part.transfer.error or HandoffError(
                Reason.TRANSFER_FAILED, "a read of a part was cancelled.", "Check that the prefill engine runs."
            )
        return part.transfer.status is Status.DONE

    def _is_probed(self, part: _Part, now: float) -> bool:
        """Return whether the source still is the source, although it does not answer."""
        if not self._is_landed(part):
            return False
        part.transfer, part.probe_at = None, now + SILENCE_SECONDS
        if self._scratch.word(part.scratch_slot) != self._expected_word:
            raise HandoffError(
                Reason.SOURCE_CHANGED,
                "the prefill engine stopped holding the blocks while they were to be packed.",
                "Send the prompt again; if this repeats, raise lease_seconds on the prefill side.",
            )
        return True

    def _read_word(self, part: _Part, address: int) -> None:
        self._scratch.clear(part.scratch_slot)
        rows: Descriptors = self._scratch.descriptor(part.scratch_slot, address)
        part.transfer = self._transport.submit(self._peer, Direction.READ, rows)

    def _check_part(self, part: _Part) -> None:
        """End a part that still was its own when all of it had come; ask again for one that was taken back."""
        assert part.place is not None
        part.transfer = None
        if self._scratch.word(part.scratch_slot) == part.place.word:
            part.phase = _Phase.DONE
            return
        part.num_attempts += 1
        part.phase, part.place = _Phase.ASKING, None
        if part.num_attempts == MAX_ATTEMPTS:
            raise HandoffError(
                Reason.LEASE_EXPIRED,
                f"{self._source.name} took a part of {part.num_bytes} bytes back {MAX_ATTEMPTS} times before it had "
                "been read.",
                'The connection is slow or the engine paused: use the strategy "direct", or a smaller stage_bytes.',
            )
