"""Stage-to-cache copies on a GPU: all layers, blocks and runs by one launch of one kernel.

Each :class:`Merge` becomes a row of a table that the kernel reads: a few integers that also say how wide an element is
(the widest that divides every address and stride) and how a tile lies over the runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from kvferry.arrays import Integers
from kvferry.errors import Reason, TransportError
from kvferry.plan.planner import Loop

if TYPE_CHECKING:
    import torch

TILE_BITS = 10
"""A program copies 1024 elements: 16 KiB where an element has 16 bytes."""
COALESCED_BYTES = 128
"""Neighbouring threads access memory together in lines of this size; no tile is narrower, even to fit a run."""
_INT32 = 1 << 31


@dataclass(frozen=True, slots=True, eq=False)
class Merge:
    """One strided copy from a stage into the cache, over a list of blocks.

    Block i of the stage begins at ``stage_offset + i * stage_block_stride`` and goes to block
    ``destination_blocks[i]`` of the cache. ``loops`` are (count, stage stride, destination stride), innermost first,
    around runs of ``run_bytes``; ``destination_address`` is that of block 0.
    """

    stage_offset: int
    stage_block_stride: int
    destination_address: int
    destination_block_stride: int
    destination_blocks: Integers
    run_bytes: int
    loops: tuple[Loop, ...]

    @property
    def num_runs(self) -> int:
        """The number of runs."""
        return len(self.destination_blocks) * int(np.prod([count for count, _, _ in self.loops], dtype=np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class DeviceCopies:
    """Copies from a stage into a cache on a GPU, prepared: ``merge`` launches them and returns at once.

    They run on the device's current stream, after earlier launches. The caller keeps stage and cache until they have
    run. Runs of one list must not overlap in the cache.
    """

    merges: "torch.Tensor"
    blocks: "torch.Tensor"
    num_merges: int
    num_tiles: int
    num_loops: int
    tile_bits: int
    is_wide: bool

    def merge(self) -> None:
        """Copy from the stage into the cache."""
        kernel().copy_tiles[(self.num_tiles,)](
            self.merges,
            self.blocks,
            self.num_merges,
            (self.num_merges - 1).bit_length(),
            NUM_LOOPS=self.num_loops,
            TILE_BITS=self.tile_bits,
            WIDE=self.is_wide,
        )


def prepare(
    merges: Sequence[Merge], stage_address: int, device: "torch.device", tile_bits: int = TILE_BITS
) -> DeviceCopies | None:
    """Return these copies with their table on the device, None where there is nothing to copy.

    Starts two small transfers on the device's current stream and does not wait for them. Raises :class:`TransportError`
    (``missing-dependency``) without triton.
    """
    kernel()
    table = merge_table([merge for merge in merges if merge.num_runs], stage_address, tile_bits)
    if table is None:
        return None
    return DeviceCopies(
        merges=_on_device(table.merges, device),
        blocks=_on_device(table.blocks, device),
        num_merges=len(table.merges),
        num_tiles=table.num_tiles,
        num_loops=table.num_loops,
        tile_bits=tile_bits,
        is_wide=table.is_wide,
    )


def merge(merges: Sequence[Merge], stage_address: int, device: str) -> None:
    """Copy from the stage into the cache on the current stream. Raises as :func:`prepare`."""
    import torch

    copies = prepare(merges, stage_address, torch.device(device))
    if copies is not None:
        copies.merge()


def _on_device(array: Integers, device: "torch.device") -> "torch.Tensor":
    import torch

    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def kernel() -> ModuleType:
    """Return the module of the kernel, imported on first use. Raises :class:`TransportError` without triton."""
    try:
        from kvferry.execution import merge_kernel
    except ImportError as error:
        raise TransportError(
            Reason.MISSING_DEPENDENCY,
            f"a stage on a GPU needs triton, which cannot be imported: {error}.",
            "Install triton.",
        ) from error
    return merge_kernel


@dataclass(frozen=True, slots=True, eq=False)
class MergeTable:
    """The kernel's table: a row for each merge, in the columns of :mod:`merge_kernel`, and all their ``blocks``."""

    merges: Integers
    blocks: Integers
    num_tiles: int
    num_loops: int
    is_wide: bool


def merge_table(merges: Sequence[Merge], stage_address: int, tile_bits: int = TILE_BITS) -> MergeTable | None:
    """Return the table of these merges, None for no merge.

    >>> merge = Merge(0, 4096, 1 << 20, 8192, np.array([5, 3]), 256, ((16, 256, 512),))
    >>> table = merge_table([merge], 1 << 30)
    >>> table.merges.tolist()[0][:10]
    [0, 16, 1073741824, 4096, 1048576, 8192, 0, 32, 16, 4]
    >>> table.num_tiles, table.blocks.tolist()
    (1, [5, 3])
    """
    if not merges:
        return None
    num_loops = max(len(merge.loops) for merge in merges)
    rows = np.array([_row(merge, stage_address, tile_bits, num_loops) for merge in merges], dtype=np.int64)
    lengths = np.array([len(merge.destination_blocks) for merge in merges], dtype=np.int64)
    tiles = np.array([num_tiles(row[7], row[8], row[9], tile_bits) for row in rows.tolist()], dtype=np.int64)
    rows[:, 0] = np.cumsum(tiles) - tiles
    rows[:, 6] = np.cumsum(lengths) - lengths
    return MergeTable(
        merges=rows,
        blocks=np.concatenate([merge.destination_blocks for merge in merges]).astype(np.int64, copy=False),
        num_tiles=int(tiles.sum()),
        num_loops=num_loops,
        # The indices of the last tile go beyond the last run and element.
        is_wide=bool(rows[:, 7:9].max() + (1 << tile_bits) >= _INT32),
    )


def _row(merge: Merge, stage_address: int, tile_bits: int, num_loops: int) -> list[int]:
    loops = [*merge.loops, *[(1, 0, 0)] * (num_loops - len(merge.loops))]
    numbers = [stage_address + merge.stage_offset, merge.stage_block_stride]
    numbers += [merge.destination_address, merge.destination_block_stride]
    width = element_width(merge.run_bytes, *numbers, *(stride for loop in merge.loops for stride in loop[1:]))
    elements = merge.run_bytes // width
    bits = column_bits(merge.num_runs, elements, width, tile_bits)
    return [0, width, *numbers, 0, merge.num_runs, elements, bits, *(number for loop in loops for number in loop)]


def element_width(*numbers: int) -> int:
    """Return the widest element, in bytes, whose size divides every one of these addresses, strides and lengths.

    >>> element_width(4096, 256), element_width(4096, 24), element_width(4096, 9)
    (16, 8, 1)
    """
    return next(width for width in (16, 8, 4, 2, 1) if all(number % width == 0 for number in numbers))


def column_bits(num_runs: int, elements: int, width: int, tile_bits: int = TILE_BITS) -> int:
    """Return the logarithm of a tile's columns: the shape that needs the fewest tiles, and of those the widest.

    A tile much wider than a run, or with more rows than there are runs, leaves threads without work.

    >>> column_bits(1, 1 << 20, 16), column_bits(4096, 16, 16), column_bits(4096, 72, 16), column_bits(4096, 3, 2)
    (10, 4, 3, 2)
    """
    most = min(tile_bits, (elements - 1).bit_length())
    least = min(most, (COALESCED_BYTES // width).bit_length() - 1)
    return min(range(least, most + 1), key=lambda bits: (num_tiles(num_runs, elements, bits, tile_bits), -bits))


def num_tiles(num_runs: int, elements: int, bits: int, tile_bits: int) -> int:
    """Return how many tiles of ``2**bits`` columns cover the runs.

    >>> num_tiles(100, 72, 6, 10), num_tiles(100, 72, 3, 10)
    (14, 9)
    """
    return -(-elements // (1 << bits)) * -(-num_runs // (1 << (tile_bits - bits)))
