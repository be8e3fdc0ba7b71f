"""A transport that moves no bytes: for tests of everything but the copies."""

import os
from typing import Literal

import msgspec

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
    pid: int
    regions: RegionList


class NullTransport(RegisteredMemoryTransport):
    """Checks addresses against the regions but never accesses them."""

    capabilities = Capabilities(name="null", ends_with_process=True, moves_device_memory=True)

    def connect(self, end_point: bytes) -> Transfer:
        """Accept any end point of a null transport."""
        self._check_open()
        remote = decode_end_point(end_point, NullEndPoint, "null")
        return reached(Peer(name=f"null:{remote.pid}", regions=unpack_regions(remote.regions)))

    def _end_point(self) -> NullEndPoint:
        return NullEndPoint(transport="null", pid=os.getpid(), regions=pack_regions(self._local))

    def _queue(self, peer: Peer, direction: Direction, descriptors: Descriptors) -> Transfer:
        return Transfer(peer, direction, len(descriptors), int(descriptors[:, 2].sum()))

    def _advance(self, transfer: Transfer) -> Status:
        transfer.bytes_done = transfer.num_bytes
        transfer.status = Status.DONE
        return transfer.status
