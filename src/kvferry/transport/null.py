"""A transport that moves no bytes and records the submissions."""

import os
from collections.abc import Sequence
from typing import Literal

import msgspec

from kvferry.arrays import Descriptors
from kvferry.layout.shard import Region
from kvferry.transport.end_points import RegionList, decode_end_point, pack_regions, unpack_regions
from kvferry.transport.host_memory import HostMemoryTransport
from kvferry.transport.protocol import Capabilities, Direction, Peer, Status, Transfer, reached
from kvferry.transport.regions import check_regions
from kvferry.transport.submission import check_submission


class NullEndPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The registered regions, which need not exist."""

    transport: Literal["null"]
    version: Literal[1]
    pid: int
    regions: RegionList


class NullTransport(HostMemoryTransport):
    """Counts descriptors and bytes; addresses are checked against the regions but never accessed.

    With ``keep_descriptors``, ``descriptor_lists`` holds the submitted arrays.

    >>> import numpy as np
    >>> source, destination = NullTransport(), NullTransport()
    >>> peer = destination.connect(source.register([Region(1 << 20, 4096)])).peer
    >>> _ = destination.register([Region(2 << 20, 4096)])
    >>> transfer = destination.submit(peer, Direction.READ, np.array([[1 << 20, 2 << 20, 512]], np.uint64))
    >>> str(destination.poll(transfer)), destination.num_descriptors, destination.num_bytes
    ('done', 1, 512)
    """

    capabilities = Capabilities(name="null", moves_bytes=False)

    def __init__(self, keep_descriptors: bool = False) -> None:
        super().__init__()
        self.num_submissions = 0
        self.num_descriptors = 0
        self.num_bytes = 0
        self.descriptor_lists: list[Descriptors] = []
        self._keep_descriptors = keep_descriptors

    def register(self, regions: Sequence[Region]) -> bytes:
        """Add regions and return the end point."""
        self._check_open()
        check_regions(regions, "null")
        self._add(regions)
        return msgspec.msgpack.encode(
            NullEndPoint(transport="null", version=1, pid=os.getpid(), regions=pack_regions(self._local))
        )

    def connect(self, end_point: bytes) -> Transfer:
        """Accept any end point of a null transport."""
        self._check_open()
        remote = decode_end_point(end_point, NullEndPoint, "null")
        return reached(Peer(name=f"null:{remote.pid}", regions=unpack_regions(remote.regions)))

    def submit(self, peer: Peer, direction: Direction, descriptors: Descriptors) -> Transfer:
        """Check the descriptors and count them."""
        self._check_open()
        sides = check_submission(descriptors, direction, self._local, peer.regions)
        transfer = Transfer(peer, direction, len(descriptors), int(sides.lengths.sum()))
        self.num_submissions += 1
        self.num_descriptors += transfer.num_descriptors
        self.num_bytes += transfer.num_bytes
        if self._keep_descriptors:
            self.descriptor_lists.append(descriptors.copy())
        if not transfer.num_bytes:
            transfer.status = Status.DONE
        return transfer

    def cancel(self, transfer: Transfer) -> Status:
        """Stop at once."""
        return transfer.cancel()

    def close(self) -> None:
        """Refuse all later calls."""
        self._closed = True

    def _advance(self, transfer: Transfer) -> Status:
        transfer.bytes_done = transfer.num_bytes
        transfer.status = Status.DONE
        return transfer.status
