"""A refused handshake: the log of each engine names the field, the values of both engines, and what to do."""

import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from kvferry.handoff import handshake, remote_holds
from kvferry.handoff.handshake import OURS, Versions
from kvferry.handoff.messages import PROTOCOL_VERSION
from kvferry.integrations.vllm.scheduler import params as scheduler_params
from kvferry.layout.shard import Atom, encode_shard
from kvferry.peer_log import LINES_PER_SECOND

from .handoff_engine import IDENTITY, HandoffEngine
from .handoff_engine import make_engine as make_engine
from .vllm_caches import full

LAYERS = {"0": full(1), "1": full(1)}
TOKENS = [(7 * index + 3) % 500 for index in range(64)]
UPDATE = "Update kvferry on the {} engine"
Patch = pytest.MonkeyPatch
Change = Callable[[HandoffEngine, Patch], None]
SCHEDULER, WORKER, SERVER = (
    f"kvferry.{name}"
    for name in ("integrations.vllm.scheduler.role", "integrations.vllm.worker.role", "handoff.wire.server")
)


def as_if(**fields: object) -> Change:
    """The decode engine serves something else."""

    def change(decode: HandoffEngine, patch: Patch) -> None:
        decode.worker._worker._rank.source_engines._identity = msgspec.structs.replace(IDENTITY, **fields)

    return change


def of_other_weights(decode: HandoffEngine, patch: Patch) -> None:
    decode.worker._worker._rank.source_engines._weights_version = "step 2"


def of_version(version: int) -> Change:
    def change(decode: HandoffEngine, patch: Patch) -> None:
        patch.setattr(handshake, "OURS", Versions(version, version))

    return change


def of_another_group(decode: HandoffEngine, patch: Patch) -> None:
    engines = decode.worker._worker._rank.source_engines
    [group] = engines._shard.groups
    groups = (msgspec.structs.replace(group, name="other"),)
    engines._shard = msgspec.structs.replace(engines._shard, groups=groups)


def with_packed_pages(decode: HandoffEngine, patch: Patch) -> None:
    engines = decode.worker._worker._rank.source_engines
    [group] = engines._shard.groups
    [component] = group.components
    component = msgspec.structs.replace(component, packing="cpu_attn:amx:float32", atom=Atom.PAGE)
    engines._shard = msgspec.structs.replace(
        engines._shard, groups=(msgspec.structs.replace(group, components=(component,)),)
    )
    assert encode_shard(engines._shard)


REFUSALS: dict[str, tuple[Change, tuple[str, ...], str, str]] = {
    "weights": (
        as_if(weights="others"),
        ("weights: prefill has 'w', decode has 'others'", "the same --model, --revision.", "[model-mismatch]"),
        SCHEDULER,
        "decode rank",
    ),
    "head size": (
        as_if(head_size=128),
        ("head_size: prefill has 8, decode has 128", "the same --model, --revision.", "[head-size-mismatch]"),
        SCHEDULER,
        "decode rank",
    ),
    "cache dtype": (
        as_if(kv_dtype="float16"),
        ("kv_dtype: prefill has 'float32', decode has 'float16'", "the same --kv-cache-dtype.", "[dtype-mismatch]"),
        SCHEDULER,
        "decode rank",
    ),
    "version of the weights": (
        of_other_weights,
        ("weights_version: prefill has 'default', decode has 'step 2'", "set the same weight version"),
        SCHEDULER,
        "decode rank",
    ),
    "an older decode engine": (
        of_version(PROTOCOL_VERSION - 1),
        (f"prefill speaks {OURS}, decode speaks {PROTOCOL_VERSION - 1}", UPDATE.format("decode")),
        SERVER,
        "refused a message",
    ),
    "a newer decode engine": (
        of_version(PROTOCOL_VERSION + 1),
        (f"prefill speaks {OURS}, decode speaks {PROTOCOL_VERSION + 1}", UPDATE.format("prefill")),
        SERVER,
        "refused a message",
    ),
    "cache groups": (
        of_another_group,
        (
            "the sources have cache groups ['0'], the destination has ['other']",
            "[group-mismatch]",
            "--disable-hybrid-kv-cache-manager on both or on neither",
        ),
        SCHEDULER,
        "decode rank",
    ),
    "layout of pages": (
        with_packed_pages,
        ("'plain' and 'cpu_attn:amx:float32'", "[packing-mismatch]", "Run both engines on one kind of processor"),
        SCHEDULER,
        "decode rank",
    ),
}


def lines_of(caplog: pytest.LogCaptureFixture, logger: str, text: str, seconds: float = 20.0) -> list[str]:
    """Return the lines of a logger that have the text, once there is one."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = [each.getMessage() for each in caplog.records if each.name == logger and text in each.getMessage()]
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"{logger} says nothing: {caplog.text}")


@pytest.mark.parametrize("name", REFUSALS)
def test_both_logs_name_the_field_both_values_and_the_remedy(
    name: str, make_engine: Any, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    change, told, prefills_logger, prefills_text = REFUSALS[name]
    prefill: HandoffEngine = make_engine(LAYERS)
    decode: HandoffEngine = make_engine(LAYERS)
    change(decode, monkeypatch)
    params = prefill.ask("p", TOKENS, {"do_remote_decode": True}, max_tokens=1).params
    with caplog.at_level(logging.INFO):
        assert decode.ask("d", TOKENS, params).has_failed
        lines = lines_of(caplog, WORKER, "failed to load d"), lines_of(caplog, prefills_logger, prefills_text)
    for line in (line for side in lines for line in side):
        assert [text for text in told if text not in line] == [], line


FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "another prompt": (
        lambda params: changed(params, prompt_digest="0" * 32),
        f"prompt_digest: the kv_transfer_params have '{'0' * 32}', this request has '",
    ),
    "another length": (
        lambda params: changed(params, num_tokens=len(TOKENS) - 1),
        f"num_tokens: the kv_transfer_params have {len(TOKENS) - 1}, this request has {len(TOKENS)}",
    ),
}


def changed(params: dict[str, Any], **fields: object) -> dict[str, Any]:
    return params | {"kvferry": params["kvferry"] | fields}


@pytest.mark.parametrize("name", FORGERIES)
def test_both_logs_say_why_a_prompt_is_refused(name: str, make_engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    forge, told = FORGERIES[name]
    prefill: HandoffEngine = make_engine(LAYERS)
    decode: HandoffEngine = make_engine(LAYERS)
    params = prefill.ask("p", TOKENS, {"do_remote_decode": True}, max_tokens=1).params
    assert decode.ask("d", TOKENS, forge(params)).has_failed
    for text in ("d cannot be loaded", "decode engine engine-1 refuses a prompt of this prefill engine"):
        [line] = lines_of(caplog, SCHEDULER, text)
        assert told in line
        assert "[invalid-request]" in line


@pytest.mark.parametrize(
    ("forge", "told"),
    [
        (
            lambda params: params | {"remote_engine_id": "another"},
            "name engine 'another' at the address of 'engine-0'",
        ),
        (
            lambda params: changed(params, block_sizes=[8]),
            "block sizes [8] of engine 'engine-0', whose cache group 0 has blocks of 16 tokens",
        ),
    ],
    ids=["engine id", "block sizes"],
)
def test_wrong_parameters_are_named_with_both_values(
    forge: Any, told: str, make_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    prefill: HandoffEngine = make_engine(LAYERS)
    decode: HandoffEngine = make_engine(LAYERS)
    params = prefill.ask("p", TOKENS, {"do_remote_decode": True}, max_tokens=1).params
    assert decode.ask("d", TOKENS, forge(params)).has_failed
    [line] = lines_of(caplog, WORKER, "failed to load d")
    assert told in line
    assert "[wrong-parameters]" in line


def test_a_prefill_engine_that_is_too_old_is_told_too(
    make_engine: Any, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its parameters come through a router: without a word to it, only the decode engine would know."""
    older = Versions(PROTOCOL_VERSION - 1, PROTOCOL_VERSION - 1)
    prefill: HandoffEngine = make_engine(LAYERS)
    decode: HandoffEngine = make_engine(LAYERS)
    monkeypatch.setattr(scheduler_params, "OURS", older)
    params = prefill.ask("p", TOKENS, {"do_remote_decode": True}, max_tokens=1).params
    assert params["kvferry"]["version"] == PROTOCOL_VERSION - 1
    # The older engine is today's, so this one must ask as if by versions that nobody speaks.
    monkeypatch.setattr(remote_holds, "OURS", Versions(PROTOCOL_VERSION + 1, PROTOCOL_VERSION + 1))
    assert decode.ask("d", TOKENS, params).has_failed
    [line] = lines_of(caplog, SCHEDULER, "d cannot be loaded")
    assert f"prefill speaks {older}, decode speaks {OURS}" in line
    assert "Update kvferry on the prefill engine" in line
    [told] = lines_of(caplog, SERVER, "refused a message")
    assert f"prefill speaks {OURS}, decode speaks {PROTOCOL_VERSION + 1}" in told


def test_refusals_do_not_flood_the_log_of_the_engine_that_is_refused(
    make_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    prefill: HandoffEngine = make_engine(LAYERS)
    role = prefill.connector._scheduler
    told = handshake.HandshakeRefused(
        "model-mismatch", "no\nERROR forged", "none\x1b[2J", version=PROTOCOL_VERSION, epoch=1, sender="d/0"
    )
    for number in range(100):
        role._answer(msgspec.structs.replace(told, sender=f"d/{number}"))
    lines = [each for each in caplog.messages if "refuses this prefill engine" in each]
    assert 1 <= len(lines) <= LINES_PER_SECOND
    assert all(line.isprintable() for line in lines)
