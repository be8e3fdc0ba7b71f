"""The room of a disk tier: which cell holds which block, and who must go when there is no free cell. Pure.

A segment has cells of one size, so a block that goes leaves exactly the room that another block of its size needs, and
nothing is ever moved or punched. The least recently used block of the same size goes first. A whole segment goes to
blocks of another size when all its blocks are older than the oldest of those: so the sizes share the disk as one list
in order of use would, and blocks of a model that is no longer served give way.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvferry.tiers.disk.segments import RecordHeader, SegmentShape, round_up
from kvferry.tiers.protocol import BlockKey


@dataclass(slots=True, eq=False)
class Segment:
    """The cells of one segment. ``num_kept`` counts cells that must stay: being written, or pinned."""

    shape: SegmentShape
    last_use: int = 0
    num_kept: int = 0
    records: dict[int, "Record"] = field(default_factory=dict)
    replaces: tuple["Segment", ...] = ()
    """Segments whose files must be removed before this one's is made."""


@dataclass(slots=True, eq=False)
class Record:
    """A block in a cell, or a cell kept for a block that is being written. ``num_kept_by``: open copies of it."""

    key: BlockKey
    segment: Segment
    cell: int
    num_bytes: int
    checksum: int = 0
    sequence: int = 0
    last_use: int = 0
    num_kept_by: int = 0
    is_held: bool = False

    @property
    def header(self) -> RecordHeader:
        """The record's header on disk."""
        return RecordHeader(self.cell, self.key, self.num_bytes, self.checksum, self.sequence)

    def is_last_in_cell(self) -> bool:
        """Return whether the cell belongs to no other block by now."""
        return self.segment.records.get(self.cell, self) is self


@dataclass(slots=True, eq=False)
class _Size:
    """All blocks of one size in cells: cells of a new segment, free cells, and held records in order of use."""

    cells_per_segment: int
    free: deque[tuple[Segment, int]] = field(default_factory=deque)
    records: OrderedDict[BlockKey, Record] = field(default_factory=OrderedDict)


class Space:
    """Records in the cells of segments that occupy at most ``capacity_bytes`` together."""

    def __init__(self, capacity_bytes: int, segment_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.segment_bytes = segment_bytes
        self.occupied_bytes = 0
        self.held: dict[BlockKey, Record] = {}
        self.segments: dict[int, Segment] = {}
        self.may_grow = True
        """Whether new segments may be made without removing one. False while the disk is full of other things."""
        self.num_pinned = 0
        self._sizes: dict[int, _Size] = {}
        self._clock = 0
        self._next_segment_id = 1

    # filling

    def add_found(self, shape: SegmentShape, headers: Iterable[RecordHeader]) -> Segment:
        """Add a segment that was found on disk. Of two records with one key the later stored one stays."""
        segment = self._add(shape)
        segment.last_use = 0
        size, cells = self._size(shape.cell_bytes), dict.fromkeys(range(shape.num_cells))
        for header in headers:
            older = self.held.get(header.key)
            if older is not None and older.sequence >= header.sequence:
                continue
            if older is not None:
                self.forget(older)
            del cells[header.cell]
            record = Record(header.key, segment, header.cell, header.num_bytes, header.checksum, header.sequence)
            record.last_use = header.sequence
            segment.last_use = max(segment.last_use, header.sequence)
            self._clock = max(self._clock, header.sequence)
            segment.records[header.cell] = record
            self._hold(record)
        size.free.extend((segment, cell) for cell in cells)
        return segment

    def sort_found(self) -> None:
        """Bring the records of all found segments into the order of their stores."""
        for size in self._sizes.values():
            size.records = OrderedDict(sorted(size.records.items(), key=lambda item: item[1].last_use))

    # storing

    def reserve(self, keys: Sequence[BlockKey], lengths: Sequence[int], evicted: list[BlockKey]) -> list[Record | None]:
        """Keep a cell for each block, None for lack of room. Keys that had to go are appended to ``evicted``.

        Blocks of one size get their cells in the order of the disk.
        """
        places: dict[int, list[tuple[int, int]]] = {}
        for num_bytes in lengths:
            cell_bytes = round_up(num_bytes)
            size = self._size(cell_bytes)
            if not size.free:
                self._make_room(cell_bytes, size, evicted)
            if size.free:
                segment, cell = size.free.popleft()
                segment.num_kept += 1
                places.setdefault(cell_bytes, []).append((segment.shape.segment_id, cell))
        ordered = {cell_bytes: deque(sorted(found)) for cell_bytes, found in places.items()}
        records: list[Record | None] = []
        for key, num_bytes in zip(keys, lengths, strict=True):
            found = ordered.get(round_up(num_bytes))
            records.append(self._reserved(key, num_bytes, *found.popleft()) if found else None)
        return records

    def publish(self, record: Record) -> None:
        """Hold a reserved record whose block has been written, and whose checksum is known."""
        self._end_keeping(record)
        self._clock += 1
        record.sequence = self._clock
        self._hold(record)
        self.touch(record)

    def give_back(self, record: Record) -> None:
        """Free the cell of a reserved record that will not be held."""
        self._end_keeping(record)
        self._free(record)

    # loading

    def pin(self, record: Record) -> None:
        """Keep a held record for a load, and count a use."""
        self.num_pinned += not record.num_kept_by
        record.segment.num_kept += not record.num_kept_by
        record.num_kept_by += 1
        self.touch(record)

    def unpin(self, record: Record) -> None:
        """End a pin; a forgotten record frees its cell with the last one."""
        self._end_keeping(record)
        self.num_pinned -= not record.num_kept_by
        if not record.num_kept_by and not record.is_held:
            self._free(record)

    def touch(self, record: Record) -> None:
        """Make a held record the last to go."""
        self._clock += 1
        record.last_use = record.segment.last_use = self._clock
        self._size(record.segment.shape.cell_bytes).records.move_to_end(record.key)

    def forget(self, record: Record) -> None:
        """Hold a record no longer; its cell is free once no load pins it."""
        if record.is_held:
            record.is_held = False
            del self.held[record.key], self._size(record.segment.shape.cell_bytes).records[record.key]
            if not record.num_kept_by:
                self._free(record)

    # segments

    def drop(self, segment: Segment) -> list[BlockKey]:
        """Remove a segment and return the keys that it held."""
        del self.segments[segment.shape.segment_id]
        self.occupied_bytes -= segment.shape.occupied_bytes
        keys = [record.key for record in segment.records.values() if record.is_held]
        size = self._size(segment.shape.cell_bytes)
        for key in keys:
            self.held[key].is_held = False
            del self.held[key], size.records[key]
        size.free = deque(place for place in size.free if place[0] is not segment)
        return keys

    def shrink(self) -> Iterator[Segment]:
        """Drop the least recently used segments until the others fit into the capacity; yield each."""
        while self.occupied_bytes > self.capacity_bytes:
            oldest = min(self.segments.values(), key=lambda segment: segment.last_use)
            self.drop(oldest)
            yield oldest

    def _reserved(self, key: BlockKey, num_bytes: int, segment_id: int, cell: int) -> Record:
        segment = self.segments[segment_id]
        record = Record(key, segment, cell, num_bytes, num_kept_by=1)
        segment.records[cell] = record
        return record

    def _make_room(self, cell_bytes: int, size: _Size, evicted: list[BlockKey]) -> None:
        shape = SegmentShape(self._next_segment_id, cell_bytes, size.cells_per_segment)
        if self.may_grow and shape.occupied_bytes <= self.capacity_bytes - self.occupied_bytes:
            self._add_new(shape, ())
            return
        oldest = next((record for record in size.records.values() if not record.num_kept_by), None)
        if not self._replace(shape, oldest, evicted) and oldest is not None:
            evicted.append(oldest.key)
            self.forget(oldest)

    def _replace(self, shape: SegmentShape, oldest: Record | None, evicted: list[BlockKey]) -> bool:
        """Replace segments of other sizes whose blocks are all older than ``oldest``; return whether there were any."""
        if len(self._sizes) == 1:
            return False
        others = sorted(
            (
                segment
                for segment in self.segments.values()
                if segment.shape.cell_bytes != shape.cell_bytes
                and not segment.num_kept
                and (oldest is None or segment.last_use < oldest.last_use)
            ),
            key=lambda segment: segment.last_use,
        )
        chosen: list[Segment] = []
        freed = self.capacity_bytes - self.occupied_bytes
        for segment in others:
            if freed >= shape.occupied_bytes and chosen:
                break
            chosen.append(segment)
            freed += segment.shape.occupied_bytes
        if not chosen or freed < shape.occupied_bytes:
            return False
        for segment in chosen:
            evicted += self.drop(segment)
        self._add_new(shape, tuple(chosen))
        return True

    def _add_new(self, shape: SegmentShape, replaces: tuple[Segment, ...]) -> None:
        segment = self._add(shape)
        segment.replaces = replaces
        self._size(shape.cell_bytes).free.extend((segment, cell) for cell in range(shape.num_cells))

    def _add(self, shape: SegmentShape) -> Segment:
        segment = Segment(shape, last_use=self._clock)
        self.segments[shape.segment_id] = segment
        self.occupied_bytes += shape.occupied_bytes
        self._next_segment_id = max(self._next_segment_id, shape.segment_id + 1)
        return segment

    def _size(self, cell_bytes: int) -> _Size:
        size = self._sizes.get(cell_bytes)
        if size is None:
            one = SegmentShape(1, cell_bytes, num_cells=1)
            shape = SegmentShape.within(1, cell_bytes, max(self.segment_bytes, one.occupied_bytes))
            size = self._sizes[cell_bytes] = _Size(shape.num_cells)
        return size

    def _hold(self, record: Record) -> None:
        record.is_held = True
        self.held[record.key] = record
        self._size(record.segment.shape.cell_bytes).records[record.key] = record

    def _end_keeping(self, record: Record) -> None:
        record.num_kept_by -= 1
        record.segment.num_kept -= not record.num_kept_by

    def _free(self, record: Record) -> None:
        segment = record.segment
        segment.records.pop(record.cell, None)
        if self.segments.get(segment.shape.segment_id) is segment:
            self._size(segment.shape.cell_bytes).free.append((segment, record.cell))
