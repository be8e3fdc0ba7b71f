"""The stack of tiers of one engine: host memory, and lower tiers below it.

**Verified before promised.** A block is promised to the engine only when it lies verified and pinned in host memory.
While a lower tier promotes blocks the answer to a request is "ask again", up to the request's deadline; then what is
there is promised. So a tier that fails, hangs or holds damaged bytes is a miss, and never an error of a request.

**Who keeps what.** A request that asks owns pins. They end with ``complete_load`` once the request loads; before that
with ``drop``, or when the request has not asked for ``lease_seconds``. Requests that want the same blocks wait for the
same promotion, and each pins them in the call in which they become visible. What keeps the slots of copies to and from
lower tiers is in :mod:`~kvferry.tiers.lower_copies`.

**Which tier gets what.** New blocks are written through to all lower tiers. A block that a lower tier brings is written
to the quicker ones, which have lost the block or never had it: a disk warms a pool after a restart.

Nothing here has a thread or a clock, but for the end: requests, landings and time are inputs, and ``poll`` drives the
lower tiers.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from types import MappingProxyType

import numpy as np

from kvferry.arrays import Flags, Integers
from kvferry.errors import Reason, TierError
from kvferry.tiers.host_memory import HostLoad, HostMemory, HostStore, Journal
from kvferry.tiers.load_rule import CopyTimes
from kvferry.tiers.lower_copies import MAX_CLOSE_SECONDS, Chunk, CopySettings, LowerCopies
from kvferry.tiers.protocol import BlockKey, LowerTier, Presence

REFUSALS = frozenset({Reason.TIER_FULL, Reason.ALREADY_BEING_STORED})
"""Reasons why a tier does not take a block, though nothing has failed."""
PREFETCH_SHARE = 0.25
"""Share of host memory that queued and running prefetches may fill."""
_NOBODY: Mapping[BlockKey, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class Promise:
    """``held[group][i]``: block ``i`` that the request wants of a group lies verified and pinned in host memory.

    ``brought_by`` names the lower tier for each block that a tier brought while the request waited; host memory held
    all others when the request asked.
    """

    held: Mapping[str, Flags]
    brought_by: Mapping[BlockKey, str] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Asker:
    """A request that has asked. Each block that it wants is pinned, undecided, in a chunk, or missed."""

    wanted: Mapping[str, Sequence[BlockKey]]
    deadline: float
    leased_until: float
    undecided: dict[BlockKey, str] = field(default_factory=dict)
    """Blocks and their groups: host memory does not hold them, and no chunk brings them yet."""
    in_chunks: set[BlockKey] = field(default_factory=set)
    tried: set[tuple[int, BlockKey]] = field(default_factory=set)
    """Lower tiers, by number, that did not bring a block: each is tried once."""
    pinned: set[BlockKey] = field(default_factory=set)
    pins: list[HostLoad] = field(default_factory=list)
    brought_by: dict[BlockKey, str] = field(default_factory=dict)
    promise: Promise | None = None
    is_loading: bool = False


class Stack:
    """Host memory and its lower tiers, the quickest first.

    A request's way: :meth:`locate`, :meth:`ask` until there is a promise, :meth:`begin_load`, :meth:`complete_load`;
    and :meth:`drop` wherever it leaves that way. A step's way: :meth:`prepare_store`, :meth:`land` for each part.

    >>> from kvferry.models.groups import AttentionCache, RankMemory, form_groups, model_shard
    >>> from kvferry.layout.named_layouts import NamedLayout
    >>> from kvferry.layout.slab import slab_shard
    >>> from kvferry.tiers.protocol import KEY_BYTES
    >>> groups = form_groups(dict.fromkeys("0", AttentionCache(num_kv_heads=1, head_size=8, itemsize=2)))
    >>> rank = model_shard(groups, frozenset("0"), RankMemory(layout=NamedLayout.LBNHC, block_size=16, num_blocks=1))
    >>> stack = Stack(HostMemory(slab_shard([rank], {"full": 8}, base_address=1 << 30)))
    >>> keys = [bytes([number] * KEY_BYTES) for number in (1, 2, 3)]
    >>> store = stack.prepare_store("full", keys[:2], num_parts=1)
    >>> stack.ask("a request", {"full": keys}, now=0.0, wait_seconds=2.0) is None
    True
    >>> stack.land(store, part=0)
    >>> stack.ask("a request", {"full": keys}, now=0.1, wait_seconds=2.0).held["full"].tolist()
    [True, True, False]
    >>> stack.begin_load("a request", {"full": keys[:2]})["full"].block_ids.tolist()
    [0, 1]
    >>> stack.complete_load("a request")
    """

    def __init__(
        self,
        host: HostMemory,
        lower: Sequence[LowerTier] = (),
        settings: CopySettings | None = None,
        lease_seconds: float = 60.0,
    ) -> None:
        self._host, self._lease_seconds = host, lease_seconds
        self._settings = settings or CopySettings()
        self._lower = tuple(LowerCopies(host, tier, self._settings) for tier in lower)
        self._askers: dict[str, _Asker] = {}
        self._chunks: dict[BlockKey, tuple[int, Chunk]] = {}
        """Blocks that a lower tier brings, with the tier's number."""
        self._prefetches: dict[Chunk, None] = {}
        """The chunks that were prefetches when they were queued."""
        self._counts: Counter[str] = Counter()

    @property
    def has_lower_tiers(self) -> bool:
        """Whether there is a tier below host memory."""
        return bool(self._lower)

    def is_moving(self, now: float) -> bool:
        """Return whether a lower tier copies, or would if ``poll`` were called."""
        return any(copies.is_moving(now) for copies in self._lower)

    @property
    def num_copies_ended(self) -> int:
        """How many copies of lower tiers have ended so far."""
        return sum(copies.num_ended for copies in self._lower)

    # Requests.

    def locate(self, keys: Sequence[BlockKey], now: float) -> Integers:
        """Return where each block would be loaded from: 0 for host memory, ``i`` for lower tier ``i``, counted from 1.

        A block that is on its way is located at its end (a store) or its origin (a promotion), and one that a tier may
        hold in that tier; a block of no tier has the number after the last. Pins and promises nothing.
        """
        nowhere = 1 + len(self._lower)
        places = np.where(self._host.look_up(keys) == Presence.ABSENT, nowhere, 0)
        if not self._lower:
            return places
        if self._chunks:
            chunks = map(self._chunks.get, keys)
            places = np.fromiter(
                (place if chunk is None else chunk[0] + 1 for place, chunk in zip(places, chunks, strict=True)),
                np.int64,
                len(keys),
            )
        for number, copies in enumerate(self._lower):
            others = np.flatnonzero(places == nowhere)
            if not len(others):
                break
            answers = copies.look_up([keys[place] for place in others.tolist()], now)
            places[others[answers != Presence.ABSENT]] = number + 1
        return places

    @property
    def slot_bytes(self) -> Mapping[str, int]:
        """The bytes of a block of each group."""
        return self._host.slot_bytes

    @property
    def promotion_times(self) -> dict[str, CopyTimes]:
        """The learned times of copies from each lower tier to host memory."""
        return {copies.name: copies.promotion_times for copies in self._lower}

    def ask(
        self, request_id: str, wanted: Mapping[str, Sequence[BlockKey]], now: float, wait_seconds: float
    ) -> Promise | None:
        """Return what can be promised of the wanted blocks of each group; None while it is worth asking again.

        The first question of a request pins what host memory holds and begins to promote the rest; ``wait_seconds``
        after it the answer is what is there, so with 0 nothing is promoted. A promise stays as it is until ``drop``,
        ``begin_load`` or the end of the lease, which each question extends. A request that asks for other blocks than
        before begins anew. While the request loads it is promised nothing. Raises :class:`TierError`
        ``invalid-request`` for a group that host memory does not have.
        """
        self._check_groups(wanted)
        wanted = {group: list(keys) for group, keys in wanted.items()}
        asker = self._askers.get(request_id)
        if asker is not None and asker.is_loading:
            return _promise(wanted, frozenset())
        if asker is not None and asker.wanted != wanted:
            self.drop(request_id)
            asker = None
        if asker is None:
            asker = _Asker(wanted, now + wait_seconds, now)
            asker.undecided = {key: group for group, keys in wanted.items() for key in keys}
            self._askers[request_id] = asker
        asker.leased_until = now + self._lease_seconds
        if asker.promise is None:
            self._decide(request_id, asker, now)
            if now >= asker.deadline or not (asker.undecided or asker.in_chunks):
                self._leave_chunks(request_id, asker)
                asker.promise = _promise(wanted, asker.pinned, asker.brought_by)
                self._counts["promised"] += len(asker.pinned)
                self._counts["missed"] += sum(map(len, wanted.values())) - len(asker.pinned)
        return asker.promise

    def begin_load(self, request_id: str, chosen: Mapping[str, Sequence[BlockKey]]) -> dict[str, HostLoad]:
        """Return the slots of the chosen blocks, which stay pinned until :meth:`complete_load`; end all other pins.

        Raises :class:`TierError` ``invalid-request`` for blocks that were not promised to this request, or for another
        group, and for a block twice.
        """
        asker = self._askers.get(request_id)
        num_blocks = sum(map(len, chosen.values()))
        if asker is None or asker.promise is None or asker.is_loading or not _is_part(chosen, asker):
            asked = f"{num_blocks} blocks were to be loaded for {request_id!r}; they were not promised to this request."
            raise TierError(Reason.INVALID_REQUEST, asked, "Load a part of what the last ask() promised.")
        loads = {group: self._host.prepare_load(group_keys) for group, group_keys in chosen.items()}
        self._end_pins(asker)
        asker.pins = list(loads.values())
        asker.is_loading = True
        self._counts["loaded"] += num_blocks
        return loads

    def complete_load(self, request_id: str) -> None:
        """End the pins of a request that loads, after no rank reads its slots any more; else nothing happens."""
        asker = self._askers.get(request_id)
        if asker is not None and asker.is_loading:
            self._end_pins(asker)
            del self._askers[request_id]

    def drop(self, request_id: str) -> None:
        """Forget a request that will not load; one that loads keeps its pins until :meth:`complete_load`."""
        asker = self._askers.get(request_id)
        if asker is not None and not asker.is_loading:
            self._leave_chunks(request_id, asker)
            self._end_pins(asker)
            del self._askers[request_id]

    def prefetch(self, group: str, keys: Sequence[BlockKey], now: float) -> None:
        """Begin to promote what a request that waits in the engine's queue will need; pins nothing.

        Takes no more than ``PREFETCH_SHARE`` of host memory at a time, the first blocks first. Raises as :meth:`ask`.
        """
        self._check_groups([group])
        keys = list(dict.fromkeys(keys))
        prefetching = (chunk for chunk in self._prefetches if chunk.is_prefetch)
        num_bytes = sum(len(chunk.keys) * self._host.slot_bytes[chunk.group] for chunk in prefetching)
        room = int(PREFETCH_SHARE * self._host.capabilities.capacity_bytes) - num_bytes
        absent = compress(keys, self._host.look_up(keys) == Presence.ABSENT)
        missing = [key for key in absent if key not in self._chunks][: max(0, room // self._host.slot_bytes[group])]
        for number, copies in enumerate(self._lower):
            is_held = copies.look_up(missing, now) == Presence.HELD
            self._promote(number, group, list(compress(missing, is_held)))
            missing = list(compress(missing, ~is_held))

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Call it with all blocks of a request when it ends; see :meth:`HostMemory.touch`."""
        self._host.touch(keys)

    # What has been counted.

    @property
    def totals(self) -> dict[tuple[str, ...], int]:
        """What has happened so far, each with the tier: blocks stored, evicted, refused; bytes moved; failures."""
        host = self._host.capabilities.name
        found: dict[tuple[str, ...], int] = {
            ("stored_blocks", host): self._counts["stored"],
            ("evicted_blocks", host): self._host.num_evicted,
        }
        for copies in self._lower:
            totals, tier = copies.totals, copies.name
            found["stored_blocks", tier] = totals["blocks_down"]
            found["evicted_blocks", tier] = totals["evicted"]
            found["tier_bytes", tier, "up"] = totals["bytes_up"]
            found["tier_bytes", tier, "down"] = totals["bytes_down"]
            for reason, number in copies.failures.items():
                found["refused_blocks" if reason in REFUSALS else "failures", tier, reason] = number
            for reason, number in copies.refused_above.items():
                found["refused_blocks", host, reason] = found.get(("refused_blocks", host, reason), 0) + number
        return found

    @property
    def sizes(self) -> dict[str, tuple[int | None, int]]:
        """Of each tier the bytes that it occupies, None where it cannot say, and the most that it may."""
        host = self._host.capabilities
        return {
            host.name: (self._host.num_bytes, host.capacity_bytes),
            **{copies.name: copies.sizes for copies in self._lower},
        }

    def are_used(self, now: float) -> dict[str, bool]:
        """Return whether each tier is used, or left alone after a failure."""
        lower = {copies.name: not copies.is_suspended(now) for copies in self._lower}
        return {self._host.capabilities.name: True, **lower}

    @property
    def journal(self) -> Journal:
        """What has become visible in each tier, and what is gone; kept only where asked for."""
        return self._host.journal

    def take_copy_seconds(self) -> list[tuple[str, str, float]]:
        """Return tier, direction (``up`` or ``down``) and seconds of the copies since the last call."""
        taken = [(copies.name, *each) for copies in self._lower for each in copies.copy_seconds]
        for copies in self._lower:
            copies.copy_seconds.clear()
        return taken

    # Stores.

    def is_missing(self, keys: Sequence[BlockKey]) -> Flags:
        """Return for each block whether host memory neither holds it nor is getting it: whether a store makes sense."""
        is_absent: Flags = self._host.look_up(keys) == Presence.ABSENT
        return is_absent

    def prepare_store(self, group: str, keys: Sequence[BlockKey], num_parts: int) -> HostStore:
        """Reserve slots for new blocks of one group, as :meth:`HostMemory.prepare_store`.

        A store that accepts no block is complete.
        """
        store = self._host.prepare_store(group, keys, num_parts=num_parts)
        if store.has_ended:
            self._host.complete_store(store)
        return store

    def land(self, store: HostStore, part: int, landed: Flags | None = None) -> None:
        """Report a part of a store, as :meth:`HostMemory.land`; after the last part its blocks are written through."""
        self._host.land(store, part, landed)
        if store.has_ended:
            self._host.complete_store(store)
            self._counts["stored"] += int(np.count_nonzero(store.landed))
            for copies in self._lower:
                copies.write(list(compress(store.keys, store.landed)))

    def cancel(self, store: HostStore) -> None:
        """Let no block of a store become visible. All its parts must still :meth:`land`."""
        self._host.cancel(store)

    def disown(self, now: float) -> None:
        """Let nothing that is on its way between tiers become visible in any; for blocks whose names nobody uses again.

        Blocks that are visible stay, and leave as others come. Stores of ranks: :meth:`cancel`.
        """
        for number, copies in enumerate(self._lower):
            for chunk in copies.disown(now):
                self._end_chunk(number, chunk)

    # Time.

    def poll(self, now: float) -> None:
        """Drive the lower tiers, pin what has arrived for those that wait, and end leases."""
        for number, copies in enumerate(self._lower):
            for chunk in copies.collect(now):
                self._end_chunk(number, chunk)
        for number, copies in enumerate(self._lower):
            for chunk in copies.begin(now):
                self._end_chunk(number, chunk)
        for request_id, asker in list(self._askers.items()):
            if not asker.is_loading and now > asker.leased_until:
                self._counts["leases_ended"] += 1
                self.drop(request_id)

    def close(self) -> None:
        """Close the lower tiers, all at once, then host memory; takes at most ``MAX_CLOSE_SECONDS``.

        Raises the first :class:`TierError` of a tier that could not be closed: the slab must then stay mapped.
        """
        deadline = time.monotonic() + MAX_CLOSE_SECONDS
        for copies in self._lower:
            copies.close()
        errors = [error for copies in self._lower if (error := copies.close_error(deadline)) is not None]
        self._host.close()
        if errors:
            raise errors[0]

    def _check_groups(self, groups: Iterable[str]) -> None:
        if unknown := set(groups) - self._host.slot_bytes.keys():
            asked = f"host memory has no group {unknown.pop()!r}; it has {sorted(self._host.slot_bytes)}."
            raise TierError(Reason.INVALID_REQUEST, asked, "Name a group of the slab.")

    def _decide(self, request_id: str, asker: _Asker, now: float) -> None:
        """Pin, wait for, or miss the undecided blocks of a request; some may stay undecided."""
        if not asker.undecided:
            return
        self._pin(asker, list(asker.undecided))
        if not asker.undecided:
            return
        keys = list(asker.undecided)
        is_being_stored = (self._host.look_up(keys) == Presence.PENDING).tolist()
        absent: list[BlockKey] = []
        for key, being_stored in zip(keys, is_being_stored, strict=True):
            if key in self._chunks:
                self._join(request_id, asker, key)
            elif not being_stored or any(key in copies.stuck for copies in self._lower):
                absent.append(key)
        self._seek(request_id, asker, absent, now)

    def _seek(self, request_id: str, asker: _Asker, absent: list[BlockKey], now: float) -> None:
        """Find lower tiers for blocks that host memory does not hold; what no tier may hold is missed."""
        may_come: set[BlockKey] = set()
        for number, copies in enumerate(self._lower):
            untried = [key for key in absent if (number, key) not in asker.tried]
            answers = copies.look_up(untried, now)
            may_come.update(compress(untried, answers == Presence.PENDING))
            by_group: dict[str, list[BlockKey]] = {}
            for key in compress(untried, answers == Presence.HELD):
                by_group.setdefault(asker.undecided[key], []).append(key)
            for group, keys in by_group.items():
                self._promote(number, group, keys, request_id)
                for key in keys:
                    self._join(request_id, asker, key)
            absent = [key for key in absent if key not in asker.in_chunks]
        for key in absent:
            if key not in may_come:
                del asker.undecided[key]

    def _promote(self, number: int, group: str, keys: Sequence[BlockKey], request_id: str | None = None) -> None:
        """Let a lower tier bring blocks, in chunks; without a request it is a prefetch."""
        size = max(1, self._settings.chunk_bytes // self._host.slot_bytes[group])
        for at in range(0, len(keys), size):
            askers = {} if request_id is None else {request_id: None}
            chunk = Chunk(group, keys[at : at + size], is_prefetch=request_id is None, askers=askers)
            self._chunks.update(dict.fromkeys(chunk.keys, (number, chunk)))
            if chunk.is_prefetch:
                self._prefetches[chunk] = None
            self._lower[number].promote(chunk)

    def _join(self, request_id: str, asker: _Asker, key: BlockKey) -> None:
        """Let a request wait for the chunk of a block."""
        number, chunk = self._chunks[key]
        if request_id not in chunk.askers:
            self._lower[number].join(chunk, request_id)
        asker.in_chunks.add(key)
        del asker.undecided[key]

    def _end_chunk(self, number: int, chunk: Chunk) -> None:
        """Pin what has landed for those that wait; the rest they decide again, without this tier."""
        self._prefetches.pop(chunk, None)
        groups = dict.fromkeys(chunk.keys, chunk.group)
        for key in chunk.keys:
            del self._chunks[key]
        for quicker in self._lower[:number]:
            quicker.write(self._host.visible_among(list(chunk.keys)))
        for request_id in chunk.askers:
            asker = self._askers[request_id]
            mine = {key: group for key, group in groups.items() if key in asker.in_chunks}
            asker.in_chunks.difference_update(mine)
            asker.undecided.update(mine)
            asker.tried.update((number, key) for key in mine)
            self._pin(asker, list(mine))
            asker.brought_by.update(dict.fromkeys(asker.pinned.intersection(mine), self._lower[number].name))

    def _pin(self, asker: _Asker, keys: list[BlockKey]) -> None:
        """Pin those of the undecided blocks that host memory holds."""
        pins = self._host.prepare_load(keys, counts_as_use=False)
        if not pins.keys:
            self._host.complete_load(pins)
            return
        asker.pins.append(pins)
        asker.pinned.update(pins.keys)
        if len(pins.keys) == len(asker.undecided):
            asker.undecided.clear()
        else:
            for key in pins.keys:
                del asker.undecided[key]

    def _leave_chunks(self, request_id: str, asker: _Asker) -> None:
        """Wait no more; a chunk that nobody waits for is not begun."""
        for key in asker.in_chunks:
            self._chunks[key][1].askers.pop(request_id, None)
        asker.in_chunks.clear()
        asker.undecided.clear()

    def _end_pins(self, asker: _Asker) -> None:
        for pins in asker.pins:
            self._host.complete_load(pins)
        asker.pins = []
        asker.pinned.clear()


def _is_part(chosen: Mapping[str, Sequence[BlockKey]], asker: _Asker) -> bool:
    """Return whether all blocks are pinned for this request, each in its own group, and chosen once."""
    return all(
        len(unique := set(keys)) == len(keys)
        and unique <= asker.pinned
        and unique.issubset(asker.wanted.get(group, ()))
        for group, keys in chosen.items()
    )


def _promise(
    wanted: Mapping[str, Sequence[BlockKey]], pinned: Iterable[BlockKey], brought_by: Mapping[BlockKey, str] = _NOBODY
) -> Promise:
    """Return the promise of the pinned blocks among the wanted."""
    is_pinned = frozenset(pinned).__contains__
    held = {group: np.fromiter(map(is_pinned, keys), np.bool_, len(keys)) for group, keys in wanted.items()}
    return Promise(held, brought_by)
