"""Cells that move between two ranks: which cells of the source's grid, and where each of the two ranks has them."""

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import numpy as np

from kvferry.arrays import Integers
from kvferry.errors import HandoffError, PlanError, Reason
from kvferry.execution.cell_sums import CellSums
from kvferry.handoff.messages import DigestTable as TableEntry
from kvferry.layout.component import HeadRange
from kvferry.plan.digest_cells import CellGrid, CellMemory, Integrity, Part
from kvferry.plan.head_ranges import common, count, without
from kvferry.plan.planner import GroupPlan, PairPlan


class PartCells(NamedTuple):
    """The cells of one part in one rank's memory.

    ``layers`` has the local index of each of the source's layers, ``heads`` the first local head of each of the
    source's head cells; -1 for those that the rank does not hold.
    """

    sums: CellSums
    layers: Integers
    heads: Integers


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

    def _received(self, plan: PairPlan, group: GroupPlan, part: Part) -> PartCells:
        memory = CellMemory(plan.destination, self.destination.component(part.component.name), self.grid, part)
        carried = group.heads.get(part.component.name, ())
        return PartCells(CellSums(memory), memory.layers(part.component.layers), self._heads(part, memory, carried))

    def _heads(self, part: Part, memory: CellMemory, carried: Sequence[HeadRange]) -> Integers:
        """Return the first local head of each head cell; -1 for one that does not move as a whole."""
        first_heads = memory.first_heads.copy()
        cells = [part.heads(index) for index in range(len(first_heads))] if carried else []
        whole = np.array([not without([cell], carried) for cell in cells] or [False] * len(first_heads))
        first_heads[~whole] = -1
        moving = common(common(carried, part.component.heads), memory.heads)
        if self.wanted is Integrity.FULL and count(moving) != part.heads_each * int((first_heads >= 0).sum()):
            self.refuse(f"holds a part of the {part.heads_each} heads of one digest of {part.component.name!r}")
        return first_heads

    def at_source(self, plan: PairPlan) -> list[PartCells]:
        """Return where the source has the cells of each part: it holds all of its own grid."""
        found = []
        for part in self.grid.parts:
            sums = CellSums(CellMemory(plan.source, part.component, self.grid, part))
            layers = np.arange(len(part.component.layers), dtype=np.int64)
            found.append(PartCells(sums, layers, part.head_cells[:, 1]))
        return found

    def refuse(self, why: str) -> NoReturn:
        """Raise: not all cells could be compared."""
        raise PlanError(
            Reason.UNSUPPORTED,
            f"group {self.name!r}: integrity cannot be {self.wanted} here: this rank {why}.",
            'Set "integrity" to "off" or "sample", or use block sizes that are multiples of 16 on both engines.',
        )

    def mismatch(self, part: int, layer: int, head_cell: int, where: str, counts: tuple[int, int]) -> HandoffError:
        """Return the error of a cell whose bytes differ; ``counts`` are the digests that differ and all compared."""
        cells = self.grid.parts[part]
        return HandoffError(
            Reason.INTEGRITY_MISMATCH,
            f"group {self.name!r}, component {cells.component.name!r}, layer {cells.component.layers[layer]!r}, heads "
            f"{cells.heads(head_cell)!r}, {where}: the bytes that arrived are not those of {self.rank_name} "
            f"({counts[0]} of {counts[1]} digests differ).",
            "Send the prompt again; if this repeats, check memory and network of both hosts.",
        )


def place_of(grid: CellGrid, tokens: tuple[int, int], blocks: tuple[int, int]) -> str:
    """Say where a difference is: tokens, half-open, and the destination's first and last block of them."""
    held = f"block {blocks[0]}" if blocks[0] == blocks[1] else f"block {blocks[0]} and those that follow"
    return f"the state in {held}" if grid.is_state else f"tokens {tokens[0]} to {tokens[1]} in {held}"


def pushed_digests(integrity: Integrity) -> TableEntry | None:
    """Return what a rank that pushes tells of its digests, which it computes for a destination that asks."""
    if integrity is Integrity.OFF:
        return None
    return TableEntry("full" if integrity is Integrity.FULL else "sample", address=0, seed=0)


def check_kept(table: TableEntry | None, wanted: Integrity) -> Integrity:
    """Return how much a source keeps. Raises :class:`PlanError` (``unsupported``) for less than ``wanted``."""
    kept = Integrity.OFF if table is None else Integrity(table.kept)
    if _ORDER.index(kept) < _ORDER.index(wanted):
        raise PlanError(
            Reason.UNSUPPORTED,
            f'this engine has "integrity": "{wanted}", the prefill engine "{kept}".',
            "Set at least the decode engine's value on the prefill engine.",
        )
    return kept


_ORDER = list(Integrity)
