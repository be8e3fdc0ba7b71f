"""A device for kvferry's own code where there is no GPU: its memory, its copies, its driver, and NIXL's agents."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from kvferry.execution import cuda_driver, device_memory, device_merge
from kvferry.execution.device import OVER, Mark
from kvferry.execution.stage import put_in_place
from kvferry.layout.shard import Region
from kvferry.execution.device_merge import Merge
from kvferry.transport import nixl, registry

from ..local import cache_memory
from ..local.cache_memory import Cache
from . import standin_driver, standin_nixl
from .device_tensor import tensor_at, to
from .standin_transport import FACTORY
from .untouchable import DEVICE, DeviceMemory, reachable

num_merged = 0
"""Launches that put a stage's bytes in place."""


def install(patch: pytest.MonkeyPatch) -> None:
    """Put the stand-ins in their places, and caches of tests on the device. Every transport by name is NIXL."""
    patch.setattr(f"{__name__}.num_merged", 0)
    patch.setattr(nixl, "_import_bindings", lambda: standin_nixl)
    for name in ("nixl", "cma", "memcpy"):
        patch.setitem(registry.FACTORIES, name, FACTORY)
    patch.setattr(device_memory, "allocate", allocate)
    patch.setattr(device_memory, "as_bytes", as_bytes)
    patch.setattr(device_merge, "merge", merge)
    patch.setattr(torch.Tensor, "to", to)
    standin_driver.reset()
    patch.setattr(cuda_driver, "_load", lambda _: standin_driver.LIBRARY)
    patch.setattr(cache_memory, "caches", DeviceCaches())
    torch.set_num_threads(1)  # this process is a fork, which has none of its parent's threads


class ImmediateOrder:
    """The order of a device that has done each launch when it returns; :mod:`..adapter.test_device_order` has others.

    Unlike on a CPU, copies out of a stage are launched, and the stage lies on the device.
    """

    device = DEVICE
    is_immediate = False

    def enter_thread(self) -> None:
        pass

    def mark(self) -> Mark:
        return OVER

    def wait_for(self, mark: Mark) -> None:
        pass

    def stream(self) -> int:
        return standin_driver.IMMEDIATE


class DeviceCaches:
    order = ImmediateOrder()

    def allocate(self, shape: Sequence[int]) -> Cache:
        memory = DeviceMemory(math.prod(shape))
        return Cache(memory.content.reshape(shape), memory.region.base_address, DEVICE)


def allocate(num_bytes: int, device: str) -> tuple[DeviceMemory, Region]:
    """In the place of :func:`kvferry.execution.device_memory.allocate`."""
    memory = DeviceMemory(num_bytes, device)
    return memory, memory.region


def as_bytes(region: Region) -> torch.Tensor:
    """In the place of :func:`kvferry.execution.device_memory.as_bytes`."""
    assert region.device == DEVICE
    return tensor_at(region.base_address, region.length)


def merge(merges: Sequence[Merge], stage_address: int, device: str) -> None:
    """In the place of :func:`kvferry.execution.device_merge.merge`: the same copies, by the second mapping."""
    global num_merged
    num_merged += 1
    assert device == DEVICE
    device_merge.merge_table(merges, stage_address)  # the kernel's, of the device's addresses
    for each in on_second_mapping(merges):
        put_in_place(each, reachable(stage_address))


def on_second_mapping(merges: Sequence[Merge]) -> list[Merge]:
    return [replace(each, destination_address=reachable(each.destination_address)) for each in merges]


def use_host_caches(patch: pytest.MonkeyPatch, is_host: bool) -> None:
    """Put the caches of engines that a test makes meanwhile into host memory, or leave them on the device."""
    patch.setattr(cache_memory, "caches", cache_memory.HostCaches() if is_host else DeviceCaches())
