"""Digests: equal at source and destination after a right move, for any two engines; different after any changed bit."""

import os
from collections.abc import Sequence
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.arrays import memory_at
from kvferry.errors import HandoffError, PlanError, Reason
from kvferry.execution import digests
from kvferry.execution.cell_sums import CellSums, DeviceCells
from kvferry.execution.digests import MOST_BYTES_AT_ONCE, MOST_BYTES_EACH, DigestTable, PairDigests, RowsRead
from kvferry.layout.component import Atom
from kvferry.layout.dense import Content, shard_for
from kvferry.layout.group import TokenShare
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import Shard
from kvferry.plan import digest_cells
from kvferry.plan.digest_cells import CellGrid, CellMemory, Integrity, weights
from kvferry.plan.planner import PairPlan, Planner
from kvferry.plan.request import GroupBlocks
from kvferry.testing.oracle import Arena, RankMemory, strided_memory

from .strategies import Move, moves
from .test_plan_properties import in_memory

NUM_AT_ONCE = MOST_BYTES_AT_ONCE // 16
"""Every second row of one word: so many are read at once."""
CASES = int(os.environ.get("KVFERRY_CASES", "70"))
Pairs = list[tuple[PairPlan, PairDigests]]


def tables_of(sources: Sequence[RankMemory], requests: Sequence[GroupBlocks], kept: Integrity) -> list[DigestTable]:
    """Return the table of each source rank, filled for the requests."""
    tables = [DigestTable(rank.shard, kept) for rank in sources]
    for table, rank in zip(tables, sources, strict=True):
        for blocks in requests:
            if rank.shard.group(blocks.group) and blocks.num_tokens:
                tokens = blocks.source_first_token, blocks.last_token
                table.fill_group(blocks.group, blocks.source_ids, blocks.source_first_token, tokens)
    return tables


def pairs_of(
    move: Move, destination: Shard, tables: Sequence[DigestTable], wanted: Integrity, selector: int = 0
) -> Pairs:
    plans = Planner(move.sources, destination).plans(selector)
    return [(plan, PairDigests(plan, tables[plan.assignment.source_index].entry, wanted)) for plan in plans]


def compare(pairs: Pairs, asked: Sequence[GroupBlocks]) -> int:
    """Read the words and compare, as a destination does; return the bytes compared."""
    compared = 0
    for _, pair in pairs:
        comparison = pair.comparison(asked)
        words = np.zeros(comparison.num_bytes // 8, dtype=np.uint64)
        for source, to, length in comparison.rows(words.ctypes.data).tolist():
            memory_at(to, (1,), (length,), length)[:] = memory_at(source, (1,), (length,), length)
        compared += sum(comparison.compare(words))
    return compared


def fill(ranks: Sequence[RankMemory], seed: int = 0) -> None:
    generator = np.random.default_rng(seed)
    for rank in ranks:
        for region in rank.regions:
            region[:] = generator.integers(0, 256, len(region), dtype=np.uint8)


def moved(move: Move, arena: Arena, destination: Shard, selector: int = 0) -> None:
    for plan in Planner(move.sources, destination).plans(selector):
        arena.move(plan.lower(move.of(destination)))


def flip(rank: RankMemory, blocks: GroupBlocks, seed: int) -> bool:
    """Change one bit of what a request brought to a rank; False where it brought nothing."""
    generator = np.random.default_rng(seed)
    group = rank.shard.group(blocks.group)
    if group is None or not blocks.num_tokens:
        return False
    token = int(generator.integers(blocks.first_token, blocks.last_token))
    position, slot = divmod(token - blocks.destination_first_token, group.block_size)
    parts = [component for component in group.components if not component.is_padding]
    component = parts[generator.integers(len(parts))]
    view = rank.views[group.name, component.name, component.layers[generator.integers(len(component.layers))]]
    block = int(blocks.destination_ids[position])
    head, channel, byte = (int(generator.integers(view.shape[axis])) for axis in (1, 3, 4))
    view[block, head, slot, channel, byte] ^= np.uint8(1 << int(generator.integers(8)))
    return True


def has_shares(move: Move) -> bool:
    ranks = (*move.sources, *move.destinations)
    return any(not group.token_share.is_whole for rank in ranks for group in rank.groups)


@settings(max_examples=CASES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(
    moves().filter(lambda move: not has_shares(move)),
    st.integers(0, 100),
    st.integers(0, 1 << 20),
    st.sampled_from([4, 8, 512]),
)
def test_digests_agree_after_a_right_move_and_differ_after_any_changed_bit(
    move: Move, selector: int, seed: int, slice_bytes: int
) -> None:
    """Whatever the layouts, block sizes, tensor-parallel sizes and stages of the two engines, and the slices."""
    with mock.patch.object(digest_cells, "SLICE_BYTES", slice_bytes):
        check_digests(move, selector, seed)


def check_digests(move: Move, selector: int, seed: int) -> None:
    arena, move, sources, destinations = in_memory(move)
    fill([*sources, *destinations], seed)
    full, sample = (tables_of(sources, move.requests, kept) for kept in (Integrity.FULL, Integrity.SAMPLE))
    for rank in destinations:
        destination, asked = rank.shard, move.of(rank.shard)
        moved(move, arena, destination, selector)
        for tables in (full, sample):
            compare(pairs_of(move, destination, tables, Integrity.SAMPLE, selector), asked)
        try:
            pairs = pairs_of(move, destination, full, Integrity.FULL, selector)
            compared = compare(pairs, asked)
        except PlanError:
            continue  # block sizes or ranks that cut a cell
        for blocks in asked:
            before = rank.snapshot()
            if flip(rank, blocks, seed):
                assert compared
                with pytest.raises(HandoffError) as caught:
                    compare(pairs, asked)
                assert caught.value.reason is Reason.INTEGRITY_MISMATCH
                assert f"group {blocks.group!r}" in caught.value.message
            rank.restore(before)


@pytest.mark.parametrize(
    ("ids", "num_reads"),
    [
        ([271, 7, 9, 8, 272, 0], 1),
        ([256 * 3 - 1, 5, 0], 1),
        ([256 * 3, 5, 0], 3),
        ([9000, 7, 8, 9, 9001, 0], 4),
        (list(range(0, 2 * NUM_AT_ONCE, 2)), 1),
        (list(range(0, 2 * NUM_AT_ONCE + 1, 2)), NUM_AT_ONCE + 1),
        ([4], 1),
        ([], 0),
    ],
)
def test_rows_that_lie_close_together_are_read_at_once(ids: list[int], num_reads: int) -> None:
    """In any order, with what is between them, of at most ``MOST_BYTES_EACH`` and not too many in all; each block's
    words are found.
    """
    each = MOST_BYTES_EACH // 8 // 256
    read = RowsRead(np.array(ids, dtype=np.int64), each)
    assert len(read.reads()) == num_reads
    table = np.arange(70_000 * each)
    words = np.full(read.num_words, -1)
    for source, to, count in read.reads().tolist():
        words[to : to + count] = table[source : source + count]
    found = [words[begin : begin + each].tolist() for begin in read.word_of_block]
    assert found == [table[block * each : (block + 1) * each].tolist() for block in ids]
    assert -1 not in words


@pytest.mark.parametrize("kept", ["sample", "full"])
def test_rows_that_lie_far_apart_are_found_where_each_has_several_words(
    kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "MOST_BYTES_EACH", 0)
    pair = two(source_layout="LBHNC", destination_layout="LBNHC")
    tables = pair.tables(Integrity(kept))
    pair.run()
    assert pair.compare(tables, Integrity(kept))
    for rank in pair.destinations:
        assert all(flip(rank, pair.request, seed) for seed in range(400))
    with pytest.raises(HandoffError):
        pair.compare(tables, Integrity(kept))


class Two:
    """Two engines of one group, and a request of 100 tokens that a destination has none of."""

    def __init__(
        self,
        arena: Arena,
        source: dict[str, object],
        destination: dict[str, object],
        tokens: tuple[int, int] = (0, 100),
    ) -> None:
        shape = {"layers": ["0", "1"], "num_kv_heads": 4, "head_size": 16, "itemsize": 2, "num_blocks": 12}
        self.sizes = [{"tp_size": 1, "block_size": 32, **side} for side in (source, destination)]
        self.ranks = [
            [
                strided_memory(arena, shard_for(**{**shape, **side}, tp_rank=rank))  # type: ignore[arg-type]
                for rank in range(int(str(side["tp_size"])))
            ]
            for side in self.sizes
        ]
        self.arena = arena
        self.sources, self.destinations = self.ranks
        fill([*self.sources, *self.destinations])
        blocks = [int(str(side["block_size"])) for side in self.sizes]
        begins = [tokens[0] // size * size for size in blocks]
        ids = [
            np.random.default_rng(size).permutation(np.arange(1, 12))[: -(-(tokens[1] - begin) // size)]
            for size, begin in zip(blocks, begins, strict=True)
        ]
        self.request = GroupBlocks(
            group="full",
            first_token=tokens[0],
            last_token=tokens[1],
            source_block_ids=ids[0],
            destination_block_ids=ids[1],
            source_first_token=begins[0],
            destination_first_token=begins[1],
        )
        self.move = Move(
            tuple(rank.shard for rank in self.sources), tuple(rank.shard for rank in self.destinations), (self.request,)
        )

    def run(self) -> None:
        for rank in self.destinations:
            moved(self.move, self.arena, rank.shard)

    def tables(self, kept: Integrity) -> list[DigestTable]:
        return tables_of(self.sources, [self.request], kept)

    def compare(self, tables: Sequence[DigestTable], wanted: Integrity) -> int:
        """Compare on every destination rank."""
        return sum(
            compare(pairs_of(self.move, rank.shard, tables, wanted), [self.request]) for rank in self.destinations
        )


LAYOUTS = {
    "LBHNC": {"layout": NamedLayout.LBHNC},
    "LBNHC": {"layout": NamedLayout.LBNHC},
    "BHLNC": {"layout": NamedLayout.BHLNC},
    "transposed keys": {"layout": NamedLayout.LBHNC, "content": Content.TRANSPOSED_KEYS},
    "planes": {"layout": NamedLayout.BHLNC, "content": Content.PLANES},
}


def two(**sides: object) -> Two:
    fused = {"content": Content.INTERLEAVED}
    source, destination = (
        {**fused, **LAYOUTS[str(sides[f"{side}_layout"])], **dict(sides.get(side, {}))}  # type: ignore[call-overload]
        for side in ("source", "destination")
    )
    tokens = sides.get("tokens", (0, 100))
    return Two(Arena(1 << 22), source, destination, tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("destination", LAYOUTS)
@pytest.mark.parametrize("source", ["LBHNC", "transposed keys"])
@pytest.mark.parametrize("sizes", [(1, 1, 32, 32), (2, 1, 32, 16), (1, 4, 16, 48), (4, 2, 48, 32)])
def test_any_bit_that_was_moved_is_found(source: str, destination: str, sizes: tuple[int, ...]) -> None:
    source_side = {"tp_size": sizes[0], "block_size": sizes[2]}
    destination_side = {"tp_size": sizes[1], "block_size": sizes[3]}
    pair = two(source_layout=source, destination_layout=destination, source=source_side, destination=destination_side)
    tables = pair.tables(Integrity.FULL)
    pair.run()
    # K and V of 100 tokens, 2 layers, 4 heads and 16 numbers of 2 bytes; the last cell counts whole.
    assert pair.compare(tables, Integrity.FULL) == 2 * 112 * 2 * 4 * 16 * 2
    for seed in range(60):
        rank = pair.destinations[seed % len(pair.destinations)]
        before = rank.snapshot()
        assert flip(rank, pair.request, seed)
        with pytest.raises(HandoffError) as caught:
            pair.compare(tables, Integrity.FULL)
        assert caught.value.reason is Reason.INTEGRITY_MISMATCH
        rank.restore(before)
    assert pair.compare(tables, Integrity.FULL)


@pytest.mark.parametrize(("kept", "wanted"), [("sample", "sample"), ("full", "sample"), ("full", "full")])
def test_cells_come_a_few_at_a_time(kept: str, wanted: str) -> None:
    """The samples of a long prompt are many cells: other jobs go on between."""
    pair = two(source_layout="LBHNC", destination_layout="LBNHC")
    grid, request = CellGrid(pair.sources[0].shard.groups[0]), pair.request
    stretches, most = grid.stretches(request.source_ids, 0, 0, 100), 2 * 16 * 16 * 2
    chosen = list(grid.cells(stretches, Integrity(kept), Integrity(wanted), 7, most))
    assert max(len(each.cell) for each in chosen) == 2
    at_once = list(grid.cells(stretches, Integrity(kept), Integrity(wanted), 7, 1 << 30))
    few, together = (
        [(each.part, *cell) for each in cells for cell in zip(*(part.tolist() for part in each[1:]), strict=True)]
        for cells in (chosen, at_once)
    )
    assert few == together


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("changes", [{}, {"atom": Atom.PAGE, "packing": "amx"}], ids=["plain", "packed"])
@pytest.mark.parametrize(("itemsize", "head_size", "num_slices"), [(2, 128, 8), (1, 96, 3), (4, 12, 1), (2, 2, 1)])
def test_the_slices_of_a_cell_have_each_of_its_bytes_once(
    layout: str, changes: dict[str, Any], itemsize: int, head_size: int, num_slices: int
) -> None:
    shape = {"itemsize": itemsize, "head_size": head_size}
    pair = two(source_layout=layout, destination_layout=layout, source=shape, destination=shape)
    shard = pair.sources[0].shard
    [group] = shard.groups
    page = {"token_stride": itemsize, "channel_stride": 32 * itemsize} if changes else {}
    components = [msgspec.structs.replace(each, **changes, **page) for each in group.components]
    group = msgspec.structs.replace(group, components=tuple(components))
    whole, sliced = (CellGrid(group, is_sliced=is_sliced) for is_sliced in (False, True))
    if not changes:
        assert sliced.num_cells == num_slices * whole.num_cells
    for part, slices in zip(whole.parts, sliced.parts, strict=True):
        assert sliced.cell_bytes(slices) >= min(digest_cells.SLICE_BYTES, whole.cell_bytes(part))
        places, sliced_places = (
            np.sort((cells.cells[:, None] + cells.offsets).ravel()[:, None] + np.arange(cells.run_bytes), axis=None)
            for cells in (
                CellMemory(shard, part.component, whole, part),
                CellMemory(shard, part.component, sliced, slices),
            )
        )
        np.testing.assert_array_equal(places, sliced_places)
        names = [part.layer_and_heads(cell) for cell in range(part.num_cells)]
        assert [slices.layer_and_heads(cell) for cell in range(slices.num_cells)] == [
            name for name in names for _ in range(slices.num_slices)
        ]


def test_the_slices_of_a_sample_are_compared_where_the_source_keeps_them() -> None:
    """A source of an earlier version keeps digests of whole cells only, and so does one that keeps all."""
    shape = {"head_size": 64}
    pair = two(source_layout="LBHNC", destination_layout="BHLNC", source=shape, destination=shape)
    [table] = pair.tables(Integrity.SAMPLE)
    pair.run()
    [plan] = Planner(pair.move.sources, pair.destinations[0].shard).plans(0)
    whole = msgspec.structs.replace(table.entry, slices=None)
    whole_bytes = 7 * 16 * 64 * 2
    assert compare([(plan, PairDigests(plan, table.entry, Integrity.SAMPLE))], [pair.request]) == whole_bytes // 4
    assert compare([(plan, PairDigests(plan, whole, Integrity.SAMPLE))], [pair.request]) == whole_bytes
    assert pair.compare(pair.tables(Integrity.FULL), Integrity.SAMPLE) == whole_bytes


def mismatch_of(pairs: Pairs, request: GroupBlocks) -> str:
    """Return the message of the comparison that fails, empty where none does."""
    try:
        compare(pairs, [request])
    except HandoffError as error:
        return error.message
    return ""


@pytest.mark.parametrize("destination", LAYOUTS)
@pytest.mark.parametrize("source", ["LBHNC", "transposed keys"])
@pytest.mark.parametrize("sizes", [(1, 1, 32, 32), (2, 1, 32, 16), (4, 2, 16, 48)])
def test_slices_find_a_block_that_is_anothers_always_and_name_its_head(
    source: str, destination: str, sizes: tuple[int, ...]
) -> None:
    source_side = {"tp_size": sizes[0], "block_size": sizes[2], "head_size": 64}
    side = {"tp_size": sizes[1], "block_size": sizes[3], "head_size": 64}
    pair = two(source_layout=source, destination_layout=destination, source=source_side, destination=side)
    tables = pair.tables(Integrity.SAMPLE)
    pair.run()
    assert pair.compare(tables, Integrity.SAMPLE)
    named = set()
    for rank in pair.destinations:
        before = rank.snapshot()
        for block in pair.request.destination_ids[: 96 // sizes[3]].tolist():
            for view in rank.views.values():
                view[block] ^= 1
            pairs = pairs_of(pair.move, rank.shard, tables, Integrity.SAMPLE)
            assert mismatch_of(pairs, pair.request)
            rank.restore(before)
        for name, view in rank.views.items():
            for head in range(view.shape[1]):
                view[:, head] ^= 1
                if message := mismatch_of(pairs, pair.request):
                    each = rank.shard.groups[0].component(name[1]).heads[0].start + head
                    assert f"component {name[1]!r}, layer {name[2]!r}, heads {each}:{each + 1}," in message
                    named.add(name)
                rank.restore(before)
    assert named, "none of 7 stretches drew one of all heads"


def test_a_mismatch_says_where() -> None:
    pair = two(source_layout="LBHNC", destination_layout="BHLNC", source={"tp_size": 2})
    tables = pair.tables(Integrity.FULL)
    pair.run()
    (rank,) = pair.destinations
    position, slot = divmod(83, 32)
    rank.views["full", "v", "1"][int(pair.request.destination_ids[position]), 3, slot, 5, 1] ^= 4
    with pytest.raises(HandoffError) as caught:
        pair.compare(tables, Integrity.FULL)
    message = caught.value.message
    assert "group 'full', component 'v', layer '1', heads 3:4, tokens 80 to 96" in message
    assert "rank tp 1/2" in message
    assert "(1 of" in message


@pytest.mark.parametrize("source", ["LBHNC", "transposed keys"])
@pytest.mark.parametrize(("kept", "wanted"), [("sample", "sample"), ("full", "sample"), ("full", "full")])
def test_a_longer_prompt_that_shares_the_last_block_leaves_the_digests_of_its_end(
    kept: str, wanted: str, source: str
) -> None:
    """The engine has generated tokens: the block is full, and another prompt writes its digests anew."""
    pair = two(source_layout=source, destination_layout="LBNHC", source={"tp_size": 2})
    tables = pair.tables(Integrity(kept))
    pair.run()
    compared = pair.compare(tables, Integrity(wanted))
    for rank, table in zip(pair.sources, tables, strict=True):
        for view in rank.views.values():
            view[int(pair.request.source_ids[-1]), :, 100 % 32 :] ^= 77
        table.fill_group("full", pair.request.source_ids, 0, (0, 128))
    assert pair.compare(tables, Integrity(wanted)) == compared
    for rank in pair.destinations:
        for view in rank.views.values():
            view[int(pair.request.destination_ids[-1]), :, 96 % 32 : 100 % 32] ^= 1
    with pytest.raises(HandoffError) as caught:
        pair.compare(tables, Integrity(wanted))
    assert "tokens 96 to 100" in caught.value.message


@pytest.mark.parametrize("source", ["LBHNC", "transposed keys"])
@pytest.mark.parametrize(("kept", "wanted"), [("sample", "sample"), ("full", "sample"), ("full", "full")])
def test_a_prompt_whose_digests_come_again_leaves_those_of_a_longer_one_that_shares_its_last_block(
    kept: str, wanted: str, source: str
) -> None:
    """A request that generates on is preempted and computed again, or its word comes with its end."""
    longer = two(source_layout=source, destination_layout="LBNHC", source={"tp_size": 2}, tokens=(0, 128))
    tables = longer.tables(Integrity(kept))
    longer.run()
    compared = longer.compare(tables, Integrity(wanted))
    for table in tables:
        table.fill_group("full", longer.request.source_ids, 0, (0, 100))
    assert longer.compare(tables, Integrity(wanted)) == compared


@pytest.mark.parametrize("kept", [Integrity.SAMPLE, Integrity.FULL])
def test_a_table_of_an_earlier_version_has_the_digests_of_a_prompts_end_in_its_rows(kept: Integrity) -> None:
    """And a destination of an earlier version reads them there."""
    pair = two(source_layout="LBHNC", destination_layout="LBNHC")
    [table] = pair.tables(kept)
    pair.run()
    [plan] = Planner(pair.move.sources, pair.destinations[0].shard).plans(0)
    earlier = msgspec.structs.replace(table.entry, open_address=0, slices=None)
    pairs = [(plan, PairDigests(plan, earlier, kept))]
    assert compare(pairs, [pair.request]) == pair.compare([table], kept)


def test_bytes_behind_the_prompt_do_not_count() -> None:
    """The last block moves whole, and both engines may write the slots behind the prompt."""
    pair = two(source_layout="LBHNC", destination_layout="LBHNC")
    tables = pair.tables(Integrity.FULL)
    pair.run()
    last = int(pair.request.destination_ids[-1])
    pair.destinations[0].views["full", "k", "0"][last, :, 100 % 32 :] ^= 255
    assert pair.compare(tables, Integrity.FULL)


def test_a_load_behind_a_cached_prefix_compares_its_own_tokens() -> None:
    pair = two(
        source_layout="LBHNC",
        destination_layout="LBNHC",
        destination={"block_size": 16},
        tokens=(48, 100),
    )
    whole = GroupBlocks(
        group="full",
        first_token=32,
        last_token=100,
        source_block_ids=pair.request.source_ids,
        destination_block_ids=pair.request.destination_ids,
        source_first_token=32,
        destination_first_token=32,
    )
    tables = tables_of(pair.sources, [whole], Integrity.FULL)
    pair.run()
    assert pair.compare(tables, Integrity.FULL) == 2 * 64 * 2 * 4 * 16 * 2


@pytest.mark.parametrize("kept", [Integrity.SAMPLE, Integrity.FULL])
@pytest.mark.parametrize(("tp_size", "destination_tp"), [(1, 1), (2, 1), (1, 2)])
def test_a_sample_has_one_cell_of_each_stretch_and_source_rank(
    tp_size: int, destination_tp: int, kept: Integrity
) -> None:
    pair = two(
        source_layout="LBHNC",
        destination_layout="LBNHC",
        source={"tp_size": tp_size},
        destination={"tp_size": destination_tp},
    )
    tables = pair.tables(kept)
    pair.run()
    # 7 stretches of 16 tokens; with one source rank and two destinations, each cell is compared by one of them.
    assert pair.compare(tables, Integrity.SAMPLE) == tp_size * 7 * 16 * 16 * 2


def test_a_sample_finds_a_changed_bit_with_its_odds_and_a_wrong_block_always() -> None:
    found = wrong_blocks = 0
    pair = two(source_layout="LBHNC", destination_layout="BHLNC")
    pair.run()
    (rank,) = pair.destinations
    before = rank.snapshot()
    for seed in range(400):
        table = DigestTable(pair.sources[0].shard, Integrity.SAMPLE)
        table._seed = seed
        table.fill_group("full", pair.request.source_ids, 0, (0, 100))
        flip(rank, pair.request, seed)
        found += differs(pair, [table])
        rank.restore(before)
        if seed % 20 == 0:
            rank.regions[0].reshape(12, -1)[int(pair.request.destination_ids[seed // 20 % 4])] ^= 1
            wrong_blocks += differs(pair, [table])
            rank.restore(before)
    assert wrong_blocks == 20
    # A stretch has 16 cells: K and V, 2 layers, 4 heads. 400 tries of odds 1 in 16: 25, and 5 standard deviations.
    assert 1 <= found <= 50


def differs(pair: Two, tables: Sequence[DigestTable]) -> bool:
    try:
        pair.compare(tables, Integrity.SAMPLE)
    except HandoffError:
        return True
    return False


def test_packed_pages_are_compared_byte_by_byte() -> None:
    packed = {"packing": "kernel:packed", "content": Content.FUSED}
    pair = two(source_layout="LBHNC", destination_layout="BHLNC", source=packed, destination={**packed, "tp_size": 2})
    tables = pair.tables(Integrity.FULL)
    pair.run()
    assert pair.compare(tables, Integrity.FULL) == 4 * 2 * 4 * 32 * 32 * 2
    rank = pair.destinations[1]
    rank.views["full", "kv", "1"][int(pair.request.destination_ids[-1]), 1, 31, 31, 1] ^= 128
    with pytest.raises(HandoffError):
        pair.compare(tables, Integrity.FULL)


@pytest.mark.parametrize(("first_token", "destination_first_token"), [(40, 32), (48, 40)])
def test_full_is_refused_where_tokens_or_blocks_begin_inside_a_cell(
    first_token: int, destination_first_token: int
) -> None:
    """The first tokens have no digest of their own, or a cell would lie in two blocks."""
    pair = two(source_layout="LBHNC", destination_layout="LBHNC", tokens=(32, 100))
    asked = GroupBlocks(
        group="full",
        first_token=first_token,
        last_token=100,
        source_block_ids=pair.request.source_ids,
        destination_block_ids=pair.request.destination_ids,
        source_first_token=32,
        destination_first_token=destination_first_token,
    )
    tables = pair.tables(Integrity.FULL)
    with pytest.raises(PlanError) as caught:
        compare(pairs_of(pair.move, pair.destinations[0].shard, tables, Integrity.FULL), [asked])
    assert f"loads from token {first_token} on" in caught.value.message


def test_full_is_refused_where_some_bytes_would_not_be_compared() -> None:
    pair = two(source_layout="LBHNC", destination_layout="LBHNC", destination={"block_size": 24})
    with pytest.raises(PlanError) as caught:
        pair.compare(pair.tables(Integrity.FULL), Integrity.FULL)
    assert caught.value.reason is Reason.UNSUPPORTED
    assert "blocks of 24 tokens" in caught.value.message
    pair.run()
    assert pair.compare(pair.tables(Integrity.FULL), Integrity.SAMPLE)


def test_a_sample_gathers_no_byte_behind_a_block_that_is_shorter_than_a_cell() -> None:
    """Where the prompt ends inside the cell, its bytes fit, but the cell would reach behind the last block."""
    pair = two(source_layout="LBHNC", destination_layout="LBHNC", destination={"block_size": 8}, tokens=(0, 5))
    pair.run()
    assert pair.compare(pair.tables(Integrity.SAMPLE), Integrity.SAMPLE) == 0


def test_full_is_refused_where_the_source_keeps_a_sample() -> None:
    pair = two(source_layout="LBHNC", destination_layout="LBHNC")
    with pytest.raises(PlanError) as caught:
        pair.compare(pair.tables(Integrity.SAMPLE), Integrity.FULL)
    assert caught.value.reason is Reason.UNSUPPORTED
    assert "'full'" not in caught.value.message
    assert '"integrity": "full"' in caught.value.message


def test_a_share_of_the_tokens_is_refused() -> None:
    shard = two(source_layout="LBHNC", destination_layout="LBHNC", source={"token_share": TokenShare(0, 2, 1)})
    with pytest.raises(PlanError) as caught:
        DigestTable(shard.sources[0].shard, Integrity.SAMPLE)
    assert caught.value.reason is Reason.UNSUPPORTED


def test_every_word_has_an_odd_weight_of_its_own() -> None:
    """Then no change of one word of 4 bytes escapes: an odd weight has an inverse modulo 2**64."""
    for itemsize in (1, 2, 4):
        found = weights((2, 3, 24), itemsize).reshape(-1, 4 // itemsize)
        assert (found[:, 0] % 2 == 1).all()
        shifts = np.arange(4 // itemsize, dtype=np.uint64) * np.uint64(8 * itemsize)
        assert (found == found[:, :1] << shifts).all()
        assert len(np.unique(found[:, 0])) == len(found), "no two words have one weight"


@pytest.mark.parametrize("source", ["LBHNC", "transposed keys"])
@pytest.mark.parametrize("bits", [(7,), (15,), (7, 15), range(8, 16), range(16)])
def test_changes_of_many_numbers_do_not_cancel(source: str, bits: Sequence[int]) -> None:
    """The same bits of two numbers, of every second one, of all: a sign in all of a cell, for example."""
    pair = two(source_layout=source, destination_layout=source)
    tables = pair.tables(Integrity.FULL)
    pair.run()
    (rank,) = pair.destinations
    before, mask = rank.snapshot(), np.array([sum(1 << bit for bit in bits)], dtype="<u2").view(np.uint8)
    block = int(pair.request.destination_ids[0])
    for tokens, channels in (([0, 1], [3]), ([0], [0, 2]), ([0, 9], [1, 3, 5, 7]), (range(16), range(16))):
        for channel in channels:
            for token in tokens:
                rank.views["full", "k", "1"][block, 2, token, channel] ^= mask
        with pytest.raises(HandoffError):
            pair.compare(tables, Integrity.FULL)
        rank.restore(before)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_torch_computes_the_sums_of_numpy(layout: str, itemsize: int) -> None:
    """A GPU's cache is summed by torch; its memory is a tensor of this host's here."""
    torch = pytest.importorskip("torch")
    pair = two(source_layout=layout, destination_layout=layout, source={"itemsize": itemsize, "head_size": 12})
    (rank,), generator = pair.sources, np.random.default_rng(1)
    group = rank.shard.groups[0]
    grid = CellGrid(group)
    for part in grid.parts:
        memory = CellMemory(rank.shard, part.component, grid, part)
        cell, block, slot = (generator.integers(0, most, 50) for most in (part.num_cells, 12, 2))
        places, num_tokens = memory.cells[cell] + memory.behind(block, slot * 16), generator.integers(1, 17, 50)
        expected = CellSums(memory).sums(places, num_tokens)
        on_device = DeviceCells(memory, torch.from_numpy(rank.regions[0]))
        np.testing.assert_array_equal(on_device.sums(places, num_tokens), expected)


@pytest.mark.parametrize("num_tokens", range(1, 17))
def test_a_sum_counts_each_of_its_tokens_and_no_other(num_tokens: int) -> None:
    """Also where one token of the cell is left out, and where none is."""
    memory = np.random.default_rng(num_tokens).integers(0, 256, 16 * 8, np.uint8)
    shard = shard_for(
        layers=["0"],
        num_kv_heads=1,
        head_size=4,
        itemsize=1,
        block_size=16,
        num_blocks=1,
        layout=NamedLayout.LBHNC,
        base_address=int(memory.ctypes.data),
    )
    grid = CellGrid(shard.groups[0])
    sums = CellSums(CellMemory(shard, shard.groups[0].components[0], grid, grid.parts[0]))
    before = sums.sums(np.array([0]), np.array([num_tokens]))[0]
    for token in range(16):
        memory[8 * token + 3] ^= 1
        assert (sums.sums(np.array([0]), np.array([num_tokens]))[0] != before) == (token < num_tokens), token
        memory[8 * token + 3] ^= 1
