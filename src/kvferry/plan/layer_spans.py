"""Spans: layers that a write sends together, before the source has computed the rest of the model; and their plans."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import msgspec

from kvferry.layout.shard import CacheGroup
from kvferry.plan.planner import GroupPlan, PairPlan

LAYERS_PER_SPAN = 8
"""With spans of one layer the time to first token was up to 1.4 times as long: each batch wakes threads
(docs/decisions/one-handoff.md)."""
SHORT_TOKENS = 256
"""A prompt of at most so many tokens is written whole: spans save about 0.02 ms per token, too little to show.

Spans were slower at 64 tokens and saved 45 ms at 2048 tokens (docs/decisions/one-handoff.md).
"""


class Span(NamedTuple):
    """Layers of one cache group that a write sends together: span ``number``, counted from 1, or with 0 all layers."""

    group: str
    number: int = 0


SpanPlans = Mapping[str, Mapping[int, GroupPlan]]
"""The plan of each span, by cache group and span number."""


class LayerSpans:
    """The spans of one rank. ``layers`` are by cache group, in the order in which the engine computes them.

    ``layers_of`` maps each span to its layers, ``span_of`` each layer to its span.

    >>> spans = LayerSpans({"full": ["a", "b", "c"]}, layers_per_span=2)
    >>> spans.layers_of[Span("full", 1)], spans.span_of["c"]
    (('a', 'b'), Span(group='full', number=2))
    """

    def __init__(self, layers: Mapping[str, Sequence[str]], layers_per_span: int = LAYERS_PER_SPAN) -> None:
        self._spans = {group: cut_layers(of_group, layers_per_span) for group, of_group in layers.items()}
        self.layers_of = {Span(group, number): cut[number] for group, cut in self._spans.items() for number in cut}
        self.span_of = {layer: span for span, of_span in self.layers_of.items() for layer in of_span}
        self._plans: WeakKeyDictionary[PairPlan, SpanPlans] = WeakKeyDictionary()

    def plans(self, plan: PairPlan) -> SpanPlans:
        """Return the plans of all spans of a pair; the first call makes them."""
        if plan not in self._plans:
            self._plans[plan] = {
                group: plan_spans(plan, group, cut) for group, cut in self._spans.items() if group in plan.groups
            }
        return self._plans[plan]


def goes_whole(num_tokens: int, *, is_computed: bool, short_tokens: int = SHORT_TOKENS) -> bool:
    """Return whether a prompt is written whole, after it is computed, instead of span by span during its computation.

    An engine that does not report its computed layers sends all spans of a chunk at the end of the step.

    >>> [goes_whole(num_tokens, is_computed=False) for num_tokens in (256, 257)], goes_whole(4096, is_computed=True)
    ([True, False], True)
    """
    return is_computed or num_tokens <= short_tokens


def cut_layers(layers: Sequence[str], layers_per_span: int) -> dict[int, tuple[str, ...]]:
    """Cut layers, in the order of their computation, into numbered spans; the last may be shorter.

    >>> cut_layers(["0", "1", "2", "3", "4"], 2)
    {1: ('0', '1'), 2: ('2', '3'), 3: ('4',)}
    """
    starts = range(0, len(layers), layers_per_span)
    return {number: tuple(layers[start : start + layers_per_span]) for number, start in enumerate(starts, 1)}


def plan_spans(plan: PairPlan, group: str, spans: Mapping[int, Sequence[str]]) -> dict[int, GroupPlan]:
    """Return the plan of each span of a group's layers, by number; together they move the same bytes as ``plan``.

    Layers that only the source or only the destination holds, as between pipeline stages, are left out, and so are
    spans without common layers.
    """
    whole = plan.groups[group]
    source, destination = whole.source_group, whole.destination_group
    common = source.layers & destination.layers
    return {
        number: GroupPlan(
            plan.source, plan.destination, (_with_layers(source, kept), _with_layers(destination, kept)), whole.heads
        )
        for number, layers in spans.items()
        if (kept := common & set(layers))
    }


def _with_layers(group: CacheGroup, layers: frozenset[str]) -> CacheGroup:
    components = []
    for component in group.components:
        held = zip(component.layers, component.layer_offsets, strict=True)
        names, offsets = zip(*((layer, offset) for layer, offset in held if layer in layers), strict=True)
        components.append(msgspec.structs.replace(component, layers=names, layer_offsets=offsets))
    scales = tuple(scale for scale in group.scales if scale.layer in layers)
    return msgspec.structs.replace(group, components=tuple(components), scales=scales)
