"""A load that fails, under both values of ``kv_load_failure_policy``: an error, or the right tokens computed here."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvferry.errors import Reason

from .handoff_engine import WRONG_BYTES, HandoffEngine, make_engine
from .test_forged_parameters import MODELS, Params, failures_of

__all__ = ["make_engine"]

PROMPT = [(11 * index + 5) % 500 for index in range(75)]
Harm = Callable[[HandoffEngine, Params], AbstractContextManager[None]]


def damage(prefill: HandoffEngine, params: Params) -> AbstractContextManager[None]:
    return prefill.writes_with(WRONG_BYTES)


def end_the_hold(prefill: HandoffEngine, params: Params) -> AbstractContextManager[None]:
    prefill.release()
    prefill.ask("another", [7, 8, 9], {})
    return nullcontext()


def forge(prefill: HandoffEngine, params: Params) -> AbstractContextManager[None]:
    params["remote_engine_id"] = "another"
    return nullcontext()


HARMS: dict[str, tuple[Harm, set[str]]] = {
    "damaged": (damage, {Reason.INTEGRITY_MISMATCH.value}),
    "ended": (end_the_hold, {Reason.LEASE_EXPIRED.value, Reason.SOURCE_CHANGED.value}),
    "forged": (forge, {Reason.WRONG_PARAMETERS.value}),
}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("model", MODELS)
def test_a_failed_load_is_an_error_or_is_computed_in_every_group(
    model: str, policy: str, harm: str, asynchronous: bool, make_engine: Any
) -> None:
    """Nothing that has landed is used, now or by the next prompt with the same beginning, and no block stays."""
    prefill = make_engine(MODELS[model], integrity="full")
    decode = make_engine(
        MODELS[model], num_blocks=60, integrity="full", failure_policy=policy, asynchronous=asynchronous
    )
    do_harm, reasons = HARMS[harm]
    params = prefill.ask("p", PROMPT, {"do_remote_decode": True}, max_tokens=1).params
    with do_harm(prefill, params):
        answer = decode.ask("d", PROMPT, params)
    expected = decode.tokens_without_cache(PROMPT, 3)
    assert (answer.has_failed, answer.tokens) == ((True, []) if policy == "fail" else (False, expected))
    [reason] = failures_of(decode)
    assert reason in reasons
    assert (decode.num_computed == 0) is (policy == "fail")
    assert decode.ask("again", PROMPT, {}).tokens == expected
    assert decode.scheduler.reset_prefix_cache(), "a block is still used"
