"""What becomes visible in a tier, and what a tier gives up: a journal for those who tell others where blocks lie."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.tiers.protocol import BlockKey


@dataclass(frozen=True, slots=True)
class Change:
    """Blocks of a tier, by the tier's name, that have become visible, or that are gone."""

    tier: str
    keys: Sequence[BlockKey]
    is_visible: bool


@dataclass(frozen=True, slots=True)
class Emptied:
    """A tier, by name, that has lost all of its blocks, or was closed for good: nobody finds any of them."""

    tier: str


@dataclass(slots=True)
class Journal:
    """The changes of all tiers of a stack, in order. Only a journal that ``is_kept`` grows.

    >>> journal = Journal(is_kept=True)
    >>> journal.note("host_memory", [b"a"], is_visible=True)
    >>> journal.take()
    [Change(tier='host_memory', keys=[b'a'], is_visible=True)]
    >>> journal.take()
    []
    """

    is_kept: bool = False
    _changes: list[Change | Emptied] = field(default_factory=list)

    def note(self, tier: str, keys: Sequence[BlockKey], *, is_visible: bool) -> None:
        """Add a change, if it is one."""
        if self.is_kept and keys:
            self._changes.append(Change(tier, keys, is_visible))

    def note_emptied(self, tier: str) -> None:
        """Add the loss of all blocks of a tier."""
        if self.is_kept:
            self._changes.append(Emptied(tier))

    def take(self) -> list[Change | Emptied]:
        """Return the changes since the last call."""
        changes, self._changes = self._changes, []
        return changes
