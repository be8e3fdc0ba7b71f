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


@pytest.mark.parametrize(
    ("transport", "chosen", "direct", "scatter", "met"),
    [
        ("nixl", "scatter", 2.99, 1.0, False),
        ("nixl", "scatter", 3.0, 1.0, True),
        ("nixl", "direct", 1.0, 1.0, False),
        ("cma", "scatter", 1.0, 1.0, True),
        ("cma", "scatter", 0.99, 1.0, False),
        ("cma", "direct", 1.0, 1.0, True),
        ("cma", "direct", 1.0, 0.99, False),
    ],
)
def test_the_gain_wanted_depends_on_the_transport(
    transport: str, chosen: str, direct: float, scatter: float, met: bool
) -> None:
    ways = {
        "direct": {"predicted_ms": direct / 2, "measured_ms": direct},
        "scatter": {"predicted_ms": scatter * 2.01, "measured_ms": scatter},
    }
    verdicts = judge_strategies([{"transport": transport, "chosen": chosen, "ways": ways}])
    assert [verdict["met"] for verdict in verdicts] == [met, True, False]
