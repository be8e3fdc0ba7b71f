"""The schedulers' part of the transfer log, of vLLM's scheduler and real bytes: holds, first steps and first tokens."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvferry.cli.timeline_jobs import Kind, Wanted, find, jobs
from kvferry.cli.transfer_records import HoldTimes, LoadedRequest, decode, open_logs
from kvferry.handoff.holds import Ending
from kvferry.integrations.vllm.scheduler.request_times import RequestTimes
from kvferry.integrations.vllm.scheduler.role import SchedulerRole
from kvferry.integrations.vllm.worker.records import LineLog

from .flows import FLOWS, Flow, to_decode, to_prefill
from .handoff_engine import make_engine
from .test_forged_parameters import MODELS

__all__ = ["make_engine"]

PROMPT = [(11 * index) % 500 for index in range(79)]
MODEL = MODELS["full attention"]


def lines_of(log: Path) -> list[bytes]:
    path = log.with_name(f"{log.name}.scheduler")
    return path.read_bytes().splitlines() if path.exists() else []


@pytest.mark.parametrize("flow", FLOWS)
def test_a_hold_and_the_request_that_loads_it_have_a_line_each(
    flow: Flow, make_engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs, lines_at_end = [tmp_path / "p", tmp_path / "d"], []
    finish = SchedulerRole.request_finished

    def request_finished(*arguments: Any) -> Any:
        lines_at_end.append(len(lines_of(logs[1])))
        return finish(*arguments)

    monkeypatch.setattr(SchedulerRole, "request_finished", request_finished)
    prefill, decode_engine = (make_engine(MODEL, transfer_log=str(log)) for log in logs)
    asked = prefill.ask("p1", PROMPT, to_prefill(flow), max_tokens=1)
    assert lines_of(logs[0]) == [], "the prompt is still held"
    decode_engine.ask("d1", PROMPT, to_decode(flow, prefill, asked.params))
    assert lines_at_end == [0, 1], "a request with three tokens has its line after the first"
    prefill.release()
    prefill.ask("last", [1, 2, 3], {})
    [hold], [request] = ([decode(line) for line in lines_of(log)] for log in logs)
    assert isinstance(hold, HoldTimes)
    assert isinstance(request, LoadedRequest)
    assert (hold.request_id, hold.ending, request.request_id) == ("p1", "released", "d1")
    assert hold.hold == request.loaded
    times = [hold.began_at, hold.first_step_at, hold.first_token_at, hold.held_at]
    times += [request.ordered_at, request.first_step_at, request.first_token_at, hold.clock.monotonic]
    assert times == sorted(times), "none is unknown"
    ranks = open_logs([log.with_name(f"{log.name}.rank0") for log in logs])
    found = find(ranks, Wanted("d1", 9))
    drawn = {job.whole.kind: job for job in jobs(ranks, found, Wanted("d1", 9))}
    assert drawn.keys() >= {Kind.HOLD, Kind.WRITE, Kind.LOAD, Kind.REQUEST}
    [first_token] = drawn[Kind.REQUEST].parts
    assert drawn[Kind.LOAD].whole.began <= first_token.began <= first_token.ended == drawn[Kind.REQUEST].whole.ended
    for engine in (prefill, decode_engine):
        times = engine.connector._scheduler._times
        assert (times._running, times._holds) == ({}, {}), "nothing is remembered of what has ended"


def test_a_request_whose_load_fails_has_a_line_without_a_token(make_engine: Any, tmp_path: Path) -> None:
    logs = [tmp_path / "p", tmp_path / "d"]
    prefill, decode_engine = (make_engine(MODEL, transfer_log=str(log)) for log in logs)
    asked = prefill.ask("p1", PROMPT, to_prefill("sequential"), max_tokens=1)
    prefill.release()
    prefill.ask("last", [1, 2, 3], {})
    assert decode_engine.ask("d1", PROMPT, asked.params).has_failed
    [hold], [request] = ([json.loads(line) for line in lines_of(log)] for log in logs)
    assert (hold["ending"], hold["hold"]) == ("released", request["loaded"])
    assert (request["first_step_at"], request["first_token_at"]) == (None, None)


def test_an_answer_that_is_held_for_the_next_turn_has_a_line(make_engine: Any, tmp_path: Path) -> None:
    log = tmp_path / "d"
    prefill, decode_engine = make_engine(MODEL), make_engine(MODEL, transfer_log=str(log), turn_seconds=60)
    asked = prefill.ask("p1", PROMPT, to_prefill("sequential"), max_tokens=1)
    decode_engine.ask("d1", PROMPT, asked.params)
    decode_engine.release()
    decode_engine.ask("last", [1, 2, 3], {})
    loaded, hold = (json.loads(line) for line in lines_of(log))
    assert (loaded["request_id"], hold["request_id"], hold["began_at"]) == ("d1", "d1", hold["held_at"])
    assert decode(json.dumps(hold).encode())


def test_without_a_transfer_log_nothing_is_kept_and_nothing_written(make_engine: Any, tmp_path: Path) -> None:
    prefill = make_engine(MODEL)
    prefill.ask("p1", PROMPT, to_prefill("sequential"), max_tokens=1)
    assert prefill.connector._scheduler._times is None
    assert not list(tmp_path.glob("**/*.scheduler"))


def test_a_log_that_takes_no_line_is_told_once_and_no_request_fails(caplog: pytest.LogCaptureFixture) -> None:
    """/dev/full refuses each byte, as a full disk does."""
    log = LineLog("/dev/full")
    assert log.is_open
    log.append({"request_id": "a"})
    assert not log.is_open
    log.append({"request_id": "b"})
    log.close()
    [told] = caplog.messages
    assert "/dev/full takes no more lines: No space left on device" in told


def test_a_second_hold_of_a_preempted_request_has_times_of_its_own(tmp_path: Path) -> None:
    """As after a reset of the cache. A hold that ended before anybody could see that it began has a line, too."""
    times = RequestTimes(str(tmp_path / "log"))
    request: Any = SimpleNamespace(request_id="r", num_tokens=3, num_prompt_tokens=3)
    first, second, unseen = (SimpleNamespace(transfer_id=name, request_id="r", held_at=None) for name in "abc")
    for hold in (first, second):
        times.begin_hold(request, hold)  # type: ignore[arg-type]
        times.begin_step(["r"])
    for hold in (first, second, unseen):
        times.end_hold(SimpleNamespace(hold=hold, ending=Ending.RELEASED))  # type: ignore[arg-type]
    times.close()
    records = [decode(line) for line in lines_of(tmp_path / "log")]
    assert [record.hold for record in records if isinstance(record, HoldTimes)] == ["a", "b", "c"]
