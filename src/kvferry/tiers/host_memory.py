"""The host tier: which block lies in which slot of the slab, who uses it, and what goes when the slab is full.

The slab is a shard (:func:`~kvferry.layout.slab.slab_shard`): a slot is a place for one block. Cache groups whose
blocks have equal bytes share a *pool* of slots, in which a slot is a block of whichever group has stored into it, and
the blocks of all these groups go in one order. This module keeps the index and touches no byte: ranks copy blocks
between their caches and the slots by ordinary plans, lower tiers by their own copies. Host memory gives slots; lower
tiers take them.

A block is written in *parts*, one for each rank that stores some of it. A key becomes visible only after every part has
landed, and its slot is free again only after every part has reported, so no late copy writes into a slot of another
block. Blocks in use are never evicted: neither those being stored nor those pinned by a load.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, repeat
from typing import Any, TypeVar

import numpy as np

from kvferry.arrays import Flags, Integers
from kvferry.errors import Reason, TierError
from kvferry.layout.shard import Shard
from kvferry.tiers.eviction import LeastRecentlyUsed
from kvferry.tiers.protocol import (
    KEY_BYTES,
    BlockKey,
    Capabilities,
    Load,
    Presence,
    Presences,
    Slots,
    Store,
    TierCopy,
    check_batch,
    closed_error,
)


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


Copy = TypeVar("Copy", bound=TierCopy)


@dataclass(slots=True, eq=False, kw_only=True)
class HostLoad(Load):
    """Pinned blocks of host memory; has ended at once, since the bytes are there.

    ``keys`` are only the blocks that were visible; the others are counted in ``failures`` as ``block-missing``.
    ``block_ids[i]`` is the slot of ``keys[i]`` as a block of its group of the slab's shard.
    """

    block_ids: Integers


@dataclass(slots=True, eq=False, kw_only=True)
class HostStore(Store):
    """Room for new blocks of one group; has ended when all of its ``num_parts`` parts have reported.

    ``keys`` are only the blocks that were accepted. The others are counted in ``failures``: ``already-being-stored``
    and ``tier-full``. Visible blocks need no store and are counted nowhere.
    """

    group: str
    num_parts: int
    block_ids: Integers
    reported: set[int] = field(default_factory=set)
    is_cancelled: bool = False


class _Pool:
    """Slots of one size, ``first_slot`` to ``first_slot + num_slots`` of all slots, for one cache group or several."""

    def __init__(self, number: int, first_slot: int, num_slots: int) -> None:
        self.number = number
        self.slots = slice(first_slot, first_slot + num_slots)
        self.free = list(range(first_slot, first_slot + num_slots))[::-1]
        self.policy = LeastRecentlyUsed()


class HostMemory:
    """The index of a slab.

    >>> from kvferry.models.groups import AttentionCache, RankMemory, form_groups, model_shard
    >>> from kvferry.layout.named_layouts import NamedLayout
    >>> from kvferry.layout.slab import slab_shard
    >>> groups = form_groups(dict.fromkeys("0", AttentionCache(num_kv_heads=1, head_size=8, itemsize=2)))
    >>> rank = model_shard(groups, frozenset("0"), RankMemory(layout=NamedLayout.LBNHC, block_size=16, num_blocks=10))
    >>> host = HostMemory(slab_shard([rank], {"full": 2}, base_address=1 << 20))
    >>> a, b, c = (bytes(47) + name for name in (b"a", b"b", b"c"))
    >>> store = host.prepare_store("full", [a, b], num_parts=1)
    >>> host.look_up([a, b, c]).tolist() == [Presence.PENDING, Presence.PENDING, Presence.ABSENT]
    True
    >>> host.land(store, part=0), host.complete_store(store)
    (None, None)
    >>> load = host.prepare_load([a, c])
    >>> load.keys == [a], load.slots.addresses.tolist(), load.failures[Reason.BLOCK_MISSING]
    (True, [1048576], 1)
    >>> host.prepare_store("full", [c], num_parts=1).evicted == [b]
    True
    """

    def __init__(self, slab: Shard) -> None:
        self.slot_bytes = {group.name: group.components[0].block_stride for group in slab.groups}
        # Of each slot: its block id in its groups, the number of its pool, its place, and its key's state.
        block_ids, pool_numbers, lengths, addresses = [], [], [], []
        pools: dict[int, _Pool] = {}
        self._pool_of: dict[str, _Pool] = {}
        self.num_slots = 0
        for group in slab.groups:
            begin = min(offset for part in group.components for offset in part.layer_offsets)
            if begin not in pools:
                pools[begin] = _Pool(len(pools), self.num_slots, group.num_blocks)
                ids, slot_bytes = np.arange(group.num_blocks, dtype=np.int64), self.slot_bytes[group.name]
                block_ids.append(ids)
                pool_numbers.append(np.full(len(ids), len(pools) - 1))
                lengths.append(np.full(len(ids), slot_bytes, np.uint64))
                addresses.append((slab.regions[0].base_address + begin + ids * slot_bytes).astype(np.uint64))
                self.num_slots += len(ids)
            self._pool_of[group.name] = pools[begin]
        self._pools = tuple(pools.values())
        self._block_ids, self._pool_numbers = np.concatenate(block_ids), np.concatenate(pool_numbers)
        self._lengths, self._addresses = np.concatenate(lengths), np.concatenate(addresses)
        self._group_numbers = np.zeros(self.num_slots, np.int64)
        """Of each slot that is not free, which group has stored into it."""
        self._capabilities = Capabilities("host_memory", slab.regions[0].length)
        self._pins = np.zeros(self.num_slots, np.int32)
        self._pinned: set[BlockKey] = set()
        # One more than there are slots: the presence of a key without a slot.
        self._presences = np.full(self.num_slots + 1, Presence.ABSENT, np.uint8)
        self._slot_of: dict[BlockKey, int] = {}
        # The slots of every open copy.
        self._loads: dict[Load, Integers] = {}
        self._stores: dict[Store, Integers] = {}
        self.num_evicted = 0
        """Blocks that were given up for others so far."""
        self.journal = Journal()
        self._is_closed = False

    @property
    def capabilities(self) -> Capabilities:
        """Host memory: its capacity is that of the slab, to the byte."""
        return self._capabilities

    @property
    def num_bytes(self) -> int:
        """Bytes of the slots that are not free."""
        used = ((pool.slots.start, pool.slots.stop - pool.slots.start - len(pool.free)) for pool in self._pools)
        return sum(int(self._lengths[first]) * num_used for first, num_used in used)

    def look_up(self, keys: Sequence[BlockKey]) -> Presences:
        """Return a presence for each key: ``PENDING`` while the block is being stored."""
        self._check(keys)
        return self._presences[self._slots_of(keys)]

    def visible_among(self, keys: list[BlockKey]) -> list[BlockKey]:
        """Return the visible blocks among any number of keys, in their order."""
        return self._visible(keys)[0]

    def prepare_load(self, keys: Sequence[BlockKey], *, counts_as_use: bool = True) -> HostLoad:
        """Pin the visible blocks among ``keys``. A copy to a lower tier is no use: it says nothing about demand."""
        self._check(keys)
        unique = list(dict.fromkeys(keys))
        held, slot_ids = self._visible(unique)
        self._pins[slot_ids] += 1
        self._pinned.update(held)
        if counts_as_use:
            self._use(held, slot_ids)
        load = HostLoad(
            keys=held,
            slots=self._slots(slot_ids),
            landed=np.ones(len(held), np.bool_),
            has_ended=True,
            block_ids=self._block_ids[slot_ids],
        )
        if num_missing := len(unique) - len(held):
            missing = f"{num_missing} of {len(unique)} blocks are not in host memory."
            load.fail(num_missing, TierError(Reason.BLOCK_MISSING, missing))
        self._loads[load] = slot_ids
        return load

    def complete_load(self, load: Load) -> None:
        """End the pins."""
        self._check_open()
        slot_ids = _taken_out(self._loads, load)
        self._pins[slot_ids] -= 1
        self._pinned.difference_update(compress(load.keys, self._pins[slot_ids] == 0))

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Count a use of the visible blocks among the keys of a prefix; of equals, the first key goes last.

        Call it for all blocks of a request when the request ends. A prefix without its first blocks is of no use, and
        these were stored first: without a touch they would also go first.
        """
        self._check(keys)
        self._use(*self._visible(list(dict.fromkeys(keys))))

    def prepare_store(self, group: str, keys: Sequence[BlockKey], *, num_parts: int) -> HostStore:
        """Reserve slots for the blocks of one group that host memory does not hold, the first ones first.

        Blocks that no load pins are evicted to make room, but none of ``keys``. Every part ``0 .. num_parts - 1`` must
        call :meth:`land`, the parts of a cancelled store too. Raises ``invalid-request`` for an unknown group and for
        keys of a wrong length.
        """
        self._check(keys)
        _check_keys(keys)
        pool = self._pool_of.get(group)
        if pool is None or num_parts < 1:
            asked = f"{num_parts} parts of group {group!r} were to be stored; the slab has {sorted(self._pool_of)}."
            raise TierError(Reason.INVALID_REQUEST, asked, "Name a group of the slab, and at least one part.")
        unique = dict.fromkeys(keys)
        num_being_stored = int(np.count_nonzero(self.look_up(list(unique)) == Presence.PENDING))
        wanted = [key for key in unique if key not in self._slot_of]
        evicted = self._make_room(pool, len(wanted), unique)
        accepted = wanted[: len(pool.free)]
        slot_ids = np.array([pool.free.pop() for _ in accepted], np.int64)
        self._group_numbers[slot_ids] = list(self._pool_of).index(group)
        self._slot_of.update(zip(accepted, slot_ids.tolist(), strict=True))
        self._presences[slot_ids] = Presence.PENDING
        store = HostStore(
            keys=accepted,
            slots=self._slots(slot_ids),
            landed=np.ones(len(accepted), np.bool_),
            has_ended=not accepted,
            evicted=evicted,
            group=group,
            num_parts=num_parts,
            block_ids=self._block_ids[slot_ids],
        )
        if num_being_stored:
            twice = f"{num_being_stored} blocks are being stored."
            store.fail(num_being_stored, TierError(Reason.ALREADY_BEING_STORED, twice))
        if num_refused := len(wanted) - len(accepted):
            in_use = f"no room for {num_refused} blocks of group {group!r}: all slots are in use."
            store.fail(num_refused, TierError(Reason.TIER_FULL, in_use, "Give the host tier more bytes."))
        self._stores[store] = slot_ids
        return store

    def land(self, store: HostStore, part: int, landed: Flags | None = None) -> None:
        """Report that a part will not write into the store's slots any more, and which blocks of it have landed.

        ``landed`` has one flag for each key of the store; None means all. A block lands when all its parts have.
        Raises ``invalid-request`` for a part that the store does not have or that has reported, and for another number
        of flags.
        """
        self._check_open()
        is_expected = store in self._stores and 0 <= part < store.num_parts and part not in store.reported
        if not is_expected or store.has_ended:
            raise TierError(
                Reason.INVALID_REQUEST,
                f"part {part} of a store of {store.num_parts} parts was not expected; {sorted(store.reported)} "
                "have reported.",
                "Let each part report once.",
            )
        if landed is not None and landed.shape != store.landed.shape:
            flags = f"part {part} has flags of the shape {landed.shape} for a store of {len(store.keys)} blocks."
            raise TierError(Reason.INVALID_REQUEST, flags, "Give one flag for each key of the store.")
        store.reported.add(part)
        if landed is not None:
            store.landed &= landed
        if len(store.reported) == store.num_parts:
            self._end(store)

    def complete_store(self, store: Store) -> None:
        """Make the blocks visible of which every part has landed; free the slots of the others."""
        self._check_open()
        if not store.has_ended:
            raise TierError(Reason.INVALID_REQUEST, "parts of the store have not reported.", "Wait for its end.")
        slot_ids = _taken_out(self._stores, store)
        assert isinstance(store, HostStore), "only a HostStore is open here"
        pool = self._pool_of[store.group]
        landed = list(compress(store.keys, store.landed))
        self._presences[slot_ids[store.landed]] = Presence.HELD
        pool.policy.insert(reversed(landed))
        self.journal.note(self._capabilities.name, landed, is_visible=True)
        if len(landed) < len(store.keys):
            self._free(pool, list(compress(store.keys, ~store.landed)))

    def cancel(self, copy: TierCopy) -> None:
        """Let no block of a store become visible. The store still ends when all of its parts have reported."""
        self._check_open()
        if isinstance(copy, HostStore) and not copy.has_ended:
            copy.is_cancelled = True

    def snapshot(self) -> dict[str, Any]:
        """Return the counts that every tier has, ``num_evicted`` blocks so far, and the slots of each group by use.

        Groups that share a pool count its free slots each.
        """
        presences = self._presences[:-1]
        groups = {}
        for number, (name, pool) in enumerate(self._pool_of.items()):
            of_group = presences[self._group_numbers == number]
            visible, being_stored = (
                int(np.count_nonzero(of_group == one)) for one in (Presence.HELD, Presence.PENDING)
            )
            groups[name] = {"free": len(pool.free), "visible": visible, "being_stored": being_stored}
        return {
            "num_blocks": int(np.count_nonzero(presences == Presence.HELD)),
            "num_bytes": self.num_bytes,
            "num_pinned": int(np.count_nonzero(self._pins)),
            "num_loads": len(self._loads),
            "num_stores": len(self._stores),
            "num_evicted": self.num_evicted,
            "groups": groups,
        }

    def close(self) -> None:
        """Fail the open copies as ``closed``. The memory itself belongs to its owner."""
        if not self._is_closed:
            self._is_closed = True
            for copy in (*self._loads, *self._stores):
                copy.landed[:] = False
                copy.has_ended = True
                copy.fail(len(copy.keys), closed_error())
            self._loads.clear()
            self._stores.clear()
            self._pins[:] = 0
            self._pinned.clear()

    def _end(self, store: HostStore) -> None:
        """End a store of which every part has reported."""
        store.has_ended = True
        if store.is_cancelled:
            store.landed[:] = False
        if num_lost := len(store.keys) - int(np.count_nonzero(store.landed)):
            reason = Reason.ABORTED if store.is_cancelled else Reason.TRANSFER_FAILED
            lost = f"{num_lost} of {len(store.keys)} blocks did not reach host memory."
            store.fail(num_lost, TierError(reason, lost))

    def _make_room(self, pool: _Pool, num_blocks: int, kept: Iterable[BlockKey]) -> Sequence[BlockKey]:
        """Evict unpinned blocks until ``num_blocks`` slots are free, or none is left; return the evicted keys."""
        if (num_missing := num_blocks - len(pool.free)) <= 0:
            return ()
        is_free_to_go = (self._presences[pool.slots] == Presence.HELD) & (self._pins[pool.slots] == 0)
        if not is_free_to_go.any():
            return ()
        also_kept = {key for key in kept if key in self._slot_of} - self._pinned
        self._pinned |= also_kept
        evicted = pool.policy.evict(num_missing, self._pinned.__contains__)
        self._pinned -= also_kept
        self._free(pool, evicted)
        self.num_evicted += len(evicted)
        self.journal.note(self._capabilities.name, evicted, is_visible=False)
        return evicted

    def _free(self, pool: _Pool, keys: Sequence[BlockKey]) -> None:
        slot_ids = [self._slot_of.pop(key) for key in keys]
        self._presences[slot_ids] = Presence.ABSENT
        pool.free.extend(slot_ids)

    def _use(self, keys: Sequence[BlockKey], slot_ids: Integers) -> None:
        """Count a use of visible blocks, from the last to the first."""
        if len(self._pools) == 1:
            self._pools[0].policy.use(reversed(keys))
            return
        pool_numbers = self._pool_numbers[slot_ids]
        for pool in self._pools:
            pool.policy.use(reversed(list(compress(keys, pool_numbers == pool.number))))

    def _visible(self, keys: list[BlockKey]) -> tuple[list[BlockKey], Integers]:
        """Return the visible blocks among the keys, and their slots."""
        slot_ids = self._slots_of(keys)
        is_visible = self._presences[slot_ids] == Presence.HELD
        if is_visible.all():
            return keys, slot_ids
        return list(compress(keys, is_visible)), slot_ids[is_visible]

    def _slots_of(self, keys: Sequence[BlockKey]) -> Integers:
        """Return the slot of each key, one behind the last for a key without a slot."""
        return np.fromiter(map(self._slot_of.get, keys, repeat(self.num_slots)), np.int64, len(keys))

    def _slots(self, slot_ids: Integers) -> Slots:
        return Slots(self._addresses[slot_ids], self._lengths[slot_ids])

    def _check(self, keys: Sequence[BlockKey]) -> None:
        self._check_open()
        check_batch(keys)

    def _check_open(self) -> None:
        if self._is_closed:
            raise closed_error()


def slots_that_fit(capacity_bytes: int, slot_bytes: Mapping[str, int]) -> dict[str, int]:
    """Return how many blocks of each group a slab of at most ``capacity_bytes`` has: of every group as many.

    So the slab holds as many positions of one group as of another; groups whose blocks have equal bytes share theirs,
    and each takes what it needs. Raises :class:`TierError` ``tier-full`` where not
    one block of each group fits.

    >>> slots_that_fit(1_000_000, {"full": 65536, "window": 32768})
    {'full': 10, 'window': 10}
    """
    count = capacity_bytes // sum(slot_bytes.values())
    if not count:
        asked = f"{capacity_bytes} bytes of host memory hold not one block of each group: {dict(slot_bytes)} bytes."
        raise TierError(Reason.TIER_FULL, asked, "Give the host tier more bytes.")
    return dict.fromkeys(slot_bytes, count)


def _taken_out(open_copies: dict[Copy, Integers], copy: Copy) -> Integers:
    """Complete a copy once; return its slots. Raises ``invalid-request`` for one that is not open here."""
    if copy not in open_copies:
        asked = f"a {type(copy).__name__} of {len(copy.keys)} blocks was completed before, or elsewhere."
        raise TierError(Reason.INVALID_REQUEST, asked, "Complete each copy once.")
    return open_copies.pop(copy)


def _check_keys(keys: Sequence[BlockKey]) -> None:
    if wrong := set(map(len, keys)) - {KEY_BYTES}:
        raise TierError(Reason.INVALID_REQUEST, f"a key has {wrong.pop()} bytes.", f"Keys have {KEY_BYTES} bytes.")
