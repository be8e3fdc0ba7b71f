"""The offload benchmark: what it compares, how it judges, and when it measures again."""

import doctest
import importlib
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("vllm_offload")


@pytest.mark.parametrize("name", ["vllm_offload_engines", "vllm_offload_report"])
def test_the_examples_hold(bench: Any, name: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert (failed, tried > 0) == (0, True)


class Engine:
    """Takes a turn as a real engine does; every second measurement is disturbed."""

    def __init__(self, bench: Any, seconds: float, num_disturbed: int = 0) -> None:
        self._sample, self.seconds, self.num_disturbed = bench.Sample, seconds, num_disturbed
        self.is_running = False

    def resume(self) -> None:
        self.is_running = True

    def pause(self) -> None:
        self.is_running = False

    def measure(self) -> Any:
        assert self.is_running
        self.num_disturbed -= 1
        return self._sample(self.seconds, 10, 20, stalled_seconds=self.seconds if self.num_disturbed >= 0 else 0.0)


def compared(bench: Any, num_disturbed: int = 0) -> Any:
    """Return one comparison after three turns: loading takes 0.2 s, computing 1 s."""
    running = {"kvferry": Engine(bench, 0.2, num_disturbed), "no offload": Engine(bench, 1.0)}
    [(comparison, figures)] = bench._comparisons("qwen3-tiny", [], [513], list(running))
    figures = {label: (name, lambda engine: engine.measure()) for label, (name, _) in figures.items()}
    for turn in range(3):
        bench.take_turn(comparison, figures, running, turn)
    return comparison


def test_a_ratio_and_its_target(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    comparison = compared(bench)
    assert comparison.ratio.median == pytest.approx(0.2)
    assert comparison.as_json()["ratio"]["target"] == bench.TARGETS["grid"]
    bench.print_results([comparison], [bench.Refused("OffloadingConnector", "only for GPUs")], Console(width=200))
    printed = capsys.readouterr().out
    assert "target at most 1.05: met" in printed
    assert "OffloadingConnector was not measured, its engine ended: only for GPUs" in printed
    comparison.target = 0.1
    bench.print_results([comparison], [], Console(width=200))
    assert "target at most 0.1: MISSED" in capsys.readouterr().out


def test_a_disturbed_measurement_is_taken_again(bench: Any) -> None:
    comparison = compared(bench, num_disturbed=2)
    assert comparison.retaken == 2
    assert [sample.is_disturbed for sample in comparison.samples["kvferry, stored"]] == [False] * 3


def test_every_case_compares_what_it_says(bench: Any) -> None:
    made = bench._comparisons("qwen3-tiny", ["first-token", "shared", "decode"], [129], ["kvferry", "no offload"])
    assert [(each.case, each.numerator, each.denominator) for each, _ in made] == [
        ("first-token", "kvferry, stored", "no offload, computed"),
        ("first-token", "kvferry, not stored", "no offload, computed"),
        ("grid", "kvferry, stored", "no offload, computed"),
        ("shared", "kvferry, 16 at once", "kvferry, one alone"),
        ("shared", "no offload, own cache, 16 at once", "no offload, own cache, one alone"),
        ("shared", "kvferry, 16 at once", "no offload, own cache, 16 at once"),
        ("decode", "kvferry", "no offload"),
    ]
    assert [[name for name, _ in figures.values()] for _, figures in made] == [
        ["kvferry", "no offload"],
        ["kvferry", "no offload"],
        ["kvferry", "no offload"],
        ["kvferry", "kvferry"],
        ["no offload", "no offload"],
        ["kvferry", "no offload"],
        ["kvferry", "no offload"],
    ]


def test_a_grid_compares_with_loading_always_alone(bench: Any) -> None:
    made = bench._comparisons("qwen3-tiny", [], [129, 257], ["kvferry", "kvferry-always"])
    assert [(each.numerator, each.denominator) for each, _ in made] == [
        ("kvferry, stored", "kvferry-always, stored")
    ] * 2
