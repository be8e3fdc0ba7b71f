"""How finely a prompt is pushed: all of it at its end, chunk by chunk, or a span of layers at a time. Pure prediction.

A receiver waits for what is left to move when the prompt has been computed. Whatever becomes final goes in one batch,
``seconds_per_batch + descriptors * seconds_per_descriptor + bytes * seconds_per_byte``, one batch after the other, so
that the last one lands ``max over batches of (when it is final + it and all behind it)`` after the prompt's end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from kvferry.errors import PlanError, Reason
from kvferry.plan.planner import GroupPlan
from kvferry.plan.staging.staged_plan import GatherPlan
from kvferry.plan.staging.strategy import templates_of

LEAST_SHARE = 0.05
"""A finer grain must save this part of the whole transfer, and the time of one batch: it wakes threads more often."""


class Grain(StrEnum):
    """What goes together."""

    WHOLE = "whole"
    """Everything, when the prompt has been computed."""
    CHUNKS = "chunks"
    """All layers of the tokens that a step has computed."""
    LAYERS = "layers"
    """Spans of layers, as soon as they have run."""


_FROM_COARSE = tuple(Grain)


@dataclass(frozen=True, slots=True)
class Amount:
    """What is to be moved."""

    num_descriptors: float
    num_bytes: float

    def scaled(self, factor: float) -> "Amount":
        """Return so much of it."""
        return Amount(self.num_descriptors * factor, self.num_bytes * factor)

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(self.num_descriptors + other.num_descriptors, self.num_bytes + other.num_bytes)


NOTHING = Amount(0, 0)


@dataclass(frozen=True, slots=True)
class Span:
    """Layers that go together, spread evenly over the last ``num_chunks`` chunks of the prompt.

    In each they are final once ``end_layer`` layers of the model have run; ``amount`` is that of all chunks together.
    """

    end_layer: int
    amount: Amount
    num_chunks: int = 1


@dataclass(frozen=True, slots=True)
class Candidate:
    """A grain and what it makes of one prompt: ``spans``, and what goes only ``at_end``, such as states."""

    grain: Grain
    spans: tuple[Span, ...] = ()
    at_end: Amount = NOTHING
    layers_per_span: int = 0

    @property
    def name(self) -> str:
        """What people read."""
        return f"{self.grain}({self.layers_per_span})" if self.grain is Grain.LAYERS else str(self.grain)


@dataclass(frozen=True, slots=True)
class Computing:
    """How a prompt is computed: each of its chunks takes ``num_layers * seconds_per_layer``."""

    num_layers: int
    seconds_per_layer: float
    num_chunks: int = 1


@dataclass(frozen=True, slots=True)
class Wire:
    """What moving takes, in seconds."""

    seconds_per_descriptor: float
    seconds_per_byte: float
    seconds_per_batch: float

    def seconds(self, amount: Amount) -> float:
        """Return how long one batch takes."""
        moving = amount.num_descriptors * self.seconds_per_descriptor + amount.num_bytes * self.seconds_per_byte
        return self.seconds_per_batch + moving


@dataclass(frozen=True, slots=True)
class GrainChoice:
    """What was chosen, with the predicted seconds from the prompt's end to the last byte of every candidate by name."""

    chosen: Candidate
    seconds: float
    predictions: dict[str, float]
    reason: str


def exposed_seconds(candidate: Candidate, computing: Computing, wire: Wire) -> float:
    """Return how long after the prompt's end the last byte lands.

    Two layers of a second each, a batch of one layer takes half a second and one of both takes one:

    >>> wire, computing = Wire(0.0, 0.5, 0.0), Computing(num_layers=2, seconds_per_layer=1.0)
    >>> layers = Candidate(Grain.LAYERS, (Span(1, Amount(1, 1)), Span(2, Amount(1, 1))), layers_per_span=1)
    >>> [exposed_seconds(each, computing, wire) for each in (layers, Candidate(Grain.WHOLE, at_end=Amount(1, 2)))]
    [0.5, 1.0]
    """
    step = computing.num_layers * computing.seconds_per_layer
    final_at: list[npt.NDArray[np.floating]] = [np.zeros(0)]
    seconds: list[npt.NDArray[np.floating]] = [np.zeros(0)]
    for span in candidate.spans:
        num_chunks = max(1, min(span.num_chunks, computing.num_chunks))
        begins = np.arange(-num_chunks, 0) * step
        final_at.append(begins + span.end_layer * computing.seconds_per_layer)
        seconds.append(np.full(num_chunks, wire.seconds(span.amount.scaled(1 / num_chunks))))
    if candidate.at_end != NOTHING:
        final_at.append(np.zeros(1))
        seconds.append(np.array([wire.seconds(candidate.at_end)]))
    ready, cost = np.concatenate(final_at), np.concatenate(seconds)
    order = np.argsort(ready, kind="stable")
    to_the_end = np.cumsum(cost[order][::-1])[::-1]
    return float(np.max(ready[order] + to_the_end, initial=0.0))


def choose_grain(candidates: Sequence[Candidate], computing: Computing, wire: Wire) -> GrainChoice:
    """Choose the coarsest candidate that is about as quick as the quickest, never one slower than the whole transfer.

    Raises :class:`PlanError` (invalid-request) where the whole transfer is not among them.
    """
    ordered = sorted(candidates, key=lambda each: (_FROM_COARSE.index(each.grain), -each.layers_per_span))
    if not ordered or ordered[0].grain is not Grain.WHOLE:
        raise PlanError(
            Reason.INVALID_REQUEST,
            f"a grain is to be chosen among {[each.name for each in ordered]}.",
            "Name the whole transfer too: others are measured by it.",
        )
    seconds = [exposed_seconds(each, computing, wire) for each in ordered]
    enough = min(seconds) + max(LEAST_SHARE * seconds[0], wire.seconds_per_batch)
    index = next(index for index, each in enumerate(seconds) if each <= enough)
    predictions = {each.name: found for each, found in zip(ordered, seconds, strict=True)}
    return GrainChoice(ordered[index], seconds[index], predictions, _reason(predictions, computing))


def amount_of(group: GroupPlan, num_tokens: int, way: GatherPlan | None = None) -> Amount:
    """Return what so many tokens of a group take, their blocks in scattered order, straight or packed first."""
    found = list(templates_of(group, num_tokens))
    return Amount(
        sum(
            (len(template.pieces) if way is None else way.staged(template).num_reads) * blocks
            for template, blocks in found
        ),
        sum(int(template.pieces[:, 2].sum()) * blocks for template, blocks in found),
    )


def _reason(predictions: dict[str, float], computing: Computing) -> str:
    times = ", ".join(f"{each} {1e3 * seconds:.2f}" for each, seconds in predictions.items())
    return (
        f"milliseconds predicted after the prompt's end are {times}, with {computing.num_chunks} chunks of "
        f"{computing.num_layers} layers of {1e3 * computing.seconds_per_layer:.3f}"
    )
