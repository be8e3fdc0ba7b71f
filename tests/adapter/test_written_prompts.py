"""Prompts that a prefill engine writes, in each flow: vLLM's scheduler, the connector and real bytes, no model."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from .flows import FLOWS, Flow, to_decode, to_prefill
from .handoff_engine import HandoffEngine, make_engine
from .test_forged_parameters import MODELS

__all__ = ["make_engine"]


@pytest.mark.parametrize("integrity", ["off", "full"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("flow", FLOWS)
def test_prompts_are_written_and_give_the_tokens_of_one_engine(
    flow: Flow, model: str, integrity: str, make_engine: Any, tmp_path: Path
) -> None:
    """Prompts of every length around a block, prefix hits, and prompts that ranks learn late."""
    log = tmp_path / "decode"
    prefill = make_engine(MODELS[model], integrity=integrity)
    decode = make_engine(MODELS[model], num_blocks=60, integrity=integrity, transfer_log=str(log))
    lengths = [2, 15, 16, 17, 33, 64, 79, 81, 112]
    for number, length in enumerate(lengths):
        prompt = [(11 * index + 5 * length) % 500 for index in range(length)]
        # A router's transfer of a model with windows is for a prefill engine that generates one token.
        max_tokens = 1 if flow == "concurrent" else 1 + 3 * (number % 2)
        asked = prefill.ask(f"p{number}", prompt, to_prefill(flow, f"x{number}"), max_tokens=max_tokens)
        answer = decode.ask(f"d{number}", prompt, to_decode(flow, prefill, asked.params, f"x{number}"))
        assert not answer.has_failed
        assert answer.tokens == decode.tokens_without_cache(prompt, 3)
        longer = [*prompt, *range(40)]
        asked = prefill.ask(f"q{number}", longer, to_prefill(flow, f"y{number}"), max_tokens=1)
        answer = decode.ask(f"e{number}", longer, to_decode(flow, prefill, asked.params, f"y{number}"))
        assert not answer.has_failed
        assert answer.tokens == decode.tokens_without_cache(longer, 3)
    loads = [json.loads(line) for line in log.with_name(f"{log.name}.rank0").read_text().splitlines()]
    # With windows the decode engine computes the last token, and a single one before it too.
    num_loads = 2 * len(lengths) - ("windows" in model)
    assert [load["error"] for load in loads if "request_id" in load] == [None] * num_loads
    assert_nothing_is_held(prefill)


def assert_nothing_is_held(prefill: HandoffEngine) -> None:
    prefill.release()
    prefill.ask("last", [1, 2, 3], {})
    assert prefill.connector._scheduler._state.holds.num_holds == 0
    writer = prefill.worker._worker._source.writer
    assert writer.is_quiet
    assert not writer._writes._prompts, "a prompt that is not held can still be written"
    assert prefill.scheduler.reset_prefix_cache(), "a block is still used"
