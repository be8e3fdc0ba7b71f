"""A lower tier in a dictionary of this process: the smallest one that passes the suite, with faults on demand.

Bytes move inside ``poll`` only, a few blocks a call, so tests decide when copies end.
"""

import ctypes
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvferry.errors import Reason, TierError
from kvferry.layout.shard import Region
from kvferry.tiers.checksum import checksum
from kvferry.tiers.eviction import LeastRecentlyUsed
from kvferry.tiers.protocol import (
    BlockKey,
    Capabilities,
    Load,
    Presence,
    Presences,
    Slots,
    Store,
    TierCopy,
    check_batch,
    check_completes,
    check_slots,
    closed_error,
)


@dataclass(slots=True)
class TierFaults:
    """What goes wrong from now on.

    ``hangs``: no copy makes progress, and a cancelled one does not end. ``fails``: every block that moves fails as
    ``tier-failed``. ``raises``: look-ups and prepares raise ``tier-failed``, which no tier should. ``is_silent``: every
    look-up answers ``PENDING``.
    """

    hangs: bool = False
    fails: bool = False
    raises: bool = False
    is_silent: bool = False


Content = tuple[bytes, int]
"""The bytes of a block and their checksum, taken when the block was stored."""


@dataclass(slots=True, eq=False)
class _Open:
    """A copy that is not completed: which of its blocks are still to move, and what it pins or stores."""

    to_move: deque[int]
    num_emptied: int
    num_reserved: int = 0
    contents: dict[BlockKey, Content] = field(default_factory=dict)
    is_cancelled: bool = False


class DictionaryTier:
    """See the module's docstring. ``blocks`` are the visible blocks: tests may damage them."""

    def __init__(
        self, region: Region, capacity_bytes: int, *, blocks_per_poll: int = 4, name: str = "dictionary"
    ) -> None:
        self.faults = TierFaults()
        self.blocks: dict[BlockKey, Content] = {}
        self.num_emptied = 0
        self._region = region
        self._capabilities = Capabilities(name, capacity_bytes)
        self._blocks_per_poll = blocks_per_poll
        self._policy = LeastRecentlyUsed()
        self._pins: Counter[BlockKey] = Counter()
        self._open: dict[TierCopy, _Open] = {}
        self._ended: list[TierCopy] = []
        self._num_bytes = 0
        self._is_closed = False

    @property
    def capabilities(self) -> Capabilities:
        """A capacity in bytes of blocks; nothing survives."""
        return self._capabilities

    def look_up(self, keys: Sequence[BlockKey]) -> Presences:
        """Return a presence for each key."""
        self._check_verb()
        check_batch(keys)
        if self.faults.is_silent:
            return np.full(len(keys), Presence.PENDING, np.uint8)
        return np.fromiter(map(self.blocks.__contains__, keys), np.uint8, len(keys))

    def prepare_load(self, keys: Sequence[BlockKey], slots: Slots) -> Load:
        """Pin the blocks that are there and have the length of their slot."""
        self._check_verb()
        check_slots(keys, slots, self._region)
        load = Load(keys=list(keys), slots=slots, landed=np.zeros(len(keys), np.bool_))
        opened = _Open(deque(), self.num_emptied)
        for index, (key, length) in enumerate(zip(keys, slots.lengths.tolist(), strict=True)):
            if key not in self.blocks:
                load.fail(1, TierError(Reason.BLOCK_MISSING, "the block is not here."))
            elif len(self.blocks[key][0]) != length:
                load.fail(1, TierError(Reason.BLOCK_SIZE_MISMATCH, f"the block does not have {length} bytes."))
            else:
                opened.to_move.append(index)
                opened.contents[key] = self.blocks[key]
        self._pins.update(opened.contents.keys())
        self._policy.use(opened.contents)
        self._keep_open(load, opened)
        return load

    def complete_load(self, load: Load) -> None:
        """End the pins."""
        self._pins -= Counter(dict.fromkeys(self._take_out(load).contents, 1))

    def prepare_store(self, keys: Sequence[BlockKey], slots: Slots) -> Store:
        """Reserve room for the blocks that are not here and that no other store brings."""
        self._check_verb()
        check_slots(keys, slots, self._region)
        being_stored = {key for copy in self._open if isinstance(copy, Store) for key in copy.keys}
        store = Store(keys=list(keys), slots=slots, landed=np.zeros(len(keys), np.bool_), evicted=[])
        opened, evicted = _Open(deque(), self.num_emptied), list[BlockKey]()
        for index, (key, length) in enumerate(zip(keys, slots.lengths.tolist(), strict=True)):
            if key in self.blocks:
                store.landed[index] = True
            elif key in being_stored:
                store.fail(1, TierError(Reason.ALREADY_BEING_STORED, "another store brings the block."))
            elif not self._make_room(length, set(keys), evicted):
                store.fail(1, TierError(Reason.TIER_FULL, f"no room for {length} bytes."))
            else:
                self._num_bytes += length
                opened.num_reserved += length
                opened.to_move.append(index)
        store.evicted = evicted
        self._keep_open(store, opened)
        return store

    def complete_store(self, store: Store) -> None:
        """Make the blocks visible that have landed."""
        opened = self._take_out(store)
        is_gone = opened.is_cancelled or opened.num_emptied != self.num_emptied
        arrived = {} if is_gone else opened.contents
        self.blocks.update(arrived)
        self._policy.insert(arrived)
        self._num_bytes -= opened.num_reserved - sum(len(content) for content, _ in arrived.values())

    def poll(self) -> list[TierCopy]:
        """Move a few blocks, in the order of the copies; return the copies that have ended."""
        self._check_open()
        if not self.faults.hangs:
            num_left = self._blocks_per_poll
            for copy, opened in self._open.items():
                while opened.to_move and num_left:
                    self._move(copy, opened, opened.to_move.popleft())
                    num_left -= 1
                self._end_if_done(copy, opened)
        ended, self._ended = self._ended, []
        return ended

    def cancel(self, copy: TierCopy) -> None:
        """Move no more blocks of the copy; while the tier hangs, the copy does not end."""
        self._check_open()
        if copy.has_ended:
            return
        opened = self._open[copy]
        opened.is_cancelled = True
        num_lost = len(opened.to_move)
        opened.to_move.clear()
        if isinstance(copy, Store):
            copy.landed[:] = False
            copy.failures.clear()
            num_lost = len(copy.keys)
        copy.fail(num_lost, TierError(Reason.ABORTED, "the copy was cancelled."))
        if not self.faults.hangs:
            self._end_if_done(copy, opened)

    def lose_all(self) -> None:
        """Lose all blocks, those of open stores too, as a pool does whose master was started again."""
        for key in list(self.blocks):
            self._forget(key)
        self.num_emptied += 1

    def snapshot(self) -> dict[str, Any]:
        """Return the counts that every tier has."""
        return {
            "num_blocks": len(self.blocks),
            "num_bytes": self._num_bytes,
            "num_pinned": len(self._pins),
            "num_loads": sum(isinstance(copy, Load) for copy in self._open),
            "num_stores": sum(isinstance(copy, Store) for copy in self._open),
        }

    def close(self) -> None:
        """Fail open copies."""
        self._is_closed = True
        for copy in self._open:
            if not copy.has_ended:
                copy.has_ended = True
                copy.fail(len(copy.keys), closed_error())
        self._open.clear()
        self._pins.clear()

    def _move(self, copy: TierCopy, opened: _Open, index: int) -> None:
        """Move one block between its slot and the dictionary."""
        key, address, length = copy.keys[index], int(copy.slots.addresses[index]), int(copy.slots.lengths[index])
        if self.faults.fails:
            copy.fail(1, TierError(Reason.TIER_FAILED, "the tier fails on purpose."))
            return
        if isinstance(copy, Store):
            opened.contents[key] = (ctypes.string_at(address, length), checksum(address, length))
        else:
            content, expected = opened.contents[key]
            ctypes.memmove(address, content, length)
            if checksum(address, length) != expected:
                copy.fail(1, TierError(Reason.CHECKSUM_MISMATCH, "the block is damaged."))
                self._forget(key)
                return
        copy.landed[index] = True

    def _forget(self, key: BlockKey) -> None:
        if key in self.blocks:
            self._num_bytes -= len(self.blocks.pop(key)[0])
            self._policy.remove([key])

    def _make_room(self, length: int, kept: set[BlockKey], evicted: list[BlockKey]) -> bool:
        """Evict until ``length`` bytes fit; return whether they do."""
        while self._num_bytes + length > self._capabilities.capacity_bytes:
            victims = self._policy.evict(1, lambda key: key in kept or key in self._pins)
            if not victims:
                return False
            evicted += victims
            self._num_bytes -= len(self.blocks.pop(victims[0])[0])
        return True

    def _keep_open(self, copy: TierCopy, opened: _Open) -> None:
        self._open[copy] = opened
        self._end_if_done(copy, opened)

    def _end_if_done(self, copy: TierCopy, opened: _Open) -> None:
        if not opened.to_move and not copy.has_ended:
            copy.has_ended = True
            self._ended.append(copy)

    def _take_out(self, copy: TierCopy) -> _Open:
        self._check_open()
        check_completes(copy, self._open)
        return self._open.pop(copy)

    def _check_verb(self) -> None:
        self._check_open()
        if self.faults.raises:
            raise TierError(Reason.TIER_FAILED, "the tier raises on purpose.")

    def _check_open(self) -> None:
        if self._is_closed:
            raise closed_error()
