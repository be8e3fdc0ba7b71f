"""Digests of writes: both ranks add up the cells that move between them, and the destination compares the sums.

A source computes the digests of what it writes, while it writes, and sends them with its report that the part has
landed. Cells do not depend on the layouts and ranks of source and destination. Which cells a sample has follows from
the write's key, which no other write has, so that later writes compare other cells.

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

The digests of one write are at most :data:`MAX_WORDS` words. Where cells are more, a word is the sum of consecutive
stretches of one layer and head, each multiplied by an odd number: a change of one of them changes the word too.
"""

import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import msgspec
import numpy as np

from kvferry.arrays import Addresses, Flags, Integers
from kvferry.errors import HandoffError, PlanError, Reason
from kvferry.execution.memory import as_bytes
from kvferry.handoff.messages import MAX_DIGEST_BYTES, AnnouncedBlocks, WriteKey
from kvferry.handoff.source import BlockList, HeldCut
from kvferry.layout.shard import HOST_DEVICE, Atom, CacheGroup, CacheKind, Component, HeadRange, Shard
from kvferry.peer_log import PeerLog
from kvferry.plan.match import common, count, without
from kvferry.plan.planner import GroupPlan, PairPlan
from kvferry.transport.protocol import memory_at

if TYPE_CHECKING:
    import torch

logger = PeerLog(logging.getLogger(__name__))

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
MOST_BYTES = 1 << 20
"""Bytes that one call sums: few enough for a core's cache, so that the sum reads them there."""
MAX_WORDS = MAX_DIGEST_BYTES // DIGEST_BYTES
PER_ADVANCE = 16 << 20
"""A job sums about so many bytes at a time: then another job may go first."""


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
    >>> from kvferry.models.groups import AttentionCache, RankMemory, form_groups, model_shard
    >>> groups = form_groups(dict.fromkeys("01", AttentionCache(num_kv_heads=8, head_size=64, itemsize=2)))
    >>> shard = model_shard(groups, frozenset("01"), RankMemory(layout=NamedLayout.LBHNC, block_size=32, num_blocks=10))
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
        for number, stride in self.loops:
            offsets = (offsets[:, None] + np.arange(number, dtype=np.int64) * stride).ravel()
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


def comparable(rank: Shard, wanted: Integrity, *, is_required: bool) -> Integrity:
    """Return how much of a rank's cache is compared: nothing where that is impossible and not required, and the log
    says why. Raises :class:`PlanError` (``unsupported``) where it is required.
    """
    try:
        for group in rank.groups if wanted is not Integrity.OFF else ():
            CellGrid(group)
    except PlanError as error:
        if is_required:
            raise
        logger.warning("kvferry: nothing is compared of what is loaded from or into this cache: %s", error.message)
        return Integrity.OFF
    return wanted


def check_computes(computed: Integrity, wanted: Integrity) -> None:
    """Raise :class:`PlanError` (``unsupported``) where a source computes fewer digests than are ``wanted``."""
    order = list(Integrity)
    if order.index(computed) < order.index(wanted):
        raise PlanError(
            Reason.UNSUPPORTED,
            f'the decode engine has "integrity": "{wanted}", the prefill engine "{computed}".',
            'Set "integrity" of the prefill engine to at least that of the decode engine.',
        )


class CellSums:
    """Sums cells of one part in one rank's memory.

    >>> from kvferry.layout.named_layouts import NamedLayout
    >>> from kvferry.models.groups import AttentionCache, RankMemory, form_groups, model_shard
    >>> memory = np.arange(4096, dtype=np.uint8)
    >>> groups = form_groups(dict.fromkeys("0", AttentionCache(num_kv_heads=1, head_size=8, itemsize=2)))
    >>> place = dict(layout=NamedLayout.LBHNC, block_size=16, num_blocks=8, base_address=memory.ctypes.data)
    >>> shard = model_shard(groups, frozenset("0"), RankMemory(**place))
    >>> grid = CellGrid(shard.groups[0])
    >>> sums = CellSums(CellMemory(shard, shard.groups[0].components[0], grid, grid.parts[0]))
    >>> before = sums.sums(np.array([0, 512]), np.array([16, 3]))
    >>> memory[[5, 512 + 3 * 32]] ^= 1
    >>> (before == sums.sums(np.array([0, 512]), np.array([16, 3]))).tolist()
    [False, True]
    """

    def __init__(self, memory: CellMemory) -> None:
        self.memory = memory

    def sums(self, places: Integers, num_tokens: Integers) -> Addresses:
        """Return the digest of the first ``num_tokens`` of each cell that begins at ``places`` of its region."""
        memory = self.memory
        if memory.region.device != HOST_DEVICE:
            return self._on_device.sums(places, num_tokens)
        number = np.dtype(f"<u{memory.number_bytes}")
        numbers = self._view[places].view(number).reshape(len(places), -1)
        if (short := np.flatnonzero(num_tokens < self._num_tokens)).size:
            numbers[short] *= memory.tokens < num_tokens[short, None]
        return np.asarray(np.einsum("cn,n->c", numbers, memory.weights, dtype=np.uint64))

    @cached_property
    def _num_tokens(self) -> int:
        """The tokens of a cell."""
        return int(self.memory.tokens.max()) + 1

    @cached_property
    def _view(self) -> Any:
        """The region as cells that begin at every byte: an index is a place."""
        region, run_bytes, loops = self.memory.region, self.memory.run_bytes, self.memory.loops
        cell_bytes = run_bytes + sum((count - 1) * stride for count, stride in loops)
        counts, strides = [count for count, _ in loops], [stride for _, stride in loops]
        num_places = max(0, region.length - cell_bytes + 1)
        return memory_at(region.base_address, (num_places, *counts), (1, *strides), run_bytes)

    @cached_property
    def _on_device(self) -> "DeviceCells":
        return DeviceCells(self.memory, as_bytes(self.memory.region))


class DeviceCells:
    """The sums of :class:`CellSums` by torch; ``region`` is the memory's region as bytes."""

    def __init__(self, memory: CellMemory, region: "torch.Tensor") -> None:
        import torch

        # A GPU loads a number only from a multiple of its size.
        self._widest = int(np.gcd.reduce([memory.number_bytes, region.data_ptr(), *memory.offsets.tolist()]))
        self._memory = memory
        self._region = region
        self._torch = torch

    def sums(self, places: Integers, num_tokens: Integers) -> Addresses:
        """Return the digests; waits for the device."""
        torch, memory, device = self._torch, self._memory, self._region.device
        narrow = int(np.gcd.reduce(places, initial=self._widest))
        kinds = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
        numbers = self._region[: len(self._region) // narrow * narrow].view(kinds[narrow])
        per_run = memory.run_bytes // narrow
        steps = (memory.offsets[:, None] // narrow + np.arange(per_run)).ravel()
        first = torch.from_numpy(places // narrow).to(device)
        gathered = numbers[first[:, None] + torch.from_numpy(steps).to(device)].to(torch.int64)
        gathered &= (1 << 8 * narrow) - 1
        weights, tokens = self._by_number(narrow)
        counted = torch.from_numpy(tokens).to(device) < torch.from_numpy(num_tokens).to(device)[:, None]
        sums = (gathered * torch.from_numpy(weights.view(np.int64)).to(device) * counted).sum(dim=1)
        return np.asarray(sums.cpu().numpy().view(np.uint64))

    def _by_number(self, narrow: int) -> tuple[Addresses, Integers]:
        """Return the weights and tokens of numbers that are ``narrow`` bytes of those of the memory."""
        memory = self._memory
        step = memory.number_bytes // narrow
        shifts = (np.arange(step) * 8 * narrow).astype(np.uint64)
        return (memory.weights[:, None] << shifts).ravel(), np.repeat(memory.tokens, step)


class CellPlaces(NamedTuple):
    """The cells of one part in one rank's memory.

    ``places`` has the place of each of the source's cells in block and slot 0, in bytes from the region's begin; -1 for
    those that do not move. A cell's number is its index.
    """

    sums: CellSums
    places: Integers


def cells_of(rank: Shard, grid: CellGrid, part: Part) -> CellPlaces:
    """Return where a source rank has the cells of one part of its own grid."""
    memory = CellMemory(rank, part.component, grid, part)
    return CellPlaces(CellSums(memory), memory.cells)


class MovingCells(NamedTuple):
    """The cells of one part that move: numbers in the part, ascending; ``first`` counts the cells of earlier parts."""

    first: int
    cells: Integers


class GroupCells:
    """The cells of one cache group that move between two ranks, in the memory of one of them.

    A cell moves where the destination holds its layer and all of its heads. ``held`` are the places in this rank's
    memory and ``moving`` the cells that move, both by part of the source's grid. Raises :class:`PlanError`
    (``unsupported``) where ``full`` is wanted, and cells do not fit the destination's blocks or heads.
    """

    def __init__(self, plan: PairPlan, group: GroupPlan, wanted: Integrity, *, at_source: bool) -> None:
        self.name, self.rank_name = group.source_group.name, plan.source.rank_name
        self.grid = grid = CellGrid(group.source_group, is_sliced=wanted is Integrity.SAMPLE)
        self.wanted, self.destination = wanted, group.destination_group
        self.block_size = (group.source_group if at_source else group.destination_group).block_size
        if not self.destination.token_share.is_whole:
            self.refuse(f"holds {self.destination.token_share!r} of the tokens")
        if wanted is Integrity.FULL and self.destination.block_size % grid.num_tokens:
            self.refuse(f"has blocks of {self.destination.block_size} tokens, and digests cover {grid.num_tokens}")
        received = [self._received(plan, group, part) for part in grid.parts]
        self.held = [cells_of(plan.source, grid, part) for part in grid.parts] if at_source else received
        self.moving: list[MovingCells] = []
        self.num_cells = 0
        for each in received:
            self.moving.append(MovingCells(self.num_cells, np.flatnonzero(each.places >= 0)))
            self.num_cells += len(self.moving[-1].cells)
        self._are_named: dict[tuple[int, frozenset[str]], Flags] = {}

    def are_named(self, part: int, layers: frozenset[str]) -> Flags:
        """Return which of a part's cells are of these layers, which are all or those of some spans."""
        if (part, layers) not in self._are_named:
            cells = self.grid.parts[part]
            are_named = np.array([name in layers for name in cells.component.layers], dtype=np.bool_)
            self._are_named[part, layers] = np.repeat(are_named, len(cells.head_cells) * cells.num_slices)
        return self._are_named[part, layers]

    @property
    def num_rows(self) -> int:
        """Digests of one stretch of tokens."""
        is_sample = self.wanted is Integrity.SAMPLE
        return min(self.num_cells, self.grid.num_samples) if is_sample else self.num_cells

    def refuse(self, why: str) -> NoReturn:
        """Raise: not all cells could be compared."""
        raise PlanError(
            Reason.UNSUPPORTED,
            f"group {self.name!r}: integrity cannot be {self.wanted} here: this rank {why}.",
            'Set "integrity" to "off" or "sample", or use block sizes that are multiples of 16 on both engines.',
        )

    def mismatch(self, part: int, cell: int, where: str, counts: tuple[int, int]) -> HandoffError:
        """Return the error of a cell whose bytes differ; ``counts`` are the digests that differ and all compared."""
        name, (layer, heads) = self.grid.parts[part].component.name, self.grid.parts[part].layer_and_heads(cell)
        return HandoffError(
            Reason.INTEGRITY_MISMATCH,
            f"group {self.name!r}, component {name!r}, layer {layer!r}, heads {heads!r}, {where}: the bytes that "
            f"arrived are not those of {self.rank_name} ({counts[0]} of {counts[1]} digests differ).",
            "Send the prompt again; if this repeats, check memory and network of both hosts.",
        )

    def _received(self, plan: PairPlan, group: GroupPlan, part: Part) -> CellPlaces:
        memory = CellMemory(plan.destination, self.destination.component(part.component.name), self.grid, part)
        moves = self._moves(part, memory, group.heads.get(part.component.name, ()))
        places = memory.cells.reshape(-1, len(moves), part.num_slices).copy()
        places[:, ~moves] = -1
        return CellPlaces(CellSums(memory), places.ravel())

    def _moves(self, part: Part, memory: CellMemory, carried: Sequence[HeadRange]) -> Flags:
        """Return which head cells move as a whole."""
        is_held = memory.first_heads >= 0
        cells = [part.heads(index) for index in range(len(is_held))] if carried else []
        moves = is_held & np.array([not without([cell], carried) for cell in cells] or [False] * len(is_held))
        moving = common(common(carried, part.component.heads), memory.heads)
        if self.wanted is Integrity.FULL and count(moving) != part.heads_each * int(moves.sum()):
            self.refuse(f"holds a part of the {part.heads_each} heads of one digest of {part.component.name!r}")
        return np.asarray(moves)


class PartCells:
    """The cells that move between two ranks, in the memory of the source or of the destination.

    Those of a sample are slices. Raises :class:`PlanError` (``unsupported``) for a cache whose digests are not
    compared.
    """

    def __init__(self, plan: PairPlan, wanted: Integrity, *, at_source: bool) -> None:
        self.wanted, self.at_source = wanted, at_source
        self.groups = {
            name: GroupCells(plan, group, wanted, at_source=at_source) for name, group in plan.groups.items()
        }


class Sums(NamedTuple):
    """Digests of some cells: what they add to which words, and the bytes that were summed."""

    words: Integers
    values: Addresses
    num_bytes: int


class Tokens(NamedTuple):
    """Stretches of tokens of a write: where each begins, how many tokens count, its word in the first row, and the odd
    number by which its digests are multiplied.
    """

    first_token: Integers
    num_tokens: Integers
    word: Integers
    odd: Addresses


class ChosenCells(NamedTuple):
    """Some cells of one part: numbers in the part, indices into the stretches, and what these add to which words."""

    cell: Integers
    stretch: Integers
    num_tokens: Integers
    word: Integers
    odd: Addresses


class PlacedCells(NamedTuple):
    """Some cells of one part, and their places in a rank's memory."""

    part: int
    chosen: ChosenCells
    places: Integers


class GroupSums:
    """The digests of one write in one cache group: ``num_words`` words from ``first_word`` on, of ``fold`` stretches
    each.
    """

    def __init__(self, group: GroupCells, announced: AnnouncedBlocks, seed: int) -> None:
        self.group, self.announced, self._seed = group, announced, seed
        each = group.grid.num_tokens
        self._first_token = -(-announced.first_token // each) * each
        self.num_stretches = max(0, -(-(announced.end_token - self._first_token) // each))
        self.first_word = self.fold = 0
        self._latest: tuple[tuple[int, int], Tokens, list[ChosenCells]] | None = None
        is_full = group.wanted is Integrity.FULL and announced.end_token > announced.first_token
        offset = (self._first_token - announced.block_token) % each
        if is_full and (self._first_token != announced.first_token or offset):
            group.refuse(f"loads from token {announced.first_token} on")

    @property
    def num_words(self) -> int:
        """The words of this group."""
        return self.group.num_rows * self._words_each

    def cells(self, cut: HeldCut) -> Iterator[PlacedCells]:
        """Return the cells of tokens and layers that this rank holds, some at a time."""
        tokens, sampled = self._of_tokens(cut.first_token, cut.end_token)
        position, slot = np.divmod(tokens.first_token - cut.blocks.first_token, self.group.block_size)
        block = np.asarray(cut.blocks.block_ids, dtype=np.int64)[position]
        is_full = self.group.wanted is Integrity.FULL
        for part, held in enumerate(self.group.held):
            named, behind = self.group.are_named(part, cut.layers), held.sums.memory.behind(block, slot)
            for each in self._all(part, named, tokens) if is_full else self._sample(part, named, sampled[part]):
                yield PlacedCells(part, each, held.places[each.cell] + behind[each.stretch])

    def summed(self, cells: PlacedCells) -> Sums:
        """Add up some cells."""
        part, chosen, places = cells
        digests = self.group.held[part].sums.sums(places, chosen.num_tokens)
        return Sums(chosen.word, digests * chosen.odd, len(digests) * self._cell_bytes(part))

    @property
    def landed(self) -> HeldCut:
        """All layers and tokens, in the destination's blocks."""
        announced = self.announced
        blocks = BlockList(announced.block_token, announced.block_ids)
        layers = self.group.destination.layers
        return HeldCut(announced.group, layers, announced.first_token, announced.end_token, blocks)

    def split(self, cut: HeldCut) -> tuple[list[HeldCut], list[HeldCut]]:
        """Return the final part of a cut, and the part that its engine may still change: a packed page that the prompt
        does not fill.
        """
        grid, end = self.group.grid, self.announced.end_token
        if not grid.is_paged or cut.end_token < end or end % grid.num_tokens == 0:
            return [cut], []
        page = max(cut.first_token, end // grid.num_tokens * grid.num_tokens)
        final = [msgspec.structs.replace(cut, end_token=page)] if page > cut.first_token else []
        return final, [msgspec.structs.replace(cut, first_token=page)]

    @property
    def _words_each(self) -> int:
        """The words of one row: those of all stretches."""
        return -(-self.num_stretches // self.fold)

    def _cell_bytes(self, part: int) -> int:
        return self.group.grid.cell_bytes(self.group.grid.parts[part])

    def _of_tokens(self, first_token: int, end_token: int) -> tuple[Tokens, list[ChosenCells]]:
        """Return the stretches of tokens, and the sampled cells; the spans of a step are of the same tokens."""
        if self._latest is None or self._latest[0] != (first_token, end_token):
            grid, size = self.group.grid, self.group.destination.block_size
            begin = -(-first_token // grid.num_tokens) * grid.num_tokens
            first = np.arange(begin, end_token, grid.num_tokens, dtype=np.int64)
            # A cell is gathered whole, so it must lie in one block of the destination.
            first = first[(first - self.announced.block_token) % size + grid.num_tokens <= size]
            counted = np.full(len(first), grid.num_tokens) if grid.is_paged else self.announced.end_token - first
            number = (first - self._first_token) // grid.num_tokens
            odd = mixed(number.astype(np.uint64)) | np.uint64(1)
            word = self.first_word + number // self.fold
            tokens = Tokens(first, np.minimum(counted, grid.num_tokens), word, odd)
            sampled = [] if self.group.wanted is Integrity.FULL else self._drawn(tokens)
            self._latest = (first_token, end_token), tokens, sampled
        return self._latest[1:]

    def _drawn(self, tokens: Tokens) -> list[ChosenCells]:
        """Return the sampled cells of each part in these stretches, in the order of their layers."""
        if not self.group.num_rows:
            return [self._chosen(tokens, *np.empty((3, 0), dtype=np.int64)) for _ in self.group.moving]
        drawn = self._draw(tokens.first_token // self.group.grid.num_tokens)
        order = np.argsort(drawn, kind="stable")
        drawn, (stretch, row) = drawn[order], np.divmod(order, self.group.num_rows)
        found = []
        for moving in self.group.moving:
            begin, end = np.searchsorted(drawn, (moving.first, moving.first + len(moving.cells)))
            cell = moving.cells[drawn[begin:end] - moving.first]
            found.append(self._chosen(tokens, cell, stretch[begin:end], row[begin:end]))
        return found

    def _sample(self, part: int, named: Flags, sampled: ChosenCells) -> Iterator[ChosenCells]:
        indices = np.flatnonzero(named[sampled.cell])
        for begin, end in pieces(len(indices), MOST_BYTES, self._cell_bytes(part)):
            chosen = _without_gaps(indices[begin:end])
            yield ChosenCells._make(each[chosen] for each in sampled)

    def _all(self, part: int, named: Flags, tokens: Tokens) -> Iterator[ChosenCells]:
        moving, num_stretches = self.group.moving[part], len(tokens.first_token)
        indices = np.flatnonzero(named[moving.cells])
        for begin, end in pieces(len(indices) * num_stretches, MOST_BYTES, self._cell_bytes(part)):
            index, stretch = np.divmod(np.arange(begin, end, dtype=np.int64), num_stretches)
            cell = indices[index]
            yield self._chosen(tokens, moving.cells[cell], stretch, moving.first + cell)

    def _chosen(self, tokens: Tokens, cell: Integers, stretch: Integers, row: Integers) -> ChosenCells:
        word = tokens.word[stretch] + row * self._words_each
        return ChosenCells(cell, stretch, tokens.num_tokens[stretch], word, tokens.odd[stretch])

    def _draw(self, numbers: Integers) -> Integers:
        """Return the sampled cells of each of the numbered stretches, one after the other."""
        return draw(numbers, self.group.num_rows, self._seed, self.group.num_cells)

    def mismatch(self, word: int, counts: tuple[int, int]) -> HandoffError:
        """Return the error of a word of this group that differs."""
        row, number = divmod(word - self.first_word, self._words_each)
        grid, announced, size = self.group.grid, self.announced, self.group.destination.block_size
        begin = self._first_token + number * self.fold * grid.num_tokens
        end = min(begin + self.fold * grid.num_tokens, announced.end_token)
        is_sample = self.group.wanted is Integrity.SAMPLE
        if is_sample:
            row = int(self._draw(np.array([begin // grid.num_tokens]))[row])
        part = max(index for index, each in enumerate(self.group.moving) if len(each.cells) and each.first <= row)
        moving = self.group.moving[part]
        first, last = (announced.block_ids[(token - announced.block_token) // size] for token in (begin, end - 1))
        held = f"block {first}" if first == last else f"block {first} and those that follow"
        where = f"the state in {held}" if grid.is_state else f"tokens {begin} to {end} in {held}"
        if is_sample and self.fold > 1:
            where += ", or another sampled one of these tokens"
        return self.group.mismatch(part, int(moving.cells[row - moving.first]), where, counts)


def _without_gaps(indices: Integers) -> Integers | slice:
    """Return ascending indices as a slice where they have no gaps: a view costs less than a copy."""
    first, end = int(indices[0]), int(indices[-1]) + 1
    return slice(first, end) if end - first == len(indices) else indices


class PartDigests:
    """The digests of one write between two ranks, in the memory of one of them.

    Raises :class:`PlanError` (``unsupported``) where ``full`` is wanted and the tokens begin inside a cell.
    """

    def __init__(self, cells: PartCells, announced: Sequence[AnnouncedBlocks], key: WriteKey) -> None:
        self.wanted = cells.wanted
        seed = int(mixed(mixed(np.array([key.receiver_epoch], dtype=np.uint64)) + np.uint64(key.number))[0])
        self._groups = {each.group: GroupSums(cells.groups[each.group], each, seed) for each in announced}
        rows = [(group.group.num_rows, group.num_stretches) for group in self._groups.values()]
        num_rows, num_digests = sum(each for each, _ in rows), sum(each * stretches for each, stretches in rows)
        if num_rows >= MAX_WORDS:
            raise PlanError(
                Reason.UNSUPPORTED,
                f"a write of {num_rows} layers and heads has more digests than one message carries.",
                'Set "integrity" to "sample" on the decode engine.',
            )
        # One more word for each row where the last fold is not full.
        fold = max(1, -(-num_digests // (MAX_WORDS - num_rows)))
        self.num_words = 0
        for group in self._groups.values():
            group.first_word, group.fold = self.num_words, fold
            self.num_words += group.num_words
        # A source must not let a peer's announcement cost memory.
        self._landed = [] if cells.at_source else [group.landed for group in self._groups.values()]
        self._prepared = self._cells(self._landed) if self.wanted is Integrity.SAMPLE else ()

    def sums(self, cuts: Sequence[HeldCut]) -> Iterator[Sums]:
        """Add up the cells of these tokens and layers, some at a time. They are chosen when the first is asked for."""
        for group, cells in self._cells(cuts):
            yield group.summed(cells)

    def _cells(self, cuts: Sequence[HeldCut]) -> Iterable[tuple[GroupSums, PlacedCells]]:
        """Return the cells of these tokens and layers.

        Those of a sample are chosen at once: a destination does so before the bytes move, a source while they move.
        """
        groups = ((self._groups[cut.group], cut) for cut in cuts)
        cells = ((group, cells) for group, cut in groups for cells in group.cells(cut))
        return list(cells) if self.wanted is Integrity.SAMPLE else cells

    def split(self, cuts: Sequence[HeldCut]) -> tuple[list[HeldCut], list[HeldCut]]:
        """Return the final parts of these cuts, and the parts that their engine may still change, as it generates
        tokens behind the prompt.
        """
        final, pages = zip(*(self._groups[cut.group].split(cut) for cut in cuts), strict=True)
        return list(chain(*final)), list(chain(*pages))

    def compare(self, sent: bytes) -> Iterator[int]:
        """Add up what has landed, some cells at a time, and yield how many bytes; at the end compare with the source.

        Raises :class:`HandoffError`: protocol-mismatch for another number of digests, integrity-mismatch.
        """
        if len(sent) != self.num_words * DIGEST_BYTES:
            raise HandoffError(
                Reason.PROTOCOL_MISMATCH,
                f"the source sent {len(sent) // DIGEST_BYTES} digests of its write; {self.num_words} belong to it.",
                "Run the same kvferry version on both sides.",
            )
        found = np.zeros(self.num_words, dtype=np.uint64)
        for group, cells in self._prepared or self._cells(self._landed):
            each = group.summed(cells)
            np.add.at(found, each.words, each.values)
            yield each.num_bytes
        wrong = np.flatnonzero(found != np.frombuffer(sent, dtype="<u8"))
        if wrong.size:
            word, counts = int(wrong[0]), (len(wrong), self.num_words)
            before = [group for group in self._groups.values() if group.num_words and group.first_word <= word]
            raise before[-1].mismatch(word, counts)


class WrittenDigests:
    """The digests of what a source writes, one batch at a time: :meth:`begin`, :meth:`advance`, :meth:`changed_pages`,
    :meth:`landed`.
    """

    def __init__(self, digests: PartDigests) -> None:
        self._digests = digests
        self._words = np.zeros(digests.num_words, dtype=np.uint64)
        self._batch: list[Sums] = []
        self._sums: Iterator[Sums] = iter(())
        self._open_pages: list[HeldCut] = []
        self._before: list[Sums] = []
        self.num_bytes = 0
        self.seconds = 0.0

    def begin(self, cuts: Sequence[HeldCut]) -> None:
        """A batch is about to be written; its digests replace those of a batch that has not landed.

        Its cells are chosen and added up while it is written, but for pages that the engine may change meanwhile.
        """
        started = time.monotonic()
        final, self._open_pages = self._digests.split(cuts)
        self._batch, self._sums = [], self._digests.sums(final)
        self._before = list(self._digests.sums(self._open_pages))
        self.seconds += time.monotonic() - started

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

    def changed_pages(self) -> dict[str, int]:
        """Return where the pages begin that the engine has changed since :meth:`begin`, by group: what has landed of
        them need not be what was summed, and does not count.
        """
        after = list(self._digests.sums(self._open_pages))
        pairs = zip(self._before, after, strict=True)
        if not all(np.array_equal(before.values, now.values) for before, now in pairs):
            return {page.group: page.first_token for page in self._open_pages}
        self._batch += self._before
        self.num_bytes += sum(each.num_bytes for each in self._before)
        return {}

    def landed(self) -> None:
        """The batch counts."""
        for each in self._batch:
            np.add.at(self._words, each.words, each.values)
        self._batch = []

    def encoded(self) -> bytes:
        """Return the digests of all batches that have landed, as :meth:`PartDigests.compare` takes them."""
        return self._words.astype("<u8").tobytes()
