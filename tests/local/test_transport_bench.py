"""``kvferry bench transport`` measures, checks its bytes, and judges."""

import json
import subprocess
import sys
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvferry.cli.bench import bench_transport, judge
from kvferry.cli.transport_measurement import MemcpyMover, allocate, copied_exactly, huge_share, scattered_pieces
from kvferry.errors import Reason, SettingsError


def run(arguments: str) -> Any:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(bench_transport)
    return CliRunner().invoke(app, arguments.split())


def test_the_report_has_all_sizes_and_the_pages_asked_for() -> None:
    result = run("--json --transport cma --no-small --sizes 64K,512K --total 4M --repeat 2")
    report = json.loads(result.stdout)
    assert [half["pages"] for half in report["halves"]] == ["huge"]
    rows = report["halves"][0]["rows"]
    assert [(row["piece_bytes"], row["descriptors"]) for row in rows] == [(65536, 64), (524288, 8)]
    assert all(rate > 0 for row in rows for rate in row["gb_per_second"].values())
    assert [target["target"] for target in report["targets"]] == [0.6, 0.7]


def test_the_plain_nixl_program_leaves_stdout_alone() -> None:
    """NIXL's own wrapper logs there, where ``--json`` writes one object."""
    program = "from kvferry.cli.transport_measurement import *; plain_nixl_agent(allocate(4096, False))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=True)
    assert done.stdout == b""
    assert b"NIXL INFO" in done.stderr


@pytest.mark.parametrize("wrong", ["--sizes 3K", "--sizes x", "--transport cam"])
def test_wrong_settings_are_refused(wrong: str) -> None:
    error = run(f"--transport cma --total 4M {wrong}").exception
    assert isinstance(error, SettingsError)
    assert error.reason in (Reason.INVALID_SETTING, Reason.UNKNOWN_SETTING)


def test_a_target_is_met_or_missed() -> None:
    rates = {"memcpy": 10.0, "cma": 6.5, "nixl": 2.0, "plain nixl": 2.5}
    half = {"rows": [{"piece_bytes": 512 << 10, "gb_per_second": rates}], "idle": {"initiator": 0.2, "target": 0.01}}
    verdicts = {verdict["what"]: verdict["met"] for verdict in judge(half)}
    assert verdicts == {
        "cma / memcpy at 512.0 KiB": False,
        "nixl / plain nixl at 512.0 KiB": False,
        "idle core share of nixl": False,
    }
    rates["cma"], rates["nixl"], half["idle"] = 7.0, 2.5, {"initiator": 0.02, "target": 0.01}
    assert all(verdict["met"] for verdict in judge(half))


def test_pieces_never_touch_and_copies_are_checked() -> None:
    pieces = scattered_pieces(1 << 20, 4096)
    source, destination = allocate(2 << 20, False), allocate(2 << 20, False)
    assert huge_share(source) == 0
    destination[:] = 0
    assert not copied_exactly(pieces, source, destination)
    MemcpyMover(source, destination)._move_each(pieces)
    assert copied_exactly(pieces, source, destination)
