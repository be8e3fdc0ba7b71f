"""The five axes on which every attention cache is described."""

from enum import StrEnum


class Axis(StrEnum):
    """One axis of a KV cache.

    >>> [axis.value for axis in Axis]
    ['L', 'B', 'H', 'N', 'C']
    """

    L = "L"
    """Layer."""
    B = "B"
    """Block: the unit that the engine's allocator hands out."""
    H = "H"
    """KV head."""
    N = "N"
    """Token slot within a block."""
    C = "C"
    """Content of one head and token."""
