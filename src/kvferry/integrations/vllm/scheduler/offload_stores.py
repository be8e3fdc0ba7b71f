"""The stores of one engine: which blocks are offered to host memory, and who keeps their sources until they are copied.

A step offers the blocks that it fills. What host memory accepts becomes one order for all ranks, and the engine's
blocks are kept by reference until every rank has reported.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvferry.arrays import Flags, Integers
from kvferry.errors import Reason
from kvferry.integrations.vllm.offload_step import HOST_MEMORY, OffloadStatistics, StoreOrder
from kvferry.integrations.vllm.scheduler.blocks import NULL_BLOCK_ID, KeptBlocks
from kvferry.integrations.vllm.scheduler.offload_events import BlockEvents
from kvferry.integrations.vllm.scheduler.stored_blocks import RequestBlocks, StoredGroup, alignment, keeps_window
from kvferry.tiers.host_memory import HostStore
from kvferry.tiers.protocol import BlockKey
from kvferry.tiers.stack import Stack

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

MAX_KEPT_SHARE = 0.5
"""Share of the engine's blocks that stores may keep by reference. Blocks beyond it are stored in a later step; those of
a request that ends are not stored, and counted as ``stores-behind``."""
ReadBlockIds = Callable[[], Sequence[Sequence[int]] | None]
"""Returns a request's blocks by group and position; copies lists as long as the request."""


@dataclass(slots=True, eq=False)
class _StoreJob:
    """A store that ranks copy, with room for the blocks of each group.

    ``checks``: of the names of adapters' blocks; each says whether the blocks have the weights that their names mean.
    """

    stores: list[HostStore]
    checks: Iterable[Callable[[], bool]]
    num_reported: int = 0


@dataclass(slots=True, eq=False)
class _Offers:
    """Blocks to store: for each group the keys, and a row of the engine's block ids for each."""

    keys: dict[int, list[BlockKey]] = field(default_factory=dict)
    rows: dict[int, list[Integers]] = field(default_factory=dict)
    num_engine_blocks: int = 0
    checks: set[Callable[[], bool]] = field(default_factory=set)

    def add(self, group: int, keys: Sequence[BlockKey], rows: Integers) -> None:
        self.keys.setdefault(group, []).extend(keys)
        self.rows.setdefault(group, []).append(rows)
        self.num_engine_blocks += rows.size


class Stores:
    """What an engine stores. ``counts`` gets counts for people, ``events`` learns what is offered."""

    def __init__(
        self,
        groups: Sequence[StoredGroup],
        num_ranks: int,
        window_interval: int,
        job_ids: Iterator[int],
        counts: Counter[str],
        statistics: OffloadStatistics,
        events: BlockEvents | None,
    ) -> None:
        self.kept = KeptBlocks()
        self.max_kept = 0
        """The most blocks that all stores keep."""
        self._groups, self._num_ranks, self._window_interval = groups, num_ranks, window_interval
        self._alignment = alignment(groups)
        self._job_ids, self._counts, self._statistics, self._events = job_ids, counts, statistics, events
        self._offers = _Offers()
        self.jobs: dict[int, _StoreJob] = {}
        """The stores that not all ranks have reported."""
        self._orders: list[StoreOrder] = []

    def bind(self, pool: "BlockPool") -> None:
        """Keep blocks in this pool from now on."""
        self.kept.bind(pool)
        self.max_kept = int(MAX_KEPT_SHARE * pool.num_gpu_blocks)

    @property
    def are_under_way(self) -> bool:
        """Whether ranks have something to copy or to report."""
        return bool(self.jobs or self._orders)

    def has_offered(self, blocks: RequestBlocks | None, end_token: int) -> bool:
        """Return whether a request has no more whole blocks up to here; cheaper than to compare its keys each step."""
        return blocks is not None and all(
            end_token // group.tokens <= number for group, number in zip(self._groups, blocks.num_offered, strict=True)
        )

    def offer(
        self,
        stack: Stack,
        request: "Request",
        blocks: RequestBlocks,
        end_token: int,
        block_ids: ReadBlockIds,
        *,
        is_last: bool = False,
    ) -> None:
        """Offer the request's stored blocks up to ``end_token`` that host memory lacks, within what may be kept."""
        ends = [
            min(end_token // group.tokens, len(keys)) for group, keys in zip(self._groups, blocks.keys, strict=True)
        ]
        begins = list(blocks.num_offered)
        others = [request.num_prompt_tokens - 1]
        if is_last and self._window_interval:
            # The next prompt may go on from here; these blocks were passed over before.
            others.append(end_token)
            needed = blocks.needed(0, end_token // self._alignment * self._alignment)
            begins = [min(begin, first) for begin, (first, _) in zip(begins, needed, strict=True)]
        if all(end <= begin for begin, end in zip(begins, ends, strict=True)) or (ids := block_ids()) is None:
            return
        for group, begin, end in zip(self._groups, begins, ends, strict=True):
            end = min(end, len(ids[group.index]) // group.engine_blocks)
            if begin < end:
                num_deferred = self._offer_group(stack, blocks, group, (begin, end), ids[group.index], others)
                self._counts["deferred_blocks"] += num_deferred
                if is_last:
                    self._statistics.count("refused_blocks", num_deferred, HOST_MEMORY, Reason.STORES_BEHIND.value)
                if self._events is not None:
                    places = range(begin, blocks.num_offered[group.index])
                    keys = blocks.keys[group.index][places.start : places.stop]
                    self._events.learn(request, group, places, keys)

    def order(self, stack: Stack) -> None:
        """Reserve slots for the offered blocks, keep their sources, and order one store of all that were accepted."""
        offers, self._offers = self._offers, _Offers()
        copies, stores, kept = [], [], []
        for index, keys in offers.keys.items():
            group = self._groups[index]
            store = stack.prepare_store(group.name, keys, num_parts=self._num_ranks)
            for reason, number in store.failures.items():
                self._statistics.count("refused_blocks", number, HOST_MEMORY, reason.value)
                self._counts[f"not_stored_{reason}"] += number
            if not store.keys:
                continue
            place = {key: number for number, key in enumerate(keys)}
            rows = np.concatenate(offers.rows[index])[[place[key] for key in store.keys]]
            copies.append(group.store_blocks(rows, store.block_ids))
            stores.append(store)
            kept.append(rows.reshape(-1).tolist())
        if stores:
            job_id = next(self._job_ids)
            self.kept.keep(("store", job_id), kept)
            self.jobs[job_id] = _StoreJob(stores, offers.checks)
            self._orders.append(StoreOrder(job_id, tuple(copies)))
            self._counts["stores"] += 1

    def take_orders(self) -> list[StoreOrder]:
        """Return the orders since the last call, for the ranks."""
        orders, self._orders = self._orders, []
        return orders

    def land(self, stack: Stack, job_id: int, num_ranks: int, *, has_landed: bool) -> bool:
        """So many ranks will not touch the blocks of a store any more.

        Return whether the store has ended and was cancelled: then its blocks may be offered again, and not before.
        """
        job = self.jobs.get(job_id)
        if job is None:
            logger.error("kvferry: a rank reported store %d, which is not under way.", job_id)
            return False
        if not all(is_certain() for is_certain in job.checks):
            for store in job.stores:
                stack.cancel(store)
        for store in job.stores:
            landed: Flags | None = None if has_landed else np.zeros(len(store.keys), np.bool_)
            for part in range(job.num_reported, job.num_reported + num_ranks):
                stack.land(store, part, landed)
        job.num_reported += num_ranks
        if not has_landed:
            self._counts["failed_stores"] += num_ranks
        if job.num_reported < self._num_ranks:
            return False
        del self.jobs[job_id]
        self.kept.free(("store", job_id))
        return any(store.is_cancelled for store in job.stores)

    def cancel(self, stack: Stack) -> None:
        """Let no store that is under way become visible."""
        for job in self.jobs.values():
            for store in job.stores:
                stack.cancel(store)

    def _offer_group(
        self,
        stack: Stack,
        blocks: RequestBlocks,
        group: StoredGroup,
        places: tuple[int, int],
        ids: Sequence[int],
        others: Sequence[int],
    ) -> int:
        """Offer those of the request's stored blocks at these places that are worth storing.

        Return how many of them are deferred, since stores keep as many of the engine's blocks as they may.
        """
        (begin, end), size = places, group.engine_blocks
        keys = blocks.keys[group.index][begin:end]
        rows = np.array(ids[begin * size : end * size], np.int64).reshape(-1, size)
        is_kept = keeps_window(group, np.arange(begin, end), self._window_interval, self._alignment, others)
        # A block that has left its window, or never had its bytes here, is the null block.
        chosen = np.flatnonzero(is_kept & stack.is_missing(keys) & (rows != NULL_BLOCK_ID).all(axis=1))
        room = max(0, self.max_kept - self.kept.num_kept - self._offers.num_engine_blocks) // size
        num_deferred = max(0, len(chosen) - room)
        if num_deferred:
            end = begin + int(chosen[room])
            chosen = chosen[:room]
        blocks.num_offered[group.index] = max(blocks.num_offered[group.index], end)
        if len(chosen):
            self._offers.add(group.index, [keys[place] for place in chosen.tolist()], rows[chosen])
            if blocks.names.is_certain is not None:
                self._offers.checks.add(blocks.names.is_certain)
        return num_deferred
