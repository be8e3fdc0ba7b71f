"""Cells that move between two ranks: which cells of the source's grid, and where each of the two ranks has them."""

import logging
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import numpy as np

from kvferry.arrays import Flags, Integers
from kvferry.errors import HandoffError, PlanError, Reason
from kvferry.execution.cell_sums import CellSums
from kvferry.layout.shard import HeadRange, Shard
from kvferry.peer_log import PeerLog
from kvferry.plan.digest_cells import CellGrid, CellMemory, Integrity, Part
from kvferry.plan.match import common, count, without
from kvferry.plan.planner import GroupPlan, PairPlan

logger = PeerLog(logging.getLogger(__name__))


class CellPlaces(NamedTuple):
    """The cells of one part in one rank's memory.

    ``places`` has the place of each of the source's cells in block and slot 0, in bytes from the region's begin; -1 for
    those that do not move. A cell's number is its index.
    """

    sums: CellSums
    places: Integers


class GroupCells:
    """The cells of one cache group that move between two ranks, and where the destination has them.

    A cell moves where the destination holds its layer and all of its heads. Raises :class:`PlanError` (``unsupported``)
    where ``full`` is wanted, and cells do not fit the destination's blocks or heads.
    """

    def __init__(self, plan: PairPlan, group: GroupPlan, grid: CellGrid, wanted: Integrity) -> None:
        self.name, self.rank_name = group.source_group.name, plan.source.rank_name
        self.grid, self.wanted = grid, wanted
        self.destination = group.destination_group
        if not self.destination.token_share.is_whole:
            self.refuse(f"holds {self.destination.token_share!r} of the tokens")
        if wanted is Integrity.FULL and self.destination.block_size % grid.num_tokens:
            self.refuse(f"has blocks of {self.destination.block_size} tokens, and digests cover {grid.num_tokens}")
        self.parts = [self._received(plan, group, part) for part in grid.parts]

    def _received(self, plan: PairPlan, group: GroupPlan, part: Part) -> CellPlaces:
        memory = CellMemory(plan.destination, self.destination.component(part.component.name), self.grid, part)
        moves = self._moves(part, memory, group.heads.get(part.component.name, ()))
        places = memory.cells.reshape(-1, len(moves), part.num_slices).copy()
        places[:, ~moves] = -1
        return CellPlaces(CellSums(memory), places.ravel())

    def _moves(self, part: Part, memory: CellMemory, carried: Sequence[HeadRange]) -> Flags:
        """Return which head cells move as a whole."""
        is_held = memory.first_heads >= 0
        cells = [part.heads(index) for index in range(len(is_held))] if carried else []
        moves = is_held & np.array([not without([cell], carried) for cell in cells] or [False] * len(is_held))
        moving = common(common(carried, part.component.heads), memory.heads)
        if self.wanted is Integrity.FULL and count(moving) != part.heads_each * int(moves.sum()):
            self.refuse(f"holds a part of the {part.heads_each} heads of one digest of {part.component.name!r}")
        return np.asarray(moves)

    def at_source(self, plan: PairPlan) -> list[CellPlaces]:
        """Return where the source has the cells of each part: it holds all of its own grid."""
        return [cells_of(plan.source, self.grid, part) for part in self.grid.parts]

    def refuse(self, why: str) -> NoReturn:
        """Raise: not all cells could be compared."""
        raise PlanError(
            Reason.UNSUPPORTED,
            f"group {self.name!r}: integrity cannot be {self.wanted} here: this rank {why}.",
            'Set "integrity" to "off" or "sample", or use block sizes that are multiples of 16 on both engines.',
        )

    def mismatch(self, part: int, cell: int, where: str, counts: tuple[int, int]) -> HandoffError:
        """Return the error of a cell whose bytes differ; ``counts`` are the digests that differ and all compared."""
        name, (layer, heads) = self.grid.parts[part].component.name, self.grid.parts[part].layer_and_heads(cell)
        return HandoffError(
            Reason.INTEGRITY_MISMATCH,
            f"group {self.name!r}, component {name!r}, layer {layer!r}, heads {heads!r}, {where}: the bytes that "
            f"arrived are not those of {self.rank_name} ({counts[0]} of {counts[1]} digests differ).",
            "Send the prompt again; if this repeats, check memory and network of both hosts.",
        )


def cells_of(rank: Shard, grid: CellGrid, part: Part) -> CellPlaces:
    """Return where a source rank has the cells of one part of its own grid."""
    memory = CellMemory(rank, part.component, grid, part)
    return CellPlaces(CellSums(memory), memory.cells)


def place_of(grid: CellGrid, tokens: tuple[int, int], blocks: tuple[int, int]) -> str:
    """Say where a difference is: tokens, half-open, and the destination's first and last block of them."""
    held = f"block {blocks[0]}" if blocks[0] == blocks[1] else f"block {blocks[0]} and those that follow"
    return f"the state in {held}" if grid.is_state else f"tokens {tokens[0]} to {tokens[1]} in {held}"


def comparable(rank: Shard, wanted: Integrity, *, is_required: bool) -> Integrity:
    """Return how much of a rank's cache is compared: nothing where that is impossible and not required, and the log
    says why. Raises :class:`PlanError` (``unsupported``) where it is required.
    """
    try:
        for group in rank.groups if wanted is not Integrity.OFF else ():
            CellGrid(group)
    except PlanError as error:
        if is_required:
            raise
        logger.warning("kvferry: nothing is compared of what is loaded from or into this cache: %s", error.message)
        return Integrity.OFF
    return wanted


def check_computes(computed: Integrity, wanted: Integrity) -> None:
    """Raise :class:`PlanError` (``unsupported``) where a source computes fewer digests than are ``wanted``."""
    if _ORDER.index(computed) < _ORDER.index(wanted):
        raise PlanError(
            Reason.UNSUPPORTED,
            f'the decode engine has "integrity": "{wanted}", the prefill engine "{computed}".',
            "Set at least the decode engine's value on the prefill engine.",
        )


_ORDER = list(Integrity)
