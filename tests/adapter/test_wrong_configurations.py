"""Ten wrong configurations: each is told once, by the setting or flag at fault and what to do, within ten seconds.

vLLM's own configuration ends with the first six, before it loads weights; ``kvferry check`` finds the others before a
request fails.
"""

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from kvferry.cli import check_pair, check_prompt
from kvferry.integrations.vllm import plugin
from kvferry.integrations.vllm.connector_configs import CONNECTOR
from kvferry.integrations.vllm.preflight import OFFLOAD

from ..local.api_servers import RouterInProcess
from ..local.test_check import Pair, differ, of_identity, rank
from ..small_models.weights import published
from .engine_flags import refused_lines
from .offload_engine import make_config
from .test_preflight import HOST, leave_free, taken_port

SECONDS = 10.0
Line = Callable[..., str]


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Line:
    """Return a function that returns the line with which ``vllm serve`` ends for these settings and arguments."""
    check, spent = plugin.check_configuration, list[float]()

    def timed(config: Any) -> None:
        began_at = time.monotonic()
        try:
            check(config)
        finally:
            spent.append(time.monotonic() - began_at)

    monkeypatch.setattr(plugin, "check_configuration", timed)

    def refused(settings: dict[str, Any], connector: str = CONNECTOR, model: str = "Qwen3-8B", **arguments: Any) -> str:
        (tmp_path / "config.json").write_text(json.dumps(published(model)))
        transfer = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": settings}
        [only] = refused_lines(lambda: make_config(tmp_path, kv_transfer_config=transfer, **arguments))
        [seconds] = spent
        assert seconds < SECONDS
        return only

    return refused


def test_a_misspelt_setting(line: Line) -> None:
    assert line({"lease_second": 9}).startswith("unknown setting 'lease_second'. Did you mean 'lease_seconds'?")


def test_a_port_in_use(line: Line) -> None:
    with taken_port() as port:
        told = line({"port": port})
    assert told.startswith(f"cannot listen on {HOST}:{port}")
    assert 'Set another "host" or "port" in kv_connector_extra_config' in told


@pytest.mark.parametrize("advertised", [{}, {"advertised_host": "prefill-0"}], ids=str)
def test_no_keys_on_every_interface(advertised: dict[str, str], line: Line) -> None:
    told = line({"host": "0.0.0.0", **advertised})
    assert "host '0.0.0.0' can be reached from other machines, and there are no keys" in told
    assert "Run 'kvferry keys new FOLDER'" in told
    assert ('Set "advertised_host"' in told) == (not advertised)


def test_a_folder_without_space(line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_free(5 << 20, monkeypatch)
    tier = {"host_bytes": 1, "disk_path": str(tmp_path / "blocks"), "disk_bytes": "64 MiB", "model_id": "m"}
    told = line(tier, OFFLOAD, prefix_caching_hash_algo="sha256_cbor")
    assert told.startswith(f"the file system of {tmp_path}/blocks has 5.0 MiB free, and the first blocks")
    assert "Make room, give the tier fewer bytes" in told


def test_a_layout_that_the_kernel_refuses(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BHLNC")
    told = line({}, model="DeepSeek-V2-Lite")
    assert told.startswith("layout BHLNC was asked for")
    assert "Unset VLLM_KV_CACHE_LAYOUT, or set it to LBNHC." in told


def test_a_flag_of_vllm(line: Line) -> None:
    told = line({}, model="DeepSeek-V2-Lite", tensor_parallel_size=2, decode_context_parallel_size=2)
    assert told.startswith("decode_context_parallel_size is 2. Run with --decode-context-parallel-size 1.")


class Clock:
    """Counts a sleep, and does not sleep."""

    _slept = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._slept

    def sleep(self, seconds: float) -> None:
        self._slept += seconds


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Pair]:
    monkeypatch.setattr(check_prompt, "time", Clock())
    made = Pair(monkeypatch, capsys)
    yield made
    made.close()


def problem(pair: Pair, *arguments: Any) -> dict[str, Any]:
    """Return the problem that the command finds."""
    began_at = check_prompt.time.monotonic()
    [found] = pair.problems(*arguments)
    assert check_prompt.time.monotonic() - began_at < SECONDS
    return found


def test_unequal_models(pair: Pair) -> None:
    """Of models with other caches no line tells how these differ."""
    other = of_identity(model="n", weights="others", num_layers=3, num_kv_heads=8)
    decode = differ(pair.decode(rank(layers=["0", "1", "2"], num_kv_heads=8), **other), model="n")
    found = problem(pair, pair.prefill(), decode)
    assert found["reason"] == "model-mismatch"
    assert "decode has 'n'" in found["message"]
    assert {"option": "--model", "prefill": "m", "decode": "n"} in found["options"]
    assert "same" in found["remedy"]


def test_unequal_quantisation(pair: Pair) -> None:
    decode = differ(pair.decode(**of_identity(quantization="fp8", weights="others")), quantization="fp8")
    found = problem(pair, pair.prefill(), decode)
    assert found["reason"] == "model-mismatch"
    assert "quantization: prefill has 'none', decode has 'fp8'" in found["message"]
    assert found["options"] == [{"option": "--quantization", "prefill": "none", "decode": "fp8"}]
    assert "--quantization" in found["remedy"]


def test_a_router_in_the_wrong_mode(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    found = problem(pair, prefill, decode, pair.opened(RouterInProcess(prefill, decode, disaggregates=False)))
    assert found["reason"] == "invalid-setting"
    assert "--vllm-pd-disaggregation" in found["remedy"]


def test_a_firewall_before_a_rank(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full queue of connections answers no further one, as a firewall that drops packets does."""
    monkeypatch.setattr(check_pair, "CONNECT_SECONDS", 0.3)
    prefill = pair.prefill()
    with closing(socket.create_server((HOST, 0), backlog=0)) as silent, closing(socket.socket()) as first:
        port = silent.getsockname()[1]
        first.connect((HOST, port))
        dropped = msgspec.structs.replace(prefill.directory().ranks[0].answers_at, port=port)
        prefill.changes["entry"] = {"answers_at": dropped}
        found = problem(pair, prefill, pair.decode())
    assert found["reason"] == "peer-unreachable"
    assert "timed out" in found["message"]
    assert f"Open TCP port {port} of {HOST} to the decode engine" in found["remedy"]
