"""Routes: how bytes move from some ranks to one rank, planned and proved once."""

from collections.abc import Sequence

from kvferry.layout.shard import Shard
from kvferry.plan.planner import PairPlan, Planner
from kvferry.plan.proof import verify_destination
from kvferry.plan.request import sample_requests


class Route:
    """How bytes move from source ranks to one destination: the plans and their proof."""

    def __init__(self, sources: Sequence[Shard], destination: Shard) -> None:
        self._sources, self._destination = sources, destination
        self._proved: set[tuple[PairPlan, ...]] = set()
        self._planner = Planner(sources, destination)

    def plans(self, selector: int) -> tuple[PairPlan, ...]:
        """Return the plans of the source ranks that the selector chooses. Raises :class:`PlanError`."""
        return self._planner.plans(selector)

    def proved_plans(self, selector: int) -> tuple[PairPlan, ...]:
        """Return :meth:`plans`, whose templates are proved on a small request before they move any other.

        Raises :class:`PlanError` and :class:`VerificationError`.
        """
        plans = self.plans(selector)
        if plans not in self._proved:
            blocks = sample_requests(self._sources, self._destination)
            verify_destination([(plan.source, plan.lower(blocks)) for plan in plans], self._destination, blocks)
            self._proved.add(plans)
        return plans
