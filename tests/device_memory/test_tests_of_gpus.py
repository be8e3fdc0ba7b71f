"""The tests of tests/gpu that need nothing of CUDA but memory, copies and a driver, on what stands in for them."""

import pytest

from ..gpu import test_cell_sums, test_offload_copies
from ..gpu.test_cell_sums import test_sums_of_the_device_are_those_of_the_processor
from ..gpu.test_offload_copies import opened, test_every_layout_through_the_buffer, test_windows
from .device import ImmediateOrder
from .standin_transport import SuiteMemory

__all__ = [
    "opened",
    "test_every_layout_through_the_buffer",
    "test_sums_of_the_device_are_those_of_the_processor",
    "test_windows",
]


@pytest.fixture(autouse=True)
def memory_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (test_cell_sums, test_offload_copies):
        monkeypatch.setattr(module, "CudaMemory", SuiteMemory)
    monkeypatch.setattr(test_offload_copies, "device_order", lambda _: ImmediateOrder())
