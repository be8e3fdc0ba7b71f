"""From a request's tokens to pairs of blocks: where each side's blocks cut the token axis."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvferry.errors import PlanError, Reason
from kvferry.layout.cache_group import CacheGroup
from kvferry.plan.request import GroupBlocks, Integers


class Phase(NamedTuple):
    """A piece of the token axis within one block on each side: first slots, and how many tokens."""

    source_slot: int
    destination_slot: int
    num_tokens: int


class BlockPairs(NamedTuple):
    """Source and destination blocks whose pieces share one phase."""

    phase: Phase
    source_blocks: Integers
    destination_blocks: Integers


def block_pairs(blocks: GroupBlocks, source: CacheGroup, destination: CacheGroup) -> list[BlockPairs]:
    """Cut the request's tokens at the block boundaries of both sides and group the pieces by phase.

    Where block sizes and slots agree, a partly filled last block moves whole: it belongs to the request on both sides,
    and whole pages need one phase and make the longest runs.

    Raises :class:`PlanError` (``invalid-request``) for tokens outside the blocks and for unknown ids.
    """
    first, last = blocks.first_token, blocks.last_token
    if first == last:
        return []
    source_slot = (first - blocks.source_first_token) % source.block_size
    aligned = source.block_size == destination.block_size and (
        source_slot == (first - blocks.destination_first_token) % destination.block_size
    )
    if aligned:
        last += -(last - blocks.source_first_token) % source.block_size
    if aligned and source_slot == 0:
        starts = np.arange(first, last, source.block_size, dtype=np.int64)
    else:
        starts = _cuts(blocks, last, source.block_size, destination.block_size)
    source_blocks, source_slots = _locate("source", blocks.source_first_token, blocks.source_ids, starts, source)
    destination_blocks, destination_slots = _locate(
        "destination", blocks.destination_first_token, blocks.destination_ids, starts, destination
    )
    if aligned and source_slot == 0:
        return [BlockPairs(Phase(0, 0, source.block_size), source_blocks, destination_blocks)]
    lengths = np.diff(starts, append=last)
    return _by_phase(np.stack((source_slots, destination_slots, lengths), axis=1), source_blocks, destination_blocks)


def refuse_twice(requests: Sequence[GroupBlocks], destination: CacheGroup) -> None:
    """Raise unless the requests fill each destination block at most once."""
    filled = np.sort(np.concatenate([_filled(blocks, destination.block_size) for blocks in requests]))
    twice = filled[1:][filled[1:] == filled[:-1]]
    if len(twice):
        raise PlanError(
            Reason.INVALID_REQUEST,
            f"group {destination.name!r}: destination block {int(twice[0])} is to be filled twice.",
            "Name each destination block once.",
        )


def _filled(blocks: GroupBlocks, block_size: int) -> Integers:
    """Return the destination blocks that the request's tokens lie in."""
    if blocks.num_tokens == 0:
        return blocks.destination_ids[:0]
    first = (blocks.first_token - blocks.destination_first_token) // block_size
    last = (blocks.last_token - 1 - blocks.destination_first_token) // block_size
    return blocks.destination_ids[first : last + 1]


def _cuts(blocks: GroupBlocks, last: int, source_size: int, destination_size: int) -> Integers:
    """Return the first token of each piece."""
    sides = [(blocks.source_first_token, source_size), (blocks.destination_first_token, destination_size)]
    first = blocks.first_token
    boundaries = [np.arange(first + -(first - begin) % size, last, size, dtype=np.int64) for begin, size in sides]
    return np.unique(np.concatenate([np.array([first], dtype=np.int64), *boundaries]))


def _locate(side: str, begin: int, ids: Integers, tokens: Integers, group: CacheGroup) -> tuple[Integers, Integers]:
    """Return the block id and the slot of each token."""
    positions, slots = np.divmod(tokens - begin, group.block_size)
    first, last = int(positions[0]), int(positions[-1])
    if last >= len(ids):
        raise PlanError(
            Reason.INVALID_REQUEST,
            f"group {group.name!r}: token {int(tokens[-1])} lies in {side} block number {last}, {len(ids)} were named.",
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
    return used[positions - first], slots


def _by_phase(pieces: Integers, source_blocks: Integers, destination_blocks: Integers) -> list[BlockPairs]:
    phases, inverse = np.unique(pieces, axis=0, return_inverse=True)
    order = np.argsort(inverse.reshape(-1), kind="stable")
    ends = np.cumsum(np.bincount(inverse.reshape(-1)))[:-1]
    members = np.split(order, ends)
    return [
        BlockPairs(Phase(*phase), source_blocks[member], destination_blocks[member])
        for phase, member in zip(phases.tolist(), members, strict=True)
    ]
