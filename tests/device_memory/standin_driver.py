"""In the place of libcuda where there is no GPU: C functions behind real addresses, which copy by the second mapping.

Only what :class:`kvferry.execution.device.HostCopies` calls is here. More strictly than the driver, each copy must
lie between one allocation of the device and one pinned range of the host, in a stream that exists.
"""

import ctypes
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvferry.execution.device import BATCH_COPY_SINCE, BatchCopy

from ..local.fake_cuda import FakeStream
from .untouchable import reachable, span_of

IMMEDIATE = 1
"""The handle of a stream that has done each launch when it returns."""
INVALID_VALUE, INVALID_CONTEXT, ILLEGAL_ADDRESS, ALREADY_PINNED, NOT_PINNED = 1, 201, 700, 712, 713
NAMES = {INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE", ILLEGAL_ADDRESS: b"CUDA_ERROR_ILLEGAL_ADDRESS"}
CONTEXT = 0xC0DE

pinned: dict[int, int] = {}
"""Length by address of the host's ranges that are pinned."""
batches: list[int] = []
"""How many copies each batch had."""
failures: list[int] = []
"""What the next batches return, in this order, after half of their copies; 0 for none."""
streams: dict[int, FakeStream] = {}
"""Streams that a test runs, by handle."""
refuses_to_pin = False
_of_thread = threading.local()
"""As with CUDA, a thread has no context until somebody gives it one."""


def reset() -> None:
    """Forget all; the calling thread, as an engine's that has used the device, has a context."""
    global refuses_to_pin
    _of_thread.context = CONTEXT
    for kept in (pinned, batches, failures, streams):
        kept.clear()  # type: ignore[attr-defined]
    refuses_to_pin = False


def _get_context(context: Any) -> int:
    context[0] = getattr(_of_thread, "context", None)
    return 0


def _set_context(context: int) -> int:
    if context != CONTEXT:
        return INVALID_CONTEXT
    _of_thread.context = context
    return 0


def _has_context() -> bool:
    return getattr(_of_thread, "context", None) == CONTEXT


def _pin(address: int, length: int, flags: int) -> int:
    if not _has_context():
        return INVALID_CONTEXT
    if refuses_to_pin or flags != 1 or not address or address % 4096:
        return INVALID_VALUE
    if any(begin < address + length and address < begin + other for begin, other in pinned.items()):
        return ALREADY_PINNED
    pinned[address] = length
    return 0


def _unpin(address: int) -> int:
    return 0 if _has_context() and pinned.pop(address, None) else NOT_PINNED


def _copy_batch(
    destinations: int,
    sources: int,
    lengths: int,
    count: int,
    attributes: Any,
    first: Any,
    num_attributes: int,
    failed: Any,
    stream: int,
) -> int:
    if not _has_context():
        return INVALID_CONTEXT
    order = attributes[0]
    hints = order.source.type, order.source.id, order.destination.type, order.destination.id, order.flags
    if (order.source_order, *hints, first[0], num_attributes) != (1, 0, 0, 0, 0, 0, 0, 1):
        return INVALID_VALUE
    if not count or (stream != IMMEDIATE and stream not in streams):
        return INVALID_VALUE
    # Copies: the driver reads the arrays during the call only.
    arrays = [
        np.ctypeslib.as_array((ctypes.c_uint64 * count).from_address(at)) for at in (destinations, sources, lengths)
    ]
    rows = np.stack(arrays, axis=1).tolist()
    for number, (to, source, length) in enumerate(rows):
        if not length or not _is_between(to, source, length):
            failed[0] = number
            return INVALID_VALUE
    batches.append(count)
    code = failures.pop(0) if failures else 0
    work = rows[: count // 2] if code else rows
    if stream == IMMEDIATE:
        _move(work)
    else:
        streams[stream].launch(lambda: _move(work))
    return code


def _move(rows: list[list[int]]) -> None:
    for to, source, length in rows:
        ctypes.memmove(reachable(to, length), reachable(source, length), length)


def _is_between(to: int, source: int, length: int) -> bool:
    on_device = [span_of(address, length) is not None for address in (to, source)]
    host = source if on_device[0] else to
    is_pinned = any(begin <= host and host + length <= begin + other for begin, other in pinned.items())
    return sum(on_device) == 1 and is_pinned


def _name_of(code: int, name: Any) -> int:
    if code not in NAMES:
        return INVALID_VALUE
    name[0] = NAMES[code]
    return 0


def _found(symbol: bytes, address: Any, version: int, flags: int, status: Any) -> int:
    if (symbol, version, flags) != (b"cuMemcpyBatchAsync", BATCH_COPY_SINCE, 0):
        return NOT_PINNED
    address[0] = ctypes.cast(_batch, ctypes.c_void_p).value
    return 0


def _function(body: Callable[..., int], *arguments: Any) -> Any:
    return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(body)


_batch = BatchCopy(_copy_batch)
LIBRARY: Any = SimpleNamespace(
    cuCtxGetCurrent=_function(_get_context, ctypes.POINTER(ctypes.c_void_p)),
    cuCtxSetCurrent=_function(_set_context, ctypes.c_void_p),
    cuMemHostRegister_v2=_function(_pin, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint),
    cuMemHostUnregister=_function(_unpin, ctypes.c_void_p),
    cuGetErrorName=_function(_name_of, ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    cuGetProcAddress_v2=_function(
        _found,
        ctypes.c_char_p,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_int,
        ctypes.c_uint64,
        ctypes.POINTER(ctypes.c_int),
    ),
)
