"""Parameters that are not those of the prompt: refused with a reason, or harmless. Never another prompt's bytes."""

import json
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvferry.integrations.vllm.scheduler import destination

from ..waits import wait_until
from .handoff_engine import HandoffEngine, make_engine
from .test_offload_names import LAYERS, attention, window

__all__ = ["make_engine"]

UNIFORM = dict.fromkeys(LAYERS, attention())
HYBRID = {name: window() if index % 2 else attention() for index, name in enumerate(LAYERS)}
MODELS = {"full attention": UNIFORM, "windows": HYBRID}
Params = dict[str, Any]
Forge = Callable[[Params, Params, random.Random], None]


def of_ferry(field: str, value: Callable[[Any, random.Random], Any]) -> Forge:
    def forge(ours: Params, theirs: Params, numbers: random.Random) -> None:
        ours["kvferry"][field] = value(ours["kvferry"][field], numbers)

    return forge


def theirs_of(*fields: str) -> Forge:
    """Take these fields from the parameters of another request."""

    def forge(ours: Params, theirs: Params, numbers: random.Random) -> None:
        for field in fields:
            if field in ours:
                ours[field] = theirs[field]
            else:
                ours["kvferry"][field] = theirs["kvferry"][field]

    return forge


def outer(field: str, *values: Any) -> Forge:
    def forge(ours: Params, theirs: Params, numbers: random.Random) -> None:
        ours[field] = numbers.choice(values)

    return forge


def of_blocks(change: Callable[[list[int], random.Random], list[int]]) -> Forge:
    def forge(ours: Params, theirs: Params, numbers: random.Random) -> None:
        group = numbers.randrange(len(ours["remote_block_ids"]))
        ours["remote_block_ids"][group] = change(ours["remote_block_ids"][group], numbers)

    return forge


def one_of_theirs(ours: Params, theirs: Params, numbers: random.Random) -> None:
    group = numbers.randrange(len(ours["remote_block_ids"]))
    listed = ours["remote_block_ids"][group]
    position = numbers.randrange(len(listed))
    listed[position] = theirs["remote_block_ids"][group][position]


def all_but_the_prompt(ours: Params, theirs: Params, numbers: random.Random) -> None:
    """Another request's parameters, under this prompt's digest and number of tokens."""
    kept = {field: ours["kvferry"][field] for field in ("prompt_digest", "num_tokens")}
    ours.clear()
    ours.update(json.loads(json.dumps(theirs)))
    ours["kvferry"].update(kept)


def shuffled(ids: list[int], numbers: random.Random) -> list[int]:
    return numbers.sample(ids, len(ids))


def replaced(ids: list[int], numbers: random.Random) -> list[int]:
    position, other = numbers.randrange(len(ids)), numbers.choice([0, 1, 7, 29, 30, 1 << 20, 1 << 62])
    return [*ids[:position], other, *ids[position + 1 :]]


ODD_VALUES: list[Any] = [
    *(
        None,
        [],
        {},
        "",
        "x",
        -1,
        0,
        1.5,
        2**63,
        2**64 - 1,
        True,
        [[]],
        {"a": 1},
        "\ud800",
        "\n",
        "a" * 600,
        [None],
        [[1, "2"]],
    ),
]


def another_type(ours: Params, theirs: Params, numbers: random.Random) -> None:
    place = numbers.choice([ours, ours["kvferry"], ours["kvferry"]])
    place[numbers.choice([*place])] = numbers.choice(ODD_VALUES)


def left_out(ours: Params, theirs: Params, numbers: random.Random) -> None:
    place = numbers.choice([ours, ours["kvferry"]])
    del place[numbers.choice([*place])]


FORGERIES: dict[str, Forge] = {
    "another request's blocks": theirs_of("remote_block_ids"),
    "one block of another request": one_of_theirs,
    "reversed": of_blocks(lambda ids, _: ids[::-1]),
    "one block three times": of_blocks(lambda ids, _: [ids[0]] * 3 + ids[3:]),
    "one block only": of_blocks(lambda ids, _: ids[-1:] * len(ids)),
    "shuffled": of_blocks(shuffled),
    "rotated": of_blocks(lambda ids, _: ids[1:] + ids[:1]),
    "truncated": of_blocks(lambda ids, numbers: ids[: numbers.randrange(len(ids))]),
    "extended": of_blocks(lambda ids, numbers: [*ids, numbers.randrange(30)]),
    "a block in front": of_blocks(lambda ids, numbers: [numbers.randrange(30), *ids]),
    "another block": of_blocks(replaced),
    "a group more": lambda ours, theirs, _: ours["remote_block_ids"].append(theirs["remote_block_ids"][0]),
    "a group less": lambda ours, theirs, _: ours["remote_block_ids"].pop(),
    "groups in another order": lambda ours, theirs, _: ours["remote_block_ids"].reverse(),
    "another generation": of_ferry("generation", lambda _, numbers: f"{numbers.getrandbits(62) or 1:016x}"),
    "another request's generation": theirs_of("generation"),
    "another request's hold": theirs_of("generation", "remote_request_id"),
    "another request's hold and blocks": theirs_of("generation", "remote_request_id", "remote_block_ids"),
    "all but the prompt": all_but_the_prompt,
    "all of another request": theirs_of("generation", "remote_request_id", "remote_block_ids", "kvferry"),
    "another request's id": theirs_of("remote_request_id"),
    "another engine's id": outer("remote_engine_id", "engine-1", "engine-2", "engine-9", "engine"),
    "another epoch": of_ferry("epoch", lambda epoch, numbers: epoch ^ 1 << numbers.randrange(53)),
    "another port": outer("remote_port", 1, 9, 65535),
    "another host": outer("remote_host", "127.0.0.2", "127.1.2.3"),
    "other block sizes": of_ferry("block_sizes", lambda sizes, numbers: [numbers.choice([1, 8, 15, 32])] * len(sizes)),
    "another digest": of_ferry("prompt_digest", lambda _, numbers: f"{numbers.getrandbits(128):032x}"),
    "another number of tokens": of_ferry("num_tokens", lambda count, numbers: count + numbers.choice([-16, -1, 1, 16])),
    "another lease": of_ferry("lease_seconds", lambda _, numbers: numbers.choice([0.001, 1.0, 1e5])),
    "a late hold": of_ferry("is_late", lambda _late, _: True),
    "another version": of_ferry("version", lambda version, _: version + 2),
    "another type": another_type,
    "a field left out": left_out,
}


OF_BLOCKS = (
    "another request's blocks",
    "one block of another request",
    "reversed",
    "one block three times",
    "one block only",
    "shuffled",
    "rotated",
    "truncated",
    "extended",
    "a block in front",
    "another block",
    "a group more",
    "a group less",
    "groups in another order",
)


def failures_of(engine: HandoffEngine) -> list[str]:
    """Return the reasons of the loads that have failed since the last call."""
    statistics = engine.worker.get_kv_connector_stats()
    return [] if statistics is None else [*statistics.data["failures"]]


class Forgers:
    """Two prefill engines, each with a held prompt, and a decode engine that is asked with forged parameters."""

    def __init__(self, make_engine: Any, specs: dict[str, Any]) -> None:
        self.prefill: HandoffEngine = make_engine(specs)
        self.other: HandoffEngine = make_engine(specs)
        self.decode: HandoffEngine = make_engine(specs, num_blocks=60)
        self.count = 0
        self.theirs: list[Params] = []

    def prompt(self, number: int) -> list[int]:
        return [(7 * index + 13 * number + 3) % 500 for index in range(75 + number % 20)]

    def hold(self, engine: HandoffEngine, prompt: list[int]) -> Params:
        self.count += 1
        answer = engine.ask(f"p{self.count}", prompt, {"do_remote_decode": True}, max_tokens=1)
        assert answer.params, "the prompt is not held"
        return json.loads(json.dumps(answer.params))  # type: ignore[no-any-return]

    def renew_others(self) -> None:
        """Hold two other prompts, one by each prefill engine; a forged request may have released them."""
        for engine in (self.prefill, self.other):
            engine.release()
        self.theirs = [self.hold(self.prefill, self.prompt(101)), self.hold(self.other, self.prompt(102))]

    def send(self, number: int, forge: Callable[[Params, Params], None]) -> tuple[bool, list[str]]:
        """Ask with forged parameters; return whether the client gets an error, and the reasons that are counted."""
        prompt, salt = self.prompt(number), f"salt {number}"
        params = self.hold(self.prefill, prompt)
        forge(params, self.theirs[number % 2])
        held = f"p{self.count}"
        answer = self.decode.ask(f"d{number}", prompt, params, cache_salt=salt)
        self.prefill.release(held)
        if not answer.has_failed:
            assert answer.tokens == self.decode.tokens_without_cache(prompt, 3), "WRONG TOKENS"
        return answer.has_failed, failures_of(self.decode)


@pytest.mark.parametrize("model", MODELS)
def test_no_mutation_of_valid_parameters_gives_wrong_bytes(
    model: str, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of 1,000 for each model. A refused request has a counted reason, and leaves nothing in the caches."""
    monkeypatch.setattr(destination, "LATE_SECONDS", 0.05)
    forgers, numbers = Forgers(make_engine, MODELS[model]), random.Random(model)
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in FORGERIES}
    for number in range(500):
        if number % 25 == 0:
            forgers.renew_others()
        names = numbers.sample([*FORGERIES], 1 if number < 8 * len(FORGERIES) else numbers.choice([2, 3]))
        if number < 8 * len(FORGERIES):
            names = [[*FORGERIES][number % len(FORGERIES)]]

        def forge(ours: Params, theirs: Params, names: list[str] = names) -> None:
            for name in names:
                # An earlier forgery may have left nothing to forge.
                with suppress(KeyError, TypeError, AttributeError, IndexError, ValueError):
                    FORGERIES[name](ours, theirs, numbers)

        try:
            has_failed, reasons = forgers.send(number, forge)
        except AssertionError as error:
            raise AssertionError(f"{number}: {names}: {error}") from error
        assert has_failed == bool(reasons), f"{number}: {names}: {has_failed}, {reasons}"
        if len(names) == 1:
            outcomes[names[0]][reasons[0] if reasons else "right tokens"] += 1
        if number % 5 == 0:  # other requests of the same salt find what this one left in the prefix cache
            prompt = forgers.prompt(number)
            again = forgers.decode.ask(f"again{number}", prompt, {}, cache_salt=f"salt {number}")
            assert again.tokens == forgers.decode.tokens_without_cache(prompt, 3), (
                f"{number}: {names}: a poisoned cache"
            )
    # The prefill engine knows the blocks of what it holds.
    for name in OF_BLOCKS:
        assert set(outcomes[name]) == {"right tokens"}, f"{name}: {outcomes[name]}"
    # The generation alone names a hold, and a renewal may say first that nobody holds such a prompt.
    harmless = {"another lease", "a late hold", "another request's id", *OF_BLOCKS}
    assert outcomes["another request's id"].keys() <= {"right tokens", "lease-expired"}
    for name, found in outcomes.items():
        assert name in harmless or set(found) != {"right tokens"}, f"{name} was never refused: {found}"
    # A renewal may say first that nobody holds such a hold.
    assert outcomes["another generation"].keys() <= {"wrong-parameters", "lease-expired"}
    # An earlier forgery that named the other hold may have released it.
    for name in ("another request's hold", "all but the prompt"):
        assert outcomes[name].keys() <= {"wrong-parameters", "lease-expired"}
        assert outcomes[name]["wrong-parameters"] > 0
    assert sum(found["right tokens"] for found in outcomes.values()) > 20, "nothing was loaded"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("model", MODELS)
def test_parameters_that_nobody_changed_load_the_prompt(model: str, asynchronous: bool, make_engine: Any) -> None:
    """The control: the same engines, prompts of every length around a block, several output tokens, a prefix hit."""
    prefill = make_engine(MODELS[model], asynchronous=asynchronous)
    decode = make_engine(MODELS[model], num_blocks=60, asynchronous=asynchronous)
    for number, length in enumerate([2, 15, 16, 17, 31, 32, 33, 64, 79, 80, 81, 112]):
        prompt = [(11 * index + 5 * length) % 500 for index in range(length)]
        before = decode.num_computed
        asked = prefill.ask(f"p{number}", prompt, {"do_remote_decode": True}, max_tokens=1 + 3 * (number % 2))
        assert not asked.params["kvferry"]["is_late"]
        answer = decode.ask(f"d{number}", prompt, asked.params)
        assert answer.tokens == decode.tokens_without_cache(prompt, 3)
        assert (answer.has_failed, failures_of(decode)) == (False, [])
        if length > 2:
            assert decode.num_computed - before <= 3, "computed, not loaded"


@pytest.mark.parametrize("field", ["remote_request_id", "remote_engine_id"])
def test_hole_10_a_wrong_id_gives_no_other_prompt_and_its_hold_ends_at_once(field: str, make_engine: Any) -> None:
    """Once it was accepted, and the hold stayed for its whole lease."""
    prefill, decode = make_engine(UNIFORM), make_engine(UNIFORM, num_blocks=60)
    prompt = [(7 * index + 3) % 500 for index in range(75)]
    params = prefill.ask("p", prompt, {"do_remote_decode": True}, max_tokens=1).params
    holds = prefill.connector._scheduler._state.holds
    assert holds.num_holds == 1
    answer = decode.ask("d", prompt, params | {field: "another"})
    if field == "remote_engine_id":
        assert answer.has_failed
        assert failures_of(decode) == ["wrong-parameters"]
    else:  # the generation alone names a hold, and a renewal may say first that nobody holds such a prompt
        assert failures_of(decode) == (["lease-expired"] if answer.has_failed else [])
        assert answer.has_failed or answer.tokens == decode.tokens_without_cache(prompt, 3)
    wait_until(lambda: holds.num_holds == 0, "the hold stays", seconds=10.0)


@pytest.mark.parametrize("size", [8, 32])
def test_block_sizes_that_are_not_those_of_the_prefill_engine_are_refused_by_the_rank(
    size: int, make_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Without keys nobody has signed them; the rank compares them with the prefill engine's directory."""
    prefill, decode = make_engine(UNIFORM), make_engine(UNIFORM, num_blocks=60)
    prompt = [(7 * index + 3) % 500 for index in range(75)]
    params = prefill.ask("p", prompt, {"do_remote_decode": True}, max_tokens=1).params
    assert params["kvferry"]["block_sizes"] == [16]
    forged = params | {"kvferry": params["kvferry"] | {"block_sizes": [size]}}
    before = {name: cache.clone() for name, cache in decode.rank.caches.items()}
    assert decode.ask("d", prompt, forged).has_failed
    assert failures_of(decode) == ["wrong-parameters"]
    assert f"say block sizes [{size}]" in caplog.text
    assert all(bool((decode.rank.caches[name] == cache).all()) for name, cache in before.items()), "bytes were written"
