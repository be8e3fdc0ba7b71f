"""The CUDA driver, asked by ctypes: whether there is a device takes milliseconds to learn, and no torch."""

import ctypes
import re
from dataclasses import dataclass

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
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise TransportError(
            Reason.MISSING_DEPENDENCY,
            f"{name} cannot be used: this machine has no CUDA driver ({error}).",
            "Run this on a machine with an NVIDIA GPU and its driver; in a container, pass the GPU to it (--gpus all).",
        ) from error
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


def _call(driver: ctypes.CDLL, name: str, function: str, *arguments: object) -> None:
    if code := getattr(driver, function)(*arguments):
        raise TransportError(
            Reason.UNSUPPORTED,
            f"{name} cannot be used: {function} of the CUDA driver returned {code}.",
            "Check that nvidia-smi lists the device.",
        )
