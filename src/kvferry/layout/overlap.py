"""Whether two elements of a component could share a byte."""

from collections.abc import Iterable

import numpy as np

from kvferry.layout.component import Component
from kvferry.layout.notation import affine_step

MAX_CHECKED_INTERVALS = 1 << 20
"""Above this many content vectors the exhaustive check is not made."""


def extent(axes: Iterable[tuple[int, int]], itemsize: int) -> int:
    """Return the bytes from the first to the end of the last element of axes given as (count, stride).

    >>> extent([(4, 8), (2, 2)], 2)
    28
    """
    return itemsize + sum((count - 1) * stride for count, stride in axes)


def is_nested(axes: Iterable[tuple[int, int]], itemsize: int) -> bool:
    """Return whether each stride steps over all that the shorter strides reach, which excludes any overlap.

    >>> is_nested([(4, 8), (4, 2)], 2), is_nested([(4, 6), (4, 2)], 2)
    (True, False)
    """
    reach = itemsize
    for count, stride in sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: axis[1]):
        if stride < reach:
            return False
        reach += (count - 1) * stride
    return True


def elements_overlap(component: Component, num_blocks: int, block_size: int) -> bool:
    """Return whether two distinct elements share a byte, as far as that is cheap to say."""
    inner = _inner_axes(component, block_size)
    axes = [*inner, (num_blocks, component.block_stride)]
    if not is_nested(axes, component.itemsize):
        return True
    offsets = tuple(sorted(component.layer_offsets))
    step = affine_step(offsets)
    if step is not None and is_nested([*axes, (len(offsets), step)], component.itemsize):
        return False
    return _content_overlaps(component, min(num_blocks, 2), inner)


def _inner_axes(component: Component, block_size: int) -> list[tuple[int, int]]:
    return [
        (component.num_heads, component.head_stride),
        (block_size, component.token_stride),
        (component.num_channels, component.channel_stride),
    ]


def _content_overlaps(component: Component, num_blocks: int, inner: list[tuple[int, int]]) -> bool:
    """Place every element of the first blocks of all layers and look for two that touch the same byte."""
    starts, length = np.asarray(component.layer_offsets, dtype=np.int64), component.itemsize
    for count, stride in sorted([*inner, (num_blocks, component.block_stride)], key=lambda axis: axis[1]):
        if stride == length:
            length *= count
            continue
        if starts.size * count > MAX_CHECKED_INTERVALS:
            return False
        starts = (starts[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
    starts.sort()
    return bool(np.any(np.diff(starts) < length))
