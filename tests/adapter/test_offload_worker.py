"""The offload connector in its workers: real caches and a real slab; each rank is a worker role of its own."""

import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvferry.errors import TransportError
from kvferry.execution.local_copy import LocalCopy
from kvferry.integrations.vllm.offload_settings import OffloadSettings
from kvferry.integrations.vllm.offload_step import LoadOrder, OffloadStep, RankReport, SlabOrder, StoreOrder
from kvferry.integrations.vllm.worker import offload as worker_offload
from kvferry.integrations.vllm.worker.offload import OffloadWorker
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import CacheKind, decode_shard
from kvferry.layout.slab import slab_shard
from kvferry.plan.match import GroupBlocks
from kvferry.tiers.slab_memory import SlabHandle, SlabMemory

from ..support.dense import shard_for
from ..support.oracle import Arena, RankMemory, strided_memory

BLOCK_SIZE, SLAB_BLOCKS = 4, 8
FAR = 10.0


def memory(arena: Arena, tp: int, pp: int = 1, kind: CacheKind = CacheKind.ATTENTION) -> list[RankMemory]:
    return [
        strided_memory(
            arena,
            shard_for(
                layers=[str(stage)] if pp > 1 else ["0", "1"],
                num_kv_heads=1 if kind is CacheKind.MLA else 2,
                head_size=8,
                itemsize=4,
                block_size=BLOCK_SIZE,
                num_blocks=10,
                layout=NamedLayout.LBHNC,
                kind=kind,
                tp_rank=rank,
                tp_size=tp,
                pp_rank=stage,
                pp_size=pp,
            ),
        )
        for stage in range(pp)
        for rank in range(tp)
    ]


def blocks(source: Sequence[int], destination: Sequence[int]) -> tuple[GroupBlocks, ...]:
    return (
        GroupBlocks(
            group="full",
            first_token=0,
            last_token=len(source) * BLOCK_SIZE,
            source_block_ids=source,
            destination_block_ids=destination,
        ),
    )


def hold_copies(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Let copies hang, for 20 s at most; return what is set when one has begun, and what lets them go on."""
    began, may_end, advance = threading.Event(), threading.Event(), LocalCopy.advance

    def hangs(copy: LocalCopy, *arguments: Any) -> bool:
        began.set()
        may_end.wait(20)
        return advance(copy, *arguments)

    monkeypatch.setattr(LocalCopy, "advance", hangs)
    return began, may_end


class Engine:
    """The workers of one engine."""

    def __init__(self, ranks: list[RankMemory]) -> None:
        self.memory = ranks
        with pytest.MonkeyPatch.context() as patch:
            self.workers = [self._worker(patch, rank) for rank in ranks]

    def _worker(self, patch: pytest.MonkeyPatch, rank: RankMemory) -> OffloadWorker:
        stage = SimpleNamespace(rank_in_group=rank.shard.pp_rank)
        patch.setattr(worker_offload, "get_tensor_model_parallel_rank", lambda: rank.shard.tp_rank)
        patch.setattr(worker_offload, "get_pp_group", lambda: stage)
        patch.setattr(worker_offload, "register_caches", lambda *_: rank.shard)
        config: Any = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=rank.shard.tp_size))
        worker = OffloadWorker(config, SimpleNamespace(), OffloadSettings(host_bytes=1))  # type: ignore[arg-type]
        worker.register_kv_caches({})
        return worker

    def open(self, handle: SlabHandle | None = None) -> RankReport:
        """Take the shards, map the slab, and return the report of all ranks."""
        shards = self.report().shards
        order = [shards[key] for key in sorted(shards)]
        counts = {"full": SLAB_BLOCKS}
        slab = slab_shard([decode_shard(shard) for shard in order], counts)
        self.slab = SlabMemory(slab.regions[0].length)
        self.bytes = np.ctypeslib.as_array(
            (np.ctypeslib.ctypes.c_uint8 * self.slab.region.length).from_address(self.slab.region.base_address)
        )
        self.step(OffloadStep(slab=SlabOrder(handle or self.slab.handle, tuple(order), counts, 1)))
        return self.report()

    def step(self, orders: OffloadStep, *, fails: bool = False) -> None:
        for worker in self.workers:
            worker.begin_step(orders)
            worker.start_loads(orders)
            worker.finish_step(orders, has_failed=fails)

    def report(self) -> RankReport:
        report = RankReport()
        for worker in self.workers:
            report = report.aggregate(worker.take_report() or RankReport())
        return report

    def finished(self) -> list[tuple[set[str], set[str]]]:
        """Return what each rank reports once its copies have ended."""
        found = [worker.take_finished(FAR) for worker in self.workers]
        assert not any(worker._orders for worker in self.workers)
        return found

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
            worker.shutdown()


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    opened: list[Engine] = []
    yield opened
    for engine in opened:
        engine.close()


ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "one": {"tp": 1},
    "tp2": {"tp": 2},
    "replicated": {"tp": 4},
    "pp2": {"tp": 1, "pp": 2},
    "mla": {"tp": 2, "kind": CacheKind.MLA},
}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_blocks_come_back_from_the_slab(arrangement: str, engines: list[Engine]) -> None:
    arena = Arena(1 << 18)
    engines.append(engine := Engine(memory(arena, **ARRANGEMENTS[arrangement])))
    number = len(engine.workers)
    assert engine.open() == RankReport(num_ready=number)
    arena.buffer[:] = np.random.default_rng(0).integers(0, 256, len(arena.buffer), dtype=np.uint8)
    if arrangement in ("replicated", "mla"):  # a replica holds what its copy holds
        for rank in engine.memory[1:]:
            if arrangement == "mla" or rank.shard.groups[0].components[0].heads != heads_of(engine.memory[0]):
                continue
            rank.regions[0][:] = engine.memory[0].regions[0]
        if arrangement == "replicated":
            engine.memory[3].regions[0][:] = engine.memory[2].regions[0]
        else:
            engine.memory[1].regions[0][:] = engine.memory[0].regions[0]
    before = [view[5].copy() for rank in engine.memory for view in rank.views.values()]

    engine.step(OffloadStep(stores=[StoreOrder(7, blocks([5, 6], [3, 0]))]))
    assert engine.finished() == [(set(), set())] * number
    assert engine.report() == RankReport(stored={7: number})  # type: ignore[arg-type]
    arena.buffer[:] = 0
    engine.step(OffloadStep(computes=False, loads=[LoadOrder("r", 8, blocks([3], [9]))]))
    assert engine.finished() == [({"r"}, set())] * number
    after = [view[9].copy() for rank in engine.memory for view in rank.views.values()]
    assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))
    written = sum(int(np.count_nonzero(view)) for rank in engine.memory for view in rank.views.values())
    assert written == sum(int(np.count_nonzero(view)) for view in after), "other blocks were written"


def heads_of(rank: RankMemory) -> Any:
    return rank.shard.groups[0].components[0].heads


def test_the_shards_are_reported_once(engines: list[Engine]) -> None:
    engines.append(engine := Engine(memory(Arena(1 << 18), tp=2)))
    assert engine.report().shards.keys() == {(0, 0), (0, 1)}
    assert [worker.take_report() for worker in engine.workers] == [None, None]


def test_a_failed_step_stores_nothing(engines: list[Engine]) -> None:
    engines.append(engine := Engine(memory(Arena(1 << 18), tp=2)))
    engine.open()
    before = engine.bytes.copy()
    engine.memory[0].regions[0][:] = 1
    engine.step(OffloadStep(stores=[StoreOrder(3, blocks([1], [1]))]), fails=True)
    assert engine.report() == RankReport(failed={3: 2})  # type: ignore[arg-type]
    assert engine.finished() == [(set(), set())] * 2
    assert np.array_equal(engine.bytes, before)


def test_a_slab_that_is_gone_refuses_offload_and_fails_what_was_ordered(engines: list[Engine]) -> None:
    engines.append(engine := Engine(memory(Arena(1 << 18), tp=1)))
    gone = SlabMemory(1 << 12)
    handle = gone.handle
    gone.close()
    report = engine.open(handle)
    assert report.num_ready == 0
    assert "peer-changed" in report.refused
    engine.step(OffloadStep(stores=[StoreOrder(1, blocks([1], [1]))], loads=[LoadOrder("r", 2, blocks([1], [1]))]))
    assert engine.finished() == [({"r"}, {"r"})]
    assert engine.report() == RankReport(failed={1: 1})  # type: ignore[arg-type]


def test_a_slab_too_small_for_its_blocks_is_refused(engines: list[Engine]) -> None:
    engines.append(engine := Engine(memory(Arena(1 << 18), tp=1)))
    small = SlabMemory(1 << 10)
    report = engine.open(small.handle)
    small.close()
    assert (report.num_ready, "slab of 1024" in report.refused) == (0, True)


def test_a_copy_that_fails_is_reported_alone(engines: list[Engine], caplog: pytest.LogCaptureFixture) -> None:
    engines.append(engine := Engine(memory(Arena(1 << 18), tp=1)))
    engine.open()
    wrong, right = blocks([1], [99]), blocks([1], [1])
    engine.step(
        OffloadStep(
            stores=[StoreOrder(1, wrong), StoreOrder(2, right)],
            loads=[LoadOrder("bad", 3, wrong), LoadOrder("good", 4, right)],
        )
    )
    received, failed = set[str](), set[str]()
    while engine.workers[0]._orders:
        one, other = engine.workers[0].take_finished(FAR)
        received, failed = received | one, failed | other
    assert (received, failed) == ({"bad", "good"}, {"bad"})
    report = engine.report()
    assert (report.stored, report.failed) == ({2: 1}, {1: 1})
    assert "load 3" in caplog.text


def test_a_cache_on_a_device_without_cuda_is_refused() -> None:
    [rank] = memory(Arena(1 << 18), tp=1)
    regions = tuple(msgspec.structs.replace(region, device="xpu:0") for region in rank.shard.regions)
    moved = RankMemory(msgspec.structs.replace(rank.shard, regions=regions), rank.regions, rank.views)
    with pytest.raises(TransportError, match=r"xpu:0.*unsupported"):
        Engine([moved])
