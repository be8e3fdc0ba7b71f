"""Hits: what a request asks of the tiers, and how many tokens are promised to it.

A hit is promised only when every block of it lies verified and pinned in host memory, so no promise can break.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvferry.arrays import Flags, Integers
from kvferry.integrations.vllm.offload_records import OffloadStatistics
from kvferry.integrations.vllm.offload_settings import OffloadSettings
from kvferry.integrations.vllm.scheduler.offload_events import BlockEvents
from kvferry.integrations.vllm.scheduler.offload_loads import Loads
from kvferry.integrations.vllm.scheduler.offload_requests import Decided, OffloadRequest, Question, wanted_blocks
from kvferry.integrations.vllm.scheduler.stored_blocks import (
    RequestBlocks,
    StoredGroup,
    alignment,
    longest_hit,
    whole_group,
)
from kvferry.tiers.load_rule import Decision, LoadRule, Option
from kvferry.tiers.stack import Stack

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Hit:
    """The blocks up to ``boundary`` that a request can have behind ``first_token``.

    ``places`` says for the stored blocks of each group, from the one with the first token on, which tier has them:
    as :meth:`Stack.locate`, which calls a block of no tier ``nowhere``.
    """

    blocks: RequestBlocks
    first_token: int
    end_token: int
    places: Sequence[Integers]
    nowhere: int
    boundary: int

    @classmethod
    def of(cls, blocks: RequestBlocks, stack: Stack, first_token: int, end_token: int, now: float) -> "Hit":
        """Return the longest hit up to ``end_token``."""
        places = [
            stack.locate(keys[first_token // group.tokens :], now)
            for group, keys in zip(blocks.groups, blocks.keys, strict=True)
        ]
        nowhere = 1 + len(stack.promotion_times)
        boundary = longest_hit(blocks, [where != nowhere for where in places], first_token, end_token)
        return cls(blocks, first_token, end_token, places, nowhere, boundary)

    def options(self, stack: Stack, *, is_whole: bool) -> list[Option]:
        """Return what can be loaded: the prefix that host memory has, and longer ones with each lower tier's blocks.

        ``is_whole``: a shorter prefix than the longest is of no use to the engine.
        """
        boundaries = {self.boundary}
        if not is_whole and self.is_below():
            for place in range(self.nowhere - 1):
                held = [where <= place for where in self.places]
                boundaries.add(longest_hit(self.blocks, held, self.first_token, self.end_token))
        return [self._option(stack, boundary) for boundary in sorted(boundaries - {self.first_token})]

    def is_below(self) -> bool:
        """Return whether a block of the hit, or behind it, lies in a lower tier."""
        return any(((where > 0) & (where < self.nowhere)).any() for where in self.places)

    def _option(self, stack: Stack, boundary: int) -> Option:
        needed, num_bytes = self.blocks.needed(self.first_token, boundary), np.zeros(self.nowhere, np.int64)
        for group, where, (begin, end) in zip(self.blocks.groups, self.places, needed, strict=True):
            before = self.first_token // group.tokens
            counts = np.bincount(where[begin - before : end - before], minlength=self.nowhere)
            num_bytes += counts[: self.nowhere] * stack.slot_bytes[group.name]
        lower = {
            name: number for name, number in zip(stack.promotion_times, num_bytes[1:].tolist(), strict=True) if number
        }
        return Option(boundary - self.first_token, int(num_bytes.sum()), lower)


class Hits:
    """The questions of all requests.

    ``num_recomputed`` tokens at the end of a prompt are never loaded. ``leaves_one_token``: the engine can use a hit
    only if it leaves at most one token to compute. ``caches_prefixes``: the engine has a cache of its own.
    """

    def __init__(
        self,
        groups: Sequence[StoredGroup],
        settings: OffloadSettings,
        loads: Loads,
        rule: LoadRule,
        statistics: OffloadStatistics,
        events: BlockEvents | None,
        *,
        num_recomputed: int,
        leaves_one_token: bool,
        caches_prefixes: bool,
        clock: Callable[[], float],
    ) -> None:
        self.promised: dict[str, OffloadRequest] = {}
        """Requests that were promised something in this call of vLLM's ``schedule``."""
        self._groups, self._settings, self._loads = groups, settings, loads
        self._alignment, self._whole_group = alignment(groups), whole_group(groups)
        self._rule, self._statistics, self._events = rule, statistics, events
        self._num_recomputed, self._leaves_one_token = num_recomputed, leaves_one_token
        self._caches_prefixes, self._clock = caches_prefixes, clock
        self._pool: BlockPool | None = None

    def bind(self, pool: "BlockPool") -> None:
        """Know the engine's own cache."""
        self._pool = pool

    def may_load(self, entry: OffloadRequest) -> bool:
        """Return whether the request may be promised anything: not while it loads, and never after a failed load."""
        request = entry.request
        params = request.kv_transfer_params or {}
        # A prefill engine has the prompt: another connector loads it, and None would stall that load.
        is_elsewhere = bool(params.get("do_remote_prefill"))
        return (
            entry.may_load
            and not is_elsewhere
            and not request.skip_reading_prefix_cache
            and request.request_id not in self._loads.jobs
        )

    def prefetch(self, stack: Stack, entry: OffloadRequest, blocks: RequestBlocks) -> None:
        """Let lower tiers begin to bring what a request will need that waits in vLLM's queue."""
        question = self._question(stack, entry, blocks, self._num_cached_tokens(entry.request))
        for group, keys in question.wanted.items():
            stack.prefetch(group, keys, self._clock())

    def promise(self, stack: Stack, entry: OffloadRequest, blocks: RequestBlocks, first_token: int) -> int | None:
        """Return how many tokens behind the first are promised; None while it is worth asking again."""
        boundary = self._ask(stack, entry, blocks, first_token)
        if boundary is None:
            return None
        entry.waits_since = None
        if boundary == first_token or not self._is_worth_loading(entry, boundary):
            self.drop(stack, entry)
            return 0
        entry.promised = boundary - first_token
        self.promised[entry.request.request_id] = entry
        return entry.promised

    def drop(self, stack: Stack | None, entry: OffloadRequest) -> None:
        """End what a request asked for and what was promised to it; a load goes on."""
        if entry.question is not None and stack is not None:
            stack.drop(entry.request.request_id)
        entry.question, entry.promised = None, 0
        self.promised.pop(entry.request.request_id, None)

    def _num_cached_tokens(self, request: "Request") -> int:
        """Return how many tokens the engine has itself, as far as its block pool says now."""
        group, pool = self._whole_group, self._pool
        if group is None or pool is None or not self._caches_prefixes:
            return 0
        size = group.shape.block_size
        ends = request.block_hashes[size // group.tokens_per_hash - 1 :: size // group.tokens_per_hash]
        # vLLM evicts the end of a prefix first.
        num_blocks = bisect_left(ends, True, key=lambda end: pool.get_cached_block(end, [group.index]) is None)
        return num_blocks * size // self._alignment * self._alignment

    def _is_worth_loading(self, entry: OffloadRequest, boundary: int) -> bool:
        """Return whether the engine can use a load up to the boundary."""
        return not self._leaves_one_token or entry.request.num_tokens - boundary <= 1

    def _ask(self, stack: Stack, entry: OffloadRequest, blocks: RequestBlocks, first_token: int) -> int | None:
        """Return the boundary up to which blocks are pinned for the request; None to ask again."""
        question = entry.question
        if entry.waits_since is None:
            entry.waits_since = self._clock()
        if (
            question is None
            or question.first_token != first_token
            or question.wanted != wanted_blocks(blocks, first_token, question.boundary)
        ):
            self.drop(stack, entry)
            if self._is_being_loaded(blocks, first_token) and self._wait_seconds(entry):
                return None
            question = entry.question = self._question(stack, entry, blocks, first_token)
        if question.boundary == first_token:
            return first_token
        request_id = entry.request.request_id
        question.promise = stack.ask(request_id, question.wanted, self._clock(), question.wait_seconds)
        if question.promise is None:
            return None
        return longest_hit(blocks, _held(blocks, question), first_token, question.boundary)

    def _is_being_loaded(self, blocks: RequestBlocks, first_token: int) -> bool:
        """Return whether another request loads the next block: vLLM has it as a local hit as soon as that load ends."""
        group = self._whole_group
        if group is None or not self._caches_prefixes:
            return False
        place = first_token // group.tokens
        return any(key in self._loads.loading for key in blocks.keys[group.index][place : place + 1])

    def _question(self, stack: Stack, entry: OffloadRequest, blocks: RequestBlocks, first_token: int) -> Question:
        """Return which blocks are worth asking for, those that a lower tier or a store is bringing included."""
        now = self._clock()
        end = entry.request.num_tokens - self._num_recomputed
        hit = Hit.of(blocks, stack, first_token, end, now)
        boundary, wait_seconds = hit.boundary, self._wait_seconds(entry)
        if not self._is_worth_loading(entry, boundary):
            boundary = first_token
        if boundary > first_token and self._settings.loads == "when-quicker":
            decision = self._decide(stack, entry, hit)
            boundary = first_token + decision.num_tokens
            if decision.saved_seconds is not None:
                wait_seconds = min(wait_seconds, decision.saved_seconds)
        wanted = wanted_blocks(blocks, first_token, boundary)
        if self._events is not None and hit.is_below():
            for group, (begin, end) in zip(self._groups, blocks.needed(first_token, boundary), strict=True):
                self._events.learn(entry.request, group, range(begin, end), wanted[group.name])
        return Question(first_token, boundary, wanted, wait_seconds, asked_at=now)

    def _wait_seconds(self, entry: OffloadRequest) -> float:
        """Return how long the request may still wait, whatever it has asked for since it began to wait."""
        waited = 0.0 if entry.waits_since is None else self._clock() - entry.waits_since
        return max(0.0, self._settings.load_wait_seconds - waited)

    def _decide(self, stack: Stack, entry: OffloadRequest, hit: Hit) -> Decision:
        """Return what is decided for a hit, once."""
        last = entry.decided
        if last is None or (last.first_token, last.boundary) != (hit.first_token, hit.boundary):
            num_tokens = entry.request.num_tokens - hit.first_token
            options = hit.options(stack, is_whole=self._leaves_one_token)
            decision = self._rule.decide(num_tokens, options, stack.promotion_times)
            logger.debug(
                "kvferry: request %s, %d tokens: %s %d (%s; expected: %s, computing all: %s)",
                entry.request.request_id, num_tokens, decision.choice, decision.num_tokens, decision.because,
                _milliseconds(decision.seconds), _milliseconds(decision.compute_seconds),
            )  # fmt: skip
            self._statistics.record_decision(decision)
            last = entry.decided = Decided(hit.first_token, hit.boundary, decision)
        return last.decision


def _milliseconds(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1e3:.1f} ms"


def _held(blocks: RequestBlocks, question: Question) -> list[Flags]:
    """Return which stored blocks of each group are pinned, from the block with the question's first token on."""
    assert question.promise is not None
    promise, held = question.promise, []
    needed = blocks.needed(question.first_token, question.boundary)
    for group, keys, (begin, end) in zip(blocks.groups, blocks.keys, needed, strict=True):
        first = question.first_token // group.tokens
        is_held = np.zeros(len(keys) - first, np.bool_)
        is_held[begin - first : end - first] = promise.held[group.name]
        held.append(is_held)
    return held
