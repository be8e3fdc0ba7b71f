"""The tokens of one request in one cache group, and their blocks at source and destination.

Blocks and token shares of both sides cut the token axis; :func:`block_pairs` pairs what is left.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.arrays import Flags, Integers
from kvferry.errors import PlanError, Reason
from kvferry.layout.shard import CacheGroup, CacheKind, Shard
from kvferry.plan.match import SAME_LAYERS

SAMPLE_BLOCKS = 3

BlockIds = Sequence[int] | npt.NDArray[np.integer]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class GroupBlocks:
    """Tokens ``first_token`` up to ``last_token`` (half-open, global) of one request in one cache group.

    Each list of ids names consecutive blocks in token order; its first block begins at the list's ``*_first_token``. A
    position of a list holds the tokens of one block times the context-parallel size; where that size is above 1, a list
    begins at a multiple of these tokens. Blocks before the first token, such as a sliding window's null blocks, are
    never read or written. A state is "token" 0 to 1 of one block in each engine.

    A decode engine that already has 32 tokens names only the blocks to fill:

    >>> GroupBlocks(group="full", first_token=32, last_token=50, source_block_ids=[9, 8, 7, 6],
    ...     destination_block_ids=[4, 3], destination_first_token=32).num_tokens
    18
    """

    group: str
    first_token: int
    last_token: int
    source_block_ids: BlockIds
    destination_block_ids: BlockIds
    source_first_token: int = 0
    destination_first_token: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "source_block_ids", _as_ids(self.source_block_ids, self.group))
        object.__setattr__(self, "destination_block_ids", _as_ids(self.destination_block_ids, self.group))
        begin = max(self.source_first_token, self.destination_first_token)
        if (
            min(self.source_first_token, self.destination_first_token) < 0
            or not begin <= self.first_token <= self.last_token
        ):
            raise PlanError(
                Reason.INVALID_REQUEST,
                f"group {self.group!r}: the request has tokens {self.first_token} to {self.last_token}, its blocks "
                f"begin at token {self.source_first_token} (source) and {self.destination_first_token} (destination).",
                "Name the blocks from the first requested token on.",
            )

    @property
    def source_ids(self) -> Integers:
        """The source's block ids as an array."""
        return np.asarray(self.source_block_ids)

    @property
    def destination_ids(self) -> Integers:
        """The destination's block ids as an array."""
        return np.asarray(self.destination_block_ids)

    @property
    def num_tokens(self) -> int:
        """The number of requested tokens."""
        return self.last_token - self.first_token


def refuse_incomplete(requests: Sequence[GroupBlocks], destination: Shard) -> None:
    """Raise unless the requests name every group that the destination holds.

    An engine takes tokens without their state for a whole cache. So a request also names a group of which it wants no
    tokens, with ``first_token == last_token``, and a request for tokens includes the state.
    """
    wanted = {group.name: 0 for group in destination.groups}
    named = {blocks.group for blocks in requests}
    if unknown := sorted(named - wanted.keys()):
        raise PlanError(
            Reason.INVALID_REQUEST, f"cache group {unknown[0]!r} does not exist; there are {sorted(wanted)}."
        )
    if requests and (missing := sorted(wanted.keys() - named)):
        raise PlanError(
            Reason.INVALID_REQUEST,
            f"cache group {missing[0]!r} of {destination.rank_name} is left out of the request.",
            "Name every group; for no tokens, set the last token to the first.",
        )
    for blocks in requests:
        wanted[blocks.group] += blocks.num_tokens
    states = [group.name for group in destination.groups if group.kind is CacheKind.STATE]
    without_state = next((name for name in states if not wanted[name]), None)
    if without_state is not None and any(wanted.values()):
        raise PlanError(
            Reason.INVALID_REQUEST,
            f"the request has tokens, but not the state of group {without_state!r}.",
            "Name the block of the last state in each engine.",
        )


def of_rank(requests: Sequence[GroupBlocks], rank: Shard) -> Sequence[GroupBlocks]:
    """Return the requests of the rank's groups: a pipeline stage may hold no layer of a cache group."""
    if rank.pp_size == 1:
        return requests
    held = {group.name for group in rank.groups}
    return [blocks for blocks in requests if blocks.group in held]


def first_token_to_move(
    *,
    num_computed_tokens: int,
    first_token: int,
    window: int,
    source_block_size: int,
    destination_block_size: int,
    whole_pages: bool,
) -> int:
    """Return the first token to move of a group that keeps only a window.

    ``num_computed_tokens`` counts the prompt's tokens that the decode engine treats as computed, not the tokens that
    fit into its list of blocks: the list may end with look-ahead blocks of speculative decoding, and counting those
    would move the window past tokens that the decode engine still needs. ``first_token`` is the first token that the
    decode engine lacks. Block sizes are in global tokens: the tokens of a block times the context-parallel size.

    The next token attends to itself and to the ``window - 1`` tokens before it, so no earlier token is needed. The
    result is rounded down to the first block that exists in both engines: an engine frees only blocks that lie wholly
    before the window. Whole blocks thus stay whole at no cost, and no null block is reached. The result is below
    ``first_token`` only for ``whole_pages``, which move as a whole.

    >>> clip = dict(first_token=0, window=100, source_block_size=16, destination_block_size=16, whole_pages=False)
    >>> first_token_to_move(num_computed_tokens=1000, **clip)
    896
    >>> first_token_to_move(num_computed_tokens=50, **clip)
    0
    >>> first_token_to_move(num_computed_tokens=1000, **{**clip, "destination_block_size": 64})
    896
    >>> first_token_to_move(num_computed_tokens=1000, **{**clip, "first_token": 950, "whole_pages": True})
    944
    """
    needed = max(first_token, num_computed_tokens - window + 1)
    if needed >= num_computed_tokens:
        return num_computed_tokens
    real = max(needed // size * size for size in (source_block_size, destination_block_size))
    return real if whole_pages else max(real, first_token)


def sample_requests(sources: Sequence[Shard], destination: Shard) -> list[GroupBlocks]:
    """Return requests of up to ``SAMPLE_BLOCKS`` blocks of each group that the destination holds.

    A route proves its plans with this sample before any request waits. Groups overlay each other in memory, so no two
    groups get the same block id. Ids descend. Raises :class:`PlanError`: ``group-mismatch`` where no source holds a
    group, ``unsupported`` for fewer blocks than groups.
    """
    held = [_held_by_all(sources, group) for group in destination.groups]
    fewest = min(min(group.num_blocks for group in groups) for groups in held)
    num_blocks = min(SAMPLE_BLOCKS, fewest // len(held))
    if num_blocks == 0:
        what = f"{len(held)} cache groups share {fewest} blocks, too few for a proof with separate blocks for each."
        raise PlanError(Reason.UNSUPPORTED, what, "Give the KV caches more memory.")
    return [_request(groups, turn * num_blocks, num_blocks) for turn, groups in enumerate(held)]


def _held_by_all(sources: Sequence[Shard], wanted: CacheGroup) -> list[CacheGroup]:
    held = [found for source in sources if (found := source.group(wanted.name))]
    if not held:
        raise PlanError(
            Reason.GROUP_MISMATCH,
            f"the prefill engine has no cache group {wanted.name!r}.",
            SAME_LAYERS,
        )
    return [wanted, *held]


def _request(groups: Sequence[CacheGroup], first_id: int, num_blocks: int) -> GroupBlocks:
    is_state = groups[0].kind is CacheKind.STATE
    num_blocks = 1 if is_state else num_blocks
    ids = range(first_id + num_blocks - 1, first_id - 1, -1)
    return GroupBlocks(
        group=groups[0].name,
        first_token=0,
        last_token=num_blocks * min(group.tokens_per_position for group in groups),
        source_block_ids=ids,
        destination_block_ids=ids,
    )


def _as_ids(ids: BlockIds, group: str) -> Integers:
    """Return a copy as int64. Raises for anything but a flat list of integers."""
    array = np.array(ids)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise PlanError(
            Reason.INVALID_REQUEST,
            f"group {group!r}: the block ids have type {array.dtype} and shape {array.shape}.",
            "Pass block ids as a flat list of integers.",
        )
    return array.astype(np.int64)


class TokenRun(NamedTuple):
    """Consecutive tokens within one block of the source and one of the destination: the first slots, the number."""

    source_slot: int
    destination_slot: int
    num_tokens: int


Phase = tuple[TokenRun, ...]
"""All tokens that one pair of blocks has in common. Most requests have one phase, some a few."""


class BlockPairs(NamedTuple):
    """Pairs of source and destination blocks with the same phase."""

    phase: Phase
    source_blocks: Integers
    destination_blocks: Integers


def block_pairs(blocks: GroupBlocks, source: CacheGroup, destination: CacheGroup) -> list[BlockPairs]:
    """Cut the tokens that source and destination hold at the block boundaries of both; group the pairs by phase.

    Where block sizes, token shares and slots agree, a partly filled last block moves whole: the request owns the block
    in both engines, and whole pages need only one phase and make the longest runs.

    Raises :class:`PlanError` (``invalid-request``) for tokens outside the blocks and for unknown ids.
    """
    _check_request(blocks, source, destination)
    first, last = blocks.first_token, blocks.last_token
    if first == last:
        return []
    tokens_each = source.tokens_per_position
    apart = (blocks.source_first_token - blocks.destination_first_token) % tokens_each
    alike = source.block_size == destination.block_size and source.token_share == destination.token_share
    if not alike or apart:
        return _in_phases(blocks, last, source, destination)
    last += -(last - blocks.source_first_token) % tokens_each
    if (first - blocks.source_first_token) % tokens_each:
        return _in_phases(blocks, last, source, destination)
    starts = np.arange(first, last, tokens_each, dtype=np.int64)
    source_positions = (starts - blocks.source_first_token) // tokens_each
    destination_positions = (starts - blocks.destination_first_token) // tokens_each
    return [
        BlockPairs(
            (TokenRun(0, 0, source.block_size),),
            _ids("source", source_positions, blocks.source_ids, source),
            _ids("destination", destination_positions, blocks.destination_ids, destination),
        )
    ]


def refuse_twice(requests: Sequence[GroupBlocks], destination: CacheGroup) -> None:
    """Raise unless the requests fill each destination block at most once."""
    filled = np.sort(np.concatenate([_filled_blocks(blocks, destination.tokens_per_position) for blocks in requests]))
    twice = filled[1:][filled[1:] == filled[:-1]]
    if len(twice):
        raise PlanError(
            Reason.INVALID_REQUEST,
            f"group {destination.name!r}: destination block {int(twice[0])} would be filled twice.",
            "Name each destination block once.",
        )


def _filled_blocks(blocks: GroupBlocks, tokens_each: int) -> Integers:
    """Return the destination blocks that hold the request's tokens."""
    if blocks.num_tokens == 0:
        return blocks.destination_ids[:0]
    first = (blocks.first_token - blocks.destination_first_token) // tokens_each
    last = (blocks.last_token - 1 - blocks.destination_first_token) // tokens_each
    return blocks.destination_ids[first : last + 1]


def _check_request(blocks: GroupBlocks, source: CacheGroup, destination: CacheGroup) -> None:
    if destination.kind is CacheKind.STATE and blocks.num_tokens:
        lists = len(blocks.source_ids), len(blocks.destination_ids)
        if (blocks.first_token, blocks.last_token, *lists) != (0, 1, 1, 1):
            raise PlanError(
                Reason.INVALID_REQUEST,
                f"group {blocks.group!r} holds states: the request has tokens {blocks.first_token} to "
                f"{blocks.last_token} of {lists[0]} source blocks and {lists[1]} destination blocks.",
                "Request token 0 to 1 and name the one block of the last state in each engine.",
            )
    for side, group, begin in (
        ("source", source, blocks.source_first_token),
        ("destination", destination, blocks.destination_first_token),
    ):
        tokens_each = group.tokens_per_position
        if not group.token_share.is_whole and begin % tokens_each:
            raise PlanError(
                Reason.INVALID_REQUEST,
                f"group {blocks.group!r}: the {side} blocks begin at token {begin}, no multiple of {tokens_each}.",
                "Begin the list with a block that begins on the first context-parallel rank.",
            )


class _TokenRuns(NamedTuple):
    """Runs of tokens within one block of the source and one of the destination, in token order."""

    source_position: Integers
    source_slot: Integers
    destination_position: Integers
    destination_slot: Integers
    num_tokens: Integers


def _in_phases(blocks: GroupBlocks, last: int, source: CacheGroup, destination: CacheGroup) -> list[BlockPairs]:
    runs = _token_runs(blocks, last, source, destination)
    if not len(runs.num_tokens):
        return []
    first_of_pair = _changes(runs.source_position, runs.destination_position)
    starts = np.flatnonzero(first_of_pair)
    source_blocks = _ids("source", runs.source_position[starts], blocks.source_ids, source)
    destination_blocks = _ids("destination", runs.destination_position[starts], blocks.destination_ids, destination)
    phases, phase_of_pair = _phases(runs, first_of_pair, starts)
    order = np.argsort(phase_of_pair, kind="stable")
    members = np.split(order, np.cumsum(np.bincount(phase_of_pair))[:-1])
    return [
        BlockPairs(phase, source_blocks[member], destination_blocks[member])
        for phase, member in zip(phases, members, strict=True)
    ]


def _phases(runs: _TokenRuns, first_of_pair: Flags, starts: Integers) -> tuple[list[Phase], Integers]:
    """Return the distinct phases of the pairs of blocks that begin at ``starts``, and each pair's index into them."""
    pair = np.cumsum(first_of_pair) - 1
    within = np.arange(len(pair), dtype=np.int64) - starts[pair]
    columns = np.stack((runs.source_slot, runs.destination_slot, runs.num_tokens), axis=1)
    table = np.zeros((len(starts), int(within.max()) + 1, 3), dtype=np.int64)
    table[pair, within] = columns
    distinct, phase_of_pair = np.unique(table.reshape(len(starts), -1), axis=0, return_inverse=True)
    # Pairs with fewer runs than others end in runs of no tokens.
    rows = distinct.reshape(len(distinct), -1, 3).tolist()
    return [tuple(TokenRun(*run) for run in row if run[2]) for row in rows], phase_of_pair.reshape(-1)


def _token_runs(blocks: GroupBlocks, last: int, source: CacheGroup, destination: CacheGroup) -> _TokenRuns:
    """Return the longest runs of tokens that both source and destination hold."""
    sides = ((source, blocks.source_first_token), (destination, blocks.destination_first_token))
    starts = _run_starts(sides, blocks.first_token, last)
    lengths = np.diff(starts, append=last)
    held = np.logical_and.reduce([_holds(group, starts) for group, _ in sides])
    starts, lengths = starts[held], lengths[held]
    (source_position, source_slot), (destination_position, destination_slot) = (
        _locate(group, starts - begin) for group, begin in sides
    )
    runs = _TokenRuns(source_position, source_slot, destination_position, destination_slot, lengths)
    both_split = not source.token_share.is_whole and not destination.token_share.is_whole
    return _join(runs) if both_split and len(lengths) else runs


def _join(runs: _TokenRuns) -> _TokenRuns:
    """Join runs that are consecutive in the blocks of both source and destination, though not on the token axis."""
    ends = runs.source_slot + runs.num_tokens, runs.destination_slot + runs.num_tokens
    breaks = _changes(runs.source_position, runs.destination_position)
    breaks[1:] |= (ends[0][:-1] != runs.source_slot[1:]) | (ends[1][:-1] != runs.destination_slot[1:])
    starts = np.flatnonzero(breaks)
    places = [column[starts] for column in runs[:4]]
    return _TokenRuns(places[0], places[1], places[2], places[3], np.add.reduceat(runs.num_tokens, starts))


def _changes(left: Integers, right: Integers) -> Flags:
    """Return which rows differ from the row before in either column; the first row counts as different."""
    changed = np.ones(len(left), dtype=np.bool_)
    changed[1:] = (np.diff(left) != 0) | (np.diff(right) != 0)
    return changed


def _run_starts(sides: Sequence[tuple[CacheGroup, int]], first: int, last: int) -> Integers:
    """Return the first token of each run: the request's first token, and every later boundary of a block or share."""
    boundaries = [np.array([first], dtype=np.int64)]
    for group, begin in sides:
        step = group.block_size if group.token_share.is_whole else group.token_share.interleave
        boundaries.append(np.arange(first + -(first - begin) % step, last, step, dtype=np.int64))
    return np.unique(np.concatenate(boundaries))


def _holds(group: CacheGroup, tokens: Integers) -> Flags:
    share = group.token_share
    return np.equal(tokens // share.interleave % share.size, share.rank)


def _locate(group: CacheGroup, tokens: Integers) -> tuple[Integers, Integers]:
    """Return position in the list of blocks and slot of tokens that are counted from the list's first token."""
    share = group.token_share
    local = tokens // (share.interleave * share.size) * share.interleave + tokens % share.interleave
    position, slot = np.divmod(local, group.block_size)
    return position, slot


def _ids(side: str, positions: Integers, ids: Integers, group: CacheGroup) -> Integers:
    """Return the block ids at ascending positions of a list."""
    first, last = int(positions[0]), int(positions[-1])
    if last >= len(ids):
        raise PlanError(
            Reason.INVALID_REQUEST,
            f"group {group.name!r}: the tokens need {last + 1} {side} blocks, the request names {len(ids)}.",
            "Name every block that the request fills.",
        )
    used = ids[first : last + 1]
    if int(used.min()) < 0 or int(used.max()) >= group.num_blocks:
        wrong = used[(used < 0) | (used >= group.num_blocks)][0]
        raise PlanError(
            Reason.INVALID_REQUEST,
            f"group {group.name!r}: {side} block {wrong} does not exist; there are {group.num_blocks}.",
            "Name blocks of the engine that the plan is for.",
        )
    return used[positions - first]
