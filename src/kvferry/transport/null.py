"""A transport that moves no bytes: for plans without memory, and to measure everything but the copies."""

import os
from typing import Literal

import msgspec
import numpy as np

from kvferry.arrays import Descriptors
from kvferry.transport.protocol import (
    Capabilities,
    Direction,
    Peer,
    RegionList,
    RegisteredMemoryTransport,
    Status,
    Transfer,
    decode_end_point,
    pack_regions,
    reached,
    unpack_regions,
)


class NullEndPoint(msgspec.Struct, frozen=True):
    """The registered regions, which need not exist."""

    transport: Literal["null"]
    version: Literal[1]
    pid: int
    regions: RegionList


class NullTransport(RegisteredMemoryTransport):
    """Checks addresses against the regions but never accesses them; ``last_submitted`` is the latest submission.

    >>> from kvferry.layout.shard import Region
    >>> source, destination = NullTransport(), NullTransport()
    >>> peer = destination.connect(source.register([Region(1 << 20, 4096)])).peer
    >>> _ = destination.register([Region(2 << 20, 4096)])
    >>> transfer = destination.submit(peer, Direction.READ, np.array([[1 << 20, 2 << 20, 512]], np.uint64))
    >>> str(destination.poll(transfer)), transfer.bytes_done, destination.last_submitted.tolist()
    ('done', 512, [[1048576, 2097152, 512]])
    """

    capabilities = Capabilities(name="null", moves_bytes=False, ends_with_process=True, moves_device_memory=True)

    def __init__(self) -> None:
        super().__init__()
        self.last_submitted: Descriptors = np.empty((0, 3), np.uint64)

    def connect(self, end_point: bytes) -> Transfer:
        """Accept any end point of a null transport."""
        self._check_open()
        remote = decode_end_point(end_point, NullEndPoint, "null")
        return reached(Peer(name=f"null:{remote.pid}", regions=unpack_regions(remote.regions)))

    def _end_point(self) -> NullEndPoint:
        return NullEndPoint(transport="null", version=1, pid=os.getpid(), regions=pack_regions(self._local))

    def _queue(self, peer: Peer, direction: Direction, descriptors: Descriptors) -> Transfer:
        self.last_submitted = descriptors
        return Transfer(peer, direction, len(descriptors), int(descriptors[:, 2].sum()))

    def _advance(self, transfer: Transfer) -> Status:
        transfer.bytes_done = transfer.num_bytes
        transfer.status = Status.DONE
        return transfer.status
