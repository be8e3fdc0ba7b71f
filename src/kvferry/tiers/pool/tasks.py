"""What the threads of the pool tier do: ask the pool, remove blocks, read blocks, write blocks.

A task keeps what came of it; the tier takes that on its caller's thread.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from kvferry.errors import Reason, TierError
from kvferry.tiers.pool.store import BLOCKS_PER_READ, BLOCKS_PER_WRITE, PoolStore, UncertainTransfer, chosen
from kvferry.tiers.protocol import BlockKey, TierCopy

logger = logging.getLogger(__name__)

MAX_ASKED = 1 << 16
"""Most blocks of one question to the master."""
CANCELLED = TierError(Reason.ABORTED, "the copy was cancelled.")


@dataclass(slots=True, eq=False)
class Ask:
    """A question which of the blocks the pool has; no answer where the pool cannot be reached."""

    store: PoolStore
    keys: Sequence[BlockKey]
    exists: list[bool] | None = None

    def perform(self) -> None:
        """Ask."""
        exists: list[bool] = []
        for at in range(0, len(self.keys), MAX_ASKED):
            exists += self.store.exists(self.keys[at : at + MAX_ASKED])
        self.exists = exists

    def fail(self, error: Exception) -> None:
        """There is no answer."""
        logger.debug("a question to the pool has no answer: %r", error)


@dataclass(slots=True, eq=False)
class Removal:
    """Blocks that shall go from the pool."""

    store: PoolStore
    keys: Sequence[BlockKey]
    is_done: bool = False

    def perform(self) -> None:
        """Remove them."""
        self.store.remove(self.keys)
        self.is_done = True

    def fail(self, error: Exception) -> None:
        """They are still there."""
        logger.debug("blocks were not removed from the pool: %r", error)


@dataclass(slots=True, eq=False)
class Transfer:
    """Blocks of a copy that the threads move. ``errors[i]``: why block ``i`` did not move; None where it did."""

    blocks_per_call: ClassVar[int]
    store: PoolStore
    copy: TierCopy
    indices: Sequence[int]
    errors: dict[int, TierError | None] = field(default_factory=dict)
    is_cancelled: threading.Event = field(default_factory=threading.Event)
    is_uncertain: bool = False

    def perform(self) -> None:
        """Move the blocks, in parts."""
        copy = self.copy
        addresses, lengths = copy.slots.addresses.tolist(), copy.slots.lengths.tolist()
        for at in range(0, len(self.indices), self.blocks_per_call):
            part = self.indices[at : at + self.blocks_per_call]
            try:
                if self.is_cancelled.is_set():
                    raise CANCELLED
                rows = ([copy.keys[i] for i in part], [addresses[i] for i in part], [lengths[i] for i in part])
                found = self.move(part, *rows)
                self.errors.update(zip(part, found, strict=True))
                slow = next((error for error in found if error and error.reason is Reason.TRANSFER_FAILED), None)
                if slow is not None:  # the next part would wait as long
                    self.errors.update(dict.fromkeys(self.indices[at + self.blocks_per_call :], slow))
                    return
            except UncertainTransfer:
                self.is_uncertain = True
                return
            except TierError as error:
                self.errors.update(dict.fromkeys(part, error))
            except Exception as error:
                self.errors.update(dict.fromkeys(part, TierError(Reason.TIER_FAILED, f"the pool failed: {error!r}.")))

    def move(
        self, part: Sequence[int], keys: list[BlockKey], addresses: list[int], lengths: list[int]
    ) -> list[TierError | None]:
        """Move the blocks ``part`` of the copy; return the error of each."""
        raise NotImplementedError


@dataclass(slots=True, eq=False)
class Read(Transfer):
    """Blocks on their way out of the pool."""

    blocks_per_call = BLOCKS_PER_READ

    def move(
        self, part: Sequence[int], keys: list[BlockKey], addresses: list[int], lengths: list[int]
    ) -> list[TierError | None]:
        """Read them into their slots."""
        return self.store.get(keys, addresses, lengths)


@dataclass(slots=True, eq=False)
class Write(Transfer):
    """Blocks on their way into the pool. ``existed``: those that another engine had stored already.

    ``uncertain``: those that the pool may have got or not.
    """

    blocks_per_call = BLOCKS_PER_WRITE
    existed: set[int] = field(default_factory=set)
    uncertain: set[int] = field(default_factory=set)

    def move(
        self, part: Sequence[int], keys: list[BlockKey], addresses: list[int], lengths: list[int]
    ) -> list[TierError | None]:
        """Write those that the pool does not have."""
        exists = self.store.exists(keys)
        self.existed.update(i for i, found in zip(part, exists, strict=True) if found)
        new = [place for place, found in enumerate(exists) if not found]
        errors: list[TierError | None] = [None] * len(keys)
        self.uncertain.update(part[place] for place in new)
        if new:
            found = self.store.put(chosen(keys, new), chosen(addresses, new), chosen(lengths, new))
            for place, error in zip(new, found, strict=True):
                errors[place] = error
        self.uncertain.difference_update(part[place] for place in new)
        return errors
