"""Pushes that are packed before they are written, between ranks in this process: real messages, stages and bytes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvferry.errors import Reason
from kvferry.execution.push_ways import PushWays
from kvferry.execution.stage import Stage
from kvferry.handoff.push.part import BlockList
from kvferry.handoff.push.sender import Prompt
from kvferry.handoff.push.sending import END
from kvferry.layout.named_layouts import NamedLayout
from kvferry.plan.planner import Planner
from kvferry.plan.staging.strategy import Strategy, typical_costs
from kvferry.transport.faults import FaultPlan

from .engines_in_process import BLOCK_SIZE, HEADS, LAYERS, NUM_BLOCKS, Rank
from .engines_that_push import Goes, Pairs, ReceivingRank, SendingEngine

LBNHC, BHLNC = NamedLayout.LBNHC, NamedLayout.BHLNC


@pytest.fixture
def engines() -> Iterator[Pairs]:
    pairs = Pairs()
    yield pairs
    pairs.close()


def by_head(rank: Rank, num_heads: int) -> np.ndarray:
    """Return a cache in LBNHC as layer, block, token, head and the head's bytes."""
    return rank.cache.reshape(len(LAYERS), NUM_BLOCKS, BLOCK_SIZE, num_heads, -1)


def check_heads(sender: SendingEngine, receivers: list[ReceivingRank], source: list[int], target: list[int]) -> None:
    """One source with all heads, receivers with their shares of them in order."""
    sent = by_head(sender.ranks[0].rank, HEADS)[:, source]
    shares = [by_head(each.rank, HEADS // len(receivers)) for each in receivers]
    assert np.array_equal(np.concatenate([share[:, target] for share in shares], axis=3), sent)
    others = sorted(set(range(NUM_BLOCKS)) - set(target))
    assert not any(share[:, others].any() for share in shares)


def compute(sender: SendingEngine, ids: Sequence[int], *num_final: int) -> None:
    """Compute a prompt step by step, each layer by layer."""
    [source] = sender.ranks
    for final in num_final:
        prompt = Prompt(len(ids) * BLOCK_SIZE, "prompt", {"full": BlockList(0, ids)}, final)
        source.pusher.begin_step([("x", prompt)])
        for layer in LAYERS:
            source.pusher.reach(layer)
        source.pusher.compute([("x", prompt)])


@pytest.mark.parametrize("goes", Goes)
def test_what_is_packed_arrives_whole_in_chunks_and_in_spans(goes: Goes, engines: Pairs) -> None:
    sender, receivers = engines.open(1, 2, goes=goes, layout=LBNHC, stage_bytes=1 << 16, wish=Strategy.GATHER)
    for receiver in receivers:
        receiver.receive(sender.hold(), [0, 3, 2])
    assert all(receiver.is_waiting() for receiver in receivers)
    compute(sender, [5, 1, 4], BLOCK_SIZE, 2 * BLOCK_SIZE + 1, END)
    results = [receiver.result() for receiver in receivers]
    assert [result.error for result in results] == [None, None]
    check_heads(sender, receivers, [5, 1, 4], [0, 3, 2])
    sent = sender.pushed(2)
    assert [result.num_gathered_bytes for result in sent] == [result.num_bytes for result in results]
    num_runs = 3 * len(LAYERS)
    assert all(result.num_descriptors <= num_runs for result in sent), "long runs of the receiver"


def test_without_a_wish_costs_decide(engines: Pairs) -> None:
    """Half a row of four tokens is short: with LBNHC packing pays, between equal ranks nothing is packed."""
    slow = {"cma": typical_costs("cma").__class__("cma", 1e-3, 15e9, 12e9, 20e-9, 20e-6)}
    for target_tp, is_packed in ((2, True), (1, False)):
        sender, receivers = engines.open(1, target_tp, layout=LBNHC, stage_bytes=1 << 16, given=slow)
        for receiver in receivers:
            receiver.receive(sender.hold(), [0, 3])
        compute(sender, [5, 1], END)
        assert [receiver.result().error for receiver in receivers] == [None] * target_tp
        check_heads(sender, receivers, [5, 1], [0, 3])
        assert [result.num_gathered_bytes > 0 for result in sender.pushed(target_tp)] == [is_packed] * target_tp


def test_a_failed_write_of_what_was_packed_is_reported(engines: Pairs) -> None:
    sender, receivers = engines.open(
        1, 2, FaultPlan(fail_after=1), layout=LBNHC, stage_bytes=1 << 16, wish=Strategy.GATHER
    )
    receivers[0].receive(sender.hold(), [0, 3])
    compute(sender, [5, 1], END)
    error = receivers[0].result().error
    assert error is not None
    assert error.reason is Reason.TRANSFER_FAILED
    stage = sender.ranks[0].stage
    assert stage is not None
    assert stage.take("probe", stage.memory.nbytes) == 0, "the stage has its room back"


def test_a_preempted_prompt_is_packed_again(engines: Pairs) -> None:
    sender, receivers = engines.open(1, 2, layout=LBNHC, stage_bytes=1 << 16, wish=Strategy.GATHER)
    for receiver in receivers:
        receiver.receive(sender.hold(), [0, 3])
    compute(sender, [5, 1], BLOCK_SIZE)
    assert all(receiver.is_waiting() for receiver in receivers)
    sender.ranks[0].pusher.preempt(["x"])
    by_head(sender.ranks[0].rank, HEADS)[:, [5, 1]] = 0
    compute(sender, [2, 4], END)
    assert [receiver.result().error for receiver in receivers] == [None, None]
    # The first block went before the preemption, and holds what it held then: the prompt is the same.
    sent = by_head(sender.ranks[0].rank, HEADS)[:, 4]
    arrived = np.concatenate([by_head(each.rank, HEADS // 2)[:, 3] for each in receivers], axis=2)
    assert np.array_equal(arrived, sent)


def test_a_stage_too_small_for_a_block_is_a_refusal_with_gather_and_nothing_without_a_wish(engines: Pairs) -> None:
    sender, [receiver, _] = engines.open(1, 2, layout=LBNHC, stage_bytes=64, wish=Strategy.GATHER)
    receiver.receive(sender.hold(), [0])
    error = receiver.result().error
    assert error is not None
    assert error.reason is Reason.UNSUPPORTED
    assert "gather" in error.message
    plan = Planner([sender.ranks[0].rank.shard], receiver.rank.shard).plans(0)[0]
    assert PushWays(Stage(64, huge_pages=False)).choose(plan, "nixl") is None
    assert PushWays().choose(plan, "nixl") is None


def test_the_remote_memory_of_a_push_is_the_receivers() -> None:
    """Heads that are split lie together there, so a cost of remote runs is none of theirs."""
    plan = Planner([Rank(0, 1, layout=LBNHC).shard], Rank(0, 2, layout=LBNHC).shard).plans(0)[0]
    costs = replace(typical_costs("cma"), seconds_per_copied_run=1e-9, seconds_per_copy=1e-9)
    by_run = replace(costs, seconds_per_descriptor=1e-9, seconds_per_remote_run=1e-3)
    by_descriptor = replace(costs, seconds_per_descriptor=1e-3, seconds_per_remote_run=1e-9)
    for given, is_packed in ((by_run, False), (by_descriptor, True)):
        way = PushWays(Stage(1 << 20, huge_pages=False), None, {"cma": given}).choose(plan, "cma")
        assert (way is not None) is is_packed


def test_copies_are_measured_where_costs_are_to_decide_and_none_are_given() -> None:
    stage = Stage(1 << 20, huge_pages=False)
    given, of_another = ({name: typical_costs("cma")} for name in ("cma", "nixl"))
    ways = [PushWays(stage, None, costs) for costs in (None, of_another, given)]
    ways += [PushWays(stage, Strategy.GATHER), PushWays()]
    typical = typical_costs("cma").seconds_per_copy
    assert [way._costs("cma").seconds_per_copy == typical for way in ways] == [False, False, True, True, True]
    assert {way._costs("cma").seconds_per_part for way in ways} == {0.0}
