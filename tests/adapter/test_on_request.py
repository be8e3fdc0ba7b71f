"""Held prompts that a prefill engine writes on request: vLLM's scheduler, the connector and real bytes, no model."""

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from kvferry.errors import HandoffError, Reason, SettingsError
from kvferry.handoff.messages import DirectoryRequest, Reopened
from kvferry.handoff.versions import OURS
from kvferry.integrations.vllm.settings import LAST_PORT, Settings, parse_settings
from kvferry.integrations.vllm.step import StepMetadata
from kvferry.integrations.vllm.translate.shards import decode_rank_entry
from kvferry.transport.memcpy import MemcpyTransport
from kvferry.transport.protocol import Capabilities

from ..local.engines_in_process import Rank
from .handoff_engine import HandoffEngine, make_engine
from .scheduler_requests import FULL
from .test_forged_parameters import MODELS, UNIFORM, check_mutations
from .test_turns import SAID, TURN_SECONDS, Conversation
from .worker_roles import make_worker_role

__all__ = ["make_engine"]


def ways(log: Path) -> list[str]:
    """Return how each load of a rank came, from its transfer log."""
    lines = [json.loads(line) for line in log.with_name(f"{log.name}.rank0").read_text().splitlines()]
    return [line["way"] for line in lines if "way" in line]


def writing(make_engine: Any, **more: Any) -> Any:
    return partial(make_engine, held_prompts="write", **more)


@pytest.mark.parametrize("integrity", ["off", "full"])
@pytest.mark.parametrize("model", MODELS)
def test_prompts_are_written_and_give_the_tokens_of_one_engine(
    model: str, integrity: str, make_engine: Any, tmp_path: Path
) -> None:
    """Prompts of every length around a block, prefix hits, and words that come late."""
    log = tmp_path / "decode"
    make = writing(make_engine, integrity=integrity)
    prefill, decode = make(MODELS[model]), make(MODELS[model], num_blocks=60, transfer_log=str(log))
    for number, length in enumerate([2, 15, 16, 17, 33, 64, 79, 81, 112]):
        prompt = [(11 * index + 5 * length) % 500 for index in range(length)]
        asked = prefill.ask(f"p{number}", prompt, {"do_remote_decode": True}, max_tokens=1 + 3 * (number % 2))
        answer = decode.ask(f"d{number}", prompt, asked.params)
        assert not answer.has_failed
        assert answer.tokens == decode.tokens_without_cache(prompt, 3)
        longer = [*prompt, *range(40)]
        asked = prefill.ask(f"q{number}", longer, {"do_remote_decode": True}, max_tokens=1)
        assert decode.ask(f"e{number}", longer, asked.params).tokens == decode.tokens_without_cache(longer, 3)
    assert set(ways(log)) == {"written"}
    assert_nothing_is_held(prefill)


def assert_nothing_is_held(prefill: HandoffEngine) -> None:
    prefill.release()
    prefill.ask("last", [1, 2, 3], {})
    assert prefill.connector._scheduler._state.holds.num_holds == 0
    writer = prefill.worker._worker_role._source._end_point.writer
    assert writer.is_quiet
    assert not writer._sender._prompts, "a prompt that is not held can still be written"
    assert prefill.scheduler.reset_prefix_cache(), "a block is still used"


@pytest.mark.parametrize("model", MODELS)
def test_no_mutation_of_valid_parameters_gives_wrong_bytes(
    model: str, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot of the guard word is not looked at: the word itself names the prompt."""
    monkeypatch.setattr("kvferry.execution.source.LATE_WORD_SECONDS", 0.05)
    check_mutations(model, writing(make_engine), ["another slot", "another request's slot"])


def test_the_next_turn_of_a_conversation_is_read(make_engine: Any, tmp_path: Path) -> None:
    """Its hold yields to the steps of its engine at any time."""
    logs = [tmp_path / "prefill", tmp_path / "decode"]
    make = writing(make_engine, num_blocks=60)
    prefill = make(UNIFORM, transfer_log=str(logs[0]))
    decode = make(UNIFORM, turn_seconds=TURN_SECONDS, transfer_log=str(logs[1]))
    ours = Conversation(prefill, decode)
    for said in SAID:
        ours.turn(said)
    assert [ways(log) for log in logs] == [["read"] * 2, ["written"] * 3]


def test_an_engine_that_reads_takes_no_announcements_and_is_refused_where_writing_is_forced(
    make_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = make_engine(UNIFORM, held_prompts="read"), make_engine(UNIFORM, held_prompts="write")
    prompt = list(range(75))
    params = prefill.ask("p", prompt, {"do_remote_decode": True}, max_tokens=1).params
    assert decode.ask("d", prompt, params).has_failed
    assert "does not write the prompts that it holds" in caplog.text


def entry_of(patch: pytest.MonkeyPatch, **settings: Any) -> Any:
    role = make_worker_role(patch, Settings(transport="memcpy", **settings), Rank(0, 1).shard)
    try:
        return decode_rank_entry(role.get_handshake_metadata().entry)
    finally:
        role.shutdown()


def test_a_rank_takes_announcements_only_where_reads_are_slow_or_writing_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = entry_of(monkeypatch, held_prompts="write")
    assert entry.held_end_point is not None
    assert entry.push_end_point is None
    ports = f"{entry.held_end_point.port}-{LAST_PORT}"
    listens_at = entry_of(monkeypatch, held_prompts="write", rank_ports=ports).held_end_point
    assert entry.held_end_point.port <= listens_at.port < entry.held_end_point.port + 50
    assert entry_of(monkeypatch).held_end_point is None
    slow = Capabilities("memcpy", same_process_only=True, ends_with_process=True, slow_reads="it is slow")
    monkeypatch.setattr(MemcpyTransport, "capabilities", slow)
    assert entry_of(monkeypatch).held_end_point is None, "host memory is read as fast as written"


@pytest.mark.parametrize(
    ("given", "on_device", "may_write"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"host": "10.0.0.1", "allow_unauthenticated": True}, False, False),
        ({"strategy": "scatter"}, True, False),
        ({"held_prompts": "read"}, True, False),
        ({"held_prompts": "write"}, False, True),
    ],
)
def test_auto_writes_only_device_memory_that_is_read_slowly(
    given: dict[str, Any], on_device: bool, may_write: bool
) -> None:
    settings = parse_settings(given)
    assert settings.may_write_held(["", "it is slow"], on_device=on_device) is may_write
    assert settings.may_write_held([""], on_device=on_device) is (settings.held_prompts == "write")


@pytest.mark.parametrize(
    "given",
    [
        {"mode": "push", "held_prompts": "write"},
        {"strategy": "scatter", "held_prompts": "write"},
        {"held_prompts": "written"},
        {"fence_seconds": 5.0, "held_prompts": "read"},
    ],
)
def test_settings_that_contradict_each_other_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        parse_settings(given)
    assert parse_settings({"fence_seconds": 5.0}).fence_seconds == 5.0


@pytest.mark.parametrize("held_prompts", ["auto", "read"])
def test_a_push_may_say_the_default_of_held_prompts_which_no_load_of_it_uses(held_prompts: str) -> None:
    """What is refused when it is said cannot be the default, and files of settings name the defaults."""
    assert parse_settings({"mode": "push", "held_prompts": held_prompts}).mode == "push"


# After a fence.


def test_a_directory_names_the_end_points_that_a_rank_has_after_a_fence(
    make_role: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers read from this rank, and would find no memory at the former ones."""
    role, entry = make_role(FULL, num_ranks=2), entry_of(monkeypatch, held_prompts="write")
    role.publish([entry, msgspec.structs.replace(entry, tp_rank=1)])
    former = role._answer(DirectoryRequest(OURS.oldest, "d", OURS.newest))
    for number, name in ((1, b"first"), (3, b"third"), (2, b"second")):
        role._answer(Reopened(role._secret, 1, number, {"memcpy": name}))
    for _ in range(2):
        found = role._answer(DirectoryRequest(OURS.oldest, "d", OURS.newest))
        assert found.ranks[0] == former.ranks[0]
        assert found.ranks[1] == msgspec.structs.replace(former.ranks[1], end_points={"memcpy": b"third"})
        role.reset_cache()
    with pytest.raises(HandoffError) as refused:
        role._answer(Reopened(b"another", 0, 9, {"memcpy": b"forged"}))
    assert refused.value.reason is Reason.PERMISSION_DENIED


def test_a_rank_tells_its_engine_of_a_fence(make_engine: Any) -> None:
    decode = writing(make_engine)(UNIFORM)
    role, scheduler = decode.worker._worker_role, decode.connector._scheduler
    decode.ask("step", [1, 2, 3], {})
    role._destination._announcer._on_fence(1, {"memcpy": b"anew"})
    until = time.monotonic() + 10
    while not scheduler._reopened:
        assert time.monotonic() < until
        time.sleep(0.01)
    [rank] = scheduler._answer(DirectoryRequest(OURS.oldest, "d", OURS.newest)).ranks
    assert rank.end_points == {"memcpy": b"anew"}


@pytest.mark.parametrize("call", ["void_transfers", "begin_step"])
def test_a_step_that_ends_a_hold_ends_its_write(call: str, make_engine: Any) -> None:
    """Before vLLM clears new blocks, among which are those of a hold that yields, where vLLM calls before that."""
    prefill = writing(make_engine)(UNIFORM)
    prefill.ask("p", list(range(75)), {"do_remote_decode": True}, max_tokens=1)
    source = prefill.worker._worker_role._source
    [slot] = source._step_words._held
    assert list(source._end_point.writer._sender._prompts)
    assert source._step_words._words.array[slot].all()
    getattr(prefill.worker._worker_role, call)(StepMetadata(ended_slots=[slot]))
    assert not source._end_point.writer._sender._prompts
    assert not source._step_words._words.array[slot].any()
