"""Templates: a plan's copies for block 0, to which a request applies its block ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvferry.arrays import Flags, Integers, Offsets
from kvferry.errors import PlanError, Reason
from kvferry.layout.shard import Atom, CacheGroup, Component, HeadRange, Shard
from kvferry.plan.block_pairs import Phase, TokenRun
from kvferry.plan.head_ranges import match_heads
from kvferry.plan.match import match_layers
from kvferry.plan.strided_copy import Loop, StridedCopy, coalesce, merge_rows, place

MAX_RUNS = 1 << 18
"""Limit of one block's runs. Only pairs of layouts that a kernel should transpose instead have more."""


@dataclass(frozen=True, eq=False)
class Template:
    """The copies for one pair of blocks of one phase, between one pair of regions.

    The copies' offsets are addresses in block 0; block b begins ``b * *_block_stride`` bytes later.
    """

    source_region: int
    destination_region: int
    source_block_stride: int
    destination_block_stride: int
    copies: tuple[StridedCopy, ...]

    @cached_property
    def runs(self) -> Offsets:
        """Rows of source address, destination address and length for block 0, sorted and joined."""
        return merge_rows(np.concatenate([copy.expand() for copy in self.copies]))

    @cached_property
    def _extends(self) -> Flags:
        """Which runs continue in the next block when both block ids advance by one."""
        if self.source_block_stride != self.destination_block_stride:
            return np.zeros(len(self.runs), dtype=np.bool_)
        return np.equal(self.runs[:, 2], self.source_block_stride)

    @cached_property
    def _is_block_major(self) -> bool:
        """Whether all runs of a destination block lie before those of the next, as in cross-layer layouts."""
        return int(self.runs[-1, 1] - self.runs[0, 1]) < self.destination_block_stride

    @cached_property
    def may_join(self) -> bool:
        """Whether rows of different runs can be adjacent: long runs over several blocks, or a block's last run and the
        next block's first.
        """
        if self._extends.any():
            return True
        strides = np.array([self.source_block_stride, self.destination_block_stride])
        shorter = self.runs[~self._extends]
        starts = set(map(tuple, (shorter[:, :2] + strides).tolist()))
        return any(tuple(end) in starts for end in (shorter[:, :2] + shorter[:, 2:]).tolist())

    def lower(self, source_blocks: Integers, destination_blocks: Integers) -> Offsets:
        """Return rows of source address, destination address and length for pairs of blocks in any order."""
        order = np.lexsort((source_blocks, destination_blocks))
        blocks = np.stack((source_blocks[order], destination_blocks[order]), axis=1)
        extends = self._extends
        if not extends.any():
            return self._product(blocks, self.runs)
        starts = np.flatnonzero(np.concatenate(([True], (np.diff(blocks, axis=0) != 1).any(axis=1))))
        runs = self._product(blocks[starts], self.runs[extends], np.diff(starts, append=len(blocks)))
        if extends.all():
            return runs
        return np.concatenate((runs, self._product(blocks, self.runs[~extends])))

    def _product(self, blocks: Integers, runs: Offsets, num_blocks: Integers | None = None) -> Offsets:
        """Return every run in every block, in an order that is close to ascending by destination.

        ``num_blocks`` multiplies the length of each block's runs.
        """
        if self._is_block_major:
            memory = np.empty((len(blocks), len(runs), 3), dtype=np.int64)
            rows = memory
        else:
            memory = np.empty((len(runs), len(blocks), 3), dtype=np.int64)
            rows = memory.swapaxes(0, 1)
        np.add((blocks[:, 0] * self.source_block_stride)[:, None], runs[:, 0], out=rows[:, :, 0])
        np.add((blocks[:, 1] * self.destination_block_stride)[:, None], runs[:, 1], out=rows[:, :, 1])
        if num_blocks is None:
            rows[:, :, 2] = runs[:, 2]
        else:
            np.multiply(num_blocks[:, None], runs[:, 2], out=rows[:, :, 2])
        return memory.reshape(-1, 3)


Memory = tuple[int, int, int, int]
"""Source region, destination region, and the block stride in each."""
Pattern = tuple[int, tuple[Loop, ...]]
"""Bytes of a run and the loops around it."""


def build_templates(
    source: Shard,
    destination: Shard,
    groups: tuple[CacheGroup, CacheGroup],
    heads: Mapping[str, Sequence[HeadRange]],
    phase: Phase,
) -> tuple[Template, ...]:
    """Return the templates of one phase of a group, one for each pair of regions.

    ``groups`` are the group at the source and at the destination, ``heads`` the global heads that move, by component.
    Raises :class:`PlanError`: ``invalid-request`` for a phase that splits a packed page, ``unsupported`` for blocks
    with more than ``MAX_RUNS`` runs.
    """
    # Equal patterns in equal memory are collected, so that K and V planes can become one run again.
    memories: dict[Memory, dict[Pattern, list[Offsets]]] = {}
    for received in groups[1].components:
        if received.name not in heads:
            continue
        sent = groups[0].component(received.name)
        memory = (sent.region, received.region, sent.block_stride, received.block_stride)
        for run in phase:
            pair = sent, received
            for copy, places in _patterns(source, destination, pair, heads[received.name], run, groups[0].block_size):
                patterns = memories.setdefault(memory, {})
                patterns.setdefault((copy.run_bytes, copy.loops), []).append(places)
    return tuple(_template(memory, patterns) for memory, patterns in memories.items())


def _template(memory: Memory, patterns: dict[Pattern, list[Offsets]]) -> Template:
    copies: list[StridedCopy] = []
    for (run_bytes, loops), places in patterns.items():
        copies += place(run_bytes, loops, np.concatenate(places))
    num_runs = sum(copy.num_runs for copy in copies)
    if num_runs > MAX_RUNS:
        raise PlanError(
            Reason.UNSUPPORTED,
            f"one block has {num_runs} runs, the shortest of {min(copy.run_bytes for copy in copies)} bytes; the limit "
            f"is {MAX_RUNS}.",
            "Use layouts with the same order of tokens and channels in both engines.",
        )
    return Template(*memory, copies=tuple(copies))


def _patterns(
    source: Shard,
    destination: Shard,
    components: tuple[Component, Component],
    heads: Sequence[HeadRange],
    run: TokenRun,
    block_size: int,
) -> list[tuple[StridedCopy, Offsets]]:
    """Return for each stretch of heads the copy within one layer and block, and the addresses of the layers."""
    sent, received = components
    bases = [source.regions[sent.region].base_address, destination.regions[received.region].base_address]
    places = match_layers(sent, received) + np.array(bases, dtype=np.int64)
    patterns = []
    for source_head, destination_head, count in match_heads(sent.heads, received.heads, heads):
        start = np.array(
            [
                source_head * sent.head_stride + run.source_slot * sent.token_stride,
                destination_head * received.head_stride + run.destination_slot * received.token_stride,
            ],
            dtype=np.int64,
        )
        head_loop = (count, sent.head_stride, received.head_stride)
        patterns.append((_page_copy(sent, received, run, block_size, head_loop), places + start))
    return patterns


def _page_copy(sent: Component, received: Component, run: TokenRun, block_size: int, head_loop: Loop) -> StridedCopy:
    """Return the copy of one run of tokens over some heads of one layer, from offset zero to offset zero."""
    if sent.atom is Atom.PAGE:
        if run != TokenRun(0, 0, block_size):
            raise PlanError(
                Reason.INVALID_REQUEST,
                f"component {sent.name!r}: slots {run.source_slot} to {run.source_slot + run.num_tokens} of a packed "
                "page cannot move alone.",
                "Request whole blocks.",
            )
        return coalesce(StridedCopy(0, 0, block_size * sent.num_channels * sent.itemsize, (head_loop,)))
    channels = (sent.num_channels, sent.channel_stride, received.channel_stride)
    tokens = (run.num_tokens, sent.token_stride, received.token_stride)
    return coalesce(StridedCopy(0, 0, sent.itemsize, (channels, tokens, head_loop)))
