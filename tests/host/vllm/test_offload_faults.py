"""Faults of disks, files and pools under a real engine: no wrong token, no failed request, nothing left behind.

``KVFERRY_FAULTS`` faults of all kinds, at random but repeatable: see :mod:`.fault_campaign.kinds`. With ``-s`` the
table of kinds and outcomes is printed; ``KVFERRY_FAULT_KINDS`` names the only kinds, by parts of their names, and
``KVFERRY_FAULT_SEED`` another order.
"""

import importlib.util
import os
import time
from pathlib import Path

import pytest

from .engine_pool import EnginePool
from .fault_campaign.campaign import DISK_BYTES, Campaign
from .fault_campaign.kinds import all_kinds, is_of_the_pool, schedule
from .fault_campaign.outcomes import family, reasons, table

# With the start of its engines it takes more than a minute.
pytestmark = [pytest.mark.vllm, *([] if "KVFERRY_FAULTS" in os.environ else [pytest.mark.matrix])]
NUM_FAULTS = int(os.environ.get("KVFERRY_FAULTS", "72"))
SEED = int(os.environ.get("KVFERRY_FAULT_SEED", "12"))
ONLY = os.environ.get("KVFERRY_FAULT_KINDS", "").split(",")
HAS_MOONCAKE = importlib.util.find_spec("mooncake") is not None
MOST_BAD = 10


@pytest.mark.timeout(300 + 4 * NUM_FAULTS)
def test_faults_cost_time_and_nothing_else(engine_pool: EnginePool, tmp_path: Path) -> None:
    bad: list[str] = []
    began_at = time.monotonic()
    with Campaign(tmp_path / "campaign", engine_pool.model_path("gqa"), SEED) as campaign:
        kinds = all_kinds(campaign)
        wanted = [
            kind for kind in kinds if any(part in kind for part in ONLY) and (HAS_MOONCAKE or not is_of_the_pool(kind))
        ]
        for number, kind in enumerate(schedule(wanted, NUM_FAULTS, SEED)):
            outcome = campaign.inject(kind, kinds[kind], with_pool=is_of_the_pool(kind))
            if not outcome.is_good:
                bad.append(f"fault {number}: {outcome}\n{campaign.processes.log_tail()}")
            if len(bad) == MOST_BAD:
                break
    print("\n" + table(campaign.outcomes, lambda outcome: outcome.kind))
    print("\n" + table(campaign.outcomes, family))
    print(f"\nblocks failed: {reasons(campaign.outcomes)}")
    print(f"\nat most {campaign.most_bytes} of {DISK_BYTES} bytes on disk; {time.monotonic() - began_at:.0f} s")
    assert not bad, "\n\n".join(bad)
    assert 0 < campaign.most_bytes <= DISK_BYTES
    met = sum(outcome.met > 0 for outcome in campaign.outcomes)
    assert met > 0.8 * NUM_FAULTS, "most faults met nothing"
    assert sum(outcome.loaded for outcome in campaign.outcomes) > NUM_FAULTS
    assert sum(sum(outcome.failed_blocks.values()) for outcome in campaign.outcomes) > NUM_FAULTS / 2


def test_the_campaign_notices_when_nothing_is_verified(engine_pool: EnginePool, tmp_path: Path) -> None:
    """With checksums that are all equal, damaged blocks reach the engine, and its tokens are wrong."""
    with Campaign(tmp_path / "campaign", engine_pool.model_path("gqa"), SEED, verifies=False) as campaign:
        kind = "blocks: a block with the bytes of another"
        outcomes = [campaign.inject(kind, all_kinds(campaign)[kind]) for _ in range(8)]
    assert sum(outcome.wrong_blocks for outcome in outcomes)
    assert sum(outcome.wrong_tokens for outcome in outcomes)
    assert not all(outcome.is_good for outcome in outcomes)
