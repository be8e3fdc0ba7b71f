"""The disk tier: blocks in the files of one directory, which outlive the engine.

All decisions are taken inside the verbs, on the caller's thread; a few threads only move bytes. A block is read into a
buffer of the thread, compared with its checksum, and then copied into its slot. So a copy can end at any time, even
while the disk hangs, and its slots are free from that moment on.

**Cap.** The directory never occupies more than ``capacity_bytes`` on disk. A segment's files are allocated at once and
never grow, so the bytes on disk are known before a file is made; a smaller cap is obeyed when the tier is opened.
Files that are not the tier's are neither counted nor touched.

**Crashes.** Record headers are written through the page cache after their blocks: SIGKILL loses the blocks whose
headers were not written yet, a loss of power those of about the last 30 seconds, since nothing is flushed. Whatever is
torn fails its checksum and is a miss.

**Failures.** A block that cannot be read is forgotten, unless this process lacks memory or descriptors for the read.
While a thread has hung for ``stall_seconds``, its copy ends as ``deadline-exceeded``; while all threads hang, the tier
holds nothing and takes nothing.
"""

import fcntl
import logging
import os
import re
import stat
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.errors import Reason, TierError
from kvferry.layout.shard import Region
from kvferry.tiers.disk.runs import RUN_BYTES, HeaderWrite, LoadRun, Run, StoreRun
from kvferry.tiers.disk.segments import (
    LOCK_NAME,
    MAX_CELL_BYTES,
    PAGE_BYTES,
    Directory,
    SegmentFiles,
    Shortage,
    errors_of,
    neighbours,
    read_segment,
)
from kvferry.tiers.disk.space import Record, Segment, Space
from kvferry.tiers.protocol import (
    CLOSE_SECONDS,
    BlockKey,
    Capabilities,
    Load,
    Presence,
    Presences,
    Slots,
    Store,
    TierCopy,
    check_batch,
)
from kvferry.tiers.workers import Task, ThreadedTier, Workers
from kvferry.units import format_bytes

logger = logging.getLogger(__name__)

NUM_THREADS = 4
STALL_SECONDS = 5.0
RETRY_SECONDS = 30.0
"""How long the tier makes no other segment after one could not be made. Reads and writes of its blocks go on: so this
is not the suspension of :mod:`~kvferry.tiers.lower_copies`, which leaves all of a tier alone."""
RESERVED_BYTES = 16 * PAGE_BYTES
"""For the directory, the lock file and their growth."""
_ROOT = 0
cell_of = attrgetter("cell")
_OWNER = re.compile(rb"\d*\n?")
"""What the lock file holds; a file of that name with anything else in it is another program's."""
MIN_SEGMENTS, MAX_SEGMENTS = 8, 64
SEGMENT_BYTES = 64 << 20
"""Bytes of a segment, unless that makes fewer than ``MIN_SEGMENTS`` or more than ``MAX_SEGMENTS``."""

_never_closed: list[object] = []  # tiers whose threads still hung when the tier was closed


@dataclass(slots=True, eq=False, kw_only=True)
class DiskLoad(Load):
    """A load; ``records[i]`` is the pinned record of ``keys[i]``. ``runs``: those that the threads have not done."""

    records: dict[int, Record] = field(default_factory=dict)
    runs: set[Run] = field(default_factory=set)


@dataclass(slots=True, eq=False, kw_only=True)
class DiskStore(Store):
    """A store; ``records`` has the cells reserved for blocks that the tier did not hold.

    ``finished`` are the blocks that no thread writes any more.
    """

    records: dict[int, Record] = field(default_factory=dict)
    runs: set[Run] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    is_completed: bool = False


class LocalDisk(ThreadedTier[DiskLoad, DiskStore]):
    """The disk tier in ``directory``, for slots of the host slab at ``region``. One owner at a time.

    Raises :class:`TierError`: ``tier-in-use`` for a directory that another tier has open, ``permission-denied`` for one
    that another user controls, ``tier-failed`` for one that cannot be used, ``invalid-setting`` for a capacity that is
    too small for anything.

    >>> import tempfile
    >>> block = np.arange(4096, dtype=np.uint8)
    >>> region = Region(int(block.ctypes.data), block.nbytes)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     disk = LocalDisk(Path(directory), 1 << 20, region)
    ...     store = disk.prepare_store([bytes(48)], Slots.of([region.base_address], [4096]))
    ...     while store not in disk.poll():
    ...         pass
    ...     disk.complete_store(store)
    ...     print(disk.look_up([bytes(48)]).tolist(), disk.snapshot()["num_blocks"])
    ...     disk.close()
    [1] 1
    """

    def __init__(
        self,
        directory: Path,
        capacity_bytes: int,
        region: Region,
        *,
        num_threads: int = NUM_THREADS,
        segment_bytes: int | None = None,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        check_capacity(capacity_bytes)
        usable_bytes = capacity_bytes - RESERVED_BYTES
        super().__init__(Capabilities("local_disk", capacity_bytes), region)
        self._stall_seconds = stall_seconds
        self._directory, self._lock = open_directory(directory)
        self._space = Space(usable_bytes, min(segment_bytes or _segment_bytes(usable_bytes), usable_bytes))
        self._files: dict[Segment, SegmentFiles] = {}
        self._refused: Counter[Reason] = Counter()
        self._being_stored: set[BlockKey] = set()
        self._performed: deque[Task] = deque()
        self._done: deque[Task] = deque()
        self._grow_again_at = 0.0
        try:
            self._recover()
            self._compare_free_space()
            self._workers = Workers("kvferry-disk", self._performed, num_threads=num_threads)
        except BaseException:
            self._release()
            raise

    @property
    def num_emptied(self) -> int:
        """0: what a disk loses is noticed block by block, when it is read."""
        return 0

    def look_up(self, keys: Sequence[BlockKey]) -> Presences:
        """Return a presence for each key, from memory; all are absent while the disk hangs."""
        self._check_open()
        check_batch(keys)
        held, being_stored = self._space.held, self._being_stored
        if self._hangs():
            return np.full(len(keys), Presence.ABSENT, np.uint8)
        found = np.fromiter(map(held.__contains__, keys), np.uint8, len(keys))
        if being_stored:
            found[[key in being_stored for key in keys]] = Presence.PENDING
        return found

    def prepare_load(self, keys: Sequence[BlockKey], slots: Slots) -> DiskLoad:
        """Pin the blocks and queue their reads."""
        lengths = self._check_slots(keys, slots)
        load = DiskLoad(keys=keys, slots=slots, landed=np.zeros(len(keys), np.bool_))
        self._loads.add(load)
        if self._hangs():
            self._end(load, self._stalled_error())
            return load
        for index in range(len(keys) - 1, -1, -1):  # the first block of a prefix goes last
            record = self._space.held.get(keys[index])
            if record is None:
                load.fail(1, TierError(Reason.BLOCK_MISSING, "a block is not on disk."))
            elif record.num_bytes != lengths[index]:
                message = f"a block of {record.num_bytes} bytes was to be loaded into a slot of {lengths[index]} bytes."
                load.fail(1, TierError(Reason.BLOCK_SIZE_MISMATCH, message))
            else:
                self._space.pin(record)
                load.records[index] = record
        self._start(load, LoadRun)
        return load

    def complete_load(self, load: Load) -> None:
        """End the pins."""
        for record in self._taken_out(load, self._loads).records.values():
            self._space.unpin(record)

    def prepare_store(self, keys: Sequence[BlockKey], slots: Slots) -> DiskStore:
        """Reserve cells and queue the writes of the slots."""
        lengths = self._check_slots(keys, slots)
        self._collect()
        store = DiskStore(keys=keys, slots=slots, landed=np.zeros(len(keys), np.bool_))
        self._stores.add(store)
        if self._hangs():
            self._end(store, self._stalled_error())
            return store
        wanted, held = [], []
        for index, key in enumerate(keys):
            record = self._space.held.get(key)
            if record is not None and record.num_bytes == lengths[index]:
                store.landed[index] = True
                held.append(record)
            elif record is not None:
                message = f"a block of {record.num_bytes} bytes was to be stored again with {lengths[index]} bytes."
                store.fail(1, TierError(Reason.BLOCK_SIZE_MISMATCH, message, "Let equal keys mean equal blocks."))
            elif lengths[index] > MAX_CELL_BYTES:
                message = f"a block of {lengths[index]} bytes was to be stored; the disk tier takes {MAX_CELL_BYTES}."
                store.fail(1, TierError(Reason.BLOCK_SIZE_MISMATCH, message, "Make blocks of fewer tokens."))
            elif key in self._being_stored:
                store.fail(1, TierError(Reason.ALREADY_BEING_STORED, "another store writes the block."))
            else:
                wanted.append(index)
        self._reserve(store, held, wanted, lengths)
        self._start(store, StoreRun)
        return store

    def complete_store(self, store: Store) -> None:
        """Make the blocks that have landed visible, and queue the writes of their headers."""
        taken = self._taken_out(store, self._stores)
        taken.is_completed = True
        landed: dict[Segment, list[Record]] = {}
        for index, record in sorted(taken.records.items(), reverse=True):  # the first block of a prefix goes last
            self._being_stored.discard(record.key)
            if taken.landed[index]:
                self._space.publish(record)
                landed.setdefault(record.segment, []).append(record)
            elif index in taken.finished:
                self._space.give_back(record)
        self._workers.submit(
            [HeaderWrite(self._files[segment], sorted(records, key=cell_of)) for segment, records in landed.items()]
        )

    def poll(self) -> list[TierCopy]:
        """Take what the threads have done; give up the copies that they hang in."""
        self._check_open()
        self._collect()
        while self._done:
            self._take(self._done.popleft())
        for task in self._workers.stalled(self._stall_seconds):
            if isinstance(task, Run) and not task.copy.has_ended:
                self._give_up(task.copy, self._stalled_error())
        if self._hangs():
            for copy in [copy for copy in (*self._loads, *self._stores) if not copy.has_ended]:
                self._give_up(copy, self._stalled_error())
        if time.monotonic() >= self._grow_again_at:
            self._space.may_grow = True
        return self._take_ended()

    def snapshot(self) -> dict[str, Any]:
        """Return the counts that every tier has, and those of the disk.

        ``refused``: records that could not be used when the tier was opened; ``failures``: blocks that have not landed
        in completed copies; both by reason. ``num_waiting``: tasks of the threads. ``num_stalled``: threads that hang.
        """
        space = self._space
        return {
            "num_blocks": len(space.held),
            "num_bytes": space.occupied_bytes + RESERVED_BYTES,
            "num_pinned": space.num_pinned,
            **self._counts(),
            "num_segments": len(space.segments),
            "num_waiting": self._workers.num_waiting,
            "num_stalled": len(self._workers.stalled(self._stall_seconds)),
            "refused": {reason.value: count for reason, count in self._refused.items()},
        }

    def close(self) -> None:
        """Fail open copies as ``closed``, write the headers that are queued, and let the directory go.

        A thread that hangs keeps the directory until its process ends; it touches no slot.
        """
        if self._is_closed:
            return
        for copy in [copy for copy in (*self._loads, *self._stores) if not copy.has_ended]:
            self._give_up(copy, TierError(Reason.CLOSED, "the tier was closed."))
        self._is_closed = True
        for load in self._loads:
            for record in load.records.values():
                self._space.unpin(record)
        self._loads.clear()
        self._stores.clear()
        self._workers.close()
        if not self._workers.join(time.monotonic() + CLOSE_SECONDS):
            logger.warning("%s: closed while a disk thread hangs; it keeps the directory", self._directory.path)
            _never_closed.append(self)
            return
        self._release()

    # opening

    def _recover(self) -> None:
        for name in self._directory.segment_names():
            try:
                shape, headers, refused = read_segment(self._directory, name)
            except TierError as error:
                if isinstance(error, Shortage):
                    raise
                logger.warning("%s is removed: %s", self._directory.path / name, error)
                self._refused[error.reason] += 1
                with errors_of(self._directory.path / name):
                    self._directory.remove_segment(name)
                continue
            segment = self._space.add_found(shape, headers)
            self._refused += refused
            self._files[segment] = SegmentFiles(self._directory, shape, exists=True)
        self._space.sort_found()
        for segment in self._space.shrink():
            self._files.pop(segment).remove()

    def _compare_free_space(self) -> None:
        """Say that the file system has less room than the tier may still use: the tier is full earlier then."""
        with suppress(OSError):  # some file systems do not know
            found = os.fstatvfs(self._directory.descriptor)
            capacity_bytes, used = self.capabilities.capacity_bytes, self._space.occupied_bytes
            if told := _why_less_room(self._directory.path, capacity_bytes, used, found):
                logger.warning("%s", told)

    def _release(self) -> None:
        for file in self._files.values():
            file.close()
        os.close(self._lock)
        self._directory.close()

    # copies

    def _reserve(self, store: DiskStore, held: list[Record], wanted: list[int], lengths: list[int]) -> None:
        """Give cells to the wanted blocks; those of the store that are held are not evicted for them."""
        for pinned in reversed(held):
            self._space.pin(pinned)
        evicted: list[BlockKey] = []
        records = self._space.reserve([store.keys[i] for i in wanted], [lengths[i] for i in wanted], evicted)
        for pinned in held:
            self._space.unpin(pinned)
        store.evicted = evicted
        self._num_evicted += len(evicted)
        self._make_files()
        for index, record in zip(wanted, records, strict=True):
            if record is None:
                store.fail(1, self._full_error())
            else:
                store.records[index] = record
                self._being_stored.add(record.key)

    def _make_files(self) -> None:
        """Give each new segment its files; the threads remove the files that these replace first."""
        for segment in self._space.segments.values():
            if segment not in self._files:
                replaced = [self._files.pop(old) for old in segment.replaces]
                self._files[segment] = SegmentFiles(self._directory, segment.shape, replaces=replaced)
                segment.replaces = ()

    def _start(self, copy: DiskLoad | DiskStore, kind: type[LoadRun] | type[StoreRun]) -> None:
        """Queue the runs of a copy; a copy without any has ended."""
        addresses = copy.slots.addresses.tolist()
        index_of = {record: index for index, record in copy.records.items()}
        by_segment: dict[Segment, list[Record]] = {}
        for record in index_of:
            by_segment.setdefault(record.segment, []).append(record)
        runs: list[LoadRun | StoreRun] = []
        for segment in sorted(by_segment, key=lambda segment: segment.shape.segment_id):
            most = max(1, RUN_BYTES // segment.shape.cell_bytes)
            for records in neighbours(sorted(by_segment[segment], key=cell_of), most):
                indices = [index_of[record] for record in records]
                runs.append(kind(copy, self._files[segment], records, indices, [addresses[i] for i in indices]))
        copy.runs = set(runs)
        if runs:
            self._workers.submit(runs, is_urgent=kind is LoadRun)
        else:
            self._end(copy)

    def _collect(self) -> None:
        """Look at what the threads have done, and take what is left of copies that are over: it ends no copy."""
        while self._performed:
            task = self._performed.popleft()
            if isinstance(task, Run) and not task.copy.has_ended:
                self._done.append(task)
            else:
                self._take(task)

    def _take(self, task: Task) -> None:
        if isinstance(task, Run):
            self._take_run(task)
        elif isinstance(task, HeaderWrite) and task.error is not None:
            self._failures[task.error.reason] += 1

    def _take_run(self, run: Run) -> None:
        copy = run.copy
        assert isinstance(copy, DiskLoad | DiskStore)
        for index, record, error in zip(run.indices, run.records, run.errors, strict=True):
            if isinstance(copy, DiskStore):
                copy.finished.add(index)
                if copy.is_completed:
                    self._space.give_back(record)
            elif error is not None and error.reason is not Reason.ABORTED and not isinstance(error, Shortage):
                self._forget(record)
            if not copy.has_ended:
                if error is None:
                    copy.landed[index] = True
                else:
                    copy.fail(1, error)
        if isinstance(copy, DiskStore) and run.files.is_removed:
            self._drop(run.records[0].segment)
        copy.runs.discard(run)
        if not copy.runs and not copy.has_ended:
            self._end(copy)

    def _give_up(self, copy: TierCopy, error: TierError) -> None:
        assert isinstance(copy, DiskLoad | DiskStore)
        for run in copy.runs:
            run.end()
        revoked = self._workers.revoke(copy.runs)
        if isinstance(copy, DiskStore):
            copy.landed[:] = False
            copy.finished.update(index for run in copy.runs if run in revoked for index in run.indices)
        self._end(copy, error)

    def _forget(self, record: Record) -> None:
        """Hold a record no longer, here and on disk."""
        if record.is_held:
            self._space.forget(record)
            self._workers.submit([HeaderWrite(self._files[record.segment], forgotten=record)])

    def _drop(self, segment: Segment) -> None:
        """Remove a segment whose files could not be made, and make no other for a while."""
        if self._space.segments.get(segment.shape.segment_id) is segment:
            self._space.drop(segment)
            del self._files[segment]
            self._space.may_grow = False
            self._grow_again_at = time.monotonic() + RETRY_SECONDS

    # checks

    def _hangs(self) -> bool:
        return self._workers.hangs(self._stall_seconds)

    def _stalled_error(self) -> TierError:
        message = f"{self._directory.path} has not answered for {self._stall_seconds} seconds."
        return TierError(Reason.DEADLINE_EXCEEDED, message, "Is the disk failing?")

    def _full_error(self) -> TierError:
        capacity = format_bytes(self.capabilities.capacity_bytes)
        message = f"no room for a block in {self._directory.path}: all of its {capacity} are in use."
        return TierError(Reason.TIER_FULL, message, "Give the disk tier more bytes.")


def open_directory(path: Path, *, of_anybody: bool = False) -> tuple[Directory, int]:
    """Make and lock a directory; return it and the descriptor that holds the lock.

    Raises :class:`TierError` ``tier-in-use`` for a second owner, ``permission-denied`` for a directory that another
    user controls, unless it may be ``of_anybody``, else ``tier-failed``.
    """
    with ExitStack() as opened, errors_of(path):
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileExistsError:
            raise TierError(Reason.TIER_FAILED, f"{path} is there and is no directory.") from None
        directory = Directory(path)
        opened.callback(directory.close)
        if not of_anybody:
            _check_owner(directory)
        lock = directory.open(LOCK_NAME, os.O_RDWR | os.O_CREAT)
        opened.callback(os.close, lock)
        try:
            # The file, since some file systems lock no directories; the directory, since somebody may remove the file.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _lock_directory(directory)
        except BlockingIOError as error:
            owner = os.pread(lock, 32, 0).decode(errors="replace").strip()
            raise TierError(
                Reason.TIER_IN_USE,
                f"{path} is in use by process {owner or 'unknown'}.",
                "End that process (vLLM's engine core outlives an API server that is killed), or give each engine a "
                "directory of its own.",
            ) from error
        _write_owner(lock)
        opened.pop_all()
        return directory, lock


def check_capacity(capacity_bytes: int) -> None:
    """Raise :class:`TierError` ``invalid-setting`` for a capacity that has no room for blocks."""
    if capacity_bytes < 2 * RESERVED_BYTES:
        asked = f"a disk tier of {capacity_bytes} bytes has no room for blocks."
        raise TierError(Reason.INVALID_SETTING, asked, f"Give it at least {2 * RESERVED_BYTES} bytes.")


def check_directory(path: Path, capacity_bytes: int) -> str:
    """Raise as :class:`LocalDisk` for a directory that cannot be used, or has an owner; leave it free, or unmade.

    Return a warning where the file system has less room than the tier may use; else nothing. Raises :class:`TierError`
    ``invalid-setting`` also for a capacity that is more than the whole file system, and ``tier-full`` where there are
    no blocks yet and no room for the first.
    """
    check_capacity(capacity_bytes)
    with errors_of(path):
        is_made = path.exists()
        place = next(each for each in (path, *path.absolute().parents) if each.exists())
        found = os.statvfs(place)
    used = 0
    if is_made:
        directory, lock = open_directory(path)
        os.close(lock)
        with closing(directory), errors_of(path):
            used = sum(map(directory.occupied_bytes, directory.segment_names()))
    elif not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        problem = f"{path} is not there, and cannot be made in {place} by user {os.geteuid()}."
        raise TierError(Reason.TIER_FAILED, problem, "Make the directory for this user, or name another one.")
    whole, free = (blocks * found.f_frsize for blocks in (found.f_blocks, found.f_bavail))
    if 0 < whole < capacity_bytes:
        sizes = f"{format_bytes(whole)} in all, and the tier may use {format_bytes(capacity_bytes)}"
        problem = f"the file system of {path} has {sizes}."
        raise TierError(Reason.INVALID_SETTING, problem, "Give the tier fewer bytes, or a directory on a larger disk.")
    needed = _segment_bytes(capacity_bytes - RESERVED_BYTES)
    if whole and not used and free < needed:
        sizes = f"{format_bytes(free)} free, and the first blocks of a tier of {format_bytes(capacity_bytes)} take"
        problem = f"the file system of {path} has {sizes} {format_bytes(needed)}."
        raise TierError(Reason.TIER_FULL, problem, "Make room, give the tier fewer bytes, or name another directory.")
    return _why_less_room(path, capacity_bytes, used, found)


def _why_less_room(path: Path, capacity_bytes: int, used_bytes: int, found: os.statvfs_result) -> str:
    """Return a warning where a file system has less room than a tier may still use: the tier is full earlier then."""
    free = found.f_bavail * found.f_frsize
    # Some file systems do not know their size.
    if not found.f_blocks or free >= capacity_bytes - RESERVED_BYTES - used_bytes:
        return ""
    may_use, uses, has_free = map(format_bytes, (capacity_bytes, used_bytes, free))
    return (
        f"{path}: the disk tier may use {may_use} and uses {uses}, but its file system has {has_free} free. Make room, "
        "or give the tier fewer bytes."
    )


def _check_owner(directory: Directory) -> None:
    """Refuse a directory in which another user could read blocks, or place blocks with right checksums."""
    found = os.fstat(directory.descriptor)
    remedy = "Name a directory inside it: kvferry makes one for its user only."
    if found.st_uid not in (os.geteuid(), _ROOT):
        asked = f"{directory.path} belongs to user {found.st_uid}, this process runs as user {os.geteuid()}."
        raise TierError(Reason.PERMISSION_DENIED, asked, remedy)
    if found.st_mode & stat.S_IWOTH:
        raise TierError(Reason.PERMISSION_DENIED, f"every user may write to {directory.path}.", remedy)


def _write_owner(lock: int) -> None:
    """Write this process's number, which is for people, over another such number; a file that is not ours stays."""
    with suppress(OSError):  # a disk may be too full even for the number
        if os.fstat(lock).st_nlink == 1 and _OWNER.fullmatch(os.pread(lock, 32, 0)):
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)


def _lock_directory(directory: Directory) -> None:
    try:
        fcntl.flock(directory.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        logger.info("%s cannot be locked itself, only its file %r: %s", directory.path, LOCK_NAME, error)


def _segment_bytes(usable_bytes: int) -> int:
    """Return the bytes of a segment."""
    return usable_bytes // min(MAX_SEGMENTS, max(MIN_SEGMENTS, usable_bytes // SEGMENT_BYTES))
