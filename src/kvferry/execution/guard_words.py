"""Guard words in memory: a source rank's, one for each slot, and the pool into which a destination reads words.

A word names a hold, its prompt and its blocks (:mod:`kvferry.handoff.guard_word`). The source sets the word with the
step that computes the prompt's end, when all blocks are known, and changes it *before* the request's blocks are
reported free. See :mod:`kvferry.handoff.pull_read`.

On a GPU a step's work goes on after the step has returned. Until the work is done and the prompt's digests are kept,
one more bit is set in the words of the requests that the step writes ("being written"), and a destination reads such a
word again.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from kvferry.execution.device import DeferredActions, DeviceOrder
from kvferry.handoff.guard_word import WORD_BYTES, HeldPrompt, being_written
from kvferry.peer_log import PeerLog
from kvferry.transport.protocol import Region

logger = PeerLog(logging.getLogger(__name__))


class GuardWords:
    """The ``num_slots`` words of one rank. Their owner registers the memory.

    >>> words = GuardWords(num_slots=4)
    >>> words.set(2, bytes([7] + [0] * 7 + [1] + [0] * 7))
    >>> words.array[2].tolist(), words.clear(2), words.array[2].tolist()
    ([7, 1], None, [0, 0])
    """

    def __init__(self, num_slots: int) -> None:
        self.array = np.zeros((num_slots, 2), dtype=np.uint64)

    @property
    def address(self) -> int:
        """Address of slot 0."""
        return int(self.array.ctypes.data)

    @property
    def region(self) -> Region:
        """The memory to register."""
        return Region(self.address, self.array.nbytes)

    def set(self, slot: int, word: bytes) -> None:
        """Write the word of a hold into its slot."""
        self.array[slot] = np.frombuffer(word, dtype=np.uint64)

    def clear(self, slot: int) -> None:
        """Clear the slot; must precede any reuse of the request's blocks."""
        self.array[slot] = 0

    def clear_all(self) -> None:
        """Clear every slot."""
        self.array[:] = 0


class Held(NamedTuple):
    """The slot and the guard word of a hold, and what is held where the source keeps digests of it."""

    slot: int
    word: bytes
    prompt: HeldPrompt | None = None


class HeldPrompts(Protocol):
    """Writes held prompts on request. It is called while words change, so each call returns at once."""

    def hold(self, held: Held, *, counts: bool) -> None:
        """The word of this hold counts from now on, or will count unless :meth:`end` is called before."""

    def end(self, words: Sequence[bytes]) -> None:
        """The holds of these words have ended."""


class StepWords:
    """Changes the words at each step, in device order.

    Call ``begin`` before the step launches work that writes blocks, and ``finish`` after its last launch. Before a word
    counts, ``keep_digests`` gets the prompt. Where prompts are written on request, ``prompts`` learns which words
    count, and which will: a destination may announce its blocks before, as it may read a word "being written".
    """

    def __init__(
        self, words: GuardWords, order: DeviceOrder, keep_digests: Callable[[HeldPrompt], None] | None = None
    ) -> None:
        self._words = words
        self._keep_digests = keep_digests
        self.prompts: HeldPrompts | None = None
        self._held: dict[int, bytes] = {}
        self._order = order
        self._deferred = DeferredActions(order)
        self._lock = threading.Lock()
        self._step = 0
        self._step_of: dict[int, int] = {}
        self._being_written: list[tuple[int, Held]] = []

    def void(self, ended: Iterable[int]) -> None:
        """Clear the words of slots whose hold has ended, before anything of the step can write their blocks."""
        with self._lock:
            self._clear(list(ended))

    def begin(self, ended: Iterable[int], written: Iterable[Held], late: Iterable[Held] = ()) -> None:
        """Clear the words of slots whose hold has ended, then set those of the requests that this step writes.

        In this order, since a request may have got the slot of a hold that ended after the last step. ``late`` are the
        words of holds that earlier steps have written: these words count once those steps are done.
        """
        with self._lock:
            self._step += 1
            self._clear(list(ended))
            # On a CPU the step is done before anybody can learn of the hold, and so are the digests.
            self._being_written += self._set(written, counts=self._order.is_immediate)
            waiting = self._set(late, counts=False)
        self._publish_when_done(waiting)

    def finish(self) -> None:
        """Set the words without ``BEING_WRITTEN`` once the device has done the step."""
        written, self._being_written = self._being_written, []
        self._publish_when_done(written)

    def clear_all(self) -> None:
        """Clear every word, and publish none of the steps that are under way."""
        with self._lock:
            self._words.clear_all()
            self._step_of.clear()
            self._end(list(self._held))

    def close(self) -> None:
        """Clear every word, since the blocks are about to be freed, and stop; twice is fine."""
        self.clear_all()
        self._deferred.close()

    def _set(self, every: Iterable[Held], *, counts: bool) -> list[tuple[int, Held]]:
        """Set the words, which say "being written" unless they count at once; return them, each with this step."""
        waiting = []
        for held in every:
            self._words.set(held.slot, held.word if counts else being_written(held.word))
            self._step_of[held.slot] = self._step
            self._hold(held, counts=counts)
            waiting.append((self._step, held))
        return waiting

    def _publish_when_done(self, written: Sequence[tuple[int, Held]]) -> None:
        if not written:
            return
        if self._order.is_immediate:
            self._publish(written)
        else:
            self._deferred.add(self._order.mark(), partial(self._publish, written))

    def _publish(self, written: Iterable[tuple[int, Held]]) -> None:
        for step, held in written:
            # Not if the hold has ended since, or a later step writes its blocks too.
            if self._is_current(step, held) and self._has_digests(step, held):
                with self._lock:
                    if self._step_of.get(held.slot) == step:
                        self._words.set(held.slot, held.word)
                        self._hold(held, counts=True)

    def _hold(self, held: Held, *, counts: bool) -> None:
        """Let the prompt be written on request, once its word counts; the caller has the lock."""
        if self.prompts is None:
            return
        if not counts or self._held.get(held.slot) != held.word:
            self._end([held.slot])
        self._held[held.slot] = held.word
        self.prompts.hold(held, counts=counts)

    def _clear(self, slots: Sequence[int]) -> None:
        """Clear words, and stop the writes of their holds; the caller has the lock."""
        for slot in slots:
            self._words.clear(slot)
            self._step_of.pop(slot, None)
        self._end(slots)

    def _end(self, slots: Sequence[int]) -> None:
        """Stop the writes of the holds of these slots; the caller has the lock."""
        words = [word for slot in slots if (word := self._held.pop(slot, None)) is not None]
        if words and self.prompts is not None:
            self.prompts.end(words)

    def _is_current(self, step: int, held: Held) -> bool:
        with self._lock:
            return self._step_of.get(held.slot) == step

    def _has_digests(self, step: int, held: Held) -> bool:
        """Keep the digests of a prompt; where they cannot be computed, nobody reads the prompt of this step."""
        if self._keep_digests is None or held.prompt is None:
            return True
        try:
            self._keep_digests(held.prompt)
        except Exception:
            logger.exception("kvferry: no digests of a prompt could be kept: its hold is not readable")
            with self._lock:
                if self._step_of.get(held.slot) == step:
                    self._words.clear(held.slot)
                    self._end([held.slot])
            return False
        return True


class Scratch:
    """Registered memory of a destination into which it reads guard words; one thread uses it.

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
        """Take words; :meth:`has_room` must be true."""
        return [self._free.pop() for _ in range(num_words)]

    def give_back(self, slots: list[int]) -> None:
        """Return words to the pool."""
        self._free.extend(slots)

    def clear(self, slot: int) -> None:
        """Clear the word in ``slot``: where a read never lands, no earlier word may be found."""
        self._words[slot] = 0

    def descriptor(self, slot: int, source_address: int) -> np.ndarray:
        """Return the ``(1, 3)`` descriptor that reads the word at ``source_address`` into ``slot``."""
        destination = int(self._words.ctypes.data) + slot * WORD_BYTES
        return np.array([[source_address, destination, WORD_BYTES]], dtype=np.uint64)

    def word(self, slot: int) -> bytes:
        """Return the word that was read into ``slot``."""
        return bytes(self._words[slot].tobytes())
