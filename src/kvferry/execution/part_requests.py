"""The reader's side of a gather: questions to packers on their way, and their answers handed to the loads that wait."""

import statistics
import time
from collections.abc import Sequence
from itertools import count

from kvferry.errors import HandoffError, Reason
from kvferry.execution.executor import WAIT_SECONDS
from kvferry.execution.gathering import NoRoom, PartPlace
from kvferry.execution.pack_copies import as_message
from kvferry.handoff.messages import MAX_PACK_COPIES, Busy, Pack, Packed, Packer, Refusal, Unpack, Unpacked
from kvferry.handoff.wire.client import Courier, Parcel, known_reason
from kvferry.plan.staging.scatter import Merge
from kvferry.plan.staging.staged_plan import PARTS_PER_STAGE

UNPACK_SECONDS = 2.0
"""So long it is tried to give parts back; after that their lease is over."""

ANSWER_SECONDS = 0.2
"""So long, at most, all loads wait for an answer that is timed."""
REPEAT = 5

Hold = tuple[int, int, int]
"""Slot, epoch and generation."""


class PartCourier:
    """Carries the questions of all loads of one rank; its thread starts with the first. Used by one thread.

    ``sender`` is a name that no other rank has.
    """

    def __init__(self, sender: str) -> None:
        self._sender = sender
        self._courier: Courier | None = None
        self._numbers = count(1)
        self._awaited: dict[tuple[str, int], Parcel | None] = {}

    def requests(self, packer: Packer, hold: Hold) -> "PartRequests":
        """Return what asks this packer for the parts of one load."""
        return PartRequests(self, packer, hold, f"{self._sender}/{next(self._numbers)}")

    def send(self, packer: Packer, question: Pack, timeout_seconds: float) -> None:
        """Ask, and keep the answer until it is taken."""
        self._awaited[question.reader, question.number] = None
        self._open().send(packer.host, packer.port, question, timeout_seconds)

    def take(self, reader: str, number: int) -> Parcel | None:
        """Return a parcel that came back about this part, once."""
        self._collect()
        parcel = self._awaited.get((reader, number))
        if parcel is not None:
            del self._awaited[reader, number]
        return parcel

    def give_back(self, packer: Packer, reader: str) -> None:
        """Forget what the reader waits for and give back its parts, if the packer still hears that."""
        for key in [key for key in self._awaited if key[0] == reader]:
            del self._awaited[key]
        self._open().send(packer.host, packer.port, Unpack(reader), UNPACK_SECONDS)

    def time_an_answer(self, packer: Packer) -> float | None:
        """Return how many seconds a question and its answer take, as a load asks; None where none comes soon.

        The median of some, on a connection that is open by then.
        """
        question, seconds = Unpack(f"{self._sender}/0"), []
        for _ in range(1 + REPEAT):
            found = self._seconds_to_answer(packer, question)
            if found is None:
                return None
            seconds.append(found)
        return statistics.median(seconds[1:])

    def _seconds_to_answer(self, packer: Packer, question: Unpack) -> float | None:
        started_at = time.perf_counter()
        self._open().send(packer.host, packer.port, question, ANSWER_SECONDS)
        while time.perf_counter() < started_at + ANSWER_SECONDS:
            for parcel in self._collect():
                if parcel.question is question:
                    return time.perf_counter() - started_at if isinstance(parcel.answer, Unpacked) else None
            time.sleep(WAIT_SECONDS)
        return None

    def _collect(self) -> list[Parcel]:
        """Keep the answers about parts that are awaited; return the others."""
        others = []
        for returned in self._open().collect():
            question = returned.question
            if isinstance(question, Pack) and (question.reader, question.number) in self._awaited:
                self._awaited[question.reader, question.number] = returned
            else:
                others.append(returned)
        return others

    def close(self) -> None:
        """Stop; what was given back is still sent. Twice is fine."""
        if self._courier is not None:
            self._courier.close()

    def _open(self) -> Courier:
        if self._courier is None:
            self._courier = Courier()
        return self._courier


class PartRequests:
    """Asks one packer for the parts of one load: a :class:`kvferry.execution.gathering.PartSource`."""

    def __init__(self, courier: PartCourier, packer: Packer, hold: Hold, reader: str) -> None:
        self._courier, self._packer, self._hold, self._reader = courier, packer, hold, reader
        self._has_asked = False
        self.name = f"{packer.host}:{packer.port}"
        self.part_bytes = packer.stage_bytes // PARTS_PER_STAGE

    def ask(self, number: int, num_done: int, packs: Sequence[Merge], num_bytes: int, timeout_seconds: float) -> None:
        """Ask for a part; the parts before ``num_done`` are no longer needed.

        Raises :class:`HandoffError` (``unsupported``) for more copies than a message has.
        """
        if len(packs) > MAX_PACK_COPIES:
            raise HandoffError(
                Reason.UNSUPPORTED,
                f"a part would be packed by {len(packs)} copies, a source takes {MAX_PACK_COPIES} at a time.",
                'Set "strategy" to "direct" or "scatter".',
            )
        self._has_asked = True
        slot, epoch, generation = self._hold
        blocks, copies = as_message(packs)
        question = Pack(
            reader=self._reader,
            number=number,
            num_done=num_done,
            slot=slot,
            epoch=epoch,
            generation=generation,
            num_bytes=num_bytes,
            blocks=blocks,
            copies=copies,
        )
        self._courier.send(self._packer, question, timeout_seconds)

    def answer(self, number: int) -> PartPlace | NoRoom | None:
        """Return what was answered last about a part, once; no answer in time is None for ever.

        Raises :class:`HandoffError` with the packer's reason for a refusal.
        """
        parcel = self._courier.take(self._reader, number)
        answer = None if parcel is None else parcel.answer
        if answer is None:
            return None
        if isinstance(answer, Packed):
            return PartPlace(answer.address, answer.word_address, answer.word)
        if isinstance(answer, Busy):
            return NoRoom.NOW
        if isinstance(answer, Refusal):
            raise HandoffError(
                known_reason(answer.reason), f"{self.name} does not pack: {answer.message}", answer.remedy
            )
        raise HandoffError(
            Reason.PROTOCOL_MISMATCH,
            f"{self.name} answered a request to pack with {type(answer).__name__}.",
            "Run the same kvferry version on both sides.",
        )

    def close(self) -> None:
        """Give back all parts; twice is fine."""
        if self._has_asked:
            self._has_asked = False
            self._courier.give_back(self._packer, self._reader)
