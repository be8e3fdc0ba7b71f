"""What would give wrong tokens, keep memory for ever or end the engine core, and what the offload connector does."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker import kv_connector_model_runner_mixin as vllm_mixin

from kvferry.execution.executor import Executor
from kvferry.integrations.vllm.engine_core import IdleSteps
from kvferry.integrations.vllm.offload_connector import KVFerryOffloadConnector
from kvferry.integrations.vllm.offload_step import LoadOrder, OffloadStep, RankReport, StoreOrder
from kvferry.integrations.vllm.scheduler import offload_tiers
from kvferry.integrations.vllm.worker import offload as worker_offload
from kvferry.layout.shard import Region
from kvferry.tiers import local_disk
from kvferry.tiers.disk.segments import SegmentFiles

from ..support.dictionary_tier import DictionaryTier
from ..support.offload_state import stack_state
from ..support.oracle import Arena
from . import test_offload_worker as rank_tests
from .offload_engine import BLOCK_SIZE, Engine, prompt_of
from .test_offload_requests import configs, crowd_out, make_engine  # noqa: F401

# ruff: noqa: F811

# Ranks.


@pytest.fixture
def ranks() -> Iterator[rank_tests.Engine]:
    """Two pipeline stages that have mapped their slab."""
    engine = rank_tests.Engine(rank_tests.memory(Arena(1 << 18), tp=1, pp=2))
    engine.open()
    yield engine
    engine.close()


def connector_of(rank: worker_offload.OffloadWorker) -> KVFerryOffloadConnector:
    connector = object.__new__(KVFerryOffloadConnector)
    connector._worker = connector._side = rank
    connector._idle_steps, connector._connector_metadata = IdleSteps(), None
    return connector


def run_step(monkeypatch: pytest.MonkeyPatch, connector: Any, orders: OffloadStep, *, fails: bool = False) -> Any:
    """Run vLLM's own part of a step of an engine with a drafter, which is ended elsewhere, if at all."""
    monkeypatch.setattr(vllm_mixin, "get_kv_transfer_group", lambda: connector)
    monkeypatch.setattr(vllm_mixin, "get_forward_context", lambda: None)
    output = SimpleNamespace(kv_connector_metadata=orders, has_sync_kv_loads=False, finished_req_ids=set())
    run = vllm_mixin.KVConnectorModelRunnerMixin._get_kv_connector_output
    found: Any = None
    try:
        with run(output, defer_finalize=True) as found:
            if fails:
                raise MemoryError
    except MemoryError:
        pass
    return found


def test_a_stage_whose_steps_vllm_never_ends_stores_with_the_next_step(
    ranks: rank_tests.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a drafter vLLM ends a step where it samples, and the earlier stages of a pipeline do not sample."""
    connector = connector_of(ranks.workers[0])
    store = StoreOrder(3, rank_tests.blocks([1], [1]))
    run_step(monkeypatch, connector, OffloadStep(stores=[store]))
    reported = RankReport()
    for _ in range(1000):
        found = run_step(monkeypatch, connector, OffloadStep(computes=False))
        reported = reported.aggregate(found.kv_connector_worker_meta or RankReport())
        if reported.stored:
            break
    assert reported == RankReport(stored={3: 1})  # type: ignore[arg-type]


def test_a_failed_step_with_a_drafter_stores_nothing(ranks: rank_tests.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    connector = connector_of(ranks.workers[0])
    store = StoreOrder(3, rank_tests.blocks([1], [1]))
    found = run_step(monkeypatch, connector, OffloadStep(stores=[store]), fails=True)
    assert found.kv_connector_worker_meta == RankReport(failed={3: 1})  # type: ignore[arg-type]
    found = run_step(monkeypatch, connector, OffloadStep())
    assert found.kv_connector_worker_meta is None


def test_a_refused_load_is_reported_as_failed(ranks: rank_tests.Engine) -> None:
    ranks.step(OffloadStep(computes=False, loads=[LoadOrder("r", 1, (), is_refused=True)]))
    assert ranks.finished() == [({"r"}, {"r"})] * 2


def test_the_slab_stays_mapped_under_a_copy_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy in memory that is no longer mapped ends the process by a signal."""
    engine = rank_tests.Engine(rank_tests.memory(Arena(1 << 18), tp=1))
    engine.open()
    began, may_end = rank_tests.hold_copies(monkeypatch)
    monkeypatch.setattr(Executor.close, "__defaults__", (0.05,))
    [rank] = engine.workers
    copies = rank._copies
    assert copies is not None
    engine.step(OffloadStep(stores=[StoreOrder(1, rank_tests.blocks([1], [1]))]))
    assert began.wait(20)
    rank.shutdown()
    assert copies._memory._is_open
    may_end.set()
    rank._executor._thread.join(20)  # type: ignore[union-attr]
    rank.shutdown()
    assert not copies._memory._is_open


def test_any_error_of_a_rank_at_the_start_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_offload, "SlabCopies", raises(OSError("too many open files")))
    engine = rank_tests.Engine(rank_tests.memory(Arena(1 << 18), tp=1))
    report = engine.open()
    assert (report.num_ready, "too many open files" in report.refused) == (0, True)
    engine.close()


# The scheduler.

MakeEngine = Callable[..., Engine]


def raises(error: Exception) -> Callable[..., Any]:
    def fails(*_: Any, **__: Any) -> Any:
        raise error

    return fails


def test_any_error_of_a_tier_at_the_start_is_a_refusal(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(host_blocks=60, starts=False)
    monkeypatch.setattr(offload_tiers, "lower_tiers", raises(OSError("stale file handle")))
    engine.add("first", prompt_of(1))
    engine.run()
    assert engine.finished.keys() == {"first"}
    assert (engine.role._start.error, engine.role.has_pending_work()) == ("OSError('stale file handle')", False)


def test_a_rank_that_refuses_frees_the_memory_of_the_tiers(make_engine: MakeEngine) -> None:
    engine = make_engine(num_ranks=2, host_blocks=60, starts=False)
    engine.are_ready = False
    while engine.role._start.opened is None:
        engine.step()
    memory = engine.role._start.opened.memory
    engine.ranks.report = RankReport(num_ready=1, refused="no address space")
    engine.add("first", prompt_of(1, 2), max_tokens=3)
    engine.run()
    assert (engine.state()["start"], memory._is_open) == ("refused", False)
    assert engine.role.reset_cache() is True


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_promise_that_is_gone_costs_one_request(policy: str, make_engine: MakeEngine) -> None:
    """VLLM asks, allocates and calls back. An error in that call would end the engine core, with all requests."""
    engine = make_engine({"failure_policy": policy}, num_ranks=2, host_blocks=60)
    engine.add("first", prompt_of(1, 2))
    engine.run()
    crowd_out(engine)
    connector, ask = engine.scheduler.connector, engine.role.get_num_new_matched_tokens

    def ask_and_lose(request: Any, num_computed_tokens: int) -> Any:
        answer = ask(request, num_computed_tokens)
        if request.request_id == "second":
            engine.role._drop(engine.role._requests["second"])
        return answer

    connector.get_num_new_matched_tokens = ask_and_lose  # type: ignore[method-assign, union-attr]
    engine.add("second", prompt_of(1, 2), max_tokens=3)
    engine.add("third", prompt_of(1, 2), max_tokens=3)
    engine.run()
    assert engine.state()["counts"]["refused_loads"] == 1
    assert engine.computed["second"] == (0 if policy == "fail" else 98)
    assert (engine.finished["second"].name == "ERROR") == (policy == "fail")
    assert engine.loaded["third"] > 0
    engine.check_at_rest()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_blocks_that_vllm_does_not_give_cost_one_request(
    policy: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes behind the pins of the load, which end all the same."""
    engine = make_engine({"failure_policy": policy}, host_blocks=60)
    engine.add("first", prompt_of(1, 2))
    engine.run()
    crowd_out(engine)
    connector, update = engine.scheduler.connector, engine.role.update_state_after_alloc

    def update_without_blocks(request: Any, blocks: Any, number: int) -> None:
        none = SimpleNamespace(get_block_ids=lambda: ([0] * 6,))
        update(request, none if number else blocks, number)  # type: ignore[arg-type]

    connector.update_state_after_alloc = update_without_blocks  # type: ignore[method-assign, union-attr]
    engine.add("second", prompt_of(1, 2), max_tokens=3)
    engine.run()
    assert engine.state()["counts"]["refused_loads"] == 1
    assert (engine.finished["second"].name == "ERROR") == (policy == "fail")
    engine.check_at_rest()


@pytest.mark.parametrize(("num_tokens", "num_loaded"), [(64, 64), (70, 0)])
def test_fewer_tokens_than_promised_are_loaded_in_whole_blocks(
    num_tokens: int, num_loaded: int, make_engine: MakeEngine
) -> None:
    """A part of a block has no key of its own: its tokens would be taken for loaded."""
    engine = make_engine({"failure_policy": "recompute"}, host_blocks=60)
    engine.add("first", prompt_of(1, 2))
    engine.run()
    crowd_out(engine)
    connector, ask = engine.scheduler.connector, engine.role.get_num_new_matched_tokens

    def ask_for_less(request: Any, num_computed_tokens: int) -> Any:
        number, is_async = ask(request, num_computed_tokens)
        return min(number or 0, num_tokens), is_async

    connector.get_num_new_matched_tokens = ask_for_less  # type: ignore[method-assign, union-attr]
    engine.add("second", prompt_of(1, 2))
    engine.run()
    assert (engine.loaded["second"], engine.computed["second"]) == (num_loaded, 96 - num_loaded)
    engine.check_at_rest()


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_nothing_is_stored_that_was_computed_behind_a_failed_load_of_another_connector(
    runs_ahead: bool, make_engine: MakeEngine
) -> None:
    """A connector that loads within the step reports its failure with that step, whose stores are under way by then."""
    engine = make_engine(host_blocks=60, runs_ahead=runs_ahead)
    engine.add("first", prompt_of(1, 2), max_tokens=40)
    for _ in range(3):
        engine.step(ends_copies=False)
    assert engine.state()["stores"] > 0
    # vLLM calls this for all connectors of a step, before the reports of the step's stores are taken.
    report = KVConnectorOutput(invalid_block_ids={1}, kv_connector_worker_meta=RankReport())
    engine.role.update_connector_output(report)
    engine.end_copies()
    engine.step(ends_copies=False)
    assert engine.state()["tiers"]["host_memory"]["num_blocks"] == 0
    engine.run()
    crowd_out(engine)
    engine.add("second", prompt_of(1, 2))
    engine.run()
    assert engine.loaded["second"] == 96, "what was computed again was offered again"
    engine.check_at_rest()


def test_the_end_of_a_load_counts_its_own_keys_only(make_engine: MakeEngine) -> None:
    """Hundreds of loads of a thousand blocks may be under way: a step must not go over all of them."""
    engine = make_engine({"enable_prefix_caching": False}, num_blocks=60, host_blocks=60)
    engine.add("first", prompt_of(1, 2))
    engine.run()
    for number in range(3):
        engine.add(f"r{number}", prompt_of(1, 2))
    engine.step(ends_copies=False)
    assert set(engine.role._loads.loading.values()) == {3}
    loading = engine.role._loads.loading
    engine.run()
    assert engine.role._loads.loading is loading, "the counter was copied"
    assert not loading
    engine.check_at_rest()


def test_a_step_asks_for_the_blocks_of_requests_that_have_new_ones_only(make_engine: MakeEngine) -> None:
    """500 requests of 1,000 blocks run at a time; in a step about one in sixteen fills a block."""
    engine = make_engine(host_blocks=60)
    request = engine.add("first", prompt_of(1, 2), max_tokens=40)
    engine.step()
    engine.step()
    entry = engine.role._requests["first"]
    assert entry.blocks is not None
    updates = []
    update = type(entry.blocks).update
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(entry.blocks), "update", lambda *each: (updates.append(1), update(*each))[1])
        for _ in range(32):
            engine.step()
    assert request.num_tokens > 128
    assert len(updates) == 2


def test_a_rank_that_refuses_lets_all_ranks_unmap_the_slab(make_engine: MakeEngine) -> None:
    engine = make_engine(num_ranks=2, host_blocks=60, starts=False)
    engine.are_ready = False
    while engine.role._start.opened is None:
        engine.step()
    orders = [engine.role.build_connector_meta(engine.scheduler.schedule())]
    assert orders[0].slab is None, "it was ordered before"
    engine.role.update_connector_output(
        KVConnectorOutput(kv_connector_worker_meta=RankReport(num_ready=1, refused="no address space"))
    )
    assert engine.role.has_pending_work(), "an engine without requests still takes the step"
    engine.schedule()
    step = engine.scheduled[-1].output.kv_connector_metadata
    assert (step.unmaps, step.slab) == (True, None)
    engine.process()
    assert not engine.role.has_pending_work()
    engine.schedule()
    assert not engine.scheduled[-1].output.kv_connector_metadata.unmaps
    engine.process()


def mapped_slabs() -> int:
    return Path("/proc/self/maps").read_text().count("kvferry-slab")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_ranks_unmap_a_slab_that_another_rank_has_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = rank_tests.Engine(rank_tests.memory(Arena(1 << 18), tp=2))
    slab_copies, before = worker_offload.SlabCopies, (mapped_slabs(), open_files())

    def refuse_one(order: Any, index: int, *more: Any) -> Any:
        if index:
            raise OSError("no address space")
        return slab_copies(order, index, *more)

    monkeypatch.setattr(worker_offload, "SlabCopies", refuse_one)
    report = engine.open()
    assert (report.num_ready, "no address space" in report.refused) == (1, True)
    assert mapped_slabs() == before[0] + 2, "the owner's and the rank's"
    engine.step(OffloadStep(unmaps=True))
    engine.slab.close()
    assert (mapped_slabs(), open_files()) == before
    engine.step(OffloadStep(stores=[StoreOrder(1, rank_tests.blocks([1], [1]))]))
    assert engine.report() == RankReport(failed={1: 2})  # type: ignore[arg-type]
    engine.close()


@pytest.mark.parametrize("part", ["HostMemory", "Stack", "lower_tiers"])
def test_tiers_that_cannot_be_opened_leave_no_memory_and_no_file(
    part: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = mapped_slabs(), open_files()
    engine = make_engine(host_blocks=60, starts=False)
    monkeypatch.setattr(offload_tiers, part, raises(MemoryError()))
    while engine.role.has_pending_work():
        engine.step()
    assert engine.state()["start"] == "refused"
    assert (mapped_slabs(), open_files()) == before


# Resets.


def with_tier(make_engine: MakeEngine, **arguments: Any) -> tuple[Engine, DictionaryTier]:
    """Return an engine, and its lower tier that holds a prompt of two parts which host memory has not."""
    made: list[DictionaryTier] = []

    def lower(region: Region) -> DictionaryTier:
        made.append(DictionaryTier(region, 1 << 20, name="local_disk"))
        return made[-1]

    engine = make_engine(lower=lower, host_blocks=8, **arguments)
    engine.add("first", prompt_of(1, 2))
    engine.run()
    crowd_out(engine)
    return engine, made[0]


@pytest.mark.parametrize("num_resets", [1, 2])
def test_after_a_reset_nothing_of_before_goes_down(num_resets: int, make_engine: MakeEngine) -> None:
    """Neither what waits nor what moves: after a second reset the names are of no process at all."""
    engine, tier = with_tier(make_engine)
    if num_resets == 2:
        engine.role.reset_cache()
    tier.faults.hangs = True
    engine.add("last", prompt_of(31, 32))
    while "last" not in engine.finished:
        engine.step()
    engine.step(is_forced=True)
    lower = engine.state()["tiers"]["lower"]["local_disk"]
    assert lower["writes"] or lower["blocks_to_write"]
    before = set(tier.blocks)
    engine.role.reset_cache()
    tier.faults.hangs = False
    for _ in range(5):
        engine.step(is_forced=True)
    assert set(tier.blocks) == before
    engine.add("now", prompt_of(31, 32))
    engine.run()
    assert engine.loaded["now"] == 0
    after = set(tier.blocks) - before
    assert len(after) == 6, "what is stored now goes down"
    for number in range(40, 44):
        engine.add(f"other {number}", prompt_of(number, -number))
        engine.run()
    assert engine.role._start.opened.stack.is_missing(list(after)).all()  # type: ignore[union-attr]
    engine.add("again", prompt_of(31, 32))
    engine.run()
    assert engine.loaded["again"] == 96, "found below, until the process ends"
    engine.check_at_rest()


def test_a_promotion_under_way_at_a_reset_is_announced_nowhere(make_engine: MakeEngine) -> None:
    engine, tier = with_tier(make_engine)
    tier.faults.hangs = True
    engine.add("second", prompt_of(1, 2))
    engine.step()
    assert engine.state()["tiers"]["lower"]["local_disk"]["promotions"]
    tiers = engine.role._start.opened
    assert tiers is not None
    keys = engine.role._requests["second"].blocks.keys[0]  # type: ignore[union-attr]
    tiers.stack.journal.is_kept = True
    engine.role.reset_cache()
    assert stack_state(tiers.stack, engine.now)["blocks_in_chunks"] > 0, "slots stay in use until the copy ends"
    tiers.stack.journal.take()
    tier.faults.hangs = False
    engine.run()
    assert not [change for change in tiers.stack.journal.take() if change.is_visible and set(change.keys) & set(keys)]
    assert tiers.stack.is_missing(keys).all()
    assert engine.loaded["second"] == 0
    engine.check_at_rest()


def test_a_request_of_before_a_reset_stores_nothing_when_the_tiers_open_later(make_engine: MakeEngine) -> None:
    """Its blocks may be of either weights, and the names are new."""
    engine = make_engine(num_ranks=2, host_blocks=60, starts=False)
    engine.are_ready = False
    engine.add("running", prompt_of(1, 2), max_tokens=40)
    report, engine.ranks.report = engine.ranks.report, RankReport()
    for _ in range(3):
        engine.step()
    assert engine.role._start.opened is None
    engine.role.reset_cache()
    engine.ranks.report, engine.are_ready = report, True
    engine.run()
    assert engine.state()["start"] == "ready"
    assert "stores" not in engine.state()["counts"]
    names = engine.role._start.opened.names  # type: ignore[union-attr]
    assert names.private is not None, "nor do later processes find what others store now"


def test_a_reset_ends_what_requests_ask_for(make_engine: MakeEngine) -> None:
    """Blocks that were pinned for a request which loads nothing any more would stay so for the request's life."""
    engine, tier = with_tier(make_engine)
    tier.faults.hangs = True
    engine.add("second", prompt_of(1, 2))
    engine.step()
    stack = engine.role._start.opened.stack  # type: ignore[union-attr]
    assert stack_state(stack, engine.now)["requests"].keys() == {"second"}
    engine.role.reset_cache()
    assert stack_state(stack, engine.now)["requests"] == {}
    tier.faults.hangs = False
    engine.run()
    engine.check_at_rest()


def test_a_waiting_request_whose_tokens_change_is_promised_blocks_of_the_new_ones(make_engine: MakeEngine) -> None:
    """A session with streaming input cuts its hashes and goes on with other tokens, here while it waits for a disk."""
    engine, tier = with_tier(make_engine)
    engine.add("other", prompt_of(1, 7))
    engine.run()
    crowd_out(engine)
    tier.faults.hangs = True
    request = engine.add("second", prompt_of(1, 2))
    engine.step()
    assert request.prompt_token_ids is not None
    request.prompt_token_ids[:] = request._all_token_ids[:] = prompt_of(1, 7)
    del request.block_hashes[3:]
    request.update_block_hashes()
    engine.now += 0.5
    engine.step()
    tier.faults.hangs = False
    engine.run()
    assert engine.loaded["second"] > 48, "more than both prompts have; the first question's blocks take room"
    assert "refused_loads" not in engine.state()["counts"]
    engine.check_at_rest()


# Deadlines.


def test_a_request_whose_question_changes_waits_no_longer(make_engine: MakeEngine) -> None:
    """Its own cache gains and loses blocks meanwhile: each question would have a deadline of its own."""
    engine, tier = with_tier(make_engine, load_wait_seconds=2.0)
    tier.faults.hangs = True
    request = engine.add("second", prompt_of(1, 2))
    began_at = engine.now
    for turn in range(1000):
        answer, _ = engine.role.get_num_new_matched_tokens(request, BLOCK_SIZE * (turn % 2))
        if answer is not None:
            break
        engine.role._start.tiers.stack.poll(engine.now)  # type: ignore[union-attr]
        engine.now += 0.1
    assert engine.now - began_at <= 2.2
    tier.faults.hangs = False
    engine.run()
    engine.check_at_rest()


def test_a_request_waits_for_the_load_of_another_no_longer_than_for_a_tier(make_engine: MakeEngine) -> None:
    engine = make_engine({"enable_prefix_caching": True}, num_blocks=40, host_blocks=60, load_wait_seconds=2.0)
    engine.add("first", prompt_of(1, 2))
    engine.run()
    crowd_out(engine)
    engine.add("second", prompt_of(1, 2))
    engine.step(ends_copies=False)
    engine.add("third", prompt_of(1, 2))
    engine.step(ends_copies=False)
    assert engine.state()["loads"] == ["second"]
    for _ in range(30):
        engine.now += 0.1
        engine.step(ends_copies=False)
    assert engine.state()["loads"] == ["second", "third"]
    engine.run()
    engine.check_at_rest()


def test_a_disk_whose_reads_never_return_costs_a_wait_and_holds_up_no_end(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()
    arguments: dict[str, Any] = {"host_blocks": 8, "disk_path": str(tmp_path), "disk_bytes": 1 << 20}
    engine = make_engine(**arguments)
    engine.add("first", prompt_of(1, 2))
    engine.run(3000)
    crowd_out(engine)
    monkeypatch.setattr(SegmentFiles, "read", lambda *_: may_end.wait(60))
    monkeypatch.setattr(local_disk, "CLOSE_SECONDS", 0.2)
    began_at = engine.now
    engine.add("second", prompt_of(1, 2))
    while "second" not in engine.finished:
        engine.now += 0.05
        engine.step()
    assert engine.now - began_at < 2.3
    assert (engine.computed["second"], engine.loaded["second"]) == (96, 0)
    closes_at = time.monotonic()
    engine.role.shutdown()
    assert time.monotonic() - closes_at < 5.0
    may_end.set()


# Lower tiers.

VERBS = ("look_up", "prepare_load", "complete_load", "prepare_store", "complete_store", "poll", "close")


@pytest.mark.parametrize("error", [OSError("stale file handle"), MemoryError(), ValueError("a bug")], ids=repr)
@pytest.mark.parametrize("verb", VERBS)
def test_whatever_a_lower_tier_raises_the_engine_goes_on(
    verb: str, error: Exception, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[DictionaryTier] = []

    def lower(region: Region) -> DictionaryTier:
        made.append(DictionaryTier(region, 1 << 20, name="local_disk"))
        return made[-1]

    engine = make_engine(lower=lower, host_blocks=8, load_wait_seconds=0.5)
    engine.add("first", prompt_of(1, 2))
    engine.run()
    crowd_out(engine)
    monkeypatch.setattr(made[0], verb, raises(error))
    for number in range(4):
        engine.add(f"again {number}", prompt_of(1, 2, 60 + number), max_tokens=3)
        engine.run()
        engine.now += 30.0
    assert {f"again {number}" for number in range(4)} <= engine.finished.keys()
    failures = engine.state()["tiers"]["lower"]["local_disk"]["failures"]
    assert failures.get("tier-failed", 0) > 0 or verb == "close"
    engine.check_at_rest()
    memory = engine.role._start.opened.memory  # type: ignore[union-attr]
    engine.role.shutdown()
    assert memory._is_open == (verb == "close"), "it may still be used"
    memory.close()
