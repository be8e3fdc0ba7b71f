"""The tokens of one request in one cache group, and their blocks at source and destination."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.arrays import Integers
from kvferry.errors import PlanError, Reason
from kvferry.layout.shard import CacheGroup, CacheKind, Shard

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
            "Serve the same model with the same cache settings on both engines.",
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
