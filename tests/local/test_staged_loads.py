"""Loads through a stage: real bytes over memcpy and cma, in rounds, and the state after a failure."""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest

from kvferry.errors import HandoffError, PlanError, Reason, TransportError
from kvferry.execution import stage as staging
from kvferry.execution.executor import Executor
from kvferry.execution.guard_words import GuardWords, Scratch
from kvferry.execution.job import JobResult, Phase
from kvferry.execution.read import Guard, Prepare, RankRead, Read
from kvferry.execution.stage import Stage
from kvferry.handoff.pull_read import State
from kvferry.layout.dense import shard_for
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import Shard
from kvferry.plan.planner import Planner
from kvferry.plan.request import GroupBlocks
from kvferry.plan.staging.scatter import NOTHING, Merge, ScatterPlan
from kvferry.transport.memcpy import MemcpyTransport
from kvferry.transport.protocol import Region, Status, Transfer, Transport, reach
from kvferry.transport.registry import Link, open_transport

from ..waits import wait_until

LAYERS, HEADS, HEAD_SIZE, BLOCK_SIZE, NUM_BLOCKS = ["0", "1", "2"], 4, 16, 8, 40
TOKEN_BYTES = len(LAYERS) * HEADS * HEAD_SIZE * 2 * 2
WORD = bytes(range(1, 17))
SHAPE = (len(LAYERS), NUM_BLOCKS, BLOCK_SIZE)


def shard(memory: np.ndarray, tp_rank: int = 0, tp_size: int = 1) -> Shard:
    return shard_for(
        layers=LAYERS,
        num_kv_heads=HEADS,
        head_size=HEAD_SIZE,
        itemsize=2,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        layout=NamedLayout.LBNHC,
        tp_rank=tp_rank,
        tp_size=tp_size,
        base_address=memory.ctypes.data,
    )


class Pair:
    """Two prefill ranks and the one decode rank that merges their heads; every read goes by way of the stage."""

    def __init__(self, name: str = "memcpy", stage_bytes: int = 1 << 20, num_blocks: int = 30) -> None:
        row = HEADS * HEAD_SIZE * 2 * 2
        self.sources = [np.random.default_rng(r).integers(0, 256, (*SHAPE, row // 2), np.uint8) for r in range(2)]
        self.cache = np.zeros((*SHAPE, row), dtype=np.uint8)
        self.words, self.stage, self.scratch = GuardWords(8), Stage(stage_bytes), Scratch(64)
        self.words.set(1, WORD)
        self.source, self.destination = open_transport(name), open_transport(name)
        held = [*self.sources, self.words.array]
        self.peer = reach(self.destination, self.source.register([Region(m.ctypes.data, m.nbytes) for m in held]))
        cache = Region(self.cache.ctypes.data, self.cache.nbytes)
        self.destination.register([cache, self.stage.region, self.scratch.region])
        shards = [shard(memory, rank, 2) for rank, memory in enumerate(self.sources)]
        self.plans = Planner(shards, shard(self.cache)).plans(0)
        generator = np.random.default_rng(5)
        self.ids = [generator.permutation(NUM_BLOCKS)[:num_blocks] for _ in range(2)]
        self.request = GroupBlocks(
            group="full",
            first_token=0,
            last_token=num_blocks * BLOCK_SIZE,
            source_block_ids=self.ids[0],
            destination_block_ids=self.ids[1],
        )

    def load(
        self,
        job_id: str = "a",
        transport: Transport | None = None,
        seconds: float = 30.0,
        is_staged: bool = True,
    ) -> Read:
        reads = [
            RankRead(
                link=Link("memcpy", transport or self.destination, self.peer),
                descriptors=NOTHING if is_staged else plan.lower([self.request]),
                parts=ScatterPlan(plan, 0).staged_blocks([self.request]) if is_staged else (),
                stage=self.stage,
                guard=Guard(self.words.address + 16, WORD),
            )
            for plan in self.plans
        ]
        return Read(job_id, lambda: reads, time.monotonic() + seconds)

    @property
    def is_exact(self) -> bool:
        expected = np.zeros_like(self.cache)
        merged = np.concatenate(self.sources, axis=-1)
        expected[:, self.ids[1]] = merged[:, self.ids[0]]
        return bool((self.cache == expected).all())

    @property
    def is_stage_free(self) -> bool:
        """Whether the whole stage can be taken at once."""
        taken = self.stage.take("probe", self.stage.memory.nbytes)
        self.stage.give_back("probe")
        return taken == 0


def run(load: Read, scratch: Scratch, each: Callable[[], None] = lambda: None) -> JobResult:
    while load.phase is not Phase.DONE:
        load.advance(scratch, time.monotonic())
        each()
    return load.result(time.monotonic())


class Watched(MemcpyTransport):
    """Does something once a transfer of data has ended, or withholds its end."""

    def __init__(self, inner: Transport) -> None:
        self.inner, self.holds = inner, False
        self.after_data: Callable[[], None] = lambda: None
        self.num_data = 0

    def submit(self, *arguments: object) -> Transfer:
        return self.inner.submit(*arguments)  # type: ignore[arg-type]

    def poll(self, transfer: Transfer) -> Status:
        if transfer.num_bytes <= 16 or transfer.status is not Status.PENDING:
            return self.inner.poll(transfer)
        if not self.holds and self.inner.poll(transfer) is Status.DONE:
            self.num_data += 1
            self.after_data()
        return transfer.status

    def cancel(self, transfer: Transfer) -> Status:
        return self.inner.cancel(transfer)

    def close(self) -> None:
        self.inner.close()


@pytest.mark.parametrize("name", ["memcpy", "cma"])
@pytest.mark.parametrize("stage_bytes", [1 << 20, 1 << 16])
def test_a_head_merge_is_exact_in_one_round_and_in_many(name: str, stage_bytes: int) -> None:
    pair = Pair(name, stage_bytes)
    result = run(pair.load(), pair.scratch)
    assert result.error is None
    assert pair.is_exact
    assert pair.is_stage_free
    assert result.num_bytes == result.num_staged_bytes == 30 * BLOCK_SIZE * TOKEN_BYTES
    assert result.num_descriptors <= 30 * len(LAYERS) * 2
    assert pair.scratch.has_room(64)


@pytest.mark.parametrize("round_number", [1, 2, 3])
def test_a_source_that_changed_never_touches_the_cache_again(round_number: int) -> None:
    pair = Pair(stage_bytes=1 << 16)
    watched = Watched(pair.destination)
    before: list[np.ndarray] = []

    def change() -> None:
        # The two ranks' reads of a round end one after the other, or one rank's alone.
        if watched.num_data == round_number:
            pair.words.clear(1)
            for copies in load._copies:
                copies.wait()  # of the round before, which had been found right
            before.append(pair.cache.copy())

    watched.after_data = change
    load = pair.load(transport=watched)
    result = run(load, pair.scratch)
    assert result.error is not None
    assert result.error.reason is Reason.SOURCE_CHANGED
    assert (pair.cache == before[0]).all()
    assert pair.is_stage_free


def test_a_cancelled_load_keeps_its_stage_until_it_is_quiet_and_then_gives_it_back() -> None:
    pair = Pair()
    watched = Watched(pair.destination)
    watched.holds = True
    load = pair.load(transport=watched)
    for _ in range(20):
        load.advance(pair.scratch, time.monotonic())
    assert load._pull.state is State.DATA
    assert not pair.is_stage_free
    load.cancel(HandoffError(Reason.ABORTED, "aborted."))
    result = run(load, pair.scratch)
    assert result.error is not None
    assert result.error.reason is Reason.ABORTED
    assert pair.is_stage_free
    assert not pair.cache.any()


class HeldCopies:
    """Copies out of a stage that begin to copy only once they may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_copy, self.num_begun = threading.Event(), 0
        self._put_in_place = staging.put_in_place
        monkeypatch.setattr(staging, "put_in_place", self)

    def __call__(self, merge: Merge, stage_address: int) -> None:
        self.num_begun += 1
        assert self.may_copy.wait(20)
        self._put_in_place(merge, stage_address)


def advance_until(load: Read, scratch: Scratch, is_so: Callable[[], bool]) -> None:
    wait_until(is_so, each=lambda: load.advance(scratch, time.monotonic()))


def test_the_next_round_is_read_while_one_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, pair = HeldCopies(monkeypatch), Pair(stage_bytes=1 << 16)
    watched = Watched(pair.destination)
    load = pair.load(transport=watched)
    advance_until(load, pair.scratch, lambda: copies.num_begun > 0 and watched.num_data >= 4)
    assert not pair.cache.any()
    copies.may_copy.set()
    assert run(load, pair.scratch).error is None
    assert pair.is_exact
    assert pair.is_stage_free


def test_a_load_ends_only_once_its_last_copy_has(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, pair = HeldCopies(monkeypatch), Pair()
    load = pair.load()
    advance_until(load, pair.scratch, lambda: load._pull.state is State.COPYING)
    assert not any(load.advance(pair.scratch, time.monotonic()) for _ in range(20))
    copies.may_copy.set()
    assert run(load, pair.scratch).error is None
    assert pair.is_exact


def test_a_cancelled_load_ends_only_once_what_was_being_copied_has_been(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, pair = HeldCopies(monkeypatch), Pair()
    load = pair.load()
    advance_until(load, pair.scratch, lambda: load._pull.state is State.COPYING)
    load.cancel(HandoffError(Reason.ABORTED, "aborted."))
    for _ in range(20):
        load.advance(pair.scratch, time.monotonic())
    assert load.phase is Phase.STOPPING
    assert not pair.is_stage_free
    copies.may_copy.set()
    result = run(load, pair.scratch)
    assert result.error is not None
    assert result.error.reason is Reason.ABORTED
    assert pair.is_stage_free


@pytest.mark.parametrize("stage_bytes", [1 << 20, 1 << 16])
def test_a_copy_that_fails_fails_its_load(stage_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(stage_bytes=stage_bytes)

    def fail(merge: Merge, stage_address: int) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(staging, "put_in_place", fail)
    executor = Executor(pair.scratch)
    try:
        executor.submit(pair.load())
        end, results = time.monotonic() + 20, []
        while not results and time.monotonic() < end:
            results = executor.collect()
            time.sleep(0.001)
    finally:
        executor.close()
    (result,) = results
    assert result.error is not None
    assert "no more" in result.error.message
    assert pair.is_stage_free


@pytest.mark.parametrize("is_staged", [True, False])
def test_no_moment_of_a_transfer_is_counted_twice(is_staged: bool) -> None:
    """50 ms pass while data moves; a load that goes directly has nothing to copy afterwards."""
    pair = Pair()
    watched = Watched(pair.destination)
    watched.after_data = lambda: time.sleep(0.025)
    result = run(pair.load(transport=watched, is_staged=is_staged), pair.scratch)
    assert result.error is None
    assert pair.is_exact
    assert 0.05 <= result.transfer_seconds < result.wait_seconds


def test_a_load_that_waits_for_the_stage_ends_at_its_deadline_and_leaves_the_queue() -> None:
    pair = Pair()
    pair.stage.take("another", pair.stage.memory.nbytes)
    load = pair.load(seconds=0.5)
    result = run(load, pair.scratch)
    assert result.error is not None
    assert result.error.reason is Reason.DEADLINE_EXCEEDED
    assert "waiting for room in the stage" in result.error.message
    pair.stage.give_back("another")
    assert pair.is_stage_free


def reads_once(event: threading.Event, prepare: Prepare) -> Sequence[RankRead] | None:
    return prepare() if event.is_set() else None


def test_vllm_ascend_7834_loads_that_share_a_stage_all_end_and_a_small_one_does_not_wait_for_a_large_one() -> None:
    large, small = Pair(stage_bytes=1 << 16, num_blocks=40), Pair(stage_bytes=1 << 16, num_blocks=1)
    small.stage, small.scratch = large.stage, large.scratch
    small.destination.register([large.stage.region, large.scratch.region])
    loads = [large.load("large"), *(small.load(f"small {number}") for number in range(8))]
    all_there = threading.Event()
    executor = Executor(large.scratch)
    try:
        for load in loads:
            load._prepare = partial(reads_once, all_there, load._prepare)
            executor.submit(load)
        all_there.set()
        ended: list[str] = []
        end = time.monotonic() + 60
        while len(ended) < 9 and time.monotonic() < end:
            results = executor.collect()
            assert [result.error for result in results] == [None] * len(results)
            ended += [result.job_id for result in results]
            time.sleep(0.001)
    finally:
        executor.close()
    assert large.is_exact
    assert small.is_exact
    assert ended[-1] == "large"


def test_parts_without_a_stage_are_no_read() -> None:
    pair = Pair()
    parts = ScatterPlan(pair.plans[0], 0).staged_blocks([pair.request])
    with pytest.raises(TransportError):
        RankRead(Link("memcpy", pair.destination, pair.peer), NOTHING, parts)


def test_more_than_the_whole_stage_is_refused() -> None:
    with pytest.raises(PlanError) as caught:
        Stage(1 << 16).take("a", (1 << 16) + 1)
    assert caught.value.reason is Reason.UNSUPPORTED
