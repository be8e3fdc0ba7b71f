"""Registered local memory into which guard words are read, one word a read."""

import numpy as np

from kvferry.transport.protocol import Region

WORD_BYTES = 16
BEING_WRITTEN = 1 << 63
"""Set in the second half of a word while its holder's blocks are being written: a reader is to ask again."""


class Scratch:
    """A pool of 16-byte words; used by one thread.

    >>> scratch = Scratch(num_words=2)
    >>> slots = scratch.take(2)
    >>> scratch.has_room(1), scratch.word(slots[0]) == bytes(16)
    (False, True)
    """

    def __init__(self, num_words: int) -> None:
        self._words = np.zeros((num_words, 2), dtype=np.uint64)
        self._free = list(range(num_words))[::-1]

    @property
    def region(self) -> Region:
        """The memory to register."""
        return Region(base_address=int(self._words.ctypes.data), length=self._words.nbytes)

    def has_room(self, num_words: int) -> bool:
        """Return whether ``num_words`` are free."""
        return len(self._free) >= num_words

    def take(self, num_words: int) -> list[int]:
        """Take words; the caller has asked :meth:`has_room`."""
        return [self._free.pop() for _ in range(num_words)]

    def give_back(self, slots: list[int]) -> None:
        """Return words to the pool."""
        self._free.extend(slots)

    def clear(self, slot: int) -> None:
        """Forget the word in ``slot``: a read that never lands must not find a former one there."""
        self._words[slot] = 0

    def descriptor(self, slot: int, source_address: int) -> np.ndarray:
        """Return the ``(1, 3)`` descriptor that reads a remote word into ``slot``."""
        destination = int(self._words.ctypes.data) + slot * WORD_BYTES
        return np.array([[source_address, destination, WORD_BYTES]], dtype=np.uint64)

    def is_being_written(self, slot: int, expected: bytes) -> bool:
        """Return whether the word in ``slot`` will be the expected one once what is being written is done."""
        word = np.frombuffer(expected, dtype=np.uint64) | np.array([0, BEING_WRITTEN], dtype=np.uint64)
        return bool((self._words[slot] == word).all())

    def word(self, slot: int) -> bytes:
        """Return the word that was read into ``slot``."""
        return bytes(self._words[slot].tobytes())
