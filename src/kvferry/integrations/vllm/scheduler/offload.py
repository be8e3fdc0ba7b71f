"""The offload connector inside vLLM's scheduler: what it does in each of vLLM's calls.

Loads are promised and ordered in :mod:`offload_loads`, blocks are stored in :mod:`offload_stores`.
No step waits, and no block is reused under a copy. See docs/decisions/offload-connector.md.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from kvferry.integrations.vllm.adapters import Adapters, hear_of_loads
from kvferry.integrations.vllm.engine_core import Engine, Looks, StepWaits
from kvferry.integrations.vllm.offload_names import BlockNames, engine_facts
from kvferry.integrations.vllm.offload_settings import OffloadSettings
from kvferry.integrations.vllm.offload_step import HOST_MEMORY, OffloadStatistics, OffloadStep, RankReport
from kvferry.integrations.vllm.scheduler.offload_events import BlockEvents
from kvferry.integrations.vllm.scheduler.offload_loads import Loads, OffloadRequest
from kvferry.integrations.vllm.scheduler.offload_stores import ReadBlockIds, Stores
from kvferry.integrations.vllm.scheduler.offload_tiers import Start, StartState, Tiers, check_settings, open_tiers
from kvferry.integrations.vllm.scheduler.stored_blocks import RequestBlocks, check_window_interval, stored_groups
from kvferry.integrations.vllm.translate import group_shapes, refuse
from kvferry.integrations.vllm.versions import check_block_hashes, tokens_per_hash
from kvferry.layout.shard import CacheKind
from kvferry.peer_log import PeerLog
from kvferry.tiers.load_rule import LoadRule
from kvferry.tiers.stack import Stack

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = PeerLog(logging.getLogger(__name__))

LEAST_PROMPT_TOKENS = 16
"""Tokens of a request in a step that measures computing: fewer are a decode, or the drafts that it checks."""
_WITHOUT_TAIL = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)
"""How a request ends whose last blocks are not stored. vLLM aborts all requests before it resets its cache, which fails
while a block is kept."""


class OffloadScheduler:
    """One engine. Every method has the name of vLLM's call that it answers; all are of the engine core's thread."""

    def __init__(self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", settings: OffloadSettings) -> None:
        shapes = group_shapes(kv_cache_config)
        parallel = vllm_config.parallel_config
        hashed = tokens_per_hash(vllm_config, kv_cache_config)
        self._clock: Callable[[], float] = time.monotonic
        self._groups = groups = stored_groups(shapes, settings.block_size, hashed)
        check_window_interval(shapes, settings.window_interval)
        self._num_ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        # A drafter's caches of the last accepted tokens are settled by its next pass. Until then they are no error: the
        # model checks all drafts. They would only be accepted less often.
        num_drafts = vllm_config.num_speculative_tokens
        self._num_unsettled = num_drafts + 1 if num_drafts else 0

        facts = engine_facts(vllm_config, hashed, settings.model_id)
        check_settings(settings, facts, parallel.data_parallel_index)

        def make_tiers(ranks: Sequence[bytes]) -> Tiers:
            tiers = open_tiers(settings, facts, ranks, groups[0].engine_blocks, parallel.data_parallel_index)
            if self._was_reset:
                tiers.names = tiers.names.renewed()
            tiers.stack.journal.is_kept = self._events is not None
            return tiers

        self._start = Start(self._num_ranks, make_tiers)
        self._was_reset = False
        self._requests: dict[str, OffloadRequest] = {}
        self._adapters = Adapters()
        if vllm_config.lora_config is not None:
            hear_of_loads()
        self._step = OffloadStep()
        self._counts: Counter[str] = Counter()
        self._statistics = OffloadStatistics()
        events = vllm_config.kv_events_config
        publishes = events is not None and events.enable_kv_cache_events
        self._events = BlockEvents(groups, kv_cache_config) if publishes else None
        self._reported: Counter[tuple[str, ...]] = Counter()
        """The tiers' totals that were reported."""
        self._used: dict[str, bool] = {}
        """Which tiers were reported to be used."""
        self._sizes: dict[str, tuple[int | None, int]] = {}
        """The tiers' bytes that were reported."""
        self._rule = LoadRule(vllm_config.scheduler_config.max_num_batched_tokens)
        self._step_waits = StepWaits()
        self._engine = Engine()
        self._looks = Looks(self._engine.wake)
        shared = count(1), self._counts, self._statistics, self._events
        self._stores = Stores(groups, self._num_ranks, settings.window_interval, *shared)
        self._loads = Loads(vllm_config, groups, settings, self._rule, lambda: self._clock(), *shared)

    @property
    def _stack(self) -> Stack | None:
        """The tiers once all ranks can copy to and from them."""
        return None if self._start.tiers is None else self._start.tiers.stack

    def bind_block_pool(self, pool: "BlockPool") -> None:
        """Keep blocks in this pool from now on."""
        self._loads.bind(pool)
        self._stores.bind(pool)

    # Hits.

    def on_new_request(self, request: "Request") -> None:
        """Know a request before it is scheduled, and let lower tiers bring what it will need while it waits."""
        entry, stack = self._entry(request), self._stack
        may_load = stack is not None and stack.has_lower_tiers and self._loads.may_load(entry)
        if stack is not None and may_load and (blocks := self._blocks_of(entry)) is not None:
            self._loads.prefetch(stack, entry, blocks)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens behind the computed ones are promised; None while it is worth asking again.

        A promise is for this call of vLLM's ``schedule``: what is not taken up is dropped at its end.
        """
        entry = self._entry(request)
        entry.num_written = 0  # vLLM asks only where a request has no blocks, or has lost them
        stack = self._stack
        if stack is None or not self._loads.may_load(entry) or (blocks := self._blocks_of(entry)) is None:
            return 0, False
        number = self._loads.promise(stack, entry, blocks, num_computed_tokens)
        if number is None:
            self._counts["asked_again"] += 1
        return number, bool(number)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Order the promised load into these blocks; the step's end drops the promise, taken up or not."""
        entry = self._entry(request)
        self._loads.count_not_brought(entry)
        if num_external_tokens:
            self._loads.order(self._stack, entry, num_external_tokens, blocks.get_block_ids)

    def get_external_cache_hit_sources(
        self, request: "Request", num_external_tokens: int
    ) -> "dict[CacheHitSource, int]":
        """Return where the tokens of the load come from: host memory, or the tier that brought them there for it."""
        return self._loads.sources(request.request_id) if num_external_tokens else {}

    # Steps.

    def build_connector_meta(self, output: "SchedulerOutput") -> OffloadStep:
        """Return the orders of a step: blocks that the step fills are stored once it has been computed."""
        stack, state = self._stack, output.kv_connector_block_state
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            entry = self._requests.get(request_id)
            if entry is not None:
                entry.num_written = entry.request.num_computed_tokens + num_scheduled
                if stack is not None and state is not None:
                    self._offer(stack, entry, self._num_settled(entry), partial(state.get_block_ids, request_id))
        if stack is not None:
            self._stores.order(stack)
        # After the stores: they evict nothing that was promised, and vLLM may ask again in the next step.
        for entry in list(self._loads.promised.values()):
            self._drop(entry)
        if stack is not None:
            stack.poll(self._clock())
        numbers = output.num_scheduled_tokens.values()
        self._rule.steps.begin(sum(each for each in numbers if each >= LEAST_PROMPT_TOKENS), self._clock())
        step, self._step = self._step, OffloadStep()
        step.stores, step.loads = self._stores.take_orders(), self._loads.take_orders()
        step.computes = output.total_num_scheduled_tokens > 0
        step.wait_seconds = self._tier_wait(step)
        return step

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Take what all ranks have reported of a step."""
        report, failed = connector_output.kv_connector_worker_meta, connector_output.failed_recving or ()
        if connector_output.invalid_block_ids and self._stack is not None:
            # Another connector's load has failed, behind which vLLM has computed: blocks of this step and the next hold
            # garbage. Requests offer them again when the stores have ended; vLLM computes them again by then.
            self._stores.cancel(self._stack)
        if isinstance(report, RankReport):
            self._note_start(report)
        if (stack := self._stack) is None:
            return
        if isinstance(report, RankReport):
            self._take_stored(stack, report)
        for request_id in connector_output.finished_recving or ():
            if request_id in self._loads.jobs:
                self._loads.finish(stack, request_id, has_failed=request_id in failed)
                if request_id in failed and request_id in self._requests:
                    self._requests[request_id].may_load = False  # else it would ask, load and fail again
        stack.poll(self._clock())

    def request_finished(self, request: "Request", block_ids: Sequence[Sequence[int]]) -> tuple[bool, None]:
        """Store the last blocks of a request that has ended; vLLM frees its blocks as if nobody else used them."""
        entry, stack = self._requests.pop(request.request_id, None), self._stack
        if entry is None or stack is None:
            return False, None
        self._drop(entry)
        if request.status not in _WITHOUT_TAIL:
            # The last sampled token has not been computed, and drafts behind it may have been rejected.
            end = min(entry.num_written, max(request.num_prompt_tokens, request.num_tokens - 1))
            self._offer(stack, entry, end, lambda: block_ids, is_last=True)
            self._stores.order(stack)
        if entry.blocks is not None:
            for keys in entry.blocks.keys:
                stack.touch(keys)
        return False, None

    def has_pending_work(self) -> bool:
        """Return whether the engine must step although it has no request.

        Ranks start, copy or wait for an order, or it is time to look at what a lower tier copies: steps drive it. The
        engine sleeps between two looks. An engine that ends does not: it would end without what is being copied.
        """
        step, stack, now = self._step, self._stack, self._clock()
        if self._start.is_under_way or self._stores.are_under_way or step.slab or step.unmaps:
            return True
        is_moving = stack is not None and stack.is_moving(now)
        return is_moving and (self._engine.stays_awake or self._engine.is_ending or self._looks.are_due(now))

    def has_pending_block_frees(self) -> bool:
        """Return whether blocks will be free without a preemption, as soon as stores have copied them."""
        return self._stores.kept.keeps_alone

    def take_statistics(self) -> OffloadStatistics | None:
        """Return what was observed since the last call; None where that is nothing.

        vLLM calls it when it has taken the results of a step, so this is the end of the step.
        """
        self._rule.steps.end(self._clock())
        used: dict[str, bool] = {}
        if self._stack is not None:
            self._count_tiers(self._stack)
            used = self._stack.are_used(self._clock())
        elif self._start.state is StartState.REFUSED:
            used = {HOST_MEMORY: False}
        if used != self._used:
            self._used = used
            for tier, is_used in used.items():
                self._statistics.set("tier_up", int(is_used), tier)
        if self._statistics.is_empty():
            return None
        taken = OffloadStatistics(data=self._statistics.data)
        self._statistics.reset()
        return taken

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
        self._looks.close()
        self._start.close()

    def _entry(self, request: "Request") -> OffloadRequest:
        return self._requests.setdefault(request.request_id, OffloadRequest(request))

    def _blocks_of(self, entry: OffloadRequest) -> RequestBlocks | None:
        """Return the stored blocks of a request; None, for good, where the weights are not those of its first block."""
        names = self._names_of(entry.request)
        if names is not None and entry.blocks is None:
            entry.blocks = RequestBlocks(self._groups, names)
        if names is None or entry.blocks is None or names.namespace != entry.blocks.names.namespace:
            self._drop(entry)
            entry.may_load = entry.may_store = False
            return None
        entry.blocks.names = names  # of an adapter's files as they were read last
        entry.blocks.update(entry.request.block_hashes)
        return entry.blocks

    def _names_of(self, request: "Request") -> BlockNames | None:
        """Return the names for a request now; None where the weights of its adapter are unknown."""
        assert self._start.tiers is not None
        names, adapter = self._start.tiers.names, request.lora_request
        if adapter is None:
            return names
        is_read_again = adapter.load_inplace
        try:
            return self._adapters.names(names, adapter.lora_path, adapter.lora_int_id, is_read_again=is_read_again)
        except OSError as error:
            told = "kvferry: %s loads and stores nothing: its adapter cannot be read: %s"
            logger.warning(told, request.request_id, error, peer=request.request_id)
            return None

    def _count_tiers(self, stack: Stack) -> None:
        """Count what the tiers did since the last call."""
        totals = Counter(stack.totals)
        for (name, *labels), number in (totals - self._reported).items():
            self._statistics.count(name, number, *labels)
        self._reported = totals
        for tier, direction, seconds in stack.take_copy_seconds():
            self._statistics.observe("tier_seconds", seconds, tier, direction)
        if (sizes := stack.sizes) != self._sizes:
            self._sizes = sizes
            for tier, (used, capacity) in sizes.items():
                self._statistics.set("tier_capacity_bytes", capacity, tier)
                self._statistics.set("tier_used_bytes", used or 0, tier)

    def _tier_wait(self, step: OffloadStep) -> float:
        """Return how long a step waits: not at all where ranks have something to do."""
        stack, now = self._stack, self._clock()
        is_busy = step.computes or step.loads or self._loads.jobs or self._stores.are_under_way or step.stores
        if stack is None or is_busy or not stack.is_moving(now):
            self._step_waits.reset()
            self._looks.reset()
            return 0.0
        if not (self._requests or self._engine.stays_awake):
            self._looks.done(stack.num_copies_ended, now)
            return 0.0
        return self._step_waits.wait(stack.num_copies_ended, now)

    def _num_settled(self, entry: OffloadRequest) -> int:
        """Return how many tokens of a running request will not be written again."""
        # Behind the last known token are drafts and tokens that are not sampled yet.
        num_known = min(entry.num_written, entry.request.num_tokens)
        num_prompt = entry.request.num_prompt_tokens
        return num_known if num_known <= num_prompt else max(num_prompt, num_known - self._num_unsettled)

    def _offer(
        self, stack: Stack, entry: OffloadRequest, end_token: int, block_ids: ReadBlockIds, *, is_last: bool = False
    ) -> None:
        """Offer the request's stored blocks up to ``end_token`` that host memory lacks."""
        is_new = is_last or not self._stores.has_offered(entry.blocks, end_token)
        if entry.may_store and is_new and (blocks := self._blocks_of(entry)) is not None:
            self._stores.offer(stack, entry.request, blocks, end_token, block_ids, is_last=is_last)

    def _note_start(self, report: RankReport) -> None:
        """Take what ranks report of the start; after a refusal those that have mapped the slab unmap it."""
        was_open = self._start.opened is not None
        self._step.slab = self._start.note(report) or self._step.slab
        if was_open and self._start.opened is None:
            self._step.slab, self._step.unmaps = None, True

    def _take_stored(self, stack: Stack, report: RankReport) -> None:
        """Take the parts of stores that ranks have copied or not; requests offer again what was cancelled."""
        was_cancelled = False
        for parts, has_landed in ((report.stored, True), (report.failed, False)):
            for job_id, num_ranks in parts.items():
                was_cancelled |= self._stores.land(stack, job_id, num_ranks, has_landed=has_landed)
        if was_cancelled:
            for entry in self._requests.values():
                if entry.blocks is not None:
                    entry.blocks.num_offered = [0] * len(self._groups)

    def _drop(self, entry: OffloadRequest) -> None:
        """End what a request asked for and what was promised to it; a load goes on."""
        self._loads.drop(self._stack, entry)


def check_offloadable(kv_cache_config: "KVCacheConfig") -> None:
    """Refuse an engine whose caches this version cannot offload. Raises :class:`LayoutError` (unsupported), and as
    :func:`check_block_hashes`.
    """
    check_block_hashes()
    for index, shape in enumerate(group_shapes(kv_cache_config)):
        if shape.kind is CacheKind.STATE:
            refuse(f"cache group {index} holds states; only attention is offloaded", "Run without this connector.")
