"""The offload connector inside vLLM's scheduler: decides which blocks are stored, and which hits are promised.

A hit is promised only when every block of it lies verified and pinned in host memory, so no promise can break. Source
blocks of a store are kept by reference until every rank has copied its part: no step waits, and no block is reused
under a copy. See docs/decisions/offload-connector.md.
"""

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, repeat
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from kvferry.arrays import Flags
from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.integrations.vllm.offload_names import BlockNames, engine_facts
from kvferry.integrations.vllm.offload_records import OffloadStatistics, difference
from kvferry.integrations.vllm.offload_settings import OffloadSettings
from kvferry.integrations.vllm.offload_step import LoadOrder, OffloadStep, RankReport
from kvferry.integrations.vllm.scheduler.blocks import num_recomputed
from kvferry.integrations.vllm.scheduler.offload_costs import Hit, LoadDecisions
from kvferry.integrations.vllm.scheduler.offload_events import BlockEvents
from kvferry.integrations.vllm.scheduler.offload_stores import ReadBlockIds, Stores
from kvferry.integrations.vllm.scheduler.offload_tiers import Start, Tiers, check_settings, open_tiers
from kvferry.integrations.vllm.scheduler.stored_blocks import (
    RequestBlocks,
    alignment,
    check_window_interval,
    longest_hit,
    stored_groups,
)
from kvferry.integrations.vllm.scheduler.tier_waits import TierWaits
from kvferry.integrations.vllm.translate.shards import group_shapes
from kvferry.integrations.vllm.translate.specs import UNEXPECTED, refuse
from kvferry.layout.group import CacheKind
from kvferry.tiers.costs import Decision
from kvferry.tiers.host_memory import HostLoad
from kvferry.tiers.protocol import BlockKey
from kvferry.tiers.stack import Promise, Stack

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

HOST_MEMORY = "host_memory"
_SOURCES = {HOST_MEMORY: CacheHitSource.HOST, "local_disk": CacheHitSource.DISK}
"""Of vLLM's sources; a pool has none."""
_WHOLE = (CacheKind.ATTENTION, CacheKind.MLA)
_WITHOUT_TAIL = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)
"""How a request ends whose last blocks are not stored. vLLM aborts all requests before it resets its cache, which fails
while a block is kept."""


@dataclass(slots=True, eq=False)
class _Question:
    """The blocks of each group for which a request asks the tiers, from ``first_token`` to ``boundary``."""

    first_token: int
    boundary: int
    wanted: Mapping[str, Sequence[BlockKey]]
    wait_seconds: float = 0.0
    """How long the request waits for lower tiers."""
    asked_at: float = 0.0
    promise: Promise | None = None


@dataclass(slots=True, eq=False)
class _Decided:
    """What was decided for a hit; vLLM asks for it again in each step until it has room for the request."""

    first_token: int
    boundary: int
    decision: Decision


@dataclass(slots=True, eq=False)
class _LoadJob:
    """A load that ranks copy: the keys of the blocks of whole attention, and the tokens by the tier they came from."""

    job_id: int
    keys: tuple[BlockKey, ...]
    tokens_by_tier: Mapping[str, int]


@dataclass(slots=True, eq=False)
class _Entry:
    """A request. ``num_written``: tokens whose keys and values lie in its blocks after the last step that was built."""

    request: "Request"
    blocks: RequestBlocks | None = None
    num_written: int = 0
    may_load: bool = True
    may_store: bool = True
    question: _Question | None = None
    decided: _Decided | None = None
    promised: int = 0
    """Tokens that were promised in this call of vLLM's ``schedule``."""
    waits_since: float | None = None
    """The first question of those in a row that had no answer."""


class OffloadScheduler:
    """One engine. Every method has the name of vLLM's call that it answers; all are of the engine core's thread."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
        settings: OffloadSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        shapes = group_shapes(kv_cache_config)
        parallel = vllm_config.parallel_config
        # The engine core sets it before it makes the scheduler; in tests it may be missing.
        tokens_per_hash = (
            kv_cache_config.hash_block_size or resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1]
        )
        self._settings, self._clock = settings, clock
        self._groups = stored_groups(shapes, settings.block_size, tokens_per_hash)
        check_window_interval(shapes, settings.window_interval)
        self._alignment = alignment(self._groups)
        self._num_ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        self._caches_prefixes = bool(vllm_config.cache_config.enable_prefix_caching)
        # Without chunked prefill a kernel of MLA on a CPU computes a prompt whole, or one token.
        is_whole = any(shape.kind is CacheKind.MLA for shape in shapes)
        self._leaves_one_token = is_whole and not vllm_config.scheduler_config.enable_chunked_prefill
        # A drafter's caches of the last accepted tokens are settled by its next pass. Until then they are no error: the
        # model checks all drafts. They would only be accepted less often.
        num_drafts = vllm_config.num_speculative_tokens
        self._num_unsettled = num_drafts + 1 if num_drafts else 0
        self._num_recomputed = num_recomputed(shapes)
        # Every load of a longer prefix has all earlier blocks of such a group.
        self._whole_group = next((group for group in self._groups if group.shape.kind in _WHOLE), None)

        facts = engine_facts(vllm_config, tokens_per_hash, settings.model_id)
        check_settings(settings, facts, parallel.data_parallel_index)

        def make_tiers(ranks: Sequence[bytes]) -> Tiers:
            engine_blocks = self._groups[0].engine_blocks
            tiers = open_tiers(settings, facts, ranks, engine_blocks, parallel.data_parallel_index)
            if self._was_reset:
                tiers.names = tiers.names.renewed()
            tiers.stack.journal.is_kept = self._events is not None
            return tiers

        self._start = Start(self._num_ranks, make_tiers)
        self._was_reset = False
        self._pool: BlockPool | None = None
        self._job_ids = count(1)
        self._requests: dict[str, _Entry] = {}
        self._promised: dict[str, _Entry] = {}
        self._loads: dict[str, _LoadJob] = {}
        """By request."""
        self._loading: Counter[BlockKey] = Counter()
        self._step = OffloadStep()
        self._counts: Counter[str] = Counter()
        self._statistics = OffloadStatistics()
        events = vllm_config.kv_events_config
        self._events = (
            BlockEvents(self._groups, kv_cache_config) if events is not None and events.enable_kv_cache_events else None
        )
        self._stores = Stores(
            self._groups, self._num_ranks, settings.window_interval, self._job_ids, self._counts, self._events
        )
        self._reported: Mapping[tuple[str, ...], int] = {}
        """The tiers' totals that were reported."""
        self._decisions = LoadDecisions(
            vllm_config.scheduler_config.max_num_batched_tokens, is_whole=self._leaves_one_token
        )
        self._tier_waits = TierWaits()
        self._copy_seconds: dict[int, float] = {}
        """Of loads that have not been reported by all ranks, what the slowest rank needed."""

    def bind_block_pool(self, pool: "BlockPool") -> None:
        """Keep blocks in this pool from now on."""
        self._pool = pool
        self._stores.bind(pool)

    # Hits.

    def on_new_request(self, request: "Request") -> None:
        """Know a request before it is scheduled, and let lower tiers bring what it will need while it waits."""
        entry, tiers = self._entry(request), self._start.tiers
        if tiers is None or not tiers.stack.has_lower_tiers or not self._may_load(entry):
            return
        question = self._question(tiers, entry, self._num_cached_tokens(tiers, entry))
        for group, keys in question.wanted.items():
            tiers.stack.prefetch(group, keys, self._clock())

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens behind the computed ones are promised; None while it is worth asking again.

        A promise is for this call of vLLM's ``schedule``: what is not taken up is dropped at its end.
        """
        entry = self._entry(request)
        entry.num_written = 0  # vLLM asks only where a request has no blocks, or has lost them
        tiers = self._start.tiers
        if tiers is None or not self._may_load(entry):
            return 0, False
        boundary = self._ask(tiers, entry, num_computed_tokens)
        if boundary is None:
            self._counts["asked_again"] += 1
            return None, False
        entry.waits_since = None
        if boundary == num_computed_tokens or not self._is_worth_loading(entry, num_computed_tokens, boundary):
            self._drop(entry)
            return 0, False
        entry.promised = boundary - num_computed_tokens
        self._promised[request.request_id] = entry
        return entry.promised, True

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Order the promised load into these blocks; with 0 tokens the promise is not taken up."""
        entry = self._entry(request)
        if not num_external_tokens:
            self._drop(entry)
            return
        request_id = request.request_id
        try:
            load = self._begin_load(entry, num_external_tokens, blocks.get_block_ids())
        except KVFerryError as error:
            # The request waits for a load from now on; only a load that fails ends that.
            logger.error("kvferry: %s cannot be loaded: %s", request_id, error)
            self._counts["refused_loads"] += 1
            load = _LoadJob(next(self._job_ids), (), {HOST_MEMORY: num_external_tokens})
            self._step.loads.append(LoadOrder(request_id, load.job_id, (), is_refused=True))
            self._decisions.loads.begin(request_id, 0, self._clock())
        self._loads[request_id] = load
        self._loading.update(load.keys)
        self._drop(entry)

    def get_external_cache_hit_sources(self, request: "Request", num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Return where the tokens of the load come from: host memory, or the tier that brought them there for it."""
        load = self._loads.get(request.request_id)
        if load is None or not num_external_tokens:
            return {}
        sources: Counter[CacheHitSource] = Counter()
        for tier, number in load.tokens_by_tier.items():
            sources[_SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)] += number
        return dict(sources)

    # Steps.

    def build_connector_meta(self, output: "SchedulerOutput") -> OffloadStep:
        """Return the orders of a step: blocks that the step fills are stored once it has been computed."""
        for request_id in output.preempted_req_ids or ():
            if request_id in self._requests:
                self._requests[request_id].num_written = 0
        tiers = self._start.tiers
        state = output.kv_connector_block_state
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            entry = self._requests.get(request_id)
            if entry is not None:
                entry.num_written = entry.request.num_computed_tokens + num_scheduled
                if tiers is not None and state is not None:
                    self._offer(tiers, entry, self._num_settled(entry), partial(state.get_block_ids, request_id))
        if tiers is not None:
            self._stores.order(tiers.stack)
        # After the stores: they evict nothing that was promised, and vLLM may ask again in the next step.
        for entry in list(self._promised.values()):
            self._drop(entry)
        if tiers is not None:
            tiers.stack.poll(self._clock())
        self._decisions.steps.begin(output, self._clock())
        step, self._step = self._step, OffloadStep()
        step.stores = self._stores.take_orders()
        step.computes = output.total_num_scheduled_tokens > 0
        step.wait_seconds = self._tier_wait(step)
        return step

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Take what all ranks have reported of a step."""
        if connector_output.invalid_block_ids:
            self._disown_stores()
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, RankReport):
            self._note_start(report)
            self._take_stored(report)
            for job_id, seconds in report.load_seconds.items():
                self._copy_seconds[job_id] = max(seconds, self._copy_seconds.get(job_id, 0.0))
        failed = connector_output.failed_recving or ()
        for request_id in connector_output.finished_recving or ():
            if request_id in self._loads:
                self._finish_load(request_id, has_failed=request_id in failed)
        if self._start.tiers is not None:
            self._start.tiers.stack.poll(self._clock())

    def request_finished(self, request: "Request", block_ids: Sequence[Sequence[int]]) -> tuple[bool, None]:
        """Store the last blocks of a request that has ended; vLLM frees its blocks as if nobody else used them."""
        self._decisions.steps.forget(request.request_id)
        entry, tiers = self._requests.pop(request.request_id, None), self._start.tiers
        if entry is None or tiers is None:
            return False, None
        self._drop(entry)
        if request.status not in _WITHOUT_TAIL:
            # The last sampled token has not been computed, and drafts behind it may have been rejected.
            end = min(entry.num_written, max(request.num_prompt_tokens, request.num_tokens - 1))
            self._offer(tiers, entry, end, lambda: block_ids, is_last=True)
            self._stores.order(tiers.stack)
        if entry.blocks is not None:
            for keys in entry.blocks.keys:
                tiers.stack.touch(keys)
        return False, None

    def has_pending_work(self) -> bool:
        """Return whether the engine must step although it has no request.

        Ranks start, copy or wait for an order, or a lower tier copies, which the steps drive.
        """
        step, tiers = self._step, self._start.tiers
        has_orders = bool(step.loads or step.slab or step.unmaps)
        if self._start.is_under_way or self._stores.are_under_way or has_orders:
            return True
        return tiers is not None and tiers.stack.is_moving(self._clock())

    def has_pending_block_frees(self) -> bool:
        """Return whether blocks will be free without a preemption, as soon as stores have copied them."""
        return self._stores.kept.keeps_alone

    def take_statistics(self) -> OffloadStatistics | None:
        """Return what was observed since the last call; None where that is nothing.

        vLLM calls it when it has taken the results of a step, so this is the end of the step.
        """
        self._decisions.steps.end(self._clock())
        if self._start.tiers is not None:
            self._count_tiers(self._start.tiers.stack)
        for reason, number in self._stores.take_refused().items():
            self._statistics.count("refused_blocks", number, reason.value)
        if self._statistics.is_empty():
            return None
        statistics, self._statistics = self._statistics, OffloadStatistics()
        return statistics

    def take_events(self) -> Sequence["KVCacheEvent"]:
        """Return the events since the last call: none unless vLLM's configuration asks for events."""
        if self._events is None:
            return ()
        if self._start.opened is not None:
            self._events.note(self._start.opened.stack.journal.take())
        return self._events.take()

    def reset_cache(self) -> bool:
        """Forget all stored blocks: the weights may have changed. Requests that are under way store nothing more."""
        self._was_reset, tiers = True, self._start.opened
        for entry in self._requests.values():
            self._drop(entry)
            entry.may_load = entry.may_store = False
        if tiers is None:
            return True
        tiers.names = tiers.names.renewed()
        self._stores.cancel(tiers.stack)
        tiers.stack.disown(self._clock())
        if self._events is not None:
            self._events.note(tiers.stack.journal.take())
            self._events.reset()
        return True

    def shutdown(self) -> None:
        """Close the tiers; twice is fine."""
        self._start.close()

    def snapshot(self) -> dict[str, Any]:
        """Return the state as plain data; when nothing is under way every count but those of ``counts`` is 0."""
        tiers = self._start.tiers
        return {
            "start": self._start.state.name.lower(),
            "requests": len(self._requests),
            "promised": len(self._promised),
            "loads": sorted(self._loads),
            "stores": self._stores.num_jobs,
            "kept_blocks": self._stores.kept.num_kept,
            "counts": dict(self._counts),
            "rates": self._decisions.snapshot(),
            "tiers": tiers.stack.snapshot(self._clock()) if tiers else {},
        }

    def _entry(self, request: "Request") -> _Entry:
        return self._requests.setdefault(request.request_id, _Entry(request))

    def _blocks_of(self, tiers: Tiers, entry: _Entry) -> RequestBlocks:
        if entry.blocks is None:
            names = _names_of(entry.request, tiers.names)
            if names is None:
                entry.may_load = entry.may_store = False
            entry.blocks = RequestBlocks(self._groups, names or tiers.names.renewed())
            self._note_adapter(entry)
        entry.blocks.update(entry.request.block_hashes)
        return entry.blocks

    def _note_adapter(self, entry: _Entry) -> None:
        """Let earlier requests of an adapter that is read again store and load nothing more: their weights change."""
        assert entry.blocks is not None
        adapter = entry.request.lora_request
        if adapter is None or not adapter.load_inplace:
            return
        for other in self._requests.values():
            of_other = other.request.lora_request
            is_earlier = other.blocks is not None and other.blocks.names.namespace != entry.blocks.names.namespace
            if is_earlier and of_other is not None and of_other.lora_path == adapter.lora_path:
                self._drop(other)
                other.may_load = other.may_store = False

    def _num_cached_tokens(self, tiers: Tiers, entry: _Entry) -> int:
        """Return how many tokens the engine has itself, as far as its block pool says now."""
        group, pool = self._whole_group, self._pool
        if group is None or pool is None or not self._caches_prefixes:
            return 0
        size = group.shape.block_size
        ends = entry.request.block_hashes[size // group.tokens_per_hash - 1 :: size // group.tokens_per_hash]
        # vLLM evicts the end of a prefix first.
        num_blocks = bisect_left(ends, True, key=lambda end: pool.get_cached_block(end, [group.index]) is None)
        return num_blocks * size // self._alignment * self._alignment

    def _may_load(self, entry: _Entry) -> bool:
        """Return whether the request may be promised anything: not while it loads, and never after a failed load."""
        request = entry.request
        params = request.kv_transfer_params or {}
        # A prefill engine has the prompt: another connector loads it, and None would stall that load.
        is_elsewhere = bool(params.get("do_remote_prefill"))
        return (
            entry.may_load
            and not is_elsewhere
            and not request.skip_reading_prefix_cache
            and request.request_id not in self._loads
        )

    def _is_worth_loading(self, entry: _Entry, first_token: int, boundary: int) -> bool:
        """Return whether the engine can use this load."""
        return not self._leaves_one_token or entry.request.num_tokens - boundary <= 1

    def _ask(self, tiers: Tiers, entry: _Entry, first_token: int) -> int | None:
        """Return the boundary up to which blocks are pinned for the request; None to ask again."""
        blocks, question = self._blocks_of(tiers, entry), entry.question
        if entry.waits_since is None:
            entry.waits_since = self._clock()
        if (
            question is None
            or question.first_token != first_token
            or question.wanted != _wanted(blocks, first_token, question.boundary)
        ):
            self._drop(entry)
            if self._is_being_loaded(blocks, first_token) and self._wait_seconds(entry):
                return None
            question = entry.question = self._question(tiers, entry, first_token)
        if question.boundary == first_token:
            return first_token
        stack, now = tiers.stack, self._clock()
        question.promise = stack.ask(entry.request.request_id, question.wanted, now, question.wait_seconds)
        if question.promise is None:
            return None
        return longest_hit(blocks, _held(blocks, question), first_token, question.boundary)

    def _is_being_loaded(self, blocks: RequestBlocks, first_token: int) -> bool:
        """Return whether another request loads the next block: vLLM has it as a local hit as soon as that load ends."""
        group = self._whole_group
        if group is None or not self._caches_prefixes:
            return False
        place = first_token // group.tokens
        return any(key in self._loading for key in blocks.keys[group.index][place : place + 1])

    def _question(self, tiers: Tiers, entry: _Entry, first_token: int) -> _Question:
        """Return which blocks are worth asking for, those that a lower tier or a store is bringing included."""
        blocks, now = self._blocks_of(tiers, entry), self._clock()
        end = entry.request.num_tokens - self._num_recomputed
        hit = Hit.of(blocks, tiers.stack, first_token, end, now)
        boundary, wait_seconds = hit.boundary, self._wait_seconds(entry)
        if not self._is_worth_loading(entry, first_token, boundary):
            boundary = first_token
        if boundary > first_token and self._settings.loads == "when-quicker":
            decision = self._decide(tiers, entry, hit)
            boundary = first_token + decision.num_tokens
            if decision.wait_seconds is not None:
                wait_seconds = min(wait_seconds, decision.wait_seconds)
        wanted = _wanted(blocks, first_token, boundary)
        if self._events is not None and hit.is_below():
            for group, (begin, end) in zip(self._groups, blocks.needed(first_token, boundary), strict=True):
                self._events.learn(entry.request, group, range(begin, end), wanted[group.name])
        return _Question(first_token, boundary, wanted, wait_seconds, asked_at=now)

    def _wait_seconds(self, entry: _Entry) -> float:
        """Return how long the request may still wait, whatever it has asked for since it began to wait."""
        waited = 0.0 if entry.waits_since is None else self._clock() - entry.waits_since
        return max(0.0, self._settings.load_wait_seconds - waited)

    def _decide(self, tiers: Tiers, entry: _Entry, hit: Hit) -> Decision:
        """Return what is decided for a hit, once."""
        last = entry.decided
        if last is None or (last.first_token, last.boundary) != (hit.first_token, hit.boundary):
            decision = self._decisions.decide(entry.request, hit, tiers.stack)
            self._statistics.record_decision(decision)
            last = entry.decided = _Decided(hit.first_token, hit.boundary, decision)
        return last.decision

    def _count_hit(self, loads: Mapping[str, HostLoad], load: _LoadJob, question: _Question) -> None:
        """Count a load that has been ordered."""
        assert question.promise is not None
        for tier, num_tokens in load.tokens_by_tier.items():
            self._statistics.count("hit_tokens", num_tokens, tier)
        for one in loads.values():
            for tier, is_from in _by_tier(one.keys, question.promise.brought_by):
                self._statistics.count("hit_bytes", one.slots[is_from].num_bytes, tier)
        if question.promise.brought_by:
            self._statistics.observe("ask_seconds", self._clock() - question.asked_at)

    def _count_tiers(self, stack: Stack) -> None:
        """Count what the tiers did since the last call."""
        totals = stack.totals
        for (name, *labels), number in difference(totals, self._reported).items():
            self._statistics.count(name, number, *labels)
        self._reported = totals
        for tier, direction, seconds in stack.take_copy_seconds():
            self._statistics.observe("tier_seconds", seconds, tier, direction)

    def _tier_wait(self, step: OffloadStep) -> float:
        """Return how long a step waits: not at all where ranks have something to do."""
        tiers, now = self._start.tiers, self._clock()
        is_busy = step.computes or step.loads or self._loads or self._stores.are_under_way or step.stores
        if tiers is None or is_busy or not tiers.stack.is_moving(now):
            self._tier_waits.reset()
            return 0.0
        return self._tier_waits.wait(tiers.stack.num_copies_ended, now)

    def _num_settled(self, entry: _Entry) -> int:
        """Return how many tokens of a running request will not be written again."""
        # Behind the last known token are drafts and tokens that are not sampled yet.
        num_known = min(entry.num_written, entry.request.num_tokens)
        num_prompt = entry.request.num_prompt_tokens
        return num_known if num_known <= num_prompt else max(num_prompt, num_known - self._num_unsettled)

    def _begin_load(self, entry: _Entry, num_tokens: int, block_ids: Sequence[Sequence[int]]) -> _LoadJob:
        """Order a load of so many of the promised tokens.

        Raises :class:`KVFerryError` for tokens that were not promised, or for which vLLM has no block.
        """
        tiers, question, request_id = self._start.tiers, entry.question, entry.request.request_id
        is_promised = question is not None and 0 < num_tokens <= entry.promised
        if tiers is None or question is None or entry.blocks is None or not is_promised:
            message = f"vLLM loads {num_tokens} tokens; {entry.promised} were promised."
            raise HandoffError(Reason.INVALID_REQUEST, message, UNEXPECTED)
        tokens = question.first_token, question.first_token + num_tokens
        if tokens[1] % self._alignment:
            message = f"vLLM loads up to token {tokens[1]}, within a stored block of {self._alignment} tokens."
            raise HandoffError(Reason.INVALID_REQUEST, message, UNEXPECTED)
        chosen = _wanted(entry.blocks, *tokens)
        loads = tiers.stack.begin_load(request_id, chosen)
        job_id = self._order_load(entry, tokens, loads, block_ids)
        keys = tuple(chosen[self._whole_group.name]) if self._whole_group is not None else ()
        load = _LoadJob(job_id, keys, _tokens_by_tier(entry.blocks, question, chosen, tokens))
        self._decisions.loads.begin(request_id, sum(one.slots.num_bytes for one in loads.values()), self._clock())
        self._count_hit(loads, load, question)
        return load

    def _offer(
        self, tiers: Tiers, entry: _Entry, end_token: int, block_ids: ReadBlockIds, *, is_last: bool = False
    ) -> None:
        """Offer the request's stored blocks up to ``end_token`` that host memory lacks."""
        if entry.may_store and not (self._stores.has_offered(entry.blocks, end_token) and not is_last):
            blocks = self._blocks_of(tiers, entry)
            if entry.may_store:
                self._stores.offer(tiers.stack, entry.request, blocks, end_token, block_ids, is_last=is_last)

    def _note_start(self, report: RankReport) -> None:
        """Take what ranks report of the start; after a refusal those that have mapped the slab unmap it."""
        was_open = self._start.opened is not None
        self._step.slab = self._start.note(report) or self._step.slab
        if was_open and self._start.opened is None:
            self._step.slab, self._step.unmaps = None, True

    def _take_stored(self, report: RankReport) -> None:
        """Take the parts of stores that ranks have copied, or could not copy."""
        if self._start.tiers is not None:
            for job_id, num_ranks in report.stored.items():
                self._stores.land(self._start.tiers.stack, job_id, num_ranks, has_landed=True)
            for job_id, num_ranks in report.failed.items():
                self._stores.land(self._start.tiers.stack, job_id, num_ranks, has_landed=False)

    def _order_load(
        self, entry: _Entry, tokens: tuple[int, int], loads: Mapping[str, HostLoad], block_ids: Sequence[Sequence[int]]
    ) -> int:
        copies = tuple(
            group.load_blocks(tokens, loads[group.name].block_ids, block_ids[group.index]) for group in self._groups
        )
        job_id = next(self._job_ids)
        self._step.loads.append(LoadOrder(entry.request.request_id, job_id, copies))
        self._counts["loads"] += 1
        self._counts["loaded_tokens"] += tokens[1] - tokens[0]
        return job_id

    def _disown_stores(self) -> None:
        """Let no store that is under way become visible, since another connector's load has failed.

        vLLM computes behind such a load in the step that loads, so blocks of that step and the next hold garbage.
        Requests offer their blocks again once vLLM has computed them again.
        """
        if self._start.tiers is not None:
            self._stores.cancel(self._start.tiers.stack)
        for entry in self._requests.values():
            if entry.blocks is not None:
                entry.blocks.num_offered = [0] * len(self._groups)

    def _finish_load(self, request_id: str, *, has_failed: bool) -> None:
        """No rank reads the slots of the load any more."""
        assert self._start.tiers is not None
        load, now = self._loads.pop(request_id), self._clock()
        copied = self._copy_seconds.pop(load.job_id, None)
        seconds = self._decisions.loads.end(request_id, now, copied, has_failed=has_failed)
        self._statistics.observe("load_seconds", seconds)
        for key in load.keys:
            self._loading[key] -= 1
            if not self._loading[key]:
                del self._loading[key]
        self._start.tiers.stack.complete_load(request_id)
        entry = self._requests.get(request_id)
        if has_failed:
            self._counts["failed_loads"] += 1
            logger.error("kvferry: a rank could not load the stored blocks of %s.", request_id)
            if entry is not None:
                entry.may_load = False  # else it would ask, load and fail again

    def _drop(self, entry: _Entry) -> None:
        """End what a request asked for and what was promised to it; a load goes on."""
        if entry.question is not None and self._start.tiers is not None:
            self._start.tiers.stack.drop(entry.request.request_id)
        self._forget_question(entry)

    def _forget_question(self, entry: _Entry) -> None:
        entry.question, entry.promised = None, 0
        self._promised.pop(entry.request.request_id, None)


def _names_of(request: "Request", names: BlockNames) -> BlockNames | None:
    """Return the names for a request, those of its adapter, whose weights may change in place; None if unknown."""
    if request.lora_request is None:
        return names
    path = request.lora_request.lora_path
    try:
        return names.of_adapter(path, is_read_again=request.lora_request.load_inplace)
    except OSError as error:
        told = "kvferry: %s loads and stores nothing: its adapter cannot be read: %s"
        logger.warning(told, request.request_id, error)
        return None


def _wanted(blocks: RequestBlocks, first_token: int, boundary: int) -> dict[str, Sequence[BlockKey]]:
    """Return the keys of each group that a load of these tokens needs."""
    return {
        group.name: keys[begin:end]
        for group, keys, (begin, end) in zip(
            blocks.groups, blocks.keys, blocks.needed(first_token, boundary), strict=True
        )
    }


def _tokens_by_tier(
    blocks: RequestBlocks, question: _Question, chosen: Mapping[str, Sequence[BlockKey]], tokens: tuple[int, int]
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


def _held(blocks: RequestBlocks, question: _Question) -> list[Flags]:
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


def check_offloadable(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
    """Refuse an engine whose caches this version cannot offload. Raises :class:`LayoutError` (unsupported)."""
    if vllm_config.parallel_config.nnodes_within_dp > 1:
        refuse("the ranks of an engine are on several hosts", "Run all ranks of an engine on one host.")
    for index, shape in enumerate(group_shapes(kv_cache_config)):
        if shape.kind is CacheKind.STATE:
            refuse(f"cache group {index} holds states; only attention is offloaded", "Run without this connector.")
