"""Builds the source distribution from the files that git tracks, and the wheel from the source distribution.

Both go into dist/ (or --to FOLDER), and their SHA-256 are printed. The time in them is that of the last commit, or
SOURCE_DATE_EPOCH: two builds of one tree give the same bytes. The setuptools of this interpreter builds, so nothing is
downloaded.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).absolute().parent.parent
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

    Raises :class:`subprocess.CalledProcessError` where git or setuptools fails.
    """
    destination.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvferry-package-") as scratch:
        tree = Path(scratch) / "tree"
        for name in _git("ls-files", "-z").split("\0"):
            if name and (ROOT / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, tree / name)
        source = _call("build_sdist", tree, destination)
        with tarfile.open(source) as archive:
            archive.extractall(scratch, filter="data")
        wheel = _call("build_wheel", Path(scratch) / source.name.removesuffix(".tar.gz"), destination)
    return [source, wheel]


def _call(hook: str, tree: Path, destination: Path) -> Path:
    """Run a hook of the project's build back end in a process of its own, in a folder; return the built file."""
    seconds = os.environ.get(VARIABLE) or _git("log", "-1", "--format=%ct").strip()
    command = [sys.executable, "-c", BUILD.format(hook=hook), str(destination.absolute())]
    environment = {**os.environ, VARIABLE: seconds}
    told = subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True, text=True).stdout
    return destination.absolute() / told.splitlines()[-1]


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
