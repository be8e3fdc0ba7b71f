"""Hypothesis strategies: two engines of one model, and a request between them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import strategies as st

from kvferry.layout.cache_group import CacheKind
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shapes import Content, shard_for
from kvferry.layout.shard import Shard
from kvferry.plan.request import GroupBlocks

RANK_SPACING = 1 << 32
APART_FORMS = (Content.INTERLEAVED, Content.PLANES, Content.TRANSPOSED_KEYS, Content.APART)


@dataclass(frozen=True)
class Move:
    """Every rank of both engines, and one request between them."""

    sources: tuple[Shard, ...]
    destinations: tuple[Shard, ...]
    request: GroupBlocks


@dataclass(frozen=True)
class Model:
    """What both engines have in common."""

    layers: tuple[str, ...]
    num_kv_heads: int
    head_size: int
    value_head_size: int
    itemsize: int
    kind: CacheKind
    fused: bool
    packing: str


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Return small models of any kind that is planned."""
    packed = draw(st.booleans()) and draw(st.booleans())
    return Model(
        layers=tuple(f"layer.{index}" for index in range(draw(st.integers(1, 4)))),
        num_kv_heads=draw(st.sampled_from([1, 2, 3, 4, 6])),
        head_size=draw(st.integers(1, 4)),
        value_head_size=draw(st.integers(1, 3)),
        itemsize=draw(st.sampled_from([1, 2, 4])),
        kind=draw(st.sampled_from([CacheKind.ATTENTION, CacheKind.MLA])),
        fused=packed or draw(st.booleans()),
        packing="kernel:packed" if packed else "",
    )


def legal_tp_sizes(num_kv_heads: int, largest: int = 8) -> list[int]:
    """Return the tensor-parallel sizes that deal the heads evenly.

    >>> legal_tp_sizes(6), legal_tp_sizes(2)
    ([1, 2, 3, 6], [1, 2, 4, 6, 8])
    """
    return [size for size in range(1, largest + 1) if max(size, num_kv_heads) % min(size, num_kv_heads) == 0]


@st.composite
def engines(draw: st.DrawFn, model: Model, block_size: int, num_blocks: int, base_address: int) -> tuple[Shard, ...]:
    """Return all ranks of an engine: any layout and parallel sizes, layers in any order and interleaved."""
    layouts = [layout for layout in NamedLayout if layout.has_whole_pages or not model.packing]
    layout = draw(st.sampled_from(layouts))
    forms = [form for form in APART_FORMS if layout.has_whole_pages or form in (Content.INTERLEAVED, Content.APART)]
    shape: dict[str, Any] = {
        "num_kv_heads": model.num_kv_heads,
        "head_size": model.head_size,
        "value_head_size": model.value_head_size,
        "itemsize": model.itemsize,
        "kind": model.kind,
        "packing": model.packing,
        "block_size": block_size,
        "num_blocks": num_blocks,
        "layout": layout,
        "content": Content.FUSED if model.fused else draw(st.sampled_from(forms)),
        "tp_size": draw(st.sampled_from(legal_tp_sizes(model.num_kv_heads))),
    }
    stages = _split(draw(st.permutations(model.layers)), draw(st.integers(1, len(model.layers))))
    # Layers of other cache groups lie between this group's: its layer offsets have gaps and any order.
    strangers = draw(st.integers(0, 2))
    order = draw(st.randoms(use_true_random=False))
    shards: list[Shard] = []
    for pp_rank, stage in enumerate(stages):
        held = [*stage, *(f"stranger.{index}" for index in range(strangers))]
        order.shuffle(held)
        for tp_rank in range(shape["tp_size"]):
            base = base_address + len(shards) * RANK_SPACING
            ranks: dict[str, Any] = {"tp_rank": tp_rank, "pp_rank": pp_rank, "pp_size": len(stages)}
            shards.append(without_layers(shard_for(layers=held, base_address=base, **ranks, **shape), "stranger"))
    return tuple(shards)


def _split(layers: Sequence[str], num_stages: int) -> list[Sequence[str]]:
    return [layers[index::num_stages] for index in range(num_stages)]


def without_layers(shard: Shard, prefix: str) -> Shard:
    """Return the shard without the layers of that prefix; the others stay where they are."""
    groups = []
    for group in shard.groups:
        components = []
        for component in group.components:
            placed = zip(component.layers, component.layer_offsets, strict=True)
            kept = [(layer, offset) for layer, offset in placed if not layer.startswith(prefix)]
            layers, offsets = zip(*kept, strict=True)
            components.append(msgspec.structs.replace(component, layers=layers, layer_offsets=offsets))
        groups.append(msgspec.structs.replace(group, components=tuple(components)))
    return msgspec.structs.replace(shard, groups=tuple(groups))


@st.composite
def requests(draw: st.DrawFn, sizes: tuple[int, int], num_blocks: int, packed: bool) -> GroupBlocks:
    """Return a request: ids in any order, and any tokens that both sides' blocks hold (whole pages where packed)."""
    first = draw(st.integers(0, 9))
    if packed:
        first -= first % sizes[1]
    last = first + draw(st.integers(0, 14))
    begins = [draw(st.integers(0, first)) for _ in sizes]
    if packed:
        begins = [begin - begin % sizes[1] for begin in begins]
    needed = [-(-(last - begin) // size) for begin, size in zip(begins, sizes, strict=True)]
    orders = st.sampled_from([list(range(num_blocks)), list(range(num_blocks))[::-1]])
    ids = [draw(orders | st.permutations(range(num_blocks)))[:count] for count in needed]
    return GroupBlocks(
        group="full",
        first_token=first,
        last_token=last,
        source_block_ids=ids[0],
        destination_block_ids=ids[1],
        source_first_token=begins[0],
        destination_first_token=begins[1],
    )


@st.composite
def moves(draw: st.DrawFn) -> Move:
    """Return two engines of one model and a request that can be moved between them."""
    model = draw(models())
    source_size = draw(st.integers(1, 6))
    same = model.packing or draw(st.booleans())
    destination_size = source_size if same else draw(st.integers(1, 6))
    num_blocks = 24
    sources = draw(engines(model, source_size, num_blocks, 1 << 40))
    destinations = draw(engines(model, destination_size, num_blocks, 1 << 50))
    request = draw(requests((source_size, destination_size), num_blocks, bool(model.packing)))
    return Move(sources, destinations, request)
