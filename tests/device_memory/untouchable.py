"""Device memory that no processor may touch: a read or write at its address ends the process by SIGSEGV.

The memory is a file in memory, mapped twice: without any permission at the address that the product knows, and readable
and writable for those who stand in for the device and for NIXL. So whatever the product does with the first address
itself, in Python, numpy or a system call, is found.
"""

import ctypes
import mmap
import os
from typing import NamedTuple

import numpy as np

from kvferry.arrays import Bytes
from kvferry.layout.shard import Region

DEVICE = "cuda:0"
_PROT_NONE = 0
_MAP_FIXED = 0x10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


MOST_BEHIND = 1 << 20


class Span(NamedTuple):
    """One allocation: ``length`` bytes of a device at ``address``, which the processor reaches at ``reachable``."""

    address: int
    length: int
    device: str
    reachable: int


spans: list[Span] = []
"""All device memory of this process. It stays mapped until the end of the process."""


class DeviceMemory:
    """``num_bytes`` of a device: the product gets ``region``; the test reads and writes ``content``.

    As with CUDA, an allocation may begin where another ends: right behind ``behind``, whose end is that of a page.
    """

    def __init__(self, num_bytes: int, device: str = DEVICE, behind: "DeviceMemory | None" = None) -> None:
        self.nbytes = num_bytes
        mapped = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        file = os.memfd_create("device")
        os.ftruncate(file, mapped)
        if behind is None:
            # Room for one more, in which a touch ends the process too.
            address = _map(file, mapped + MOST_BEHIND, _PROT_NONE)
        else:
            assert behind.nbytes % mmap.PAGESIZE == 0
            assert mapped <= MOST_BEHIND
            address = _map(file, mapped, _PROT_NONE, behind.region.base_address + behind.nbytes)
        reachable = _map(file, mapped, mmap.PROT_READ | mmap.PROT_WRITE)
        os.close(file)
        spans.append(Span(address, mapped, device, reachable))
        self.region = Region(address, num_bytes, device)
        self.content: Bytes = np.frombuffer((ctypes.c_uint8 * num_bytes).from_address(reachable), np.uint8)


def _map(file: int, num_bytes: int, protection: int, address: int | None = None) -> int:
    fixed = 0 if address is None else _MAP_FIXED
    address = _libc.mmap(address, num_bytes, protection, mmap.MAP_SHARED | fixed, file, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    return int(address)


def span_of(address: int, length: int) -> Span | None:
    """Return the allocation that has all of this range; None for host memory."""
    for span in spans:
        if span.address <= address and address + length <= span.address + span.length:
            return span
    return None


def reachable(address: int, length: int = 1) -> int:
    """Return where the processor reaches a range; host memory is where it is."""
    span = span_of(address, length)
    return address if span is None else span.reachable + address - span.address
