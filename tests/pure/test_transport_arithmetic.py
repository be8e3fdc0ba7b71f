"""Ranges, slices and region tables against plain Python."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import Reason, TransportError
from kvferry.layout.shard import Region
from kvferry.transport.protocol import MAX_DESCRIPTORS, RangeStream, RegionTable, _check_shape
from kvferry.transport.sliced import slice_bounds, split_long

ranges = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 12)), min_size=1, max_size=20)


def addresses_of(items: list[tuple[int, int]]) -> list[int]:
    return [address for start, length in items for address in range(start, start + length)]


@given(ranges, st.data())
def test_a_cut_is_that_part_of_the_stream(items: list[tuple[int, int]], data: st.DataObject) -> None:
    columns = np.array(items, np.uint64)
    stream = RangeStream(columns[:, 0], columns[:, 1])
    flat = addresses_of(items)
    start = data.draw(st.integers(0, len(flat) - 1))
    stop = data.draw(st.integers(start + 1, len(flat)))
    cut = stream.cut(start, stop)
    assert cut[:, 1].all()
    assert addresses_of([tuple(each) for each in cut.tolist()]) == flat[start:stop]


@given(ranges, st.integers(1, 5), st.data())
def test_reach_is_as_far_as_so_many_merged_ranges_go(
    items: list[tuple[int, int]], most: int, data: st.DataObject
) -> None:
    columns = np.array(items, np.uint64)
    stream = RangeStream(columns[:, 0], columns[:, 1])
    flat = addresses_of(items)
    start = data.draw(st.integers(0, len(flat) - 1))
    stop = stream.reach(start, most)
    assert len(stream.cut(start, stop)) <= most
    assert stop == len(flat) or len(stream.cut(start, stop + 1)) == most + 1


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=5), st.integers(0, 90), st.integers(0, 30))
def test_a_range_is_inside_when_all_its_bytes_are_registered(
    regions: list[tuple[int, int]], start: int, length: int
) -> None:
    table = RegionTable([Region(base, size) for base, size in regions])
    registered = set(addresses_of(regions))
    inside = set(range(start, start + max(1, length))) <= registered
    outside = table.outside(np.array([start], np.uint64), np.array([max(1, length)], np.uint64))
    assert bool(len(outside)) != inside


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=4),
    st.lists(st.tuples(st.integers(80, 140), st.integers(1, 12)), max_size=4),
)
def test_regions_of_a_table_are_what_was_registered_once(
    host: list[tuple[int, int]], device: list[tuple[int, int]]
) -> None:
    """Regions that overlap, or lie inside another, are one; those that touch are one on the host, and not on a device,
    where they are two allocations. Other addresses are the host's.
    """
    table = RegionTable([Region(*each) for each in host] + [Region(*each, "cuda:1") for each in device])
    for kind, regions in (("cpu", host), ("cuda:1", device)):
        of_kind = table.of_device(kind)
        assert addresses_of([(each.base_address, each.length) for each in of_kind]) == sorted(
            set(addresses_of(regions))
        )
        # Disjoint regions with these bytes and these begins are the only ones.
        also_touching = kind == "cpu"
        begins = {at for at, _ in regions if not any(0 < at - begin < size + also_touching for begin, size in regions)}
        assert [each.base_address for each in of_kind] == sorted(begins)
    on_device = set(addresses_of(device))
    assert [table.device_of(address) for address in range(160)] == [
        "cuda:1" if address in on_device else "cpu" for address in range(160)
    ]


def test_a_submission_has_at_most_so_many_descriptors() -> None:
    for count in (MAX_DESCRIPTORS, MAX_DESCRIPTORS + 1):
        rows = np.broadcast_to(np.ones((1, 3), np.uint64), (count, 3))
        if count <= MAX_DESCRIPTORS:
            _check_shape(rows)
            continue
        with pytest.raises(TransportError) as caught:
            _check_shape(rows)
        assert caught.value.reason is Reason.INVALID_REQUEST


@given(ranges, st.integers(1, 8))
def test_split_descriptors_copy_the_same_bytes(items: list[tuple[int, int]], limit: int) -> None:
    descriptors = np.array([(start, start + 1000, length) for start, length in items], np.uint64)
    split = split_long(descriptors, limit)
    assert int(split[:, 2].max()) <= limit
    assert addresses_of([(row[0], row[2]) for row in split.tolist()]) == addresses_of(items)
    assert (split[:, 1] - split[:, 0] == 1000).all()


@given(st.lists(st.integers(1, 8), max_size=40), st.integers(1, 6))
def test_slices_are_bounded_and_cover_the_list(lengths: list[int], most: int) -> None:
    bounds = slice_bounds(np.array(lengths, np.uint64), most, 8)
    assert bounds[0] == 0
    assert bounds[-1] == len(lengths)
    for start, stop in itertools.pairwise(bounds):
        assert 0 < stop - start <= most
        assert sum(lengths[start:stop]) < 2 * 8
