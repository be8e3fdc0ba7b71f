"""Which block goes when a tier is full: the least recently used.

The order has the visible blocks of a tier; it neither owns their bytes nor knows their pins. Insertion and use are
batches, and a use of a block is O(1) without a Python loop. Pinned blocks are passed over without one too, so
``is_pinned`` should be a method of a set.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import filterfalse, islice

from kvferry.tiers.protocol import BlockKey


class LeastRecentlyUsed:
    """Evicts the block whose last use, or insertion, is the oldest.

    ``use`` and ``remove`` take blocks that were inserted.

    >>> policy = LeastRecentlyUsed()
    >>> policy.insert([b"a", b"b", b"c", b"d"])
    >>> policy.use([b"a"])
    >>> policy.evict(2, is_pinned=lambda key: key == b"b")
    [b'c', b'd']
    """

    def __init__(self) -> None:
        self._order: OrderedDict[BlockKey, None] = OrderedDict()

    def insert(self, keys: Iterable[BlockKey]) -> None:
        """Add blocks that the tier did not hold as the most recent ones, oldest first."""
        self._order.update(dict.fromkeys(keys))

    def use(self, keys: Iterable[BlockKey]) -> None:
        """Make the blocks the most recent ones, in this order."""
        _for_each(self._order.move_to_end, keys)

    def remove(self, keys: Iterable[BlockKey]) -> None:
        """Forget blocks that are gone for another reason than eviction."""
        _for_each(self._order.__delitem__, keys)

    def evict(self, num_blocks: int, is_pinned: Callable[[BlockKey], bool]) -> Sequence[BlockKey]:
        """Remove and return up to ``num_blocks`` least recently used blocks that are not pinned; pinned ones keep their
        places.
        """
        victims = list(islice(filterfalse(is_pinned, self._order), num_blocks))
        self.remove(victims)
        return victims


def _for_each(call: Callable[[BlockKey], None], keys: Iterable[BlockKey]) -> None:
    """Call for each key, without a Python loop."""
    deque(map(call, keys), maxlen=0)
