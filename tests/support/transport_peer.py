"""The peer in a transport test: a process that registers a buffer and executes one-line commands.

Run as ``python -m tests.support.transport_peer <module:factory> <module:memory> <bytes> <reply file descriptor>``.
The process ends at the end of its standard input.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.arrays import Bytes
from kvferry.transport.registry import make

from .transport_memory import HOST_MEMORY, make_memory

ANSWER_SECONDS = 30.0
ROOT = Path(__file__).parents[2]
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


class PeerProcess:
    """A peer in another process. Every wait is bounded; ``close`` ends the process."""

    def __init__(self, factory: str, num_bytes: int, on_host: OnHost, memory: str) -> None:
        reading, writing = os.pipe()
        program = [sys.executable, "-m", "tests.support.transport_peer"]
        arguments = [*program, factory, memory, str(num_bytes), str(writing)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        self._process = subprocess.Popen(on_host(arguments), stdin=subprocess.PIPE, pass_fds=[writing], env=environment)
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
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

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
    _serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
