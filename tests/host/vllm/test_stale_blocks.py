"""What a block held before its request matters to nobody."""

import pytest

from .engine_pool import EnginePool, Reference
from .handoffs import Handoffs, Pair, check_tokens, for_pairs, random_prompts

pytestmark = pytest.mark.vllm


@for_pairs("granite-1-2", "granite-1-1", "granite-2-1")
def test_keys_that_lie_where_nan_was(pair: Pair, engine_pool: EnginePool, reference: Reference) -> None:
    """NaN behind a prompt's last token, to which attention gives weight 0, makes NaN of the sum and tokens of 0.

    It takes no fault to have it there: a hybrid's keys lie where a state was, often one of another type.
    """
    handoffs = Handoffs.of(pair, engine_pool)
    for engine in (handoffs.prefill, handoffs.decode):
        engine.call("oracle_poison")
    prompts = random_prompts(seed=2, count=8, shortest=7, longest=700)
    check_tokens(handoffs.send_all(prompts), pair.model, prompts, reference)
