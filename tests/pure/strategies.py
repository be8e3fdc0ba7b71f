"""Hypothesis strategies: two engines of one model, and a request that moves between them.

A model has up to three cache groups of any kind. Each engine has its own layouts, tensor-parallel size (with
replication), uneven pipeline stages, context-parallel size and interleave, and block sizes.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from kvferry.layout.shard import WHOLE, CacheKind, Shard, TokenShare
from kvferry.plan.match import GroupBlocks, first_token_to_move

from .random_models import (
    ComponentShape,
    EngineLayout,
    GroupModel,
    RankShape,
    common_tp_sizes,
    positions,
    rank_shard,
)

RANK_SPACING = 1 << 32
MAX_TOKENS = 18
MAX_RANKS = 6
"""Ranks of one engine. The time of a case grows with the pairs of ranks; more ranks find no more errors."""
SOURCE, DESTINATION = 0, 1

# Built once: building a strategy takes as long as drawing from it.
BITS, SEEDS = st.booleans(), st.integers(0, 1 << 32)
KINDS, FAMILIES = st.sampled_from(CacheKind), st.sampled_from(["mamba1", "mamba2", "mamba2-groups", "delta"])
HEADS = {prime: st.sampled_from([1, prime, prime, 2 * prime]) for prime in (2, 3)}
"""Numbers of heads by the prime of their tensor-parallel sizes, so that the groups of a model have common sizes."""
STATE_HEADS = {prime: st.sampled_from([prime, 2 * prime]) for prime in HEADS}
PRIMES = st.sampled_from([2, 2, 2, 3])
WIDTHS, OTHER_WIDTHS, ITEMSIZES = st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 2, 4])
NUM_GROUPS, NUM_COMPONENTS, WINDOWS, BLOCK_SIZES = (st.integers(1, largest) for largest in (3, 3, 9, 6))
CONTEXT_PARALLEL_SIZES, NUM_STAGES = st.sampled_from([1, 1, 1, 2, 2, 3]), st.sampled_from([1, 1, 1, 2, 2, 3])
PROMPTS = st.sampled_from([*range(1, MAX_TOKENS + 1)] * 3 + [0])
PLACEMENTS = st.sampled_from(["rows", "slots", "apart"])
UP_TO = [st.integers(0, largest) for largest in range(MAX_TOKENS + 1)]


@dataclass(frozen=True)
class Move:
    """Every rank of both engines, and a request for each group."""

    sources: tuple[Shard, ...]
    destinations: tuple[Shard, ...]
    requests: tuple[GroupBlocks, ...]

    @property
    def num_tokens(self) -> int:
        """The number of requested tokens and states."""
        return sum(blocks.num_tokens for blocks in self.requests)

    def of(self, destination: Shard) -> list[GroupBlocks]:
        """Return the requests of the groups that a rank holds."""
        return [blocks for blocks in self.requests if destination.group(blocks.group)]


def _group_model(draw: st.DrawFn, name: str, layers: tuple[str, ...], prime: int) -> GroupModel:
    """Return a group of any kind over these layers."""
    kind = draw(KINDS)
    width, other, itemsize = draw(WIDTHS), draw(OTHER_WIDTHS), draw(ITEMSIZES)
    if kind is CacheKind.STATE:
        components = (ComponentShape("conv", other, itemsize), ComponentShape("ssm", width, 4))
        return GroupModel(name, kind, layers, draw(STATE_HEADS[prime]), components, family=draw(FAMILIES))
    num_heads = draw(HEADS[prime])
    packed = draw(BITS) and draw(BITS)
    names = ("latent", "rope") if kind is CacheKind.MLA else ("k", "v")
    every = (
        ComponentShape(names[0], width, itemsize),
        ComponentShape(names[1], other, itemsize),
        ComponentShape("scale", 1, 4),
    )
    kept = every[: draw(NUM_COMPONENTS)]
    window = draw(WINDOWS) if kind is CacheKind.SLIDING_WINDOW else 0
    return GroupModel(name, kind, layers, num_heads, kept, window=window, packed=packed)


def _model(draw: st.DrawFn) -> tuple[GroupModel, ...]:
    """Return small models of several groups, whose layers interleave."""
    num_groups, prime = draw(NUM_GROUPS), draw(PRIMES)
    layers = [f"layer.{index}" for index in range(draw(st.integers(num_groups, 5)))]
    return tuple(_group_model(draw, str(index), tuple(layers[index::num_groups]), prime) for index in range(num_groups))


@dataclass(frozen=True)
class Tokens:
    """How one engine splits the token axis of one group."""

    block_size: int
    share: TokenShare
    """The token share of the first rank."""

    @property
    def tokens_each(self) -> int:
        """Tokens that one position of a list of blocks stands for."""
        return self.block_size * self.share.size


def _token_splits(draw: st.DrawFn, model: Sequence[GroupModel]) -> tuple[dict[str, Tokens], dict[str, Tokens]]:
    """Return for both engines how they split each group's tokens; packed pages have equal splits."""
    sizes = [draw(CONTEXT_PARALLEL_SIZES) for _ in (SOURCE, DESTINATION)]
    if any(group.packed for group in model):
        sizes[DESTINATION] = sizes[SOURCE]
    splits: tuple[dict[str, Tokens], dict[str, Tokens]] = ({}, {})
    for group in model:
        for side, size in enumerate(sizes):
            splits[side][group.name] = _split(draw, group, size)
        if group.packed or draw(BITS):
            alike = splits[SOURCE][group.name]
            same_size = sizes[SOURCE] == sizes[DESTINATION]
            splits[DESTINATION][group.name] = alike if same_size else splits[DESTINATION][group.name]
    return splits


def _split(draw: st.DrawFn, group: GroupModel, size: int) -> Tokens:
    if group.kind is CacheKind.STATE:
        return Tokens(1, WHOLE)
    block_size = draw(BLOCK_SIZES)
    if size == 1:
        return Tokens(block_size, WHOLE)
    dividing = [interleave for interleave in range(1, block_size + 1) if block_size % interleave == 0]
    return Tokens(block_size, TokenShare(0, size, draw(st.sampled_from(dividing))))


def _requests(
    draw: st.DrawFn, model: Sequence[GroupModel], splits: tuple[dict[str, Tokens], dict[str, Tokens]]
) -> tuple[list[GroupBlocks], list[int]]:
    """Return a request and the number of blocks of each engine. Block 0 is the null block, all others occur once."""
    prompt = draw(PROMPTS)
    generator = random.Random(draw(SEEDS))
    wanted = {group.name: _wanted(draw, group, prompt, *(split[group.name] for split in splits)) for group in model}
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
        # Either list may end with look-ahead blocks.
        ahead = [0 if name in states else generator.choice((0, 0, 2)) for _ in lists]
        counts[name] = [count + more for count, more in zip(lists, ahead, strict=True)]
    for side in (SOURCE, DESTINATION):
        every = list(range(1, 1 + sum(lists[side] for lists in counts.values())))
        ids[side].extend(generator.choice((every, every[::-1], generator.sample(every, len(every)))))
    num_blocks = [len(side) + 1 for side in ids]
    return _take(model, wanted, counts, splits, ids), num_blocks


def _wanted(
    draw: st.DrawFn, group: GroupModel, prompt: int, source: Tokens, destination: Tokens
) -> tuple[int, int, list[int]]:
    """Return the first and last token that move, and the first tokens of both lists of blocks."""
    if group.kind is CacheKind.STATE:
        return 0, min(prompt, 1), [0, 0]
    # The decode engine has none, some or (rarely) all of the prompt's tokens already.
    first = draw(UP_TO[prompt if draw(BITS) else max(prompt - 1, 0)]) if draw(BITS) else 0
    if group.kind is CacheKind.SLIDING_WINDOW:
        first = first_token_to_move(
            num_computed_tokens=prompt,
            first_token=first,
            window=group.window,
            source_block_size=source.tokens_each,
            destination_block_size=destination.tokens_each,
        )
    if group.packed:
        first -= first % destination.tokens_each
    begins = [draw(UP_TO[first]) for _ in (SOURCE, DESTINATION)]
    for side, split in enumerate((source, destination)):
        if group.packed or split.share.size > 1 or group.kind is CacheKind.SLIDING_WINDOW:
            begins[side] -= begins[side] % split.tokens_each
    return first, prompt, begins


def _take(
    model: Sequence[GroupModel],
    wanted: dict[str, tuple[int, int, list[int]]],
    counts: dict[str, list[int]],
    splits: tuple[dict[str, Tokens], dict[str, Tokens]],
    ids: tuple[list[int], ...],
) -> list[GroupBlocks]:
    """Give each group its blocks; blocks before a window are null blocks."""
    asked = []
    for group in model:
        first, last, begins = wanted[group.name]
        lists = []
        for side, begin in enumerate(begins):
            taken = [ids[side].pop() for _ in range(counts[group.name][side])]
            before = (first - begin) // splits[side][group.name].tokens_each if group.window else 0
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


def _engine(
    draw: st.DrawFn,
    model: Sequence[GroupModel],
    splits: dict[str, Tokens],
    num_blocks: int,
    sizes: tuple[int, int],
    base_address: int,
) -> tuple[Shard, ...]:
    """Return all ranks of an engine. ``sizes`` are the tensor-parallel size and the number of pipeline stages."""
    tp_size, num_stages = sizes
    layout = EngineLayout(draw(PLACEMENTS), num_blocks, draw(SEEDS))
    cp_size = max(split.share.size for split in splits.values())
    block_sizes = {name: split.block_size for name, split in splits.items()}
    shards: list[Shard] = []
    for pp_rank, stage in enumerate(_stages(model, num_stages, layout.seed)):
        for rank in range(tp_size * cp_size):
            shares = {name: _share(split.share, rank // tp_size) for name, split in splits.items()}
            shape = RankShape(stage, rank % tp_size, tp_size, block_sizes, shares)
            ranks = {"tp_rank": rank, "tp_size": tp_size * cp_size, "pp_rank": pp_rank, "pp_size": num_stages}
            shards.append(rank_shard(model, shape, layout, base_address + len(shards) * RANK_SPACING, **ranks))
    return tuple(shards)


def _sizes(draw: st.DrawFn, model: Sequence[GroupModel], splits: Sequence[dict[str, Tokens]]) -> list[tuple[int, int]]:
    """Return for both engines the tensor-parallel size, in most cases different, and the number of pipeline stages."""
    num_layers = sum(len(group.layers) for group in model)
    sizes: list[tuple[int, int]] = []
    for side in splits:
        cp_size = max(split.share.size for split in side.values())
        num_stages = min(draw(NUM_STAGES), num_layers)
        possible = common_tp_sizes(model, max(1, MAX_RANKS // (cp_size * num_stages)))
        others = [size for size in possible if sizes and size != sizes[SOURCE][0]]
        wants_other = draw(BITS)
        chosen = others if others and wants_other else possible
        sizes.append((draw(st.sampled_from(chosen)), num_stages))
    return sizes


def _share(first: TokenShare, cp_rank: int) -> TokenShare:
    return first if first.is_whole else TokenShare(cp_rank, first.size, first.interleave)


def _stages(model: Sequence[GroupModel], num_stages: int, seed: int) -> list[frozenset[str]]:
    """Split layers into pipeline stages, unevenly and in any order."""
    generator = random.Random(seed)
    order = [layer for group in model for layer in group.layers]
    generator.shuffle(order)
    cuts = sorted(generator.sample(range(1, len(order)), num_stages - 1))
    bounds = [0, *cuts, len(order)]
    return [frozenset(order[start:end]) for start, end in itertools.pairwise(bounds)]


@st.composite
def moves(draw: st.DrawFn) -> Move:
    """Return two engines of one model and a request that can move between them."""
    model = _model(draw)
    splits = _token_splits(draw, model)
    asked, num_blocks = _requests(draw, model, splits)
    sizes = _sizes(draw, model, splits)
    sources, destinations = (
        _engine(draw, model, splits[side], num_blocks[side], sizes[side], 1 << (40 + 10 * side))
        for side in (SOURCE, DESTINATION)
    )
    return Move(sources, destinations, tuple(asked))
