"""The plan between a source rank and a destination rank, and its lowering to descriptors."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from kvferry.arrays import Descriptors, Offsets
from kvferry.errors import PlanError, Reason
from kvferry.layout.shard import CacheGroup, HeadRange, Shard, shard_encoder
from kvferry.plan.block_pairs import BlockPairs, Phase, block_pairs, refuse_twice
from kvferry.plan.match import Assignment, choose_sources
from kvferry.plan.request import GroupBlocks, refuse_incomplete
from kvferry.plan.strided_copy import merge_rows
from kvferry.plan.template import Template, build_templates

MAX_CACHED_PHASES = 256
"""Phases of a group whose templates are kept. Block sizes without a common factor have many phases."""
MAX_FIRST_PHASES = 16
"""Phases whose templates are built at handshake; in most cases there is one."""
MAX_DESCRIPTORS = 1 << 24
"""Limit of the descriptors of one call of ``lower``."""
NOTHING: Descriptors = np.empty((0, 3), dtype=np.uint64)
"""An empty list of descriptors."""
_DIGEST_BYTES = 16


class GroupPlan:
    """The plan of one cache group between two ranks.

    Builds the templates of whole blocks at once, so that a request only applies block ids; those of any other phase on
    first use. ``groups`` are the group at the source and at the destination, ``heads`` those that move, by component.
    """

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
        for phase in self.first_phases():
            self.templates(phase)

    def first_phases(self) -> list[Phase]:
        """Return the phases of the first whole blocks of a request from token 0: in most cases all of its phases."""
        tokens_each = [group.tokens_per_position for group in (self.source_group, self.destination_group)]
        tokens = max(tokens_each)
        ids = [np.zeros(-(-tokens // each), dtype=np.int64) for each in tokens_each]
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
        """Return the pairs of blocks of these requests, which are all of this group, by phase."""
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
        """Return rows of addresses for these requests of this group, one array per pair of regions."""
        pairs = self.pairs(requests)
        rows: dict[tuple[int, int], list[Offsets]] = {}
        joins, num_rows = len(pairs) > 1, 0
        for phase, source_blocks, destination_blocks in pairs:
            for template in self.templates(phase):
                num_rows += len(template.runs) * len(source_blocks)
                _refuse_too_many(self.destination_group, num_rows)
                lowered = template.lower(source_blocks, destination_blocks)
                members = rows.setdefault((template.source_region, template.destination_region), [])
                members.append(lowered)
                joins = joins or template.may_join or len(members) > 1
        # Rows never join across regions: a transport registers each region on its own.
        return [_join(rows[regions], joins) for regions in sorted(rows)]


class PairPlan:
    """The plan of one ``assignment`` from :func:`choose_sources`, for any request.

    >>> from kvferry.layout.named_layouts import NamedLayout
    >>> from kvferry.layout.dense import shard_for
    >>> from kvferry.plan.match import choose_sources
    >>> shape = dict(layers=["0", "1"], num_kv_heads=2, head_size=64, itemsize=2, block_size=16, num_blocks=10)
    >>> prefill = [shard_for(layout=NamedLayout.BHLNC, tp_rank=rank, tp_size=2, **shape) for rank in range(2)]
    >>> decode = shard_for(layout=NamedLayout.BHLNC, base_address=1 << 30, **shape)
    >>> first, second = choose_sources(prefill, decode, selector=0)
    >>> plan = PairPlan(prefill[1], decode, second)
    >>> plan.lower([GroupBlocks(group="full", first_token=0, last_token=20, source_block_ids=[5, 4],
    ...     destination_block_ids=[7, 9])]).tolist()
    [[40960, 1073864704, 8192], [32768, 1073897472, 8192]]
    """

    def __init__(self, source: Shard, destination: Shard, assignment: Assignment) -> None:
        self.source, self.destination, self.assignment = source, destination, assignment
        self.groups: dict[str, GroupPlan] = {}
        heads: dict[str, dict[str, tuple[HeadRange, ...]]] = {}
        for component in assignment.components:
            heads.setdefault(component.group, {})[component.component] = component.heads
        for name, by_component in heads.items():
            groups = (source.group(name), destination.group(name))
            if groups[0] is None or groups[1] is None:
                raise PlanError(
                    Reason.GROUP_MISMATCH,
                    f"{source.rank_name} is assigned to send group {name!r} to {destination.rank_name}, "
                    "but one of them does not hold that group.",
                    "Use the same shards for the assignment and the plan.",
                )
            self.groups[name] = GroupPlan(source, destination, (groups[0], groups[1]), by_component)

    @property
    def heads(self) -> dict[tuple[str, str], tuple[HeadRange, ...]]:
        """Global heads that the source sends, by group and component."""
        return {(component.group, component.component): component.heads for component in self.assignment.components}

    @cached_property
    def digest(self) -> str:
        """A digest of both shards and of the groups and heads that the source sends: it names the plan of a write.

        It is equal in every process.
        """
        encoded = shard_encoder.encode((self.source, self.destination, self.assignment))
        return hashlib.blake2b(encoded, digest_size=_DIGEST_BYTES).hexdigest()

    def asked(self, requests: Sequence[GroupBlocks]) -> list[tuple[GroupPlan, list[GroupBlocks]]]:
        """Return the requests of each group that this source serves. Raises as :meth:`lower`."""
        refuse_incomplete(requests, self.destination)
        named = {blocks.group for blocks in requests}
        return [
            (plan, [blocks for blocks in requests if blocks.group == name])
            for name, plan in self.groups.items()
            if name in named
        ]

    def lower(self, requests: Sequence[GroupBlocks]) -> Descriptors:
        """Return the descriptors, an array of shape (n, 3): source address, destination address, length in bytes.

        Runs are joined wherever both addresses advance together; the result depends on the set of block pairs, not on
        their order. A group that only another source serves adds no descriptors.

        Raises :class:`PlanError` (``invalid-request``) for a group that is unknown or left out (see
        :func:`kvferry.plan.request.refuse_incomplete`), and for blocks that do not fit.
        """
        return _descriptors([rows for plan, asked in self.asked(requests) for rows in plan.lower(asked)])

    def lower_groups(self, requests: Sequence[GroupBlocks]) -> dict[str, Descriptors]:
        """Return the descriptors of :meth:`lower` by group."""
        return {plan.source_group.name: _descriptors(plan.lower(asked)) for plan, asked in self.asked(requests)}


class Planner:
    """The plans between every rank of a source engine and one destination rank, cached.

    The constructor runs at handshake and raises as :func:`choose_sources` for caches that do not fit together.
    """

    def __init__(self, sources: Sequence[Shard], destination: Shard) -> None:
        self.sources, self.destination = tuple(sources), destination
        self._plans: dict[Assignment, PairPlan] = {}
        self._by_selector: dict[int, tuple[PairPlan, ...]] = {}
        self.plans(0)

    def plans(self, selector: int) -> tuple[PairPlan, ...]:
        """Return one plan for each source rank that the selector chooses; see :func:`choose_sources`."""
        # Selectors that are equal modulo the number of sources are the same; choose_sources refuses negative ones.
        remainder = selector % len(self.sources) if selector > 0 and self.sources else selector
        found = self._by_selector.get(remainder)
        if found is None:
            chosen = choose_sources(self.sources, self.destination, remainder)
            found = self._by_selector[remainder] = tuple(self._plan(assignment) for assignment in chosen)
        return found

    def _plan(self, assignment: Assignment) -> PairPlan:
        found = self._plans.get(assignment)
        if found is None:
            source = self.sources[assignment.source_index]
            found = self._plans.setdefault(assignment, PairPlan(source, self.destination, assignment))
        return found


def _descriptors(rows: list[Offsets]) -> Descriptors:
    if not rows:
        return NOTHING
    return (rows[0] if len(rows) == 1 else np.concatenate(rows)).view(np.uint64)


def _join(rows: list[Offsets], joins: bool) -> Offsets:
    together = rows[0] if len(rows) == 1 else np.concatenate(rows)
    return merge_rows(together) if joins else together


def _refuse_too_many(group: CacheGroup, num_rows: int) -> None:
    if num_rows > MAX_DESCRIPTORS:
        raise PlanError(
            Reason.UNSUPPORTED,
            f"group {group.name!r} needs {num_rows} descriptors; the limit of one request is {MAX_DESCRIPTORS}.",
            "Use a layout whose runs are longer, such as BHLNC on both sides.",
        )
