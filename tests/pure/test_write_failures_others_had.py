"""Known faults of other systems' layer-by-layer transfers, each as a test of the code that prevents the fault here."""

from collections.abc import Sequence

import numpy as np
import pytest

from kvferry.errors import HandoffError, Reason
from kvferry.handoff.messages import WriteKey
from kvferry.handoff.source import (
    END,
    BlockList,
    Part,
    Prompt,
    SourceWrite,
    SourceWrites,
    WriteRequest,
    WriteState,
    announced_blocks,
)
from kvferry.layout.shard import TokenShare
from kvferry.plan.match import GroupBlocks, selector_of
from kvferry.plan.planner import PairPlan, Planner, Span, cut_layers, plan_spans
from kvferry.plan.proof import verify_destination

from .arrangements import FULL, STATE, ask, attention, hybrid
from .test_writes_and_loads import load_of

KEY = WriteKey("d", 1, 1)


def part_of(plan: PairPlan, requests: Sequence[GroupBlocks], layers_per_span: int = 0) -> Part:
    order = ["0", "2", "4"]
    has_spans = layers_per_span and "full" in plan.groups
    spans = {"full": plan_spans(plan, "full", cut_layers(order, layers_per_span))} if has_spans else {}
    return Part(plan, announced_blocks(plan, requests)).in_spans(spans)


def written(part: Part, requests: Sequence[GroupBlocks], steps: Sequence[int]) -> np.ndarray:
    """Return the rows of a write whose prompt becomes final in these steps, each span after the other in each."""
    held = {blocks.group: BlockList(blocks.source_first_token, blocks.source_ids.tolist()) for blocks in requests}
    write = SourceWrite("x", part.needs, deadline=1.0)
    final, rows = dict.fromkeys(part.needs, 0), [np.empty((0, 3), dtype=np.uint64)]
    for step in steps:
        for span in sorted(part.needs):
            final[span] = step
            if batch := write.take(final):
                rows.append(part.lower(batch, held))
                write.landed()
    assert (write.state, write.error) == (WriteState.OVER, None)
    return np.concatenate(rows)


def test_a_failure_is_terminal_and_the_destination_does_not_wait_for_ever() -> None:
    side, load = SourceWrites(), load_of({0: "a", 1: "b"}, deadline=1e9)
    for source in (0, 1):
        load.announcing(source)
    part = part_of(Planner([attention(0, 1, ["0"])], attention(0, 1, ["0"])).plans(0)[0], [FULL])
    side.announce(WriteRequest(KEY, "x", 10, "p", part.needs, deadline=1e9), now=0.0)
    side.compute("x", Prompt(10, "p", {}, num_final=END))
    assert side.take(KEY)
    side.stopped(KEY, HandoffError(Reason.TRANSFER_FAILED, "one write failed"))
    over = side.outcome(KEY)
    assert over is not None
    assert over.error is not None
    load.refused(0, over.error)
    assert str(load.error) == str(over.error)
    # The other rank, whatever it wrote, is asked to stop, and its answer ends the wait.
    assert load.writers == [1]
    load.quiet(1)
    assert load.is_over


@pytest.mark.parametrize("first_token", [0, 4, 8])
def test_sources_are_expected_by_the_plan_with_context_parallelism_and_a_prefix_hit(first_token: int) -> None:
    """Every rank of the plan says "done", also one whose tokens the destination has, which writes nothing."""
    sources = [
        attention(0, 1, ["0", "2", "4"], token_share=TokenShare(rank, 2, 4), base_address=rank << 20)
        for rank in range(2)
    ]
    target = attention(0, 1, ["0", "2", "4"], base_address=1 << 30)
    request = ask("full", 12, [9, 3], [4, 5, 6], first_token=first_token)
    plans = Planner(sources, target).plans(0)
    parts = {plan.assignment.source_index: part_of(plan, [request]) for plan in plans}
    assert parts.keys() == {0, 1}
    lists = [(plan.source, written(parts[plan.assignment.source_index], [request], (5, END))) for plan in plans]
    verify_destination(lists, target, [request])
    assert (len(lists[1][1]) == 0) == (first_token == 8)
    load = load_of({index: part.digest for index, part in parts.items()}, deadline=1.0)
    for index in parts:
        load.announcing(index)
    load.done(0, parts[0].digest)
    assert not load.is_over
    load.done(1, parts[1].digest)
    assert load.is_over


def test_blocks_that_are_freed_while_they_are_sent_do_not_count() -> None:
    """The engine holds references until the transfer ends; where they end early, what was read then is void."""
    side = SourceWrites()
    part = part_of(Planner([attention(0, 1, ["0"])], attention(0, 1, ["0"])).plans(0)[0], [FULL])
    side.announce(WriteRequest(KEY, "x", 10, "p", part.needs, deadline=1e9), now=0.0)
    side.compute("x", Prompt(10, "p", {}, num_final=END))
    assert side.take(KEY)
    side.end("x", HandoffError(Reason.LEASE_EXPIRED, "nobody took it"))
    assert side.outcome(KEY) is None
    side.landed(KEY)
    over = side.outcome(KEY)
    assert over is not None
    assert over.error is not None
    assert over.error.reason is Reason.LEASE_EXPIRED


def test_a_replica_is_chosen_once_for_all_chunks_of_a_transfer() -> None:
    """Not by the step: chunks would come from several sources, of which only the last reports."""
    sources = [attention(rank, 8, ["0"]) for rank in range(8)]
    chosen = set()
    for number in range(32):
        transfer_id = f"xfer-{number}"
        each = {
            tuple(plan.assignment.source_index for plan in Planner(sources, attention(0, 1, ["0"])).plans(selector))
            for selector in [selector_of(transfer_id)] * 2
        }
        assert len(each) == 1
        chosen |= each
    assert len(chosen) > 1, "transfers are spread over the replicas"


@pytest.mark.parametrize("layers_per_span", [0, 1, 2])
@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 4)])
def test_states_of_all_ranks_are_awaited(source_tp: int, target_tp: int, layers_per_span: int) -> None:
    """A hybrid in chunks and spans: exactly the needed bytes, and no rank is done before its state has gone."""
    requests = [FULL, STATE]
    sources = [hybrid(rank, source_tp) for rank in range(source_tp)]
    for target in (hybrid(rank, target_tp) for rank in range(target_tp)):
        plans = Planner(sources, target).plans(0)
        parts = [part_of(plan, requests, layers_per_span) for plan in plans]
        lists = [
            (plan.source, written(part, requests, (3, 4, 9, END))) for plan, part in zip(plans, parts, strict=True)
        ]
        verify_destination(lists, target, requests)
        for part in parts:
            write = SourceWrite("x", part.needs, deadline=1.0)
            write.take(dict.fromkeys(part.needs, 10))
            write.landed()
            assert (write.state is WriteState.OPEN) == (Span("state") in part.needs)
        assert any(Span("state") in part.needs for part in parts)


def test_sglang_23515_a_short_prompt_takes_as_few_descriptors_as_one_transfer() -> None:
    """SGLang PR #23515: layer by layer, short prompts were 18 % slower."""
    layers = ["0", "2", "4"]
    [plan] = Planner([attention(0, 1, layers)], attention(0, 1, layers, base_address=1 << 20)).plans(0)
    part = part_of(plan, [FULL], layers_per_span=1)
    batch = SourceWrite("x", part.needs, 1.0).take(dict.fromkeys(part.needs, END))
    rows = part.lower(batch, {"full": BlockList(0, FULL.source_ids.tolist())})
    assert rows.tolist() == plan.lower([FULL]).tolist()
