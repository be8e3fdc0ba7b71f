"""The blocks of a load: windows, states, and lists without the needed blocks."""

import pytest

from kvferry.errors import HandoffError, Reason
from kvferry.integrations.vllm.scheduler.blocks import GroupShape, blocks_to_load, has_state, num_recomputed
from kvferry.layout.group import CacheKind

FULL = GroupShape(CacheKind.ATTENTION, 16)
WINDOW = GroupShape(CacheKind.SLIDING_WINDOW, 16, 40)
STATE = GroupShape(CacheKind.STATE, 1)


def test_look_ahead_blocks_do_not_move_the_window() -> None:
    """Trimmed to the prompt first, then clipped: blocks behind the prompt are neither loaded nor counted."""
    source, destination = [[9, 8, 7, 6, 5, 4]], [[0, 0, 3, 4, 5, 6, 7, 8]]
    [blocks] = blocks_to_load([WINDOW], [16], (0, 79), source, destination)
    assert (blocks.first_token, blocks.last_token) == (32, 79)
    assert (blocks.source_ids.tolist(), blocks.destination_ids.tolist()) == ([7, 6, 5], [3, 4, 5])
    assert (blocks.source_first_token, blocks.destination_first_token) == (32, 32)


def test_the_window_reaches_the_first_token_that_the_last_one_attends_to() -> None:
    """Behind 80 tokens a window of 17 begins at 64, but the last of them, computed again, attends to 63.

    vLLM may have laid out a null block there, had the load been of all 80.
    """
    [blocks] = blocks_to_load(
        [GroupShape(CacheKind.SLIDING_WINDOW, 16, 17)], [16], (0, 79), [[9, 8, 7, 6, 5]], [[0, 0, 0, 3, 4]]
    )
    assert blocks.first_token == 48
    assert num_recomputed([FULL, WINDOW]) == 1


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_null_block_within_the_window_is_refused(side: str) -> None:
    whole, holed = [[0, 0, 7, 6, 5]], [[0, 0, 0, 6, 5]]
    lists = (holed, whole) if side == "prefill" else (whole, holed)
    with pytest.raises(HandoffError, match=f"{side} engine has no block number 2 of 5") as refusal:
        blocks_to_load([WINDOW], [16], (0, 79), *lists)
    assert refusal.value.reason is Reason.INVALID_REQUEST


def test_a_list_that_ends_too_early_is_refused() -> None:
    with pytest.raises(HandoffError, match="prefill engine has no block number 4 of 4"):
        blocks_to_load([FULL], [16], (0, 79), [[9, 8, 7, 6]], [[1, 2, 3, 4, 5]])


def test_block_sizes_differ_and_the_prefix_hit_is_unaligned() -> None:
    [blocks] = blocks_to_load([FULL], [64], (48, 100), [[9, 8]], [[1, 2, 3, 4, 5, 6, 7]])
    assert (blocks.source_first_token, blocks.destination_first_token) == (0, 48)
    assert (blocks.source_ids.tolist(), blocks.destination_ids.tolist()) == ([9, 8], [4, 5, 6, 7])


def test_a_state_is_the_last_block_of_each_list() -> None:
    full, state = blocks_to_load([FULL, STATE], [16, 1], (0, 20), [[9, 8], [0, 3]], [[1, 2], [0, 5]])
    assert (full.num_tokens, state.num_tokens) == (20, 1)
    assert (state.source_ids.tolist(), state.destination_ids.tolist()) == ([3], [5])
    assert has_state([FULL, STATE])
    assert not has_state([FULL, WINDOW])
    assert num_recomputed([FULL, STATE]) == 1


@pytest.mark.parametrize("lost", [[], [0]])
def test_a_lost_state_is_refused(lost: list[int]) -> None:
    with pytest.raises(HandoffError, match="prefill engine has no state"):
        blocks_to_load([FULL, STATE], [16, 1], (0, 20), [[9, 8], lost], [[1, 2], [5]])


@pytest.mark.parametrize(
    ("source_block_sizes", "source_ids", "destination_ids"),
    [
        ([16], [[9, 8]], [[1, 2], [5]]),
        ([16], [[9, 8], [7]], [[1, 2], [5]]),
        ([16, 1], [[9, 8]], [[1, 2], [5]]),
        ([16, 1], [[9, 8], [7]], [[1, 2]]),
        ([16], None, [[1, 2], [5]]),
    ],
    ids=str,
)
def test_unequal_numbers_of_groups_are_refused(
    source_block_sizes: list[int], source_ids: list[list[int]] | None, destination_ids: list[list[int]]
) -> None:
    with pytest.raises(HandoffError, match="blocks of 1 cache groups, this engine has 2") as refusal:
        blocks_to_load([FULL, STATE], source_block_sizes, (0, 20), source_ids, destination_ids)
    assert refusal.value.reason is Reason.GROUP_MISMATCH
