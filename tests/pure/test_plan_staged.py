"""Staged moves: the proof finds wrong moves; the choice of strategy. test_plan_properties.py tests right moves."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvferry.arrays import Descriptors
from kvferry.errors import PlanError, Reason, VerificationError
from kvferry.layout.dense import shard_for
from kvferry.layout.group import CacheKind, TokenShare
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import Shard
from kvferry.plan.planner import PairPlan, Planner
from kvferry.plan.proof.verify import compose, verify_pair
from kvferry.plan.request import GroupBlocks
from kvferry.plan.staging.scatter import (
    Merge,
    Numbered,
    ScatterPlan,
    cut_rounds,
    join_merges,
    lay_out_round,
    stage_offsets,
)
from kvferry.plan.staging.strategy import LEAST_GAIN, TYPICAL_COSTS, Strategy, choose

from .arrangements import attention
from .strategies import Move, moves

GAPS, ROUNDS = st.sampled_from([0, 1, 8, 64, 1 << 20]), st.sampled_from([1, 300, 1 << 30])
CASES = int(os.environ.get("KVFERRY_CASES", "0"))


def staged_rows(plan: PairPlan, requests: Sequence[GroupBlocks], gap_bytes: int, round_bytes: int) -> Descriptors:
    """Return what the rounds of a scatter amount to."""
    parts: list[Numbered] = [(0, part) for part in ScatterPlan(plan, gap_bytes).staged_blocks(requests)]
    rows = [np.empty((0, 3), dtype=np.uint64)]
    for staged in cut_rounds(parts, round_bytes):
        reads, merges, num_bytes = lay_out_round(staged)
        rows.append(compose(reads, merges, num_bytes, plan.source))
    return np.concatenate(rows)


def verify_round(rows: Descriptors, plan: PairPlan, requests: Sequence[GroupBlocks]) -> None:
    verify_pair(rows[rows[:, 2] > 0], plan.source, plan.destination, requests, plan.heads)


Round = tuple[npt.NDArray[np.int64], list[Merge]]


def without_a_read(staged: Round, at: int) -> Round:
    return np.delete(staged[0], at % len(staged[0]), axis=0), staged[1]


def read_elsewhere(staged: Round, at: int) -> Round:
    staged[0][at % len(staged[0]), 0] += 1
    return staged


def read_twice(staged: Round, at: int) -> Round:
    return np.concatenate((staged[0], staged[0][at % len(staged[0])][None])), staged[1]


def read_beyond_the_stage(staged: Round, at: int) -> Round:
    staged[0][at % len(staged[0]), 1] += 1 << 40
    return staged


def with_a_merge(change: Callable[[Merge], Merge]) -> Callable[[Round, int], Round]:
    def mutate(staged: Round, at: int) -> Round:
        index = at % len(staged[1])
        staged[1][index] = change(staged[1][index])
        return staged

    return mutate


MUTATIONS = {
    "without a read": without_a_read,
    "read elsewhere": read_elsewhere,
    "read twice": read_twice,
    "read beyond the stage": read_beyond_the_stage,
    "merge from elsewhere": with_a_merge(lambda merge: replace(merge, stage_offset=merge.stage_offset + 1)),
    "merge to elsewhere": with_a_merge(lambda merge: replace(merge, destination_address=merge.destination_address + 1)),
    "shorter runs": with_a_merge(lambda merge: replace(merge, run_bytes=merge.run_bytes - 1)),
    "longer runs": with_a_merge(lambda merge: replace(merge, run_bytes=merge.run_bytes + 1)),
    "other blocks": with_a_merge(lambda merge: replace(merge, destination_blocks=merge.destination_blocks + 1)),
    "no block": with_a_merge(lambda merge: replace(merge, destination_blocks=merge.destination_blocks[1:])),
}


@settings(max_examples=max(40, CASES // 20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(moves(), GAPS, st.integers(0, 1000), st.sampled_from(list(MUTATIONS)))
def test_a_wrong_stage_is_caught(move: Move, gap_bytes: int, at: int, mutation: str) -> None:
    asked = move.of(move.destinations[0])
    plan = Planner(move.sources, move.destinations[0]).plans(0)[0]
    staged: list[Numbered] = [(0, part) for part in ScatterPlan(plan, gap_bytes).staged_blocks(asked)]
    assume(staged)
    reads, merges, num_bytes = lay_out_round(staged)
    reads, merges = MUTATIONS[mutation]((reads.copy(), merges), at)
    with pytest.raises(VerificationError):
        verify_round(compose(reads, merges, num_bytes, plan.source), plan, asked)


SHAPE = {"layers": [str(layer) for layer in range(4)], "num_kv_heads": 8, "head_size": 128, "itemsize": 2}


def shard(layout: NamedLayout, tp_rank: int = 0, tp_size: int = 1, block_size: int = 16) -> Shard:
    return shard_for(
        layout=layout,
        tp_rank=tp_rank,
        tp_size=tp_size,
        block_size=block_size,
        num_blocks=64,
        base_address=tp_rank << 40,
        **SHAPE,  # type: ignore[arg-type]
    )


def pair(layout: NamedLayout, source_tp: int, destination_tp: int) -> PairPlan:
    sources = [shard(layout, rank, source_tp) for rank in range(source_tp)]
    return Planner(sources, shard(layout, 0, destination_tp)).plans(0)[0]


def test_a_head_merge_of_short_runs_is_read_in_whole_pages() -> None:
    plan = pair(NamedLayout.LBNHC, 2, 1)
    request = GroupBlocks(
        group="full", first_token=0, last_token=64, source_block_ids=[9, 3, 7, 8], destination_block_ids=[1, 5, 2, 4]
    )
    (part,) = ScatterPlan(plan, 0).staged_blocks([request])
    reads = part.reads(0)
    # Blocks 7, 8 and 9 lie together in each of the 4 layers.
    assert len(reads) == 8
    assert len(plan.lower([request])) == 4 * 4 * 16
    assert len(part.merges(0)) == 1


def test_a_head_split_reads_the_gaps_where_that_is_quicker() -> None:
    plan = pair(NamedLayout.LBNHC, 1, 2)
    choice = choose(plan, TYPICAL_COSTS["nixl"])
    assert choice.chosen.strategy is Strategy.SCATTER
    assert choice.chosen.gap_bytes > 0
    without_gaps = next(found for found in choice.rejected if found.strategy is Strategy.SCATTER)
    assert choice.chosen.num_descriptors * 16 == without_gaps.num_descriptors
    assert choice.chosen.num_bytes > without_gaps.num_bytes
    assert choice.chosen.copied_bytes == without_gaps.copied_bytes


def test_long_runs_go_directly() -> None:
    choice = choose(pair(NamedLayout.BHLNC, 2, 1), TYPICAL_COSTS["nixl"])
    assert choice.chosen.strategy is Strategy.DIRECT
    assert [found.strategy for found in choice.rejected] == [Strategy.SCATTER]


def test_the_choice_turns_where_descriptors_cost_so_much_more_than_the_copy() -> None:
    plan, costs = pair(NamedLayout.LBNHC, 2, 1), replace(TYPICAL_COSTS["nixl"], seconds_per_copy=0.0)
    direct, scatter = (choose(plan, costs, strategy).chosen for strategy in (Strategy.DIRECT, Strategy.SCATTER))
    copying = scatter.copied_bytes / costs.copy_bytes_per_second + scatter.num_copied_runs * 20e-9
    bytes_once = direct.num_bytes / costs.bytes_per_second
    even = (LEAST_GAIN * copying + (LEAST_GAIN - 1) * bytes_once) / (
        direct.num_descriptors - LEAST_GAIN * scatter.num_descriptors
    )
    for factor, expected in ((0.99, Strategy.DIRECT), (1.01, Strategy.SCATTER)):
        turned = replace(costs, seconds_per_descriptor=even * factor)
        assert choose(plan, turned).chosen.strategy is expected


@pytest.mark.parametrize(("source_tp", "num_remote_runs"), [(2, 4 * 128), (1, 16 * 4 * 128)])
def test_what_lies_together_in_the_peers_memory_is_one_remote_run(source_tp: int, num_remote_runs: int) -> None:
    """Heads of 16 tokens in 4 layers of 128 blocks: whole where they are merged, apart where they are split."""
    plan = pair(NamedLayout.LBNHC, source_tp, 3 - source_tp)
    direct = choose(plan, TYPICAL_COSTS["cma"], Strategy.DIRECT).chosen
    assert (direct.num_descriptors, direct.num_remote_runs) == (16 * 4 * 128, num_remote_runs)
    slower = replace(TYPICAL_COSTS["cma"], seconds_per_remote_run=1.0)
    added = choose(plan, slower, Strategy.DIRECT).chosen.seconds - direct.seconds
    assert added == pytest.approx(num_remote_runs * (1.0 - TYPICAL_COSTS["cma"].seconds_per_remote_run))


def test_a_merge_over_a_transport_that_joins_what_lies_together_goes_directly() -> None:
    plan, cma = pair(NamedLayout.LBNHC, 2, 1), TYPICAL_COSTS["cma"]
    apart = replace(cma, seconds_per_descriptor=cma.seconds_per_run, seconds_per_remote_run=0.0)
    assert choose(plan, apart).chosen.strategy is Strategy.SCATTER
    assert choose(plan, cma).chosen.strategy is Strategy.DIRECT


def test_shares_of_the_tokens_that_first_meet_behind_the_first_blocks_have_a_strategy() -> None:
    """Token 5 is the first that rank 1 of 2 and rank 2 of 3 both hold."""

    def shared(rank: int, size: int) -> Shard:
        share = TokenShare(rank, size, 1)
        return attention(rank, size, ["0"], kind=CacheKind.MLA, num_kv_heads=1, block_size=1, token_share=share)

    plan = Planner([shared(rank, 2) for rank in range(2)], shared(2, 3)).plans(0)[1]
    assert [group.first_phases() for group in plan.groups.values()] == [[]]
    assert choose(plan, TYPICAL_COSTS["nixl"]).chosen.strategy is Strategy.DIRECT


def test_a_stage_smaller_than_a_block_leaves_only_direct() -> None:
    plan = pair(NamedLayout.LBNHC, 2, 1)
    block_bytes = 4 * 16 * 4 * 256 * 2
    assert choose(plan, TYPICAL_COSTS["nixl"], stage_bytes=block_bytes + 64).chosen.strategy is Strategy.SCATTER
    small = choose(plan, TYPICAL_COSTS["nixl"], stage_bytes=block_bytes)
    assert small.chosen.strategy is Strategy.DIRECT
    assert "one block needs a stage of" in small.impossible
    with pytest.raises(PlanError) as caught:
        choose(plan, TYPICAL_COSTS["nixl"], Strategy.SCATTER, stage_bytes=block_bytes)
    assert caught.value.reason is Reason.UNSUPPORTED


def test_ranks_that_fill_the_same_blocks_go_in_step_and_fill_them_by_one_copy() -> None:
    ids = np.random.default_rng(0).permutation(64)[:60]
    request = GroupBlocks(
        group="full", first_token=0, last_token=960, source_block_ids=ids, destination_block_ids=ids[::-1]
    )
    sources = [shard(NamedLayout.LBNHC, rank, 2) for rank in range(2)]
    plans = Planner(sources, shard(NamedLayout.LBNHC)).plans(0)
    parts: list[Numbered] = [
        (number, part) for number, plan in enumerate(plans) for part in ScatterPlan(plan, 0).staged_blocks([request])
    ]
    block_bytes = parts[0][1].template.block_bytes
    rounds = list(cut_rounds(parts, 4 * block_bytes + 128))
    assert [[number for number, _ in staged] for staged in rounds] == [[0, 1]] * 30
    for staged in rounds:
        begins, _ = stage_offsets(staged)
        (merge,) = join_merges(
            [one for begin, (_, each) in zip(begins, staged, strict=True) for one in each.merges(begin)]
        )
        assert merge.loops[0] == (2, begins[1], 4 * 256 * 2)
        assert merge.num_runs * merge.run_bytes == 4 * block_bytes
    alone = list(cut_rounds(parts, block_bytes + 128))
    assert sorted(len(staged) for staged in alone) == [1] * 120


def test_copies_are_joined_only_where_the_step_is_the_same_on_both_sides() -> None:
    blocks = np.array([3, 1])
    merges = [
        Merge(at, 64, to, 256, blocks, 4, ((2, 4, 32),)) for at, to in ((0, 1000), (8, 1008), (16, 1128), (24, 1136))
    ]
    merges += [
        Merge(32, 64, 1016, 256, blocks, 4, ((2, 8, 32),)),
        Merge(48, 64, 2000, 256, blocks + 1, 4, ((2, 4, 32),)),
    ]
    found = join_merges(merges[::-1])
    assert sorted((merge.stage_offset, merge.num_runs) for merge in found) == [(0, 8), (16, 8), (32, 4), (48, 4)]
    everything = np.array([[0, 0, 128]])
    source = shard(NamedLayout.LBNHC)
    rows = [compose(everything, some, 128, source).tolist() for some in (merges, found)]
    assert sorted(rows[0]) == sorted(rows[1])


def test_rounds_hold_no_more_than_asked_and_every_block_once() -> None:
    plan = pair(NamedLayout.LBNHC, 2, 1)
    ids = np.random.default_rng(0).permutation(64)[:60]
    request = GroupBlocks(
        group="full", first_token=0, last_token=960, source_block_ids=ids, destination_block_ids=ids[::-1]
    )
    parts: list[Numbered] = [
        (number, part) for number in range(2) for part in ScatterPlan(plan, 0).staged_blocks([request])
    ]
    limit = 7 * parts[0][1].template.block_bytes + 64
    rounds = list(cut_rounds(parts, limit))
    assert all(stage_offsets(staged)[1] <= limit for staged in rounds)
    for number in range(2):
        blocks = [each.source_blocks for staged in rounds for owner, each in staged if owner == number]
        assert sorted(np.concatenate(blocks)) == sorted(ids)
    assert len(rounds) == 20
