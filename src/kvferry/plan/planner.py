"""The plan between a source rank and a destination rank, and its lowering to descriptors."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from kvferry.arrays import Descriptors, Offsets
from kvferry.errors import PlanError, Reason
from kvferry.layout.component import HeadRange
from kvferry.layout.group import CacheGroup
from kvferry.layout.shard import Shard
from kvferry.plan.block_pairs import BlockPairs, Phase, block_pairs, refuse_twice
from kvferry.plan.match import Assignment, choose_sources
from kvferry.plan.request import GroupBlocks, refuse_incomplete
from kvferry.plan.strided_copy import merge_rows
from kvferry.plan.template import Template, build_templates
from kvferry.plan.wire import digest

MAX_CACHED_PHASES = 256
"""Templates of this many phases are kept for each group; block sizes without a common factor can make many."""
MAX_FIRST_PHASES = 16
"""Phases whose templates are built at handshake; the common case has one."""
MAX_DESCRIPTORS = 1 << 24
"""Descriptors that one lowering may make."""


class GroupPlan:
    """The plan of one cache group: its templates by phase, made when first needed and kept."""

    def __init__(
        self,
        source: Shard,
        destination: Shard,
        groups: tuple[CacheGroup, CacheGroup],
        heads: Mapping[str, tuple[HeadRange, ...]],
    ) -> None:
        self.source_group, self.destination_group = groups
        self.heads = heads
        self._shards = (source, destination)
        self._templates: dict[Phase, tuple[Template, ...]] = {}

    def first_phases(self) -> list[Phase]:
        """Return the phases in which a request that begins at token 0 begins: of whole blocks, all in most cases."""
        covers = [group.tokens_per_position for group in (self.source_group, self.destination_group)]
        tokens = max(covers)
        ids = [np.zeros(-(-tokens // each), dtype=np.int64) for each in covers]
        first = GroupBlocks(
            group=self.source_group.name,
            first_token=0,
            last_token=tokens,
            source_block_ids=ids[0],
            destination_block_ids=ids[1],
        )
        found = block_pairs(first, self.source_group, self.destination_group)
        return [pairs.phase for pairs in found[:MAX_FIRST_PHASES]]

    def templates(self, phase: Phase) -> tuple[Template, ...]:
        """Return the templates of a phase, one for each pair of regions."""
        found = self._templates.get(phase)
        if found is None:
            groups = (self.source_group, self.destination_group)
            found = build_templates(*self._shards, groups, self.heads, phase)
            if len(self._templates) >= MAX_CACHED_PHASES:
                self._templates.clear()
            self._templates[phase] = found
        return found

    def pairs(self, requests: Sequence[GroupBlocks]) -> list[BlockPairs]:
        """Return the pairs of blocks of these requests of this group, once for each phase."""
        refuse_twice(requests, self.destination_group)
        members: dict[Phase, list[BlockPairs]] = {}
        for blocks in requests:
            for found in block_pairs(blocks, self.source_group, self.destination_group):
                members.setdefault(found.phase, []).append(found)
        return [
            BlockPairs(
                phase,
                np.concatenate([found.source_blocks for found in members[phase]]),
                np.concatenate([found.destination_blocks for found in members[phase]]),
            )
            for phase in sorted(members)
        ]

    def lower(self, requests: Sequence[GroupBlocks]) -> list[Offsets]:
        """Return rows for these requests of this group, one array for each pair of regions and blocks."""
        pairs = self.pairs(requests)
        rows: dict[tuple[int, int], list[Offsets]] = {}
        joins, num_rows = len(pairs) > 1, 0
        for phase, source_blocks, destination_blocks in pairs:
            for template in self.templates(phase):
                num_rows += len(template.pieces) * len(source_blocks)
                _refuse_too_many(self.destination_group, num_rows)
                lowered = template.lower(source_blocks, destination_blocks)
                together = rows.setdefault((template.source_region, template.destination_region), [])
                together.append(lowered)
                joins = joins or template.may_join or len(together) > 1
        # What can still be adjacent is joined by address. Never across regions: a transport registers them apart.
        return [_join(rows[regions], joins) for regions in sorted(rows)]


class PairPlan:
    """What one source rank sends to one destination rank, for any request.

    >>> from kvferry.layout.named_layouts import NamedLayout
    >>> from kvferry.testing.dense_shards import shard_for
    >>> from kvferry.plan.match import choose_sources
    >>> shape = dict(layers=["0", "1"], num_kv_heads=2, head_size=64, itemsize=2, block_size=16, num_blocks=10)
    >>> prefill = [shard_for(layout=NamedLayout.BHLNC, tp_rank=rank, tp_size=2, **shape) for rank in range(2)]
    >>> decode = shard_for(layout=NamedLayout.BHLNC, base_address=1 << 30, **shape)
    >>> first, second = choose_sources(prefill, decode, selector=0)
    >>> plan = plan_pair(prefill[1], decode, second)
    >>> plan.lower([GroupBlocks(group="full", first_token=0, last_token=20, source_block_ids=[5, 4],
    ...     destination_block_ids=[7, 9])]).tolist()
    [[40960, 1073864704, 8192], [32768, 1073897472, 8192]]
    """

    def __init__(self, source: Shard, destination: Shard, assignment: Assignment) -> None:
        self.source, self.destination, self.assignment = source, destination, assignment
        self.groups: dict[str, GroupPlan] = {}
        heads: dict[str, dict[str, tuple[HeadRange, ...]]] = {}
        for part in assignment.parts:
            heads.setdefault(part.group, {})[part.component] = part.heads
        for name, by_component in heads.items():
            groups = (source.group(name), destination.group(name))
            if groups[0] is None or groups[1] is None:
                raise PlanError(
                    Reason.GROUP_MISMATCH,
                    f"{source.rank_name} was chosen to send group {name!r} to {destination.rank_name}, "
                    "but not both hold it.",
                    "Plan with the shards that the sources were chosen from.",
                )
            self.groups[name] = GroupPlan(source, destination, (groups[0], groups[1]), by_component)

    @property
    def heads(self) -> dict[tuple[str, str], tuple[HeadRange, ...]]:
        """Global heads that this pair carries, by group and component."""
        return {(part.group, part.component): part.heads for part in self.assignment.parts}

    @cached_property
    def digest(self) -> str:
        """Names both shards and what the source sends of them: groups, layers and heads."""
        return digest([self.source], self.destination, [self.assignment])

    def asked(self, requests: Sequence[GroupBlocks]) -> list[tuple[GroupPlan, list[GroupBlocks]]]:
        """Return what is asked of each group that this source serves. Raises as :meth:`lower`."""
        refuse_incomplete(requests, self.destination)
        named = {blocks.group for blocks in requests}
        return [
            (plan, [blocks for blocks in requests if blocks.group == name])
            for name, plan in self.groups.items()
            if name in named
        ]

    def lower(self, requests: Sequence[GroupBlocks]) -> Descriptors:
        """Return the descriptors, an array of shape (n, 3): source address, destination address, length in bytes.

        Runs are joined wherever both sides advance; the result depends on the set of block pairs, not on their order.
        A group of the destination that another source serves gives nothing here.

        Raises :class:`PlanError` (``invalid-request``) for an unknown group, one that is left out (see
        :func:`kvferry.plan.request.refuse_incomplete`), and blocks that do not fit.
        """
        return _together([part for plan, asked in self.asked(requests) for part in plan.lower(asked)])

    def lower_groups(self, requests: Sequence[GroupBlocks]) -> dict[str, Descriptors]:
        """Return what :meth:`lower` does, by group."""
        return {plan.source_group.name: _together(plan.lower(asked)) for plan, asked in self.asked(requests)}


class Planner:
    """The plans of one destination rank against every rank of a source engine, cached.

    Made at handshake: what cannot be planned is refused here, by :func:`choose_sources`.
    """

    def __init__(self, sources: Sequence[Shard], destination: Shard) -> None:
        self.sources, self.destination = tuple(sources), destination
        self._plans: dict[Assignment, PairPlan] = {}
        self._turns: dict[int, tuple[PairPlan, ...]] = {}
        self.plans(0)

    def plans(self, selector: int) -> tuple[PairPlan, ...]:
        """Return one plan for each source rank that the selector chooses; see :func:`choose_sources`."""
        # A selector counts only modulo the number of sources. A negative one is left to be refused.
        turn = selector % len(self.sources) if selector > 0 and self.sources else selector
        found = self._turns.get(turn)
        if found is None:
            chosen = choose_sources(self.sources, self.destination, turn)
            found = self._turns[turn] = tuple(self._plan(assignment) for assignment in chosen)
        return found

    def _plan(self, assignment: Assignment) -> PairPlan:
        found = self._plans.get(assignment)
        if found is None:
            source = self.sources[assignment.source_index]
            found = self._plans.setdefault(assignment, plan_pair(source, self.destination, assignment))
        return found


def plan_pair(source: Shard, destination: Shard, assignment: Assignment) -> PairPlan:
    """Plan what ``assignment``, from :func:`choose_sources`, lets the source send to the destination.

    The templates of whole blocks are built at once, so that a later request only applies block ids.
    """
    plan = PairPlan(source, destination, assignment)
    for group in plan.groups.values():
        for phase in group.first_phases():
            group.templates(phase)
    return plan


def _together(rows: list[Offsets]) -> Descriptors:
    if not rows:
        return np.empty((0, 3), dtype=np.uint64)
    return (rows[0] if len(rows) == 1 else np.concatenate(rows)).view(np.uint64)


def _join(rows: list[Offsets], joins: bool) -> Offsets:
    together = rows[0] if len(rows) == 1 else np.concatenate(rows)
    return merge_rows(together) if joins else together


def _refuse_too_many(group: CacheGroup, num_rows: int) -> None:
    if num_rows > MAX_DESCRIPTORS:
        raise PlanError(
            Reason.UNSUPPORTED,
            f"group {group.name!r}: {num_rows} descriptors are needed, at most {MAX_DESCRIPTORS} are made at once.",
            "Use a layout whose runs are longer, such as BHLNC on both sides.",
        )
