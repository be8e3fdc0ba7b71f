"""``KVFerryOffloadingSpec``: host memory behind vLLM's own ``OffloadingConnector``, on the CPU too.

``KVFerryOffloadConnector`` is the connector to use; this spec runs the settings of engines that are configured for
``OffloadingConnector``. vLLM decides what is looked up, stored and loaded. A *chunk* is the unit: as many blocks as
``block_size`` tokens have. The manager, in the scheduler, keeps the index of chunks. The worker of each rank copies
the rank's part of a chunk to one contiguous stretch of host memory, and back. One engine's process alone reads the
chunks, so vLLM's hashes name them without a namespace.

vLLM has no way to report that a copy failed: it asserts success. So an error here ends the engine, with its reason.
"""

import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self

import msgspec
import numpy as np
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvferry.arrays import Addresses, Descriptors, Integers
from kvferry.errors import Reason, SettingsError, TierError, did_you_mean
from kvferry.execution.executor import cores_that_do_not_compute
from kvferry.integrations.vllm.versions import cache_hit_source, check_block_hashes, check_version, report_version
from kvferry.layout.component import Component, HeadRange
from kvferry.layout.group import CacheGroup, CacheKind
from kvferry.layout.shard import HOST_DEVICE, Region, Shard
from kvferry.tiers.eviction import Eviction
from kvferry.tiers.host_memory import HostLoad, HostMemory, HostStore
from kvferry.tiers.protocol import KEY_BYTES, BlockKey, Presence
from kvferry.tiers.slab_memory import SlabMemory
from kvferry.transport.memcpy import MemcpyTransport
from kvferry.transport.protocol import Direction, Status, Transfer, reach

if TYPE_CHECKING:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

check_version()
report_version()

CHUNKS = "chunks"
"""The one group of the index: chunks of all of the engine's cache groups take slots of the same size."""
_RESULTS = {
    Presence.ABSENT: LookupResult.MISS,
    Presence.HELD: LookupResult.HIT,
    Presence.PENDING: LookupResult.HIT_PENDING,
}


class SpecSettings(msgspec.Struct, frozen=True):
    """``kv_connector_extra_config`` of ``OffloadingConnector`` with this spec; the first three are the spec's own.

    One of ``num_cpu_blocks``, which counts chunks, and ``cpu_bytes_to_use``, of all ranks together, is needed.
    """

    num_cpu_blocks: Annotated[int, msgspec.Meta(gt=0, le=2**31)] | None = None
    cpu_bytes_to_use: Annotated[int, msgspec.Meta(gt=0)] | None = None
    eviction_policy: Eviction = Eviction.LRU
    spec_name: str = ""
    spec_module_path: str = ""
    block_size: int | None = None
    blocks_per_chunk: int | None = None
    offload_prompt_only: bool = True
    self_describing_kv_events: bool = False


class KVFerryOffloadingSpec(OffloadingSpec):
    """Makes the manager and the workers. Raises :class:`SettingsError` for settings that cannot be kept."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._settings = _parse_settings(config.extra_config)
        _check_supported(config)
        self.num_chunks = self._settings.num_cpu_blocks or _chunks_in(self._settings.cpu_bytes_to_use, config)
        self._manager: HostManager | None = None

    def get_manager(self) -> OffloadingManager:
        """Return the index of chunks, for the scheduler."""
        if self._manager is None:
            has_events = self.kv_events_config.enable_kv_cache_events
            self._manager = HostManager(self.num_chunks, self._settings.eviction_policy, has_events=has_events)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return the copying half of one rank. Raises :class:`SettingsError` ``unsupported`` for caches on a device."""
        devices = {str(cache.tensor.device) for cache in kv_caches.tensors}
        if devices != {HOST_DEVICE}:
            raise SettingsError(
                Reason.UNSUPPORTED,
                f"KVFerryOffloadingSpec copies caches in host memory, and this rank's are on {sorted(devices)}.",
                'Use "kv_connector": "KVFerryOffloadConnector", or vLLM\'s "spec_name": "CPUOffloadingSpec".',
            )
        return HostWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)


def _parse_settings(given: Mapping[str, Any]) -> SpecSettings:
    """Raise :class:`SettingsError`: unknown-setting with the nearest known one, invalid-setting."""
    known = SpecSettings.__struct_fields__
    if given.get("canonical_layout"):
        raise SettingsError(
            Reason.UNSUPPORTED,
            "canonical_layout is set: KVFerryOffloadingSpec stores each rank's own pages.",
            'Use "kv_connector": "KVFerryOffloadConnector", whose blocks any number of ranks can load.',
        )
    for name in given.keys() - {*known, "canonical_layout"}:
        raise SettingsError(
            Reason.UNKNOWN_SETTING, f"KVFerryOffloadingSpec has no setting {name!r}.", did_you_mean(name, known)
        )
    try:
        settings = msgspec.convert(dict(given), SpecSettings)
    except msgspec.ValidationError as error:
        raise SettingsError(Reason.INVALID_SETTING, f"kv_connector_extra_config: {error}.") from error
    if (settings.num_cpu_blocks is None) == (settings.cpu_bytes_to_use is None):
        raise SettingsError(
            Reason.INVALID_SETTING,
            f"num_cpu_blocks is {settings.num_cpu_blocks} and cpu_bytes_to_use is {settings.cpu_bytes_to_use}.",
            'Set one of both: "num_cpu_blocks", the number of chunks to keep, or "cpu_bytes_to_use".',
        )
    return settings


def _check_supported(config: OffloadingConfig) -> None:
    check_block_hashes()
    if len(config.groups) > 1 and config.cache.blocks_per_chunk > 1:
        raise SettingsError(
            Reason.UNSUPPORTED,
            f"a chunk has {config.cache.blocks_per_chunk} blocks and the model {len(config.groups)} cache groups: the "
            "first blocks of a window's chunk may be gone before the chunk is stored, and vLLM would load them.",
            'Leave "block_size" and "blocks_per_chunk" out: a chunk is then one block.',
        )


def _chunks_in(num_bytes: int | None, config: OffloadingConfig) -> int:
    """Return how many chunks this many bytes hold, the same number in the scheduler and in every rank."""
    assert num_bytes is not None, "the settings name one of both"
    if config.parallel.pp_size > 1 or not config.worker_kv_bytes_per_block:
        raise SettingsError(
            Reason.UNSUPPORTED,
            f"cpu_bytes_to_use is set; with {config.parallel.pp_size} pipeline stages, of which each has chunks of its "
            f"own size, and {config.worker_kv_bytes_per_block} bytes of a block, ranks may count chunks differently.",
            'Set "num_cpu_blocks".',
        )
    chunk_bytes = config.worker_kv_bytes_per_block * config.parallel.world_size * config.cache.blocks_per_chunk
    if num_bytes < chunk_bytes:
        held = f"cpu_bytes_to_use is {num_bytes}, and one chunk of all ranks has {chunk_bytes} bytes."
        raise SettingsError(Reason.INVALID_SETTING, held, "Give more bytes.")
    return num_bytes // chunk_bytes


# The scheduler's half.


@dataclass
class RequestKeys:
    """The chunks that a request has loaded or offered for storing, in the order of its prefix."""

    keys: dict[BlockKey, None] = field(default_factory=dict)


class HostManager(OffloadingManager):
    """The index of chunks: which are in host memory, which are pinned, which go when it is full.

    Stores and loads are completed by their set of keys, since vLLM names them so.
    """

    def __init__(self, num_chunks: int, eviction: Eviction = Eviction.LRU, *, has_events: bool = False) -> None:
        self._num_chunks, self._eviction = num_chunks, eviction
        self._host = self._empty_index()
        self._stores: dict[frozenset[OffloadKey], HostStore] = {}
        self._loads: dict[frozenset[OffloadKey], list[HostLoad]] = {}
        self._events: list[OffloadingEvent] | None = [] if has_events else None

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return whether a chunk is in host memory; pending while it is being stored."""
        return _RESULTS[self._host.presence(_block_key(key))]

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> "CacheHitSource":
        """Host memory is all there is."""
        source: CacheHitSource = cache_hit_source("HOST")
        return source

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pin the chunks. Raises :class:`TierError` ``block-missing`` where one is not in host memory any more."""
        block_keys = list(map(_block_key, keys))
        load = self._host.prepare_load(block_keys)
        if len(load.keys) != len(block_keys):
            self._host.complete_load(load)
            raise load.error or TierError(Reason.INVALID_REQUEST, "a chunk is to be loaded twice by one job.")
        _keys_of(req_context).update(dict.fromkeys(block_keys))
        self._loads.setdefault(frozenset(keys), []).append(load)
        return CPULoadStoreSpec(load.block_ids.tolist())

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """End the pins of one load of these chunks."""
        loads = self._loads[frozenset(keys)]
        self._host.complete_load(loads.pop())
        if not loads:
            del self._loads[frozenset(keys)]

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Count a use of the chunks among these that are in host memory."""
        self._host.touch(list(map(_block_key, keys)))

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Reserve slots for as many of the new chunks as there is room for, the first ones first.

        None, after which vLLM asks again in the next step, only where room for new chunks was wanted and every slot is
        in use: a prompt of more chunks than host memory has would otherwise never be stored.
        """
        block_keys = list(map(_block_key, keys))
        store = self._host.prepare_store(CHUNKS, block_keys, num_parts=1)
        _keys_of(req_context).update(dict.fromkeys(block_keys))
        evicted = list(map(_offload_key, store.evicted))
        self._record(evicted, removed=True)
        accepted = list(map(_offload_key, store.keys))
        if not accepted:
            self._host.complete_store(store)
            if Reason.TIER_FULL in store.failures:
                return None
        else:
            self._stores[frozenset(accepted)] = store
        return PrepareStoreOutput(accepted, CPULoadStoreSpec(store.block_ids.tolist()), evicted)

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """Make the chunks visible, or free their slots."""
        store = self._stores.pop(frozenset(keys))
        self._host.land(store, 0, np.full(len(store.keys), success))
        self._host.complete_store(store)
        if success:
            self._record(list(map(_offload_key, store.keys)), removed=False)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Chunks that other requests have stored need not be stored again."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Let the end of a prefix go before its beginning, without which the end is of no use."""
        self._host.touch(list(_keys_of(req_context)))

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the chunks stored and evicted since the last call."""
        events, self._events = self._events or [], None if self._events is None else []
        return events

    def reset_cache(self) -> None:
        """Forget every chunk. vLLM completes no job of before, and waits for the copies before it stores again."""
        self._host = self._empty_index()
        self._stores.clear()
        self._loads.clear()

    def shutdown(self) -> None:
        """Refuse all later calls."""
        self._host.close()

    def _record(self, keys: list[OffloadKey], *, removed: bool) -> None:
        if self._events is not None and keys:
            self._events.append(OffloadingEvent(keys, Medium.CPU, removed))

    def _empty_index(self) -> HostMemory:
        """Return an index of slots; each rank places them in memory of its own, so they have no address here."""
        slot = Component(
            name="chunk",
            layers=("all",),
            layer_offsets=(0,),
            heads=(HeadRange(0, 1),),
            total_heads=1,
            num_channels=1,
            itemsize=1,
            block_stride=1,
            head_stride=1,
            token_stride=1,
            channel_stride=1,
        )
        group = CacheGroup(
            name=CHUNKS, kind=CacheKind.ATTENTION, block_size=1, num_blocks=self._num_chunks, components=(slot,)
        )
        return HostMemory(Shard(regions=(Region(0, self._num_chunks),), groups=(group,)), self._eviction)


def _keys_of(req_context: ReqContext) -> dict[BlockKey, None]:
    state = req_context.get_state(RequestKeys)
    if state is None:
        state = RequestKeys()
        req_context.set_state(state)
    return state.keys


def _block_key(key: OffloadKey) -> BlockKey:
    """Return the key at the length of a tier's keys; the last byte counts the bytes that were added.

    >>> _offload_key(_block_key(OffloadKey(b"hash and group"))), len(_block_key(OffloadKey(b"hash and group")))
    (b'hash and group', 48)
    """
    added = KEY_BYTES - len(key)
    if added < 1:
        raise TierError(Reason.INVALID_REQUEST, f"vLLM's key has {len(key)} bytes; {KEY_BYTES - 1} at most are known.")
    return key + bytes([added]) * added


def _offload_key(key: BlockKey) -> OffloadKey:
    return OffloadKey(key[: -key[-1]])


# A rank's half.


class Pages(NamedTuple):
    """The pages of one block of a cache group, as arrays: the address of each in block 0, the bytes to the next
    block's, its bytes, and its place among the bytes of the block in host memory.
    """

    addresses: Addresses
    strides: Addresses
    lengths: Addresses
    places: Addresses

    @classmethod
    def of(cls, caches: CanonicalKVCaches, refs: Sequence[CanonicalKVCacheRef]) -> Self:
        """Return the pages of one group of vLLM's; without what pads them."""
        tensors = [caches.tensors[ref.tensor_idx].tensor for ref in refs]
        lengths = np.array([ref.page_size_bytes for ref in refs], np.uint64)
        return cls(
            np.array([tensor.data_ptr() for tensor in tensors], np.uint64),
            np.array([tensor.stride(0) * tensor.element_size() for tensor in tensors], np.uint64),
            lengths,
            np.cumsum(lengths) - lengths,
        )


class HostWorker(OffloadingWorker):
    """Copies between one rank's caches and its own host memory, in the order of submission, on one thread.

    A chunk is contiguous: its blocks one behind the other, and in each block the pages of all layers. Where the
    engine's layout keeps a block's layers together (``BLHNC``), a block is one copy.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, num_chunks: int) -> None:
        """Raises :class:`TierError` ``tier-failed`` where this machine has not so much memory."""
        self._groups = [Pages.of(kv_caches, refs) for refs in kv_caches.group_data_refs]
        self._blocks_per_chunk = blocks_per_chunk
        self.block_bytes = max(int(pages.lengths.sum()) for pages in self._groups)
        self._memory = SlabMemory(num_chunks * blocks_per_chunk * self.block_bytes)
        # A window may have left the first blocks of a chunk, which are then not stored.
        self._is_stored = np.zeros((num_chunks, blocks_per_chunk), np.bool_)
        self._caches = kv_caches  # holds the memory that is registered
        storages = [cache.tensor.untyped_storage() for cache in kv_caches.tensors]
        regions = {storage.data_ptr(): Region(storage.data_ptr(), storage.nbytes()) for storage in storages}
        self._transport = MemcpyTransport()
        self._peer = reach(self._transport, self._transport.register([*regions.values(), self._memory.region]))
        self._thread = ThreadPoolExecutor(1, "kvferry-offloading", _leave_computing_cores)
        self._jobs: dict[int, Future[TransferResult]] = {}

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Copy blocks of the engine to chunks."""
        copies = self._copies(src_spec, dst_spec)
        for _, _, places in copies:
            self._is_stored[places // self._blocks_per_chunk] = False
        for _, _, places in copies:
            self._is_stored.reshape(-1)[places] = True
        self._submit(job_id, Direction.WRITE, self._descriptors(copies))
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Copy chunks to blocks of the engine, also when ``expedited`` behind what was submitted before.

        Raises :class:`TierError` ``block-missing`` for a block never stored.
        """
        copies = self._copies(dst_spec, src_spec)
        for _, _, places in copies:
            if not self._is_stored.reshape(-1)[places].all():
                raise TierError(
                    Reason.BLOCK_MISSING,
                    "vLLM asks for a block of a chunk that was stored in part: a window had left the chunk's first "
                    "blocks.",
                    'Leave "block_size" and "blocks_per_chunk" out: a chunk is then one block.',
                )
        self._submit(job_id, Direction.READ, self._descriptors(copies)[:, [1, 0, 2]])
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that have ended since the last call. Raises the error of a copy that failed."""
        ended = [job_id for job_id, job in self._jobs.items() if job.done()]
        return [self._jobs.pop(job_id).result() for job_id in ended]

    def wait(self, job_ids: set[int]) -> None:
        """Wait for those of the jobs that have not ended; :meth:`get_finished` still returns them."""
        wait([self._jobs[job_id] for job_id in job_ids & self._jobs.keys()])

    def shutdown(self) -> None:
        """End the copies and give the memory back. Twice is fine."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._transport.close()
        self._memory.close()

    def _copies(self, blocks: GPULoadStoreSpec, chunks: LoadStoreSpec) -> list[tuple[Pages, Integers, Integers]]:
        """Return for each cache group its pages, the engine's blocks, and the place of each among all host blocks.

        The first and the last chunk of a group may have more blocks than are copied. Raises :class:`TierError`
        ``invalid-request`` for another number of chunks than the blocks need.
        """
        assert isinstance(chunks, CPULoadStoreSpec)
        sizes, per_chunk = np.asarray(blocks.group_sizes), self._blocks_per_chunk
        skips = np.asarray(blocks.block_indices) % per_chunk
        num_chunks = np.where(sizes > 0, -(-(sizes + skips) // per_chunk), 0)
        if int(num_chunks.sum()) != len(chunks.chunk_ids):
            asked = f"{len(chunks.chunk_ids)} chunks for {sizes.tolist()} blocks, from {skips.tolist()} of a chunk on."
            raise TierError(Reason.INVALID_REQUEST, asked)
        block_ids = np.split(blocks.block_ids.astype(np.int64), np.cumsum(sizes)[:-1])
        chunk_ids = np.split(chunks.chunk_ids.astype(np.int64), np.cumsum(num_chunks)[:-1])
        within = np.arange(per_chunk)
        places = [(listed[:, None] * per_chunk + within).ravel() for listed in chunk_ids]
        return [
            (pages, listed, every[skip : skip + len(listed)])
            for pages, listed, every, skip in zip(self._groups, block_ids, places, skips.tolist(), strict=True)
        ]

    def _descriptors(self, copies: Sequence[tuple[Pages, Integers, Integers]]) -> Descriptors:
        """Return the copies from the engine's blocks to host memory."""
        found = []
        for pages, block_ids, places in copies:
            descriptors = np.empty((len(block_ids), len(pages.lengths), 3), np.uint64)
            descriptors[:, :, 0] = pages.addresses + block_ids.astype(np.uint64)[:, None] * pages.strides
            first = self._memory.region.base_address + places * self.block_bytes
            descriptors[:, :, 1] = pages.places + first.astype(np.uint64)[:, None]
            descriptors[:, :, 2] = pages.lengths
            found.append(descriptors.reshape(-1, 3))
        return np.concatenate(found)

    def _submit(self, job_id: int, direction: Direction, descriptors: Descriptors) -> None:
        transfer = self._transport.submit(self._peer, direction, descriptors)
        self._jobs[job_id] = self._thread.submit(self._run, job_id, transfer)

    def _run(self, job_id: int, transfer: Transfer) -> TransferResult:
        began_at = time.monotonic()
        while self._transport.poll(transfer) is Status.PENDING:
            pass
        if transfer.error is not None:
            raise transfer.error
        return TransferResult(job_id, True, transfer.num_bytes, time.monotonic() - began_at)


def _leave_computing_cores() -> None:
    os.sched_setaffinity(0, cores_that_do_not_compute())
