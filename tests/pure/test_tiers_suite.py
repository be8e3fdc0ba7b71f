"""Host memory and the tier in a dictionary pass the shipped suite, and state machines drive both."""

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from kvferry.layout.shard import Region
from kvferry.tiers.protocol import BlockKey, LowerTier

from ..support.dictionary_tier import DictionaryTier
from ..support.tier_suite import (
    BLOCK_BYTES,
    HostBench,
    LowerBench,
    LowerTierSuite,
    TierSuite,
    tier_machine,
)


class TestHostMemory(TierSuite):
    def open_bench(self, place: Path) -> HostBench:
        return HostBench()


class TestDictionaryTier(LowerTierSuite):
    def open_tier(self, region: Region, place: Path) -> DictionaryTier:
        return DictionaryTier(region, 64 * BLOCK_BYTES)

    def damage(self, tier: LowerTier, place: Path, key: BlockKey) -> None:
        assert isinstance(tier, DictionaryTier)
        content, expected = tier.blocks[key]
        tier.blocks[key] = (bytes([content[0] ^ 1]) + content[1:], expected)


BENCHES = {
    "host memory": lambda: HostBench(12),
    "dictionary": lambda: LowerBench(lambda region: DictionaryTier(region, 12 * BLOCK_BYTES)),
}


@pytest.mark.parametrize("open_bench", BENCHES.values(), ids=BENCHES.keys())
def test_no_sequence_of_calls_breaks_a_tier(open_bench) -> None:  # type: ignore[no-untyped-def]
    machine = tier_machine(open_bench)
    run_state_machine_as_test(machine, settings=settings(max_examples=30, stateful_step_count=30, deadline=None))
