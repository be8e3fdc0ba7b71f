"""The bytes that a source writes, through vLLM's own views."""

import ctypes

from kvferry.plan.match import GroupBlocks
from kvferry.plan.planner import Planner

from ..local.test_write_plan import pushed
from .vllm_caches import CacheRank, full, window


def test_a_hybrid_arrives_through_vllms_views() -> None:
    """Windows and whole attention, other block sizes on both sides, a prefix hit within a block."""
    layers = {"0": window, "1": window, "2": full, "3": window, "4": full}
    sides = [
        [CacheRank({name: spec(tp) for name, spec in layers.items()}, layout, (rank, tp)) for rank in range(tp)]
        for tp, layout in ((2, "BLHNC"), (1, "LBHNC"))
    ]
    requests = [
        GroupBlocks(
            group=str(group),
            first_token=0,
            last_token=32,
            source_block_ids=[2 * group + 1, 2 * group + 2],
            destination_block_ids=[10 - 2 * group, 9 - 2 * group],
        )
        for group in range(3)
    ]
    sources, [target] = sides
    for source in sources:
        source.label(requests)
    for plan in Planner([source.shard for source in sources], target.shard).plans(0):
        for source_address, address, length in pushed(plan, requests, (7, 20)):
            ctypes.memmove(address, source_address, length)
    target.check(requests, 32)
