"""``make test-gpu`` and ``kvferry doctor --device`` on a machine without a GPU: what would run, and why not."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kvferry.cli.doctor import report_device
from kvferry.errors import KVFerryError, Reason, SettingsError, TransportError
from kvferry.execution import device
from kvferry.execution.device import CudaDevice, find_device

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
    parts = {part.name: part for part in script.PARTS if "demo" in part.arguments}
    can_run = {name for name, part in parts.items() if not part.obstacle()}
    expected = {"engines", "engines, concurrent", "engines, offload"}
    assert can_run == (expected if num_devices == 1 else {*parts})
    for name, part in parts.items():
        given = dict(zip(part.arguments[3::2], part.arguments[4::2], strict=True))
        assert int(given["--prefill-tp"]) == (2 if "two devices" in name else 1)
        assert int(given["--decode-tp"]) == 1
        # Two engines run at a time, with a context of CUDA each.
        assert 0 < 2 * float(given["--gpu-memory"]) < 0.95
    if num_devices == 1:
        assert parts["engines, two devices"].obstacle() == "cuda:1 does not exist."


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
