"""Chunks of a push write the same bytes as one pull: labels through vLLM's own views."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from kvferry.errors import HandoffError, Reason
from kvferry.handoff.source import END, BlockList, Part, SourceWrite, WriteState, announced_blocks
from kvferry.plan.match import GroupBlocks
from kvferry.plan.planner import PairPlan, Planner, Span, cut_layers, plan_spans

from .engines_in_process import BLOCK_SIZE, LAYERS, Rank, whole_blocks

CHUNKS = [(5,), (16, 33, 40), (1, 2, 3), (), (47,)]


def pushed(plan: PairPlan, requests: Sequence[GroupBlocks], steps: Iterable[int]) -> list[list[int]]:
    """Return the rows of a push whose prompt becomes final in these steps."""
    part = Part(plan, announced_blocks(plan, requests))
    held = {blocks.group: BlockList(blocks.source_first_token, blocks.source_ids.tolist()) for blocks in requests}
    push, rows = SourceWrite("x", part.needs, deadline=1.0), []
    for final in (*steps, END):
        batch = push.take(dict.fromkeys(part.needs, final))
        if batch:
            rows += part.lower(batch, held).tolist()
            push.landed()
    assert (push.state, push.error) == (WriteState.OVER, None)
    return rows


@pytest.mark.parametrize("steps", CHUNKS, ids=str)
@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_chunks_write_what_one_transfer_does(steps: tuple[int, ...], source_tp: int, target_tp: int) -> None:
    sources = [Rank(rank, source_tp).shard for rank in range(source_tp)]
    requests = [whole_blocks("full", [5, 1, 4], [0, 3, 2])]
    for target in (Rank(rank, target_tp).shard for rank in range(target_tp)):
        for plan in Planner(sources, target).plans(0):
            assert _bytes(pushed(plan, requests, steps)) == _bytes(plan.lower(requests).tolist())


@pytest.mark.parametrize("layers_per_span", [1, 2])
@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 1), (2, 1), (1, 2)])
def test_spans_of_layers_write_what_one_transfer_does(layers_per_span: int, source_tp: int, target_tp: int) -> None:
    """The first chunk span by span, the second all at once, the third in part by spans."""
    sources = [Rank(rank, source_tp).shard for rank in range(source_tp)]
    requests = [whole_blocks("full", [5, 1, 4], [0, 3, 2])]
    for target in (Rank(rank, target_tp).shard for rank in range(target_tp)):
        for plan in Planner(sources, target).plans(0):
            plans = plan_spans(plan, "full", cut_layers(LAYERS, layers_per_span))
            part = Part(plan, announced_blocks(plan, requests)).in_spans({"full": plans})
            spans = [Span("full", span) for span in plans]
            push, rows = SourceWrite("x", part.needs, deadline=1.0), []
            steps = [{span: 4} for span in spans] + [
                dict.fromkeys(spans, 8),
                {spans[-1]: END},
                dict.fromkeys(spans, END),
            ]
            for final in steps:
                if batch := push.take(final):
                    rows += part.lower(batch, {"full": BlockList(0, [5, 1, 4])}).tolist()
                    push.landed()
            assert push.state is WriteState.OVER
            assert _bytes(rows) == _bytes(plan.lower(requests).tolist())


def test_a_span_that_a_stage_of_a_pipeline_does_not_hold_is_not_awaited() -> None:
    source, target = Rank(0, 1), Rank(0, 1, layers=["1"])
    target.shard = msgspec.structs.replace(target.shard, pp_rank=1, pp_size=2)
    [plan] = Planner([source.shard], target.shard).plans(0)
    requests = [whole_blocks("full", [1], [3])]
    part = Part(plan, announced_blocks(plan, requests)).in_spans(
        {"full": plan_spans(plan, "full", {1: ("0",), 2: ("1",)})}
    )
    assert list(part.needs) == [Span("full", 2)]
    push = SourceWrite("x", part.needs, 1.0)
    rows = part.lower(push.take({Span("full", 2): END}), {"full": BlockList(0, [1])})
    push.landed()
    assert (push.state, rows.tolist()) == (WriteState.OVER, plan.lower(requests).tolist())


def test_all_spans_together_take_as_few_descriptors_as_the_whole() -> None:
    [plan] = Planner([Rank(0, 1).shard], Rank(0, 1).shard).plans(0)
    requests = [whole_blocks("full", [1, 4], [3, 0])]
    plans = plan_spans(plan, "full", cut_layers(LAYERS, 1))
    part = Part(plan, announced_blocks(plan, requests)).in_spans({"full": plans})
    rows = part.lower(
        SourceWrite("x", part.needs, 1.0).take(dict.fromkeys(part.needs, END)), {"full": BlockList(0, [1, 4])}
    )
    assert rows.tolist() == plan.lower(requests).tolist()


def test_the_digest_names_what_is_to_be_written() -> None:
    [plan] = Planner([Rank(0, 1).shard], Rank(0, 1).shard).plans(0)
    [other] = Planner([Rank(0, 1).shard], Rank(1, 2).shard).plans(0)
    parts = [
        Part(which, announced_blocks(which, [whole_blocks("full", [0] * len(ids), ids)]))
        for which, ids in ((plan, [1, 2]), (plan, [2, 1]), (plan, [1]), (other, [1, 2]), (plan, [1, 2]))
    ]
    digests = [part.digest for part in parts]
    assert len(set(digests)) == 4
    assert digests[0] == digests[-1]


def test_blocks_that_the_sender_no_longer_has_are_an_error() -> None:
    [plan] = Planner([Rank(0, 1).shard], Rank(0, 1).shard).plans(0)
    part = Part(plan, announced_blocks(plan, [whole_blocks("full", [0, 0], [1, 2])]))
    push = SourceWrite("x", part.needs, deadline=1.0)
    batch = push.take({Span("full"): END})
    with pytest.raises(HandoffError) as refused:
        part.lower(batch, {"full": BlockList(BLOCK_SIZE, [4])})
    assert refused.value.reason is Reason.INVALID_REQUEST


def test_a_group_that_is_not_announced_is_an_error() -> None:
    [plan] = Planner([Rank(0, 1).shard], Rank(0, 1).shard).plans(0)
    with pytest.raises(HandoffError) as refused:
        Part(plan, ())
    assert refused.value.reason is Reason.GROUP_MISMATCH


def _bytes(rows: Any) -> dict[int, int]:
    """Return from where each destination byte comes; no byte may come twice."""
    array = np.asarray(rows, dtype=np.int64).reshape(-1, 3)
    pairs = [(row[1] + offset, row[0] + offset) for row in array.tolist() for offset in range(0, row[2], 4)]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)
