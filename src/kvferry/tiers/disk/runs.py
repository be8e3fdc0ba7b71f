"""What the threads of a disk tier do: they move runs of blocks between slots and cells, and write headers.

A thread may hang in a read for as long as the disk does. So it never touches a slot of the host slab after its copy is
over: blocks are read into the thread's own buffer, verified there, and copied into their slots under the run's lock. A
copy can therefore end at any time, and its slots can be used for something else at once.
"""

import ctypes
import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.errors import Reason, TierError
from kvferry.tiers.checksum import checksum
from kvferry.tiers.disk.segments import PAGE_BYTES, SegmentFiles, tier_error
from kvferry.tiers.disk.space import Record
from kvferry.tiers.protocol import TierCopy

RUN_BYTES = 4 << 20
"""Most bytes of neighbouring blocks that move in one call, unless one block is longer."""
_OVER = TierError(Reason.ABORTED, "the copy was over before its turn came.")
_of_thread = threading.local()


@dataclass(slots=True, eq=False)
class Run:
    """Blocks in neighbouring cells of a segment. ``indices`` are the blocks' places in the copy.

    A thread holds the ``lock`` while it touches a slot, and touches none once the run ``is_over``.
    Once the run is done, ``errors`` has one entry for each block, None for a block that has landed.
    """

    copy: TierCopy
    files: SegmentFiles
    records: list[Record]
    indices: list[int]
    addresses: list[int]
    errors: list[TierError | None] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_over: bool = False

    def perform(self) -> None:
        """Move the blocks."""
        raise NotImplementedError

    def end(self) -> None:
        """Make sure that no slot is touched from now on; waits for at most one copy of the run in memory."""
        with self.lock:
            self.is_over = True

    def fail(self, error: Exception) -> None:
        """Note that no block of the run has landed."""
        self.errors = [tier_error("a disk thread", error).without_traceback()] * len(self.records)

    @property
    def num_bytes(self) -> int:
        """The bytes of the run's cells."""
        return len(self.records) * self.files.shape.cell_bytes


class LoadRun(Run):
    """Blocks that are read, verified and copied into their slots."""

    def perform(self) -> None:
        """Read all cells in one call; a block that differs from its checksum has not landed."""
        if self.is_over:
            return self.fail(_OVER)
        view, address = thread_buffer(self.num_bytes)
        self.files.read(self.records[0].cell, view)
        errors: list[TierError | None] = []
        for place, (record, slot) in enumerate(zip(self.records, self.addresses, strict=True)):
            start = address + place * self.files.shape.cell_bytes
            if checksum(start, record.num_bytes) != record.checksum:
                message = f"cell {record.cell} of {self.files.path} holds other bytes than were stored."
                errors.append(TierError(Reason.CHECKSUM_MISMATCH, message))
                continue
            with self.lock:
                if self.is_over:
                    return self.fail(_OVER)
                ctypes.memmove(slot, start, record.num_bytes)
            errors.append(None)
        self.errors = errors


class StoreRun(Run):
    """Blocks whose slots are written to their cells."""

    def perform(self) -> None:
        """Write all cells in one call, straight from the slots where they are whole pages."""
        cell_bytes = self.files.shape.cell_bytes
        slots = [(address, record.num_bytes) for address, record in zip(self.addresses, self.records, strict=True)]
        is_paged = all(value % PAGE_BYTES == 0 for slot in slots for value in slot)
        with self.lock:
            if self.is_over:
                return self.fail(_OVER)
            for record, slot in zip(self.records, slots, strict=True):
                record.checksum = checksum(*slot)
            if is_paged:
                pieces = [memory(*slot) for slot in slots]
            else:
                view, address = thread_buffer(self.num_bytes)
                for place, slot in enumerate(slots):
                    ctypes.memmove(address + place * cell_bytes, *slot)
                pieces = [view]
        # The headers of the blocks that lay here go first, so that a crash leaves free cells and no damaged blocks.
        self.files.clear_headers(self.records[0].cell, len(self.records))
        self.files.write(self.records[0].cell, pieces)
        self.errors = [None] * len(self.records)


@dataclass(slots=True, eq=False)
class HeaderWrite:
    """Headers of neighbouring cells: written for records that are held, cleared for a record that no longer is.

    Threads may overtake each other, so a record's cell may belong to another block by now.
    """

    files: SegmentFiles
    held: Sequence[Record] = ()
    forgotten: Record | None = None
    error: TierError | None = None

    def perform(self) -> None:
        """Write the headers."""
        if self.forgotten is not None:
            self.files.clear_headers(self.forgotten.cell, 1, self.forgotten.is_last_in_cell)
        else:
            self.files.write_headers(lambda: [record.header for record in self.held if record.is_held])

    def fail(self, error: Exception) -> None:
        """Note why the table was not written."""
        self.error = tier_error("a disk thread", error).without_traceback()


def thread_buffer(num_bytes: int) -> tuple[memoryview, int]:
    """Return memory of this thread on a page boundary, which grows to the longest run, and its address."""
    held = getattr(_of_thread, "memory", None)
    if held is None or num_bytes > len(held):
        held = _of_thread.memory = mmap.mmap(-1, max(num_bytes, RUN_BYTES))
    found = (ctypes.c_char * num_bytes).from_buffer(held)
    return memoryview(found).cast("B"), ctypes.addressof(found)


def memory(address: int, num_bytes: int) -> memoryview:
    """Return memory of this process as a view."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")
