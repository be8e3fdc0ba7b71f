"""The memory of caches in tests: the host's; tests of device memory put another in its place."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvferry.arrays import Bytes
from kvferry.execution.device import HOST, DeviceOrder


class Cache(NamedTuple):
    """``content`` is what the test reads and writes; the product knows ``address`` and ``device``."""

    content: Bytes
    address: int
    device: str


class HostCaches:
    """Caches in host memory."""

    order: DeviceOrder = HOST

    def allocate(self, shape: Sequence[int]) -> Cache:
        """Return a cache of zeros."""
        content = np.zeros(shape, np.uint8)
        return Cache(content, int(content.ctypes.data), "cpu")


caches = HostCaches()
