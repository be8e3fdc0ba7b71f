"""How an engine forms cache groups from a model's layers, and how large its blocks become.

These are the rules of vLLM 0.32. Layers with equal caches form one group. A model that mixes kinds gets groups of
equally many layers, so that a block of any group takes the same memory. The number is that of the layers of the rarest
kind, or of the most frequent kind where that is less than 1.5 times as many. Kind by kind, in the order of their first
layers, every ``num_groups``-th layer goes to one group, so that each pipeline stage holds layers of every group
(``kv_cache_utils.py``). Where the number does not divide a kind's layers, its groups have fewer.

A state is larger than a block of 16 tokens. vLLM then makes the attention block long enough for its page to hold a
state, and pads the state's page to that size (``platforms/interface.py``). Both sizes depend on the tensor-parallel
size.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.errors import LayoutError, Reason
from kvferry.layout.component import require
from kvferry.layout.group import CacheKind
from kvferry.layout.named_layouts import NamedLayout
from kvferry.models.layer_caches import AttentionCache, LayerCache, state_bytes

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
    return max((state_bytes(cache, tp_size) for cache in caches if not isinstance(cache, AttentionCache)), default=0)


def resolve_block_size(groups: tuple[LayerGroup, ...], block_size: int, tp_size: int) -> int:
    """Return the tokens of an attention block, enlarged until its page holds a state.

    >>> from kvferry.models.layer_caches import Mamba2Cache
    >>> state = Mamba2Cache(intermediate_size=8192, num_groups=1, state_size=128, num_heads=128, head_size=64,
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
