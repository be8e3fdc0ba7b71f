"""When a prompt's spans were computed and pushed: one timeline a push, for whoever wants to see that they overlap.

All times are seconds of the host's monotonic clock, which its processes share.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.handoff.bounded import Bounded
from kvferry.handoff.push.part import NEVER
from kvferry.handoff.push.sender import Prompt, PushRequest
from kvferry.handoff.push.sending import Batch, Cut
from kvferry.plan.layer_spans import Span

MAX_STEPS = 1024
"""Of one prompt, the latest ones."""
MAX_BATCHES = 1024
MAX_CUTS = 8192
"""Of one push; of what comes after them only the number is kept."""
MAX_PROMPTS = 4096


@dataclass(slots=True)
class Step:
    """One step of an engine: ``layers_at`` says when layers had run, of those that tell."""

    began_at: float
    layers_at: dict[str, float] = field(default_factory=dict)
    ended_at: float | None = None


@dataclass(frozen=True, slots=True)
class ComputedTokens:
    """Tokens of a prompt that a step computes."""

    first_token: int
    end_token: int
    step: Step


Computed = deque[ComputedTokens]


class PromptTimes:
    """The steps of every prompt, by transfer id; of so many prompts at most."""

    def __init__(self) -> None:
        self._prompts: Bounded[str, Computed] = Bounded(MAX_PROMPTS)

    def begin_step(self, step: Step, prompts: Sequence[tuple[str, Prompt]]) -> None:
        """A step begins that computes tokens of these prompts."""
        for transfer_id, prompt in prompts:
            end_token = min(prompt.num_final, prompt.num_tokens)
            self.of(transfer_id).append(ComputedTokens(end_token - prompt.num_scheduled, end_token, step))

    def of(self, transfer_id: str) -> Computed:
        """Return a prompt's steps, to which later ones are added."""
        return self._prompts.setdefault(transfer_id, deque(maxlen=MAX_STEPS))

    def forget(self, transfer_id: str) -> None:
        """A prompt has ended; pushes that go on keep what they know of it."""
        self._prompts.pop(transfer_id, None)


@dataclass(slots=True)
class _PostedBatch:
    cuts: Batch
    num_descriptors: int
    num_bytes: int
    posted_at: float
    landed_at: float | None = None


class PushTimes:
    """One push: ``layers_of`` names the layers of a span that is not all layers of its group."""

    def __init__(self, request: PushRequest, computed: Computed, layers_of: Mapping[Span, Sequence[str]]) -> None:
        self._request, self._computed, self._layers_of = request, computed, layers_of
        self._announced_at = time.monotonic()
        self._batches: list[_PostedBatch] = []
        self._num_cuts = self._num_left_out = 0
        self._latest: _PostedBatch | None = None

    def posted(self, batch: Batch, num_descriptors: int, num_bytes: int, now: float) -> None:
        """A batch has been handed to the transport."""
        self._latest = _PostedBatch(batch, num_descriptors, num_bytes, now)
        if len(self._batches) < MAX_BATCHES and self._num_cuts + len(batch) <= MAX_CUTS:
            self._num_cuts += len(batch)
            self._batches.append(self._latest)
        else:
            self._num_left_out += 1

    def landed(self, now: float) -> None:
        """It has landed; of one that failed or was stopped nothing is said."""
        if self._latest is not None:
            self._latest.landed_at = now

    def as_dict(self) -> dict[str, Any]:
        """Return the timeline, ready for JSON; the step that ended the prompt may end after the push."""
        steps = list(self._computed)
        ended_at = steps[-1].step.ended_at if steps else None
        return {
            "transfer_id": self._request.transfer_id,
            "receiver": self._request.key.receiver,
            "num_tokens": self._request.num_tokens,
            "clock": clock(),
            "announced_at": self._announced_at,
            "prompt_began_at": steps[0].step.began_at if steps else None,
            "prompt_ended_at": ended_at,
            "batches": [self._batch(batch, steps) for batch in self._batches],
            "batches_left_out": self._num_left_out,
        }

    def _batch(self, batch: _PostedBatch, steps: Sequence[ComputedTokens]) -> dict[str, Any]:
        before = [each for each in steps if each.step.began_at <= batch.posted_at]
        return {
            "posted_at": batch.posted_at,
            "landed_at": batch.landed_at,
            "bytes": batch.num_bytes,
            "descriptors": batch.num_descriptors,
            "spans": [self._span(cut, before) for cut in batch.cuts],
        }

    def _span(self, cut: Cut, steps: Sequence[ComputedTokens]) -> dict[str, Any]:
        layers = self._layers_of.get(cut.span, ())
        began_at, ended_at = self._interval(cut, layers, steps)
        return {
            "group": cut.span.group,
            "layers": [layers[0], layers[-1]] if layers else None,
            "tokens": [cut.first_token, cut.end_token],
            "compute_began_at": began_at,
            "compute_ended_at": ended_at,
        }

    def _interval(
        self, cut: Cut, layers: Sequence[str], steps: Sequence[ComputedTokens]
    ) -> tuple[float | None, float | None]:
        """Return from when to when the layers of a cut ran for its tokens; after a preemption, the last time."""
        if self._request.needs[cut.span].multiple_of == NEVER:
            first, last = (steps[0], steps[-1]) if steps else (None, None)
        else:
            first, last = (_latest_with(token, steps) for token in (cut.first_token, cut.end_token - 1))
        began_at = None if first is None else _before(layers, first.step)
        ended_at = None if last is None else _after(layers, last.step)
        return began_at, ended_at


def clock() -> dict[str, float]:
    """Return the time of day and the monotonic clock's, taken together.

    >>> sorted(clock())
    ['monotonic', 'wall']
    """
    return {"wall": time.time(), "monotonic": time.monotonic()}


def _latest_with(token: int, steps: Sequence[ComputedTokens]) -> ComputedTokens | None:
    return next((each for each in reversed(steps) if each.first_token <= token < each.end_token), None)


def _before(layers: Sequence[str], step: Step) -> float:
    """Return when the layer before these had run: so long theirs cannot have begun."""
    if not layers:
        return step.began_at
    earlier = step.began_at
    for layer, ran_at in step.layers_at.copy().items():
        if layer in layers:
            break
        earlier = ran_at
    return earlier


def _after(layers: Sequence[str], step: Step) -> float | None:
    return step.layers_at.get(layers[-1], step.ended_at) if layers else step.ended_at
