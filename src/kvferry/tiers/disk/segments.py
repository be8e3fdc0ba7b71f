"""Segment files: made in one piece, read and written with direct access, on any thread."""

import errno
import os
import re
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvferry.errors import Reason, TierError
from kvferry.tiers.disk.records import FREE_CELL, PAGE_BYTES, RECORD_BYTES, RecordHeader, SegmentShape, read_table

_SEGMENT_NAME = re.compile(r"segment-\d{8,20}\.kv")
LOCK_NAME = "lock"
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Directory:
    """The directory of a disk tier, by descriptor: another directory of the same name is another directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def open(self, name: str, flags: int) -> int:
        """Open a file of this directory: no link to another file, and no pipe that would wait for its other end."""
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=self.descriptor)

    def open_direct(self, name: str, flags: int) -> int:
        """Open a file for direct access; for access through the page cache where its file system has no other."""
        try:
            return self.open(name, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return self.open(name, flags)

    def segment_names(self) -> list[str]:
        """Return the names of all segment files, and of what has such a name but is no file."""
        with os.scandir(self.descriptor) as entries:
            return sorted(
                entry.name
                for entry in entries
                if _SEGMENT_NAME.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False)
            )

    def remove(self, name: str) -> None:
        """Remove a file, if there is one."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)


class SegmentFile:
    """The file of one segment. ``replaces`` are removed before this file is made, on its first write.

    Methods raise :class:`TierError`: ``tier-full`` where the disk has no room, ``tier-failed`` where the disk, or the
    directory, fails. They may take as long as the disk does.
    """

    def __init__(
        self,
        directory: Directory,
        shape: SegmentShape,
        *,
        replaces: Sequence["SegmentFile"] = (),
        exists: bool = False,
    ) -> None:
        self.name = segment_name(shape.segment_id)
        self.path = directory.path / self.name
        self.shape = shape
        self.is_removed = False
        self._is_made = exists
        self._error: Exception | None = None
        self._directory = directory
        self._replaces = tuple(replaces)
        self._lock = threading.Lock()
        self._direct = -1
        self._cached = -1

    def read(self, cell: int, buffer: memoryview) -> None:
        """Fill ``buffer``, whole pages on a page boundary, with the bytes from the beginning of a cell."""
        with errors_of(self.path):
            with self._lock:
                self._open()
            self._check_moved(os.preadv(self._direct, [buffer], self.shape.cell_offset(cell)), len(buffer))

    def write(self, cell: int, pieces: Sequence[memoryview]) -> None:
        """Write pieces, whole pages on page boundaries, one behind the other from the beginning of a cell."""
        with errors_of(self.path):
            with self._lock:
                self._open()
            moved = os.pwritev(self._direct, pieces, self.shape.cell_offset(cell))
            self._check_moved(moved, sum(map(len, pieces)))

    def write_headers(self, current: Callable[[], Iterable[RecordHeader]]) -> None:
        """Write the headers that ``current`` returns, which is asked while nothing else writes headers of this file.

        So a thread that is late writes no header of a block whose cell belongs to another block by now.
        """
        with self._table():
            for cell, packed in _stretches((header.cell, header.pack(self.shape.segment_id)) for header in current()):
                self._write_table(cell, packed)

    def clear_headers(self, cell: int, num_cells: int, is_current: Callable[[], bool] = lambda: True) -> None:
        """Mark neighbouring cells as free, if ``is_current`` says so while nothing else writes headers."""
        with self._table():
            if is_current():
                self._write_table(cell, FREE_CELL * num_cells)

    def remove(self) -> None:
        """Remove the file, and those that it was to replace; nothing is written to it afterwards."""
        with self._lock, errors_of(self.path):
            self._remove_replaced()
            self.is_removed = True
            self._directory.remove(self.name)
            self._close()

    def close(self) -> None:
        """Close the file. A later read or write opens it again."""
        with self._lock:
            self._close()

    def _open(self) -> None:
        if self._error is not None:
            raise self._error
        if self.is_removed:
            raise TierError(Reason.TIER_FAILED, f"{self.path} has been removed.")
        if self._direct >= 0:
            return
        self._remove_replaced()
        if not self._is_made:
            self._make()
        cached = self._directory.open(self.name, os.O_RDWR)
        try:
            self._direct = self._directory.open_direct(self.name, os.O_RDWR)
        except OSError:
            os.close(cached)
            raise
        self._cached = cached

    def _remove_replaced(self) -> None:
        for file in self._replaces:
            file.remove()
        self._replaces = ()

    def _make(self) -> None:
        """Make the file with all its bytes, and only then its header: a file without header is removed at start.

        A file that cannot be made counts as removed, so that no thread makes the file after the tier has given up.
        """
        descriptor = -1
        try:
            descriptor = self._directory.open(self.name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            os.posix_fallocate(descriptor, 0, self.shape.file_bytes)
            found = os.fstat(descriptor).st_blocks * 512
            if found > self.shape.made_bytes:
                message = f"{self.path} occupies {found} bytes on disk instead of at most {self.shape.made_bytes}."
                raise TierError(Reason.TIER_FULL, message, "Is the free space of the file system very fragmented?")
            os.pwrite(descriptor, self.shape.pack(), 0)
        except Exception as error:
            self.is_removed, self._error = True, error
            if descriptor >= 0:  # else a file of that name is another's
                self._directory.remove(self.name)
            raise
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        self._is_made = True

    @contextmanager
    def _table(self) -> Iterator[None]:
        """Let one thread at a time write headers."""
        with errors_of(self.path), self._lock:
            yield

    def _write_table(self, cell: int, packed: bytes) -> None:
        """Write through the page cache, which outlives this process: headers lie in pages of their own."""
        if not self.is_removed:
            self._open()
            moved = os.pwrite(self._cached, packed, self.shape.header_offset(cell))
            self._check_moved(moved, len(packed))

    def _check_moved(self, moved: int, wanted: int) -> None:
        if moved != wanted:
            raise TierError(Reason.TIER_FAILED, f"{self.path} ended after {moved} of {wanted} bytes.")
        if not os.fstat(self._direct).st_nlink:
            raise TierError(Reason.TIER_FAILED, f"{self.path} was removed by another program.")

    def _close(self) -> None:
        for descriptor in (self._direct, self._cached):
            if descriptor >= 0:
                os.close(descriptor)
        self._direct = self._cached = -1


def segment_name(segment_id: int) -> str:
    """Return the name of a segment's file.

    >>> segment_name(7)
    'segment-00000007.kv'
    """
    return f"segment-{segment_id:08d}.kv"


def _stretches(rows: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Yield the rows of neighbouring cells, given in the order of cells, as one.

    >>> list(_stretches([(3, b"a"), (4, b"b"), (9, b"c")]))
    [(3, b'ab'), (9, b'c')]
    """
    first, packed = 0, list[bytes]()
    for cell, row in rows:
        if packed and cell != first + len(packed):
            yield first, b"".join(packed)
            packed = []
        first = first if packed else cell
        packed.append(row)
    if packed:
        yield first, b"".join(packed)


def read_segment(directory: Directory, name: str) -> tuple[SegmentShape, list[RecordHeader], Counter[Reason]]:
    """Return the shape of a segment file, its intact record headers, and the number of refused ones by reason.

    Raises :class:`TierError` where the file is no segment of this format, or is not as long as a segment of its shape.
    """
    path = directory.path / name
    with errors_of(path):
        descriptor = directory.open(name, os.O_RDONLY)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise TierError(Reason.CHECKSUM_MISMATCH, f"{path} is no file.")
            shape, length = SegmentShape.unpack(os.pread(descriptor, PAGE_BYTES, 0)), found.st_size
            if segment_name(shape.segment_id) != name or length != shape.file_bytes:
                message = f"{path}: {length} bytes of segment {shape.segment_id} instead of {shape.file_bytes}."
                raise TierError(Reason.CHECKSUM_MISMATCH, message)
            table = os.pread(descriptor, shape.num_cells * RECORD_BYTES, PAGE_BYTES)
            if len(table) != shape.num_cells * RECORD_BYTES:
                raise TierError(Reason.CHECKSUM_MISMATCH, f"{path} was cut while its table was read.")
        finally:
            os.close(descriptor)
    return shape, *read_table(table, shape)


@contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Turn an ``OSError`` into a :class:`TierError`."""
    try:
        yield
    except OSError as error:
        reason = Reason.TIER_FULL if error.errno in _NO_ROOM else Reason.TIER_FAILED
        raise TierError(reason, f"{path}: {error.strerror or error}.") from error
