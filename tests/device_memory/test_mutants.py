"""What this suite finds: the product is broken on purpose, and tests of the suite must fail in their child process.

A *touch* is a read of a device's address by the processor, put into a function of each module that handles such
addresses. Other mutants join kinds of memory that must stay apart.
"""

import ctypes
import faulthandler
import importlib
import inspect
import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("vllm")

import kvferry
from kvferry.execution.digests import Integrity
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import Region
from kvferry.transport import protocol
from kvferry.transport.nixl import NixlTransport
from kvferry.transport.protocol import RegionTable
from kvferry.transport.sliced import SlicedTransport

from ..local import test_write_integrity
from ..local.engines_that_write import Batches, Pairs
from . import conftest, standin_nixl, test_conformance, test_engine_caches, test_trial
from .device_tensor import DeviceTensor
from .untouchable import span_of

Patch = pytest.MonkeyPatch
STATES = "states"


def load() -> None:
    """Write prompts of two source ranks into one destination rank, and compare digests."""
    engines = Pairs()
    try:
        test_write_integrity.test_a_right_push_is_compared_and_commits(2, 1, Integrity.FULL, Batches.CHUNKS, engines)
    finally:
        engines.close()


SCENARIOS: dict[str, Callable[[Patch], object]] = {
    "worker": lambda patch: test_engine_caches.test_a_worker_starts_on_the_engines_own_views(STATES, patch),
    "offload": lambda patch: test_engine_caches.test_an_offload_worker_starts_on_the_engines_own_views(STATES, patch),
    "load": lambda _: load(),
    "doctor": lambda _: test_trial.test_the_small_cache_of_doctor_passes_in_every_layout(NamedLayout.BHLNC),
    "kinds": lambda _: test_conformance.test_each_pair_of_kinds_of_memory_is_a_submission_of_its_own(),
    "allocations": lambda _: test_conformance.test_allocations_that_lie_side_by_side_are_registered_each_for_itself(),
}
"""Tests of the suite, none of which lasts a second."""

TOUCHES = {
    "execution.device:HostCopies.launch": "offload",
    "execution.device_gather:Chunk.rows": "offload",
    "execution.device_gather:choose": "offload",
    "execution.device_gather:GatherBuffer.launch": "offload",
    "execution.digests:DeviceCells.sums": "load",
    "execution.digests:PartCells.__init__": "load",
    "execution.digests:GroupCells._received": "load",
    "execution.local_copy:_descriptors": "offload",
    "execution.local_copy:batch_ends": "offload",
    "execution.local_copy:PinnedMemory.copying": "offload",
    "execution.memory:placed": "worker",
    "execution.trial:_bytes_of": "worker",
    "execution.trial:views_of": "doctor",
    "integrations.vllm.kernels.engine:_is_checkable": "worker",
    "integrations.vllm.translate:attention_components": "worker",
    "integrations.vllm.worker.caches:_use_huge_pages": "worker",
    "integrations.vllm.worker.offload:OffloadWorker.register_kv_caches": "offload",
    "integrations.vllm.worker.role:WorkerRole.register_kv_caches": "worker",
    "plan.planner:PairPlan.lower": "worker",
    "plan.planner:Planner.proved_plans": "worker",
    "plan.planner:build_templates": "load",
    "plan.proof:_sorted_in_bounds": "worker",
    "tiers.slab_trial:SlabTrial.run": "offload",
    "transport.nixl:NixlTransport._descriptor_list": "load",
    "transport.protocol:RegionTable.outside": "load",
    "transport.protocol:_check_inside": "load",
    "transport.protocol:pack_regions": "load",
    "transport.registry:TransportSet.register": "worker",
    "transport.sliced:SlicedTransport._queue": "load",
}
"""Functions that get or return a device's address, and the scenario that calls each."""


def outcome(
    request: pytest.FixtureRequest, monkeypatch: Patch, scenario: Callable[[Patch], object]
) -> pytest.TestReport:
    """Run a scenario in a child of the suite's own kind, and return the suite's report."""

    def run(item: pytest.Item, **_: object) -> list[pytest.TestReport]:
        # Without a description of the place, for which the handlers of Python and of a library take a second.
        faulthandler.disable()
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        found, text = "passed", ""
        try:
            scenario(monkeypatch)
        except BaseException as error:
            found, text = "failed", f"{type(error).__name__}: {error}"
        return [pytest.TestReport(item.nodeid, item.location, {}, found, text, "call")]  # type: ignore[arg-type]

    monkeypatch.setattr(conftest, "runtestprotocol", run)
    child = conftest.Child(request.session, "a scope")
    [report] = child.run(request.session, request.node, None)
    if child.scope:
        child.close()
    return report


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_passes_without_a_mutant(name: str, request: pytest.FixtureRequest, monkeypatch: Patch) -> None:
    report = outcome(request, monkeypatch, SCENARIOS[name])
    assert report.passed, report.longrepr


@pytest.mark.parametrize("function", TOUCHES)
def test_a_touch_in_any_module_ends_the_child(
    function: str, request: pytest.FixtureRequest, monkeypatch: Patch
) -> None:
    module, _, name = function.partition(":")
    mutate(monkeypatch, f"kvferry.{module}", name, lambda address, _: ctypes.string_at(address, 1))
    report = outcome(request, monkeypatch, SCENARIOS[TOUCHES[function]])
    assert report.failed
    assert "SIGSEGV: the product has touched device memory" in str(report.longrepr)


def first_byte(address: int) -> Any:
    return np.frombuffer((ctypes.c_uint8 * 1).from_address(address), np.uint8)[0]


WAYS: dict[str, Callable[[int, Any], object]] = {
    "a view of numpy": lambda address, _: first_byte(address),
    "memmove": lambda address, _: ctypes.memmove(ctypes.create_string_buffer(1), address, 1),
    "a write": lambda address, _: ctypes.memset(address, 0, 1),
    "tensor.numpy": lambda _, view: view.numpy(),
    "numpy.asarray": lambda _, view: np.asarray(view),
    "tensor.tolist": lambda _, view: view.tolist(),
    "an element": lambda _, view: int(view.flatten()[0]),
    "a comparison": lambda _, view: bool((view == 0).all()),
    "the address of its storage": lambda _, view: first_byte(view.untyped_storage().data_ptr()),
    "a copy on the device": lambda _, view: view.clone().numpy(),
}


@pytest.mark.parametrize("way", WAYS)
def test_whatever_way_the_processor_takes_its_touch_ends_the_child(
    way: str, request: pytest.FixtureRequest, monkeypatch: Patch
) -> None:
    mutate(monkeypatch, "kvferry.integrations.vllm.translate", "_check_views", WAYS[way])
    report = outcome(request, monkeypatch, SCENARIOS["worker"])
    assert report.failed
    assert "SIGSEGV: the product has touched device memory" in str(report.longrepr)


JOINS: dict[str, tuple[str, Callable[[Patch], object]]] = {
    "a submission of all kinds": (
        "kinds",
        lambda patch: patch.setattr(SlicedTransport, "_by_devices", lambda self, peer, way, rows: (rows, ())),
    ),
    "a submission of all devices of a side": (
        "kinds",
        lambda patch: patch.setattr(RegionTable, "device_indices", lambda self, rows: np.zeros(len(rows), np.int64)),
    ),
    "all registered as the host's": (
        "load",
        lambda patch: patch.setattr(NixlTransport, "_segment", lambda *_: (standin_nixl.DRAM_SEG, 0)),
    ),
    "a registration of all kinds": (
        "kinds",
        lambda patch: patch.setattr(RegionTable, "of_device", lambda self, _: list(self.regions)),
    ),
    "two allocations as one": (
        "allocations",
        lambda patch: patch.setattr(protocol, "_merges_before", lambda _: 1 << 63),
    ),
}


@pytest.mark.parametrize("joins", JOINS)
def test_kinds_of_memory_that_are_joined_fail_the_test(
    joins: str, request: pytest.FixtureRequest, monkeypatch: Patch
) -> None:
    scenario, breaks = JOINS[joins]
    breaks(monkeypatch)
    report = outcome(request, monkeypatch, SCENARIOS[scenario])
    assert report.failed, "the mutant survives"


def mutate(patch: Patch, module: str, name: str, touch: Callable[[int, Any], object]) -> None:
    """Let a function touch the first device's address that it gets or returns; none ever: the mutant survives."""
    found = importlib.import_module(module)
    owner_name, _, attribute = name.rpartition(".")
    owner = getattr(found, owner_name) if owner_name else found
    kept = inspect.getattr_static(owner, attribute)

    def touching(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            for address, view in addresses([args, kwargs]):
                touch(address, view)
            result = function(*args, **kwargs)
            for address, view in addresses(result):
                touch(address, view)
            return result

        return called

    if isinstance(kept, property):
        assert kept.fget is not None
        patch.setattr(owner, attribute, property(touching(kept.fget)))
        return
    assert isinstance(kept, FunctionType)
    # Other modules may have imported the function by its name.
    holders = [owner] if owner_name else [each for key, each in sys.modules.items() if key.startswith("kvferry.")]
    for holder in holders:
        if getattr(holder, attribute, None) is kept:
            patch.setattr(holder, attribute, touching(kept))


def addresses(value: Any, depth: int = 9) -> Iterator[tuple[int, Any]]:
    """Yield addresses of device memory anywhere in a value, each with the tensor that lies there, None for others."""
    if isinstance(value, DeviceTensor):
        yield value.data_ptr(), value
    elif isinstance(value, int | np.integer):
        if span_of(int(value), 1):
            yield int(value), None
    elif isinstance(value, np.ndarray):
        if value.dtype.kind in "iu" and value.itemsize == 8:
            for each in value.ravel()[:64].tolist():
                yield from addresses(each)
    elif depth and isinstance(value, dict):
        for each in value.values():
            yield from addresses(each, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for each in value[:64]:
            yield from addresses(each, depth - 1)
    elif depth and type(value).__module__.startswith("kvferry."):
        for name in parts_of(value):
            yield from addresses(getattr(value, name, None), depth - 1)


def parts_of(value: Any) -> list[str]:
    if isinstance(value, msgspec.Struct):
        return list(value.__struct_fields__)
    if is_dataclass(value):
        return [field.name for field in fields(value)]
    return [*getattr(value, "__dict__", ()), *getattr(value, "__slots__", ())]


HOST_ONLY = {
    "integrations.vllm.connector": "passes the views on",
    "integrations.vllm.scheduler.offload_tiers": "a slab is host memory",
    "layout.shard": "a region is its address",
    "layout.slab": "a slab is host memory",
    "tiers.host_memory": "a slab is host memory",
    "tiers.local_disk": "a slab is host memory",
    "tiers.pool.store": "a slab is host memory",
    "tiers.slab_memory": "a slab is host memory",
    "tiers.stack": "a slab is host memory",
    "transport.mooncake": "its build for CUDA: tests/device_memory/test_mooncake.py",
}
"""Modules that name addresses and never get a device's, or do no more than pass it on, and why."""
NAMES_OF_ADDRESSES = re.compile(
    r"base_address|data_ptr\(|as_bytes\(|destination_address|source_address|untyped_storage|kv_caches\b|views\["
)


def test_every_module_that_names_an_address_has_a_mutant_or_a_reason() -> None:
    root = Path(kvferry.__file__).parent
    naming = {
        ".".join(path.relative_to(root).with_suffix("").parts)
        for path in root.rglob("*.py")
        if path.relative_to(root).parts[0] not in ("harness", "cli", "models")
        and NAMES_OF_ADDRESSES.search(path.read_text())
    }
    touched = {function.partition(":")[0] for function in TOUCHES}
    assert sorted(naming - touched - HOST_ONLY.keys()) == [], "give each a row in TOUCHES"
    assert sorted(HOST_ONLY.keys() - naming) == []


def test_a_region_of_the_host_is_no_address_of_a_device() -> None:
    assert list(addresses([Region(4096, 4096), 7, np.zeros(3, np.uint64)])) == []
