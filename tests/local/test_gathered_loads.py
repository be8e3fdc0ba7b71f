"""Loads out of what a source packs: real bytes and messages, rounds, back-pressure, and what a death leaves behind."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from kvferry.cli.head_moves import SPLIT, HeadMove
from kvferry.cli.transport_measurement import allocate, open_movers
from kvferry.errors import HandoffError, KVFerryError, Reason, TransportError
from kvferry.execution import gathering as module
from kvferry.execution import packing_side, part_requests
from kvferry.execution import stage as staging
from kvferry.execution.gathering import Gathering, NoRoom, PartPlace
from kvferry.execution.part_requests import PartCourier
from kvferry.execution.read import GuardedRead, Load, LoadResult, Phase
from kvferry.execution.scratch import Scratch
from kvferry.execution.stage import Stage, pack
from kvferry.handoff.messages import Pack, PackCopy, Packer, Refusal, Release
from kvferry.handoff.wire.client import ask
from kvferry.layout.shard import Shard
from kvferry.plan.planner import Planner
from kvferry.plan.proof.verify_staged import composed_gather
from kvferry.plan.request import GroupBlocks
from kvferry.plan.staging.scatter import Merge, StagedPart, laid_out
from kvferry.plan.staging.staged_plan import GatherPlan
from kvferry.plan.staging.strategy import Strategy
from kvferry.testing.oracle import Arena, strided_memory
from kvferry.testing.strategies import Move, moves
from kvferry.transport.protocol import Region, reach
from kvferry.transport.registry import open_transport

from .engines_in_process import HOST, SLOT, DecodeRank, PrefillEngine
from .test_staged_loads import BLOCK_SIZE, HEAD_SIZE, HEADS, LAYERS, NUM_BLOCKS, shard

HEAD_BYTES = HEAD_SIZE * 2 * 2
BLOCK_BYTES = len(LAYERS) * BLOCK_SIZE * HEADS * HEAD_BYTES // 2
"""Of a block at a rank that has half of the heads."""
ROOM_FOR_TWO = 2 * BLOCK_BYTES
"""A stage in which a part holds one block, and which holds two parts."""


class SplitRank:
    """One of ``tp_size`` ranks in ``LBNHC``: a head split leaves runs of half a token's heads."""

    def __init__(self, tp_rank: int = 0, tp_size: int = 1) -> None:
        self.cache = np.zeros((len(LAYERS), NUM_BLOCKS, BLOCK_SIZE, HEADS * HEAD_BYTES // tp_size), dtype=np.uint8)
        self.regions = [Region(self.cache.ctypes.data, self.cache.nbytes)]
        self.shard: Shard = shard(self.cache, tp_rank, tp_size)


class Split:
    """A prefill engine of one rank that packs, and the two ranks of a decode engine that reads its halves."""

    def __init__(self, transport: str = "memcpy", packing_bytes: int = 1 << 20, num_blocks: int = 30) -> None:
        self.source = SplitRank()
        self.source.cache[:] = np.random.default_rng(0).integers(0, 256, self.source.cache.shape, np.uint8)
        self.prefill = PrefillEngine(transport, [self.source], packing_bytes=packing_bytes)
        self.readers = [DecodeRank(transport, SplitRank(rank, 2), wish=Strategy.GATHER) for rank in range(2)]
        generator = np.random.default_rng(5)
        self.ids = [generator.permutation(NUM_BLOCKS)[:num_blocks] for _ in range(2)]
        self.request = GroupBlocks(
            group="full",
            first_token=0,
            last_token=num_blocks * BLOCK_SIZE,
            source_block_ids=self.ids[0],
            destination_block_ids=self.ids[1],
        )

    def start(self, reader: int = 0, seconds: float = 30.0) -> Load:
        return self.readers[reader].start(self.prefill.hold(), [self.request], seconds)

    def run(self, load: Load, reader: int = 0, each: Callable[[], None] = lambda: None) -> LoadResult:
        scratch = self.readers[reader].scratch
        while load.phase is not Phase.DONE:
            if not load.advance(scratch, time.monotonic()):
                time.sleep(0.0005)
            each()
        assert scratch.has_room(16), "no word is left"
        return load.result(time.monotonic())

    def advance_until(self, load: Load, condition: Callable[[], bool], reader: int = 0) -> None:
        """Advance a load until something is so."""
        end = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < end
            load.advance(self.readers[reader].scratch, time.monotonic())

    @property
    def num_parts(self) -> int:
        return self.prefill.packing_sides[0].num_parts

    def is_exact(self, reader: int = 0) -> bool:
        cache = self.readers[reader].rank.cache  # type: ignore[attr-defined]
        expected = np.zeros_like(cache)
        width = cache.shape[-1]
        expected[:, self.ids[1]] = self.source.cache[:, self.ids[0], :, reader * width : (reader + 1) * width]
        return bool((cache == expected).all())

    def close(self) -> None:
        for reader in self.readers:
            reader.close()
        self.prefill.close()


@pytest.fixture
def split() -> Iterator[Split]:
    """With room for two parts of one block each."""
    made = Split(packing_bytes=ROOM_FOR_TWO)
    yield made
    made.close()


@pytest.mark.parametrize("transport", ["memcpy", "cma"])
@pytest.mark.parametrize("packing_bytes", [1 << 20, 1 << 16])
def test_a_head_split_is_exact_in_one_part_and_in_many(transport: str, packing_bytes: int) -> None:
    split = Split(transport, packing_bytes)
    try:
        for reader in range(2):
            result = split.run(split.start(reader), reader)
            assert result.error is None
            assert split.is_exact(reader)
            assert result.num_bytes == result.num_gathered_bytes == 30 * BLOCK_BYTES
            assert result.num_staged_bytes == 0
            assert result.num_descriptors <= 30 * len(LAYERS)
        assert split.prefill.is_stage_free
        assert split.prefill.num_handshakes == 2
    finally:
        split.close()


def test_readers_that_find_the_stage_full_ask_again_and_all_end(split: Split) -> None:
    loads = [split.start(reader) for reader in range(2)]
    most = 0
    while any(load.phase is not Phase.DONE for load in loads):
        for reader, load in enumerate(loads):
            if load.phase is not Phase.DONE:
                load.advance(split.readers[reader].scratch, time.monotonic())
        most = max(most, split.num_parts)
    assert [load.error for load in loads] == [None, None]
    assert split.is_exact(0)
    assert split.is_exact(1)
    assert most == 2
    assert split.prefill.is_stage_free


def test_a_dead_readers_part_goes_to_the_next(split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_side, "LEASE_SECONDS", 0.4)
    dead = split.start(0)
    split.advance_until(dead, lambda: split.num_parts == 2)
    began_at = time.monotonic()
    result = split.run(split.start(1), 1)
    assert result.error is None
    assert split.is_exact(1)
    assert time.monotonic() - began_at > 0.3, "it had to wait for the dead one's lease"
    assert split.prefill.is_stage_free


def test_a_reader_that_is_aborted_gives_its_parts_back_at_once(split: Split) -> None:
    load = split.start(0)
    split.advance_until(load, lambda: split.num_parts == 2)
    load.cancel(HandoffError(Reason.ABORTED, "aborted."))
    began_at = time.monotonic()
    assert split.run(load).num_bytes == 0
    assert split.prefill.is_stage_free
    assert time.monotonic() - began_at < packing_side.LEASE_SECONDS


def test_a_source_that_packs_no_more_is_told_of_at_the_deadline(split: Split) -> None:
    load = split.start(0, seconds=1.0)
    split.advance_until(load, lambda: split.num_parts > 0)
    split.prefill.packing[0].close()
    began_at = time.monotonic()
    result = split.run(load)
    assert result.error is not None
    assert result.error.reason is Reason.DEADLINE_EXCEEDED
    assert f"{HOST}:{split.prefill.packing[0].packer.port} packs for it" in result.error.message
    assert time.monotonic() - began_at < 3


def test_a_source_process_that_dies_is_noticed_long_before_the_deadline() -> None:
    """It stops before it answers and is killed; cross-memory attach says so when the guard word is read again."""
    local, scratch, stage = allocate(8 << 20, huge=False), Scratch(16), Stage(1 << 16, huge_pages=False)
    courier = PartCourier("test")
    with open_movers(["cma"], 4 << 20, local, False, [scratch.region], packing_bytes=4 << 20) as (movers, child):
        move = HeadMove(4 << 20, allocate(8 << 20, huge=False), local, SPLIT)
        plans = {plan: GatherPlan(plan) for plan in move.plans(movers["cma"])}
        reads = move.reads(movers["cma"], plans, stage, courier)
        load = Load("a", lambda: reads, time.monotonic() + 30)
        child.pause(True)
        while not load._gatherings or load._gatherings[0]._num_begun == 0:
            load.advance(scratch, time.monotonic())
        os.killpg(child._process.pid, signal.SIGKILL)
        child._process.wait(20)
        began_at = time.monotonic()
        while load.phase is not Phase.DONE:
            if not load.advance(scratch, time.monotonic()):
                time.sleep(0.001)
        assert load.error is not None
        assert load.error.reason is Reason.PEER_DIED
        assert time.monotonic() - began_at < 10
        assert scratch.has_room(16)
    courier.close()


def test_a_hold_that_ends_meanwhile_fails_the_load_and_leaves_no_part(split: Split) -> None:
    load = split.start(0)
    split.advance_until(load, lambda: load._gatherings != [] and load._gatherings[0]._num_begun > 5)
    split.prefill.words[0].clear(SLOT)
    result = split.run(load)
    assert result.error is not None
    assert result.error.reason is Reason.SOURCE_CHANGED
    assert split.prefill.is_stage_free
    again = split.run(split.start(0))
    assert again.error is not None
    assert again.error.reason is Reason.SOURCE_CHANGED


def test_a_hold_that_ends_after_the_last_part_fails_the_load(split: Split) -> None:
    """The source packed all of it in time, but nothing is committed without the hold's word afterwards."""
    load = split.start(0)
    split.advance_until(load, lambda: load.phase is Phase.GUARD_AFTER or _is_last_read(load))
    split.prefill.words[0].clear(SLOT)
    result = split.run(load)
    assert result.error is not None
    assert result.error.reason is Reason.SOURCE_CHANGED


def _is_last_read(load: Load) -> bool:
    return load._gatherings != [] and load._gatherings[0].is_over


def test_a_packer_refuses_other_questions_and_lives(split: Split) -> None:
    with pytest.raises(HandoffError) as caught:
        ask(HOST, split.prefill.packing[0].packer.port, Release(7, ()), timeout_seconds=20)
    assert caught.value.reason is Reason.UNSUPPORTED
    assert split.run(split.start(0)).error is None


def test_more_copies_than_a_message_has_are_refused(split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_requests, "MAX_PACK_COPIES", 0)
    result = split.run(split.start(0))
    assert result.error is not None
    assert result.error.reason is Reason.UNSUPPORTED
    assert "1 copies" in result.error.message


def test_an_answer_is_timed_and_those_that_loads_wait_for_are_kept(split: Split) -> None:
    courier, packer = PartCourier("timer"), split.prefill.packing[0].packer
    try:
        copy = PackCopy(0, 16, 4096, 64, 0, 8, ())
        courier.send(packer, Pack("load", 3, 0, 0, 7, 1, 32, ((5, 3),), (copy,)), timeout_seconds=20)
        seconds = courier.time_an_answer(packer)
        assert seconds is not None
        assert 1e-5 < seconds < part_requests.ANSWER_SECONDS
        parcel = courier.take("load", 3)
        assert parcel is not None
        assert isinstance(parcel.answer, Refusal)
    finally:
        courier.close()


def test_who_does_not_answer_or_not_to_that_is_not_timed(split: Split) -> None:
    courier = PartCourier("timer")
    with socket.create_server((HOST, 0)) as mute:
        for port in (mute.getsockname()[1], split.prefill.listener.port):
            began_at = time.monotonic()
            assert courier.time_an_answer(Packer(HOST, port, 1 << 20)) is None
            assert time.monotonic() - began_at < 2.0
    courier.close()


def test_parts_without_a_packer_are_no_read() -> None:
    with pytest.raises(TransportError, match="without a packer"):
        GuardedRead(None, None, 0, b"", np.empty((0, 3), np.uint64), gathered=[None])  # type: ignore[arg-type, list-item]


class Source:
    """A packer in this thread, and what a test wants of it: no room, silence, or parts that are taken back."""

    name = "the source"

    def __init__(self, num_blocks: int = 3) -> None:
        source, destination = SplitRank(), SplitRank(1, 2)
        source.cache[:] = np.random.default_rng(0).integers(0, 256, source.cache.shape, np.uint8)
        self.source, self.destination = source, destination
        self.stage, self.words, self.scratch = Stage(1 << 20, huge_pages=False), np.zeros((4, 2), np.uint64), Scratch(2)
        self.words[3] = 7, 3
        holder, reader = open_transport("memcpy"), open_transport("memcpy")
        words = Region(self.words.ctypes.data, self.words.nbytes)
        self.peer = reach(reader, holder.register([self.stage.region, words]))
        reader.register([*destination.regions, self.scratch.region])
        (plan,) = Planner([source.shard], destination.shard).plans(0)
        ids = np.arange(num_blocks)
        request = GroupBlocks(
            group="full",
            first_token=0,
            last_token=num_blocks * BLOCK_SIZE,
            source_block_ids=ids,
            destination_block_ids=ids[::-1] + 4,
        )
        self.part_bytes = BLOCK_BYTES + 64
        self.asked: list[tuple[int, int]] = []
        self.num_busy, self.num_taken_back, self.is_silent, self.num_closed = 0, 0, False, 0
        self._answers: dict[int, PartPlace | NoRoom] = {}
        self.gathering = Gathering(
            link=(reader, self.peer),
            source=self,
            hold=(words.base_address + 48, self.words[3].tobytes()),
            parts=GatherPlan(plan).parts([request]),
            scratch=(self.scratch, self.scratch.take(2)),
            deadline=100.0,
        )

    def ask(self, number: int, num_done: int, packs: Sequence[Merge], num_bytes: int, timeout_seconds: float) -> None:
        self.asked.append((number, num_done))
        if self.is_silent:
            return
        if self.num_busy:
            self.num_busy -= 1
            self._answers[number] = NoRoom.NOW
            return
        begin = number % 2 * self.part_bytes
        self.stage.pack([replace(pack, stage_offset=begin + pack.stage_offset) for pack in packs])
        self.words[number % 2] = 9, len(self.asked)
        word = self.words[number % 2].tobytes()
        self._answers[number] = PartPlace(
            self.stage.region.base_address + begin, int(self.words.ctypes.data) + number % 2 * 16, word
        )
        if self.num_taken_back:
            self.num_taken_back -= 1
            self.words[number % 2] = 0
            self.stage.memory[begin : begin + num_bytes] = 0

    def answer(self, number: int) -> PartPlace | NoRoom | None:
        return self._answers.pop(number, None)

    def close(self) -> None:
        self.num_closed += 1

    def run(self, now: float = 0.0, seconds: float = 2.0) -> float:
        """Advance in steps of a millisecond; return when it was over."""
        end = now + seconds
        while not self.gathering.is_over:
            assert now < end, "it is not over in time"
            self.gathering.advance(now)
            now += 0.001
        return now

    @property
    def is_exact(self) -> bool:
        half = self.source.cache[..., self.source.cache.shape[-1] // 2 :]
        return bool((self.destination.cache[:, [6, 5, 4]] == half[:, [0, 1, 2]]).all())


@pytest.mark.parametrize("buffer_bytes", [1, 5000, 1 << 20])
def test_a_copy_that_goes_through_a_small_buffer_is_the_same(
    buffer_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "PACKING_BYTES", buffer_bytes)
    cache, stage = np.random.default_rng(0).integers(0, 256, (9, 3, 2, 200), np.uint8), np.zeros((7, 3, 200), np.uint8)
    blocks = np.array([5, 0, 8, 3, 1, 7, 2])
    pack(Merge(0, 600, int(cache.ctypes.data) + 200, 1200, blocks, 200, ((3, 200, 400),)), int(stage.ctypes.data))
    np.testing.assert_array_equal(stage, cache[blocks, :, 1])


def test_parts_are_asked_for_two_at_a_time_and_given_back_in_order() -> None:
    source = Source()
    source.run()
    assert source.asked == [(0, 0), (1, 0), (2, 2)]
    assert source.is_exact
    assert source.num_closed


def test_one_that_finds_no_room_pauses_ever_longer() -> None:
    source = Source()
    source.num_busy = 20
    began_at = source.run()
    assert source.is_exact
    assert 0.2 < began_at < 1.5
    assert len(source.asked) == 23


def test_a_part_that_was_taken_back_is_asked_for_again() -> None:
    source = Source()
    source.num_taken_back = 3
    source.run()
    assert source.is_exact
    assert len(source.asked) == 6


def test_a_part_that_is_always_taken_back_ends_the_load() -> None:
    source = Source()
    source.num_taken_back = 100
    with pytest.raises(HandoffError) as caught:
        source.run()
    assert caught.value.reason is Reason.LEASE_EXPIRED
    assert source.gathering.stop()


@pytest.mark.parametrize("is_source_gone", [False, True])
def test_a_silent_source_is_looked_at(is_source_gone: bool) -> None:
    """Its guard word is read once a second: a transport says when a peer has died, the word when it holds no more."""
    source = Source()
    source.is_silent = True
    with pytest.raises(AssertionError, match="not over in time"):
        source.run(seconds=2 * module.SILENCE_SECONDS + 0.1)
    if is_source_gone:
        source.words[3] = 0
    with pytest.raises((KVFerryError, AssertionError)) as caught:
        source.run(now=5.0)
    assert isinstance(caught.value, HandoffError) is is_source_gone


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(moves())
def test_what_is_packed_is_what_was_verified(move: Move) -> None:
    """The copies really made, of any drawn case, bring into the stage what the verified rows say."""
    regions = [region for shard in (*move.sources, *move.destinations) for region in shard.regions]
    arena = Arena(sum(region.length for region in regions) + len(regions) * 4096)
    sources = [strided_memory(arena, shard) for shard in move.sources]
    for rank in sources:
        rank.restore([np.random.default_rng(1).integers(0, 256, len(region), np.uint8) for region in rank.regions])
    for plan in Planner([rank.shard for rank in sources], move.destinations[0]).plans(0):
        pieces: list[tuple[int, StagedPart]] = [(0, part) for part in GatherPlan(plan).parts(move.of(plan.destination))]
        if not pieces:
            continue
        reads, packs, num_bytes = laid_out(pieces)
        stage, expected = Stage(num_bytes, huge_pages=False), arena.allocate(num_bytes)
        stage.pack(packs)
        reads = reads[:, [1, 1, 2]]
        rows = composed_gather(packs, reads + np.array([expected.ctypes.data, 0, 0]), num_bytes, plan.source)
        arena.move(rows)
        np.testing.assert_array_equal(stage.memory, expected)
