"""What vLLM itself makes of a model's configuration, from a process that has imported vLLM."""

import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from ..matrix_results import REPOSITORY


class Oracle:
    """vLLM's answers for any ``config.json``; nothing is remembered but the answers of this process."""

    def __init__(self, questions: TextIO, answers: TextIO) -> None:
        self._questions, self._lines = questions, answers
        self._answers: dict[str, dict[str, Any]] = {}

    def groups(
        self, path: Path, tp: int, *, dtype: str | None = None, block_size: int = 16, layout: str = "BHLNC"
    ) -> dict[str, Any]:
        """Return the groups of rank 0, or why vLLM ``refused`` the model."""
        return self._ask({"path": str(path), "tp": tp, "dtype": dtype, "block_size": block_size, "layout": layout})

    def moved(self, path: Path, *, block_size: int, layout: str) -> dict[str, Any]:
        """Return the ``bytes`` that moved between caches of this model, or ``differs``, ``unsupported``, ``refused``.

        Each but the first is text: what is wrong, why kvferry has no plan, why vLLM has no model.
        """
        return self._ask({"path": str(path), "block_size": block_size, "layout": layout, "move": True})

    def _ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        line = json.dumps(asked)
        if line not in self._answers:
            print(line, file=self._questions, flush=True)
            answer = self._lines.readline()
            assert answer, "the process with vLLM has ended"
            self._answers[line] = json.loads(answer)
        return self._answers[line]


@contextmanager
def vllm_oracle(folder: Path) -> Iterator[Oracle]:
    """Ask the one process of all that name this folder; the first of them starts it."""
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(folder / "socket"))
        except OSError:  # there is none, or it ended with its last connection
            start_process(folder)
            connection.connect(str(folder / "socket"))
    with connection, connection.makefile("w") as questions, connection.makefile("r") as answers:
        yield Oracle(questions, answers)


def start_process(folder: Path) -> None:
    """Start the process; what vLLM prints goes to a file in the folder, as does what vLLM remembers of its classes."""
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CACHE_ROOT": str(folder)}
    with socket.socket(socket.AF_UNIX) as listener, (folder / "log").open("w") as log:
        listener.bind(str(folder / "socket"))
        listener.listen()
        subprocess.Popen(
            [sys.executable, "-m", "tests.adapter.planner_oracle_process", str(listener.fileno()), str(folder)],
            cwd=REPOSITORY,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[listener.fileno()],
            process_group=0,
        )
