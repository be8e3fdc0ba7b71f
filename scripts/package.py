"""Builds the source distribution from the files that git tracks, and the wheel from the source distribution.

Both go into dist/ (or --to FOLDER), and their SHA-256 are printed. The time in them is that of the last commit, or
SOURCE_DATE_EPOCH: two builds of one tree by one setuptools give the same bytes. The setuptools of this interpreter
builds, and nothing is downloaded; where it has none that is new enough, pip gets one into build/package-environment.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from environments import make_environment

ROOT = Path(__file__).absolute().parent.parent
ENVIRONMENT = ROOT / "build" / "package-environment"
VARIABLE = "SOURCE_DATE_EPOCH"
BUILD = "import sys; sys.path.insert(0, 'scripts'); import reproducible_build as b; print(b.{hook}(sys.argv[1]))"


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 where the build fails."""
    parser = argparse.ArgumentParser(prog="package", description=__doc__)
    parser.add_argument("--to", type=Path, default=ROOT / "dist", help="the folder of the archives")
    options = parser.parse_args(arguments)
    try:
        for path in build(options.to):
            print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path}")
    except subprocess.CalledProcessError as error:
        print(f"{error.stdout or ''}{error.stderr or ''}the build has failed", file=sys.stderr)
        return 1
    return 0


def build(destination: Path) -> list[Path]:
    """Build the source distribution and the wheel; return their paths.

    Raises :class:`subprocess.CalledProcessError` where git, pip or setuptools fails.
    """
    python = builder()
    destination.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvferry-package-") as scratch:
        tree = Path(scratch) / "tree"
        for name in _git("ls-files", "-z").split("\0"):
            if name and (ROOT / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, tree / name)
        source = _call(python, "build_sdist", tree, destination)
        with tarfile.open(source) as archive:
            archive.extractall(scratch, filter="data")
        wheel = _call(python, "build_wheel", Path(scratch) / source.name.removesuffix(".tar.gz"), destination)
    return [source, wheel]


def builder() -> str:
    """Return an interpreter with the setuptools that pyproject.toml asks for: this one, or that of an environment.

    Raises :class:`subprocess.CalledProcessError` where pip does not get setuptools.
    """
    [requirement] = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    name, _, least = requirement.partition(">=")
    try:
        if int(version(name).partition(".")[0]) >= int(least):
            return sys.executable
    except PackageNotFoundError:
        pass
    return str(make_environment(sys.executable, ENVIRONMENT, [requirement]) / "python")


def _call(python: str, hook: str, tree: Path, destination: Path) -> Path:
    """Run a hook of the project's build back end in a process of its own, in a folder; return the built file."""
    seconds = os.environ.get(VARIABLE) or _git("log", "-1", "--format=%ct").strip()
    command = [python, "-c", BUILD.format(hook=hook), str(destination.absolute())]
    environment = {**os.environ, VARIABLE: seconds}
    told = subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True, text=True).stdout
    return destination.absolute() / told.splitlines()[-1]


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
