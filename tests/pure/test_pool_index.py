"""What an engine knows of the pool: own blocks, answers, and blocks on their way out."""

import time
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.tiers.pool.index import ABSENT_SECONDS, HELD_SECONDS, PoolIndex, allocated_bytes
from kvferry.tiers.protocol import Presence

A, B, C, D = b"a", b"b", b"c", b"d"
SIZE = 4096 - 72
NOTHING: frozenset[bytes] = frozenset()


def index_with(*owned: bytes, room: int = 3) -> PoolIndex:
    index = PoolIndex(room * 4096)
    for key in owned:
        assert index.reserve(key, SIZE, NOTHING)
        index.publish(key)
    return index


def found(index: PoolIndex, *keys: bytes) -> list[int]:
    return [int(presence) for presence in index.look_up(keys)[0]]


@pytest.mark.parametrize(
    ("block", "occupied"),
    [(65536 - 72, 65536), (65536 - 71, 73728), (73728 - 72, 73728), (2 << 20, 9 << 18), (1, 80), (4096 - 72, 4096)],
)
def test_sizes_are_those_of_the_allocator(block: int, occupied: int) -> None:
    assert allocated_bytes(block) == occupied


def test_the_pool_is_asked_once_for_a_block() -> None:
    index = index_with(A)
    assert index.look_up([A, B, C, B])[1] == [B, C]
    assert index.look_up([A, B, C, D])[1] == [D]
    index.answer([B, C], [True, False], now=0.0)
    assert found(index, A, B, C, D) == [Presence.HELD, Presence.HELD, Presence.ABSENT, Presence.PENDING]
    index.cannot_answer([D])
    assert index.look_up([D])[1] == [D]


def test_answers_are_believed_for_a_while() -> None:
    index = index_with()
    index.look_up([A, B])
    index.answer([A, B], [True, False], now=0.0)
    index.expire(ABSENT_SECONDS - 0.01)
    assert found(index, A, B) == [Presence.HELD, Presence.ABSENT]
    index.expire(ABSENT_SECONDS)
    assert index.look_up([A, B])[1] == [B]
    index.expire(HELD_SECONDS - 0.01)
    assert index.holds(A)
    index.expire(HELD_SECONDS)
    assert index.look_up([A])[1] == [A]


def test_a_late_answer_changes_nothing_that_is_known_now() -> None:
    """A block was asked for, and stored before the answer came."""
    index = index_with()
    index.look_up([A, B])
    index.reserve(A, SIZE, NOTHING)
    index.publish(A)
    index.reserve(B, SIZE, NOTHING)
    index.answer([A, B], [False, False], now=0.0)
    assert found(index, A, B) == [Presence.HELD, Presence.PENDING]
    index.expire(100.0)
    assert found(index, A, B) == [Presence.HELD, Presence.PENDING]


def test_the_least_recently_used_own_block_goes() -> None:
    index = index_with(A, B, C)
    index.use([A])
    assert index.reserve(D, SIZE, NOTHING)
    assert index.evicted == [B]
    assert index.used_bytes == 3 * 4096


def test_pinned_and_kept_blocks_stay() -> None:
    index = index_with(A, B, C)
    index.pin([A])
    assert not index.reserve(D, SIZE, frozenset([B, C]))
    assert index.reserve(D, SIZE, frozenset([B]))
    assert index.evicted == [C]
    index.unpin([A])
    assert index.num_pinned == 0


def test_a_block_on_its_way_out_is_absent_until_it_is_out() -> None:
    index = index_with(A)
    index.forget(A)
    index.leave([A])
    index.expire(1000.0)
    assert index.look_up([A])[1] == [], "nobody asks: the pool may still have it"
    assert found(index, A) == [Presence.ABSENT]
    index.left([A])
    assert index.look_up([A])[1] == [A]


def test_a_block_that_comes_back_while_it_leaves_stays() -> None:
    index = index_with(A)
    index.forget(A)
    index.leave([A])
    index.reserve(A, SIZE, NOTHING)
    index.publish(A)
    index.left([A])
    assert found(index, A) == [Presence.HELD]


def test_a_store_that_failed_while_the_block_leaves() -> None:
    index = index_with(A)
    index.forget(A)
    index.leave([A])
    index.reserve(A, SIZE, NOTHING)
    index.give_back(A)
    assert found(index, A) == [Presence.ABSENT]
    index.left([A])
    assert index.look_up([A])[1] == [A]


def test_a_block_that_leaves_twice_is_absent_until_the_second_removal() -> None:
    index = PoolIndex(1 << 20)
    index.leave([b"a"])
    index.leave([b"a"])
    index.left([b"a"])
    assert index.look_up([b"a"])[0].tolist() == [Presence.ABSENT], "the second removal is under way"
    index.left([b"a"])
    assert index.look_up([b"a"])[1] == [b"a"]


def test_a_block_that_is_being_stored_is_not_forgotten() -> None:
    """A load of another engine's copy of it may fail meanwhile."""
    index = PoolIndex(1 << 20)
    assert index.reserve(b"a", 4000, frozenset())
    index.forget(b"a")
    presences, unknown = index.look_up([b"a"])
    assert (presences.tolist(), unknown) == ([Presence.PENDING], []), "the pool is not asked"
    index.publish(b"a")
    assert index.holds(b"a")


def test_a_block_of_another_engine_uses_no_room() -> None:
    index = index_with()
    index.reserve(A, SIZE, NOTHING)
    index.give_back(A, is_held_by_another=True, now=0.0)
    assert index.used_bytes == 0
    assert found(index, A) == [Presence.HELD]
    assert A not in index.own


def test_a_holder_that_does_not_answer_is_not_asked_for_a_while() -> None:
    index = index_with()
    index.look_up([A])
    index.answer([A], [True], now=0.0)
    index.distrust(A, now=10.0)
    index.expire(10.0 + HELD_SECONDS - 0.01)
    assert found(index, A) == [Presence.ABSENT]
    index.expire(10.0 + HELD_SECONDS)
    assert index.look_up([A])[1] == [A]


def test_an_earlier_answer_does_not_end_a_later_one() -> None:
    """The pool said no, then an engine that stopped turned out to have the block: nobody asks for half a minute."""
    index = index_with()
    index.look_up([A])
    index.answer([A], [False], now=0.0)
    index.reserve(A, SIZE, NOTHING)
    index.give_back(A, is_held_by_another=True, now=0.5)
    index.distrust(A, now=0.6)
    index.expire(ABSENT_SECONDS)
    index.expire(0.5 + HELD_SECONDS)
    assert index.look_up([A])[1] == []
    index.expire(0.6 + HELD_SECONDS)
    assert index.look_up([A])[1] == [A]


def test_the_end_of_an_earlier_answer_changes_nothing_of_an_own_block() -> None:
    """Another engine had the block, lost it, and this engine has stored it since."""
    index = index_with()
    index.look_up([A])
    index.answer([A], [True], now=0.0)
    index.forget(A)
    index.reserve(A, SIZE, NOTHING)
    index.publish(A)
    index.expire(HELD_SECONDS)
    assert index.look_up([A])[1] == []
    index.forget(A)
    assert index.used_bytes == 0


def test_the_end_of_an_earlier_answer_changes_nothing_of_a_block_on_its_way_out() -> None:
    """The pool still has it for a moment, and would say so."""
    index = index_with()
    index.look_up([A])
    index.answer([A], [False], now=0.0)
    index.leave([A])
    index.expire(ABSENT_SECONDS)
    assert found(index, A) == [Presence.ABSENT]
    index.left([A])
    assert index.look_up([A])[1] == [A]


def test_a_question_to_a_pool_that_was_emptied_meanwhile_has_no_answer() -> None:
    index = index_with()
    index.look_up([A])
    index.clear()
    index.answer([A], [True], now=0.0)
    assert index.look_up([A])[1] == [A]


def test_answers_that_are_still_believed_cost_no_poll_anything() -> None:
    """A busy scheduler asks a thousand times a second, and polls twice a step."""
    index = index_with()
    for number in range(30_000):
        key = number.to_bytes(4, "big")
        index.look_up([key])
        index.answer([key], [True], now=number / 1000)
    began_at = time.thread_time()
    for _ in range(100):
        index.expire(HELD_SECONDS - 0.01)
    assert time.thread_time() - began_at < 0.02
    index.expire(2 * HELD_SECONDS)
    assert not index._presence
    assert not index._beliefs


def test_an_emptied_pool_leaves_stores_in_progress_and_pins() -> None:
    index = index_with(A, B)
    index.pin([A])
    index.reserve(C, SIZE, NOTHING)
    index.look_up([D])
    assert sorted(index.clear()) == [A, B]
    assert index.used_bytes == 4096
    assert index.look_up([A, B, C, D])[1] == [A, B, D]
    index.answer([A], [True], now=0.0)
    index.publish(C)
    index.unpin([A])
    assert found(index, A, C) == [Presence.HELD, Presence.HELD]


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["store", "fail", "forget", "use", "clear", "leave", "left"]), st.integers(0, 7)),
    max_size=60,
)


@given(operations=OPERATIONS)
def test_against_a_dictionary(operations: list[tuple[str, int]]) -> None:
    """Own blocks, their order and the bytes in use, with room for four."""
    index, model = PoolIndex(4 * 4096), OrderedDict[bytes, None]()
    for name, number in operations:
        key = bytes([number])
        if name in ("store", "fail") and key not in model and index.reserve(key, SIZE, NOTHING):
            for victim in index.evicted:
                assert victim == model.popitem(last=False)[0]
            index.evicted = []
            if name == "store":
                index.publish(key)
                model[key] = None
            else:
                index.give_back(key)
        elif name == "forget":
            index.forget(key)
            model.pop(key, None)
        elif name == "use" and key in model:
            index.use([key])
            model.move_to_end(key)
        elif name == "clear":
            assert sorted(index.clear()) == sorted(model)
            model.clear()
        elif name == "leave" and key not in model:
            index.leave([key])
        elif name == "left":
            index.left([key])
        assert set(index.own) == set(model)
        assert index.used_bytes == 4096 * len(model)
        keys = [bytes([other]) for other in range(8)]
        held = {other for other in keys if index.holds(other)}
        assert held == set(model)
