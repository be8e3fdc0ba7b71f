"""Tries a transport as a handoff uses it: this process writes into memory of a child process, which compares it."""

import os
import select
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

import numpy as np

from kvferry.errors import KVFerryError, Reason, TransportError
from kvferry.layout.shard import Region
from kvferry.transport.protocol import Direction, Status, Transport, reach
from kvferry.transport.registry import AUTO, FACTORIES, make

PROBE_BYTES = 1 << 20
PROBE_SECONDS = 30.0
RIGHT = "right"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Whether a transport works between two processes of this machine; if not, why, and what to do."""

    name: str
    works: bool
    reason: str = ""
    remedy: str = ""


def probe(name: str, factory: str) -> ProbeResult:
    """Try the transport of ``factory`` (``module:class``), in bounded time. Raises no ``KVFerryError``."""
    try:
        transport = make(factory)
        try:
            _write_to_child(factory, transport)
        finally:
            transport.close()
    except KVFerryError as error:
        return ProbeResult(name, False, error.message, error.remedy)
    return ProbeResult(name, True)


def probe_all() -> list[ProbeResult]:
    """Try each transport of ``auto``."""
    return [probe(name, FACTORIES[name]) for name in AUTO]


def _write_to_child(factory: str, transport: Transport) -> None:
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "kvferry.transport.probe", factory, str(writing)]
    with tempfile.TemporaryFile() as errors, os.fdopen(reading, "rb", buffering=0) as replies:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=errors, pass_fds=[writing])
        os.close(writing)
        try:
            address, _, end_point = _await_line(replies, errors).partition(" ")
            _write_pattern(transport, int(address), bytes.fromhex(end_point))
            assert child.stdin is not None
            with suppress(BrokenPipeError):  # it has ended, and said why
                child.stdin.write(b"\n")
                child.stdin.flush()
            if _await_line(replies, errors) != RIGHT:
                raise TransportError(
                    Reason.TRANSFER_FAILED,
                    "the received bytes differ from the sent bytes.",
                    "Name another transport: this one is not safe on this machine.",
                )
        finally:
            child.kill()
            child.wait(PROBE_SECONDS)


def _await_line(replies: IO[bytes], errors: IO[bytes]) -> str:
    """Return what the child process says next: its address and end point, then whether it got the bytes."""
    message, deadline = b"", time.monotonic() + PROBE_SECONDS
    while not message.endswith(b"\n"):
        ready, _, _ = select.select([replies], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TransportError(
                Reason.DEADLINE_EXCEEDED,
                f"the child process gave no answer for {PROBE_SECONDS} s.",
                "Try again when fewer programs use this machine.",
            )
        chunk = replies.read(1 << 16)
        if not chunk:
            errors.seek(0)
            found = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
            raise TransportError(
                Reason.TRANSPORT_UNAVAILABLE,
                f"the child process could not use the transport: {found}.",
                "Name another transport, or reinstall this transport's library.",
            )
        message += chunk
    return message.decode().strip()


def _write_pattern(transport: Transport, address: int, end_point: bytes) -> None:
    local = _pattern()
    transport.register([Region(int(local.ctypes.data), PROBE_BYTES)])
    peer = reach(transport, end_point)
    descriptors = np.array([[local.ctypes.data, address, PROBE_BYTES]], np.uint64)
    transfer = transport.submit(peer, Direction.WRITE, descriptors)
    deadline = time.monotonic() + PROBE_SECONDS
    while transport.poll(transfer) is Status.PENDING and time.monotonic() < deadline:
        time.sleep(0.0005)
    if transfer.error is not None:
        raise transfer.error
    if transfer.status is not Status.DONE:
        raise TransportError(
            Reason.DEADLINE_EXCEEDED,
            f"1 MiB did not arrive within {PROBE_SECONDS} s.",
            "Check the limits of this process (a container, a firewall), or name another transport.",
        )


def _pattern() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.resize(np.arange(251, dtype=np.uint8), PROBE_BYTES)


def _serve(factory: str, writing: int) -> None:
    memory = np.zeros(PROBE_BYTES, np.uint8)
    transport = make(factory)
    end_point = transport.register([Region(int(memory.ctypes.data), PROBE_BYTES)])
    with os.fdopen(writing, "w") as replies:
        print(memory.ctypes.data, end_point.hex(), file=replies, flush=True)
        sys.stdin.readline()
        print(RIGHT if np.array_equal(memory, _pattern()) else "wrong", file=replies, flush=True)
        sys.stdin.read()
    transport.close()


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
