"""The types of numpy arrays, by what the arrays hold."""

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
