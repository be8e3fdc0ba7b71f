"""Scatter: the destination reads long runs of the source into a stage; strided copies move them into the cache.

A source run is contiguous at the source, whether or not it is at the destination. So a pair that splits heads reads
whole pages, where descriptors between the two caches would carry one token of one head each. The stage is ordered
``[block][run]`` where the source keeps a block's runs together, else ``[run][block]``: either order makes one run of
consecutive source blocks.
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
"""Each group of blocks begins in the stage at a multiple of so many bytes."""
MAX_COPIES = 4096
"""Limit of one template's copies. Irregular layouts need more, and move directly."""
MAX_CACHED_TEMPLATES = 1024
ROUNDS_PER_STAGE = 4
"""A read fills at most one such fraction of the stage at a time, so that other reads find room."""
NOTHING: Descriptors = np.empty((0, 3), dtype=np.uint64)
"""An empty list of descriptors."""


@dataclass(frozen=True, slots=True, eq=False)
class Merge:
    """One strided copy from a stage into the cache, over a list of blocks.

    Block i of the stage begins at ``stage_offset + i * stage_block_stride`` and goes to block
    ``destination_blocks[i]`` of the cache. ``loops`` are (count, stage stride, destination stride), innermost first,
    around runs of ``run_bytes``; ``destination_address`` is that of block 0.
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
        """The number of runs."""
        return len(self.destination_blocks) * int(np.prod([count for count, _, _ in self.loops], dtype=np.int64))


@dataclass(frozen=True, slots=True)
class _StageCopy:
    """A copy out of the stage. Loops are (count, stride over stage runs, stride within a run, destination stride)."""

    run_begin: int
    within_run: int
    run_length: int
    destination_address: int
    run_bytes: int
    loops: tuple[tuple[int, int, int, int], ...]


class StagedTemplate:
    """A template whose bytes go through a stage.

    Source runs with a gap of at most ``gap_bytes`` are read as one; the bytes of the gap are not used. Raises
    :class:`PlanError` (``unsupported``) where the stage would need more than ``MAX_COPIES`` copies.

    >>> template = Template(0, 0, 64, 128, (StridedCopy(0, 1000, 8, ((4, 16, 8),)),))
    >>> StagedTemplate(template, gap_bytes=0).num_reads, StagedTemplate(template, gap_bytes=8).num_reads
    (4, 1)
    """

    def __init__(self, template: Template, gap_bytes: int) -> None:
        self.template = template
        starts, lengths = source_runs(template.runs, gap_bytes)
        self.starts, self.lengths = starts, lengths
        self.offsets = np.cumsum(lengths) - lengths
        self.is_block_major = bool(starts[-1] + lengths[-1] - starts[0] <= template.source_block_stride)
        self.copies = [found for copy in template.copies for found in self._stage_copies(copy)]
        if len(self.copies) > MAX_COPIES:
            raise PlanError(
                Reason.UNSUPPORTED,
                f"{len(self.copies)} copies would move the stage into the cache; the limit is {MAX_COPIES}.",
            )

    @property
    def num_reads(self) -> int:
        """Descriptors for one block."""
        return len(self.starts)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in the stage."""
        return int(self.lengths.sum())

    @property
    def num_copies(self) -> int:
        """Copies from the stage into the cache, for any number of blocks."""
        return len(self.copies)

    @property
    def num_copied_runs(self) -> int:
        """Runs of these copies for one block."""
        return int(sum(np.prod([loop[0] for loop in copy.loops], dtype=np.int64) for copy in self.copies))

    def _stage_copies(self, copy: StridedCopy) -> Iterator[_StageCopy]:
        """Express a copy's source offsets as offsets in the stage; split the copy where those are not affine."""
        counts = [count for count, _, _ in copy.loops][::-1]
        rows = copy.expand().reshape(*counts, 3)
        run = np.searchsorted(self.starts, rows[..., 0], side="right") - 1
        places = np.stack(
            (self.offsets[run], rows[..., 0] - self.starts[run], self.lengths[run], rows[..., 1]), axis=-1
        )
        for affine in _affine_parts(places, compare_lengths=not self.is_block_major):
            yield _stage_copy(affine, copy.run_bytes)


def _stage_copy(places: Integers, run_bytes: int) -> _StageCopy:
    origin = places[(0,) * (places.ndim - 1)].tolist()
    loops = []
    for axis in reversed(range(places.ndim - 1)):
        count = places.shape[axis]
        if count > 1:
            over, within, _, to = _step(places, axis).tolist()
            loops.append((count, over, within, to))
    return _StageCopy(origin[0], origin[1], origin[2], origin[3], run_bytes, tuple(loops))


def _step(places: Integers, axis: int) -> Integers:
    second = [0] * (places.ndim - 1)
    second[axis] = 1
    step: Integers = places[tuple(second)] - places[(0,) * (places.ndim - 1)]
    return step


def _affine_parts(places: Integers, compare_lengths: bool) -> Iterator[Integers]:
    """Halve an array of stage places along its outermost axis until every half is affine in its indices."""
    if not compare_lengths:
        places = places.copy()
        places[..., 2] = 0
    pending = [places]
    while pending:
        part = pending.pop()
        axis = next((axis for axis in range(part.ndim - 1) if part.shape[axis] > 1), None)
        if axis is None or _is_affine(part):
            yield part
            continue
        half = part.shape[axis] // 2
        pending += np.split(part, [half], axis=axis)[::-1]


def _is_affine(places: Integers) -> bool:
    expected = np.broadcast_to(places[(0,) * (places.ndim - 1)], places.shape).copy()
    for axis in range(places.ndim - 1):
        if places.shape[axis] > 1:
            index = np.arange(places.shape[axis]).reshape(-1, *(1,) * (places.ndim - 1 - axis))
            expected += index * _step(places, axis)
    # In a stage [run][block] the run's length is the stride over blocks, so all runs of one copy have one length.
    expected[..., 2] = places[(0,) * (places.ndim - 1)][2]
    return bool(np.array_equal(expected, places))


def source_runs(runs: Offsets, gap_bytes: int = 0) -> tuple[Integers, Integers]:
    """Return starts and lengths of one block's runs at the source, joined over gaps of up to ``gap_bytes``."""
    order = np.argsort(runs[:, 0], kind="stable")
    starts, ends = runs[order, 0], runs[order, 0] + runs[order, 2]
    first = np.concatenate(([True], starts[1:] - ends[:-1] > gap_bytes))
    last = np.concatenate((first[1:], [True]))
    return starts[first], ends[last] - starts[first]


@dataclass(frozen=True, slots=True, eq=False)
class StagedBlocks:
    """Pairs of blocks of one template that go through a stage together."""

    template: StagedTemplate
    source_blocks: Integers
    destination_blocks: Integers

    @property
    def num_bytes(self) -> int:
        """Bytes in the stage."""
        return len(self.source_blocks) * self.template.block_bytes

    def slice(self, start: int, stop: int) -> "StagedBlocks":
        """Return the pairs ``start`` up to but not including ``stop``."""
        return StagedBlocks(self.template, self.source_blocks[start:stop], self.destination_blocks[start:stop])

    def reads(self, stage_offset: int) -> Offsets:
        """Return rows of source address, stage offset and length; adjacent rows are joined."""
        staged, num_blocks = self.template, len(self.source_blocks)
        places = np.arange(num_blocks, dtype=np.int64)[:, None]
        rows = np.empty((num_blocks, staged.num_reads, 3), dtype=np.int64)
        rows[:, :, 0] = (self.source_blocks * staged.template.source_block_stride)[:, None] + staged.starts
        if staged.is_block_major:
            rows[:, :, 1] = stage_offset + places * staged.block_bytes + staged.offsets
        else:
            rows[:, :, 1] = stage_offset + num_blocks * staged.offsets + places * staged.lengths
        rows[:, :, 2] = staged.lengths
        return merge_rows((rows if staged.is_block_major else rows.swapaxes(0, 1)).reshape(-1, 3))

    def merges(self, stage_offset: int) -> list[Merge]:
        """Return the copies that follow the reads."""
        staged = self.template
        scale = 1 if staged.is_block_major else len(self.destination_blocks)
        merges = []
        for copy in staged.copies:
            loops = [(count, over * scale + within, to) for count, over, within, to in copy.loops]
            run_bytes, folded = fold(copy.run_bytes, loops)
            merges.append(
                Merge(
                    stage_offset=stage_offset + copy.run_begin * scale + copy.within_run,
                    stage_block_stride=staged.block_bytes if staged.is_block_major else copy.run_length,
                    destination_address=copy.destination_address,
                    destination_block_stride=staged.template.destination_block_stride,
                    destination_blocks=self.destination_blocks,
                    run_bytes=run_bytes,
                    loops=folded,
                )
            )
        return merges


class ScatterPlan:
    """A pair's plan through a stage at the destination; see :class:`StagedTemplate` for ``gap_bytes``."""

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

    def staged_blocks(self, requests: Sequence[GroupBlocks]) -> list[StagedBlocks]:
        """Return the blocks that go through the stage, by phase and pair of regions. Raises as ``PairPlan.lower``."""
        found = []
        for plan, blocks in self.plan.asked(requests):
            for phase, source_blocks, destination_blocks in plan.pairs(blocks):
                # Most blocks join in the order of the source.
                order = np.lexsort((destination_blocks, source_blocks))
                pairs = source_blocks[order], destination_blocks[order]
                found += [StagedBlocks(self.staged(template), *pairs) for template in plan.templates(phase)]
        return found


Numbered = tuple[int, StagedBlocks]
"""Staged blocks with the number of the read that they belong to, one for each source rank."""


def cut_rounds(staged: Sequence[Numbered], max_bytes: int) -> Iterator[list[Numbered]]:
    """Cut staged blocks into rounds of at most ``max_bytes``, but of at least one block.

    Source ranks that fill the same destination blocks advance together, so that :func:`join_merges` finds copies to
    neighbouring addresses in one round.
    """
    current: list[Numbered] = []
    left = max_bytes
    for members in _by_destination(staged, max_bytes):
        block_bytes = sum(blocks.template.block_bytes for _, blocks in members)
        start, num_blocks = 0, len(members[0][1].source_blocks)
        while start < num_blocks:
            num_fitting = (left - ALIGNMENT * len(members)) // block_bytes
            if num_fitting <= 0 and current:
                yield current
                current, left = [], max_bytes
                continue
            stop = min(num_blocks, start + max(num_fitting, 1))
            slices = [(number, blocks.slice(start, stop)) for number, blocks in members]
            current += slices
            left -= sum(aligned(blocks.num_bytes) for _, blocks in slices)
            start = stop
    if current:
        yield current


def _by_destination(staged: Sequence[Numbered], max_bytes: int) -> Iterator[list[Numbered]]:
    """Collect staged blocks that fill the same destination blocks, unless one block of all exceeds a round."""
    by_destination: dict[bytes, list[Numbered]] = {}
    for numbered in staged:
        by_destination.setdefault(numbered[1].destination_blocks.tobytes(), []).append(numbered)
    for members in by_destination.values():
        if sum(blocks.template.block_bytes + ALIGNMENT for _, blocks in members) <= max_bytes:
            yield members
        else:
            yield from ([numbered] for numbered in members)


def join_merges(merges: Sequence[Merge]) -> list[Merge]:
    """Join copies that differ by a constant step in stage and cache, such as the heads of two source ranks.

    One copy then writes whole stretches of the cache in ascending order, which is faster.

    >>> heads = [Merge(64 * rank, 8, 1000 + 2 * rank, 16, np.array([5, 4]), 2, ((4, 2, 4),)) for rank in range(2)]
    >>> [(merge.destination_address, merge.loops) for merge in join_merges(heads)]
    [(1000, ((2, 64, 2), (4, 2, 4)))]
    """
    alike: dict[tuple[object, ...], list[Merge]] = {}
    for merge in merges:
        strides = (merge.stage_block_stride, merge.destination_block_stride)
        key = (*strides, merge.run_bytes, merge.loops, merge.destination_blocks.tobytes())
        alike.setdefault(key, []).append(merge)
    return [merge for members in alike.values() for merge in _join_alike(members)]


def _join_alike(members: list[Merge]) -> list[Merge]:
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
    """Round up to a multiple of ``ALIGNMENT``."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def stage_offsets(staged: Sequence[Numbered]) -> tuple[list[int], int]:
    """Return where the blocks of each member of a round begin in the stage, and the bytes of the round."""
    sizes = [aligned(blocks.num_bytes) for _, blocks in staged]
    offsets = np.cumsum([0, *sizes]).tolist()
    return offsets[:-1], offsets[-1]


def lay_out_round(staged: Sequence[Numbered]) -> tuple[Integers, list[Merge], int]:
    """Return the reads of a round, its joined copies, and its bytes. A round may be empty."""
    offsets, num_bytes = stage_offsets(staged)
    members = [(offset, blocks) for offset, (_, blocks) in zip(offsets, staged, strict=True)]
    reads = np.concatenate([np.empty((0, 3), dtype=np.int64), *(blocks.reads(offset) for offset, blocks in members)])
    return reads, join_merges([merge for offset, blocks in members for merge in blocks.merges(offset)]), num_bytes
