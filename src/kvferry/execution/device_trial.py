"""The trial at start without an engine, for ``kvferry doctor --device``: a small cache of one layout on a device."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from kvferry.execution import device_memory
from kvferry.execution.device import DeviceOrder
from kvferry.execution.digests import DigestTable
from kvferry.execution.guard_words import GuardWords, Scratch
from kvferry.execution.stage import Stage
from kvferry.execution.trial import DIGESTS_BYTES, STAGE_BYTES, Side, Trial, TrialResult
from kvferry.layout.dense import shard_for
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import Region, Shard
from kvferry.plan.digest_cells import Integrity
from kvferry.plan.staging.strategy import Strategy
from kvferry.transport.registry import TransportSet

if TYPE_CHECKING:
    import torch

LAYERS, NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, HEAD_SIZE, ITEMSIZE = ("0", "1", "2", "3"), 8, 8, 16, 128, 2
"""Numbers of two bytes."""


def try_device(
    order: DeviceOrder,
    layout: NamedLayout,
    opens: Callable[[], TransportSet],
    strategies: Sequence[Strategy],
    integrity: Integrity = Integrity.FULL,
    *,
    pushes: bool = False,
) -> TrialResult:
    """Run the trial in a small cache of this layout. Raises :class:`TransportError` (``trial-failed``), and the errors
    of ``opens`` and of registration.
    """
    order.enter_thread()
    shard, memory = small_cache(layout, order.device)
    views = views_of(shard)
    words, scratch, stage = GuardWords(num_slots=1), Scratch(num_words=1), Stage(STAGE_BYTES, order)
    digests = Stage(DIGESTS_BYTES)
    table = None if pushes else DigestTable(shard, integrity)
    regions = [*shard.regions, scratch.region, stage.region, digests.region]
    regions += [Region(words.address, words.array.nbytes), *([] if table is None else [table.region])]
    transports = opens()
    try:
        end_points = transports.register(regions)
        side = Side(shard, transports, end_points, scratch, None if pushes else words, stage, table, digests)
        return Trial(side, views, order, opens, strategies, integrity, f"layout {layout}, ").run()
    finally:
        transports.close()
        stage.close()
        del memory


def small_cache(layout: NamedLayout, device: str) -> "tuple[Shard, object]":
    """Return a dense cache on a device, and what keeps its memory."""
    shard = shard_for(
        layers=LAYERS,
        num_kv_heads=NUM_HEADS,
        head_size=HEAD_SIZE,
        itemsize=ITEMSIZE,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        layout=layout,
    )
    length = shard.regions[0].length
    memory, address = device_memory.allocate(length, device)
    return msgspec.structs.replace(shard, regions=(Region(address, length, device),)), memory


def views_of(shard: Shard) -> "Mapping[str, torch.Tensor]":
    """Return the views of an engine: for each layer ``[block, head, token, channel]`` in numbers of two bytes."""
    import torch

    component = shard.groups[0].components[0]
    numbers = device_memory.as_bytes(shard.regions[0]).view(torch.int16)
    strides = (component.block_stride, component.head_stride, component.token_stride, component.channel_stride)
    shape = NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, component.num_channels
    in_numbers = tuple(stride // ITEMSIZE for stride in strides)
    return {
        layer: torch.as_strided(numbers, shape, in_numbers, offset // ITEMSIZE)
        for layer, offset in zip(component.layers, component.layer_offsets, strict=True)
    }
