"""Bytes on their way into a peer's cache: straight from the cache here, or packed in a stage first.

What is packed goes in rounds, as much at a time as the stage has room for, and one is packed while the one before it is
on its way.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvferry.errors import KVFerryError, PlanError, Reason, TransportError
from kvferry.execution.device import OVER, Mark
from kvferry.execution.stage import Stage
from kvferry.plan.staging.scatter import Merge, StagedPart, gathered_rounds
from kvferry.plan.strided_copy import Offsets
from kvferry.transport.protocol import Descriptors, Direction, Status, Transfer
from kvferry.transport.registry import Link


class _Round(NamedTuple):
    """``rows`` are stage offset, address there and length."""

    rows: Offsets
    packs: Sequence[Merge]
    num_bytes: int


class _Stretch:
    """A round's part of the stage; ``begin`` is None while there is no room for it."""

    begin: int | None = None
    mark: Mark = OVER


class Writing:
    """``rows`` that are written as they are, and then ``parts`` of a gather that go by way of ``stage``.

    :meth:`poll` until the :attr:`status` is not pending, or from some time on :meth:`cancel`: nothing is being written
    any more then, and the stage has its room back. Used by one thread. Raises :class:`PlanError` (``unsupported``)
    where one block is more than the stage, or there is none, and whatever the transport refuses.
    """

    def __init__(
        self, link: Link, rows: Descriptors, parts: Sequence[StagedPart] = (), stage: Stage | None = None
    ) -> None:
        self._link, self._stage = link, stage
        self._rounds = deque(_rounds(parts, stage))
        self._next, self._current = _Stretch(), _Stretch()
        self._landed_bytes = 0
        self.num_bytes = int(rows[:, 2].sum()) + sum(part.num_bytes for part in parts)
        self.num_descriptors = len(rows) + sum(len(each.rows) for each in self._rounds)
        self.status = Status.PENDING
        self.error: KVFerryError | None = None
        self._transfer = self._submit(rows) if len(rows) or not self._rounds else None

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes that have landed, and those of what is on its way that the transport tells of, -1 where nothing is."""
        return self._landed_bytes, -1 if self._transfer is None else self._transfer.bytes_done

    def poll(self) -> Status:
        """Look after what is on its way, and pack what comes next."""
        if self.status is Status.PENDING:
            try:
                self._advance()
            except KVFerryError as error:
                self._end(Status.FAILED, error)
        return self.status

    def cancel(self) -> Status:
        """Stop what is on its way; pending until it is quiet. What is packed and has not gone gives its room back."""
        if self.status is Status.PENDING:
            following, self._next = self._next, _Stretch()
            self._give_back(following)
            transfer = self._transfer
            if transfer is None or self._link.transport.cancel(transfer) is not Status.PENDING:
                self._end(Status.CANCELLED)
        return self.status

    def _advance(self) -> None:
        transfer = self._transfer
        if transfer is not None and self._link.transport.poll(transfer) is not Status.PENDING:
            self._land(transfer)
        self._pack()
        if self._transfer is None and self._next.begin is not None and self._next.mark.is_over():
            self._write_packed(self._next.begin)

    def _land(self, transfer: Transfer) -> None:
        if transfer.status is not Status.DONE:
            raise transfer.error or TransportError(
                Reason.TRANSFER_FAILED, f"a write ended {transfer.status}.", "Check that the decode engine runs."
            )
        self._landed_bytes, self._transfer = self._landed_bytes + transfer.num_bytes, None
        if self._rounds:
            self._give_back(self._current)
        else:
            self._end(Status.DONE)

    def _pack(self) -> None:
        """Pack the next round unless it is packed already, or has no room yet."""
        if self._stage is None or not self._rounds or self._next.begin is not None:
            return
        following = self._rounds[0]
        self._next.begin = self._stage.take(self._next, following.num_bytes)
        if self._next.begin is not None:
            self._next.mark = self._stage.pack([copy.moved(self._next.begin) for copy in following.packs])

    def _write_packed(self, begin: int) -> None:
        assert self._stage is not None
        rows = self._rounds.popleft().rows
        rows[:, 0] += self._stage.region.base_address + begin
        self._current, self._next = self._next, _Stretch()
        self._transfer = self._submit(rows.view(np.uint64))

    def _submit(self, rows: Descriptors) -> Transfer:
        return self._link.transport.submit(self._link.peer, Direction.WRITE, rows)

    def _end(self, status: Status, error: KVFerryError | None = None) -> None:
        """Nothing is on its way any more."""
        self.status, self.error = status, error
        self._give_back(self._current)
        self._give_back(self._next)

    def _give_back(self, stretch: _Stretch) -> None:
        if self._stage is not None:
            self._stage.give_back(stretch, after=stretch.mark)


def _rounds(parts: Sequence[StagedPart], stage: Stage | None) -> list[_Round]:
    if not parts:
        return []
    if stage is None:
        raise PlanError(Reason.UNSUPPORTED, "there is no stage in which to pack.", "Write directly.")
    found: list[_Round] = []
    for packs, rows, num_bytes in gathered_rounds(parts, stage.round_bytes):
        if num_bytes > stage.region.length:
            raise PlanError(
                Reason.UNSUPPORTED,
                f"one block fills {num_bytes} bytes of a stage of {stage.region.length}.",
                "Raise stage_bytes.",
            )
        found.append(_Round(rows, packs, num_bytes))
    return found
