"""Pipelines in vLLM's engine core: the count of ranks, deferred blocks, and the published ranks."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvferry.errors import HandoffError, Reason
from kvferry.handoff.messages import EndPoint, Handle, RankEntry
from kvferry.integrations.vllm.connector import KVFerryConnector
from kvferry.integrations.vllm.scheduler.blocks import KeptBlocks
from kvferry.integrations.vllm.step import FailedTurns, PromptLoad, RankMetadata, StepMetadata
from kvferry.integrations.vllm.versions import installed_version
from kvferry.integrations.vllm.worker.records import LoadTraces, Statistics, TransferLog
from kvferry.integrations.vllm.worker.role import WorkerRole
from kvferry.layout.named_layouts import NamedLayout
from kvferry.plan.match import GroupBlocks

from .scheduler_requests import IDENTITY
from .vllm_caches import CacheRank, full, move, window

TP, PP = 2, 2
HANDLE = Handle("r", 3)
# As vLLM groups them: sliding windows in "0" (0, 3) and "1" (1), full attention in "2" (2, 4).
LAYERS = {"0": window, "1": window, "2": full, "3": window, "4": full}
WHOLE: Sequence[Sequence[str]] = ()
SHORT_LAST, SHORT_FIRST = (["0", "1", "2"], ["3", "4"]), (["0"], ["1", "2", "3", "4"])
THREE = (["0"], ["1", "2"], ["3", "4"])


def rank_without_engine() -> Any:
    role: Any = WorkerRole.__new__(WorkerRole)
    role._refused, role._failed_turns, role._rank, role._source = [], set(), None, None
    role._statistics, role._log = Statistics(), TransferLog("", 0, NamedLayout.BHLNC)
    role._traces = LoadTraces(0)
    return role


def test_a_turn_that_cannot_be_ordered_is_received_and_no_request_fails_for_it() -> None:
    """Each rank reports it once; the scheduler then lets the engine compute the turn."""
    role, error = rank_without_engine(), HandoffError(Reason.INVALID_REQUEST, "of no use.")
    turn, load = PromptLoad("t", 1.0, error=error, is_optional=True), PromptLoad("r", 1.0, error=error)
    role.end_loads(StepMetadata(loads=[turn, load]))
    assert role.take_finished() == ({"t", "r"}, {"r"})
    assert role.take_failed_turns() == FailedTurns(frozenset({"t"}))
    assert role.take_finished() == (set(), set())
    assert role.take_failed_turns() is None


def test_a_load_is_over_when_every_rank_of_every_stage_has_said_so_once() -> None:
    """Trap 11: the aggregator counts down from the number of ranks, and a second report would never be undone."""
    connector: Any = SimpleNamespace(get_finished_count=lambda: KVFerryConnector.get_finished_count(connector))
    aggregator = KVOutputAggregator.from_connector(connector, world_size=TP * PP)
    roles = [rank_without_engine() for _ in range(TP * PP)]
    refused = StepMetadata(loads=[PromptLoad("r", 1.0, error=HandoffError(Reason.INVALID_REQUEST, "of no use."))])
    reports = []
    for late in (*roles, None):  # one rank after the other gets to the order
        if late is not None:
            late.end_loads(refused)
        outputs: list[Any] = []
        for role in roles:
            received, failed = role.take_finished()
            output = KVConnectorOutput(finished_recving=received, failed_recving=failed)
            outputs.append(ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=output))
        found = aggregator.aggregate(outputs, output_rank=(PP - 1) * TP)
        assert found is not None
        assert found.kv_connector_output is not None
        reports.append((found.kv_connector_output.finished_recving, found.kv_connector_output.failed_recving))
    assert reports == [(None, set())] * 3 + [({"r"}, {"r"}), (None, set())]
    assert not aggregator._recv_remaining_count


@pytest.mark.parametrize("is_ended_first", [False, True])
def test_blocks_of_a_step_in_flight_stay_with_both_owners(is_ended_first: bool) -> None:
    """Trap 12: with batches in flight vLLM drops a finished request's references later, perhaps after its reader."""
    pool = BlockPool(num_gpu_blocks=8, enable_caching=False, hash_block_size=16)
    held = KeptBlocks()
    held.bind(pool)
    blocks = pool.get_new_blocks(3)
    num_free = pool.get_num_free_blocks()
    held.keep(HANDLE, [[block.block_id for block in blocks]])
    drops = [lambda: held.free(HANDLE), lambda: pool.free_blocks(reversed(blocks))]
    for drop, expected in zip(drops if is_ended_first else drops[::-1], (num_free, num_free + 3), strict=True):
        drop()
        assert pool.get_num_free_blocks() == expected


def test_a_request_has_given_its_blocks_up_once_the_last_block_of_one_group_is_unshared() -> None:
    """Another request may share a group to its end: a group of a prefix alone, of which it has the same last block."""
    pool = BlockPool(num_gpu_blocks=8, enable_caching=False, hash_block_size=16)
    null = pool.null_block
    held = KeptBlocks()
    held.bind(pool)
    whole, window = pool.get_new_blocks(2), pool.get_new_blocks(1)
    num_references = null.ref_cnt
    of_request = [*whole, *window]
    held.keep(HANDLE, [[each.block_id for each in whole], [null.block_id, window[0].block_id], [null.block_id], []])
    assert (held.num_kept, null.ref_cnt) == (3, num_references), "the null block is nobody's"
    pool.touch(whole)  # by another request
    assert not held.are_given_up(HANDLE)
    pool.free_blocks(reversed(of_request))
    assert held.are_given_up(HANDLE)
    held.free(HANDLE)
    assert null.ref_cnt == num_references


def test_ranks_are_published_stage_by_stage() -> None:
    """Workers answer in any order, each with its (pp, tp); none of them is named twice or left out."""
    published: list[RankEntry] = []
    connector: Any = KVFerryConnector.__new__(KVFerryConnector)
    connector._scheduler = SimpleNamespace(publish=published.extend, check_ranks=MagicMock())
    entries = {
        (pp, tp): RankEntry(tp, pp, b"", {}, EndPoint("127.0.0.1", 1, 1))
        for tp in range(TP)
        for pp in reversed(range(PP))
    }
    connector.set_xfer_handshake_metadata_pp_aware(
        {place: RankMetadata(msgspec.msgpack.encode(entry), IDENTITY) for place, entry in entries.items()}
    )
    assert [(entry.pp_rank, entry.tp_rank) for entry in published] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def engine(stages: Sequence[Sequence[str]], tp_size: int, layout: str) -> list[CacheRank]:
    specs = {name: spec(tp_size) for name, spec in LAYERS.items()}
    places = [(stage, rank) for stage in range(max(len(stages), 1)) for rank in range(tp_size)]
    return [CacheRank(specs, layout, (rank, tp_size), stages=stages, pp_rank=stage) for stage, rank in places]


def requests_of(num_groups: int) -> list[GroupBlocks]:
    """Two blocks of each group, others on either side."""
    return [
        GroupBlocks(
            group=str(group),
            first_token=0,
            last_token=32,
            source_block_ids=[2 * group + 1, 2 * group + 2],
            destination_block_ids=[10 - 2 * group, 9 - 2 * group],
        )
        for group in range(num_groups)
    ]


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ((SHORT_LAST, 1), (WHOLE, 1)),
        ((WHOLE, 1), (SHORT_LAST, 1)),
        ((SHORT_LAST, 2), (WHOLE, 2)),
        ((SHORT_FIRST, 2), (SHORT_LAST, 1)),
        ((THREE, 1), (SHORT_FIRST, 2)),
    ],
    ids=["pp2-1", "1-pp2", "pp2x2-2", "pp2x2-pp2", "pp3-pp2x2"],
)
def test_stages_of_a_hybrid_meet_through_vllms_own_groups_and_views(prefill: Any, decode: Any) -> None:
    """A stage has all groups, some without a layer of its own: labels are written and found through vLLM's views."""
    sources, destinations = engine(*prefill, "BLHNC"), engine(*decode, "LBHNC")
    assert {tuple(map(len, rank.groups())) for rank in engine(SHORT_LAST, 1, "BLHNC")} == {(1, 1, 1), (1, 0, 1)}
    requests = requests_of(3)
    for rank in sources:
        rank.label(requests)
    for rank in destinations:
        move(sources, rank, requests)
        rank.check(requests, 32)


DRAFT = ("mtp.0", "mtp.1")


@pytest.mark.parametrize(("sizes", "stages"), [((2, 1), False), ((1, 2), False), ((1, 2), True)])
@pytest.mark.parametrize("drafter", [full, window], ids=["with the target's", "in groups of their own"])
def test_a_drafters_layers_move_too(drafter: Any, sizes: tuple[int, int], stages: bool) -> None:
    """MTP and EAGLE: vLLM puts their caches with the target's where they are alike, else into groups that it flags.

    In a pipeline they belong to the last stage, however the other side is cut.
    """
    layers = {**dict.fromkeys(("0", "1", "2", "3"), full), **dict.fromkeys(DRAFT, drafter)}
    cuts = ([["0"], ["1", "2", "3", *DRAFT]], [["0", "1", "2"], ["3", *DRAFT]]) if stages else ([], [])

    def side(cut: Sequence[Sequence[str]], tp_size: int, layout: str) -> list[CacheRank]:
        specs = {name: spec(tp_size) for name, spec in layers.items()}
        places = [(stage, rank) for stage in range(max(len(cut), 1)) for rank in range(tp_size)]
        more = {"stages": cut, "drafter": DRAFT}
        return [CacheRank(specs, layout, (rank, tp_size), pp_rank=stage, **more) for stage, rank in places]

    sources, destinations = side(cuts[0], sizes[0], "BLHNC"), side(cuts[1], sizes[1], "LBHNC")
    whole = side([], 1, "BLHNC")[0]
    # 0.30 flags no group here; since 0.33 vLLM flags a group of both too.
    is_flagged = drafter is window and not installed_version().startswith("0.30.")
    flags = {frozenset(group): flag for group, flag in zip(whole.groups(), whole.is_drafters, strict=True)}
    assert [flag for group, flag in flags.items() if group <= set(DRAFT)] == ([is_flagged] if drafter is window else [])
    assert not any(flag for group, flag in flags.items() if group.isdisjoint(DRAFT))
    requests = requests_of(len(whole.is_drafters))
    for rank in sources:
        rank.label(requests)
    for rank in destinations:
        move(sources, rank, requests)
        rank.check(requests, 32)
