"""Wrong parameters never reach the engine: what the API server refuses, through vLLM's own methods."""

import asyncio
import inspect
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.input_processor import InputProcessor

from kvferry.errors import HandoffError, Reason
from kvferry.handoff.wire.trust import make_keys
from kvferry.integrations.vllm import request_checks
from kvferry.integrations.vllm.request_checks import check_params, check_requests
from kvferry.integrations.vllm.scheduler.router_beacon import encode_zmq_address

from .scheduler_requests import FULL, PROMPT, kept, next_step, request, run_prefill

Connector = tuple[str, dict[str, Any]]
"""Its name and its settings."""
CONFIG: Connector = ("KVFerryConnector", {})
FOREIGN: Connector = ("NixlConnector", {})
IS_ONE_OF_SEVERAL = False


@pytest.fixture(params=[False, True], ids=["alone", "one of several"], autouse=True)
def is_one_of_several(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test with the connector alone, and between others under vLLM's ``MultiConnector``."""
    monkeypatch.setattr(request.module, "IS_ONE_OF_SEVERAL", request.param)


def transfer_config(connector: Connector | None) -> Any:
    """Return the part of vLLM's ``kv_transfer_config`` that names the connectors."""
    if connector is None:
        return None
    name, settings = connector
    if not IS_ONE_OF_SEVERAL:
        return SimpleNamespace(kv_connector=name, kv_connector_extra_config=settings)
    own = {"kv_connector": name} | ({"kv_connector_extra_config": settings} if settings else {})
    offload = {"kv_connector": "KVFerryOffloadConnector"}
    listed = [{**offload, "kv_connector_extra_config": {"mode": "another"}}, own, offload]
    return SimpleNamespace(kv_connector="MultiConnector", kv_connector_extra_config={"connectors": listed})


def check(connector: Connector | None, params: Any) -> None:
    check_params(transfer_config(connector), params, "r")


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
        ("generation", "0" * 16),
        ("generation", None),
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
    check(CONFIG, params)
    with pytest.raises(HandoffError) as refused:
        check(CONFIG, changed(params, name, value))
    assert refused.value.reason is Reason.MALFORMED_MESSAGE
    assert len(str(refused.value)) < 600
    assert str(refused.value).isprintable()


def test_every_field_is_needed(params: dict[str, Any]) -> None:
    paths = [*((name,) for name in params if name.startswith("remote_")), *(("kvferry", n) for n in params["kvferry"])]
    assert len(paths) == 14
    for path in [("kvferry",), *paths]:
        with pytest.raises(HandoffError):
            check(CONFIG, without(params, *path))


def test_what_is_not_for_this_connector_passes(params: dict[str, Any]) -> None:
    check(FOREIGN, {"do_remote_prefill": True})
    check(None, "text")
    check(CONFIG, None)
    check(CONFIG, {"do_remote_decode": True})
    check(CONFIG, {"do_remote_decode": True, "transfer_id": "x"})


@pytest.mark.parametrize("given", ["text", ["do_remote_prefill"], 7])
def test_parameters_that_are_no_object_are_refused(given: Any) -> None:
    """``vllm_xargs`` lets a client write any value there, and vLLM's scheduler takes it for a dictionary."""
    with pytest.raises(HandoffError, match="not an object"):
        check(CONFIG, given)


def test_an_older_prefill_engine_is_named_as_such(params: dict[str, Any]) -> None:
    older = changed(changed(params, "version", 0), "newest", 0)
    with pytest.raises(HandoffError) as refused:
        check(CONFIG, older)
    assert refused.value.reason is Reason.PROTOCOL_MISMATCH
    assert "prefill speaks 0, decode speaks 1" in refused.value.message
    assert "Update kvferry on the prefill engine" in refused.value.remedy
    check(CONFIG, changed(params, "newest", 2))


def admit(params: Any, prompt: list[int], config: Connector = CONFIG, **fields: Any) -> Any:
    """Pass the request on to the engine, as all end points do."""
    processor: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(kv_transfer_config=transfer_config(config)), request=(prompt, fields)
    )
    sampling: Any = SimpleNamespace(extra_args={"kv_transfer_params": params})
    return InputProcessor.process_inputs(processor, "r", "a prompt", sampling, ("generate",))


def processed(processor: Any, request_id: str, *_: Any, **__: Any) -> Any:
    """Stand for vLLM's own method, which needs a model."""
    prompt, fields = processor.request
    given = {"mm_features": None, "prompt_embeds": None, "lora_request": None, "request_id": request_id, **fields}
    return SimpleNamespace(prompt_token_ids=prompt, **given)


@pytest.fixture
def keys(tmp_path: Path) -> str:
    make_keys(tmp_path / "keys")
    return str(tmp_path / "keys")


def serve(
    params: Any, prompt: Any, config: Connector = CONFIG, header: str | None = None, *, stream: bool = False
) -> tuple[Any, list[str]]:
    """Answer a completion request as vLLM does; return the answer and what happened.

    ``header`` is the ``X-Request-Id`` of the HTTP request. A prompt of tokens goes through vLLM's input processor.
    """
    events: list[str] = []

    async def notify(request_id: str, params: Any, **_: Any) -> None:
        events.append(f"let {params['remote_request_id']} go")

    async def create() -> str:
        if stream:
            return "a stream, which asks the engine later"
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            try:
                admit(params, prompt, config)
            except VLLMValidationError as error:
                return GenerateBaseServing.create_error_response(error)
        events.append("begun")
        return "completion"

    serving: Any = SimpleNamespace(
        has_kv_connector=True,
        create_error_response=GenerateBaseServing.create_error_response,
        engine_client=SimpleNamespace(
            vllm_config=SimpleNamespace(kv_transfer_config=transfer_config(config)),
            notify_kv_transfer_request_rejected=notify,
        ),
        _get_data_parallel_rank=lambda _: None,
        _base_request_id=GenerateBaseServing._base_request_id,
    )
    raw_request: Any = SimpleNamespace(headers={} if header is None else {"X-Request-Id": header})
    request: Any = SimpleNamespace(kv_transfer_params=params, prompt=prompt, request_id="r", stream=stream)
    answer = asyncio.run(
        GenerateBaseServing._with_kv_transfer_rejection_cleanup(serving, create(), request, raw_request)  # type: ignore[arg-type]
    )
    return answer, events


def test_hole_10_a_list_of_prompts_is_a_400_that_lets_go_at_once(params: dict[str, Any]) -> None:
    """On both engines: the prefill engine's answer would name the first prompt only; the others' holds would stay."""
    for given, let_go in ((params, ["let r go"]), ({"do_remote_decode": True}, [])):
        for prompts in (["a", "b"], [[1, 2], [3]]):
            answer, events = serve(given, prompts)
            assert (answer.error.code, answer.error.param) == (400, "prompt")
            assert "Send one prompt per request. [unsupported]" in answer.error.message
            assert "kv_transfer_params" not in answer.error.message, "a client behind a router has sent none"
            assert events == let_go
        for prompt in ("a", ["a"], [[1, 2]]):
            assert serve(given, prompt) == ("completion", ["begun"])
    assert serve({}, ["a", "b"]) == ("completion", ["begun"])
    assert serve({"do_remote_prefill": True}, ["a", "b"], FOREIGN) == ("completion", ["begun"])


def test_hole_10_the_connectors_of_the_page_about_offload_are_found(params: dict[str, Any]) -> None:
    """The object of vLLM, with the configuration that users copy: prompts are moved by one of two connectors."""
    page = (Path(__file__).parents[2] / "docs" / "offload.md").read_text()
    [given] = [each for each in re.findall(r"```json\n(.*?)```", page, re.DOTALL) if "MultiConnector" in each]
    config = KVTransferConfig(**json.loads(given))
    for wrong, num_prompts in ((params, 2), (changed(params, "epoch", []), 1)):
        with pytest.raises(HandoffError):
            check_params(config, wrong, "r", num_prompts)
    check_params(config, params, "r")
    offload_alone = KVTransferConfig(kv_connector="KVFerryOffloadConnector", kv_role="kv_both")
    check_params(offload_alone, changed(params, "epoch", []), "r", 2)


NIXL_PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_block_ids": [[1]],
    "remote_host": "prefill-0",
    "remote_port": 5600,
    "tp_size": 1,
}


@pytest.mark.parametrize("own_field", ["kvferry", "transfer_id"])
def test_parameters_of_another_connector_pass_where_the_engine_has_one_that_may_take_them(
    own_field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM gives the prompt to the first connector that has it. What names kvferry is checked all the same."""
    monkeypatch.setattr(InputProcessor, "process_inputs", processed)
    check_requests()
    own = {"kv_connector": "KVFerryConnector"}
    for other, passes in (("NixlConnector", True), ("KVFerryOffloadConnector", False)):
        listed = [{"kv_connector": other}, own]
        config = SimpleNamespace(kv_connector="MultiConnector", kv_connector_extra_config={"connectors": listed})
        monkeypatch.setitem(globals(), "transfer_config", lambda _, config=config: config)
        for prompt in ("a", [1, 2]):
            answer, _ = serve(NIXL_PARAMS, prompt)
            assert (answer == "completion") is passes
        assert (serve(NIXL_PARAMS, ["a", "b"])[0] == "completion") is passes
        for given, prompts in ((NIXL_PARAMS | {own_field: []}, "a"), ({"do_remote_decode": True}, ["a", "b"])):
            assert serve(given, prompts)[0].error.code == 400
    request_checks._lets_go.set(True)
    config.kv_connector_extra_config["connectors"][0]["kv_connector"] = "NixlConnector"
    assert admit(NIXL_PARAMS, [1, 2]).prompt_token_ids == [1, 2]
    request_checks._lets_go.set(False)


def test_a_router_that_names_the_prefill_engine_in_the_request_id_is_understood() -> None:
    """vllm-router with ``--kv-connector moriio`` does so, in a header, and sends no such parameters."""
    address = encode_zmq_address("127.0.0.1", 8998, 5600, "prefill@7")
    given = {"do_remote_prefill": True, "transfer_id": "t", "remote_engine_id": None}
    named = f"___prefill_addr_{address}___decode_addr_host:d_0123"
    assert serve(given, "a", CONFIG, named) == ("completion", ["begun"])
    answer, _ = serve(given, "a", CONFIG, "another id")
    assert "name no transfer" in answer.error.message


def test_malformed_parameters_are_a_400_within_milliseconds(
    params: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    long = changed(params, "remote_block_ids", [list(range(1 << 17))])
    for given in (changed(params, "epoch", []), without(params, "kvferry"), {**long, "remote_port": 0}):
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
    processor: Any = SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=transfer_config(CONFIG)))

    def pass_on(extra_args: Any) -> Any:
        sampling: Any = SimpleNamespace(extra_args=extra_args)
        return InputProcessor.process_inputs(processor, "r", "a prompt", sampling, ("generate",))

    assert [pass_on(each) for each in (None, {}, {"kv_transfer_params": params})] == ["admitted"] * 3
    for wrong in ("text", {"do_remote_prefill": True}, changed(params, "epoch", "7")):
        with pytest.raises(VLLMValidationError, match="kv_transfer_params"):
            pass_on({"kv_transfer_params": wrong})


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_parameters_that_no_trusted_key_has_signed_are_a_400(
    stream: bool, keys: str, make_role: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """In a stream, too: the signature is known before its first byte."""
    config = ("KVFerryConnector", {"keys": keys})
    signed = run_prefill(make_role(FULL, keys=keys), PROMPT, [5, 4, 3, 2, 1]) or {}
    answer, _ = serve(signed, "a", config, stream=stream)
    assert isinstance(answer, str)
    signature = signed["kvferry"]["signature"]
    forgeries = [
        changed(signed, "signature", ""),
        changed(signed, "signature", "0" * 16 + signature[16:]),
        changed(signed, "signature", signature[:-1] + ("0" if signature[-1] != "0" else "1")),
        changed(signed, "remote_block_ids", [[1, 2, 3, 4, 5]]),
        changed(signed, "remote_host", "127.0.0.2"),
        changed(signed, "epoch", signed["kvferry"]["epoch"] + 1),
    ]
    for forged in forgeries:
        caplog.clear()
        answer, events = serve(forged, "a", config, header=f"r{forgeries.index(forged)}", stream=stream)
        assert answer.error.code == 400
        assert "[permission-denied]" in answer.error.message
        assert keys not in answer.error.message, "where keys lie is not for clients"
        assert events == ["let r go"]
        with pytest.raises(VLLMValidationError, match="permission-denied"):
            admit(forged, PROMPT, config)


def test_an_api_server_that_cannot_read_the_keys_leaves_signatures_to_its_engine(
    make_role: Any, tmp_path: Path
) -> None:
    config = ("KVFerryConnector", {"keys": str(tmp_path / "elsewhere")})
    params = run_prefill(make_role(FULL), PROMPT, [5, 4, 3, 2, 1]) or {}
    assert serve(params, "a", config) == ("completion", ["begun"])
    assert serve(changed(params, "epoch", []), "a", config)[0].error.code == 400


@pytest.mark.parametrize("host", ["203.0.113.1", "[2001:db8::1]", "0.0.0.0", "::ffff:203.0.113.1"])
def test_an_address_to_which_the_engine_does_not_connect_is_a_400(host: str, params: dict[str, Any]) -> None:
    """Names are not looked up here: the engine does, on another thread."""
    named = {"do_remote_prefill": True, "transfer_id": "t", "remote_engine_id": "e"}
    url = f"http://{host if host.startswith('[') or ':' not in host else f'[{host}]'}:8998"
    for given in (params | {"remote_host": host}, named | {"remote_bootstrap_addr": url}):
        answer, _ = serve(given, "a")
        assert answer.error.code == 400
        assert "[permission-denied]" in answer.error.message
        for allowed in ({"allowed_hosts": ["203.0.0.0/8", "2001:db8::/32", "0.0.0.0"]}, {"allowed_hosts": ["a-name"]}):
            assert serve(given, "a", ("KVFerryConnector", allowed)) == ("completion", ["begun"])
    for name in ("prefill-0", "localhost", "127.9.9.9"):
        assert serve(params | {"remote_host": name}, "a") == ("completion", ["begun"])


def test_settings_of_a_program_may_be_sets(params: dict[str, Any]) -> None:
    """``LLM(kv_transfer_config=...)`` gets its settings from Python, not from JSON."""
    config = "KVFerryConnector", {"allowed_hosts": {"203.0.113.0/24", "a-name"}}
    assert serve(params | {"remote_host": "203.0.113.1"}, "a", config) == ("completion", ["begun"])


def test_the_name_of_a_hold_is_no_transfer_of_a_router(params: dict[str, Any]) -> None:
    """Only who has read the prefill engine's answer may have the prompt."""
    hold = f"hold:{params['kvferry']['generation']}"
    named = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_bootstrap_addr": "http://127.0.0.1:1"}
    assert serve({**named, "transfer_id": "t"}, "a") == ("completion", ["begun"])
    answer, _ = serve({**named, "transfer_id": hold}, "a")
    assert answer.error.code == 400
    assert "is the name of a hold" in answer.error.message


@pytest.mark.parametrize("address", ["prefill-0:8998", "http://a:8998/query?b", "http://user@a:8998", "ftp://a:1"])
def test_a_bootstrap_address_that_is_none_is_a_400(address: str) -> None:
    given = {"do_remote_prefill": True, "transfer_id": "t", "remote_engine_id": "e", "remote_bootstrap_addr": address}
    answer, _ = serve(given, "a")
    assert answer.error.code == 400
    assert "[malformed-message]" in answer.error.message


def test_parameters_of_another_prompt_are_a_400_that_lets_go_at_once(
    params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InputProcessor, "process_inputs", processed)
    check_requests()
    assert serve(params, PROMPT) == ("completion", ["begun"])
    # A prefill engine of a model with states holds all but the last token.
    assert serve(params, [*PROMPT, 7])[0] == "completion"
    other_digest = changed(params, "prompt_digest", "0" * 32)
    other_count = changed(params, "num_tokens", params["kvferry"]["num_tokens"] - 2)
    for given, prompt in (
        (params, PROMPT[::-1]),
        (params, PROMPT[:-1]),
        (params, [*PROMPT, 7, 8]),
        (other_digest, PROMPT),
        (other_count, PROMPT),
    ):
        answer, events = serve(given, prompt)
        assert answer.error.code == 400
        assert "[invalid-request]" in answer.error.message
        assert events == ["let r go"]


def test_where_a_refusal_would_not_let_the_hold_go_the_engine_compares_the_prompt(
    params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream has begun by then. So has the exchange of an image, which vLLM believes the engine to have."""
    monkeypatch.setattr(InputProcessor, "process_inputs", processed)
    check_requests()
    assert admit(params, PROMPT[::-1]).prompt_token_ids == PROMPT[::-1]
    request_checks._lets_go.set(True)
    with pytest.raises(VLLMValidationError, match="invalid-request"):
        admit(params, PROMPT[::-1])
    assert admit(params, PROMPT[::-1], mm_features=["an image"]).prompt_token_ids == PROMPT[::-1]
    named = {"do_remote_prefill": True, "transfer_id": "t", "remote_engine_id": "e"}
    assert admit(named | {"remote_bootstrap_addr": "http://127.0.0.1:1"}, PROMPT).prompt_token_ids == PROMPT
    request_checks._lets_go.set(False)


def test_a_refused_request_lets_the_hold_go_that_a_trusted_engine_has_signed(keys: str, make_role: Any) -> None:
    """VLLM tells the engine of a request that was refused at the door: of another prompt, for example."""
    prefill, decode = make_role(FULL, keys=keys), make_role(FULL, keys=keys)
    params = run_prefill(prefill, PROMPT, [5, 4, 3, 2, 1]) or {}

    def refuse(given: dict[str, Any]) -> None:
        """As vLLM does, with a request that is aborted at once."""
        rejected = request([0], dict(given), "rejected")
        decode.on_new_request(rejected)
        decode.request_finished(rejected, ([],), is_complete=False)

    refuse(changed(params, "remote_request_id", "another"))
    for _ in range(30):
        time.sleep(0.01)
        next_step(prefill)
        assert sorted(kept(prefill)) == [1, 2, 3, 4, 5], "nobody has signed the release of that hold"
    refuse(params)
    deadline = time.monotonic() + 20
    while kept(prefill):
        assert time.monotonic() < deadline, "the hold is not released"
        time.sleep(0.01)
        next_step(prefill)


def test_vllm_has_the_methods_that_the_plugin_wraps() -> None:
    around = inspect.signature(inspect.unwrap(GenerateBaseServing._with_kv_transfer_rejection_cleanup))
    assert list(around.parameters) == ["self", "awaitable", "request", "raw_request"]
    before = inspect.signature(inspect.unwrap(InputProcessor.process_inputs))
    assert list(before.parameters)[:4] == ["self", "request_id", "prompt", "params"]
