"""Digests between two engines of vLLM's scheduler and the connector: of what is written and of what has landed."""

from typing import Any

import pytest

pytest.importorskip("vllm")

from kvferry.errors import PlanError, Reason
from kvferry.execution import digests
from kvferry.integrations.vllm.settings import parse_settings

from .handoff_engine import WRONG_BYTES, HandoffEngine, make_engine
from .test_forged_parameters import MODELS

__all__ = ["make_engine"]

INTEGRITIES = ["off", "sample", "full"]
LENGTHS = [2, 15, 16, 17, 33, 64, 81, 112]


def prompt_of(length: int) -> list[int]:
    return [(11 * index + 5 * length) % 500 for index in range(length)]


def take_outcome(engine: HandoffEngine) -> tuple[list[str], int]:
    """Return the reasons of the loads that have failed since the last call, and the bytes that were compared."""
    statistics = engine.worker.get_kv_connector_stats()
    return ([], 0) if statistics is None else ([*statistics.data["failures"]], sum(statistics.data["compared_bytes"]))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("integrity", INTEGRITIES)
@pytest.mark.parametrize("model", MODELS)
def test_right_loads_commit(model: str, integrity: str, asynchronous: bool, make_engine: Any) -> None:
    """With prefix hits in both engines, prompts of every length, and prefill engines that go on."""
    prefill = make_engine(MODELS[model], asynchronous=asynchronous, integrity=integrity)
    decode = make_engine(MODELS[model], num_blocks=60, asynchronous=asynchronous, integrity=integrity)
    total = 0
    for number, length in enumerate([*LENGTHS, 112, 113, 128]):
        prompt = prompt_of(length) if length < 113 else [*prompt_of(112), *range(length - 112)]
        asked = prefill.ask(f"p{number}", prompt, {"do_remote_decode": True}, max_tokens=1 + 3 * (number % 2))
        answer = decode.ask(f"d{number}", prompt, asked.params)
        assert answer.tokens == decode.tokens_without_cache(prompt, 3)
        failures, compared = take_outcome(decode)
        assert (answer.has_failed, failures) == (False, [])
        total += compared
    assert bool(total) == (integrity != "off")


@pytest.mark.parametrize("layout", ["BHLNC", "LBNHC"])
@pytest.mark.parametrize("model", MODELS)
def test_bytes_that_arrive_wrong_fail_the_request_and_no_other(model: str, layout: str, make_engine: Any) -> None:
    prefill = make_engine(MODELS[model], integrity="full")
    decode = make_engine(MODELS[model], layout=layout, num_blocks=60, integrity="full")
    for number, length in enumerate([40, 64, 100]):
        prompt = prompt_of(length)
        asked = prefill.ask(f"p{number}", prompt, {"do_remote_decode": True}, max_tokens=1)
        with prefill.writes_with(WRONG_BYTES):
            answer = decode.ask(f"d{number}", prompt, asked.params)
        assert (answer.has_failed, take_outcome(decode)[0]) == (True, [Reason.INTEGRITY_MISMATCH.value])
        asked = prefill.ask(f"again{number}", prompt, {"do_remote_decode": True}, max_tokens=1)
        answer = decode.ask(f"dagain{number}", prompt, asked.params)
        assert (answer.has_failed, answer.tokens) == (False, decode.tokens_without_cache(prompt, 3))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("integrity", ["sample", "full"])
def test_a_prompt_whose_engine_generated_on_and_shared_the_block_is_not_taken_for_damaged(
    integrity: str, asynchronous: bool, make_engine: Any
) -> None:
    """The next turn of a conversation shares the block in which the prompt ended and the answer began."""
    prefill = make_engine(MODELS["full attention"], integrity=integrity, asynchronous=asynchronous)
    decode = make_engine(MODELS["full attention"], num_blocks=60, integrity=integrity)
    prompt = prompt_of(20)
    asked = prefill.ask("p", prompt, {"do_remote_decode": True}, max_tokens=30)
    turn = [*prompt, *asked.tokens[:28], 3, 1, 4]
    assert prefill.ask("next", turn, {"do_remote_decode": True}, max_tokens=1).params
    answer = decode.ask("d", prompt, asked.params)
    assert (answer.has_failed, take_outcome(decode)[0]) == (False, [])
    assert answer.tokens == decode.tokens_without_cache(prompt, 3)


def test_an_engine_that_keeps_fewer_digests_is_refused(make_engine: Any) -> None:
    prefill = make_engine(MODELS["full attention"], integrity="sample")
    decode = make_engine(MODELS["full attention"], integrity="full")
    asked = prefill.ask("p", prompt_of(40), {"do_remote_decode": True}, max_tokens=1)
    answer = decode.ask("d", prompt_of(40), asked.params)
    assert (answer.has_failed, take_outcome(decode)[0]) == (True, [Reason.UNSUPPORTED.value])


def test_the_default_is_a_sample_which_no_load_requires() -> None:
    given = {name: parse_settings({"integrity": name}) for name in ("auto", "off", "sample", "full")}
    assert given["auto"] == parse_settings({})
    assert [each.wanted_integrity.value for each in given.values()] == ["sample", "off", "sample", "full"]
    assert [each.requires_digests for each in given.values()] == [False, True, True, True]


def test_a_load_of_numbers_that_have_no_digests_compares_nothing_by_default(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No cache of vLLM has such numbers: here those of 4 bytes are as ones of 8 would be."""
    monkeypatch.setattr(digests, "_ITEM_SIZES", (1, 2))
    prefill, decode = (make_engine(MODELS["full attention"], num_blocks=60) for _ in range(2))
    assert "nothing is compared" in caplog.text
    asked = prefill.ask("p", prompt_of(40), {"do_remote_decode": True}, max_tokens=1)
    answer = decode.ask("d", prompt_of(40), asked.params)
    assert (answer.has_failed, answer.tokens) == (False, decode.tokens_without_cache(prompt_of(40), 3))
    assert take_outcome(decode) == ([], 0)


@pytest.mark.parametrize("integrity", ["sample", "full"])
def test_an_engine_that_must_compare_numbers_that_have_no_digests_does_not_start(
    integrity: str, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "_ITEM_SIZES", (1, 2))
    with pytest.raises(PlanError) as caught:
        make_engine(MODELS["full attention"], integrity=integrity)
    assert caught.value.reason is Reason.UNSUPPORTED
    assert '"integrity" to "off"' in caught.value.remedy
