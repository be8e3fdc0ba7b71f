"""The blocks of a load and of a held prompt: windows, states, and lists without the needed blocks."""

import pytest

from kvferry.errors import HandoffError, Reason
from kvferry.integrations.vllm.scheduler.blocks import (
    GroupShape,
    blocks_to_load,
    blocks_up_to,
    has_every_block,
    has_state,
    held_blocks,
    num_recomputed,
)
from kvferry.layout.shard import CacheKind

FULL = GroupShape(CacheKind.ATTENTION, 16)
WINDOW = GroupShape(CacheKind.SLIDING_WINDOW, 16, 40)
STATE = GroupShape(CacheKind.STATE, 1)


def held(groups: list[GroupShape], listed: list[list[int]], num_tokens: int) -> list[tuple[int, list[int]]]:
    """Return the first token and the ids of what is held of each group."""
    up_to = [ids.tolist() for ids in blocks_up_to(groups, listed, num_tokens)]
    return [(each.first_token, list(each.block_ids)) for each in held_blocks(groups, up_to).values()]


def test_look_ahead_blocks_do_not_move_the_window() -> None:
    """Trimmed to the prompt first, then clipped: blocks behind the prompt are neither loaded nor held."""
    [blocks] = blocks_to_load([WINDOW], [16], (0, 79), [[0, 0, 3, 4, 5, 6, 7, 8]])
    assert (blocks.first_token, blocks.last_token) == (32, 79)
    assert blocks.destination_ids.tolist() == [3, 4, 5]
    assert blocks.destination_first_token == 32
    assert held([WINDOW], [[9, 8, 7, 6, 5, 4]], 79) == [(32, [7, 6, 5])]


def test_the_window_reaches_the_first_token_that_the_last_one_attends_to() -> None:
    """Behind 80 tokens a window of 17 begins at 64, but the last of them, computed again, attends to 63.

    vLLM may have laid out a null block there, had the load been of all 80.
    """
    window = GroupShape(CacheKind.SLIDING_WINDOW, 16, 17)
    [blocks] = blocks_to_load([window], [16], (0, 79), [[0, 0, 0, 3, 4]])
    assert blocks.first_token == 48
    assert held([window], [[9, 8, 7, 6, 5]], 79) == [(48, [6, 5])]
    assert num_recomputed([FULL, WINDOW]) == 1


def test_a_null_block_within_the_window_is_refused_and_not_held() -> None:
    with pytest.raises(HandoffError, match="this engine has no block number 2 of 5") as refusal:
        blocks_to_load([WINDOW], [16], (0, 79), [[0, 0, 0, 6, 5]])
    assert refusal.value.reason is Reason.INVALID_REQUEST
    for listed, is_whole in (([0, 0, 0, 6, 5], False), ([0, 0, 7, 6, 5], True)):
        assert has_every_block([WINDOW], blocks_up_to([WINDOW], [listed], 79), 79) is is_whole


def test_a_list_that_ends_too_early_is_refused_and_not_held() -> None:
    with pytest.raises(HandoffError, match="this engine has no block number 4 of 4"):
        blocks_to_load([FULL], [16], (0, 79), [[9, 8, 7, 6]])
    assert not has_every_block([FULL], blocks_up_to([FULL], [[9, 8, 7, 6]], 79), 79)


def test_block_sizes_differ_and_the_prefix_hit_is_unaligned() -> None:
    [blocks] = blocks_to_load([FULL], [64], (48, 100), [[1, 2, 3, 4, 5, 6, 7]])
    assert (blocks.first_token, blocks.last_token, blocks.destination_first_token) == (48, 100, 48)
    assert blocks.destination_ids.tolist() == [4, 5, 6, 7]


def test_a_state_is_the_last_block_of_each_list() -> None:
    full, state = blocks_to_load([FULL, STATE], [16, 1], (0, 20), [[1, 2], [0, 5]])
    assert (full.num_tokens, state.num_tokens) == (20, 1)
    assert state.destination_ids.tolist() == [5]
    assert held([FULL, STATE], [[9, 8], [0, 3]], 20) == [(0, [9, 8]), (0, [3])]
    assert has_state([FULL, STATE])
    assert not has_state([FULL, WINDOW])
    assert num_recomputed([FULL, STATE]) == 1


@pytest.mark.parametrize("lost", [[], [0]])
def test_a_lost_state_is_refused_and_not_held(lost: list[int]) -> None:
    with pytest.raises(HandoffError, match="this engine has no state"):
        blocks_to_load([FULL, STATE], [16, 1], (0, 20), [[1, 2], lost])
    assert not has_every_block([FULL, STATE], blocks_up_to([FULL, STATE], [[9, 8], lost], 20), 20)


@pytest.mark.parametrize(
    ("source_block_sizes", "destination_ids"), [([16], [[1, 2], [5]]), ([16, 1], [[1, 2]])], ids=str
)
def test_unequal_numbers_of_groups_are_refused(source_block_sizes: list[int], destination_ids: list[list[int]]) -> None:
    with pytest.raises(HandoffError, match="blocks of 1 cache groups, this engine has 2") as refusal:
        blocks_to_load([FULL, STATE], source_block_sizes, (0, 20), destination_ids)
    assert refusal.value.reason is Reason.GROUP_MISMATCH
