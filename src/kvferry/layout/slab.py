"""The slab of a tier as a shard: one rank that holds every layer and head of an engine's cache groups.

A block of the slab holds consecutive tokens, or one state, of all ranks, and is contiguous. Attention lies in the order
head, layer, token, content (``BHLNC``), so that a rank's heads of all layers are one stretch. K and V that are apart
lie one behind the other within the page of one head and layer. States lie layer by layer, as in the engine: there each
layer's state is one stretch, and head by head it would be thousands.

Tokens and channels of a page, or heads and channels of a state, keep the engine's order: a transposition would move
number by number. So the slab of an engine does not depend on its tensor-parallel or pipeline-parallel size, and an
engine of other sizes can load what this one has stored.
"""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from kvferry.errors import LayoutError, Reason
from kvferry.layout.shard import Atom, CacheGroup, CacheKind, Component, HeadRange, Region, Shard, require


def slab_shard(
    ranks: Sequence[Shard],
    num_blocks: Mapping[str, int],
    *,
    engine_blocks: int = 1,
    base_address: int = 0,
) -> Shard:
    """Return the shard of a slab for the caches of all ``ranks`` of one engine.

    ``num_blocks`` counts the slab's blocks of each cache group. Groups whose blocks have equal bytes share theirs: each
    has the blocks of all of them, block ``i`` of one lies where block ``i`` of another does, and whoever keeps the slab
    gives a block to one group at a time. So a group of windows, which needs few blocks, leaves the others to the rest.

    A block holds the tokens of ``engine_blocks`` blocks of
    the engine, on all context-parallel ranks together; a block of states holds one state. The slab has each head once,
    also where several ranks hold it, and no padding.

    Raises :class:`LayoutError`: ``split-atom`` where a block of the slab would not be exactly one packed page of each
    head and layer, ``invalid-layout`` for groups that ``num_blocks`` does not count or whose ranks differ.

    >>> from kvferry.models.groups import AttentionCache, RankMemory, form_groups, model_shard
    >>> from kvferry.layout.named_layouts import NamedLayout
    >>> groups = form_groups(dict.fromkeys("01", AttentionCache(num_kv_heads=8, head_size=64, itemsize=2)))
    >>> shape = dict(layout=NamedLayout.LBNHC, block_size=16, num_blocks=10, tp_size=2)
    >>> ranks = [model_shard(groups, frozenset("01"), RankMemory(tp_rank=rank, **shape)) for rank in range(2)]
    >>> slab_shard(ranks, {"full": 100})
    rank tp 0/1 [cpu 0x0 + 6553600]
    full (attention, 100 blocks of 16 tokens, heads 0:8 of 8)
      kv BHLNC: base + b*65536 + h*8192 + l*4096 + n*256 + c*2
    """
    held: dict[str, list[CacheGroup]] = {}
    for rank in sorted(ranks, key=lambda rank: rank.pp_rank):
        for group in rank.groups:
            held.setdefault(group.name, []).append(group)
    counted = f"the ranks hold groups {sorted(held)}, the slab's blocks are given for {sorted(num_blocks)}."
    require(held.keys() == num_blocks.keys(), counted, "Give a number of blocks for each group.")
    sharing: dict[int, list[str]] = {}
    for name, members in held.items():
        block_bytes = _group(members, num_blocks[name], engine_blocks, begin=0).components[0].block_stride
        sharing.setdefault(block_bytes, []).append(name)
    groups: dict[str, CacheGroup] = {}
    length = 0
    for block_bytes, names in sharing.items():
        count = sum(num_blocks[name] for name in names)
        groups |= {name: _group(held[name], count, engine_blocks, length) for name in names}
        length += count * block_bytes
    return Shard(regions=(Region(base_address, length),), groups=tuple(groups[name] for name in held))


def _group(held: Sequence[CacheGroup], num_blocks: int, engine_blocks: int, begin: int) -> CacheGroup:
    """Return the slab's group, of which the first block begins ``begin`` bytes into the slab."""
    first = held[0]
    alike = {(group.kind, group.window, group.block_size, group.token_share.split) for group in held}
    require(len(alike) == 1, f"group {first.name!r}: the ranks differ in kind, window or blocks: {sorted(alike)}.")
    is_state = first.kind is CacheKind.STATE
    block_size = 1 if is_state else first.tokens_per_position * engine_blocks
    if first.components[0].atom is Atom.PAGE and block_size != first.block_size:
        raise LayoutError(
            Reason.SPLIT_ATOM,
            f"group {first.name!r}: a block of {block_size} tokens would hold parts of several packed pages, each of "
            f"{first.block_size} tokens of {first.token_share!r}.",
            "Use blocks of one engine block, and no context parallelism.",
        )
    layers = tuple(dict.fromkeys(layer for group in held for layer in group.components[0].layers))
    kept = [component for component in first.components if not component.is_padding]
    return CacheGroup(
        name=first.name,
        kind=first.kind,
        block_size=block_size,
        num_blocks=num_blocks,
        components=tuple(_components(kept, layers, block_size, is_state=is_state, begin=begin)),
        window=first.window,
        scales=tuple({(scale.layer, scale.tensor): scale for group in held for scale in group.scales}.values()),
    )


def _components(
    held: Sequence[Component], layers: tuple[str, ...], block_size: int, *, is_state: bool, begin: int
) -> Iterator[Component]:
    """Place components in blocks of which the first begins ``begin`` bytes into the slab."""
    # A page's rows are tokens; the page of a state has a row for each head. Attention has a page for each head.
    num_rows = {component.name: component.total_heads if is_state else block_size for component in held}
    page_bytes = {part.name: num_rows[part.name] * part.num_channels * part.itemsize for part in held}
    arrays: dict[int, list[Component]] = {}
    for component in held:
        arrays.setdefault(1 if is_state else component.total_heads, []).append(component)
    cells = {num_pages: sum(page_bytes[part.name] for part in parts) for num_pages, parts in arrays.items()}
    block_stride = len(layers) * sum(num_pages * cell for num_pages, cell in cells.items())
    for num_pages, parts in arrays.items():
        cell, first = cells[num_pages], begin
        for part in parts:
            content, column = part.num_channels * part.itemsize, num_rows[part.name] * part.itemsize
            keeps_rows = (part.head_stride if is_state else part.token_stride) >= part.channel_stride
            row_stride, channel_stride = (content, part.itemsize) if keeps_rows else (part.itemsize, column)
            yield msgspec.structs.replace(
                part,
                layers=layers,
                layer_offsets=tuple(first + index * cell for index in range(len(layers))),
                heads=(HeadRange(0, part.total_heads),),
                block_stride=block_stride,
                head_stride=row_stride if is_state else len(layers) * cell,
                token_stride=block_stride if is_state else row_stride,
                channel_stride=channel_stride,
                region=0,
            )
            first += page_bytes[part.name]
        begin += num_pages * len(layers) * cell
