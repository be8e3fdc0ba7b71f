"""``kvferry bench transport --strategy`` moves the bytes exactly both ways, and judges."""

import json

import pytest

from kvferry.cli.bench_strategy import BLOCK_BYTES, judge_strategies
from kvferry.cli.bench_transport import bench_transport
from kvferry.errors import Reason, SettingsError


def test_the_report_has_both_ways_measured_and_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    bench_transport(json_output=True, transport="cma", total="8M", sizes="64K", repeat=1, strategy=True)
    report = json.loads(capsys.readouterr().out)
    assert report["bytes"] == 3 * BLOCK_BYTES
    (row,) = report["rows"]
    assert row["ways"]["direct"]["descriptors"] == 3 * 36 * 16 * 2
    assert row["ways"]["scatter"]["descriptors"] <= 3 * 36 * 2
    assert all(figures[kind] > 0 for figures in row["ways"].values() for kind in ("predicted_ms", "measured_ms"))
    assert len(report["targets"]) == 3


def test_fewer_bytes_than_a_block_are_refused() -> None:
    with pytest.raises(SettingsError) as caught:
        bench_transport(transport="cma", total="1M", sizes="64K", strategy=True)
    assert caught.value.reason is Reason.INVALID_SETTING


@pytest.mark.parametrize(("transport", "gain", "met"), [("nixl", 2.99, False), ("nixl", 3.0, True), ("cma", 1.0, True)])
def test_the_gain_wanted_depends_on_the_transport(transport: str, gain: float, met: bool) -> None:
    ways = {"direct": {"predicted_ms": 1.0, "measured_ms": 2.0}, "scatter": {"predicted_ms": 1.0, "measured_ms": 2.1}}
    row = {"transport": transport, "chosen": "scatter", "gain": gain, "ways": ways}
    assert [verdict["met"] for verdict in judge_strategies([row])] == [met, True, False]
