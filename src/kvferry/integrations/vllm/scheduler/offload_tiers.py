"""The start of the offload connector: from the shards of all ranks to tiers that every rank can copy to and from."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum, auto

from kvferry.errors import KVFerryError, TierError
from kvferry.integrations.vllm.offload_names import BlockNames, EngineFacts
from kvferry.integrations.vllm.offload_settings import OffloadSettings, disk_folder
from kvferry.integrations.vllm.offload_step import RankReport, SlabOrder
from kvferry.layout.shard import Region, decode_shard
from kvferry.layout.slab import slab_shard
from kvferry.tiers.host_memory import HostMemory, slots_that_fit
from kvferry.tiers.local_disk import LocalDisk, check_directory
from kvferry.tiers.protocol import LowerTier
from kvferry.tiers.remote_pool import RemotePool, check_pool
from kvferry.tiers.slab_memory import SlabMemory, check_memory
from kvferry.tiers.stack import Stack
from kvferry.units import format_bytes

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Tiers:
    """The tiers of one engine, the names of blocks in them, and what ranks need to map the slab."""

    stack: Stack
    names: BlockNames
    memory: SlabMemory
    order: SlabOrder

    def close(self) -> None:
        """Close the tiers; the slab stays mapped where a lower tier may still use it."""
        try:
            self.stack.close()
        except Exception as error:
            logger.warning("kvferry: the slab stays mapped: %s", error, exc_info=not isinstance(error, TierError))
            return
        self.memory.close()


def check_settings(settings: OffloadSettings, facts: EngineFacts, data_parallel_rank: int) -> None:
    """Raise when the engine is built, not some steps later, where a tier could not be opened.

    :class:`TierError`: tier-failed for too little memory or an unusable folder, tier-in-use for a folder with another
    owner, tier-full for one without room for its first blocks, invalid-setting or missing-dependency for a pool;
    :class:`SettingsError` for names that mean nothing to another process.
    """
    check_memory(settings.host_bytes, settings.pool_bytes)
    if facts.private is not None and (settings.disk_path or settings.pool_master):
        raise facts.private.without_traceback()
    if settings.disk_path:
        check_directory(disk_folder(settings, data_parallel_rank), settings.disk_bytes)
    if settings.pool_master:
        check_pool(settings.pool_master, settings.pool_bytes)


def lower_tiers(settings: OffloadSettings, region: Region, data_parallel_rank: int) -> list[LowerTier]:
    """Open the tiers below host memory, the quickest first, for slots of the slab at ``region``.

    Raises :class:`KVFerryError`; then none stays open.
    """
    with ExitStack() as opened:
        tiers: list[LowerTier] = []
        if settings.pool_master:
            tiers.append(RemotePool(settings.pool_master, settings.pool_bytes, region))
            opened.callback(tiers[0].close)
        if settings.disk_path:
            tiers.append(LocalDisk(disk_folder(settings, data_parallel_rank), settings.disk_bytes, region))
        opened.pop_all()
    return tiers


def open_tiers(
    settings: OffloadSettings, facts: EngineFacts, ranks: Sequence[bytes], engine_blocks: int, data_parallel_rank: int
) -> Tiers:
    """Make the slab for the caches of all ranks, and open the tiers on it.

    ``ranks`` are the encoded shards; a stored block has ``engine_blocks`` blocks of the engine. Raises
    :class:`KVFerryError` for caches that have no slab, for too little memory, and for a tier that cannot be opened.
    """
    shards = [decode_shard(rank) for rank in ranks]
    one_of_each = dict.fromkeys((group.name for shard in shards for group in shard.groups), 1)
    one_block = slab_shard(shards, one_of_each, engine_blocks=engine_blocks)
    slot_bytes = {group.name: group.components[0].block_stride for group in one_block.groups}
    num_blocks = slots_that_fit(settings.host_bytes, slot_bytes)
    length = sum(num_blocks[name] * slot_bytes[name] for name in num_blocks)
    with ExitStack() as opened:
        memory = SlabMemory(length)
        opened.callback(memory.close)
        address = memory.region.base_address
        slab = slab_shard(shards, num_blocks, engine_blocks=engine_blocks, base_address=address)
        names = facts.names(slab)
        host = HostMemory(slab)
        order = SlabOrder(memory.handle, tuple(ranks), num_blocks, engine_blocks)
        # Last: nothing behind it can fail, so no tier stays open on memory that is gone.
        stack = Stack(host, lower_tiers(settings, memory.region, data_parallel_rank))
        opened.pop_all()
    room = f"{min(num_blocks.values())} stored blocks of each cache group ({len(num_blocks)})"
    logger.info("kvferry: %s of host memory, room for %s.", format_bytes(length), room)
    return Tiers(stack, names, memory, order)


class StartState(Enum):
    """How far the start has come."""

    COLLECTING = auto()
    """Not all ranks have reported their shards."""
    MAPPING = auto()
    """The tiers are open; not all ranks have mapped the slab and proved their copies."""
    READY = auto()
    REFUSED = auto()
    """Nothing will be offloaded; the engine serves without."""


class Start:
    """Collects the ranks' shards, opens the tiers, and waits until all ranks are ready. A refusal is final."""

    def __init__(self, num_ranks: int, make_tiers: Callable[[Sequence[bytes]], Tiers]) -> None:
        self.state = StartState.COLLECTING
        self.error = ""
        self._num_ranks, self._make_tiers = num_ranks, make_tiers
        self._shards: dict[tuple[int, int], bytes] = {}
        self._num_ready = 0
        self.opened: Tiers | None = None

    @property
    def tiers(self) -> Tiers | None:
        """The tiers once all ranks can copy to and from them."""
        return self.opened if self.state is StartState.READY else None

    @property
    def is_under_way(self) -> bool:
        """Whether ranks have something to do or to report."""
        return self.state in (StartState.COLLECTING, StartState.MAPPING)

    def note(self, report: RankReport) -> SlabOrder | None:
        """Take a report; return the order for all ranks when the slab has been made."""
        if not self.is_under_way:
            return None
        if report.refused:
            self._refuse(report.refused)
            return None
        self._shards |= report.shards
        self._num_ready += report.num_ready
        if self.state is StartState.MAPPING and self._num_ready == self._num_ranks:
            self.state = StartState.READY
            logger.info("kvferry: every rank (of %d) can store and load blocks.", self._num_ranks)
        if self.state is not StartState.COLLECTING or len(self._shards) < self._num_ranks:
            return None
        try:
            self.opened = self._make_tiers([self._shards[rank] for rank in sorted(self._shards)])
        except Exception as error:
            # The engine serves without: no error here is worth its end.
            is_known = isinstance(error, KVFerryError)
            self._refuse(str(error) if is_known else repr(error), with_traceback=not is_known)
            return None
        self.state = StartState.MAPPING
        return self.opened.order

    def close(self) -> None:
        """Close the tiers: memory and folder are of no use to this engine any more."""
        self.state = StartState.REFUSED
        if self.opened is not None:
            self.opened.close()
            self.opened = None

    def _refuse(self, error: str, *, with_traceback: bool = False) -> None:
        self.error = error
        told = "kvferry: no block is offloaded, the engine serves without: %s"
        logger.error(told, error, exc_info=with_traceback)
        self.close()
