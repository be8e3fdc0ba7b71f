"""Set-up's cure for a torchvision whose operators do not load: mended where it can be, removed where not."""

import importlib.util
import subprocess
import sys
import venv
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "mend_torchvision.py"
EXTENSION = "import torch\ndef _has_ops():\n    return False\n"
"""As torchvision's own, after its operators did not load."""
REGISTERS = """
from . import extension
import torch.library
@torch.library.register_fake("torchvision::nms")
def nms(dets, scores, iou_threshold):
    return dets.new_empty(0)
"""
"""As torchvision registers what an operator does on tensors without data, whether or not its operators loaded."""
CALLS = """
import torch, torchvision
print(torch.ops.torchvision.nms(torch.zeros(1, 4, device="meta"), torch.zeros(1, device="meta"), 0.5).device)
torch.ops.torchvision.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
"""


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Return the folder of packages of a new environment, which has this one's packages too."""
    venv.create(tmp_path, symlinks=True)
    [packages] = (tmp_path / "lib").glob("*/site-packages")
    (packages / "beside.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return packages


def install(packages: Path, name: str, **modules: str) -> None:
    """Install a package with these modules, so that pip can remove it."""
    sources = {f"{name}/{module}.py": source for module, source in modules.items()}
    sources[f"{name}-1.0.dist-info/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    sources[f"{name}-1.0.dist-info/RECORD"] = "".join(
        f"{path},,\n" for path in [*sources, f"{name}-1.0.dist-info/RECORD"]
    )
    for path, source in sources.items():
        (packages / path).parent.mkdir(exist_ok=True)
        (packages / path).write_text(source)


def run(packages: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    python = packages.parent.parent.parent / "bin" / "python"
    return subprocess.run([str(python), *arguments], capture_output=True, text=True, timeout=120, cwd=packages)


def test_a_torchvision_without_operators_is_mended_and_its_broken_neighbour_removed(packages: Path) -> None:
    install(packages, "torchvision", __init__=REGISTERS, extension=EXTENSION)
    install(packages, "torchaudio", __init__="raise OSError('Could not load this library')")
    mended = run(packages, str(SCRIPT))
    assert mended.returncode == 0, mended.stderr
    assert "torchvision's operators do not load here (RuntimeError: " in mended.stderr
    assert "removing what does not import here (torchaudio: OSError: Could not load this library)" in mended.stderr
    assert {path.name for path in packages.glob("torch*")} == {"torchvision", "torchvision-1.0.dist-info"}

    called = run(packages, "-c", CALLS)
    assert called.stdout == "meta\n", called.stderr
    assert "NotImplementedError: Could not run 'torchvision::nms'" in called.stderr

    text = (packages / "torchvision" / "extension.py").read_text()
    again = run(packages, str(SCRIPT))
    assert (again.returncode, again.stderr) == (0, "")
    assert (packages / "torchvision" / "extension.py").read_text() == text


def test_a_torchvision_that_imports_is_left_alone(packages: Path) -> None:
    install(packages, "torchvision", __init__="", extension=EXTENSION)
    ran = run(packages, str(SCRIPT))
    assert (ran.returncode, ran.stderr) == (0, "")
    assert (packages / "torchvision" / "extension.py").read_text() == EXTENSION


@pytest.mark.parametrize(
    "modules",
    [{"extension": EXTENSION, "version": ""}, {"version": ""}],
    ids=["broken otherwise", "without the file to mend"],
)
def test_a_torchvision_that_stays_broken_is_removed(packages: Path, modules: dict[str, str]) -> None:
    install(packages, "torchvision", __init__="raise ImportError('no such symbol')", **modules)
    ran = run(packages, str(SCRIPT))
    assert ran.returncode == 0, ran.stderr
    assert "removing what does not import here (torchvision: ImportError: no such symbol)" in ran.stderr
    assert not list(packages.glob("torchvision*"))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="set-up installs torchvision with vLLM")
def test_torchvision_imports_in_the_environment_of_these_tests() -> None:
    """Else vLLM does not know its multimodal classes, and their tests fail for no reason that they name."""
    command = [sys.executable, "-c", "from torchvision.transforms.v2 import functional"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
