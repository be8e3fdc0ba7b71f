"""Memory of a CUDA device through torch, which is imported only here and only for a device.

Only the device's own kernels and transports may access its memory: an address of it is none of the processor's.
"""

from typing import TYPE_CHECKING

from kvferry.layout.shard import Region

if TYPE_CHECKING:
    import torch


def allocate(num_bytes: int, device: str) -> "tuple[torch.Tensor, int]":
    """Return memory of a device, which lives as long as the tensor, and its address."""
    import torch

    memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return memory, memory.data_ptr()


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
