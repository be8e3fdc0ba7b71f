"""``make test-gpu`` and ``kvferry doctor --device`` on a machine without a GPU: what would run, and why not."""

import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import typer

from kvferry.cli.demo import DTYPES, DemoSettings
from kvferry.cli.doctor import report_device
from kvferry.cli.main import app
from kvferry.errors import KVFerryError, Reason, SettingsError, TransportError
from kvferry.execution import device
from kvferry.execution.device import CudaDevice, find_device
from kvferry.harness.launch import words_of
from kvferry.harness.tiny_models import find_tiny_model

ROOT = Path(__file__).parents[2]
COLLECT_SECONDS = 240.0
MOST_SECONDS = 60.0
"""Limit of a child that waits for something. A busy machine needs a part of it."""


@pytest.fixture
def without_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "LIBRARY", "libcuda-of-no-machine.so.1")


def has_device() -> bool:
    try:
        find_device("cuda:0")
    except KVFerryError:
        return False
    return True


@pytest.mark.usefixtures("without_driver")
def test_a_machine_without_a_driver_says_so() -> None:
    with pytest.raises(TransportError, match=r"no CUDA driver.*--gpus all") as caught:
        find_device("cuda:0")
    assert caught.value.reason is Reason.MISSING_DEPENDENCY


@pytest.mark.parametrize("name", ["cpu", "cuda", "gpu:0", "cuda:-1", "cuda:0 "])
def test_another_name_is_no_device(name: str) -> None:
    with pytest.raises(SettingsError, match="cuda:0") as caught:
        find_device(name)
    assert caught.value.reason is Reason.INVALID_SETTING


class Driver:
    """The functions of the driver that are asked, with two devices; ``failing`` returns an error."""

    def __init__(self, failing: str = "", ordering: int = 100) -> None:
        self._failing, self._ordering = failing, ordering

    def __getattr__(self, name: str) -> object:
        def call(*arguments: object) -> int:
            if name == "cuDeviceGetCount":
                arguments[0]._obj.value = 2  # type: ignore[attr-defined]
            if name == "cuDeviceGetName":
                arguments[0].value = b"A GPU"  # type: ignore[attr-defined]
            if name == "cuDeviceGetAttribute":
                arguments[0]._obj.value = self._ordering  # type: ignore[attr-defined]
            return 100 if name == self._failing else 0

        return call


def test_devices_are_counted_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.ctypes, "CDLL", lambda _: Driver())
    assert find_device("cuda:1") == CudaDevice("A GPU", sees_rdma_writes=True)
    with pytest.raises(TransportError, match="sees 2 CUDA devices") as caught:
        find_device("cuda:2")
    assert caught.value.reason is Reason.UNSUPPORTED
    monkeypatch.setattr(device.ctypes, "CDLL", lambda _: Driver(ordering=0))
    assert not find_device("cuda:0").sees_rdma_writes
    monkeypatch.setattr(device.ctypes, "CDLL", lambda _: Driver("cuInit"))
    with pytest.raises(TransportError, match="cuInit of the CUDA driver returned 100"):
        find_device("cuda:0")


@pytest.mark.skipif(has_device(), reason="runs the trial where there is a GPU")
def test_doctor_refuses_a_device_that_is_not_there_without_importing_torch() -> None:
    program = (
        "import sys, kvferry.cli.main as main; sys.argv[1:] = ['doctor', '--device', 'cuda:0']\n"
        "try: main.main()\nexcept SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=MOST_SECONDS)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # On a busy machine the clock says nothing; 2 s are promised.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0
    assert found.stdout.split() == ["2", "False"]
    assert "kvferry: cuda:0 cannot be used: this machine has no CUDA driver" in found.stderr


@pytest.mark.skipif(torch.version.cuda is not None, reason="the installed torch is built for CUDA")
def test_doctor_says_that_torch_cannot_use_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_load", lambda _: Driver())
    with pytest.raises(TransportError, match="is built without CUDA") as caught:
        report_device("cuda:0", "auto", json_output=False)
    assert caught.value.reason is Reason.MISSING_DEPENDENCY


def gpu_tests(patch: pytest.MonkeyPatch) -> ModuleType:
    """Return scripts/gpu_tests.py as a module."""
    script = ModuleType("gpu_tests")
    source = ROOT / "scripts/gpu_tests.py"
    patch.setitem(sys.modules, script.__name__, script)
    vars(script)["__file__"] = str(source)
    exec(compile(source.read_text(), source, "exec"), vars(script))
    return script


def test_every_test_of_gpus_can_be_imported_and_every_part_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "tests/gpu"]
    environment = {**os.environ, "KVFERRY_GPU": "1"}
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=COLLECT_SECONDS)
    assert found.returncode == 0, found.stdout
    tests = [line for line in found.stdout.splitlines() if "::" in line]
    assert {test.partition("::")[0] for test in tests} == {
        str(path.relative_to(ROOT)) for path in (ROOT / "tests/gpu").glob("test_*.py")
    }
    for part in gpu_tests(monkeypatch).PARTS:
        for file in (argument for argument in part.arguments if argument.endswith(".py")):
            keyword = part.arguments[-1] if "-k" in part.arguments else ""
            assert (ROOT / file).exists(), part.name
            assert not file.startswith("tests/") or any(file in test and keyword in test for test in tests), part.name


@pytest.mark.parametrize("num_devices", [1, 2])
def test_engines_run_on_as_many_devices_as_there_are(num_devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM asserts that each rank of an engine has a device, and that the part of it that it wants is free."""
    script = gpu_tests(monkeypatch)

    def find(name: str) -> None:
        if int(name.removeprefix("cuda:")) >= num_devices:
            raise TransportError(Reason.UNSUPPORTED, f"{name} does not exist.")

    monkeypatch.setattr(script, "find_device", find)
    monkeypatch.setattr(script, "version", lambda name: "1.0")
    monkeypatch.setattr(script, "_capability", lambda: 9)
    monkeypatch.setattr(script.importlib.util, "find_spec", without())
    parts = {part.name: part for part in script.PARTS if "demo" in part.arguments}
    can_run = {name for name, part in parts.items() if not part.obstacle()}
    on_two = {"engines, two devices", "engines, concurrent, two devices"}
    assert can_run == ({*parts} - on_two if num_devices == 1 else {*parts})
    for name, part in parts.items():
        given = dict(zip(part.arguments[3::2], part.arguments[4::2], strict=True))
        assert int(given["--prefill-tp"]) == (2 if "two devices" in name else 1)
        assert int(given["--decode-tp"]) == 1
        # Two engines run at a time, with a context of CUDA each.
        assert given["--gpu-memory"] == script.SHARE
    if num_devices == 1:
        assert parts["engines, two devices"].obstacle() == "cuda:1 does not exist."


def without(*missing: str) -> Callable[[str], Any]:
    """Return a search for modules that finds all but those that are named."""
    return lambda name: None if name in missing else SimpleNamespace(submodule_search_locations=[])


def test_a_part_whose_kernel_is_missing_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    script = gpu_tests(monkeypatch)
    monkeypatch.setattr(script, "find_device", lambda name: None)
    monkeypatch.setattr(script, "version", lambda name: "1.0")
    monkeypatch.setattr(script, "_capability", lambda: 8)
    monkeypatch.setattr(script.importlib.util, "find_spec", without("flashinfer"))
    parts = {part.name: part.obstacle() for part in script.PARTS}
    assert parts["engines, FlashInfer"] == "flashinfer is not installed"
    assert "the device has 8" in parts["engines, FlashAttention 3"]
    assert "the device has 8" in parts["engines, sparse MLA"]
    assert parts["engines, Triton"] == parts["engines, MLA"] == ""
    monkeypatch.setattr(script, "_capability", lambda: 9)
    monkeypatch.setattr(script.importlib.util, "find_spec", without("deep_gemm"))
    parts = {part.name: part.obstacle() for part in script.PARTS}
    assert parts["engines, FlashAttention 3"] == ""
    assert parts["engines, sparse FP8 MLA"] == "deep_gemm is not installed"


def test_every_demo_is_one_that_the_command_line_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = gpu_tests(monkeypatch)
    group = typer.main.get_command(app)
    command = group.get_command(typer.Context(group), "demo")  # type: ignore[attr-defined]
    monkeypatch.setattr(script.Files, "_make", lambda self, kind, name: tmp_path / kind / name)
    files = script.Files(tmp_path, threading.Lock())
    for part in script.PARTS:
        if "demo" in part.arguments:
            arguments = [files.written(argument).replace(script.SHARE, "0.1") for argument in part.arguments[3:]]
            assert not any("@" in argument for argument in arguments), part.name
            given = command.make_context("demo", arguments).params
            assert given["dtype"] in DTYPES
            DemoSettings(
                mode=given["mode"], dtype=given["dtype"], arguments=words_of(given["engine_arguments"])
            ).check()
            if not given["model"].startswith(str(tmp_path)):
                find_tiny_model(given["model"])


def test_a_model_and_its_adapter_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = gpu_tests(monkeypatch)
    files = script.Files(tmp_path, threading.Lock())
    adapter = files.written("@adapter:qwen3-tiny@")
    assert (Path(adapter) / "adapter_config.json").is_file()
    path = files.written('{"model": "@tiny:qwen3-tiny@", "tokens": 3}')
    assert Path(json.loads(path)["model"], "config.json").is_file()
    assert len([*tmp_path.iterdir()]) == 2
    assert files.written("@adapter:qwen3-tiny@") == adapter


def run_parts(script: ModuleType, parts: list[Any], seconds: float, at_once: int, folder: Path) -> dict[str, Any]:
    """Run parts that stand in; return the outcomes by name, in the order in which they came."""
    outcomes: list[Any] = []
    files = script.Files(folder, threading.Lock())
    script.Run(files, at_once, time.monotonic() + seconds, set()).all(parts, outcomes.append)
    return {outcome.name: outcome for outcome in outcomes}


def stand_in(script: ModuleType, name: str, program: str, **more: Any) -> Any:
    return script.Part(name, "", ("-c", program), str, **more)


def test_parts_run_beside_each_other_and_those_that_measure_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = gpu_tests(monkeypatch)
    meet = f"""
import os, sys, time
folder, name, other = {str(tmp_path)!r}, *sys.argv[1:]
open(f"{{folder}}/{{name}}", "w").close()
end = time.monotonic() + {MOST_SECONDS}
while not os.path.exists(f"{{folder}}/{{other}}"):
    assert time.monotonic() < end
    time.sleep(0.01)
os.remove(f"{{folder}}/{{other}}")
print("met", "KVFERRY_GPU" in os.environ)
"""
    look = f"import os; assert not os.listdir({str(tmp_path)!r})"
    parts = [
        stand_in(script, "measures", look, alone=True),
        script.Part("one", "", ("-c", meet, "a", "b"), str),
        script.Part("other", "", ("-c", meet, "b", "a"), str),
    ]
    found = run_parts(script, parts, MOST_SECONDS, 2, tmp_path)
    assert {name: each.outcome for name, each in found.items()} == dict.fromkeys(("one", "other", "measures"), "passed")
    assert [*found][-1] == "measures"
    assert found["one"].found == "met True"


def test_a_part_that_fails_ends_late_or_shows_nothing_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = gpu_tests(monkeypatch)
    monkeypatch.setattr(script, "END_SECONDS", 0.5)
    monkeypatch.setattr(script, "PART_SECONDS", 15.0)
    child = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '999']).pid, flush=True); time.sleep(999)"
    parts = [
        stand_in(script, "fails", "raise SystemExit('it broke')"),
        stand_in(script, "hangs", child),
        stand_in(script, "shows nothing", "print('0 preemptions')", evidence=r"[1-9]\d* preemptions"),
        stand_in(script, "shows", "print('12 preemptions')", evidence=r"[1-9]\d* preemptions"),
        script.Part("no file", "", ("@tiny:qwen9@",), str),
        script.Part("shares", "", ("-c", "import sys; print(sys.argv[1])", script.SHARE), str),
        script.Part("cannot", "", ("-c", "1"), lambda: "flashinfer is not installed"),
    ]
    found = run_parts(script, parts, MOST_SECONDS, len(parts), tmp_path)
    outcomes = {name: each.outcome for name, each in found.items()}
    assert outcomes == {
        **dict.fromkeys(("fails", "hangs", "shows nothing", "no file"), "failed"),
        **dict.fromkeys(("shows", "shares"), "passed"),
        "cannot": "cannot run",
    }
    assert found["fails"].found == "it broke"
    assert "qwen9" in found["no file"].found
    assert found["cannot"].found == "flashinfer is not installed"
    assert found["hangs"].found.startswith("had not ended after 15 s: ")
    # Two engines of each part at a time.
    assert 2 * len(parts) * float(found["shares"].found) == pytest.approx(script.PART_OF_DEVICE, rel=0.02)
    process = Path("/proc", found["hangs"].found.split()[-1], "stat")
    assert not process.exists() or process.read_text().rpartition(")")[2].split()[0] == "Z"
    assert "--- fails\nit broke" in capsys.readouterr().err
    late = run_parts(script, parts[:1], 0.0, 1, tmp_path)["fails"]
    assert (late.outcome, late.found[:16]) == ("cannot run", "no time was left")


def test_outcomes_are_written_as_each_part_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends this run too early loses no outcome that it had."""
    script = gpu_tests(monkeypatch)
    path = tmp_path / "outcomes.json"
    monkeypatch.setattr(script, "_needs_device", str)
    wait = f"import time, os\nwhile 'passed' not in open({str(path)!r}).read(): time.sleep(0.01)"
    monkeypatch.setattr(
        script, "PARTS", (stand_in(script, "first", f"open({str(path)!r}, 'a')"), stand_in(script, "second", wait))
    )
    monkeypatch.setattr(sys, "argv", ["gpu_tests.py", "--json", str(path), "--at-once", "2", "--seconds", "60"])
    path.touch()
    assert script.main() == 0
    assert [part["outcome"] for part in json.loads(path.read_text())["parts"]] == ["passed", "passed"]


@pytest.mark.skipif(has_device(), reason="runs the parts where there is a GPU")
def test_gpu_tests_name_every_part_and_why_it_does_not_run(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.json"
    command = [sys.executable, "scripts/gpu_tests.py", "--json", str(path)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 2, found.stderr
    outcomes = json.loads(path.read_text())
    assert "no CUDA driver" in outcomes["obstacle"]
    names = [part["name"] for part in outcomes["parts"]]
    expected = {"trial", "conformance", "cell sums", "graph capture", "offload copies"}
    expected |= {
        "offload rate",
        "decode beside transfers",
        "engines",
        "engines, concurrent, two devices",
        "engines, offload",
    }
    assert expected <= {*names}
    for part in outcomes["parts"]:
        assert part["outcome"] == "cannot run"
        assert part["found"]
        assert part["name"] in found.stdout
    assert "Nothing ran: cuda:0 cannot be used" in found.stdout
