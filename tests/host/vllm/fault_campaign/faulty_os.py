"""System calls of the disk tier that fail, lie, hang or kill the process, on demand.

:class:`FaultyOs` stands in for the module ``os`` in ``kvferry.tiers.disk.segments``, through which every byte of the
disk tier goes. All other calls are passed on.
"""

import errno
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

PAGE_BYTES = 4096


@dataclass
class Fault:
    """What the next calls of one system call do, beginning after ``skip`` calls, ``times`` times.

    ``what``: ``error`` (with the error ``number``), ``hang`` (for ``seconds``), ``short``, ``empty``, ``flip`` (one
    bit), ``elsewhere`` (other bytes of the file), ``lost``, ``cut`` (half is written, all is claimed), ``kill`` (half
    is written, then SIGKILL). ``place`` chooses the bit, as a part of the bytes.
    """

    call: str
    what: str
    number: int = errno.EIO
    seconds: float = 0.0
    skip: int = 0
    times: int = 1
    place: float = 0.5


class FaultyOs:
    """The module ``os`` with one fault at a time. ``after_growth`` is called after each call that may take room."""

    def __init__(self, after_growth: Callable[[], None] = lambda: None) -> None:
        self._lock = threading.Lock()
        self._fault: Fault | None = None
        self._released = threading.Event()
        self._num_met = 0
        self._after_growth = after_growth

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def arm(self, fault: Fault) -> None:
        """Let the next calls fail."""
        with self._lock:
            self._fault, self._num_met = fault, 0
            self._released.clear()

    def disarm(self) -> int:
        """Let all calls succeed, end those that hang, and return how many calls met the fault."""
        with self._lock:
            self._fault = None
            self._released.set()
            return self._num_met

    # The calls of kvferry.tiers.disk.segments that can fail.

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        fault = self._met("preadv")
        if fault is None:
            return os.preadv(descriptor, buffers, offset)
        [buffer] = buffers
        self._fail_or_wait(fault)
        if fault.what == "empty":
            return 0
        if fault.what == "lost":
            return len(buffer)
        if fault.what == "short":
            return os.preadv(descriptor, [buffer[: _half(len(buffer))]], offset)
        if fault.what == "elsewhere":
            return os.preadv(descriptor, [buffer], _elsewhere(descriptor, offset, len(buffer)))
        moved = os.preadv(descriptor, [buffer], offset)
        if fault.what == "flip":
            _flip(buffer, fault.place)
        return moved

    def pread(self, descriptor: int, length: int, offset: int) -> bytes:
        fault = self._met("pread")
        if fault is None:
            return os.pread(descriptor, length, offset)
        self._fail_or_wait(fault)
        found = bytearray(os.pread(descriptor, length, offset))
        if fault.what == "flip" and found:
            _flip(memoryview(found), fault.place)
        return bytes(found[: len(found) // 2] if fault.what == "short" else found)

    def pwritev(self, descriptor: int, pieces: Sequence[memoryview], offset: int) -> int:
        fault = self._met("pwritev")
        if fault is None:
            moved = os.pwritev(descriptor, pieces, offset)
        else:
            moved = self._write_badly(fault, descriptor, b"".join(pieces), offset)
        self._after_growth()
        return moved

    def pwrite(self, descriptor: int, content: bytes, offset: int) -> int:
        fault = self._met("pwrite") if content else None
        if fault is None:
            return os.pwrite(descriptor, content, offset)
        return self._write_badly(fault, descriptor, content, offset, page_bytes=1)

    def open(self, *arguments: Any, **named: Any) -> int:
        fault = self._met("open")
        if fault is not None:
            self._fail_or_wait(fault)
        return os.open(*arguments, **named)

    def posix_fallocate(self, descriptor: int, offset: int, length: int) -> None:
        fault = self._met("posix_fallocate")
        if fault is not None:
            self._fail_or_wait(fault)
        os.posix_fallocate(descriptor, offset, length)
        self._after_growth()
        if fault is not None and fault.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

    def unlink(self, *arguments: Any, **named: Any) -> None:
        fault = self._met("unlink")
        if fault is not None:
            self._fail_or_wait(fault)
        os.unlink(*arguments, **named)

    def _met(self, call: str) -> Fault | None:
        """Return the fault that this call meets."""
        with self._lock:
            fault = self._fault
            if fault is None or fault.call != call or not fault.times:
                return None
            if fault.skip:
                fault.skip -= 1
                return None
            fault.times -= 1
            self._num_met += 1
            return fault

    def _fail_or_wait(self, fault: Fault) -> None:
        if fault.what == "error":
            raise OSError(fault.number, os.strerror(fault.number))
        if fault.what == "hang":
            self._released.wait(fault.seconds)

    def _write_badly(
        self, fault: Fault, descriptor: int, content: bytes, offset: int, page_bytes: int = PAGE_BYTES
    ) -> int:
        self._fail_or_wait(fault)
        if fault.what == "lost":
            return len(content)
        if fault.what == "elsewhere":
            return _write(descriptor, content, _elsewhere(descriptor, offset, len(content)))
        if fault.what in ("short", "cut", "kill"):
            half = _half(len(content), page_bytes)
            moved = _write(descriptor, content[:half], offset)
            if fault.what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)
            return moved if fault.what == "short" else len(content)
        if fault.what == "flip":
            changed = bytearray(content)
            _flip(memoryview(changed), fault.place)
            content = bytes(changed)
        return _write(descriptor, content, offset)


def _half(num_bytes: int, page_bytes: int = PAGE_BYTES) -> int:
    """Return about half of a length, in whole pages.

    >>> _half(3 * 4096), _half(128, 1)
    (4096, 64)
    """
    return num_bytes // 2 // page_bytes * page_bytes


def _elsewhere(descriptor: int, offset: int, num_bytes: int) -> int:
    """Return the offset of as many bytes beside those at ``offset``."""
    behind = offset + num_bytes
    return behind if behind + num_bytes <= os.fstat(descriptor).st_size else max(0, offset - num_bytes)


def _flip(buffer: memoryview, place: float) -> None:
    """Flip one bit.

    >>> changed = bytearray(4)
    >>> _flip(memoryview(changed), 0.5)
    >>> changed.hex()
    '00000100'
    """
    bit = min(int(place * 8 * len(buffer)), 8 * len(buffer) - 1)
    buffer[bit // 8] ^= 1 << bit % 8


def _write(descriptor: int, content: bytes, offset: int) -> int:
    """Write from memory on a page boundary, as direct access wants."""
    if not content:
        return 0
    memory = mmap.mmap(-1, len(content))
    memory[:] = content
    try:
        return os.pwritev(descriptor, [memory], offset)
    finally:
        memory.close()
