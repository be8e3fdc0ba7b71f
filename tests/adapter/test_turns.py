"""Conversations: the prefill engine loads from the decode engine what that engine has computed for the last turn."""

import json
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvferry.errors import Reason
from kvferry.handoff.holds import Ending, transfer_of
from kvferry.integrations.vllm.scheduler import destination
from kvferry.integrations.vllm.scheduler import source as source_module

from . import handoff_engine
from .handoff_engine import Answer, HandoffEngine, make_engine
from .scheduler_requests import handle_of
from .test_forged_parameters import HYBRID, MODELS, UNIFORM, failures_of

__all__ = ["make_engine"]

SAID = [[(11 * index + 5) % 500 for index in range(75)], [*range(7, 37)], [*range(600, 621)]]
TURN_SECONDS = 60.0


class Conversation:
    """One conversation between two engines, as a router for several turns leads it."""

    def __init__(self, prefill: HandoffEngine, decode: HandoffEngine, name: str = "c") -> None:
        self.prefill, self.decode = prefill, decode
        self.tokens: list[int] = []
        self.params: dict[str, Any] = {}
        self._name, self._number = name, 0

    def turn(self, said: Sequence[int], max_tokens: int = 9) -> tuple[Answer, int]:
        """Say something: return the answer, and how many tokens the prefill engine has computed for it."""
        self._number += 1
        self.tokens += said
        name, before = f"{self._name}-{self._number}", self.prefill.num_computed
        prompted = self.prefill.ask(f"{name}-p", self.tokens, {**self.params, "do_remote_decode": True}, max_tokens=1)
        assert not prompted.has_failed
        params = through_json({**prompted.params, "do_remote_prefill": True})
        answer = self.decode.ask(f"{name}-d", self.tokens, params, max_tokens=max_tokens)
        assert not answer.has_failed
        assert answer.tokens == self.decode.tokens_without_cache(self.tokens, max_tokens)
        self.tokens += answer.tokens
        self.params = through_json(answer.params)
        return answer, self.prefill.num_computed - before


def through_json(params: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(params))  # type: ignore[no-any-return]


def holds_of(engine: HandoffEngine) -> list[str]:
    """Return the requests that the engine holds, sorted by name."""
    return sorted(hold.request_id for hold in engine.connector._scheduler._state.holds._holds.values())


def num_free(engine: HandoffEngine) -> int:
    return engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()  # type: ignore[no-any-return]


@pytest.fixture(params=["sync", "async"])
def decode_is_asynchronous(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "async")


@pytest.mark.parametrize("integrity", ["off", "full"])
@pytest.mark.parametrize("model", MODELS)
def test_the_prefill_engine_computes_only_what_is_new(
    model: str, integrity: str, decode_is_asynchronous: bool, make_engine: Any
) -> None:
    prefill = make_engine(MODELS[model], num_blocks=60, integrity=integrity)
    decode = make_engine(
        MODELS[model],
        num_blocks=60,
        integrity=integrity,
        turn_seconds=TURN_SECONDS,
        asynchronous=decode_is_asynchronous,
    )
    ours, left_out = Conversation(prefill, decode), 1 if MODELS[model] is HYBRID else 0
    free = num_free(decode)
    for number, said in enumerate(SAID):
        known = ours.params.get("remote_num_tokens", 0)
        # The cache of the last token of an answer is not computed, as a rule.
        assert known in ((0,) if number == 0 else (len(ours.tokens) - 1, len(ours.tokens)))
        _, num_computed = ours.turn(said)
        prompt = len(ours.tokens) - 9
        assert num_computed == prompt - left_out - known
        assert num_free(decode) == free, "held answers take blocks from other requests"
    assert failures_of(prefill) == []
    # Each turn released the hold of the turn before.
    decode.ask("step", [1, 2, 3], {})
    assert holds_of(decode) == ["c-3-d"]
    decode.release()
    prefill.release()
    for engine in (decode, prefill):
        engine.ask("last", [1, 2, 3], {})
        assert engine.scheduler.reset_prefix_cache(), "a block is still used"


def test_a_held_answer_yields_its_blocks_to_other_requests(make_engine: Any) -> None:
    """Then the prefill engine computes the turn; its writes end before the step that writes the block."""
    prefill, decode = make_engine(UNIFORM, num_blocks=60), make_engine(UNIFORM, turn_seconds=TURN_SECONDS)
    ours = Conversation(prefill, decode)
    ours.turn(SAID[0])
    writer = decode.worker._worker._source.writer
    assert len(writer._writes._prompts) == 1
    for number in range(4):
        decode.ask(f"other-{number}", [(number + 3 * index) % 400 for index in range(200)], {})
    assert holds_of(decode) == []
    assert writer._writes._prompts == {}
    prefill.forget()
    _, num_computed = ours.turn(SAID[1])
    assert num_computed == len(ours.tokens) - 9
    assert failures_of(prefill) == []


def test_two_holds_of_one_conversation_share_blocks_and_yield_together(make_engine: Any) -> None:
    """VLLM remembers one watcher for each block."""
    decode = make_engine(UNIFORM, turn_seconds=TURN_SECONDS)
    first = decode.ask("first", SAID[0], {"do_remote_prefill": False})
    second = decode.ask("second", SAID[0] + first.tokens + SAID[1], {"do_remote_prefill": False})
    shared = set(first.params["remote_block_ids"][0]) & set(second.params["remote_block_ids"][0])
    assert len(shared) == 4
    assert holds_of(decode) == ["first", "second"]
    for number in range(4):
        decode.ask(f"other-{number}", [(number + 3 * index) % 400 for index in range(200)], {})
    assert holds_of(decode) == []


def test_a_decode_engine_that_has_ended_costs_a_computation(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(destination, "TURN_ANSWER_SECONDS", 0.3)
    prefill, decode = make_engine(UNIFORM, num_blocks=60), make_engine(UNIFORM, turn_seconds=TURN_SECONDS)
    ours = Conversation(prefill, decode)
    ours.turn(SAID[0])
    decode.connector._scheduler.shutdown()
    prompt = ours.tokens + SAID[1]
    began_at = time.monotonic()
    answer = prefill.ask("turn", prompt, {**ours.params, "do_remote_decode": True}, max_tokens=1)
    assert answer.tokens == prefill.tokens_without_cache(prompt, 1)
    assert time.monotonic() - began_at < 5.0
    assert answer.params["kvferry"]["num_tokens"] == len(prompt)


@pytest.mark.parametrize("model", MODELS)
def test_a_turn_whose_load_fails_is_computed(model: str, make_engine: Any) -> None:
    """Whatever ``kv_load_failure_policy`` says: the client has done nothing wrong, and nothing is lost."""
    prefill = make_engine(MODELS[model], num_blocks=60, integrity="full", failure_policy="fail")
    decode = make_engine(MODELS[model], num_blocks=60, integrity="full", turn_seconds=TURN_SECONDS)
    ours = Conversation(prefill, decode)
    ours.turn(SAID[0])
    # The rank has ended the hold, and the scheduler still answers that it is held.
    decode.worker._worker._source.writer.end([transfer_of(handle_of(ours.params))])
    prefill.forget()
    before = prefill.num_computed
    prompt = ours.tokens + SAID[1]
    answer = prefill.ask("turn", prompt, {**ours.params, "do_remote_decode": True}, max_tokens=1)
    assert not answer.has_failed
    assert answer.params, "the prompt is held for the decode engine all the same"
    assert failures_of(prefill) == [Reason.LEASE_EXPIRED.value]
    left_out = 1 if MODELS[model] is HYBRID else 0
    assert prefill.num_computed - before == len(prompt) - left_out
    assert answer.tokens == prefill.tokens_without_cache(prompt[: len(prompt) - left_out], 1)


def test_parameters_of_another_conversation_are_not_loaded(make_engine: Any) -> None:
    prefill, decode = make_engine(UNIFORM, num_blocks=60), make_engine(UNIFORM, num_blocks=60, turn_seconds=60.0)
    ours, theirs = Conversation(prefill, decode), Conversation(prefill, decode, "other")
    ours.turn(SAID[0])
    theirs.turn(SAID[2] * 3)
    wrong = [
        theirs.params,
        {**theirs.params, "kvferry": ours.params["kvferry"]},
        {**ours.params, "kvferry": {**ours.params["kvferry"], "num_tokens": 1}},
        {**ours.params, "kvferry": None},
        {**ours.params, "remote_port": "x"},
    ]
    prompt = ours.tokens + SAID[1]
    for number, params in enumerate(wrong):
        prefill.forget()
        before = prefill.num_computed
        asked = {**params, "do_remote_decode": True}
        answer = prefill.ask(f"turn-{number}", prompt, asked, max_tokens=1)
        assert answer.tokens == prefill.tokens_without_cache(prompt, 1)
        assert prefill.num_computed - before == len(prompt)
    # The decode engine knows the blocks of what it holds.
    for number, blocks in enumerate((theirs.params["remote_block_ids"], [ours.params["remote_block_ids"][0][::-1]])):
        prefill.forget()
        asked = {**ours.params, "remote_block_ids": blocks, "do_remote_decode": True}
        answer = prefill.ask(f"blocks-{number}", prompt, asked, max_tokens=1)
        assert answer.tokens == prefill.tokens_without_cache(prompt, 1)


def test_a_request_that_names_no_other_engine_is_not_held(make_engine: Any) -> None:
    decode = make_engine(UNIFORM, turn_seconds=TURN_SECONDS)
    assert decode.ask("plain", SAID[0], {}).params == {}
    assert make_engine(UNIFORM).ask("off", SAID[0], {"do_remote_prefill": False}).params == {}
    assert holds_of(decode) == []


def test_draining_ends_held_answers(make_engine: Any) -> None:
    decode = make_engine(UNIFORM, turn_seconds=TURN_SECONDS)
    decode.ask("a", SAID[0], {"do_remote_prefill": False})
    role = decode.connector._scheduler
    role._state.holds.drain()
    assert [ended.ending for ended in role._state.holds._ended] == [Ending.YIELDED]
    assert decode.ask("b", SAID[1], {"do_remote_prefill": False}).params == {}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_stopped_answer_yields_last(asynchronous: bool, make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM defers its own free of a request that stops while a step is in flight, until after the loan."""
    decode = make_engine(UNIFORM, num_blocks=60, turn_seconds=TURN_SECONDS, asynchronous=asynchronous)
    stop = decode.tokens_without_cache(SAID[0], 4)[-1]
    monkeypatch.setattr(handoff_engine, "SamplingParams", partial(SamplingParams, stop_token_ids=[stop]))
    # Another request keeps the engine stepping, as a busy engine's requests do.
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    other = Request("other", [9, 8, 7], sampling, None, block_hasher=decode._hasher)
    decode.scheduler.add_request(other)
    decode._tokens["other"] = [9, 8, 7]
    answer = decode.ask("a", SAID[0], {"do_remote_prefill": False}, max_tokens=30)
    held = answer.params["remote_block_ids"][0]
    assert holds_of(decode) == ["a"]
    pool = decode.scheduler.kv_cache_manager.block_pool
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    places = [free.index(each) for each in held]
    # 59 blocks are free, and this prompt needs 3 of them.
    decode.ask("x", [3 * index for index in range(40)], {}, max_tokens=1)
    assert holds_of(decode) == ["a"], f"the held blocks were at {places} of {len(free)} free ones"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_answers_that_share_a_prefix_yield_after_a_reset(asynchronous: bool, make_engine: Any) -> None:
    """The reset takes the hashes of shared blocks away, so that they look as if nobody shared them."""
    decode = make_engine(UNIFORM, turn_seconds=TURN_SECONDS, asynchronous=asynchronous)
    decode.ask("before", SAID[0], {})
    free = num_free(decode)
    for name in "ab":
        sampling = SamplingParams(
            max_tokens=3, ignore_eos=True, extra_args={"kv_transfer_params": {"do_remote_prefill": False}}
        )
        prompt = SAID[0] + [1, 2, 3]
        decode.scheduler.add_request(Request(name, prompt, sampling, None, block_hasher=decode._hasher))
        decode._tokens[name] = list(prompt)
    steps = deque[tuple[Any, Any]]()
    while decode.scheduler.has_unfinished_requests() or steps:
        if decode.scheduler.has_unfinished_requests():
            output = decode.scheduler.schedule()
            steps.append((output, decode._execute(output)))
        while steps and (len(steps) >= decode._depth or not decode.scheduler.has_unfinished_requests()):
            decode.scheduler.update_from_output(*steps.popleft())
    kept = decode.connector._scheduler._state.kept_blocks
    assert num_free(decode) < free, "the holds are not lent yet"
    assert decode.scheduler.reset_prefix_cache()
    num_steps = 0
    while decode.scheduler.has_requests():
        num_steps += 1
        assert num_steps < 4, "each hold waits for the other, and the engine steps for it"
        output = decode.scheduler.schedule()
        decode.scheduler.update_from_output(output, decode._execute(output))
    assert holds_of(decode) == ["a", "b"]
    assert (num_free(decode), kept.num_kept) == (free, 0)
    # 29 blocks are free, and this prompt needs 26 of them.
    decode.ask("big", [(7 * index + 2) % 500 for index in range(400)], {}, max_tokens=1)
    assert holds_of(decode) == []


def test_a_renewed_turn_takes_no_blocks_from_its_decode_engine(make_engine: Any) -> None:
    """A turn that waits in the prefill engine's queue renews; the decode engine's next request gets no blocks."""
    prefill, decode = make_engine(UNIFORM), make_engine(UNIFORM, turn_seconds=TURN_SECONDS)
    said = [(3 * index + 1) % 500 for index in range(230)]
    answer = decode.ask("a", said, {"do_remote_prefill": False})
    prompt = [*said, *answer.tokens, 5, 6, 7]
    sampling = SamplingParams(
        max_tokens=1, extra_args={"kv_transfer_params": {**answer.params, "do_remote_decode": True}}
    )
    # It is queued: the prefill engine has no room for it yet. Its server thread renews.
    prefill.scheduler.add_request(Request("turn", prompt, sampling, None, block_hasher=prefill._hasher))
    prefill.connector._scheduler._state.leases.keep()
    time.sleep(1.0)
    decode.ask("step", [1, 2, 3], {}, max_tokens=1)
    decode.ask("big", [(7 * index + 2) % 500 for index in range(400)], {}, max_tokens=1)
    assert holds_of(decode) == []


def test_an_engine_of_both_sides_does_not_wait_for_its_own_turn(make_engine: Any) -> None:
    both = make_engine(UNIFORM, turn_seconds=TURN_SECONDS)
    said = [(3 * index + 1) % 500 for index in range(290)]
    answer = both.ask("a", said, {"do_remote_prefill": False})
    prompt = [*said, *answer.tokens, 5, 6, 7]
    params = {**answer.params, "do_remote_decode": True}
    found = both.ask("turn", prompt, params, max_tokens=1, cache_salt="other")
    assert found.tokens == both.tokens_without_cache(prompt, 1)


def test_a_request_of_an_id_whose_hold_has_just_ended(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = make_engine(UNIFORM, num_blocks=60, turn_seconds=TURN_SECONDS)
    free = num_free(decode)
    decode.ask("a", SAID[0], {"do_remote_prefill": False})
    role = decode.connector._scheduler
    [hold] = role._state.holds._holds.values()
    role._state.holds.renew(role._state.epoch, [hold.handle], time.monotonic())
    decode.ask("step", [1, 2, 3], {})
    original = source_module.HeldAnswers.hold

    def hold_after_release(self: Any, *arguments: Any) -> Any:
        # The server's thread gets the release between the last step's orders and this request's end.
        with role._state.holds_lock:
            role._state.holds.release(role._state.epoch, [hold.handle])
        return original(self, *arguments)

    monkeypatch.setattr(source_module.HeldAnswers, "hold", hold_after_release)
    decode.ask("a", SAID[1], {"do_remote_prefill": False})
    monkeypatch.undo()
    decode.ask("step 2", [1, 2, 3], {})
    assert (num_free(decode), holds_of(decode)) == (free, ["a"]), "the end of one hold is taken for that of the other"
    decode.release()
    decode.ask("step 3", [1, 2, 3], {})
    assert num_free(decode) == free
