"""The reader's side of a gather: questions to packers on their way, and their answers handed to the loads that wait."""

from collections.abc import Sequence
from itertools import count

from kvferry.errors import HandoffError, Reason
from kvferry.execution.gathering import NoRoom, PartPlace
from kvferry.handoff.courier import Courier, Parcel, known_reason
from kvferry.handoff.protocol import MAX_PACK_COPIES, Busy, Pack, PackCopy, Packed, Packer, Refusal, Unpack
from kvferry.plan.request import Integers
from kvferry.plan.staged import Merge
from kvferry.plan.staged_plan import PARTS_PER_STAGE

UNPACK_SECONDS = 2.0
"""So long it is tried to give parts back; after that their lease is over."""

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
        for returned in self._open().collect():
            question = returned.question
            if isinstance(question, Pack) and (question.reader, question.number) in self._awaited:
                self._awaited[question.reader, question.number] = returned
        parcel = self._awaited.get((reader, number))
        if parcel is not None:
            del self._awaited[reader, number]
        return parcel

    def give_back(self, packer: Packer, reader: str) -> None:
        """Forget what the reader waits for and give back its parts, if the packer still hears that."""
        for key in [key for key in self._awaited if key[0] == reader]:
            del self._awaited[key]
        self._open().send(packer.host, packer.port, Unpack(reader), UNPACK_SECONDS)

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
        blocks: dict[bytes, tuple[int, Integers]] = {}
        copies = tuple(_copy(pack, blocks) for pack in packs)
        question = Pack(
            reader=self._reader,
            number=number,
            num_done=num_done,
            slot=slot,
            epoch=epoch,
            generation=generation,
            num_bytes=num_bytes,
            blocks=tuple(tuple(ids.tolist()) for _, ids in blocks.values()),
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


def _copy(pack: Merge, blocks: dict[bytes, tuple[int, Integers]]) -> PackCopy:
    """Return a copy as it is sent; lists of blocks are collected once each."""
    ids = pack.destination_blocks
    place, _ = blocks.setdefault(ids.tobytes(), (len(blocks), ids))
    return PackCopy(
        stage_offset=pack.stage_offset,
        stage_block_stride=pack.stage_block_stride,
        address=pack.destination_address,
        block_stride=pack.destination_block_stride,
        blocks=place,
        run_bytes=pack.run_bytes,
        loops=pack.loops,
    )
