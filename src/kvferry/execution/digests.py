"""Digests of held prompts: a source's table of them in registered memory, and their comparison at a destination.

The table has a row of words for each block of each cache group. A source fills the rows of a prompt's blocks before the
guard word says that the prompt is held; a destination reads the rows between the two reads of the guard word, like the
data. Prompts that share a block write equal words into its row: a shared block is full and never changes, and the cells
of the sample follow from the block's id.
"""

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, NoReturn

import numpy as np

from kvferry.arrays import Addresses, Descriptors, Flags, Integers
from kvferry.errors import HandoffError, PlanError, Reason
from kvferry.execution.cell_sums import MOST_BYTES, CellSums
from kvferry.handoff.messages import DigestTable as TableEntry
from kvferry.layout.component import HeadRange
from kvferry.layout.shard import Region, Shard
from kvferry.plan.digest_cells import DIGEST_BYTES, CellGrid, CellMemory, Cells, Integrity, Part
from kvferry.plan.head_ranges import common, count, without
from kvferry.plan.planner import GroupPlan, PairPlan
from kvferry.plan.request import GroupBlocks
from kvferry.plan.strided_copy import merge_rows

SEED_BITS = 62


class DigestTable:
    """The digests of one source rank's blocks. Untouched memory costs nothing.

    Raises :class:`PlanError` (``unsupported``) for a cache whose digests are not compared.
    """

    def __init__(self, shard: Shard, kept: Integrity) -> None:
        self._kept, self._seed = kept, secrets.randbits(SEED_BITS)
        self._grids = {group.name: CellGrid(group) for group in shard.groups}
        self._sums = {
            name: [CellSums(CellMemory(shard, part.component, grid, part)) for part in grid.parts]
            for name, grid in self._grids.items()
        }
        begins = _first_words(self._grids.values(), kept)
        self._memory = np.zeros(max(begins[""], 1), dtype=np.uint64)
        self._rows = {
            name: self._memory[begins[name] :][: grid.group.num_blocks * grid.num_words(kept)].reshape(
                -1, grid.num_words(kept)
            )
            for name, grid in self._grids.items()
        }

    @property
    def region(self) -> Region:
        """The memory to register."""
        return Region(int(self._memory.ctypes.data), self._memory.nbytes)

    @property
    def entry(self) -> TableEntry:
        """The table as a destination must know it."""
        kept: Literal["sample", "full"] = "full" if self._kept is Integrity.FULL else "sample"
        return TableEntry(kept, self.region.base_address, self._seed)

    def fill(self, num_tokens: int, block_ids: Mapping[str, Integers]) -> None:
        """Fill the rows of a prompt's blocks.

        Each group's blocks are those of the whole prompt by position, with zeros for blocks that are not held; of a
        state the one block. Groups that this rank does not hold are left out.
        """
        for name, grid in self._grids.items():
            ids = block_ids[name]
            end = 1 if grid.is_state else num_tokens
            self.fill_group(name, ids, 0, (first_held(ids) * grid.group.block_size, end))

    def fill_group(self, name: str, block_ids: Integers, begin: int, tokens: tuple[int, int]) -> None:
        """Fill the rows of ``tokens`` of one group, half-open, in blocks of which the first begins at ``begin``."""
        grid, rows = self._grids[name], self._rows[name]
        stretches = grid.stretches(block_ids, begin, *tokens)
        for cells in grid.cells(stretches, self._kept, self._kept, self._seed, MOST_BYTES):
            summed, at = self._sums[name][cells.part], cells.stretch
            head = grid.parts[cells.part].head_cells[cells.head_cell, 1]
            slot = stretches.number[at] * grid.num_tokens
            places = summed.memory.places(cells.layer, head, stretches.block[at], slot)
            rows[stretches.block[at], cells.word] = summed.sums(places, stretches.num_tokens[at])


def first_held(block_ids: Integers) -> int:
    """Return the position of the first block behind the last null block.

    >>> first_held(np.array([0, 0, 7, 6])), first_held(np.array([3]))
    (2, 0)
    """
    gone = np.flatnonzero(block_ids == 0)
    return int(gone[-1]) + 1 if gone.size else 0


def _first_words(grids: Iterable[CellGrid], kept: Integrity) -> dict[str, int]:
    """Return the word with which each group's rows begin in a table; the empty name has the words of all."""
    begins, begin = {}, 0
    for grid in grids:
        begins[grid.group.name] = begin
        begin += grid.group.num_blocks * grid.num_words(kept)
    return {**begins, "": begin}


class PairDigests:
    """The comparison between one source rank and this one: which words to read for a request, and what they must be.

    Raises :class:`PlanError` (``unsupported``) where the source keeps fewer digests than are wanted, or, with ``full``,
    where its cells do not fit this rank's blocks or heads.
    """

    def __init__(self, plan: PairPlan, table: TableEntry | None, wanted: Integrity) -> None:
        kept = Integrity.OFF if table is None else Integrity(table.kept)
        if table is None or (wanted, kept) not in _COMPARABLE:
            raise PlanError(
                Reason.UNSUPPORTED,
                f'this engine has "integrity": "{wanted}", the prefill engine "{kept}".',
                "Set at least the decode engine's value on the prefill engine.",
            )
        grids = {group.name: CellGrid(group) for group in plan.source.groups}
        begins = _first_words(grids.values(), kept)
        self._groups = [
            GroupDigests(plan, group, grids[name], Kept(table, kept, begins[name]), wanted)
            for name, group in plan.groups.items()
        ]

    def comparison(self, requests: Sequence[GroupBlocks]) -> "Comparison":
        """Return the comparison of a request. Raises :class:`PlanError` (``unsupported``) where ``full`` is wanted and
        the tokens begin inside a cell.
        """
        asked = [(group, blocks) for group in self._groups for blocks in requests if blocks.group == group.name]
        return Comparison([GroupComparison(group, blocks) for group, blocks in asked if blocks.num_tokens])


class Kept(NamedTuple):
    """A source's table: what it keeps, and the word with which the rows of a group begin."""

    table: TableEntry
    kept: Integrity
    first_word: int


class GroupDigests:
    """The comparison of one cache group between two ranks."""

    def __init__(self, plan: PairPlan, group: GroupPlan, grid: CellGrid, kept: Kept, wanted: Integrity) -> None:
        self.name, self.rank_name = group.source_group.name, plan.source.rank_name
        self.grid, self.kept, self.wanted = grid, kept, wanted
        self.destination = group.destination_group
        self.num_words = grid.num_words(kept.kept)
        if not self.destination.token_share.is_whole:
            self.refuse(f"holds {self.destination.token_share!r} of the tokens")
        if wanted is Integrity.FULL and self.destination.block_size % grid.num_tokens:
            self.refuse(f"has blocks of {self.destination.block_size} tokens, and digests cover {grid.num_tokens}")
        self.sums: list[CellSums] = []
        self.layers: list[Integers] = []
        self.heads: list[Integers] = []
        """Of each part, the local layer of each of the source's layers and the first local head of each of its head
        cells; -1 for those that do not move between these two ranks."""
        for part in grid.parts:
            received = self.destination.component(part.component.name)
            memory = CellMemory(plan.destination, received, grid, part)
            self.sums.append(CellSums(memory))
            self.layers.append(memory.layers(part.component.layers))
            self.heads.append(self._moving(part, memory, group.heads.get(part.component.name, ())))

    def _moving(self, part: Part, memory: CellMemory, carried: Sequence[HeadRange]) -> Integers:
        """Return the first local head of each head cell; -1 for one that does not move as a whole."""
        first_heads = memory.first_heads.copy()
        cells = [part.heads(index) for index in range(len(first_heads))] if carried else []
        whole = np.array([not without([cell], carried) for cell in cells] or [False] * len(first_heads))
        first_heads[~whole] = -1
        moving = common(common(carried, part.component.heads), memory.heads)
        if self.wanted is Integrity.FULL and count(moving) != part.heads_each * int((first_heads >= 0).sum()):
            self.refuse(f"holds a part of the {part.heads_each} heads of one digest of {part.component.name!r}")
        return first_heads

    def refuse(self, why: str) -> NoReturn:
        """Raise: not all cells could be compared."""
        raise PlanError(
            Reason.UNSUPPORTED,
            f"group {self.name!r}: integrity cannot be {self.wanted} here: this rank {why}.",
            'Set "integrity" to "off" or "sample", or use block sizes that are multiples of 16 on both engines.',
        )


class GroupComparison:
    """The comparison of one request in one group."""

    def __init__(self, group: GroupDigests, blocks: GroupBlocks) -> None:
        self._group = group
        grid, wanted = group.grid, group.destination
        self._stretches = grid.stretches(
            blocks.source_ids, blocks.source_first_token, blocks.first_token, blocks.last_token
        )
        first = self._stretches.first_token
        position, self._slot = np.divmod(first - blocks.destination_first_token, wanted.block_size)
        self._block = blocks.destination_ids[np.minimum(position, len(blocks.destination_ids) - 1)]
        # A cell is gathered whole, also where the prompt ends inside.
        self._is_inside: Flags = self._slot + grid.num_tokens <= wanted.block_size
        if group.wanted is Integrity.FULL and (not self._is_inside.all() or first[:1].tolist() != [blocks.first_token]):
            group.refuse(f"loads from token {blocks.first_token} on")
        held = self._stretches.position
        self._first_position = int(held[0]) if len(held) else 0
        self._ids = blocks.source_ids[self._first_position : int(held[-1]) + 1 if len(held) else 0]

    @property
    def num_words(self) -> int:
        """The words that the comparison reads: rows of consecutive blocks of the request."""
        return len(self._ids) * self._group.num_words

    def rows(self, destination: int) -> Integers:
        """Return rows of source address, destination address and length that read the words."""
        group, each = self._group, self._group.num_words * DIGEST_BYTES
        source = group.kept.table.address + group.kept.first_word * DIGEST_BYTES + self._ids * each
        to = destination + np.arange(len(self._ids), dtype=np.int64) * each
        return merge_rows(np.stack((source, to, np.full(len(to), each)), axis=1))

    def compare(self, words: Addresses) -> Iterator[int]:
        """Compare some cells at a time, and yield their bytes. Raises :class:`HandoffError` (integrity-mismatch)."""
        group, stretches = self._group, self._stretches
        grid, kept = group.grid, group.kept
        for cells in grid.cells(stretches, kept.kept, group.wanted, kept.table.seed, MOST_BYTES):
            layer, head = group.layers[cells.part][cells.layer], group.heads[cells.part][cells.head_cell]
            moved = np.flatnonzero((layer >= 0) & (head >= 0) & self._is_inside[cells.stretch])
            if not len(moved):
                continue
            at, summed = cells.stretch[moved], group.sums[cells.part]
            places = summed.memory.places(layer[moved], head[moved], self._block[at], self._slot[at])
            found = summed.sums(places, stretches.num_tokens[at])
            row = stretches.position[at] - self._first_position
            wrong = np.flatnonzero(found != words[row * group.num_words + cells.word[moved]])
            if wrong.size:
                raise self._mismatch(cells, moved[wrong])
            yield len(moved) * grid.cell_bytes(grid.parts[cells.part])

    def _mismatch(self, cells: Cells, wrong: Integers) -> HandoffError:
        part, first = self._group.grid.parts[cells.part], int(wrong[0])
        stretch = int(cells.stretch[first])
        token = int(self._stretches.first_token[stretch])
        heads = part.heads(int(cells.head_cell[first]))
        where = f"tokens {token} to {token + int(self._stretches.num_tokens[stretch])}"
        if self._group.grid.is_state:
            where = "the state"
        return HandoffError(
            Reason.INTEGRITY_MISMATCH,
            f"group {self._group.name!r}, component {part.component.name!r}, layer "
            f"{part.component.layers[int(cells.layer[first])]!r}, heads {heads!r}, {where}: the bytes that arrived are "
            f"not those of {self._group.rank_name} ({len(wrong)} of {len(cells.layer)} digests differ).",
            "Send the prompt again; if this repeats, check memory and network of both hosts.",
        )


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

    def compare(self, words: Addresses) -> Iterator[int]:
        """Compare the cache with the words that were read, some cells at a time; yield how many bytes were compared.

        Raises :class:`HandoffError` (integrity-mismatch) for the first cells that differ.
        """
        begin = 0
        for group in self._groups:
            yield from group.compare(words[begin : begin + group.num_words])
            begin += group.num_words


_ORDER = list(Integrity)
_COMPARABLE = frozenset((wanted, kept) for kept in _ORDER for wanted in _ORDER[1 : _ORDER.index(kept) + 1])
