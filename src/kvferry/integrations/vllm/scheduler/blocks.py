"""Blocks of requests: which a load moves, and references to those that their requests may give up.

vLLM lists a request's blocks by position. A sliding window's list has the null block wherever a block has left the
window, on the prefill side as the prompt ran, on the decode side from the start. A state's list has one block.

vLLM offers to delay a request's end until every worker reports it. The engine then steps a thousand times a second
while blocks are held, and its workers spin on the cores that compute. References in the block pool keep the blocks too,
and the engine can sleep. :class:`Quarantine` keeps the blocks of failed requests while a peer may still write into
them: a peer that has vanished or is stopped cannot acknowledge that it writes no more. The request fails at once; only
its blocks wait. See docs/decisions/quarantined-blocks.md.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvferry.arrays import Integers
from kvferry.errors import HandoffError, Reason
from kvferry.handoff.source import BlockList
from kvferry.layout.shard import CacheKind
from kvferry.peer_log import PeerLog
from kvferry.plan.match import SAME_LAYERS, GroupBlocks, first_token_to_move

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

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
    )


def _check_number_of_groups(groups: Sequence[GroupShape], *lists: Sequence[object]) -> None:
    for each in lists:
        if len(each) != len(groups):
            raise HandoffError(
                Reason.GROUP_MISMATCH,
                f"the prefill engine names blocks of {len(each)} cache groups, this engine has {len(groups)}.",
                SAME_LAYERS,
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


logger = PeerLog(logging.getLogger(__name__))

BlockIds = Sequence[Sequence[int]]


class _Kept(NamedTuple):
    """The blocks under one name; ``last_blocks`` are those at the ends of the cache groups."""

    blocks: "list[KVCacheBlock]"
    block_ids: Integers
    last_blocks: "list[KVCacheBlock]"


class KeptBlocks:
    """One reference per name and block. Only the scheduler's thread uses it.

    Blocks may be *lent* to the pool: they are free, and stay as they are until the pool gives one of them to a request.
    Who else uses a block is counted: the pool's references to it less those of this object.
    """

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._num_references: Integers = np.zeros(0, np.int64)
        """Of this object, to each block of the pool."""
        self._kept: dict[Hashable, _Kept] = {}
        self._lent: dict[Hashable, list[KVCacheBlock]] = {}
        self._lenders: defaultdict[int, set[Hashable]] = defaultdict(set)
        self._used: set[Hashable] = set()

    def bind(self, pool: "BlockPool") -> None:
        """Take references in this pool from now on."""
        self._pool = pool
        self._num_references = np.zeros(len(pool.blocks), np.int64)

    def allow_resets(self, after: Callable[[], None] = lambda: None) -> None:
        """Let the pool reset its prefix cache beside the kept blocks, which stay as they are.

        The pool refuses while a block is used, so its reset is replaced by one that counts the blocks of this object as
        unused. ``after`` is called after each reset that has cleared the prefix cache.
        """
        assert self._pool is not None
        reset = self._pool.reset_prefix_cache
        self._pool.reset_prefix_cache = lambda: self._reset(reset, after)  # type: ignore[method-assign]

    def _reset(self, reset: Callable[[], bool], after: Callable[[], None]) -> bool:
        is_cleared = self._without_references(reset)
        if is_cleared:
            after()
        return is_cleared

    def _without_references(self, reset: Callable[[], bool]) -> bool:
        """Reset a prefix cache while no block has a reference of this object; nobody can be given a block meanwhile."""
        assert self._pool is not None
        kept = [block for each in self._kept.values() for block in each.blocks]
        self._pool.free_blocks(reversed(kept))
        try:
            return reset()
        finally:
            self._pool.touch(kept)

    def keep(self, name: Hashable, block_ids: BlockIds) -> None:
        """Add a reference to each block of a request that still has its own references.

        The null block, in the place of a block that has left a sliding window, needs none.
        """
        assert self._pool is not None
        pool = self._pool
        groups = [[block_id for block_id in group if block_id != NULL_BLOCK_ID] for group in block_ids]
        ids = [block_id for group in groups for block_id in group]
        blocks = [pool.blocks[block_id] for block_id in ids]
        last_blocks = [pool.blocks[group[-1]] for group in groups if group]
        kept = self._kept[name] = _Kept(blocks, np.array(ids, np.int64), last_blocks)
        pool.touch(blocks)
        np.add.at(self._num_references, kept.block_ids, 1)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._kept or name in self._lent

    def are_given_up(self, name: Hashable) -> bool:
        """Return whether the request of these kept blocks has given them up.

        An engine gives the blocks of a request up together, some steps after its end where a step with the request is
        in flight. So they are given up where nobody else uses the last block of a group. Where others use each last
        block, they use the blocks before it too, and the answer is not known before they have given theirs up.
        """
        return any(map(self._is_unshared, self._kept[name].last_blocks))

    @property
    def num_kept(self) -> int:
        """The number of references."""
        return sum(len(each.blocks) for each in self._kept.values())

    @property
    def keeps_alone(self) -> bool:
        """Whether a block is used by nobody else, so that it is free once its references are dropped."""
        return any(self._is_unshared(block) for each in self._kept.values() for block in each.blocks)

    def free(self, name: Hashable) -> None:
        """Drop the references under this name, the tail first, as vLLM does: a prefix stays cached longest."""
        assert self._pool is not None
        if name in self._lent:
            self._forget_lent(name)
        else:
            self._pool.free_blocks(reversed(self._taken_out(name)))

    def lend(self, name: Hashable) -> None:
        """Let the pool give these blocks to others, the tail first; :meth:`take_used` then returns the name."""
        assert self._pool is not None
        blocks = self._lent[name] = self._taken_out(name)
        for block in blocks:
            self._lenders[block.block_id].add(name)
        self._pool.unpin_blocks(reversed(blocks), self._note_use)

    def take_used(self) -> set[Hashable]:
        """Return the names of which the pool has given a lent block to a request, each once."""
        used, self._used = self._used, set()
        return used

    def _taken_out(self, name: Hashable) -> "list[KVCacheBlock]":
        """Forget the blocks under this name, and return them: the caller drops their references."""
        kept = self._kept.pop(name)
        np.add.at(self._num_references, kept.block_ids, -1)
        return kept.blocks

    def _is_unshared(self, block: "KVCacheBlock") -> bool:
        """Return whether nobody but this object uses a block that it keeps."""
        return bool(block.ref_cnt == self._num_references[block.block_id])

    def _note_use(self, block: "KVCacheBlock") -> None:
        # A block may be lent under several names, but the pool remembers one call.
        self._used |= self._lenders.get(block.block_id, set())

    def _forget_lent(self, name: Hashable) -> None:
        self._used.discard(name)
        for block in self._lent.pop(name):
            names = self._lenders[block.block_id]
            names.discard(name)
            if not names:
                del self._lenders[block.block_id]


class Quarantine:
    """The requests into whose blocks a peer may still write, as each rank of the engine reports them.

    The server's thread calls :meth:`note`, the scheduler's thread the other methods.
    """

    def __init__(self, kept_blocks: KeptBlocks, num_ranks: int) -> None:
        self._kept_blocks = kept_blocks
        self._num_ranks = num_ranks
        self._lock = threading.Lock()
        self._reports: dict[int, tuple[int, frozenset[str]]] = {}
        self._has_news = False
        self._agreed: set[tuple[int, str]] = set()
        self._num_blocks: dict[str, int] = {}
        self.num_ever_kept = 0
        """Blocks that were kept so far."""
        self._kept_since: dict[str, float] = {}

    @property
    def has_news(self) -> bool:
        """Whether :meth:`turn` has something to do."""
        return self._has_news

    def note(self, rank: int, number: int, request_ids: Iterable[str]) -> None:
        """Take a rank's report of all its requests into whose blocks a peer may still write; the latest report counts.

        Raises :class:`HandoffError` (invalid-request) for a rank that the engine does not have.
        """
        if rank >= self._num_ranks:
            raise HandoffError(
                Reason.INVALID_REQUEST,
                f"a report names rank {rank}; this engine has {self._num_ranks} ranks.",
                "Only this engine's ranks may report.",
            )
        with self._lock:
            if number > self._reports.get(rank, (0, frozenset()))[0]:
                self._reports[rank] = number, frozenset(request_ids)
                self._has_news = True

    def turn(self, loading: Mapping[str, BlockIds]) -> list[tuple[int, str]]:
        """Keep the blocks of reported requests, and free the blocks of requests that no rank reports any more.

        Return, by rank, the requests whose blocks are kept from now on, so that the rank reports them as failed.
        ``loading`` are the blocks of the requests that the engine waits for; a report of any other request is ignored.
        """
        if not self._has_news:
            return []
        with self._lock:
            self._has_news = False
            reported = {(rank, request_id) for rank, (_, ids) in self._reports.items() for request_id in ids}
        for request_id in {request_id for _, request_id in reported} - self._kept_since.keys():
            if request_id in loading:
                self._kept_blocks.keep(_name(request_id), loading[request_id])
                number = self._num_blocks[request_id] = sum(map(len, loading[request_id]))
                self.num_ever_kept += number
                self._kept_since[request_id] = time.monotonic()
        agreed = {(rank, request_id) for rank, request_id in reported if request_id in self._kept_since}
        for request_id in self._kept_since.keys() - {request_id for _, request_id in agreed}:
            seconds = time.monotonic() - self._kept_since.pop(request_id)
            self._kept_blocks.free(_name(request_id))
            del self._num_blocks[request_id]
            logger.warning(
                "kvferry: no peer writes into the blocks of %s any more: they are free after %.0f s.",
                request_id,
                seconds,
                peer=request_id,
            )
        new, self._agreed = agreed - self._agreed, agreed
        return sorted(new)

    @property
    def num_blocks(self) -> int:
        """Blocks that are kept now."""
        return sum(self._num_blocks.values())

    def num_not_loading(self, loading: Mapping[str, BlockIds]) -> int:
        """Return how many quarantined requests the engine no longer waits for."""
        return len(self._kept_since.keys() - loading.keys())


def _name(request_id: str) -> Hashable:
    # No handle of a hold is equal to it.
    return "quarantine", request_id
