"""What is packed before it is written: real bytes over memcpy and cma, in rounds, and what a failure leaves behind."""

from dataclasses import replace

import numpy as np
import pytest

from kvferry.errors import PlanError, Reason
from kvferry.execution.stage import Stage
from kvferry.execution.write import Writing
from kvferry.layout.dense import shard_for
from kvferry.layout.named_layouts import NamedLayout
from kvferry.plan.planner import PairPlan, Planner
from kvferry.plan.request import GroupBlocks
from kvferry.plan.staging.scatter import NOTHING, StagedPart
from kvferry.plan.staging.staged_plan import ROUNDS_PER_STAGE, GatherPlan
from kvferry.transport.faults import FaultPlan, FaultyTransport
from kvferry.transport.protocol import Region, Status, Transport, reach
from kvferry.transport.registry import Link, open_transport

LAYERS, HEADS, BLOCK_SIZE, NUM_BLOCKS = ["0", "1", "2"], 4, 8, 40
ROW_BYTES = HEADS * 16 * 2 * 2
CACHE_BYTES = len(LAYERS) * NUM_BLOCKS * BLOCK_SIZE * ROW_BYTES


class Pair:
    """A source of one rank and the ranks of a destination, each in memory of its own; tokens are apart everywhere."""

    def __init__(
        self,
        layouts: tuple[NamedLayout, NamedLayout] = (NamedLayout.LBNHC, NamedLayout.LBNHC),
        tp_size: int = 2,
        transport: str = "memcpy",
        stage_bytes: int = 1 << 20,
    ) -> None:
        self.source = np.random.default_rng(1).integers(0, 256, CACHE_BYTES, np.uint8)
        self.caches = [np.zeros(CACHE_BYTES // tp_size, np.uint8) for _ in range(tp_size)]
        self.stage = Stage(stage_bytes, huge_pages=False)
        holder, self.writer = open_transport(transport), open_transport(transport)
        end_point = holder.register([region(memory) for memory in self.caches])
        self.writer.register([region(self.source), self.stage.region])
        self.holder, self.peer = holder, reach(self.writer, end_point)
        shape = {"layers": LAYERS, "num_kv_heads": HEADS, "head_size": 16, "itemsize": 2, "block_size": BLOCK_SIZE}
        shape["num_blocks"] = NUM_BLOCKS
        source = shard_for(layout=layouts[0], base_address=self.source.ctypes.data, **shape)
        self.plans: list[PairPlan] = []
        for rank, memory in enumerate(self.caches):
            place = {"tp_rank": rank, "tp_size": tp_size, "base_address": memory.ctypes.data}
            [plan] = Planner([source], shard_for(layout=layouts[1], **place, **shape)).plans(0)
            self.plans.append(plan)
        ids = np.random.default_rng(5).permutation(NUM_BLOCKS)
        # From within a block to within a block: both ends are in part another's.
        self.request = GroupBlocks(
            group="full",
            first_token=3,
            last_token=29 * BLOCK_SIZE + 5,
            source_block_ids=ids[:30],
            destination_block_ids=ids[::-1][:30],
        )

    def link(self, transport: Transport | None = None) -> Link:
        return Link("memcpy", transport or self.writer, self.peer)

    def parts(self, plan: PairPlan) -> list[StagedPart]:
        return GatherPlan(plan).parts([self.request])

    def packed(self, plan: PairPlan, transport: Transport | None = None) -> Writing:
        return Writing(self.link(transport), NOTHING, self.parts(plan), self.stage)

    def expect(self) -> list[np.ndarray]:
        """Return what caches hold after the direct way, which other tests prove, and empty them again."""
        for plan in self.plans:
            assert run(Writing(self.link(), plan.lower([self.request]))) is Status.DONE
        expected = [memory.copy() for memory in self.caches]
        for memory in self.caches:
            memory[:] = 0
        return expected

    @property
    def is_stage_free(self) -> bool:
        """Whether the whole stage can be taken at once."""
        taken = self.stage.take("probe", self.stage.memory.nbytes)
        self.stage.give_back("probe")
        return taken == 0


def region(memory: np.ndarray) -> Region:
    return Region(memory.ctypes.data, memory.nbytes)


def run(writing: Writing) -> Status:
    for _ in range(100_000):
        if writing.poll() is not Status.PENDING:
            return writing.status
    raise AssertionError("it never ends")


@pytest.mark.parametrize("transport", ["memcpy", "cma"])
@pytest.mark.parametrize("stage_bytes", [1 << 16, 1 << 20])
@pytest.mark.parametrize(
    ("layouts", "tp_size"),
    [
        ((NamedLayout.LBNHC, NamedLayout.LBNHC), 2),
        ((NamedLayout.LBNHC, NamedLayout.BHLNC), 1),
        ((NamedLayout.BHLNC, NamedLayout.LBNHC), 2),
        ((NamedLayout.BLNHC, NamedLayout.BLNHC), 4),
    ],
)
def test_packed_bytes_are_those_of_the_direct_way(
    layouts: tuple[NamedLayout, NamedLayout], tp_size: int, stage_bytes: int, transport: str
) -> None:
    pair = Pair(layouts, tp_size, transport, stage_bytes)
    expected = pair.expect()
    assert any(memory.any() for memory in expected)
    for plan in pair.plans:
        writing = pair.packed(plan)
        assert run(writing) is Status.DONE
        assert writing.num_descriptors < len(plan.lower([pair.request]))
        assert writing.num_bytes == plan.lower([pair.request])[:, 2].sum()
    assert all(map(np.array_equal, pair.caches, expected))
    assert pair.is_stage_free


def test_rounds_wait_for_room_while_others_have_the_stage() -> None:
    """Two pushes in turns through a stage with room for one round of each: neither keeps the other out."""
    pair = Pair(stage_bytes=1 << 16)
    expected = pair.expect()
    writings = [pair.packed(plan) for plan in pair.plans]
    assert all(writing.num_bytes > 3 * pair.stage.round_bytes for writing in writings), "several rounds"
    taken = pair.stage.take("another", (ROUNDS_PER_STAGE - 1) * pair.stage.round_bytes)
    assert taken == 0
    for _ in range(100_000):
        statuses = [writing.poll() for writing in writings]
        if statuses == [Status.DONE] * 2:
            break
    pair.stage.give_back("another")
    assert [writing.status for writing in writings] == [Status.DONE] * 2
    assert all(map(np.array_equal, pair.caches, expected))
    assert pair.is_stage_free


@pytest.mark.parametrize("num_polls", range(7))
def test_a_cancelled_writing_gives_the_stage_back(num_polls: int) -> None:
    pair = Pair(stage_bytes=1 << 16)
    writing = pair.packed(pair.plans[0])
    for _ in range(num_polls):
        writing.poll()
    while writing.cancel() is Status.PENDING:
        pass
    assert writing.status is Status.CANCELLED
    assert pair.is_stage_free
    before = [memory.copy() for memory in pair.caches]
    assert writing.poll() is Status.CANCELLED
    assert all(map(np.array_equal, pair.caches, before)), "written after its end"


def test_a_failed_write_is_reported_and_gives_the_stage_back() -> None:
    pair = Pair(stage_bytes=1 << 16)
    faulty = FaultyTransport(pair.writer, FaultPlan(fail_after=2))
    writing = pair.packed(pair.plans[0], faulty)
    assert run(writing) is Status.FAILED
    assert writing.error is not None
    assert pair.is_stage_free


def test_a_writing_that_hangs_keeps_its_room_until_it_is_quiet() -> None:
    """A round is on its way and the next one is packed: both have room."""
    pair = Pair(stage_bytes=1 << 16)
    hanging = FaultyTransport(pair.writer, FaultPlan(hang=True))
    writing = pair.packed(pair.plans[0], hanging)
    for _ in range(50):
        assert writing.poll() is Status.PENDING
    assert not pair.is_stage_free
    while writing.cancel() is Status.PENDING:
        pass
    assert pair.is_stage_free


def test_what_is_packed_and_will_not_go_leaves_its_room_while_the_rest_is_not_quiet() -> None:
    """A peer that is stopped may keep a round on its way for ever; others need the stage."""
    pair = Pair(stage_bytes=1 << 16)
    stuck = FaultyTransport(pair.writer, FaultPlan(hang=True))
    stuck.cancel = lambda transfer: Status.PENDING  # type: ignore[method-assign]
    writing = pair.packed(pair.plans[0], stuck)
    for _ in range(50):
        writing.poll()
    room = pair.stage.memory.nbytes - pair.stage.round_bytes
    assert pair.stage.take("another", room) is None
    pair.stage.give_back("another")
    assert [writing.cancel() for _ in range(2)] == [Status.PENDING] * 2
    assert pair.stage.take("another", room) is not None


def test_a_writing_that_waits_for_room_gives_its_place_up() -> None:
    pair = Pair(stage_bytes=1 << 16)
    assert pair.stage.take("another", pair.stage.memory.nbytes) == 0
    writing = pair.packed(pair.plans[0])
    for _ in range(5):
        assert writing.poll() is Status.PENDING
    assert writing.cancel() is Status.CANCELLED
    pair.stage.give_back("another")
    assert pair.is_stage_free


def test_what_goes_directly_and_what_is_packed_may_be_of_one_writing() -> None:
    pair = Pair(stage_bytes=1 << 16)
    expected = pair.expect()
    first = replace(pair.request, last_token=10 * BLOCK_SIZE)
    rest = replace(pair.request, first_token=10 * BLOCK_SIZE)
    for plan in pair.plans:
        parts = GatherPlan(plan).parts([rest])
        writing = Writing(pair.link(), plan.lower([first]), parts, pair.stage)
        assert run(writing) is Status.DONE
        assert writing.num_bytes == plan.lower([pair.request])[:, 2].sum()
    assert all(map(np.array_equal, pair.caches, expected))
    with pytest.raises(PlanError, match="no stage"):
        Writing(pair.link(), NOTHING, parts)


def test_a_block_larger_than_the_stage_is_refused_before_anything_moves() -> None:
    pair = Pair((NamedLayout.LBNHC, NamedLayout.BHLNC), tp_size=1)
    pair.stage = Stage(1 << 12, huge_pages=False)
    with pytest.raises(PlanError, match="one block fills") as refusal:
        pair.packed(pair.plans[0])
    assert refusal.value.reason is Reason.UNSUPPORTED
    assert pair.is_stage_free
    assert not pair.caches[0].any()
