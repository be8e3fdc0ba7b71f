"""``GET /ready`` of an API server: what a router or a readiness probe learns of an engine that drains or has ended."""

import shutil
import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from fastapi import FastAPI
from starlette.testclient import TestClient
from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware

from kvferry.cli.drain import ask_drain
from kvferry.handoff.wire.trust import make_keys
from kvferry.harness.launch import free_port
from kvferry.integrations.vllm import readiness

from .scheduler_requests import FULL

MIDDLEWARE = "kvferry.integrations.vllm.readiness.Readiness"
"""As a user gives it to ``--middleware``."""
READY, DRAINS = (200, {"ready": True}), (503, {"ready": False, "reason": "draining"})


@pytest.fixture(autouse=True)
def ask_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "KNOWN_SECONDS", 0.0)


def server(connector_settings: dict[str, Any], connector: str = "KVFerryConnector", num_ranks: int = 1) -> TestClient:
    """Return an API server with the middleware, and with a key of its own for its other paths."""
    app = FastAPI()
    origins = {"allowed_origins": ["*"], "allow_credentials": False, "allowed_methods": ["*"], "allowed_headers": ["*"]}
    given = Namespace(middleware=[MIDDLEWARE], api_key=["secret"], enable_request_id_headers=False, **origins)
    init_entrypoints_middleware(given, app, ("generate",))
    transfer = SimpleNamespace(kv_connector=connector, kv_connector_extra_config=connector_settings)
    parallel = SimpleNamespace(data_parallel_index=0, data_parallel_size_local=num_ranks)
    config = SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel)
    app.state.engine_client = SimpleNamespace(vllm_config=config)

    @app.get("/health")
    async def health() -> str:
        return "alive"

    return TestClient(app)


def ready(client: TestClient) -> tuple[int, Any]:
    answer = client.get("/ready")
    return answer.status_code, answer.json()


def test_an_engine_that_was_told_to_drain_is_alive_and_not_ready(make_role: Any) -> None:
    role = make_role(FULL, port=free_port())
    client = server({"port": role._server.port})
    assert ready(client) == READY
    ask_drain(f"127.0.0.1:{role._server.port}", None, begin=True)
    assert not role._state.holds.is_draining, "routers need some seconds to notice"
    assert ready(client) == DRAINS
    assert client.get("/health").json() == "alive"
    assert client.post("/ready").status_code == 404


def test_an_engine_that_does_not_answer_is_not_ready(make_role: Any, caplog: pytest.LogCaptureFixture) -> None:
    role = make_role(FULL, port=free_port())
    client = server({"port": role._server.port})
    role.shutdown()
    assert ready(client) == (503, {"ready": False, "reason": "peer-unreachable"})
    assert "nothing listens" in caplog.text


def test_one_data_parallel_rank_that_drains_makes_the_api_server_of_all_not_ready(make_role: Any) -> None:
    port = free_port()
    client = server({"port": port}, num_ranks=2)
    roles = [make_role(FULL, port=port + rank) for rank in range(2)]
    assert ready(client) == READY
    ask_drain(f"127.0.0.1:{roles[1]._server.port}", None, begin=True)
    assert ready(client) == DRAINS


def test_an_engine_whose_key_is_replaced_for_the_next_start_stays_ready(make_role: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make_keys(keys)
    role = make_role(FULL, keys=str(keys), port=free_port())
    settings = {"port": role._server.port, "keys": str(keys)}
    assert ready(server(settings)) == READY
    shutil.rmtree(keys)
    make_keys(keys)
    assert ready(server(settings)) == READY


def test_an_engine_with_keys_is_asked_with_its_keys(make_role: Any, tmp_path: Path) -> None:
    for name in ("ours", "foreign"):
        make_keys(tmp_path / name)
    role = make_role(FULL, keys=str(tmp_path / "ours"), port=free_port())
    settings = {"port": role._server.port, "keys": str(tmp_path / "ours")}
    assert ready(server(settings)) == READY
    assert ready(server({**settings, "keys": str(tmp_path / "foreign")})) == (
        503,
        {"ready": False, "reason": "permission-denied"},
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "*"])
def test_an_engine_that_listens_on_every_interface_is_asked_on_this_host(host: str, make_role: Any) -> None:
    own = {"host": host, "advertised_host": "203.0.113.1", "keys": "none", "port": free_port()}
    make_role(FULL, **own)
    assert ready(server(own)) == READY


def test_the_connector_may_be_one_of_several(make_role: Any) -> None:
    role = make_role(FULL, port=free_port())
    own = {"kv_connector": "KVFerryConnector", "kv_connector_extra_config": {"port": role._server.port}}
    assert ready(server({"connectors": [{"kv_connector": "Other"}, own]}, "MultiConnector")) == READY


@pytest.mark.parametrize(
    ("settings", "connector", "remedy"),
    [({}, "KVFerryConnector", 'Set "port"'), ({"port": 5600}, "NixlConnector", "leave the middleware out")],
)
def test_what_cannot_be_asked_is_not_ready_and_the_log_says_why(
    settings: dict[str, Any], connector: str, remedy: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert ready(server(settings, connector)) == (503, {"ready": False, "reason": "invalid-setting"})
    assert remedy in caplog.text


def test_many_questions_are_one_question_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def any_drains(config: Any) -> bool:
        asked.append(time.monotonic())
        return False

    monkeypatch.setattr(readiness, "KNOWN_SECONDS", 60.0)
    monkeypatch.setattr(readiness, "any_drains", any_drains)
    client = server({"port": 5600})
    assert [ready(client) for _ in range(50)] == [READY] * 50
    assert len(asked) == 1
