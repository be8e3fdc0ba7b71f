"""Costs in a file: given at start, or measured once and kept for the next start."""

import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from kvferry.errors import Reason, SettingsError
from kvferry.execution import kept_costs, transfer_costs
from kvferry.execution.kept_costs import MAX_REPORT_BYTES, KeptCosts, decode_costs, read_costs
from kvferry.execution.transfer_costs import Strategist
from kvferry.plan.staging.strategy import TYPICAL_COSTS, Choice, Costs

from .test_staged_loads import Pair

CMA, NIXL = TYPICAL_COSTS["cma"], TYPICAL_COSTS["nixl"]


def report(*costs: Costs, **more: Any) -> str:
    return json.dumps({"repeat": 5, "rows": [{"move": "merge", "costs": asdict(each)} for each in costs], **more})


def choose(strategist: Strategist, pair: Pair, number: int = 0) -> Choice:
    choice = strategist.choice(pair.plans[number], pair.reader, pair.peer)
    assert choice is not None
    return choice


def strategist_of(kept: KeptCosts, pair: Pair) -> Strategist:
    return Strategist(pair.stage, None, kept.given, kept.keep)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "costs.json"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the transports over which costs were measured so far."""
    names: list[str] = []

    def measure(transport: Any, *others: Any) -> Costs | None:
        names.append(transport.capabilities.name)
        return inner(transport, *others)

    inner = transfer_costs.measure_costs
    monkeypatch.setattr(transfer_costs, "measure_costs", measure)
    return names


def test_costs_measured_once_serve_every_pair_and_peer_and_the_next_start(path: Path, measured: list[str]) -> None:
    pair, other = Pair(), Pair()
    strategist = strategist_of(KeptCosts(str(path)), pair)
    costs = choose(strategist, pair).costs
    assert measured == ["memcpy"]
    assert choose(strategist, pair, 1).costs == choose(strategist, other).costs == costs
    assert measured == ["memcpy"]
    assert decode_costs(path.read_bytes()) == read_costs(path, "--costs") == {"memcpy": costs}
    again = strategist_of(KeptCosts(str(path)), other)
    assert choose(again, other).costs == costs
    assert measured == ["memcpy"]
    assert os.listdir(path.parent) == [path.name]


def test_a_file_that_was_there_at_start_is_never_rewritten(path: Path, measured: list[str]) -> None:
    path.write_text(report(CMA, replace(CMA, seconds_per_descriptor=1e-6)))
    before = path.read_bytes(), path.stat().st_ino
    kept, pair = KeptCosts(str(path)), Pair()
    assert kept.given == {"cma": replace(CMA, seconds_per_descriptor=1e-6)}
    choose(strategist_of(kept, pair), pair)
    assert measured == ["memcpy"], "it has no costs of this transport"
    assert (path.read_bytes(), path.stat().st_ino) == before


def test_without_a_file_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kept = KeptCosts("")
    kept.keep(CMA)
    assert kept.given == {}
    assert os.listdir(tmp_path) == []


def test_a_link_is_followed_and_a_change_of_folder_changes_nothing(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.symlink_to(tmp_path / "target.json")
    monkeypatch.chdir(tmp_path)
    kept = KeptCosts(path.name)
    monkeypatch.chdir("/")
    kept.keep(CMA)
    assert path.is_symlink()
    assert decode_costs((tmp_path / "target.json").read_bytes()) == {"cma": CMA}


def test_writers_at_the_same_time_lose_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_costs, "LOCK_SECONDS", 60.0)  # the last waits for eleven others, on any disk
    every = {f"transport {number}": replace(CMA, transport=f"transport {number}") for number in range(12)}
    ranks = [(KeptCosts(str(path)), costs) for costs in every.values()]
    barrier = threading.Barrier(len(ranks))

    def write(kept: KeptCosts, costs: Costs) -> None:
        barrier.wait()
        kept.keep(costs)

    threads = [threading.Thread(target=write, args=rank) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert decode_costs(path.read_bytes()) == every
    assert os.listdir(path.parent) == [path.name]


def test_what_others_wrote_since_the_start_stays(path: Path) -> None:
    kept = KeptCosts(str(path))
    path.write_text(report(NIXL, targets=["what a benchmark says besides"]))
    kept.keep(replace(NIXL, seconds_per_copy=1.0))
    assert decode_costs(path.read_bytes()) == {"nixl": NIXL}
    kept.keep(CMA)
    assert decode_costs(path.read_bytes()) == {"nixl": NIXL, "cma": CMA}
    found = json.loads(path.read_bytes())
    assert found["rows"][0]["move"] == "merge"
    assert (found["repeat"], found["targets"]) == (5, ["what a benchmark says besides"])


def lock_the_folder(path: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kept_costs, "LOCK_SECONDS", 0.02)
    patch.setattr(kept_costs, "_try_lock", lambda _: False)


def refuse_to_replace(path: Path, patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("No space left on device")

    patch.setattr(os, "replace", refuse)


OBSTACLES: dict[str, Callable[[Path, pytest.MonkeyPatch], Any]] = {
    "no folder": lambda path, _: path.parent.rmdir(),
    "another holds the lock": lock_the_folder,
    "no space": refuse_to_replace,
    "no report by now": lambda path, _: path.write_text("{"),
    "a folder by now": lambda path, _: path.mkdir(),
    "full by now": lambda path, _: path.write_text(report(NIXL, more="x" * (MAX_REPORT_BYTES - 500))),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_what_cannot_be_kept_is_one_warning(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "folder" / "costs.json"
    path.parent.mkdir()
    kept, pair = KeptCosts(str(path)), Pair()
    OBSTACLES[name](path, monkeypatch)
    before = path.read_bytes() if path.is_file() else None
    with caplog.at_level(logging.WARNING):
        assert choose(strategist_of(kept, pair), pair).costs.transport == "memcpy"
    assert [(record.levelname, str(path) in record.getMessage()) for record in caplog.records] == [("WARNING", True)]
    assert (path.read_bytes() if path.is_file() else None) == before
    assert not path.parent.exists() or os.listdir(path.parent) in ([], [path.name])


def test_nothing_is_written_that_the_next_start_would_refuse(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    KeptCosts(str(path)).keep(replace(CMA, bytes_per_second=float("inf")))
    assert len(caplog.records) == 1
    assert not path.exists()


WRONG = {
    "": "truncated",
    "{": "truncated",
    "[1]": "object",
    '{"rows": []}': "no costs",
    '{"rows": [{"costs": {"transport": "cma"}}]}': "seconds_per_descriptor",
    '{"rows": ' + "[" * 100_000: "nested|truncated|array|object",
    '{"more": ' + "[" * 100_000: "nested",
    report(replace(CMA, bytes_per_second=0.0)): "bytes_per_second is 0",
    report(replace(CMA, copy_bytes_per_second=1e200)): "copy_bytes_per_second is 1e[+]200",
    report(replace(CMA, seconds_per_copy=-1e-6)): "seconds_per_copy is -1e-06",
    report(replace(CMA, seconds_per_remote_run=-1e-6)): "seconds_per_remote_run is -1e-06",
    report(CMA, replace(NIXL, seconds_per_part=1e200)): "seconds_per_part is 1e[+]200",
    report(CMA) + " " * MAX_REPORT_BYTES: "larger than",
}


def test_what_a_remote_run_takes_may_be_nothing_or_not_be_there(path: Path) -> None:
    path.write_text(report(NIXL).replace('"seconds_per_remote_run": 0.0', '"other": 0'))
    assert NIXL.seconds_per_remote_run == 0.0
    assert KeptCosts(str(path)).given == {"nixl": NIXL}
    path.write_text(report(NIXL, CMA))
    assert KeptCosts(str(path)).given == {"nixl": NIXL, "cma": CMA}


@pytest.mark.parametrize("text", WRONG, ids=[text[:40] + WRONG[text] for text in WRONG])
def test_a_file_that_is_no_report_is_refused_at_start(text: str, path: Path) -> None:
    path.write_text(text)
    for refused in (lambda: KeptCosts(str(path)), lambda: read_costs(path, "costs_file")):
        with pytest.raises(
            SettingsError, match=f"^costs_file: {path} is no report of costs: .*({WRONG[text]})"
        ) as found:
            refused()
        assert found.value.reason is Reason.INVALID_SETTING
    assert path.read_text() == text


@pytest.mark.parametrize("name", ["/", "/dev/zero", "/dev/null/costs.json", "a\0b"])
def test_a_file_that_cannot_be_read_is_refused_at_start(name: str) -> None:
    with pytest.raises(SettingsError, match="costs_file: ") as found:
        KeptCosts(name)
    assert found.value.reason is Reason.INVALID_SETTING


def test_a_report_may_be_as_large_as_the_bound(path: Path) -> None:
    path.write_text(report(CMA).ljust(MAX_REPORT_BYTES))
    assert KeptCosts(str(path)).given == {"cma": CMA}
