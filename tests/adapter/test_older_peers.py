"""An engine of version 9 and one of today, with vLLM's scheduler, load what the other one holds."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest

from kvferry.handoff.wire.keys import Keys, make_keys
from kvferry.integrations.vllm.scheduler import params as todays
from kvferry.layout.shard import encode_shard

from .. import version_9 as nine
from ..waits import wait_until
from .handoff_engine import IDENTITY, HandoffEngine
from .handoff_engine import make_engine as make_engine
from .scheduler_requests import PROMPT, request
from .vllm_caches import full

RECORDED: dict[str, Any] = json.loads(Path(nine.__file__).with_suffix(".json").read_text())
THEIRS = nine.Identity(*msgspec.structs.astuple(IDENTITY))
TOKENS = [(11 * index + 5) % 500 for index in range(64)]
LAYERS = {"0": full(1), "1": full(1)}


def num_holds(engine: HandoffEngine) -> int:
    state = engine.connector._scheduler._state
    with state.holds_lock:
        return int(state.holds.num_holds)


@pytest.fixture
def keys(tmp_path: Path) -> str:
    make_keys(tmp_path / "keys")
    return str(tmp_path / "keys")


@pytest.mark.parametrize("has_keys", [False, True], ids=["plain", "keys"])
def test_version_9_loads_what_this_version_holds(has_keys: bool, make_engine: Any, keys: str) -> None:
    """Handshake, renewal, a read between two looks at the guard word, and the release."""
    given = {"keys": keys} if has_keys else {}
    prefill: HandoffEngine = make_engine(LAYERS, transport="cma", integrity="off", **given)
    decode = nine.DecodeEngine(THEIRS, nine.Keys(Path(keys)) if has_keys else None)
    try:
        answered = prefill.ask("p", TOKENS, {"do_remote_decode": True}, max_tokens=1).params
        params = json.loads(json.dumps(answered))
        parsed = decode.parse(params)
        if has_keys:
            Keys(keys).check(nine.signed_params(parsed), bytes.fromhex(parsed.kvferry.signature))
        handle = nine.Handle(parsed.remote_request_id, int(parsed.kvferry.generation, 16))
        renewed = decode.ask(parsed.remote_port, nine.Renew(parsed.kvferry.epoch, (handle,)))
        assert isinstance(renewed, nine.Renewed)
        assert renewed.lost == ()
        found = decode.read(params, TOKENS)
        [ids] = parsed.remote_block_ids
        caches = prefill.rank.caches
        # A component's blocks come layer by layer, in the order of its names.
        [component] = prefill.rank.shard.groups[0].components
        expected = [caches[layer][block].numpy() for layer in component.layers for block in ids]
        assert len(found) == len(expected) == 8
        for read, held in zip(found, expected, strict=True):
            assert held.any(), "there is nothing to compare"
            np.testing.assert_array_equal(read.reshape(-1).view(np.float32), held.reshape(-1))
        assert num_holds(prefill) == 1
        assert decode.ask(parsed.remote_port, nine.Release(parsed.kvferry.epoch, (handle,))) == nine.Noted(
            parsed.kvferry.epoch
        )
        wait_until(lambda: num_holds(prefill) == 0)
        lost = decode.ask(parsed.remote_port, nine.Renew(parsed.kvferry.epoch, (handle,)))
        assert isinstance(lost, nine.Renewed)
        assert lost.lost == (handle,)
        draining = decode.ask(parsed.remote_port, nine.Drain(False))
        assert isinstance(draining, nine.Draining)
        assert not draining.is_draining
    finally:
        decode.close()


@pytest.mark.parametrize("has_keys", [False, True], ids=["plain", "keys"])
def test_this_version_loads_what_version_9_holds(has_keys: bool, make_engine: Any, keys: str) -> None:
    given: dict[str, Any] = {"keys": keys} if has_keys else {}
    computing: HandoffEngine = make_engine(LAYERS, transport="cma", integrity="off")
    decode: HandoffEngine = make_engine(LAYERS, transport="cma", integrity="off", num_blocks=60, **given)
    blocks = computing.ask("p", TOKENS, {"do_remote_decode": True}, max_tokens=1).params["remote_block_ids"]
    memory = nine.Memory(msgspec.msgpack.decode(encode_shard(computing.rank.shard), type=nine.Shard))
    for region, original in zip(memory.regions, computing.rank.shard.regions, strict=True):
        region[:] = np.frombuffer(nine.bytes_at(original.base_address, original.length), np.uint8)
    prefill = nine.PrefillEngine(memory, THEIRS, keys=nine.Keys(Path(keys)) if has_keys else None)
    try:
        params = prefill.hold("held by 9", TOKENS, blocks)
        if has_keys:
            parsed = msgspec.convert(params, nine.RemoteParams)
            params["kvferry"]["signature"] = Keys(keys).sign(nine.signed_params(parsed)).hex()
        before = decode.num_computed
        answer = decode.ask("d", TOKENS, params)
        assert (answer.has_failed, answer.tokens) == (False, decode.tokens_without_cache(TOKENS, 3))
        assert decode.num_computed - before <= 3, "computed, not loaded"
        wait_until(lambda: not prefill.held)
        assert prefill.server.refused == []
        [handshake] = [each for each in prefill.server.raw if each["type"] == "directory-request"]
        assert (handshake["version"], handshake["newest"]) == (9, 10)
        assert {each["type"] for each in prefill.server.raw} == {"directory-request", "renew", "release"}
    finally:
        prefill.close()


@pytest.mark.parametrize("has_keys", [False, True], ids=["plain", "keys"])
def test_this_version_computes_a_prompt_of_an_adapter_that_version_9_holds(
    has_keys: bool, make_engine: Any, keys: str, tmp_path: Path
) -> None:
    """Version 9 compares adapters by their names, and says no more of them. It reads and believes what this version
    answers for such a prompt.
    """
    given: dict[str, Any] = {"keys": keys} if has_keys else {}
    prefill, decode = make_engine(LAYERS, **given), make_engine(LAYERS, **given)
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(8) + b"weights")
    (tmp_path / "adapter_config.json").write_text("{}")
    adapter = LoRARequest("sql", 1, str(tmp_path))
    answered = prefill.ask("p", TOKENS, {"do_remote_decode": True}, max_tokens=1, lora_request=adapter).params
    parsed = msgspec.convert(answered, nine.RemoteParams)
    nine.check_version(parsed.kvferry.version)
    if has_keys:
        Keys(keys).check(nine.signed_params(parsed), bytes.fromhex(parsed.kvferry.signature))
    of_version_9 = {**answered, **msgspec.to_builtins(parsed)}
    assert answered["kvferry"]["adapter"]
    assert not of_version_9["kvferry"].keys() & {"adapter", "adapter_signature"}
    before = decode.num_computed
    answer = decode.ask("d", TOKENS, of_version_9, lora_request=adapter)
    assert (answer.has_failed, answer.tokens) == (False, decode.tokens_without_cache(TOKENS, 3))
    assert decode.num_computed - before >= len(TOKENS), "loaded"
    wait_until(lambda: num_holds(prefill) == 0)


def test_parameters_are_signed_over_the_bytes_of_version_9() -> None:
    ours = todays.parse_params(RECORDED["params"], "r")
    ferry = msgspec.structs.replace(ours.kvferry, newest=10, adapter="a" * 32, adapter_signature="b" * 144)
    newer = msgspec.structs.replace(ours, kvferry=ferry)
    assert {todays.signed_bytes(each).hex() for each in (ours, newer)} == {RECORDED["signed_params"]}
    theirs = msgspec.convert(msgspec.to_builtins(newer), nine.RemoteParams)
    assert nine.signed_params(theirs).hex() == RECORDED["signed_params"]


def test_a_prompt_has_the_digest_of_version_9() -> None:
    assert todays.prompt_digest(request(PROMPT, {}), len(PROMPT)) == RECORDED["prompt_digest"]
    assert nine.prompt_digest(PROMPT) == RECORDED["prompt_digest"]
