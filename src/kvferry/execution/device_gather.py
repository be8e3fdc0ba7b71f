"""Short pieces of a cache pass a buffer on the device, so that few long copies pass between the device and the host.

In a tier's slab a block is contiguous; in a cache it may lie in thousands of pieces, and a copy by the driver costs as
much for 16 KiB as for 16 bytes. So a kernel gathers the pieces of a store in the buffer as they lie in the slab, and
the driver copies them from there; for a load the driver copies into the buffer, and the kernel scatters the pieces.

What a block's pieces become in the buffer is an *image*: the bytes of the host from the first piece to the end of the
last. Images, and the choice of copies that need none, depend on plans alone and need no device.

The buffer has two halves, and copies have a stream of their own, so that the kernel fills or empties one half while the
driver copies the other. One thread, which also owns the kernel's stream, launches all of it:

* a chunk begins once the last chunk in its half has ended;
* the copy of a store waits for the kernel, the kernel of a load waits for the copy;
* waits are those of streams: no thread waits, and the engine's stream waits for nothing.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from kvferry.arrays import Descriptors, Integers, Offsets
from kvferry.errors import Reason, TransportError
from kvferry.execution import memory
from kvferry.execution.device import OVER, DeviceOrder, Mark
from kvferry.execution.memory import as_bytes
from kvferry.layout.shard import HOST_DEVICE
from kvferry.peer_log import PeerLog
from kvferry.plan.block_copies import BlockCopies
from kvferry.plan.planner import StridedCopy, coalesce, merge_rows
from kvferry.units import format_bytes

if TYPE_CHECKING:
    import torch

logger = PeerLog(logging.getLogger(__name__))

GATHER_BELOW = 256 << 10
"""Pieces of so many bytes are copied one by one: the driver's time for a copy is a tenth of the time of its bytes."""
HALF_BYTES = 32 << 20
"""Half of the buffer: a copy of so many bytes takes 30 times as long as the launches for it."""
IMAGE_ALIGNMENT = 16
TILE_BITS = 10
"""A program copies 1024 elements: 16 KiB where an element has 16 bytes."""
COALESCED_BYTES = 128
"""Neighbouring threads access memory together in lines of this size; no tile is narrower, even to fit a run."""

CacheCopy = tuple[StridedCopy, int]
"""A copy from the host to the cache in block 0, and the stride of the cache's blocks."""


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """Pieces of a block, of any pair of blocks, as they lie in the buffer: ``num_bytes`` with those between pieces.

    ``host_offset`` is where the image begins in block 0 of the host. ``rows`` are offset in the image and length of
    what is contiguous at the host. ``table`` has the kernel's row for each copy, in the columns of
    :mod:`gather_kernel`, with ``num_loops`` loops.
    """

    host_offset: int
    num_bytes: int
    rows: Offsets
    table: Integers
    num_tiles: int
    num_loops: int


@dataclass(slots=True, eq=False)
class BlockImages:
    """An image for each of these pairs of blocks. ``on_device`` is the table, then the ids of the cache's blocks."""

    image: Image
    host_block_stride: int
    host_blocks: Integers
    cache_blocks: Integers
    on_device: "torch.Tensor | None" = None

    def chunks(self, half_bytes: int) -> "Iterator[Chunk]":
        """Yield chunks that fit into half of a buffer."""
        most = half_bytes // self.image.num_bytes
        for first in range(0, len(self.host_blocks), most):
            yield Chunk(self, first, min(most, len(self.host_blocks) - first))


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """The images of ``count`` pairs of blocks, from the pair ``first`` on, which pass the buffer together."""

    images: BlockImages
    first: int
    count: int

    def rows(self, buffer_address: int, *, is_load: bool) -> Descriptors:
        """Return the copies between the host and the images, which begin at this address of the buffer."""
        image, blocks = self.images.image, self.images.host_blocks[self.first : self.first + self.count]
        hosts = image.host_offset + blocks * self.images.host_block_stride
        buffers = buffer_address + np.arange(self.count, dtype=np.int64) * image.num_bytes
        places = np.stack((hosts, buffers) if is_load else (buffers, hosts), axis=1)
        rows = np.empty((self.count, len(image.rows), 3), dtype=np.int64)
        rows[:, :, :2] = places[:, None] + image.rows[:, :1]
        rows[:, :, 2] = image.rows[:, 1]
        return merge_rows(rows.reshape(-1, 3)).astype(np.uint64)


def choose(
    copies: Sequence[BlockCopies], half_bytes: int, *, is_load: bool
) -> tuple[list[BlockCopies], list[BlockImages]]:
    """Return the copies that the driver makes as they are, and images for the others.

    A copy needs an image where its runs are shorter than :data:`GATHER_BELOW` and adjoin others at the host.
    """
    direct: list[BlockCopies] = []
    short: dict[tuple[int, ...], list[BlockCopies]] = {}
    for each in copies:
        if each.copy.run_bytes >= min(GATHER_BELOW, half_bytes):
            direct.append(each)
        elif len(each.source_blocks):
            load = each if is_load else turned(each)
            # Copies of one phase of a group have the same arrays of blocks.
            alike = id(load.source_blocks), id(load.destination_blocks), load.source_block_stride
            short.setdefault(alike, []).append(load)
    images = []
    for loads in short.values():
        memory = loads[0].source_block_stride, loads[0].source_blocks, loads[0].destination_blocks
        in_block = tuple((each.copy, each.destination_block_stride) for each in loads)
        found, others = images_of(in_block, half_bytes)
        images += [BlockImages(image, *memory) for image in found]
        rest = [BlockCopies(copy, memory[0], stride, *memory[1:]) for copy, stride in others]
        direct += rest if is_load else map(turned, rest)
    return direct, images


def turned(copies: BlockCopies) -> BlockCopies:
    """Return the copies back from where these go."""
    copy = copies.copy
    loops = tuple((count, there, here) for count, here, there in copy.loops)
    back = StridedCopy(copy.destination_offset, copy.source_offset, copy.run_bytes, loops)
    strides = copies.destination_block_stride, copies.source_block_stride
    return BlockCopies(back, *strides, copies.destination_blocks, copies.source_blocks)


@lru_cache(maxsize=256)
def images_of(copies: tuple[CacheCopy, ...], half_bytes: int) -> tuple[tuple[Image, ...], tuple[CacheCopy, ...]]:
    """Return images of a block's copies, each of at most ``half_bytes``, and the copies that an image does not join.

    ``half_bytes`` is a multiple of 16, and no run is longer. Two layers of four bytes, which are apart in the cache:

    >>> (image,), others = images_of(((StridedCopy(512, 4096, 4, ((2, 4, 64),)), 8),), 1 << 20)
    >>> image.host_offset, image.num_bytes, image.rows.tolist(), others
    (512, 16, [[0, 8]], ())
    """
    parts = [(part, stride) for copy, stride in copies for part in _cut(copy, half_bytes)]
    parts.sort(key=lambda part: (part[0].source_offset, part[0].destination_offset))
    windows: list[list[CacheCopy]] = []
    for part in parts:
        end = part[0].source_offset + _host_span(part[0])
        if not windows or end - windows[-1][0][0].source_offset > half_bytes:
            windows.append([])
        windows[-1].append(part)
    images: list[Image] = []
    others: list[CacheCopy] = []
    for window in windows:
        image = _image(window)
        if len(image.rows) < sum(copy.num_runs for copy, _ in window):
            images.append(image)
        else:
            others += window
    return tuple(images), tuple(others)


def _host_span(copy: StridedCopy) -> int:
    return copy.run_bytes + sum((count - 1) * at_host for count, at_host, _ in copy.loops)


def _cut(copy: StridedCopy, most_bytes: int) -> Iterator[StridedCopy]:
    """Yield the copy in parts that span at most so many bytes of the host: cut along the widest loop, and the next."""
    if _host_span(copy) <= most_bytes:
        yield copy
        return
    widest = max(range(len(copy.loops)), key=lambda loop: copy.loops[loop][1])
    count, at_host, in_cache = copy.loops[widest]
    loops = copy.loops[:widest] + copy.loops[widest + 1 :]
    for index in range(count):
        places = copy.source_offset + index * at_host, copy.destination_offset + index * in_cache
        yield from _cut(StridedCopy(*places, copy.run_bytes, loops), most_bytes)


def _image(copies: Sequence[CacheCopy]) -> Image:
    begin = min(copy.source_offset for copy, _ in copies)
    at_host = []
    for copy, _ in copies:
        # The host's side alone, so that runs are joined which lie apart in the cache.
        place, loops = copy.source_offset - begin, tuple((count, host, host) for count, host, _ in copy.loops)
        at_host.append(coalesce(StridedCopy(place, place, copy.run_bytes, loops)).expand())
    rows = merge_rows(np.concatenate(at_host))[:, 1:]
    num_loops = max(len(copy.loops) for copy, _ in copies)
    table = np.array([_table_row(copy, stride, begin, num_loops) for copy, stride in copies], dtype=np.int64)
    tiles = [num_tiles(runs, elements, bits) for runs, elements, bits in table[:, 5:8].tolist()]
    table[:, 0] = np.cumsum(tiles) - tiles
    num_bytes = -(-int((rows[:, 0] + rows[:, 1]).max()) // IMAGE_ALIGNMENT) * IMAGE_ALIGNMENT
    return Image(begin, num_bytes, rows, table, sum(tiles), num_loops)


def _table_row(copy: StridedCopy, cache_block_stride: int, begin: int, num_loops: int) -> list[int]:
    numbers = copy.source_offset - begin, copy.destination_offset, cache_block_stride
    width = element_width(copy.run_bytes, *numbers, *(stride for loop in copy.loops for stride in loop[1:]))
    elements = copy.run_bytes // width
    shape = copy.num_runs, elements, column_bits(copy.num_runs, elements, width)
    loops = *copy.loops, *[(1, 0, 0)] * (num_loops - len(copy.loops))
    return [0, width, *numbers, *shape, *(number for loop in loops for number in loop)]


def element_width(*numbers: int) -> int:
    """Return the widest element, in bytes, whose size divides every one of these addresses, strides and lengths.

    >>> element_width(4096, 256), element_width(4096, 24), element_width(4096, 9)
    (16, 8, 1)
    """
    return next(width for width in (16, 8, 4, 2, 1) if all(number % width == 0 for number in numbers))


def column_bits(num_runs: int, elements: int, width: int) -> int:
    """Return the logarithm of a tile's columns: the shape that needs the fewest tiles, and of those the widest.

    A tile much wider than a run, or with more rows than there are runs, leaves threads without work.

    >>> column_bits(1, 1 << 20, 16), column_bits(4096, 16, 16), column_bits(4096, 72, 16), column_bits(4096, 3, 2)
    (10, 4, 3, 2)
    """
    most = min(TILE_BITS, (elements - 1).bit_length())
    least = min(most, (COALESCED_BYTES // width).bit_length() - 1)
    return min(range(least, most + 1), key=lambda bits: (num_tiles(num_runs, elements, bits), -bits))


def num_tiles(num_runs: int, elements: int, bits: int) -> int:
    """Return how many tiles of ``2**bits`` columns cover the runs.

    >>> num_tiles(100, 72, 6), num_tiles(100, 72, 3)
    (14, 9)
    """
    return -(-elements // (1 << bits)) * -(-num_runs // (1 << (TILE_BITS - bits)))


@dataclass(slots=True, eq=False)
class Half:
    """Half of the buffer, free once ``end`` is over."""

    address: int
    end: Mark = OVER


class GatherBuffer:
    """The buffer of one rank, two halves of ``half_bytes``, with the compiled kernel.

    Raises what torch and triton raise, where the device has no room or the kernel cannot be compiled. Made by a thread
    that has used the device; used by one thread.
    """

    def __init__(self, order: DeviceOrder, half_bytes: int) -> None:
        self._kernel = kernel()
        self._order, self.half_bytes = order, half_bytes
        self._memory, self._region = memory.allocate(2 * half_bytes, order.device)
        begin = self._region.base_address
        self._halves = cycle((Half(begin), Half(begin + half_bytes)))
        self._copies = order.new_stream()
        # Triton compiles with the first launch: here, and not while a request waits.
        (image,), _ = images_of(((StridedCopy(0, begin, 16, ((2, 16, 32),)), 64),), half_bytes)
        none = np.zeros(1, dtype=np.int64)
        for to_buffer in (True, False):
            self._run(Chunk(BlockImages(image, 0, none, none), 0, 1), begin + half_bytes, to_buffer=to_buffer)

    def launch(
        self, chunk: Chunk, *, copy: Callable[[Descriptors, int], None], under_way: deque[Mark], is_load: bool
    ) -> None:
        """Launch a chunk, whose copies ``copy`` launches on a stream, and add the mark behind it, also behind a part.

        Raises :class:`TransportError` (``transfer-failed``) where the driver refuses the copies, or the device has no
        room for the kernel's table.
        """
        half, kernel, copies = next(self._halves), self._order.stream(), self._copies
        rows = chunk.rows(half.address, is_load=is_load)
        first, second = (copies, kernel) if is_load else (kernel, copies)
        first.wait_for(half.end)
        try:
            try:
                if is_load:
                    copy(rows, copies.handle)
                else:
                    self._run(chunk, half.address, to_buffer=True)
            finally:
                # Also where the driver has refused: a part of the copies may be under way.
                second.wait_for(first.mark())
            if is_load:
                self._run(chunk, half.address, to_buffer=False)
            else:
                copy(rows, copies.handle)
        finally:
            half.end = second.mark()
            under_way.append(half.end)

    def clear(self) -> None:
        """Launch zeros for the whole buffer on the calling thread's stream. No chunk is under way."""
        as_bytes(self._region).zero_()

    def _run(self, chunk: Chunk, buffer_address: int, *, to_buffer: bool) -> None:
        """Launch the kernel on the calling thread's stream."""
        images = chunk.images
        image, num_copies = images.image, len(images.image.table)
        if images.on_device is None:
            images.on_device = self._table(images)
        self._kernel.copy_tiles[(chunk.count * image.num_tiles,)](
            images.on_device,
            image.table.size + chunk.first,
            buffer_address,
            image.num_bytes,
            image.num_tiles,
            num_copies,
            (num_copies - 1).bit_length(),
            image.num_loops,
            TO_BUFFER=to_buffer,
            TILE_BITS=TILE_BITS,
        )

    def _table(self, images: BlockImages) -> "torch.Tensor":
        """Return what the kernel reads of these images. Raises :class:`TransportError` where the device has no room."""
        on_host, device = np.concatenate((images.image.table.ravel(), images.cache_blocks)), self._order.device
        try:
            return _on_device(on_host, device)
        except RuntimeError as error:  # torch's own for memory of the device, and for pinned memory of the host
            problem = f"no room on {device} for {format_bytes(on_host.nbytes)}: {error}"
            remedy = "Leave the device some memory: lower vLLM's --gpu-memory-utilization."
            raise TransportError(Reason.TRANSFER_FAILED, problem, remedy) from error


def take_buffer(order: DeviceOrder) -> GatherBuffer | None:
    """Return the buffer of a rank; None, with a line in the log, where the device has no room or the kernel cannot run.

    The buffer is memory of the device beside the engine's caches, which no limit of the engine's counts.
    """
    try:
        buffer = GatherBuffer(order, HALF_BYTES)
    except Exception as error:
        # Whatever torch, triton and the C compiler that triton calls have to say: offload works without the buffer.
        told = "kvferry: offload on %s copies each piece of a cache by itself, which is slow where pieces are short: %s"
        logger.warning(told, order.device, error or repr(error))
        return None
    logger.info("kvferry: offload took %s of %s for a buffer", format_bytes(2 * HALF_BYTES), order.device)
    return buffer


def kernel() -> ModuleType:
    """Return the module of the kernel, imported on first use."""
    from kvferry.execution import gather_kernel

    return gather_kernel


def _on_device(array: Integers, device: str) -> "torch.Tensor":
    import torch

    tensor = torch.from_numpy(array)
    return tensor if device == HOST_DEVICE else tensor.pin_memory().to(device, non_blocking=True)
