"""Which way a pair's bytes go: straight between the caches, or by way of a stage. Costs predicted, not measured here.

``descriptors * seconds_per_descriptor + remote runs * seconds_per_remote_run + bytes / bytes_per_second`` for the wire,
and for what is staged ``copied bytes / copy_bytes_per_second + runs * seconds_per_copied_run + copies *
seconds_per_copy`` on top, and for what the source packs ``parts * seconds_per_part``. A remote run is what lies
together in the peer's memory: heads that are merged have one for many descriptors.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from kvferry.errors import PlanError, Reason
from kvferry.layout.group import CacheGroup, CacheKind
from kvferry.plan.planner import Descriptors, GroupPlan, PairPlan
from kvferry.plan.staging.scatter import StagedPart, aligned, source_runs
from kvferry.plan.staging.staged_plan import PARTS_PER_STAGE, ROUNDS_PER_STAGE, GatherPlan, ScatterPlan
from kvferry.plan.template import Template, mirrored

DEFAULT_STAGE_BYTES = 64 << 20
LEAST_GAIN = 1.4
TYPICAL_SECONDS_PER_PART = 0.5e-3
"""Where it is not measured: from a question to its answer, two messages and the threads that wake for them."""
NOMINAL_TOKENS = 2048
"""Tokens of the request for which a pair chooses. All but the copies' fixed costs grows alike, so it matters little."""


class Strategy(StrEnum):
    """How bytes get from one cache into another."""

    DIRECT = "direct"
    """Descriptors straight between the caches."""
    SCATTER = "scatter"
    """Long runs of the source into a stage at the destination, which copies them into its cache."""
    GATHER = "gather"
    """The source packs a stage in the destination's order, out of which long runs are read into the cache."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What moving takes over one transport on one machine. Seconds and bytes per second."""

    transport: str
    seconds_per_descriptor: float
    bytes_per_second: float
    copy_bytes_per_second: float
    seconds_per_copied_run: float
    seconds_per_copy: float
    seconds_per_part: float = TYPICAL_SECONDS_PER_PART
    """From asking a source for a part to its answer, but for the copy itself."""
    seconds_per_remote_run: float = 0.0
    """Besides those of its descriptors, where a transport takes what is contiguous in the peer's memory at once."""

    @property
    def seconds_apart(self) -> float:
        """Seconds for a descriptor that is a remote run of its own."""
        return self.seconds_per_descriptor + self.seconds_per_remote_run

    @property
    def gap_bytes(self) -> int:
        """Bytes that take as long as one descriptor: a smaller gap between two runs is read along with them."""
        return int(self.seconds_apart * self.bytes_per_second)


TYPICAL_COSTS = {
    "cma": Costs("cma", 0.2e-6, 15e9, 12e9, 20e-9, 20e-6, seconds_per_remote_run=0.4e-6),
    "nixl": Costs("nixl", 2.2e-6, 15e9, 12e9, 20e-9, 20e-6),
    "memcpy": Costs("memcpy", 0.3e-6, 15e9, 12e9, 20e-9, 20e-6),
}
"""One machine with two x86-64 server cores and huge pages: for plans that are made where nothing can be measured."""


def typical_costs(transport: str) -> Costs:
    """Return what moving over a transport typically takes; one that was never measured is taken for ``nixl``.

    >>> typical_costs("mooncake").transport
    'mooncake'
    """
    return TYPICAL_COSTS.get(transport, replace(TYPICAL_COSTS["nixl"], transport=transport))


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one strategy would move, and how long that should take."""

    strategy: Strategy
    num_descriptors: int
    num_bytes: int
    """Bytes on the wire."""
    copied_bytes: int = 0
    num_copies: int = 0
    num_copied_runs: int = 0
    gap_bytes: int = 0
    num_parts: int = 0
    """Parts that the source is asked to pack."""
    num_remote_runs: int = 0
    """Of the peer's memory; see :class:`Costs`."""
    seconds: float = 0.0

    def timed(self, costs: Costs) -> "Prediction":
        """Return it with the time that it should take.

        >>> Prediction(Strategy.DIRECT, 1000, 15_000_000).timed(TYPICAL_COSTS["nixl"]).seconds
        0.0032
        """
        wire = self.num_descriptors * costs.seconds_per_descriptor + self.num_bytes / costs.bytes_per_second
        wire += self.num_remote_runs * costs.seconds_per_remote_run
        copies = self.copied_bytes / costs.copy_bytes_per_second + self.num_copied_runs * costs.seconds_per_copied_run
        fixed = self.num_copies * costs.seconds_per_copy + self.num_parts * costs.seconds_per_part
        return replace(self, seconds=round(wire + copies + fixed, 9))


@dataclass(frozen=True, slots=True)
class Choice:
    """The strategy of one pair of ranks, and what was rejected, for a request of ``num_tokens`` in scattered blocks."""

    chosen: Prediction
    rejected: tuple[Prediction, ...]
    impossible: tuple[tuple[Strategy, str], ...]
    costs: Costs
    num_tokens: int


def choose(
    plan: PairPlan,
    costs: Costs,
    wish: Strategy | None = None,
    stage_bytes: int | None = DEFAULT_STAGE_BYTES,
    packing_bytes: int | None = None,
    *,
    writes: bool = False,
) -> Choice:
    """Choose the strategy whose predicted time is shortest, or the one wished for.

    A stage must be predicted to be ``LEAST_GAIN`` times as fast as the direct way: it takes memory and a core besides.
    ``stage_bytes`` is the destination's stage, None where it has none, ``packing_bytes`` the source's, None where that
    does not pack. With ``writes`` the source writes, and the destination's memory is the remote one. Raises
    :class:`PlanError` (``unsupported``) for a wish that this pair cannot have.

    >>> from kvferry.layout.named_layouts import NamedLayout
    >>> from kvferry.layout.dense import shard_for
    >>> from kvferry.plan.planner import Planner
    >>> shape = dict(layers=["0", "1"], num_kv_heads=8, head_size=128, itemsize=2, block_size=16, num_blocks=10,
    ...     layout=NamedLayout.LBNHC)
    >>> halves, whole = [[shard_for(tp_rank=rank, tp_size=size, base_address=size << 30, **shape)
    ...     for rank in range(size)] for size in (2, 1)]
    >>> for sources, destination in ((halves, whole[0]), (whole, halves[0])):
    ...     plan = Planner(sources, destination).plans(0)[0]
    ...     choice = choose(plan, TYPICAL_COSTS["nixl"], packing_bytes=64 << 20)
    ...     print([(str(found.strategy), found.num_descriptors) for found in (choice.chosen, *choice.rejected)])
    [('scatter', 256), ('direct', 4096), ('gather', 4096)]
    [('gather', 256), ('scatter', 256), ('direct', 4096), ('scatter', 4096)]
    """
    possible = [direct_prediction(plan, costs, writes=writes)]
    impossible: list[tuple[Strategy, str]] = []
    others: dict[Strategy, Callable[[], list[Prediction]]] = {
        Strategy.SCATTER: lambda: _scatter_predictions(plan, costs, stage_bytes),
        Strategy.GATHER: lambda: [_gather_prediction(GatherPlan(plan), costs, packing_bytes, writes=writes)],
    }
    for strategy, predict in others.items():
        try:
            possible += predict()
        except PlanError as error:
            impossible.append((strategy, error.message))
    possible.sort(key=lambda found: found.seconds * (1 if found.strategy is Strategy.DIRECT else LEAST_GAIN))
    wished = [found for found in possible if wish in (None, found.strategy)]
    if not wished:
        why = next(reason for strategy, reason in impossible if strategy is wish)
        raise PlanError(
            Reason.UNSUPPORTED,
            f"strategy {str(wish)!r} from {plan.source.rank_name} to {plan.destination.rank_name}: {why}",
            'Set "strategy" to "auto" or "direct".',
        )
    rejected = tuple(found for found in possible if found is not wished[0])
    return Choice(wished[0], rejected, tuple(impossible), costs, NOMINAL_TOKENS)


def direct_prediction(plan: PairPlan, costs: Costs, *, writes: bool = False) -> Prediction:
    """Return what moving directly should take, by reads or by writes."""
    found = list(_nominal(plan))
    remote = [((mirrored(template) if writes else template).pieces, blocks) for template, blocks in found]
    return Prediction(
        strategy=Strategy.DIRECT,
        num_descriptors=sum(len(template.pieces) * blocks for template, blocks in found),
        num_bytes=sum(int(template.pieces[:, 2].sum()) * blocks for template, blocks in found),
        num_remote_runs=sum(len(source_runs(pieces)[0]) * blocks for pieces, blocks in remote),
    ).timed(costs)


def _scatter_predictions(plan: PairPlan, costs: Costs, stage_bytes: int | None) -> list[Prediction]:
    if stage_bytes is None:
        raise PlanError(Reason.UNSUPPORTED, "there is no stage at the destination.")
    plans = [ScatterPlan(plan, gap_bytes) for gap_bytes in sorted({0, costs.gap_bytes})]
    found = [_scatter_prediction(scatter, costs, stage_bytes) for scatter in plans]
    # Gaps worth reading are named only where there are any.
    return found[:1] if found[-1].num_bytes == found[0].num_bytes else found


def _scatter_prediction(scatter: ScatterPlan, costs: Costs, stage_bytes: int) -> Prediction:
    prediction = _staged_prediction(Strategy.SCATTER, scatter, stage_bytes)
    return replace(prediction, gap_bytes=scatter.gap_bytes, num_remote_runs=prediction.num_descriptors).timed(costs)


def _gather_prediction(
    gather: GatherPlan, costs: Costs, packing_bytes: int | None, *, writes: bool = False
) -> Prediction:
    if packing_bytes is None:
        why = 'the prefill engine does not copy on request: its own "strategy" must be "gather" or "auto".'
        raise PlanError(Reason.UNSUPPORTED, why)
    prediction = _staged_prediction(Strategy.GATHER, gather, packing_bytes)
    part_bytes = max(packing_bytes // (ROUNDS_PER_STAGE if writes else PARTS_PER_STAGE), _largest_block(gather))
    num_parts = -(-prediction.num_bytes // part_bytes)
    # A stage that is read is read from its begin to its end.
    num_remote_runs = prediction.num_descriptors if writes else num_parts
    return replace(prediction, num_parts=num_parts, num_remote_runs=num_remote_runs).timed(costs)


def _staged_prediction(strategy: Strategy, staged_plan: ScatterPlan | GatherPlan, stage_bytes: int) -> Prediction:
    """Return what goes by way of a stage, untimed."""
    nominal = [(template, staged_plan.staged(template), blocks) for template, blocks in _nominal(staged_plan.plan)]
    largest = _largest_block(staged_plan)
    if aligned(largest) + aligned(1) > stage_bytes:
        raise PlanError(Reason.UNSUPPORTED, f"one block fills {largest} bytes, the stage has {stage_bytes}.")
    return Prediction(
        strategy=strategy,
        num_descriptors=sum(staged.num_reads * blocks for _, staged, blocks in nominal),
        num_bytes=sum(staged.block_bytes * blocks for _, staged, blocks in nominal),
        copied_bytes=sum(int(template.pieces[:, 2].sum()) * blocks for template, _, blocks in nominal),
        num_copies=sum(staged.num_copies for _, staged, _ in nominal),
        num_copied_runs=sum(staged.num_copied_runs * blocks for _, staged, blocks in nominal),
    )


def _largest_block(staged_plan: ScatterPlan | GatherPlan) -> int:
    return max((staged_plan.staged(template).block_bytes for template, _ in _nominal(staged_plan.plan)), default=0)


def _nominal(plan: PairPlan) -> Iterator[tuple[Template, int]]:
    for group in plan.groups.values():
        yield from templates_of(group, NOMINAL_TOKENS)


def templates_of(group: GroupPlan, num_tokens: int) -> Iterator[tuple[Template, int]]:
    """Return the templates of whole blocks and how many blocks of each so many tokens have."""
    phases = group.first_phases()
    blocks = -(-_num_blocks(group.destination_group, num_tokens) // len(phases))
    for phase in phases:
        for template in group.templates(phase):
            yield template, blocks


def _num_blocks(group: CacheGroup, num_tokens: int) -> int:
    return 1 if group.kind is CacheKind.STATE else -(-num_tokens // group.tokens_per_position)


def predict_direct(lists: Sequence[Descriptors], costs: Costs) -> Prediction:
    """Return what lists that were lowered should take."""
    return Prediction(
        strategy=Strategy.DIRECT,
        num_descriptors=sum(map(len, lists)),
        num_bytes=sum(int(rows[:, 2].sum()) for rows in lists),
        num_remote_runs=sum(len(source_runs(rows.view(np.int64))[0]) for rows in lists if len(rows)),
    ).timed(costs)


def predict_staged(strategy: Strategy, parts: Sequence[StagedPart], costs: Costs, num_parts: int = 0) -> Prediction:
    """Return what parts of a request, and their copies, should take when each is read at once.

    The source packs them in ``num_parts`` parts.
    """
    num_descriptors = sum(len(part.reads(0)) for part in parts)
    return Prediction(
        strategy=strategy,
        num_descriptors=num_descriptors,
        num_remote_runs=num_parts if strategy is Strategy.GATHER else num_descriptors,
        num_bytes=sum(part.num_bytes for part in parts),
        copied_bytes=sum(int(part.template.template.pieces[:, 2].sum()) * len(part.source_blocks) for part in parts),
        num_copies=sum(part.template.num_copies for part in parts),
        num_copied_runs=sum(part.template.num_copied_runs * len(part.source_blocks) for part in parts),
        num_parts=num_parts,
    ).timed(costs)
