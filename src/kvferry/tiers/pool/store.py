"""One engine's client of Mooncake Store: its share of the pool's memory, and calls that end in bounded time.

Mooncake's client talks to the master again by itself when a master comes back. What this module adds: calls are not
begun while the master does not answer, a *mark* shows whether the pool was emptied in between, and blocks lie in the
pool together with a trailer that says what they are.

The mark is a small object in this client's own share. A master that was started again does not know it, and neither
does one that took this client for dead and gave up the client's share; in both cases the blocks of the share are gone.
"""

import importlib
import logging
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from kvferry.errors import Reason, TierError, TransportError
from kvferry.layout.shard import Region
from kvferry.tiers.checksum import checksum
from kvferry.tiers.pool.index import TRAILER_BYTES
from kvferry.tiers.protocol import KEY_BYTES, BlockKey, TierCopy
from kvferry.tiers.workers import CANCELLED
from kvferry.transport.mooncake import LOOPBACK, Greeting, install_mooncake, mooncake_environment, open_engine

logger = logging.getLogger(__name__)

BLOCKS_PER_READ, BLOCKS_PER_WRITE = 16, 128
"""Most blocks of one call. With a peer that stops, Mooncake lets two requests for each block wait for the limits of
``_LASTING_ENVIRONMENT``, ``NUM_CONNECTIONS`` at a time; writes rarely go to a peer."""
NUM_CONNECTIONS = 16
GREETING_SECONDS = 1.0
PEER_SECONDS = 0.25
"""How long it is believed that a peer runs, or does not."""
LOOK_SECONDS = 1.0
FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS = 0.25, 8.0
UNCERTAIN_SECONDS = 55.0
"""Mooncake gives a transfer up after 60 s without a proof that its bytes have stopped."""
_ENVIRONMENT: dict[str, str | None] = {
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
    "MC_STORE_CLIENT_METRIC": "0",
    "MOONCAKE_STORE_CHECKSUM": None,  # the trailer has one
}
_LASTING_ENVIRONMENT = {"MC_TCP_STATUS_TIMEOUT_SEC": "2", "MC_TCP_PROGRESS_TIMEOUT_SEC": "2"}
"""Mooncake reads these for each transfer; a peer that stops is given up after so long. The user's values stay."""
_NO_ROOM, _TRANSFER_FAILED = -200, -800
_UNREACHABLE = (-900, -901)
_TRAILER = np.dtype([("key", np.uint8, KEY_BYTES), ("magic", "S8"), ("length", np.uint64), ("checksum", np.uint64)])
_MAGIC = b"kvferry1"
assert _TRAILER.itemsize == TRAILER_BYTES

Trailers = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class PoolState:
    """What the client knows of the pool: ``num_emptied`` counts how often the client's share lost its blocks."""

    is_reachable: bool = False
    num_emptied: int = 0


class PoolStore:
    """A client with ``share_bytes`` of memory for the pool. All calls block, and any thread may make them.

    ``regions``: memory that blocks are copied from and to. While ``state.is_reachable`` is False, calls raise
    :class:`TierError` ``tier-failed`` at once; :meth:`renew` finds the master again.
    """

    def __init__(self, master: str, share_bytes: int, region: Region, num_threads: int) -> None:
        # Any thread may find that the master is away; the mark is looked for by one.
        self._is_reachable, self._num_emptied = False, 0
        self._master, self._share_bytes, self._region = master, share_bytes, region
        self._trailers = np.zeros((num_threads, BLOCKS_PER_WRITE), _TRAILER)
        self._free_trailers = list(range(num_threads))
        self._mark = np.frombuffer(uuid.uuid4().bytes * 4, np.uint8).copy()
        self._mark_name = f"kvferry/member/{uuid.uuid4().hex}"
        self._retry_seconds = FIRST_RETRY_SECONDS
        self._peers: dict[str, tuple[float, bool]] = {}
        """When a peer was last greeted, and whether a process runs there."""
        for name, value in _LASTING_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._address = os.environ.get("MC_TCP_BIND_ADDRESS", LOOPBACK)
        self._package = import_store()
        try:
            self._engine: Any = open_engine(self._address, NUM_CONNECTIONS)
        except TransportError as error:
            raise TierError(error.reason, error.message, error.remedy) from error
        self._name = f"{self._address}:{self._engine.get_rpc_port()}"
        self._store: Any = None
        self._refusal = ""
        """Why the master did not take this client the last time; each is logged once."""

    @property
    def state(self) -> PoolState:
        """What is known of the pool now."""
        return PoolState(self._is_reachable, self._num_emptied)

    def renew(self) -> float:
        """Look whether the pool can be reached and still has this client's mark; return seconds until the next look.

        Changes ``state``. Raises nothing.
        """
        try:
            greet(self._master)  # Mooncake's ``setup`` holds the GIL while it waits
            if self._store is None:
                self._join()
            if not self._has_mark():
                self._put_mark()
                self._num_emptied += 1
            self._is_reachable = True
        except Exception as error:  # Mooncake's binding raises what C++ throws
            logger.debug("the pool's master at %s: %r", self._master, error)
            self._is_reachable = False
            seconds = self._retry_seconds
            self._retry_seconds = min(2 * seconds, LONGEST_RETRY_SECONDS)
            return seconds
        self._retry_seconds = FIRST_RETRY_SECONDS
        return LOOK_SECONDS

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Return whether the pool has each block, complete."""
        self._check_reachable()
        codes = self._store.batch_is_exist(object_names(keys)) if keys else []
        self._check_codes(codes)
        return [code == 1 for code in codes]

    def remove(self, keys: Sequence[BlockKey]) -> None:
        """Remove blocks, those that somebody reads too: the reader's checksum will differ."""
        self._check_reachable()
        if keys:
            self._check_codes(self._store.batch_remove(object_names(keys), True))

    def put(self, keys: Sequence[BlockKey], addresses: Sequence[int], lengths: Sequence[int]) -> list[TierError | None]:
        """Store at most ``BLOCKS_PER_WRITE`` blocks with their trailers; return the error of each that failed.

        Where the call raises, it is not known which blocks the pool has now.
        """
        self._check_reachable()
        place, trailers = self._take_trailers(len(keys))
        try:
            trailers[:] = np.zeros(1, _TRAILER)
            trailers["magic"] = _MAGIC
            trailers["key"] = _key_bytes(keys)
            trailers["length"] = lengths
            trailers["checksum"] = list(map(checksum, addresses, lengths))
            config = self._package.ReplicateConfig()
            config.preferred_segment = self._name
            buffers, sizes = _buffers(addresses, lengths, trailers)
            codes = self._store.batch_put_from_multi_buffers(object_names(keys), buffers, sizes, config)
            self._check_codes(codes)
        finally:
            self._free_trailers.append(place)
        return [None if code == 0 else _put_error(code) for code in codes]

    def get(self, keys: Sequence[BlockKey], addresses: Sequence[int], lengths: Sequence[int]) -> list[TierError | None]:
        """Read at most ``BLOCKS_PER_READ`` blocks and compare them with their trailers; return the error of each.

        Raises :class:`UncertainTransfer` where a read failed and its bytes may still arrive.
        """
        self._check_reachable()
        found: list[TierError | None] = list(self._cannot_be_read(object_names(keys), lengths))
        places = [place for place, error in enumerate(found) if error is None]
        if places:
            errors = self._read(chosen(keys, places), chosen(addresses, places), chosen(lengths, places))
            for place, error in zip(places, errors, strict=True):
                found[place] = error
        return found

    def _read(
        self, keys: Sequence[BlockKey], addresses: Sequence[int], lengths: Sequence[int]
    ) -> list[TierError | None]:
        place, trailers = self._take_trailers(len(keys))
        began_at = time.monotonic()
        try:
            trailers[:] = np.zeros(1, _TRAILER)
            buffers, sizes = _buffers(addresses, lengths, trailers)
            codes = self._store.batch_get_into_multi_buffers(object_names(keys), buffers, sizes)
            seconds = time.monotonic() - began_at
            if seconds > UNCERTAIN_SECONDS and min(codes) < 0:
                raise UncertainTransfer
            self._check_codes(codes)
            is_named = (trailers["magic"] == _MAGIC) & (trailers["length"] == np.array(lengths, np.uint64))
            is_named &= (trailers["key"] == _key_bytes(keys)).all(axis=1)
            checksums = trailers["checksum"].tolist()
            rows = zip(codes, addresses, lengths, is_named.tolist(), checksums, strict=True)
            return [
                _get_error(code, seconds)
                if code != length + TRAILER_BYTES
                else None
                if named and checksum(address, length) == expected
                else TierError(Reason.CHECKSUM_MISMATCH, "a block of the pool is damaged.")
                for code, address, length, named, expected in rows
            ]
        finally:
            self._free_trailers.append(place)

    def _cannot_be_read(self, names: Sequence[str], lengths: Sequence[int]) -> Iterator[TierError | None]:
        """Yield why each block cannot be read: it has another length, or lies with an engine that does not answer.

        Mooncake would wait for a stopped peer once for each block.
        """
        replicas = self._store.batch_get_replica_desc(list(names))
        for name, length in zip(names, lengths, strict=True):
            places = [
                replica.get_memory_descriptor().buffer_descriptor
                for replica in replicas.get(name, ())
                if replica.is_memory_replica()
            ]
            if any(place.size != length + TRAILER_BYTES for place in places):
                message = f"a block of the pool does not have the {length} bytes of its slot."
                yield TierError(Reason.BLOCK_SIZE_MISMATCH, message, "Let equal keys mean equal blocks.")
            elif any(not self._runs(place.transport_endpoint) for place in places):
                yield TierError(Reason.PEER_UNREACHABLE, "the engine whose memory has a block does not answer.")
            else:
                yield None

    def _runs(self, peer: str) -> bool:
        """Return whether a process runs at the end point of a peer."""
        if peer == self._name:
            return True
        greeted_at, runs = self._peers.get(peer, (-np.inf, False))
        if time.monotonic() - greeted_at > PEER_SECONDS:
            try:
                greet(peer)
                runs = True
            except OSError:
                runs = False
            self._peers[peer] = (time.monotonic(), runs)
        return runs

    def close(self) -> None:
        """Leave the pool, which loses the blocks of this client's share. No call may be in progress.

        Takes up to a second; where the master has died, up to 19 s, for which Mooncake keeps the interpreter's lock.
        """
        self._is_reachable = False
        if self._store is not None:
            for address in (self._region.base_address, self._trailers.ctypes.data, self._mark.ctypes.data):
                self._store.unregister_buffer(address)
            self._store.close()
        self._store = self._engine = None

    def _join(self) -> None:
        try:
            self._set_up()
        except TierError as error:
            if self._refusal != str(error):
                logger.warning("no block is shared: %s", error)
            self._refusal = str(error)
            raise

    def _set_up(self) -> None:
        store = self._package.MooncakeDistributedStore()
        with mooncake_environment(_ENVIRONMENT):
            code = store.setup(
                self._name, "P2PHANDSHAKE", self._share_bytes, 0, "tcp", "", self._master, self._engine.get_engine()
            )
        if code:
            asked = f"Mooncake's master at {self._master} refuses this client (code {code})."
            raise TierError(Reason.TIER_FAILED, asked, "Start mooncake_master of the same version.")
        own = [Region(int(array.ctypes.data), array.nbytes) for array in (self._trailers, self._mark)]
        for region in (self._region, *own):
            if code := store.register_buffer(region.base_address, region.length):
                store.close()
                raise TierError(Reason.TIER_FAILED, f"Mooncake refuses to register {region} (code {code}).")
        self._store = store

    def _has_mark(self) -> bool:
        found = int(self._store.is_exist(self._mark_name))
        self._check_codes([found])
        return found == 1

    def _put_mark(self) -> None:
        """Put the mark into this client's share. Raises ``tier-failed`` while the master does not know the share."""
        config = self._package.ReplicateConfig()
        config.preferred_segment = self._name
        config.with_hard_pin = True
        code = self._store.put_from(self._mark_name, int(self._mark.ctypes.data), self._mark.nbytes, config)
        self._check_codes([code])
        places = [
            replica.get_memory_descriptor().buffer_descriptor.transport_endpoint
            for replica in self._store.get_replica_desc(self._mark_name)
        ]
        if places != [self._name]:
            self._store.remove(self._mark_name, True)
            raise TierError(Reason.TIER_FAILED, "the pool does not have this engine's share yet.")

    def _take_trailers(self, num_blocks: int) -> tuple[int, Trailers]:
        place = self._free_trailers.pop()
        return place, self._trailers[place, :num_blocks]

    def _check_reachable(self) -> None:
        if not self._is_reachable:
            raise self._unreachable()

    def _check_codes(self, codes: Sequence[int]) -> None:
        if any(code in _UNREACHABLE for code in codes):
            self._is_reachable = False
            raise self._unreachable()

    def _unreachable(self) -> TierError:
        message = f"Mooncake's master at {self._master} does not answer."
        return TierError(Reason.TIER_FAILED, message, "Start mooncake_master there.")


class UncertainTransfer(Exception):
    """A read failed, and its bytes may still arrive."""


Value = TypeVar("Value")


def chosen(values: Sequence[Value], places: Sequence[int]) -> list[Value]:
    """Return the values at these places.

    >>> chosen("abc", [0, 2])
    ['a', 'c']
    """
    return [values[place] for place in places]


def import_store() -> Any:
    """Return Mooncake's module ``store``. Raises :class:`TierError` ``missing-dependency``."""
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise TierError(
            Reason.MISSING_DEPENDENCY,
            f"the pool cannot load Mooncake Store: {error}.",
            install_mooncake(),
        ) from error


def greet(address: str) -> None:
    """Check that a process runs at "host:port", for at most ``GREETING_SECONDS``. Raises ``OSError``."""
    host, _, port = address.rpartition(":")
    greeting = Greeting(host, int(port))
    deadline = time.monotonic() + GREETING_SECONDS
    try:
        while not greeting.is_over():
            if (seconds := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            greeting.wait(seconds)
    finally:
        greeting.close()


def object_names(keys: Sequence[BlockKey]) -> list[str]:
    """Return the names of blocks in the pool: the namespace, and the rest of the key.

    >>> object_names([bytes(range(48))])[0][:48]
    'kvferry/000102030405060708090a0b0c0d0e0f/1011121'
    """
    return [f"kvferry/{key[:16].hex()}/{key[16:].hex()}" for key in keys]


def _key_bytes(keys: Sequence[BlockKey]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)


def _buffers(
    addresses: Sequence[int], lengths: Sequence[int], trailers: Trailers
) -> tuple[list[list[int]], list[list[int]]]:
    """Return what Mooncake takes: for each block its two buffers, and their sizes."""
    first = int(trailers.ctypes.data)
    behind = range(first, first + len(addresses) * TRAILER_BYTES, TRAILER_BYTES)
    buffers = np.column_stack([np.array(addresses, np.uint64), np.array(behind, np.uint64)])
    sizes = np.column_stack([np.array(lengths, np.uint64), np.full(len(lengths), TRAILER_BYTES, np.uint64)])
    return buffers.tolist(), sizes.tolist()


def _put_error(code: int) -> TierError:
    if code == _NO_ROOM:
        return TierError(Reason.TIER_FULL, "the pool has no room for a block.", "Give the pool more bytes.")
    return TierError(Reason.PEER_UNREACHABLE, f"the pool did not take a block (code {code}).")


def _get_error(code: int, seconds: float) -> TierError:
    if code == _TRANSFER_FAILED:
        # One engine that is gone is no reason to leave the whole pool alone, unless it costs time.
        reason = Reason.TRANSFER_FAILED if seconds > GREETING_SECONDS else Reason.PEER_UNREACHABLE
        return TierError(reason, "the engine whose memory has a block cannot be reached.")
    return TierError(Reason.BLOCK_MISSING, f"the pool does not have a block (code {code}).")


MAX_ASKED = 1 << 16
"""Most blocks of one question to the master."""


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
    is_cancelled: bool = False
    is_uncertain: bool = False

    def perform(self) -> None:
        """Move the blocks, in parts."""
        copy = self.copy
        addresses, lengths = copy.slots.addresses.tolist(), copy.slots.lengths.tolist()
        for at in range(0, len(self.indices), self.blocks_per_call):
            part = self.indices[at : at + self.blocks_per_call]
            try:
                if self.is_cancelled:
                    raise CANCELLED
                rows = ([copy.keys[i] for i in part], [addresses[i] for i in part], [lengths[i] for i in part])
                found = self.move(part, *rows)
                self.errors.update(zip(part, found, strict=True))
                slow = next((error for error in found if error and error.reason is Reason.TRANSFER_FAILED), None)
                if slow is not None:  # the next part would wait as long
                    self.errors.update(dict.fromkeys(self.indices[at + self.blocks_per_call :], slow))
                    return
            except UncertainTransfer:
                raise
            except TierError as error:
                self.errors.update(dict.fromkeys(part, error))
            except Exception as error:
                self.errors.update(dict.fromkeys(part, TierError(Reason.TIER_FAILED, f"the pool failed: {error!r}.")))

    def fail(self, error: Exception) -> None:
        """Some bytes may still arrive."""
        self.is_uncertain = True

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
