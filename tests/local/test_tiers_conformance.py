"""Every tier that needs files, threads or other processes passes the suite of tiers."""

import time
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from kvferry.layout.shard import Region
from kvferry.testing.tier_suite import LowerBench, LowerTierSuite, tier_machine
from kvferry.tiers.disk.segments import Directory, read_segment
from kvferry.tiers.local_disk import LocalDisk
from kvferry.tiers.protocol import BlockKey, LowerTier

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
                    with (directory.path / name).open("r+b") as file:
                        file.seek(shape.cell_offset(header.cell) + 100)
                        byte = file.read(1)[0]
                        file.seek(shape.cell_offset(header.cell) + 100)
                        file.write(bytes([byte ^ 1]))
                    directory.close()
                    return
        raise AssertionError("the block is not on disk")


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
