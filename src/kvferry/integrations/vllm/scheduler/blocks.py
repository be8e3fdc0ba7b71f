"""Which blocks of each cache group a load moves, from the lists of block ids of both engines.

vLLM lists a request's blocks by position. A sliding window's list has the null block wherever a block has left the
window, on the prefill side as the prompt ran, on the decode side from the start. A state's list has one block.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.arrays import Integers
from kvferry.errors import HandoffError, Reason
from kvferry.handoff.source import BlockList
from kvferry.layout.shard import CacheKind
from kvferry.plan.request import GroupBlocks, first_token_to_move

NULL_BLOCK_ID = 0
"""The id that vLLM puts in place of a block that a request does not have: the first of the pool, never allocated."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The properties of a group that decide which blocks a load moves; sizes in tokens."""

    kind: CacheKind
    block_size: int
    window: int = 0


def group_name(index: int) -> str:
    """Return the name of a cache group of vLLM, by its index: the same in every pipeline stage and in both engines.

    >>> group_name(0)
    '0'
    """
    return str(index)


def num_recomputed(groups: Iterable[GroupShape]) -> int:
    """Return how many of a prompt's last tokens only the decode engine computes.

    The decode engine always computes the last token, whose logits it needs. If the prefill engine computed it too, a
    state would advance twice by it, and a window could lack the first token that the last one attends to, on either
    engine. Whole attention is not harmed: there the token is loaded and computed once more.

    >>> num_recomputed([GroupShape(CacheKind.ATTENTION, 16)])
    0
    >>> num_recomputed([GroupShape(CacheKind.ATTENTION, 16), GroupShape(CacheKind.SLIDING_WINDOW, 16, 128)])
    1
    """
    whole = (CacheKind.ATTENTION, CacheKind.MLA)
    return 0 if all(group.kind in whole for group in groups) else 1


def has_state(groups: Iterable[GroupShape]) -> bool:
    """Return whether a request has a state, which covers all computed tokens and cannot be cut."""
    return any(group.kind is CacheKind.STATE for group in groups)


def groups_filled_whole(groups: Sequence[GroupShape], source_block_sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the groups whose blocks a load overwrites whole: states, and pages that move whole.

    Where block sizes differ tokens move, and the bytes behind the last token stay. In a hybrid these may be a state's,
    NaN as keys and values; a kernel that gives them weight 0 turns the whole sum into NaN.

    >>> groups_filled_whole([GroupShape(CacheKind.ATTENTION, 544), GroupShape(CacheKind.STATE, 4096)], [288, 4096])
    (1,)
    """
    if len(source_block_sizes) != len(groups):
        return ()
    return tuple(
        index
        for index, (group, source_size) in enumerate(zip(groups, source_block_sizes, strict=True))
        if group.kind is CacheKind.STATE or group.block_size == source_size
    )


def check_filled_whole(groups: Sequence[GroupShape], source_block_sizes: Sequence[int]) -> None:
    """Refuse a load into blocks of which a part stays as it was, for a vLLM that clears none of them.

    Raises :class:`HandoffError` (block-size-mismatch) for a model with states: see :func:`groups_filled_whole`.

    >>> attention, state = GroupShape(CacheKind.ATTENTION, 544), GroupShape(CacheKind.STATE, 1)
    >>> check_filled_whole([attention], [288]), check_filled_whole([attention, state], [544, 1])
    (None, None)
    """
    has_states = any(group.kind is CacheKind.STATE for group in groups)
    if not has_states or len(source_block_sizes) != len(groups):
        return
    if missing := set(range(len(groups))) - set(groups_filled_whole(groups, source_block_sizes)):
        index = min(missing)
        raise HandoffError(
            Reason.BLOCK_SIZE_MISMATCH,
            f"cache group {index}: blocks of {source_block_sizes[index]} tokens go to blocks of "
            f"{groups[index].block_size} in a model with states, and vLLM before 0.32 clears no part of a block.",
            "Run both engines with the same --block-size and --tensor-parallel-size, or with vLLM 0.32.",
        )


def check_cached_windows(
    groups: Sequence[GroupShape], source_block_sizes: Sequence[int], caches_prefixes: bool
) -> None:
    """Refuse windows in blocks that do not divide the source's, for an engine that caches prefixes.

    The source frees tokens that have left the window in its own block size. So a longer block here may be filled from
    the middle on, and vLLM caches a block that lies before the prompt's end as a whole: a later prompt would read bytes
    that were never written. Raises :class:`HandoffError` (block-size-mismatch).

    >>> check_cached_windows([GroupShape(CacheKind.SLIDING_WINDOW, 64, 128)], [128], caches_prefixes=True)
    """
    for index, (group, size) in enumerate(zip(groups, source_block_sizes, strict=False)):
        if caches_prefixes and group.kind is CacheKind.SLIDING_WINDOW and size % group.block_size:
            raise HandoffError(
                Reason.BLOCK_SIZE_MISMATCH,
                f"cache group {index} has sliding windows in blocks of {size} tokens on the prefill side and of "
                f"{group.block_size} here: a load fills such a block in part, and this engine caches the whole block.",
                f"Run this engine with --block-size {size}, or with --no-enable-prefix-caching.",
            )


def blocks_to_load(
    groups: Sequence[GroupShape],
    source_block_sizes: Sequence[int],
    tokens: tuple[int, int],
    block_ids: Sequence[Sequence[int]],
) -> tuple[GroupBlocks, ...]:
    """Return this engine's blocks of each group for the prompt's tokens from ``tokens[0]`` to ``tokens[1]``.

    The lists of ids begin with the prompt's first block and may be longer than the prompt. A source knows its own
    blocks. Raises :class:`HandoffError`: group-mismatch for unequal numbers of groups, invalid-request where a needed
    block is missing.

    >>> window = GroupShape(CacheKind.SLIDING_WINDOW, 16, 20)
    >>> [blocks] = blocks_to_load([window], [16], (0, 64), [[0, 0, 2, 5, 9]])
    >>> blocks.first_token, blocks.destination_ids.tolist()
    (32, [2, 5])
    """
    _check_number_of_groups(groups, source_block_sizes, block_ids)
    sides = zip(groups, source_block_sizes, block_ids, strict=True)
    return tuple(_blocks_of(index, *each, tokens) for index, each in enumerate(sides))


def blocks_up_to(
    groups: Sequence[GroupShape], listed: Sequence[Sequence[int]], num_tokens: int
) -> tuple[Integers, ...]:
    """Return a request's blocks that a load of its first ``num_tokens`` can take, by position.

    Of a state it is the last block of its list, of other groups the blocks up to the prompt's end. Blocks before a
    window are 0, whether vLLM has freed them yet or not. Raises :class:`HandoffError` (group-mismatch) for lists of
    other groups.

    >>> window = GroupShape(CacheKind.SLIDING_WINDOW, 16, 20)
    >>> [ids.tolist() for ids in blocks_up_to([window], [[3, 9, 7, 6, 5]], 64)]
    [[0, 0, 7, 6]]
    """
    _check_number_of_groups(groups, listed)
    return tuple(_up_to(*each, num_tokens) for each in zip(groups, listed, strict=True))


def _up_to(group: GroupShape, listed: Sequence[int], num_tokens: int) -> Integers:
    if group.kind is CacheKind.STATE:
        return np.asarray(listed[-1:], dtype=np.int64)
    ids = np.array(listed[: -(-num_tokens // group.block_size)], dtype=np.int64)
    ids[: _num_before_window(group, num_tokens)] = NULL_BLOCK_ID
    return ids


def _num_before_window(group: GroupShape, num_tokens: int) -> int:
    """Return how many of the first blocks the token after these tokens does not attend to."""
    if group.kind is not CacheKind.SLIDING_WINDOW:
        return 0
    # As vLLM counts: that token attends to the window - 1 tokens before it.
    return max(num_tokens - group.window + 1, 0) // group.block_size


def has_every_block(groups: Sequence[GroupShape], up_to: Sequence[Integers], num_tokens: int) -> bool:
    """Return whether :func:`blocks_up_to` lack none that a load of the tokens takes.

    >>> window = GroupShape(CacheKind.SLIDING_WINDOW, 16, 20)
    >>> [has_every_block([window], [np.array(ids)], 64) for ids in ([0, 0, 7, 6], [0, 0, 7, 0], [0, 0, 7])]
    [True, False, False]
    """
    for group, ids in zip(groups, up_to, strict=True):
        num_blocks = 1 if group.kind is CacheKind.STATE else -(-num_tokens // group.block_size)
        begin = _num_before_window(group, num_tokens)
        if len(ids) < num_blocks or (ids[begin:] == NULL_BLOCK_ID).any():
            return False
    return True


def held_blocks(groups: Sequence[GroupShape], ids: Sequence[Sequence[int]]) -> dict[str, BlockList]:
    """Return the real blocks at the end of each group's list, by group: earlier ones have left a sliding window.

    >>> held_blocks([GroupShape(CacheKind.SLIDING_WINDOW, 16, 20)], [[0, 0, 7, 6]])["0"]
    BlockList(first_token=32, block_ids=[7, 6])
    """
    found = {}
    for index, (group, listed) in enumerate(zip(groups, ids, strict=True)):
        first = _num_before(group, listed)
        begin = 0 if group.kind is CacheKind.STATE else first * group.block_size
        found[group_name(index)] = BlockList(begin, list(listed[first:]))
    return found


def _num_before(group: GroupShape, listed: Sequence[int]) -> int:
    """Return how many blocks precede the held ones: a state has one block, and a window leaves null blocks."""
    if group.kind is CacheKind.STATE:
        return max(len(listed) - 1, 0)
    if group.kind is not CacheKind.SLIDING_WINDOW:
        return 0
    gone = np.flatnonzero(np.asarray(listed, dtype=np.int64) == NULL_BLOCK_ID)
    return int(gone[-1]) + 1 if gone.size else 0


def _first_token(group: GroupShape, source_block_size: int, tokens: tuple[int, int]) -> int:
    if group.kind is not CacheKind.SLIDING_WINDOW:
        return tokens[0]
    return first_token_to_move(
        num_computed_tokens=tokens[1],
        first_token=tokens[0],
        window=group.window,
        source_block_size=source_block_size,
        destination_block_size=group.block_size,
        # Whole pages need equal block sizes; then vLLM's first token begins a block on both sides.
        whole_pages=False,
    )


def _check_number_of_groups(groups: Sequence[GroupShape], *lists: Sequence[object]) -> None:
    for each in lists:
        if len(each) != len(groups):
            raise HandoffError(
                Reason.GROUP_MISMATCH,
                f"the prefill engine names blocks of {len(each)} cache groups, this engine has {len(groups)}.",
                "Serve the same model with the same cache settings.",
            )


def _blocks_of(
    index: int, group: GroupShape, source_block_size: int, listed: Sequence[int], tokens: tuple[int, int]
) -> GroupBlocks:
    if group.kind is CacheKind.STATE:
        # The last block of a list holds the state, which is token 0 to 1.
        return GroupBlocks(
            group=group_name(index),
            first_token=0,
            last_token=1,
            source_block_ids=(),
            destination_block_ids=_last_block(index, listed),
        )
    first, end, size = _first_token(group, source_block_size, tokens), tokens[1], group.block_size
    return GroupBlocks(
        group=group_name(index),
        first_token=first,
        last_token=end,
        source_block_ids=(),
        destination_block_ids=_ids_covering(index, listed, size, first, end),
        destination_first_token=first // size * size,
    )


def _ids_covering(index: int, listed: Sequence[int], block_size: int, first_token: int, end_token: int) -> Integers:
    """Return the ids of the blocks that hold the tokens; every one must be real."""
    if first_token == end_token:
        return np.empty(0, dtype=np.int64)
    first, end = first_token // block_size, -(-end_token // block_size)
    wanted = np.asarray(listed[first:end], dtype=np.int64)
    if len(wanted) < end - first or (wanted == NULL_BLOCK_ID).any():
        missing = first + (int((wanted == NULL_BLOCK_ID).argmax()) if (wanted == NULL_BLOCK_ID).any() else len(wanted))
        raise _missing(index, f"block number {missing} of {len(listed)}, which tokens to {end_token} need")
    return wanted


def _last_block(index: int, listed: Sequence[int]) -> Sequence[int]:
    """Return the block of a state: the last one of its list, which must be real."""
    if len(listed) == 0 or listed[-1] == NULL_BLOCK_ID:
        raise _missing(index, "state")
    return listed[-1:]


def _missing(index: int, what: str) -> HandoffError:
    return HandoffError(
        Reason.INVALID_REQUEST,
        f"cache group {index}: this engine has no {what}.",
        "Report it with the engine's log: vLLM gives a request these blocks before a load.",
    )
