"""The disk tier: crashes, damage, the cap on disk, a second owner, and a disk that fails or hangs."""

import ctypes
import errno
import os
import resource
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.errors import Reason, TierError
from kvferry.tiers.disk import runs
from kvferry.tiers.disk.runs import HeaderWrite
from kvferry.tiers.disk.segments import (
    MAX_CELL_BYTES,
    MAX_CELLS,
    RECORD_BYTES,
    Directory,
    RecordHeader,
    SegmentFiles,
    SegmentShape,
    cells_name,
    segment_name,
    table_name,
)
from kvferry.tiers.local_disk import RESERVED_BYTES, LocalDisk, open_directory
from kvferry.tiers.protocol import Presence, Slots, Store
from kvferry.tiers.workers import Task, Workers
from kvferry.units import format_bytes

from ..counted_work import lines_of
from ..waits import wait_until
from .disk_blocks import Blocks, bytes_on_disk, content, key_of

CAPACITY = 1 << 20
NUM_KILLS = int(os.environ.get("KVFERRY_KILLS", "40"))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Blocks]]:
    """Open tiers in one directory, one after the other; all are closed at the end, and their threads have ended."""
    before = threading.active_count()
    tiers: list[Blocks] = []

    def open_tier(capacity_bytes: int = CAPACITY, **options: Any) -> Blocks:
        if tiers:
            tiers[-1].disk.close()
        tiers.append(Blocks(tmp_path / "tier", capacity_bytes, **options))
        return tiers[-1]

    yield open_tier
    for tier in tiers:
        tier.disk.close()
    assert threading.active_count() == before


def segments(blocks: Blocks) -> list[Path]:
    """Return the files of cells."""
    return sorted(blocks.directory.glob("segment-*.kv"))


def table_of(path: Path) -> Path:
    """Return the file of the table that belongs to a file of cells."""
    return path.with_suffix(".table")


def shape_of(path: Path) -> SegmentShape:
    """Return the shape of the segment with this file of cells."""
    return SegmentShape.unpack(table_of(path).read_bytes()[:4096])


def change(path: Path, offset: int, mask: int = 1) -> None:
    """Flip bits of one byte of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


def test_blocks_come_back_and_again_after_a_restart(opened: Callable[..., Blocks]) -> None:
    blocks = opened()
    numbers = list(range(20))
    assert blocks.store(numbers).landed.all()
    assert blocks.load(numbers).landed.all()
    blocks = opened()
    assert blocks.held([*numbers, 99]) == set(numbers)
    assert blocks.load(numbers).landed.all()
    assert blocks.disk.snapshot()["num_blocks"] == 20


@pytest.mark.parametrize(("length", "shift"), [(8192, 1), (5000, 0), (1, 3), (12288, 512)])
def test_slots_need_no_page_boundary(opened: Callable[..., Blocks], length: int, shift: int) -> None:
    blocks = opened()
    addresses = [blocks.region.base_address + shift + index * (length + 7) for index in range(5)]
    slots = Slots.of(addresses, [length] * 5)
    for index in range(5):
        blocks.view(slots, index)[:] = np.frombuffer(content(index, length), np.uint8)
    store = blocks.disk.prepare_store([key_of(index) for index in range(5)], slots)
    blocks.wait(store)
    blocks.disk.complete_store(store)
    before = blocks.slab.copy()
    for index in range(5):
        blocks.view(slots, index)[:] = 0
    load = blocks.disk.prepare_load([key_of(index) for index in range(5)], slots)
    blocks.wait(load)
    blocks.disk.complete_load(load)
    assert load.landed.all()
    assert np.array_equal(blocks.slab, before)


def test_neighbouring_blocks_move_in_one_call(opened: Callable[..., Blocks], monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = opened(4 << 20)
    calls: list[int] = []
    read = SegmentFiles.read
    monkeypatch.setattr(SegmentFiles, "read", lambda *arguments: (calls.append(len(arguments[2])), read(*arguments))[1])
    blocks.store(list(range(32)))
    blocks.load(list(range(32))[::-1])
    assert calls == [32 * 8192]


@pytest.mark.parametrize("length", [8192, 5000, 40_000])
def test_a_block_is_longer_than_what_one_call_moves(
    opened: Callable[..., Blocks], monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """Linux moves at most 2 GiB less a page in one call; here it moves three pages."""
    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, moving_at_most(3 * 4096, getattr(os, name)))
    blocks = opened()
    numbers = list(range(7))
    assert blocks.store(numbers, length).landed.all()
    assert blocks.load(numbers, length).landed.all()
    assert opened().load(numbers, length).landed.all()


def moving_at_most(most: int, call: Callable[..., int]) -> Callable[..., int]:
    """Return the call with a limit."""

    def limited(descriptor: int, pieces: list[memoryview], offset: int) -> int:
        left, room = [], most
        for piece in pieces:
            left.append(piece[:room])
            room -= len(left[-1])
        return call(descriptor, [piece for piece in left if piece], offset)

    return limited


def test_a_block_that_no_segment_could_hold_after_a_restart_is_refused(
    opened: Callable[..., Blocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.tiers.local_disk.MAX_CELL_BYTES", 8192)
    blocks = opened()
    assert blocks.store([1]).landed.all()
    assert blocks.store([2], 8193).failures == {Reason.BLOCK_SIZE_MISMATCH: 1}
    assert blocks.held([1, 2]) == {1}
    assert len(segments(blocks)) == 1


# the cap


def test_bytes_on_disk_never_exceed_the_cap(opened: Callable[..., Blocks]) -> None:
    blocks = opened()
    num_evicted = 0
    for turn in range(60):
        length = (4096, 8192, 40_000)[turn % 3]
        store = blocks.store([turn * 10 + index for index in range(10)], length)
        num_evicted += len(store.evicted)
        assert store.landed.all()
        assert bytes_on_disk(blocks.directory) <= CAPACITY
        assert blocks.disk.snapshot()["num_bytes"] <= CAPACITY
    assert num_evicted > 300
    assert bytes_on_disk(blocks.directory) > 0.7 * CAPACITY


def test_bytes_on_disk_stay_below_the_cap_while_files_are_replaced(opened: Callable[..., Blocks]) -> None:
    blocks = opened()
    largest, stop = 0, threading.Event()

    def watch() -> None:
        nonlocal largest
        while not stop.is_set():
            try:
                largest = max(largest, bytes_on_disk(blocks.directory))
            except FileNotFoundError:
                continue

    watcher = threading.Thread(target=watch)
    watcher.start()
    for turn in range(30):
        blocks.store([turn * 20 + index for index in range(20)], (8192, 24_576)[turn % 2])
    stop.set()
    watcher.join()
    assert 0.5 * CAPACITY < largest <= CAPACITY


def test_a_smaller_cap_is_obeyed_at_once(opened: Callable[..., Blocks]) -> None:
    blocks = opened()
    numbers = list(range(100))
    blocks.store(numbers)
    kept = blocks.held(numbers)
    smaller = opened(CAPACITY // 2)
    assert bytes_on_disk(smaller.directory) <= CAPACITY // 2
    left = smaller.held(numbers)
    assert 20 < len(left) < len(kept)
    assert smaller.load(sorted(left)).landed.all()
    tiny = opened(2 * RESERVED_BYTES)
    assert bytes_on_disk(tiny.directory) <= 2 * RESERVED_BYTES
    assert [path.name for path in tiny.directory.iterdir()] == ["lock"]


def test_the_least_recently_used_block_goes_first(opened: Callable[..., Blocks]) -> None:
    blocks = opened(segment_bytes=CAPACITY)
    room = shape_room(blocks)
    numbers = list(range(room))
    blocks.store(numbers)
    blocks.load([numbers[-1]])
    assert blocks.held(numbers) == set(numbers)  # a look-up is no use
    store = blocks.store([1000])
    assert list(store.evicted) == [key_of(numbers[-2])]


def test_of_a_prefix_that_was_loaded_the_last_blocks_go_first(opened: Callable[..., Blocks]) -> None:
    blocks = opened(segment_bytes=CAPACITY)
    numbers = list(range(shape_room(blocks)))
    blocks.store(numbers)
    blocks.load(numbers[3:])
    blocks.load(numbers[:3])
    assert list(blocks.store([1000]).evicted) == [key_of(numbers[-1])]
    blocks.load([*numbers[3:-1], 1000])
    assert list(blocks.store([1001, 1002]).evicted) == [key_of(2), key_of(1)]


def test_restarts_keep_the_order_of_the_stores(opened: Callable[..., Blocks]) -> None:
    blocks = opened(segment_bytes=CAPACITY)
    numbers = list(range(shape_room(blocks) - 1))
    blocks.store(numbers)
    opened(segment_bytes=CAPACITY).store([1000])
    store = opened(segment_bytes=CAPACITY).store([2000, 2001])
    assert list(store.evicted) == [key_of(numbers[-1]), key_of(numbers[-2])]


def test_a_store_does_not_evict_a_block_that_it_names(opened: Callable[..., Blocks]) -> None:
    blocks = opened(segment_bytes=CAPACITY)
    numbers = list(range(shape_room(blocks)))
    blocks.store(numbers)
    store = blocks.store([numbers[-1], 1000])  # the last block of a store is the oldest
    assert store.landed.all()
    assert list(store.evicted) == [key_of(numbers[-2])]
    assert blocks.load([numbers[-1], 1000]).landed.all()


def shape_room(blocks: Blocks) -> int:
    """Return how many blocks of 8192 bytes fit into a tier with one segment."""
    return SegmentShape.within(1, 8192, CAPACITY - RESERVED_BYTES).num_cells


def test_blocks_in_use_are_not_evicted(opened: Callable[..., Blocks]) -> None:
    blocks = opened(segment_bytes=CAPACITY)
    room = shape_room(blocks)
    blocks.store(list(range(room)))
    load = blocks.disk.prepare_load([key_of(number) for number in range(room)], blocks.slots([8192] * room))
    assert blocks.disk.snapshot()["num_pinned"] == room
    blocks.wait(load)
    for length in (8192, 16_384):
        store = blocks.store([5000 + length], length)
        assert store.failures == {Reason.TIER_FULL: 1}
        assert not store.evicted
    blocks.disk.complete_load(load)
    assert blocks.store([5000]).landed.all()
    assert blocks.disk.snapshot()["num_pinned"] == 0


def test_blocks_of_another_size_take_the_oldest_segment(opened: Callable[..., Blocks]) -> None:
    blocks = opened()
    numbers = list(range(200))
    for first in range(0, 200, 10):
        blocks.store(numbers[first : first + 10])
    held = blocks.held(numbers)
    store = blocks.store([1000], 40_000)
    assert store.landed.all()
    gone = held - blocks.held(numbers)
    assert gone
    assert max(gone) < sorted(held)[len(held) // 2]
    for turn in range(20):
        blocks.store([2000 + turn * 5 + index for index in range(5)], 40_000)
    assert len(blocks.held(numbers)) < 20  # blocks that nobody uses give way


def test_a_segment_that_was_never_made_hands_on_the_files_to_be_removed(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    first = SegmentFiles(directory, SegmentShape(1, 4096, 2))
    first.clear_headers(0, 1)
    second = SegmentFiles(directory, SegmentShape(2, 4096, 2), replaces=[first])
    third = SegmentFiles(directory, SegmentShape(3, 4096, 2), replaces=[second])
    third.clear_headers(0, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["segment-00000003.kv", "segment-00000003.table"]
    third.close()
    directory.close()


# crashes


def write_until_killed(directory: Path, capacity_bytes: int, seed: int, report: int) -> None:
    """Store blocks for ever; report each batch once its headers are written."""
    blocks = Blocks(directory, capacity_bytes)
    first = seed * 10_000
    while True:
        numbers = list(range(first, first + 8))
        blocks.store(numbers, (8192, 12_288)[seed % 2])
        blocks.settle()
        os.write(report, b"".join(number.to_bytes(8, "big") for number in numbers))
        first += 8


def test_sigkill_during_writes_loses_nothing_that_was_written(tmp_path: Path) -> None:
    """After each of ``KVFERRY_KILLS`` kills the same directory is opened again, read, and written further."""
    stored: dict[int, int] = {}
    num_seen = 0
    for seed in range(NUM_KILLS):
        capacity = CAPACITY if seed % 4 else 64 << 20
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                write_until_killed(tmp_path / "tier", capacity, seed, writing)
            finally:
                os._exit(1)
        os.close(writing)
        reported = os.read(reading, 8)
        time.sleep((seed * 7 % 23) / 1000)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while more := os.read(reading, 1 << 16):
            reported += more
        os.close(reading)
        assert len(reported) >= 64, "the child wrote nothing"
        batch = [int.from_bytes(reported[start : start + 8], "big") for start in range(0, len(reported), 8)]
        length = (8192, 12_288)[seed % 2]
        stored.update(dict.fromkeys(range(seed * 10_000, seed * 10_000 + len(batch) + 64), length))

        blocks = Blocks(tmp_path / "tier", capacity)
        assert bytes_on_disk(blocks.directory) <= capacity
        held = blocks.held(list(stored))
        if capacity > CAPACITY:
            assert held >= set(batch)
        assert held
        for size in (8192, 12_288):
            wanted = sorted(number for number in held if stored[number] == size)[-100:]
            num_seen += int(blocks.load(wanted, size).landed.sum())
        blocks.disk.close()
    assert num_seen > 20 * NUM_KILLS


def test_a_store_that_was_not_completed_is_not_held_after_a_crash(
    opened: Callable[..., Blocks], tmp_path: Path
) -> None:
    blocks = opened()
    blocks.store([1])
    pending = blocks.begin_store([2], [8192])
    blocks.wait(pending)
    cancelled = blocks.begin_store([3], [8192])
    blocks.disk.cancel(cancelled)
    blocks.disk.complete_store(cancelled)
    blocks.settle()
    assert blocks.held([1, 2, 3]) == {1}
    shutil.copytree(blocks.directory, tmp_path / "crashed")
    crashed = Blocks(tmp_path / "crashed", CAPACITY)
    assert crashed.held([1, 2, 3]) == {1}
    crashed.disk.close()


def test_a_cell_that_is_written_again_is_free_after_a_crash(
    opened: Callable[..., Blocks], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash in the middle of a write leaves no header of the block that lay there before."""
    blocks = opened(segment_bytes=CAPACITY)
    room = shape_room(blocks)
    blocks.store(list(range(room)))
    blocks.settle()
    crashed = tmp_path / "crashed"

    def write(file: SegmentFiles, cell: int, pieces: Any) -> None:
        shutil.copytree(blocks.directory, crashed)
        raise TierError(Reason.TIER_FAILED, "the process was killed.")

    monkeypatch.setattr(SegmentFiles, "write", write)
    assert not blocks.store([1000]).landed.any()
    again = Blocks(crashed, CAPACITY)
    num_blocks = again.disk.snapshot()["num_blocks"]
    again.disk.close()
    assert num_blocks == room - 1


@pytest.mark.parametrize("late", ["a written header", "a cleared header"])
def test_a_thread_that_is_late_writes_no_header_over_that_of_the_next_block(
    opened: Callable[..., Blocks], monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """The cell of the late header belongs to another block by now, which a restart must find."""
    blocks = opened(segment_bytes=CAPACITY, num_threads=2)
    room = shape_room(blocks)
    numbers = list(range(room))
    blocks.store(numbers)
    blocks.settle()
    goes_on, perform, is_first = threading.Event(), HeaderWrite.perform, [True]

    def wait(*arguments: Any) -> None:
        if is_first.pop() if is_first else False:
            goes_on.wait(20)
        perform(*arguments)

    monkeypatch.setattr(HeaderWrite, "perform", wait)
    if late == "a written header":
        assert list(blocks.store([1000]).evicted) == [key_of(numbers[-1])]
        blocks.load(numbers[:-1])  # now 1000 is the oldest
    else:
        [path] = segments(blocks)
        record = blocks.disk._space.held[key_of(5)]
        change(path, shape_of(path).cell_offset(record.cell))
        assert blocks.load([5]).failures == {Reason.CHECKSUM_MISMATCH: 1}
    assert blocks.store([2000]).landed.all()
    wait_until(lambda: blocks.disk.snapshot()["num_waiting"] <= 1)
    goes_on.set()
    blocks.settle()
    blocks = opened()
    assert blocks.disk.snapshot()["refused"] == {}
    assert blocks.held([2000]) == {2000}
    assert blocks.load([2000]).landed.all()


def test_the_index_of_100_000_blocks_is_back_in_two_seconds_after_sigkill(tmp_path: Path) -> None:
    capacity = int(100_000 * 4096 * 1.1)
    child = os.fork()
    if not child:
        try:
            blocks = Blocks(tmp_path / "tier", capacity)
            slots = blocks.slots([4096] * 2000)
            for first in range(0, 100_000, 2000):
                store = blocks.disk.prepare_store([key_of(first + index) for index in range(2000)], slots)
                blocks.wait(store)
                blocks.disk.complete_store(store)
            blocks.settle()
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    began_at = time.process_time()  # time of this process: other processes share its cores
    blocks = Blocks(tmp_path / "tier", capacity)
    seconds = time.process_time() - began_at
    assert blocks.disk.snapshot()["num_blocks"] == 100_000
    numbers = [0, 50_000, 99_999]
    load = blocks.disk.prepare_load([key_of(number) for number in numbers], blocks.slots([4096] * 3))
    blocks.wait(load)
    assert load.landed.all()
    blocks.disk.close()
    assert seconds < 2.0


# damage


def test_a_flipped_bit_in_a_block_is_a_miss_and_the_block_is_forgotten(opened: Callable[..., Blocks]) -> None:
    blocks = opened()
    blocks.store([0, 1, 2])
    [path] = segments(blocks)
    change(path, shape_of(path).cell_offset(1) + 777)
    load = blocks.load([0, 1, 2])
    assert load.landed.tolist() == [True, False, True]
    assert load.failures == {Reason.CHECKSUM_MISMATCH: 1}
    assert blocks.held([0, 1, 2]) == {0, 2}
    assert blocks.disk.snapshot()["failures"] == {"checksum-mismatch": 1}
    blocks = opened()
    assert blocks.held([0, 1, 2]) == {0, 2}
    assert blocks.disk.snapshot()["refused"] == {}
    assert blocks.store([1]).landed.all()
    assert blocks.load([0, 1, 2]).landed.all()


def test_a_slot_is_not_touched_by_a_damaged_block(opened: Callable[..., Blocks]) -> None:
    blocks = opened()
    blocks.store([0])
    [path] = segments(blocks)
    change(path, shape_of(path).cell_offset(0))
    blocks.load([0])
    assert not blocks.slab.any()


@pytest.mark.parametrize("offset", [0, 9, 13, 20, 25, 33, 41, 60, 100, 125])
def test_a_flipped_bit_in_a_record_header_is_a_miss(opened: Callable[..., Blocks], offset: int) -> None:
    blocks = opened()
    blocks.store([0, 1, 2])
    blocks.disk.close()
    [path] = segments(blocks)
    change(table_of(path), shape_of(path).header_offset(1) + offset)
    blocks = opened()
    assert blocks.held([0, 1, 2]) == {0, 2}
    reason = "unsupported-version" if offset == 9 else "checksum-mismatch"
    assert blocks.disk.snapshot()["refused"] == {reason: 1}
    assert blocks.load([0, 2]).landed.all()


def test_a_header_of_another_cell_or_file_is_refused(opened: Callable[..., Blocks]) -> None:
    blocks = opened(segment_bytes=70_000)
    blocks.store(list(range(12)))
    blocks.disk.close()
    first, second = map(table_of, segments(blocks)[:2])
    table = first.read_bytes()[4096 : 4096 + 2 * RECORD_BYTES]
    for path, cells in ((first, table[RECORD_BYTES:] + table[:RECORD_BYTES]), (second, table)):
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(cells)
    blocks = opened()
    assert blocks.disk.snapshot()["refused"] == {"checksum-mismatch": 4}
    assert len(blocks.held(list(range(12)))) == 8


@pytest.mark.parametrize("offset", [0, 8, 20, 30, 36, 41])
def test_a_damaged_segment_header_removes_the_segment(opened: Callable[..., Blocks], offset: int) -> None:
    blocks = opened()
    blocks.store([0, 1])
    blocks.disk.close()
    change(table_of(segments(blocks)[0]), offset)
    blocks = opened()
    assert blocks.held([0, 1]) == set()
    assert [path.name for path in blocks.directory.iterdir()] == ["lock"]
    reason = "unsupported-version" if offset == 8 else "checksum-mismatch"
    assert blocks.disk.snapshot()["refused"] == {reason: 1}


def test_a_renamed_segment_is_removed(opened: Callable[..., Blocks]) -> None:
    """Two copies of one segment would be one for the tier, which counts and removes the files of the segment's name."""
    blocks = opened()
    blocks.store([0, 1])
    blocks.disk.close()
    [path] = segments(blocks)
    table_of(path).rename(blocks.directory / table_name(segment_name(9)))
    path.rename(blocks.directory / cells_name(segment_name(9)))
    blocks = opened()
    assert blocks.disk.snapshot()["refused"] == {"checksum-mismatch": 1}
    assert not segments(blocks)


@pytest.mark.parametrize("length", [0, 4096, 50_001])
def test_a_cut_segment_is_removed_at_start_and_misses_while_open(opened: Callable[..., Blocks], length: int) -> None:
    blocks = opened()
    blocks.store(list(range(10)))
    os.truncate(segments(blocks)[0], length)
    load = blocks.load([9])
    assert not load.landed.any()
    assert blocks.held([9]) == set()
    blocks = opened()
    assert blocks.held(list(range(10))) == set()
    assert not segments(blocks)
    assert blocks.store([1]).landed.all()


@pytest.mark.parametrize("gone", ["table", "cells"])
def test_half_a_segment_is_removed_at_start(
    opened: Callable[..., Blocks], caplog: pytest.LogCaptureFixture, gone: str
) -> None:
    blocks = opened()
    blocks.store([1, 2])
    blocks.disk.close()
    [path] = segments(blocks)
    (table_of(path) if gone == "table" else path).unlink()
    blocks = opened()
    assert blocks.held([1, 2]) == set()
    assert blocks.disk.snapshot()["refused"] == {"checksum-mismatch": 1}
    assert [path.name for path in blocks.directory.iterdir()] == ["lock"]
    assert ("has no table" if gone == "table" else "is missing, its table is there") in caplog.text


@pytest.mark.parametrize("longer", [-4096, 4096])
@pytest.mark.parametrize("kind", ["table", "cells"])
def test_a_table_that_does_not_fit_its_cells_is_removed_with_them(
    opened: Callable[..., Blocks], caplog: pytest.LogCaptureFixture, kind: str, longer: int
) -> None:
    blocks = opened()
    blocks.store([1, 2])
    blocks.disk.close()
    path = table_of(segments(blocks)[0]) if kind == "table" else segments(blocks)[0]
    length = path.stat().st_size
    os.truncate(path, length + longer)
    blocks = opened()
    assert blocks.held([1, 2]) == set()
    assert f"has {length + longer} bytes; its table needs {length}" in caplog.text
    assert [path.name for path in blocks.directory.iterdir()] == ["lock"]


def test_a_directory_of_another_format_is_emptied_with_a_message(
    opened: Callable[..., Blocks], caplog: pytest.LogCaptureFixture
) -> None:
    blocks = opened()
    blocks.store([1])
    blocks.disk.close()
    with table_of(segments(blocks)[0]).open("r+b") as table:
        table.seek(8)
        table.write((2).to_bytes(2, "little"))
    blocks = opened()
    assert blocks.disk.snapshot()["refused"] == {"unsupported-version": 1}
    assert "the segment has format 2, this kvferry reads and writes format 1" in caplog.text
    assert not segments(blocks)


def test_a_file_with_more_room_on_disk_than_a_segment_needs_is_removed(opened: Callable[..., Blocks]) -> None:
    """Room behind the end of a file counts too: the cap is for what the directory occupies."""
    blocks = opened()
    blocks.store([1])
    blocks.disk.close()
    [path] = segments(blocks)
    before = bytes_on_disk(blocks.directory)
    with path.open("r+b") as file:
        keep_size, offset, length = 1, ctypes.c_long(path.stat().st_size), ctypes.c_long(CAPACITY)
        assert ctypes.CDLL(None).fallocate(file.fileno(), keep_size, offset, length) == 0
    assert bytes_on_disk(blocks.directory) >= before + CAPACITY
    blocks = opened()
    assert blocks.disk.snapshot()["refused"] == {"tier-full": 1}
    assert bytes_on_disk(blocks.directory) <= CAPACITY
    assert blocks.held([1]) == set()


@pytest.mark.parametrize("kind", ["table", "cells"])
def test_a_file_with_a_second_name_is_not_written(opened: Callable[..., Blocks], tmp_path: Path, kind: str) -> None:
    """A snapshot by hard links would change with the tier."""
    blocks = opened()
    blocks.store([1])
    blocks.disk.close()
    path = table_of(segments(blocks)[0]) if kind == "table" else segments(blocks)[0]
    kept = tmp_path / "kept"
    os.link(path, kept)
    before = kept.read_bytes()
    blocks = opened()
    assert blocks.disk.snapshot()["refused"] == {"checksum-mismatch": 1}
    assert blocks.store([2, 3]).landed.all()
    blocks.settle()
    assert kept.read_bytes() == before


def test_foreign_files_are_left_alone(opened: Callable[..., Blocks]) -> None:
    blocks = opened()
    blocks.store([1])
    others = [blocks.directory / name for name in ("notes.txt", "segment-notes.kv", "segment-1.kv", "segment-1.table")]
    for other in others:
        other.write_text("mine")
    folders = [blocks.directory / "segment-00000077.kv", blocks.directory / "segment-00000001.table.d"]
    for folder in folders:
        folder.mkdir()
    opened(2 * RESERVED_BYTES)
    assert [other.read_text() for other in others] == ["mine"] * 4
    assert all(folder.is_dir() for folder in folders)


@pytest.mark.parametrize("name", [cells_name(segment_name(1)), table_name(segment_name(1))])
def test_a_file_with_the_name_of_a_new_segment_is_left_alone(opened: Callable[..., Blocks], name: str) -> None:
    blocks = opened()
    foreign = blocks.directory / name
    foreign.write_text("mine")
    assert blocks.store([1]).failures == {Reason.TIER_FAILED: 1}
    assert foreign.read_text() == "mine"
    assert sorted(path.name for path in blocks.directory.iterdir()) == ["lock", name]
    blocks.disk._grow_again_at = 0.0
    blocks.disk.poll()
    assert blocks.store([1]).landed.all()


@pytest.mark.parametrize("kind", ["table", "cells"])
def test_links_and_pipes_are_not_opened(opened: Callable[..., Blocks], tmp_path: Path, kind: str) -> None:
    """A link must not lead to a file of another directory; a pipe would wait for its other end."""
    blocks = opened()
    blocks.store([1, 2])
    [path] = segments(blocks)
    blocks.disk.close()
    elsewhere = tmp_path / "elsewhere"
    path = table_of(path) if kind == "table" else path
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    os.mkfifo(blocks.directory / f"{segment_name(2)}{path.suffix}")
    before = elsewhere.read_bytes()
    blocks = opened()
    assert blocks.held([1, 2]) == set()
    reasons = {"tier-failed": 1, "checksum-mismatch": 1} if kind == "table" else {"checksum-mismatch": 2}
    assert blocks.disk.snapshot()["refused"] == reasons
    assert blocks.store([1]).landed.all()
    assert elsewhere.read_bytes() == before
    lock = blocks.directory / "lock"
    blocks.disk.close()
    lock.unlink()
    lock.symlink_to(elsewhere)
    with pytest.raises(TierError) as raised:
        LocalDisk(blocks.directory, CAPACITY, blocks.region)
    assert raised.value.reason is Reason.TIER_FAILED
    assert elsewhere.read_bytes() == before


@pytest.mark.parametrize(
    "shape",
    [
        SegmentShape(1, 4096, MAX_CELLS + 1),
        SegmentShape(1, 4096, 0),
        SegmentShape(1, 0, 9),
        SegmentShape(1, 4097, 9),
        SegmentShape(1, MAX_CELL_BYTES + 4096, 1),
        SegmentShape(1, 1 << 63, 1 << 62),
        SegmentShape((1 << 64) - 1, 4096, 1),
    ],
)
def test_a_forged_header_cannot_claim_an_impossible_segment(opened: Callable[..., Blocks], shape: SegmentShape) -> None:
    """A file with holes may be as long as its header says, and take no room on disk."""
    blocks = opened()
    blocks.disk.close()
    forge(blocks.directory, shape)
    blocks = opened()
    assert blocks.disk.snapshot()["refused"] == {"checksum-mismatch": 1}
    assert not segments(blocks)
    assert blocks.store([1]).landed.all()


def forge(directory: Path, shape: SegmentShape, table: bytes = b"") -> None:
    """Write the files of a segment, with holes in place of the cells."""
    name = segment_name(shape.segment_id)
    (directory / table_name(name)).write_bytes(shape.pack().ljust(4096, b"\0") + table)
    for path, length in ((table_name(name), shape.table_bytes), (cells_name(name), shape.data_bytes)):
        (directory / path).touch()
        os.truncate(directory / path, min(length, 1 << 40))


def test_a_forged_sequence_leaves_room_for_the_next(opened: Callable[..., Blocks]) -> None:
    """The largest number that fits into a header has no successor: no later block would survive a restart."""
    blocks = opened()
    blocks.disk.close()
    forge(blocks.directory, SegmentShape(1, 8192, 3), RecordHeader(0, key_of(7), 8192, 0, (1 << 64) - 1).pack(1))
    blocks = opened()
    assert blocks.disk.snapshot()["refused"] == {"checksum-mismatch": 1}
    blocks.store([1])
    assert opened().held([1]) == {1}


def test_a_process_without_descriptors_removes_no_segment(
    opened: Callable[..., Blocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = opened()
    blocks.store([1, 2])
    blocks.disk.close()
    open_file = Directory.open

    def fail(directory: Directory, name: str, flags: int) -> int:
        if name.startswith("segment"):
            raise OSError(errno.EMFILE, "Too many open files")
        return open_file(directory, name, flags)

    with monkeypatch.context() as patched:
        patched.setattr(Directory, "open", fail)
        with pytest.raises(TierError, match="Too many open files"):
            LocalDisk(blocks.directory, CAPACITY, blocks.region)
    assert opened().held([1, 2]) == {1, 2}


def test_a_file_that_cannot_be_opened_leaves_no_descriptor(
    opened: Callable[..., Blocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = opened()
    blocks.store([1])
    blocks = opened()

    def fail(*arguments: Any) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(Directory, "open_direct", fail)
        assert not blocks.load([1]).landed.any()
        blocks.settle()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "too many"), OSError(errno.ENOMEM, "none"), MemoryError()])
@pytest.mark.parametrize("place", ["descriptor", "buffer"])
def test_a_process_without_descriptors_or_memory_forgets_no_block(
    place: str, error: Exception, opened: Callable[..., Blocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shortage is no damage: the blocks are there when it is over, and after a restart."""
    blocks = opened()
    blocks.store([1, 2])
    blocks = opened()

    def fail(*arguments: Any) -> Any:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(*((Directory, "open_direct") if place == "descriptor" else (runs, "thread_buffer")), fail)
        load = blocks.load([1, 2])
        assert not load.landed.any()
        assert load.failures == {Reason.TIER_FAILED: 2}, "the tier is left alone for a while"
        blocks.settle()
    assert blocks.held([1, 2]) == {1, 2}
    assert blocks.load([1, 2]).landed.all()
    assert opened().held([1, 2]) == {1, 2}


def test_threads_that_cannot_start_leave_the_directory_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = Blocks(tmp_path, CAPACITY)
    blocks.disk.close()

    def fail(*arguments: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError):
            LocalDisk(tmp_path, CAPACITY, blocks.region)
    LocalDisk(tmp_path, CAPACITY, blocks.region).close()


# one owner


def test_a_second_owner_is_refused_by_name(opened: Callable[..., Blocks]) -> None:
    blocks = opened()
    with pytest.raises(TierError, match=f"in use by process {os.getpid()}") as raised:
        LocalDisk(blocks.directory, CAPACITY, blocks.region)
    assert raised.value.reason is Reason.TIER_IN_USE
    assert blocks.store([1]).landed.all()
    blocks.disk.close()
    LocalDisk(blocks.directory, CAPACITY, blocks.region).close()


def test_a_lock_file_that_was_removed_lets_no_second_owner_in(opened: Callable[..., Blocks]) -> None:
    blocks = opened()
    (blocks.directory / "lock").unlink()
    with pytest.raises(TierError) as raised:
        LocalDisk(blocks.directory, CAPACITY, blocks.region)
    assert raised.value.reason is Reason.TIER_IN_USE


@pytest.mark.parametrize("kind", ["text", "second name"])
def test_a_lock_file_of_another_program_is_left_alone(tmp_path: Path, kind: str) -> None:
    other, directory = tmp_path / "other", tmp_path / "tier"
    directory.mkdir()
    other.write_text("4321\n" if kind == "second name" else '{"dependencies": {}}\n')
    (directory / "lock").hardlink_to(other)
    if kind == "text":
        other.unlink()
    before = (directory / "lock").read_bytes()
    held, lock = open_directory(directory)
    with pytest.raises(TierError) as raised:
        open_directory(directory)
    assert raised.value.reason is Reason.TIER_IN_USE
    os.close(lock)
    held.close()
    assert (directory / "lock").read_bytes() == before


def test_a_full_disk_has_an_owner_too(opened: Callable[..., Blocks], monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = opened()
    blocks.store([1])
    blocks.settle()

    def fail(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", fail)
        blocks = opened()
    assert blocks.load([1]).landed.all()


def test_a_refused_owner_leaves_no_descriptor(opened: Callable[..., Blocks]) -> None:
    blocks = opened()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TierError):
        LocalDisk(blocks.directory, CAPACITY, blocks.region)
    assert len(os.listdir("/proc/self/fd")) == before


def test_only_its_user_may_read_the_directory(opened: Callable[..., Blocks]) -> None:
    blocks = opened()
    blocks.store([1])
    assert blocks.directory.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in blocks.directory.iterdir())


def test_a_directory_of_another_user_is_refused(opened: Callable[..., Blocks], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its user could read the blocks, and place others with right checksums."""
    blocks = opened()
    blocks.store([1])
    blocks.disk.close()
    before = sorted(blocks.directory.iterdir())
    os.chown(blocks.directory, 12345, -1) if not os.geteuid() else monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(TierError, match=r"belongs to user \d+, this process runs as user \d+") as raised:
        LocalDisk(blocks.directory, CAPACITY, blocks.region)
    assert raised.value.reason is Reason.PERMISSION_DENIED
    assert sorted(blocks.directory.iterdir()) == before


def test_a_directory_that_every_user_may_write_is_refused(opened: Callable[..., Blocks]) -> None:
    blocks = opened()
    blocks.disk.close()
    blocks.directory.chmod(0o777)
    with pytest.raises(TierError, match="every user may write") as raised:
        LocalDisk(blocks.directory, CAPACITY, blocks.region)
    assert raised.value.reason is Reason.PERMISSION_DENIED
    LocalDisk(blocks.directory / "inside", CAPACITY, blocks.region).close()


def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path, opened: Callable[..., Blocks]) -> None:
    (tmp_path / "file").write_text("")
    blocks = opened()
    with pytest.raises(TierError) as raised:
        LocalDisk(tmp_path / "file" / "tier", CAPACITY, blocks.region)
    assert raised.value.reason is Reason.TIER_FAILED
    with pytest.raises(TierError, match="is there and is no directory"):
        LocalDisk(tmp_path / "file", CAPACITY, blocks.region)
    with pytest.raises(TierError) as raised:
        LocalDisk(tmp_path / "other", 4096, blocks.region)
    assert raised.value.reason is Reason.INVALID_SETTING


def test_a_header_that_waits_for_the_kernel_holds_up_no_read(
    opened: Callable[..., Blocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = opened(num_threads=2)
    blocks.store([1, 2])
    blocks.settle()
    goes_on, waits, write = threading.Event(), threading.Event(), os.pwrite

    def wait(*arguments: Any) -> int:
        waits.set()
        goes_on.wait(20)
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", wait)
    path = segments(blocks)[0]
    change(path, shape_of(path).cell_offset(blocks.disk._space.held[key_of(2)].cell))
    assert not blocks.load([2]).landed.any()  # its header is cleared, which waits
    assert waits.wait(20)
    assert blocks.load([1]).landed.all()
    goes_on.set()
    blocks.settle()


# a disk that fails


def test_a_tier_says_that_its_file_system_has_less_room_than_it_may_use(
    opened: Callable[..., Blocks], caplog: pytest.LogCaptureFixture
) -> None:
    free = shutil.disk_usage(opened().directory).free
    assert not caplog.records
    too_much = opened(2 * free + CAPACITY)
    [told] = [record.getMessage() for record in caplog.records]
    assert str(too_much.directory) in told
    assert f"may use {format_bytes(2 * free + CAPACITY)} and uses 0 B" in told


def test_a_full_disk_is_a_miss_and_leaves_no_file(opened: Callable[..., Blocks]) -> None:
    """``RLIMIT_FSIZE`` fails like a full disk, when the file is allocated."""
    blocks = opened()
    blocks.store([0])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, limits[1]))
    try:
        store = blocks.store([1, 2, 3], 40_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert store.failures == {Reason.TIER_FULL: 3}
    assert len(list(blocks.directory.iterdir())) == 3
    assert blocks.disk.snapshot()["num_segments"] == 1
    assert blocks.load([0]).landed.all()
    assert blocks.store([5, 6]).landed.all()  # its segment has free cells
    assert blocks.disk.snapshot()["num_stores"] == 0


def test_a_file_that_takes_more_room_than_it_should_is_not_kept(
    opened: Callable[..., Blocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may need more pages to describe a file than the cap allows for."""
    blocks, allocate = opened(), os.posix_fallocate

    def allocate_more(descriptor: int, offset: int, length: int) -> None:
        allocate(descriptor, offset, length + (1 << 19))

    monkeypatch.setattr(os, "posix_fallocate", allocate_more)
    assert blocks.store([1]).failures == {Reason.TIER_FULL: 1}
    assert [path.name for path in blocks.directory.iterdir()] == ["lock"]
    assert blocks.disk.snapshot()["num_segments"] == 0


def test_a_tier_grows_no_more_on_a_full_disk_but_replaces(
    opened: Callable[..., Blocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = opened(segment_bytes=100_000)
    blocks.store(list(range(10)))
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", no_space)
        assert not blocks.store(list(range(100, 110))).landed.all()
        blocks.store([200])
    held = blocks.disk.snapshot()["num_blocks"]
    store = blocks.store(list(range(300, 305)))
    assert store.landed.all()
    assert len(store.evicted) == 5
    assert blocks.disk.snapshot()["num_blocks"] == held
    blocks.disk._grow_again_at = 0.0
    blocks.disk.poll()
    assert not blocks.store(list(range(400, 405))).evicted


def no_space(descriptor: int, offset: int, length: int) -> None:
    """Fail as a full disk."""
    raise OSError(28, "No space left on device")


def test_a_removed_directory_is_a_miss_and_is_not_made_again(opened: Callable[..., Blocks]) -> None:
    blocks = opened()
    blocks.store([1, 2])
    shutil.rmtree(blocks.directory)
    load = blocks.load([1, 2])
    assert load.failures == {Reason.TIER_FAILED: 2}
    assert blocks.held([1, 2]) == set()
    assert blocks.store([3]).failures == {Reason.TIER_FAILED: 1}
    blocks.directory.mkdir()
    assert blocks.store([4], 40_000).failures == {Reason.TIER_FAILED: 1}
    assert not list(blocks.directory.iterdir())
    assert blocks.disk.snapshot()["num_pinned"] == 0


def test_reads_that_fail_are_misses(opened: Callable[..., Blocks], monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = opened()
    blocks.store([1, 2])

    def fail(*arguments: Any) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", fail)
        load = blocks.load([1, 2])
    assert load.failures == {Reason.TIER_FAILED: 2}
    assert load.error is not None
    assert "Input/output error" in str(load.error)
    assert blocks.held([1, 2]) == set()


def test_a_read_that_hangs_ends_and_touches_no_slot_afterwards(
    opened: Callable[..., Blocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = opened(stall_seconds=1.0, num_threads=2)
    blocks.store([1, 2, 3])
    goes_on, read = threading.Event(), SegmentFiles.read

    def hang(*arguments: Any) -> None:
        read(*arguments)
        goes_on.wait(20)

    monkeypatch.setattr(SegmentFiles, "read", hang)
    loads = []
    for number in (1, 2):
        blocks.slab[:] = 0
        load = blocks.disk.prepare_load([key_of(number)], blocks.slots([8192]))
        blocks.wait(load)
        assert load.failures == {Reason.DEADLINE_EXCEEDED: 1}
        loads.append(load)
    # Both threads hang: nothing is promised, and nothing waits.
    assert blocks.disk.snapshot()["num_stalled"] == 2
    assert blocks.held([1, 2, 3]) == set()
    assert blocks.load([3]).failures == {Reason.DEADLINE_EXCEEDED: 1}
    assert blocks.store([4]).failures == {Reason.DEADLINE_EXCEEDED: 1}
    for load in loads:
        blocks.disk.complete_load(load)
    goes_on.set()
    blocks.settle()
    assert not blocks.slab[:8192].any() or blocks.slab[:8192].tobytes() == content(4, 8192)
    monkeypatch.undo()
    assert blocks.held([1, 2, 3]) == {1, 2, 3}
    assert blocks.load([1, 2, 3]).landed.all()
    assert blocks.disk.snapshot()["num_pinned"] == 0


def test_a_write_that_hangs_keeps_its_cell_until_it_ends(
    opened: Callable[..., Blocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = opened(stall_seconds=1.0, num_threads=2, segment_bytes=CAPACITY)
    room = shape_room(blocks)
    goes_on, write = threading.Event(), SegmentFiles.write

    def hang(*arguments: Any) -> None:
        goes_on.wait(20)
        write(*arguments)

    monkeypatch.setattr(SegmentFiles, "write", hang)
    store = blocks.begin_store([1], [8192])
    blocks.wait(store)
    blocks.disk.complete_store(store)
    assert store.failures == {Reason.DEADLINE_EXCEEDED: 1}
    monkeypatch.undo()
    landed = blocks.store(list(range(10, 10 + room))).landed
    assert landed.sum() == room - 1
    goes_on.set()
    blocks.settle()
    assert blocks.load(list(range(10, 10 + room - 1))).landed.all()
    assert not blocks.store([2000]).evicted  # the cell of the write that hung is free again


def test_close_is_bounded_and_a_hanging_thread_keeps_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.tiers.local_disk.CLOSE_SECONDS", 0.3)
    blocks = Blocks(tmp_path, CAPACITY, num_threads=2)
    blocks.store([1])
    goes_on = threading.Event()
    monkeypatch.setattr(SegmentFiles, "read", lambda *arguments: goes_on.wait(20))
    load = blocks.disk.prepare_load([key_of(1)], blocks.slots([8192]))
    time.sleep(0.05)
    began_at = time.monotonic()
    blocks.disk.close()
    blocks.disk.close()
    assert time.monotonic() - began_at < 10.0
    assert load.failures == {Reason.CLOSED: 1}
    with pytest.raises(TierError):
        LocalDisk(tmp_path, CAPACITY, blocks.region)
    goes_on.set()
    while any(thread.name.startswith("kvferry-disk") for thread in threading.enumerate()):
        time.sleep(0.001)


# threads


@dataclass(eq=False)
class Waiting:
    """A task that notes which thread performs it."""

    name: str
    performed: list[tuple[str, str]]
    goes_on: threading.Event

    def perform(self) -> None:
        self.performed.append((threading.current_thread().name, self.name))
        self.goes_on.wait(20)

    def fail(self, error: Exception) -> None:
        raise AssertionError(error)


def test_the_first_thread_takes_stores_first_and_the_others_loads() -> None:
    """So neither waits for ever behind the other, as long as there are two threads."""
    done = deque[Task]()
    workers, performed = Workers("test", done, num_threads=2), list[tuple[str, str]]()
    first, second = threading.Event(), threading.Event()
    workers.submit([Waiting("busy", performed, first), Waiting("busy", performed, first)], is_urgent=True)
    wait_until(lambda: len(performed) >= 2)
    workers.submit([Waiting("load", performed, second) for _ in range(2)], is_urgent=True)
    workers.submit([Waiting("store", performed, second) for _ in range(2)])
    first.set()
    wait_until(lambda: len(performed) >= 4)
    assert set(performed[2:]) == {("test-0", "store"), ("test-1", "load")}
    second.set()
    workers.close()
    assert workers.join(time.monotonic() + 20.0)
    assert len(done) == 6


# verbs


def test_cancel_ends_a_copy_at_once(opened: Callable[..., Blocks], monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = opened()
    blocks.store([1])
    goes_on, read = threading.Event(), SegmentFiles.read

    def wait(*arguments: Any) -> None:
        goes_on.wait(20)
        read(*arguments)

    monkeypatch.setattr(SegmentFiles, "read", wait)
    blocks.slab[:] = 0
    load = blocks.disk.prepare_load([key_of(1)], blocks.slots([8192]))
    blocks.disk.cancel(load)
    assert load.has_ended
    assert load.failures == {Reason.ABORTED: 1}
    assert load in blocks.disk.poll()
    blocks.disk.complete_load(load)
    goes_on.set()
    blocks.settle()
    assert not blocks.slab.any()
    assert blocks.held([1]) == {1}


def test_a_block_is_stored_once(opened: Callable[..., Blocks]) -> None:
    blocks = opened()
    first = blocks.begin_store([1, 2], [8192, 8192])
    assert blocks.disk.look_up([key_of(1)]).tolist() == [Presence.PENDING]
    second = blocks.disk.prepare_store([key_of(2)], blocks.slots([8192]))
    assert second.failures == {Reason.ALREADY_BEING_STORED: 1}
    assert second in blocks.disk.poll()
    blocks.wait(first)
    assert blocks.held([1]) == set()
    blocks.disk.complete_store(first)
    blocks.disk.complete_store(second)
    again = blocks.disk.prepare_store([key_of(1)], blocks.slots([8192]))
    assert again.has_ended
    assert again.landed.all()
    assert blocks.load([1], 4096).failures == {Reason.BLOCK_SIZE_MISMATCH: 1}
    assert blocks.disk.snapshot()["num_blocks"] == 2


def test_errors_of_the_caller_are_raised_and_start_nothing(opened: Callable[..., Blocks]) -> None:
    blocks = opened()
    disk, slots, key = blocks.disk, blocks.slots([8192]), key_of(1)
    for keys, places, reason in (
        ([key, key], blocks.slots([8192, 8192]), Reason.INVALID_REQUEST),
        ([key], blocks.slots([8192, 8192]), Reason.INVALID_REQUEST),
        ([b"short"], slots, Reason.INVALID_REQUEST),
        ([key], Slots.of([blocks.region.base_address - 1], [8192]), Reason.UNREGISTERED_RANGE),
        ([key], Slots.of([blocks.region.base_address + blocks.region.length - 1], [2]), Reason.UNREGISTERED_RANGE),
        ([key], Slots.of([blocks.region.base_address], [blocks.region.length + 1]), Reason.UNREGISTERED_RANGE),
        ([key], Slots.of([2**64 - 1], [2]), Reason.UNREGISTERED_RANGE),
    ):
        for verb in (disk.prepare_load, disk.prepare_store):
            with pytest.raises(TierError) as raised:
                verb(keys, places)
            assert raised.value.reason is reason
    assert disk.snapshot()["num_loads"] == disk.snapshot()["num_stores"] == 0
    store = disk.prepare_store([key], slots)
    with pytest.raises(TierError, match="before its end"):
        disk.complete_store(store)
    blocks.wait(store)
    disk.complete_store(store)
    with pytest.raises(TierError, match="second time"):
        disk.complete_store(store)
    disk.close()
    with pytest.raises(TierError) as raised:
        disk.look_up([key])
    assert raised.value.reason is Reason.CLOSED


def test_a_full_tier_stores_small_blocks_with_little_work(opened: Callable[..., Blocks]) -> None:
    """Thousands of cells in a segment: an eviction must not compute the shape of another segment each time."""
    blocks = opened(40 << 20, segment_bytes=20 << 20)
    for first in range(0, 10_000, 1000):
        blocks.store(list(range(first, first + 1000)), 4096)
    store = blocks.begin_store(list(range(20_000, 20_100)), [4096] * 100)
    assert len(store.evicted) == 100
    blocks.wait(store)
    blocks.disk.complete_store(store)
    keys, slots = [key_of(number) for number in range(30_000, 30_100)], blocks.slots([4096] * 100)
    copies: list[Store] = []
    assert lines_of(lambda: copies.append(blocks.disk.prepare_store(keys, slots))) < 100 * 120
    blocks.wait(copies[0])


def test_look_up_takes_less_than_a_microsecond_for_a_block(opened: Callable[..., Blocks]) -> None:
    blocks = opened(4 << 20)
    blocks.store(list(range(300)))
    keys = [key_of(number) for number in range(600)]
    seconds = []
    for _ in range(20):
        began_at = time.perf_counter()
        blocks.disk.look_up(keys)
        seconds.append(time.perf_counter() - began_at)
    assert min(seconds) / len(keys) < 1e-6
