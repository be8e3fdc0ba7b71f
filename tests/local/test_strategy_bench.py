"""``kvferry bench transport --strategy`` moves the bytes exactly both ways, and judges."""

import json

import pytest

from kvferry.cli.bench_strategy import BLOCK_BYTES, judge_strategies
from kvferry.errors import Reason, SettingsError

from .test_transport_bench import run


def test_the_report_has_both_ways_measured_and_predicted() -> None:
    report = json.loads(run("--strategy --json --transport cma --total 8M --repeat 1").stdout)
    assert report["bytes"] == 3 * BLOCK_BYTES
    (row,) = report["rows"]
    assert row["ways"]["direct"]["descriptors"] == 3 * 36 * 16 * 2
    assert row["ways"]["scatter"]["descriptors"] <= 3 * 36 * 2
    assert all(figures[kind] > 0 for figures in row["ways"].values() for kind in ("predicted_ms", "measured_ms"))
    assert len(report["targets"]) == 3


def test_fewer_bytes_than_a_block_are_refused() -> None:
    error = run("--strategy --transport cma --total 1M").exception
    assert isinstance(error, SettingsError)
    assert error.reason is Reason.INVALID_SETTING


@pytest.mark.parametrize("option", ["--sizes 4K", "--huge", "--no-huge", "--no-small"])
def test_options_that_say_nothing_of_a_head_merge_are_refused(option: str) -> None:
    error = run(f"--strategy --transport cma --total 1M {option}").exception
    assert isinstance(error, SettingsError)
    assert option.split()[0].replace("no-", "") in error.message


@pytest.mark.parametrize(("transport", "gain", "met"), [("nixl", 2.99, False), ("nixl", 3.0, True), ("cma", 1.0, True)])
def test_the_gain_wanted_depends_on_the_transport(transport: str, gain: float, met: bool) -> None:
    ways = {"direct": {"predicted_ms": 1.0, "measured_ms": 2.0}, "scatter": {"predicted_ms": 1.0, "measured_ms": 2.1}}
    row = {"transport": transport, "chosen": "scatter", "gain": gain, "ways": ways}
    assert [verdict["met"] for verdict in judge_strategies([row])] == [met, True, False]
