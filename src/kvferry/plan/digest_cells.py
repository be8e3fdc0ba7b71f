"""Cells: the parts of a cache whose digests a source and a destination compare, whatever their layouts and ranks.

A cell is one layer, component and KV head, and up to 16 tokens of one block of the source; a state's cell is a range of
its heads. In a *sliced* grid a cell has a slice of the channels only, of at least 512 bytes. The *digest* of a cell is
the sum of ``number * weight`` over its elements, modulo 2**64. The weight of an element follows from its place in the
cell alone (head, token, channel), so the memory order of source and destination does not matter, and any rank that
holds the whole cell can compute the digest.

**A change inside one aligned word of 4 bytes of a token's content is always found.** The elements of such a word have
one odd weight w, shifted by their place in the word: together they count as ``word * w``. Two words differ by some d,
0 < abs(d) < 2**32, and ``d * w`` is not 0 modulo 2**64, since an odd w has an inverse. Changes in several words cancel
where the sum of their ``d * w`` is 0: for pseudo-random weights, by chance only, and for one flipped bit in each of two
words about once in 2**32 or less often. That is no protection against forgery.

With ``full`` every cell has a digest; with ``sample`` each stretch of 16 tokens has that of one cell of a sliced grid,
and each state that of 16. A pseudo-random function of the write and the stretch chooses them, the same on both sides.
Damage to k of the n cells of a stretch is found with odds of k in n for that stretch.
"""

import math
from collections.abc import Iterator
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from kvferry.arrays import Addresses, Integers
from kvferry.errors import PlanError, Reason
from kvferry.layout.shard import Atom, CacheGroup, CacheKind, Component, HeadRange, Shard

DIGEST_BYTES = 8
WORD_BYTES = 4
_SECOND = 0xD1B54A32D192ED03
"""The weight of a pair's second word, as a multiple of the first's: odd, and 3 modulo 8, so that equal or opposite
changes of both words do not cancel."""
MOST_TOKENS = 16
"""Tokens of a cell. vLLM's block sizes are multiples of it, so a cell lies in one block of either engine."""
SPLIT_HEADS_ABOVE = 256
"""A component of more heads, which are a convolution's channels, has cells of several heads ..."""
HEAD_CELLS = 192
"""... of which at most so many: its divisors are the tensor-parallel sizes that do not cut a cell."""
SLICE_BYTES = 512
"""Bytes of a cell of a sliced grid, at least: fewer bytes to gather, and a block that is another's is found all the
same."""
STATE_SAMPLES = 16
_ITEM_SIZES = (1, 2, 4)


class Integrity(StrEnum):
    """How much of a transfer is compared."""

    OFF = "off"
    SAMPLE = "sample"
    FULL = "full"


class Part(NamedTuple):
    """The cells of one component at the source: ``layers`` by ``head_cells``, each of ``heads_each`` heads, by
    ``num_slices``.

    ``first`` is the number of its first cell among those of one stretch of tokens.
    """

    component: Component
    first: int
    heads_each: int
    head_cells: Integers
    """Rows of the global and the local index of each cell's first head."""
    num_slices: int
    """Slices of the channels; of a packed page, of the page."""

    @property
    def num_cells(self) -> int:
        """Cells of one stretch of tokens."""
        return len(self.component.layers) * len(self.head_cells) * self.num_slices

    def heads(self, head_cell: int) -> HeadRange:
        """Return the global heads of a range of heads."""
        start = int(self.head_cells[head_cell, 0])
        return HeadRange(start, start + self.heads_each)

    def layer_and_heads(self, cell: int) -> tuple[str, HeadRange]:
        """Return the name of a cell's layer, and its global heads."""
        layer, head_cell = divmod(cell // self.num_slices, len(self.head_cells))
        return self.component.layers[layer], self.heads(head_cell)


class CellGrid:
    """The cells of one cache group of a source rank.

    With ``is_sliced`` a cell has a slice of its channels. Raises :class:`PlanError` (``unsupported``) for a rank that
    holds a share of the tokens, or items of odd sizes.

    >>> from kvferry.layout.named_layouts import NamedLayout
    >>> from kvferry.layout.dense import shard_for
    >>> shard = shard_for(layers=["0", "1"], num_kv_heads=8, head_size=64, itemsize=2, block_size=32, num_blocks=10,
    ...     layout=NamedLayout.LBHNC)
    >>> grid = CellGrid(shard.groups[0])
    >>> grid.num_tokens, grid.num_cells
    (16, 16)
    >>> CellGrid(shard.groups[0], is_sliced=True).num_cells
    128
    """

    def __init__(self, group: CacheGroup, *, is_sliced: bool = False) -> None:
        self.group = group
        self.is_paged = any(component.atom is Atom.PAGE for component in group.components)
        _refuse_unless_plain(group)
        most = group.block_size if self.is_paged else min(group.block_size, MOST_TOKENS)
        self.num_tokens = next(size for size in range(most, 0, -1) if group.block_size % size == 0)
        """Tokens of a stretch. Pages that a kernel packs cannot be cut: their stretch is the page."""
        self.is_state = group.kind is CacheKind.STATE
        self.num_samples = STATE_SAMPLES if self.is_state else 1
        self.parts: list[Part] = []
        self.num_cells = 0
        for component in group.components:
            if not component.is_padding:
                part = self._part(component, is_sliced=is_sliced)
                self.parts.append(part)
                self.num_cells += part.num_cells

    def _part(self, component: Component, *, is_sliced: bool) -> Part:
        each, head_cells = _head_cells(component)
        num_slices = _num_slices(component, each * self.num_tokens, is_paged=self.is_paged) if is_sliced else 1
        return Part(component, self.num_cells, each, head_cells, num_slices)

    def cell_bytes(self, part: Part) -> int:
        """Return the bytes of one cell."""
        component = part.component
        return part.heads_each * self.num_tokens * component.num_channels * component.itemsize // part.num_slices


class CellMemory:
    """Where the cells of one part lie in the memory of one rank, and the weights of their elements in memory order.

    ``cells`` has the place of each cell of block and slot 0, in bytes from the region's begin, by layer, head cell and
    slice; -1 for one that the rank does not hold whole. A cell is runs of ``run_bytes``, repeated over ``loops`` of
    count and stride, outermost first. A run is numbers of ``number_bytes`` each. ``weights`` has the weight of each
    number of a cell, ``tokens`` the token of the cell to which the number belongs.
    """

    def __init__(self, shard: Shard, component: Component, grid: CellGrid, part: Part) -> None:
        self.region, self.heads = shard.regions[component.region], component.heads
        self._component, self._part = component, part
        item, (num_heads, num_tokens, num_channels) = component.itemsize, _shape(grid, part)
        strides = (
            (component.head_stride, item * num_channels, item)
            if grid.is_paged
            else (component.head_stride, component.token_stride, component.channel_stride)
        )
        shape = (num_heads, num_tokens, num_channels)
        # Shortest stride first; an axis of one index has none.
        axes = sorted((axis for axis in range(3) if shape[axis] > 1), key=lambda axis: strides[axis])
        self.run_bytes, inner = item, []
        while axes and strides[axes[0]] == self.run_bytes:
            inner.append(axes.pop(0))
            self.run_bytes *= shape[inner[-1]]
        self.loops = [(shape[axis], strides[axis]) for axis in reversed(axes)]
        order = [*reversed(axes), *(axis for axis in range(3) if shape[axis] == 1), *reversed(inner)]
        numbers = np.broadcast_to(np.arange(num_tokens)[:, None], shape)
        by_place = [np.transpose(each, order).ravel() for each in (weights(shape, item), numbers)]
        # A word in one piece counts as one number: its elements have one weight, shifted.
        is_whole = bool(inner) and inner[0] == 2 and num_channels * item % WORD_BYTES == 0
        self.number_bytes = WORD_BYTES if is_whole else item
        step = self.number_bytes // item
        self.weights, self.tokens = by_place[0][::step].copy(), by_place[1][::step].copy()
        held = dict(zip(component.layers, component.layer_offsets, strict=True))
        layers = np.array([held.get(name, -1) for name in part.component.layers], dtype=np.int64)[:, None, None]
        heads = self.first_heads[:, None]
        slices = np.arange(part.num_slices, dtype=np.int64) * num_channels * strides[2]
        is_held = (layers >= 0) & (heads >= 0)
        self.cells: Integers = np.where(is_held, layers + heads * component.head_stride + slices, -1).ravel()

    @cached_property
    def offsets(self) -> Integers:
        """Where each run begins, from the cell's first byte."""
        offsets = np.zeros(1, dtype=np.int64)
        for count, stride in self.loops:
            offsets = (offsets[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
        return offsets

    @cached_property
    def first_heads(self) -> Integers:
        """The local index of each head cell's first head, -1 where this rank does not hold the whole cell."""
        found = np.full(len(self._part.head_cells), -1, dtype=np.int64)
        local = 0
        for held in self._component.heads:
            start = self._part.head_cells[:, 0]
            inside = (start >= held.start) & (start + self._part.heads_each <= held.end)
            found[inside] = start[inside] - held.start + local
            local += len(held)
        return found

    def behind(self, block: Integers, slot: Integers) -> Integers:
        """Return how far behind its place in block and slot 0 a cell of this block and slot is, in bytes."""
        # The slot of a state, and of a whole page, is 0.
        return np.asarray(block * self._component.block_stride + slot * self._component.token_stride)


def weights(shape: tuple[int, int, int], itemsize: int) -> Addresses:
    """Return the weight of each element ``[head, token, channel]`` of a cell.

    >>> word = weights((1, 1, 4), itemsize=1)[0, 0]
    >>> int(word[0]) % 2, np.array_equal(word, word[0] << np.array([0, 8, 16, 24], dtype=np.uint64))
    (1, True)
    """
    num_heads, num_tokens, num_channels = shape
    byte = np.arange(num_channels) * itemsize
    num_pairs = -(-num_channels * itemsize // (2 * WORD_BYTES))
    firsts = mixed(np.arange(num_heads * num_tokens * num_pairs, dtype=np.uint64)) | np.uint64(1)
    words = np.stack((firsts, firsts * np.uint64(_SECOND)), axis=1).reshape(num_heads, num_tokens, -1)
    shifts = (byte % WORD_BYTES * 8).astype(np.uint64)
    return np.asarray(words[..., byte // WORD_BYTES] << shifts)


def mixed(numbers: Addresses) -> Addresses:
    """Return pseudo-random words of numbers, by splitmix64.

    >>> hex(int(mixed(np.zeros(1, dtype=np.uint64))[0]))
    '0xe220a8397b1dcdaf'
    """
    mixing = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixing = (mixing ^ (mixing >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixing = (mixing ^ (mixing >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixing ^ (mixing >> np.uint64(31))


def draw(stretches: Integers, each: int, seed: int, num_cells: int) -> Integers:
    """Return ``each`` pseudo-random cells of every numbered stretch, one stretch after the other.

    >>> draw(np.array([0, 1, 5]), 2, seed=7, num_cells=100).tolist() == draw(
    ...     np.array([0, 1, 2, 3, 10, 11]), 1, seed=7, num_cells=100).tolist()
    True
    """
    keys = stretches if each == 1 else (stretches[:, None] * each + np.arange(each)).ravel()
    return (mixed(keys.astype(np.uint64) ^ np.uint64(seed)) % np.uint64(num_cells)).astype(np.int64)


def pieces(count: int, most_bytes: int, each_bytes: int) -> Iterator[tuple[int, int]]:
    """Return the bounds of pieces of ``count`` cells, none of more than ``most_bytes`` unless of one cell.

    >>> list(pieces(5, 100, 40)), list(pieces(2, 100, 400))
    ([(0, 2), (2, 4), (4, 5)], [(0, 1), (1, 2)])
    """
    most = max(1, most_bytes // each_bytes)
    return ((begin, min(begin + most, count)) for begin in range(0, count, most))


def _shape(grid: CellGrid, part: Part) -> tuple[int, int, int]:
    """Return heads, tokens and channels of a cell; the inside of a packed page has one order for both engines."""
    if grid.is_paged:
        return part.heads_each, 1, grid.num_tokens * part.component.num_channels // part.num_slices
    return part.heads_each, grid.num_tokens, part.component.num_channels // part.num_slices


def _head_cells(component: Component) -> tuple[int, Integers]:
    """Return the heads of a cell, and :attr:`Part.head_cells`."""
    total, bounds = component.total_heads, [bound for held in component.heads for bound in (held.start, held.end)]
    each = 1 if total <= SPLIT_HEADS_ABOVE else math.gcd(total // math.gcd(total, HEAD_CELLS), *bounds)
    local, starts = 0, []
    for held in component.heads:
        steps = np.arange(0, len(held), each, dtype=np.int64)
        starts.append(np.stack((steps + held.start, steps + local), axis=1))
        local += len(held)
    return each, np.concatenate(starts)


def _num_slices(component: Component, num_contents: int, *, is_paged: bool) -> int:
    """Return the most slices of whole words and at least :data:`SLICE_BYTES`, of cells of ``num_contents`` contents: of
    one head and token each.
    """
    content_bytes = component.num_channels * component.itemsize
    most = num_contents * content_bytes // SLICE_BYTES
    num_words, odd_bytes = divmod(content_bytes * (num_contents if is_paged else 1), WORD_BYTES)
    return 1 if odd_bytes else max(number for number in range(1, max(1, most) + 1) if num_words % number == 0)


def _refuse_unless_plain(group: CacheGroup) -> None:
    if not group.token_share.is_whole:
        what = f"group {group.name!r}: digests of {group.token_share!r} of the tokens are not compared."
    elif odd := next((each.itemsize for each in group.components if each.itemsize not in _ITEM_SIZES), 0):
        what = f"group {group.name!r}: digests of items of {odd} bytes are not compared."
    else:
        return
    raise PlanError(Reason.UNSUPPORTED, what, 'Set "integrity" to "off" on both engines.')
