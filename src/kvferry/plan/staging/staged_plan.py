"""The two ways by a stage that a pair's plan can take, and what a request then moves."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvferry.plan.planner import Descriptors, GroupPlan, PairPlan
from kvferry.plan.request import GroupBlocks, Integers
from kvferry.plan.staging.scatter import NOTHING, StagedPart, StagedTemplate
from kvferry.plan.template import Template, mirrored

MAX_CACHED_TEMPLATES = 1024


class _StagedPlan:
    """A pair's plan by way of a stage: ``make`` gives the staged form of each of its templates, once."""

    def __init__(self, plan: PairPlan, make: Callable[[Template], StagedTemplate]) -> None:
        self.plan, self._make = plan, make
        self._templates: dict[Template, StagedTemplate] = {}

    def staged(self, template: Template) -> StagedTemplate:
        """Return the staged form of one of the plan's templates."""
        found = self._templates.get(template)
        if found is None:
            if len(self._templates) >= MAX_CACHED_TEMPLATES:
                self._templates.clear()
            found = self._templates[template] = self._make(template)
        return found

    def _pairs(
        self, asked: Sequence[tuple[GroupPlan, Sequence[GroupBlocks]]]
    ) -> Iterator[tuple[StagedTemplate, Integers, Integers]]:
        """Return staged forms with their source and destination blocks, for each phase and pair of regions."""
        for plan, blocks in asked:
            for phase, source_blocks, destination_blocks in plan.pairs(blocks):
                for template in plan.templates(phase):
                    yield self.staged(template), source_blocks, destination_blocks


class ScatterPlan(_StagedPlan):
    """A pair's plan by way of a stage at the destination; see :class:`StagedTemplate` for ``gap_bytes``."""

    def __init__(self, plan: PairPlan, gap_bytes: int) -> None:
        super().__init__(plan, lambda template: StagedTemplate(template, gap_bytes))
        self.gap_bytes = gap_bytes

    def parts(self, requests: Sequence[GroupBlocks]) -> list[StagedPart]:
        """Return what goes through the stage, one part for each phase and pair of regions. Raises as ``lower``."""
        pairs = self._pairs(self.plan.asked(requests))
        return [_part(staged, source, destination) for staged, source, destination in pairs]


class GatherPlan(_StagedPlan):
    """A pair's plan by way of a stage at the source, which packs it in the destination's order.

    It is scatter with the ends exchanged: the parts' *source* is the cache into which is read, out of the stage, in
    the runs that are contiguous there; their *destination* is the cache from which the stage is packed. No gap is read
    along: it would be written.
    """

    def __init__(self, plan: PairPlan) -> None:
        super().__init__(plan, lambda template: StagedTemplate(mirrored(template), gap_bytes=0))

    def parts(self, requests: Sequence[GroupBlocks]) -> list[StagedPart]:
        """Return what is packed and read, one part for each phase and pair of regions. Raises as ``lower``."""
        return self.parts_of(self.plan.asked(requests))

    def parts_of(self, asked: Sequence[tuple[GroupPlan, Sequence[GroupBlocks]]]) -> list[StagedPart]:
        """Return the same of what is asked of some of the plan's groups, or of plans of some of their layers."""
        return [_part(staged, destination, source) for staged, source, destination in self._pairs(asked)]


def _part(staged: StagedTemplate, blocks: Integers, other_blocks: Integers) -> StagedPart:
    """Return a part whose blocks are in the order in which most of them join."""
    order = np.lexsort((other_blocks, blocks))
    return StagedPart(staged, blocks[order], other_blocks[order])


PARTS_PER_STAGE = 8
"""A reader asks for at most this part of a source's stage at a time, so that several find room in it."""
ROUNDS_PER_STAGE = 4
"""A load or a push takes at most this part of its own rank's stage at a time, so that others find room beside it."""


class Lowered(NamedTuple):
    """What a pair moves: directly, by way of a stage at the destination, or of one at the source. One of them only."""

    descriptors: Descriptors
    scattered: Sequence[StagedPart] = ()
    gathered: Sequence[StagedPart] = ()


def lowered(plan: PairPlan, staged: ScatterPlan | GatherPlan | None, requests: Sequence[GroupBlocks]) -> Lowered:
    """Return what a pair moves, and which way; None is directly. Raises as ``lower``."""
    if staged is None:
        return Lowered(plan.lower(requests))
    if isinstance(staged, GatherPlan):
        return Lowered(NOTHING, gathered=staged.parts(requests))
    return Lowered(NOTHING, scattered=staged.parts(requests))
