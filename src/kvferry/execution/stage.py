"""Bounded stages, the copies out of a stage into the cache, and huge pages for memory that moves in long runs."""

import ctypes
import errno
import mmap
import os
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Union

import numpy as np
import numpy.typing as npt

from kvferry.arrays import memory_at
from kvferry.errors import PlanError, Reason
from kvferry.execution import device_memory, device_merge
from kvferry.execution.device import HOST, OVER, DeviceOrder, Mark
from kvferry.layout.shard import Region
from kvferry.plan.staging.scatter import ROUNDS_PER_STAGE, Merge, aligned
from kvferry.transport.copy_threads import CopyThreads

if TYPE_CHECKING:
    import torch

Memory = Union[npt.NDArray[np.uint8], "torch.Tensor"]
_HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25
_libc = ctypes.CDLL(None, use_errno=True)


class _Copied:
    """A mark behind copies that another thread of this process makes."""

    def __init__(self, copying: Future[None]) -> None:
        self._copying = copying

    def is_over(self) -> bool:
        return self._copying.done()

    def wait(self) -> None:
        self._copying.result()


class Stage:
    """Memory on the cache's device. Each owner takes at most one stretch at a time; a queue serves owners in order.

    No owner waits while it has a stretch, so every stretch comes back and the first in the queue gets one: there is no
    deadlock, and no owner is overtaken. One thread uses a stage. Untouched memory costs nothing.

    >>> stage = Stage(4096)
    >>> stage.take("a", 3000), stage.take("b", 2000), stage.take("c", 100)
    (0, None, None)
    >>> stage.give_back("a"); stage.take("c", 100), stage.take("b", 2000), stage.take("c", 100)
    (None, 0, 2048)
    """

    def __init__(self, num_bytes: int, order: DeviceOrder = HOST) -> None:
        self._order = order
        self.memory: Memory
        self.region: Region
        """The memory to register."""
        self.memory, self.region = (
            _host_memory(num_bytes) if order.is_immediate else device_memory.allocate(num_bytes, order.device)
        )
        self._held: dict[Hashable, tuple[int, int]] = {}
        self._waiting: dict[Hashable, None] = {}
        self._given_back: list[tuple[tuple[int, int], Mark]] = []
        self._threads = CopyThreads()

    @property
    def is_on_host(self) -> bool:
        """Whether the caller must wait for the marks of copies; on a GPU the engine's stream waits for them."""
        return self._order.is_immediate

    @property
    def round_bytes(self) -> int:
        """Most bytes that a job takes at a time, unless one block has more."""
        return self.memory.nbytes // ROUNDS_PER_STAGE

    def take(self, owner: Hashable, num_bytes: int) -> int | None:
        """Return where the owner's stretch begins, or None while the owner must wait; it keeps its place in the queue.

        Raises :class:`PlanError` (``unsupported``) for more bytes than the stage has.
        """
        assert owner not in self._held, "an owner holds one stretch at a time"
        if aligned(num_bytes) > self.memory.nbytes:
            raise PlanError(
                Reason.UNSUPPORTED,
                f"{num_bytes} bytes were asked of a stage of {self.memory.nbytes}.",
                'Set "strategy" to "direct".',
            )
        self._waiting.setdefault(owner)
        if next(iter(self._waiting)) != owner:
            return None
        begin = self._gap(aligned(num_bytes))
        if begin is not None:
            del self._waiting[owner]
            self._held[owner] = (begin, begin + aligned(num_bytes))
        return begin

    def give_back(self, owner: Hashable, after: Mark = OVER) -> None:
        """Return the owner's stretch, or its place in the queue. The stretch is free once the mark is over."""
        stretch = self._held.pop(owner, None)
        self._waiting.pop(owner, None)
        if stretch is not None:
            self._given_back.append((stretch, after))

    def put_in_place(self, merges: Sequence[Merge]) -> Mark:
        """Start to copy from the stage into the cache; return the mark behind the copies.

        On a CPU another thread copies while the caller goes on reading; on a GPU the caller's stream gets one launch.
        """
        if self.is_on_host:
            return _Copied(self._threads.start(partial(_put_all_in_place, merges, self.region.base_address)))
        device_merge.merge(merges, self.region.base_address, self._order.device)
        return self._order.mark()

    def close(self) -> None:
        """End the copying thread once its copies are done; twice is fine."""
        self._threads.close()

    def _gap(self, num_bytes: int) -> int | None:
        self._given_back = [(stretch, mark) for stretch, mark in self._given_back if not mark.is_over()]
        begin = 0
        for start, end in sorted((*self._held.values(), *(stretch for stretch, _ in self._given_back))):
            if start - begin >= num_bytes:
                return begin
            begin = end
        return begin if self.memory.nbytes - begin >= num_bytes else None


def _host_memory(num_bytes: int) -> tuple[npt.NDArray[np.uint8], Region]:
    mapping = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(mapping, dtype=np.uint8)
    memory = whole[-whole.ctypes.data % _HUGE_PAGE_BYTES :][:num_bytes]
    return memory, Region(int(memory.ctypes.data), num_bytes)


def _put_all_in_place(merges: Sequence[Merge], stage_address: int) -> None:
    for merge in merges:
        put_in_place(merge, stage_address)


def put_in_place(merge: Merge, stage_address: int) -> None:
    """Copy one merge from the stage into the cache, all blocks by one assignment.

    >>> stage, cache = np.arange(8, dtype=np.uint8), np.zeros(16, dtype=np.uint8)
    >>> put_in_place(Merge(0, 4, cache.ctypes.data, 8, np.array([1, 0]), 2, ((2, 2, 4),)), stage.ctypes.data)
    >>> cache.tolist()
    [4, 5, 0, 0, 6, 7, 0, 0, 0, 1, 0, 0, 2, 3, 0, 0]
    """
    # numpy releases the interpreter lock while it copies and starts no threads, as torch would on the compute cores.
    counts, stage_strides, cache_strides = zip(*merge.loops[::-1], strict=True) if merge.loops else ((), (), ())
    blocks = merge.destination_blocks
    in_stage = (merge.stage_block_stride, *stage_strides)
    stage = memory_at(stage_address + merge.stage_offset, (len(blocks), *counts), in_stage, merge.run_bytes)
    shape = (int(blocks.max()) + 1, *counts)
    in_cache = (merge.destination_block_stride, *cache_strides)
    memory_at(merge.destination_address, shape, in_cache, merge.run_bytes)[blocks] = stage


def collapse_to_huge_pages(address: int, length: int) -> str | None:
    """Put the whole 2 MiB pages inside ``[address, address + length)`` into huge pages.

    A descriptor into 4 KiB pages costs the kernel a page-table walk per page; the same bytes in huge pages move about
    twice as fast. Returns None on success, else why the kernel refused; then transfers are only slower. Costs about a
    second per 800 MB, once, since memory that is already touched is rewritten (Linux 6.1).

    >>> import numpy as np
    >>> memory = np.ones(8 << 20, dtype=np.uint8)
    >>> reason = collapse_to_huge_pages(memory.ctypes.data, memory.nbytes)
    >>> reason is None or isinstance(reason, str), int(memory.sum()) == memory.nbytes
    (True, True)
    """
    start = -(-address // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    end = (address + length) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if end <= start:
        return f"{length} bytes hold no whole 2 MiB page"
    for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
        if _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice) != 0:
            number = ctypes.get_errno()
            return f"madvise({advice}): {errno.errorcode.get(number, number)} {os.strerror(number)}"
    return None
