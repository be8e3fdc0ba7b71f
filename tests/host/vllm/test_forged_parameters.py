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
from .handoffs import Handoffs, Pair, check_tokens, random_prompt

pytestmark = pytest.mark.vllm
Params = dict[str, Any]

# The decode engine caches prefixes, and fails a request whose load fails.
PAIR = Pair("gqa-forged", "gqa-tp1-other", "gqa-tp1")
on_a_pair = pytest.mark.parametrize(
    "pair", [pytest.param(PAIR, id=PAIR.name, marks=pytest.mark.engines(PAIR.prefill, PAIR.decode))]
)
NUM_TOKENS, RANDOM_SECONDS = 300, 60.0
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


# Each with the HTTP status and the reason that the decode engine logs, or names in its answer.
BY_HAND: dict[str, tuple[Callable[[Params, Params], Params], int, str]] = {
    "another request's blocks": (with_blocks(lambda _, theirs: theirs), 500, "wrong-parameters"),
    "one block of another request": (with_blocks(lambda ids, theirs: [*ids[:-1], theirs[0]]), 500, "wrong-parameters"),
    "reversed": (with_blocks(lambda ids, _: ids[::-1]), 500, "wrong-parameters"),
    "one block three times": (with_blocks(lambda ids, _: ids[:1] * len(ids)), 500, "wrong-parameters"),
    "too few blocks": (with_blocks(lambda ids, _: ids[:-1]), 500, "invalid-request"),
    "another request's hold": (
        lambda ours, theirs: theirs | {"remote_block_ids": ours["remote_block_ids"]},
        400,
        "invalid-request",
    ),
    "all but the prompt": (all_but_the_prompt, 500, "wrong-parameters"),
    "another slot": (
        lambda ours, theirs: ours | {"kvferry": ours["kvferry"] | {"slot": theirs["kvferry"]["slot"]}},
        500,
        "wrong-parameters",
    ),
    "another generation": (of_ferry(generation="0123456789abcdef"), 500, "wrong-parameters"),
    "another engine's id": (lambda ours, _: ours | {"remote_engine_id": "another"}, 500, "wrong-parameters"),
    "another request's id": (lambda ours, _: ours | {"remote_request_id": "another"}, 500, "wrong-parameters"),
    "another epoch": (of_ferry(epoch=7), 500, "peer-changed"),
    "other block sizes": (of_ferry(block_sizes=[16]), 500, "invalid-request"),
    "another digest": (of_ferry(prompt_digest="0" * 32), 400, "invalid-request"),
    "another number of tokens": (of_ferry(num_tokens=NUM_TOKENS - 1), 400, "invalid-request"),
    "an address elsewhere": (lambda ours, _: ours | {"remote_host": "203.0.113.1"}, 400, "permission-denied"),
    "a number as text": (of_ferry(slot="0"), 400, "malformed-message"),
    "a huge number": (of_ferry(num_tokens=1 << 62), 400, "malformed-message"),
    "a list for an object": (lambda ours, _: ours | {"kvferry": [ours["kvferry"]]}, 400, "malformed-message"),
    "half of a surrogate pair": (lambda ours, _: ours | {"remote_request_id": "\ud800"}, 400, "malformed-message"),
    "a new line in a host": (lambda ours, _: ours | {"remote_host": "127.0.0.1\nforged"}, 400, "malformed-message"),
    "no blocks": (lambda ours, _: {k: v for k, v in ours.items() if k != "remote_block_ids"}, 400, "malformed-message"),
}


OR_ELSE = dict.fromkeys(("another generation", "another request's id"), ("lease-expired",))
"""The reason where the first renewal is answered before the guard word is read: there is no such hold."""


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
    """The same prompt under the same salt, without parameters, finds no foreign bytes in the prefix cache."""
    forge, status, reason = BY_HAND[name]
    (prompt, ours), (other_prompt, theirs) = hold(handoffs.prefill, 900), hold(handoffs.prefill, 901)
    salt, num_loads = fresh_salt(), len(handoffs.decode.loads())
    asked_at = time.monotonic()
    tokens, found, text = ask(handoffs.decode, prompt, forge(copied(ours), copied(theirs)), salt)
    assert (tokens, found) == (None, status), text
    assert time.monotonic() - asked_at < AT_ONCE_SECONDS
    loads = handoffs.decode.loads()[num_loads:]
    if status == 400:
        assert f"[{reason}]" in text
        assert loads == []
    else:
        # The transfer log has every load; the engine's log leaves lines out where many come in one second.
        [load] = loads
        assert load["error"] in {reason, *OR_ELSE.get(name, ())}
        assert load["message"]
    [answer] = handoffs.decode.complete(prompt, 8, salt)["choices"]
    check_tokens([[answer["token_ids"]]], pair.model, [prompt], reference)
    let_go(handoffs.decode, prompt, ours)
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
                names = ("generation", "slot", "prompt_digest", "epoch", "num_tokens")
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
    numbers, seen = random.Random(5), Counter[int]()
    prompt, other_prompt = random_prompt(910, NUM_TOKENS), random_prompt(911, NUM_TOKENS)
    [expected] = reference.tokens(pair.model, [prompt], 8)
    theirs = handoffs.prefill.prefill(other_prompt)
    salts: list[str] = []
    began = time.monotonic()
    while time.monotonic() - began < RANDOM_SECONDS or len(salts) < LEAST_FORGERIES:
        ours, salt = handoffs.prefill.prefill(prompt), fresh_salt()
        with suppress(ValueError, TypeError, IndexError, KeyError):
            forged = random_forgery(copied(ours), copied(theirs), numbers)
        num_loads = len(handoffs.decode.loads())
        tokens, status, text = ask(handoffs.decode, prompt, forged, salt)
        seen[status] += 1
        assert tokens is None or tokens == [expected], f"WRONG TOKENS for {json.dumps(forged)[:2000]}"
        assert status in (200, 400, 500), text
        reasons = [load["error"] for load in handoffs.decode.loads()[num_loads:]]
        assert status != 500 or all(reasons) == bool(reasons) is True, f"no reason for {json.dumps(forged)[:2000]}"
        salts.append(salt)
        let_go(handoffs.decode, prompt, ours)
    for salt in salts[::5]:
        [answer] = handoffs.decode.complete(prompt, 8, salt)["choices"]
        assert answer["token_ids"] == expected, "a forgery has left bytes in the prefix cache"
    let_go(handoffs.decode, other_prompt, theirs)
    print(f"\n{sum(seen.values())} forgeries: {dict(seen)}", end="")
    assert seen[400] > 5
    assert seen[500] > 5


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
