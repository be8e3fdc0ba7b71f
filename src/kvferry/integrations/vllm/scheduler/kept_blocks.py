"""References to blocks that their requests may give up: blocks of ended requests, and blocks that are being copied.

vLLM offers to delay a request's end until every worker reports it. The engine then steps a thousand times a second
while blocks are held, and its workers spin on the cores that compute. References in the block pool keep the blocks too,
and the engine can sleep.

:class:`Quarantine` keeps the blocks of failed requests while a peer may still write into them. A peer that has vanished
or is stopped cannot acknowledge that it writes no more. The request fails at once; only its blocks wait. See
docs/decisions/quarantined-blocks.md.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvferry.arrays import Integers
from kvferry.errors import HandoffError, Reason
from kvferry.integrations.vllm.scheduler.blocks import NULL_BLOCK_ID
from kvferry.peer_log import PeerLog

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

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
                self._kept_since[request_id] = time.monotonic()
        agreed = {(rank, request_id) for rank, request_id in reported if request_id in self._kept_since}
        for request_id in self._kept_since.keys() - {request_id for _, request_id in agreed}:
            seconds = time.monotonic() - self._kept_since.pop(request_id)
            self._kept_blocks.free(_name(request_id))
            logger.warning(
                "kvferry: no peer writes into the blocks of %s any more: they are free after %.0f s.",
                request_id,
                seconds,
                peer=request_id,
            )
        new, self._agreed = agreed - self._agreed, agreed
        return sorted(new)

    def num_not_loading(self, loading: Mapping[str, BlockIds]) -> int:
        """Return how many quarantined requests the engine no longer waits for."""
        return len(self._kept_since.keys() - loading.keys())

    def snapshot(self, now: float) -> dict[str, float]:
        """Return the quarantined requests and for how many seconds their blocks have been kept."""
        return {request_id: now - since for request_id, since in sorted(self._kept_since.items())}


def _name(request_id: str) -> Hashable:
    # No handle of a hold is equal to it.
    return "quarantine", request_id
