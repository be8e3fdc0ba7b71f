"""Which way a rank's pushes go: straight into the receivers' caches, or packed in a stage here first."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from kvferry.execution.copy_costs import measure_stage
from kvferry.execution.stage import Stage
from kvferry.plan.describe import describe_choice
from kvferry.plan.planner import PairPlan
from kvferry.plan.staging.staged_plan import GatherPlan
from kvferry.plan.staging.strategy import Costs, Strategy, choose, typical_costs

logger = logging.getLogger(__name__)


class PackedWay(NamedTuple):
    """A push's plan by way of a stage here."""

    plan: GatherPlan
    stage: Stage


class PushWays:
    """Chooses between ``direct`` and ``gather`` for a pair of ranks; ``wish`` None leaves the choice to costs.

    Those are ``given`` by transport, or typical ones with copies that are measured here, at once: which transport
    reaches a receiver shows only later. Without a ``stage`` everything goes directly.
    """

    def __init__(
        self, stage: Stage | None = None, wish: Strategy | None = None, given: Mapping[str, Costs] | None = None
    ) -> None:
        self._stage, self._wish = stage, wish
        self._given = dict(given or {})
        self._copies = measure_stage(stage) if stage is not None and wish is None else None

    def choose(self, plan: PairPlan, transport: str) -> PackedWay | None:
        """Return the way by the stage where that is the choice, None for the direct one.

        Raises :class:`PlanError` (``unsupported``) where ``gather`` was wished for and cannot be had.
        """
        if self._stage is None:
            return None
        size = self._stage.region.length
        choice = choose(plan, self._costs(transport), self._wish, None, size, writes=True)
        logger.info("kvferry: %s to %s %s", plan.source.rank_name, plan.destination.rank_name, describe_choice(choice))
        if choice.chosen.strategy is not Strategy.GATHER:
            return None
        return PackedWay(GatherPlan(plan), self._stage)

    def close(self) -> None:
        """End the stage's thread; twice is fine."""
        if self._stage is not None:
            self._stage.close()

    def _costs(self, transport: str) -> Costs:
        costs = self._given.get(transport)
        if costs is None:
            costs = typical_costs(transport)
            if self._copies is not None:
                rate, per_run, per_copy = self._copies
                costs = replace(
                    costs, copy_bytes_per_second=rate, seconds_per_copied_run=per_run, seconds_per_copy=per_copy
                )
        # Nobody is asked for what is packed here.
        return replace(costs, seconds_per_part=0.0)
