"""The demo as a process of its own."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

DEMO = [sys.executable, "-m", "kvferry.cli.main", "demo"]


@contextlib.contextmanager
def started_demo(folder: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Start the demo with a temporary folder of its own; end it in any case."""
    with (folder / "stderr").open("w") as errors:
        process = subprocess.Popen(
            [*DEMO, "--json", *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "TMPDIR": str(folder)},
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder with a short name: sockets are made in it."""
    with tempfile.TemporaryDirectory(prefix="kvf") as path:
        yield Path(path)
