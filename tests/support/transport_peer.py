"""The peer in a transport test: a process that registers a buffer and executes one-line commands.

Run as ``python -m tests.support.transport_peer <module:factory> <module:memory> <bytes> <reply file descriptor>``.
The process ends at the end of its standard input. Peers whose library takes seconds to import are forked from a process
that has imported it: ``python -m tests.support.transport_peer <module> <socket's file descriptor>``.
"""

import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kvferry.arrays import Bytes
from kvferry.transport.registry import make

from .transport_memory import HOST_MEMORY, make_memory

ANSWER_SECONDS = 30.0
ROOT = Path(__file__).parents[2]
SLOW_IMPORTS = {"kvferry.transport.nixl:NixlTransport": "nixl._api"}
"""NIXL imports PyTorch, which takes two seconds."""
OnHost = Callable[[list[str]], list[str]]
"""Returns the command line that runs a command on the peer's host."""


@lru_cache(maxsize=4)
def pattern(seed: int, num_bytes: int) -> Bytes:
    """Return the content of a buffer after ``fill(seed)``."""
    return np.frombuffer(np.random.default_rng(seed).bytes(num_bytes), np.uint8)


class InProcessPeer:
    """A peer in this process; ``kill`` closes its transport."""

    def __init__(self, factory: str, num_bytes: int, memory: str) -> None:
        self._transport = make(factory)
        self._memory = make_memory(memory, num_bytes)
        self.address, self.length = self._memory.region.base_address, num_bytes
        self.end_point = self._transport.register([self._memory.region])

    def fill(self, seed: int) -> None:
        """Fill the buffer with ``pattern(seed)``."""
        self._memory.put(pattern(seed, self.length))

    def checksum(self) -> int:
        """Return the CRC-32 of the buffer."""
        return zlib.crc32(self._memory.get().data)

    def kill(self) -> None:
        """Close the peer's transport."""
        self._transport.close()

    close = kill


class ForkedProcess:
    """A forked peer, with those parts of a ``Popen`` that a :class:`PeerProcess` needs."""

    def __init__(self, process_id: int, stdin: BinaryIO) -> None:
        self.pid, self.stdin = process_id, stdin
        self._handle = os.pidfd_open(process_id)

    def send_signal(self, number: int) -> None:
        signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self.send_signal(signal.SIGKILL)

    def wait(self, seconds: float) -> None:
        assert select.select([self._handle], [], [], seconds)[0], "the peer does not end"


class Forks:
    """A process that has imported a module, and forks peers."""

    def __init__(self, module: str) -> None:
        self.variables = _variables_of_libraries()
        self._requests, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.transport_peer", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=_environment(),
            )

    def start(self, factory: str, memory: str, num_bytes: int, replies: int) -> ForkedProcess:
        """Fork a peer."""
        commands, ours = os.pipe()
        socket.send_fds(self._requests, [json.dumps([factory, memory, num_bytes]).encode()], [commands, replies])
        os.close(commands)
        return ForkedProcess(int(self._requests.recv(16)), os.fdopen(ours, "wb"))


@cache
def _forks_of(factory: str) -> Forks:
    return Forks(SLOW_IMPORTS[factory])


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}


def _variables_of_libraries() -> dict[str, str]:
    """Return what the libraries read when they are loaded."""
    return {name: value for name, value in os.environ.items() if name.startswith(("UCX_", "NIXL_"))}


class PeerProcess:
    """A peer in another process. Every wait is bounded; ``close`` ends the process."""

    def __init__(self, factory: str, num_bytes: int, on_host: OnHost, memory: str) -> None:
        reading, writing = os.pipe()
        command = [sys.executable, "-m", "tests.support.transport_peer", factory, memory, str(num_bytes), str(writing)]
        is_forked = factory in SLOW_IMPORTS and on_host(command) == command
        self._process: subprocess.Popen[bytes] | ForkedProcess
        if is_forked and (forks := _forks_of(factory)).variables == _variables_of_libraries():
            self._process = forks.start(factory, memory, num_bytes, writing)
        else:
            self._process = subprocess.Popen(
                on_host(command), stdin=subprocess.PIPE, pass_fds=[writing], env=_environment()
            )
        os.close(writing)
        self._replies: int | None = reading
        try:
            hello = self._read()
        except BaseException:
            self.close()
            raise
        self.address, self.length = hello["address"], num_bytes
        self.end_point = bytes.fromhex(hello["end_point"])

    @property
    def pid(self) -> int:
        """The id of the peer's process."""
        return self._process.pid

    def fill(self, seed: int) -> None:
        """Fill the buffer with ``pattern(seed)``."""
        self._ask({"fill": seed})

    def checksum(self) -> int:
        """Return the CRC-32 of the buffer."""
        return int(self._ask({"checksum": True})["checksum"])

    def kill(self) -> None:
        """Send SIGKILL and wait for the end of the process."""
        self._process.kill()
        self._process.wait(ANSWER_SECONDS)

    def stop(self) -> None:
        """Send SIGSTOP and wait until all threads have stopped: on a busy host they may answer until then."""
        self._process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + ANSWER_SECONDS
        while any(state(path) not in "tTZX" for path in Path(f"/proc/{self._process.pid}/task").glob("*/stat")):
            assert time.monotonic() < deadline, "the peer does not stop"
            time.sleep(0.001)

    def resume(self) -> None:
        """Send SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End the process in any state; twice is fine."""
        if self._replies is None:
            return
        self.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        os.close(self._replies)
        self._replies = None

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._replies is not None
        line, deadline = b"", time.monotonic() + ANSWER_SECONDS
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([self._replies], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self._replies, 1 << 16) if readable else b""
            if not chunk:
                raise RuntimeError("the transport's peer process " + ("ended." if readable else "does not answer."))
            line += chunk
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def start_peer(
    factory: str, num_bytes: int, on_host: OnHost = list, memory: str = HOST_MEMORY
) -> Iterator[PeerProcess]:
    """Start a peer and end it afterwards."""
    peer = PeerProcess(factory, num_bytes, on_host, memory)
    try:
        yield peer
    finally:
        peer.close()


def state(path: Path) -> str:
    """Return the state of a thread, whose ``stat`` file this is."""
    try:
        return path.read_text().rpartition(")")[2].split()[0]
    except OSError:  # it has ended
        return "X"


def _serve_forks(module: str, requests: socket.socket) -> None:
    """Fork a peer for each request; the kernel forgets those that end."""
    importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while (received := socket.recv_fds(requests, 1 << 12, 2))[0]:
        text, (commands, replies), _, _ = received
        if not (child := os.fork()):
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(commands, 0)
            os.close(commands)
            factory, memory, num_bytes = json.loads(text)
            _serve(factory, memory, num_bytes, replies)
            os._exit(0)
        os.close(commands)
        os.close(replies)
        requests.sendall(str(child).encode())


def _serve(factory: str, memory: str, num_bytes: int, replies: int) -> None:
    peer = InProcessPeer(factory, num_bytes, memory)
    _reply(replies, {"address": peer.address, "end_point": peer.end_point.hex()})
    for line in sys.stdin:
        command = json.loads(line)
        if "fill" in command:
            peer.fill(command["fill"])
        _reply(replies, {"checksum": peer.checksum()} if "checksum" in command else {})


def _reply(replies: int, answer: dict[str, Any]) -> None:
    message = memoryview(json.dumps(answer).encode() + b"\n")
    while message:
        message = message[os.write(replies, message) :]


if __name__ == "__main__":
    if len(sys.argv) == 3:
        _serve_forks(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
    else:
        _serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
