"""The types of numpy arrays, by what the arrays hold, and arrays over memory that no Python object owns."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
"""Memory, byte by byte."""
Flags = npt.NDArray[np.bool_]
"""One yes or no for each element of another array."""
Integers = npt.NDArray[np.int64]
"""Ids, indices, counts or offsets."""
Offsets = npt.NDArray[np.int64]
"""Rows of source offset, destination offset and, where a third column is there, length in bytes."""
Addresses = npt.NDArray[np.uint64]
"""Addresses, or lengths in bytes."""
Descriptors = npt.NDArray[np.uint64]
"""Shape ``(n, 3)``: source address, destination address, length in bytes."""


class _Memory:
    def __init__(self, address: int, shape: Sequence[int], strides: Sequence[int], element_bytes: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": tuple(shape),
            "strides": tuple(strides),
            "typestr": f"|V{element_bytes}",
            "version": 3,
        }


def memory_at(address: int, shape: Sequence[int], strides: Sequence[int], element_bytes: int) -> npt.NDArray[np.void]:
    """Return the memory at an address as an array; numpy copies each element by one memmove. Strides are bytes.

    >>> memory = np.arange(8, dtype=np.uint8)
    >>> memory_at(memory.ctypes.data, (2,), (4,), 2).tobytes().hex()
    '00010405'
    """
    return np.asarray(_Memory(address, shape, strides, element_bytes))
