"""The order of eviction is that of ``functools.lru_cache``, and no pinned block goes."""

from functools import lru_cache
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvferry.tiers.eviction import LeastRecentlyUsed


def key(number: int) -> bytes:
    return number.to_bytes(48, "big")


def of_blocks(num_blocks: int) -> LeastRecentlyUsed:
    order = LeastRecentlyUsed()
    order.insert(map(key, range(num_blocks)))
    return order


def misses(trace: list[int], num_blocks: int) -> list[int]:
    """Return the requests of a trace, by position, that a tier of ``num_blocks`` blocks misses."""
    order, held, missed = LeastRecentlyUsed(), set[bytes](), []
    for position, number in enumerate(trace):
        if key(number) in held:
            order.use([key(number)])
            continue
        missed.append(position)
        if len(held) == num_blocks:
            held.difference_update(order.evict(1, lambda _: False))
        order.insert([key(number)])
        held.add(key(number))
        assert len(held) <= num_blocks
    return missed


@given(st.lists(st.integers(0, 20), max_size=200), st.integers(1, 12))
def test_misses_are_those_of_the_standard_library(trace: list[int], num_blocks: int) -> None:
    cached = lru_cache(maxsize=num_blocks)(key)
    misses_until = [0]
    for number in trace:
        cached(number)
        misses_until.append(cached.cache_info().misses)
    assert misses(trace, num_blocks) == [at for at, (before, now) in enumerate(pairwise(misses_until)) if now > before]


@given(st.data())
def test_a_pinned_block_stays_and_keeps_its_place(data: st.DataObject) -> None:
    """Two orders see the same; one of them skips pinned blocks first, and then its rest goes in the other's order."""
    numbers = st.integers(0, 30)
    first, second = of_blocks(31), of_blocks(31)
    for used in data.draw(st.lists(numbers, max_size=60)):
        first.use([key(used)])
        second.use([key(used)])
    pinned = set(map(key, data.draw(st.sets(numbers, min_size=1))))
    victims = first.evict(3, pinned.__contains__)
    assert not pinned & set(victims)
    assert len(victims) == min(3, 31 - len(pinned))
    everything = second.evict(31, lambda _: False)
    assert list(first.evict(31, lambda _: False)) == [each for each in everything if each not in victims]
    assert set(everything) == set(map(key, range(31)))


def test_pinned_blocks_keep_their_places() -> None:
    order = of_blocks(5)
    assert order.evict(1, {key(0), key(1)}.__contains__) == [key(2)]
    assert order.evict(9, lambda _: False) == [key(0), key(1), key(3), key(4)]


def test_a_removed_block_leaves_nothing_behind() -> None:
    order = of_blocks(10)
    order.use(map(key, range(5)))
    order.remove(map(key, range(3, 10)))
    assert sorted(order.evict(20, lambda _: False)) == list(map(key, range(3)))
    order.insert([key(7)])
    assert order.evict(1, lambda _: False) == [key(7)]
