"""Buffers, the child process, and the movers that ``transport.py`` compares."""

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
    """Return mapped memory with a fixed pattern, in huge or in 4 KiB pages."""
    mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    whole = np.frombuffer(mapping, np.uint8)
    buffer = whole[-whole.ctypes.data % HUGE_PAGE_BYTES :][:num_bytes]
    buffer[:] = np.frombuffer(np.random.default_rng(_SEED).bytes(num_bytes), np.uint8)
    return buffer


def huge_share(buffer: Bytes) -> float:
    """Return the fraction of the buffer's mapping that the kernel keeps in huge pages."""
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


def scattered_offsets(num_bytes: int, descriptor_bytes: int) -> Descriptors:
    """Return rows of remote offset, local offset and length: equal lengths, in random order, with gaps.

    No two rows are adjacent, so no transport can merge them; both buffers need ``2 * num_bytes``.

    >>> scattered_offsets(8, 4).shape, sorted(scattered_offsets(8, 4)[:, 0].tolist())
    ((2, 3), [0, 8])
    """
    generator = np.random.default_rng(descriptor_bytes)
    offsets = np.empty((num_bytes // descriptor_bytes, 3), np.uint64)
    for column in (0, 1):
        offsets[:, column] = generator.permutation(len(offsets)) * 2 * descriptor_bytes
    offsets[:, 2] = descriptor_bytes
    return offsets


def copied_exactly(offsets: Descriptors, source: Bytes, destination: Bytes) -> bool:
    """Return whether the bytes of every row arrived."""
    length = int(offsets[0, 2])
    rows = (offsets[:, :2] // np.uint64(length)).astype(np.int64)
    return bool((source.reshape(-1, length)[rows[:, 0]] == destination.reshape(-1, length)[rows[:, 1]]).all())


class Mover:
    """One transport with a connected peer."""

    def __init__(self, transport: Transport, peer: Peer, remote_address: int, local: Bytes) -> None:
        self.transport = transport
        self.peer = peer
        self._base = np.array([remote_address, local.ctypes.data, 0], np.uint64)

    def __call__(self, offsets: Descriptors) -> float:
        """Read the rows and return the seconds from before ``submit`` to the end."""
        descriptors = offsets + self._base
        started = time.perf_counter()
        transfer = self.transport.submit(self.peer, Direction.READ, descriptors)
        while self.transport.poll(transfer) is Status.PENDING:
            if time.perf_counter() - started > ANSWER_SECONDS:
                self.transport.cancel(transfer)
                raise TransportError(Reason.DEADLINE_EXCEEDED, f"{self.peer.name}: no end after {ANSWER_SECONDS} s.")
        seconds = time.perf_counter() - started
        if transfer.error is not None:
            raise transfer.error
        return seconds


class PlainNixlMover:
    """NIXL as its documentation shows it: Python wrapper, default settings, one transfer for the whole list."""

    def __init__(self, metadata: bytes, remote_address: int, local: Bytes) -> None:
        self._agent = plain_nixl_agent(local)
        self._remote_agent = self._agent.add_remote_agent(metadata)
        self._base = np.array([remote_address, local.ctypes.data, 0], np.uint64)

    def __call__(self, offsets: Descriptors) -> float:
        """Read the rows and return the seconds from the descriptor lists to the release of the transfer."""
        descriptors = offsets + self._base
        agent = self._agent
        started = time.perf_counter()
        remote, local = np.zeros((2, len(offsets), 3), np.uint64)
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
    """Return an agent with NIXL's documented defaults and the buffer registered."""
    from nixl._api import nixl_agent  # type: ignore[import-untyped]

    for handler in logging.getLogger("nixl").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)  # standard output is for results
    agent = nixl_agent(f"plain-{os.getpid()}")
    agent.register_memory([(int(buffer.ctypes.data), buffer.nbytes, 0, "")], "DRAM")
    return agent


class MemcpyMover:
    """Copies inside one process: the faster of one ``memmove`` per row and a gather into dense memory."""

    def __init__(self, source: Bytes, destination: Bytes) -> None:
        self._source, self._destination = source, destination

    def __call__(self, offsets: Descriptors) -> float:
        """Copy the rows by both methods and return the shorter time."""
        return min(self._gather(offsets), self._move_each(offsets))

    def _gather(self, offsets: Descriptors) -> float:
        length = int(offsets[0, 2])
        index = (offsets[:, 0] // np.uint64(length)).astype(np.int64)
        rows = self._source.reshape(-1, length)
        dense = self._destination[: len(offsets) * length].reshape(-1, length)
        started = time.perf_counter()
        np.take(rows, index, axis=0, out=dense, mode="clip")
        return time.perf_counter() - started

    def _move_each(self, offsets: Descriptors) -> float:
        from ctypes import memmove

        base = np.array([self._source.ctypes.data, self._destination.ctypes.data, 0], np.uint64)
        rows = (offsets + base).tolist()
        started = time.perf_counter()
        for source, destination, length in rows:
            memmove(destination, source, length)
        return time.perf_counter() - started


class Child:
    """The child process, which answers every JSON line with one and ends with its standard input."""

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
                raise TransportError(Reason.PEER_DIED, "the measurement's child process ended or does not answer.")
            self._buffered += chunk
        line, _, self._buffered = self._buffered.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def cpu_seconds(self) -> float:
        """Return the processor time of the child process."""
        with open(f"/proc/{self._process.pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def pause(self, paused: bool) -> None:
        """Stop or resume the child's process group, whose spinning threads would disturb other measurements."""
        os.killpg(self._process.pid, signal.SIGSTOP if paused else signal.SIGCONT)

    def close(self) -> None:
        """End the child and its children: by the end of their input, else by SIGKILL."""
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
    """A plain NIXL pair in two more processes, stopped while others are measured."""

    def __init__(self, num_bytes: int, huge: bool) -> None:
        self._child = Child("plain", num_bytes, int(huge))
        try:
            self._child.read()
        except BaseException:
            self._child.close()
            raise
        self._child.pause(True)

    def __call__(self, offsets: Descriptors) -> float:
        """Let the pair move the rows twice and return the seconds of the second time."""
        self._child.pause(False)
        try:
            return float(self._child.ask({"descriptor_bytes": int(offsets[0, 2])})["seconds"])
        finally:
            self._child.pause(True)

    def close(self) -> None:
        """End both processes."""
        self._child.close()


@contextmanager
def open_movers(
    names: Sequence[str], num_bytes: int, local: Bytes, huge: bool
) -> Iterator[tuple[dict[str, Mover], Child]]:
    """Open transports and connect each to one child process with ``2 * num_bytes`` of memory."""
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
    """Serve the initiator of the plain pair; the peer is a child in the same process group."""
    reading, writing = os.pipe()
    command = [sys.executable, __file__, "plain-peer", str(writing)]
    arguments = [*command, str(num_bytes), str(int(huge))]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, pass_fds=[writing]), os.fdopen(reading, "rb") as file:
        hello = json.loads(file.readline())
        local = allocate(2 * num_bytes, huge)
        mover = PlainNixlMover(bytes.fromhex(hello["metadata"]), hello["address"], local)
        mover(scattered_offsets(num_bytes, num_bytes))
        _reply(replies, {})
        for line in sys.stdin:
            offsets = scattered_offsets(num_bytes, json.loads(line)["descriptor_bytes"])
            mover(offsets)
            _reply(replies, {"seconds": mover(offsets)})


def _main(role: str, replies: str, num_bytes: str, huge: str, *names: str) -> None:
    serve = {"peer": _serve_peer, "plain": _serve_plain, "plain-peer": _serve_plain_peer}[role]
    serve(int(replies), int(num_bytes), huge == "1", *names)  # type: ignore[operator]


if __name__ == "__main__":
    _main(*sys.argv[1:])
