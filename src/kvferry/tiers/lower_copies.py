"""The copies between host memory and one lower tier: which wait, which move, which are given up.

Two directions share the tier. A *promotion* fills slots of host memory with a chunk of blocks that requests wait for,
or that a prefetch brings; requests take turns, and prefetches come last. A *write-through* brings blocks from host
memory down. At most ``copies_per_tier`` of each move at a time, and write-throughs of one tier pin at most
``WRITE_SHARE`` of host memory.

Errors of a device, file or peer should not leave the verbs of a tier. Where one does, whatever its type, the verb has
failed (:class:`GuardedTier`). A tier that fails is *suspended*: left alone for ``suspend_seconds``, so that one broken
disk costs one wait and not one for every request; after errors of a verb in a row each time for twice as long. After
``MAX_RAISED`` of them it is *set aside* for good, and at once where it may have begun a copy without returning it:
nobody can wait for the end of that copy. It is then closed, on a thread of its own because that may take seconds.

A copy that does not end within ``hang_seconds`` is cancelled and *given up*: nobody waits for it, the tier is left
alone until it ends, and its slots stay in use until then. All copies of a tier that is set aside are given up; they
touch no slot when the tier has closed without an error.
"""

import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field
from itertools import compress, islice
from typing import TypeVar

import numpy as np

from kvferry.errors import Reason, TierError
from kvferry.tiers.host_memory import HostLoad, HostMemory, HostStore
from kvferry.tiers.load_rule import CopyTimes
from kvferry.tiers.protocol import (
    CLOSE_SECONDS,
    BlockKey,
    Load,
    LowerTier,
    Presence,
    Presences,
    Slots,
    Store,
    TierCopy,
    closed_error,
)
from kvferry.units import format_bytes

logger = logging.getLogger(__name__)

MAX_RAISED = 5
"""So many errors of a verb in a row are no accident."""
QUICK_SECONDS = 0.25
"""How long the caller waits for the end of a tier that is set aside; most end at once."""
MAX_CLOSE_SECONDS = CLOSE_SECONDS + 20.0
"""How long the caller waits for the end of a tier when all is closed: for its copies, then for Mooncake, which goes on
asking a master that has died: the heartbeat, a new connection and the unmount take 5.3 s each, 19 s were measured, and
the interpreter stands still meanwhile, so that a shorter wait ends no sooner."""

Answer = TypeVar("Answer")


class GuardedTier:
    """The verbs of a lower tier, which raise nothing. ``failures`` counts blocks and calls that failed, by reason."""

    def __init__(self, tier: LowerTier, suspend_seconds: float) -> None:
        self.name = tier.capabilities.name
        self.failures: Counter[Reason] = Counter()
        self._tier, self._suspend_seconds = tier, suspend_seconds
        self._suspended_until = -np.inf
        self._num_raised: Counter[str] = Counter()
        """By verb: errors in a row."""
        self._is_told_full = False
        self._closing: _Closing | None = None

    @property
    def is_set_aside(self) -> bool:
        """Whether the tier is asked nothing more."""
        return self._closing is not None

    @property
    def is_gone(self) -> bool:
        """Whether the tier is closed and touches no slot any more."""
        return self._closing is not None and self._closing.is_over.is_set() and self._closing.error is None

    @property
    def num_bytes(self) -> int | None:
        """Bytes that the tier occupies; None where it cannot say."""
        try:
            return None if self.is_set_aside else int(self._tier.snapshot()["num_bytes"])
        except Exception:
            logger.debug("%s has no snapshot", self.name, exc_info=True)
            return None

    @property
    def capacity_bytes(self) -> int:
        """The most bytes that the tier occupies."""
        return self._tier.capabilities.capacity_bytes

    def is_suspended(self, now: float) -> bool:
        """Return whether the tier is left alone for now, or for ever."""
        return self.is_set_aside or now < self._suspended_until

    def look_up(self, keys: Sequence[BlockKey], now: float) -> Presences:
        """Return which blocks the tier holds: none where it fails or is suspended."""
        if not self.is_suspended(now):
            found = self._call("look_up", self._tier.look_up, now, keys, num_blocks=len(keys))
            if found is not None:
                return found
        return np.full(len(keys), Presence.ABSENT, np.uint8)

    def lost_among(self, keys: Sequence[BlockKey], now: float) -> list[BlockKey]:
        """Return which blocks, none of which could be loaded, the tier does not hold; also while it is suspended."""
        found = self._call("look_up", self._tier.look_up, now, keys, num_blocks=len(keys))
        return [] if found is None else list(compress(keys, found != Presence.HELD))

    def num_emptied(self, now: float) -> int:
        """Return how often the tier has lost all that it held; 0 where it is set aside."""
        return self._call("num_emptied", lambda: self._tier.num_emptied, now) or 0

    def prepare_load(self, keys: Sequence[BlockKey], slots: Slots, num_open: int, now: float) -> Load | None:
        """Return the begun load; None where nothing was begun. The caller has ``num_open`` loads that have not ended.

        A load that may have been begun, and that the tier did not return, is returned as one that does not end.
        """
        load = self._call("prepare_load", self._tier.prepare_load, now, keys, slots, num_blocks=len(keys))
        if load is not None or self._has_begun_nothing("num_loads", num_open):
            return load
        self._set_aside("it may move bytes for a load that it did not return")
        return Load(keys=keys, slots=slots, landed=np.zeros(len(keys), np.bool_))

    def prepare_store(self, keys: Sequence[BlockKey], slots: Slots, num_open: int, now: float) -> Store | None:
        """Return the begun store, as :meth:`prepare_load`."""
        store = self._call("prepare_store", self._tier.prepare_store, now, keys, slots, num_blocks=len(keys))
        if store is not None or self._has_begun_nothing("num_stores", num_open):
            return store
        self._set_aside("it may move bytes for a store that it did not return")
        return Store(keys=keys, slots=slots, landed=np.zeros(len(keys), np.bool_))

    def poll(self, now: float) -> None:
        """Let the tier make progress. Which copies have ended stands in the copies: what is returned may be lost."""
        self._call("poll", self._tier.poll, now)

    def complete(self, copy: TierCopy, now: float) -> bool:
        """Complete a copy that has ended; return whether the tier did."""

        def complete() -> bool:
            if isinstance(copy, Load):
                self._tier.complete_load(copy)
            elif isinstance(copy, Store):
                self._tier.complete_store(copy)
            return True

        return self._call("complete_load" if isinstance(copy, Load) else "complete_store", complete, now) is True

    def cancel(self, copy: TierCopy, now: float) -> None:
        """Give a copy up, which then ends as soon as it can."""
        self._call("cancel", self._tier.cancel, now, copy)

    def fail(self, num_blocks: int, error: TierError, now: float) -> None:
        """Count blocks that failed, and leave the tier alone."""
        self.failures[error.reason] += num_blocks
        self.suspend(error, now)

    def note_full(self, store: Store) -> None:
        """Say once, with the numbers, that blocks of a store found no room; ``failures`` counts them all."""
        if self._is_told_full or not store.failures[Reason.TIER_FULL]:
            return
        self._is_told_full = True
        used = "an unknown part" if (num_bytes := self.num_bytes) is None else format_bytes(num_bytes)
        logger.warning(
            "%s is full: %d of %d blocks were not stored, while it uses %s of its %s; later ones are only counted. %s",
            self.name,
            store.failures[Reason.TIER_FULL],
            len(store.keys),
            used,
            format_bytes(self.capacity_bytes),
            store.error,
        )

    def suspend(self, error: Exception, now: float, seconds: float = 0.0) -> None:
        """Leave the tier alone for a while; say why, once."""
        seconds = seconds or self._suspend_seconds
        if not self.is_suspended(now):
            is_known = isinstance(error, TierError)
            told = error if is_known else repr(error)
            logger.warning("%s is left alone for %g s: %s", self.name, seconds, told, exc_info=not is_known and error)
        self._suspended_until = max(self._suspended_until, now + seconds)

    def close(self) -> None:
        """Begin to close the tier; ``close_error`` says how it went."""
        if self._closing is None:
            self._closing = _Closing(self.name, self._tier)

    def close_error(self, deadline: float) -> TierError | None:
        """Wait for the end of ``close`` until a time of ``monotonic``; return why slots may still be used."""
        assert self._closing is not None, "close comes first"
        if self._closing.is_over.wait(max(0.0, deadline - time.monotonic())):
            return self._closing.error
        hangs = f"{self.name} has not closed for {MAX_CLOSE_SECONDS:g} s."
        return TierError(Reason.DEADLINE_EXCEEDED, hangs, "Keep the slab mapped until the process ends.")

    def _call(
        self, name: str, verb: Callable[..., Answer], now: float, *arguments: object, num_blocks: int = 1
    ) -> Answer | None:
        """Call a verb of the tier; None where it raises, or the tier is set aside."""
        if self.is_set_aside:
            return None
        try:
            answer = verb(*arguments)
        except Exception as error:
            self._note_raised(name, error, max(1, num_blocks), now)
            return None
        del self._num_raised[name]
        return answer

    def _note_raised(self, name: str, error: Exception, num_blocks: int, now: float) -> None:
        """Count an error of a verb; leave the tier alone for twice as long as after the last, or for ever."""
        self.failures[error.reason if isinstance(error, TierError) else Reason.TIER_FAILED] += num_blocks
        if self.is_suspended(now):
            return  # copies of a tier that is left alone are still driven, in every step
        self.suspend(error, now, self._suspend_seconds * 2 ** self._num_raised[name])
        self._num_raised[name] += 1
        if self._num_raised[name] == MAX_RAISED:
            self._set_aside(f"{name} has raised errors {MAX_RAISED} times in a row, the last one {error!r}")

    def _has_begun_nothing(self, kind: str, num_open: int) -> bool:
        """Return whether the tier has no other open copy than those that its caller knows."""
        if self.is_set_aside:
            return False
        try:
            return bool(self._tier.snapshot()[kind] <= num_open)
        except Exception:
            logger.debug("%s has no snapshot", self.name, exc_info=True)
            return False

    def _set_aside(self, why: str) -> None:
        if self._closing is None:
            logger.error("%s is closed and stays out of use, since %s.", self.name, why)
            self.close()
            assert self._closing is not None
            self._closing.is_over.wait(QUICK_SECONDS)


class _Closing:
    """A call of ``close``, on a thread of its own. ``error``: why the tier may still touch slots, once it is over."""

    def __init__(self, name: str, tier: LowerTier) -> None:
        self.error: TierError | None = None
        self.is_over = threading.Event()
        self._name, self._tier = name, tier
        try:
            threading.Thread(target=self._close, name=f"kvferry-close-{name}", daemon=True).start()
        except RuntimeError:  # there is no other thread to be had, or the interpreter ends
            self._close()

    def _close(self) -> None:
        try:
            self._tier.close()
        except TierError as error:
            self.error = error.without_traceback()
        except Exception as error:
            raised = f"{self._name} cannot be closed: {error!r}."
            self.error = TierError(Reason.TIER_FAILED, raised, "Keep the slab mapped until the process ends.")
        finally:
            self.is_over.set()


SUSPENDING = frozenset({Reason.TIER_FAILED, Reason.TRANSFER_FAILED, Reason.DEADLINE_EXCEEDED, Reason.CLOSED})
"""Failures of a tier; others are about single blocks."""
WRITE_SHARE = 0.25
"""Share of host memory that the writes of one tier may pin, so that a slow tier leaves room for new blocks."""
MAX_KEPT_TIMES = 1000
"""Times of copies that are kept for the metrics; the oldest go where nobody reads them."""


@dataclass(frozen=True, slots=True)
class CopySettings:
    """Sizes in bytes, times in seconds; the module's docstring says what for. ``chunk_bytes``: most of one copy."""

    chunk_bytes: int = 16 << 20
    copies_per_tier: int = 4
    hang_seconds: float = 10.0
    suspend_seconds: float = 10.0


@dataclass(slots=True, eq=False)
class Chunk:
    """Blocks of one group that are promoted together, for the requests ``askers`` or for a prefetch."""

    group: str
    keys: Sequence[BlockKey]
    is_prefetch: bool = False
    askers: dict[str, None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Promotion:
    """A chunk on its way up, and its room in host memory."""

    chunk: Chunk
    room: HostStore
    since: float
    is_given_up: bool = False


@dataclass(slots=True, eq=False)
class _Write:
    """Blocks on their way down, and their pins in host memory; how often the tier had been emptied at their begin."""

    pins: HostLoad
    since: float
    num_emptied: int
    is_given_up: bool = False


class LowerCopies:
    """All copies of one lower tier; see the module's docstring. ``collect`` and then ``begin`` drive them."""

    def __init__(self, host: HostMemory, tier: LowerTier, settings: CopySettings) -> None:
        self.stuck: set[BlockKey] = set()
        """Blocks of promotions that were given up: host memory says that they are being stored, and nobody waits."""
        self.promotion_times = CopyTimes()
        self.copy_seconds: deque[tuple[str, float]] = deque(maxlen=MAX_KEPT_TIMES)
        """Direction, ``up`` or ``down``, and seconds of the last copies; whoever reads them takes them out."""
        self.refused_above: Counter[Reason] = Counter()
        """Blocks that were not brought up since host memory did not take them, by reason."""
        self.num_ended = 0
        """Copies that have ended so far, however."""
        self._host, self._settings = host, settings
        self._tier = GuardedTier(tier, settings.suspend_seconds)
        self._queues: OrderedDict[str, deque[Chunk]] = OrderedDict()
        # Ordered dictionaries: of a plain one that loses its first keys, the next first key is found slowly.
        self._prefetches: OrderedDict[Chunk, None] = OrderedDict()
        self._to_write: OrderedDict[BlockKey, None] = OrderedDict()
        self._promotions: dict[Load, _Promotion] = {}
        self._writes: dict[Store, _Write] = {}
        self._counts: Counter[str] = Counter()
        self._is_end_noted = False
        self._num_emptied = tier.num_emptied
        self._bytes_to_pin = int(WRITE_SHARE * host.capabilities.capacity_bytes)
        most_bytes = min(settings.chunk_bytes, self._bytes_to_pin)
        self._blocks_to_write = max(1, most_bytes // max(host.slot_bytes.values()))

    @property
    def name(self) -> str:
        """The tier's name."""
        return self._tier.name

    @property
    def failures(self) -> Counter[Reason]:
        """Blocks that did not arrive, above or below, and calls that failed, by reason; ``tier-full`` is no error."""
        return self._tier.failures

    @property
    def sizes(self) -> tuple[int | None, int]:
        """The bytes that the tier occupies, None where it cannot say, and the most that it may."""
        return self._tier.num_bytes, self._tier.capacity_bytes

    def is_moving(self, now: float) -> bool:
        """Return whether a copy goes on, or another may begin: not while a tier that failed or hangs is left alone."""
        copies: list[_Promotion | _Write] = [*self._promotions.values(), *self._writes.values()]
        waits = self._queues or self._prefetches or self._to_write
        return any(not copy.is_given_up for copy in copies) or bool(waits and not self.is_suspended(now))

    def is_suspended(self, now: float) -> bool:
        """Return whether the tier failed a short while ago, or has a copy that was given up and has not ended."""
        copies: list[_Promotion | _Write] = [*self._promotions.values(), *self._writes.values()]
        return self._tier.is_suspended(now) or any(copy.is_given_up for copy in copies)

    def look_up(self, keys: Sequence[BlockKey], now: float) -> Presences:
        """Return which blocks the tier holds: none of them while it is suspended."""
        if self.is_suspended(now):
            return np.full(len(keys), Presence.ABSENT, np.uint8)
        return self._tier.look_up(keys, now)

    def promote(self, chunk: Chunk) -> None:
        """Queue a chunk. ``collect`` or ``begin`` returns it, once."""
        if chunk.is_prefetch:
            self._prefetches[chunk] = None
        else:
            self._queues.setdefault(next(iter(chunk.askers)), deque()).append(chunk)

    def join(self, chunk: Chunk, request_id: str) -> None:
        """Let one more request wait for a chunk; a queued prefetch then moves ahead of other prefetches."""
        chunk.askers[request_id] = None
        if chunk.is_prefetch and chunk in self._prefetches:
            del self._prefetches[chunk]
            chunk.is_prefetch = False
            self.promote(chunk)

    def write(self, keys: Sequence[BlockKey]) -> None:
        """Queue visible blocks of host memory for the way down; those evicted before their turn are left out."""
        if self._tier.is_set_aside:
            return
        self._to_write.update(dict.fromkeys(keys))
        if len(self._to_write) > 2 * self._host.num_slots:
            self._to_write = OrderedDict.fromkeys(self._host.visible_among(list(self._to_write)))

    def disown(self, now: float) -> list[Chunk]:
        """Let nothing that waits or moves become visible, above or below; return the chunks that will not be brought.

        Copies that move still end, and their chunks with them.
        """
        self._to_write.clear()
        for load, promotion in self._promotions.items():
            self._host.cancel(promotion.room)
            self._tier.cancel(load, now)
        for store in self._writes:
            self._tier.cancel(store, now)
        return self._drained()

    def collect(self, now: float) -> list[Chunk]:
        """Drive the tier; return the chunks that have ended or were given up since the last call.

        What has landed is visible in host memory and not pinned: pin it before anything takes a slot.
        """
        ended: list[Chunk] = []
        self._tier.poll(now)
        if self._tier.is_set_aside:
            self._note_end()
        else:
            self._note_emptied(now)
            for load in [load for load in self._promotions if load.has_ended]:
                self._finish_promotion(load, ended, now)
            for store in [store for store in self._writes if store.has_ended]:
                self._finish_write(store, now)
        self._give_up_overdue(ended, now)
        if self._tier.is_gone:
            self._free_all()
        return ended

    def begin(self, now: float) -> list[Chunk]:
        """Begin as many copies as may move; return the chunks that will not be brought.

        Nobody waits for them any more, host memory has no room for them, or the tier is suspended.
        """
        if self.is_suspended(now):
            return self._drained()
        left_out: list[Chunk] = []
        while self._may_begin(self._promotions, now) and (chunk := self._next_chunk()):
            if not self._begin_promotion(chunk, now):
                left_out.append(chunk)
        while self._to_write and self._may_begin(self._writes, now) and self._may_pin():
            self._begin_write(now)
        return left_out

    def close(self) -> None:
        """Begin to close the tier."""
        self._tier.close()

    def close_error(self, deadline: float) -> TierError | None:
        """Wait until the tier is closed, as :meth:`GuardedTier.close_error`."""
        return self._tier.close_error(deadline)

    @property
    def totals(self) -> dict[str, int]:
        """Blocks and bytes that have moved so far, up and down, and the blocks that the tier evicted."""
        names = ("blocks_up", "bytes_up", "blocks_down", "bytes_down", "evicted")
        return {name: self._counts[name] for name in names}

    def _may_begin(self, copies: Sized, now: float) -> bool:
        return len(copies) < self._settings.copies_per_tier and not self.is_suspended(now)

    def _may_pin(self) -> bool:
        """Return whether one more write leaves the share of host memory that writes may pin."""
        pinned = sum(write.pins.slots.num_bytes for write in self._writes.values())
        next_bytes = self._blocks_to_write * max(self._host.slot_bytes.values())
        return not self._writes or pinned + next_bytes <= self._bytes_to_pin

    def _next_chunk(self) -> Chunk | None:
        """Take the first chunk of the next request in turn, or of a prefetch."""
        if not self._queues:
            return self._prefetches.popitem(last=False)[0] if self._prefetches else None
        request_id, queue = self._queues.popitem(last=False)
        chunk = queue.popleft()
        if queue:
            self._queues[request_id] = queue
        return chunk

    def _drained(self) -> list[Chunk]:
        """Take all chunks out of the queues: their requests shall not wait for a tier that is suspended."""
        chunks = [chunk for queue in self._queues.values() for chunk in queue] + list(self._prefetches)
        self._queues.clear()
        self._prefetches.clear()
        return chunks

    def _begin_promotion(self, chunk: Chunk, now: float) -> bool:
        """Reserve slots and begin to fill them; return whether a copy has begun."""
        if not (chunk.askers or chunk.is_prefetch):
            return False
        room = self._host.prepare_store(chunk.group, chunk.keys, num_parts=1)
        self.refused_above.update(room.failures)
        load = self._tier.prepare_load(room.keys, room.slots, len(self._promotions), now) if room.keys else None
        if load is None:
            self._free_room(room)
            return False
        self._promotions[load] = _Promotion(chunk, room, now)
        self.promotion_times.begin(load, load.slots.num_bytes, now)
        return True

    def _begin_write(self, now: float) -> None:
        """Pin the oldest blocks that wait and begin to write them."""
        keys = list(islice(self._to_write, self._blocks_to_write))
        for key in keys:
            del self._to_write[key]
        pins = self._host.prepare_load(keys, counts_as_use=False)
        store = self._tier.prepare_store(pins.keys, pins.slots, len(self._writes), now) if pins.keys else None
        if store is None:
            self._host.complete_load(pins)
        else:
            self._host.journal.note(self.name, store.evicted, is_visible=False)
            self._writes[store] = _Write(pins, now, self._tier.num_emptied(now))

    def _finish_promotion(self, load: Load, ended: list[Chunk], now: float) -> None:
        """Complete a load on both sides, first in host memory: no error of the tier keeps its slots."""
        promotion = self._promotions.pop(load)
        self.promotion_times.end(load, now, has_landed=bool(load.landed.all()))
        self._host.land(promotion.room, 0, load.landed)
        self._host.complete_store(promotion.room)
        self._tier.complete(load, now)
        self._note_lost(load, now)
        self.stuck.difference_update(load.keys)
        if not promotion.is_given_up:
            ended.append(promotion.chunk)
        self._count("up", load, promotion, now)

    def _finish_write(self, store: Store, now: float) -> None:
        """Complete a store on both sides; what the tier could not complete, or has lost, is not announced."""
        write = self._writes.pop(store)
        if self._tier.complete(store, now) and write.num_emptied == self._num_emptied:
            self._host.journal.note(self.name, list(compress(store.keys, store.landed)), is_visible=True)
        self._host.complete_load(write.pins)
        self._counts["evicted"] += len(store.evicted)
        self._count("down", store, write, now)

    def _note_end(self) -> None:
        """Note once that nobody finds the blocks of the tier any more."""
        if not self._is_end_noted:
            self._is_end_noted = True
            self._host.journal.note_emptied(self.name)

    def _note_emptied(self, now: float) -> None:
        """Note that the tier has lost all that it held, before what was stored afterwards is announced."""
        num_emptied = self._tier.num_emptied(now)
        if num_emptied != self._num_emptied and not self._tier.is_set_aside:
            self._num_emptied = num_emptied
            self._host.journal.note_emptied(self.name)

    def _note_lost(self, load: Load, now: float) -> None:
        """Note the blocks that the tier turned out not to hold, or gave up because they were damaged."""
        if self._host.journal.is_kept and not load.landed.all():
            missing = list(compress(load.keys, ~load.landed))
            self._host.journal.note(self.name, self._tier.lost_among(missing, now), is_visible=False)

    def _count(self, way: str, copy: TierCopy, moved: _Promotion | _Write, now: float) -> None:
        self.num_ended += 1
        self._counts[f"blocks_{way}"] += int(np.count_nonzero(copy.landed))
        self._counts[f"bytes_{way}"] += copy.slots[copy.landed].num_bytes
        if copy.landed.any():
            self.copy_seconds.append((way, now - moved.since))
        if not moved.is_given_up:  # its blocks are counted already
            self.failures.update(copy.failures)
            if isinstance(copy, Store):
                self._tier.note_full(copy)
            if copy.error is not None and SUSPENDING & copy.failures.keys():
                self._tier.suspend(copy.error, now)

    def _give_up_overdue(self, ended: list[Chunk], now: float) -> None:
        for load, promotion in self._promotions.items():
            if self._is_overdue(promotion, now):
                self._give_up(load, promotion, now)
                self.stuck.update(load.keys)
                ended.append(promotion.chunk)
        for store, write in self._writes.items():
            if self._is_overdue(write, now):
                self._give_up(store, write, now)

    def _is_overdue(self, moving: _Promotion | _Write, now: float) -> bool:
        is_late = self._tier.is_set_aside or now - moving.since > self._settings.hang_seconds
        return is_late and not moving.is_given_up

    def _give_up(self, copy: TierCopy, moving: _Promotion | _Write, now: float) -> None:
        hangs = f"a copy of {len(copy.keys)} blocks has not ended for {now - moving.since:.1f} s."
        late = TierError(Reason.DEADLINE_EXCEEDED, hangs, "Look at the device.")
        self._tier.fail(len(copy.keys), closed_error() if self._tier.is_set_aside else late, now)
        moving.is_given_up = True
        self.promotion_times.end(copy, now, has_landed=False)
        self._tier.cancel(copy, now)

    def _free_all(self) -> None:
        """Give back what a tier kept that is closed; nothing that it brought is believed."""
        for promotion in self._promotions.values():
            self._free_room(promotion.room)
        for write in self._writes.values():
            self._host.complete_load(write.pins)
        self._promotions.clear()
        self._writes.clear()
        self._to_write.clear()
        self.stuck.clear()

    def _free_room(self, room: HostStore) -> None:
        """Give back the slots of a promotion that brings nothing."""
        if not room.has_ended:
            self._host.land(room, 0, np.zeros(len(room.keys), np.bool_))
        self._host.complete_store(room)
