"""The campaign's side of its engines: starts the program, asks for engines and lives, and kills them."""

import os
import resource
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvferry.harness.child_process import ChildProcess

ANSWER_SECONDS, START_SECONDS = 120.0, 240.0
PROGRAM = "tests.host.vllm.fault_campaign.program"
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # With one thread there is no team of threads that a fork would lose.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_CI_ENV": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


class Ended(Exception):
    """The process at the other end is gone."""


@dataclass
class Process:
    """A process that waits for orders."""

    connection: Connection
    process_id: int
    hello: dict[str, Any]

    def begin(self, verb: str, **arguments: Any) -> None:
        """Ask for something, and do not wait."""
        try:
            self.connection.send((verb, arguments))
        except OSError as error:
            raise Ended(verb) from error

    def answer(self) -> Any:
        """Wait for the answer. Raises :class:`Ended` for a process that has ended."""
        try:
            if not self.connection.poll(ANSWER_SECONDS):
                raise TimeoutError(f"process {self.process_id} has not answered for {ANSWER_SECONDS:g} s")
            return self.connection.recv()
        except (EOFError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise Ended(str(self.process_id)) from error

    def call(self, verb: str, **arguments: Any) -> Any:
        """Ask and wait."""
        self.begin(verb, **arguments)
        return self.answer()

    def kill(self) -> None:
        """End the process with SIGKILL; return when the kernel has closed its files, so that nobody holds its lock."""
        with suppress(ProcessLookupError):
            os.kill(self.process_id, signal.SIGKILL)
        with suppress(EOFError, OSError):
            while self.connection.poll(ANSWER_SECONDS):
                self.connection.recv()
        self.connection.close()
        # The connection may be closed before the lock is.
        with suppress(FileNotFoundError, ProcessLookupError):
            while _state(self.process_id) not in "ZX":
                os.sched_yield()

    def limit_files(self, num_bytes: int | None) -> None:
        """Let no file of the process grow or be written beyond this length; None for no limit."""
        hard = resource.prlimit(self.process_id, resource.RLIMIT_FSIZE)[1]
        soft = hard if num_bytes is None else num_bytes
        resource.prlimit(self.process_id, resource.RLIMIT_FSIZE, (soft, hard))


def _state(process_id: int) -> str:
    return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]


@dataclass
class Processes:
    """The program, which has imported vLLM, and what was forked from it."""

    socket: Path
    listener: Listener
    child: ChildProcess
    program: Process = field(init=False)

    @classmethod
    def start(cls, folder: Path) -> Self:
        """Start the program, whose log is in ``folder``."""
        # A path of a test's folder may be too long for a socket.
        socket = Path(tempfile.mkdtemp(prefix="kvferry-faults-")) / "socket"
        listener = Listener(str(socket), "AF_UNIX")
        root = Path(__file__).parents[4]
        path = os.pathsep.join([str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")])
        import_and_serve = f"from {PROGRAM} import main; main()"
        child = ChildProcess.start(
            "faults",
            [sys.executable, "-c", import_and_serve, str(socket)],
            folder / "engines.log",
            {**ENVIRONMENT, "PYTHONPATH": path},
        )
        started = cls(socket, listener, child)
        try:
            started.program = started._accept("program")
        except BaseException:
            started.stop()
            raise
        return started

    def fork(self, parent: Process, order: Mapping[str, Any], kind: str) -> Process:
        """Return a process that was forked for an order, when it is ready for its own."""
        parent.connection.send(dict(order))
        return self._accept(kind)

    def stop(self) -> None:
        """End all processes."""
        self.child.kill()
        self.listener.close()
        with suppress(OSError):
            self.socket.parent.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def log_tail(self) -> str:
        """Return the end of the log of all processes."""
        return self.child.log_tail()

    def _accept(self, kind: str) -> Process:
        """Wait for the next process that says what it is."""
        # multiprocessing's listener has no public timeout.
        self.listener._listener._socket.settimeout(START_SECONDS)  # type: ignore[attr-defined]
        try:
            connection = self.listener.accept()
        except TimeoutError as error:
            raise AssertionError(f"no {kind} has started; the log ends:\n{self.log_tail()}") from error
        hello = connection.recv()
        assert hello["is"] == kind, hello
        return Process(connection, hello["process_id"], hello)
