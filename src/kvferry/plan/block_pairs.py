"""Pairs of blocks from a request's tokens: blocks and token shares of source and destination cut the token axis."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvferry.arrays import Flags, Integers
from kvferry.errors import PlanError, Reason
from kvferry.layout.shard import CacheGroup, CacheKind
from kvferry.plan.request import GroupBlocks


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
