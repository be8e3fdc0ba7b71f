"""Which block goes when a tier is full: least recently used, or S3-FIFO.

A policy orders the visible blocks of a tier; it neither owns their bytes nor knows their pins. Insertion and use are
batches, and a use of a block is O(1) without a Python loop; an eviction is a step for each victim. Pinned blocks are
passed over without one, so ``is_pinned`` should be a method of a set.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from itertools import filterfalse, islice
from typing import Protocol

from kvferry.tiers.protocol import BlockKey

IsPinned = Callable[[BlockKey], bool]


class Eviction(StrEnum):
    """The policies by name."""

    LRU = "lru"
    S3_FIFO = "s3-fifo"


class EvictionPolicy(Protocol):
    """Orders blocks for eviction. ``use``, ``remove`` and ``evict`` take blocks that were inserted."""

    def insert(self, keys: Iterable[BlockKey]) -> None:
        """Add blocks that the tier did not hold, oldest first."""

    def use(self, keys: Iterable[BlockKey]) -> None:
        """Count one use of each block, in this order."""

    def remove(self, keys: Iterable[BlockKey]) -> None:
        """Forget blocks that are gone for another reason than eviction."""

    def evict(self, num_blocks: int, is_pinned: IsPinned) -> Sequence[BlockKey]:
        """Remove and return up to ``num_blocks`` blocks that are not pinned; fewer where all others are pinned.

        Pinned blocks keep their places.
        """


class LeastRecentlyUsed:
    """Evicts the block whose last use, or insertion, is the oldest.

    >>> policy = LeastRecentlyUsed()
    >>> policy.insert([b"a", b"b", b"c", b"d"])
    >>> policy.use([b"a"])
    >>> policy.evict(2, is_pinned=lambda key: key == b"b")
    [b'c', b'd']
    """

    def __init__(self) -> None:
        self._order: OrderedDict[BlockKey, None] = OrderedDict()

    def insert(self, keys: Iterable[BlockKey]) -> None:
        """Add the blocks as the most recent ones."""
        self._order.update(dict.fromkeys(keys))

    def use(self, keys: Iterable[BlockKey]) -> None:
        """Make the blocks the most recent ones."""
        _for_each(self._order.move_to_end, keys)

    def remove(self, keys: Iterable[BlockKey]) -> None:
        """Forget the blocks."""
        _for_each(self._order.__delitem__, keys)

    def evict(self, num_blocks: int, is_pinned: IsPinned) -> Sequence[BlockKey]:
        """Remove and return the least recently used blocks that are not pinned."""
        victims = list(islice(filterfalse(is_pinned, self._order), num_blocks))
        self.remove(victims)
        return victims


SMALL_SHARE = 0.1
"""Share of the blocks that the queue of new blocks should have."""
GHOST_SHARE = 0.9
"""Evicted keys that are remembered, as a share of the blocks of the tier."""
USES_TO_STAY = 2
"""Uses that move a block from the queue of new blocks to the main queue."""
BATCH = 256
"""Blocks that are looked for at a time behind pinned ones."""
MOST_USES = 3
"""Uses that count in the main queue: each lets a block stay for one more round."""


class S3Fifo:
    """Evicts new blocks that are not used again soon before blocks that were.

    New blocks enter a *small* queue. Its oldest block moves to the *main* queue when it was used twice, and goes
    otherwise. The oldest block of the main queue goes unless it was used since its last round. A block that comes back
    soon after it went from the small queue, while its key is still a *ghost*, enters the main queue at once. So a long
    prompt that is seen once cannot drive out what many requests share.

    From "FIFO queues are all you need for cache eviction" (SOSP 2023), in the version of libCacheSim 0.3.5, against
    which the tests compare: while the tier fills up for the first time, blocks that find the small queue full enter the
    main queue.

    >>> policy = S3Fifo(num_blocks=20)
    >>> policy.insert([b"a", b"b"])
    >>> policy.use([b"a"]), policy.use([b"a"])
    (None, None)
    >>> policy.insert([b"c"])
    >>> policy.evict(2, is_pinned=lambda key: False)
    [b'b', b'c']
    """

    def __init__(self, num_blocks: int) -> None:
        self._small_size = max(1, int(num_blocks * SMALL_SHARE))
        self._main_size = num_blocks - self._small_size
        self._num_ghosts = int(num_blocks * GHOST_SHARE)
        self._small: OrderedDict[BlockKey, None] = OrderedDict()
        self._main: OrderedDict[BlockKey, None] = OrderedDict()
        self._ghosts: OrderedDict[BlockKey, None] = OrderedDict()
        self._uses: Counter[BlockKey] = Counter()
        self._has_evicted = False

    def insert(self, keys: Iterable[BlockKey]) -> None:
        """Add the blocks to the small queue, those whose ghosts are remembered to the main queue."""
        for key in keys:
            is_back = self._ghosts.pop(key, self) is None
            is_filling_up = not self._has_evicted and len(self._small) >= self._small_size
            (self._main if is_back or is_filling_up else self._small)[key] = None
            self._uses[key] = 0
        self._trim_ghosts(self._num_ghosts)

    def use(self, keys: Iterable[BlockKey]) -> None:
        """Count the uses; no block moves."""
        self._uses.update(keys)

    def remove(self, keys: Iterable[BlockKey]) -> None:
        """Forget the blocks and their uses."""
        for key in keys:
            (self._small if key in self._small else self._main).pop(key)
            del self._uses[key]

    def evict(self, num_blocks: int, is_pinned: IsPinned) -> Sequence[BlockKey]:
        """Remove and return blocks as the class says."""
        victims: list[BlockKey] = []
        small, main = _Unpinned(self._small, is_pinned), _Unpinned(self._main, is_pinned)
        while len(victims) < num_blocks:
            main_is_full = len(self._main) > self._main_size
            if small.first is not None and not (main_is_full and main.first is not None):
                victims += self._evict_small(small, main)
            elif main.first is not None:
                victims += self._evict_main(main)
            else:
                break
            self._has_evicted = True
        # The ghosts of this call outlive the insertion of the blocks that it makes room for.
        self._trim_ghosts(self._num_ghosts + len(victims))
        return victims

    def _evict_small(self, small: "_Unpinned", main: "_Unpinned") -> list[BlockKey]:
        """Go through the small queue up to a block that goes; return the block, or nothing where all stay."""
        while (key := small.first) is not None:
            small.take()
            if self._uses[key] < USES_TO_STAY:
                self._ghosts[key] = None
                del self._uses[key]
                return [key]
            main.append(key)
            self._uses[key] = 0
        return []

    def _evict_main(self, main: "_Unpinned") -> list[BlockKey]:
        """Go through the main queue up to a block that goes; return the block, or nothing where all are pinned."""
        while (key := main.first) is not None:
            main.take()
            if not self._uses[key]:
                del self._uses[key]
                return [key]
            main.append(key)
            self._uses[key] = min(self._uses[key], MOST_USES) - 1
        return []

    def _trim_ghosts(self, num_ghosts: int) -> None:
        while len(self._ghosts) > num_ghosts:
            self._ghosts.popitem(last=False)


class _Unpinned:
    """The blocks of a queue that are not pinned, from the old end on; pinned ones are passed over in batches."""

    def __init__(self, queue: OrderedDict[BlockKey, None], is_pinned: IsPinned) -> None:
        self._queue, self._is_pinned = queue, is_pinned
        self._found: deque[BlockKey] = deque()
        self._has_all = False

    @property
    def first(self) -> BlockKey | None:
        """The oldest block that is not pinned."""
        if not self._found and not self._has_all:
            self._found.extend(islice(filterfalse(self._is_pinned, self._queue), BATCH))
            self._has_all = not self._found
        return self._found[0] if self._found else None

    def take(self) -> None:
        """Remove the first block."""
        del self._queue[self._found.popleft()]

    def append(self, key: BlockKey) -> None:
        """Add a block that is not pinned at the young end."""
        self._queue[key] = None
        if self._has_all:
            self._found.append(key)


def make_policy(eviction: Eviction, num_blocks: int) -> EvictionPolicy:
    """Return an empty policy for a tier of at most ``num_blocks`` blocks."""
    return LeastRecentlyUsed() if eviction is Eviction.LRU else S3Fifo(num_blocks)


def _for_each(call: Callable[[BlockKey], None], keys: Iterable[BlockKey]) -> None:
    """Call for each key, without a Python loop."""
    deque(map(call, keys), maxlen=0)
