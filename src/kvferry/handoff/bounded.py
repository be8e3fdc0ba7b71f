"""A dictionary of bounded size, for keys that peers choose."""

from collections import OrderedDict
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Bounded(OrderedDict[Key, Value]):
    """Keeps ``most`` entries: one entry more removes the oldest one.

    >>> kept: Bounded[str, int] = Bounded(2)
    >>> [kept.setdefault(key, number) for number, key in enumerate("abca")]
    [0, 1, 2, 3]
    >>> list(kept)
    ['c', 'a']
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        if len(self) > self._most:
            self.popitem(last=False)
