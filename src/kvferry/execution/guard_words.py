"""Guard words: the seqlock by which a one-sided reader learns that its source was still its source.

A rank keeps one word per slot in memory registered beside its cache: ``(epoch, generation)``,
two unsigned 64-bit integers. It is set when a request gets its slot and changed *before* the
request's blocks are reported free. The reader reads it, then the data, then the word again.

On a GPU a step's work goes on after the step has returned. Until it is done the words of the requests that it writes
say so in one bit more, and a reader asks again.
"""

import threading
from collections.abc import Iterable
from functools import partial

import numpy as np

from kvferry.execution.device import Afterwards, DeviceOrder
from kvferry.execution.scratch import BEING_WRITTEN


class GuardWords:
    """The words of one rank, ``num_slots`` of them; slot memory is plain and registered by the owner.

    >>> words = GuardWords(num_slots=4)
    >>> words.set(2, epoch=7, generation=1)
    >>> words.array[2].tolist(), words.clear(2), words.array[2].tolist()
    ([7, 1], None, [0, 0])
    """

    def __init__(self, num_slots: int) -> None:
        self.array = np.zeros((num_slots, 2), dtype=np.uint64)

    @property
    def address(self) -> int:
        """Address of slot 0."""
        return int(self.array.ctypes.data)

    def set(self, slot: int, epoch: int, generation: int, *, being_written: bool = False) -> None:
        """Mark the slot as holding ``generation``, or as being written for it."""
        self.array[slot] = np.array((epoch, generation | BEING_WRITTEN * being_written), dtype=np.uint64)

    def clear(self, slot: int) -> None:
        """Mark the slot as holding nothing; must precede any reuse of the request's blocks."""
        self.array[slot] = 0

    def clear_all(self) -> None:
        """Mark every slot as holding nothing."""
        self.array[:] = 0


Held = tuple[int, int, int]
"""Slot, epoch and generation."""


class StepWords:
    """Changes words as each step orders it, in device order.

    ``begin`` comes before the step launches anything that writes blocks, ``finish`` after the last of it.
    """

    def __init__(self, words: GuardWords, order: DeviceOrder) -> None:
        self._words = words
        self._order = order
        self._afterwards = Afterwards(order)
        self._lock = threading.Lock()
        self._step = 0
        self._step_of: dict[int, int] = {}
        self._being_written: list[tuple[int, Held]] = []

    def begin(self, ended: Iterable[int], written: Iterable[Held]) -> None:
        """Clear the words of slots whose hold has ended, then set those of the requests that this step writes.

        In this order: a request may have been given the slot of a hold that ended since the last step.
        """
        with self._lock:
            self._step += 1
            for slot in ended:
                self._words.clear(slot)
                self._step_of.pop(slot, None)
            for held in written:
                self._words.set(*held, being_written=not self._order.is_immediate)
                if not self._order.is_immediate:
                    self._step_of[held[0]] = self._step
                    self._being_written.append((self._step, held))

    def finish(self) -> None:
        """Let readers believe what was written, once it is done on the device; returns at once."""
        if self._being_written:
            written, self._being_written = self._being_written, []
            self._afterwards.add(self._order.mark(), partial(self._publish, written))

    def close(self) -> None:
        """Let every hold end, since the blocks are about to go, and stop; twice is fine."""
        with self._lock:
            self._words.clear_all()
            self._step_of.clear()
        self._afterwards.close()

    def _publish(self, written: Iterable[tuple[int, Held]]) -> None:
        with self._lock:
            for step, held in written:
                # Not where the hold has ended since, or a later step writes on.
                if self._step_of.get(held[0]) == step:
                    self._words.set(*held)


def word_bytes(epoch: int, generation: int) -> bytes:
    """Return what a reader must find in the slot, before and after."""
    return np.array((epoch, generation), dtype=np.uint64).tobytes()
