"""vLLM's real scheduler with the offload connector's part in it, and a model of everything else.

Ranks, caches and slab are dictionaries of *contents*: the content of a token's slot is a number that depends on all
tokens up to it, so each slot says which prefix it belongs to. A step that computes a token first checks the contents of
all slots before it: a wrong promise, a reused block or a copy that is read too early fails there.

A copy reads and writes at its end, the worst moment; until then its destination holds garbage.
"""

import ctypes
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvferry.integrations.vllm import connector as connector_module
from kvferry.integrations.vllm.offload_connector import KVFerryOffloadConnector
from kvferry.integrations.vllm.offload_names import GROUP_BYTES, NAMESPACE_BYTES, BlockNames
from kvferry.integrations.vllm.offload_step import LoadOrder, OffloadStep, RankReport, SlabOrder
from kvferry.integrations.vllm.plugin import register
from kvferry.integrations.vllm.scheduler import offload_tiers
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import CacheKind, Region, Shard, decode_shard, encode_shard
from kvferry.layout.slab import slab_shard
from kvferry.tiers.protocol import LowerTier

from ..support.dense import shard_for
from ..support.offload_state import role_state

VOCABULARY = 50
BLOCK_SIZE = 16
GARBAGE = -1
HEAD_SIZE, NUM_HEADS = 8, 2


def content_of(before: int, token: int) -> int:
    """Return the content of a slot: of its token, behind a slot with the content ``before``."""
    return hash((before, token)) & (2**60 - 1)


def contents_of(tokens: Iterable[int]) -> list[int]:
    content, found = 0, []
    for token in tokens:
        content = content_of(content, token)
        found.append(content)
    return found


def next_token(tokens: Sequence[int]) -> int:
    """Return what the model samples behind these tokens."""
    return contents_of(tokens)[-1] % VOCABULARY


LATENT = -1
"""In place of a window: MLA."""


def group_spec(index: int, window: int) -> KVCacheGroupSpec:
    """Return vLLM's specification of a cache group of one layer; a window of 0 attends to all tokens."""
    size: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": NUM_HEADS, "head_size": HEAD_SIZE}
    size["dtype"] = torch.float32
    if window == LATENT:
        spec: Any = MLAAttentionSpec(**{**size, "num_kv_heads": 1, "head_size": 2 * NUM_HEADS * HEAD_SIZE})
    else:
        spec = SlidingWindowSpec(**size, sliding_window=window) if window else FullAttentionSpec(**size)
    return KVCacheGroupSpec([f"layer {index}"], spec)


def cache_kind(window: int) -> CacheKind:
    if window == LATENT:
        return CacheKind.MLA
    return CacheKind.SLIDING_WINDOW if window else CacheKind.ATTENTION


def rank_shard(windows: Sequence[int], num_blocks: int, rank: int, num_ranks: int) -> Shard:
    """Return a rank's shard with cache groups of these windows."""
    shards = [
        shard_for(
            layers=[f"layer {index}"],
            num_kv_heads=NUM_HEADS,
            head_size=2 * NUM_HEADS * HEAD_SIZE if window == LATENT else HEAD_SIZE,
            itemsize=4,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            layout=NamedLayout.BHLNC,
            tp_rank=rank,
            tp_size=num_ranks,
            kind=cache_kind(window),
            window=max(window, 0),
            group_name=str(index),
        )
        for index, window in enumerate(windows)
    ]
    return msgspec.structs.replace(shards[0], groups=tuple(shard.groups[0] for shard in shards))


class SlabContents:
    """The slab's real memory, so that lower tiers carry the contents: eight bytes of each rank in a token's row."""

    def __init__(self, order: SlabOrder, base_address: int) -> None:
        ranks = [decode_shard(rank) for rank in order.ranks]
        slab = slab_shard(ranks, order.num_blocks, engine_blocks=order.engine_blocks, base_address=base_address)
        self._memory = (ctypes.c_char * slab.regions[0].length).from_address(base_address)
        self._groups = {group.name: group for group in slab.groups}

    def __getitem__(self, place: tuple[int, str, int, int]) -> int:
        return int(np.frombuffer(self._memory, np.int64, 1, self._offset(*place))[0])

    def __setitem__(self, place: tuple[int, str, int, int], content: int) -> None:
        np.frombuffer(self._memory, np.int64, 1, self._offset(*place))[0] = content

    def _offset(self, rank: int, group: str, block: int, slot: int) -> int:
        part = self._groups[group].components[0]
        row = part.block_stride // self._groups[group].block_size
        return part.layer_offsets[0] + block * part.block_stride + slot * row + rank * 8


class EngineContents:
    """The engine's own blocks: cache groups share them, as in an engine whose groups have equal blocks."""

    def __init__(self) -> None:
        self._slots: dict[tuple[int, int, int], int] = {}

    def get(self, place: tuple[int, str, int, int], missing: int) -> int:
        rank, _, block, slot = place
        return self._slots.get((rank, block, slot), missing)

    def __setitem__(self, place: tuple[int, str, int, int], content: int) -> None:
        rank, _, block, slot = place
        self._slots[rank, block, slot] = content


@dataclass
class Step:
    """A step that was scheduled: what to compute, with the blocks as they were then."""

    output: Any
    blocks: dict[str, tuple[list[int], ...]]
    starts: dict[str, int]
    requests: dict[str, Request]


@dataclass
class Copy:
    """A store or load of one rank that has begun."""

    order: Any
    is_store: bool
    rank: int


@dataclass
class Ranks:
    """All ranks of the engine: contents by (rank, group, block, slot)."""

    num_ranks: int
    engine: EngineContents = field(default_factory=EngineContents)
    slab: Any = None
    copies: list[Copy] = field(default_factory=list)
    report: RankReport = field(default_factory=RankReport)
    loads_left: dict[str, int] = field(default_factory=dict)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    stored_tokens: int = 0

    def begin(self, step: OffloadStep) -> None:
        """Take the orders of a step whose tokens have been computed."""
        for order in step.stores:
            self._begin(order, is_store=True)
        for order in step.loads:
            assert order.request_id not in self.loads_left, "a request loads once at a time"
            if order.is_refused:
                self.failed.add(order.request_id)
                self.received.add(order.request_id)
                continue
            self.loads_left[order.request_id] = self.num_ranks
            self._begin(order, is_store=False)

    def _begin(self, order: Any, *, is_store: bool) -> None:
        for rank in range(self.num_ranks):
            self.copies.append(copy := Copy(order, is_store, rank))
            for _, destination in self.slots(copy):
                (self.slab if is_store else self.engine)[destination] = GARBAGE

    def slots(self, copy: Copy) -> Iterator[tuple[tuple[int, str, int, int], tuple[int, str, int, int]]]:
        """Yield source and destination of each token's slot."""
        for blocks in copy.order.blocks:
            sizes = [self.tokens[blocks.group], BLOCK_SIZE]
            sizes = sizes[::-1] if copy.is_store else sizes
            for token in range(blocks.first_token, blocks.last_token):
                at = [
                    (copy.rank, blocks.group, int(ids[(token - begin) // size]), (token - begin) % size)
                    for ids, begin, size in (
                        (blocks.source_ids, blocks.source_first_token, sizes[0]),
                        (blocks.destination_ids, blocks.destination_first_token, sizes[1]),
                    )
                ]
                yield at[0], at[1]

    tokens: dict[str, int] = field(default_factory=lambda: defaultdict(lambda: BLOCK_SIZE))
    """Tokens of a stored block of each group."""

    def end(self, number: int, *, fails: bool = False) -> None:
        """End one of the copies that are under way."""
        copy = self.copies.pop(number)
        if not fails:
            for at, to in self.slots(copy):
                if copy.is_store:
                    self.slab[to] = self.engine.get(at, GARBAGE)
                else:
                    self.engine[to] = self.slab[at]
        if copy.is_store:
            (self.report.failed if fails else self.report.stored)[copy.order.job_id] += 1
            return
        request_id = copy.order.request_id
        self.loads_left[request_id] -= 1
        if fails:
            self.failed.add(request_id)
        if not self.loads_left[request_id]:
            del self.loads_left[request_id]
            self.received.add(request_id)

    def take_output(self) -> KVConnectorOutput:
        """Return what vLLM gives to the scheduler, all ranks together."""
        output = KVConnectorOutput(
            finished_recving=self.received or None,
            failed_recving=self.failed & self.received,
            kv_connector_worker_meta=self.report,
        )
        self.report, self.failed, self.received = RankReport(), self.failed - self.received, set()
        return output


class Engine:
    """An engine of a scheduler and ranks."""

    def __init__(
        self,
        vllm_config: Any,
        *,
        num_blocks: int = 24,
        windows: Sequence[int] = (0,),
        num_ranks: int = 1,
        host_blocks: float = 12,
        runs_ahead: bool = False,
        starts: bool = True,
        lower: Callable[[Region], LowerTier] | None = None,
        **settings: Any,
    ) -> None:
        self.now = 1000.0
        self.runs_ahead, self.num_ranks = runs_ahead, num_ranks
        vllm_config.cache_config.num_gpu_blocks = num_blocks
        vllm_config.scheduler_config.async_scheduling = runs_ahead
        self.windows = windows
        groups = [group_spec(index, window) for index, window in enumerate(windows)]
        config = KVCacheConfig(num_blocks, [], groups)
        config.hash_block_size = BLOCK_SIZE
        slot_bytes = 2 * NUM_HEADS * HEAD_SIZE * 4 * (settings.get("block_size") or BLOCK_SIZE)
        host_bytes = int(host_blocks * slot_bytes * len(windows))
        # The clock stands still while a step is computed: no time can be measured.
        given = {"host_bytes": host_bytes, "model_id": "m", "loads": "always", **settings}
        parallel = SimpleNamespace(**{**vars(vllm_config.parallel_config), "tensor_parallel_size": num_ranks})
        parallel.nnodes_within_dp = 1
        self.ranks = Ranks(num_ranks)
        self.ranks.tokens = {str(index): settings.get("block_size") or BLOCK_SIZE for index in range(len(windows))}
        shards = {(0, rank): rank_shard(windows, num_blocks, rank, num_ranks) for rank in range(num_ranks)}
        self.ranks.report.shards = {key: encode_shard(shard) for key, shard in shards.items()}

        factory = KVConnectorFactory.create_connector

        def create(config: Any, role: KVConnectorRole, kv_cache_config: Any) -> KVConnectorBase_V1:
            transfer = config.kv_transfer_config
            if transfer.kv_connector == "MultiConnector":
                transfer.kv_connector_extra_config["connectors"][-1]["kv_connector_extra_config"] = given
            else:
                transfer.kv_connector_extra_config = given
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(config, "parallel_config", parallel)
                patch.setattr(connector_module, "resolved_layout", lambda _: NamedLayout.BHLNC)
                patch.setattr(connector_module, "check_layout", lambda *_: None)
                return factory(config, role, kv_cache_config)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(KVConnectorFactory, "create_connector", create)
            kind = AsyncScheduler if runs_ahead else Scheduler
            grammar: Any = SimpleNamespace(accept_tokens=lambda *_: True, validate_tokens=lambda _, tokens: tokens)
            self.scheduler = kind(vllm_config, config, grammar, BLOCK_SIZE, BLOCK_SIZE)
        connector = self.scheduler.connector
        *others, own = connector.sub_connectors if isinstance(connector, MultiConnector) else [connector]
        assert isinstance(own, KVFerryOffloadConnector)
        self.others: list[Any] = others
        """Under a ``MultiConnector``: those that are asked before the offload connector."""
        self.role = own._scheduler
        self.role._clock = lambda: self.now
        hashing = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hashing)
        self.hasher = get_request_block_hasher(BLOCK_SIZE, hashing)
        self.scheduled: list[Step] = []
        self.computed = Counter[str]()
        self.loaded = Counter[str]()
        self.finished: dict[str, Any] = {}
        self.are_ready = True
        """Whether ranks are ready as soon as they have their order."""
        self.last_loads: list[LoadOrder] = []
        self.num_drafts, self.random = vllm_config.num_speculative_tokens, random.Random(0)
        self.aborted: set[str] = set()
        self.contents: dict[bytes, int] = {}
        """What the last slot of a block with this hash must hold."""
        with pytest.MonkeyPatch.context() as patch:
            if lower is not None:
                patch.setattr(offload_tiers, "lower_tiers", lambda _, region, __: [lower(region)])
            while starts and self.role.has_pending_work():
                self.step()

    # Requests.

    def add(self, request_id: str, prompt: Sequence[int] | None, max_tokens: int = 1, **named: Any) -> Request:
        """Give the engine a request; ``named`` are fields of vLLM's."""
        params = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args=named.pop("extra_args", None),
            skip_reading_prefix_cache=named.pop("skips_cache", None),
        )
        given = None if prompt is None else list(prompt)
        request = Request(request_id, given, params, None, block_hasher=self.hasher, **named)
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        self.aborted.add(request_id)
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    # Steps.

    def schedule(self) -> Step:
        """Let the scheduler plan a step."""
        output = self.scheduler.schedule()
        ids = output.num_scheduled_tokens
        requests = {name: self.scheduler.requests[name] for name in ids}
        starts = {name: requests[name].num_computed_tokens - number for name, number in ids.items()}
        blocks = {name: self.scheduler.kv_cache_manager.get_block_ids(name) for name in ids}
        step = Step(output, blocks, starts, requests)
        self.scheduled.append(step)
        return step

    def process(self) -> None:
        """Compute the oldest planned step and give its results to the scheduler."""
        step = self.scheduled.pop(0)
        sampled = {name: self._compute(step, name) for name in step.output.num_scheduled_tokens}
        orders = step.output.kv_connector_metadata
        if isinstance(orders, MultiKVConnectorMetadata):
            orders = orders.metadata[-1]
        assert isinstance(orders, OffloadStep)
        if orders.slab is not None:
            assert [decode_shard(rank).tp_rank for rank in orders.slab.ranks] == list(range(self.num_ranks))
            opened = self.role._start.opened
            assert opened is not None
            self.ranks.slab = SlabContents(orders.slab, opened.memory.region.base_address)
            self.ranks.report.num_ready += self.num_ranks * self.are_ready
        self.ranks.begin(orders)
        self.last_loads = orders.loads
        output = ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={name: index for index, name in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=self._connector_output(),
        )
        results = self.scheduler.update_from_output(step.output, output)
        self._draft(step, sampled)
        for each in results.values():
            for one in each.outputs:
                if one.finish_reason is not None:
                    assert one.request_id not in self.finished
                    self.finished[one.request_id] = one.finish_reason

    def _draft(self, step: Step, sampled: dict[str, list[int]]) -> None:
        """Draft tokens for the next step, some of them wrong."""
        if self.num_drafts:
            drafts = {}
            for name, request in step.requests.items():
                tokens = list(request.all_token_ids)
                for _ in range(self.num_drafts if sampled[name] else 0):
                    is_right = self.random.random() < 0.6
                    tokens.append(next_token(tokens) if is_right else self.random.randrange(VOCABULARY))
                drafts[name] = tokens[request.num_tokens :]
            self.scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), list(drafts.values())))

    def step(self, *, ends_copies: bool = True, is_forced: bool = False) -> None:
        """Plan a step and process the oldest one; running ahead, one step is planned before the last is processed.

        Only a forced step is planned where the engine would sleep.
        """
        has_work = self.scheduler.has_requests() or is_forced
        if has_work:
            self.schedule()
        if ends_copies:
            self.end_copies()
        while len(self.scheduled) > (self.runs_ahead and has_work):
            self.process()

    def run(self, max_steps: int = 300) -> None:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            if not (self.scheduler.has_requests() or self.scheduled or self.ranks.copies):
                return
            self.now += 0.01
            self.step()
            if self.role.has_pending_work():
                time.sleep(0.0005)  # for the threads of a disk
        raise AssertionError(f"the engine does not come to an end: {self.state()}")

    def state(self) -> dict[str, Any]:
        """Return what the connector's scheduler keeps and has counted."""
        return role_state(self.role)

    def end_copies(self, *, fails: bool = False) -> None:
        while self.ranks.copies:
            self.ranks.end(0, fails=fails)

    def check_at_rest(self) -> None:
        """Check that nothing is pinned, kept or promised, and that every visible block has the content of its key."""
        state = self.state()
        tiers = state["tiers"]["host_memory"]
        assert (state["promised"], state["loads"], state["stores"], state["kept_blocks"]) == (0, [], 0, 0), state
        assert (tiers["num_pinned"], tiers["num_loads"], tiers["num_stores"]) == (0, 0, 0), tiers
        assert state["requests"] == 0, state
        for lower in state["tiers"]["lower"].values():
            assert (lower["promotions"], lower["writes"], lower["queued_chunks"]) == ([], [], 0), lower
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        self.check_slab()

    def check_slab(self) -> None:
        """Check the content of every visible block."""
        tiers = self.role._start.tiers
        assert tiers is not None
        host = tiers.stack._host
        for group in range(len(self.windows)):
            expected = dict(zip(tiers.names.keys(group, self.contents), self.contents.values(), strict=True))
            load = host.prepare_load(list(expected), counts_as_use=False)
            last = self.ranks.tokens[str(group)] - 1
            for key, block in zip(load.keys, load.block_ids.tolist(), strict=True):
                for rank in range(self.num_ranks):
                    assert self.ranks.slab[rank, str(group), block, last] == expected[key], "a wrong block"
            host.complete_load(load)

    def _connector_output(self) -> KVConnectorOutput:
        for request_id in self.ranks.received - self.ranks.failed:
            request = self.scheduler.requests[request_id]
            self._check_contents(request_id, self.scheduler.kv_cache_manager.get_block_ids(request_id), request, None)
            self.loaded[request_id] += request.num_computed_tokens
        output = self.ranks.take_output()
        if self.others:
            reports = *(None for _ in self.others), output.kv_connector_worker_meta
            output.kv_connector_worker_meta = MultiKVConnectorWorkerMetadata(reports)
        return output

    def _tokens(self, request: Request, length: int) -> list[int]:
        """Return the request's tokens, also those that the scheduler does not know yet."""
        tokens = list(request.all_token_ids)
        while len(tokens) < length:
            tokens.append(next_token(tokens))
        return tokens

    def _compute(self, step: Step, name: str) -> list[int]:
        """Write the slots of one request, those of drafts too; return the accepted and sampled tokens."""
        start, number, request = step.starts[name], step.output.num_scheduled_tokens[name], step.requests[name]
        self._check_contents(name, step.blocks[name], request, start, start + number)
        drafts = step.output.scheduled_spec_decode_tokens.get(name, [])
        end = start + number
        tokens = [*self._tokens(request, end - len(drafts))[: end - len(drafts)], *drafts]
        contents = contents_of(tokens)
        for group, ids in enumerate(step.blocks[name]):
            for place in range(start, start + number):
                for rank in range(self.num_ranks):
                    slot = ids[place // BLOCK_SIZE], place % BLOCK_SIZE
                    self.ranks.engine[rank, str(group), *slot] = contents[place]
        self.computed[name] += number
        if end < request.num_tokens:
            return []
        place, sampled = end - len(drafts), []
        while place < end and next_token(tokens[:place]) == tokens[place]:
            sampled.append(tokens[place])
            place += 1
        return [*sampled, next_token(tokens[:place])]

    def _check_contents(
        self, name: str, blocks: Sequence[Sequence[int]], request: Request, start: int | None, end: int = 0
    ) -> list[int]:
        """Check that all slots before ``start`` hold what they should; return the contents up to ``end``."""
        start = request.num_computed_tokens if start is None else start
        contents = contents_of(self._tokens(request, max(start, end))[: max(start, end, request.num_tokens)])
        for index, block_hash in enumerate(request.block_hashes):
            if (index + 1) * BLOCK_SIZE <= len(contents):
                self.contents[block_hash] = contents[(index + 1) * BLOCK_SIZE - 1]
        for group, ids in enumerate(blocks):
            for rank in range(self.num_ranks):
                first = max(0, start - self.windows[group] + 1) if self.windows[group] > 0 else 0
                found = [
                    self.ranks.engine.get((rank, str(group), ids[place // BLOCK_SIZE], place % BLOCK_SIZE), GARBAGE)
                    for place in range(first, start)
                ]
                assert 0 not in ids[first // BLOCK_SIZE : -(-start // BLOCK_SIZE)], f"{name} lacks a block"
                assert found == contents[first:start], f"{name}: rank {rank} finds wrong contents in group {group}"
        return contents


def make_config(folder: Path, **arguments: Any) -> Any:
    """Return vLLM's configuration of a small model, without its files' weights."""
    given: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 4,
        "block_size": BLOCK_SIZE,
        "kv_transfer_config": {
            "kv_connector": "KVFerryOffloadConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": arguments.pop("failure_policy", "fail"),
            "kv_connector_extra_config": {"host_bytes": 1},
        },
        **arguments,
    }
    register()
    return EngineArgs(**given).create_engine_config()


def prompt_of(*parts: int, length: int = 48) -> list[int]:
    """Return a prompt of parts, each with tokens that depend on the part's number alone."""
    return [token for part in parts for token in random.Random(part).choices(range(VOCABULARY), k=length)]


def group_and_hash(names: BlockNames, key: bytes) -> tuple[int, bytes]:
    """Return the cache group and vLLM's hash of a block from its key."""
    behind = NAMESPACE_BYTES + GROUP_BYTES
    return int.from_bytes(key[NAMESPACE_BYTES:behind], "big"), key[behind : behind + names.hash_bytes]
