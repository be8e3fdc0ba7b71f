"""The thirteen traps of keeping KV blocks behind vLLM 0.32's cache, by number: traps 4 to 13.

Traps 1 to 3 are in ``test_offload_traps_names`` and ``test_offload_adapters``, and what needs a second connector in
``test_offload_beside_others``. Each docstring begins with the trap. All tests run the connector: its scheduler's half
in vLLM's own scheduler (see ``offload_engine``, whose model of ranks fails on a slot with another content than its
tokens'), its worker's half in vLLM's part of a step.
"""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvferry.errors import LayoutError
from kvferry.execution.local_copy import LocalCopy
from kvferry.integrations.vllm.engine_core import FIRST_WAIT_SECONDS
from kvferry.integrations.vllm.offload_step import LoadOrder, OffloadStep, RankReport, StoreOrder
from kvferry.integrations.vllm.scheduler import offload
from kvferry.integrations.vllm.scheduler.blocks import GroupShape
from kvferry.layout.shard import CacheKind

from . import test_offload_worker as rank_tests
from .offload_engine import BLOCK_SIZE, LATENT, Engine, prompt_of
from .test_offload_hazards import connector_of, raises, ranks, run_step  # noqa: F401
from .test_offload_requests import (  # noqa: F401
    FULL,
    PROMPT,
    configs,
    crowd_out,
    engine_hashes,
    make_engine,
    make_engine_with_tier,
    seen_before,
)

# ruff: noqa: F811
MakeEngine = Callable[..., Engine]
NUM_RANKS = 2


# 4 and 5: which blocks may be stored, and when.


def test_trap_04_the_slot_of_the_last_sampled_token_is_not_stored(make_engine: MakeEngine) -> None:
    """The slot of the last sampled token and rejected drafts must not be stored."""
    engine = make_engine(host_blocks=60)
    request = engine.add("first", prompt_of(1), max_tokens=17)
    engine.run()
    # 48 tokens and 17 sampled ones, of which the last was never computed: 4 whole blocks.
    assert request.num_tokens == 65
    num_others = crowd_out(engine)
    engine.add("second", list(request.all_token_ids))
    engine.run()
    assert (engine.loaded["second"], engine.computed["second"]) == (64, 1)
    engine.add("third", prompt_of(2), max_tokens=16)
    engine.run()
    # 63 tokens were computed of the third, so 3 blocks are stored; the others have 6 each.
    assert engine.state()["tiers"]["host_memory"]["num_blocks"] == 4 + num_others * 6 + 3


@pytest.mark.parametrize("prompt_tokens", [48, 40])
def test_trap_04_rejected_drafts_are_not_stored(prompt_tokens: int, make_engine: MakeEngine) -> None:
    """The slot of the last sampled token and rejected drafts must not be stored."""
    drafting = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    engine = make_engine({"speculative_config": drafting}, num_blocks=40, host_blocks=400)
    request = engine.add("first", prompt_of(1, 2)[:prompt_tokens], max_tokens=80)
    while "first" not in engine.finished:
        num_known = request.num_tokens
        engine.step(ends_copies=True)
        engine.check_slab()
        if (entry := engine.role._requests.get("first")) is not None and entry.blocks is not None:
            # A drafter's caches of the last accepted tokens are settled by its next pass.
            assert entry.blocks.num_offered[0] * BLOCK_SIZE <= max(prompt_tokens, num_known - 1 - 3)
    engine.run()
    assert request.spec_token_ids or engine.computed["first"] > prompt_tokens + 79, "some drafts were rejected"
    crowd_out(engine)
    engine.add("second", list(request.all_token_ids), max_tokens=3)
    engine.run()
    assert engine.loaded["second"] == (prompt_tokens + 79) // BLOCK_SIZE * BLOCK_SIZE
    engine.check_at_rest()


@pytest.mark.parametrize("num_steps", [1, 2, 4, 20, 40])
def test_trap_04_of_an_aborted_request_only_what_was_computed_is_stored(
    num_steps: int, make_engine: MakeEngine
) -> None:
    """``num_scheduled_tokens`` runs ahead of the block hashes under asynchronous scheduling.

    A step is planned and not yet computed when the abort comes, and its blocks go to others.
    """
    engine = make_engine(num_blocks=14, host_blocks=60, runs_ahead=True)
    engine.add("first", PROMPT, max_tokens=60)
    for _ in range(num_steps):
        engine.step(ends_copies=num_steps % 2 == 0)
    engine.abort("first")
    engine.add("other", prompt_of(7, 8), max_tokens=30)
    engine.run()
    engine.check_at_rest()
    crowd_out(engine)
    engine.add("second", PROMPT)
    engine.run()
    engine.check_at_rest()


def test_trap_05_a_preempted_request_comes_back_with_a_store_in_flight(make_engine: MakeEngine) -> None:
    """Its source block is not reused before the copy is done: stores keep their blocks by reference."""
    engine = make_engine(num_blocks=11, host_blocks=60)
    engine.add("one", prompt_of(1), max_tokens=80)
    engine.add("two", prompt_of(2), max_tokens=80)
    while not any(each.num_preemptions for each in engine.scheduler.requests.values()):
        engine.step(ends_copies=len(engine.scheduler.running) < 2)
        assert len(engine.finished) < 2
    assert engine.ranks.copies
    for _ in range(30):
        engine.step(ends_copies=False)
    engine.run()
    assert engine.finished.keys() == {"one", "two"}
    engine.check_at_rest()


def test_trap_05_a_request_may_be_aborted_that_was_never_scheduled(make_engine: MakeEngine) -> None:
    """And no block of an aborted request is kept: vLLM aborts all, resets its cache, and fails while one is in use."""
    engine = make_engine(host_blocks=60)
    engine.add("never scheduled", prompt_of(3))
    engine.abort("never scheduled")
    engine.add("first", prompt_of(1, 2), max_tokens=40)
    max_kept, engine.role._stores.max_kept = engine.role._stores.max_kept, 0  # so that blocks are left for the end
    for _ in range(30):
        engine.step()
    engine.role._stores.max_kept = max_kept
    engine.abort("first")
    assert engine.state()["kept_blocks"] == 0
    engine.run()
    engine.check_at_rest()


def test_trap_05_no_copy_is_launched_before_the_step_has_written(
    ranks: rank_tests.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy is launched before the kernel has finished: a store begins behind the step that fills its block."""
    rank, began = ranks.workers[0], threading.Event()
    advance = LocalCopy.advance
    monkeypatch.setattr(LocalCopy, "advance", lambda *each: (began.set(), advance(*each))[1])

    def compute() -> None:
        began.wait(0.2)  # a store that does not wait for the step has copied by now
        for view in ranks.memory[0].views.values():
            view[1] = 77

    connector = connector_of(rank)
    orders = OffloadStep(stores=[StoreOrder(3, rank_tests.blocks([1], [1]))])
    monkeypatch.setattr(worker_steps := run_step.__globals__["vllm_mixin"], "get_kv_transfer_group", lambda: connector)
    monkeypatch.setattr(worker_steps, "get_forward_context", lambda: None)
    output = SimpleNamespace(kv_connector_metadata=orders, has_sync_kv_loads=False, finished_req_ids=set())
    reported = RankReport()
    with worker_steps.KVConnectorModelRunnerMixin._get_kv_connector_output(output) as found:
        compute()
    for _ in range(1000):
        reported = reported.aggregate(found.kv_connector_worker_meta or RankReport())
        if reported.stored:
            break
        found = run_step(monkeypatch, connector, OffloadStep(computes=False))
    block_bytes = ranks.memory[0].views["full", "kv", "0"][1].size
    assert int((ranks.bytes == 77).sum()) == block_bytes


# 6 to 8: which hits a model can use.


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("windows", [(0, 40), (40, 0), (40,)])
def test_trap_06_a_hits_end_needs_the_window_before_it(
    windows: tuple[int, ...], runs_ahead: bool, make_engine: MakeEngine
) -> None:
    """A hit's end needs ``window - 1`` tokens before it, and no more of a window."""
    engine = make_engine(num_blocks=40, windows=windows, host_blocks=80, runs_ahead=runs_ahead)
    prompt = prompt_of(1, 2, 3)
    engine.add("first", prompt, max_tokens=3)
    engine.run()
    crowd_out(engine)
    engine.add("second", prompt, max_tokens=3)
    [order] = [load for _ in range(3) if (engine.step(ends_copies=False) or True) for load in engine.last_loads]
    assert sum(engine.role._loads.sources("second").values()) == 128, "vLLM counts all of the tokens"
    engine.end_copies()
    engine.step()
    # A whole hit would leave the last token without the first one of its window.
    assert engine.scheduler.requests["second"].num_computed_tokens >= 128
    for blocks in order.blocks:
        # Behind 128 tokens of which the window has 40: tokens from 89 on, so from the block at 80.
        assert (blocks.first_token, blocks.last_token) == ((80 if windows[int(blocks.group)] else 0), 128)
    engine.run()
    assert (engine.loaded["second"], engine.computed["second"]) == (128, 16 + 2)
    engine.check_at_rest()


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_trap_06_a_block_that_has_left_its_window_is_not_stored(runs_ahead: bool, make_engine: MakeEngine) -> None:
    """Blocks leave a sliding window in mid-request: null ids, reallocated ids."""
    engine = make_engine(num_blocks=50, windows=(0, 24), host_blocks=80, runs_ahead=runs_ahead)
    engine.role._stores.max_kept = 2  # so blocks are stored some steps after they were filled
    engine.add("first", prompt_of(1, 2), max_tokens=60)
    engine.add("other", prompt_of(3, 4), max_tokens=60)
    while engine.scheduler.has_requests():
        engine.step()
        engine.check_slab()
    engine.run()
    assert engine.state()["counts"]["deferred_blocks"] > 0
    engine.check_at_rest()


def test_trap_06_states_are_refused_by_name(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention without its Mamba state is garbage."""
    monkeypatch.setattr(offload, "group_shapes", lambda _: (FULL, GroupShape(CacheKind.STATE, 1)))
    with pytest.raises(LayoutError, match="cache group 1 holds states"):
        make_engine()


def test_trap_07_groups_are_evicted_apart(make_engine: MakeEngine) -> None:
    """The hit is the intersection: host memory has all blocks of one group, and of the other one lacks the fourth."""
    engine = make_engine(windows=(0, 0), host_blocks=60)
    seen_before(engine)
    tiers = engine.role._start.opened
    assert tiers is not None
    keys = tiers.names.keys(1, engine_hashes(engine, PROMPT))
    number = 0
    while not all(tiers.stack.is_missing(keys[3:4])):
        for group in range(2):
            tiers.stack.touch([key for key in tiers.names.keys(group, engine.contents) if key != keys[3]])
        tiers.stack.land(tiers.stack.prepare_store("1", [number.to_bytes(48, "big")], num_parts=1), 0)
        number += 1
    engine.add("second", PROMPT)
    engine.run()
    assert engine.loaded["second"] == 3 * BLOCK_SIZE
    engine.check_at_rest()


def test_trap_07_the_intersection_is_taken_when_it_is_read(make_engine_with_tier: Any) -> None:
    """Not when it was looked up: all blocks of both groups are below then, and one turns out to be damaged."""
    engine, tier = make_engine_with_tier(windows=(0, 0), num_blocks=40)
    names = engine.role._start.opened.names
    [key] = names.keys(1, [engine_hashes(engine, PROMPT)[2]])
    content, expected = tier.blocks[key]
    tier.blocks[key] = bytes([content[0] ^ 1]) + content[1:], expected
    engine.add("second", PROMPT)
    engine.run()
    assert engine.loaded["second"] == 2 * BLOCK_SIZE
    engine.check_at_rest()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(("length", "num_loaded"), [(96, 96), (97, 96), (98, 0)])
def test_trap_08_mla_on_a_cpu_takes_hits_that_leave_one_token(
    length: int, num_loaded: int, num_ranks: int, make_engine: MakeEngine
) -> None:
    """MLA on the CPU has prefix caching and chunked prefill forced off; a partial hit is a chunked prefill."""
    config = {"enable_prefix_caching": False, "enable_chunked_prefill": False, "max_num_batched_tokens": 256}
    engine = make_engine(config, host_blocks=60, windows=(LATENT,), num_ranks=num_ranks)
    engine.add("first", prompt_of(1, 2, 3)[:100])
    engine.run()
    engine.add("second", prompt_of(1, 2, 3)[:length])
    engine.run()
    assert engine.loaded["second"] == num_loaded
    engine.check_at_rest()


# 9 and 10: questions and answers.


def test_trap_09_a_promise_that_is_not_taken_up_is_dropped(make_engine: MakeEngine) -> None:
    """The question for a hit repeats and its answer may be dropped: no pins there without an owner that ends them.

    VLLM has no room for the load: it asks again in each step, and between its questions nothing is pinned.
    """
    engine = make_engine(num_blocks=13, host_blocks=60)
    engine.add("first", PROMPT)
    engine.run()
    engine.add("long", prompt_of(3, 4), max_tokens=60)
    engine.step()
    engine.step()
    engine.add("second", PROMPT)
    for _ in range(20):
        engine.step()
        state = engine.state()
        assert state["promised"] == 0
        if "second" not in state["loads"]:
            assert state["tiers"]["host_memory"]["num_pinned"] == 0
    engine.run()
    assert engine.loaded["second"] == 96
    engine.check_at_rest()


def test_trap_09_the_tiers_are_not_asked_where_the_answer_is_dropped(make_engine_with_tier: Any) -> None:
    """Its answer may be dropped: vLLM asks for a request that must not read the cache too, and takes it for 0."""
    engine, _ = make_engine_with_tier(num_blocks=40)
    engine.add("logprobs", PROMPT, skips_cache=True)
    engine.run()
    assert engine.loaded["logprobs"] == 0
    assert "asked_again" not in engine.state()["counts"]
    engine.check_at_rest()


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_trap_10_a_full_hit_leaves_one_token_to_compute(runs_ahead: bool, make_engine: MakeEngine) -> None:
    """The load is of the whole prompt; the last token is computed behind it for its logits, and stored by nobody."""
    engine = make_engine(host_blocks=60, runs_ahead=runs_ahead)
    seen_before(engine)
    num_stores = engine.state()["counts"]["stores"]
    engine.add("second", PROMPT, max_tokens=4)
    engine.run()
    assert (engine.loaded["second"], engine.computed["second"]) == (96, 1 + 3)
    assert engine.state()["counts"]["stores"] == num_stores
    engine.check_at_rest()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_trap_10_after_a_failed_load_the_miss_is_remembered(policy: str, make_engine: MakeEngine) -> None:
    """After a failed load with ``recompute`` the request starts at 0 and asks again: else it loops."""
    engine = make_engine({"failure_policy": policy}, num_ranks=2, host_blocks=60)
    seen_before(engine)
    engine.add("second", PROMPT, max_tokens=3)
    for _ in range(30):
        engine.step(ends_copies=False)
        engine.end_copies(fails=any(not copy.is_store for copy in engine.ranks.copies))
    engine.run()
    counts = engine.state()["counts"]
    assert (counts["loads"], counts["failed_loads"]) == (1, 1)
    assert engine.computed["second"] == (0 if policy == "fail" else 98)
    engine.check_at_rest()


# 11 to 13: what ranks report, and what they wait for.


def failed_load(monkeypatch: pytest.MonkeyPatch, ranks: rank_tests.Engine) -> list[KVConnectorOutput]:
    """Return what vLLM has of two ranks' reports, step by step, of a load that the second one cannot copy."""
    connectors = [connector_of(rank) for rank in ranks.workers]
    aggregator, found, job_ids = KVOutputAggregator(NUM_RANKS), [], (1, 99)
    steps = [OffloadStep(computes=False, loads=[LoadOrder("second", 7, rank_tests.blocks([1], [n]))]) for n in job_ids]
    for _ in range(1000):
        outputs: list[ModelRunnerOutput | None] = []
        for connector, step in zip(connectors, steps, strict=True):
            one = ModelRunnerOutput(req_ids=[], req_id_to_index={})
            one.kv_connector_output = run_step(monkeypatch, connector, step)
            outputs.append(one)
        together = aggregator.aggregate(outputs)
        assert together is not None
        assert together.kv_connector_output is not None
        found.append(together.kv_connector_output)
        if found[-1].finished_recving:
            break
        steps = [OffloadStep(computes=False)] * NUM_RANKS
    return found


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_trap_11_and_12_a_load_that_one_rank_could_not_copy(
    policy: str, ranks: rank_tests.Engine, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several groups report ``failed_recving``, not invalid blocks (those raise).

    A failed transfer counted as loaded has served another request's KV (dynamo #15079, LMCache #4385).
    """
    reports = failed_load(monkeypatch, ranks)
    assert not any(report.invalid_block_ids for report in reports)
    assert reports[-1].failed_recving == {"second"}
    engine = make_engine({"failure_policy": policy}, windows=(0, 0), num_ranks=NUM_RANKS, host_blocks=60)
    seen_before(engine)
    engine.add("second", PROMPT, max_tokens=3)
    while not engine.ranks.copies:
        engine.step(ends_copies=False)
    engine.ranks.copies.clear()
    engine.ranks.loads_left.clear()
    with monkeypatch.context() as patch:
        patch.setattr(engine.ranks, "take_output", lambda: reports.pop(0))
        while reports:
            engine.step()
    engine.run()
    assert (engine.finished["second"].name == "ERROR") == (policy == "fail")
    assert (engine.loaded["second"], engine.computed["second"]) == (0, 0 if policy == "fail" else 98)
    engine.check_at_rest()


def test_trap_12_a_store_that_one_rank_could_not_copy_is_not_visible(make_engine: MakeEngine) -> None:
    """A failed transfer counted as loaded has served another request's KV: nor is one counted as stored."""
    engine = make_engine(num_ranks=2, host_blocks=60)
    engine.add("first", PROMPT)
    for number in range(20):
        engine.step(ends_copies=False)
        while engine.ranks.copies:
            engine.ranks.end(0, fails=engine.ranks.copies[0].rank == 1)
        if number > 5 and not engine.scheduler.has_requests():
            break
    engine.check_at_rest()
    assert engine.state()["tiers"]["host_memory"]["num_blocks"] == 0


def test_trap_13_pending_work_is_what_ranks_copy_and_not_a_tier_that_hangs(make_engine_with_tier: Any) -> None:
    """``has_pending_push_work`` makes the engine spin."""
    engine, tier = make_engine_with_tier(num_blocks=40)
    connector = engine.scheduler.connector
    engine.add("last", prompt_of(7, 8))
    while "last" not in engine.finished:
        engine.step(ends_copies=False)
    tier.faults.hangs = True
    assert connector.has_pending_push_work()
    engine.step()
    engine.step()
    assert connector.has_pending_push_work(), "the tier has begun to write"
    engine.now += 20.0
    engine.step(is_forced=True)
    assert not connector.has_pending_push_work()
    assert not engine.scheduler.has_requests()
    tier.faults.hangs = False
    engine.step(is_forced=True)
    engine.run()


def test_trap_13_idle_steps_wait(ranks: rank_tests.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """``has_pending_push_work`` makes the engine spin; wait in idle steps. A load ends the wait."""
    began, may_end = rank_tests.hold_copies(monkeypatch)
    connector = connector_of(ranks.workers[0])
    run_step(monkeypatch, connector, OffloadStep(loads=[LoadOrder("r", 7, rank_tests.blocks([1], [1]))]))
    assert began.wait(20)
    for turns in (1, 2, 4, 4):
        began_at = time.monotonic()
        found = run_step(monkeypatch, connector, OffloadStep(computes=False))
        assert time.monotonic() - began_at >= 0.9 * turns * FIRST_WAIT_SECONDS
        assert not found.finished_recving
    may_end.set()
    for _ in range(1000):
        found = run_step(monkeypatch, connector, OffloadStep(computes=False))
        if found.finished_recving:
            break
    assert found.finished_recving == {"r"}
