"""The CUDA driver, called by ctypes: it finds a device within milliseconds, without torch.

:class:`HostCopies` pins host memory and launches batches of copies: what torch has no call for.
"""

import ctypes
import re
from dataclasses import dataclass

import numpy as np

from kvferry.arrays import Descriptors
from kvferry.errors import Reason, SettingsError, TransportError
from kvferry.transport.protocol import CUDA_DEVICE

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
        if getattr(self._driver, "cuGetProcAddress_v2", _missing)(b"cuMemcpyBatchAsync", *found_in) or not found.value:
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


def _missing(*_: object) -> int:
    return 1


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
