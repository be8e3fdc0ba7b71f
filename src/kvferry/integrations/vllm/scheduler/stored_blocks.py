"""Which blocks of a request are stored, which of them a hit needs, and how orders name them.

A *stored block* holds the tokens of a whole number of the engine's blocks. A hit ends at a *boundary*: a number of
tokens behind which each cache group has all that the next token needs. Which tier holds a block is not known here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvferry.arrays import Flags, Integers
from kvferry.errors import HandoffError, Reason, SettingsError
from kvferry.integrations.vllm.offload_names import BlockNames
from kvferry.integrations.vllm.scheduler.blocks import NULL_BLOCK_ID, GroupShape
from kvferry.integrations.vllm.translate import UNEXPECTED
from kvferry.layout.shard import CacheKind
from kvferry.plan.match import GroupBlocks
from kvferry.tiers.protocol import BlockKey


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """How a cache group is stored; sizes in tokens. ``engine_blocks`` blocks of the engine are one stored block.

    ``tokens_per_hash``: vLLM has one hash for so many tokens.

    >>> StoredGroup(0, GroupShape(CacheKind.ATTENTION, 16), engine_blocks=4, tokens_per_hash=16).tokens
    64
    """

    index: int
    shape: GroupShape
    engine_blocks: int
    tokens_per_hash: int

    @property
    def name(self) -> str:
        """The group's name in shards."""
        return str(self.index)

    @property
    def tokens(self) -> int:
        """Tokens of a stored block."""
        return self.shape.block_size * self.engine_blocks

    def first_needed(self, first_token: Integers, boundary: Integers) -> Integers:
        """Return the first token that a load from ``first_token`` to the boundary must bring, for arrays of boundaries.

        A window needs its last tokens only, from the begin of an engine's block on: vLLM caches that block as a whole.
        """
        if self.shape.kind is not CacheKind.SLIDING_WINDOW:
            return first_token
        size = self.shape.block_size
        return np.maximum(first_token, (boundary - self.shape.window + 1) // size * size)

    def store_blocks(self, engine_ids: Integers, slab_ids: Integers) -> GroupBlocks:
        """Return the copy of stored blocks to the slab; ``engine_ids`` has a row for each."""
        return GroupBlocks(
            group=self.name,
            first_token=0,
            last_token=len(slab_ids) * self.tokens,
            source_block_ids=engine_ids.reshape(-1),
            destination_block_ids=slab_ids,
        )

    def load_blocks(self, tokens: tuple[int, int], slab_ids: Integers, engine_ids: Sequence[int]) -> GroupBlocks:
        """Return the copy for a load of the tokens ``tokens[0]`` to ``tokens[1]`` from the slab.

        ``slab_ids`` are the stored blocks that the load needs, ``engine_ids`` all blocks of the request. Raises
        :class:`HandoffError` (invalid-request) where the request has no block for a token.
        """
        first, end = int(self.first_needed(np.array(tokens[0]), np.array(tokens[1]))), tokens[1]
        size = self.shape.block_size
        destination_ids = engine_ids[first // size : -(-end // size)]
        if NULL_BLOCK_ID in destination_ids:
            message = f"cache group {self.index}: vLLM has no block for some of the tokens {first} to {end} of a load."
            raise HandoffError(Reason.INVALID_REQUEST, message, UNEXPECTED)
        return GroupBlocks(
            group=self.name,
            first_token=first,
            last_token=end,
            source_block_ids=slab_ids,
            destination_block_ids=destination_ids,
            source_first_token=first // self.tokens * self.tokens,
            destination_first_token=first // size * size,
        )


def stored_groups(shapes: Sequence[GroupShape], block_size: int, tokens_per_hash: int) -> tuple[StoredGroup, ...]:
    """Return how each group is stored in blocks of ``block_size`` tokens; 0 takes the engine's blocks.

    Raises :class:`SettingsError` (invalid-setting) where the engine's blocks are not all of one size that divides it.

    >>> full = GroupShape(CacheKind.ATTENTION, 16)
    >>> [group.engine_blocks for group in stored_groups([full, full], 64, tokens_per_hash=16)]
    [4, 4]
    """
    sizes = sorted({shape.block_size for shape in shapes})
    if block_size and (len(sizes) > 1 or block_size % sizes[0]):
        raise SettingsError(
            Reason.INVALID_SETTING,
            f"block_size is {block_size}; the engine has blocks of {' and '.join(map(str, sizes))} tokens.",
            f"Set a multiple of {sizes[0]}." if len(sizes) == 1 else "Leave the setting out.",
        )
    num = block_size // sizes[0] or 1
    return tuple(StoredGroup(index, shape, num, tokens_per_hash) for index, shape in enumerate(shapes))


def check_window_interval(shapes: Sequence[GroupShape], interval: int) -> None:
    """Raise :class:`SettingsError` (invalid-setting) for an interval of windows that the model does not have.

    >>> check_window_interval([GroupShape(CacheKind.ATTENTION, 16)], 0)
    """
    if interval and not any(shape.kind is CacheKind.SLIDING_WINDOW for shape in shapes):
        asked = f"window_interval is {interval}; no cache group of this model has a sliding window."
        raise SettingsError(Reason.INVALID_SETTING, asked, "Leave the setting out.")


@dataclass(slots=True, eq=False)
class RequestBlocks:
    """The keys of a request's stored blocks, by group, and how many of each group were offered to the tiers.

    The keys follow vLLM's list of hashes. The list grows, and it may be cut and go on with other tokens (streaming
    input): :meth:`update` compares the last key of each group.
    """

    groups: Sequence[StoredGroup]
    names: BlockNames
    keys: list[list[BlockKey]] = field(default_factory=list)
    num_offered: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.keys = [[] for _ in self.groups]
        self.num_offered = [0] * len(self.groups)

    def update(self, hashes: Sequence[bytes]) -> None:
        """Take the hashes that the request has now."""
        for group, keys in zip(self.groups, self.keys, strict=True):
            per_block = group.tokens // group.tokens_per_hash
            ends = hashes[per_block - 1 :: per_block]
            if len(ends) == len(keys) and (not keys or keys[-1:] == self.names.keys(group.index, ends[-1:])):
                continue
            del keys[len(ends) :]
            while keys and keys[-1:] != self.names.keys(group.index, ends[len(keys) - 1 : len(keys)]):
                keys.pop()
            self.num_offered[group.index] = min(self.num_offered[group.index], len(keys))
            keys += self.names.keys(group.index, ends[len(keys) :])

    @property
    def num_tokens(self) -> int:
        """The tokens up to which every group has keys."""
        return min(len(keys) * group.tokens for group, keys in zip(self.groups, self.keys, strict=True))

    def needed(self, first_token: int, boundary: int) -> list[tuple[int, int]]:
        """Return which stored blocks of each group a load from ``first_token`` to the boundary needs, half-open."""
        tokens = np.array(first_token), np.array(boundary)
        return [(int(group.first_needed(*tokens)) // group.tokens, boundary // group.tokens) for group in self.groups]

    def wanted(self, first_token: int, boundary: int) -> dict[str, Sequence[BlockKey]]:
        """Return the keys of the needed blocks, by the name of their group."""
        parts = zip(self.groups, self.keys, self.needed(first_token, boundary), strict=True)
        return {group.name: keys[begin:end] for group, keys, (begin, end) in parts}


def keeps_window(group: StoredGroup, places: Integers, interval: int, step: int, others: Sequence[int]) -> Flags:
    """Return which stored blocks of a group, by place, are worth storing: with an ``interval`` of 0 all of them.

    Else windows are stored at each multiple of the interval, and behind the tokens ``others``: the end of a prompt, and
    of a request that has ended, at the last boundary, a multiple of ``step``, before them.
    """
    if not interval or group.shape.kind is not CacheKind.SLIDING_WINDOW:
        return np.ones(len(places), np.bool_)
    ends = (places + 1) * group.tokens
    interval = -(-interval // step) * step
    kept = np.zeros(len(places), np.bool_)
    for boundaries in (-(-ends // interval) * interval, *(np.full_like(ends, end // step * step) for end in others)):
        kept |= (ends <= boundaries) & (group.first_needed(np.zeros_like(ends), boundaries) < ends)
    return kept


def whole_group(groups: Sequence[StoredGroup]) -> StoredGroup | None:
    """Return a group whose attention is whole: every load of a longer prefix has all of its earlier blocks."""
    return next((group for group in groups if group.shape.kind in (CacheKind.ATTENTION, CacheKind.MLA)), None)


def alignment(groups: Sequence[StoredGroup]) -> int:
    """Return the tokens of which every boundary is a multiple."""
    return math.lcm(*(group.tokens for group in groups))


def longest_hit(blocks: RequestBlocks, held: Sequence[Flags], first_token: int, end_token: int) -> int:
    """Return the last boundary up to ``end_token`` that a load from ``first_token`` can reach; else ``first_token``.

    ``held`` says for the stored blocks of each group, from the one with ``first_token`` on, whether they can be had.
    The hit is what all groups have: each is evicted alone.
    """
    step = alignment(blocks.groups)
    boundaries = np.arange(first_token // step * step + step, min(end_token, blocks.num_tokens) + 1, step)
    reaches = np.ones(len(boundaries), np.bool_)
    for group, is_held in zip(blocks.groups, held, strict=True):
        if len(is_held):
            before = first_token // group.tokens
            last_missing = np.maximum.accumulate(np.where(is_held, -1, np.arange(len(is_held))))
            begin = group.first_needed(np.array(first_token), boundaries) // group.tokens - before
            reaches &= last_missing[boundaries // group.tokens - before - 1] < begin
    return int(boundaries[reaches].max(initial=first_token))
