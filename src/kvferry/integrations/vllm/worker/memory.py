"""The memory of a rank that transports reach: its cache, and beside it what its loads and its peers read."""

from dataclasses import dataclass

from kvferry.execution.device import DeviceOrder
from kvferry.execution.digests import DigestTable
from kvferry.execution.guard_words import GuardWords, Scratch
from kvferry.execution.pair_cells import comparable, pushed_digests
from kvferry.execution.stage import Stage
from kvferry.handoff.messages import DigestTable as TableEntry
from kvferry.integrations.vllm.settings import Settings
from kvferry.integrations.vllm.step import MAX_HELD_REQUESTS
from kvferry.layout.shard import Region, Shard
from kvferry.plan.digest_cells import Integrity
from kvferry.plan.staging.strategy import DEFAULT_STAGE_BYTES

SCRATCH_WORDS = 4096
DIGESTS_BYTES = 64 << 20
"""Room for the digests that loads read: with ``full`` at least 8 GB of a cache at a time. Untouched memory costs
nothing."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What one rank registers. With ``push`` it neither reads nor is read: it has no words and keeps no digests."""

    shard: Shard
    integrity: Integrity
    """How much of a transfer is compared."""
    scratch: Scratch
    stage: Stage | None
    """Where loads read long runs into."""
    compared: Stage | None
    """Where loads read the digests of their sources into."""
    words: GuardWords | None
    """The guard words of the prompts that this rank holds."""
    table: DigestTable | None
    """The digests of the prompts that this rank holds."""

    @classmethod
    def of(cls, shard: Shard, order: DeviceOrder, settings: Settings) -> "RankMemory":
        """Allocate the memory of a rank with this cache. Raises :class:`PlanError` (unsupported) for a cache that the
        settings require to be compared, and that cannot be.
        """
        integrity = comparable(shard, settings.wanted_integrity, is_required=settings.requires_digests)
        reads = settings.mode == "pull"
        reads_digests = reads and integrity is not Integrity.OFF
        return cls(
            shard,
            integrity,
            Scratch(SCRATCH_WORDS),
            stage=Stage(DEFAULT_STAGE_BYTES, order) if settings.scatters else None,
            compared=Stage(DIGESTS_BYTES) if reads_digests else None,
            words=GuardWords(MAX_HELD_REQUESTS) if reads else None,
            table=DigestTable(shard, integrity) if reads_digests else None,
        )

    @property
    def regions(self) -> list[Region]:
        """The memory to register."""
        beside = self.scratch, self.stage, self.compared, self.words, self.table
        return [*self.shard.regions, *(each.region for each in beside if each is not None)]

    @property
    def digests(self) -> TableEntry | None:
        """What peers learn of this rank's digests: where they are kept, or that they come with what is written."""
        return pushed_digests(self.integrity) if self.table is None else self.table.entry
