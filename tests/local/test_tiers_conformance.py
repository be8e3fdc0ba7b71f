"""Every tier that needs files, threads or other processes passes the suite of tiers."""

import ctypes
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from kvferry.layout.shard import Region
from kvferry.tiers import remote_pool
from kvferry.tiers.disk.segments import Directory, cells_name, read_segment
from kvferry.tiers.local_disk import LocalDisk
from kvferry.tiers.pool.store import object_names
from kvferry.tiers.protocol import BlockKey, LowerTier
from kvferry.tiers.remote_pool import RemotePool

from ..support.tier_suite import LowerBench, LowerTierSuite, tier_machine
from .pool_master import Master, SharedClients, open_pool, skip_without_mooncake

CAPACITY = 4 << 20


class TestLocalDisk(LowerTierSuite):
    """The disk tier."""

    def open_tier(self, region: Region, place: Path) -> LowerTier:
        """Open it in a directory."""
        return LocalDisk(place / "blocks", CAPACITY, region)

    def damage(self, tier: LowerTier, place: Path, key: BlockKey) -> None:
        """Flip a bit of the block on disk."""
        deadline = time.monotonic() + 20.0
        while tier.snapshot()["num_waiting"]:  # its headers are written after the store
            assert time.monotonic() < deadline
        directory = Directory(place / "blocks")
        for name in directory.segment_names():
            shape, headers, _ = read_segment(directory, name)
            for header in headers:
                if header.key == key:
                    with (directory.path / cells_name(name)).open("r+b") as file:
                        file.seek(shape.cell_offset(header.cell) + 100)
                        byte = file.read(1)[0]
                        file.seek(shape.cell_offset(header.cell) + 100)
                        file.write(bytes([byte ^ 1]))
                    directory.close()
                    return
        raise AssertionError("the block is not on disk")


@pytest.mark.mooncake
class TestRemotePool(LowerTierSuite):
    """The pool tier, with a master of its own. Tests of ``close`` have clients of their own, others share them."""

    master: ClassVar[Master]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _clients(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedClients]:
        skip_without_mooncake()
        cls.master = Master(tmp_path_factory.mktemp("master"))
        clients = SharedClients()
        yield clients
        clients.close()
        cls.master.kill()

    @pytest.fixture(autouse=True)
    def _share(self, _clients: SharedClients, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        if "close" not in request.node.name:
            monkeypatch.setattr(remote_pool, "PoolStore", _clients.open)

    def open_tier(self, region: Region, place: Path) -> LowerTier:
        """Open it as a client of the master."""
        return open_pool(self.master, region)

    def damage(self, tier: LowerTier, place: Path, key: BlockKey) -> None:
        """Flip a bit of the block in the memory that this process lends."""
        assert isinstance(tier, RemotePool)
        (replica,) = tier._store._store.get_replica_desc(object_names([key])[0])
        address = replica.get_memory_descriptor().buffer_descriptor.buffer_address
        ctypes.c_uint8.from_address(address + 100).value ^= 1


@pytest.mark.mooncake
def test_remote_pool_against_a_dictionary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_mooncake()
    master, clients = Master(tmp_path), SharedClients()
    monkeypatch.setattr(remote_pool, "PoolStore", clients.open)
    try:
        run_state_machine_as_test(
            tier_machine(lambda: LowerBench(lambda region: open_pool(master, region))),
            settings=settings(
                max_examples=8, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
            ),
        )
        clients.close()
    finally:
        master.kill()


def test_local_disk_against_a_dictionary(tmp_path: Path) -> None:
    def open_bench() -> LowerBench:
        scratch = TemporaryDirectory(dir=tmp_path)
        return LowerBench(lambda region: LocalDisk(Path(scratch.name) / "blocks", 20 * 65_536, region, num_threads=2))

    run_state_machine_as_test(
        tier_machine(open_bench),
        settings=settings(
            max_examples=15, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
