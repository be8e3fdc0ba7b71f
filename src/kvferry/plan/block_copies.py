"""Plans within one process as strided copies: the other form, beside descriptors, to which a template is lowered."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.arrays import Descriptors, Integers
from kvferry.plan.match import GroupBlocks
from kvferry.plan.planner import PairPlan, StridedCopy


@dataclass(frozen=True, slots=True, eq=False)
class BlockCopies:
    """One strided copy, made for each pair of blocks.

    ``copy`` has the addresses in block 0; block b begins ``b * *_block_stride`` bytes later.
    """

    copy: StridedCopy
    source_block_stride: int
    destination_block_stride: int
    source_blocks: Integers
    destination_blocks: Integers

    @property
    def block_bytes(self) -> int:
        """Bytes of one pair of blocks."""
        return self.copy.num_runs * self.copy.run_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all pairs."""
        return self.block_bytes * len(self.source_blocks)

    def descriptors(self) -> Descriptors:
        """Return every run as a row of source address, destination address and length, for the proof."""
        strides = np.array([self.source_block_stride, self.destination_block_stride], dtype=np.int64)
        places = np.stack((self.source_blocks, self.destination_blocks), axis=1) * strides
        runs = self.copy.expand()
        rows = np.repeat(runs[None], len(places), axis=0)
        rows[:, :, :2] += places[:, None]
        return rows.reshape(-1, 3).astype(np.uint64)


def block_copies(plan: PairPlan, requests: Sequence[GroupBlocks]) -> list[BlockCopies]:
    """Return the copies of these requests from one source; a group that only another source serves adds none.

    In contrast to :meth:`PairPlan.lower` the requests need not name every group: a tier keeps each group's blocks on
    their own. Raises :class:`PlanError` (``invalid-request``) for blocks that do not fit.

    >>> from kvferry.layout.named_layouts import NamedLayout
    >>> from kvferry.layout.slab import slab_shard
    >>> from kvferry.plan.planner import Planner
    >>> from kvferry.models.groups import AttentionCache, RankMemory, form_groups, model_shard
    >>> groups = form_groups(dict.fromkeys("01", AttentionCache(num_kv_heads=2, head_size=4, itemsize=2)))
    >>> rank = model_shard(groups, frozenset("01"), RankMemory(layout=NamedLayout.LBHNC, block_size=4, num_blocks=9))
    >>> plan, = Planner([rank], slab_shard([rank], {"full": 5})).plans(0)
    >>> copies, = block_copies(plan, [GroupBlocks(group="full", first_token=0, last_token=8, source_block_ids=[7, 2],
    ...     destination_block_ids=[3, 4])])
    >>> copies.copy.run_bytes, copies.copy.loops, copies.block_bytes
    (64, ((2, 1152, 64), (2, 64, 128)), 256)
    """
    found = []
    for name, group in plan.groups.items():
        asked = [blocks for blocks in requests if blocks.group == name]
        for phase, source_blocks, destination_blocks in group.pairs(asked) if asked else ():
            for template in group.templates(phase):
                strides = template.source_block_stride, template.destination_block_stride
                found += [BlockCopies(copy, *strides, source_blocks, destination_blocks) for copy in template.copies]
    return found
