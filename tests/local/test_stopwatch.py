"""The benchmarks' stopwatch, and that an engine's workers find it."""

import doctest
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..no_skips import OF_THE_MACHINE
from ..small_models.trial import has_amx

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.parametrize(
    "name", ["vllm_stopwatch", "stall_watch", "vllm_handoff_engines", "vllm_handoff_report", "vllm_flows_engines"]
)
def test_the_examples_of_the_benchmarks_hold(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert (results.failed, results.attempted > 0) == (0, True)


@pytest.mark.parametrize("engines", ["vllm_handoff_engines", "vllm_flows_engines"])
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


@pytest.mark.skipif(not has_amx(), reason=f"{OF_THE_MACHINE}its processor has no AMX")
def test_a_worker_with_the_stopwatch_may_use_amx(tmp_path: Path) -> None:
    """Linux lets a process use AMX that asks for it: before the stopwatch is there nothing in the worker has asked.

    The system call 158 is ``arch_prctl``, 0x1022 asks which states of the processor are allowed, 18 is that of tiles.
    """
    program = """
import ctypes, sys, types
from vllm_stopwatch import StopwatchExtension

def may_use_amx():
    states = ctypes.c_ulong()
    ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(states))
    return bool(states.value >> 18 & 1)

nothing = lambda *_: None
names = "start_load_kv get_transfer_results get_kv_connector_stats save_kv_layer wait_for_save".split()
for part in ("vllm", "vllm.distributed", "vllm.distributed.kv_transfer"):
    sys.modules[part] = types.ModuleType(part)
sys.modules[part].get_kv_transfer_group = lambda: types.SimpleNamespace(**dict.fromkeys(names, nothing))
before = may_use_amx()
StopwatchExtension().install_stopwatch()
print(before, may_use_amx())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), *sys.path])}
    worker = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert worker.stdout == "False True\n", worker.stderr
