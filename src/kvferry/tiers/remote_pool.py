"""The pool tier: blocks in Mooncake Store, which many engines share over a network.

Each engine lends memory to the pool, its *share*, and owns the blocks that it stored: their number is bounded by the
share, and their owner alone evicts them. What another engine stored is found by asking the pool, and loaded from that
engine's memory. A block that the pool has already is not stored again: keys name contents.

All decisions are taken inside the verbs, on the caller's thread. One thread asks the pool, one stores and removes, in
order, and two load. Blocks move between the host slab and the pool without another copy, so the end of a call of
Mooncake, a few seconds at most, is the end of its copies, also where the copies are cancelled.

**Failures.** While the master does not answer, the tier holds nothing and takes nothing; Mooncake's client and a look
at the master each second find it again. Where the pool was emptied meanwhile, the tier forgets its blocks. A block that
the pool has no more is a miss: its engine has ended, or the master has evicted it for another use of the pool.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np

from kvferry.errors import Reason, TierError
from kvferry.layout.shard import Region
from kvferry.tiers.pool.index import PoolIndex
from kvferry.tiers.pool.store import Ask, PoolState, PoolStore, Read, Removal, Transfer, Write, greet, import_store
from kvferry.tiers.protocol import (
    CLOSE_SECONDS,
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
)
from kvferry.tiers.slab_memory import available_bytes
from kvferry.tiers.workers import CANCELLED, Task, ThreadedTier, Workers
from kvferry.units import format_bytes

logger = logging.getLogger(__name__)

NUM_LOAD_THREADS = 2
SILENT_SECONDS = 1.0
"""While a question has no answer for so long, the tier holds nothing."""
USABLE_SHARE = 0.85
"""Share of the lent memory that own blocks may fill. Mooncake's master evicts when 0.9 of the pool is full."""
MIN_SHARE_BYTES = 16 << 20

_NOT_WHAT_IT_SAYS = (Reason.CHECKSUM_MISMATCH, Reason.BLOCK_SIZE_MISMATCH)
_never_closed: list[object] = []  # clients whose threads still hung when the tier was closed


@dataclass(slots=True, eq=False, kw_only=True)
class PoolLoad(Load):
    """A load; ``pinned`` are the blocks that it keeps."""

    pinned: Sequence[BlockKey] = ()
    transfer: Transfer | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class PoolStoring(Store):
    """A store; ``reserved`` are the blocks that have room of this engine's share, by index.

    ``generation``: how often the pool had been emptied when the store began.
    """

    reserved: dict[int, BlockKey] = field(default_factory=dict)
    transfer: Transfer | None = None
    generation: int = 0


class RemotePool(ThreadedTier[PoolLoad, PoolStoring]):
    """The pool tier at the master ``master`` ("host:port"), for slots of the host slab at ``region``.

    ``share_bytes`` of this process's memory are lent to the pool until ``close``. On loopback, unless
    ``MC_TCP_BIND_ADDRESS`` names an address of this host: see docs/offload.md. The master may be absent, now or later.

    Raises :class:`TierError`: ``invalid-setting`` for a master without a port and a share that is too small,
    ``tier-failed`` for a share that this machine has no memory for, and ``transport-unavailable`` or
    ``missing-dependency`` where Mooncake cannot be loaded.
    """

    def __init__(self, master: str, share_bytes: int, region: Region) -> None:
        check_pool(master, share_bytes)
        super().__init__(Capabilities("remote_pool", share_bytes), region)
        self._index = PoolIndex(int(USABLE_SHARE * share_bytes))
        self._done: deque[Task] = deque()
        self._to_remove: list[BlockKey] = []
        """Blocks whose removal waits until the pool can be reached."""
        self._store = PoolStore(master, share_bytes, region, num_threads=NUM_LOAD_THREADS + 1)
        self._store.renew()
        self._state = PoolState()
        self._questions = Workers("kvferry-pool-questions", self._done, idle=self._store.renew)
        self._writes = Workers("kvferry-pool-writes", self._done)
        self._reads = Workers("kvferry-pool-reads", self._done, num_threads=NUM_LOAD_THREADS)
        self._note_state()
        if not self._state.is_reachable:
            logger.warning("the pool's master at %s does not answer; no block is shared until it does", master)

    @property
    def num_emptied(self) -> int:
        """How often this engine's share was found empty, the first time included; the master is looked at each second.

        Blocks of other engines may still be there, and be found again by asking.
        """
        return self._state.num_emptied

    def look_up(self, keys: Sequence[BlockKey]) -> Presences:
        """Return what is known; the pool is asked for the rest, which is pending until its answer."""
        self._check_open()
        check_batch(keys)
        self._note_state()
        found = np.full(len(keys), Presence.ABSENT, np.uint8)
        if not self._is_reachable():
            return found
        if set(map(len, keys)) - {KEY_BYTES}:
            is_key = [len(key) == KEY_BYTES for key in keys]
            found[is_key] = self.look_up(list(compress(keys, is_key)))
            return found
        found, unknown = self._index.look_up(keys)
        if unknown:
            self._questions.submit([Ask(self._store, unknown)])
        return found

    def prepare_load(self, keys: Sequence[BlockKey], slots: Slots) -> PoolLoad:
        """Pin the blocks that a look-up has found, and queue their reads."""
        lengths = self._check_slots(keys, slots)
        load = PoolLoad(keys=keys, slots=slots, landed=np.zeros(len(keys), np.bool_))
        self._loads.add(load)
        index, to_read = self._index, list[int]()
        for i, key in enumerate(keys):
            if not index.holds(key):
                load.fail(1, TierError(Reason.BLOCK_MISSING, "the pool is not known to have a block."))
            elif index.own.get(key, lengths[i]) != lengths[i]:
                load.fail(1, _wrong_size(index.own[key], lengths[i]))
            else:
                to_read.append(i)
        load.pinned = [keys[i] for i in to_read]
        index.pin(load.pinned)
        index.use(reversed(load.pinned))  # the first block of a prefix goes last
        self._begin(load, Read(self._store, load, to_read), self._reads)
        return load

    def complete_load(self, load: Load) -> None:
        """End the pins."""
        self._index.unpin(self._taken_out(load, self._loads).pinned)

    def prepare_store(self, keys: Sequence[BlockKey], slots: Slots) -> PoolStoring:
        """Reserve room in this engine's share and queue the writes of the slots."""
        lengths = self._check_slots(keys, slots)
        store = PoolStoring(keys=keys, slots=slots, landed=np.zeros(len(keys), np.bool_), evicted=[])
        store.generation = self._state.num_emptied
        self._stores.add(store)
        if not self._is_reachable():
            self._end(store, TierError(Reason.TIER_FAILED, "the pool's master does not answer."))
            return store
        index, kept = self._index, frozenset(keys)
        for i, key in enumerate(keys):
            if index.own.get(key, lengths[i]) != lengths[i]:
                store.fail(1, _wrong_size(index.own[key], lengths[i]))
            elif index.holds(key):
                store.landed[i] = True
            elif index.is_being_stored(key):
                store.fail(1, TierError(Reason.ALREADY_BEING_STORED, "another store writes the block."))
            elif not index.reserve(key, lengths[i], kept):
                store.fail(1, self._full_error())
            else:
                store.reserved[i] = key
        store.evicted, index.evicted = index.evicted, []
        self._num_evicted += len(store.evicted)
        self._remove(store.evicted)
        self._begin(store, Write(self._store, store, list(store.reserved)), self._writes)
        return store

    def complete_store(self, store: Store) -> None:
        """Make the blocks that have landed visible; those that must not stay are removed from the pool."""
        taken = self._taken_out(store, self._stores)
        write, now = taken.transfer, time.monotonic()
        is_current = taken.generation == self._state.num_emptied
        unwanted: list[BlockKey] = []
        for i, key in sorted(taken.reserved.items(), reverse=True):  # the first block of a prefix goes last
            existed = isinstance(write, Write) and i in write.existed
            if taken.landed[i] and is_current and not existed:
                self._index.publish(key)
                continue
            self._index.give_back(key, is_held_by_another=existed and is_current, now=now)
            if (
                isinstance(write, Write)
                and not existed
                and (i in write.uncertain or write.errors.get(i, _OVER) is None)
            ):
                unwanted.append(key)
        self._remove(unwanted)

    def poll(self) -> list[TierCopy]:
        """Take what the threads have done."""
        self._check_open()
        self._note_state()
        now = time.monotonic()
        while self._done:
            self._take(self._done.popleft(), now)
        self._index.expire(now)
        if self._to_remove and self._is_reachable():
            self._retry_removals()
        return self._take_ended()

    def snapshot(self) -> dict[str, Any]:
        """Return the counts that every tier has, and those of the pool.

        ``num_blocks`` and ``num_bytes``: of the blocks that this engine owns. ``is_reachable``: whether the master
        answers. ``num_emptied``: how often this engine's share was found empty, the first time included.
        ``failures``: blocks that have not landed in completed copies, by reason.
        """
        return {
            "num_blocks": len(self._index.own),
            "num_bytes": self._index.used_bytes,
            "num_pinned": self._index.num_pinned,
            **self._counts(),
            "num_waiting": sum(queue.num_waiting for queue in (self._writes, self._reads)),
            "is_reachable": self._is_reachable(),
            "num_emptied": self._state.num_emptied,
        }

    def close(self) -> None:
        """Fail open copies as ``closed`` and leave the pool, which forgets this engine's blocks.

        Takes about a second; where the master has died, up to 19 s, during which no other thread of Python runs.
        """
        if self._is_closed:
            return
        closed = TierError(Reason.CLOSED, "the tier was closed.")
        queues = (self._reads, self._writes, self._questions)
        copies: list[PoolLoad | PoolStoring] = [*self._loads, *self._stores]
        for copy in copies:
            if not copy.has_ended:
                self._give_up(copy, closed)
        self._is_closed = True
        deadline = time.monotonic() + CLOSE_SECONDS
        for queue in queues:
            queue.close(drops_queued=True)
        ends = [queue.join(deadline) for queue in queues]
        over: set[Transfer | None] = {None}
        while self._done:
            task = self._done.popleft()
            if isinstance(task, Transfer) and not task.is_uncertain:
                over.add(task)
        moving = [copy for copy in copies if not copy.has_ended and copy.transfer not in over]
        for copy in copies:
            if not copy.has_ended and copy not in moving:
                self._end(copy, closed)
        self._index.unpin([key for load in self._loads for key in load.pinned])
        self._loads.clear()
        self._stores.clear()
        if all(ends) and not moving:
            self._store.close()
            return
        logger.warning("closed while a call of the pool hangs; this engine's share stays until the process ends")
        _never_closed.append(self)
        if not moving:
            return
        hangs = f"{len(moving)} copies of the pool have not ended for {CLOSE_SECONDS:g} s."
        raise TierError(Reason.DEADLINE_EXCEEDED, hangs, "Keep the slab mapped until the process ends.")

    # copies

    def _begin(self, copy: "PoolLoad | PoolStoring", transfer: Transfer, queue: Workers) -> None:
        """Queue the transfer of a copy; one without blocks has ended."""
        copy.transfer = transfer
        if transfer.indices:
            queue.submit([transfer])
        else:
            self._end(copy)

    def _give_up(self, copy: "PoolLoad | PoolStoring", error: TierError) -> None:
        """Let a copy end as soon as it can; what its thread moves meanwhile counts for a load only."""
        transfer = copy.transfer
        if transfer is None:
            return
        transfer.is_cancelled = True
        if (self._reads if isinstance(copy, PoolLoad) else self._writes).revoke([transfer]):
            if isinstance(copy, PoolStoring):
                _lose_all(copy)
            self._end(copy, error)

    def _take(self, task: Task, now: float) -> None:
        if isinstance(task, Ask):
            if task.exists is None:
                self._index.cannot_answer(task.keys)
            else:
                self._index.answer(task.keys, task.exists, now)
        elif isinstance(task, Removal):
            if task.is_done:
                self._index.left(task.keys)
            else:
                self._to_remove += task.keys
        elif isinstance(task, Transfer) and not task.is_uncertain and not task.copy.has_ended:
            self._take_transfer(task, now)

    def _take_transfer(self, transfer: Transfer, now: float) -> None:
        copy, is_load = transfer.copy, isinstance(transfer, Read)
        if not is_load and transfer.is_cancelled:
            _lose_all(copy)
            self._end(copy, CANCELLED)
            return
        for i, error in transfer.errors.items():
            if error is None:
                copy.landed[i] = True
            else:
                copy.fail(1, error)
                if is_load:
                    self._note_miss(copy.keys[i], error.reason, now)
        self._end(copy)

    def _note_miss(self, key: BlockKey, reason: Reason, now: float) -> None:
        """Keep a block that did not arrive from being promised again.

        A block that is not what its name says would stay there, and would be asked for and not stored, for ever. So
        would a block of this engine whose room is given back.
        """
        is_own = key in self._index.own
        if reason in (Reason.PEER_UNREACHABLE, Reason.TRANSFER_FAILED):
            self._index.distrust(key, now)
        elif reason in (Reason.BLOCK_MISSING, *_NOT_WHAT_IT_SAYS):
            self._index.forget(key)
        else:
            return
        if is_own or reason in _NOT_WHAT_IT_SAYS:
            self._remove([key])

    def _remove(self, keys: Sequence[BlockKey]) -> None:
        """Let blocks go from the pool, before anything that is stored from now on."""
        if keys:
            self._index.leave(keys)
            self._writes.submit([Removal(self._store, keys)])

    def _retry_removals(self) -> None:
        """Remove what could not be removed before, unless the block was stored again."""
        index, keys = self._index, self._to_remove
        is_again = [key in index.own or index.is_being_stored(key) for key in keys]
        index.left(compress(keys, is_again))
        self._to_remove = []
        self._writes.submit(
            [Removal(self._store, [key for key, again in zip(keys, is_again, strict=True) if not again])]
        )

    # the pool

    def _note_state(self) -> None:
        """Forget the blocks of a pool that was emptied."""
        state = self._store.state
        if state.num_emptied != self._state.num_emptied:
            owned = self._index.clear()
            if owned:
                logger.warning("the pool was emptied: %d blocks of this engine are gone", len(owned))
                self._to_remove = owned  # those that were stored after the pool was emptied, and before this moment
        if state.is_reachable != self._state.is_reachable and self._state.num_emptied:
            logger.warning("the pool's master %s", "answers again" if state.is_reachable else "does not answer")
        self._state = state

    def _is_reachable(self) -> bool:
        return self._store.state.is_reachable and not self._questions.hangs(SILENT_SECONDS)

    # checks

    def _full_error(self) -> TierError:
        share = format_bytes(self.capabilities.capacity_bytes)
        message = f"no room for a block in this engine's share of the pool: all of its {share} are in use."
        return TierError(Reason.TIER_FULL, message, "Give the pool more bytes.")


def check_pool(master: str, share_bytes: int) -> None:
    """Raise as :class:`RemotePool` does where no pool can be opened with these settings on this machine.

    >>> check_pool("127.0.0.1:50051", 1 << 20)
    Traceback (most recent call last):
    kvferry.errors.TierError: the pool's share of 1.0 MiB is too small. Lend at least 16.0 MiB. [invalid-setting]
    """
    check_master(master)
    check_share(share_bytes)
    if share_bytes > (available := available_bytes()):
        message = f"{format_bytes(share_bytes)} cannot be lent to the pool: {format_bytes(available)} are available."
        raise TierError(Reason.TIER_FAILED, message, "Lend fewer bytes.")
    import_store()


def check_share(share_bytes: int) -> None:
    """Raise :class:`TierError` (invalid-setting) for a share that Mooncake does not take."""
    if share_bytes < MIN_SHARE_BYTES:
        message = f"the pool's share of {format_bytes(share_bytes)} is too small."
        raise TierError(Reason.INVALID_SETTING, message, f"Lend at least {format_bytes(MIN_SHARE_BYTES)}.")


def check_master_answers(master: str) -> None:
    """Raise :class:`TierError` (peer-unreachable) where no process answers at "host:port" within a second or so."""
    try:
        greet(master)
    except OSError as error:
        found = str(error) or "no answer"
        remedy = "Start the master first (mooncake_master), or correct the address."
        raise TierError(Reason.PEER_UNREACHABLE, f"no master answers at {master}: {found}.", remedy) from error


def check_master(master: str) -> None:
    """Raise :class:`TierError` (invalid-setting) unless this is "host:port".

    >>> check_master("http://127.0.0.1:50051")
    Traceback (most recent call last):
    kvferry.errors.TierError: 'http://127.0.0.1:50051' does not name a master. Write "host:port". [invalid-setting]
    """
    host, _, port = master.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise TierError(Reason.INVALID_SETTING, f"{master!r} does not name a master.", 'Write "host:port".')


_OVER = TierError(Reason.ABORTED, "no thread has moved the block.")


def _lose_all(copy: TierCopy) -> None:
    """Take all blocks of a cancelled store for not landed, those too that the pool has already."""
    copy.landed[:] = False


def _wrong_size(found: int, asked: int) -> TierError:
    message = f"a block of {found} bytes was to be copied from or to a slot of {asked} bytes."
    return TierError(Reason.BLOCK_SIZE_MISMATCH, message, "Let equal keys mean equal blocks.")
