"""Scatter: long runs of the source are read into a stage at the destination, strided copies take them into the cache.

A source run is what is contiguous at the source alone, so a head split leaves whole pages where the pair of caches has
one run for each token. A stage holds ``[block][run]`` where the source keeps a block's runs together, else
``[run][block]``: either way consecutive source blocks make longer runs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvferry.arrays import Descriptors, Integers, Offsets
from kvferry.errors import PlanError, Reason
from kvferry.plan.planner import PairPlan
from kvferry.plan.request import GroupBlocks
from kvferry.plan.strided_copy import Loop, StridedCopy, fold, merge_rows, place
from kvferry.plan.template import Template

ALIGNMENT = 64
"""Bytes to which each part of a stage is aligned."""
MAX_COPIES = 4096
"""Copies of one template; irregular layouts make more, and are moved directly."""
MAX_CACHED_TEMPLATES = 1024
ROUNDS_PER_STAGE = 4
"""A load takes at most this part of the stage at a time, so that others find room beside it."""
NOTHING: Descriptors = np.empty((0, 3), dtype=np.uint64)
"""A list without descriptors."""


@dataclass(frozen=True, slots=True, eq=False)
class Merge:
    """One strided copy from a stage into the cache, over all its blocks.

    Block i of the stage lies ``i * stage_block_stride`` bytes behind ``stage_offset``; it goes to block
    ``destination_blocks[i]``. ``loops`` are (count, stage stride, destination stride), innermost first, around runs of
    ``run_bytes``; ``destination_address`` is that of block 0.
    """

    stage_offset: int
    stage_block_stride: int
    destination_address: int
    destination_block_stride: int
    destination_blocks: Integers
    run_bytes: int
    loops: tuple[Loop, ...]

    @property
    def num_runs(self) -> int:
        """Runs that are copied."""
        return len(self.destination_blocks) * int(np.prod([count for count, _, _ in self.loops], dtype=np.int64))


@dataclass(frozen=True, slots=True)
class _StageCopy:
    """A copy out of the stage. Loops are (count, stride over runs of the stage, stride within them, destination)."""

    run_begin: int
    within_run: int
    run_length: int
    destination_address: int
    run_bytes: int
    loops: tuple[tuple[int, int, int, int], ...]


class StagedTemplate:
    """A template whose source side goes through a stage.

    ``gap_bytes``: source runs apart by no more are read as one, the bytes between them for nothing. Raises
    :class:`PlanError` (``unsupported``) where no regular copies take the stage apart.

    >>> template = Template(0, 0, 64, 128, (StridedCopy(0, 1000, 8, ((4, 16, 8),)),))
    >>> StagedTemplate(template, gap_bytes=0).num_reads, StagedTemplate(template, gap_bytes=8).num_reads
    (4, 1)
    """

    def __init__(self, template: Template, gap_bytes: int) -> None:
        self.template = template
        starts, lengths = source_runs(template.pieces, gap_bytes)
        self._starts, self._lengths = starts, lengths
        self._begins = np.cumsum(lengths) - lengths
        self.is_block_major = bool(starts[-1] + lengths[-1] - starts[0] <= template.source_block_stride)
        self._copies = [found for copy in template.copies for found in self._stage_copies(copy)]
        if len(self._copies) > MAX_COPIES:
            raise PlanError(Reason.UNSUPPORTED, f"a stage would be taken apart by {len(self._copies)} copies.")

    @property
    def num_reads(self) -> int:
        """Descriptors for one block."""
        return len(self._starts)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in the stage."""
        return int(self._lengths.sum())

    @property
    def num_copies(self) -> int:
        """Copies that take a stage apart, however many blocks it has."""
        return len(self._copies)

    @property
    def num_copied_runs(self) -> int:
        """Runs that these copies make of one block."""
        return int(sum(np.prod([loop[0] for loop in copy.loops], dtype=np.int64) for copy in self._copies))

    def reads(self, source_blocks: Integers, stage_offset: int) -> Offsets:
        """Return rows of source address, stage offset and length, adjacent ones joined."""
        blocks = source_blocks * self.template.source_block_stride
        places = np.arange(len(blocks), dtype=np.int64)
        shape = (len(blocks), self.num_reads)
        rows = np.empty((*shape, 3), dtype=np.int64)
        rows[:, :, 0] = blocks[:, None] + self._starts
        rows[:, :, 1] = stage_offset + self._stage_offsets(places, len(blocks))
        rows[:, :, 2] = self._lengths
        return merge_rows(rows.reshape(-1, 3) if self.is_block_major else rows.swapaxes(0, 1).reshape(-1, 3))

    def _stage_offsets(self, places: Integers, num_blocks: int) -> Integers:
        if self.is_block_major:
            return places[:, None] * self.block_bytes + self._begins
        return num_blocks * self._begins + places[:, None] * self._lengths

    def merges(self, destination_blocks: Integers, stage_offset: int) -> list[Merge]:
        """Return the copies that take a stage of these blocks apart."""
        scale = 1 if self.is_block_major else len(destination_blocks)
        merges = []
        for copy in self._copies:
            loops = [(count, over * scale + within, to) for count, over, within, to in copy.loops]
            run_bytes, folded = fold(copy.run_bytes, loops)
            merges.append(
                Merge(
                    stage_offset=stage_offset + copy.run_begin * scale + copy.within_run,
                    stage_block_stride=self.block_bytes if self.is_block_major else copy.run_length,
                    destination_address=copy.destination_address,
                    destination_block_stride=self.template.destination_block_stride,
                    destination_blocks=destination_blocks,
                    run_bytes=run_bytes,
                    loops=folded,
                )
            )
        return merges

    def _stage_copies(self, copy: StridedCopy) -> Iterator[_StageCopy]:
        """Express a copy's source side by places in the stage; it is split where these are not affine."""
        counts = [count for count, _, _ in copy.loops][::-1]
        rows = copy.expand().reshape(*counts, 3)
        run = np.searchsorted(self._starts, rows[..., 0], side="right") - 1
        spots = np.stack(
            (self._begins[run], rows[..., 0] - self._starts[run], self._lengths[run], rows[..., 1]), axis=-1
        )
        for affine in _affine_parts(spots, compare_lengths=not self.is_block_major):
            yield _stage_copy(affine, copy.run_bytes)


def _stage_copy(spots: Integers, run_bytes: int) -> _StageCopy:
    origin = spots[(0,) * (spots.ndim - 1)].tolist()
    loops = []
    for axis in reversed(range(spots.ndim - 1)):
        count = spots.shape[axis]
        if count > 1:
            over, within, _, to = _step(spots, axis).tolist()
            loops.append((count, over, within, to))
    return _StageCopy(origin[0], origin[1], origin[2], origin[3], run_bytes, tuple(loops))


def _step(spots: Integers, axis: int) -> Integers:
    second = [0] * (spots.ndim - 1)
    second[axis] = 1
    step: Integers = spots[tuple(second)] - spots[(0,) * (spots.ndim - 1)]
    return step


def _affine_parts(spots: Integers, compare_lengths: bool) -> Iterator[Integers]:
    """Halve an array of spots along its outermost axis until each part is affine in its indices."""
    if not compare_lengths:
        spots = spots.copy()
        spots[..., 2] = 0
    pending = [spots]
    while pending:
        part = pending.pop()
        axis = next((axis for axis in range(part.ndim - 1) if part.shape[axis] > 1), None)
        if axis is None or _is_affine(part):
            yield part
            continue
        half = part.shape[axis] // 2
        pending += np.split(part, [half], axis=axis)[::-1]


def _is_affine(spots: Integers) -> bool:
    expected = np.broadcast_to(spots[(0,) * (spots.ndim - 1)], spots.shape).copy()
    for axis in range(spots.ndim - 1):
        if spots.shape[axis] > 1:
            index = np.arange(spots.shape[axis]).reshape(-1, *(1,) * (spots.ndim - 1 - axis))
            expected += index * _step(spots, axis)
    # All runs that one copy takes from a stage [run][block] have one length, which is its stride over blocks.
    expected[..., 2] = spots[(0,) * (spots.ndim - 1)][2]
    return bool(np.array_equal(expected, spots))


def source_runs(pieces: Offsets, gap_bytes: int = 0) -> tuple[Integers, Integers]:
    """Return starts and lengths of what one block's pieces are at the source, where gaps up to so many bytes do."""
    order = np.argsort(pieces[:, 0], kind="stable")
    starts, ends = pieces[order, 0], pieces[order, 0] + pieces[order, 2]
    first = np.concatenate(([True], starts[1:] - ends[:-1] > gap_bytes))
    last = np.concatenate((first[1:], [True]))
    return starts[first], ends[last] - starts[first]


@dataclass(frozen=True, slots=True, eq=False)
class StagedPart:
    """Blocks of one template that go through a stage together."""

    template: StagedTemplate
    source_blocks: Integers
    destination_blocks: Integers

    @property
    def num_bytes(self) -> int:
        """Bytes in the stage."""
        return len(self.source_blocks) * self.template.block_bytes

    def slice(self, start: int, stop: int) -> "StagedPart":
        """Return some of the blocks."""
        return StagedPart(self.template, self.source_blocks[start:stop], self.destination_blocks[start:stop])

    def reads(self, stage_offset: int) -> Offsets:
        """Return rows of source address, stage offset and length."""
        return self.template.reads(self.source_blocks, stage_offset)

    def merges(self, stage_offset: int) -> list[Merge]:
        """Return the copies that follow the reads."""
        return self.template.merges(self.destination_blocks, stage_offset)


class ScatterPlan:
    """A pair's plan by way of a stage at the destination; see :class:`StagedTemplate` for ``gap_bytes``."""

    def __init__(self, plan: PairPlan, gap_bytes: int) -> None:
        self.plan, self.gap_bytes = plan, gap_bytes
        self._templates: dict[Template, StagedTemplate] = {}

    def staged(self, template: Template) -> StagedTemplate:
        """Return the staged form of one of the plan's templates."""
        found = self._templates.get(template)
        if found is None:
            if len(self._templates) >= MAX_CACHED_TEMPLATES:
                self._templates.clear()
            found = self._templates[template] = StagedTemplate(template, self.gap_bytes)
        return found

    def parts(self, requests: Sequence[GroupBlocks]) -> list[StagedPart]:
        """Return what goes through the stage, one part for each phase and pair of regions. Raises as ``lower``."""
        found = []
        for plan, blocks in self.plan.asked(requests):
            for phase, source_blocks, destination_blocks in plan.pairs(blocks):
                # In the order of the source, in which most blocks join.
                order = np.lexsort((destination_blocks, source_blocks))
                pairs = source_blocks[order], destination_blocks[order]
                found += [StagedPart(self.staged(template), *pairs) for template in plan.templates(phase)]
        return found


Numbered = tuple[int, StagedPart]


def cut(parts: Sequence[Numbered], max_bytes: int) -> Iterator[list[Numbered]]:
    """Cut numbered parts (the number says whose they are) into rounds of at most so many bytes, a block at least.

    Parts that fill the same blocks go in step, so that :func:`joined` finds what they write side by side.
    """
    together: list[Numbered] = []
    left = max_bytes
    for band in _bands(parts, max_bytes):
        block_bytes = sum(part.template.block_bytes for _, part in band)
        start, num_blocks = 0, len(band[0][1].source_blocks)
        while start < num_blocks:
            fit = (left - ALIGNMENT * len(band)) // block_bytes
            if fit <= 0 and together:
                yield together
                together, left = [], max_bytes
                continue
            stop = min(num_blocks, start + max(fit, 1))
            pieces = [(number, part.slice(start, stop)) for number, part in band]
            together += pieces
            left -= sum(aligned(piece.num_bytes) for _, piece in pieces)
            start = stop
    if together:
        yield together


def _bands(parts: Sequence[Numbered], max_bytes: int) -> Iterator[list[Numbered]]:
    """Group parts that fill the same blocks, unless one block of all of them is more than a round."""
    bands: dict[bytes, list[Numbered]] = {}
    for numbered in parts:
        bands.setdefault(numbered[1].destination_blocks.tobytes(), []).append(numbered)
    for band in bands.values():
        if sum(part.template.block_bytes + ALIGNMENT for _, part in band) <= max_bytes:
            yield band
        else:
            yield from ([numbered] for numbered in band)


def joined(merges: Sequence[Merge]) -> list[Merge]:
    """Join copies that are alike but for a constant step on both sides, such as the heads of two source ranks.

    One copy then writes whole stretches of the cache in the order of their addresses, which memory does faster.

    >>> heads = [Merge(64 * rank, 8, 1000 + 2 * rank, 16, np.array([5, 4]), 2, ((4, 2, 4),)) for rank in range(2)]
    >>> [(merge.destination_address, merge.loops) for merge in joined(heads)]
    [(1000, ((2, 64, 2), (4, 2, 4)))]
    """
    alike: dict[tuple[object, ...], list[Merge]] = {}
    for merge in merges:
        strides = (merge.stage_block_stride, merge.destination_block_stride)
        key = (*strides, merge.run_bytes, merge.loops, merge.destination_blocks.tobytes())
        alike.setdefault(key, []).append(merge)
    return [merge for members in alike.values() for merge in _joined(members)]


def _joined(members: list[Merge]) -> list[Merge]:
    first = members[0]
    places = np.array([(merge.stage_offset, merge.destination_address) for merge in members], dtype=np.int64)
    return [
        replace(
            first,
            stage_offset=copy.source_offset,
            destination_address=copy.destination_offset,
            run_bytes=copy.run_bytes,
            loops=copy.loops,
        )
        for copy in place(first.run_bytes, first.loops, places)
    ]


def aligned(num_bytes: int) -> int:
    """Round up to the alignment of a stage's parts."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def placed(pieces: Sequence[Numbered]) -> tuple[list[int], int]:
    """Return where each piece of a round begins in the stage, and the bytes of the round."""
    sizes = [aligned(piece.num_bytes) for _, piece in pieces]
    begins = np.cumsum([0, *sizes]).tolist()
    return begins[:-1], begins[-1]


def laid_out(pieces: Sequence[Numbered]) -> tuple[Integers, list[Merge], int]:
    """Return a round's reads, whose stage offsets begin at 0, its copies, joined, and its bytes, whoever owns what.

    There may be no piece; then there is nothing to read.
    """
    begins, num_bytes = placed(pieces)
    together = [(begin, piece) for begin, (_, piece) in zip(begins, pieces, strict=True)]
    reads = np.concatenate([np.empty((0, 3), dtype=np.int64), *(piece.reads(begin) for begin, piece in together)])
    return reads, joined([copy for begin, piece in together for copy in piece.merges(begin)]), num_bytes
