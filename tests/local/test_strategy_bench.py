"""``kvferry bench transport --strategy`` moves the bytes exactly every way, and judges."""

import json

import pytest

from kvferry.cli.bench_strategy import judge_strategies
from kvferry.cli.head_moves import BLOCK_BYTES
from kvferry.errors import Reason, SettingsError

from .test_transport_bench import run


def test_the_report_has_every_way_measured_and_predicted() -> None:
    """A stage of 8 MiB is packed in eighths, each of which has room for one of three blocks."""
    report = json.loads(run("--strategy --json --transport cma --total 8M --repeat 1 --packing-stage 8M").stdout)
    merge, split = report["rows"]
    assert (merge["move"], merge["bytes"]) == ("merge", 3 * BLOCK_BYTES)
    assert (split["move"], split["bytes"]) == ("split", 3 * BLOCK_BYTES // 2)
    assert merge["ways"]["direct"]["descriptors"] == 3 * 36 * 16 * 2
    assert merge["ways"]["scatter"]["descriptors"] <= 3 * 36 * 2
    assert split["ways"]["direct"]["descriptors"] == 3 * 36 * 16
    assert split["ways"]["gather"]["descriptors"] <= 3 * 36
    assert [split["ways"][way]["parts"] for way in ("direct", "scatter", "gather")] == [0, 0, 3]
    for row in (merge, split):
        assert all(figures[kind] > 0 for figures in row["ways"].values() for kind in ("predicted_ms", "measured_ms"))
    assert len(report["targets"]) == 3 + 4


def test_fewer_bytes_than_a_block_are_refused() -> None:
    error = run("--strategy --transport cma --total 1M").exception
    assert isinstance(error, SettingsError)
    assert error.reason is Reason.INVALID_SETTING


def test_a_stage_that_packs_nothing_is_refused() -> None:
    error = run("--transport cma --total 1M --sizes 4K --packing-stage 8M").exception
    assert isinstance(error, SettingsError)
    assert "--strategy" in error.message


@pytest.mark.parametrize("option", ["--sizes 4K", "--huge", "--no-huge", "--no-small"])
def test_options_that_say_nothing_of_a_head_merge_are_refused(option: str) -> None:
    error = run(f"--strategy --transport cma --total 1M {option}").exception
    assert isinstance(error, SettingsError)
    assert option.split()[0].replace("no-", "") in error.message


@pytest.mark.parametrize(
    ("over", "chosen", "direct", "scatter", "met"),
    [
        ("nixl", "scatter", 2.99, 1.0, False),
        ("nixl", "scatter", 3.0, 1.0, True),
        ("nixl", "direct", 1.0, 1.0, False),
        ("cma", "scatter", 1.0, 1.0, True),
        ("cma", "scatter", 0.99, 1.0, False),
        ("cma", "direct", 1.0, 1.0, True),
        ("cma", "direct", 1.0, 0.99, False),
        ("split nixl", "scatter", 1.0, 1.0, True),
        ("split nixl", "scatter", 0.99, 1.0, False),
    ],
)
def test_the_gain_wanted_depends_on_the_move_and_the_transport(
    over: str, chosen: str, direct: float, scatter: float, met: bool
) -> None:
    ways = {
        "direct": {"predicted_ms": direct / 2, "measured_ms": direct},
        "scatter": {"predicted_ms": scatter * 2.01, "measured_ms": scatter},
    }
    move, _, transport = over.rpartition(" ")
    verdicts = judge_strategies([{"move": move or "merge", "transport": transport, "chosen": chosen, "ways": ways}])
    assert [verdict["met"] for verdict in verdicts] == [met, True, False]
