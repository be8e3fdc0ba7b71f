"""Moves of short runs between two processes: heads merged from two ranks into one, or split from one to two."""

from collections.abc import Mapping

import numpy as np

from kvferry.cli.transport_measurement import Bytes, Mover
from kvferry.errors import Reason, SettingsError
from kvferry.execution.guard_words import word_bytes
from kvferry.execution.part_requests import PartCourier
from kvferry.execution.read import GuardedRead
from kvferry.execution.stage import Stage
from kvferry.layout.dense import shard_for
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import Shard
from kvferry.plan.planner import PairPlan, Planner
from kvferry.plan.request import GroupBlocks
from kvferry.plan.staging.staged_plan import GatherPlan, Lowered, ScatterPlan, lowered

LAYERS, HEADS, HEAD_SIZE, ITEMSIZE, BLOCK_SIZE = 36, 8, 128, 2, 16
TOKEN_BYTES = HEADS * 2 * HEAD_SIZE * ITEMSIZE
BLOCK_BYTES = LAYERS * BLOCK_SIZE * TOKEN_BYTES
MERGE, SPLIT = (2, 1), (1, 2)
"""Tensor-parallel sizes there and here. Either way runs have 2 KiB."""

Plans = Mapping[PairPlan, ScatterPlan | GatherPlan | None]


class HeadMove:
    """All ranks' caches in the other process, the first rank's here, and a request of scattered blocks between them."""

    def __init__(self, num_bytes: int, source: Bytes, local: Bytes, sizes: tuple[int, int]) -> None:
        self.num_blocks, num_moved = 2 * num_bytes // BLOCK_BYTES, num_bytes // BLOCK_BYTES
        if not num_moved:
            what = f"{num_bytes} bytes hold no block of {BLOCK_BYTES}."
            raise SettingsError(Reason.INVALID_SETTING, what, "Give --total more.")
        generator = np.random.default_rng(0)
        self._ids = [generator.permutation(self.num_blocks)[:num_moved] for _ in range(2)]
        self.num_bytes = num_moved * BLOCK_BYTES // sizes[1]
        self._sizes, self._local = sizes, local
        shape, width = (LAYERS, self.num_blocks, BLOCK_SIZE), TOKEN_BYTES // sizes[1]
        ranks = [each.reshape(*shape, -1) for each in np.split(source[: self._rank_bytes * sizes[0]], sizes[0])]
        self._wanted = np.concatenate([rank[:, self._ids[0]] for rank in ranks], axis=-1)[..., :width]
        self._cache = local[: self.num_blocks * BLOCK_BYTES // sizes[1]].reshape(*shape, width)

    @property
    def _rank_bytes(self) -> int:
        return self.num_blocks * BLOCK_BYTES // self._sizes[0]

    @property
    def request(self) -> GroupBlocks:
        """Return all tokens of the blocks that move."""
        return GroupBlocks(
            group="full",
            first_token=0,
            last_token=len(self._ids[0]) * BLOCK_SIZE,
            source_block_ids=self._ids[0],
            destination_block_ids=self._ids[1],
        )

    def plans(self, mover: Mover) -> tuple[PairPlan, ...]:
        """Return a plan for each rank there."""
        there, here = self._sizes
        sources = [self._shard(mover.remote_address + rank * self._rank_bytes, rank, there) for rank in range(there)]
        return Planner(sources, self._shard(int(self._local.ctypes.data), 0, here)).plans(0)

    def _shard(self, address: int, tp_rank: int, tp_size: int) -> Shard:
        return shard_for(
            layers=[str(layer) for layer in range(LAYERS)],
            num_kv_heads=HEADS,
            head_size=HEAD_SIZE,
            itemsize=ITEMSIZE,
            block_size=BLOCK_SIZE,
            num_blocks=self.num_blocks,
            layout=NamedLayout.LBNHC,
            tp_rank=tp_rank,
            tp_size=tp_size,
            base_address=address,
        )

    def reads(self, mover: Mover, plans: Plans, stage: Stage, courier: PartCourier) -> list[GuardedRead]:
        """Return the guarded reads of one load."""
        moves = [lowered(plan, staged, [self.request]) for plan, staged in plans.items()]
        return [self._read(mover, moved, stage, courier) for moved in moves]

    def _read(self, mover: Mover, moved: Lowered, stage: Stage, courier: PartCourier) -> GuardedRead:
        assert mover.packing is not None
        hold = mover.packing.hold
        return GuardedRead(
            transport=mover.transport,
            peer=mover.peer,
            word_address=mover.packing.word_address,
            expected_word=word_bytes(*hold[1:]),
            descriptors=moved.descriptors,
            parts=moved.scattered,
            stage=stage,
            gathered=moved.gathered,
            packer=courier.requests(mover.packing.packer, hold),
        )

    def is_exact(self) -> bool:
        """Return whether exactly the wanted bytes are here, and forget them."""
        exact = bool((self._cache[:, self._ids[1]] == self._wanted).all())
        untouched = np.setdiff1d(np.arange(self.num_blocks), self._ids[1])
        exact = exact and not self._cache[:, untouched].any()
        self._local[:] = 0
        return exact
