"""Shards in the layouts of engines, and a move between ranks that compares every byte."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import CacheGroup, CacheKind, Region, Shard, heads_of_rank
from kvferry.layout.states import ConvOrder, StatePages, conv_components, mamba2_segments, recurrent_component
from kvferry.plan.match import GroupBlocks
from kvferry.plan.planner import Planner
from kvferry.plan.proof import verify_destination

from ..support.dense import shard_for
from ..support.oracle import Arena, OracleMismatch, check_moved, strided_memory

BLOCKS = 12


def moved(sources: Sequence[Shard], destinations: Sequence[Shard], *requests: GroupBlocks) -> list[np.ndarray]:
    """Move in real memory, compare every byte, and return the rows of each pair."""
    arena = Arena(sum(region.length for shard in (*sources, *destinations) for region in shard.regions))
    held = [strided_memory(arena, shard) for shard in sources]
    filled = [strided_memory(arena, shard) for shard in destinations]
    rows = []
    for rank in filled:
        plans = Planner([source.shard for source in held], rank.shard).plans(0)
        lists = [(plan.source, plan.lower(requests)) for plan in plans]
        verify_destination(lists, rank.shard, requests)
        rows += [found for _, found in lists]
    check_moved(arena, held, filled, requests, np.concatenate(rows))
    with pytest.raises(OracleMismatch):
        check_moved(arena, held, filled, requests, np.concatenate(rows)[1:])
    return rows


def ask(group: str, tokens: int, source_ids: Sequence[int], destination_ids: Sequence[int], **more: int) -> GroupBlocks:
    values = {"first_token": 0, **more}
    return GroupBlocks(
        group=group, last_token=tokens, source_block_ids=source_ids, destination_block_ids=destination_ids, **values
    )


def state_group(
    tp_rank: int,
    tp_size: int,
    pages: StatePages,
    order: ConvOrder = ConvOrder.SD,
    num_groups: int = 1,
) -> CacheGroup:
    """Mamba2 with 4 heads of 2 channels and a state of 3: a bfloat16 convolution of 3 taps, a float32 state."""
    segments = mamba2_segments(8, num_groups, 3, tp_rank, tp_size)
    conv = conv_components(pages, segments, state_len=3, order=order, itemsize=2)
    conv_bytes = sum(len(segment.held) for segment in segments) * 3 * 2
    heads = heads_of_rank(4, tp_rank, tp_size)
    state = recurrent_component(pages, heads, 4, num_channels=6, itemsize=4, page_offset=conv_bytes)
    return CacheGroup(name="state", kind=CacheKind.STATE, block_size=1, num_blocks=BLOCKS, components=(*conv, state))


def attention(rank: int, size: int, layers: Sequence[str], **changes: object) -> Shard:
    values: dict[str, object] = {
        "layers": layers,
        "num_kv_heads": 2,
        "head_size": 3,
        "itemsize": 2,
        "block_size": 4,
        "num_blocks": BLOCKS,
        "layout": NamedLayout.BLHNC,
        "group_name": "full",
        "tp_rank": rank,
        "tp_size": size,
    }
    return shard_for(**{**values, **changes})  # type: ignore[arg-type]


def hybrid(tp_rank: int, tp_size: int, order: ConvOrder = ConvOrder.SD, num_groups: int = 1) -> Shard:
    """Lay groups over each other as vLLM does: rows of one length, whose slot l is layer l of each group.

    Global layers 0 to 5 are dealt to the groups in turn, so that no group's local index is a global range.
    """
    full = attention(tp_rank, tp_size, ["0", "2", "4"]).groups[0]
    page = max(full.components[0].layer_offsets[1], 512)
    stride = 3 * page + 32
    offsets = [slot * page for slot in range(3)]
    (kv,) = full.components
    kv = msgspec.structs.replace(kv, layer_offsets=tuple(offsets), block_stride=stride)
    pages = StatePages(layers=["1", "3", "5"], layer_offsets=offsets, block_stride=stride)
    groups = (
        msgspec.structs.replace(full, components=(kv,)),
        state_group(tp_rank, tp_size, pages, order, num_groups=num_groups),
    )
    region = Region(0, BLOCKS * stride)
    return Shard(regions=(region,), groups=groups, tp_rank=tp_rank, tp_size=tp_size)


FULL = ask("full", 10, [9, 3, 7], [4, 5, 6])
STATE = ask("state", 1, [5], [2])
