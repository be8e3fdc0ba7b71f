"""The loads of one engine: from a promise to an order for all ranks, until the last of them has reported."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np

from kvferry.arrays import Flags
from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.integrations.vllm.offload_records import OffloadStatistics
from kvferry.integrations.vllm.offload_step import LoadOrder
from kvferry.integrations.vllm.scheduler.offload_requests import OffloadRequest, Question, wanted_blocks
from kvferry.integrations.vllm.scheduler.stored_blocks import RequestBlocks, StoredGroup, alignment, whole_group
from kvferry.integrations.vllm.translate.specs import UNEXPECTED
from kvferry.integrations.vllm.versions import cache_hit_source
from kvferry.peer_log import PeerLog
from kvferry.tiers.host_memory import HostLoad
from kvferry.tiers.load_rule import CopyTimes
from kvferry.tiers.protocol import BlockKey
from kvferry.tiers.stack import Stack

if TYPE_CHECKING:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

logger = PeerLog(logging.getLogger(__name__))

HOST_MEMORY = "host_memory"
_SOURCES = {HOST_MEMORY: cache_hit_source("HOST"), "local_disk": cache_hit_source("DISK")}
"""Of vLLM's sources; a pool has none."""


@dataclass(slots=True, eq=False)
class LoadJob:
    """A load that ranks copy: the keys of the blocks of whole attention, and the tokens by the tier they came from."""

    job_id: int
    keys: tuple[BlockKey, ...]
    tokens_by_tier: Mapping[str, int]
    ordered_at: float


class Loads:
    """What an engine loads. ``counts`` gets counts for people; ``times`` learns how long loads take."""

    def __init__(
        self,
        groups: Sequence[StoredGroup],
        job_ids: Iterator[int],
        counts: Counter[str],
        times: CopyTimes,
        statistics: OffloadStatistics,
        clock: Callable[[], float],
    ) -> None:
        self.jobs: dict[str, LoadJob] = {}
        """By request."""
        self.loading: Counter[BlockKey] = Counter()
        """Blocks of whole attention, and how many loads bring each."""
        self._groups, self._alignment, self._whole_group = groups, alignment(groups), whole_group(groups)
        self._job_ids, self._counts, self._times = job_ids, counts, times
        self._statistics, self._clock = statistics, clock
        self._orders: list[LoadOrder] = []

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
            logger.error("kvferry: %s cannot be loaded: %s", request_id, error, peer=request_id)
            self._counts["refused_loads"] += 1
            job = LoadJob(next(self._job_ids), (), {HOST_MEMORY: num_tokens}, self._clock())
            self._orders.append(LoadOrder(request_id, job.job_id, (), is_refused=True))
        self.jobs[request_id] = job
        self.loading.update(job.keys)

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
        self._times.end(request_id, now, has_landed=not has_failed)
        self._statistics.observe("load_seconds", now - job.ordered_at)
        for key in job.keys:
            self.loading[key] -= 1
            if not self.loading[key]:
                del self.loading[key]
        stack.complete_load(request_id)
        if has_failed:
            self._counts["failed_loads"] += 1
            logger.error("kvferry: a rank could not load the stored blocks of %s.", request_id, peer=request_id)

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
        chosen = wanted_blocks(entry.blocks, *tokens)
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
        self._times.begin(request_id, sum(one.slots.num_bytes for one in loads.values()), now)
        self._count_hit(loads, job, question)
        return job

    def _count_hit(self, loads: Mapping[str, HostLoad], job: LoadJob, question: Question) -> None:
        """Count a load that has been ordered."""
        assert question.promise is not None
        for tier, num_tokens in job.tokens_by_tier.items():
            self._statistics.count("hit_tokens", num_tokens, tier)
        for one in loads.values():
            for tier, is_from in _by_tier(one.keys, question.promise.brought_by):
                self._statistics.count("hit_bytes", one.slots[is_from].num_bytes, tier)
        if question.promise.brought_by:
            self._statistics.observe("ask_seconds", self._clock() - question.asked_at)


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
