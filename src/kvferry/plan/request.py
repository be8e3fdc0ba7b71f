"""What one request asks of one cache group: which tokens, and in which blocks they lie on both sides."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.arrays import Integers
from kvferry.errors import PlanError, Reason
from kvferry.layout.group import CacheKind
from kvferry.layout.shard import Shard

BlockIds = Sequence[int] | npt.NDArray[np.integer]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class GroupBlocks:
    """Tokens ``first_token`` up to ``last_token`` (half-open, global) of one request in one cache group.

    Each side's ids list consecutive blocks in token order; the first of them begins at that side's ``*_first_token``.
    A position of a list covers the tokens of one block, times the context-parallel size (where that is above 1, a list
    begins at a multiple of so many tokens). Blocks before the first token, such as the null blocks that a sliding
    window leaves, are never touched. A state is "token" 0 to 1 of one block on each side.

    A decode engine that already has 32 tokens names only the blocks it wants filled:

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
                f"group {self.group!r}: tokens {self.first_token} to {self.last_token} asked of blocks that begin at "
                f"token {self.source_first_token} (source) and {self.destination_first_token} (destination).",
                "Name the blocks from the first wanted token on.",
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
        """Tokens asked for."""
        return self.last_token - self.first_token


def refuse_incomplete(requests: Sequence[GroupBlocks], destination: Shard) -> None:
    """Raise unless the requests say what they want of every group that the destination holds.

    Tokens without the state that goes with them would be taken for a whole cache, so a group of which nothing is
    wanted must be named too, with ``first_token == last_token``; a state is wanted wherever tokens are.
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
            "Name every group; one of which nothing is wanted has its first token equal to its last.",
        )
    for blocks in requests:
        wanted[blocks.group] += blocks.num_tokens
    states = [group.name for group in destination.groups if group.kind is CacheKind.STATE]
    without_state = next((name for name in states if not wanted[name]), None)
    if without_state is not None and any(wanted.values()):
        raise PlanError(
            Reason.INVALID_REQUEST,
            f"tokens are asked for without the state of group {without_state!r}.",
            "Name the block of its last state on each side.",
        )


def of_rank(requests: Sequence[GroupBlocks], rank: Shard) -> Sequence[GroupBlocks]:
    """Return what concerns the rank: a stage of a pipeline may hold no layer of a cache group."""
    if rank.pp_size == 1:
        return requests
    held = {group.name for group in rank.groups}
    return [blocks for blocks in requests if blocks.group in held]


def _as_ids(ids: BlockIds, group: str) -> Integers:
    """Return a copy as int64, refusing anything that is not a flat list of integers."""
    array = np.array(ids)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise PlanError(
            Reason.INVALID_REQUEST,
            f"group {group!r}: block ids of type {array.dtype} and shape {array.shape} were named.",
            "Name block ids as a flat list of integers.",
        )
    return array.astype(np.int64)
