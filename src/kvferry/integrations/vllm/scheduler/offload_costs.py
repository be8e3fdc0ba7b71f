"""The scheduler's measurements for load, wait or compute: times of steps and loads, and what the tiers offer.

vLLM plans a step with ``schedule()`` and takes its results with ``update_from_output()``, each once for a step and in
the same order. Under asynchronous scheduling a step is planned before the last one's results are taken: it begins on
the device when the last one ends.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvferry.arrays import Integers
from kvferry.integrations.vllm.scheduler.stored_blocks import RequestBlocks, reachable
from kvferry.tiers.costs import Costs, Decision, Offer, Work
from kvferry.tiers.stack import Stack

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

NUM_PREFIXES = 8
"""Prefixes among those that are offered, besides those that end where the tier changes."""
_PARTS = np.arange(1, NUM_PREFIXES + 1)
MOST_STEPS_AHEAD = 16
"""More planned steps without results mean that results are not reported here; then nothing is measured."""


@dataclass(frozen=True, slots=True)
class _PlannedStep:
    work: Work
    planned_at: float


@dataclass(frozen=True, slots=True)
class _OrderedLoad:
    num_bytes: int
    ordered_at: float
    num_busy_steps: int
    """Steps with tokens that had been planned when the load was ordered."""


class StepTimes:
    """Lets ``costs`` learn from the engine's steps."""

    def __init__(self, costs: Costs) -> None:
        self.num_busy_steps = 0
        self._contexts: dict[str, int] = {}
        """Of each request of the last planned step that has not ended, its tokens after the step."""
        self._costs = costs
        self._planned: deque[_PlannedStep] = deque(maxlen=MOST_STEPS_AHEAD)
        self._last_ended_at = -np.inf

    def begin(self, output: "SchedulerOutput", now: float) -> None:
        """Take a step that vLLM has planned."""
        before = {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        after, num_pairs = {}, 0
        for name, number in output.num_scheduled_tokens.items():
            context = before[name]
            after[name] = end = context + number
            num_pairs += number * (context + end + 1) // 2
        self._contexts = after
        num_tokens = output.total_num_scheduled_tokens
        self.num_busy_steps += num_tokens > 0
        self._planned.append(_PlannedStep(Work(num_tokens, num_pairs), now))

    def forget(self, request_id: str) -> None:
        """Note that a request has ended: no load waits for a step of it."""
        self._contexts.pop(request_id, None)

    @property
    def running(self) -> Work:
        """The work of a step of the requests that run: one token each."""
        num_tokens = len(self._contexts)
        return Work(num_tokens, sum(self._contexts.values()) + num_tokens)

    def end(self, now: float) -> None:
        """Note that vLLM has taken the results of the oldest planned step."""
        if self._planned:
            step = self._planned.popleft()
            self._costs.computed(step.work, now - max(step.planned_at, self._last_ended_at))
            self._last_ended_at = now


class LoadTimes:
    """Lets ``costs`` learn from loads."""

    def __init__(self, costs: Costs, steps: StepTimes) -> None:
        self._costs, self._steps = costs, steps
        self._ordered: dict[str, _OrderedLoad] = {}

    def begin(self, request_id: str, num_bytes: int, now: float) -> None:
        """Note the order of a request's load."""
        self._ordered[request_id] = _OrderedLoad(num_bytes, now, self._steps.num_busy_steps)
        self._costs.loads.begin(request_id, num_bytes, now)

    def end(self, request_id: str, now: float, copy_seconds: float | None, *, has_failed: bool) -> float:
        """Note the end of a load; ``copy_seconds`` is what the slowest rank needed. Return the seconds in all.

        The scheduler hears of the end after a step. In an idle engine what exceeds the copy is the cost of that step.
        """
        load = self._ordered.pop(request_id)
        seconds = now - load.ordered_at
        copied = seconds if copy_seconds is None else min(seconds, copy_seconds)
        self._costs.loads.end(request_id, load.ordered_at + copied, share_landed=float(not has_failed))
        if copy_seconds is not None and load.num_busy_steps == self._steps.num_busy_steps and not has_failed:
            self._costs.waited(seconds - copied)
        return seconds


class LoadDecisions:
    """Decides for each request whether it loads, waits or computes, by what ``steps`` and ``loads`` have measured.

    ``is_whole``: a shorter prefix than the longest is of no use to the engine.
    """

    def __init__(self, max_step_tokens: int, *, is_whole: bool) -> None:
        self._costs = Costs(max_step_tokens)
        self._is_whole = is_whole
        self.steps = StepTimes(self._costs)
        self.loads = LoadTimes(self._costs, self.steps)

    def decide(self, request: "Request", hit: "Hit", stack: Stack) -> Decision:
        """Return what the request shall do with this hit."""
        self._costs.promotions = stack.promotion_times
        offer = hit.offer(request.num_tokens, stack, is_whole=self._is_whole)
        decision = self._costs.decide(offer, self.steps.running)
        logger.debug(
            "kvferry: request %s, %d tokens of which %d are here: %s",
            request.request_id, offer.num_tokens, offer.num_local, decision,
        )  # fmt: skip
        return decision

    def snapshot(self) -> dict[str, dict[str, float]]:
        """Return the measured rates."""
        return self._costs.snapshot()


@dataclass(frozen=True, slots=True, eq=False)
class Hit:
    """The blocks behind ``first_token`` that a request can have; ``ends`` are the boundaries that a load can reach.

    ``places`` says for the stored blocks of each group, from the one with the first token on, which tier has them:
    as :meth:`Stack.locate`, which calls a block of no tier ``nowhere``.
    """

    blocks: RequestBlocks
    first_token: int
    ends: Integers
    places: Sequence[Integers]
    nowhere: int

    @classmethod
    def of(cls, blocks: RequestBlocks, stack: Stack, first_token: int, end_token: int, now: float) -> "Hit":
        """Return the longest hit up to ``end_token``."""
        places = [
            stack.locate(keys[first_token // group.tokens :], now)
            for group, keys in zip(blocks.groups, blocks.keys, strict=True)
        ]
        nowhere = 1 + len(stack.promotion_times)
        held = [where != nowhere for where in places]
        return cls(blocks, first_token, reachable(blocks, held, first_token, end_token), places, nowhere)

    @property
    def boundary(self) -> int:
        """The end of the hit; ``first_token`` where there is none."""
        return int(self.ends[-1]) if len(self.ends) else self.first_token

    def offer(self, num_tokens: int, stack: Stack, *, is_whole: bool) -> Offer:
        """Return the prefixes to choose from, for a request with ``num_tokens``."""
        ends = self.ends[-1:] if is_whole else self._chosen_ends()
        amounts = np.zeros((self.nowhere, len(ends)), np.int64)
        for group, where in zip(self.blocks.groups, self.places, strict=True):
            before = self.first_token // group.tokens
            begins = group.first_needed(np.array(self.first_token), ends) // group.tokens - before
            behind = ends // group.tokens - before
            for place in range(self.nowhere):
                up_to = np.zeros(len(where) + 1, np.int64)
                np.cumsum(where == place, out=up_to[1:])
                amounts[place] += stack.slot_bytes[group.name] * (up_to[behind] - up_to[np.minimum(begins, behind)])
        lower = dict(zip(stack.promotion_times, amounts[1:], strict=True))
        return Offer(num_tokens, self.first_token, ends, amounts.sum(axis=0), lower, stack.queued_bytes)

    def is_below(self) -> bool:
        """Return whether a block of the hit, or behind it, lies in a lower tier."""
        return any(((where > 0) & (where < self.nowhere)).any() for where in self.places)

    def _chosen_ends(self) -> Integers:
        """Return where prefixes end: where the tier changes, and some others of equal length."""
        is_chosen = np.zeros(len(self.ends), np.bool_)
        if len(self.ends):
            is_chosen[-(-_PARTS * len(self.ends) // NUM_PREFIXES) - 1] = True
        for group, where in zip(self.blocks.groups, self.places, strict=True):
            changes = np.flatnonzero(where[1:] != where[:-1])[:NUM_PREFIXES] + 1
            if len(changes):
                last = self.ends.searchsorted((self.first_token // group.tokens + changes) * group.tokens, "right") - 1
                is_chosen[last[last >= 0]] = True
        return self.ends[is_chosen]
