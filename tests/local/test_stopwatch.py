"""The benchmarks' stopwatch, and that an engine's workers find it."""

import doctest
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.parametrize(
    "name", ["vllm_stopwatch", "stall_watch", "vllm_pull_engines", "vllm_pull_report", "vllm_push_engines"]
)
def test_the_examples_of_the_benchmarks_hold(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert (results.failed, results.attempted > 0) == (0, True)


@pytest.mark.parametrize("engines", ["vllm_pull_engines", "vllm_push_engines"])
def test_workers_of_a_benchmarks_engines_import_its_extension(engines: str, tmp_path: Path) -> None:
    """VLLM imports the class by its dotted name in the worker's process."""
    module = importlib.import_module(engines)
    name, _, extension = module.EXTENSION.rpartition(".")
    program = f"from {name} import {extension} as it; print(callable(it.install_stopwatch))"
    environment = {**os.environ, **module.KVFERRY.variables}
    worker = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert worker.stdout == "True\n", worker.stderr
