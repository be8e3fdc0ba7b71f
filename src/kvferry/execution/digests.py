"""Digests of held prompts: a source's table of them in registered memory, and their comparison at a destination.

The table has a row of words for each block of each cache group. A source fills the rows of a prompt's blocks before the
guard word says that the prompt is held; a destination reads the rows between the two reads of the guard word, like the
data. Prompts that share a block write equal words into its row: a shared block is full and never changes, and the cells
of the sample follow from the block's id.

Where a prompt ends inside a stretch of tokens, the digest covers the prompt's tokens only. The engine may go on, fill
the block, and share it with a longer prompt, which writes the stretch's words anew, over all tokens. So the words of
such an *open* stretch have a row of their own. A block has one at most, of the one prompt that ended there. Its words
may come after those of the longer prompt, which stay: a prompt is computed again after a preemption, and a word may be
late.
"""

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from kvferry.arrays import Addresses, Descriptors, Flags, Integers
from kvferry.errors import HandoffError
from kvferry.execution.cell_sums import MOST_BYTES
from kvferry.execution.pair_cells import GroupCells, cells_of, check_kept, place_of
from kvferry.handoff.messages import DigestRows
from kvferry.handoff.messages import DigestTable as TableEntry
from kvferry.layout.shard import Region, Shard
from kvferry.plan.digest_cells import DIGEST_BYTES, CellGrid, Cells, Integrity
from kvferry.plan.planner import PairPlan
from kvferry.plan.request import GroupBlocks
from kvferry.plan.strided_copy import merge_rows

SEED_BITS = 62
MOST_BYTES_EACH, MOST_BYTES_AT_ONCE = 1 << 11, 1 << 19
"""Rows are read at once where these are so many bytes for each, with those between them: a descriptor costs as much;
and so many in all, since the digests of all loads share a stage.
"""


class DigestTable:
    """The digests of one source rank's blocks. Untouched memory costs nothing.

    A sample is kept twice: of slices, and of whole cells for destinations of an earlier version. Raises
    :class:`PlanError` (``unsupported``) for a cache whose digests are not compared.
    """

    def __init__(self, shard: Shard, kept: Integrity) -> None:
        self._kept, self._seed = kept, secrets.randbits(SEED_BITS)
        self._whole = Rows(shard, kept, is_sliced=False)
        self._sliced = Rows(shard, kept, is_sliced=True) if kept is Integrity.SAMPLE else None

    @property
    def regions(self) -> list[Region]:
        """The memory to register."""
        return [rows.region for rows in (self._whole, self._sliced) if rows is not None]

    @property
    def entry(self) -> TableEntry:
        """The table as a destination must know it."""
        kept: Literal["sample", "full"] = "full" if self._kept is Integrity.FULL else "sample"
        at, slices = self._whole.at, None if self._sliced is None else self._sliced.at
        return TableEntry(kept, at.address, self._seed, at.open_address, slices)

    def fill(self, num_tokens: int, block_ids: Mapping[str, Integers]) -> None:
        """Fill the rows of a prompt's blocks.

        Each group's blocks are those of the whole prompt by position, with zeros for blocks that are not held; of a
        state the one block. Groups that this rank does not hold are left out.
        """
        for name, grid in self._whole.grids.items():
            ids = block_ids[name]
            end = 1 if grid.is_state else num_tokens
            self.fill_group(name, ids, 0, (first_held(ids) * grid.group.block_size, end))

    def fill_group(self, name: str, block_ids: Integers, begin: int, tokens: tuple[int, int]) -> None:
        """Fill the rows of ``tokens`` of one group, half-open, in blocks of which the first begins at ``begin``."""
        for rows in (self._whole, self._sliced):
            if rows is not None:
                rows.fill(name, block_ids, begin, tokens, self._seed)


class Rows:
    """The rows of words of one rank's blocks, and those of its open stretches."""

    def __init__(self, shard: Shard, kept: Integrity, *, is_sliced: bool) -> None:
        self._kept = kept
        self.grids = {group.name: CellGrid(group, is_sliced=is_sliced) for group in shard.groups}
        self._cells = {name: [cells_of(shard, grid, part) for part in grid.parts] for name, grid in self.grids.items()}
        first, first_open = (_first_words(self.grids.values(), kept, is_open=is_open) for is_open in (False, True))
        self._open_word = first[""]
        self._memory = np.zeros(max(self._open_word + first_open[""], 1), dtype=np.uint64)
        self._rows, self._open_rows = {}, {}
        for name, grid in self.grids.items():
            self._rows[name] = self._view(grid, first[name], grid.num_words(kept))
            self._open_rows[name] = self._view(grid, self._open_word + first_open[name], grid.num_words_each(kept))

    def _view(self, grid: CellGrid, first_word: int, num_words: int) -> Addresses:
        num_blocks = grid.group.num_blocks
        return self._memory[first_word : first_word + num_blocks * num_words].reshape(num_blocks, num_words)

    @property
    def region(self) -> Region:
        """The memory of the rows."""
        return Region(int(self._memory.ctypes.data), self._memory.nbytes)

    @property
    def at(self) -> DigestRows:
        """Where the rows begin."""
        address = self.region.base_address
        return DigestRows(address, address + self._open_word * DIGEST_BYTES)

    def fill(self, name: str, block_ids: Integers, begin: int, tokens: tuple[int, int], seed: int) -> None:
        """Fill the rows as :meth:`DigestTable.fill_group` does."""
        grid, rows, kept = self.grids[name], self._rows[name], self._kept
        stretches = grid.stretches(block_ids, begin, *tokens)
        is_open, last = grid.is_open(stretches, tokens[1]), len(stretches.block) - 1
        parts = self._cells[name]
        behind = [here.sums.memory.behind(stretches.block, stretches.number * grid.num_tokens) for here in parts]
        for cells in grid.cells(stretches, kept, kept, seed, MOST_BYTES):
            here, at, word = parts[cells.part], cells.stretch, cells.word
            block, places = stretches.block[at], here.places[cells.cell] + behind[cells.part][at]
            sums = here.sums.sums(places, stretches.num_tokens[at])
            if is_open and (of_end := np.flatnonzero(at == last)).size:
                self._open_rows[name][stretches.block[last], grid.word_of_stretch(kept, word[of_end])] = sums[of_end]
                # Also into the rows, for destinations of an earlier version: but not over the words of a longer prompt
                # that shares the block, where this one's come again or late.
                whole = here.sums.sums(places[of_end], np.full(len(of_end), grid.num_tokens))
                in_row = rows[block[of_end], word[of_end]]
                sums[of_end] = np.where(in_row == whole, in_row, sums[of_end])
            rows[block, word] = sums


def first_held(block_ids: Integers) -> int:
    """Return the position of the first block behind the last null block.

    >>> first_held(np.array([0, 0, 7, 6])), first_held(np.array([3]))
    (2, 0)
    """
    gone = np.flatnonzero(block_ids == 0)
    return int(gone[-1]) + 1 if gone.size else 0


def _first_words(grids: Iterable[CellGrid], kept: Integrity, *, is_open: bool) -> dict[str, int]:
    """Return the word with which each group's rows begin, those of blocks or of open stretches; the empty name has the
    words of all.
    """
    begins, begin = {}, 0
    for grid in grids:
        begins[grid.group.name] = begin
        begin += grid.group.num_blocks * (grid.num_words_each(kept) if is_open else grid.num_words(kept))
    return {**begins, "": begin}


class PairDigests:
    """The comparison between one source rank and this one: which words to read for a request, and what they must be.

    Raises :class:`PlanError` (``unsupported``) where the source keeps fewer digests than are wanted, or, with ``full``,
    where its cells do not fit this rank's blocks or heads.
    """

    def __init__(self, plan: PairPlan, table: TableEntry | None, wanted: Integrity) -> None:
        kept = check_kept(table, wanted)
        assert table is not None, "who wants digests asks a source that keeps some"
        slices = table.slices if wanted is Integrity.SAMPLE and kept is Integrity.SAMPLE else None
        grids = {group.name: CellGrid(group, is_sliced=slices is not None) for group in plan.source.groups}
        rows, open_rows = (_first_words(grids.values(), kept, is_open=is_open) for is_open in (False, True))
        at = DigestRows(table.address, table.open_address) if slices is None else slices
        self._groups = [
            GroupDigests(
                GroupCells(plan, group, grids[name], wanted),
                Kept(at, kept, table.seed, rows[name], open_rows[name]),
            )
            for name, group in plan.groups.items()
        ]

    def comparison(self, requests: Sequence[GroupBlocks]) -> "Comparison":
        """Return the comparison of a request. Raises :class:`PlanError` (``unsupported``) where ``full`` is wanted and
        the tokens begin inside a cell.
        """
        asked = [(group, blocks) for group in self._groups for blocks in requests if blocks.group == group.cells.name]
        return Comparison([GroupComparison(group, blocks) for group, blocks in asked if blocks.num_tokens])


class Kept(NamedTuple):
    """A source's table: where it lies, what it keeps, and the words with which the rows of a group begin."""

    at: DigestRows
    kept: Integrity
    seed: int
    first_word: int
    first_open_word: int


class GroupDigests(NamedTuple):
    """The cells of one cache group that move between two ranks, and the source's digests of them."""

    cells: GroupCells
    kept: Kept

    @property
    def num_words(self) -> int:
        """The words of one block."""
        return self.cells.grid.num_words(self.kept.kept)


class RowsRead:
    """How the rows of some blocks are read, in the order of the request: at once where they lie close together.

    A sample's rows do, whatever the order of the blocks: 8 bytes for each 16 tokens.
    """

    def __init__(self, ids: Integers, words_each: int) -> None:
        self._ids, self._words_each = ids, words_each
        self._first, end = (int(ids.min()), int(ids.max()) + 1) if len(ids) else (0, 0)
        most_bytes = min(MOST_BYTES_EACH * len(ids), MOST_BYTES_AT_ONCE)
        self._is_whole = (end - self._first) * words_each * DIGEST_BYTES <= most_bytes
        self.num_words = (end - self._first if self._is_whole else len(ids)) * words_each
        """The words that are read."""
        at = ids - self._first if self._is_whole else np.arange(len(ids), dtype=np.int64)
        self.word_of_block: Integers = at * words_each
        """Which of them is the first one of each block's row."""

    def reads(self) -> Integers:
        """Return rows of the first word in the table, the first word at the reader, and the number of words.

        >>> RowsRead(np.array([9, 3, 4]), 2).reads().tolist(), RowsRead(np.array([5000, 3, 4]), 2).reads().tolist()
        ([[6, 0, 14]], [[10000, 0, 2], [6, 2, 4]])
        """
        each = self._words_each
        if self._is_whole:
            return np.array([[self._first * each, 0, self.num_words]], dtype=np.int64)[: len(self._ids)]
        counts = np.full(len(self._ids), each, dtype=np.int64)
        return merge_rows(np.stack((self._ids * each, self.word_of_block, counts), axis=1))


class Landing(NamedTuple):
    """Where the stretches of a request are at the destination.

    ``is_inside`` says whether the block has the whole stretch: a cell is gathered whole, also where the prompt ends
    inside.
    """

    block: Integers
    slot: Integers
    is_inside: Flags


class ComparedCells(NamedTuple):
    """Some cells that are compared: where this rank has them, how many tokens count, None for all, and which words they
    must have.
    """

    cells: Cells
    places: Integers
    num_tokens: Integers | None
    words: Integers


class GroupComparison:
    """The comparison of one request in one group."""

    def __init__(self, group: GroupDigests, blocks: GroupBlocks) -> None:
        self._group, self._blocks = group, blocks
        grid = group.cells.grid
        self._stretches = grid.stretches(
            blocks.source_ids, blocks.source_first_token, blocks.first_token, blocks.last_token
        )
        self._is_sample = group.cells.wanted is Integrity.SAMPLE
        first = self._stretches.first_token[:1].tolist()
        if not self._is_sample and (not self._landing.is_inside.all() or first != [blocks.first_token]):
            group.cells.refuse(f"loads from token {blocks.first_token} on")
        held = self._stretches.position
        self._first_position = int(held[0]) if len(held) else 0
        self._ids = blocks.source_ids[self._first_position : int(held[-1]) + 1 if len(held) else 0]
        self._rows = RowsRead(self._ids, group.num_words)
        has_row = group.kept.at.open_address and grid.is_open(self._stretches, blocks.last_token)
        self._num_open_words = grid.num_words_each(group.kept.kept) if has_row else 0
        self._prepared: Sequence[ComparedCells] = ()

    @property
    def num_words(self) -> int:
        """The words that are read: rows of the request's blocks, those between them, and that of its end."""
        return self._rows.num_words + self._num_open_words

    def rows(self, destination: int) -> Integers:
        """Return rows of source address, destination address and length that read the words."""
        kept = self._group.kept
        begins = (kept.at.address + kept.first_word * DIGEST_BYTES, destination, 0)
        read = self._rows.reads() * DIGEST_BYTES + np.array(begins, dtype=np.int64)
        if not self._num_open_words:
            return read
        length = self._num_open_words * DIGEST_BYTES
        begin = kept.at.open_address + kept.first_open_word * DIGEST_BYTES + int(self._ids[-1]) * length
        return np.concatenate((read, [[begin, destination + self._rows.num_words * DIGEST_BYTES, length]]))

    def prepare(self) -> None:
        """Choose what a sample compares, while the bytes move: afterwards the request waits for the comparison.

        The cells of ``full`` are too many to be kept.
        """
        if self._is_sample:
            self._prepared = list(self._compared())

    def compare(self, words: Addresses) -> Iterator[int]:
        """Compare some cells at a time, and yield their bytes. Raises :class:`HandoffError` (integrity-mismatch)."""
        group = self._group.cells
        for each in self._prepared or self._compared():
            found = group.parts[each.cells.part].sums.sums(each.places, each.num_tokens)
            if (wrong := np.flatnonzero(found != words[each.words])).size:
                raise self._mismatch(each.cells, wrong)
            yield len(found) * group.grid.cell_bytes(group.grid.parts[each.cells.part])

    @cached_property
    def _landing(self) -> Landing:
        wanted, blocks = self._group.cells.destination, self._blocks
        position, slot = np.divmod(self._stretches.first_token - blocks.destination_first_token, wanted.block_size)
        block = blocks.destination_ids[np.minimum(position, len(blocks.destination_ids) - 1)]
        return Landing(block, slot, slot + self._group.cells.grid.num_tokens <= wanted.block_size)

    def _compared(self) -> Iterator[ComparedCells]:
        group, kept, stretches, landing = self._group.cells, self._group.kept, self._stretches, self._landing
        behind = [here.sums.memory.behind(landing.block, landing.slot) for here in group.parts]
        for cells in group.grid.cells(stretches, kept.kept, group.wanted, kept.seed, MOST_BYTES):
            here = group.parts[cells.part].places
            moves = (here[cells.cell] >= 0) & landing.is_inside[cells.stretch]
            moving = cells if moves.all() else Cells(cells.part, *(each[moves] for each in cells[1:]))
            if len(moving.cell):
                at = moving.stretch
                places, num_tokens = here[moving.cell] + behind[cells.part][at], stretches.num_tokens[at]
                counted = None if (num_tokens == group.grid.num_tokens).all() else num_tokens
                yield ComparedCells(moving, places, counted, self._index(at, moving.word))

    def _index(self, stretch: Integers, word: Integers) -> Integers:
        """Return where the words of blocks' rows are among those that were read."""
        found = self._rows.word_of_block[self._stretches.position[stretch] - self._first_position] + word
        if self._num_open_words:
            last = stretch == len(self._stretches.block) - 1
            of_stretch = self._group.cells.grid.word_of_stretch(self._group.kept.kept, word[last])
            found[last] = self._rows.num_words + of_stretch
        return found

    def _mismatch(self, cells: Cells, wrong: Integers) -> HandoffError:
        first = int(wrong[0])
        stretch = int(cells.stretch[first])
        token = int(self._stretches.first_token[stretch])
        tokens = token, token + int(self._stretches.num_tokens[stretch])
        where = place_of(self._group.cells.grid, tokens, (int(self._landing.block[stretch]),) * 2)
        return self._group.cells.mismatch(cells.part, int(cells.cell[first]), where, (len(wrong), len(cells.cell)))


class Comparison:
    """The comparison of one request with one source rank."""

    def __init__(self, groups: Sequence[GroupComparison]) -> None:
        self._groups = groups

    @property
    def num_bytes(self) -> int:
        """Memory for the words."""
        return sum(group.num_words for group in self._groups) * DIGEST_BYTES

    def rows(self, destination: int) -> Descriptors:
        """Return the descriptors that read the source's words to ``destination``."""
        rows, begin = [np.empty((0, 3), dtype=np.int64)], destination
        for group in self._groups:
            rows.append(group.rows(begin))
            begin += group.num_words * DIGEST_BYTES
        return np.concatenate(rows).view(np.uint64)

    def prepare(self) -> None:
        """Choose what is compared, as far as it can be chosen before the bytes have landed."""
        for group in self._groups:
            group.prepare()

    def compare(self, words: Addresses) -> Iterator[int]:
        """Compare the cache with the words that were read, some cells at a time; yield how many bytes were compared.

        Raises :class:`HandoffError` (integrity-mismatch) for the first cells that differ.
        """
        begin = 0
        for group in self._groups:
            yield from group.compare(words[begin : begin + group.num_words])
            begin += group.num_words
