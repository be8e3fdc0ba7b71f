"""Parameters that a client has changed, on real engines: right tokens or an explicit error, and the log says why."""

import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from .engine_pool import Engine, EnginePool, Reference, RequestFailed, completion_body, fresh_salt, post
from .handoffs import ALL_PAIRS, Handoffs, Pair, check_tokens, random_prompt

pytestmark = pytest.mark.vllm
Params = dict[str, Any]

# The decode engine caches prefixes, fails a request whose load fails, and has kvferry's middleware.
PAIR = Pair("gqa-forged", "gqa-tp1-other", "gqa-tp1")
on_a_pair = pytest.mark.parametrize(
    "pair", [pytest.param(PAIR, id=PAIR.name, marks=pytest.mark.engines(PAIR.prefill, PAIR.decode))]
)
NUM_TOKENS, LONGEST_SECONDS = 300, 60.0
RANDOM_SECONDS = LONGEST_SECONDS if ALL_PAIRS else 20.0
LEAST_FORGERIES = int(os.environ.get("KVFERRY_FORGERIES", "0"))
"""Random ones, however long they take."""
AT_ONCE_SECONDS = 2.0


def copied(params: Params) -> Params:
    return json.loads(json.dumps(params))  # type: ignore[no-any-return]


def with_blocks(change: Callable[[list[int], list[int]], list[int]]) -> Callable[[Params, Params], Params]:
    def forge(ours: Params, theirs: Params) -> Params:
        [blocks], [other_blocks] = ours["remote_block_ids"], theirs["remote_block_ids"]
        return ours | {"remote_block_ids": [change(blocks, other_blocks)]}

    return forge


def of_ferry(**fields: Any) -> Callable[[Params, Params], Params]:
    return lambda ours, _: ours | {"kvferry": ours["kvferry"] | fields}


def all_but_the_prompt(ours: Params, theirs: Params) -> Params:
    kept = {name: ours["kvferry"][name] for name in ("prompt_digest", "num_tokens")}
    return theirs | {"kvferry": theirs["kvferry"] | kept}


# Each with the HTTP status, the reason, and who answers: the API server before the engine hears of the request, or the
# engine by a failed load.
API_SERVER, ENGINE = "API server", "engine"
BY_HAND: dict[str, tuple[Callable[[Params, Params], Params], int, str, str]] = {
    "another request's hold": (
        lambda ours, theirs: theirs | {"remote_block_ids": ours["remote_block_ids"]},
        400,
        "invalid-request",
        API_SERVER,
    ),
    "all but the prompt": (all_but_the_prompt, 400, "wrong-parameters", ENGINE),
    "another generation": (of_ferry(generation="0123456789abcdef"), 400, "wrong-parameters", ENGINE),
    "no generation": (of_ferry(generation="0" * 16), 400, "malformed-message", API_SERVER),
    "another engine's id": (lambda ours, _: ours | {"remote_engine_id": "another"}, 400, "wrong-parameters", ENGINE),
    "another epoch": (of_ferry(epoch=7), 503, "peer-changed", ENGINE),
    "other block sizes": (of_ferry(block_sizes=[16]), 400, "wrong-parameters", ENGINE),
    "another digest": (of_ferry(prompt_digest="0" * 32), 400, "invalid-request", API_SERVER),
    "another number of tokens": (of_ferry(num_tokens=NUM_TOKENS - 1), 400, "invalid-request", API_SERVER),
    "an address elsewhere": (
        lambda ours, _: ours | {"remote_host": "203.0.113.1"},
        400,
        "permission-denied",
        API_SERVER,
    ),
    "a number as text": (of_ferry(num_tokens="300"), 400, "malformed-message", API_SERVER),
    "a huge number": (of_ferry(num_tokens=1 << 62), 400, "malformed-message", API_SERVER),
    "a list for an object": (
        lambda ours, _: ours | {"kvferry": [ours["kvferry"]]},
        400,
        "malformed-message",
        API_SERVER,
    ),
    "half of a surrogate pair": (
        lambda ours, _: ours | {"remote_request_id": "\ud800"},
        400,
        "malformed-message",
        API_SERVER,
    ),
    "a new line in a host": (
        lambda ours, _: ours | {"remote_host": "127.0.0.1\nforged"},
        400,
        "malformed-message",
        API_SERVER,
    ),
    "no blocks": (
        lambda ours, _: {k: v for k, v in ours.items() if k != "remote_block_ids"},
        400,
        "malformed-message",
        API_SERVER,
    ),
}


OR_ELSE = {"another generation": ("lease-expired",)}
"""The reason where the first renewal is answered before the announcement: there is no such hold."""
UNUSED: dict[str, Callable[[Params, Params], Params]] = {
    "another request's blocks": with_blocks(lambda _, theirs: theirs),
    "reversed": with_blocks(lambda ids, _: ids[::-1]),
    "one block three times": with_blocks(lambda ids, _: ids[:1] * len(ids)),
    "too few blocks": with_blocks(lambda ids, _: ids[:-1]),
}
"""The source writes the blocks that it holds, whatever the parameters say of them."""


@pytest.fixture
def handoffs(pair: Pair, engine_pool: EnginePool) -> Handoffs:
    return Handoffs.of(pair, engine_pool)


def hold(engine: Engine, seed: int) -> tuple[list[int], Params]:
    prompt = random_prompt(seed, NUM_TOKENS)
    return prompt, engine.prefill(prompt)


def let_go(engine: Engine, prompt: list[int], params: Params) -> None:
    """Load a held prompt as it is, which releases the hold."""
    with suppress(RequestFailed):
        engine.decode(prompt, params, 1)


def ask(engine: Engine, prompt: list[int], params: Params, salt: str) -> tuple[list[list[int]] | None, int, str]:
    """Return the tokens, or None with the status and the text of the error."""
    try:
        return engine.decode(prompt, params, 8, salt), 200, ""
    except RequestFailed as failed:
        return None, failed.status, failed.text


@on_a_pair
@pytest.mark.parametrize("name", BY_HAND)
def test_a_forgery_is_refused_and_leaves_nothing_behind(
    name: str, handoffs: Handoffs, pair: Pair, reference: Reference
) -> None:
    """The client learns the reason, and whether to send the request again. The same prompt under the same salt, without
    parameters, finds no foreign bytes in the prefix cache.
    """
    forge, status, reason, who = BY_HAND[name]
    (prompt, ours), (other_prompt, theirs) = hold(handoffs.prefill, 900), hold(handoffs.prefill, 901)
    salt, num_loads = fresh_salt(), len(handoffs.decode.loads())
    asked_at = time.monotonic()
    tokens, found, text = ask(handoffs.decode, prompt, forge(copied(ours), copied(theirs)), salt)
    assert tokens is None, text
    assert time.monotonic() - asked_at < AT_ONCE_SECONDS
    loads, error = handoffs.decode.loads()[num_loads:], json.loads(text)["error"]
    if who == API_SERVER:
        assert found == status, text
        assert f"[{reason}]" in error["message"]
        assert loads == []
    else:
        # The transfer log has every load; the engine's log leaves lines out where many come in one second.
        [load] = loads
        assert load["error"] in {reason, *OR_ELSE.get(name, ())}
        assert load["message"]
        status = status if load["error"] == reason else 503
        told = found, error.get("code"), error.get("reason"), error.get("retry")
        assert told == (status, status, load["error"], status == 503), text
    [answer] = handoffs.decode.complete(prompt, 8, salt)["choices"]
    check_tokens([[answer["token_ids"]]], pair.model, [prompt], reference)
    let_go(handoffs.decode, prompt, ours)
    let_go(handoffs.decode, other_prompt, theirs)


@on_a_pair
@pytest.mark.parametrize("name", UNUSED)
def test_a_client_cannot_choose_the_blocks(name: str, handoffs: Handoffs, pair: Pair, reference: Reference) -> None:
    (prompt, ours), (other_prompt, theirs) = hold(handoffs.prefill, 902), hold(handoffs.prefill, 903)
    answer = handoffs.decode.decode(prompt, UNUSED[name](copied(ours), copied(theirs)), 8)
    check_tokens([answer], pair.model, [prompt], reference)
    let_go(handoffs.decode, other_prompt, theirs)


def random_forgery(ours: Params, theirs: Params, numbers: random.Random) -> Params:
    """Change one to three things."""
    values: list[Any] = [None, [], {}, "x", -1, 0, 1, 7, 1.5, 2**60, True, [[1]], "\ud800", "a" * 600]
    for _ in range(numbers.choice([1, 1, 2, 3])):
        [blocks] = ours["remote_block_ids"] if isinstance(ours.get("remote_block_ids"), list) else [[1]]
        match numbers.randrange(7):
            case 0:
                blocks = numbers.sample(blocks, len(blocks))
            case 1:
                blocks = [numbers.choice([*blocks, *theirs["remote_block_ids"][0], 0, 1, 9999]) for _ in blocks]
            case 2:
                blocks = blocks[: numbers.randrange(len(blocks) + 1)] + blocks[: numbers.randrange(3)]
            case 3 | 4:
                place = ours["kvferry"] if isinstance(ours.get("kvferry"), dict) else ours
                place[numbers.choice([*place])] = numbers.choice(values)
                continue
            case 5:
                names = ("generation", "prompt_digest", "epoch", "num_tokens")
                if isinstance(ours.get("kvferry"), dict):
                    ours["kvferry"] |= {each: theirs["kvferry"][each] for each in numbers.sample(names, 2)}
                continue
            case 6:
                each = numbers.choice(["remote_request_id", "remote_engine_id", "remote_block_ids", "remote_host"])
                ours[each] = numbers.choice([theirs.get(each), *values])
                continue
        ours["remote_block_ids"] = [blocks]
    return ours


@on_a_pair
@pytest.mark.timeout(3600)
def test_random_forgeries_give_right_tokens_or_an_error(handoffs: Handoffs, pair: Pair, reference: Reference) -> None:
    numbers, seen, num_failed, num_refused = random.Random(5), Counter[int](), 0, 0
    prompt, other_prompt = random_prompt(910, NUM_TOKENS), random_prompt(911, NUM_TOKENS)
    [expected] = reference.tokens(pair.model, [prompt], 8)
    theirs = handoffs.prefill.prefill(other_prompt)
    salts: list[str] = []
    began = time.monotonic()
    while (
        (took := time.monotonic() - began) < RANDOM_SECONDS
        or len(salts) < LEAST_FORGERIES
        or (took < LONGEST_SECONDS and min(num_refused, num_failed) <= 5)
    ):
        ours, salt = handoffs.prefill.prefill(prompt), fresh_salt()
        with suppress(ValueError, TypeError, IndexError, KeyError):
            forged = random_forgery(copied(ours), copied(theirs), numbers)
        num_loads = len(handoffs.decode.loads())
        tokens, status, text = ask(handoffs.decode, prompt, forged, salt)
        seen[status] += 1
        assert tokens is None or tokens == [expected], f"WRONG TOKENS for {json.dumps(forged)[:2000]}"
        assert status in (200, 400, 500, 503), text
        if failed := [load["error"] for load in handoffs.decode.loads()[num_loads:] if load["error"] is not None]:
            num_failed += 1
            assert [json.loads(text)["error"].get("reason")] == failed, f"{text} for {json.dumps(forged)[:2000]}"
        else:
            num_refused += status == 400
            assert status in (200, 400), f"no reason for {json.dumps(forged)[:2000]}"
        salts.append(salt)
        let_go(handoffs.decode, prompt, ours)
    for salt in salts[::5]:
        [answer] = handoffs.decode.complete(prompt, 8, salt)["choices"]
        assert answer["token_ids"] == expected, "a forgery has left bytes in the prefix cache"
    let_go(handoffs.decode, other_prompt, theirs)
    print(f"\n{sum(seen.values())} forgeries: {dict(seen)}", end="")
    assert num_refused > 5
    assert num_failed > 5


@on_a_pair
def test_a_list_of_prompts_is_a_400_and_holds_nothing(pair: Pair, handoffs: Handoffs) -> None:
    """On both engines, streaming or not; a hold that the parameters name is released at once."""
    prompts = [random_prompt(920 + index, NUM_TOKENS) for index in range(3)]
    logs_before = handoffs.log_ends()
    params = handoffs.prefill.prefill(prompts[0])
    for engine, given in ((handoffs.prefill, {"do_remote_decode": True}), (handoffs.decode, params)):
        for stream in (False, True):
            body = completion_body([], 4, fresh_salt(), stream=stream, kv_transfer_params=given) | {"prompt": prompts}
            with pytest.raises(RequestFailed) as failed:
                post(f"{engine.server.url}/v1/completions", body)
            assert failed.value.status == 400
            assert "[unsupported]" in failed.value.text
    handoffs.check_released(logs_before)


@on_a_pair
def test_parameters_that_are_no_object_do_not_end_the_engine(pair: Pair, handoffs: Handoffs) -> None:
    """``vllm_xargs`` brings any value to the scheduler, which takes it for a dictionary."""
    for engine in (handoffs.prefill, handoffs.decode):
        body = completion_body([5, 6, 7], 2, fresh_salt(), vllm_xargs={"kv_transfer_params": "text"})
        with pytest.raises(RequestFailed) as failed:
            post(f"{engine.server.url}/v1/completions", body)
        assert failed.value.status == 400
        assert engine.complete([5, 6, 7], 2)["choices"]
