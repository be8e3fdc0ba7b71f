"""The interface of a tier: two-phase verbs, called by one thread at a time.

``look_up`` blocks; ``prepare_load`` and ``prepare_store`` begin; ``complete_load`` and ``complete_store`` finish. Host
memory is the staging place of all other tiers, which are *lower*: a lower tier reads from slots of the host slab and
writes into them, moves bytes on its own threads or devices, and reports them from ``poll``.

**Keys.** A block is named by a key of ``KEY_BYTES`` bytes, which names its content too: one key, one content, on every
engine. Whoever makes keys puts everything that changes what the bytes mean into them; a tier compares keys and nothing
else. Equal keys with blocks of different lengths are an error of the caller.

**Pins.** A prepared load keeps its blocks in the tier, and a prepared store keeps its room. The caller of ``prepare_*``
owns both, and ``complete_*`` ends both, exactly once, whatever the outcome. No time limit ends them: a caller that
gives up calls ``cancel``, waits for ``has_ended``, and completes. ``look_up`` pins nothing and promises nothing: after
a look-up the block may go. So a block may be promised to an engine only after its load has *landed* and while it is
pinned in host memory.

**Slots.** The caller keeps the slots that it hands to a lower tier, neither freed nor used for anything else, until the
copy has ended. After that the tier touches them no more.

**Visible.** A stored block can be looked up after ``complete_store`` and not before, and only if it has landed. A lower
tier changes its index inside these verbs only, so its threads need no lock for it.

**Verified.** A lower tier computes the :func:`~kvferry.tiers.checksum.checksum` of each block from the slot that it
stores, keeps it with the key and the length, and compares all three after it has read a block into a slot. A block that
differs has not landed (``checksum-mismatch``), and the tier forgets it.

**Failures.** A tier that fails is a tier that does not hold the block. Errors of a device, file or peer never leave a
verb: they end copies, with a :class:`~kvferry.errors.Reason` for each block that has not landed. What verbs raise are
errors of the caller.
"""

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvferry.arrays import Addresses, Flags
from kvferry.errors import Reason, TierError
from kvferry.layout.shard import Region
from kvferry.transport.protocol import RegionTable

KEY_BYTES = 48
"""Bytes of every key: 16 for a namespace and 32 for the hash of the tokens, as the adapter makes them."""
MAX_BATCH = 1 << 20
"""Most blocks of one call."""
CLOSE_SECONDS = 5.0
"""How long ``close`` waits for copies in progress."""

BlockKey = bytes


class Presence(IntEnum):
    """Whether a tier holds a block; the values of the array that ``look_up`` returns."""

    ABSENT = 0
    HELD = 1
    """Stored and visible. A load may still miss the block: it can be evicted first, or fail its checksum."""
    PENDING = 2
    """Not known yet: the block is being stored here, or the tier has asked its peer. Ask again after ``poll``."""


Presences = npt.NDArray[np.uint8]
"""One :class:`Presence` for each key."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a tier is.

    ``capacity_bytes`` bounds the bytes that the tier occupies, overhead included.
    """

    name: str
    capacity_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """Places of blocks in the host slab: address and length in bytes of each, as arrays of equal length.

    >>> Slots.of([4096, 8192], [512, 1024]).num_bytes
    1536
    """

    addresses: Addresses
    lengths: Addresses

    @classmethod
    def of(cls, addresses: Sequence[int], lengths: Sequence[int]) -> "Slots":
        """Return slots of lists of integers."""
        return cls(np.array(addresses, np.uint64), np.array(lengths, np.uint64))

    def __len__(self) -> int:
        return len(self.addresses)

    def __getitem__(self, chosen: slice | Flags) -> "Slots":
        return Slots(self.addresses[chosen], self.lengths[chosen])

    @property
    def num_bytes(self) -> int:
        """The bytes of all slots."""
        return int(self.lengths.sum())


@dataclass(slots=True, eq=False, kw_only=True)
class TierCopy:
    """A prepared load or store: ``keys[i]`` is copied from or to slot ``i``.

    ``landed[i]`` says whether block ``i`` arrived and is verified; it is final once ``has_ended``. ``failures`` counts
    the blocks that have not landed, by reason, and ``error`` is the error of the first of them, for people. Only the
    tier changes these fields, and only inside its verbs. Where bytes must move, a copy ends in ``poll`` or ``cancel``.
    """

    keys: Sequence[BlockKey]
    slots: Slots
    landed: Flags
    has_ended: bool = False
    failures: Counter[Reason] = field(default_factory=Counter)
    error: TierError | None = None

    def fail(self, num_blocks: int, error: TierError) -> None:
        """Count blocks that have not landed; keep the first error, without its traceback."""
        self.failures[error.reason] += num_blocks
        self.error = self.error or error.without_traceback()

    def end(self, error: TierError | None = None) -> None:
        """End the copy; with an error, for all blocks that have neither landed nor failed."""
        num_open = len(self.keys) - int(self.landed.sum()) - self.failures.total()
        if error is not None and num_open:
            self.fail(num_open, error)
        self.has_ended = True


@dataclass(slots=True, eq=False, kw_only=True)
class Load(TierCopy):
    """Blocks on their way out of a tier, pinned there until ``complete_load``."""


@dataclass(slots=True, eq=False, kw_only=True)
class Store(TierCopy):
    """Blocks on their way into a tier, whose room is kept until ``complete_store``.

    ``evicted`` are the keys that the tier gave up to make room: it holds them no longer.
    """

    evicted: Sequence[BlockKey] = ()


class Tier(Protocol):
    """What host memory and every lower tier have in common. All verbs return at once and raise ``closed`` after
    ``close``, except ``snapshot`` and ``close``.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What this tier is."""

    def look_up(self, keys: Sequence[BlockKey]) -> Presences:
        """Return a :class:`Presence` for each key, under 1 us a block. Counts as no use, pins nothing, moves nothing.

        Raises :class:`TierError` ``invalid-request`` for more than ``MAX_BATCH`` keys. A key of another length is
        absent.
        """

    def complete_load(self, load: Load) -> None:
        """End the pins of a load that has ended. Raises ``invalid-request`` before its end and the second time."""

    def complete_store(self, store: Store) -> None:
        """Make the blocks that have landed visible and give back the room of all others.

        Raises ``invalid-request`` before the end of the store and the second time.
        """

    def cancel(self, copy: TierCopy) -> None:
        """Give a copy up. The blocks of a load that have not landed yet fail as ``aborted``, and all of a store do.

        The copy ends as soon as no byte of it can move any more, which may be later: wait for ``has_ended``, then
        complete it. Of a copy that has ended nothing changes.
        """

    def snapshot(self) -> dict[str, Any]:
        """Return the state as plain data. Every tier has ``num_blocks`` (visible), ``num_bytes`` (occupied, at most
        ``capacity_bytes``), ``num_pinned`` (blocks that an open load keeps), ``num_loads`` and ``num_stores`` (not yet
        completed). When all copies are completed the last three are 0.
        """

    def close(self) -> None:
        """Release all resources; open copies fail with ``closed``. Twice is fine.

        Afterwards no byte of a slot moves. Raises ``deadline-exceeded`` where a copy goes on for more than
        ``CLOSE_SECONDS``: the slab must then stay mapped until the process ends.
        """


class LowerTier(Tier, Protocol):
    """A tier below host memory: its copies are between its own storage and slots of the region it was opened with.

    ``prepare_*`` raise ``invalid-request`` for a key of another length than ``KEY_BYTES``, for another number of slots
    than keys, for more than ``MAX_BATCH`` blocks, for a key twice in a call and for a slot of 0 bytes, and
    ``unregistered-range`` for a slot outside the region. They then start nothing.
    """

    @property
    def num_emptied(self) -> int:
        """How often the tier has lost all blocks that it held, while it was open. Changes inside verbs only."""

    def prepare_load(self, keys: Sequence[BlockKey], slots: Slots) -> Load:
        """Pin the blocks and begin to read each into its slot; a use of every block, for the order of eviction.

        A block that the tier does not hold fails as ``block-missing``, one of another length than its slot as
        ``block-size-mismatch``. Bytes of a slot whose block has not landed are undefined.
        """

    def prepare_store(self, keys: Sequence[BlockKey], slots: Slots) -> Store:
        """Reserve room, where needed by evicting blocks that no load pins, and begin to write the slots.

        A key that the tier holds has landed at once. A key that another open store is writing fails as
        ``already-being-stored``, and one for which there is no room as ``tier-full``: neither is an error of the tier.
        """

    def poll(self) -> list[TierCopy]:
        """Make bounded progress and return the copies that have ended since the last call, each once.

        Copies that end inside ``prepare_*`` or ``cancel`` are returned too.
        """


def closed_error() -> TierError:
    """Return what verbs of a closed tier raise."""
    return TierError(Reason.CLOSED, "the tier is closed.", "Open another.")


def check_batch(keys: Sequence[BlockKey]) -> None:
    """Raise ``invalid-request`` for more than ``MAX_BATCH`` keys."""
    if len(keys) > MAX_BATCH:
        raise TierError(Reason.INVALID_REQUEST, f"{len(keys)} blocks in one call; the limit is {MAX_BATCH}.")


def check_completes(copy: TierCopy, open_copies: Container[TierCopy]) -> None:
    """Raise ``invalid-request`` for a copy that has not ended or is not among the open ones of a tier."""
    if not copy.has_ended or copy not in open_copies:
        asked = "a copy was completed before its end, a second time, or in another tier."
        raise TierError(Reason.INVALID_REQUEST, asked, "Complete each copy once, when it has ended.")


def check_slots(keys: Sequence[BlockKey], slots: Slots, region: Region) -> None:
    """Raise as ``prepare_*`` of a :class:`LowerTier` do, for a tier whose slots lie in ``region``."""
    check_batch(keys)
    if len(slots) != len(keys) or len(set(keys)) != len(keys) or set(map(len, keys)) - {KEY_BYTES}:
        asked = f"{len(slots)} slots for {len(keys)} keys, of which {len(set(keys))} differ."
        raise TierError(Reason.INVALID_REQUEST, asked, f"Give one slot for each key of {KEY_BYTES} bytes.")
    outside = RegionTable([region]).outside(slots.addresses, slots.lengths)
    if len(outside):
        first = int(outside[0])
        asked = f"slot {first} has {int(slots.lengths[first])} bytes at {int(slots.addresses[first]):#x}."
        raise TierError(Reason.UNREGISTERED_RANGE, asked, f"The slab is {region!r}.")
    if not slots.lengths.all():
        raise TierError(Reason.INVALID_REQUEST, "a slot has 0 bytes.", "A block has at least one byte.")
