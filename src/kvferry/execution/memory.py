"""Memory of ranks: of a device, through torch, which is imported only for it; of the host, in huge pages.

Only the device's own kernels and transports may access its memory: an address of it is none of the processor's.
"""

import ctypes
import errno
import os
from typing import TYPE_CHECKING

import msgspec

from kvferry.layout.shard import Region, Shard

if TYPE_CHECKING:
    import torch


def allocate(num_bytes: int, device: str) -> "tuple[torch.Tensor, Region]":
    """Return memory of a device, which lives as long as the tensor, and its region."""
    import torch

    memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return memory, Region(memory.data_ptr(), num_bytes, device)


def placed(shard: Shard, device: str) -> "tuple[Shard, torch.Tensor]":
    """Return a shard of one region in memory of a device, and this memory, which lives as long as the tensor."""
    memory, region = allocate(shard.regions[0].length, device)
    return msgspec.structs.replace(shard, regions=(region,)), memory


def as_bytes(region: Region) -> "torch.Tensor":
    """Return a region of a device's memory as a tensor of bytes."""
    import torch

    return torch.as_tensor(_DeviceMemory(region), device=region.device)


class _DeviceMemory:
    def __init__(self, region: Region) -> None:
        self.__cuda_array_interface__ = {
            "data": (region.base_address, False),
            "shape": (region.length,),
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }


_HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25
_libc = ctypes.CDLL(None, use_errno=True)


def collapse_to_huge_pages(address: int, length: int) -> str | None:
    """Put the whole 2 MiB pages inside ``[address, address + length)`` into huge pages.

    A descriptor into 4 KiB pages costs the kernel a page-table walk per page; the same bytes in huge pages move about
    twice as fast. Returns None on success, else why the kernel refused; then transfers are only slower. Costs about a
    second per 800 MB, once, since memory that is already touched is rewritten (Linux 6.1).

    >>> import numpy as np
    >>> memory = np.ones(8 << 20, dtype=np.uint8)
    >>> reason = collapse_to_huge_pages(memory.ctypes.data, memory.nbytes)
    >>> reason is None or isinstance(reason, str), int(memory.sum()) == memory.nbytes
    (True, True)
    """
    start = -(-address // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    end = (address + length) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if end <= start:
        return f"{length} bytes hold no whole 2 MiB page"
    for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
        if _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice) != 0:
            number = ctypes.get_errno()
            return f"madvise({advice}): {errno.errorcode.get(number, number)} {os.strerror(number)}"
    return None
