"""Plans between source ranks and a destination rank, and their lowering to descriptors.

A *template* is a plan's copies for block 0, to which a request applies its block ids. Its copies are *strided copies*
with the fewest and longest runs. A CuTe *layout* is a function from integers to integers, written as (count, stride)
loops. A strided copy is a pair of such functions, source and destination, over one shared domain. CuTe's ``coalesce``
folds neighbouring loops in four cases; here a case must hold for source and destination at once:

1. a loop of count 1 is dropped;
2. a loop whose strides both equal the run's length makes the run longer;
3. a loop whose strides both equal the inner neighbour's stride times its count is merged into that neighbour;
4. any other loop stays.

Afterwards no loop has count 1 and no neighbours can be folded. Every byte is copied from and to the same offset as
before.

*Spans* are layers that a write sends together, before the source has computed the rest of the model.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple
from weakref import WeakKeyDictionary

import msgspec
import numpy as np

from kvferry.arrays import Descriptors, Flags, Integers, Offsets
from kvferry.errors import PlanError, Reason
from kvferry.layout.shard import Atom, CacheGroup, Component, HeadRange, Shard, shard_encoder
from kvferry.plan.match import (
    Assignment,
    BlockPairs,
    GroupBlocks,
    Phase,
    TokenRun,
    block_pairs,
    choose_sources,
    match_heads,
    match_layers,
    refuse_incomplete,
    refuse_twice,
    sample_requests,
)
from kvferry.plan.proof import verify_destination

Loop = tuple[int, int, int]
"""Count, source stride, destination stride."""


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """Runs of ``run_bytes`` from source to destination, repeated over loops, innermost loop first.

    >>> copy = StridedCopy(0, 0, 256, ((16, 256, 256), (8, 8192, 4096)))
    >>> coalesce(copy)
    StridedCopy(source_offset=0, destination_offset=0, run_bytes=4096, loops=((8, 8192, 4096),))
    """

    source_offset: int
    destination_offset: int
    run_bytes: int
    loops: tuple[Loop, ...] = ()

    @property
    def num_runs(self) -> int:
        """The number of runs."""
        return int(np.prod([count for count, _, _ in self.loops], dtype=np.int64))

    def expand(self) -> Offsets:
        """Return the runs as rows of source offset, destination offset, length.

        >>> StridedCopy(0, 100, 4, ((2, 16, 8),)).expand().tolist()
        [[0, 100, 4], [16, 108, 4]]
        """
        rows = np.array([[self.source_offset, self.destination_offset, self.run_bytes]], dtype=np.int64)
        for count, source_stride, destination_stride in self.loops:
            step = np.array([source_stride, destination_stride, 0], dtype=np.int64)
            rows = (np.arange(count, dtype=np.int64)[:, None, None] * step + rows).reshape(-1, 3)
        return rows


def coalesce(copy: StridedCopy) -> StridedCopy:
    """Order the loops by destination stride and fold them by the four cases.

    >>> coalesce(StridedCopy(0, 0, 2, ((128, 2, 2), (1, 7, 7), (16, 256, 256), (36, 4096, 4096))))
    StridedCopy(source_offset=0, destination_offset=0, run_bytes=147456, loops=())
    """
    run_bytes, loops = fold(copy.run_bytes, copy.loops)
    return replace(copy, run_bytes=run_bytes, loops=loops)


def fold(run_bytes: int, loops: Iterable[Loop]) -> tuple[int, tuple[Loop, ...]]:
    """Fold loops around a run and return the longer run and the loops that remain.

    >>> fold(2, [(4, 16, 8), (2, 64, 32)])
    (2, ((8, 16, 8),))
    """
    folded: list[Loop] = []
    for count, source, destination in sorted(loops, key=lambda loop: (loop[2], loop[1])):
        if count == 1:
            continue
        if source == destination == run_bytes:
            run_bytes *= count
            continue
        inner_count, inner_source, inner_destination = folded[-1] if folded else (0, 0, 0)
        if folded and (source, destination) == (inner_source * inner_count, inner_destination * inner_count):
            folded[-1] = (inner_count * count, inner_source, inner_destination)
        else:
            folded.append((count, source, destination))
    return run_bytes, tuple(folded)


def merge_rows(rows: Offsets) -> Offsets:
    """Sort rows of source, destination, length by destination; join rows adjacent at both source and destination.

    >>> merge_rows(np.array([[16, 116, 8], [0, 100, 16], [40, 124, 4]])).tolist()
    [[0, 100, 24], [40, 124, 4]]
    """
    if len(rows) < 2:
        return rows
    source, destination, length = np.ascontiguousarray(rows.T)
    if (destination[1:] < destination[:-1]).any():
        order = np.argsort(destination, kind="stable")
        rows, source, destination, length = rows[order], source[order], destination[order], length[order]
    apart = (source[:-1] + length[:-1] != source[1:]) | (destination[:-1] + length[:-1] != destination[1:])
    if apart.all():
        return rows
    starts = np.flatnonzero(np.concatenate(([True], apart)))
    merged = rows[starts]
    merged[:, 2] = np.add.reduceat(length, starts)
    return merged


def place(run_bytes: int, loops: tuple[Loop, ...], places: Offsets) -> list[StridedCopy]:
    """Return the copies of one strided pattern at many places, which are rows of source and destination offset.

    A place is a layer, or a component with the same pattern. Patterns that are adjacent at source and destination join
    into longer runs; the remaining places are split into maximal affine stretches, each of which becomes one loop.

    >>> places = np.array([[0, 0], [256, 256], [512, 512], [4096, 1024], [8192, 2048]])
    >>> [(copy.source_offset, copy.run_bytes, copy.loops) for copy in place(256, (), places)]
    [(0, 768, ()), (4096, 256, ((2, 4096, 1024),))]
    """
    lengths = np.full((len(places), 1), run_bytes, dtype=np.int64)
    rows = merge_rows(np.concatenate((places.astype(np.int64, copy=False), lengths), axis=1))
    copies: list[StridedCopy] = []
    for length in np.unique(rows[:, 2]).tolist():
        same = rows[rows[:, 2] == length, :2]
        longer, fewer = fold(length, loops)
        if len(same) > 1 and longer != length:
            # The longer run may reach the next place: join again.
            copies += place(longer, fewer, same)
        else:
            copies += [coalesce(copy) for copy in _stretches(longer, fewer, same)]
    return sorted(copies, key=lambda copy: copy.destination_offset)


def _stretches(run_bytes: int, loops: tuple[Loop, ...], places: Offsets) -> list[StridedCopy]:
    """Split places, sorted by destination, into maximal stretches of constant step."""
    steps = np.diff(places, axis=0)
    changes = np.flatnonzero((steps[1:] != steps[:-1]).any(axis=1)) + 1
    copies, first = [], 0
    while first < len(places):
        # A stretch that begins at `first` has the step that follows it and ends at the next change after that step.
        position = int(np.searchsorted(changes, first, side="right"))
        last = int(changes[position]) if position < len(changes) else len(places) - 1
        source, destination = places[first].tolist()
        count = last - first + 1
        step = steps[first].tolist() if count > 1 else [0, 0]
        copies.append(StridedCopy(source, destination, run_bytes, (*loops, (count, step[0], step[1]))))
        first = last + 1
    return copies


MAX_RUNS = 1 << 18
"""Limit of one block's runs. Only pairs of layouts that a kernel should transpose instead have more."""


@dataclass(frozen=True, eq=False)
class Template:
    """The copies for one pair of blocks of one phase, between one pair of regions.

    The copies' offsets are addresses in block 0; block b begins ``b * *_block_stride`` bytes later.
    """

    source_region: int
    destination_region: int
    source_block_stride: int
    destination_block_stride: int
    copies: tuple[StridedCopy, ...]

    @cached_property
    def runs(self) -> Offsets:
        """Rows of source address, destination address and length for block 0, sorted and joined."""
        return merge_rows(np.concatenate([copy.expand() for copy in self.copies]))

    @cached_property
    def _extends(self) -> Flags:
        """Which runs continue in the next block when both block ids advance by one."""
        if self.source_block_stride != self.destination_block_stride:
            return np.zeros(len(self.runs), dtype=np.bool_)
        return np.equal(self.runs[:, 2], self.source_block_stride)

    @cached_property
    def _is_block_major(self) -> bool:
        """Whether all runs of a destination block lie before those of the next, as in cross-layer layouts."""
        return int(self.runs[-1, 1] - self.runs[0, 1]) < self.destination_block_stride

    @cached_property
    def may_join(self) -> bool:
        """Whether rows of different runs can be adjacent: long runs over several blocks, or a block's last run and the
        next block's first.
        """
        if self._extends.any():
            return True
        strides = np.array([self.source_block_stride, self.destination_block_stride])
        shorter = self.runs[~self._extends]
        starts = set(map(tuple, (shorter[:, :2] + strides).tolist()))
        return any(tuple(end) in starts for end in (shorter[:, :2] + shorter[:, 2:]).tolist())

    def lower(self, source_blocks: Integers, destination_blocks: Integers) -> Offsets:
        """Return rows of source address, destination address and length for pairs of blocks in any order."""
        order = np.lexsort((source_blocks, destination_blocks))
        blocks = np.stack((source_blocks[order], destination_blocks[order]), axis=1)
        extends = self._extends
        if not extends.any():
            return self._product(blocks, self.runs)
        starts = np.flatnonzero(np.concatenate(([True], (np.diff(blocks, axis=0) != 1).any(axis=1))))
        runs = self._product(blocks[starts], self.runs[extends], np.diff(starts, append=len(blocks)))
        if extends.all():
            return runs
        return np.concatenate((runs, self._product(blocks, self.runs[~extends])))

    def _product(self, blocks: Integers, runs: Offsets, num_blocks: Integers | None = None) -> Offsets:
        """Return every run in every block, in an order that is close to ascending by destination.

        ``num_blocks`` multiplies the length of each block's runs.
        """
        if self._is_block_major:
            memory = np.empty((len(blocks), len(runs), 3), dtype=np.int64)
            rows = memory
        else:
            memory = np.empty((len(runs), len(blocks), 3), dtype=np.int64)
            rows = memory.swapaxes(0, 1)
        np.add((blocks[:, 0] * self.source_block_stride)[:, None], runs[:, 0], out=rows[:, :, 0])
        np.add((blocks[:, 1] * self.destination_block_stride)[:, None], runs[:, 1], out=rows[:, :, 1])
        if num_blocks is None:
            rows[:, :, 2] = runs[:, 2]
        else:
            np.multiply(num_blocks[:, None], runs[:, 2], out=rows[:, :, 2])
        return memory.reshape(-1, 3)


Memory = tuple[int, int, int, int]
"""Source region, destination region, and the block stride in each."""
Pattern = tuple[int, tuple[Loop, ...]]
"""Bytes of a run and the loops around it."""


def build_templates(
    source: Shard,
    destination: Shard,
    groups: tuple[CacheGroup, CacheGroup],
    heads: Mapping[str, Sequence[HeadRange]],
    phase: Phase,
) -> tuple[Template, ...]:
    """Return the templates of one phase of a group, one for each pair of regions.

    ``groups`` are the group at the source and at the destination, ``heads`` the global heads that move, by component.
    Raises :class:`PlanError`: ``invalid-request`` for a phase that splits a packed page, ``unsupported`` for blocks
    with more than ``MAX_RUNS`` runs.
    """
    # Equal patterns in equal memory are collected, so that K and V planes can become one run again.
    memories: dict[Memory, dict[Pattern, list[Offsets]]] = {}
    for received in groups[1].components:
        if received.name not in heads:
            continue
        sent = groups[0].component(received.name)
        memory = (sent.region, received.region, sent.block_stride, received.block_stride)
        for run in phase:
            pair = sent, received
            for copy, places in _patterns(source, destination, pair, heads[received.name], run, groups[0].block_size):
                patterns = memories.setdefault(memory, {})
                patterns.setdefault((copy.run_bytes, copy.loops), []).append(places)
    return tuple(_template(memory, patterns) for memory, patterns in memories.items())


def _template(memory: Memory, patterns: dict[Pattern, list[Offsets]]) -> Template:
    copies: list[StridedCopy] = []
    for (run_bytes, loops), places in patterns.items():
        copies += place(run_bytes, loops, np.concatenate(places))
    num_runs = sum(copy.num_runs for copy in copies)
    if num_runs > MAX_RUNS:
        raise PlanError(
            Reason.UNSUPPORTED,
            f"one block has {num_runs} runs, the shortest of {min(copy.run_bytes for copy in copies)} bytes; the limit "
            f"is {MAX_RUNS}.",
            "Use layouts with the same order of tokens and channels in both engines.",
        )
    return Template(*memory, copies=tuple(copies))


def _patterns(
    source: Shard,
    destination: Shard,
    components: tuple[Component, Component],
    heads: Sequence[HeadRange],
    run: TokenRun,
    block_size: int,
) -> list[tuple[StridedCopy, Offsets]]:
    """Return for each stretch of heads the copy within one layer and block, and the addresses of the layers."""
    sent, received = components
    bases = [source.regions[sent.region].base_address, destination.regions[received.region].base_address]
    places = match_layers(sent, received) + np.array(bases, dtype=np.int64)
    patterns = []
    for source_head, destination_head, count in match_heads(sent.heads, received.heads, heads):
        start = np.array(
            [
                source_head * sent.head_stride + run.source_slot * sent.token_stride,
                destination_head * received.head_stride + run.destination_slot * received.token_stride,
            ],
            dtype=np.int64,
        )
        head_loop = (count, sent.head_stride, received.head_stride)
        patterns.append((_page_copy(sent, received, run, block_size, head_loop), places + start))
    return patterns


def _page_copy(sent: Component, received: Component, run: TokenRun, block_size: int, head_loop: Loop) -> StridedCopy:
    """Return the copy of one run of tokens over some heads of one layer, from offset zero to offset zero."""
    if sent.atom is Atom.PAGE:
        if run != TokenRun(0, 0, block_size):
            raise PlanError(
                Reason.INVALID_REQUEST,
                f"component {sent.name!r}: slots {run.source_slot} to {run.source_slot + run.num_tokens} of a packed "
                "page cannot move alone.",
                "Request whole blocks.",
            )
        return coalesce(StridedCopy(0, 0, block_size * sent.num_channels * sent.itemsize, (head_loop,)))
    channels = (sent.num_channels, sent.channel_stride, received.channel_stride)
    tokens = (run.num_tokens, sent.token_stride, received.token_stride)
    return coalesce(StridedCopy(0, 0, sent.itemsize, (channels, tokens, head_loop)))


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
    >>> from kvferry.models.groups import AttentionCache, RankMemory, form_groups, model_shard
    >>> from kvferry.plan.match import choose_sources
    >>> groups = form_groups(dict.fromkeys("01", AttentionCache(num_kv_heads=2, head_size=64, itemsize=2)))
    >>> shape = dict(layout=NamedLayout.BHLNC, block_size=16, num_blocks=10)
    >>> ranks = [RankMemory(tp_rank=rank, tp_size=2, **shape) for rank in range(2)]
    >>> prefill = [model_shard(groups, frozenset("01"), rank) for rank in ranks]
    >>> decode = model_shard(groups, frozenset("01"), RankMemory(base_address=1 << 30, **shape))
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
        :func:`kvferry.plan.match.refuse_incomplete`), and for blocks that do not fit.
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
        self._proved: set[tuple[PairPlan, ...]] = set()
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

    def proved_plans(self, selector: int) -> tuple[PairPlan, ...]:
        """Return :meth:`plans`, whose templates are proved on a small request before they move any other.

        Raises :class:`PlanError` and :class:`VerificationError`.
        """
        plans = self.plans(selector)
        if plans not in self._proved:
            blocks = sample_requests(self.sources, self.destination)
            verify_destination([(plan.source, plan.lower(blocks)) for plan in plans], self.destination, blocks)
            self._proved.add(plans)
        return plans

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


LAYERS_PER_SPAN = 8
"""With spans of one layer the time to first token was up to 1.4 times as long: each batch wakes threads
(docs/decisions/one-handoff.md)."""
SHORT_TOKENS = 256
"""A prompt of at most so many tokens is written whole: spans save about 0.02 ms per token, too little to show.

Spans were slower at 64 tokens and saved 45 ms at 2048 tokens (docs/decisions/one-handoff.md).
"""


class Span(NamedTuple):
    """Layers of one cache group that a write sends together: span ``number``, counted from 1, or with 0 all layers."""

    group: str
    number: int = 0


SpanPlans = Mapping[str, Mapping[int, GroupPlan]]
"""The plan of each span, by cache group and span number."""


class LayerSpans:
    """The spans of one rank. ``layers`` are by cache group, in the order in which the engine computes them.

    ``layers_of`` maps each span to its layers, ``span_of`` each layer to its span.

    >>> spans = LayerSpans({"full": ["a", "b", "c"]}, layers_per_span=2)
    >>> spans.layers_of[Span("full", 1)], spans.span_of["c"]
    (('a', 'b'), Span(group='full', number=2))
    """

    def __init__(self, layers: Mapping[str, Sequence[str]], layers_per_span: int = LAYERS_PER_SPAN) -> None:
        self._spans = {group: cut_layers(of_group, layers_per_span) for group, of_group in layers.items()}
        self.layers_of = {Span(group, number): cut[number] for group, cut in self._spans.items() for number in cut}
        self.span_of = {layer: span for span, of_span in self.layers_of.items() for layer in of_span}
        self._plans: WeakKeyDictionary[PairPlan, SpanPlans] = WeakKeyDictionary()

    def plans(self, plan: PairPlan) -> SpanPlans:
        """Return the plans of all spans of a pair; the first call makes them."""
        if plan not in self._plans:
            self._plans[plan] = {
                group: plan_spans(plan, group, cut) for group, cut in self._spans.items() if group in plan.groups
            }
        return self._plans[plan]


def goes_whole(num_tokens: int, *, is_computed: bool, short_tokens: int = SHORT_TOKENS) -> bool:
    """Return whether a prompt is written whole, after it is computed, instead of span by span during its computation.

    An engine that does not report its computed layers sends all spans of a chunk at the end of the step.

    >>> [goes_whole(num_tokens, is_computed=False) for num_tokens in (256, 257)], goes_whole(4096, is_computed=True)
    ([True, False], True)
    """
    return is_computed or num_tokens <= short_tokens


def cut_layers(layers: Sequence[str], layers_per_span: int) -> dict[int, tuple[str, ...]]:
    """Cut layers, in the order of their computation, into numbered spans; the last may be shorter.

    >>> cut_layers(["0", "1", "2", "3", "4"], 2)
    {1: ('0', '1'), 2: ('2', '3'), 3: ('4',)}
    """
    starts = range(0, len(layers), layers_per_span)
    return {number: tuple(layers[start : start + layers_per_span]) for number, start in enumerate(starts, 1)}


def plan_spans(plan: PairPlan, group: str, spans: Mapping[int, Sequence[str]]) -> dict[int, GroupPlan]:
    """Return the plan of each span of a group's layers, by number; together they move the same bytes as ``plan``.

    Layers that only the source or only the destination holds, as between pipeline stages, are left out, and so are
    spans without common layers.
    """
    whole = plan.groups[group]
    source, destination = whole.source_group, whole.destination_group
    common = source.layers & destination.layers
    return {
        number: GroupPlan(
            plan.source, plan.destination, (_with_layers(source, kept), _with_layers(destination, kept)), whole.heads
        )
        for number, layers in spans.items()
        if (kept := common & set(layers))
    }


def _with_layers(group: CacheGroup, layers: frozenset[str]) -> CacheGroup:
    components = []
    for component in group.components:
        held = zip(component.layers, component.layer_offsets, strict=True)
        names, offsets = zip(*((layer, offset) for layer, offset in held if layer in layers), strict=True)
        components.append(msgspec.structs.replace(component, layers=names, layer_offsets=offsets))
    scales = tuple(scale for scale in group.scales if scale.layer in layers)
    return msgspec.structs.replace(group, components=tuple(components), scales=scales)
