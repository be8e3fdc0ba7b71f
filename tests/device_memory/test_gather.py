"""Short pieces through the buffer: the kernel's own code, the driver's copies, and streams in any order."""

import ctypes
import inspect
import random
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from kvferry.errors import Reason, TransportError
from kvferry.execution import device_gather, memory
from kvferry.execution.device import CudaOrder
from kvferry.execution.device_gather import GatherBuffer, take_buffer
from kvferry.execution.local_copy import CHUNKS_IN_FLIGHT, LocalRoute, PinnedCopying, PinnedMemory
from kvferry.execution.trial import LabelledBlocks
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import CacheKind, Region
from kvferry.layout.slab import slab_shard
from kvferry.plan.match import GroupBlocks
from kvferry.tiers.slab_memory import SlabMemory

from ..local.fake_cuda import FakeCuda, FakeEvent, FakeStream
from ..local.test_local_copy import CASES, Ranks
from ..pure.arrangements import attention
from ..support.dense import Content
from . import standin_driver, standin_kernel
from .device import ImmediateOrder
from .test_offload import DeviceCopies, trial_of
from .test_trial import SHARDS, placed
from .untouchable import DEVICE, DeviceMemory

pytest.importorskip("triton")

WINDOW = CacheKind.SLIDING_WINDOW
SMALL = 1 << 11
"""Half of a buffer of some blocks: every test here has several chunks, blocks larger than that, and their rests."""


class Gathered(DeviceCopies):
    """Ranks on the device, whose short pieces pass a small buffer."""

    def __init__(self, stores: Ranks, loads: Ranks, selector: int = 0) -> None:
        super().__init__(stores, loads, selector=selector)
        begin = int(self.buffer.ctypes.data) // 4096 * 4096
        standin_driver.pinned.clear()
        pinned = PinnedMemory(Region(begin, (1 << 18) + 4096), self.order, GatherBuffer(self.order, SMALL))
        self.copying = pinned.copying  # type: ignore[method-assign]
        standin_kernel.launches.clear()


LAYOUTS = {
    f"{layout}, {name}": (Ranks(layout=layout, tp=tp, kind=kind), Ranks(layout=layout, kind=kind))
    for layout in NamedLayout
    for name, tp, kind in [("TP 2 to 1", 2, CacheKind.ATTENTION), ("MLA", 1, CacheKind.MLA)]
}
LAYOUTS |= {
    f"{layout}, windows, K and V apart": (Ranks(layout=layout, content=Content.APART, kind=WINDOW, window=6),) * 2
    for layout in (NamedLayout.LBNHC, NamedLayout.BHLNC)
}
LAYOUTS |= {name: CASES[name] for name in ("tp4-to-tp2-other-layouts", "pp2-tp2-to-tp1", "cpu-attention")}
WHOLE = {"BHLNC, TP 2 to 1", "BHLNC, MLA", "BLHNC, MLA", "BLNHC, MLA"}
"""In these a block is one piece at both ends: no kernel is launched. Of the others each stores and loads by one."""


@pytest.mark.parametrize("case", LAYOUTS)
def test_stored_blocks_are_loaded_byte_by_byte(case: str) -> None:
    """The oracle labels each number by layer, block, head, token and channel, and compares the whole memory."""
    copies = Gathered(*LAYOUTS[case])
    copies.check()
    copies.executor.close()
    assert {*standin_kernel.launches} == (set() if case in WHOLE else {True, False}) or case in CASES


@pytest.mark.parametrize("name", ["tokens outermost", "hybrid, one rank of two"])
def test_the_trial_of_several_groups_passes(name: str) -> None:
    """Attention and states in one memory, by labels that the engine's own views write and read."""
    trial, content, executor = trial_of(SHARDS[name]())
    trial._buffer = GatherBuffer(ImmediateOrder(), SMALL)
    before = content.content.copy()
    assert trial.run().num_bytes > 0
    assert np.array_equal(content.content, before)
    assert {*standin_kernel.launches[2:]} == {True, False}
    executor.close()


@pytest.mark.parametrize("is_broken", [False, True])
def test_the_trial_finds_copies_that_move_nothing_behind_the_buffer(
    is_broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a store has gathered stays in the buffer: a load must not find it there."""
    trial, _, executor = trial_of(SHARDS["hybrid"]())
    trial._buffer = GatherBuffer(ImmediateOrder(), 1 << 16)
    if is_broken:
        monkeypatch.setattr(standin_driver, "_move", lambda _: None)
        with pytest.raises(TransportError, match="bytes are wrong"):
            trial.run()
    else:
        trial.run()
    executor.close()


def test_the_trial_copies_only_once_its_labels_and_its_cleared_buffer_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both are launched on the engine's stream, beside which the copies have streams of their own."""
    launched: list[Callable[[], None]] = []
    done: list[str] = []

    class WorkOver:
        def is_over(self) -> bool:
            while launched:
                launched.pop(0)()
            return True

        wait = is_over

    def late(owner: Any, name: str) -> None:
        act = getattr(owner, name)
        launch = lambda it: launched.append(lambda: (done.append(name), act(it)))  # noqa: E731
        monkeypatch.setattr(owner, name, launch)

    trial, _, executor = trial_of(attention(0, 1, ["0", "1"]))
    trial._buffer = GatherBuffer(ImmediateOrder(), 1 << 16)
    monkeypatch.setattr(trial._order, "mark", WorkOver)
    late(LabelledBlocks, "label")
    late(GatherBuffer, "clear")
    move = standin_driver._move
    monkeypatch.setattr(standin_driver, "_move", lambda rows: (done.append("copy"), move(rows)))
    trial.run()
    executor.close()
    assert done == ["label", "copy", "clear", "copy"]


# Streams that a test runs.


class Streams:
    """One rank with a slab, on streams of which the test says which does its next launch."""

    def __init__(self) -> None:
        standin_driver.reset()
        standin_kernel.launches.clear()
        self.cuda = FakeCuda.of_this_thread(DEVICE)
        self.engine = self.cuda.current_stream(DEVICE)
        order = CudaOrder(DEVICE, self.cuda)
        shard = attention(0, 1, ["0", "1", "2"], layout=NamedLayout.LBNHC, num_blocks=24)
        self.memory = DeviceMemory(shard.regions[0].length)
        shard = placed(shard, self.memory)
        slab = slab_shard([shard], {"full": 24})
        self.slab = SlabMemory(slab.regions[0].length)
        slab = msgspec.structs.replace(slab, regions=(self.slab.region,))
        self.stores, self.loads = LocalRoute([shard], slab, own=[0]), LocalRoute([slab], shard, own=[0])
        standin_kernel.current_stream = lambda: self.cuda.current_stream(DEVICE)
        # Two blocks of 288 bytes fill a half.
        buffer = GatherBuffer(order, 640)
        self.engine.run()
        self.pinned = PinnedMemory(self.slab.region, order, buffer)
        self.copies = self.cuda.streams[-1]
        assert self.copies is not self.engine, "copies would hold the engine up"
        self.kernels = self.cuda.Stream(DEVICE)
        self.cuda.set_stream(self.kernels)
        for stream in (self.copies, self.kernels):
            standin_driver.streams[stream.cuda_stream] = stream
        self.stored = np.frombuffer(
            (ctypes.c_uint8 * self.slab.region.length).from_address(self.slab.region.base_address), np.uint8
        )

    def job(self, source: Sequence[int], destination: Sequence[int], *, is_load: bool) -> PinnedCopying:
        blocks = GroupBlocks(
            group="full",
            first_token=0,
            last_token=len(source) * 4,
            source_block_ids=source,
            destination_block_ids=destination,
        )
        return self.pinned.copying((self.loads if is_load else self.stores).copies(0, [blocks]))

    def expect(self, source: Sequence[int], destination: Sequence[int], *, is_load: bool) -> None:
        """Compare the cache ``[layer, block, token, head, content]`` with the slab, both in that order."""
        cache = self.memory.content.view(np.uint16).reshape(3, 24, 4, 2, 6)
        slab = self.stored.view(np.uint16).reshape(24, 2, 3, 4, 6).transpose(2, 0, 3, 1, 4)
        found, wanted = (cache, slab) if is_load else (slab, cache)
        assert np.array_equal(found[:, destination], wanted[:, source])


Order = Callable[[FakeStream, FakeStream], Sequence[FakeStream]]


def either(seed: int) -> Order:
    rng = random.Random(seed)
    return lambda copies, kernels: [copies, kernels] if rng.random() < 0.5 else [kernels, copies]


ORDERS: dict[str, Order] = {
    "copies as early as they may": lambda copies, kernels: [copies, kernels],
    "kernels as early as they may": lambda copies, kernels: [kernels, copies],
    **{f"either, {seed}": either(seed) for seed in range(2)},
}
BLOCKS = [21, 3, 4, 11, 7, 0, 16, 9, 2, 23, 5]
SLOTS = [1, 2, 3, 12, 20, 7, 22, 4, 17, 8, 0]


@pytest.mark.parametrize("kinds", [[False], [True], [False, True]], ids=["store", "load", "store and load"])
@pytest.mark.parametrize("order", ORDERS)
def test_bytes_are_right_in_whatever_order_the_streams_run(order: str, kinds: list[bool]) -> None:
    streams = Streams()
    numbers = len(streams.memory.content) // 2
    streams.memory.content.view(np.uint16)[:] = np.arange(numbers)
    streams.stored.view(np.uint16)[:] = np.arange(numbers) + numbers
    # A load beside a store has blocks and slots of its own.
    others = [each for each in range(24) if each not in BLOCKS], [each for each in range(24) if each not in SLOTS]
    asked = {False: (BLOCKS, SLOTS), True: (others[1][:11], others[0][:11])}
    jobs = {is_load: streams.job(*asked[is_load], is_load=is_load) for is_load in kinds}
    for turn in range(1000):
        # Either goes first, so that each half is a store's and then a load's.
        for is_load, job in [*jobs.items()][:: 1 if turn % 2 else -1]:
            job.advance()
            if job.is_over:
                streams.expect(*asked[is_load], is_load=is_load)
                assert job.is_quiet()
                del jobs[is_load]
        for stream in ORDERS[order](streams.copies, streams.kernels):
            if stream.step():
                break
        if not jobs:
            break
    assert not jobs, "the streams wait for each other"
    assert standin_kernel.launches[2:].count(False in kinds) == 6
    assert not streams.engine.num_waiting, "the engine's stream waits for nothing"


MUTANTS: dict[str, tuple[Any, str, str, str]] = {
    "no wait between kernel and copy": (GatherBuffer, "launch", "second.wait_for(first.mark())", "pass"),
    "no wait for the half": (GatherBuffer, "launch", "first.wait_for(half.end)", "pass"),
    "the kernel in another half": (GatherBuffer, "launch", "chunk, half.address", "chunk, next(self._halves).address"),
    "one half twice": (GatherBuffer, "__init__", "Half(begin + half_bytes)", "Half(begin)"),
    "an end before the second step": (GatherBuffer, "launch", "half.end = second.mark()", "half.end = first.mark()"),
    "no end waited for": (PinnedCopying, "is_over", " and not self._in_flight", ""),
    "a load's copies on the kernel's stream": (
        GatherBuffer,
        "launch",
        "copy(rows, copies.handle)\n                else",
        "copy(rows, kernel.handle)\n                else",
    ),
    "elements twice as wide": (device_gather, "element_width", "% width", "% max(1, width // 2)"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_broken_line_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, right, wrong = MUTANTS[mutant]
    kept = getattr(owner, name)
    source = inspect.getsource(getattr(kept, "fget", kept))
    assert right in source
    made: dict[str, Any] = {}
    module = owner if owner is device_gather else sys.modules[owner.__module__]
    exec(compile(textwrap.dedent(source.replace(right, wrong)), mutant, "exec"), vars(module), made)
    monkeypatch.setattr(owner, name, made[name])
    device_gather.images_of.cache_clear()
    found = []
    for order in list(ORDERS)[:2]:
        for kinds in ([False], [True], [False, True]):
            try:
                test_bytes_are_right_in_whatever_order_the_streams_run(order, kinds)
            except Exception:  # an assertion's, inside the interpreter another
                found.append((order, kinds))
                break
        if found:
            break
    device_gather.images_of.cache_clear()
    assert found, "the mutant survives"


def test_few_chunks_are_under_way_and_a_job_that_is_given_up_ends_with_them() -> None:
    streams = Streams()
    job = streams.job(BLOCKS, SLOTS, is_load=False)
    for _ in range(10):
        job.advance()
    assert standin_kernel.launches[2:] == [True] * CHUNKS_IN_FLIGHT
    while streams.copies.num_waiting:
        assert not job.is_quiet(), "what the kernel has gathered is copied"
        streams.kernels.run()
        streams.copies.step()
    assert job.is_quiet()
    assert not job.is_over


@pytest.mark.parametrize("is_load", [False, True])
def test_a_refused_copy_fails_its_job_and_the_next_chunk_in_its_half_waits(is_load: bool) -> None:
    streams = Streams()
    standin_driver.failures.append(standin_driver.ILLEGAL_ADDRESS)
    bad = streams.job(BLOCKS[:2], SLOTS[:2], is_load=is_load)
    with pytest.raises(TransportError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        bad.advance()
    assert not bad.is_quiet(), "a part of it may be under way"
    numbers = len(streams.memory.content) // 2
    streams.memory.content.view(np.uint16)[:] = np.arange(numbers)
    good = streams.job(BLOCKS[:6], SLOTS[:6], is_load=False)
    for _ in range(1000):
        good.advance()
        if not streams.copies.step():
            streams.kernels.step()
        if good.is_over:
            break
    assert good.is_over
    assert bad.is_quiet()
    streams.expect(BLOCKS[:6], SLOTS[:6], is_load=False)


@pytest.mark.parametrize("is_load", [False, True])
def test_a_device_without_room_for_a_table_fails_its_job(is_load: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object) -> None:
        raise RuntimeError("tried to allocate 2.00 MiB")  # torch's OutOfMemoryError is one

    streams = Streams()
    job = streams.job(BLOCKS[:2], SLOTS[:2], is_load=is_load)
    monkeypatch.setattr(device_gather, "_on_device", out_of_memory)
    with pytest.raises(TransportError, match=r"no room on .*tried to allocate") as failed:
        job.advance()
    assert failed.value.reason is Reason.TRANSFER_FAILED
    for _ in range(1000):
        if job.is_quiet():
            break
        if not streams.copies.step():
            streams.kernels.step()
    assert job.is_quiet()


def test_an_event_of_another_stream_is_waited_for_on_the_device() -> None:
    streams = Streams()
    streams.job(BLOCKS[:2], SLOTS[:2], is_load=False).advance()
    assert [type(each) for each in streams.copies._work][:1] == [FakeEvent]


# A start without the buffer.


def no_memory(*_: object) -> Any:
    raise RuntimeError("CUDA out of memory. Tried to allocate 64.00 MiB.")


def no_kernel() -> Any:
    raise ImportError("No module named 'triton'")


@pytest.mark.parametrize("lacks", ["memory", "triton"])
def test_a_start_without_the_buffer_says_so_once_and_copies_piece_by_piece(
    lacks: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if lacks == "memory":
        monkeypatch.setattr(memory, "allocate", no_memory)
    else:
        monkeypatch.setattr(device_gather, "kernel", no_kernel)
    assert take_buffer(ImmediateOrder()) is None
    [line] = caplog.messages
    assert f"offload on {DEVICE} copies each piece of a cache by itself" in line
    assert ("out of memory" if lacks == "memory" else "No module named 'triton'") in line
