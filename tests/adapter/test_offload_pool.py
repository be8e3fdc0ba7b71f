"""The settings of the pool, and the order in which an engine opens its lower tiers."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from kvferry.errors import KVFerryError, Reason, SettingsError
from kvferry.integrations.vllm.offload_names import EngineFacts
from kvferry.integrations.vllm.offload_settings import OffloadSettings, parse_offload_settings
from kvferry.integrations.vllm.scheduler import offload_tiers
from kvferry.integrations.vllm.scheduler.offload_tiers import check_settings, lower_tiers
from kvferry.tiers.local_disk import LocalDisk
from kvferry.tiers.slab_memory import SlabMemory, available_bytes

from ..local.pool_master import SHARE_BYTES, Master, skip_without_mooncake

PRIVATE = SettingsError(Reason.UNKNOWN_WEIGHTS, "nobody knows the weights.")
FACTS = EngineFacts({}, None, 32)


@pytest.fixture
def memory() -> Iterator[SlabMemory]:
    slab = SlabMemory(1 << 20)
    yield slab
    slab.close()


def settings(**given: Any) -> OffloadSettings:
    return parse_offload_settings({"host_bytes": "1 MiB", **given})


def refusal(*arguments: Any) -> Reason:
    with pytest.raises(KVFerryError) as caught:
        check_settings(*arguments)
    return caught.value.reason


@pytest.mark.mooncake
def test_the_pool_comes_before_the_disk(tmp_path: Path, memory: SlabMemory) -> None:
    """Memory of this or another host is quicker than a disk."""
    skip_without_mooncake()
    master = Master(tmp_path)
    both = settings(
        pool_master=master.address, pool_bytes=SHARE_BYTES, disk_path=str(tmp_path / "a"), disk_bytes="4 MiB"
    )
    try:
        check_settings(both, FACTS, 0)
        tiers = lower_tiers(both, memory.region, 0)
        assert [tier.capabilities.name for tier in tiers] == ["remote_pool", "local_disk"]
        assert [tier.capabilities.capacity_bytes for tier in tiers] == [SHARE_BYTES, 4 << 20]
        for tier in tiers:
            tier.close()
    finally:
        master.kill()


class FakePool:
    """Notes whether it is closed."""

    is_closed = False

    def __init__(self, *_: object) -> None:
        FakePool.is_closed = False

    def close(self) -> None:
        FakePool.is_closed = True


def test_no_pool_stays_open_where_the_disk_cannot_be(
    tmp_path: Path, memory: SlabMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload_tiers, "RemotePool", FakePool)
    owner = LocalDisk(tmp_path / "a", 4 << 20, memory.region)
    both = settings(pool_master="a:1", pool_bytes=SHARE_BYTES, disk_path=str(tmp_path / "a"), disk_bytes="4 MiB")
    with pytest.raises(KVFerryError) as caught:
        lower_tiers(both, memory.region, 0)
    assert caught.value.reason is Reason.TIER_IN_USE
    assert FakePool.is_closed
    owner.close()
    tiers = lower_tiers(both, memory.region, 0)
    assert not FakePool.is_closed
    tiers[1].close()


def test_names_that_mean_nothing_elsewhere_are_not_shared() -> None:
    pool = settings(pool_master="127.0.0.1:50051", pool_bytes=SHARE_BYTES)
    assert refusal(pool, replace(FACTS, private=PRIVATE), 0) is Reason.UNKNOWN_WEIGHTS
    check_settings(settings(), replace(FACTS, private=PRIVATE), 0)


def test_a_pool_that_cannot_be_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    half = available_bytes() // 4 * 3
    pool = settings(pool_master="127.0.0.1:50051", pool_bytes=SHARE_BYTES)
    assert refusal(msgspec.structs.replace(pool, host_bytes=half, pool_bytes=half), FACTS, 0) is Reason.TIER_FAILED
    assert refusal(msgspec.structs.replace(pool, pool_master="nowhere"), FACTS, 0) is Reason.INVALID_SETTING
    assert refusal(msgspec.structs.replace(pool, pool_bytes=1 << 20), FACTS, 0) is Reason.INVALID_SETTING
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    assert refusal(pool, FACTS, 0) is Reason.MISSING_DEPENDENCY
