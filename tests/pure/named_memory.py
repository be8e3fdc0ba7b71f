"""Memory of dense shards with views from the layout's name alone, which checks the shards' strides."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from kvferry.arrays import Bytes
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import CacheGroup, Region, Shard

from ..support.dense import Content
from ..support.oracle import Arena, RankMemory


def named_memory(
    arena: Arena, shard: Shard, layout: NamedLayout, content: Content, widths: Sequence[tuple[str, int]]
) -> RankMemory:
    """Give a dense one-group shard real memory whose views come from the layout's name alone.

    ``widths`` names the parts of the content with their channels: ``[("k", 64), ("v", 64)]``. The shard's numbers are
    used for nothing but counts, so that a wrong stride in them shows.
    """
    (group,) = shard.groups
    counts = {"L": len(group.layers), "B": group.num_blocks, "N": group.block_size}
    counts["H"] = sum(held.end - held.start for held in group.components[0].heads)
    memory = arena.allocate(shard.regions[0].length)
    parts = _apart(memory, layout, counts, group, widths) if content is Content.APART else {}
    parts = parts or _together(memory, layout, counts, group, content, widths)
    layers = group.components[0].layers
    views = {
        (group.name, name, layer): array[index] for name, array in parts.items() for index, layer in enumerate(layers)
    }
    placed = msgspec.structs.replace(shard, regions=(Region(memory.ctypes.data, len(memory)),))
    return RankMemory(placed, (memory,), views)


def _apart(
    memory: Bytes, layout: NamedLayout, counts: Mapping[str, int], group: CacheGroup, widths: Sequence[tuple[str, int]]
) -> dict[str, Bytes]:
    parts: dict[str, Bytes] = {}
    begin = 0
    tokens = counts["L"] * counts["B"] * counts["H"] * counts["N"]
    for name, width in widths:
        end = begin + tokens * width * group.components[0].itemsize
        parts |= _together(memory[begin:end], layout, counts, group, Content.FUSED, [(name, width)])
        begin = end
    return parts


def _together(
    memory: Bytes,
    layout: NamedLayout,
    counts: Mapping[str, int],
    group: CacheGroup,
    content: Content,
    widths: Sequence[tuple[str, int]],
) -> dict[str, Bytes]:
    """Return for each part an array (layer, block, head, slot, channel, itemsize), a view of the memory."""
    total, itemsize = sum(width for _, width in widths), group.components[0].itemsize
    order = "".join(layout)
    dense = memory.reshape(*(counts[axis] for axis in order if axis != "C"), total, itemsize)
    whole = dense.transpose(*(order.index(axis) for axis in "LBHNC"), 5)
    if content is Content.FUSED:
        names = [component.name for component in group.components]
        return {next(name for name in names if name == widths[0][0] or name == "kv"): whole}
    if content is Content.INTERLEAVED:
        return {name: whole[..., first : first + width, :] for name, first, width in _spans(widths)}
    pages = memory.reshape(*(counts[axis] for axis in order[:3]), counts["N"] * total, itemsize)
    pages = pages.transpose(*(order.index(axis) for axis in "LBH"), 3, 4)
    parts = {}
    for name, first, width in _spans(widths):
        plane = pages[..., first * counts["N"] : (first + width) * counts["N"], :]
        transposed = content is Content.TRANSPOSED_KEYS and name == "k"
        inner = (width, counts["N"]) if transposed else (counts["N"], width)
        # Splitting an axis of constant stride is always a view.
        split = np.lib.stride_tricks.as_strided(
            plane, (*plane.shape[:3], *inner, itemsize), (*plane.strides[:3], inner[1] * itemsize, itemsize, 1)
        )
        parts[name] = split.swapaxes(3, 4) if transposed else split
    return parts


def _spans(widths: Sequence[tuple[str, int]]) -> Iterable[tuple[str, int, int]]:
    first = 0
    for name, width in widths:
        yield name, first, width
        first += width
