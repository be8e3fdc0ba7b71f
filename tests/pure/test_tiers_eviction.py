"""LRU and S3-FIFO evict what libCacheSim evicts, and never a pinned block."""

import libcachesim
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.tiers.eviction import Eviction, EvictionPolicy, make_policy


def key(number: int) -> bytes:
    return number.to_bytes(48, "big")


def misses(eviction: Eviction, trace: list[int], num_blocks: int) -> list[int]:
    """Return the requests of a trace, by position, that a tier of ``num_blocks`` blocks misses."""
    policy, held, missed = make_policy(eviction, num_blocks), set[bytes](), []
    for position, number in enumerate(trace):
        if key(number) in held:
            policy.use([key(number)])
            continue
        missed.append(position)
        if len(held) == num_blocks:
            held.difference_update(policy.evict(1, lambda _: False))
        policy.insert([key(number)])
        held.add(key(number))
        assert len(held) <= num_blocks
    return missed


def misses_of_libcachesim(eviction: Eviction, trace: list[int], num_blocks: int) -> list[int]:
    policies = {Eviction.LRU: libcachesim.LRU, Eviction.S3_FIFO: libcachesim.S3FIFO}
    cache = policies[eviction](cache_size=num_blocks)
    requests = [libcachesim.Request(obj_id=number, obj_size=1) for number in trace]
    return [position for position, request in enumerate(requests) if not cache.get(request)]


def traces() -> dict[str, list[int]]:
    generator = np.random.default_rng(5)
    skewed = (generator.zipf(1.2, 6000) % 400).tolist()
    scans = [number for start in range(0, 2000, 100) for number in (*range(start, start + 100), *range(15))]
    loop = list(range(90)) * 30
    drawn = generator.integers(0, 150, 6000).tolist()
    return {"skewed": skewed, "scans over shared prefixes": scans, "loop": loop, "uniform": drawn}


@pytest.mark.parametrize("num_blocks", [20, 37, 80, 200])
@pytest.mark.parametrize("eviction", list(Eviction))
@pytest.mark.parametrize("trace", traces().values(), ids=traces().keys())
def test_misses_are_those_of_libcachesim(trace: list[int], eviction: Eviction, num_blocks: int) -> None:
    found = misses(eviction, trace, num_blocks)
    assert found == misses_of_libcachesim(eviction, trace, num_blocks)
    assert len(found) > 0


def test_s3_fifo_keeps_shared_prefixes_that_a_scan_drives_out_of_an_lru() -> None:
    """Three requests between two long prompts: the reason to have a second policy."""
    shared = [*range(10)] * 3
    trace = [number for start in range(100, 3000, 100) for number in (*range(start, start + 90), *shared)]
    lost = {eviction: sum(trace[at] < 10 for at in misses(eviction, trace, num_blocks=60)) for eviction in Eviction}
    assert lost[Eviction.LRU] == 290
    assert lost[Eviction.S3_FIFO] == 15, "10 of them for the first time"


@pytest.mark.parametrize("eviction", list(Eviction))
@given(st.data())
def test_a_pinned_block_stays_and_keeps_its_place(eviction: Eviction, data: st.DataObject) -> None:
    """Two policies see the same; one of them skips pinned blocks first, and then both evict in the same order."""
    numbers = st.integers(0, 30)
    first, second = make_policy(eviction, 31), make_policy(eviction, 31)
    for policy in (first, second):
        policy.insert(map(key, range(31)))
    for used in data.draw(st.lists(numbers, max_size=60)):
        for policy in (first, second):
            policy.use([key(used)])
    pinned = set(map(key, data.draw(st.sets(numbers, min_size=1))))
    victims = first.evict(3, pinned.__contains__)
    assert not pinned & set(victims)
    assert len(victims) == min(3, 31 - len(pinned))
    assert set(first.evict(31, lambda _: False)) == set(map(key, range(31))) - set(victims)
    assert set(second.evict(31, lambda _: False)) == set(map(key, range(31)))
    assert is_empty(first)
    assert is_empty(second)


def is_empty(policy: EvictionPolicy) -> bool:
    return not policy.evict(1, lambda _: False)


def test_pinned_blocks_keep_their_places_in_an_lru() -> None:
    policy = make_policy(Eviction.LRU, 5)
    policy.insert(map(key, range(5)))
    assert policy.evict(1, {key(0), key(1)}.__contains__) == [key(2)]
    assert policy.evict(9, lambda _: False) == [key(0), key(1), key(3), key(4)]


def test_pinned_blocks_keep_their_places_in_both_queues_of_s3_fifo() -> None:
    policy = make_policy(Eviction.S3_FIFO, 20)
    policy.insert(map(key, range(20)))  # 0 and 1 fill the small queue, 2 to 19 go to the main queue
    assert policy.evict(3, {key(0), key(2), key(3)}.__contains__) == [key(1), key(4), key(5)]
    assert policy.evict(3, lambda _: False) == [key(0), key(2), key(3)]


@pytest.mark.parametrize("eviction", list(Eviction))
def test_a_removed_block_leaves_nothing_behind(eviction: Eviction) -> None:
    policy = make_policy(eviction, 20)
    policy.insert(map(key, range(10)))
    policy.use(map(key, range(5)))
    policy.remove(map(key, range(3, 10)))
    assert sorted(policy.evict(20, lambda _: False)) == list(map(key, range(3)))
    policy.insert([key(7)])
    assert policy.evict(1, lambda _: False) == [key(7)]


def test_ghosts_are_bounded() -> None:
    """Stores that are aborted evict and insert nothing."""
    policy = make_policy(Eviction.S3_FIFO, 100)
    for start in range(0, 10_000, 100):
        policy.insert(map(key, range(start, start + 100)))
        policy.evict(100, lambda _: False)
    assert len(vars(policy)["_ghosts"]) <= 190


def test_a_used_block_that_moves_to_a_main_queue_of_pinned_blocks_can_still_go() -> None:
    policy = make_policy(Eviction.S3_FIFO, 20)
    policy.insert(map(key, range(20)))  # 0 and 1 fill the small queue
    assert policy.evict(1, lambda _: False) == [key(0)]
    policy.insert([key(0)])  # its ghost is remembered: now the main queue has more than its share
    policy.use([key(1)])
    policy.use([key(1)])
    assert policy.evict(2, {key(0), *map(key, range(2, 20))}.__contains__) == [key(1)]
