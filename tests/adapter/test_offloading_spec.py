"""``KVFerryOffloadingSpec`` behind vLLM's own ``OffloadingConnector``: vLLM's classes, real bytes, no model."""

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from kvferry.errors import KVFerryError, Reason, SettingsError, TierError, TransportError
from kvferry.integrations.vllm import plugin
from kvferry.integrations.vllm.offloading_spec import HostManager, HostWorker, KVFerryOffloadingSpec
from kvferry.integrations.vllm.versions import cache_hit_source
from kvferry.tiers.eviction import Eviction

from .label_engine import LabelEngine
from .model_files import write_model
from .test_offload_names import LAYERS, attention, window
from .vllm_caches import CacheRank

UNIFORM = dict.fromkeys(LAYERS, attention())
HYBRID = {name: window() if index % 2 else attention() for index, name in enumerate(LAYERS)}
PROMPT = [(7 * index + 3) % 500 for index in range(90)]
SOURCES_SETTINGS = {"spec_name": plugin.SPEC_NAME, "spec_module_path": plugin.SPEC_MODULE, "num_cpu_blocks": 40}


# The settings of the sources, through vLLM's scheduler and connector.


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[Callable[..., LabelEngine]]:
    """Return a function that makes an engine behind ``OffloadingConnector`` with this spec."""
    model = write_model(tmp_path / "model")
    made: list[LabelEngine] = []

    def make(specs: dict[str, Any] = UNIFORM, layout: str = "LBHNC", **given: Any) -> LabelEngine:
        engine_arguments = {name: given.pop(name) for name in ("asynchronous", "kv_events_config") if name in given}
        extra = SOURCES_SETTINGS | given
        transfer = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
        # Two prompts at a time do not fit.
        rank = CacheRank(specs, layout, num_blocks=12 if specs is UNIFORM else 18)
        made.append(LabelEngine(rank, model, transfer, layout=layout, **engine_arguments))
        return made[-1]

    yield make
    for engine in made:
        engine.shutdown()


CASES: dict[str, dict[str, Any]] = {
    "one block a chunk": {},
    "two blocks a chunk": {"block_size": 32},
    "a chunk of whole rows": {"block_size": 32, "layout": "BLHNC"},
    "rows by head": {"block_size": 32, "layout": "BHLNC"},
    "s3-fifo": {"eviction_policy": "s3-fifo"},
    "windows": {"specs": HYBRID},
    "windows in rows": {"specs": HYBRID, "layout": "BLHNC"},
}
PROMPTS = {f"p{index}": [index, *PROMPT[index:], *range(index)] for index in range(5)}


def one_by_one(engine: LabelEngine, suffix: str = "") -> dict[str, list[int]]:
    """Run the prompts one after the other, each with an empty prefix cache of the engine."""
    found = {}
    for name, prompt in PROMPTS.items():
        engine.forget()
        found[name] = engine.run(**{name + suffix: prompt})[name + suffix]
    return found


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", CASES)
def test_the_second_pass_loads_and_gives_the_same_tokens(
    name: str, asynchronous: bool, make_engine: Callable[..., LabelEngine]
) -> None:
    engine = make_engine(asynchronous=asynchronous, **CASES[name])
    first = one_by_one(engine)
    in_first = engine.num_computed
    assert in_first >= 5 * len(PROMPT)
    assert first == {name: true_tokens(engine, prompt) for name, prompt in PROMPTS.items()}
    assert one_by_one(engine, "-again") == first
    # A prompt of 91 tokens has 5 whole blocks or 2 whole chunks of 32; 7 of 8 new tokens are computed.
    rest = len(PROMPT) + 1 - (80 if "block_size" not in CASES[name] else 64)
    assert engine.num_computed - in_first <= 5 * (rest + 8)


def true_tokens(engine: LabelEngine, prompt: list[int]) -> list[int]:
    """Return the tokens of a request that an engine computes on its own, without vLLM's scheduler or a connector."""
    return engine.tokens_without_cache(prompt, 8)


def test_a_byte_that_changes_in_host_memory_changes_the_tokens(make_engine: Callable[..., LabelEngine]) -> None:
    """The control of the test before: the second pass reads host memory."""
    engine = make_engine()
    first = one_by_one(engine)
    memory = worker_of(engine)._memory.region
    held = np.ctypeslib.as_array((ctypes.c_uint8 * memory.length).from_address(memory.base_address))
    held.view(np.float32)[:] += 1
    assert one_by_one(engine, "-again") != first


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_requests_at_a_time_preempt_one_another(asynchronous: bool, make_engine: Callable[..., LabelEngine]) -> None:
    """Three prompts of 6 blocks meet 11 blocks of the engine and 8 chunks: blocks are reused under stores."""
    engine = make_engine(asynchronous=asynchronous, num_cpu_blocks=8)
    expected = {name: true_tokens(engine, prompt) for name, prompt in PROMPTS.items()}
    for turn in range(4):
        found = engine.run(**{f"{name}-{turn}": prompt for name, prompt in PROMPTS.items()})
        assert {name.split("-")[0]: tokens for name, tokens in found.items()} == expected
    assert manager_of(engine)._stores == manager_of(engine)._loads == {}
    assert manager_of(engine)._host.snapshot()["num_pinned"] == 0


def test_a_reset_forgets_what_was_stored(make_engine: Callable[..., LabelEngine]) -> None:
    """The weights may have changed: nothing of before is loaded."""
    engine = make_engine()
    one_by_one(engine)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    before = engine.num_computed
    one_by_one(engine, "-again")
    assert engine.num_computed - before >= 5 * len(PROMPT)


def test_a_longer_prompt_than_host_memory_is_stored_as_far_as_it_fits(
    make_engine: Callable[..., LabelEngine],
) -> None:
    """VLLM's own manager stores nothing of it, and is asked again in each step."""
    engine = make_engine(num_cpu_blocks=3)
    engine.run(one=PROMPT)
    engine.forget()
    before = engine.num_computed
    engine.run(again=PROMPT)
    assert engine.num_computed - before == len(PROMPT) - 3 * 16 + 7


def test_events_name_what_is_stored_and_evicted(make_engine: Callable[..., LabelEngine]) -> None:
    from vllm.config.kv_events import KVEventsConfig
    from vllm.distributed.kv_events import BlockRemoved, BlockStored

    engine = make_engine(num_cpu_blocks=6, kv_events_config=KVEventsConfig(enable_kv_cache_events=True))
    seen: list[Any] = []
    connector = engine.scheduler.connector
    taken = connector.take_events
    connector.take_events = lambda: seen.extend(found := list(taken())) or found
    one_by_one(engine)
    stored = [block for event in seen if isinstance(event, BlockStored) for block in event.block_hashes]
    removed = [block for event in seen if isinstance(event, BlockRemoved) for block in event.block_hashes]
    assert len(stored) == len(set(stored)) == 5 * 5
    assert set(removed) < set(stored)
    assert len(stored) - len(removed) == 6


def worker_of(engine: LabelEngine) -> HostWorker:
    found = engine.worker.connector_worker.worker
    assert isinstance(found, HostWorker)
    return found


def manager_of(engine: LabelEngine) -> HostManager:
    found = engine.scheduler.connector.connector_scheduler.manager
    assert isinstance(found, HostManager)
    return found


def test_the_plugin_makes_the_module_path_needless(make_engine: Callable[..., LabelEngine]) -> None:
    plugin.register()
    plugin.register()
    assert OffloadingSpecFactory.get_spec_cls({"spec_name": plugin.SPEC_NAME}) is KVFerryOffloadingSpec
    engine = make_engine(spec_module_path="")
    assert engine.run(one=PROMPT)["one"] == true_tokens(engine, PROMPT)


# Settings.


def offloading_config(
    num_groups: int = 1, blocks_per_chunk: int = 1, bytes_per_block: int = 1000, pp_size: int = 1, **extra: Any
) -> OffloadingConfig:
    return OffloadingConfig(
        groups=tuple(OffloadingGroupConfig(16, ("0",), index) for index in range(num_groups)),
        worker_kv_bytes_per_block=bytes_per_block,
        enable_kv_cache_events=False,
        extra_config=extra,
        engine_id="e",
        model=OffloadingModelConfig("m", "float32"),
        cache=OffloadingCacheConfig(16, blocks_per_chunk),
        parallel=OffloadingParallelConfig(0, 2 * pp_size, 2, pp_size, 1, 1, 0, 1, None, True),
    )


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"num_cpu_blocks": 0}, Reason.INVALID_SETTING),
        ({"num_cpu_blocks": "many"}, Reason.INVALID_SETTING),
        ({}, Reason.INVALID_SETTING),
        ({"num_cpu_blocks": 4, "cpu_bytes_to_use": 4000}, Reason.INVALID_SETTING),
        ({"cpu_bytes_to_use": 3999, "blocks_per_chunk": 2}, Reason.INVALID_SETTING),
        ({"num_cpu_blocks": 4, "eviction_policy": "arc"}, Reason.INVALID_SETTING),
        ({"num_cpu_blocks": 4, "num_cpu_block": 4}, Reason.UNKNOWN_SETTING),
        ({"num_cpu_blocks": 4, "secondary_tiers": []}, Reason.UNKNOWN_SETTING),
        ({"num_cpu_blocks": 4, "canonical_layout": True}, Reason.UNSUPPORTED),
        ({"num_cpu_blocks": 4, "num_groups": 2, "blocks_per_chunk": 2}, Reason.UNSUPPORTED),
        ({"cpu_bytes_to_use": 1 << 20, "pp_size": 2}, Reason.UNSUPPORTED),
        ({"cpu_bytes_to_use": 1 << 20, "bytes_per_block": 0}, Reason.UNSUPPORTED),
    ],
    ids=lambda value: str(value),
)
def test_settings_that_cannot_be_kept_are_refused(given: dict[str, Any], reason: Reason) -> None:
    with pytest.raises(SettingsError) as refused:
        KVFerryOffloadingSpec(offloading_config(**given))
    assert refused.value.reason is reason


def test_bytes_are_those_of_all_ranks() -> None:
    """Two ranks of 1,000 bytes a block, two blocks a chunk."""
    assert KVFerryOffloadingSpec(offloading_config(blocks_per_chunk=2, cpu_bytes_to_use=11_999)).num_chunks == 2


def test_caches_on_a_device_are_refused() -> None:
    cache = CanonicalKVCacheTensor(torch.empty((4, 8), dtype=torch.int8, device="meta"), 8)
    spec = KVFerryOffloadingSpec(offloading_config(num_cpu_blocks=4))
    with pytest.raises(SettingsError, match="meta") as refused:
        spec.get_worker(CanonicalKVCaches([cache], [[CanonicalKVCacheRef(0, 8)]]))
    assert refused.value.reason is Reason.UNSUPPORTED


# The manager.

REQUEST = ReqContext("r")


def key(number: int, group: int = 0) -> OffloadKey:
    return make_offload_key(number.to_bytes(32, "big"), group)


def stored(manager: HostManager, *numbers: int) -> None:
    output = manager.prepare_store([key(number) for number in numbers], REQUEST)
    assert output is not None
    manager.complete_store(set(output.keys_to_store), REQUEST)


def test_a_chunk_is_found_when_it_is_stored() -> None:
    manager = HostManager(4)
    assert manager.lookup(key(1), REQUEST) is LookupResult.MISS
    output = manager.prepare_store([key(1), key(2)], REQUEST)
    assert output is not None
    assert manager.lookup(key(1), REQUEST) is LookupResult.HIT_PENDING
    manager.complete_store(set(output.keys_to_store), REQUEST)
    assert manager.lookup(key(1), REQUEST) is LookupResult.HIT
    assert manager.lookup(key(1, group=1), REQUEST) is LookupResult.MISS
    assert manager.get_load_source(key(1), REQUEST) == cache_hit_source("HOST")
    spec = manager.prepare_load([key(2), key(1)], REQUEST)
    assert isinstance(spec, CPULoadStoreSpec)
    assert spec.chunk_ids.tolist() == output.store_spec.chunk_ids.tolist()[::-1]


def test_a_failed_store_frees_its_slots() -> None:
    manager = HostManager(2)
    assert manager.prepare_store([key(1), key(2)], REQUEST) is not None
    manager.complete_store({key(1), key(2)}, REQUEST, success=False)
    assert manager.lookup(key(1), REQUEST) is LookupResult.MISS
    stored(manager, 3, 4)
    assert manager.lookup(key(3), REQUEST) is LookupResult.HIT


def test_chunks_that_are_loaded_stay() -> None:
    """Two requests load one chunk: it may go after the second has ended."""
    manager = HostManager(2)
    stored(manager, 1, 2)
    for _ in range(2):
        manager.prepare_load([key(1)], REQUEST)
    stored(manager, 3)
    assert [manager.lookup(key(number), REQUEST) for number in (1, 2)] == [LookupResult.HIT, LookupResult.MISS]
    manager.prepare_load([key(3)], REQUEST)
    assert manager.prepare_store([key(4)], REQUEST) is None, "all slots are in use"
    manager.complete_load({key(1)}, REQUEST)
    assert manager.prepare_store([key(4)], REQUEST) is None
    manager.complete_load({key(1)}, REQUEST)
    stored(manager, 4)
    assert manager.lookup(key(1), REQUEST) is LookupResult.MISS


def test_what_is_stored_needs_no_store() -> None:
    manager = HostManager(2)
    stored(manager, 1)
    output = manager.prepare_store([key(1)], REQUEST)
    assert output is not None
    assert output.keys_to_store == output.evicted_keys == []
    twice = manager.prepare_store([key(2)], REQUEST), manager.prepare_store([key(2)], REQUEST)
    assert [found.keys_to_store for found in twice if found is not None] == [[key(2)], []]


def test_a_chunk_that_has_gone_is_not_loaded() -> None:
    manager = HostManager(1)
    stored(manager, 1)
    stored(manager, 2)
    with pytest.raises(TierError) as refused:
        manager.prepare_load([key(1)], REQUEST)
    assert refused.value.reason is Reason.BLOCK_MISSING
    assert manager._host.snapshot()["num_loads"] == 0


def test_the_end_of_a_prefix_goes_first() -> None:
    """The request has stored its beginning first."""
    manager, request = HostManager(3), ReqContext("s")
    for numbers in ((1, 2), (3,)):
        output = manager.prepare_store([key(number) for number in numbers], request)
        assert output is not None
        manager.complete_store(set(output.keys_to_store), request)
    manager.on_request_finished(request)
    stored(manager, 4)
    found = [manager.lookup(key(number), REQUEST) for number in (1, 2, 3)]
    assert found == [LookupResult.HIT, LookupResult.HIT, LookupResult.MISS]


def test_a_chunk_that_is_used_often_outlasts_new_ones_with_s3_fifo() -> None:
    manager = HostManager(10, Eviction.S3_FIFO)
    stored(manager, 1)
    for _ in range(2):
        manager.prepare_load([key(1)], REQUEST)
        manager.complete_load({key(1)}, REQUEST)
    for number in range(2, 30):
        stored(manager, number)
    assert manager.lookup(key(1), REQUEST) is LookupResult.HIT


def test_a_use_that_vllm_reports_counts() -> None:
    manager = HostManager(2)
    stored(manager, 1)
    stored(manager, 2)
    manager.touch([key(1)], REQUEST)
    stored(manager, 3)
    assert manager.lookup(key(1), REQUEST) is LookupResult.HIT


def test_events_of_the_manager() -> None:
    manager = HostManager(1, has_events=True)
    stored(manager, 1)
    stored(manager, 2)
    found = [(event.keys, event.medium, event.removed) for event in manager.take_events()]
    assert found == [([key(1)], Medium.CPU, False), ([key(1)], Medium.CPU, True), ([key(2)], Medium.CPU, False)]
    assert list(manager.take_events()) == []
    assert list(HostManager(1).take_events()) == []


def test_keys_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TierError) as refused:
        HostManager(1).lookup(OffloadKey(bytes(48)), REQUEST)
    assert refused.value.reason is Reason.INVALID_REQUEST


# The worker.


@pytest.fixture
def make_worker() -> Iterator[Callable[..., tuple[HostWorker, torch.Tensor]]]:
    """Return a function that makes a worker of two groups, which have two and one pages in padded rows of 24 bytes."""
    made: list[HostWorker] = []

    def make(blocks_per_chunk: int = 1, num_chunks: int = 4) -> tuple[HostWorker, torch.Tensor]:
        rows = torch.arange(10 * 24, dtype=torch.uint8).view(torch.int8).reshape(10, 24)
        tensors = [CanonicalKVCacheTensor(rows[:, begin : begin + 12], 12) for begin in (0, 12)]
        groups = [[CanonicalKVCacheRef(0, 10), CanonicalKVCacheRef(1, 12)], [CanonicalKVCacheRef(1, 7)]]
        made.append(HostWorker(CanonicalKVCaches(tensors, groups), blocks_per_chunk, num_chunks))
        return made[-1], rows

    yield make
    for worker in made:
        worker.shutdown()
        worker.shutdown()


def device(groups: list[list[int]], first: tuple[int, int] = (0, 0)) -> GPULoadStoreSpec:
    ids = [block for group in groups for block in group]
    return GPULoadStoreSpec(ids, [len(group) for group in groups], first)


def finish(worker: HostWorker, job_id: int) -> int:
    worker.wait({job_id, 99})
    (result,) = worker.get_finished()
    assert (result.job_id, result.success) == (job_id, True)
    assert worker.get_finished() == []
    assert result.transfer_size is not None
    return result.transfer_size


def test_pages_come_back_without_what_pads_them(make_worker: Callable[..., Any]) -> None:
    worker, rows = make_worker()
    before = rows.clone()
    assert worker.submit_store(1, device([[2, 3], [4]]), CPULoadStoreSpec([3, 0, 1]))
    assert finish(worker, 1) == 2 * (10 + 12) + 7
    rows[:] = 0
    assert worker.submit_load(2, CPULoadStoreSpec([0, 3, 1]), device([[5, 6], [7]]))
    assert finish(worker, 2) == 2 * (10 + 12) + 7
    expected = torch.zeros_like(rows)
    for destination, source in ((5, 3), (6, 2)):
        expected[destination, :10], expected[destination, 12:] = before[source, :10], before[source, 12:]
    expected[7, 12:19] = before[4, 12:19]
    assert torch.equal(rows, expected)


def test_a_chunk_is_contiguous(make_worker: Callable[..., Any]) -> None:
    worker, rows = make_worker(blocks_per_chunk=2)
    worker.submit_store(1, device([[8, 1], []]), CPULoadStoreSpec([2]))
    finish(worker, 1)
    begin = worker._memory.region.base_address + 2 * 2 * worker.block_bytes
    expected = b"".join(rows[block, :10].numpy().tobytes() + rows[block, 12:].numpy().tobytes() for block in (8, 1))
    assert ctypes.string_at(begin, 2 * worker.block_bytes) == expected


def test_a_load_may_begin_and_end_within_a_chunk(make_worker: Callable[..., Any]) -> None:
    worker, rows = make_worker(blocks_per_chunk=3, num_chunks=2)
    before = rows.clone()
    worker.submit_store(1, device([[0, 1, 2, 3, 4, 5], []]), CPULoadStoreSpec([1, 0]))
    finish(worker, 1)
    worker.submit_load(2, CPULoadStoreSpec([1, 0]), device([[7, 8, 9], []], (2, 0)))
    finish(worker, 2)
    assert torch.equal(rows[7:, :10], before[2:5, :10])
    assert torch.equal(rows[7:, 12:], before[2:5, 12:])
    assert torch.equal(rows[:7], before[:7])


def test_blocks_that_were_never_stored_are_not_loaded(make_worker: Callable[..., Any]) -> None:
    """A window had left the first block of the chunk; the chunk was whole before and is stored again."""
    worker, rows = make_worker(blocks_per_chunk=2)
    worker.submit_store(1, device([[0, 1], []]), CPULoadStoreSpec([2]))
    worker.submit_store(2, device([[5], []], (1, 0)), CPULoadStoreSpec([2]))
    with pytest.raises(TierError) as refused:
        worker.submit_load(3, CPULoadStoreSpec([2]), device([[6, 7], []]))
    assert refused.value.reason is Reason.BLOCK_MISSING
    worker.submit_load(4, CPULoadStoreSpec([2]), device([[7], []], (1, 0)))
    worker.wait({1, 2, 4})
    assert {result.job_id for result in worker.get_finished()} == {1, 2, 4}
    assert torch.equal(rows[7, :10], rows[5, :10])


def test_orders_that_cannot_be_are_refused(make_worker: Callable[..., Any]) -> None:
    worker, _ = make_worker(blocks_per_chunk=2)
    with pytest.raises(TierError) as refused:
        worker.submit_store(1, device([[1, 2, 3], []]), CPULoadStoreSpec([0]))
    assert refused.value.reason is Reason.INVALID_REQUEST
    with pytest.raises(TransportError) as outside:
        worker.submit_store(2, device([[1000, 1001], []]), CPULoadStoreSpec([0]))
    assert outside.value.reason is Reason.UNREGISTERED_RANGE
    assert worker.get_finished() == []


def test_a_copy_that_fails_ends_the_engine_with_its_reason(
    make_worker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM asserts success, and says nothing of what has failed."""
    worker, _ = make_worker()
    error = TransportError(Reason.TRANSFER_FAILED, "the copy failed.")
    monkeypatch.setattr(worker._transport, "_advance", lambda transfer: transfer.fail(error))
    worker.submit_store(1, device([[1], []]), CPULoadStoreSpec([0]))
    worker.wait({1})
    with pytest.raises(TransportError, match="the copy failed"):
        worker.get_finished()


def test_more_memory_than_there_is_is_refused(make_worker: Callable[..., Any]) -> None:
    with pytest.raises(KVFerryError) as refused:
        make_worker(num_chunks=1 << 40)
    assert refused.value.reason is Reason.TIER_FAILED
