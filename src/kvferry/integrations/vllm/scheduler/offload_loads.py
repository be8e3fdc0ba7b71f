"""The loads of one engine: what a request asks of the tiers, what is promised to it, and the copies of all ranks.

A hit is promised only when every block of it lies verified and pinned in host memory, so no promise can break.
"""

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np

from kvferry.arrays import Flags, Integers
from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.integrations.vllm.offload_settings import OffloadSettings
from kvferry.integrations.vllm.offload_step import HOST_MEMORY, ComputedCause, LoadOrder, OffloadStatistics
from kvferry.integrations.vllm.scheduler.blocks import num_recomputed
from kvferry.integrations.vllm.scheduler.offload_events import BlockEvents
from kvferry.integrations.vllm.scheduler.stored_blocks import (
    RequestBlocks,
    StoredGroup,
    alignment,
    longest_hit,
    whole_group,
)
from kvferry.integrations.vllm.translate import UNEXPECTED
from kvferry.integrations.vllm.versions import cache_hit_source
from kvferry.layout.shard import CacheKind
from kvferry.peer_log import PeerLog
from kvferry.tiers.load_rule import Decision, LoadRule, Option
from kvferry.tiers.protocol import BlockKey
from kvferry.tiers.stack import Promise, Stack

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)
peer_logger = PeerLog(logger)

_SOURCES = {HOST_MEMORY: cache_hit_source("HOST"), "local_disk": cache_hit_source("DISK")}
"""Of vLLM's sources; a pool has none."""


@dataclass(slots=True, eq=False)
class Question:
    """The blocks of each group for which a request asks the tiers, from ``first_token`` to ``boundary``."""

    first_token: int
    boundary: int
    wanted: Mapping[str, Sequence[BlockKey]]
    wait_seconds: float
    """How long the request waits for lower tiers."""
    asked_at: float
    promise: Promise | None = None


@dataclass(slots=True, eq=False)
class OffloadRequest:
    """A request. ``num_written``: tokens whose keys and values lie in its blocks after the last step that was built."""

    request: "Request"
    blocks: RequestBlocks | None = None
    num_written: int = 0
    may_load: bool = True
    may_store: bool = True
    question: Question | None = None
    decided: tuple[int, int, Decision] | None = None
    """First token and boundary of the last hit, and its decision: vLLM asks in each step until the request has room."""
    num_not_brought: int = 0
    """Tokens of the last hit that its tiers have not brought."""
    promised: int = 0
    """Tokens that were promised in this call of vLLM's ``schedule``."""
    waits_since: float | None = None
    """The first question of those in a row that had no answer."""


@dataclass(slots=True, eq=False)
class LoadJob:
    """A load that ranks copy: the keys of the blocks of whole attention, and the tokens by the tier they came from."""

    job_id: int
    keys: tuple[BlockKey, ...]
    tokens_by_tier: Mapping[str, int]
    ordered_at: float


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
        lower = zip(stack.promotion_times, num_bytes[1:].tolist(), strict=True)
        return Option(boundary - self.first_token, int(num_bytes.sum()), {name: size for name, size in lower if size})


class Loads:
    """What requests ask of the tiers, are promised and load. ``counts`` gets counts for people."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        groups: Sequence[StoredGroup],
        settings: OffloadSettings,
        rule: LoadRule,
        clock: Callable[[], float],
        job_ids: Iterator[int],
        counts: Counter[str],
        statistics: OffloadStatistics,
        events: BlockEvents | None,
    ) -> None:
        self.promised: dict[str, OffloadRequest] = {}
        """Requests that were promised something in this call of vLLM's ``schedule``."""
        self.jobs: dict[str, LoadJob] = {}
        """By request."""
        self.loading: Counter[BlockKey] = Counter()
        """Blocks of whole attention, and how many loads bring each."""
        self._groups, self._alignment, self._whole_group = groups, alignment(groups), whole_group(groups)
        self._settings, self._rule, self._job_ids = settings, rule, job_ids
        self._counts, self._statistics, self._events, self._clock = counts, statistics, events, clock
        shapes = [group.shape for group in groups]
        self._num_recomputed = num_recomputed(shapes)
        # Without chunked prefill a kernel of MLA on a CPU computes a prompt whole, or one token.
        is_whole = any(shape.kind is CacheKind.MLA for shape in shapes)
        self._leaves_one_token = is_whole and not vllm_config.scheduler_config.enable_chunked_prefill
        self._caches_prefixes = bool(vllm_config.cache_config.enable_prefix_caching)
        self._pool: BlockPool | None = None
        self._orders: list[LoadOrder] = []

    def bind(self, pool: "BlockPool") -> None:
        """Know the engine's own cache."""
        self._pool = pool

    def may_load(self, entry: OffloadRequest) -> bool:
        """Return whether the request may be promised anything: not while it loads, and never after a failed load."""
        request = entry.request
        # A prefill engine has the prompt: another connector loads it, and None would stall that load.
        is_elsewhere = bool((request.kv_transfer_params or {}).get("do_remote_prefill"))
        is_kept_out = is_elsewhere or request.skip_reading_prefix_cache or request.request_id in self.jobs
        return entry.may_load and not is_kept_out

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
        entry.num_not_brought = 0 if entry.question is None else entry.question.boundary - boundary
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

    def take_orders(self) -> list[LoadOrder]:
        """Return the orders since the last call, for the ranks."""
        orders, self._orders = self._orders, []
        return orders

    def order(
        self,
        stack: Stack | None,
        entry: OffloadRequest,
        num_tokens: int,
        block_ids: Callable[[], Sequence[Sequence[int]]],
    ) -> None:
        """Order a load of so many of the promised tokens into the request's blocks.

        One that cannot be is ordered as refused: the request waits for a load by now, and only its failure ends that.
        """
        request_id = entry.request.request_id
        try:
            job = self._begin(stack, entry, num_tokens, block_ids())
        except KVFerryError as error:
            peer_logger.error("kvferry: %s cannot be loaded: %s", request_id, error, peer=request_id)
            self._counts["refused_loads"] += 1
            job = LoadJob(next(self._job_ids), (), {HOST_MEMORY: num_tokens}, self._clock())
            self._orders.append(LoadOrder(request_id, job.job_id, (), is_refused=True))
        self.jobs[request_id] = job
        self.loading.update(job.keys)

    def count_not_brought(self, entry: OffloadRequest) -> None:
        """The engine has given the request blocks: what its tiers have not brought by now will be computed."""
        self._statistics.count("computed_tokens", entry.num_not_brought, ComputedCause.NOT_BROUGHT.value)
        entry.num_not_brought = 0

    def sources(self, request_id: str) -> "dict[CacheHitSource, int]":
        """Return where the tokens of a load come from: host memory, or the tier that brought them there for it."""
        sources: Counter[CacheHitSource] = Counter()
        if request_id in self.jobs:
            for tier, number in self.jobs[request_id].tokens_by_tier.items():
                sources[_SOURCES.get(tier, cache_hit_source("EXTERNAL_UNSPECIFIED"))] += number
        return dict(sources)

    def finish(self, stack: Stack, request_id: str, *, has_failed: bool) -> None:
        """End a load, of which no rank reads the slots any more."""
        job = self.jobs.pop(request_id)
        now = self._clock()
        self._rule.loads.end(request_id, now, has_landed=not has_failed)
        self._statistics.observe("load_seconds", now - job.ordered_at)
        for key in job.keys:
            self.loading[key] -= 1
            if not self.loading[key]:
                del self.loading[key]
        stack.complete_load(request_id)
        if has_failed:
            self._counts["failed_loads"] += 1
            num_tokens = sum(job.tokens_by_tier.values())
            self._statistics.count("computed_tokens", num_tokens, ComputedCause.LOAD_FAILED.value)
            peer_logger.error("kvferry: a rank could not load the stored blocks of %s.", request_id, peer=request_id)

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
        is_same = question is not None and question.first_token == first_token
        if question is None or not is_same or question.wanted != blocks.wanted(first_token, question.boundary):
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
        return any(key in self.loading for key in blocks.keys[group.index][place : place + 1])

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
        wanted = blocks.wanted(first_token, boundary)
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
        tokens = hit.first_token, hit.boundary
        if entry.decided is None or entry.decided[:2] != tokens:
            num_tokens = entry.request.num_tokens - hit.first_token
            options = hit.options(stack, is_whole=self._leaves_one_token)
            decision = self._rule.decide(num_tokens, options, stack.promotion_times)
            logger.debug(
                "kvferry: request %s, %d tokens: %s %d (%s; expected: %s, computing all: %s)",
                entry.request.request_id, num_tokens, decision.choice, decision.num_tokens, decision.because,
                _milliseconds(decision.seconds), _milliseconds(decision.compute_seconds),
            )  # fmt: skip
            self._statistics.count("decisions", 1, decision.choice.value, decision.because.value)
            entry.decided = *tokens, decision
        return entry.decided[2]

    def _begin(
        self, stack: Stack | None, entry: OffloadRequest, num_tokens: int, block_ids: Sequence[Sequence[int]]
    ) -> LoadJob:
        """Order the load.

        Raises :class:`KVFerryError` for tokens that were not promised, or for which vLLM has no block.
        """
        question, request_id = entry.question, entry.request.request_id
        is_promised = question is not None and 0 < num_tokens <= entry.promised
        if stack is None or question is None or entry.blocks is None or not is_promised:
            message = f"vLLM loads {num_tokens} tokens; {entry.promised} were promised."
            raise HandoffError(Reason.INVALID_REQUEST, message, UNEXPECTED)
        tokens = question.first_token, question.first_token + num_tokens
        if tokens[1] % self._alignment:
            message = f"vLLM loads up to token {tokens[1]}, within a stored block of {self._alignment} tokens."
            raise HandoffError(Reason.INVALID_REQUEST, message, UNEXPECTED)
        chosen = entry.blocks.wanted(*tokens)
        loads = stack.begin_load(request_id, chosen)
        copies = tuple(
            group.load_blocks(tokens, loads[group.name].block_ids, block_ids[group.index]) for group in self._groups
        )
        keys = tuple(chosen[self._whole_group.name]) if self._whole_group is not None else ()
        now = self._clock()
        job = LoadJob(next(self._job_ids), keys, _tokens_by_tier(entry.blocks, question, chosen, tokens), now)
        self._orders.append(LoadOrder(request_id, job.job_id, copies))
        self._counts["loads"] += 1
        self._counts["loaded_tokens"] += num_tokens
        self._rule.loads.begin(request_id, sum(one.slots.num_bytes for one in loads.values()), now)
        assert question.promise is not None
        for tier, number in job.tokens_by_tier.items():
            self._statistics.count("hit_tokens", number, tier)
        for one in loads.values():
            for tier, is_from in _by_tier(one.keys, question.promise.brought_by):
                self._statistics.count("hit_bytes", one.slots[is_from].num_bytes, tier)
        if question.promise.brought_by:
            self._statistics.observe("ask_seconds", now - question.asked_at)
        return job


def _tokens_by_tier(
    blocks: RequestBlocks, question: Question, chosen: Mapping[str, Sequence[BlockKey]], tokens: tuple[int, int]
) -> dict[str, int]:
    """Return how many tokens of a load host memory held when the request asked, and how many each tier brought.

    Groups differ: the tokens are those of the group of which the load needs the most.
    """
    assert question.promise is not None
    group = max(blocks.groups, key=lambda group: len(chosen[group.name]) * group.tokens)
    keys = chosen[group.name]
    ends = tokens[1] - np.arange(len(keys))[::-1] * group.tokens
    sizes = ends - np.maximum(ends - group.tokens, tokens[0])
    sizes[0] += tokens[1] - tokens[0] - sizes.sum()  # a window's first tokens need no block
    found = {tier: int(sizes[is_from].sum()) for tier, is_from in _by_tier(keys, question.promise.brought_by)}
    return {tier: number for tier, number in found.items() if number}


def _by_tier(keys: Sequence[BlockKey], brought_by: Mapping[BlockKey, str]) -> Iterator[tuple[str, Flags]]:
    """Yield each tier and which of the blocks came from it."""
    if not brought_by:
        yield HOST_MEMORY, np.ones(len(keys), np.bool_)
        return
    tiers = np.fromiter(map(brought_by.get, keys, repeat(HOST_MEMORY)), np.object_, len(keys))
    for tier in {HOST_MEMORY, *brought_by.values()}:
        yield tier, tiers == tier


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
