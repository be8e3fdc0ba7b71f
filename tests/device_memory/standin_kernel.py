"""In the place of a kernel's launch where there is no GPU: Triton's interpreter, on the second mapping.

The kernel's own code runs. As a GPU would, each load and store checks that its address is one of the device's, or of
the kernel's table, and that it is a multiple of the element: of 16 bytes where a thread moves two elements of 8.
"""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.execution import device_gather

from ..local.fake_cuda import FakeStream
from .device_tensor import on_host
from .untouchable import spans

KERNEL = "kvferry.execution.gather_kernel"

launches: list[bool] = []
"""For each launch whether it went to the buffer."""


def current_stream() -> FakeStream | None:
    """Return the calling thread's stream, which a test runs; None where each launch is done when it returns."""
    return None


def install(patch: pytest.MonkeyPatch) -> None:
    launches.clear()
    patch.setattr(sys.modules[__name__], "current_stream", lambda: None)
    patch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    if sys.modules.get("triton", torch) is not None:
        patch.setattr(device_gather, "kernel", standin)


def standin() -> Any:
    """In the place of :func:`kvferry.execution.device_gather.kernel`."""
    return SimpleNamespace(copy_tiles=CopyTiles())


class CopyTiles:
    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(table: torch.Tensor, *given: int, TO_BUFFER: bool, TILE_BITS: int) -> None:
            launches.append(TO_BUFFER)
            stream = current_stream()

            def run() -> None:
                with torch._C.DisableTorchFunctionSubclass():
                    plain = on_host(table)
                with pytest.MonkeyPatch.context() as patch:
                    checked(patch, plain)
                    interpreted().copy_tiles[grid](plain, *given, TO_BUFFER=TO_BUFFER, TILE_BITS=TILE_BITS)

            run() if stream is None else stream.launch(run)

        return launch


_module: list[ModuleType] = []


def interpreted() -> Any:
    """Return the kernel's module, imported so that Triton interprets it."""
    if not _module:
        import importlib

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            patch.delitem(sys.modules, KERNEL, raising=False)
            _module.append(importlib.import_module(KERNEL))
    return _module[0]


def checked(patch: pytest.MonkeyPatch, table: torch.Tensor) -> None:
    """Let the interpreter's loads and stores reach the device's memory by its second mapping."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    begin = np.array([span.address for span in spans], np.uint64)
    order = np.argsort(begin)
    begin = begin[order]
    end = np.array([spans[each].address + spans[each].length for each in order], np.uint64)
    reachable = np.array([spans[each].reachable for each in order], np.uint64)
    own = table.data_ptr(), table.data_ptr() + table.nbytes
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def reached(pointers: Any, mask: Any) -> Any:
        addresses = pointers.data.astype(np.uint64)
        num_bytes = np.uint64(pointers.get_element_ty().primitive_bitwidth // 8)
        used = np.broadcast_to(mask.data, addresses.shape).astype(bool)
        is_own = (addresses >= own[0]) & (addresses + num_bytes <= own[1])
        place = np.maximum(np.searchsorted(begin, addresses, side="right"), 1) - 1
        is_inside = (begin[place] <= addresses) & (addresses + num_bytes <= end[place])
        assert (is_own | is_inside)[used].all(), "a kernel touches memory that is not the device's"
        unit = num_bytes
        if addresses.ndim == 2:
            used, unit = used & (np.arange(2) == 0), np.uint64(16)
        assert not (addresses[used] % unit).any(), "a kernel's access is not aligned"
        moved = np.where(is_own, addresses, addresses - begin[place] + reachable[place])
        return TensorHandle(moved, pointers.dtype)

    patch.setattr(
        InterpreterBuilder,
        "create_masked_load",
        lambda self, pointers, mask, *more: load(self, reached(pointers, mask), mask, *more),
    )
    patch.setattr(
        InterpreterBuilder,
        "create_masked_store",
        lambda self, pointers, value, mask, *more: store(self, reached(pointers, mask), value, mask, *more),
    )
