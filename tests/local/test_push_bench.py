"""The push benchmark's report, on samples that are made up."""

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
    return importlib.import_module("vllm_push_engines"), importlib.import_module("vllm_push_report")


def result(modules: tuple[Any, Any], pushed: list[float]) -> Any:
    engines, report = modules

    def sample(wait: float, grain: str = "") -> Any:
        predictions = {"whole": 0.02, "layers(1)": 0.001, "layers(2)": 0.002} if grain else {}
        return engines.Sample(wait, 1.0, 0.9, 0.5, 10**6, 3, True, grain, 2, predictions)

    every_layer, *_, whole = engines.FORCED
    samples = {
        engines.PULL: [sample(wait) for wait in (0.1, 0.2, 0.3)],
        engines.CHOSEN: [sample(wait, "layers(2)") for wait in pushed],
        every_layer: [sample(0.1, "layers(1)") for _ in range(3)],
        whole: [sample(0.4, "whole") for _ in range(3)],
    }
    return report.Result(engines.CASES["one-chunk"], samples)


def test_ratios_predictions_and_targets(modules: tuple[Any, Any]) -> None:
    engines, report = modules
    met = result(modules, [0.02, 0.04, 0.06])
    assert met.check()["ratio"]["value"] == pytest.approx(0.2)
    assert met.check()["met"]
    assert not result(modules, [0.1, 0.1, 0.1]).check()["met"]
    every_layer, *_, whole = engines.FORCED
    assert [met.predicted(each) for each in (engines.CHOSEN, every_layer, whole)] == [0.002, 0.001, 0.02]
    assert met.grains(engines.CHOSEN) == "layers(2) x3"
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
    assert "push, every layer" in text
    assert "one-chunk: wait_seconds of the chosen grain 0.200" in text
    assert "met" in text
    found = json.loads(json.dumps(result(modules, [0.02, 0.04, 0.06]).as_json()))
    assert found["variants"]["push, chosen"]["predicted_seconds"] == 0.002
    assert found["rounds"] == 3
