"""The threads of a disk tier. They move bytes and decide nothing: each task reports what it found.

A thread may hang in a read for as long as the disk does. So a task never touches a slot of the host slab after its copy
is over: blocks are read into the thread's own buffer, verified there, and copied into their slots under the run's
lock. A copy can therefore end at any time, and its slots can be used for something else at once.
"""

import ctypes
import mmap
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvferry.errors import Reason, TierError
from kvferry.tiers.disk.segments import PAGE_BYTES, SegmentFiles, errors_of
from kvferry.tiers.disk.space import Record
from kvferry.tiers.protocol import TierCopy, checksum

RUN_BYTES = 4 << 20
"""Most bytes of neighbouring blocks that move in one call, unless one block is longer."""


class Task(Protocol):
    """Something that a thread does for the tier, and that the tier then finds in ``Workers.done``."""

    def perform(self, buffer: "Buffer") -> None:
        """Do it; may take as long as the disk does. Raises :class:`TierError`."""

    def fail(self, error: TierError) -> None:
        """Note an error."""


@dataclass(slots=True, eq=False)
class Run:
    """Blocks in neighbouring cells of a segment. ``indices`` are the blocks' places in the copy.

    A thread holds the ``lock`` while it touches a slot, and touches none once the run ``is_over``.
    Once the run is done, ``errors`` has one entry for each block, None for a block that has landed, and a store has
    the ``checksums`` of the blocks.
    """

    copy: TierCopy
    files: SegmentFiles
    records: list[Record]
    indices: list[int]
    addresses: list[int]
    errors: list[TierError | None] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_over: bool = False

    def end(self) -> None:
        """Make sure that no slot is touched from now on; waits for at most one copy of the run in memory."""
        with self.lock:
            self.is_over = True

    def fail(self, error: TierError) -> None:
        """Note that no block of the run has landed."""
        self.errors = [error.without_traceback()] * len(self.records)

    @property
    def num_bytes(self) -> int:
        """The bytes of the run's cells."""
        return len(self.records) * self.files.shape.cell_bytes


class LoadRun(Run):
    """Blocks that are read, verified and copied into their slots."""

    def perform(self, buffer: "Buffer") -> None:
        """Read all cells in one call; a block that differs from its checksum has not landed."""
        if self.is_over:
            return self.fail(_OVER)
        view, address = buffer.of(self.num_bytes)
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

    def perform(self, buffer: "Buffer") -> None:
        """Write all cells in one call, straight from the slots where they are whole pages."""
        cell_bytes = self.files.shape.cell_bytes
        lengths = [record.num_bytes for record in self.records]
        is_paged = all(value % PAGE_BYTES == 0 for value in (*self.addresses, *lengths))
        with self.lock:
            if self.is_over:
                return self.fail(_OVER)
            self.checksums = [checksum(*slot) for slot in zip(self.addresses, lengths, strict=True)]
            if is_paged:
                pieces = [memory(*slot) for slot in zip(self.addresses, lengths, strict=True)]
            else:
                view, address = buffer.of(self.num_bytes)
                for place, (slot, length) in enumerate(zip(self.addresses, lengths, strict=True)):
                    ctypes.memmove(address + place * cell_bytes, slot, length)
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

    def perform(self, buffer: "Buffer") -> None:
        """Write the headers."""
        if self.forgotten is not None:
            self.files.clear_headers(self.forgotten.cell, 1, self.forgotten.is_last_in_cell)
        else:
            self.files.write_headers(lambda: [record.header for record in self.held if record.is_held])

    def fail(self, error: TierError) -> None:
        """Note why the table was not written."""
        self.error = error.without_traceback()


_OVER = TierError(Reason.ABORTED, "the copy was over before its turn came.")


class Buffer:
    """Memory of one thread on a page boundary, which grows to the longest run."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def of(self, num_bytes: int) -> tuple[memoryview, int]:
        """Return ``num_bytes`` of the buffer, and their address."""
        if self._memory is None or num_bytes > len(self._memory):
            self._memory = mmap.mmap(-1, max(num_bytes, RUN_BYTES))
        held = (ctypes.c_char * num_bytes).from_buffer(self._memory)
        return memoryview(held).cast("B"), ctypes.addressof(held)


class Workers:
    """A few threads that take loads before stores, except the first, which takes stores before loads."""

    def __init__(self, num_threads: int, name: str) -> None:
        self.done: deque[Task] = deque()
        self._loads: deque[Task] = deque()
        self._stores: deque[Task] = deque()
        self._work = threading.Condition()
        self._is_closing = False
        self._busy: list[tuple[float, Task] | None] = [None] * num_threads
        self._threads = [
            threading.Thread(target=self._serve, args=(index,), name=f"{name}-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, tasks: Sequence[Task], *, is_load: bool) -> None:
        """Queue tasks."""
        with self._work:
            (self._loads if is_load else self._stores).extend(tasks)
            self._work.notify(len(tasks))

    def revoke(self, runs: Collection[Run]) -> list[Run]:
        """Take runs out of the queues; return those that no thread has begun and none will perform."""
        with self._work:
            queued = (*self._loads, *self._stores)
            revoked: list[Run] = [task for task in queued if isinstance(task, Run) and task in runs]
            for queue in (self._loads, self._stores):
                kept = [task for task in queue if not (isinstance(task, Run) and task in runs)]
                queue.clear()
                queue.extend(kept)
            return revoked

    def stalled(self, seconds: float) -> list[Task]:
        """Return the tasks that threads have been busy with for longer than ``seconds``."""
        before = time.monotonic() - seconds
        return [entry[1] for entry in self._busy if entry is not None and entry[0] < before]

    @property
    def num_waiting(self) -> int:
        """The number of tasks that are queued or being performed."""
        with self._work:
            return len(self._loads) + len(self._stores) + sum(entry is not None for entry in self._busy)

    @property
    def num_threads(self) -> int:
        """The number of threads."""
        return len(self._threads)

    def close(self, seconds: float) -> bool:
        """Let the threads finish all tasks and end; return whether they did so in time."""
        with self._work:
            self._is_closing = True
            self._work.notify_all()
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self, index: int) -> None:
        buffer = Buffer()
        while (task := self._next(index)) is not None:
            try:
                with errors_of("a disk thread"):
                    task.perform(buffer)
            except TierError as error:
                task.fail(error)
            except Exception as error:
                task.fail(TierError(Reason.TIER_FAILED, f"a disk thread failed: {error!r}."))
            self._busy[index] = None
            self.done.append(task)

    def _next(self, index: int) -> Task | None:
        with self._work:
            self._work.wait_for(lambda: self._loads or self._stores or self._is_closing)
            for queue in (self._stores, self._loads) if index == 0 else (self._loads, self._stores):
                if queue:
                    task = queue.popleft()
                    self._busy[index] = (time.monotonic(), task)
                    return task
            return None


def memory(address: int, num_bytes: int) -> memoryview:
    """Return memory of this process as a view."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")
