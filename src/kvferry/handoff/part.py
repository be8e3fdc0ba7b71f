"""The part of a write that one source rank writes, which both ranks derive from the same plan."""

import copy
import hashlib
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from kvferry.arrays import Descriptors
from kvferry.errors import HandoffError, Reason
from kvferry.handoff.messages import AnnouncedBlocks
from kvferry.handoff.source import Batch, BlockList, Cut, Need
from kvferry.layout.shard import CacheGroup, CacheKind
from kvferry.plan.planner import NOTHING, GroupPlan, PairPlan, Span, SpanPlans
from kvferry.plan.request import GroupBlocks

NEVER = 1 << 61
"""A ``multiple_of`` larger than any token: for a state, final only with its prompt, and for a part sent whole."""


MOST_NAMES = 500
"""Characters of a peer's names in an error."""


class HeldCut(msgspec.Struct, frozen=True):
    """Tokens of some layers of a cache group, half-open, and the blocks of one rank that hold these tokens."""

    group: str
    layers: frozenset[str]
    first_token: int
    end_token: int
    blocks: BlockList


class Part:
    """The part of one request that a source rank of a plan writes.

    ``announced`` are the destination's blocks of the groups that this source serves, in the plan's order. ``spans`` has
    the groups whose layers are written a span at a time; the destination need not know them.
    """

    def __init__(
        self,
        plan: PairPlan,
        announced: Sequence[AnnouncedBlocks],
        spans: SpanPlans | None = None,
    ) -> None:
        self._plan = plan
        self._spans = spans or {}
        self._is_whole = False
        by_group = {blocks.group: blocks for blocks in announced}
        if by_group.keys() != plan.groups.keys() or len(by_group) < len(announced):
            raise HandoffError(
                Reason.GROUP_MISMATCH,
                f"blocks of cache groups {', '.join(by_group)[:MOST_NAMES]} were announced to a rank that sends "
                f"{', '.join(plan.groups)}.",
                "Serve the same model with the same cache settings.",
            )
        self.announced = tuple(by_group[group] for group in plan.groups)
        for blocks in self.announced:
            _check_ids(blocks, plan.groups[blocks.group].destination_group)
        encoded = msgspec.msgpack.encode((plan.digest, self.announced))
        self.digest = hashlib.blake2b(encoded, digest_size=16).hexdigest()

    def in_spans(self, spans: SpanPlans) -> "Part":
        """Return this part, sent in these spans of layers."""
        part = copy.copy(self)
        part._spans = spans
        return part

    def as_whole(self) -> "Part":
        """Return this part, sent at once when the prompt has been computed."""
        part = copy.copy(self)
        part._is_whole = True
        return part

    @property
    def needs(self) -> dict[Span, Need]:
        """The tokens that each span needs; a group without spans is one span of all its layers."""
        return {
            Span(blocks.group, number): self._need(blocks)
            for blocks in self.announced
            for number in self._spans.get(blocks.group) or (0,)
        }

    def lower(self, batch: Batch, held: Mapping[str, BlockList]) -> Descriptors:
        """Return the descriptors that write a batch out of the blocks that the source holds.

        Raises :class:`HandoffError` (invalid-request) where the source does not hold a block, :class:`PlanError` where
        blocks do not fit.
        """
        announced = {blocks.group: blocks for blocks in self.announced}
        rows = [NOTHING]
        for (group, first_token, end_token), numbers in _spans_by_tokens(batch).items():
            blocks = self._group_blocks(Cut(Span(group), first_token, end_token), announced[group], held[group])
            rows += [part.view(np.uint64) for plan in self._plans(group, numbers) for part in plan.lower([blocks])]
        return np.concatenate(rows)

    def cuts(self, batch: Batch, held: Mapping[str, BlockList]) -> list[HeldCut]:
        """Return what a batch writes out of the blocks that the source holds. Raises as :meth:`lower`."""
        return [
            HeldCut(
                group,
                frozenset().union(*(plan.source_group.layers for plan in self._plans(group, numbers))),
                first_token,
                end_token,
                self._held_blocks(Cut(Span(group), first_token, end_token), held[group]),
            )
            for (group, first_token, end_token), numbers in _spans_by_tokens(batch).items()
        ]

    def _plans(self, group: str, numbers: Sequence[int]) -> list[GroupPlan]:
        """Return the plans of these spans; for all spans the plan of the whole group, whose runs are longer."""
        known = self._spans.get(group, {})
        if len(numbers) >= len(known):
            return [self._plan.groups[group]]
        return [known[number] for number in numbers]

    def _need(self, blocks: AnnouncedBlocks) -> Need:
        source = self._plan.groups[blocks.group].source_group
        goes_at_end = self._is_whole or source.kind is CacheKind.STATE
        multiple_of = NEVER if goes_at_end else source.tokens_per_position
        return Need(blocks.first_token, blocks.end_token, multiple_of)

    def _group_blocks(self, cut: Cut, announced: AnnouncedBlocks, held: BlockList) -> GroupBlocks:
        plan = self._plan.groups[cut.span.group]
        source = self._held_blocks(cut, held)
        destination = _blocks_covering(
            announced.block_token, announced.block_ids, plan.destination_group.tokens_per_position, cut
        )
        return GroupBlocks(
            group=cut.span.group,
            first_token=cut.first_token,
            last_token=cut.end_token,
            source_block_ids=source.block_ids,
            source_first_token=source.first_token,
            destination_block_ids=destination.block_ids,
            destination_first_token=destination.first_token,
        )

    def _held_blocks(self, cut: Cut, held: BlockList) -> BlockList:
        covers = self._plan.groups[cut.span.group].source_group.tokens_per_position
        return _blocks_covering(held.first_token, held.block_ids, covers, cut)


def _check_ids(blocks: AnnouncedBlocks, group: CacheGroup) -> None:
    """Raise :class:`HandoffError` (invalid-request) for blocks that a cache does not have, or has once, and for tokens
    that end before they begin: such a write would never end.
    """
    if blocks.first_token > blocks.end_token:
        raise HandoffError(
            Reason.INVALID_REQUEST,
            f"cache group {blocks.group!r}: tokens {blocks.first_token} to {blocks.end_token} were announced.",
            "Run the same kvferry version on both sides.",
        )
    num_before = max(0, blocks.first_token - blocks.block_token) // group.tokens_per_position
    listed = blocks.block_ids[num_before:]
    ids = set(listed)
    if len(ids) < len(listed) or max(ids, default=0) >= group.num_blocks:
        raise HandoffError(
            Reason.INVALID_REQUEST,
            f"cache group {blocks.group!r}: {len(listed)} blocks were announced, {len(ids)} of them distinct, "
            f"up to number {max(ids, default=0)}, of a cache of {group.num_blocks}.",
            "Run the same kvferry version on both sides.",
        )


def _spans_by_tokens(batch: Batch) -> dict[tuple[str, int, int], list[int]]:
    """Return the numbers of a batch's spans by group and tokens."""
    found: dict[tuple[str, int, int], list[int]] = {}
    for cut in batch:
        found.setdefault((cut.span.group, cut.first_token, cut.end_token), []).append(cut.span.number)
    return found


def announced_blocks(plan: PairPlan, requests: Sequence[GroupBlocks]) -> tuple[AnnouncedBlocks, ...]:
    """Return the destination's blocks of the groups that a source serves."""
    return tuple(
        AnnouncedBlocks(
            group=blocks.group,
            first_token=blocks.first_token,
            end_token=blocks.last_token,
            block_token=blocks.destination_first_token,
            block_ids=tuple(blocks.destination_ids.tolist()),
        )
        for blocks in requests
        if blocks.group in plan.groups
    )


def _blocks_covering(first_token: int, block_ids: Sequence[int], covers: int, cut: Cut) -> BlockList:
    """Return the blocks of a list that hold the tokens of ``cut``. Raises :class:`HandoffError` (invalid-request)."""
    first, end = (cut.first_token - first_token) // covers, -(-(cut.end_token - first_token) // covers)
    if first < 0 or end > len(block_ids):
        raise HandoffError(
            Reason.INVALID_REQUEST,
            f"cache group {cut.span.group!r}: tokens {cut.first_token} to {cut.end_token} were asked of "
            f"{len(block_ids)} blocks of {covers} tokens from token {first_token} on.",
            "Let the prefill engine generate one token only (max_tokens 1): blocks that leave a window are freed.",
        )
    return BlockList(first_token + first * covers, block_ids[first:end])
