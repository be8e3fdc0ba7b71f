"""The shard of one rank for a whole model: one flat region that all groups overlay.

These are the rules of vLLM 0.32 (``get_kv_cache_config_from_groups``, ``compute_layout_strides``): every group begins
at byte 0, and no two groups use the same block id. In a cross-layer layout every block is as long as the block of the
group with most layers; a group with fewer layers leaves the tail unused. In any other layout a layer's pages of all
blocks are contiguous.
"""

from dataclasses import dataclass

from kvferry.errors import LayoutError, Reason
from kvferry.layout.component import Component, require
from kvferry.layout.group import CacheGroup, CacheKind
from kvferry.layout.named_layouts import Axis, NamedLayout
from kvferry.layout.shard import Region, Shard
from kvferry.layout.states import ConvOrder, StatePages, conv_components, padding_components, recurrent_component
from kvferry.models.groups import LayerGroup, page_bytes, possible_layout
from kvferry.models.layer_caches import (
    AttentionCache,
    StateCache,
    conv_bytes,
    recurrent_itemsize,
    state_bytes,
    state_heads,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """One rank's memory: rank, layout, blocks of ``block_size`` tokens, address of the first byte."""

    layout: NamedLayout
    block_size: int
    num_blocks: int
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    base_address: int = 0


def model_shard(groups: tuple[LayerGroup, ...], layers: frozenset[str], memory: RankMemory) -> Shard:
    """Return what a rank holds of a model. ``layers`` are those of the rank's pipeline stage.

    ``memory.block_size`` is the resolved one (see :func:`kvferry.models.groups.resolve_block_size`). Raises
    :class:`LayoutError` (``invalid-layout``) for a layout that cannot hold pages of these groups.

    >>> from kvferry.models.groups import form_groups
    >>> full, slides = (AttentionCache(num_kv_heads=2, head_size=64, itemsize=2, window=size) for size in (0, 128))
    >>> groups = form_groups({str(layer): full if layer == 2 else slides for layer in range(3)})
    >>> model_shard(groups, frozenset("012"), RankMemory(layout=NamedLayout.BHLNC, block_size=16, num_blocks=10))
    rank tp 0/1 [cpu 0x0 + 81920]
    sliding-window-0 (sliding-window, 10 blocks of 16 tokens, window 128, heads 0:2 of 2)
      kv LBHNC: base + b*8192 + h*4096 + n*256 + c*2
    sliding-window-1 (sliding-window, 10 blocks of 16 tokens, window 128, heads 0:2 of 2)
      kv LBHNC: base + b*8192 + h*4096 + n*256 + c*2
    full (attention, 10 blocks of 16 tokens, heads 0:2 of 2)
      kv LBHNC: base + b*8192 + h*4096 + n*256 + c*2
    """
    if possible_layout(groups, memory.layout) is not memory.layout:
        what = f"states and attention cannot share blocks in layout {memory.layout}."
        raise LayoutError(Reason.INVALID_LAYOUT, what, f"Use {possible_layout(groups, memory.layout)}.")
    held = [(group, tuple(layer for layer in group.layers if layer in layers)) for group in groups]
    held = [(group, own) for group, own in held if own]
    require(bool(held), "a pipeline stage without layers has no cache.")
    page = page_bytes(groups, memory.block_size, memory.tp_size)
    row = page * max(len(own) for _, own in held)
    return Shard(
        regions=(Region(memory.base_address, row * memory.num_blocks),),
        groups=tuple(_group(group, own, memory, page, row) for group, own in held),
        tp_rank=memory.tp_rank,
        tp_size=memory.tp_size,
        pp_rank=memory.pp_rank,
        pp_size=memory.pp_size,
    )


def _group(group: LayerGroup, layers: tuple[str, ...], memory: RankMemory, page: int, row: int) -> CacheGroup:
    cache = group.cache
    if isinstance(cache, AttentionCache):
        components: tuple[Component, ...] = (_attention(cache, layers, memory, page, row),)
    else:
        components = _state(cache, layers, memory, page, row)
    return CacheGroup(
        name=group.name,
        kind=group.kind,
        block_size=1 if group.kind is CacheKind.STATE else memory.block_size,
        num_blocks=memory.num_blocks,
        components=components,
        window=cache.window,
    )


def _attention(cache: AttentionCache, layers: tuple[str, ...], memory: RankMemory, page: int, row: int) -> Component:
    heads = cache.heads(memory.tp_rank, memory.tp_size)
    content = cache.num_channels * cache.itemsize
    sizes = {Axis.H: len(heads), Axis.N: memory.block_size, Axis.C: content}
    strides = _strides(memory, {Axis.L: len(layers), Axis.B: memory.num_blocks, **sizes}, page, row)
    return Component(
        name="latent" if cache.is_latent else "kv",
        layers=layers,
        layer_offsets=tuple(index * strides[Axis.L] for index in range(len(layers))),
        heads=(heads,),
        total_heads=1 if cache.is_latent else cache.num_kv_heads,
        num_channels=cache.num_channels,
        itemsize=cache.itemsize,
        block_stride=strides[Axis.B],
        head_stride=strides[Axis.H],
        token_stride=strides[Axis.N],
        channel_stride=cache.itemsize,
    )


def _state(
    cache: StateCache, layers: tuple[str, ...], memory: RankMemory, page: int, row: int
) -> tuple[Component, ...]:
    sizes = {Axis.L: len(layers), Axis.B: memory.num_blocks, Axis.H: 1, Axis.N: 1, Axis.C: 1}
    strides = _strides(memory, sizes, page, row)
    offsets = [index * strides[Axis.L] for index in range(len(layers))]
    pages = StatePages(layers=layers, layer_offsets=offsets, block_stride=strides[Axis.B])
    segments = cache.segments(memory.tp_rank, memory.tp_size)
    taps = cache.kernel_size - 1
    conv = conv_components(pages, segments, state_len=taps, order=ConvOrder.SD, itemsize=cache.itemsize)
    recurrent = recurrent_component(
        pages,
        state_heads(cache, memory.tp_rank, memory.tp_size),
        cache.num_heads,
        num_channels=cache.state_channels,
        itemsize=recurrent_itemsize(cache),
        page_offset=conv_bytes(cache, memory.tp_size),
    )
    padding = padding_components(pages, state_bytes(cache, memory.tp_size), page, memory.tp_rank, memory.tp_size)
    return (*conv, recurrent, *padding)


def _strides(memory: RankMemory, sizes: dict[Axis, int], page: int, row: int) -> dict[Axis, int]:
    """Return strides in bytes: pages are dense and ``page`` bytes long, cross-layer blocks ``row`` bytes."""
    order = memory.layout.order
    inner_of_pages = max(order.index(Axis.L), order.index(Axis.B))
    strides: dict[Axis, int] = {}
    stride = 1
    for position in reversed(range(len(order))):
        axis = order[position]
        if position == inner_of_pages == 1:
            stride = page
        if axis is Axis.B and memory.layout.is_cross_layer:
            stride = row
        strides[axis] = stride
        stride *= sizes[axis]
    return strides
