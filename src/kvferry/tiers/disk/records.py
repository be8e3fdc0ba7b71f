"""What lies in the two files of a segment: a table of record headers, and equal cells.

::

    segment-00000001.table   page 0: the segment's header; page 1 ...: one record header of RECORD_BYTES for each cell
    segment-00000001.kv      the cells: one block each, from a page boundary, without gaps

A record header describes itself: magic, version, place, key, length and the block's checksum, under a checksum of its
own. A cell whose header is not intact is free. The headers lie together, so that the index of a directory is read in a
few long reads; the blocks of neighbouring cells lie together, so that they move in one call. Headers are written
through the page cache and blocks are not: in one file, each header would wait for all blocks on their way, and hold up
those behind them. All integers are little-endian.
"""

import struct
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_64_intdigest

from kvferry.errors import Reason, TierError
from kvferry.tiers.protocol import KEY_BYTES, BlockKey

PAGE_BYTES = 4096
"""The alignment of direct access: of every offset, length and address."""
VERSION = 2
"""Version 1 had header, table and cells in one file, ``segment-00000001.kv``."""
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
