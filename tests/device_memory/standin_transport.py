"""What a peer's process of the suite of transports needs: the transport on the stand-in for NIXL, and device memory."""

from kvferry.arrays import Bytes
from kvferry.transport import nixl
from kvferry.transport.network import LOOPBACK_DEVICE
from kvferry.transport.nixl import NixlTransport

from . import standin_nixl
from .untouchable import DeviceMemory

FACTORY = f"{__name__}:open_transport"
MEMORY = f"{__name__}:SuiteMemory"


def open_transport(devices: str = LOOPBACK_DEVICE) -> NixlTransport:
    """Return kvferry's transport on the stand-in for NIXL, in any process."""
    nixl._import_bindings = lambda: standin_nixl
    return NixlTransport(devices)


class SuiteMemory:
    """Device memory for the suite of transports."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = DeviceMemory(num_bytes)
        self.region = self._memory.region

    def put(self, content: Bytes, offset: int = 0) -> None:
        self._memory.content[offset : offset + len(content)] = content

    def get(self) -> Bytes:
        return self._memory.content
