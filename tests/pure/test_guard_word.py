"""The guard word: two holds have one word only if all that they name is the same."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.handoff.guard_word import CLEARED, HeldPrompt, being_written, guard_word, is_cleared
from kvferry.handoff.messages import Handle

NAMED: dict[str, Any] = {
    "engine_id": "engine",
    "epoch": 7,
    "request_id": "r",
    "generation": 3,
    "digest": "prompt",
    "num_tokens": 48,
    "sizes": [16, 16],
    "ids": [[5, 4, 3], [0, 2, 1]],
}


def word_of(**changes: Any) -> bytes:
    named = NAMED | changes
    ids = [np.array(each, dtype=np.int64) for each in named["ids"]]
    prompt = HeldPrompt(named["digest"], named["num_tokens"], named["sizes"], ids)
    return guard_word(named["engine_id"], named["epoch"], Handle(named["request_id"], named["generation"]), prompt)


def test_each_part_changes_the_word_and_no_two_changes_are_alike() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"engine_id": "engine2"},
        {"epoch": 8},
        {"epoch": 3, "generation": 7},
        {"request_id": "r2"},
        {"engine_id": "enginer", "request_id": ""},
        {"generation": 4},
        {"digest": "prompu"},
        {"num_tokens": 47},
        {"sizes": [16, 32]},
        {"ids": [[5, 4], [3, 0, 2, 1]]},
        {"ids": [[5, 4, 3, 0], [2, 1]]},
        {"ids": [[5, 4, 3, 0, 2, 1]]},
        {"ids": [[3, 4, 5], [0, 2, 1]]},
        {"ids": [[5, 5, 5], [0, 2, 1]]},
        {"ids": [[0, 2, 1], [5, 4, 3]]},
        {"ids": [[5, 4, 3], [2, 1]]},
        {"ids": [[5, 4, 3], [0, 2, 1], []]},
    ]
    assert len({word_of(**each) for each in changes}) == len(changes)
    assert word_of(ids=[(5, 4, 3), (0, 2, 1)]) == word_of(), "the type of a list says nothing"


@given(generation=st.integers(0, (1 << 62) - 1), ids=st.lists(st.lists(st.integers(0, (1 << 63) - 1)), max_size=3))
def test_a_word_is_never_cleared_nor_being_written(generation: int, ids: list[list[int]]) -> None:
    word = word_of(generation=generation, ids=ids)
    assert not is_cleared(word)
    assert not is_cleared(being_written(word))
    assert being_written(word) != word
    assert being_written(being_written(word)) == being_written(word)
    halves = np.frombuffer(word, dtype=np.uint64)
    assert (halves % 2 == 1).all(), "no half is ever like that of a cleared word"
    assert np.frombuffer(being_written(word), dtype=np.uint64).tolist() == [halves[0], int(halves[1]) | 1 << 63]


@pytest.mark.parametrize("half", [slice(0, 8), slice(8, 16)])
def test_a_word_that_is_read_while_it_is_cleared_counts_as_cleared(half: slice) -> None:
    torn = bytearray(word_of())
    torn[half] = CLEARED[half]
    assert is_cleared(bytes(torn))
