"""What vLLM itself makes of a model's configuration, from a process that has imported vLLM."""

import json
import os
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
    """Start the process; what vLLM prints goes to a file in the folder, as does what vLLM remembers of its classes."""
    read, write = os.pipe()
    command = [sys.executable, "-m", "tests.adapter.planner_oracle_process", str(write)]
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CACHE_ROOT": str(folder)}
    with (
        os.fdopen(read) as answers,
        (folder / "log").open("w") as log,
        subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[write],
            text=True,
        ) as process,
    ):
        os.close(write)
        assert process.stdin is not None
        try:
            yield Oracle(process.stdin, answers)
        finally:
            process.stdin.close()
            process.kill()
