"""Layouts, components, groups and shards: their strides, text and refusals."""

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import LayoutError, Reason
from kvferry.layout.named_layouts import Axis, NamedLayout
from kvferry.layout.shard import (
    MAX_LAYERS,
    Atom,
    CacheGroup,
    CacheKind,
    Component,
    HeadRange,
    Region,
    Shard,
    elements_overlap,
    heads_of_rank,
)

from ..support.dense import Content, dense_strides, shard_for
from .refusals import refused

SHAPE = {"layers": ["0", "1"], "num_kv_heads": 4, "head_size": 8, "itemsize": 2, "block_size": 4, "num_blocks": 5}


def component(**changes: object) -> Component:
    values: dict[str, object] = {
        "name": "kv",
        "layers": ("0", "1"),
        "layer_offsets": (0, 64),
        "heads": (HeadRange(0, 2),),
        "total_heads": 2,
        "num_channels": 4,
        "itemsize": 2,
        "block_stride": 256,
        "head_stride": 128,
        "token_stride": 8,
        "channel_stride": 2,
    }
    return Component(**{**values, **changes})  # type: ignore[arg-type]


def group(*components: Component, **changes: object) -> CacheGroup:
    values = {"name": "full", "kind": CacheKind.ATTENTION, "block_size": 4, "num_blocks": 3}
    return CacheGroup(**{**values, **changes}, components=components)  # type: ignore[arg-type]


def test_unknown_layout_names_the_nearest() -> None:
    assert "'BLNHC'" in refused(Reason.UNKNOWN_LAYOUT, lambda: NamedLayout.parse("BLNCH"))
    for earlier, name in (("HND", "LBHNC"), ("nhd", "LBNHC")):
        assert f"'{name}'" in refused(Reason.UNKNOWN_LAYOUT, lambda earlier=earlier: NamedLayout.parse(earlier))


@pytest.mark.parametrize("layout", NamedLayout)
def test_strides_are_those_of_a_dense_array_in_that_order(layout: NamedLayout) -> None:
    sizes = {Axis.L: 3, Axis.B: 4, Axis.H: 5, Axis.N: 6, Axis.C: 7}
    array = np.zeros([sizes[axis] for axis in layout.order], dtype=np.uint8)
    assert dense_strides(layout, sizes) == dict(zip(layout.order, array.strides, strict=True))


@pytest.mark.parametrize(
    ("heads", "tp_size"), [(1, 1), (8, 2), (8, 8), (2, 8), (1, 16), (6, 3), (3, 6)], ids=lambda size: str(size)
)
def test_ranks_hold_every_head_equally_often(heads: int, tp_size: int) -> None:
    held = [heads_of_rank(heads, rank, tp_size) for rank in range(tp_size)]
    times = np.bincount([head for each in held for head in range(each.start, each.end)], minlength=heads)
    assert set(times.tolist()) == {max(1, tp_size // heads)}
    assert held == sorted(held, key=lambda each: each.start)


@pytest.mark.parametrize(("heads", "tp_size"), [(8, 3), (6, 4), (2, 5)])
def test_heads_that_do_not_divide_are_refused(heads: int, tp_size: int) -> None:
    refused(Reason.INDIVISIBLE_HEADS, lambda: heads_of_rank(heads, 0, tp_size))


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": ()},
        {"layers": ("0", "0")},
        {"layer_offsets": (0,)},
        {"layer_offsets": (-64, 0)},
        {"heads": ()},
        {"heads": (HeadRange(0, 1), HeadRange(0, 1))},
        {"total_heads": 1},
        {"total_heads": 2**40},
        {"num_channels": 0},
        {"block_stride": -256},
        {"token_stride": 2**62},
        {"region": -1},
        {"packing": "amx"},
        {"atom": Atom.PAGE},
    ],
    ids=str,
)
def test_components_that_cannot_exist(changes: dict[str, object]) -> None:
    refused(Reason.INVALID_LAYOUT, lambda: component(**changes))


def test_groups_that_cannot_exist() -> None:
    kv = component()
    for build in (
        lambda: group(),
        lambda: group(kv, kv),
        lambda: group(kv, component(name="v", layers=("0", "2"))),
        lambda: group(kv, component(name="v", atom=Atom.PAGE, packing="amx")),
        lambda: group(kv, block_size=0),
        lambda: group(kv, num_blocks=0),
        lambda: group(component(atom=Atom.PAGE, packing="amx", token_stride=16)),
    ):
        refused(Reason.INVALID_LAYOUT, build)


def shard(*groups: CacheGroup, length: int = 768, **ranks: int) -> Shard:
    return Shard(regions=(Region(0, length),), groups=groups, **ranks)


def test_shards_that_cannot_exist() -> None:
    full = group(component())
    shard(full)
    refused(Reason.OUT_OF_REGION, lambda: shard(full, length=700))
    for build in (
        lambda: shard(),
        lambda: shard(full, full),
        lambda: shard(full, group(component(), name="other")),
        lambda: shard(full, tp_rank=1),
        lambda: shard(full, pp_rank=-1),
        lambda: shard(group(component(region=1))),
        lambda: shard(group(component(layer_offsets=(0, 24)))),
        lambda: shard(group(component(layer_offsets=(0, 128))), length=800),
        lambda: shard(group(component(head_stride=24))),
        lambda: Region(0, 0),
        lambda: Region(-1, 8),
    ):
        refused(Reason.INVALID_LAYOUT, build)


@given(
    offsets=st.lists(st.integers(0, 40), min_size=1, max_size=3, unique=True),
    strides=st.tuples(*[st.integers(1, 24)] * 4),
    counts=st.tuples(*[st.integers(1, 3)] * 3),
    itemsize=st.sampled_from([1, 2]),
)
def test_what_is_accepted_never_overlaps(
    offsets: list[int], strides: tuple[int, ...], counts: tuple[int, ...], itemsize: int
) -> None:
    """Of two blocks, all that fits a region is compared element by element."""
    num_heads, block_size, num_channels = counts
    block_stride, head_stride, token_stride, channel_stride = strides
    part = component(
        layers=tuple(map(str, range(len(offsets)))),
        layer_offsets=tuple(offsets),
        heads=(HeadRange(0, num_heads),),
        total_heads=num_heads,
        num_channels=num_channels,
        itemsize=itemsize,
        block_stride=block_stride,
        head_stride=head_stride,
        token_stride=token_stride,
        channel_stride=channel_stride,
    )
    indices = itertools.product(offsets, *map(range, (2, num_heads, block_size, num_channels)))
    starts = [offset + sum(map(int.__mul__, strides, index)) for offset, *index in indices]
    touched = [start + byte for start in starts for byte in range(itemsize)]
    if not elements_overlap(part, 2, block_size):
        assert len(set(touched)) == len(touched)


def test_interleaved_layers_of_other_groups_are_accepted() -> None:
    shard(group(component(layers=("0", "2", "1"), layer_offsets=(64, 0, 32), block_stride=256, head_stride=128)))


def test_shard_prints_its_formula() -> None:
    text = repr(shard_for(layout=NamedLayout.BHLNC, content=Content.TRANSPOSED_KEYS, tp_rank=1, tp_size=2, **SHAPE))
    assert text.splitlines() == [
        "rank tp 1/2 [cpu 0x0 + 2560]",
        "full (attention, 5 blocks of 4 tokens, heads 2:4 of 4)",
        "  k BHLCN: base + b*512 + h*256 + l*128 + c*8 + n*2",
        "  v BHLNC: base + 64 + b*512 + h*256 + l*128 + n*16 + c*2",
    ]


def test_planes_need_whole_pages() -> None:
    refused(Reason.INVALID_LAYOUT, lambda: shard_for(layout=NamedLayout.LBNHC, content=Content.PLANES, **SHAPE))


def test_a_decoded_shard_is_checked() -> None:
    good = shard(group(component()))
    raw = msgspec.to_builtins(good)
    assert msgspec.convert(raw, Shard) == good
    raw["groups"][0]["components"][0]["layer_offsets"] = [0, 1]
    with pytest.raises(msgspec.ValidationError, match="overlap"):
        msgspec.convert(raw, Shard)
    raw["groups"][0]["components"][0]["layers"] = ["x"] * (MAX_LAYERS + 1)
    with pytest.raises(msgspec.ValidationError, match="length"):
        msgspec.convert(raw, Shard)


def test_layout_errors_are_value_errors() -> None:
    assert issubclass(LayoutError, ValueError)
