"""The wheel and the source distribution: the same bytes from every build, and nothing that git does not track."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "scripts" / "package.py"

pytestmark = pytest.mark.skipif(
    not (ROOT / ".git").exists() or shutil.which("git") is None, reason="the package is built from what git tracks"
)


def build(destination: Path, umask: int, zone: str) -> dict[str, bytes]:
    """Build both archives under this umask and time zone; return their bytes by name."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000", "TZ": zone}
    command = [sys.executable, str(SCRIPT), "--to", str(destination)]
    subprocess.run(command, env=environment, umask=umask, check=True, capture_output=True, text=True, timeout=120)
    return {path.name: path.read_bytes() for path in sorted(destination.iterdir())}


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return build(tmp_path_factory.mktemp("first"), 0o022, "UTC")


def test_two_builds_give_the_same_bytes(archives: dict[str, bytes], tmp_path: Path) -> None:
    """Whenever they are built, by whom, in which folder, and with which modes of the files."""
    assert len(archives) == 2
    again = build(tmp_path, 0o077, "Asia/Tokyo")
    assert {name: again[name] == content for name, content in archives.items()} == dict.fromkeys(archives, True)


def test_the_wheel_has_every_module_of_the_project_and_nothing_else(archives: dict[str, bytes], tmp_path: Path) -> None:
    [wheel] = [name for name in archives if name.endswith(".whl")]
    (tmp_path / wheel).write_bytes(archives[wheel])
    with zipfile.ZipFile(tmp_path / wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
        times = {member.date_time for member in archive.infolist()}
    tracked = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert found == {name.removeprefix("src/") for name in tracked.splitlines() if (ROOT / name).exists()}
    assert times == {(2023, 11, 14, 22, 13, 20)}


def test_the_source_distribution_has_its_own_back_end(archives: dict[str, bytes], tmp_path: Path) -> None:
    """Else pip could not build it; a build from it gives the wheel above, since that one is built from it too."""
    [source] = [name for name in archives if name.endswith(".tar.gz")]
    (tmp_path / source).write_bytes(archives[source])
    with tarfile.open(tmp_path / source) as archive:
        members = archive.getmembers()
    names = {member.name.partition("/")[2] for member in members}
    assert {"pyproject.toml", "LICENSE", "README.md", "scripts/reproducible_build.py"} <= names
    assert {(member.mtime, member.uid, member.gname) for member in members} == {(1700000000, 0, "")}


@pytest.mark.parametrize(("found", "makes_one"), [("77.0.1", False), ("76.1", True), (None, True)])
def test_setuptools_is_fetched_only_where_none_or_an_old_one_is_there(found: str | None, makes_one: bool) -> None:
    """Neither .venv nor a package of it is needed: ``-S`` hides them all."""
    program = f"""
import importlib.metadata, sys
def version(name):
    if {found!r} is None: raise importlib.metadata.PackageNotFoundError(name)
    return {found!r}
importlib.metadata.version = version
import package
package.make_environment = lambda python, folder, requirements: folder.joinpath(python, *requirements)
print(package.builder() == sys.executable)
print(package.builder())
"""
    command = [sys.executable, "-S", "-c", program]
    told = subprocess.run(command, cwd=SCRIPT.parent, check=True, capture_output=True, text=True, timeout=60).stdout
    is_own, python = told.splitlines()
    assert is_own == str(not makes_one)
    assert not makes_one or python.endswith("/setuptools>=77/python")


def test_make_package_sets_up_nothing() -> None:
    command = ["make", "--no-print-directory", "--dry-run", "package", "PYTHON=/somewhere/python", "ARGS="]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert told.split() == ["/somewhere/python", "scripts/package.py"]


def run_readme_lines(folder: Path, **programs: str) -> "subprocess.CompletedProcess[str]":
    """Run the README's lines for a CPU in an empty folder, with programs that only say that they ran."""
    (folder / "empty").mkdir()
    stand_ins = {
        "python3.11": "mkdir -p environment/bin; echo echo activated > environment/bin/activate",
        "pip": "echo installed",
        "python": "echo engine",
        "vllm-router": "echo router",
        "kvferry": "echo checked",
        "curl": '[[ "$*" == *health* ]] && echo healthy || echo answer',
    }
    for name, line in (stand_ins | programs).items():
        (folder / name).write_text(f"#!/bin/bash\n{line}\n")
        (folder / name).chmod(0o755)
    command = [sys.executable, "-c", "import check_package; print(check_package.readme_lines(), end='')"]
    lines = subprocess.run(command, cwd=ROOT / "scripts", check=True, capture_output=True, text=True, timeout=60).stdout
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        ["/bin/bash", "-c", lines], cwd=folder / "empty", env=environment, capture_output=True, text=True, timeout=60
    )


def test_the_readmes_lines_go_from_an_environment_to_an_answer(tmp_path: Path) -> None:
    """The check of the package reads standard output as JSON; all but the last line print elsewhere."""
    ran = run_readme_lines(tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "answer\n"
    assert ran.stderr.split()[:2] == ["activated", "installed"]
    assert sorted(ran.stderr.split()[2:]) == ["checked", "engine", "engine", "healthy", "router"]


@pytest.mark.parametrize(
    ("failing", "others", "told", "never"),
    [
        ("pip", "", "this line failed: pip install", "engine"),
        ("kvferry", "", "this line failed: kvferry check", "answer"),
        ("python", "sleep 20; exit 1", "an engine or the router has ended", "checked"),
    ],
)
def test_the_readmes_lines_end_at_the_first_that_fails(
    failing: str, others: str, told: str, never: str, tmp_path: Path
) -> None:
    """An engine's line too, which runs while others do: nobody waits for a health that never comes."""
    ran = run_readme_lines(tmp_path, **{failing: "exit 1"}, **({"curl": others} if others else {}))
    assert ran.returncode != 0
    assert told in ran.stderr
    assert never not in ran.stdout + ran.stderr.replace(told, "")


@pytest.mark.parametrize("arguments", [[], ["--debootstrap"]], ids=" ".join)
def test_a_machine_that_builds_no_images_is_told_what_is_needed(arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT.with_name("check_image.py")), *arguments]
    ran = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    assert ran.stderr.startswith("nothing was built")
    assert "buildah" in ran.stderr
