"""Wrong parameters never reach the engine: what the API server refuses, through vLLM's own methods."""

import asyncio
import inspect
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.input_processor import InputProcessor

from kvferry.errors import HandoffError, Reason
from kvferry.integrations.vllm.request_checks import check_params, check_requests
from kvferry.integrations.vllm.scheduler.router_beacon import encode_zmq_address

from .scheduler_requests import FULL, PROMPT, run_prefill

CONFIG = SimpleNamespace(kv_connector="KVFerryConnector", kv_connector_extra_config={})
PUSH = SimpleNamespace(kv_connector="KVFerryConnector", kv_connector_extra_config={"mode": "push"})
FOREIGN = SimpleNamespace(kv_connector="NixlConnector", kv_connector_extra_config={})


@pytest.fixture
def params(make_role: Any) -> dict[str, Any]:
    return run_prefill(make_role(FULL), PROMPT, [5, 4, 3, 2, 1]) or {}


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrap vLLM's methods as the plugin does, and unwrap them afterwards."""
    for owner, name in (
        (GenerateBaseServing, "_with_kv_transfer_rejection_cleanup"),
        (InputProcessor, "process_inputs"),
    ):
        monkeypatch.setattr(owner, name, inspect.unwrap(getattr(owner, name)))
    check_requests()
    wrapped = InputProcessor.process_inputs
    check_requests()
    assert InputProcessor.process_inputs is wrapped, "wrapped twice"


def without(params: dict[str, Any], *path: str) -> dict[str, Any]:
    changed = {**params, "kvferry": {**params["kvferry"]}}
    place = changed
    for name in path[:-1]:
        place = place[name]
    del place[path[-1]]
    return changed


def changed(params: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    if name in params:
        return {**params, name: value}
    return {**params, "kvferry": {**params["kvferry"], name: value}}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("remote_host", "a\nhost"),
        ("remote_host", "a\x1b[31mhost"),
        ("remote_host", "a" * 256),
        ("remote_request_id", "\ud800"),
        ("remote_request_id", "r\x00"),
        ("remote_request_id", "r" * 513),
        ("remote_engine_id", ""),
        ("remote_engine_id", ["engine"]),
        ("remote_port", 0),
        ("remote_port", 65536),
        ("remote_port", "5600"),
        ("remote_block_ids", 7),
        ("remote_block_ids", [7]),
        ("remote_block_ids", [[-1]]),
        ("remote_block_ids", [["7"]]),
        ("remote_block_ids", [[1 << 63]]),
        ("remote_block_ids", [[1]] * 4097),
        ("kvferry", []),
        ("generation", "\ud800"),
        ("epoch", "\ud800"),
        ("epoch", -1),
        ("epoch", 1.5),
        ("generation", 7),
        ("generation", "7"),
        ("generation", "0" * 16 + "\n"),
        ("generation", "f" * 16),
        ("slot", None),
        ("slot", 2**70),
        ("is_late", "yes"),
        ("lease_seconds", 0),
        ("lease_seconds", float("inf")),
        ("num_tokens", 0),
        ("num_tokens", 1 << 40),
        ("prompt_digest", "x" * 32),
        ("block_sizes", [0]),
        ("block_sizes", {"0": 16}),
    ],
)
def test_a_field_of_another_type_or_beyond_its_bounds_is_refused(name: str, value: Any, params: dict[str, Any]) -> None:
    check_params(CONFIG, params, "r")
    with pytest.raises(HandoffError) as refused:
        check_params(CONFIG, changed(params, name, value), "r")
    assert refused.value.reason is Reason.MALFORMED_MESSAGE
    assert len(str(refused.value)) < 600
    assert str(refused.value).isprintable()


def test_every_field_is_needed(params: dict[str, Any]) -> None:
    """All but ``newest``, which a prefill engine of version 9 does not say."""
    params = without(params, "kvferry", "newest")
    paths = [*((name,) for name in params if name.startswith("remote_")), *(("kvferry", n) for n in params["kvferry"])]
    assert len(paths) > 12
    for path in [("kvferry",), *paths]:
        with pytest.raises(HandoffError):
            check_params(CONFIG, without(params, *path), "r")


def test_what_is_not_for_this_connector_passes(params: dict[str, Any]) -> None:
    check_params(FOREIGN, {"do_remote_prefill": True}, "r")
    check_params(None, "text", "r")
    check_params(CONFIG, None, "r")
    check_params(CONFIG, {"do_remote_decode": True}, "r")
    check_params(PUSH, {"do_remote_decode": True, "transfer_id": "x"}, "r")


@pytest.mark.parametrize("given", ["text", ["do_remote_prefill"], 7])
def test_parameters_that_are_no_object_are_refused(given: Any) -> None:
    """``vllm_xargs`` lets a client write any value there, and vLLM's scheduler takes it for a dictionary."""
    with pytest.raises(HandoffError, match="not an object"):
        check_params(CONFIG, given, "r")


def test_an_older_prefill_engine_is_named_as_such(params: dict[str, Any]) -> None:
    with pytest.raises(HandoffError) as refused:
        check_params(CONFIG, without(changed(params, "version", 8), "kvferry", "newest"), "r")
    assert refused.value.reason is Reason.PROTOCOL_MISMATCH
    assert "prefill speaks 8, decode speaks 9 to 10" in refused.value.message
    assert "Update kvferry on the prefill engine" in refused.value.remedy
    check_params(CONFIG, without(params, "kvferry", "newest"), "r")


def serve(params: Any, prompt: Any, config: Any = CONFIG, header: str | None = None) -> tuple[Any, list[str]]:
    """Answer a completion request as vLLM does; return the answer and what happened.

    ``header`` is the ``X-Request-Id`` of the HTTP request.
    """
    events: list[str] = []

    async def notify(request_id: str, params: Any, **_: Any) -> None:
        events.append(f"let {params['remote_request_id']} go")

    async def create() -> str:
        events.append("begun")
        return "completion"

    serving: Any = SimpleNamespace(
        has_kv_connector=True,
        create_error_response=GenerateBaseServing.create_error_response,
        engine_client=SimpleNamespace(
            vllm_config=SimpleNamespace(kv_transfer_config=config), notify_kv_transfer_request_rejected=notify
        ),
        _get_data_parallel_rank=lambda _: None,
        _base_request_id=GenerateBaseServing._base_request_id,
    )
    raw_request: Any = SimpleNamespace(headers={} if header is None else {"X-Request-Id": header})
    request: Any = SimpleNamespace(kv_transfer_params=params, prompt=prompt, request_id="r")
    answer = asyncio.run(
        GenerateBaseServing._with_kv_transfer_rejection_cleanup(serving, create(), request, raw_request)  # type: ignore[arg-type]
    )
    return answer, events


def test_a_list_of_prompts_is_a_400_that_lets_go_at_once(params: dict[str, Any]) -> None:
    """On both engines: the prefill engine's answer would name the first prompt only; the others' holds would stay."""
    for given, let_go in ((params, ["let r go"]), ({"do_remote_decode": True}, [])):
        for prompts in (["a", "b"], [[1, 2], [3]]):
            answer, events = serve(given, prompts)
            assert (answer.error.code, answer.error.param) == (400, "kv_transfer_params")
            assert "[unsupported]" in answer.error.message
            assert events == let_go
        for prompt in ("a", [1, 2], ["a"], [[1, 2]]):
            assert serve(given, prompt) == ("completion", ["begun"])
    assert serve({}, ["a", "b"]) == ("completion", ["begun"])
    assert serve({"do_remote_prefill": True}, ["a", "b"], FOREIGN) == ("completion", ["begun"])


def test_a_router_that_names_the_prefill_engine_in_the_request_id_is_understood() -> None:
    """vllm-router with ``--kv-connector moriio`` does so, in a header, and sends no such parameters."""
    address = encode_zmq_address("127.0.0.1", 8998, 5600, "prefill@7")
    given = {"do_remote_prefill": True, "transfer_id": "t", "remote_engine_id": None}
    named = f"___prefill_addr_{address}___decode_addr_host:d_0123"
    assert serve(given, "a", PUSH, named) == ("completion", ["begun"])
    answer, _ = serve(given, "a", PUSH, "another id")
    assert "name no push" in answer.error.message


def test_malformed_parameters_are_a_400_within_milliseconds(
    params: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    long = changed(params, "remote_block_ids", [list(range(1 << 17))])
    for given in (changed(params, "slot", []), without(params, "kvferry"), {**long, "remote_port": 0}):
        started = time.monotonic()
        answer, events = serve(given, "a")
        assert time.monotonic() - started < 0.5
        assert answer.error.code == 400
        assert "[malformed-message]" in answer.error.message
        assert events == ["let r go"]
    assert [line for line in caplog.messages if "kvferry: r is refused" in line and "[malformed-message]" in line]


def test_every_way_to_the_engine_is_checked(params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As requests that pass none of the end points for completions, chat and responses."""
    monkeypatch.setattr(InputProcessor, "process_inputs", lambda *_, **__: "admitted")
    check_requests()
    processor: Any = SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=CONFIG))

    def admit(extra_args: Any) -> Any:
        sampling: Any = SimpleNamespace(extra_args=extra_args)
        return InputProcessor.process_inputs(processor, "r", "a prompt", sampling, ("generate",))

    assert [admit(each) for each in (None, {}, {"kv_transfer_params": params})] == ["admitted"] * 3
    for wrong in ("text", {"do_remote_prefill": True}, changed(params, "epoch", "7")):
        with pytest.raises(VLLMValidationError, match="kv_transfer_params"):
            admit({"kv_transfer_params": wrong})


def test_vllm_has_the_methods_that_the_plugin_wraps() -> None:
    around = inspect.signature(inspect.unwrap(GenerateBaseServing._with_kv_transfer_rejection_cleanup))
    assert list(around.parameters) == ["self", "awaitable", "request", "raw_request"]
    before = inspect.signature(inspect.unwrap(InputProcessor.process_inputs))
    assert list(before.parameters)[:4] == ["self", "request_id", "prompt", "params"]
