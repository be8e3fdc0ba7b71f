"""Choice of a strategy for a pair of ranks: directly between the caches, or through a stage; by predicted time.

The transfer takes ``descriptors * seconds_per_descriptor + remote runs * seconds_per_remote_run + bytes /
bytes_per_second``. The stage adds ``copied bytes / copy_bytes_per_second + copied runs * seconds_per_copied_run +
copies * seconds_per_copy``. A remote run is contiguous in the source's memory and may need many descriptors, where
the destination merges heads of several ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from kvferry.errors import PlanError, Reason
from kvferry.layout.group import CacheGroup, CacheKind
from kvferry.plan.planner import PairPlan
from kvferry.plan.staging.scatter import ALIGNMENT, ScatterPlan, aligned, source_runs
from kvferry.plan.template import Template
from kvferry.units import format_bytes

DEFAULT_STAGE_BYTES = 64 << 20
LEAST_GAIN = 1.4
NOMINAL_TOKENS = 2048
"""Tokens of the request that the prediction assumes. It matters little: only ``seconds_per_copy`` does not grow with
the tokens."""


class Strategy(StrEnum):
    """How bytes move from one cache into another."""

    DIRECT = "direct"
    """Descriptors from cache to cache."""
    SCATTER = "scatter"
    """Long runs of the source into a stage at the destination, then copies into the cache."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Time of moving bytes over one transport, in seconds and bytes per second."""

    transport: str
    seconds_per_descriptor: float
    bytes_per_second: float
    copy_bytes_per_second: float
    seconds_per_copied_run: float
    seconds_per_copy: float
    seconds_per_remote_run: float = 0.0
    """On top of the descriptors' time, for a transport that moves a run of the peer's memory in one operation."""

    @property
    def seconds_per_run(self) -> float:
        """Seconds for one descriptor with a remote run of its own."""
        return self.seconds_per_descriptor + self.seconds_per_remote_run

    @property
    def gap_bytes(self) -> int:
        """Bytes that take as long as one descriptor: reading a smaller gap is faster than a second descriptor."""
        return int(self.seconds_per_run * self.bytes_per_second)


TYPICAL_COSTS = {
    "cma": Costs("cma", 0.2e-6, 15e9, 12e9, 20e-9, 20e-6, seconds_per_remote_run=0.4e-6),
    "nixl": Costs("nixl", 2.2e-6, 15e9, 12e9, 20e-9, 20e-6),
    "memcpy": Costs("memcpy", 0.3e-6, 15e9, 12e9, 20e-9, 20e-6),
}
"""Measured on one machine with two x86-64 server cores and huge pages."""


def typical_costs(transport: str) -> Costs:
    """Return the typical costs of a transport; a transport without measurements has those of ``nixl``.

    >>> typical_costs("mooncake").transport
    'mooncake'
    """
    return TYPICAL_COSTS.get(transport, replace(TYPICAL_COSTS["nixl"], transport=transport))


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one strategy would move, and in how many seconds."""

    strategy: Strategy
    num_descriptors: int
    num_bytes: int
    """Bytes that the transport moves."""
    copied_bytes: int = 0
    num_copies: int = 0
    num_copied_runs: int = 0
    gap_bytes: int = 0
    num_remote_runs: int = 0
    """Runs of the peer's memory; see :class:`Costs`."""
    seconds: float = 0.0

    def timed(self, costs: Costs) -> "Prediction":
        """Return the prediction with its time by ``costs``.

        >>> Prediction(Strategy.DIRECT, 1000, 15_000_000).timed(TYPICAL_COSTS["nixl"]).seconds
        0.0032
        """
        wire = self.num_descriptors * costs.seconds_per_descriptor + self.num_bytes / costs.bytes_per_second
        wire += self.num_remote_runs * costs.seconds_per_remote_run
        copies = self.copied_bytes / costs.copy_bytes_per_second + self.num_copied_runs * costs.seconds_per_copied_run
        return replace(self, seconds=round(wire + copies + self.num_copies * costs.seconds_per_copy, 9))

    def __str__(self) -> str:
        what = f"{self.num_descriptors} descriptors, {format_bytes(self.num_bytes)} on the wire"
        if self.num_copies:
            what += f", then {self.num_copied_runs} runs in {self.num_copies} copies"
        if self.gap_bytes:
            what += f", reads include gaps of up to {format_bytes(self.gap_bytes)}"
        return f"{self.strategy:7} {self.seconds * 1e3:7.2f} ms: {what}"


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen and the rejected strategies of one pair of ranks, for ``num_tokens`` tokens in scattered blocks.

    ``impossible`` says why the pair cannot use scatter; it is empty where the pair can.

    >>> direct, scatter = Prediction(Strategy.DIRECT, 4096, 8 << 20), Prediction(Strategy.SCATTER, 256, 8 << 20)
    >>> costs = TYPICAL_COSTS["nixl"]
    >>> print(Choice(scatter.timed(costs), (direct.timed(costs),), "the stage is small.", costs, 2048))
    for 2048 tokens in scattered blocks over nixl:
      chosen   scatter    1.12 ms: 256 descriptors, 8.0 MiB on the wire
      rejected direct     9.57 ms: 4096 descriptors, 8.0 MiB on the wire
      excluded scatter the stage is small.
    """

    chosen: Prediction
    rejected: tuple[Prediction, ...]
    impossible: str
    costs: Costs
    num_tokens: int

    def __str__(self) -> str:
        lines = [f"for {self.num_tokens} tokens in scattered blocks over {self.costs.transport}:"]
        lines += [f"  chosen   {self.chosen}", *(f"  rejected {prediction}" for prediction in self.rejected)]
        lines += [f"  excluded scatter {self.impossible}"] if self.impossible else []
        return "\n".join(lines)


def choose(
    plan: PairPlan, costs: Costs, strategy: Strategy | None = None, stage_bytes: int = DEFAULT_STAGE_BYTES
) -> Choice:
    """Choose the strategy with the shortest predicted time, or the one that ``strategy`` names.

    Scatter must be ``LEAST_GAIN`` times as fast as direct, since a stage also takes memory and a core. ``stage_bytes``
    is the size of the destination's stage. Raises :class:`PlanError` (``unsupported``) for a strategy that this pair
    cannot use.

    >>> from kvferry.layout.named_layouts import NamedLayout
    >>> from kvferry.layout.dense import shard_for
    >>> from kvferry.plan.planner import Planner
    >>> shape = dict(layers=["0", "1"], num_kv_heads=8, head_size=128, itemsize=2, block_size=16, num_blocks=10,
    ...     layout=NamedLayout.LBNHC)
    >>> halves, whole = [[shard_for(tp_rank=rank, tp_size=size, base_address=size << 30, **shape)
    ...     for rank in range(size)] for size in (2, 1)]
    >>> for sources, destination in ((halves, whole[0]), (whole, halves[0])):
    ...     plan = Planner(sources, destination).plans(0)[0]
    ...     choice = choose(plan, TYPICAL_COSTS["nixl"])
    ...     print([(str(found.strategy), found.num_descriptors) for found in (choice.chosen, *choice.rejected)])
    [('scatter', 256), ('direct', 4096)]
    [('scatter', 256), ('direct', 4096), ('scatter', 4096)]
    """
    possible = [_direct_prediction(plan, costs)]
    impossible = ""
    try:
        possible += _scatter_predictions(plan, costs, stage_bytes)
    except PlanError as error:
        if strategy is Strategy.SCATTER:
            raise PlanError(
                Reason.UNSUPPORTED,
                f"strategy 'scatter' from {plan.source.rank_name} to {plan.destination.rank_name}: {error.message}",
                'Set "strategy" to "auto" or "direct".',
            ) from error
        impossible = error.message
    possible.sort(key=lambda found: found.seconds * (1 if found.strategy is Strategy.DIRECT else LEAST_GAIN))
    chosen = next(found for found in possible if strategy in (None, found.strategy))
    rejected = tuple(found for found in possible if found is not chosen)
    return Choice(chosen, rejected, impossible, costs, NOMINAL_TOKENS)


def _direct_prediction(plan: PairPlan, costs: Costs) -> Prediction:
    found = list(_nominal(plan))
    return Prediction(
        strategy=Strategy.DIRECT,
        num_descriptors=sum(len(template.runs) * blocks for template, blocks in found),
        num_bytes=sum(int(template.runs[:, 2].sum()) * blocks for template, blocks in found),
        num_remote_runs=sum(len(source_runs(template.runs)[0]) * blocks for template, blocks in found),
    ).timed(costs)


def _scatter_predictions(plan: PairPlan, costs: Costs, stage_bytes: int) -> list[Prediction]:
    plans = [ScatterPlan(plan, gap_bytes) for gap_bytes in sorted({0, costs.gap_bytes})]
    found = [_scatter_prediction(scatter, costs, stage_bytes) for scatter in plans]
    # Without gaps both predictions are the same.
    return found[:1] if found[-1].num_bytes == found[0].num_bytes else found


def _scatter_prediction(scatter: ScatterPlan, costs: Costs, stage_bytes: int) -> Prediction:
    nominal = [(template, scatter.staged(template), blocks) for template, blocks in _nominal(scatter.plan)]
    largest = max((staged.block_bytes for _, staged, _ in nominal), default=0)
    needed = aligned(largest) + ALIGNMENT
    if needed > stage_bytes:
        raise PlanError(Reason.UNSUPPORTED, f"one block needs a stage of {needed} bytes, the stage has {stage_bytes}.")
    num_descriptors = sum(staged.num_reads * blocks for _, staged, blocks in nominal)
    return Prediction(
        strategy=Strategy.SCATTER,
        num_descriptors=num_descriptors,
        num_bytes=sum(staged.block_bytes * blocks for _, staged, blocks in nominal),
        copied_bytes=sum(int(template.runs[:, 2].sum()) * blocks for template, _, blocks in nominal),
        num_copies=sum(staged.num_copies for _, staged, _ in nominal),
        num_copied_runs=sum(staged.num_copied_runs * blocks for _, staged, blocks in nominal),
        gap_bytes=scatter.gap_bytes,
        num_remote_runs=num_descriptors,
    ).timed(costs)


def _nominal(plan: PairPlan) -> Iterator[tuple[Template, int]]:
    """Yield the templates of whole blocks, each with its number of blocks in the nominal request."""
    for group in plan.groups.values():
        phases = group.first_phases()  # none where two shares of the tokens first meet in a later block
        for phase in phases:
            for template in group.templates(phase):
                yield template, -(-_num_blocks(group.destination_group) // len(phases))


def _num_blocks(group: CacheGroup) -> int:
    return 1 if group.kind is CacheKind.STATE else -(-NOMINAL_TOKENS // group.tokens_per_position)
