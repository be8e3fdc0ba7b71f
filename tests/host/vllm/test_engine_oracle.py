"""Labels written through one engine's own tensor views are found through the other's, each exactly once."""

from typing import Any

import pytest

from .engine_pool import EnginePool, fresh_salt
from .handoffs import ALL_PAIRS, Handoffs, Pair, for_pairs, random_prompt, submission_bytes

pytestmark = pytest.mark.vllm


def move_labels(handoffs: Handoffs, num_tokens: int) -> list[dict[str, Any]]:
    """Label a held prompt's blocks, let the decode engine load them, and return what each of its ranks finds.

    Of several data-parallel ranks all label and the first loads: its workers' answers are those that one gets.
    """
    prompt, salt = random_prompt(num_tokens, num_tokens), fresh_salt()
    params = handoffs.prefill.prefill(prompt, salt)
    held = {"block_ids": params["remote_block_ids"], "num_tokens": params["kvferry"]["num_tokens"]}
    handoffs.prefill.call("oracle_label", {**held, "nonce": salt})
    handoffs.decode.call("oracle_remember", {"nonce": salt})
    handoffs.decode.decode(prompt, params, 1, salt, dp_rank=0)
    return handoffs.decode.call("oracle_find", {"num_tokens": num_tokens, "nonce": salt})


@for_pairs()
def test_labels_arrive_whole_and_nowhere_else(pair: Pair, engine_pool: EnginePool) -> None:
    handoffs = Handoffs.of(pair, engine_pool)
    block_size, logs_before = handoffs.decode.block_size, handoffs.log_ends()
    for num_tokens in (3 * block_size, 2 * block_size + block_size // 2 + 1):
        ranks = move_labels(handoffs, num_tokens)
        assert [rank["problems"] for rank in ranks] == [[]] * (handoffs.decode.tp * handoffs.decode.pp)
        # One scheduler gave all ranks the same blocks; a stage knows those of the groups of which it has layers.
        found = [(group, block_ids) for rank in ranks for group, block_ids in rank["block_ids"].items()]
        assert all(block_ids == dict(found)[group] for group, block_ids in found)
    handoffs.check_released(logs_before)


@for_pairs(*(() if ALL_PAIRS else ("gqa-1-1", "gqa-2-1", "gqa-1-2", "mla-2-1")))
def test_swapped_labels_are_noticed(pair: Pair, engine_pool: EnginePool) -> None:
    handoffs = Handoffs.of(pair, engine_pool)
    num_tokens = 3 * handoffs.decode.block_size
    third = submission_bytes(handoffs, num_tokens) // 12 * 4  # of whole numbers: halves of two can be NaN, which stays
    with handoffs.faults({"swap": {"first": 0, "second": 2 * third, "length": 4096}}):
        ranks = move_labels(handoffs, num_tokens)
    assert all(rank["problems"] for rank in ranks)
