"""The trial at start without an engine, for ``kvferry doctor --device``: a small cache of one layout on a device."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kvferry.execution import device_memory
from kvferry.execution.device import DeviceOrder
from kvferry.execution.trial import Trial, TrialResult, open_side
from kvferry.layout.dense import shard_for
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import Shard
from kvferry.plan.digest_cells import Integrity
from kvferry.transport.registry import TransportSet

if TYPE_CHECKING:
    import torch

LAYERS, NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, HEAD_SIZE, ITEMSIZE = ("0", "1", "2", "3"), 8, 8, 16, 128, 2
"""Numbers of two bytes."""


def try_device(order: DeviceOrder, layout: NamedLayout, *, opens: Callable[[], TransportSet]) -> TrialResult:
    """Run the trial of a rank with a small cache of this layout.

    Raises :class:`TransportError` (``trial-failed``), and the errors of ``opens`` and of registration.
    """
    order.enter_thread()
    shard, memory = small_cache(layout, order.device)
    side = open_side(shard, opens)
    try:
        return Trial(side, views_of(shard), order, opens, layout, Integrity.FULL).run()
    finally:
        side.close()
        del memory


def small_cache(layout: NamedLayout, device: str) -> "tuple[Shard, torch.Tensor]":
    """Return a dense cache on a device, and its memory, which lives as long as the tensor."""
    shard = shard_for(
        layers=LAYERS,
        num_kv_heads=NUM_HEADS,
        head_size=HEAD_SIZE,
        itemsize=ITEMSIZE,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        layout=layout,
    )
    return device_memory.placed(shard, device)


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
