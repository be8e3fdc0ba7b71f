"""The memory of a rank that transports reach: its cache, and beside it what its loads and its peers read."""

from dataclasses import dataclass

from kvferry.execution.device import DeviceOrder
from kvferry.execution.digests import DigestTable
from kvferry.execution.guard_words import GuardWords, Scratch
from kvferry.execution.pair_cells import pushed_digests
from kvferry.execution.stage import Stage
from kvferry.handoff.messages import DigestTable as TableEntry
from kvferry.layout.shard import Region, Shard
from kvferry.plan.digest_cells import Integrity


@dataclass(frozen=True, slots=True)
class RegisteredMemory:
    """What one rank registers. One that only writes and is written to has no guard words and keeps no digests."""

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
    def of(
        cls,
        shard: Shard,
        order: DeviceOrder,
        integrity: Integrity,
        *,
        num_scratch_words: int,
        num_slots: int,
        stage_bytes: int,
        compared_bytes: int,
    ) -> "RegisteredMemory":
        """Allocate the memory of a rank with this cache.

        ``num_slots`` prompts may be held; 0 for a rank that only writes and is written to. ``stage_bytes`` may be 0.
        """
        compares = num_slots and integrity is not Integrity.OFF
        return cls(
            shard,
            integrity,
            Scratch(num_scratch_words),
            stage=Stage(stage_bytes, order) if stage_bytes else None,
            compared=Stage(compared_bytes) if compares else None,
            words=GuardWords(num_slots) if num_slots else None,
            table=DigestTable(shard, integrity) if compares else None,
        )

    @property
    def regions(self) -> list[Region]:
        """The memory to register."""
        beside = self.scratch, self.stage, self.compared, self.words
        tables = [] if self.table is None else self.table.regions
        return [*self.shard.regions, *(each.region for each in beside if each is not None), *tables]

    @property
    def digests(self) -> TableEntry | None:
        """What peers learn of this rank's digests: where they are kept, or that they come with what is written."""
        return pushed_digests(self.integrity) if self.table is None else self.table.entry
