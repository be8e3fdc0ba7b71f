"""Memory of a CUDA device through torch, which is imported only here and only for a device.

Only the device's own kernels and transports may access its memory: an address of it is none of the processor's.
"""

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
