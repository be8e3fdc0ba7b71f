"""Both flows through one engine: vLLM's own scheduler, the connector and real bytes."""

from collections.abc import Callable

import pytest

pytest.importorskip("vllm")

from .flows import FLOWS, Flow, to_decode, to_prefill
from .handoff_engine import HandoffEngine, make_engine
from .test_offload_names import LAYERS, attention, window

__all__ = ["make_engine"]

MODELS = {
    "full attention": dict.fromkeys(LAYERS, attention()),
    "windows": {name: window() if index % 2 else attention() for index, name in enumerate(LAYERS)},
}
PROMPT = [3 * index for index in range(70)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("flow", FLOWS)
def test_a_handed_over_prompt_gives_the_tokens_of_one_engine(
    flow: Flow, model: str, make_engine: Callable[..., HandoffEngine]
) -> None:
    prefill, decode = make_engine(MODELS[model]), make_engine(MODELS[model], "BHLNC", num_blocks=60)
    answered = prefill.ask("p", PROMPT, to_prefill(flow), max_tokens=1)
    assert bool(answered.params) is (flow == "sequential"), "a router's transfer is not named in an answer"
    answer = decode.ask("d", PROMPT, to_decode(flow, prefill, answered.params))
    assert not answer.has_failed
    assert answer.tokens == decode.tokens_without_cache(PROMPT, 3)
    assert decode.num_computed <= 4, "the decode engine computes the last token of the prompt, and its own"
