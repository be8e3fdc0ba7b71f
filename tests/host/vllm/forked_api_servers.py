"""vLLM's API servers, each forked from one process that has imported vLLM: an import costs 13 seconds of a core.

The process is this module as a program. What it forks is the supervisor that :mod:`kvferry.harness.supervisor` also is
in a process of its own, and the supervisor forks the API server: so a server ends with its owner, and as all others.
"""

import atexit
import ctypes
import gc
import json
import mmap
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, NoReturn

from kvferry.harness import supervisor
from kvferry.harness.child_process import GRACE_SECONDS, ChildProcess

IMPORT_SECONDS = 120.0
LONGEST_REQUEST = 1 << 16


class ForkedSupervisor:
    """A supervisor that was forked, with those parts of a ``Popen`` that a :class:`ChildProcess` needs."""

    def __init__(self, process_id: int, stdin: BinaryIO, status: int) -> None:
        self.pid, self.stdin = process_id, stdin
        self._status = status
        self._found: int | None = None

    def poll(self) -> int | None:
        """Return the exit status of the command, or None while it runs."""
        if self._found is None and select.select([self._status], [], [], 0.0)[0]:
            written = os.read(self._status, 16)
            self._found = int(written) if written else -signal.SIGKILL  # it had no time to say
            os.close(self._status)
        return self._found

    def wait(self, timeout: float) -> int:
        """Raises ``TimeoutExpired`` where the command does not end within ``timeout`` seconds."""
        if self._found is None:
            select.select([self._status], [], [], timeout)
        if (found := self.poll()) is None:
            raise subprocess.TimeoutExpired("the supervisor", timeout)
        return found


class ApiServerForks:
    """The process that has imported vLLM, and what it forks."""

    def __init__(self, log: Path, environment: Mapping[str, str]) -> None:
        """The variables are those that Python and vLLM read while they are imported."""
        self._requests, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs, log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        self._requests.settimeout(IMPORT_SECONDS)

    def start(
        self, name: str, arguments: Sequence[str], log_path: Path, environment: Mapping[str, str]
    ) -> ChildProcess:
        """Start an API server with these arguments of its command line; as :meth:`ChildProcess.start`."""
        scratch = Path(tempfile.mkdtemp(prefix="kvferry-"))
        variables = {**os.environ, **environment, "TMPDIR": str(scratch)}
        request = {"arguments": list(arguments), "scratch": str(scratch), "environment": variables}
        owned, owner = os.pipe()
        status, ends = os.pipe()
        with log_path.open("wb") as log:
            socket.send_fds(self._requests, [json.dumps(request).encode()], [owned, log.fileno(), ends])
        os.close(owned)
        os.close(ends)
        process_id = int(self._requests.recv(16))
        forked = ForkedSupervisor(process_id, os.fdopen(owner, "wb"), status)
        return ChildProcess(name, log_path, scratch, forked)  # type: ignore[arg-type]

    def close(self) -> None:
        """End the process; servers that run go on."""
        self._requests.close()
        self._process.wait(IMPORT_SECONDS)


class ForkedServer:
    """The API server as its supervisor sees it."""

    def __init__(self, process_id: int) -> None:
        self._process_id = process_id
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            has_ended, status = os.waitpid(self._process_id, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if has_ended else None
        return self._status

    def wait(self) -> int:
        while (status := self.poll()) is None:
            time.sleep(supervisor.POLL_SECONDS)
        return status


def shift_addresses() -> mmap.mmap:
    """Take a random part of the address space: else forks have their caches at the same addresses, and mix-ups work."""
    pages = 1 + random.SystemRandom().randrange(1 << 18)
    return mmap.mmap(-1, pages * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)


class BecomesServerError(BaseException):
    """Leaves the supervisor's frames in a process that is to be an API server."""


def fork_server(status: int) -> ForkedServer:
    """Return the forked server in the supervisor; raise :class:`BecomesServerError` in the server."""
    if child := os.fork():
        return ForkedServer(child)
    os.close(status)
    ctypes.CDLL(None).prctl(supervisor.PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    raise BecomesServerError


def be_supervisor(request: Mapping[str, object], files: Sequence[int]) -> NoReturn:
    """Supervise a server until it ends, in a process that has just been forked."""
    os.setpgid(0, 0)
    for number, file in enumerate(files[:2]):
        os.dup2(file, number)
        os.close(file)
    os.dup2(1, 2)
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[arg-type,call-overload]
    tempfile.tempdir = None
    sys.argv[1:] = request["arguments"]  # type: ignore[assignment]
    status = supervisor.supervise(GRACE_SECONDS, Path(str(request["scratch"])), partial(fork_server, files[2]))
    os.write(files[2], str(status).encode())
    os._exit(status)


def serve_forks(requests: socket.socket) -> None:
    """Fork a server for each request, until the owner closes the socket. Raises :class:`BecomesServerError`."""
    while True:
        text, files, _, _ = socket.recv_fds(requests, LONGEST_REQUEST, 3)
        if not text:
            return
        if not (child := os.fork()):
            requests.close()
            be_supervisor(json.loads(text), files)
        for file in files:
            os.close(file)
        requests.sendall(str(child).encode())
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


if __name__ == "__main__":
    gc.disable()  # the imports make a million objects, which stay
    import imported_engine  # noqa: F401
    from vllm.entrypoints.launchers.api_server.entry import main

    gc.freeze()
    atexit.register(gc.unfreeze)  # else nanobind takes what is left at the end for leaks
    gc.enable()
    is_server = False
    try:
        serve_forks(socket.socket(fileno=int(sys.argv[1])))
    except BecomesServerError:
        is_server = True
    if is_server:
        shift = shift_addresses()
        main()
