"""What one engine knows of the pool: the blocks that it stored itself, and what the pool said of others.

An engine *owns* the blocks that it stored, until it evicts them, and may own as many bytes as its share of the pool
allows. So all engines together never fill the pool, and each decides by its own order of use which blocks go. Of all
other blocks the engine knows what it asked: an answer is believed for a while, because other engines store and evict.

No thread, no clock, no Mooncake: the tier calls this from its verbs.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import compress, count, repeat

import numpy as np

from kvferry.tiers.eviction import LeastRecentlyUsed
from kvferry.tiers.protocol import BlockKey, Presence, Presences

HELD_SECONDS = 30.0
"""How long the answer is believed that another engine holds a block; a wrong one costs a load that misses."""
ABSENT_SECONDS = 1.0
"""How long the answer is believed that no engine holds a block; a wrong one costs a hit."""
_BELIEVED_SECONDS = {Presence.HELD: HELD_SECONDS, Presence.ABSENT: ABSENT_SECONDS}
_UNKNOWN = 255


@dataclass(frozen=True, slots=True, eq=False)
class _Belief:
    """What is believed of blocks until a time."""

    presence: Presence
    keys: Sequence[BlockKey]


class PoolIndex:
    """Blocks by key, with room for ``usable_bytes`` of own ones.

    >>> index = PoolIndex(3 * 4096)
    >>> index.reserve(b"a", 4000, frozenset()), index.publish(b"a"), index.own[b"a"]
    (True, None, 4000)
    >>> found, unknown = index.look_up([b"a", b"b"])
    >>> found.tolist(), unknown
    ([1, 2], [b'b'])
    >>> index.answer([b"b"], [False], now=5.0)
    >>> index.look_up([b"b"])[0].tolist(), index.expire(now=6.5), index.look_up([b"b"])[1]
    ([0], None, [b'b'])
    """

    def __init__(self, usable_bytes: int) -> None:
        self.own: dict[BlockKey, int] = {}
        """Bytes of the blocks that this engine owns and that are visible."""
        self.used_bytes = 0
        """Bytes that own blocks occupy in the pool, those being stored included."""
        self.evicted: list[BlockKey] = []
        """Blocks that ``reserve`` gave up; the tier takes them."""
        self._usable_bytes = usable_bytes
        self._policy = LeastRecentlyUsed()
        self._pins: Counter[BlockKey] = Counter()
        self._being_stored: dict[BlockKey, int] = {}
        self._asked: set[BlockKey] = set()
        self._leaving: Counter[BlockKey] = Counter()
        self._presence: dict[BlockKey, int] = {}
        self._beliefs: dict[BlockKey, _Belief] = {}
        """The last one of each block: earlier ones end without effect."""
        self._expiries: list[tuple[float, int, _Belief]] = []
        """A heap: a poll must not go over the answers of half a minute."""
        self._numbers = count()

    @property
    def num_pinned(self) -> int:
        """The number of blocks that an open load keeps."""
        return len(self._pins)

    def look_up(self, keys: Sequence[BlockKey]) -> tuple[Presences, list[BlockKey]]:
        """Return a presence for each key, and the keys that the pool must be asked for: these are pending now."""
        found = np.fromiter(map(self._presence.get, keys, repeat(_UNKNOWN)), np.uint8, len(keys))
        is_unknown = found == _UNKNOWN
        if not is_unknown.any():
            return found, []
        unknown = list(dict.fromkeys(compress(keys, is_unknown.tolist())))
        found[is_unknown] = Presence.PENDING
        self._presence.update(dict.fromkeys(unknown, int(Presence.PENDING)))
        self._asked.update(unknown)
        return found, unknown

    def answer(self, keys: Sequence[BlockKey], exists: Sequence[bool], now: float) -> None:
        """Note what the pool said of keys; what became known in another way meanwhile stays."""
        is_held = np.array(exists, np.bool_)
        for presence, flags in ((Presence.HELD, is_held), (Presence.ABSENT, ~is_held)):
            chosen = filter(self._asked.__contains__, compress(keys, flags.tolist()))
            self._believe(list(chosen), presence, now)

    def cannot_answer(self, keys: Iterable[BlockKey]) -> None:
        """Note that the pool did not answer: the next look-up asks again."""
        for key in self._asked.intersection(keys):
            self._asked.discard(key)
            del self._presence[key]

    def expire(self, now: float) -> None:
        """Forget answers that are too old."""
        while self._expiries and self._expiries[0][0] <= now:
            _, _, belief = heappop(self._expiries)
            for key in belief.keys:
                if self._beliefs.get(key) is not belief:
                    continue
                del self._beliefs[key]
                is_still = self._presence.get(key) == belief.presence
                if is_still and key not in self.own and key not in self._leaving:
                    del self._presence[key]

    def holds(self, key: BlockKey) -> bool:
        """Return whether a load may be tried."""
        return self._presence.get(key) == Presence.HELD

    def is_being_stored(self, key: BlockKey) -> bool:
        """Return whether an open store of this engine writes the block."""
        return key in self._being_stored

    # room

    def reserve(self, key: BlockKey, num_bytes: int, kept: Iterable[BlockKey]) -> bool:
        """Take room for a block, where needed by giving up own blocks that are neither pinned nor ``kept``."""
        occupied = allocated_bytes(num_bytes)
        if occupied > self._usable_bytes or not self._make_room(occupied, kept):
            return False
        self.used_bytes += occupied
        self._being_stored[key] = num_bytes
        self._asked.discard(key)
        self._presence[key] = int(Presence.PENDING)
        return True

    def publish(self, key: BlockKey) -> None:
        """Own a block that was being stored."""
        self.own[key] = self._being_stored.pop(key)
        self._policy.insert([key])
        self._presence[key] = int(Presence.HELD)

    def give_back(self, key: BlockKey, *, is_held_by_another: bool = False, now: float = 0.0) -> None:
        """End a store without owning the block."""
        self.used_bytes -= allocated_bytes(self._being_stored.pop(key))
        del self._presence[key]
        if is_held_by_another:
            self._believe([key], Presence.HELD, now)
        elif key in self._leaving:
            self._presence[key] = int(Presence.ABSENT)

    def forget(self, key: BlockKey) -> None:
        """Hold a block no longer: it was evicted, is damaged, or the pool does not have it."""
        if key in self.own:
            self._policy.remove([key])
            self._drop(key)
        elif key not in self._being_stored:
            self._asked.discard(key)
            self._presence.pop(key, None)

    def distrust(self, key: BlockKey, now: float) -> None:
        """Take a block for absent for a while, whatever the pool says: its holder does not answer."""
        self.forget(key)
        if key not in self._being_stored:
            self._believe([key], Presence.ABSENT, now, HELD_SECONDS)

    # blocks on their way out of the pool

    def leave(self, keys: Iterable[BlockKey]) -> None:
        """Take forgotten blocks for absent until :meth:`left`: their removal has begun."""
        for key in keys:
            self._leaving[key] += 1
            self._presence.setdefault(key, int(Presence.ABSENT))

    def left(self, keys: Iterable[BlockKey]) -> None:
        """Note that the pool has removed blocks."""
        for key in keys:
            self._leaving[key] -= 1
            if self._leaving[key] <= 0:
                del self._leaving[key]
                if self._presence.get(key) == Presence.ABSENT:
                    del self._presence[key]

    # loads

    def use(self, keys: Iterable[BlockKey]) -> None:
        """Count a use of each own block."""
        self._policy.use(filter(self.own.__contains__, keys))

    def pin(self, keys: Iterable[BlockKey]) -> None:
        """Keep blocks until :meth:`unpin`. Another engine may still evict those that it owns."""
        self._pins.update(keys)

    def unpin(self, keys: Iterable[BlockKey]) -> None:
        """End one pin of each block."""
        self._pins -= Counter(keys)

    def clear(self) -> list[BlockKey]:
        """Forget everything but pins and stores in progress: the pool is empty. Returns the blocks that were owned."""
        owned = list(self.own)
        self._policy.remove(owned)
        self.own.clear()
        self._asked.clear()
        self._leaving.clear()
        self._beliefs.clear()
        self._expiries.clear()
        self._presence = dict.fromkeys(self._being_stored, int(Presence.PENDING))
        self.used_bytes = sum(map(allocated_bytes, self._being_stored.values()))
        return owned

    def _believe(self, keys: Sequence[BlockKey], presence: Presence, now: float, seconds: float | None = None) -> None:
        if keys:
            belief = _Belief(presence, keys)
            self._asked.difference_update(keys)
            self._presence.update(dict.fromkeys(keys, int(presence)))
            self._beliefs.update(dict.fromkeys(keys, belief))
            until = now + (_BELIEVED_SECONDS[presence] if seconds is None else seconds)
            heappush(self._expiries, (until, next(self._numbers), belief))

    def _make_room(self, occupied: int, kept: Iterable[BlockKey]) -> bool:
        stays: Callable[[BlockKey], bool] = lambda key: key in self._pins or key in kept  # noqa: E731
        while self.used_bytes + occupied > self._usable_bytes:
            victims = self._policy.evict(1, stays)
            if not victims:
                return False
            self._drop(victims[0])
            self.evicted.append(victims[0])
        return True

    def _drop(self, key: BlockKey) -> None:
        self.used_bytes -= allocated_bytes(self.own.pop(key))
        del self._presence[key]


TRAILER_BYTES = 72
"""Bytes behind a block in the pool: its key, length and checksum."""


def allocated_bytes(num_bytes: int) -> int:
    """Return what Mooncake's allocator takes for a block and its trailer: an eighth of a power of two, rounded up.

    >>> allocated_bytes(65536), allocated_bytes(65536 - TRAILER_BYTES), allocated_bytes(1)
    (73728, 65536, 80)
    """
    stored = num_bytes + TRAILER_BYTES
    bits = max(0, stored.bit_length() - 4)
    return -(-stored >> bits) << bits
