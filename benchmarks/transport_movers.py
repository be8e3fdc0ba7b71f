"""What moves pieces for ``transport.py``: buffers, the other process, and one mover for each way."""

import json
import logging
import mmap
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from kvferry.arrays import Bytes, Descriptors
from kvferry.errors import Reason, TransportError
from kvferry.layout.shard import Region
from kvferry.transport.protocol import Direction, Peer, Status, Transport, reach
from kvferry.transport.registry import TransportSet, open_transport

HUGE_PAGE_BYTES = 2 << 20
ANSWER_SECONDS = 60.0
END_SECONDS = 10.0
_SEED = 20


def allocate(num_bytes: int, huge: bool) -> Bytes:
    """Return touched memory, filled with a fixed pattern, in huge or in 4 KiB pages."""
    mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    whole = np.frombuffer(mapping, np.uint8)
    buffer = whole[-whole.ctypes.data % HUGE_PAGE_BYTES :][:num_bytes]
    buffer[:] = np.frombuffer(np.random.default_rng(_SEED).bytes(num_bytes), np.uint8)
    return buffer


def huge_share(buffer: Bytes) -> float:
    """Return which part of the buffer's mapping lies in huge pages, as the kernel says."""
    address = int(buffer.ctypes.data)
    inside, share = False, 0.0
    with open("/proc/self/smaps", encoding="ascii") as file:
        for line in file:
            first = line.split()[0]
            if not first.endswith(":"):
                start, end = (int(bound, 16) for bound in first.split("-"))
                inside = start <= address < end
            elif inside and first == "AnonHugePages:":
                share = int(line.split()[1]) * 1024 / buffer.nbytes
    return min(share, 1.0)


def scattered_pieces(num_bytes: int, piece_bytes: int) -> Descriptors:
    """Return pieces (remote offset, local offset, length) of equal length, shuffled and with gaps on both sides.

    Two pieces never touch, so that no transport can merge them; both buffers need ``2 * num_bytes``.

    >>> scattered_pieces(8, 4).shape, sorted(scattered_pieces(8, 4)[:, 0].tolist())
    ((2, 3), [0, 8])
    """
    generator = np.random.default_rng(piece_bytes)
    pieces = np.empty((num_bytes // piece_bytes, 3), np.uint64)
    for column in (0, 1):
        pieces[:, column] = generator.permutation(len(pieces)) * 2 * piece_bytes
    pieces[:, 2] = piece_bytes
    return pieces


def copied_exactly(pieces: Descriptors, source: Bytes, destination: Bytes) -> bool:
    """Return whether every piece arrived."""
    length = int(pieces[0, 2])
    rows = (pieces[:, :2] // np.uint64(length)).astype(np.int64)
    return bool((source.reshape(-1, length)[rows[:, 0]] == destination.reshape(-1, length)[rows[:, 1]]).all())


class Mover:
    """One transport with its peer, ready to move pieces."""

    def __init__(self, transport: Transport, peer: Peer, remote_address: int, local: Bytes) -> None:
        self.transport = transport
        self.peer = peer
        self._base = np.array([remote_address, local.ctypes.data, 0], np.uint64)

    def __call__(self, pieces: Descriptors) -> float:
        """Read the pieces and return the seconds, submit and end included."""
        descriptors = pieces + self._base
        started = time.perf_counter()
        transfer = self.transport.submit(self.peer, Direction.READ, descriptors)
        while self.transport.poll(transfer) is Status.PENDING:
            if time.perf_counter() - started > ANSWER_SECONDS:
                self.transport.cancel(transfer)
                raise TransportError(Reason.DEADLINE_EXCEEDED, f"{self.peer.name}: no end in {ANSWER_SECONDS} s.")
        seconds = time.perf_counter() - started
        if transfer.error is not None:
            raise transfer.error
        return seconds


class PlainNixlMover:
    """The program one writes from NIXL's documentation: wrapper, defaults, one transfer for the whole list."""

    def __init__(self, metadata: bytes, remote_address: int, local: Bytes) -> None:
        self._agent = plain_nixl_agent(local)
        self._remote_agent = self._agent.add_remote_agent(metadata)
        self._base = np.array([remote_address, local.ctypes.data, 0], np.uint64)

    def __call__(self, pieces: Descriptors) -> float:
        """Read the pieces and return the seconds, from descriptors to release."""
        descriptors = pieces + self._base
        agent = self._agent
        started = time.perf_counter()
        remote, local = np.zeros((2, len(pieces), 3), np.uint64)
        remote[:, 0], remote[:, 1] = descriptors[:, 0], descriptors[:, 2]
        local[:, 0], local[:, 1] = descriptors[:, 1], descriptors[:, 2]
        handle = agent.initialize_xfer(
            "READ", agent.get_xfer_descs(local, "DRAM"), agent.get_xfer_descs(remote, "DRAM"), self._remote_agent
        )
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        return time.perf_counter() - started


def plain_nixl_agent(buffer: Bytes) -> Any:
    """Return an agent with NIXL's documented defaults that has the buffer registered."""
    from nixl._api import nixl_agent  # type: ignore[import-untyped]

    for handler in logging.getLogger("nixl").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)  # it logs to stdout, which may be a JSON object's
    agent = nixl_agent(f"plain-{os.getpid()}")
    agent.register_memory([(int(buffer.ctypes.data), buffer.nbytes, 0, "")], "DRAM")
    return agent


class MemcpyMover:
    """One process, the same pieces: the better of one ``memmove`` per piece and a gather into dense memory."""

    def __init__(self, source: Bytes, destination: Bytes) -> None:
        self._source, self._destination = source, destination

    def __call__(self, pieces: Descriptors) -> float:
        """Copy the pieces both ways and return the shorter time."""
        return min(self._gather(pieces), self._move_each(pieces))

    def _gather(self, pieces: Descriptors) -> float:
        length = int(pieces[0, 2])
        index = (pieces[:, 0] // np.uint64(length)).astype(np.int64)
        rows = self._source.reshape(-1, length)
        dense = self._destination[: len(pieces) * length].reshape(-1, length)
        started = time.perf_counter()
        np.take(rows, index, axis=0, out=dense, mode="clip")
        return time.perf_counter() - started

    def _move_each(self, pieces: Descriptors) -> float:
        from ctypes import memmove

        base = np.array([self._source.ctypes.data, self._destination.ctypes.data, 0], np.uint64)
        rows = (pieces + base).tolist()
        started = time.perf_counter()
        for source, destination, length in rows:
            memmove(destination, source, length)
        return time.perf_counter() - started


class Child:
    """The other process, which answers one JSON line per JSON line and ends with its standard input."""

    def __init__(self, role: str, *arguments: object) -> None:
        reading, writing = os.pipe()
        command = [sys.executable, __file__, role, str(writing)]
        self._process = subprocess.Popen(
            [*command, *map(str, arguments)], stdin=subprocess.PIPE, pass_fds=[writing], start_new_session=True
        )
        os.close(writing)
        self._replies = os.fdopen(reading, "rb", buffering=0)
        self._buffered = b""

    def ask(self, question: Mapping[str, object]) -> dict[str, Any]:
        """Send a line and wait for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        self._process.stdin.flush()
        return self.read()

    def read(self) -> dict[str, Any]:
        """Wait for a line."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while b"\n" not in self._buffered:
            ready, _, _ = select.select([self._replies], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self._replies.fileno(), 1 << 16) if ready else b""
            if not chunk:
                raise TransportError(Reason.PEER_DIED, "the measurement's other process ended or does not answer.")
            self._buffered += chunk
        line, _, self._buffered = self._buffered.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def cpu_seconds(self) -> float:
        """Return the processor time it has used."""
        with open(f"/proc/{self._process.pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def pause(self, paused: bool) -> None:
        """Stop it and its own children (their spinning threads would disturb others), or let them go on."""
        os.killpg(self._process.pid, signal.SIGSTOP if paused else signal.SIGCONT)

    def close(self) -> None:
        """End it with its children: by the end of its input, else by a signal."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(ProcessLookupError):
            self.pause(False)
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(END_SECONDS)
        self._replies.close()


class PlainNixl:
    """A plain NIXL pair in two processes of its own, paused while others are measured."""

    def __init__(self, num_bytes: int, huge: bool) -> None:
        self._child = Child("plain", num_bytes, int(huge))
        try:
            self._child.read()
        except BaseException:
            self._child.close()
            raise
        self._child.pause(True)

    def __call__(self, pieces: Descriptors) -> float:
        """Let the pair move the pieces once to wake up and once for the clock."""
        self._child.pause(False)
        try:
            return float(self._child.ask({"piece_bytes": int(pieces[0, 2])})["seconds"])
        finally:
            self._child.pause(True)

    def close(self) -> None:
        """End both processes."""
        self._child.close()


@contextmanager
def open_movers(
    names: Sequence[str], num_bytes: int, local: Bytes, huge: bool
) -> Iterator[tuple[dict[str, Mover], Child]]:
    """Open transports and connect each to one other process that has ``2 * num_bytes`` of memory."""
    transports = TransportSet({name: open_transport(name) for name in names})
    child = Child("peer", num_bytes, int(huge), ",".join(names))
    try:
        transports.register([Region(int(local.ctypes.data), local.nbytes)])
        hello = child.read()
        movers = {}
        for name in names:
            peer = reach(transports.transports[name], bytes.fromhex(hello["end_points"][name]))
            movers[name] = Mover(transports.transports[name], peer, hello["address"], local)
        yield movers, child
    finally:
        transports.close()
        child.close()


def _reply(file: int, answer: Mapping[str, object]) -> None:
    os.write(file, json.dumps(answer).encode() + b"\n")


def _serve_peer(replies: int, num_bytes: int, huge: bool, names: str) -> None:
    buffer = allocate(2 * num_bytes, huge)
    whole = Region(int(buffer.ctypes.data), buffer.nbytes)
    transports = TransportSet({name: open_transport(name) for name in names.split(",")})
    end_points = {name: value.hex() for name, value in transports.register([whole]).items()}
    _reply(replies, {"address": whole.base_address, "end_points": end_points})
    sys.stdin.read()


def _serve_plain_peer(replies: int, num_bytes: int, huge: bool) -> None:
    buffer = allocate(2 * num_bytes, huge)
    agent = plain_nixl_agent(buffer)
    _reply(replies, {"address": int(buffer.ctypes.data), "metadata": agent.get_agent_metadata().hex()})
    sys.stdin.read()


def _serve_plain(replies: int, num_bytes: int, huge: bool) -> None:
    """The initiator of the plain pair; its peer is its own child in the same process group."""
    reading, writing = os.pipe()
    command = [sys.executable, __file__, "plain-peer", str(writing)]
    arguments = [*command, str(num_bytes), str(int(huge))]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, pass_fds=[writing]), os.fdopen(reading, "rb") as file:
        hello = json.loads(file.readline())
        local = allocate(2 * num_bytes, huge)
        mover = PlainNixlMover(bytes.fromhex(hello["metadata"]), hello["address"], local)
        mover(scattered_pieces(num_bytes, num_bytes))
        _reply(replies, {})
        for line in sys.stdin:
            pieces = scattered_pieces(num_bytes, json.loads(line)["piece_bytes"])
            mover(pieces)
            _reply(replies, {"seconds": mover(pieces)})


def _main(role: str, replies: str, num_bytes: str, huge: str, *names: str) -> None:
    serve = {"peer": _serve_peer, "plain": _serve_plain, "plain-peer": _serve_plain_peer}[role]
    serve(int(replies), int(num_bytes), huge == "1", *names)  # type: ignore[operator]


if __name__ == "__main__":
    _main(*sys.argv[1:])
