"""References to the blocks of finished requests, so that the engine may forget the requests.

vLLM offers to delay a request's end until every worker reports it; the engine then steps a
thousand times a second while anything is held, and its workers spin on the cores that compute.
A reference in the block pool holds the blocks as well and lets the engine sleep.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvferry.integrations.vllm.scheduler.blocks import NULL_BLOCK_ID

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class HeldBlocks:
    """One reference per hold and block, under a name of its own; used on the scheduler's thread only."""

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._blocks: dict[str, list[KVCacheBlock]] = {}

    def bind(self, pool: "BlockPool") -> None:
        """Take references in this pool from now on."""
        self._pool = pool

    def hold(self, name: str, block_ids: Sequence[Sequence[int]]) -> None:
        """Add a reference to each block of the request, which still has its own.

        Where a block has left a sliding window, the null block stands, which nobody owns.
        """
        assert self._pool is not None
        held = (block_id for group in block_ids for block_id in group if block_id != NULL_BLOCK_ID)
        blocks = [self._pool.blocks[block_id] for block_id in held]
        self._pool.touch(blocks)
        self._blocks[name] = blocks

    def free(self, name: str) -> None:
        """Drop the hold's references, the tail first, as vLLM does: a prefix stays cached longest."""
        assert self._pool is not None
        self._pool.free_blocks(reversed(self._blocks.pop(name)))
