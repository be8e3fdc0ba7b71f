"""Guard words: the seqlock by which a one-sided reader learns that its source was still its source.

A rank keeps one word per slot in memory registered beside its cache: ``(epoch, generation)``,
two unsigned 64-bit integers. It is set when a request gets its slot and changed *before* the
request's blocks are reported free. The reader reads it, then the data, then the word again.
"""

import numpy as np

WORD_BYTES = 16


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

    def set(self, slot: int, epoch: int, generation: int) -> None:
        """Mark the slot as holding ``generation``."""
        self.array[slot] = (epoch, generation)

    def clear(self, slot: int) -> None:
        """Mark the slot as holding nothing; must precede any reuse of the request's blocks."""
        self.array[slot] = 0


def word_bytes(epoch: int, generation: int) -> bytes:
    """Return what a reader must find in the slot, before and after."""
    return np.array((epoch, generation), dtype=np.uint64).tobytes()
