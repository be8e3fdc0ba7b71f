"""A device for kvferry's own code where there is no GPU: its memory, its copies, its driver, and NIXL's agents."""

import math
from collections.abc import Sequence

import pytest
import torch

from kvferry.execution import device as device_module
from kvferry.execution import device_gather, digests, memory, trial
from kvferry.execution.device import OVER, HostStream, Mark, Stream
from kvferry.layout.shard import Region
from kvferry.transport import nixl, registry

from ..local import cache_memory
from ..local.cache_memory import Cache
from . import standin_driver, standin_kernel, standin_nixl
from .device_tensor import tensor_at, to
from .standin_transport import FACTORY
from .untouchable import DEVICE, DeviceMemory


def install(patch: pytest.MonkeyPatch) -> None:
    """Put the stand-ins in their places, and caches of tests on the device. Every transport by name is NIXL."""
    patch.setattr(nixl, "_import_bindings", lambda: standin_nixl)
    for name in ("nixl", "cma"):
        patch.setitem(registry.FACTORIES, name, FACTORY)
    patch.setattr(memory, "allocate", allocate)
    for module in (device_gather, digests, trial):
        patch.setattr(module, "as_bytes", as_bytes)
    patch.setattr(torch.Tensor, "to", to)
    standin_driver.reset()
    standin_kernel.install(patch)
    patch.setattr(device_gather, "HALF_BYTES", 1 << 16)
    patch.setattr(device_module, "_load", lambda _: standin_driver.LIBRARY)
    patch.setattr(cache_memory, "caches", DeviceCaches())
    torch.set_num_threads(1)  # this process is a fork, which has none of its parent's threads


class ImmediateStream(HostStream):
    handle = standin_driver.IMMEDIATE


class ImmediateOrder:
    """The order of a device that has done each launch when it returns; others: :mod:`..adapter.test_device_order`."""

    device = DEVICE
    is_immediate = False

    def enter_thread(self) -> None:
        pass

    def mark(self) -> Mark:
        return OVER

    def stream(self) -> Stream:
        return ImmediateStream()

    new_stream = stream


class DeviceCaches:
    order = ImmediateOrder()

    def allocate(self, shape: Sequence[int]) -> Cache:
        memory = DeviceMemory(math.prod(shape))
        return Cache(memory.content.reshape(shape), memory.region.base_address, DEVICE)


def allocate(num_bytes: int, device: str) -> tuple[DeviceMemory, Region]:
    """In the place of :func:`kvferry.execution.memory.allocate`."""
    memory = DeviceMemory(num_bytes, device)
    return memory, memory.region


def as_bytes(region: Region) -> torch.Tensor:
    """In the place of :func:`kvferry.execution.memory.as_bytes`."""
    assert region.device == DEVICE
    return tensor_at(region.base_address, region.length)


def use_host_caches(patch: pytest.MonkeyPatch, is_host: bool) -> None:
    """Put the caches of engines that a test makes meanwhile into host memory, or leave them on the device."""
    patch.setattr(cache_memory, "caches", cache_memory.HostCaches() if is_host else DeviceCaches())
