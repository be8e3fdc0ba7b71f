"""Stores and loads of offload on memory that no processor may touch: the driver's copies alone move bytes."""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kvferry.errors import KVFerryError, Reason, TransportError
from kvferry.execution import device as device_module
from kvferry.execution import local_copy
from kvferry.execution.device import CudaOrder, DeviceOrder, HostCopies
from kvferry.execution.executor import Executor
from kvferry.execution.local_copy import PinnedMemory, batch_ends
from kvferry.integrations.vllm.offload_settings import OffloadSettings
from kvferry.integrations.vllm.offload_step import LoadOrder, OffloadStep, RankReport, SlabOrder, StoreOrder
from kvferry.integrations.vllm.worker import offload as worker_offload
from kvferry.integrations.vllm.worker.offload import OffloadWorker
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import CacheKind, Region, Shard, encode_shard
from kvferry.layout.slab import slab_shard
from kvferry.plan.match import GroupBlocks
from kvferry.tiers.slab_memory import SlabMemory
from kvferry.tiers.slab_trial import SlabTrial, try_offload

from ..local import test_local_copy
from ..local.fake_cuda import FakeCuda, FakeStream
from ..local.test_local_copy import BLOCK_SIZE, CASES, Copies, Ranks
from ..pure.arrangements import attention, hybrid
from ..support.oracle import Arena, RankMemory, strided_memory
from ..waits import wait_until
from . import standin_driver, standin_kernel
from .device import ImmediateOrder
from .device_tensor import tensor_at
from .test_trial import SHARDS, placed, views_of
from .untouchable import DEVICE, DeviceMemory


class OnDevice(Arena):
    """Memory of ranks: the oracle has the second mapping, the product the address of the device."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(0)
        self.memory = DeviceMemory(num_bytes)
        self.buffer = self.memory.content

    def placed(self, shard: Shard) -> RankMemory:
        rank = strided_memory(self, shard)
        shift = self.memory.region.base_address - int(self.buffer.ctypes.data)
        [region] = rank.shard.regions
        moved = Region(region.base_address + shift, region.length, DEVICE)
        return RankMemory(msgspec.structs.replace(rank.shard, regions=(moved,)), rank.regions, rank.views)


class DeviceCopies(Copies):
    """Engines on the device, a slab in pinned host memory."""

    order = ImmediateOrder()

    def __init__(self, stores: Ranks, loads: Ranks, engine_blocks: int = 1, selector: int = 0) -> None:
        self.on_device = OnDevice(1 << 18)
        super().__init__(stores, loads, engine_blocks, selector)
        begin = int(self.buffer.ctypes.data) // 4096 * 4096
        self.copying = PinnedMemory(Region(begin, (1 << 18) + 4096), self.order).copying  # type: ignore[method-assign]

    def placed(self, shard: Shard) -> RankMemory:
        return self.on_device.placed(shard)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Copies]]:
    monkeypatch.setattr(test_local_copy, "Copies", DeviceCopies)
    found: list[Copies] = []
    yield found
    for copies in found:
        copies.executor.close()


@pytest.mark.parametrize("selector", [0, 3])
@pytest.mark.parametrize("case", CASES)
def test_stored_blocks_are_loaded_byte_by_byte(case: str, selector: int, opened: list[Copies]) -> None:
    """TP 1 to 2 and 2 to 1, pipelines, replicas, MLA and other layouts, through one slab."""
    test_local_copy.test_stored_blocks_are_loaded_byte_by_byte(case, selector, None, opened)
    assert standin_driver.batches
    assert {result.transport for result in (*opened[0].stored, *opened[0].loaded)} == {"cuda"}


@pytest.mark.parametrize("case", ["tp1-to-tp2", "pp2-to-pp1", "mla-tp1-to-tp2"])
def test_a_stored_block_of_several_engine_blocks(case: str, opened: list[Copies]) -> None:
    test_local_copy.test_a_stored_block_of_several_engine_blocks(case, None, opened)


@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 1), (1, 2), (2, 1)])
def test_a_window_is_loaded_from_its_first_block(source_tp: int, target_tp: int, opened: list[Copies]) -> None:
    kind = CacheKind.SLIDING_WINDOW
    opened.append(copies := DeviceCopies(*(Ranks(tp=tp, kind=kind, window=6) for tp in (source_tp, target_tp))))
    rng = np.random.default_rng(0)
    for rank in copies.sources:
        rank.regions[0][:] = rng.integers(0, 256, len(rank.regions[0]), np.uint8)
    # What the engine stores is whole; what it loads are the blocks with the last five tokens.
    stored = copies.run(copies.store_routes, copies.blocks([7, 2, 3, 11], [5, 0, 6, 1]), is_load=False)
    wanted = GroupBlocks(
        group="full",
        first_token=2 * BLOCK_SIZE,
        last_token=4 * BLOCK_SIZE,
        source_block_ids=[6, 1],
        destination_block_ids=[9, 4],
        source_first_token=2 * BLOCK_SIZE,
        destination_first_token=2 * BLOCK_SIZE,
    )
    loaded = copies.run(copies.load_routes, wanted, is_load=True)
    assert [result.error for result in (*stored, *loaded)] == [None] * (source_tp + target_tp)
    for layer in test_local_copy.LAYERS:
        before, after = (
            np.concatenate([rank.views["full", "kv", layer] for rank in ranks], axis=1)
            for ranks in (copies.sources, copies.destinations)
        )
        # Of five tokens one is the last of block 3.
        assert np.array_equal(after[4], before[11])
        assert np.array_equal(after[9, :, -1], before[3, :, -1])
        others = [block for block in range(len(after)) if block not in (4, 9)]
        assert not after[others].any()


def test_many_runs_go_by_few_calls(opened: list[Copies]) -> None:
    opened.append(copies := DeviceCopies(Ranks(tp=2, layout=NamedLayout.LBNHC), Ranks()))
    copies.check()
    # Two ranks store 4 blocks of 3 layers with 2 heads and 4 tokens; one loads a block of the slab in one piece.
    assert standin_driver.batches == [96, 96, 4], "a call for each job"


def test_batches_are_bounded_and_cover_every_row() -> None:
    rows = np.zeros((200_000, 3), np.uint64)
    rows[:, 2] = np.random.default_rng(0).integers(1, 1 << 12, len(rows))
    rows[777, 2] = 1 << 30
    ends = batch_ends(rows)
    assert ends[-1] == len(rows)
    assert ends == sorted(set(ends))
    for begin, end in zip([0, *ends], ends, strict=False):
        assert end - begin <= local_copy.BATCH_ROWS
        assert rows[begin : end - 1, 2].sum() <= local_copy.BATCH_BYTES


# Streams that a test runs: which launches wait, and what a job that is given up waits for.


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda.of_this_thread(DEVICE)


class Rank:
    """The worker role of one rank on a device whose streams a test runs, with a slab of eight blocks."""

    def __init__(self, patch: pytest.MonkeyPatch, order: DeviceOrder, shard: Shard | None = None) -> None:
        self.shard = attention(0, 1, ["0", "1"]) if shard is None else shard
        self.memory = DeviceMemory(self.shard.regions[0].length)
        self.shard = placed(self.shard, self.memory)
        patch.setattr(worker_offload, "get_tensor_model_parallel_rank", lambda: 0)
        patch.setattr(worker_offload, "get_pp_group", lambda: SimpleNamespace(rank_in_group=0))
        patch.setattr(worker_offload, "register_caches", lambda *_: self.shard)
        patch.setattr(worker_offload, "resolved_layout", lambda _: NamedLayout.BLHNC)
        patch.setattr(worker_offload, "device_order", lambda devices: (list(devices), order)[1])
        config: Any = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=1))
        self.worker = OffloadWorker(config, SimpleNamespace(), OffloadSettings(host_bytes=1))  # type: ignore[arg-type]
        self.worker.register_kv_caches(views_of(self.shard, self.memory))
        self.worker.take_report()

    def open(self) -> RankReport:
        order, counts = (encode_shard(self.shard),), {"full": 8}
        self.slab = SlabMemory(slab_shard([self.shard], counts).regions[0].length)
        self.step(OffloadStep(slab=SlabOrder(self.slab.handle, order, counts, 1)))
        report = self.worker.take_report()
        assert report is not None
        return report

    def step(self, orders: OffloadStep) -> None:
        self.worker.begin_step(orders)
        self.worker.start_loads(orders)
        self.worker.finish_step(orders)

    def finished(self) -> tuple[set[str], set[str]]:
        return self.worker.take_finished(10.0)

    @property
    def stored(self) -> np.ndarray[Any, Any]:
        """The bytes of the slab."""
        region = self.slab.region
        return np.frombuffer((ctypes.c_uint8 * region.length).from_address(region.base_address), np.uint8)


def whole(source: Sequence[int], destination: Sequence[int]) -> tuple[GroupBlocks, ...]:
    return (
        GroupBlocks(
            group="full",
            first_token=0,
            last_token=len(source) * 4,
            source_block_ids=source,
            destination_block_ids=destination,
        ),
    )


@pytest.fixture
def make_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rank]]:
    made: list[Rank] = []

    def make(order: DeviceOrder, shard: Shard | None = None) -> Rank:
        made.append(Rank(monkeypatch, order, shard))
        return made[-1]

    yield make
    for rank in made:
        rank.worker.shutdown()


@pytest.fixture
def on_streams(
    make_rank: Callable[..., Rank], cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Rank, FakeStream, FakeStream]]:
    """A ready rank, the engine's stream and that of the rank's transfer thread."""
    # Streams here do nothing until the test runs them. Those of the buffer: test_gather.py.
    monkeypatch.setattr(SlabTrial, "run", lambda _: SimpleNamespace(num_bytes=0, seconds=0.0))
    monkeypatch.setattr(worker_offload, "take_buffer", lambda _: None)
    engine = cuda.current_stream(DEVICE)
    rank = make_rank(CudaOrder(DEVICE, cuda))
    copies = cuda.streams[-1]
    assert copies is not engine
    standin_driver.streams[copies.cuda_stream] = copies
    assert rank.open() == RankReport(num_ready=1)
    yield rank, engine, copies
    engine.run()
    copies.run()


def await_batch(copies: FakeStream) -> None:
    """Wait until one batch is launched, and the mark behind it."""
    wait_until(lambda: copies.num_waiting == 2)


def run_until(is_done: Callable[[], bool], *streams: FakeStream) -> None:
    wait_until(is_done, each=lambda: [stream.run() for stream in streams])


def test_a_store_copies_only_what_the_step_has_written(on_streams: tuple[Rank, FakeStream, FakeStream]) -> None:
    rank, engine, copies = on_streams
    engine.launch(lambda: rank.memory.content.fill(7))
    rank.step(OffloadStep(stores=[StoreOrder(1, whole([5, 6], [3, 0]))]))
    time.sleep(0.1)
    copies.run()
    assert not standin_driver.batches, "the step has not run on the device"
    engine.run()
    await_batch(copies)
    assert rank.worker.take_finished() == (set(), set())
    assert rank.worker.take_report() is None, "launched, and not done"
    assert not rank.stored.any()
    copies.run()
    assert rank.finished() == (set(), set())
    assert rank.worker.take_report() == RankReport(stored={1: 1})  # type: ignore[arg-type]
    assert int(np.count_nonzero(rank.stored == 7)) == len(rank.stored) * 2 // 8


def test_a_load_waits_for_its_blocks_and_is_reported_when_it_has_landed(
    on_streams: tuple[Rank, FakeStream, FakeStream],
) -> None:
    rank, engine, copies = on_streams
    rank.stored[:] = 9
    engine.launch(lambda: rank.memory.content.fill(0))  # the engine clears new blocks
    rank.step(OffloadStep(loads=[LoadOrder("r", 2, whole([3], [9]))]))
    time.sleep(0.1)
    copies.run()
    assert not standin_driver.batches
    engine.run()
    await_batch(copies)
    time.sleep(0.05)
    assert rank.worker.take_finished() == (set(), set()), "launched, and not done"
    copies.step()
    assert int(np.count_nonzero(rank.memory.content == 9)) == len(rank.stored) // 8, "the mark is behind the copies"
    copies.run()
    assert rank.finished() == ({"r"}, set())


def test_shutdown_waits_for_copies_under_way(on_streams: tuple[Rank, FakeStream, FakeStream]) -> None:
    rank, engine, copies = on_streams
    rank.step(OffloadStep(loads=[LoadOrder("r", 2, whole([3], [9]))]))
    engine.run()
    await_batch(copies)
    closing = threading.Thread(target=rank.worker.shutdown)
    closing.start()
    time.sleep(0.3)
    assert closing.is_alive()
    assert standin_driver.pinned, "a copy may still write there"
    copies.run()
    closing.join(20)
    assert not closing.is_alive()
    assert not standin_driver.pinned


def test_a_copy_that_is_given_up_ends_when_the_device_has_ended_it(
    on_streams: tuple[Rank, FakeStream, FakeStream],
) -> None:
    rank, engine, copies = on_streams
    rank.step(OffloadStep(loads=[LoadOrder("r", 2, whole([3], [9]))]))
    engine.run()
    await_batch(copies)
    assert rank.worker._executor is not None
    rank.worker._executor.cancel("load 2", KVFerryError(Reason.ABORTED, "given up."))
    time.sleep(0.1)
    assert rank.worker.take_finished() == (set(), set()), "its block may still be written"
    copies.run()
    assert rank.finished() == ({"r"}, {"r"})


def test_a_refused_batch_fails_its_job_once_its_launched_part_has_ended(
    on_streams: tuple[Rank, FakeStream, FakeStream], caplog: pytest.LogCaptureFixture
) -> None:
    rank, engine, copies = on_streams
    standin_driver.failures.append(standin_driver.ILLEGAL_ADDRESS)
    rank.step(OffloadStep(loads=[LoadOrder("bad", 2, whole([3, 4], [9, 8]))]))
    engine.run()
    await_batch(copies)
    time.sleep(0.05)
    assert rank.worker.take_finished() == (set(), set()), "a part of the batch was launched"
    copies.run()
    assert rank.finished() == ({"bad"}, {"bad"})
    assert "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in caplog.text
    assert "transfer-failed" in caplog.text
    rank.step(OffloadStep(loads=[LoadOrder("good", 3, whole([3], [9]))]))
    run_until(lambda: rank.worker.take_finished() == ({"good"}, set()), engine, copies)


def test_a_refused_store_is_no_block(on_streams: tuple[Rank, FakeStream, FakeStream]) -> None:
    rank, engine, copies = on_streams
    standin_driver.failures[:] = [standin_driver.INVALID_VALUE]
    rank.step(OffloadStep(stores=[StoreOrder(1, whole([5], [3])), StoreOrder(2, whole([6], [0]))]))
    reports = RankReport()

    def is_reported() -> bool:
        nonlocal reports
        rank.worker.take_finished()
        reports = reports.aggregate(rank.worker.take_report() or RankReport())
        return len(reports.stored) + len(reports.failed) == 2

    run_until(is_reported, engine, copies)
    assert (dict(reports.stored), dict(reports.failed)) == ({2: 1}, {1: 1})


def test_a_device_that_fails_ends_its_copies_and_none_is_believed(
    on_streams: tuple[Rank, FakeStream, FakeStream], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ..local.fake_cuda import FakeEvent

    rank, engine, _ = on_streams
    rank.step(OffloadStep(loads=[LoadOrder("r", 2, whole([3], [9]))]))
    engine.run()
    wait_until(lambda: bool(standin_driver.batches))

    def failed(_: FakeEvent) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(FakeEvent, "query", failed)
        assert rank.finished() == ({"r"}, {"r"})
    assert f"{DEVICE} has failed" in caplog.text


def test_a_large_store_lets_a_load_go_first(
    on_streams: tuple[Rank, FakeStream, FakeStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, engine, copies = on_streams
    monkeypatch.setattr(local_copy, "BATCH_ROWS", 1)
    rank.step(OffloadStep(stores=[StoreOrder(1, whole([5, 6, 7, 8], [3, 0, 1, 2]))]))
    engine.run()
    wait_until(lambda: len(standin_driver.batches) == local_copy.LAUNCHES_IN_FLIGHT)
    time.sleep(0.05)
    assert len(standin_driver.batches) == 2, "no more is launched than is done"
    rank.step(OffloadStep(loads=[LoadOrder("r", 2, whole([3], [9]))]))
    engine.run()
    wait_until(lambda: len(standin_driver.batches) == 4, "the load's first two batches")
    run_until(lambda: "r" in rank.worker.take_finished()[0], copies)
    assert rank.worker.take_report() is None, "the store is not done"
    run_until(lambda: bool(rank.worker.take_finished() and rank.worker._report.stored), engine, copies)


# What the driver of a machine may refuse.


def test_an_engine_whose_slab_cannot_be_pinned_serves_without_offload(make_rank: Callable[..., Rank]) -> None:
    rank = make_rank(ImmediateOrder())
    standin_driver.refuses_to_pin = True
    report = rank.open()
    assert report.num_ready == 0
    assert "cannot be pinned" in report.refused
    assert "CUDA_ERROR_INVALID_VALUE" in report.refused
    rank.step(OffloadStep(stores=[StoreOrder(1, whole([1], [1]))], loads=[LoadOrder("r", 2, whole([1], [1]))]))
    assert rank.finished() == ({"r"}, {"r"})
    assert rank.worker.take_report() == RankReport(failed={1: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("driver", ["of CUDA 11", "of CUDA 12.0"])
def test_a_driver_without_batches_is_refused(driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {"cuGetProcAddress_v2": lambda *_: 500} if driver == "of CUDA 12.0" else {}
    monkeypatch.setattr(device_module, "_load", lambda _: SimpleNamespace(**functions))
    with pytest.raises(TransportError, match=r"cuMemcpyBatchAsync.*CUDA 12\.8") as caught:
        HostCopies(DEVICE)
    assert caught.value.reason is Reason.UNSUPPORTED


def test_copies_need_a_context_of_the_thread_that_makes_them() -> None:
    found: list[str] = []

    def make() -> None:
        try:
            HostCopies(DEVICE)
        except TransportError as error:
            found.append(error.message)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert ["no CUDA context" in each for each in found] == [True]


def test_a_copy_outside_pinned_memory_is_the_drivers_error() -> None:
    rank, slab = DeviceMemory(4096), SlabMemory(4096)
    copies = HostCopies(DEVICE)
    rows = np.array([[slab.region.base_address, rank.region.base_address, 64]], np.uint64)
    with pytest.raises(TransportError, match="copy 0 of 1") as caught:
        copies.launch(rows, standin_driver.IMMEDIATE)
    assert caught.value.reason is Reason.TRANSFER_FAILED
    slab.close()


# The trial at start.


def trial_of(shard: Shard) -> tuple[SlabTrial, DeviceMemory, Executor]:
    memory = DeviceMemory(shard.regions[0].length)
    memory.content[:] = np.random.default_rng(3).integers(0, 256, memory.nbytes, np.uint8)
    shard = placed(shard, memory)
    executor = Executor(order=ImmediateOrder())
    return SlabTrial(shard, views_of(shard, memory), ImmediateOrder(), executor, NamedLayout.BLHNC), memory, executor


@pytest.mark.parametrize("name", SHARDS)
def test_the_trial_passes_and_leaves_every_byte_as_it_was(name: str) -> None:
    trial, memory, executor = trial_of(SHARDS[name]())
    before = memory.content.copy()
    result = trial.run()
    assert np.array_equal(memory.content, before)
    assert result.num_bytes > 0
    assert len(standin_driver.batches) == 2
    assert not standin_driver.pinned
    executor.close()


def failing(trial: SlabTrial, memory: DeviceMemory, executor: Executor) -> TransportError:
    before = memory.content.copy()
    with pytest.raises(TransportError) as caught:
        trial.run()
    executor.close()
    assert caught.value.reason is Reason.TRIAL_FAILED
    assert np.array_equal(memory.content, before)
    assert "layout BLHNC" in caught.value.message
    return caught.value


def test_copies_that_move_nothing_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standin_driver, "_move", lambda _: None)
    assert "bytes are wrong" in failing(*trial_of(attention(0, 1, ["0", "1"]))).message


def test_a_shard_that_says_the_wrong_place_is_found_through_the_engines_views() -> None:
    trial, memory, executor = trial_of(attention(0, 1, ["0", "1", "2"]))
    views: Any = trial._views
    last = views["2"]
    longer = tensor_at(memory.region.base_address, memory.nbytes + 2)  # the mapping ends with a page
    views["2"] = torch.as_strided(longer, last.shape, last.stride(), last.storage_offset() + 2)
    with pytest.raises(TransportError, match=r"layout BLHNC.*bytes are wrong") as caught:
        trial.run()
    executor.close()
    assert caught.value.reason is Reason.TRIAL_FAILED


def test_memory_that_cannot_be_pinned_ends_the_trial_with_its_reason() -> None:
    standin_driver.refuses_to_pin = True
    error = failing(*trial_of(attention(0, 1, ["0", "1"])))
    assert "cannot be pinned" in error.message
    assert "memlock" in error.remedy


def test_copies_that_never_end_end_the_trial_and_keep_their_memory(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, memory, executor = trial_of(attention(0, 1, ["0", "1"]))
    executor.close()
    stuck = Executor(order=CudaOrder(DEVICE, cuda))
    copies = cuda.streams[-1]
    standin_driver.streams[copies.cuda_stream] = copies
    order: Any = CudaOrder(DEVICE, cuda)
    trial = SlabTrial(trial._shard, trial._views, order, stuck, NamedLayout.BLHNC)

    def collect(_: float) -> list[Any]:
        wait_until(lambda: bool(standin_driver.batches))
        return []

    monkeypatch.setattr(stuck, "collect", collect)
    close = stuck.close
    monkeypatch.setattr(stuck, "close", lambda: close(0.2))
    engine = cuda.current_stream(DEVICE)
    runs = threading.Event()

    def run_engine() -> None:
        cuda.set_device(DEVICE)
        while not runs.wait(0.01):
            engine.run()

    thread = threading.Thread(target=run_engine)
    thread.start()
    try:
        assert "did not arrive" in failing(trial, memory, stuck).message
    finally:
        runs.set()
        thread.join()
    assert standin_driver.pinned, "the device may still write there"
    copies.run()


def test_an_engine_on_a_device_runs_the_trial_before_it_is_ready(
    make_rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank(ImmediateOrder())
    assert not rank.memory.content.any()
    assert len(standin_driver.batches) == 2
    assert standin_kernel.launches[-2:] == [True, False], "short pieces pass the buffer"
    assert rank.open() == RankReport(num_ready=1)
    monkeypatch.setattr(standin_driver, "_move", lambda _: None)
    with pytest.raises(TransportError) as caught:
        make_rank(ImmediateOrder(), hybrid(0, 1))
    assert caught.value.reason is Reason.TRIAL_FAILED


@pytest.mark.parametrize("layout", NamedLayout)
def test_doctor_tries_offload_in_every_layout(layout: NamedLayout) -> None:
    assert try_offload(ImmediateOrder(), layout).num_bytes > 0
    assert torch.get_num_threads() == 1
