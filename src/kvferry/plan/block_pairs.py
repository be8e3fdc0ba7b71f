"""From a request's tokens to pairs of blocks: where each side's blocks and token shares cut the token axis."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.arrays import Integers
from kvferry.errors import PlanError, Reason
from kvferry.layout.group import CacheGroup, CacheKind
from kvferry.plan.request import GroupBlocks


class TokenRun(NamedTuple):
    """Tokens that follow each other within one block on each side: first slots, and how many."""

    source_slot: int
    destination_slot: int
    num_tokens: int


Phase = tuple[TokenRun, ...]
"""All that one pair of blocks has in common. Blocks of one request come in few phases, mostly in one."""


class BlockPairs(NamedTuple):
    """Source and destination blocks that have the same phase."""

    phase: Phase
    source_blocks: Integers
    destination_blocks: Integers


def block_pairs(blocks: GroupBlocks, source: CacheGroup, destination: CacheGroup) -> list[BlockPairs]:
    """Cut the tokens that both sides hold at the boundaries of both, and group the pairs of blocks by phase.

    Where block sizes, token shares and slots agree, a partly filled last block moves whole: it belongs to the request
    on both sides, and whole pages need one phase and make the longest runs.

    Raises :class:`PlanError` (``invalid-request``) for tokens outside the blocks and for unknown ids.
    """
    _check_request(blocks, source, destination)
    first, last = blocks.first_token, blocks.last_token
    if first == last:
        return []
    covers = source.tokens_per_position
    apart = (blocks.source_first_token - blocks.destination_first_token) % covers
    alike = source.block_size == destination.block_size and source.token_share == destination.token_share
    if not alike or apart:
        return _in_phases(blocks, last, source, destination)
    last += -(last - blocks.source_first_token) % covers
    if (first - blocks.source_first_token) % covers:
        return _in_phases(blocks, last, source, destination)
    starts = np.arange(first, last, covers, dtype=np.int64)
    source_positions = (starts - blocks.source_first_token) // covers
    destination_positions = (starts - blocks.destination_first_token) // covers
    return [
        BlockPairs(
            (TokenRun(0, 0, source.block_size),),
            _ids("source", source_positions, blocks.source_ids, source),
            _ids("destination", destination_positions, blocks.destination_ids, destination),
        )
    ]


def refuse_twice(requests: Sequence[GroupBlocks], destination: CacheGroup) -> None:
    """Raise unless the requests fill each destination block at most once."""
    filled = np.sort(np.concatenate([_filled(blocks, destination.tokens_per_position) for blocks in requests]))
    twice = filled[1:][filled[1:] == filled[:-1]]
    if len(twice):
        raise PlanError(
            Reason.INVALID_REQUEST,
            f"group {destination.name!r}: destination block {int(twice[0])} is to be filled twice.",
            "Name each destination block once.",
        )


def _filled(blocks: GroupBlocks, covers: int) -> Integers:
    """Return the destination blocks that the request's tokens lie in."""
    if blocks.num_tokens == 0:
        return blocks.destination_ids[:0]
    first = (blocks.first_token - blocks.destination_first_token) // covers
    last = (blocks.last_token - 1 - blocks.destination_first_token) // covers
    return blocks.destination_ids[first : last + 1]


def _check_request(blocks: GroupBlocks, source: CacheGroup, destination: CacheGroup) -> None:
    if destination.kind is CacheKind.STATE and blocks.num_tokens:
        lists = len(blocks.source_ids), len(blocks.destination_ids)
        if (blocks.first_token, blocks.last_token, *lists) != (0, 1, 1, 1):
            raise PlanError(
                Reason.INVALID_REQUEST,
                f"group {blocks.group!r}: tokens {blocks.first_token} to {blocks.last_token} of {lists[0]} and "
                f"{lists[1]} blocks were asked of a state.",
                "Ask for token 0 to 1 and name the block of the last state on each side.",
            )
    for side, group, begin in (
        ("source", source, blocks.source_first_token),
        ("destination", destination, blocks.destination_first_token),
    ):
        covers = group.tokens_per_position
        if not group.token_share.is_whole and begin % covers:
            raise PlanError(
                Reason.INVALID_REQUEST,
                f"group {blocks.group!r}: the {side} blocks begin at token {begin}, which is no multiple of {covers}.",
                "Name the blocks from one that begins on the first context-parallel rank.",
            )


class _Pieces(NamedTuple):
    """Pieces of the token axis that stay within one block on each side, in token order."""

    source_position: Integers
    source_slot: Integers
    destination_position: Integers
    destination_slot: Integers
    num_tokens: Integers


def _in_phases(blocks: GroupBlocks, last: int, source: CacheGroup, destination: CacheGroup) -> list[BlockPairs]:
    pieces = _pieces(blocks, last, source, destination)
    if not len(pieces.num_tokens):
        return []
    first_of_pair = _changes(pieces.source_position, pieces.destination_position)
    starts = np.flatnonzero(first_of_pair)
    source_blocks = _ids("source", pieces.source_position[starts], blocks.source_ids, source)
    destination_blocks = _ids("destination", pieces.destination_position[starts], blocks.destination_ids, destination)
    phases, which = _phases(pieces, first_of_pair, starts)
    order = np.argsort(which, kind="stable")
    members = np.split(order, np.cumsum(np.bincount(which))[:-1])
    return [
        BlockPairs(phase, source_blocks[member], destination_blocks[member])
        for phase, member in zip(phases, members, strict=True)
    ]


def _phases(pieces: _Pieces, first_of_pair: npt.NDArray[np.bool_], starts: Integers) -> tuple[list[Phase], Integers]:
    """Return the distinct phases of the pairs of blocks that begin at ``starts``, and which of them each pair has."""
    pair = np.cumsum(first_of_pair) - 1
    within = np.arange(len(pair), dtype=np.int64) - starts[pair]
    runs = np.stack((pieces.source_slot, pieces.destination_slot, pieces.num_tokens), axis=1)
    table = np.zeros((len(starts), int(within.max()) + 1, 3), dtype=np.int64)
    table[pair, within] = runs
    distinct, which = np.unique(table.reshape(len(starts), -1), axis=0, return_inverse=True)
    # Pairs with fewer pieces than others end in runs of no tokens.
    rows = distinct.reshape(len(distinct), -1, 3).tolist()
    return [tuple(TokenRun(*run) for run in row if run[2]) for row in rows], which.reshape(-1)


def _pieces(blocks: GroupBlocks, last: int, source: CacheGroup, destination: CacheGroup) -> _Pieces:
    """Return the pieces that both sides hold, as long as they get."""
    sides = ((source, blocks.source_first_token), (destination, blocks.destination_first_token))
    starts = _cuts(sides, blocks.first_token, last)
    lengths = np.diff(starts, append=last)
    held = np.logical_and.reduce([_holds(group, starts) for group, _ in sides])
    starts, lengths = starts[held], lengths[held]
    (source_position, source_slot), (destination_position, destination_slot) = (
        _locate(group, starts - begin) for group, begin in sides
    )
    pieces = _Pieces(source_position, source_slot, destination_position, destination_slot, lengths)
    dealt_alike = not source.token_share.is_whole and not destination.token_share.is_whole
    return _joined(pieces) if dealt_alike and len(lengths) else pieces


def _joined(pieces: _Pieces) -> _Pieces:
    """Join pieces that are apart on the token axis but follow each other in both sides' blocks."""
    ends = pieces.source_slot + pieces.num_tokens, pieces.destination_slot + pieces.num_tokens
    breaks = _changes(pieces.source_position, pieces.destination_position)
    breaks[1:] |= (ends[0][:-1] != pieces.source_slot[1:]) | (ends[1][:-1] != pieces.destination_slot[1:])
    starts = np.flatnonzero(breaks)
    places = [column[starts] for column in pieces[:4]]
    return _Pieces(places[0], places[1], places[2], places[3], np.add.reduceat(pieces.num_tokens, starts))


def _changes(left: Integers, right: Integers) -> npt.NDArray[np.bool_]:
    """Return where either column differs from the row before it; the first row does."""
    changed = np.ones(len(left), dtype=np.bool_)
    changed[1:] = (np.diff(left) != 0) | (np.diff(right) != 0)
    return changed


def _cuts(sides: Sequence[tuple[CacheGroup, int]], first: int, last: int) -> Integers:
    """Return the first token of each piece: the request's first, and every boundary of a block or a share after it."""
    boundaries = [np.array([first], dtype=np.int64)]
    for group, begin in sides:
        step = group.block_size if group.token_share.is_whole else group.token_share.interleave
        boundaries.append(np.arange(first + -(first - begin) % step, last, step, dtype=np.int64))
    return np.unique(np.concatenate(boundaries))


def _holds(group: CacheGroup, tokens: Integers) -> npt.NDArray[np.bool_]:
    share = group.token_share
    return np.equal(tokens // share.interleave % share.size, share.rank)


def _locate(group: CacheGroup, tokens: Integers) -> tuple[Integers, Integers]:
    """Return the position in the list of blocks and the slot of tokens counted from the list's first."""
    share = group.token_share
    local = tokens // (share.interleave * share.size) * share.interleave + tokens % share.interleave
    position, slot = np.divmod(local, group.block_size)
    return position, slot


def _ids(side: str, positions: Integers, ids: Integers, group: CacheGroup) -> Integers:
    """Return the block ids at ascending positions of a side's list."""
    first, last = int(positions[0]), int(positions[-1])
    if last >= len(ids):
        raise PlanError(
            Reason.INVALID_REQUEST,
            f"group {group.name!r}: tokens lie in {side} block number {last}, {len(ids)} were named.",
            "Name every block that the request fills.",
        )
    used = ids[first : last + 1]
    if int(used.min()) < 0 or int(used.max()) >= group.num_blocks:
        wrong = used[(used < 0) | (used >= group.num_blocks)][0]
        raise PlanError(
            Reason.INVALID_REQUEST,
            f"group {group.name!r}: {side} block {wrong} does not exist; there are {group.num_blocks}.",
            "Name blocks of the engine that this plan was made for.",
        )
    return used[positions - first]
