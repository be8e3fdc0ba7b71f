"""Offload's copies on a real device: stores and loads through a pinned slab, behind kernels that still run."""

import ctypes
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvferry.arrays import Bytes
from kvferry.execution.device import OVER, Mark, device_order
from kvferry.execution.device_gather import GatherBuffer, take_buffer
from kvferry.execution.executor import Executor, JobResult
from kvferry.execution.local_copy import BATCH_BYTES, LocalCopy, LocalRoute, PinnedMemory
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import CacheKind, Region, Shard
from kvferry.layout.slab import slab_shard
from kvferry.plan.match import GroupBlocks
from kvferry.tiers.slab_memory import SlabMemory

from ..local.test_local_copy import CASES, Copies, Ranks
from ..support.dense import shard_for
from ..support.oracle import RankMemory, strided_memory
from ..support.transport_memory import CudaMemory

DEVICE = CudaMemory.device
CLOCK_CYCLES = 500_000_000
"""A kernel that waits so long takes some tenths of a second."""


class GpuCopies(Copies):
    """Engines on the device, a slab in pinned host memory. The oracle labels copies of the engines' memory."""

    def __init__(
        self, stores: Ranks, loads: Ranks, engine_blocks: int = 1, selector: int = 0, half_bytes: int = 0
    ) -> None:
        self.order = device_order([DEVICE])
        self.on_device: list[tuple[CudaMemory, Bytes]] = []
        super().__init__(stores, loads, engine_blocks, selector)
        address = int(self.buffer.ctypes.data)
        begin = address // 4096 * 4096
        # Not a page more: it may not be mapped, and then cannot be pinned.
        gather = GatherBuffer(self.order, half_bytes) if half_bytes else None
        self.pinned = PinnedMemory(Region(begin, address + self.buffer.nbytes - begin), self.order, gather)
        self.copying = self.pinned.copying

    def placed(self, shard: Shard) -> RankMemory:
        rank = strided_memory(self, shard)
        [mirror] = rank.regions
        memory = CudaMemory(mirror.nbytes)
        self.on_device.append((memory, mirror))
        return RankMemory(msgspec.structs.replace(rank.shard, regions=(memory.region,)), rank.regions, rank.views)

    def move(self, rows: npt.NDArray[np.uint64]) -> None:
        for memory, mirror in self.on_device:
            memory.put(mirror)
        super().move(rows)
        for memory, mirror in self.on_device:
            mirror[:] = memory.get()

    def close(self) -> None:
        assert self.executor.close()
        self.pinned.close()


@pytest.fixture
def opened() -> Iterator[list[GpuCopies]]:
    found: list[GpuCopies] = []
    yield found
    for copies in found:
        copies.close()


HALVES = [0, 1 << 11, 1 << 20]
"""Half of the buffer for short pieces: none, one that most blocks exceed, and one for all."""


@pytest.mark.parametrize("half_bytes", HALVES)
@pytest.mark.parametrize("case", CASES)
def test_stored_blocks_are_loaded_byte_by_byte(case: str, half_bytes: int, opened: list[GpuCopies]) -> None:
    opened.append(copies := GpuCopies(*CASES[case], selector=3, half_bytes=half_bytes))
    copies.check()
    assert {result.transport for result in (*copies.stored, *copies.loaded)} == {"cuda"}


@pytest.mark.parametrize("half_bytes", HALVES[:2])
@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 2), (2, 1)])
def test_windows(source_tp: int, target_tp: int, half_bytes: int, opened: list[GpuCopies]) -> None:
    stores, loads = (Ranks(tp=tp, kind=CacheKind.SLIDING_WINDOW, window=16) for tp in (source_tp, target_tp))
    opened.append(copies := GpuCopies(stores, loads, half_bytes=half_bytes))
    copies.check()


@pytest.mark.parametrize("layout", NamedLayout)
@pytest.mark.parametrize("kind", [CacheKind.ATTENTION, CacheKind.MLA])
def test_every_layout_through_the_buffer(layout: NamedLayout, kind: CacheKind, opened: list[GpuCopies]) -> None:
    stores, loads = (Ranks(tp=tp, layout=layout, kind=kind) for tp in (2, 1))
    opened.append(copies := GpuCopies(stores, loads, half_bytes=1 << 11))
    copies.check()


class Engine:
    """A cache of 16 blocks of 32 MiB on the device, and a slab of as many in pinned host memory.

    In ``LBNHC`` the pieces are of 512 bytes, and pass the buffer that an engine takes.
    """

    def __init__(self, layout: NamedLayout) -> None:
        sizes = {"num_kv_heads": 8, "head_size": 128, "itemsize": 2, "block_size": 256, "num_blocks": 16}
        shard = shard_for(layers=[str(layer) for layer in range(32)], layout=layout, **sizes)  # type: ignore[arg-type]
        self.cache = CudaMemory(shard.regions[0].length)
        self.shard = msgspec.structs.replace(shard, regions=(self.cache.region,))
        slab = slab_shard([self.shard], {"full": 16})
        self.slab = SlabMemory(slab.regions[0].length)
        slab = msgspec.structs.replace(slab, regions=(self.slab.region,))
        self.stores, self.loads = LocalRoute([self.shard], slab, own=[0]), LocalRoute([slab], self.shard, own=[0])
        self.order = device_order([DEVICE])
        self.gather = take_buffer(self.order)
        assert self.gather is not None, "the log says why"
        self.pinned = PinnedMemory(self.slab.region, self.order, self.gather)
        self.executor = Executor(order=self.order)
        region = self.slab.region
        memory = (ctypes.c_uint8 * region.length).from_address(region.base_address)
        self.stored: Bytes = np.ctypeslib.as_array(memory)

    def submit(
        self, job_id: str, source: Sequence[int], destination: Sequence[int], after: Mark, *, is_load: bool
    ) -> None:
        blocks = GroupBlocks(
            group="full",
            first_token=0,
            last_token=256 * len(source),
            source_block_ids=source,
            destination_block_ids=destination,
        )
        route = self.loads if is_load else self.stores
        self.executor.submit(LocalCopy(job_id, route, 0, [blocks], after, self.pinned.copying, fills_blocks=is_load))

    def copy(self, source: Sequence[int], destination: Sequence[int], after: Mark, *, is_load: bool) -> JobResult:
        self.submit("copy", source, destination, after, is_load=is_load)
        [result] = self.executor.collect(60.0)
        assert result.error is None, result.error
        return result

    def close(self) -> None:
        assert self.executor.close()
        self.pinned.close()
        del self.stored
        self.slab.close()


@pytest.fixture(params=[NamedLayout.BHLNC, NamedLayout.LBNHC])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    found = Engine(request.param)
    yield found
    found.close()


@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_store_has_what_the_kernels_before_it_write(engine: Engine, is_ordered: bool) -> None:
    """Without the wait the store has what was there before: so the wait is what orders them."""
    torch.cuda._sleep(CLOCK_CYCLES)  # type: ignore[no-untyped-call]
    engine.cache.tensor.fill_(7)
    engine.copy([3, 1], [2, 9], engine.order.mark() if is_ordered else OVER, is_load=False)
    block = len(engine.stored) // 16
    assert (engine.stored[2 * block : 3 * block] == (7 if is_ordered else 0)).all()
    torch.cuda.synchronize(DEVICE)
    assert int(np.count_nonzero(engine.stored)) == (2 * block if is_ordered else 0)


@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_load_outlasts_what_was_launched_before_it(engine: Engine, is_ordered: bool) -> None:
    """The engine clears blocks before it gives them to a load."""
    engine.stored[:] = 9
    torch.cuda._sleep(CLOCK_CYCLES)  # type: ignore[no-untyped-call]
    engine.cache.tensor.zero_()
    engine.copy([3, 1], [2, 9], engine.order.mark() if is_ordered else OVER, is_load=True)
    # Launched after the load was reported, as the engine's next step is.
    found = engine.cache.get()
    assert int(np.count_nonzero(found == 9)) == (2 * len(found) // 16 if is_ordered else 0)


def test_many_batches_move_every_byte(engine: Engine) -> None:
    content = np.random.default_rng(0).integers(0, 256, engine.cache.tensor.numel(), np.uint8)
    assert len(content) > 4 * BATCH_BYTES
    engine.cache.put(content)
    ids = np.random.default_rng(1).permutation(16).tolist()
    engine.copy(ids, list(range(16)), engine.order.mark(), is_load=False)
    engine.cache.put(np.zeros(len(content), np.uint8))
    engine.copy(list(range(16)), ids, engine.order.mark(), is_load=True)
    assert np.array_equal(engine.cache.get(), content)


def test_a_store_and_a_load_share_the_buffer(engine: Engine) -> None:
    """Both at once, by turns of one thread; the engine's stream is busy, and waits for neither."""
    half = engine.cache.tensor.numel() // 2
    content = np.random.default_rng(0).integers(0, 256, 2 * half, np.uint8)
    engine.cache.put(content)
    engine.copy(list(range(16)), list(range(16)), engine.order.mark(), is_load=False)
    stored = engine.stored.copy()
    engine.cache.tensor.zero_()
    engine.submit("load", list(range(8)), list(range(8)), engine.order.mark(), is_load=True)
    engine.submit("store", list(range(8, 16)), list(range(8, 16)), engine.order.mark(), is_load=False)
    found = engine.executor.collect(60.0)
    found += engine.executor.collect(60.0) if len(found) < 2 else []
    assert [result.error for result in found] == [None, None]
    assert np.array_equal(engine.stored[:half], stored[:half])
    assert not engine.stored[half:].any()
    engine.copy(list(range(8)), list(range(8, 16)), engine.order.mark(), is_load=False)
    assert np.array_equal(engine.stored[half:], stored[:half])
