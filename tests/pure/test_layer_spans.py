"""Spans of layers: each layer is in one span, and all spans together write the bytes of the whole plan."""

from collections.abc import Iterable

import msgspec
import numpy as np
import pytest

from kvferry.arrays import Descriptors
from kvferry.handoff.source import END, BlockList, Part, SourceWrite, WriteState, announced_blocks
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import TensorScale
from kvferry.plan.match import GroupBlocks
from kvferry.plan.planner import LAYERS_PER_SPAN, LayerSpans, PairPlan, Planner, Span, goes_whole

from ..support.dense import shard_for

LAYERS = [f"{index:02}" for index in range(20)]
BLOCKS = GroupBlocks(
    group="full", first_token=0, last_token=48, source_block_ids=[5, 1, 4], destination_block_ids=[0, 3, 2]
)


def test_layers_are_cut_into_spans_of_eight_and_a_rest() -> None:
    assert LAYERS_PER_SPAN == 8
    spans = LayerSpans({"full": LAYERS, "window": ["w"]})
    assert spans.layers_of == {
        Span("full", 1): tuple(LAYERS[:8]),
        Span("full", 2): tuple(LAYERS[8:16]),
        Span("full", 3): tuple(LAYERS[16:]),
        Span("window", 1): ("w",),
    }
    assert spans.span_of == {layer: span for span, layers in spans.layers_of.items() for layer in layers}


def pair(layout: NamedLayout) -> PairPlan:
    sizes = {"num_kv_heads": 2, "head_size": 4, "itemsize": 2, "block_size": 16, "num_blocks": 6}
    source, target = (shard_for(layers=LAYERS, layout=layout, base_address=base << 40, **sizes) for base in (1, 2))
    return Planner([source], target).plans(0)[0]


def copied(rows: Iterable[Descriptors]) -> list[tuple[int, int]]:
    """Return every destination byte, as often as it is written, with the source byte that it comes from."""
    listed = np.concatenate([each.view(np.uint64) for each in rows]).tolist()
    return sorted((row[1] + offset, row[0] + offset) for row in listed for offset in range(row[2]))


@pytest.mark.parametrize("layout", [NamedLayout.BHLNC, NamedLayout.BLHNC, NamedLayout.LBHNC])
def test_every_byte_of_the_whole_plan_goes_with_one_span(layout: NamedLayout) -> None:
    plan, spans = pair(layout), LayerSpans({"full": LAYERS, "of another model": ["0"]})
    plans = spans.plans(plan)
    assert {group: list(of_group) for group, of_group in plans.items()} == {"full": [1, 2, 3]}
    each = [rows for span in plans["full"].values() for rows in span.lower([BLOCKS])]
    assert copied(each) == copied(plan.groups["full"].lower([BLOCKS]))
    assert spans.plans(plan) is plans


def test_a_span_has_the_memory_and_the_scales_of_its_own_layers() -> None:
    """A span with the memory of other layers would be sent before these layers have run."""
    both = [
        msgspec.structs.replace(
            shard,
            groups=(
                msgspec.structs.replace(
                    shard.groups[0], scales=tuple(TensorScale(layer, "k", 0.5) for layer in LAYERS)
                ),
            ),
        )
        for shard in (pair(NamedLayout.LBHNC).source, pair(NamedLayout.LBHNC).destination)
    ]
    (plan,) = Planner(both[:1], both[1]).plans(0)
    spans = LayerSpans({"full": LAYERS})
    for number, of_span in spans.plans(plan)["full"].items():
        layers = spans.layers_of[Span("full", number)]
        for shard, group in zip(both, (of_span.source_group, of_span.destination_group), strict=True):
            (whole,), (kept,) = shard.groups[0].components, group.components
            offsets = dict(zip(whole.layers, whole.layer_offsets, strict=True))
            assert dict(zip(kept.layers, kept.layer_offsets, strict=True)) == {each: offsets[each] for each in layers}
            assert [scale.layer for scale in group.scales] == list(layers)


@pytest.mark.parametrize("together", [[1, 2], [2, 3], [1, 3]])
def test_spans_that_go_in_one_batch_go_once_each(together: list[int]) -> None:
    plan = pair(NamedLayout.BHLNC)
    part = Part(plan, announced_blocks(plan, [BLOCKS])).in_spans(LayerSpans({"full": LAYERS}).plans(plan))
    write, rows = SourceWrite("x", part.needs, deadline=1.0), []
    for numbers in (together, [1, 2, 3]):
        batch = write.take({Span("full", number): END for number in numbers})
        rows.append(part.lower(batch, {"full": BlockList(0, [5, 1, 4])}))
        write.landed()
    assert write.state is WriteState.OVER
    assert copied(rows) == copied(plan.groups["full"].lower([BLOCKS]))


def test_a_short_prompt_and_one_that_has_been_computed_go_whole() -> None:
    lengths = [1, 256, 257, 4096]
    assert [goes_whole(length, is_computed=False) for length in lengths] == [True, True, False, False]
    assert [goes_whole(length, is_computed=True) for length in lengths] == [True] * 4
