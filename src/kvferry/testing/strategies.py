"""Hypothesis strategies: two engines of one model, and a request between them.

A model has up to three cache groups of any kind. Each engine has its own layouts, tensor-parallel size (replication
included), uneven pipeline stages, context-parallel size and interleave, and block sizes.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from kvferry.layout.cache_group import CacheKind
from kvferry.layout.shard import Shard
from kvferry.layout.token_share import WHOLE, TokenShare
from kvferry.plan.request import GroupBlocks
from kvferry.plan.window import first_token_to_move
from kvferry.testing.random_models import (
    EngineLayout,
    GroupModel,
    Part,
    RankShape,
    common_tp_sizes,
    positions,
    rank_shard,
)

RANK_SPACING = 1 << 32
MAX_TOKENS = 14
MAX_RANKS_OF_STAGE = 8
SOURCE, DESTINATION = 0, 1


@dataclass(frozen=True)
class Move:
    """Every rank of both engines, and what is asked of each group."""

    sources: tuple[Shard, ...]
    destinations: tuple[Shard, ...]
    requests: tuple[GroupBlocks, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens and states that are asked for."""
        return sum(blocks.num_tokens for blocks in self.requests)

    def of(self, destination: Shard) -> list[GroupBlocks]:
        """Return the requests of the groups that a rank holds."""
        return [blocks for blocks in self.requests if destination.group(blocks.group)]


@st.composite
def groups(draw: st.DrawFn, name: str, layers: tuple[str, ...]) -> GroupModel:
    """Return a group of any kind over these layers."""
    kind = draw(st.sampled_from(CacheKind))
    num_heads = draw(st.sampled_from([1, 2, 3, 4, 6]))
    width, other, itemsize = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    if kind is CacheKind.STATE:
        family = draw(st.sampled_from(["mamba1", "mamba2", "mamba2-groups", "delta"]))
        parts = (Part("conv", other, itemsize), Part("ssm", width, 4))
        return GroupModel(name, kind, layers, num_heads, parts, family=family)
    packed = draw(st.booleans()) and draw(st.booleans())
    names = ("latent", "rope") if kind is CacheKind.MLA else ("k", "v")
    every = (Part(names[0], width, itemsize), Part(names[1], other, itemsize), Part("scale", 1, 4))
    kept = every[: draw(st.integers(1, 3))]
    window = draw(st.integers(1, 9)) if kind is CacheKind.SLIDING_WINDOW else 0
    return GroupModel(name, kind, layers, num_heads, kept, window=window, packed=packed)


@st.composite
def models(draw: st.DrawFn) -> tuple[GroupModel, ...]:
    """Return small models of several groups, whose layers interleave."""
    num_groups = draw(st.integers(1, 3))
    layers = [f"layer.{index}" for index in range(draw(st.integers(num_groups, 5)))]
    return tuple(draw(groups(str(index), tuple(layers[index::num_groups]))) for index in range(num_groups))


@dataclass(frozen=True)
class Tokens:
    """How one engine splits the token axis of one group."""

    block_size: int
    share: TokenShare
    """The first rank's."""

    @property
    def covers(self) -> int:
        """Tokens that one position of a list of blocks covers."""
        return self.block_size * self.share.size


@st.composite
def token_splits(draw: st.DrawFn, model: Sequence[GroupModel]) -> tuple[dict[str, Tokens], dict[str, Tokens]]:
    """Return for both engines how each group's tokens are split; packed pages are split alike."""
    sizes = [draw(st.sampled_from([1, 1, 2, 3])) for _ in (SOURCE, DESTINATION)]
    if any(group.packed for group in model):
        sizes[DESTINATION] = sizes[SOURCE]
    splits: tuple[dict[str, Tokens], dict[str, Tokens]] = ({}, {})
    for group in model:
        for side, size in enumerate(sizes):
            splits[side][group.name] = draw(_split(group, size))
        if group.packed or draw(st.booleans()):
            alike = splits[SOURCE][group.name]
            same_size = sizes[SOURCE] == sizes[DESTINATION]
            splits[DESTINATION][group.name] = alike if same_size else splits[DESTINATION][group.name]
    return splits


@st.composite
def _split(draw: st.DrawFn, group: GroupModel, size: int) -> Tokens:
    if group.kind is CacheKind.STATE:
        return Tokens(1, WHOLE)
    block_size = draw(st.integers(1, 6))
    if size == 1:
        return Tokens(block_size, WHOLE)
    dividing = [interleave for interleave in range(1, block_size + 1) if block_size % interleave == 0]
    return Tokens(block_size, TokenShare(0, size, draw(st.sampled_from(dividing))))


@st.composite
def requests(
    draw: st.DrawFn, model: Sequence[GroupModel], splits: tuple[dict[str, Tokens], dict[str, Tokens]]
) -> tuple[list[GroupBlocks], list[int]]:
    """Return a request, and how many blocks each engine needs: block 0 is the null block, all others are used once."""
    prompt = draw(st.integers(0, MAX_TOKENS))
    generator = random.Random(draw(st.integers(0, 1 << 32)))
    wanted = {group.name: draw(_wanted(group, prompt, *(split[group.name] for split in splits))) for group in model}
    states = {group.name for group in model if group.kind is CacheKind.STATE}
    if any(first < last for name, (first, last, _) in wanted.items() if name not in states):
        wanted.update(dict.fromkeys(states, (0, 1, [0, 0])))
    ids: tuple[list[int], ...] = ([], [])
    counts: dict[str, list[int]] = {}
    for name, (_, last, begins) in wanted.items():
        lists = [
            positions(last - begin, split[name].block_size, split[name].share)
            for begin, split in zip(begins, splits, strict=True)
        ]
        # Blocks that look ahead of the prompt follow in the receiver's list.
        lists[DESTINATION] += 0 if name in states else generator.choice((0, 0, 2))
        counts[name] = lists
    for side in (SOURCE, DESTINATION):
        every = list(range(1, 1 + sum(lists[side] for lists in counts.values())))
        ids[side].extend(generator.choice((every, every[::-1], generator.sample(every, len(every)))))
    num_blocks = [len(side) + 1 for side in ids]
    return _take(model, wanted, counts, splits, ids), num_blocks


@st.composite
def _wanted(
    draw: st.DrawFn, group: GroupModel, prompt: int, source: Tokens, destination: Tokens
) -> tuple[int, int, list[int]]:
    """Return the first and last token that move, and the token with which each side's list of blocks begins."""
    if group.kind is CacheKind.STATE:
        return 0, min(prompt, 1), [0, 0]
    first = draw(st.integers(0, prompt))
    if group.kind is CacheKind.SLIDING_WINDOW:
        first = first_token_to_move(
            num_computed_tokens=prompt,
            first_token=first,
            window=group.window,
            source_block_size=source.covers,
            destination_block_size=destination.covers,
            whole_pages=group.packed,
        )
    if group.packed:
        first -= first % destination.covers
    begins = [draw(st.integers(0, first)) for _ in (SOURCE, DESTINATION)]
    for side, split in enumerate((source, destination)):
        if group.packed or split.share.size > 1 or group.kind is CacheKind.SLIDING_WINDOW:
            begins[side] -= begins[side] % split.covers
    return first, prompt, begins


def _take(
    model: Sequence[GroupModel],
    wanted: dict[str, tuple[int, int, list[int]]],
    counts: dict[str, list[int]],
    splits: tuple[dict[str, Tokens], dict[str, Tokens]],
    ids: tuple[list[int], ...],
) -> list[GroupBlocks]:
    """Give each group its blocks; those that lie before a window are null."""
    asked = []
    for group in model:
        first, last, begins = wanted[group.name]
        lists = []
        for side, begin in enumerate(begins):
            taken = [ids[side].pop() for _ in range(counts[group.name][side])]
            before = (first - begin) // splits[side][group.name].covers if group.window else 0
            lists.append([0] * before + taken[before:])
        asked.append(
            GroupBlocks(
                group=group.name,
                first_token=first,
                last_token=last,
                source_block_ids=lists[SOURCE],
                destination_block_ids=lists[DESTINATION],
                source_first_token=begins[SOURCE],
                destination_first_token=begins[DESTINATION],
            )
        )
    return asked


@st.composite
def engines(
    draw: st.DrawFn, model: Sequence[GroupModel], splits: dict[str, Tokens], num_blocks: int, base_address: int
) -> tuple[Shard, ...]:
    """Return all ranks of an engine."""
    layout = EngineLayout(draw(st.sampled_from(["rows", "slots", "apart"])), num_blocks, draw(st.integers(0, 1 << 32)))
    cp_size = max(split.share.size for split in splits.values())
    tp_size = draw(st.sampled_from(common_tp_sizes(model, MAX_RANKS_OF_STAGE // cp_size)))
    stages = _stages(draw, [layer for group in model for layer in group.layers])
    shards: list[Shard] = []
    for pp_rank, stage in enumerate(stages):
        for rank in range(tp_size * cp_size):
            cp_rank = rank // tp_size
            shares = {name: _share(split.share, cp_rank) for name, split in splits.items()}
            block_sizes = {name: split.block_size for name, split in splits.items()}
            shape = RankShape(stage, rank % tp_size, tp_size, block_sizes, shares)
            ranks = {"tp_rank": rank, "tp_size": tp_size * cp_size, "pp_rank": pp_rank, "pp_size": len(stages)}
            shards.append(rank_shard(model, shape, layout, base_address + len(shards) * RANK_SPACING, **ranks))
    return tuple(shards)


def _share(first: TokenShare, cp_rank: int) -> TokenShare:
    return first if first.is_whole else TokenShare(cp_rank, first.size, first.interleave)


def _stages(draw: st.DrawFn, layers: Sequence[str]) -> list[frozenset[str]]:
    """Deal layers to pipeline stages, unevenly and in any order."""
    num_stages = draw(st.integers(1, min(3, len(layers))))
    order = draw(st.permutations(layers))
    cuts = sorted(draw(st.permutations(range(1, len(layers))))[: num_stages - 1])
    bounds = [0, *cuts, len(layers)]
    return [frozenset(order[start:end]) for start, end in itertools.pairwise(bounds)]


@st.composite
def moves(draw: st.DrawFn) -> Move:
    """Return two engines of one model and a request that can be moved between them."""
    model = draw(models())
    splits = draw(token_splits(model))
    asked, num_blocks = draw(requests(model, splits))
    sources = draw(engines(model, splits[SOURCE], num_blocks[SOURCE], 1 << 40))
    destinations = draw(engines(model, splits[DESTINATION], num_blocks[DESTINATION], 1 << 50))
    return Move(sources, destinations, tuple(asked))
