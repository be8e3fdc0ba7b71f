"""The report of the benchmark of flows, from invented samples."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("vllm_flows_engines"), importlib.import_module("vllm_flows_report")


def result(modules: tuple[Any, Any], at_once: list[float]) -> Any:
    engines, report = modules

    def sample(wait: float, num_batches: int = 0) -> Any:
        return engines.Sample(wait, 1.0, 0.9, 0.5, 10**6, 3, True, num_batches)

    samples = {
        "sequential": [sample(wait) for wait in (0.1, 0.2, 0.3)],
        "concurrent": [sample(wait, 2) for wait in at_once],
    }
    return report.Result(engines.CASES["one-chunk"], samples)


def test_ratios_and_targets(modules: tuple[Any, Any]) -> None:
    _, report = modules
    met = result(modules, [0.02, 0.04, 0.06])
    assert met.check()["ratio"]["value"] == pytest.approx(0.2)
    assert met.check()["met"]
    assert not result(modules, [0.1, 0.1, 0.1]).check()["met"]
    assert report.median([3.0, 1.0, 2.0]).low >= 1.0


def test_rounds_that_were_cut_short_count_as_far_as_all_were_measured(modules: tuple[Any, Any]) -> None:
    cut_short = result(modules, [0.02, 0.04])
    assert cut_short.num_rounds == 2
    assert cut_short.check()["ratio"]["value"] == pytest.approx(0.03 / 0.15)


def test_what_is_printed_and_written(modules: tuple[Any, Any]) -> None:
    _, report = modules
    console = Console(record=True, width=220, quiet=False)
    report.print_results([result(modules, [0.02, 0.04, 0.06])], console)
    text = console.export_text()
    assert "one-chunk: wait_seconds of the concurrent flow 0.200" in text
    assert "met" in text
    found = json.loads(json.dumps(result(modules, [0.02, 0.04, 0.06]).as_json()))
    assert found["concurrent_to_sequential"]["wait_seconds"]["value"] == pytest.approx(0.2)
    assert [found["flows"]["concurrent"]["samples"][0][name] for name in ("wait_seconds", "num_batches")] == [0.02, 2]
    assert found["flows"]["sequential"]["medians"]["handoff_seconds"]["value"] == pytest.approx(
        0.1
    )  # first token - prefill
    assert found["rounds"] == 3
