"""The benchmarks of plans and transports measure, check their bytes, and judge."""

import doctest
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvferry.errors import Reason, SettingsError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that imports a benchmark's module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def run(module: Any, arguments: str) -> Any:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(module.main)
    return CliRunner().invoke(app, arguments.split())


def test_every_plan_is_timed_and_judged(benchmark: Any, tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    result = run(benchmark("plan"), f"--repeats 3 --json {output}")
    report = json.loads(output.read_text())
    assert report["within_budget"] is (result.exit_code == 0)
    descriptors = [case["descriptors"] for case in report["cases"]]
    assert descriptors[:4] == [640, 1280, 23040, 112000]
    assert all(0 < case["lower_s"] <= case["slowest_s"] for case in report["cases"])


def test_the_report_has_all_sizes_and_the_pages_asked_for(tmp_path: Path) -> None:
    """As it is started by hand: the other process must find its module and kvferry too."""
    output = tmp_path / "transport.json"
    arguments = f"--json {output} --transport cma --no-small --sizes 64K,512K --total 4M --repeat 2"
    command = [sys.executable, str(BENCHMARKS / "transport.py"), *arguments.split()]
    subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120, check=True)
    report = json.loads(output.read_text())
    assert [half["pages"] for half in report["halves"]] == ["huge"]
    rows = report["halves"][0]["rows"]
    assert [(row["descriptor_bytes"], row["descriptors"]) for row in rows] == [(65536, 64), (524288, 8)]
    assert all(rate > 0 for row in rows for rate in row["gb_per_second"].values())
    assert [target["target"] for target in report["targets"]] == [0.6, 0.7]


def test_the_plain_nixl_program_leaves_stdout_alone() -> None:
    """NIXL's own wrapper logs there, where the tables are printed."""
    program = "from transport_movers import *; plain_nixl_agent(allocate(4096, False))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, timeout=60, check=True)
    assert done.stdout == b""
    assert b"NIXL INFO" in done.stderr


@pytest.mark.parametrize(("wrong", "complaint"), [("--sizes 3K", "not a multiple"), ("--sizes x", "not a size")])
def test_sizes_that_do_not_fit_are_refused(benchmark: Any, wrong: str, complaint: str) -> None:
    result = run(benchmark("transport"), f"--transport cma --total 4M {wrong}")
    assert result.exit_code == 2
    assert complaint in result.output


def test_an_unknown_transport_is_refused(benchmark: Any) -> None:
    error = run(benchmark("transport"), "--transport cam").exception
    assert isinstance(error, SettingsError)
    assert error.reason is Reason.UNKNOWN_SETTING


def test_a_target_is_met_or_missed(benchmark: Any) -> None:
    judge = benchmark("transport").judge
    rates = {"memcpy": 10.0, "cma": 6.5, "nixl": 2.0, "plain nixl": 2.5}
    half = {
        "rows": [{"descriptor_bytes": 512 << 10, "gb_per_second": rates}],
        "idle": {"initiator": 0.2, "target": 0.01},
    }
    verdicts = {verdict["what"]: verdict["met"] for verdict in judge(half)}
    assert verdicts == {
        "cma / memcpy at 512.0 KiB": False,
        "nixl / plain nixl at 512.0 KiB": False,
        "idle core share of nixl": False,
    }
    rates["cma"], rates["nixl"], half["idle"] = 7.0, 2.5, {"initiator": 0.02, "target": 0.01}
    assert all(verdict["met"] for verdict in judge(half))


def test_descriptors_never_touch_and_copies_are_checked(benchmark: Any) -> None:
    movers = benchmark("transport_movers")
    offsets = movers.scattered_offsets(1 << 20, 4096)
    source, destination = movers.allocate(2 << 20, False), movers.allocate(2 << 20, False)
    assert movers.huge_share(source) == 0
    destination[:] = 0
    assert not movers.copied_exactly(offsets, source, destination)
    movers.MemcpyMover(source, destination)._move_each(offsets)
    assert movers.copied_exactly(offsets, source, destination)


@pytest.mark.parametrize("name", ["transport", "transport_movers"])
def test_the_benchmarks_examples_are_true(benchmark: Any, name: str) -> None:
    results = doctest.testmod(benchmark(name))
    assert (results.failed, results.attempted > 0) == (0, True)
