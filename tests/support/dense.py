"""Shards of dense caches, from the sizes of a cache and a named layout."""

from collections.abc import Mapping, Sequence
from enum import StrEnum

from kvferry.layout.named_layouts import Axis, NamedLayout
from kvferry.layout.shard import (
    HOST_DEVICE,
    WHOLE,
    Atom,
    CacheGroup,
    CacheKind,
    Component,
    HeadRange,
    Region,
    Shard,
    TokenShare,
    heads_of_rank,
    require,
)


class Content(StrEnum):
    """How keys and values share the content axis."""

    FUSED = "fused"
    """One component ``kv``: K and V of a head and token side by side."""
    INTERLEAVED = "interleaved"
    """The same memory as FUSED, described as two components ``k`` and ``v``."""
    PLANES = "planes"
    """In each page a K plane ``[token][channel]``, then a V plane ``[token][channel]``."""
    TRANSPOSED_KEYS = "transposed-keys"
    """In each page a K plane ``[channel][token]``, then a V plane ``[token][channel]`` (vLLM's CPU attention)."""
    APART = "apart"
    """All of K in the first half of the memory and all of V in the second."""


def dense_strides(layout: NamedLayout, sizes: Mapping[Axis, int]) -> dict[Axis, int]:
    """Return the stride of each axis of a dense array, in the unit of the size of C."""
    strides: dict[Axis, int] = {}
    stride = 1
    for axis in reversed(layout.order):
        strides[axis] = stride
        stride *= sizes[axis]
    return strides


def shard_for(
    *,
    layers: Sequence[str],
    num_kv_heads: int,
    head_size: int,
    itemsize: int,
    block_size: int,
    num_blocks: int,
    layout: NamedLayout,
    tp_rank: int = 0,
    tp_size: int = 1,
    pp_rank: int = 0,
    pp_size: int = 1,
    kind: CacheKind = CacheKind.ATTENTION,
    content: Content = Content.FUSED,
    value_head_size: int | None = None,
    packing: str = "",
    base_address: int = 0,
    device: str = HOST_DEVICE,
    group_name: str = "full",
    window: int = 0,
    token_share: TokenShare = WHOLE,
) -> Shard:
    """Return the shard of a rank with one dense cache group that starts at ``base_address``.

    ``layers`` are those of this rank. A ``packing`` makes each page of a block and head an atom. For MLA ``head_size``
    is the width of the latent, which every rank holds. ``value_head_size`` defaults to ``head_size``.

    >>> shard_for(layers=["0", "1"], num_kv_heads=8, head_size=64, itemsize=2, block_size=16, num_blocks=10,
    ...     layout=NamedLayout.BHLNC, tp_rank=1, tp_size=2)
    rank tp 1/2 [cpu 0x0 + 327680]
    full (attention, 10 blocks of 16 tokens, heads 4:8 of 8)
      kv BHLNC: base + b*32768 + h*8192 + l*4096 + n*256 + c*2
    """
    require(kind is not CacheKind.STATE, "states are not laid out by axes.", "Use kvferry.layout.states.")
    value_head_size = head_size if value_head_size is None else value_head_size
    widths = {"latent": head_size} if kind is CacheKind.MLA else {"k": head_size, "v": value_head_size}
    num_kv_heads = 1 if kind is CacheKind.MLA else num_kv_heads
    heads = HeadRange(0, 1) if kind is CacheKind.MLA else heads_of_rank(num_kv_heads, tp_rank, tp_size)
    if content is Content.FUSED and len(widths) == 2:
        widths = {"kv": sum(widths.values())}
    components: list[Component] = []
    length = 0
    for together in [{name: width} for name, width in widths.items()] if content is Content.APART else [widths]:
        content_bytes = sum(together.values()) * itemsize
        sizes = {Axis.L: len(layers), Axis.B: num_blocks, Axis.H: len(heads), Axis.N: block_size, Axis.C: content_bytes}
        strides = dense_strides(layout, sizes)
        places = _places(together, content, layout, itemsize, block_size, strides[Axis.N])
        for (name, width), (first_byte, token_stride, channel_stride) in zip(together.items(), places, strict=True):
            first = length + first_byte
            components.append(
                Component(
                    name=name,
                    layers=tuple(layers),
                    layer_offsets=tuple(first + index * strides[Axis.L] for index in range(len(layers))),
                    heads=(heads,),
                    total_heads=num_kv_heads,
                    num_channels=width,
                    itemsize=itemsize,
                    block_stride=strides[Axis.B],
                    head_stride=strides[Axis.H],
                    token_stride=token_stride,
                    channel_stride=channel_stride,
                    atom=Atom.PAGE if packing else Atom.CONTENT,
                    packing=packing,
                )
            )
        length += content_bytes * len(layers) * num_blocks * len(heads) * block_size
    group = CacheGroup(
        name=group_name,
        kind=kind,
        block_size=block_size,
        num_blocks=num_blocks,
        components=tuple(components),
        window=window,
        token_share=token_share,
    )
    ranks = {"tp_rank": tp_rank, "tp_size": tp_size, "pp_rank": pp_rank, "pp_size": pp_size}
    return Shard(regions=(Region(base_address, length, device),), groups=(group,), **ranks)


def _places(
    widths: Mapping[str, int], content: Content, layout: NamedLayout, itemsize: int, block_size: int, token_stride: int
) -> list[tuple[int, int, int]]:
    """Return the first byte, token stride and channel stride, within one page, of each tensor with these channels."""
    key_bytes, *value_bytes = (width * itemsize for width in widths.values())
    if not value_bytes:
        return [(0, token_stride, itemsize)]
    if content is Content.INTERLEAVED:
        return [(0, token_stride, itemsize), (key_bytes, token_stride, itemsize)]
    require(layout.value.endswith("NC"), f"layout {layout} has no planes of K and V.", "Use a layout that ends in NC.")
    transposed = content is Content.TRANSPOSED_KEYS
    keys = (0, itemsize, block_size * itemsize) if transposed else (0, key_bytes, itemsize)
    return [keys, (block_size * key_bytes, value_bytes[0], itemsize)]
