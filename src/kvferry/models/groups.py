"""The caches of a model's layers, the groups that an engine forms from them, and the shard of a rank.

These are the rules of vLLM 0.32. Layers with equal caches form one group. A model that mixes kinds gets groups of
equally many layers, so that a block of any group takes the same memory. The number is that of the layers of the rarest
kind, or of the most frequent kind where that is less than 1.5 times as many. Kind by kind, in the order of their first
layers, every ``num_groups``-th layer goes to one group, so that each pipeline stage holds layers of every group
(``kv_cache_utils.py``). Where the number does not divide a kind's layers, its groups have fewer.

A state is larger than a block of 16 tokens. vLLM then makes the attention block long enough for its page to hold a
state, and pads the state's page to that size (``platforms/interface.py``). Both sizes depend on the tensor-parallel
size.

A shard is one flat region that all groups overlay (``get_kv_cache_config_from_groups``, ``compute_layout_strides``):
every group begins at byte 0, and no two groups use the same block id. In a cross-layer layout every block is as long as
the block of the group with most layers; a group with fewer layers leaves the tail unused. In any other layout a layer's
pages of all blocks are contiguous.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvferry.errors import LayoutError, Reason
from kvferry.layout.named_layouts import Axis, NamedLayout
from kvferry.layout.shard import CacheGroup, CacheKind, Component, HeadRange, Region, Shard, heads_of_rank, require
from kvferry.layout.states import (
    ConvOrder,
    ConvSegment,
    StatePages,
    conv_components,
    padding_components,
    recurrent_component,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCache:
    """Keys and values of one layer, or its latent vectors. ``head_size`` is the width of K, of V, or of the latent.

    >>> AttentionCache(num_kv_heads=8, head_size=128, itemsize=2).page_bytes(16, tp_size=2)
    32768
    """

    num_kv_heads: int
    head_size: int
    itemsize: int
    window: int = 0
    is_latent: bool = False

    @property
    def kind(self) -> CacheKind:
        """The kind of group that such layers form."""
        if self.is_latent:
            return CacheKind.MLA
        return CacheKind.SLIDING_WINDOW if self.window else CacheKind.ATTENTION

    @property
    def num_channels(self) -> int:
        """Numbers per head and token."""
        return self.head_size * (1 if self.is_latent else 2)

    def heads(self, tp_rank: int, tp_size: int) -> HeadRange:
        """Return the global heads of a rank; every rank holds the latent."""
        return HeadRange(0, 1) if self.is_latent else heads_of_rank(self.num_kv_heads, tp_rank, tp_size)

    def page_bytes(self, block_size: int, tp_size: int) -> int:
        """Return the bytes of one block of this layer on one rank."""
        return len(self.heads(0, tp_size)) * block_size * self.num_channels * self.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCache:
    """The state of one layer: a convolution, which keeps ``kernel_size - 1`` inputs, and a recurrent state.

    ``split`` of ``sizes``, a rank and the number of ranks are the convolution's segments on that rank. The recurrent
    state has ``num_heads`` of ``num_channels``; ``recurrent_itemsize`` is given where its dtype is another one.

    >>> from kvferry.layout.states import mamba2_segments
    >>> StateCache(split=mamba2_segments, sizes=(8192, 1, 128), num_heads=128, num_channels=64 * 128, kernel_size=4,
    ...     itemsize=2).num_bytes(tp_size=2)
    1074688
    """

    split: Callable[..., tuple[ConvSegment, ...]]
    sizes: tuple[int, ...]
    num_heads: int
    num_channels: int
    kernel_size: int
    itemsize: int
    recurrent_itemsize: int | None = None
    kind: ClassVar = CacheKind.STATE
    window: ClassVar = 0

    @property
    def state_itemsize(self) -> int:
        """Bytes of one number of the recurrent state."""
        return self.recurrent_itemsize or self.itemsize

    def segments(self, tp_rank: int, tp_size: int) -> tuple[ConvSegment, ...]:
        """Return the segments of the convolution's channels that a rank holds."""
        return self.split(*self.sizes, tp_rank, tp_size)

    def heads(self, tp_rank: int, tp_size: int) -> HeadRange:
        """Return the heads of the recurrent state that a rank holds: split evenly, never replicated."""
        what = f"{self.num_heads} heads of a state cannot be split over {tp_size} ranks."
        require(self.num_heads >= tp_size, what, "Use ranks that divide them.")
        return heads_of_rank(self.num_heads, tp_rank, tp_size)

    def conv_bytes(self, tp_size: int) -> int:
        """Return the bytes of the convolution's inputs that one layer keeps on one rank."""
        channels = sum(len(segment.held) for segment in self.segments(0, tp_size))
        return channels * (self.kernel_size - 1) * self.itemsize

    def num_bytes(self, tp_size: int) -> int:
        """Return the bytes of one layer's whole state on one rank."""
        return self.conv_bytes(tp_size) + len(self.heads(0, tp_size)) * self.num_channels * self.state_itemsize


LayerCache = AttentionCache | StateCache


KERNEL_BLOCK_SIZE = 16
"""Tokens of the smallest block that vLLM's GPU attention kernels support."""
COMPACT_LAYOUTS = (NamedLayout.BLHNC, NamedLayout.BLNHC, NamedLayout.LBHNC, NamedLayout.LBNHC)
"""Layouts in which each layer's page is contiguous, so that pages of any shape can share blocks."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share block ids; all have the same cache."""

    name: str
    cache: LayerCache
    layers: tuple[str, ...]

    @property
    def kind(self) -> CacheKind:
        """The kind of the group."""
        return self.cache.kind


def form_groups(caches: Mapping[str, LayerCache]) -> tuple[LayerGroup, ...]:
    """Return the groups of a model, given the cache of each layer, in layer order.

    Raises :class:`LayoutError` (``unsupported``) for attention layers of different widths.

    >>> full, slides = (AttentionCache(num_kv_heads=2, head_size=64, itemsize=2, window=size) for size in (0, 128))
    >>> for group in form_groups({str(layer): full if layer % 3 == 2 else slides for layer in range(8)}):
    ...     print(group.name, *group.layers)
    sliding-window-0 0 4
    sliding-window-1 1 6
    sliding-window-2 3 7
    full 2 5
    """
    require(bool(caches), "a model without layers has no cache.")
    _refuse_unequal_widths(caches)
    kinds: dict[LayerCache, list[str]] = {}
    for layer, cache in caches.items():
        kinds.setdefault(cache, []).append(layer)
    sizes = [len(layers) for layers in kinds.values()]
    group_size = max(sizes) if max(sizes) < 1.5 * min(sizes) else min(sizes)
    split = [
        (cache, tuple(layers[first::num_groups]))
        for cache, layers in kinds.items()
        for num_groups in (-(-len(layers) // group_size),)
        for first in range(num_groups)
    ]
    names = _names([cache for cache, _ in split])
    return tuple(LayerGroup(name, cache, layers) for name, (cache, layers) in zip(names, split, strict=True))


def _refuse_unequal_widths(caches: Mapping[str, LayerCache]) -> None:
    attention = [cache for cache in caches.values() if isinstance(cache, AttentionCache)]
    widths = {(cache.num_kv_heads, cache.num_channels, cache.itemsize) for cache in attention}
    if len(widths) > 1:
        what = f"the attention layers differ in (heads, channels, item size): {sorted(widths)}."
        raise LayoutError(Reason.UNSUPPORTED, what, "Plan models whose attention layers are equally wide.")


def _names(caches: list[LayerCache]) -> list[str]:
    names = ["full" if cache.kind is CacheKind.ATTENTION else cache.kind.value for cache in caches]
    total, seen = Counter(names), Counter[str]()
    numbered = []
    for name in names:
        numbered.append(name if total[name] == 1 else f"{name}-{seen[name]}")
        seen[name] += 1
    return numbered


def possible_layout(groups: tuple[LayerGroup, ...], wanted: NamedLayout) -> NamedLayout:
    """Return the wanted layout, or for states beside attention the nearest one that can hold pages of both shapes.

    >>> attention = AttentionCache(num_kv_heads=2, head_size=64, itemsize=2)
    >>> possible_layout(form_groups({"0": attention}), NamedLayout.BHLNC).value
    'BHLNC'
    """
    is_mixed = len({group.kind is CacheKind.STATE for group in groups}) > 1
    if not is_mixed or wanted in COMPACT_LAYOUTS:
        return wanted
    return NamedLayout.BLHNC if wanted.is_cross_layer else NamedLayout.LBHNC


def largest_state(groups: tuple[LayerGroup, ...], tp_size: int) -> int:
    """Return the bytes of the largest state of a layer on one rank; 0 without states."""
    caches = [group.cache for group in groups]
    return max((cache.num_bytes(tp_size) for cache in caches if isinstance(cache, StateCache)), default=0)


def resolve_block_size(groups: tuple[LayerGroup, ...], block_size: int, tp_size: int) -> int:
    """Return the tokens of an attention block, enlarged until its page holds a state.

    >>> from kvferry.layout.states import mamba2_segments
    >>> state = StateCache(split=mamba2_segments, sizes=(8192, 1, 128), num_heads=128, num_channels=64 * 128,
    ...     kernel_size=4, itemsize=2)
    >>> groups = form_groups({"0": state, "1": AttentionCache(num_kv_heads=8, head_size=128, itemsize=2)})
    >>> [resolve_block_size(groups, 16, tp_size) for tp_size in (1, 2, 16)]
    [528, 528, 272]
    """
    attention = next((group.cache for group in groups if isinstance(group.cache, AttentionCache)), None)
    state = largest_state(groups, tp_size)
    if attention is None or not state:
        return block_size
    step = max(KERNEL_BLOCK_SIZE, block_size)
    return step * -(-state // (step * attention.page_bytes(1, tp_size)))


def page_bytes(groups: tuple[LayerGroup, ...], block_size: int, tp_size: int) -> int:
    """Return the bytes of one layer's page of any group on one rank. ``block_size`` is the resolved one."""
    attention = [group.cache for group in groups if isinstance(group.cache, AttentionCache)]
    return max([largest_state(groups, tp_size), *(cache.page_bytes(block_size, tp_size) for cache in attention)])


def split_layers(num_layers: int, pp_size: int) -> tuple[int, ...]:
    """Return the number of layers of each pipeline stage; surplus layers go to the stages just before the last.

    >>> split_layers(36, 2), split_layers(62, 4)
    ((18, 18), (15, 16, 16, 15))
    """
    what = f"{num_layers} layers cannot be split over {pp_size} pipeline stages."
    require(0 < pp_size <= num_layers, what, "Use no more stages than layers.")
    each, rest = divmod(num_layers, pp_size)
    return tuple(each + (pp_size - 1 - rest <= stage < pp_size - 1) for stage in range(pp_size))


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
        cache.heads(memory.tp_rank, memory.tp_size),
        cache.num_heads,
        num_channels=cache.num_channels,
        itemsize=cache.state_itemsize,
        page_offset=cache.conv_bytes(memory.tp_size),
    )
    padding = padding_components(pages, cache.num_bytes(memory.tp_size), page, memory.tp_rank, memory.tp_size)
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
