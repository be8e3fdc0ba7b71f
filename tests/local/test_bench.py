"""``kvferry bench`` without engines: which rows are measured, what a turn counts, and what is printed and drawn."""

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from kvferry.cli import bench as bench_module
from kvferry.cli.bench import KVFERRY, METRICS, NIXL, NONE, BenchSettings, Contestant
from kvferry.cli.bench_report import BenchReport, Cell, Moved, Request, Row, Turn
from kvferry.cli.main import app
from kvferry.errors import TransportError
from kvferry.harness.launch import Server, scrape_metrics

CELL = Cell(100, 2)
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


@pytest.mark.parametrize(
    ("devices", "tp_size", "expected", "part"),
    [((0,), 1, ["0"] * 4, 0.225), ((0, 1), 1, ["0", "1", "0", "1"], 0.45), ((0, 1, 2, 3), 2, ["0,1", "2,3"] * 2, 0.45)],
)
def test_each_engine_gets_its_share_of_the_gpus(
    devices: tuple[int, ...], tp_size: int, expected: list[str], part: float, tmp_path: Path
) -> None:
    chosen = settings(
        tmp_path,
        devices=devices,
        prefill_tp=tp_size,
        decode_tp=tp_size,
        connectors=(KVFERRY, NIXL),
        cache_bytes=1 << 30,
    )
    engines = [chosen.engine(KVFERRY, "kv_producer", index) for index in range(4)]
    assert [engine.variables["CUDA_VISIBLE_DEVICES"] for engine in engines] == expected
    assert [engine.gpu_memory for engine in engines] == pytest.approx([part] * 4)
    assert "--no-enforce-eager" in engines[0].arguments


def test_an_engine_without_a_connector_has_no_transfer_configuration(tmp_path: Path) -> None:
    assert "--kv-transfer-config" not in settings(tmp_path).engine(NONE, "kv_consumer", 0).command(1)
    assert '"NixlConnector"' in " ".join(settings(tmp_path).engine(NIXL, "kv_consumer", 0).command(1))


class Engine(BaseHTTPRequestHandler):
    """As vLLM's API server answers: a prefill engine offers, a decode engine streams and counts."""

    connector = KVFERRY
    answers_tokens = 4
    counted = 0
    asked: list[dict[str, Any]]

    def do_GET(self) -> None:
        lines = [f"{metric} {2.0 * type(self).counted}" for metric in METRICS[self.connector].values()]
        source = 'vllm:prompt_tokens_by_source_total{source="%s"} %d'
        lines += [source % (name, 5) for name in ("external_kv_transfer", "local_cache_hit", "local_compute")]
        self._answer("\n".join(lines) + "\n")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).asked.append(body)
        if not body.get("stream"):
            self._answer(json.dumps({"kv_transfer_params": {"held": body["prompt"][0]}}))
            return
        type(self).counted += 1
        chunks = [{"choices": [{"token_ids": [token]}]} for token in range(self.answers_tokens)]
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


@pytest.mark.parametrize("connector", [KVFERRY, NIXL, NONE])
def test_a_turn_hands_each_prompt_over_and_counts_what_moved(connector: str, start: Any) -> None:
    decode, decoding = start(connector=connector)
    prefill, prefilling = (None, None) if connector == NONE else start(connector=connector)
    turn = Contestant(connector, decode, prefill, 1000, 4).turn(CELL)
    assert len(turn.requests) == 2
    assert all(each.first_token_seconds > 0 and each.token_seconds >= 0 for each in turn.requests)
    assert len({tuple(body["prompt"]) for body in decoding.asked}) == 2
    assert {len(body["prompt"]) for body in decoding.asked} == {100}
    if prefilling is None:
        assert all("kv_transfer_params" not in body for body in decoding.asked)
        assert turn.moved == Moved()
        return
    assert {body["max_tokens"] for body in prefilling.asked} == {1}
    assert all(body["kv_transfer_params"] == {"held": body["prompt"][0]} for body in decoding.asked)
    expected = dict.fromkeys(METRICS[connector], 4.0)
    assert turn.moved == Moved(**expected)


@pytest.mark.parametrize("answers_tokens", [0, 1])
def test_an_answer_of_fewer_tokens_is_an_error(answers_tokens: int, start: Any) -> None:
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
    return Turn((Request(0.1, seconds, 0.01), Request(0.1, 3 * seconds, 0.01)), 1.0, moved)


def test_a_row_has_the_medians_of_its_turns() -> None:
    row = Row.of(KVFERRY, CELL, [turn_of(seconds) for seconds in (0.1, 0.2, 5.0)])
    assert (row.first_token_ms, row.slowest_ms) == (pytest.approx(450), pytest.approx(15000))
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
        (["--tokens", "100,many"], "--tokens 'many' is no number"),
        (["--at-once", "0"], "--at-once '0' is no number"),
        (["--cache", "4 apples"], "--cache"),
        (["--engine-arguments", '--foo "'], "Close the quotes"),
        (["--plot", "bench.jpg"], "bench.svg"),
        (["--plot", "/no/such/folder/a.svg"], "there is no folder"),
        (["--model", "kv-hevy"], "Did you mean 'kv-heavy'"),
    ],
)
def test_wrong_options_are_refused_before_an_engine_starts(options: list[str], said: str) -> None:
    found = CliRunner().invoke(app, ["bench", *options])
    assert found.exit_code != 0
    assert said in str(found.exception), found.output


class Fake:
    """A contestant whose turns take a second of a virtual clock each."""

    def __init__(self, name: str, clock: list[float], log: list[str], fails: bool) -> None:
        self.name, self._clock, self._log, self._fails = name, clock, log, fails

    def turn(self, cell: Cell) -> Turn:
        self._clock[0] += 1
        self._log.append(self.name)
        if self._fails:
            raise TransportError(bench_module.Reason.TRANSFER_FAILED, "it broke.", "")
        return turn_of(1.0, self.name)

    def pause(self) -> None:
        self._log.append(f"pause {self.name}")

    def resume(self) -> None: ...


@given(turns=st.integers(1, 4), seconds=st.floats(1, 60), fails=st.booleans())
def test_turns_rotate_and_end_in_time_and_each_cell_has_a_row(turns: int, seconds: float, fails: bool) -> None:
    clock, log = [0.0], list[str]()
    cells = [Cell(100, 1), Cell(200, 1)]
    chosen = SimpleNamespace(
        connectors=(KVFERRY, NIXL), cells=lambda: (cells, {}), seconds=seconds, turns=turns, num_engines=4
    )
    fakes = [Fake(KVFERRY, clock, log, False), Fake(NIXL, clock, log, fails)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_module, "_start", lambda *_: (fakes, {}))
        patch.setattr(bench_module, "_conditions", lambda *_: {})
        patch.setattr(bench_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        found = bench_module.run(chosen, "model", Path(), lambda _: None)  # type: ignore[arg-type]
    assert clock[0] <= seconds + 1
    assert [(row.cell.tokens, row.connector) for row in found.rows] == [
        (cell.tokens, name) for cell in cells for name in chosen.connectors
    ]
    complete = clock[0] == 2 * 2 * (turns + 1)
    for row in found.rows:
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
    monkeypatch.setattr(bench_module.os, "kill", lambda number, kind: signalled.append((number, kind)))
    servers = [Server(SimpleNamespace(process_ids=lambda own=own: [own]), "", 0.0) for own in (7, 8)]  # type: ignore[arg-type,misc]
    contestant = Contestant(KVFERRY, servers[1], servers[0], 10, 4)
    contestant.pause()
    contestant.resume()
    contestant.resume()
    stop, go = bench_module.signal.SIGSTOP, bench_module.signal.SIGCONT
    assert signalled == [(7, stop), (8, stop), (7, go), (8, go)]
