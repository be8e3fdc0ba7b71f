"""Copies inside one process: for tests, for one-process engines, and as the upper bound in measurements."""

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvferry.arrays import Addresses, Descriptors, Integers
from kvferry.errors import Reason, TransportError
from kvferry.transport.protocol import (
    Capabilities,
    Direction,
    Nonce,
    Peer,
    ProcessEndPoint,
    RegisteredMemoryTransport,
    Status,
    Transfer,
    decode_end_point,
    memory_at,
    own_identity,
    reached,
    unpack_regions,
)

MAX_BYTES_PER_POLL = 16 << 20
GATHER_BYTES = 256 << 10  # a gather goes through a buffer that stays in the second-level cache
MEMMOVE_FROM = 16 << 10  # measured: from this length on one memmove per descriptor is faster than gather and scatter

_open_nonces: set[bytes] = set()


@dataclass(slots=True, eq=False)
class MemcpyPeer(Peer):
    """Another memcpy transport of this process, until that transport is closed."""

    nonce: bytes

    @property
    def is_open(self) -> bool:
        """Whether the other transport is open, and so its memory mapped."""
        return self.nonce in _open_nonces


@dataclass(slots=True, eq=False)
class MemcpyTransfer(Transfer):
    """A transfer as an iterator that makes one copy per step and yields the copied bytes."""

    may_land: bool = False
    copies: Iterator[int] = field(kw_only=True)


class MemcpyTransport(RegisteredMemoryTransport):
    """Moves bytes between transports of one process."""

    capabilities = Capabilities(name="memcpy", same_process_only=True, ends_with_process=True)

    def __init__(self) -> None:
        super().__init__()
        self._nonce = Nonce()
        _open_nonces.add(self._nonce.value)

    def connect(self, end_point: bytes) -> Transfer:
        """Accept an end point of an open memcpy transport of this process."""
        self._check_open()
        remote = decode_end_point(end_point, ProcessEndPoint, "memcpy")
        if remote.identity != own_identity():
            raise TransportError(
                Reason.TRANSPORT_UNAVAILABLE,
                f"memcpy stays inside process {os.getpid()}; the end point is of process {remote.identity.pid}.",
                "Use the cma or nixl transport between processes.",
            )
        if remote.nonce not in _open_nonces:
            raise _peer_closed()
        return reached(MemcpyPeer(name="memcpy", regions=unpack_regions(remote.regions), nonce=remote.nonce))

    def close(self) -> bool:
        """Refuse all later calls, also transfers of peers."""
        _open_nonces.discard(self._nonce.value)
        return super().close()

    def _end_point(self) -> ProcessEndPoint:
        return ProcessEndPoint.own("memcpy", self._local, self._nonce)

    def _queue(self, peer: Peer, direction: Direction, descriptors: Descriptors) -> MemcpyTransfer:
        copies = _copies(descriptors.copy())
        return MemcpyTransfer(peer, direction, len(descriptors), int(descriptors[:, 2].sum()), copies=copies)

    def _advance(self, transfer: Transfer) -> Status:
        """Copy up to 16 MiB, or one descriptor that is larger."""
        assert isinstance(transfer, MemcpyTransfer)
        assert isinstance(transfer.peer, MemcpyPeer)
        if not transfer.peer.is_open:
            return transfer.fail(_peer_closed())
        stop = min(transfer.bytes_done + MAX_BYTES_PER_POLL, transfer.num_bytes)
        while transfer.bytes_done < stop:
            transfer.bytes_done += next(transfer.copies)
        if transfer.bytes_done == transfer.num_bytes:
            transfer.status = Status.DONE
        return transfer.status


def _peer_closed() -> TransportError:
    return TransportError(
        Reason.PEER_DIED, "the memcpy transport of this end point is closed.", "Use an end point of an open transport."
    )


def _copies(descriptors: Descriptors) -> Iterator[int]:
    """Copy descriptors of equal length together, so that numpy loops over them."""
    lengths = descriptors[:, 2]
    for length in np.unique(lengths).tolist():
        sources, destinations = descriptors[lengths == length, :2].T
        if length >= MEMMOVE_FROM:
            yield from _move_each(sources, destinations, length)
        else:
            yield from _gather(sources, destinations, length)


def _move_each(sources: Addresses, destinations: Addresses, length: int) -> Iterator[int]:
    for source, destination in zip(sources.tolist(), destinations.tolist(), strict=True):
        ctypes.memmove(destination, source, length)
        yield length


def _gather(sources: Addresses, destinations: Addresses, length: int) -> Iterator[int]:
    source_rows, source_index = _rows(sources, length)
    destination_rows, destination_index = _rows(destinations, length)
    num_rows = max(1, GATHER_BYTES // length)
    for start in range(0, len(sources), num_rows):
        chosen = source_index[start : start + num_rows]
        destination_rows[destination_index[start : start + num_rows]] = source_rows[chosen]
        yield len(chosen) * length


def _rows(addresses: Addresses, length: int) -> tuple[npt.NDArray[np.void], Integers]:
    """Return an array in which range ``i`` is element ``index[i]``, and the index.

    The array's elements may overlap. Memory between the ranges is never accessed.
    """
    base = int(addresses.min())
    offsets = (addresses - np.uint64(base)).astype(np.int64)
    step = int(np.gcd.reduce(offsets)) or 1
    index = offsets // step
    return memory_at(base, (int(index.max()) + 1,), (step,), length), index
