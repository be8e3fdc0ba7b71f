"""What a client learns of a failed load: vLLM's own error handlers behind the middleware, without an engine."""

import json
import threading
from argparse import Namespace
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.requests import Request
from starlette.testclient import TestClient
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware
from vllm.exceptions import GenerationError

from kvferry.errors import HandoffError, Reason, TransportError
from kvferry.execution.executor import JobResult
from kvferry.integrations.vllm import failed_loads
from kvferry.integrations.vllm.failed_loads import FailedLoads
from kvferry.integrations.vllm.worker.records import PrometheusMetrics, Statistics

MIDDLEWARE = "kvferry.integrations.vllm.failed_loads.FailedLoadAnswers"
"""As a user gives it to ``--middleware``."""
ERROR_EVENT = b'data: {"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}}\n\n'


@pytest.fixture(autouse=True)
def failed(monkeypatch: pytest.MonkeyPatch) -> FailedLoads:
    """The failed loads of this test alone."""
    from kvferry.integrations.vllm.worker import records

    registry = FailedLoads()
    monkeypatch.setattr(failed_loads, "FAILED", registry)
    monkeypatch.setattr(records, "FAILED", registry)
    monkeypatch.setattr(failed_loads, "ARRIVAL_SECONDS", 0.2)
    return registry


@pytest.fixture
def client() -> Iterator[TestClient]:
    """A server that ends every request as vLLM's does when its load has failed, or as its path says."""
    app = FastAPI()
    init_exception_handler(app)
    origins = {"allowed_origins": ["*"], "allow_credentials": False, "allowed_methods": ["*"], "allowed_headers": ["*"]}
    given = Namespace(middleware=[MIDDLEWARE], api_key=None, enable_request_id_headers=True, **origins)
    init_entrypoints_middleware(given, app, ("generate",))
    app.state.seen = []

    @app.post("/v1/completions")
    async def complete(request: Request) -> None:
        app.state.seen.append(request.headers["x-request-id"])
        raise GenerationError("Internal server error")

    @app.post("/stream")
    async def stream() -> StreamingResponse:
        async def events() -> AsyncIterator[bytes]:
            yield b'data: {"choices": [{"text": "Internal server error"}]}\n\n'
            yield ERROR_EVENT
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    @app.post("/other")
    async def other() -> None:
        raise GenerationError("the disk is full")

    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


def metrics() -> Any:
    registry = CollectorRegistry()

    def made(metric: Any) -> Any:
        return lambda **named: metric(registry=registry, **named)

    types = {Gauge: made(Gauge), Counter: made(Counter), Histogram: made(Histogram)}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    return PrometheusMetrics(config, types, ["engine"], {0: ["0"]})  # type: ignore[arg-type]


def fail(request_id: str, reason: Reason) -> None:
    """Let two ranks report a failed load, through what vLLM carries from the workers to the API server."""
    ranks = Statistics(), Statistics()
    ranks[0].record(JobResult(request_id, TransportError(reason, "10.0.0.7:5600 did it.")))
    ranks[1].record(JobResult(request_id, HandoffError(Reason.ABORTED, "the other rank failed.")))
    total = Statistics(json.loads(json.dumps(ranks[1].to_dict()))).aggregate(ranks[0])
    metrics().observe(total.to_dict())


@pytest.mark.parametrize(
    ("reason", "status", "retry"),
    [
        (Reason.PEER_DIED, 503, True),
        (Reason.LEASE_EXPIRED, 503, True),
        (Reason.MODEL_MISMATCH, 500, False),
        (Reason.INVALID_REQUEST, 400, False),
        (Reason.WRONG_PARAMETERS, 400, False),
    ],
)
def test_hole_8_the_client_learns_why_a_load_failed_and_whether_to_send_the_request_again(
    reason: Reason, status: int, retry: bool, client: TestClient
) -> None:
    fail("cmpl-7c1e-0-9f3b12aa", reason)
    answer = client.post("/v1/completions", headers={"X-Request-Id": "7c1e"})
    error = answer.json()["error"]
    assert answer.status_code == error["code"] == status
    assert (error["reason"], error["retry"]) == (reason.value, retry)
    assert reason.value in error["message"]
    assert "10.0.0.7" not in answer.text, "where other engines are is not for clients"


def test_sglang_32267_a_stream_ends_with_the_reason_of_its_failed_load(client: TestClient) -> None:
    fail("0_chatcmpl-77-9f3b12aa", Reason.SOURCE_CHANGED)
    answer = client.post("/stream", headers={"X-Request-Id": "77"})
    text, error, end = [line for line in answer.text.split("\n") if line]
    assert text == 'data: {"choices": [{"text": "Internal server error"}]}'
    assert json.loads(error.removeprefix("data: "))["error"]["reason"] == "source-changed"
    assert end == "data: [DONE]"


def test_a_request_without_an_id_is_given_one_by_which_its_reason_is_found(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failed_loads.secrets, "token_hex", lambda _: "given")
    fail("cmpl-given-0-9f3b12aa", Reason.PEER_DIED)
    assert client.post("/v1/completions").status_code == 503
    assert client.app.state.seen == ["given"]  # type: ignore[attr-defined]


def test_a_reason_that_comes_a_little_later_than_the_error_is_awaited(client: TestClient) -> None:
    later = threading.Timer(0.05, fail, ("cmpl-late-0-9f3b12aa", Reason.PEER_DIED))
    later.start()
    assert client.post("/v1/completions", headers={"X-Request-Id": "late"}).status_code == 503
    later.join()


def test_an_error_of_another_kind_or_of_another_request_is_left_as_it_is(client: TestClient) -> None:
    fail("cmpl-7c1e-0-9f3b12aa", Reason.PEER_DIED)
    for path, request_id, message in (
        ("/other", "7c1e", "the disk is full"),
        ("/v1/completions", "7c1", "Internal server error"),
    ):
        answer = client.post(path, headers={"X-Request-Id": request_id})
        assert (answer.status_code, answer.json()["error"]["message"]) == (500, message)
        assert "reason" not in answer.json()["error"]


def test_an_aborted_load_explains_nothing() -> None:
    statistics = Statistics()
    statistics.record(JobResult("r", HandoffError(Reason.ABORTED, "the client went away.")))
    assert statistics.data["failed_requests"] == {}
    assert not statistics.is_empty(), "counted all the same"


def test_failed_requests_are_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvferry.integrations.vllm.worker import records

    monkeypatch.setattr(records, "MAX_FAILED", 3)
    statistics = Statistics()
    for number in range(5):
        statistics.record(JobResult(f"r{number}", TransportError(Reason.PEER_DIED, "gone.")))
    assert list(statistics.data["failed_requests"]) == ["r0", "r1", "r2"]
    assert statistics.data["failures"] == {"peer-died": 5}


def test_a_reason_is_found_as_fast_among_thousands_of_failed_requests() -> None:
    """An answer looks for its reason a hundred times a second, and clients cause as many failed loads as they like."""
    failed = FailedLoads()
    looked_at = []

    class Watched(OrderedDict[str, str]):
        def __iter__(self) -> Iterator[str]:
            looked_at.append(len(self))
            return super().__iter__()

        def items(self) -> Any:
            looked_at.append(len(self))
            return super().items()

    failed.note({f"cmpl-{number}-0-9f3b12aa": "peer-died" for number in range(2 * failed_loads.MAX_FAILED)})
    assert failed.reason_of("0") is None, "the oldest are forgotten"
    failed._reasons = Watched(failed._reasons)  # type: ignore[assignment]
    looked_at.clear()
    for number in range(failed_loads.MAX_FAILED, 2 * failed_loads.MAX_FAILED):
        assert failed.reason_of(str(number)) is Reason.PEER_DIED
    assert failed.reason_of("unknown") is None
    assert looked_at == []


@pytest.mark.parametrize(
    "name",
    [
        "chatcmpl-{}-9f3b12aa",
        "cmpl-{}-0-9f3b12aa",
        "3_cmpl-{}-0-9f3b12aa",
        "generate-tokens-{}-9f3b12aa",
        "cmpl-{}-0",
        "chatcmpl-{}",
        "{}",
    ],
)
@pytest.mark.parametrize("request_id", ["7c1e", "2f1a-4c-99", "-", "___prefill_addr_host:1,zmq:9___decode_addr_h:2_77"])
def test_every_name_that_vllm_makes_of_a_request_id_is_found(name: str, request_id: str) -> None:
    failed = FailedLoads()
    failed.note({name.format(request_id): "peer-died", "cmpl-other-0-9f3b12aa": "lease-expired"})
    assert failed.reason_of(request_id) is Reason.PEER_DIED
