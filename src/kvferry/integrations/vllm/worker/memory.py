"""The memory that a rank of an engine registers, by its settings."""

from kvferry.execution.device import DeviceOrder
from kvferry.execution.pair_cells import comparable
from kvferry.execution.registered_memory import RegisteredMemory
from kvferry.integrations.vllm.settings import Settings
from kvferry.integrations.vllm.step import MAX_HELD_REQUESTS
from kvferry.layout.shard import Shard
from kvferry.plan.staging.strategy import DEFAULT_STAGE_BYTES

SCRATCH_WORDS = 4096
COMPARED_BYTES = 64 << 20
"""Room for the digests that loads read: with ``full`` at least 8 GB of a cache at a time. Untouched memory costs
nothing."""


def memory_of(shard: Shard, order: DeviceOrder, settings: Settings) -> RegisteredMemory:
    """Allocate the memory of a rank with this cache.

    Raises :class:`PlanError` (unsupported) for a cache that the settings require to be compared, and that cannot be.
    """
    return RegisteredMemory.of(
        shard,
        order,
        comparable(shard, settings.wanted_integrity, is_required=settings.requires_digests),
        num_scratch_words=SCRATCH_WORDS,
        num_slots=MAX_HELD_REQUESTS if settings.mode == "pull" else 0,
        stage_bytes=DEFAULT_STAGE_BYTES if settings.scatters else 0,
        compared_bytes=COMPARED_BYTES,
    )
