"""Memory in a transport test, by the name of its class: ``module:class``, made with a number of bytes.

The test puts and gets bytes through the class alone, so that memory may be a device's.
"""

import importlib
from typing import Protocol

import numpy as np

from kvferry.arrays import Bytes
from kvferry.layout.shard import Region


class Memory(Protocol):
    """Bytes that a transport can register."""

    region: Region

    def put(self, content: Bytes, offset: int = 0) -> None:
        """Write these bytes."""

    def get(self) -> Bytes:
        """Return a copy of all bytes, or the bytes themselves where the processor can read them."""


class HostMemory:
    """An array of numpy."""

    def __init__(self, num_bytes: int) -> None:
        self.array: Bytes = np.zeros(num_bytes, np.uint8)
        self.region = Region(int(self.array.ctypes.data), num_bytes)

    def put(self, content: Bytes, offset: int = 0) -> None:
        """Write these bytes."""
        self.array[offset : offset + len(content)] = content

    def get(self) -> Bytes:
        """Return the array."""
        return self.array


class CudaMemory:
    """Memory of a CUDA device, the first one unless a subclass names another."""

    device = "cuda:0"

    def __init__(self, num_bytes: int) -> None:
        import torch

        self.tensor: torch.Tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        torch.cuda.synchronize(self.device)
        self.region = Region(self.tensor.data_ptr(), num_bytes, self.device)

    def put(self, content: Bytes, offset: int = 0) -> None:
        """Write these bytes, and wait for the device."""
        import torch

        self.tensor[offset : offset + len(content)] = torch.from_numpy(content.copy()).to(self.device)
        torch.cuda.synchronize(self.device)

    def get(self) -> Bytes:
        """Return a copy of all bytes: the copy is launched after what has landed."""
        found: Bytes = self.tensor.cpu().numpy()
        return found


class SecondCudaMemory(CudaMemory):
    """Memory of the second device."""

    device = "cuda:1"


HOST_MEMORY = "tests.support.transport_memory:HostMemory"


def make_memory(name: str, num_bytes: int) -> Memory:
    """Import ``module:class`` and make so many bytes, all zero."""
    module, attribute = name.split(":")
    memory: Memory = getattr(importlib.import_module(module), attribute)(num_bytes)
    return memory
