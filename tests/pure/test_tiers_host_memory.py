"""Host memory: when a key is visible, what is never evicted, and that nothing leaks."""

import ctypes
import errno
import itertools
import multiprocessing
import os
import resource
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from kvferry.errors import Reason, TierError
from kvferry.layout.shard import CacheKind, Shard
from kvferry.layout.slab import slab_shard
from kvferry.tiers import slab_memory
from kvferry.tiers.host_memory import HostMemory, HostStore, slots_that_fit
from kvferry.tiers.protocol import MAX_BATCH, Presence
from kvferry.tiers.slab_memory import SlabHandle, SlabMemory, available_bytes

from ..counted_work import lines_of
from .arrangements import attention, hybrid

BASE = 1 << 40


def key(number: int) -> bytes:
    return number.to_bytes(48, "big")


def keys(*numbers: int) -> list[bytes]:
    return list(map(key, numbers))


def slab(num_blocks: Mapping[str, int]) -> Shard:
    ranks = [hybrid(0, 1)] if "state" in num_blocks else [attention(0, 1, ["0", "1"])]
    return slab_shard(ranks, num_blocks, base_address=BASE)


def host_memory(num_blocks: int = 4) -> HostMemory:
    return HostMemory(slab({"full": num_blocks}))


def store(host: HostMemory, *numbers: int, group: str = "full") -> HostStore:
    """Store blocks whole; return the completed store."""
    prepared = host.prepare_store(group, keys(*numbers), num_parts=1)
    if prepared.keys:
        host.land(prepared, 0)
    host.complete_store(prepared)
    return prepared


def presences(host: HostMemory, *numbers: int) -> str:
    """Return a letter for each key: a(bsent), h(eld), p(ending)."""
    found = [Presence(one) for one in host.look_up(keys(*numbers))]
    return "".join(one.name[0].lower() for one in found)


def refusal(call: object, *args: object, **named: object) -> Reason:
    with pytest.raises(TierError) as caught:
        call(*args, **named)  # type: ignore[operator]
    return caught.value.reason


def in_use(host: HostMemory) -> tuple[int, int, int]:
    found = host.snapshot()
    return found["num_pinned"], found["num_loads"], found["num_stores"]


def test_a_key_is_visible_only_after_all_parts_have_landed() -> None:
    host = host_memory()
    prepared = host.prepare_store("full", keys(1, 2), num_parts=3)
    for part in (2, 0):
        host.land(prepared, part)
        assert presences(host, 1, 2) == "pp"
        assert not prepared.has_ended
        assert refusal(host.complete_store, prepared) is Reason.INVALID_REQUEST
        assert host.prepare_load(keys(1, 2)).keys == []
    host.land(prepared, 1)
    assert presences(host, 1, 2) == "pp", "visible after complete_store and not before"
    host.complete_store(prepared)
    assert presences(host, 1, 2, 3) == "hha"


def test_a_block_of_which_one_part_is_lost_is_not_visible() -> None:
    host = host_memory()
    prepared = host.prepare_store("full", keys(1, 2, 3), num_parts=2)
    host.land(prepared, 0, np.array([True, False, True]))
    host.land(prepared, 1, np.array([True, True, False]))
    host.complete_store(prepared)
    assert presences(host, 1, 2, 3) == "haa"
    assert prepared.failures == {Reason.TRANSFER_FAILED: 2}
    assert host.snapshot()["groups"] == {"full": {"free": 3, "visible": 1, "being_stored": 0}}


@pytest.mark.parametrize("num_flags", [0, 1, 3])
def test_a_part_says_of_each_block_whether_it_has_landed(num_flags: int) -> None:
    """One flag for two blocks must not count for both."""
    host = host_memory()
    prepared = host.prepare_store("full", keys(1, 2), num_parts=1)
    assert refusal(host.land, prepared, 0, np.ones(num_flags, np.bool_)) is Reason.INVALID_REQUEST
    host.land(prepared, 0, np.array([True, False]))
    host.complete_store(prepared)
    assert presences(host, 1, 2) == "ha"


def test_a_slot_is_free_only_after_every_part_has_reported() -> None:
    """A part that is late must not write into a slot that another block has got."""
    host = host_memory(2)
    aborted = host.prepare_store("full", keys(1, 2), num_parts=2)
    host.cancel(aborted)
    host.land(aborted, 1)
    assert host.prepare_store("full", keys(3), num_parts=1).failures == {Reason.TIER_FULL: 1}
    host.land(aborted, 0)
    assert aborted.has_ended
    host.complete_store(aborted)
    assert presences(host, 1, 2) == "aa"
    assert aborted.failures == {Reason.ABORTED: 2}
    assert len(store(host, 3, 4).keys) == 2


def test_two_stores_of_one_key_at_a_time() -> None:
    host = host_memory()
    first = host.prepare_store("full", keys(1, 2), num_parts=1)
    second = host.prepare_store("full", keys(2, 3, 2), num_parts=1)
    assert (first.keys, second.keys) == (keys(1, 2), keys(3))
    assert second.failures == {Reason.ALREADY_BEING_STORED: 1}
    assert not set(first.slots.addresses.tolist()) & set(second.slots.addresses.tolist())
    for prepared in (first, second):
        host.land(prepared, 0)
        host.complete_store(prepared)
    again = host.prepare_store("full", keys(1, 2, 3), num_parts=1)
    assert (again.keys, dict(again.failures), again.has_ended) == ([], {}, True)


def test_mooncake_850_blocks_in_use_are_never_evicted() -> None:
    host = host_memory(4)
    store(host, 1, 2)
    loads = [host.prepare_load(keys(1)), host.prepare_load(keys(1))]
    being_stored = host.prepare_store("full", keys(5), num_parts=1)
    assert store(host, 6, 7, 8, 9).keys == keys(6, 7), "one free slot, one evicted block"
    assert presences(host, 1, 2, 5, 6, 7) == "haphh"
    for number in range(10, 30):
        store(host, number)
        host.complete_load(loads.pop()) if number == 20 else None
    assert presences(host, 1, 5) == "hp", "one pin is left"
    host.complete_load(loads.pop())
    host.land(being_stored, 0)
    host.complete_store(being_stored)
    assert store(host, 30, 31, 32, 33).keys == keys(30, 31, 32, 33), "nothing in use is left"
    assert in_use(host) == (0, 0, 0)


def test_many_blocks_in_use_cost_a_store_little() -> None:
    """20,000 blocks that are next to go are in use: the store of one block takes no step for each of them."""
    host = host_memory(30_000)
    store(host, *range(30_000))
    load = host.prepare_load(keys(*range(10_000, 30_000)), counts_as_use=False)
    for number in range(30_000, 30_010):
        assert lines_of(partial(store, host, number)) < 500
    rest = host.prepare_load(keys(*range(10_000), *range(30_000, 30_010)), counts_as_use=False)
    assert store(host, 50_000).failures == {Reason.TIER_FULL: 1}
    host.complete_load(load)
    host.complete_load(rest)
    assert store(host, *range(60_000, 90_000)).keys == keys(*range(60_000, 90_000)), "no block stays in use"


def test_what_is_evicted_is_reported_and_least_recently_used() -> None:
    host = host_memory(4)
    store(host, 1, 2, 3, 4)
    host.complete_load(host.prepare_load(keys(3, 4)))
    assert store(host, 5, 6).evicted == keys(2, 1), "of one prefix the last block goes first"
    host.complete_load(host.prepare_load(keys(4), counts_as_use=False))
    assert store(host, 7).evicted == keys(4), "a copy to a lower tier is no use"
    assert host.snapshot()["num_evicted"] == 3


def test_a_prefix_that_was_stored_in_steps_loses_its_last_blocks_first() -> None:
    host = host_memory(6)
    store(host, 1, 2)
    store(host, 3, 4)
    store(host, 5, 6)
    host.touch(keys(1, 2, 3, 4, 5, 6, 99))
    assert store(host, 7, 8, 9).evicted == keys(6, 5, 4)


def test_a_store_does_not_evict_the_prefix_that_it_goes_on() -> None:
    host = host_memory(2)
    store(host, 1, 2)
    longer = store(host, 1, 2, 3)
    assert (longer.keys, longer.evicted, dict(longer.failures)) == ([], [], {Reason.TIER_FULL: 1})
    assert store(host, 4, 5).evicted == keys(2, 1), "they are kept for that store only"
    store(host, 4, 5, 6)
    assert store(host, 7).evicted == keys(5)


def test_a_load_says_which_blocks_it_has() -> None:
    host = host_memory()
    store(host, 1, 2, 3)
    load = host.prepare_load(keys(2, 9, 3, 2))
    assert load.keys == keys(2, 3)
    assert load.failures == {Reason.BLOCK_MISSING: 1}
    assert load.has_ended
    assert in_use(host) == (2, 1, 0)
    host.complete_load(load)
    assert refusal(host.complete_load, load) is Reason.INVALID_REQUEST
    assert in_use(host) == (0, 0, 0)


def test_slots_are_the_blocks_of_the_slab() -> None:
    """Every slot of both groups, once: addresses in the order of block ids, no gap, capacity exact to the byte."""
    shard = slab({"full": 3, "state": 5})
    host = HostMemory(shard)
    places = []
    for first, (group, count) in enumerate((("full", 3), ("state", 5))):
        prepared = host.prepare_store(group, keys(*(100 * first + one for one in range(count))), num_parts=1)
        assert sorted(prepared.block_ids.tolist()) == list(range(count))
        stride = next(one for one in shard.groups if one.name == group).components[0].block_stride
        first = min(part.layer_offsets[0] for one in shard.groups if one.name == group for part in one.components)
        assert (prepared.slots.addresses - BASE).tolist() == (first + stride * prepared.block_ids).tolist()
        places += zip(prepared.slots.addresses.tolist(), prepared.slots.lengths.tolist(), strict=True)
    places.sort()
    assert [begin + length for begin, length in places] == [
        *(begin for begin, _ in places[1:]),
        BASE + region_of(shard),
    ]
    assert host.snapshot()["num_bytes"] == host.capabilities.capacity_bytes == region_of(shard)


def region_of(shard: Shard) -> int:
    return shard.regions[0].length


def test_groups_have_slots_of_their_own() -> None:
    host = HostMemory(slab({"full": 1, "state": 2}))
    store(host, 1)
    store(host, 2, 3, group="state")
    assert store(host, 4, group="state").evicted == keys(3), "no slot of the other group"
    assert presences(host, 1, 2, 3, 4) == "hhah"
    load = host.prepare_load(keys(2, 1))
    assert store(host, 5, 6, group="state").evicted == keys(4)
    assert sorted(load.slots.lengths.tolist()) == sorted({int(one) for one in load.slots.lengths})
    assert store(host, 7).failures == {Reason.TIER_FULL: 1}


def test_of_a_prefix_in_two_groups_the_last_blocks_go_first() -> None:
    host = HostMemory(slab({"full": 2, "state": 3}))
    store(host, 1)
    store(host, 2)
    for number in (11, 12, 13):
        store(host, number, group="state")
    host.touch(keys(1, 11, 2, 12, 13))
    assert store(host, 3).evicted == keys(2)
    assert store(host, 14, 15, group="state").evicted == keys(13, 12)


def test_groups_of_equal_slots_share_them_by_use() -> None:
    """A window group takes what it needs; blocks of both groups go in one order, and no slot has two."""
    rank = attention(0, 1, ["0", "1"])
    window = attention(0, 1, ["2", "3"], group_name="window", kind=CacheKind.SLIDING_WINDOW, window=8)
    rank = replace(rank, groups=(*rank.groups, *window.groups))
    shard = slab_shard([rank], {"full": 4, "window": 4}, base_address=BASE)
    host = HostMemory(shard)
    assert host.num_slots == 8
    assert len(store(host, *range(7)).keys) == 7
    in_window = store(host, 100, group="window")
    assert host.snapshot()["groups"] == {
        "full": {"free": 0, "visible": 7, "being_stored": 0},
        "window": {"free": 0, "visible": 1, "being_stored": 0},
    }
    assert in_window.slots.addresses.tolist() == [BASE + 7 * int(in_window.slots.lengths[0])]
    host.touch(keys(6))
    store(host, 101, 102, group="window")
    assert presences(host, *range(7), 100, 101, 102) == "hhhhaahhhh"
    places = host.prepare_load(keys(*range(4), 6, 100, 101, 102))
    assert len(set(places.slots.addresses.tolist())) == 8
    assert (places.slots.addresses == BASE + places.block_ids * in_window.slots.lengths[0]).all()
    assert host.snapshot()["num_bytes"] == region_of(shard)


def test_wrong_calls_are_refused() -> None:
    host = host_memory()
    prepared = host.prepare_store("full", keys(1), num_parts=1)
    assert refusal(host.land, prepared, 1) is Reason.INVALID_REQUEST
    host.land(prepared, 0)
    assert refusal(host.land, prepared, 0) is Reason.INVALID_REQUEST
    host.complete_store(prepared)
    assert refusal(host.complete_store, prepared) is Reason.INVALID_REQUEST
    assert refusal(host.prepare_store, "other", keys(1), num_parts=1) is Reason.INVALID_REQUEST
    assert refusal(host.prepare_store, "full", keys(1), num_parts=0) is Reason.INVALID_REQUEST
    assert refusal(host.prepare_store, "full", [b"short"], num_parts=1) is Reason.INVALID_REQUEST
    assert refusal(host.look_up, [key(1)] * (MAX_BATCH + 1)) is Reason.INVALID_REQUEST
    assert host.look_up([b"short"]).tolist() == [Presence.ABSENT]


def test_a_closed_tier_fails_its_copies_and_refuses_calls() -> None:
    host = host_memory()
    store(host, 1)
    load, prepared = host.prepare_load(keys(1)), host.prepare_store("full", keys(2), num_parts=1)
    host.close()
    host.close()
    for copy in (load, prepared):
        assert copy.has_ended
        assert not copy.landed.any()
        assert copy.failures == {Reason.CLOSED: 1}
    assert refusal(host.look_up, keys(1)) is Reason.CLOSED
    assert refusal(host.complete_load, load) is Reason.CLOSED
    assert refusal(host.land, prepared, 0) is Reason.CLOSED


def test_a_look_up_takes_less_than_a_microsecond_a_block() -> None:
    host = host_memory(10_000)
    asked = keys(*range(20_000))
    store(host, *range(10_000))
    quickest = min(_seconds(host, asked) for _ in range(5))
    assert quickest / len(asked) < 1e-6


def _seconds(host: HostMemory, asked: list[bytes]) -> float:
    began_at = time.perf_counter()
    host.look_up(asked)
    return time.perf_counter() - began_at


def test_a_capacity_in_bytes_is_never_exceeded() -> None:
    sizes = {"full": 1000, "window": 24}
    assert slots_that_fit(10_240, sizes) == {"full": 10, "window": 10}
    assert slots_that_fit(10_239, sizes) == {"full": 9, "window": 9}
    assert refusal(slots_that_fit, 1023, sizes) is Reason.TIER_FULL


# The memory of a slab.


def huge_bytes(slab: SlabMemory) -> int:
    """Return the bytes of a mapping that lie in huge pages, as the kernel counts them."""
    begin = f"{slab.region.base_address:x}-"
    with open("/proc/self/smaps") as lines:
        next(line for line in lines if line.startswith(begin))
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("ShmemPmdMapped:"))


def _write(handle: SlabHandle) -> None:
    rank = SlabMemory.attach(handle)
    ctypes.memmove(rank.region.base_address + 4_000_000, b"rank", 4)
    os._exit(0 if huge_bytes(rank) else 3)


def test_another_process_maps_the_same_memory_in_huge_pages() -> None:
    memory = SlabMemory(9 << 20)
    try:
        child = multiprocessing.get_context("spawn").Process(target=_write, args=(memory.handle,))
        child.start()
        child.join(60)
        assert ctypes.string_at(memory.region.base_address + 4_000_000, 4) == b"rank"
        has_huge_pages = huge_bytes(memory) > 0
        assert child.exitcode == (0 if has_huge_pages else 3), "ranks that attach have huge pages where the owner has"
        assert not has_huge_pages or huge_bytes(memory) == 8 << 20
        assert memory.region.base_address % (2 << 20) == 0
    finally:
        memory.close()


@pytest.mark.parametrize("is_refused", [False, True])
def test_every_page_of_a_slab_exists(is_refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With huge pages, which fill their holes themselves, and without: else a copy could end a process by a signal."""
    if is_refused:
        monkeypatch.setattr(slab_memory, "collapse_to_huge_pages", lambda *_: "EINVAL")
    for length in (100, 2 << 20, (9 << 20) + 100):
        memory = SlabMemory(length)
        assert os.stat(f"/proc/self/fd/{memory.handle.file_descriptor}").st_blocks * 512 >= length
        assert ctypes.string_at(memory.region.base_address, length) == bytes(length)
        assert not (is_refused and huge_bytes(memory))
        memory.close()


@pytest.mark.parametrize("num_allocated", [0, 1, 4])
def test_a_slab_whose_pages_run_out_leaves_nothing(num_allocated: int, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate, calls, before = os.posix_fallocate, itertools.count(), (open_files(), mappings())

    def run_out(*arguments: int) -> None:
        if next(calls) >= num_allocated:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", run_out)
    assert refusal(SlabMemory, 9 << 20) is Reason.TIER_FAILED
    assert (open_files(), mappings()) == before
    monkeypatch.undo()
    assert next(calls) == num_allocated + 1


def test_a_slab_longer_than_files_may_be_is_refused() -> None:
    limits, before = resource.getrlimit(resource.RLIMIT_FSIZE), open_files()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        assert refusal(SlabMemory, 4 << 20) is Reason.TIER_FAILED
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert open_files() == before


def test_a_slab_cannot_be_cut_under_its_mappings() -> None:
    memory = SlabMemory(1 << 20)
    for length in (0, 2 << 20):
        with pytest.raises(PermissionError):
            os.truncate(f"/proc/self/fd/{memory.handle.file_descriptor}", length)
    memory.close()


def test_another_file_or_process_is_not_the_slab() -> None:
    first, second = SlabMemory(1 << 20), SlabMemory(1 << 20)
    handle = first.handle
    swapped = SlabHandle(handle.process_id, second.handle.file_descriptor, handle.inode, handle.length)
    assert refusal(SlabMemory.attach, swapped) is Reason.PEER_CHANGED
    first.close()
    first.close()
    assert refusal(SlabMemory.attach, handle) is Reason.PEER_CHANGED
    second.close()


def test_a_slab_larger_than_the_available_memory_is_refused_before_a_page_is_taken() -> None:
    """Otherwise the kernel kills processes for memory, and not only this one."""
    available, open_files = available_bytes(), len(os.listdir("/proc/self/fd"))
    assert refusal(SlabMemory, 2 * available) is Reason.TIER_FAILED
    assert len(os.listdir("/proc/self/fd")) == open_files


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    with open("/proc/self/maps") as lines:
        return sum(1 for _ in lines)


@pytest.mark.parametrize("num_mapped", [0, 1])
def test_a_slab_that_cannot_be_mapped_leaves_nothing(num_mapped: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its file nor the range of addresses that was kept for it, in the owner and in a rank."""
    memory = SlabMemory(1 << 20)
    handle, libc = memory.handle, vars(slab_memory)["_libc"]
    mmap, calls, before = libc.mmap, itertools.count(), (open_files(), mappings())

    class Refusing:
        munmap = libc.munmap

        @staticmethod
        def mmap(*arguments: object) -> object:
            return mmap(*arguments) if next(calls) < num_mapped else ctypes.c_void_p(-1).value

    for open_slab in (lambda: SlabMemory(1 << 20), lambda: SlabMemory.attach(handle)):
        calls = itertools.count()
        monkeypatch.setattr(slab_memory, "_libc", Refusing)
        assert refusal(open_slab) is Reason.TIER_FAILED
        monkeypatch.undo()
        assert (open_files(), mappings()) == before
    memory.close()


def test_the_limit_of_a_control_group_holds_and_the_page_cache_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that has read its weights has filled the group with page cache."""
    monkeypatch.setattr(slab_memory, "_CONTROL_GROUPS", str(tmp_path))
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes() > 1 << 22
    (tmp_path / "memory.max").write_text(f"{1 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{1 << 20}\n")
    (tmp_path / "memory.stat").write_text("anon 524288\ninactive_anon 9\ninactive_file 300000\nactive_file 224288\n")
    assert available_bytes() == 524_288
