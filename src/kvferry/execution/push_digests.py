"""Digests of pushes: both ranks add up the cells that move between them, and the destination compares the sums.

A source computes the digests of what it writes, while it writes, and sends them with its report that the part has
landed. A cell's digest is that of :mod:`kvferry.plan.digest_cells`; which cells a sample has follows from the push's
key, which no other push has, so that later pushes compare other cells.

The digests of one push are at most :data:`MAX_WORDS` words. Where cells are more, a word is the sum of consecutive
stretches of one layer and head, each multiplied by an odd number: a change of one of them changes the word too.
"""

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from kvferry.arrays import Addresses, Flags, Integers
from kvferry.errors import HandoffError, PlanError, Reason
from kvferry.execution.cell_sums import MOST_BYTES
from kvferry.execution.pair_cells import GroupCells, PartCells, place_of
from kvferry.handoff.messages import MAX_DIGEST_BYTES, AnnouncedBlocks, PushKey
from kvferry.handoff.push.part import HeldCut
from kvferry.handoff.push.sender import BlockList
from kvferry.plan.digest_cells import DIGEST_BYTES, CellGrid, Integrity, mixed
from kvferry.plan.planner import PairPlan

MAX_WORDS = MAX_DIGEST_BYTES // DIGEST_BYTES
PER_ADVANCE = 16 << 20
"""A push sums about so many bytes at a time: then another job may go first."""


class Sums(NamedTuple):
    """Digests of some cells: what they add to which words, and the bytes that were summed."""

    words: Integers
    values: Addresses
    num_bytes: int


class MovingCells(NamedTuple):
    """The cells of one part that move: layers and head cells of the source's grid; ``first`` counts the cells of
    earlier parts.
    """

    first: int
    layers: Integers
    head_cells: Integers

    @property
    def num_cells(self) -> int:
        """Cells of one stretch of tokens."""
        return len(self.layers) * len(self.head_cells)


class PushedGroup:
    """The cells of one cache group that move between two ranks, in the memory of one of them, ``held``."""

    def __init__(self, cells: GroupCells, held: Sequence[PartCells], block_size: int) -> None:
        self.cells, self.grid, self.held, self.block_size = cells, cells.grid, held, block_size
        self.moving: list[MovingCells] = []
        self._are_named: dict[tuple[int, frozenset[str]], Flags] = {}
        self.num_cells = 0
        for received in cells.parts:
            layer, head = (np.flatnonzero(each >= 0) for each in (received.layers, received.heads))
            self.moving.append(MovingCells(self.num_cells, layer, head))
            self.num_cells += self.moving[-1].num_cells

    def are_named(self, part: int, layers: frozenset[str]) -> Flags:
        """Return which layers of a part's cells that move are among these, which are all or those of some spans."""
        if (part, layers) not in self._are_named:
            names = self.grid.parts[part].component.layers
            are_named = [names[index] in layers for index in self.moving[part].layers.tolist()]
            self._are_named[part, layers] = np.array(are_named, dtype=np.bool_)
        return self._are_named[part, layers]

    @property
    def num_rows(self) -> int:
        """Digests of one stretch of tokens."""
        is_sample = self.cells.wanted is Integrity.SAMPLE
        return min(self.num_cells, self.grid.num_samples) if is_sample else self.num_cells


class PushedCells:
    """The cells that move between two ranks, in the memory of the source or of the destination.

    Raises :class:`PlanError` (``unsupported``) for a cache whose digests are not compared.
    """

    def __init__(self, plan: PairPlan, wanted: Integrity, *, at_source: bool) -> None:
        self.wanted = wanted
        self.groups: dict[str, PushedGroup] = {}
        for name, group in plan.groups.items():
            cells = GroupCells(plan, group, CellGrid(group.source_group), wanted)
            held = cells.at_source(plan) if at_source else cells.parts
            size = (group.source_group if at_source else group.destination_group).block_size
            self.groups[name] = PushedGroup(cells, held, size)


class GroupSums:
    """The digests of one push in one cache group: ``num_words`` words from ``first_word`` on, of ``fold`` stretches."""

    def __init__(self, group: PushedGroup, announced: AnnouncedBlocks, seed: int) -> None:
        self.group, self.announced, self._seed = group, announced, seed
        cells, each = group.cells, group.grid.num_tokens
        self._first_token = -(-announced.first_token // each) * each
        self.num_stretches = max(0, -(-(announced.end_token - self._first_token) // each))
        self.first_word = self.fold = 0
        is_full = cells.wanted is Integrity.FULL and announced.end_token > announced.first_token
        offset = (self._first_token - announced.block_token) % each
        if is_full and (self._first_token != announced.first_token or offset):
            cells.refuse(f"loads from token {announced.first_token} on")

    @property
    def num_words(self) -> int:
        """The words of this group."""
        return self.group.num_rows * -(-self.num_stretches // self.fold)

    def sums(self, cut: HeldCut) -> Iterator[Sums]:
        """Add up cells of tokens and layers that this rank holds, some at a time."""
        grid = self.group.grid
        begin = -(-cut.first_token // grid.num_tokens) * grid.num_tokens
        first = np.arange(begin, cut.end_token, grid.num_tokens, dtype=np.int64)
        first = first[self._is_inside(first)]
        if not len(first):
            return
        counted = np.full(len(first), grid.num_tokens) if grid.is_paged else self.announced.end_token - first
        where = _Where(first, np.minimum(counted, grid.num_tokens), cut.blocks, self.group.block_size)
        if self.group.cells.wanted is Integrity.FULL:
            yield from self._all(cut.layers, where)
        else:
            yield from self._sample(cut.layers, where)

    @property
    def landed(self) -> HeldCut:
        """All layers and tokens, in the destination's blocks."""
        announced = self.announced
        blocks = BlockList(announced.block_token, announced.block_ids)
        layers = self.group.cells.destination.layers
        return HeldCut(announced.group, layers, announced.first_token, announced.end_token, blocks)

    def open_page(self, cut: HeldCut) -> HeldCut | None:
        """Return the part of a cut that its engine may still change: a packed page that the prompt does not fill."""
        grid, end = self.group.grid, self.announced.end_token
        if not grid.is_paged or cut.end_token < end or end % grid.num_tokens == 0:
            return None
        return msgspec.structs.replace(cut, first_token=max(cut.first_token, end // grid.num_tokens * grid.num_tokens))

    def _is_inside(self, first_tokens: Integers) -> Flags:
        """Return which stretches lie in one block of the destination: a cell is gathered whole."""
        size = self.group.cells.destination.block_size
        inside = (first_tokens - self.announced.block_token) % size + self.group.grid.num_tokens <= size
        return np.asarray(inside)

    def _all(self, layers: frozenset[str], where: "_Where") -> Iterator[Sums]:
        for part, moving in enumerate(self.group.moving):
            chosen = np.flatnonzero(self.group.are_named(part, layers))
            shape = len(chosen), len(where.first_token), len(moving.head_cells)
            cell_bytes = self.group.grid.cell_bytes(self.group.grid.parts[part])
            most, num_cells = max(1, MOST_BYTES // cell_bytes), int(np.prod(shape))
            for begin in range(0, num_cells, most):
                flat = np.arange(begin, min(begin + most, num_cells), dtype=np.int64)
                layer, stretch, head = np.unravel_index(flat, shape)
                row = moving.first + chosen[layer] * len(moving.head_cells) + head
                yield self._summed(part, moving.layers[chosen[layer]], moving.head_cells[head], stretch, row, where)

    def _sample(self, wanted: frozenset[str], where: "_Where") -> Iterator[Sums]:
        num_rows = self.group.num_rows
        if not num_rows:
            return
        drawn = self._draw(where.first_token // self.group.grid.num_tokens)
        for part, moving in enumerate(self.group.moving):
            at = np.flatnonzero((drawn >= moving.first) & (drawn < moving.first + moving.num_cells))
            if not len(at):
                continue
            layer, head = np.divmod(drawn[at] - moving.first, len(moving.head_cells))
            named = np.flatnonzero(self.group.are_named(part, wanted)[layer])
            most = max(1, MOST_BYTES // self.group.grid.cell_bytes(self.group.grid.parts[part]))
            for begin in range(0, len(named), most):
                kept = named[begin : begin + most]
                stretch, row = np.divmod(at[kept], num_rows)
                layers, heads = moving.layers[layer[kept]], moving.head_cells[head[kept]]
                yield self._summed(part, layers, heads, stretch, row, where)

    def _draw(self, numbers: Integers) -> Integers:
        """Return the sampled cells of each of the numbered stretches, one after the other."""
        keys = numbers[:, None] * self.group.num_rows + np.arange(self.group.num_rows)
        random = mixed(keys.ravel().astype(np.uint64) ^ np.uint64(self._seed))
        return (random % np.uint64(self.group.num_cells)).astype(np.int64)

    def _summed(
        self, part: int, layer: Integers, head_cell: Integers, stretch: Integers, row: Integers, where: "_Where"
    ) -> Sums:
        held, grid = self.group.held[part], self.group.grid
        block, slot = where.block[stretch], where.slot[stretch]
        places = held.sums.memory.places(held.layers[layer], held.heads[head_cell], block, slot)
        digests = held.sums.sums(places, where.num_tokens[stretch])
        number = (where.first_token[stretch] - self._first_token) // grid.num_tokens
        words = self.first_word + row * -(-self.num_stretches // self.fold) + number // self.fold
        odd = mixed(number.astype(np.uint64)) | np.uint64(1)
        return Sums(words, digests * odd, len(layer) * grid.cell_bytes(grid.parts[part]))

    def mismatch(self, word: int, counts: tuple[int, int]) -> HandoffError:
        """Return the error of a word of this group that differs."""
        row, number = divmod(word - self.first_word, -(-self.num_stretches // self.fold))
        grid, announced, size = self.group.grid, self.announced, self.group.cells.destination.block_size
        begin = self._first_token + number * self.fold * grid.num_tokens
        end = min(begin + self.fold * grid.num_tokens, announced.end_token)
        if self.group.cells.wanted is Integrity.SAMPLE:
            row = int(self._draw(np.array([begin // grid.num_tokens]))[row])
        part = max(index for index, moving in enumerate(self.group.moving) if moving.num_cells and moving.first <= row)
        moving = self.group.moving[part]
        layer, head = divmod(row - moving.first, len(moving.head_cells))
        first, last = (announced.block_ids[(token - announced.block_token) // size] for token in (begin, end - 1))
        where = place_of(grid, (begin, end), (first, last))
        if self.group.cells.wanted is Integrity.SAMPLE and self.fold > 1:
            where += ", or another sampled one of these tokens"
        return self.group.cells.mismatch(part, int(moving.layers[layer]), int(moving.head_cells[head]), where, counts)


class _Where:
    """Where stretches of tokens lie in the blocks of one rank."""

    def __init__(self, first_token: Integers, num_tokens: Integers, blocks: BlockList, block_size: int) -> None:
        self.first_token, self.num_tokens = first_token, num_tokens
        position, self.slot = np.divmod(first_token - blocks.first_token, block_size)
        self.block = np.asarray(blocks.block_ids, dtype=np.int64)[position]


class PushDigests:
    """The digests of one push between two ranks, in the memory of one of them.

    Raises :class:`PlanError` (``unsupported``) where ``full`` is wanted and the tokens begin inside a cell.
    """

    def __init__(self, cells: PushedCells, announced: Sequence[AnnouncedBlocks], key: PushKey) -> None:
        self.wanted = cells.wanted
        seed = int(mixed(mixed(np.array([key.receiver_epoch], dtype=np.uint64)) + np.uint64(key.number))[0])
        self._groups = {each.group: GroupSums(cells.groups[each.group], each, seed) for each in announced}
        rows = [(group.group.num_rows, group.num_stretches) for group in self._groups.values()]
        num_rows, num_digests = sum(each for each, _ in rows), sum(each * stretches for each, stretches in rows)
        if num_rows >= MAX_WORDS:
            raise PlanError(
                Reason.UNSUPPORTED,
                f"a push of {num_rows} layers and heads has more digests than one message carries.",
                'Set "integrity" to "sample" on the decode engine.',
            )
        # One more word for each row where the last fold is not full.
        fold = max(1, -(-num_digests // (MAX_WORDS - num_rows)))
        self.num_words = 0
        for group in self._groups.values():
            group.first_word, group.fold = self.num_words, fold
            self.num_words += group.num_words

    def sums(self, cuts: Sequence[HeldCut]) -> Iterator[Sums]:
        """Add up the cells of these tokens and layers, some at a time."""
        for cut in cuts:
            yield from self._groups[cut.group].sums(cut)

    def open_pages(self, cuts: Sequence[HeldCut]) -> list[HeldCut]:
        """Return what of these cuts their engine may still change, as it generates tokens behind the prompt."""
        return [page for cut in cuts if (page := self._groups[cut.group].open_page(cut)) is not None]

    def compare(self, sent: bytes) -> Iterator[int]:
        """Add up what has landed, some cells at a time, and yield how many bytes; at the end compare with the source.

        Raises :class:`HandoffError`: protocol-mismatch for another number of digests, integrity-mismatch.
        """
        if len(sent) != self.num_words * DIGEST_BYTES:
            raise HandoffError(
                Reason.PROTOCOL_MISMATCH,
                f"the source sent {len(sent) // DIGEST_BYTES} digests of its push; {self.num_words} belong to it.",
                "Run the same kvferry version on both sides.",
            )
        found = np.zeros(self.num_words, dtype=np.uint64)
        for each in self.sums([group.landed for group in self._groups.values()]):
            np.add.at(found, each.words, each.values)
            yield each.num_bytes
        wrong = np.flatnonzero(found != np.frombuffer(sent, dtype="<u8"))
        if wrong.size:
            word, counts = int(wrong[0]), (len(wrong), self.num_words)
            before = [group for group in self._groups.values() if group.num_words and group.first_word <= word]
            raise before[-1].mismatch(word, counts)


class WrittenDigests:
    """The digests of what a source writes, one batch at a time: :meth:`begin`, :meth:`advance`, :meth:`landed`."""

    def __init__(self, digests: PushDigests) -> None:
        self._digests = digests
        self._words = np.zeros(digests.num_words, dtype=np.uint64)
        self._batch: list[Sums] = []
        self._sums: Iterator[Sums] = iter(())
        self._open_pages: list[HeldCut] = []
        self._before: list[Sums] = []
        self.num_bytes = 0
        self.seconds = 0.0

    def begin(self, cuts: Sequence[HeldCut]) -> None:
        """A batch is about to be written; its digests replace those of a batch that has not landed."""
        self._batch, self._sums = [], self._digests.sums(cuts)
        self._open_pages = self._digests.open_pages(cuts)
        self._before = list(self._digests.sums(self._open_pages))

    def advance(self) -> bool:
        """Add up some cells; return whether the batch has all of its digests."""
        started, num_bytes = time.monotonic(), 0
        try:
            while num_bytes < PER_ADVANCE:
                self._batch.append(next(self._sums))
                num_bytes += self._batch[-1].num_bytes
        except StopIteration:
            return True
        finally:
            self.num_bytes += num_bytes
            self.seconds += time.monotonic() - started
        return False

    def is_unchanged(self) -> bool:
        """Return whether no page of the batch has changed since :meth:`begin`: what has landed is what was summed."""
        after = list(self._digests.sums(self._open_pages))
        pairs = zip(self._before, after, strict=True)
        return all(np.array_equal(before.values, now.values) for before, now in pairs)

    def landed(self) -> None:
        """The batch counts."""
        for each in self._batch:
            np.add.at(self._words, each.words, each.values)
        self._batch = []

    def encoded(self) -> bytes:
        """Return the digests of all batches that have landed, as :meth:`PushDigests.compare` takes them."""
        return self._words.astype("<u8").tobytes()
