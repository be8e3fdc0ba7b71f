"""Digests of writes: equal at both ranks after right writes, for any engines and batches; a flipped bit is found."""

import dataclasses
import functools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvferry.arrays import Descriptors
from kvferry.errors import HandoffError, PlanError, Reason
from kvferry.execution import digests
from kvferry.execution.digests import Integrity, PartCells, PartDigests, WrittenDigests
from kvferry.execution.executor import JobResult, Phase
from kvferry.execution.source import MAX_PAGE_WRITES, Write
from kvferry.handoff.messages import AnnouncedBlocks, WriteKey
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
from kvferry.layout.shard import CacheKind, Shard
from kvferry.plan.match import GroupBlocks
from kvferry.plan.planner import LayerSpans, PairPlan, Planner
from kvferry.transport.protocol import Direction, Peer, Transfer
from kvferry.transport.registry import Link, open_transports

from ..support.dense import Content
from ..support.oracle import Arena
from .strategies import Move, moves
from .test_digest_cells import LAYOUTS, Two, fill, flip, has_shares, two
from .test_plan_properties import in_memory

CASES = int(os.environ.get("KVFERRY_CASES", "70"))
FULL, SAMPLE = Integrity.FULL, Integrity.SAMPLE
KEY = WriteKey("d/0", 7, 1)


@functools.lru_cache(maxsize=16)
def cells_of(plan: PairPlan, wanted: Integrity, *, at_source: bool) -> PartCells:
    """Return the cells of a plan, made once, as ranks do."""
    return PartCells(plan, wanted, at_source=at_source)


@functools.lru_cache(maxsize=16)
def plans_of(sources: tuple[Shard, ...], destination: Shard, selector: int) -> tuple[PairPlan, ...]:
    return Planner(sources, destination).plans(selector)


class Landed:
    """One write between two ranks that has landed, with the source's digests."""

    def __init__(
        self,
        plan: PairPlan,
        requests: Sequence[GroupBlocks],
        wanted: Integrity,
        arena: Arena,
        steps: Sequence[int] = (),
        layers_per_span: int = 0,
        key: WriteKey = KEY,
    ) -> None:
        part = Part(plan, announced_blocks(plan, requests))
        ours, others = (cells_of(plan, wanted, at_source=at) for at in (True, False))
        self._landed = PartDigests(others, part.announced, key)
        self.written = WrittenDigests(PartDigests(ours, part.announced, key))
        if layers_per_span:
            # The order of computation is the source's; spans need not be the destination's.
            layers = {name: sorted(group.source_group.layers) for name, group in plan.groups.items()}
            states = {name for name, group in plan.groups.items() if group.source_group.kind is CacheKind.STATE}
            spans = LayerSpans({name: layers[name] for name in layers.keys() - states}, layers_per_span)
            part = part.in_spans(spans.plans(plan))
        held = {blocks.group: BlockList(blocks.source_first_token, blocks.source_ids.tolist()) for blocks in requests}
        write = SourceWrite("x", part.needs, deadline=1.0)
        for number, final in enumerate((*steps, END)):
            # Every second step is behind with its last spans.
            spans_done = [*part.needs][: -1 if number % 2 == 0 and final != END else None]
            while batch := write.take(dict.fromkeys(spans_done, final)):
                self.written.begin(part.cuts(batch, held))
                arena.move(part.lower(batch, held))
                while not self.written.advance():
                    pass
                assert not self.written.changed_pages()
                if write.landed():
                    self.written.landed()
        assert write.state is WriteState.OVER

    def compare(self) -> int:
        return sum(self._landed.compare(self.written.encoded()))


def writes(
    move: Move, destination: Shard, wanted: Integrity, arena: Arena, selector: int = 0, **more: Any
) -> list[Landed]:
    asked = move.of(destination)
    return [Landed(plan, asked, wanted, arena, **more) for plan in plans_of(move.sources, destination, selector)]


def begins_like_an_engine(move: Move) -> bool:
    """A source's list of blocks begins at a multiple of its block size."""
    sizes = {group.name: group.tokens_per_position for rank in move.sources for group in rank.groups}
    return all(blocks.source_first_token % sizes[blocks.group] == 0 for blocks in move.requests)


STEPS = st.lists(st.integers(1, 18), max_size=3).map(sorted)


@settings(max_examples=CASES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(
    moves().filter(lambda move: not has_shares(move) and begins_like_an_engine(move)),
    st.integers(0, 100),
    st.integers(0, 1 << 20),
    STEPS,
    st.integers(0, 2),
    st.sampled_from([4, 512]),
)
def test_digests_agree_after_a_right_write_and_differ_after_any_flipped_bit(
    move: Move, selector: int, seed: int, steps: list[int], layers_per_span: int, slice_bytes: int
) -> None:
    """Whatever kinds of caches, layouts, block sizes, tensor-parallel sizes, stages, chunks, spans and slices."""
    assume(move.num_tokens)
    cells_of.cache_clear()
    with mock.patch.object(digests, "SLICE_BYTES", slice_bytes):
        check_writes(move, selector, seed, steps, layers_per_span)


def check_writes(move: Move, selector: int, seed: int, steps: list[int], layers_per_span: int) -> None:
    arena, move, sources, destinations = in_memory(move)
    fill([*sources, *destinations], seed)
    more = {"steps": steps, "layers_per_span": layers_per_span}
    for rank in destinations:
        sampled = writes(move, rank.shard, SAMPLE, arena, selector, **more)
        for each in sampled:
            each.compare()
        try:
            landed = writes(move, rank.shard, FULL, arena, selector, **more)
        except PlanError:
            continue  # block sizes or ranks that cut a cell
        assert all(each.compare() or not each.written.num_bytes for each in landed)
        for blocks in move.of(rank.shard):
            before = rank.snapshot()
            if flip(rank, blocks, seed):
                found = [error for each in landed if (error := mismatch(each)) is not None]
                assert len(found) == 1, "the bit came from one source"
                assert found[0].reason is Reason.INTEGRITY_MISMATCH
                assert f"group {blocks.group!r}" in found[0].message
            rank.restore(before)


def mismatch(landed: Landed) -> HandoffError | None:
    try:
        landed.compare()
    except HandoffError as error:
        return error
    return None


@pytest.mark.parametrize("max_words", [digests.MAX_WORDS, 70], ids=["apart", "folded"])
@pytest.mark.parametrize("destination", ["BHLNC", "LBNHC", "transposed keys"])
@pytest.mark.parametrize("sizes", [(1, 1, 32, 32), (2, 1, 32, 16), (1, 4, 16, 48), (4, 2, 48, 32)])
def test_any_flipped_bit_of_a_prompt_is_found(
    destination: str, sizes: tuple[int, ...], max_words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "MAX_WORDS", max_words)
    source_side = {"tp_size": sizes[0], "block_size": sizes[2]}
    target_side = {"tp_size": sizes[1], "block_size": sizes[3]}
    pair = two(source_layout="LBHNC", destination_layout=destination, source=source_side, destination=target_side)
    landed = [
        writes(pair.move, rank.shard, FULL, pair.arena, steps=[40, 70], layers_per_span=1) for rank in pair.destinations
    ]
    # K and V of 100 tokens, 2 layers, 4 heads and 16 numbers of 2 bytes; the last cell counts whole.
    assert sum(each.compare() for of_rank in landed for each in of_rank) == 2 * 112 * 2 * 4 * 16 * 2
    for seed in range(40):
        index = seed % len(pair.destinations)
        before = pair.destinations[index].snapshot()
        assert flip(pair.destinations[index], pair.request, seed)
        assert [mismatch(each) is not None for each in landed[index]].count(True) == 1
        pair.destinations[index].restore(before)


@pytest.mark.parametrize("wanted", [SAMPLE, FULL])
def test_a_sum_has_few_bytes_however_long_the_prompt(wanted: Integrity, monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples of a long prompt are many cells: other jobs go on between."""
    pair = two(source_layout="LBHNC", destination_layout="LBNHC")
    cell_bytes = 16 * 16 * 2
    monkeypatch.setattr(digests, "MOST_BYTES", 2 * cell_bytes)
    [landed] = writes(pair.move, pair.destinations[0].shard, wanted, pair.arena)
    summed = list(landed._landed.compare(landed.written.encoded()))
    assert max(summed) == 2 * cell_bytes
    assert sum(summed) == (7 if wanted is SAMPLE else 7 * 2 * 2 * 4) * cell_bytes


def test_a_mismatch_names_the_block_and_head() -> None:
    pair = two(source_layout="LBHNC", destination_layout="BHLNC", source={"tp_size": 2})
    (rank,) = pair.destinations
    landed = writes(pair.move, rank.shard, FULL, pair.arena)
    position, slot = divmod(83, 32)
    block = int(pair.request.destination_ids[position])
    rank.views["full", "v", "1"][block, 3, slot, 5, 1] ^= 4
    [error] = [error for each in landed if (error := mismatch(each)) is not None]
    assert f"component 'v', layer '1', heads 3:4, tokens 80 to 96 in block {block}:" in error.message
    assert "rank tp 1/2 (1 of 56 digests differ)" in error.message


def test_bytes_behind_the_prompt_do_not_count() -> None:
    pair = two(source_layout="LBHNC", destination_layout="LBHNC")
    [landed] = writes(pair.move, pair.destinations[0].shard, FULL, pair.arena)
    last = int(pair.request.destination_ids[-1])
    pair.destinations[0].views["full", "k", "0"][last, :, 100 % 32 :] ^= 255
    assert landed.compare()


def test_a_sample_has_slices_of_cells() -> None:
    sides = {"head_size": 64}
    pair = two(source_layout="LBHNC", destination_layout="BHLNC", source=sides, destination=sides)
    (rank,) = pair.destinations
    [landed] = writes(pair.move, rank.shard, SAMPLE, pair.arena)
    whole_bytes = 7 * 16 * 64 * 2
    assert landed.compare() == whole_bytes // 4
    rank.regions[0].reshape(12, -1)[int(pair.request.destination_ids[1])] ^= 1
    assert mismatch(landed) is not None


@pytest.mark.parametrize("destination", LAYOUTS)
@pytest.mark.parametrize("source", ["LBHNC", "transposed keys"])
@pytest.mark.parametrize("sizes", [(1, 1, 32, 32), (2, 1, 32, 16), (4, 2, 16, 48)])
def test_slices_find_a_block_that_is_anothers_always_and_name_its_head(
    source: str, destination: str, sizes: tuple[int, ...]
) -> None:
    source_side = {"tp_size": sizes[0], "block_size": sizes[2], "head_size": 64}
    side = {"tp_size": sizes[1], "block_size": sizes[3], "head_size": 64}
    pair = two(source_layout=source, destination_layout=destination, source=source_side, destination=side)
    named = set()
    for rank in pair.destinations:
        all_landed = writes(pair.move, rank.shard, SAMPLE, pair.arena)
        before = rank.snapshot()
        for block in pair.request.destination_ids[: 96 // sizes[3]].tolist():
            for view in rank.views.values():
                view[block] ^= 1
            assert any(mismatch(each) for each in all_landed)
            rank.restore(before)
        for name, view in rank.views.items():
            for head in range(view.shape[1]):
                view[:, head] ^= 1
                for error in filter(None, map(mismatch, all_landed)):
                    each = rank.shard.groups[0].component(name[1]).heads[0].start + head
                    assert f"component {name[1]!r}, layer {name[2]!r}, heads {each}:{each + 1}," in error.message
                    named.add(name)
                rank.restore(before)
    assert named, "none of 7 stretches drew one of all heads"


@pytest.mark.parametrize("source", ["LBHNC", "transposed keys"])
@pytest.mark.parametrize("bits", [(7,), (15,), (7, 15), range(8, 16), range(16)])
def test_changes_of_many_numbers_do_not_cancel(source: str, bits: Sequence[int]) -> None:
    """The same bits of two numbers, of every second one, of all: a sign in all of a cell, for example."""
    pair = two(source_layout=source, destination_layout=source)
    (rank,) = pair.destinations
    [landed] = writes(pair.move, rank.shard, FULL, pair.arena)
    before, mask = rank.snapshot(), np.array([sum(1 << bit for bit in bits)], dtype="<u2").view(np.uint8)
    block = int(pair.request.destination_ids[0])
    for tokens, channels in (([0, 1], [3]), ([0], [0, 2]), ([0, 9], [1, 3, 5, 7]), (range(16), range(16))):
        for channel in channels:
            for token in tokens:
                rank.views["full", "k", "1"][block, 2, token, channel] ^= mask
        assert mismatch(landed) is not None
        rank.restore(before)
    assert mismatch(landed) is None


def test_a_load_behind_a_cached_prefix_compares_its_own_tokens() -> None:
    pair = two(source_layout="LBHNC", destination_layout="LBNHC", destination={"block_size": 16}, tokens=(48, 100))
    (rank,) = pair.destinations
    [landed] = writes(pair.move, rank.shard, FULL, pair.arena)
    assert landed.compare() == 2 * 64 * 2 * 4 * 16 * 2


def test_a_sample_gathers_no_byte_behind_a_block_that_is_shorter_than_a_cell() -> None:
    """Where the prompt ends inside the cell, its bytes fit, but the cell would reach behind the last block."""
    pair = two(source_layout="LBHNC", destination_layout="LBHNC", destination={"block_size": 8}, tokens=(0, 5))
    (rank,) = pair.destinations
    [landed] = writes(pair.move, rank.shard, SAMPLE, pair.arena)
    assert landed.compare() == 0


@pytest.mark.parametrize("max_words", [digests.MAX_WORDS, 4], ids=["apart", "folded"])
def test_a_sample_finds_a_flipped_bit_with_its_odds_and_a_wrong_block_always(
    max_words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stretch has 16 cells: K and V, 2 layers, 4 heads. Each write draws others."""
    monkeypatch.setattr(digests, "MAX_WORDS", max_words)
    pair = two(source_layout="LBHNC", destination_layout="BHLNC")
    (rank,) = pair.destinations
    found = wrong_blocks = 0
    for number in range(400):
        [landed] = writes(pair.move, rank.shard, SAMPLE, pair.arena, key=WriteKey("d/0", 7, number))
        before = rank.snapshot()
        flip(rank, pair.request, number)
        found += mismatch(landed) is not None
        rank.restore(before)
        if number % 20 == 0:
            rank.regions[0].reshape(12, -1)[int(pair.request.destination_ids[number // 20 % 4])] ^= 1
            wrong_blocks += mismatch(landed) is not None
            rank.restore(before)
    assert wrong_blocks == 20
    # 400 tries of odds 1 in 16: 25 with a standard deviation of 4.8. Beyond these bounds in one of 10**6 seeds.
    assert 5 <= found <= 51


def test_a_sample_draws_each_cell_as_often_as_any_other() -> None:
    """Damage of one cell is found with odds of 1 in n, whichever the cell is, and whatever the write before found."""
    pair = two(source_layout="LBHNC", destination_layout="LBHNC")
    [plan] = Planner(pair.move.sources, pair.destinations[0].shard).plans(0)
    cells = cells_of(plan, SAMPLE, at_source=True)
    announced = announced_blocks(plan, [pair.request])
    draws = [
        PartDigests(cells, announced, WriteKey("d/0", epoch, number))._groups["full"]._draw(np.arange(7))
        for epoch in (1, 1 << 52)
        for number in range(400)
    ]
    counts = np.bincount(np.concatenate(draws), minlength=16)
    # 5600 draws over 16 cells: 350 each with a standard deviation of 18.1; 5.5 of these on either side.
    assert len(counts) == 16
    assert 250 <= counts.min() <= counts.max() <= 450
    assert len({tuple(draw.tolist()) for draw in draws}) == len(draws), "no two writes compare the same cells"


def test_both_ranks_draw_the_cells_that_move_between_them() -> None:
    """A rank of two that share a source's heads compares a cell of its own for each 16 tokens."""
    pair = two(source_layout="LBHNC", destination_layout="LBNHC", destination={"tp_size": 2})
    for rank in pair.destinations:
        [landed] = writes(pair.move, rank.shard, SAMPLE, pair.arena, steps=[50], layers_per_span=1)
        assert landed.compare() == landed.written.num_bytes == 7 * 16 * 16 * 2


def test_a_batch_of_layers_that_lie_apart_has_the_digests_of_no_layer_between() -> None:
    """The layer between is not final yet: it changes after the batch."""
    sides = {"layers": ["0", "1", "2"]}
    pair = two(source_layout="LBHNC", destination_layout="LBNHC", source=sides, destination=sides)
    [plan] = plans_of(pair.move.sources, pair.destinations[0].shard, 0)
    part = Part(plan, announced_blocks(plan, [pair.request]))
    part = part.in_spans(LayerSpans({"full": sides["layers"]}, 1).plans(plan))
    held = {"full": BlockList(0, pair.request.source_ids.tolist())}
    first, between, last = part.needs
    for number in range(20):
        key = WriteKey("d/0", 7, number)
        written = WrittenDigests(PartDigests(cells_of(plan, SAMPLE, at_source=True), part.announced, key))
        write = SourceWrite("x", part.needs, deadline=1.0)
        for spans in ((first, last), (between,)):
            batch = write.take(dict.fromkeys(spans, END))
            written.begin(part.cuts(batch, held))
            pair.arena.move(part.lower(batch, held))
            while not written.advance():
                pass
            assert write.landed()
            written.landed()
            if between in spans:
                break
            for name in ("k", "v"):
                pair.sources[0].views["full", name, "1"] ^= 1
        landed = PartDigests(cells_of(plan, SAMPLE, at_source=False), part.announced, key)
        assert sum(landed.compare(written.encoded()))


def packed_pair() -> Two:
    packed = {"packing": "kernel:packed", "content": Content.FUSED}
    return two(source_layout="LBHNC", destination_layout="BHLNC", source=packed, destination={**packed, "tp_size": 2})


def test_packed_pages_are_compared_byte_by_byte() -> None:
    pair = packed_pair()
    for rank in pair.destinations:
        [landed] = writes(pair.move, rank.shard, FULL, pair.arena)
        assert landed.compare() == 4 * 2 * 2 * 32 * 32 * 2
        rank.views["full", "kv", "1"][int(pair.request.destination_ids[-1]), 1, 31, 31, 1] ^= 128
        assert mismatch(landed) is not None


def test_a_packed_page_that_changes_while_it_is_written_is_noticed() -> None:
    """A prefill engine that generates writes behind the prompt, in an order that only the kernel knows."""
    pair = packed_pair()
    plan = Planner(pair.move.sources, pair.destinations[0].shard).plans(0)[0]
    part = Part(plan, announced_blocks(plan, [pair.request]))
    held = {"full": BlockList(0, pair.request.source_ids.tolist())}
    for wanted in (FULL, SAMPLE):
        written = WrittenDigests(PartDigests(cells_of(plan, wanted, at_source=True), part.announced, KEY))
        batch = SourceWrite("x", part.needs, 1.0).take(dict.fromkeys(part.needs, END))
        for position, changes in ((3, True), (2, False)):
            written.begin(part.cuts(batch, held))
            source = pair.sources[0].views["full", "kv", "0"]
            source[int(pair.request.source_ids[position])] ^= 1
            pair.sources[0].views["full", "kv", "1"][int(pair.request.source_ids[position])] ^= 1
            assert written.changed_pages() == ({"full": 96} if changes else {})


def test_full_is_refused_where_some_bytes_would_not_be_compared() -> None:
    pair = two(source_layout="LBHNC", destination_layout="LBHNC", destination={"block_size": 24})
    with pytest.raises(PlanError) as caught:
        writes(pair.move, pair.destinations[0].shard, FULL, pair.arena)
    assert caught.value.reason is Reason.UNSUPPORTED
    assert "blocks of 24 tokens" in caught.value.message
    [landed] = writes(pair.move, pair.destinations[0].shard, SAMPLE, pair.arena)
    assert landed.compare()


def test_full_is_refused_where_the_tokens_begin_inside_a_cell() -> None:
    pair = two(source_layout="LBHNC", destination_layout="LBHNC", tokens=(40, 100))
    with pytest.raises(PlanError) as caught:
        writes(pair.move, pair.destinations[0].shard, FULL, pair.arena)
    assert "loads from token 40 on" in caught.value.message


def test_full_is_refused_where_blocks_begin_inside_a_cell() -> None:
    pair = two(source_layout="LBHNC", destination_layout="LBNHC")
    [plan] = Planner(pair.move.sources, pair.destinations[0].shard).plans(0)
    announced = AnnouncedBlocks("full", 48, 100, 40, (1, 2, 3))
    with pytest.raises(PlanError) as caught:
        PartDigests(cells_of(plan, FULL, at_source=True), [announced], KEY)
    assert "loads from token 48 on" in caught.value.message


def test_more_layers_and_heads_than_one_message_has_digests_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = two(source_layout="LBHNC", destination_layout="LBNHC")
    monkeypatch.setattr(digests, "MAX_WORDS", 16)
    with pytest.raises(PlanError) as caught:
        writes(pair.move, pair.destinations[0].shard, FULL, pair.arena)
    assert "a write of 16 layers and heads has more digests than one message carries" in caught.value.message
    monkeypatch.setattr(digests, "MAX_WORDS", 17)
    assert writes(pair.move, pair.destinations[0].shard, FULL, pair.arena)


def test_what_a_peer_announces_costs_no_memory_before_the_prompt_is_there() -> None:
    """An announcement may name any tokens; its digests have at most as many words as a message carries."""
    pair = two(source_layout="LBHNC", destination_layout="LBHNC")
    [plan] = Planner(pair.move.sources, pair.destinations[0].shard).plans(0)
    announced = AnnouncedBlocks("full", 0, (1 << 63) - 16, 0, (1, 2, 3))
    for wanted in (SAMPLE, FULL):
        found = PartDigests(cells_of(plan, wanted, at_source=True), [announced], KEY)
        assert found.num_words <= digests.MAX_WORDS
    message = msgspec.msgpack.encode(WrittenDigests(found).encoded())
    assert len(message) <= digests.MAX_WORDS * 8 + 5


class PageChanges:
    """A transport whose engine changes the last page of the prompt while a batch is written, so many times."""

    def __init__(self, link: Link, page: npt.NDArray[np.uint8], num_changes: int) -> None:
        self._link, self._page, self.num_changes = link, page, num_changes
        self.written: list[int] = []

    def link(self) -> Link:
        return dataclasses.replace(self._link, transport=self)  # type: ignore[arg-type]

    def submit(self, peer: Peer, direction: Direction, rows: Descriptors) -> Transfer:
        transfer = self._link.transport.submit(peer, direction, rows)
        self.written.append(transfer.num_bytes)
        if self.num_changes:
            self.num_changes -= 1
            self._page ^= 1
        return transfer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link.transport, name)


@contextmanager
def a_write_of_packed_pages(wanted: Integrity, num_changes: int) -> Iterator[tuple[Write, PageChanges, PartDigests]]:
    """Yield a write of 4 pages, of which the prompt fills 3, its transport, and the digests of its destination."""
    pair = packed_pair()
    [plan, *_] = plans_of(pair.move.sources, pair.destinations[0].shard, 0)
    part = Part(plan, announced_blocks(plan, [pair.request]))
    written = WrittenDigests(PartDigests(cells_of(plan, wanted, at_source=True), part.announced, KEY))
    landed = PartDigests(cells_of(plan, wanted, at_source=False), part.announced, KEY)
    transports = open_transports("cma")
    regions = [region for rank in (*pair.sources, *pair.destinations) for region in rank.shard.regions]
    link = transports.connect(transports.register(regions)).poll()
    assert link is not None
    page = [view[int(pair.request.source_ids[-1])] for view in pair.sources[0].views.values()]
    changes = PageChanges(link, page[0], num_changes)
    source = SourceWrites()
    source.announce(WriteRequest(KEY, "x", 100, "prompt", part.needs, deadline=time.monotonic() + 60), now=0.0)
    blocks = {"full": BlockList(0, pair.request.source_ids.tolist())}
    source.compute("x", Prompt(100, "prompt", blocks, END))
    yield Write(source, threading.Lock(), KEY, part, changes.link, lambda *_: None, digests=written), changes, landed
    transports.close()


def run(write: Write) -> JobResult:
    for _ in range(300):
        write.advance(time.monotonic())
        if write.phase is Phase.DONE:
            return write.result(time.monotonic())
    raise AssertionError("the write does not end")


PAGE_BYTES = 2 * 2 * 32 * 32 * 2
"""Of two layers, two heads and 32 tokens, of which each has K and V of 16 numbers of 2 bytes."""


@pytest.mark.parametrize("wanted", [SAMPLE, FULL])
@pytest.mark.parametrize("num_changes", [0, 1, 5])
def test_of_a_batch_whose_last_page_has_changed_only_the_page_is_written_again(
    num_changes: int, wanted: Integrity
) -> None:
    with a_write_of_packed_pages(wanted, num_changes) as (write, changes, landed):
        result = run(write)
        assert result.error is None
        assert write._digests is not None
        assert sum(landed.compare(write._digests.encoded())) == result.num_compared_bytes
        # A page whose changed cell was not in the sample is not written again.
        again = changes.written[1:]
        assert changes.written[0] == 4 * PAGE_BYTES
        assert again == [PAGE_BYTES] * (num_changes if wanted is FULL else len(again))


def test_a_write_whose_last_page_never_rests_fails_and_says_what_to_do() -> None:
    with a_write_of_packed_pages(FULL, 1 << 30) as (write, changes, _):
        error = run(write).error
        assert error is not None
        assert error.reason is Reason.SOURCE_CHANGED
        assert "max_tokens 1" in error.remedy
        assert sum(changes.written) <= 4 * PAGE_BYTES + MAX_PAGE_WRITES * PAGE_BYTES
