"""The device of a rank: the order of what is launched on it, and the CUDA driver, which finds it and copies in batches.

On a GPU a launch returns before its work is done. A *mark* is a place in the stream of the thread that made it, and
says when all work behind which it stands is done; on a CPU every mark is over at once.

* A source writes or stores what a step computes only once a mark behind the step's launches is over.
* A block is announced, or loaded from a tier, only once all work is done that was launched when it got its request.
* Every thread that launches or waits sets its device first, and launches on a stream of its own.

Torch is imported only where there is a GPU. The driver is called by ctypes, within milliseconds and without torch.
"""

import ctypes
import logging
import queue
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvferry.arrays import Descriptors
from kvferry.errors import Reason, SettingsError, TransportError
from kvferry.layout.shard import HOST_DEVICE
from kvferry.peer_log import PeerLog
from kvferry.transport.protocol import CUDA_DEVICE

logger = PeerLog(logging.getLogger(__name__))


class Mark(Protocol):
    """All work that was launched on a thread's stream before the mark was made."""

    def is_over(self) -> bool:
        """Return whether that work is done, without waiting."""

    def wait(self) -> None:
        """Return once that work is done."""


class Stream(Protocol):
    """What is launched on a stream runs in order, and beside what runs on others."""

    handle: int
    """The stream as the CUDA driver names it."""

    def mark(self) -> Mark:
        """Return a mark behind all work launched on the stream so far."""

    def wait_for(self, mark: Mark) -> None:
        """Let work that is launched from now on wait, on the device, until the mark is over."""


class DeviceOrder(Protocol):
    """Streams and marks of the device on which a rank's caches lie."""

    device: str
    """The device's name in torch."""
    is_immediate: bool
    """Whether a launch is done when it returns, so that every mark is over."""

    def enter_thread(self) -> None:
        """Prepare the calling thread, one of kvferry's: set its device, and a stream for its launches."""

    def mark(self) -> Mark:
        """Return a mark behind all work launched on the calling thread's stream so far."""

    def stream(self) -> Stream:
        """Return the calling thread's stream."""

    def new_stream(self) -> Stream:
        """Return a stream beside those of threads."""


class HostMark:
    """A mark of a CPU, which is always over."""

    def is_over(self) -> bool:
        return True

    def wait(self) -> None:
        pass


OVER: Mark = HostMark()


class HostStream:
    """A launch on a CPU is done when it returns."""

    handle = 0

    def mark(self) -> Mark:
        return OVER

    def wait_for(self, mark: Mark) -> None:
        pass


class HostOrder:
    """The order of a CPU."""

    device = HOST_DEVICE
    is_immediate = True

    def enter_thread(self) -> None:
        pass

    def mark(self) -> Mark:
        return OVER

    def stream(self) -> Stream:
        return HostStream()

    new_stream = stream


HOST: DeviceOrder = HostOrder()


class CudaMark:
    """A ``torch.cuda.Event`` that has been recorded."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def is_over(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


class CudaStream:
    """A ``torch.cuda.Stream``; ``cuda`` is ``torch.cuda``."""

    def __init__(self, stream: Any, cuda: Any) -> None:
        self._stream, self._cuda = stream, cuda
        self.handle = int(stream.cuda_stream)

    def mark(self) -> Mark:
        """Record an event on the stream; a thread's wait for the event uses no processor."""
        event = self._cuda.Event(blocking=True)
        event.record(self._stream)
        return CudaMark(event)

    def wait_for(self, mark: Mark) -> None:
        """Wait for an event of any stream of the device; the mark of a CPU is over."""
        if isinstance(mark, CudaMark):
            self._stream.wait_event(mark.event)


class CudaOrder:
    """Streams and events of one GPU; ``cuda`` is ``torch.cuda``."""

    is_immediate = False

    def __init__(self, device: str, cuda: Any) -> None:
        self.device = device
        self._cuda = cuda

    def enter_thread(self) -> None:
        """Set the thread's device and stream: a new thread has device 0 and the engine's default stream."""
        self._cuda.set_device(self.device)
        self._cuda.set_stream(self._cuda.Stream(self.device))

    def mark(self) -> Mark:
        return self.stream().mark()

    def stream(self) -> Stream:
        return CudaStream(self._cuda.current_stream(self.device), self._cuda)

    def new_stream(self) -> Stream:
        return CudaStream(self._cuda.Stream(self.device), self._cuda)


def device_order(devices: Iterable[str]) -> DeviceOrder:
    """Return the order of the one device on which a rank's regions lie.

    Raises :class:`TransportError` (``unsupported``) for several devices, or one that is neither CPU nor CUDA.

    >>> device_order(["cpu", "cpu"]).is_immediate
    True
    """
    names = set(devices)
    if names == {HOST_DEVICE}:
        return HOST
    if len(names) != 1 or not next(iter(names)).startswith("cuda"):
        raise TransportError(
            Reason.UNSUPPORTED,
            f"a rank's caches lie on {', '.join(sorted(names)) or 'no device'}.",
            "Keep them on one CUDA device, or on the CPU.",
        )
    import torch

    return CudaOrder(names.pop(), torch.cuda)


class DeferredActions:
    """Runs actions once their marks are over, in order, on a thread that starts with the first action.

    An action is dropped where the device fails: as the thread turns to it, or in the wait for the mark.
    """

    def __init__(self, order: DeviceOrder) -> None:
        self._order = order
        self._pending: queue.SimpleQueue[tuple[Mark, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, mark: Mark, action: Callable[[], None]) -> None:
        """Run the action once the mark is over."""
        self._pending.put((mark, action))
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="kvferry-deferred", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # The engine's thread calls: the action waits for the next one, its write for its deadline.
                logger.exception("kvferry: the process can start no thread")
            else:
                self._thread = thread

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Run the actions added before, within ``timeout_seconds``, and stop; twice is fine."""
        if self._thread is not None:
            self._pending.put(None)
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        has_entered = False
        while (entry := self._pending.get()) is not None:
            mark, action = entry
            try:
                if not has_entered:
                    self._order.enter_thread()
                    has_entered = True
                mark.wait()
                action()
            except Exception:
                logger.exception("kvferry: the device failed: an action that waited for the device is dropped")


LIBRARY = "libcuda.so.1"
_NAME_BYTES = 128
_RDMA_WRITES_ORDERING = 118
"""CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING: 0 where a device sees what a network card has written only after
a flush that kvferry does not make."""


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A device of this machine that this process may use. ``sees_rdma_writes``: work that is launched after a network
    card's write sees the written bytes.
    """

    name: str
    sees_rdma_writes: bool


def find_device(name: str) -> CudaDevice:
    """Return the device with this name in torch, such as ``cuda:0``.

    Raises :class:`SettingsError` (``invalid-setting``) for another name, :class:`TransportError`
    (``missing-dependency``, ``unsupported``) where the driver or the device is missing.
    """
    numbered = re.fullmatch(CUDA_DEVICE, name)
    if numbered is None:
        raise SettingsError(Reason.INVALID_SETTING, f"{name!r} names no CUDA device.", "Name one such as cuda:0.")
    driver = _load(name)
    count, device, found = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(_NAME_BYTES)
    _call(driver, name, "cuInit", 0)
    _call(driver, name, "cuDeviceGetCount", ctypes.byref(count))
    number = int(numbered[1])
    if number >= count.value:
        raise TransportError(
            Reason.UNSUPPORTED,
            f"{name} does not exist: this process sees {count.value} CUDA devices.",
            "Name a lower number; CUDA_VISIBLE_DEVICES says which devices a process sees.",
        )
    _call(driver, name, "cuDeviceGet", ctypes.byref(device), number)
    _call(driver, name, "cuDeviceGetName", found, _NAME_BYTES, device)
    ordering = ctypes.c_int()
    _call(driver, name, "cuDeviceGetAttribute", ctypes.byref(ordering), _RDMA_WRITES_ORDERING, device)
    return CudaDevice(found.value.decode(errors="replace"), ordering.value > 0)


class _Location(ctypes.Structure):
    """CUmemLocation; type 0 gives no hint."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source", _Location),
        ("destination", _Location),
        ("flags", ctypes.c_uint),
    )


BatchCopy = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,  # destinations
    ctypes.c_void_p,  # sources
    ctypes.c_void_p,  # lengths
    ctypes.c_size_t,
    ctypes.POINTER(CopyAttributes),
    ctypes.POINTER(ctypes.c_size_t),  # the first copy of each of the attributes
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_size_t),  # the copy that failed
    ctypes.c_void_p,  # stream
)
"""cuMemcpyBatchAsync as CUDA 12.8 declared it. A later driver returns this version where the caller names it."""
BATCH_COPY_SINCE = 12080
_IN_STREAM_ORDER = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: a source is read behind what the stream waits for, not when it is launched."""
_PINNED_FOR_ALL_CONTEXTS = 1


class HostCopies:
    """Copies between memory of one device and pinned host memory, launched in batches by the driver.

    The thread that makes it has used the device: its context is the one that every later call has, in any thread. torch
    makes a context current in a thread only with the first call that needs it, which may be the driver's. Raises
    :class:`TransportError` (``missing-dependency``, ``unsupported``) where there is no driver, or one older than CUDA
    12.8, which has no call for a batch.
    """

    def __init__(self, device: str) -> None:
        self._device, self._driver = device, _load(device)
        found, status = ctypes.c_void_p(), ctypes.c_int()
        version, flags = ctypes.c_int(BATCH_COPY_SINCE), ctypes.c_uint64(0)
        found_in = ctypes.byref(found), version, flags, ctypes.byref(status)
        get_address = getattr(self._driver, "cuGetProcAddress_v2", lambda *_: 1)
        if get_address(b"cuMemcpyBatchAsync", *found_in) or not found.value:
            raise TransportError(
                Reason.UNSUPPORTED,
                f"{device} cannot copy to the host in batches: this machine's CUDA driver has no cuMemcpyBatchAsync.",
                "Install a driver for CUDA 12.8 or later.",
            )
        self._context = ctypes.c_void_p()
        if self._driver.cuCtxGetCurrent(ctypes.byref(self._context)) or not self._context.value:
            raise TransportError(
                Reason.UNSUPPORTED,
                f"{device} has no CUDA context in this thread, so its copies cannot be launched.",
                "Please report it: the engine's thread should have used the device by now.",
            )
        self._copy_batch = BatchCopy(found.value)
        self._attributes = CopyAttributes(source_order=_IN_STREAM_ORDER)
        self._first = ctypes.c_size_t(0)

    def pin(self, address: int, length: int) -> None:
        """Keep host memory in place and let the device copy from and to it. Takes seconds for tens of gigabytes.

        Raises :class:`TransportError` (``unsupported``).
        """
        arguments = ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_uint(_PINNED_FOR_ALL_CONTEXTS)
        if code := self._enter() or self._driver.cuMemHostRegister_v2(*arguments):
            raise TransportError(
                Reason.UNSUPPORTED,
                f"{length} bytes of host memory cannot be pinned for {self._device}: {self._error(code)}.",
                'Set a smaller "host_bytes"; in a container, raise its limit of locked memory (--ulimit memlock=-1).',
            )

    def unpin(self, address: int) -> str:
        """Give pinned memory back; return why the driver refused, empty where it did not."""
        code = self._enter() or self._driver.cuMemHostUnregister(ctypes.c_void_p(address))
        return self._error(code) if code else ""

    def launch(self, rows: Descriptors, stream: int) -> None:
        """Launch the copies of these rows on a stream, by one call, and return at once. They run in no order.

        Raises :class:`TransportError` (``transfer-failed``); some of the copies may be under way then.
        """
        sources, destinations, lengths = np.ascontiguousarray(rows.T)
        failed = ctypes.c_size_t(len(rows))
        code = self._enter() or self._copy_batch(
            destinations.ctypes.data,
            sources.ctypes.data,
            lengths.ctypes.data,
            len(rows),
            ctypes.byref(self._attributes),
            ctypes.byref(self._first),
            1,
            ctypes.byref(failed),
            stream,
        )
        if code:
            which = f"copy {failed.value} of {len(rows)}" if failed.value < len(rows) else f"a batch of {len(rows)}"
            raise TransportError(
                Reason.TRANSFER_FAILED,
                f"{self._device} did not take {which} between its memory and the host's: {self._error(code)}.",
                "Look for an earlier error of the device in the engine's log and in dmesg (Xid).",
            )

    def _enter(self) -> int:
        """Make the context the calling thread's; return the driver's code."""
        return int(self._driver.cuCtxSetCurrent(self._context))

    def _error(self, code: int) -> str:
        name = ctypes.c_char_p()
        if self._driver.cuGetErrorName(ctypes.c_int(code), ctypes.byref(name)) or not name.value:
            return f"CUDA error {code}"
        return f"{name.value.decode(errors='replace')} ({code})"


def _load(name: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise TransportError(
            Reason.MISSING_DEPENDENCY,
            f"{name} cannot be used: this machine has no CUDA driver ({error}).",
            "Run this on a machine with an NVIDIA GPU and its driver; in a container, pass the GPU to it (--gpus all).",
        ) from error


def _call(driver: ctypes.CDLL, name: str, function: str, *arguments: object) -> None:
    if code := getattr(driver, function)(*arguments):
        raise TransportError(
            Reason.UNSUPPORTED,
            f"{name} cannot be used: {function} of the CUDA driver returned {code}.",
            "Check that nvidia-smi lists the device.",
        )
