"""Cross-memory attach: ``process_vm_readv`` and ``process_vm_writev`` between processes of one user on one host.

The kernel copies from one process's pages to another's. The peer takes no part, so a stopped or busy peer does not
delay a transfer. See ``man 2 process_vm_readv``.
"""

import ctypes
import errno
import io
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np

from kvferry.arrays import Descriptors
from kvferry.errors import Reason, TransportError
from kvferry.layout.shard import Region
from kvferry.transport.protocol import (
    NONCE_BYTES,
    Capabilities,
    Direction,
    Nonce,
    Peer,
    Process,
    ProcessEndPoint,
    ProcessIdentity,
    RangeStream,
    RegisteredMemoryTransport,
    Sides,
    Status,
    Transfer,
    decode_end_point,
    own_identity,
    parse_start_time,
    reached,
    unpack_regions,
)

logger = logging.getLogger(__name__)

MAX_THREADS = 4
"""The calling thread included. Copies are bound by memory: more cores only take time from computation."""
MAX_RANGES_PER_CALL = 1024  # the kernel's UIO_MAXIOV, for local and for remote ranges
# Some milliseconds of copying, so that the calling thread can do other work in between. Not less: every poll ends with
# a wait for the interpreter, which takes about half a millisecond inside an engine.
MAX_BYTES_PER_POLL = 64 << 20
MAX_RANGES_PER_SHARE = 8 * MAX_RANGES_PER_CALL
# A millisecond of copying: less is not worth waking a thread.
MIN_BYTES_PER_THREAD = 4 << 20

Result = TypeVar("Result")
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)
_PTRACE_SCOPE = "/proc/sys/kernel/yama/ptrace_scope"
_PERMISSION_REMEDY = (
    "Run both processes as one user, in containers with --cap-add=SYS_PTRACE, and with "
    "`sysctl kernel.yama.ptrace_scope` at 0 or 1 (it is {scope} here); or use the nixl transport."
)
_ARGUMENTS = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]


class CopyThreads:
    """Runs calls that release the interpreter in parallel: the last on the calling thread, which waits for all.

    The threads start on first use. They run on the cores of the calling thread, which may change, with its scheduling
    priority.

    >>> threads = CopyThreads()
    >>> threads.run([lambda: "one", lambda: "two"])
    ['one', 'two']
    >>> threads.close()
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    @property
    def num_usable(self) -> int:
        """The number of calls worth running in parallel: one per core of the calling thread, up to ``MAX_THREADS``."""
        return min(MAX_THREADS, len(os.sched_getaffinity(0)))

    def run(self, calls: Sequence[Callable[[], Result]]) -> list[Result]:
        """Wait for all calls; return their results in order, or raise the error of one."""
        *others, last = calls
        futures: list[Future[Result]] = []
        try:
            if others:
                cores = os.sched_getaffinity(0)
                futures.extend(self._started_pool().submit(partial(_on, cores, call)) for call in others)
            result = last()
        finally:
            # The caller may reuse the memory as soon as this method raises.
            wait(futures)
        return [*(future.result() for future in futures), result]

    def close(self) -> None:
        """Wait for all started calls and end the threads; twice is fine."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _started_pool(self) -> ThreadPoolExecutor:
        if self._pool is None:
            scheduling = os.sched_getscheduler(0), os.sched_getparam(0)
            self._pool = ThreadPoolExecutor(MAX_THREADS - 1, "kvferry-copy", _schedule, scheduling)
        return self._pool


def _on(cores: set[int], call: Callable[[], Result]) -> Result:
    with suppress(OSError):  # a container's set of cores may have changed: the call copies wherever it may
        os.sched_setaffinity(0, cores)
    return call()


def _schedule(policy: int, parameters: os.sched_param) -> None:
    """Set the scheduling of the calling thread: a real-time thread's children do not inherit it."""
    if os.sched_getscheduler(0) != policy:
        os.sched_setscheduler(0, policy, parameters)


def _bind(name: str) -> "ctypes._NamedFuncPointer":
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:
        raise TransportError(
            Reason.TRANSPORT_UNAVAILABLE,
            f"this C library has no {name}.",
            "Cross-memory attach needs Linux with glibc or musl; use the nixl transport.",
        )
    function.argtypes, function.restype = _ARGUMENTS, ctypes.c_ssize_t
    return function  # type: ignore[no-any-return]


@dataclass(slots=True, eq=False)
class CmaPeer(Peer):
    """A process, identified by its open ``/proc/<pid>/stat``; ``process`` is None where the kernel has no pidfd."""

    identity: ProcessIdentity
    stat_file: io.FileIO
    process: Process | None = None

    def verify(self) -> TransportError | None:
        """Return an error if the process has ended, else None.

        An open stat file stays bound to its process: after the end of the process a read fails with ESRCH, even where
        another process has the pid.
        """
        try:
            start_time = parse_start_time(os.pread(self.stat_file.fileno(), 1024, 0))
        except (OSError, ValueError):
            return _died(self.identity)
        return None if start_time == self.identity.start_time else _changed(self.identity, start_time)

    def has_pid(self) -> bool:
        """Return whether the process keeps its pid, so that no other process has it. Any thread may call it."""
        return self.verify() is None if self.process is None else self.process.has_pid

    def close(self) -> None:
        """Close the files."""
        self.stat_file.close()
        if self.process is not None:
            self.process.close()


@dataclass(slots=True, eq=False)
class CmaTransfer(Transfer):
    """A transfer as two streams of ranges with one common position. The end of a call is the end of its bytes."""

    may_land: bool = False
    local: RangeStream = field(kw_only=True)
    remote: RangeStream = field(kw_only=True)


class CmaTransport(RegisteredMemoryTransport):
    """Moves bytes in ``poll``: at most 64 MiB, and 8192 ranges per copying thread; per system call 1024 ranges.

    Several threads copy a large transfer while ``poll`` waits: one core alone does not reach the memory's bandwidth,
    since the kernel pins each small page, of which 70 MB have 18,000.
    """

    capabilities = Capabilities(name="cma", ends_with_process=True)

    def __init__(self) -> None:
        super().__init__()
        self._calls = {Direction.READ: _bind("process_vm_readv"), Direction.WRITE: _bind("process_vm_writev")}
        self._nonce = Nonce()
        self._threads = CopyThreads()

    def connect(self, end_point: bytes) -> Transfer:
        """Check that the peer is a running process of this host, and read its nonce."""
        self._check_open()
        remote = decode_end_point(end_point, ProcessEndPoint, "cma")
        identity = remote.identity
        check_same_host(own_identity(), identity)
        peer = CmaPeer(f"cma:{identity.pid}", unpack_regions(remote.regions), identity, _open_stat(identity))
        try:
            peer.process = _hold(identity)
            self._probe(peer, remote)
        except TransportError:
            peer.close()
            raise
        return reached(peer)

    def close(self) -> bool:
        """Refuse all later calls. Peers write as before: only the kernel knows of their calls."""
        self._threads.close()
        return super().close()

    def _make_reachable(self, regions: Sequence[Region]) -> None:
        """Allow peers of this user to attach where Yama requires that."""
        _allow_attach()

    def _end_point(self) -> ProcessEndPoint:
        return ProcessEndPoint.own(self._local, self._nonce)

    def _queue(self, peer: Peer, direction: Direction, descriptors: Descriptors) -> CmaTransfer:
        sides = _in_remote_order(Sides.of(descriptors, direction))
        return CmaTransfer(
            peer=peer,
            direction=direction,
            num_descriptors=len(descriptors),
            num_bytes=int(sides.lengths.sum()),
            local=RangeStream(sides.local, sides.lengths),
            remote=RangeStream(sides.remote, sides.lengths),
        )

    def _advance(self, transfer: Transfer) -> Status:
        """Copy one share, or for many bytes one share on each copying thread."""
        assert isinstance(transfer, CmaTransfer)
        assert isinstance(transfer.peer, CmaPeer)
        if transfer.bytes_done == 0 and (error := transfer.peer.verify()):
            return transfer.fail(error)
        if error := self._copy_shares(transfer, transfer.peer):
            return transfer.fail(error)
        if transfer.bytes_done == transfer.num_bytes:
            # The bytes are valid only if they came from the connected process.
            if error := transfer.peer.verify():
                return transfer.fail(error)
            transfer.status = Status.DONE
        return transfer.status

    def _copy_shares(self, transfer: CmaTransfer, peer: CmaPeer) -> TransportError | None:
        shares = _shares(transfer, self._threads.num_usable)
        outcomes = self._threads.run([partial(self._copy, transfer, peer, start, stop) for start, stop in shares])
        for (start, stop), (moved, error_number) in zip(shares, outcomes, strict=True):
            if moved <= 0:
                return _explain(error_number or errno.EFAULT, peer, start)
            transfer.bytes_done = start + moved
            if transfer.bytes_done < stop:
                break  # possibly inside a range; the next poll continues from there and repeats the later shares
        return None

    def _copy(self, transfer: CmaTransfer, peer: CmaPeer, start: int, stop: int) -> tuple[int, int]:
        """Return the copied bytes and, where the first call failed, the calling thread's error number."""
        position = start
        while position < stop:
            # Where the peer ended since the last call, another process may have its pid: the call would write there.
            if transfer.direction is Direction.WRITE and not peer.has_pid():
                return position - start, errno.ESRCH
            end = _reach(transfer, position, stop, MAX_RANGES_PER_CALL)
            local, remote = transfer.local.cut(position, end), transfer.remote.cut(position, end)
            moved = self._calls[transfer.direction](
                peer.identity.pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0
            )
            if moved <= 0:
                return position - start, ctypes.get_errno() if moved < 0 else 0
            position += moved
            if position < end:
                break
        return position - start, 0

    def _probe(self, peer: CmaPeer, remote: ProcessEndPoint) -> None:
        """Read the peer's nonce; raise unless it is equal."""
        if error := peer.verify():
            raise error
        buffer = np.zeros(NONCE_BYTES, np.uint8)
        ranges = np.array(
            [[buffer.ctypes.data, NONCE_BYTES], [remote.nonce_address, NONCE_BYTES]],
            np.uint64,
        )
        address = ranges.ctypes.data
        moved = self._calls[Direction.READ](peer.identity.pid, address, 1, address + 16, 1, 0)
        if moved < 0:
            raise _explain(ctypes.get_errno(), peer, 0)
        if buffer.tobytes() != remote.nonce:
            raise _changed(remote.identity, remote.identity.start_time)


def _shares(transfer: CmaTransfer, num_threads: int) -> list[tuple[int, int]]:
    """Return the next (start, stop) positions to copy in parallel, in order and without gaps."""
    start = transfer.bytes_done
    fair = -(-(transfer.num_bytes - start) // num_threads)
    share = min(max(fair, MIN_BYTES_PER_THREAD), MAX_BYTES_PER_POLL // num_threads)
    shares: list[tuple[int, int]] = []
    while len(shares) < num_threads and start < transfer.num_bytes:
        stop = _reach(transfer, start, min(start + share, transfer.num_bytes), MAX_RANGES_PER_SHARE)
        shares.append((start, stop))
        start = stop
    return shares


def _reach(transfer: CmaTransfer, start: int, stop: int, max_ranges: int) -> int:
    """Return the position that ``max_ranges`` local and ``max_ranges`` remote ranges reach, at most ``stop``."""
    return min(stop, transfer.local.reach(start, max_ranges), transfer.remote.reach(start, max_ranges))


def _in_remote_order(sides: Sides) -> Sides:
    """Sort by remote address: neighbours merge, and the kernel walks the peer's page tables in order."""
    if (sides.remote[1:] >= sides.remote[:-1]).all():
        return sides
    order = np.argsort(sides.remote)
    return Sides(sides.local[order], sides.remote[order], sides.lengths[order])


def _died(identity: ProcessIdentity) -> TransportError:
    return TransportError(
        Reason.PEER_DIED, f"the peer process {identity.pid} has exited.", "Reconnect when the peer has been restarted."
    )


def _changed(identity: ProcessIdentity, start_time: int) -> TransportError:
    return TransportError(
        Reason.PEER_CHANGED,
        f"process {identity.pid} is not the peer of this end point (started at tick {start_time}, the peer at "
        f"{identity.start_time}; the nonce must match too).",
        "Ask the peer for a new end point.",
    )


def _explain(number: int, peer: CmaPeer, position: int) -> TransportError:
    pid = peer.identity.pid
    if number == errno.ESRCH:
        return _died(peer.identity)
    if number == errno.EPERM:
        remedy = _PERMISSION_REMEDY.format(scope=_read_ptrace_scope())
        return TransportError(
            Reason.PERMISSION_DENIED,
            f"the kernel does not let process {os.getpid()} (uid {os.geteuid()}) read the memory of process {pid} "
            f"(uid {peer.identity.uid}).",
            remedy,
        )
    if number == errno.EFAULT and (error := peer.verify()):
        return error
    message = f"copying from or to process {pid} stopped after {position} bytes: {os.strerror(number)}."
    return TransportError(
        Reason.TRANSFER_FAILED, message, "Keep the registered memory of both engines mapped until close."
    )


def check_same_host(own: ProcessIdentity, other: ProcessIdentity) -> None:
    """Refuse a process that ``own`` does not reach. Raises :class:`TransportError` (transport-unavailable)."""
    if own.boot_id != other.boot_id:
        found, remedy = "the peer is on another host", "Use the nixl transport between hosts."
    elif own.pid_namespace != other.pid_namespace:
        found = "the peer is in another pid namespace"
        remedy = "Share the namespace (--pid=host or --pid=container:<name>) or use the nixl transport."
    else:
        return
    raise TransportError(Reason.TRANSPORT_UNAVAILABLE, f"cma needs both processes on one host; {found}.", remedy)


def _hold(identity: ProcessIdentity) -> Process | None:
    try:
        return Process(identity.pid)
    except ProcessLookupError as error:
        raise _died(identity) from error
    except (OSError, AttributeError):
        return None


def _open_stat(identity: ProcessIdentity) -> io.FileIO:
    try:
        return io.FileIO(f"/proc/{identity.pid}/stat")
    except OSError as error:
        raise _died(identity) from error


def _read_ptrace_scope() -> str:
    try:
        with open(_PTRACE_SCOPE, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return "not in use"


def _allow_attach() -> None:
    """Allow all processes of this user to attach: under Yama's scope 1 only a parent may do so by default."""
    if _read_ptrace_scope() != "1":
        return
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0) == 0:
        logger.info("ptrace_scope is 1: processes of uid %d may now read this process's memory", os.geteuid())
    else:
        logger.warning("ptrace_scope is 1 and prctl(PR_SET_PTRACER) failed: peers will be refused")
