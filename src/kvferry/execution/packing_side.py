"""The source's side of a gather: packs parts of its cache into its stage for readers, and takes them back.

The state machine is pure: messages and the time are inputs. A part is the reader's until it says that it is done, or
until its lease is over; then its word changes before another gets its memory. That bytes are right is proven by words:
the hold's, which must be the same before and after the copy, and the part's, which no two parts share and which a
reader reads after the data. The lease serves only to take back what a dead reader had.
"""

import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvferry.errors import HandoffError, Reason
from kvferry.execution.guard_words import GuardWords, word_bytes
from kvferry.execution.pack_copies import from_message
from kvferry.execution.scratch import BEING_WRITTEN, WORD_BYTES
from kvferry.execution.stage import Stage
from kvferry.handoff.holds import Lease
from kvferry.handoff.messages import Answer, Busy, Pack, Packed, Question, Unpack, Unpacked
from kvferry.layout.shard import Region
from kvferry.plan.staging.scatter import Merge

LEASE_SECONDS = 2.0
"""How long a part is kept for a reader of whom nothing is heard."""
PLACE_SECONDS = 0.5
"""How long a reader that found no room keeps its place in the queue without asking again."""
PARTS_PER_READER = 2
MAX_PARTS = 256

Key = tuple[str, int]
"""A reader and the number of its part."""


@dataclass(slots=True)
class _Part:
    slot: int
    packed: Packed
    lease: Lease


class PackingSide:
    """The parts of one rank's stage. Used by one thread.

    ``holds`` are the rank's guard words, ``regions`` its cache: nothing else is ever packed. The caller registers
    :attr:`regions` with its transports.
    """

    def __init__(self, stage: Stage, holds: GuardWords, regions: Sequence[Region]) -> None:
        self._stage, self._holds, self._cache = stage, holds, tuple(regions)
        self._words = GuardWords(MAX_PARTS)
        self._free_slots = list(range(MAX_PARTS))[::-1]
        self._life, self._num_packed = secrets.randbits(63), 0
        self._parts: dict[Key, _Part] = {}
        self._waiting: dict[Key, Lease] = {}

    @property
    def regions(self) -> list[Region]:
        """The memory that readers read: the stage and the parts' words."""
        return [self._stage.region, Region(self._words.address, self._words.array.nbytes)]

    @property
    def stage_bytes(self) -> int:
        """Bytes of the stage."""
        return self._stage.region.length

    @property
    def num_parts(self) -> int:
        """Parts that readers have."""
        return len(self._parts)

    def answer(self, question: Question, now: float) -> Answer:
        """Answer one question.

        Raises :class:`HandoffError`: ``source-changed`` when the hold has ended, ``invalid-request`` for copies that
        leave the cache or the part, or too many parts, ``unsupported`` for another kind of question; and
        :class:`PlanError` (``unsupported``) for more than the whole stage.
        """
        self.expire(now)
        if isinstance(question, Unpack):
            self._take_back(key for key in (*self._parts, *self._waiting) if key[0] == question.reader)
            return Unpacked()
        if not isinstance(question, Pack):
            raise HandoffError(
                Reason.UNSUPPORTED,
                f"a packer does not answer a {type(question).__name__}.",
                "Ask the prefill engine's own port.",
            )
        self._hear_of(question, now)
        key = (question.reader, question.number)
        found = self._parts.get(key)
        return self._pack(key, question, now) if found is None else found.packed

    def expire(self, now: float) -> None:
        """Take back what nobody has asked about for too long."""
        self._take_back(key for key, part in self._parts.items() if part.lease.is_over(now))
        self._take_back(key for key, lease in self._waiting.items() if lease.is_over(now))

    def _hear_of(self, question: Pack, now: float) -> None:
        """Take back what the reader is done with; it is alive, so what it still reads stays its own."""
        own = [key for key in self._parts if key[0] == question.reader]
        self._take_back(key for key in own if key[1] < question.num_done)
        for key in own:
            if key in self._parts:
                self._parts[key].lease = Lease.granted(now, LEASE_SECONDS)

    def _take_back(self, keys: Iterable[Key]) -> None:
        for key in list(keys):
            part = self._parts.pop(key, None)
            if part is not None:
                self._words.clear(part.slot)
                self._free_slots.append(part.slot)
            self._waiting.pop(key, None)
            self._stage.give_back(key)

    def _pack(self, key: Key, question: Pack, now: float) -> Packed | Busy:
        num_own = sum(reader == question.reader for reader, _ in self._parts)
        if num_own >= PARTS_PER_READER:
            raise _invalid(f"a reader has at most {PARTS_PER_READER} parts at a time.")
        copies = checked_copies(question, self._cache)
        if not self._is_held(question) or not self._free_slots:
            return Busy()
        begin = self._stage.take(key, question.num_bytes)
        if begin is None:
            self._waiting[key] = Lease.granted(now, PLACE_SECONDS)
            return Busy()
        self._waiting.pop(key, None)
        try:
            self._stage.pack([copy.moved(begin) for copy in copies]).wait()
            is_unchanged = self._is_held(question)
        except Exception:
            self._stage.give_back(key)
            raise
        if not is_unchanged:
            self._stage.give_back(key)
            return Busy()
        return self._publish(key, begin, now)

    def _publish(self, key: Key, begin: int, now: float) -> Packed:
        slot = self._free_slots.pop()
        self._num_packed += 1
        self._words.set(slot, self._life, self._num_packed)
        packed = Packed(
            address=self._stage.region.base_address + begin,
            word_address=self._words.address + slot * WORD_BYTES,
            word=word_bytes(self._life, self._num_packed),
        )
        self._parts[key] = _Part(slot, packed, Lease.granted(now, LEASE_SECONDS))
        return packed

    def _is_held(self, question: Pack) -> bool:
        """Return whether the hold's blocks may be read; False while they are being written. Raises when it is over."""
        if question.slot >= len(self._holds.array):
            raise _invalid(f"slot {question.slot} was named: there are {len(self._holds.array)}.")
        epoch, generation = self._holds.array[question.slot].tolist()
        if (epoch, generation) == (question.epoch, question.generation | BEING_WRITTEN):
            return False
        if (epoch, generation) != (question.epoch, question.generation):
            raise HandoffError(
                Reason.SOURCE_CHANGED,
                "the prefill engine stopped holding the blocks that were to be packed.",
                "Send the prompt again; if this repeats, raise lease_seconds on the prefill side.",
            )
        return True


def checked_copies(question: Pack, cache: Sequence[Region]) -> list[Merge]:
    """Return the copies of a question, once it is sure that they stay inside the cache and the part.

    No more bytes are copied than the part has. Raises :class:`HandoffError` (``invalid-request``).

    >>> from kvferry.handoff.messages import PackCopy
    >>> copy = PackCopy(0, 16, 4096, 64, 0, 8, ((2, 8, 32),))
    >>> pack = Pack("reader", 0, 0, 0, 7, 1, 32, ((5, 3),), (copy,))
    >>> checked_copies(pack, [Region(4096, 6 * 64)])[0].destination_blocks.tolist()
    [5, 3]
    >>> checked_copies(pack, [Region(4096, 5 * 64)])
    Traceback (most recent call last):
    kvferry.errors.HandoffError: copy 0 was to read bytes 4288 to 4456, which lie in no region of the cache. ...
    """
    merges, num_left = from_message(question), question.num_bytes
    for number, copy in enumerate(merges):
        blocks = copy.destination_blocks
        begin, end = _reach(copy, 1, copy.stage_offset, copy.stage_block_stride, (0, len(blocks) - 1))
        if begin < 0 or end > question.num_bytes:
            raise _invalid(f"copy {number} was to write bytes {begin} to {end} of a part of {question.num_bytes}.")
        first_and_last = int(blocks.min()), int(blocks.max())
        begin, end = _reach(copy, 2, copy.destination_address, copy.destination_block_stride, first_and_last)
        if not any(each.base_address <= begin and end <= each.base_address + each.length for each in cache):
            raise _invalid(f"copy {number} was to read bytes {begin} to {end}, which lie in no region of the cache.")
        num_left -= len(blocks) * copy.run_bytes * math.prod(count for count, _, _ in copy.loops)
        if num_left < 0:
            raise _invalid(f"more was to be packed than the {question.num_bytes} bytes of the part.")
    return merges


def _reach(copy: Merge, side: int, begin: int, block_stride: int, blocks: tuple[int, int]) -> tuple[int, int]:
    """Return the first and the last byte, half-open, of one side of a copy (1 is the stage's), exactly."""
    steps = [(loop[0] - 1) * loop[side] for loop in copy.loops]
    first = begin + blocks[0] * block_stride + sum(min(step, 0) for step in steps)
    last = begin + blocks[1] * block_stride + sum(max(step, 0) for step in steps)
    return first, last + copy.run_bytes


def _invalid(what: str) -> HandoffError:
    return HandoffError(Reason.INVALID_REQUEST, what, "Run the same kvferry version on both sides.")
