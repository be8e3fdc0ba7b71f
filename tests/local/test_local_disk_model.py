"""The disk tier against a dictionary: stores, loads, crashes, restarts under other caps, and damage, in any order."""

import os
import random
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.errors import Reason
from kvferry.tiers.local_disk import RESERVED_BYTES

from .disk_blocks import Blocks, bytes_on_disk, key_of

NUMBERS = range(48)
CAPACITIES = [2 * RESERVED_BYTES, 300_000, 500_000, 900_000]
BATCH = st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=12, unique=True)
EXAMPLES = int(os.environ.get("KVFERRY_DISK_EXAMPLES", "40"))


def length_of(number: int) -> int:
    """Return the length of a block: three sizes of cells, and lengths that are no whole pages."""
    return (4096, 12_288, 5000, 20_001)[number % 4]


class DiskModel(RuleBasedStateMachine):
    """``held`` is what the tier must hold. Blocks that may be ``damaged`` may go, but never come with other bytes.

    ``evicted`` blocks may come back with a restart: their file is removed only when another file takes its room.
    A file that ``was_cut`` goes with the restart, with blocks that were stored in it after the cut.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scratch = Path(tempfile.mkdtemp())
        self.num_directories = 0
        self.held: set[int] = set()
        self.damaged: set[int] = set()
        self.evicted: set[int] = set()
        self.was_cut = False
        self.capacity = CAPACITIES[-1]
        self.blocks = Blocks(self.scratch / "tier", self.capacity, num_threads=2)

    def teardown(self) -> None:
        self.blocks.disk.close()
        shutil.rmtree(self.scratch)

    @rule(numbers=BATCH, cancelled=st.booleans())
    def store(self, numbers: list[int], cancelled: bool) -> None:
        store = self.blocks.begin_store(numbers, [length_of(number) for number in numbers])
        if cancelled:
            self.blocks.disk.cancel(store)
        self.blocks.wait(store)
        self.blocks.disk.complete_store(store)
        gone = {int.from_bytes(key, "big") for key in store.evicted}
        assert gone <= self.held
        assert not gone & set(numbers)
        landed = {number for number, has_landed in zip(numbers, store.landed.tolist(), strict=True) if has_landed}
        self.evicted |= gone
        self.damaged -= gone | (landed - self.held)
        self.damaged |= landed if self.was_cut else set()
        self.held = (self.held - gone) | landed
        assert set(store.failures) <= {Reason.TIER_FULL, Reason.ABORTED}

    @rule(numbers=BATCH)
    def load(self, numbers: list[int]) -> None:
        slots = self.blocks.slots([length_of(number) for number in numbers])
        load = self.blocks.disk.prepare_load([key_of(number) for number in numbers], slots)
        self.blocks.wait(load)
        self.blocks.check_landed(load, numbers)
        self.blocks.disk.complete_load(load)
        for number, has_landed in zip(numbers, load.landed.tolist(), strict=True):
            assert has_landed <= (number in self.held)
            if number in self.held and not has_landed:
                assert number in self.damaged, f"block {number} was lost"
                self.held.remove(number)
                self.damaged.remove(number)
        assert set(load.failures) <= {Reason.BLOCK_MISSING, Reason.CHECKSUM_MISMATCH, Reason.TIER_FAILED}

    @rule(capacity=st.sampled_from(CAPACITIES), crashes=st.booleans())
    def open_again(self, capacity: int, crashes: bool) -> None:
        """Open the directory again, or a copy of it as it is on disk while the tier is open."""
        if crashes:
            self.blocks.settle()
            self.num_directories += 1
            copied = self.scratch / f"copy-{self.num_directories}"
            shutil.copytree(self.blocks.directory, copied)
            self.blocks.disk.close()
            shutil.rmtree(self.blocks.directory)
        else:
            self.blocks.disk.close()
            copied = self.blocks.directory
        self.blocks = Blocks(copied, capacity, num_threads=2)
        left = self.blocks.held(NUMBERS)
        assert left <= self.held | self.evicted
        if capacity >= self.capacity:
            assert self.held - left <= self.damaged
        self.held, self.damaged, self.capacity = left, self.damaged & left, capacity
        self.was_cut = False

    @precondition(lambda self: self.held)
    @rule(seed=st.integers(0, 2**32), cuts=st.booleans())
    def damage(self, seed: int, cuts: bool) -> None:
        """Flip a bit of a segment file, or cut a file."""
        self.blocks.settle()
        drawn = random.Random(seed)
        path = drawn.choice(sorted(self.blocks.directory.glob("segment-*")))
        place = drawn.randrange(path.stat().st_size or 1)
        if cuts:
            os.truncate(path, place)
            self.was_cut = True
        elif path.stat().st_size:
            with path.open("r+b") as file:
                file.seek(place)
                byte = file.read(1)[0]
                file.seek(place)
                file.write(bytes([byte ^ (1 << drawn.randrange(8))]))
        self.damaged = set(self.held)

    @invariant()
    def the_tier_is_the_model(self) -> None:
        assert self.blocks.held(NUMBERS) == self.held
        assert bytes_on_disk(self.blocks.directory) <= self.capacity
        snapshot = self.blocks.disk.snapshot()
        assert snapshot["num_blocks"] == len(self.held)
        assert snapshot["num_bytes"] <= self.capacity
        assert snapshot["num_pinned"] == snapshot["num_loads"] == snapshot["num_stores"] == 0


TestDiskModel = DiskModel.TestCase
TestDiskModel.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
