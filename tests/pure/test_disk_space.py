"""The room of the disk tier: cells are never shared, the capacity is never exceeded, the oldest block goes first."""

from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import Reason
from kvferry.tiers.disk.segments import MAX_CELLS, RecordHeader, SegmentShape, read_table
from kvferry.tiers.disk.space import Record, Space

from ..counted_work import lines_of

CAPACITY = 400_000
LENGTHS = [4096, 10_000, 30_000]


def key_of(number: int) -> bytes:
    """Return a key."""
    return number.to_bytes(48, "big")


def filled(space: Space, count: int, length: int, first: int = 0) -> list[Record]:
    """Store blocks one by one."""
    records = []
    for number in range(first, first + count):
        [record] = space.reserve([key_of(number)], [length], [])
        assert record is not None
        record.checksum = number
        space.publish(record)
        records.append(record)
    return records


@given(st.lists(st.tuples(st.integers(0, 60), st.sampled_from(LENGTHS), st.sampled_from("spfr")), max_size=120))
def test_cells_are_held_by_one_block_and_segments_fit(steps: list[tuple[int, int, str]]) -> None:
    space, pinned = Space(CAPACITY, CAPACITY // 8), list[Record]()
    for number, length, step in steps:
        key = key_of(number * 100 + LENGTHS.index(length))
        record = space.held.get(key)
        if step == "s" and record is None:
            evicted: list[bytes] = []
            [reserved] = space.reserve([key], [length], evicted)
            assert not set(evicted) & {one.key for one in pinned}
            if reserved is not None:
                assert reserved.segment.shape.cell_bytes >= length
                space.publish(reserved)
        elif step == "p" and record is not None:
            space.pin(record)
            pinned.append(record)
        elif step == "f" and record is not None:
            space.forget(record)
        elif step == "r" and pinned:
            space.unpin(pinned.pop())
        taken = {(one.segment.shape.segment_id, one.cell) for one in space.held.values()}
        assert len(taken) == len(space.held)
        for one in {*space.held.values(), *pinned}:
            assert space.segments[one.segment.shape.segment_id] is one.segment
            assert one.segment.records[one.cell] is one
        assert space.occupied_bytes <= CAPACITY
        assert space.occupied_bytes == sum(one.shape.occupied_bytes for one in space.segments.values())
        assert space.num_pinned == len(set(pinned))
        used = sum(len(one.records) for one in space.segments.values())
        free = sum(len(size.free) for size in space._sizes.values())
        assert used + free == sum(one.shape.num_cells for one in space.segments.values())
        assert sum(one.num_kept for one in space.segments.values()) == len(set(pinned))


def test_a_segment_goes_to_another_size_when_its_blocks_are_the_oldest() -> None:
    space = Space(CAPACITY, CAPACITY // 4)
    small = filled(space, 40, 4096)
    large = filled(space, 4, 30_000, first=1000)
    num_large_segments = len({record.segment for record in large})
    space.touch(small[-1])
    while len({record.segment for record in large}) == num_large_segments:
        [record] = filled(space, 1, 30_000, first=2000 + len(large))
        large.append(record)
    held = [record for record in small if record.is_held]
    assert small[-1] in held
    assert not any(record.is_held for record in small[:10])


def test_two_sizes_in_use_keep_their_shares() -> None:
    """Blocks of both sizes are stored in turn: no segment changes its size for every few blocks."""
    space = Space(8_000_000, 400_000)
    changes, shapes = 0, dict[int, int]()
    for number in range(3000):
        filled(space, 1, (4096, 10_000)[number % 2], first=number)
        found = {segment_id: one.shape.cell_bytes for segment_id, one in space.segments.items()}
        if number > 1500:
            changes += len(found.keys() - shapes.keys())
        shapes = found
    assert changes < 20
    assert len(space.held) > 0.9 * 8_000_000 / 8192


def test_of_two_records_with_one_key_the_later_stays() -> None:
    for order in ((1, 2), (2, 1)):
        space = Space(CAPACITY, CAPACITY // 4)
        for sequence in order:
            shape = SegmentShape.within(sequence, 4096, CAPACITY // 4)
            space.add_found(shape, [RecordHeader(3, key_of(7), 4096, checksum=sequence, sequence=sequence)])
        assert space.held[key_of(7)].checksum == 2
        assert len(space.held) == 1


def test_found_segments_shrink_to_the_capacity_oldest_first() -> None:
    space = Space(CAPACITY, CAPACITY // 4)
    for segment_id in (1, 2, 3, 4, 5):
        shape = SegmentShape.within(segment_id, 4096, CAPACITY // 4)
        sequence = (segment_id * 2) % 5 + 1
        space.add_found(shape, [RecordHeader(0, key_of(segment_id), 4096, 0, sequence)])
    assert [segment.last_use for segment in space.shrink()] == [1]
    assert space.occupied_bytes <= CAPACITY


def test_a_shape_fills_its_room() -> None:
    for cell_bytes in (4096, 65_536, 1 << 20):
        for room in (100_000, 3 << 20, 64 << 20):
            shape = SegmentShape.within(1, cell_bytes, room)
            one_more = SegmentShape(1, cell_bytes, shape.num_cells + 1)
            assert shape.num_cells == 0 or shape.occupied_bytes <= room < one_more.occupied_bytes + 2 * 4096


def test_the_shape_of_a_huge_segment_takes_few_steps() -> None:
    shape = SegmentShape.within(1, 4096, 1 << 34)
    assert shape.occupied_bytes <= 1 << 34 < SegmentShape(1, 4096, shape.num_cells + 1).occupied_bytes
    assert lines_of(lambda: SegmentShape.within(1, 4096, 1 << 34)) < 500
    assert SegmentShape.within(1, 4096, 1 << 44).num_cells == MAX_CELLS


def test_a_header_of_a_block_that_does_not_fill_its_cell_is_refused() -> None:
    """Sealed, and in its place: only the length is that of another cell."""
    shape = SegmentShape(1, 8192, 3)
    lengths = [8192, 4096, 8193]
    rows = [RecordHeader(cell, key_of(cell), length, 0, 1).pack(1) for cell, length in enumerate(lengths)]
    headers, refused = read_table(b"".join(rows), shape)
    assert [header.cell for header in headers] == [0]
    assert refused == {Reason.CHECKSUM_MISMATCH: 2}
