"""Blocks whose bytes follow from their names, a slab for them, and a disk tier that stores and loads them."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.layout.shard import Region
from kvferry.tiers.local_disk import LocalDisk
from kvferry.tiers.protocol import Load, Slots, Store, TierCopy

from ..waits import wait_until

SLAB_BYTES = 8 << 20


def key_of(number: int) -> bytes:
    """Return the key of block ``number``."""
    return number.to_bytes(48, "big")


def content(number: int, length: int) -> bytes:
    """Return the bytes of block ``number``."""
    return random.Random(number).randbytes(length)


def bytes_on_disk(directory: Path) -> int:
    """Return what a directory and its files occupy, as the file system counts it."""
    return sum(path.stat().st_blocks * 512 for path in (directory, *directory.iterdir()))


class Blocks:
    """A slab and a disk tier in a directory. Blocks are named by numbers; each call waits for its end."""

    def __init__(self, directory: Path, capacity_bytes: int, **options: Any) -> None:
        memory = np.zeros(SLAB_BYTES + 4096, np.uint8)
        self.slab = memory[-int(memory.ctypes.data) % 4096 :][:SLAB_BYTES]
        self.region = Region(int(self.slab.ctypes.data), SLAB_BYTES)
        self.directory = directory
        self.disk = LocalDisk(directory, capacity_bytes, self.region, **options)

    def slots(self, lengths: Sequence[int], first: int = 0) -> Slots:
        """Return slots one behind the other, each on a page boundary, from ``first``."""
        starts = first + np.cumsum([0, *(-(-length // 4096) * 4096 for length in lengths)])[:-1]
        return Slots.of([self.region.base_address + int(start) for start in starts], lengths)

    def view(self, slots: Slots, index: int) -> np.ndarray[Any, Any]:
        """Return the bytes of a slot."""
        start = int(slots.addresses[index]) - self.region.base_address
        return self.slab[start : start + int(slots.lengths[index])]

    def begin_store(self, numbers: Sequence[int], lengths: Sequence[int]) -> Store:
        """Fill slots with blocks and prepare a store of them."""
        slots = self.slots(lengths)
        for index, number in enumerate(numbers):
            self.view(slots, index)[:] = np.frombuffer(content(number, lengths[index]), np.uint8)
        return self.disk.prepare_store([key_of(number) for number in numbers], slots)

    def store(self, numbers: Sequence[int], length: int = 8192) -> Store:
        """Store blocks of one length; return the completed store."""
        store = self.begin_store(numbers, [length] * len(numbers))
        self.wait(store)
        self.disk.complete_store(store)
        return store

    def load(self, numbers: Sequence[int], length: int = 8192) -> Load:
        """Load blocks of one length; return the completed load. No block that has landed has other bytes."""
        self.slab[:] = 0
        load = self.disk.prepare_load([key_of(number) for number in numbers], self.slots([length] * len(numbers)))
        self.wait(load)
        self.check_landed(load, numbers)
        self.disk.complete_load(load)
        return load

    def check_landed(self, load: Load, numbers: Sequence[int]) -> None:
        """Compare the blocks that have landed."""
        for index in np.flatnonzero(load.landed).tolist():
            view = self.view(load.slots, index)
            assert view.tobytes() == content(numbers[index], len(view)), f"block {numbers[index]} has other bytes"
        assert load.failures.total() == len(numbers) - int(load.landed.sum())

    def wait(self, copy: TierCopy) -> None:
        """Poll until a copy has ended."""
        wait_until(lambda: copy.has_ended, "the copy has not ended", each=self.disk.poll)

    def settle(self) -> None:
        """Wait until the threads have nothing to do."""
        wait_until(lambda: not self.disk.snapshot()["num_waiting"], "the threads have not finished")
        self.disk.poll()

    def held(self, numbers: Sequence[int]) -> set[int]:
        """Return the blocks that the tier says it holds."""
        presences = self.disk.look_up([key_of(number) for number in numbers])
        return {number for number, presence in zip(numbers, presences.tolist(), strict=True) if presence == 1}
