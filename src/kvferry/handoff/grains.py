"""Which grain each push of a rank has: as set, or chosen by the times that were measured here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from kvferry.handoff.messages import AnnouncedBlocks
from kvferry.handoff.push.sending import Lane
from kvferry.handoff.push_measures import PACKED, Measures
from kvferry.layout.group import CacheKind
from kvferry.plan.layer_spans import Spans, cut_layers, plan_spans
from kvferry.plan.planner import GroupPlan, PairPlan
from kvferry.plan.push_grain import (
    NOTHING,
    Amount,
    Candidate,
    Computing,
    Grain,
    GrainChoice,
    Span,
    amount_of,
    choose_grain,
)
from kvferry.plan.staging.staged_plan import GatherPlan
from kvferry.plan.staging.strategy import NOMINAL_TOKENS

SpanPlans = Mapping[str, Mapping[int, GroupPlan]]
"""The plan of each span by its number, by cache group."""


@dataclass(frozen=True, slots=True)
class ChosenGrain:
    """The grain of one push; ``choice`` is what was predicted, where something was."""

    grain: Grain
    reason: str
    layers_per_span: int = 0
    choice: GrainChoice | None = None

    @property
    def name(self) -> str:
        """What people read."""
        return Candidate(self.grain, layers_per_span=self.layers_per_span).name


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """Layers as they are computed. Those ``told`` of, by cache group, are the ones of which an engine says "has run".

    ``order`` is all of them. The engine computes at most ``chunk_tokens`` of a prompt in a step.
    """

    told: Mapping[str, Sequence[str]] = field(default_factory=dict)
    order: Sequence[str] = ()
    chunk_tokens: int = 1 << 30


@dataclass(slots=True)
class _PairSpans:
    """What is known of one pair's plan, by layers per span: the plan of every span, and of one of each group."""

    plans: dict[int, dict[str, dict[int, GroupPlan]]] = field(default_factory=dict)
    sizes: dict[int, dict[str, Amount]] = field(default_factory=dict)
    whole: dict[str, Amount] = field(default_factory=dict)


class Grains:
    """The grains of one rank's pushes.

    ``wish`` None leaves the choice to :func:`choose_grain`, for which spans of 1, 2, 4 and so on layers are at hand;
    otherwise spans have ``layers_per_span``. Spans are numbered from 1, of each length differently; 0 is all layers.
    ``layers_of`` has the layers of each span, ``lanes_of`` the spans that a layer is in.

    >>> grains = Grains(None, ModelLayers({"full": ["a", "b", "c"]}, ["a", "b", "c"]))
    >>> {layer: [lane.span for lane in lanes] for layer, lanes in grains.lanes_of.items()}
    {'a': [1, 4], 'b': [2, 4], 'c': [3, 5]}
    """

    def __init__(self, wish: Grain | None, layers: ModelLayers, layers_per_span: int = 1) -> None:
        self.wish, self.layers_per_span = wish, layers_per_span
        self.measures = Measures()
        self.has_hooks = False
        self.layers_of: dict[Lane, tuple[str, ...]] = {}
        self.lanes_of: dict[str, tuple[Lane, ...]] = {}
        self._layers = layers
        self._position = {layer: index for index, layer in enumerate(layers.order)}
        longest = max(map(len, layers.told.values()), default=0)
        sizes = [1 << shift for shift in range(longest.bit_length()) if 1 << shift < longest]
        self._spans: dict[int, dict[str, Spans]] = {}
        self._first_number: dict[int, int] = {}
        number = 1
        for size in {None: sizes, Grain.LAYERS: [layers_per_span]}.get(wish, []) if longest else []:
            self._add(size, number)
            number += -(-longest // size)
        self._known: WeakKeyDictionary[PairPlan | GatherPlan, _PairSpans] = WeakKeyDictionary()

    def note_step(self, num_tokens: int, seconds: float, num_hooks: int) -> None:
        """A step has computed so many tokens of prompts, and told when so many layers had run."""
        self.has_hooks = 0 < len(self.lanes_of) <= num_hooks
        if self._layers.order:
            self.measures.note_step(num_tokens, seconds / len(self._layers.order))

    def choose(
        self,
        plan: PairPlan,
        announced: Sequence[AnnouncedBlocks],
        num_tokens: int,
        transport: str,
        *,
        is_computed: bool = False,
        way: GatherPlan | None = None,
    ) -> ChosenGrain:
        """Return the grain of a push of a prompt of so many tokens, straight or by way of a stage here.

        ``is_computed`` says that the prompt has been computed.
        """
        if self.wish is not None:
            size = self.layers_per_span if self.wish is Grain.LAYERS else 0
            return ChosenGrain(self.wish, "as push_grain says", size)
        if is_computed:
            return ChosenGrain(Grain.WHOLE, "the prompt had been computed before the blocks were announced")
        chunk = min(num_tokens, self._layers.chunk_tokens)
        seconds = self.measures.seconds_per_layer(chunk)
        if seconds is None:
            return ChosenGrain(Grain.CHUNKS, "nothing has been measured yet")
        computing = Computing(len(self._layers.order), seconds, -(-num_tokens // chunk))
        wire = self.measures.wire(transport if way is None else transport + PACKED)
        choice = choose_grain(self._candidates(plan, announced, way), computing, wire)
        return ChosenGrain(choice.chosen.grain, choice.reason, choice.chosen.layers_per_span, choice)

    def span_plans(self, plan: PairPlan, size: int) -> SpanPlans:
        """Return the plans of the spans of so many layers of every group that tells of its layers; of 0 none."""
        if size not in self._spans:
            return {}
        known = self._known.setdefault(plan, _PairSpans())
        if size not in known.plans:
            first = self._first_number[size]
            known.plans[size] = {
                group: {first + number: found for number, found in plan_spans(plan, group, cut).items()}
                for group, cut in self._spans[size].items()
                if group in plan.groups
            }
        return known.plans[size]

    def _add(self, size: int, first_number: int) -> None:
        self._first_number[size] = first_number
        self._spans[size] = {group: cut_layers(layers, size) for group, layers in self._layers.told.items()}
        for group, cut in self._spans[size].items():
            for number, span in enumerate(cut, first_number):
                lane = Lane(group, number)
                self.layers_of[lane] = span
                for layer in span:
                    self.lanes_of[layer] = (*self.lanes_of.get(layer, ()), lane)

    def _candidates(
        self, plan: PairPlan, announced: Sequence[AnnouncedBlocks], way: GatherPlan | None
    ) -> list[Candidate]:
        """Return what a push can be: as the whole, in chunks, and where layers tell of themselves in spans."""
        known = self._known.setdefault(way or plan, _PairSpans())
        tokens = {blocks.group: blocks.end_token - blocks.first_token for blocks in announced}
        for group in tokens.keys() - known.whole.keys():
            known.whole[group] = amount_of(plan.groups[group], NOMINAL_TOKENS, way)
        states = [group for group in tokens if plan.groups[group].source_group.kind is CacheKind.STATE]
        others = {group: num_tokens / NOMINAL_TOKENS for group, num_tokens in tokens.items() if group not in states}
        at_end = sum((known.whole[group] for group in states), NOTHING)
        shares = {group: known.whole[group].scaled(share) for group, share in others.items()}
        chunks = {group: -(-tokens[group] // self._layers.chunk_tokens) for group in others}
        num_layers = len(self._layers.order)
        found = [
            Candidate(Grain.WHOLE, at_end=sum(shares.values(), at_end)),
            Candidate(Grain.CHUNKS, tuple(Span(num_layers, shares[group], chunks[group]) for group in others), at_end),
        ]
        if self.has_hooks:
            for size in self._spans:
                spans = [
                    span
                    for group in others
                    for span in self._spans_of((plan, way), group, size, others[group], chunks[group])
                ]
                found.append(Candidate(Grain.LAYERS, tuple(spans), at_end, size))
        return found

    def _spans_of(
        self, pair: tuple[PairPlan, GatherPlan | None], group: str, size: int, share: float, num_chunks: int
    ) -> list[Span]:
        each = self._amount_per_layer(*pair, group, size)
        return [
            Span(self._position[span[-1]] + 1, each.scaled(share * len(span)), num_chunks)
            for span in self._spans[size].get(group, ())
        ]

    def _amount_per_layer(self, plan: PairPlan, way: GatherPlan | None, group: str, size: int) -> Amount:
        """Return what one layer of a span of such a length takes, by the first span that both sides hold."""
        by_group = self._known[way or plan].sizes.setdefault(size, {})
        if group not in by_group:
            by_group[group] = next(
                (
                    amount_of(found[0], NOMINAL_TOKENS, way).scaled(1 / len(span))
                    for span in self._spans[size].get(group, ())
                    if (found := plan_spans(plan, group, (span,)))
                ),
                NOTHING,
            )
        return by_group[group]
