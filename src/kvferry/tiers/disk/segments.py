"""Segments of a disk tier: two files each, a table of record headers and equal cells, made in one piece.

::

    segment-00000001.table   page 0: the segment's header; page 1 ...: one record header of RECORD_BYTES for each cell
    segment-00000001.kv      the cells: one block each, from a page boundary, without gaps

A record header describes itself: magic, version, place, key, length and the block's checksum, under a checksum of its
own. A cell whose header is not intact is free. The headers lie together, so that the index of a directory is read in a
few long reads; the blocks of neighbouring cells lie together, so that they move in one call. Cells are read and written
with direct access, on any thread, headers through the page cache: in one file, each header would wait for all blocks on
their way, and hold up those behind them. All integers are little-endian.
"""

import errno
import os
import re
import stat
import struct
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from xxhash import xxh3_64_intdigest

from kvferry.errors import Reason, TierError
from kvferry.tiers.protocol import KEY_BYTES, BlockKey

PAGE_BYTES = 4096
"""The alignment of direct access: of every offset, length and address."""
VERSION = 1
RECORD_BYTES = 128
MAX_CELLS = 1 << 22
"""Most cells of a segment: a damaged header cannot claim a table that fills the memory."""
MAX_CELL_BYTES = 1 << 32
_SEGMENT_MAGIC = b"KVFSEGMT"
_RECORD_MAGIC = b"KVFBLOCK"
_SEGMENT = struct.Struct("<8sHxxxxxxQQQ")
_RECORD = struct.Struct(f"<8sHxxIQQQQ{KEY_BYTES}s24x")
_DIGEST = struct.Struct("<Q")
_MAX_NUMBER = 1 << 63
"""Above all ids and sequences: a forged one leaves no room for the next ones."""
_SPLITS_PER_PAGE = 84
"""A page of a file's extents holds 340 on ext4, half of which may be unused, and each split of an extent adds two. The
first write of a cell or of a table's page splits one, and so may each MiB of a file on a fragmented file system."""
_EXTENTS_IN_INODE = 4


def round_up(num_bytes: int) -> int:
    """Return the bytes of the pages that hold ``num_bytes``.

    >>> round_up(0), round_up(1), round_up(4096)
    (0, 4096, 4096)
    """
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class SegmentShape:
    """The shape of a segment.

    >>> SegmentShape(segment_id=1, cell_bytes=65536, num_cells=100)
    SegmentShape(segment_id=1, cell_bytes=65536, num_cells=100)
    """

    segment_id: int
    cell_bytes: int
    num_cells: int

    @classmethod
    def within(cls, segment_id: int, cell_bytes: int, max_bytes: int) -> "SegmentShape":
        """Return the shape with the most cells that occupies at most ``max_bytes`` on disk; none may fit.

        >>> shape = SegmentShape.within(1, 65536, 1 << 20)
        >>> shape.num_cells, shape.occupied_bytes
        (15, 1007616)
        """
        counts = range(1, min(max_bytes // cell_bytes, MAX_CELLS) + 1)
        num_cells = bisect_right(counts, max_bytes, key=lambda count: cls(segment_id, cell_bytes, count).occupied_bytes)
        return cls(segment_id, cell_bytes, num_cells)

    @property
    def table_bytes(self) -> int:
        """The length of the table's file."""
        return PAGE_BYTES + round_up(self.num_cells * RECORD_BYTES)

    @property
    def data_bytes(self) -> int:
        """The length of the cells' file."""
        return self.num_cells * self.cell_bytes

    @property
    def occupied_bytes(self) -> int:
        """The most that both files occupy on disk, with the file system's own pages that describe the files."""
        return self.made_bytes + self.num_cells // _SPLITS_PER_PAGE * PAGE_BYTES

    @property
    def made_bytes(self) -> int:
        """The most that both files occupy before a cell is written."""
        table_pages = self.table_bytes // PAGE_BYTES
        of_table = (table_pages + _SPLITS_PER_PAGE - _EXTENTS_IN_INODE) // _SPLITS_PER_PAGE
        of_data = 4 + (self.data_bytes >> 20) // _SPLITS_PER_PAGE
        return self.table_bytes + self.data_bytes + (of_table + of_data) * PAGE_BYTES

    def cell_offset(self, cell: int) -> int:
        """Return where a cell begins in its file."""
        return cell * self.cell_bytes

    def header_offset(self, cell: int) -> int:
        """Return where the record header of a cell lies in the table's file."""
        return PAGE_BYTES + cell * RECORD_BYTES

    def pack(self) -> bytes:
        """Return the segment's header, without the rest of its page.

        >>> SegmentShape.unpack(SegmentShape(1, 65536, 100).pack())
        SegmentShape(segment_id=1, cell_bytes=65536, num_cells=100)
        """
        return _sealed(_SEGMENT.pack(_SEGMENT_MAGIC, VERSION, self.segment_id, self.cell_bytes, self.num_cells))

    @classmethod
    def unpack(cls, page: bytes) -> "SegmentShape":
        """Return the shape in a table's first page.

        Raises :class:`TierError`: ``unsupported-version`` for another format, ``checksum-mismatch`` for other bytes.
        """
        if len(page) < _SEGMENT.size + _DIGEST.size or not page.startswith(_SEGMENT_MAGIC):
            raise TierError(Reason.CHECKSUM_MISMATCH, "the table does not begin with the header of a segment.")
        _, version, segment_id, cell_bytes, num_cells = _SEGMENT.unpack_from(page)
        if version != VERSION:
            message = f"the segment has format {version}, this kvferry reads and writes format {VERSION}."
            raise TierError(Reason.UNSUPPORTED_VERSION, message)
        if not _is_sealed(page[: _SEGMENT.size + _DIGEST.size]):
            raise TierError(Reason.CHECKSUM_MISMATCH, "the header of the segment is damaged.")
        is_possible = 0 < num_cells <= MAX_CELLS and 0 < cell_bytes <= MAX_CELL_BYTES and segment_id < _MAX_NUMBER
        if not is_possible or cell_bytes % PAGE_BYTES:
            message = f"no segment {segment_id} has {num_cells} cells of {cell_bytes} bytes."
            raise TierError(Reason.CHECKSUM_MISMATCH, message)
        return cls(segment_id, cell_bytes, num_cells)


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """One block in a cell. ``sequence`` grows with every store of a tier; ``checksum`` is the block's."""

    cell: int
    key: BlockKey
    num_bytes: int
    checksum: int
    sequence: int

    def pack(self, segment_id: int) -> bytes:
        """Return the header as it lies in the table of this segment."""
        return _sealed(
            _RECORD.pack(
                _RECORD_MAGIC,
                VERSION,
                self.cell,
                segment_id,
                self.num_bytes,
                self.sequence,
                self.checksum,
                self.key,
            )
        )


FREE_CELL = bytes(RECORD_BYTES)
"""The header of a cell that holds no block."""


def read_table(table: bytes, shape: SegmentShape) -> tuple[list[RecordHeader], Counter[Reason]]:
    """Return the intact record headers of a segment, and the number of refused ones by reason.

    Refused are headers of another version (``unsupported-version``), and damaged or misplaced ones
    (``checksum-mismatch``).
    """
    headers, refused = [], Counter[Reason]()
    used = np.frombuffer(table, np.uint8).reshape(-1, RECORD_BYTES).any(axis=1)
    for cell in np.flatnonzero(used).tolist():
        row = table[cell * RECORD_BYTES : (cell + 1) * RECORD_BYTES]
        magic, version, place, segment_id, num_bytes, sequence, checksum, key = _RECORD.unpack_from(row)
        if magic == _RECORD_MAGIC and version != VERSION:
            refused[Reason.UNSUPPORTED_VERSION] += 1
        elif (
            (magic, place, segment_id) != (_RECORD_MAGIC, cell, shape.segment_id)
            or not _is_sealed(row)
            or round_up(num_bytes) != shape.cell_bytes
            or sequence >= _MAX_NUMBER
        ):
            refused[Reason.CHECKSUM_MISMATCH] += 1
        else:
            headers.append(RecordHeader(cell, key, num_bytes, checksum, sequence))
    return headers, refused


def _sealed(content: bytes) -> bytes:
    return content + _DIGEST.pack(xxh3_64_intdigest(content))


def _is_sealed(row: bytes) -> bool:
    return bool(_DIGEST.unpack_from(row, len(row) - _DIGEST.size)[0] == xxh3_64_intdigest(row[: -_DIGEST.size]))


_SEGMENT_FILE = re.compile(r"(segment-\d{8,20})\.(?:kv|table)")
LOCK_NAME = "lock"
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}


class Shortage(TierError):
    """The process or the machine lacks descriptors or memory now, which says nothing about a file or a block."""


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
        """Return the names of all segments that have a file, or something with the name of one that is no folder.

        Raises :class:`TierError` ``tier-failed`` where the directory cannot be read.
        """
        with errors_of(self.path), os.scandir(self.descriptor) as entries:
            files = [entry.name for entry in entries if not entry.is_dir(follow_symlinks=False)]
        return sorted({found[1] for found in map(_SEGMENT_FILE.fullmatch, files) if found})

    def remove_segment(self, name: str) -> None:
        """Remove the files of a segment, if there are any; the table first, which makes the cells a segment."""
        for file in (table_name(name), cells_name(name)):
            self.remove(file)

    def remove(self, name: str) -> None:
        """Remove a file, if there is one; a folder of that name is left alone."""
        with suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(name, dir_fd=self.descriptor)

    def occupied_bytes(self, segment: str) -> int:
        """Return the bytes on disk of a segment's files."""
        found = 0
        for name in (table_name(segment), cells_name(segment)):
            with suppress(FileNotFoundError):
                found += os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_blocks * 512
        return found

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)


class SegmentFiles:
    """The table and the cells of one segment. ``replaces`` are removed before these are made, on the first write.

    Methods raise :class:`TierError`: ``tier-full`` where the disk has no room, ``tier-failed`` where the disk, or the
    directory, fails. They may take as long as the disk does.
    """

    def __init__(
        self,
        directory: Directory,
        shape: SegmentShape,
        *,
        replaces: Sequence["SegmentFiles"] = (),
        exists: bool = False,
    ) -> None:
        self.name = segment_name(shape.segment_id)
        self.path = directory.path / cells_name(self.name)
        self.shape = shape
        self.is_removed = False
        self._is_made = exists
        self._error: Exception | None = None
        self._directory = directory
        self._replaces = tuple(replaces)
        self._header_lock = threading.Lock()
        """Held while headers are written, which may wait for the kernel; taken before ``_lock``, which blocks need."""
        self._lock = threading.Lock()
        self._cells = -1
        self._table = -1

    def read(self, cell: int, buffer: memoryview, begin: int = 0) -> None:
        """Fill ``buffer``, whole pages on a page boundary, with the bytes from ``begin`` of a cell."""
        self._move(os.preadv, self.shape.cell_offset(cell) + begin, [buffer])

    def write(self, cell: int, pieces: Sequence[memoryview]) -> None:
        """Write pieces, whole pages on page boundaries, one behind the other from the beginning of a cell."""
        self._move(os.pwritev, self.shape.cell_offset(cell), pieces)

    def write_headers(self, current: Callable[[], Iterable[RecordHeader]]) -> None:
        """Write the headers that ``current`` returns, which is asked while nothing else writes headers of this segment.

        So a thread that is late writes no header of a block whose cell belongs to another block by now.
        """
        with self._header_lock:
            for run in neighbours(current()):
                self._write_table(run[0].cell, b"".join(header.pack(self.shape.segment_id) for header in run))

    def clear_headers(self, cell: int, num_cells: int, is_current: Callable[[], bool] = lambda: True) -> None:
        """Mark neighbouring cells as free, if ``is_current`` says so while nothing else writes headers."""
        with self._header_lock:
            if is_current():
                self._write_table(cell, FREE_CELL * num_cells)

    def remove(self) -> None:
        """Remove the files, and those that they were to replace; nothing is written to them afterwards."""
        with self._header_lock, self._lock, errors_of(self.path):
            self._remove_replaced()
            self.is_removed = True
            self._directory.remove_segment(self.name)
            self._close()

    def close(self) -> None:
        """Close the files. A later read or write opens them again."""
        with self._header_lock, self._lock:
            self._close()

    def _move(
        self, call: Callable[[int, Sequence[memoryview], int], int], offset: int, pieces: Sequence[memoryview]
    ) -> None:
        """Call until all bytes have moved: the kernel moves less than 2 GiB in one call."""
        with errors_of(self.path):
            with self._lock:
                self._open()
            wanted, moved = sum(map(len, pieces)), 0
            while moved < wanted:
                found = call(self._cells, pieces, offset + moved)
                moved += found
                if found % PAGE_BYTES or not found:  # the end of the file
                    break
                if moved < wanted:
                    pieces = without_first(pieces, found)
            _check_moved(self._cells, self.path, moved, wanted)

    def _open(self) -> None:
        if self._error is not None:
            raise self._error
        if self.is_removed:
            raise TierError(Reason.TIER_FAILED, f"{self.path} has been removed.")
        if self._cells >= 0:
            return
        self._remove_replaced()
        if not self._is_made:
            self._make()
        table = self._directory.open(table_name(self.name), os.O_RDWR)
        try:
            self._cells = self._directory.open_direct(cells_name(self.name), os.O_RDWR)
        except OSError:
            os.close(table)
            raise
        self._table = table

    def _remove_replaced(self) -> None:
        for files in self._replaces:
            files.remove()
        self._replaces = ()

    def _make(self) -> None:
        """Make both files with all their bytes, and only then the header: a segment without one is removed at start.

        Files that cannot be made count as removed, so that no thread makes them after the tier has given up.
        """
        shape, made = self.shape, list[str]()
        occupied_bytes = 0
        try:
            for name, length, header in (
                (cells_name(self.name), shape.data_bytes, b""),
                (table_name(self.name), shape.table_bytes, shape.pack()),
            ):
                descriptor = self._directory.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                made.append(name)  # a file of that name that was there before is another's
                try:
                    os.posix_fallocate(descriptor, 0, length)
                    occupied_bytes += os.fstat(descriptor).st_blocks * 512
                    if occupied_bytes > shape.made_bytes:
                        message = f"{self.path} takes {occupied_bytes} bytes on disk instead of {shape.made_bytes}."
                        raise TierError(Reason.TIER_FULL, message, "Is the file system's free space very fragmented?")
                    os.pwrite(descriptor, header, 0)
                finally:
                    os.close(descriptor)
        except Exception as error:
            self.is_removed, self._error = True, error
            for name in made:
                self._directory.remove(name)
            raise
        self._is_made = True

    def _write_table(self, cell: int, packed: bytes) -> None:
        """Write through the page cache, which outlives this process."""
        path = self.path.with_name(table_name(self.name))
        with errors_of(path):
            with self._lock:
                if self.is_removed:
                    return
                self._open()
            moved = os.pwrite(self._table, packed, self.shape.header_offset(cell))
            _check_moved(self._table, path, moved, len(packed))

    def _close(self) -> None:
        for descriptor in (self._cells, self._table):
            if descriptor >= 0:
                os.close(descriptor)
        self._cells = self._table = -1


def segment_name(segment_id: int) -> str:
    """Return the name of a segment, without the ending of either file.

    >>> segment_name(7)
    'segment-00000007'
    """
    return f"segment-{segment_id:08d}"


def cells_name(segment: str) -> str:
    """Return the name of the file with a segment's cells.

    >>> cells_name(segment_name(7))
    'segment-00000007.kv'
    """
    return f"{segment}.kv"


def table_name(segment: str) -> str:
    """Return the name of the file with a segment's record headers.

    >>> table_name(segment_name(7))
    'segment-00000007.table'
    """
    return f"{segment}.table"


def without_first(pieces: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """Return what is left of pieces without their first ``num_bytes``.

    >>> [bytes(piece) for piece in without_first([memoryview(b"ab"), memoryview(b"cd"), memoryview(b"e")], 3)]
    [b'd', b'e']
    """
    left = []
    for piece in pieces:
        left += [piece[num_bytes:]] if num_bytes < len(piece) else []
        num_bytes = max(0, num_bytes - len(piece))
    return left


class _Placed(Protocol):
    @property
    def cell(self) -> int: ...


Placed = TypeVar("Placed", bound=_Placed)


def neighbours(items: Iterable[Placed], most: int = MAX_CELLS) -> Iterator[list[Placed]]:
    """Yield items of neighbouring cells of a segment, given in the order of cells, together: at most ``most``.

    >>> headers = [RecordHeader(cell, bytes(48), 4096, 0, 0) for cell in (3, 4, 9)]
    >>> [[header.cell for header in run] for run in neighbours(headers)]
    [[3, 4], [9]]
    """
    run: list[Placed] = []
    for item in items:
        if run and (item.cell != run[-1].cell + 1 or len(run) == most):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def read_segment(directory: Directory, name: str) -> tuple[SegmentShape, list[RecordHeader], Counter[Reason]]:
    """Return the shape of a segment, its intact record headers, and the number of refused ones by reason.

    Raises :class:`TierError` where the files are no segment of this format, or are not those that a tier made. Its
    cause is a ``FileNotFoundError`` for a segment that is removed meanwhile.
    """
    path = directory.path / table_name(name)
    with errors_of(path):
        try:
            descriptor = directory.open(path.name, os.O_RDONLY)
        except FileNotFoundError:
            cells = directory.path / cells_name(name)
            os.stat(cells.name, dir_fd=directory.descriptor, follow_symlinks=False)  # a removed segment has neither
            message = f"{cells} has no table that says which blocks it holds."
            raise TierError(Reason.CHECKSUM_MISMATCH, message) from None
        try:
            found = os.fstat(descriptor)
            _check_file(path, found)
            shape = SegmentShape.unpack(os.pread(descriptor, PAGE_BYTES, 0))
            if segment_name(shape.segment_id) != name:
                raise TierError(Reason.CHECKSUM_MISMATCH, f"{path} is the table of segment {shape.segment_id}.")
            _check_length(path, found, shape.table_bytes)
            _check_cells(directory, name, shape, descriptor)
            table = os.pread(descriptor, shape.num_cells * RECORD_BYTES, PAGE_BYTES)
            if len(table) != shape.num_cells * RECORD_BYTES:
                raise TierError(Reason.CHECKSUM_MISMATCH, f"{path} was cut while it was read.")
        finally:
            os.close(descriptor)
    return shape, *read_table(table, shape)


def _check_cells(directory: Directory, name: str, shape: SegmentShape, table: int) -> None:
    path = directory.path / cells_name(name)
    try:
        found = os.stat(path.name, dir_fd=directory.descriptor, follow_symlinks=False)
    except FileNotFoundError:
        if not os.fstat(table).st_nlink:  # the table is gone too
            raise
        raise TierError(Reason.CHECKSUM_MISMATCH, f"{path} is missing, its table is there.") from None
    _check_file(path, found)
    _check_length(path, found, shape.data_bytes)
    occupied_bytes = (found.st_blocks + os.fstat(table).st_blocks) * 512
    if occupied_bytes > shape.occupied_bytes:
        message = f"{path} and its table take {occupied_bytes} bytes on disk instead of {shape.occupied_bytes}."
        raise TierError(Reason.TIER_FULL, message)


def _check_file(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise TierError(Reason.CHECKSUM_MISMATCH, f"{path} is no file.")
    if found.st_nlink > 1:
        message = f"{path} is one of {found.st_nlink} names of a file: blocks written here would change it there."
        raise TierError(Reason.CHECKSUM_MISMATCH, message)


def _check_length(path: Path, found: os.stat_result, length: int) -> None:
    if found.st_size != length:
        message = f"{path} has {found.st_size} bytes; its table needs {length}."
        raise TierError(Reason.CHECKSUM_MISMATCH, message)


def _check_moved(descriptor: int, path: Path, moved: int, wanted: int) -> None:
    if moved != wanted:
        raise TierError(Reason.TIER_FAILED, f"{path} ended after {moved} of {wanted} bytes.")
    if not os.fstat(descriptor).st_nlink:
        raise TierError(Reason.TIER_FAILED, f"{path} was removed by another program.")


@contextmanager
def errors_of(place: Path | str) -> Iterator[None]:
    """Turn an ``OSError`` or ``MemoryError`` into a :class:`TierError` that names the place."""
    try:
        yield
    except (OSError, MemoryError) as error:
        raise tier_error(place, error) from error


def tier_error(place: Path | str, error: Exception) -> TierError:
    """Return the error of a tier for any other."""
    if isinstance(error, TierError):
        return error
    message = f"{place}: {getattr(error, 'strerror', None) or repr(error)}."
    number = getattr(error, "errno", None)
    if isinstance(error, MemoryError) or number in _SHORTAGES:
        return Shortage(Reason.TIER_FAILED, message, "Give the process more descriptors and memory.")
    return TierError(Reason.TIER_FULL if number in _NO_ROOM else Reason.TIER_FAILED, message)
