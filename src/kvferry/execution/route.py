"""Routes: how bytes move from some ranks to one rank, planned, connected and proved once."""

import logging
from collections.abc import Mapping, Sequence

from kvferry.arrays import Descriptors
from kvferry.execution.read import Guard, RankRead
from kvferry.execution.stage import Stage
from kvferry.layout.shard import Shard
from kvferry.peer_log import PeerLog
from kvferry.plan.planner import PairPlan, Planner
from kvferry.plan.proof.verify import compose, verify_destination
from kvferry.plan.request import GroupBlocks, sample_requests
from kvferry.plan.staging.scatter import NOTHING, ScatterPlan, lay_out_round
from kvferry.plan.staging.strategy import Strategy, choose, typical_costs
from kvferry.transport.registry import Connecting, Link

logger = PeerLog(logging.getLogger(__name__))


class Route:
    """How bytes move from source ranks to one destination: plans, connections and their proof.

    All sources are planned and proved. ``links`` has, by the index of the source, those whose bytes this process moves:
    the connection to the source where the destination reads, and to the destination where the source writes; a
    :class:`Link` where both are memory of this process. With a ``stage``, each of these pairs moves its bytes by the
    ``strategy``; None leaves the choice to typical costs.
    """

    def __init__(
        self,
        sources: Sequence[Shard],
        destination: Shard,
        links: Mapping[int, Connecting | Link],
        stage: Stage | None = None,
        strategy: Strategy | None = None,
    ) -> None:
        self.links, self._stage = dict(links), stage
        self._sources, self._destination = sources, destination
        self._strategy = strategy
        self._scatter_plans: dict[PairPlan, ScatterPlan | None] = {}
        self._proved: set[tuple[PairPlan, ...]] = set()
        self._planner = Planner(sources, destination)

    def plans(self, selector: int) -> tuple[PairPlan, ...]:
        """Return the plans of the source ranks that the selector chooses. Raises :class:`PlanError`."""
        return self._planner.plans(selector)

    def own_plans(self, selector: int) -> tuple[PairPlan, ...]:
        """Return those of :meth:`plans` whose bytes this process moves."""
        return tuple(plan for plan in self.plans(selector) if plan.assignment.source_index in self.links)

    def is_ready(self, selector: int = 0) -> bool:
        """Go on connecting for :meth:`own_plans`; return whether they are connected, and all plans proved.

        Call it until it is true; no call waits for a peer. Raises :class:`TransportError`, :class:`PlanError` and
        :class:`VerificationError`.
        """
        plans = self.plans(selector)
        if plans in self._proved:
            return True
        if None in [self.links[plan.assignment.source_index].poll() for plan in self.own_plans(selector)]:
            return False
        self._prove(plans)
        return True

    def read(self, plan: PairPlan, blocks: Sequence[GroupBlocks], guard: Guard | None = None) -> RankRead:
        """Return the read of one of :meth:`own_plans` for a request; the route must be ready."""
        scatter = self._scatter_plan(plan)
        if scatter is None:
            return RankRead(self.link(plan), plan.lower(blocks), guard=guard)
        return RankRead(self.link(plan), NOTHING, scatter.staged_blocks(blocks), self._stage, guard)

    def link(self, plan: PairPlan) -> Link:
        """Return the connection of one of :meth:`own_plans`; the route must be ready."""
        link = self.links[plan.assignment.source_index].poll()
        assert link is not None, "a route that is ready is connected"
        return link

    def _scatter_plan(self, plan: PairPlan) -> ScatterPlan | None:
        """Return the pair's plan through the stage, None where its bytes go directly."""
        if self._stage is None or plan.assignment.source_index not in self.links:
            return None
        if plan not in self._scatter_plans:
            choice = choose(plan, typical_costs(self.link(plan).name), self._strategy, self._stage.region.length)
            pair = f"{plan.source.rank_name} to {plan.destination.rank_name}"
            logger.info("kvferry: %s %s", pair, choice, peer=pair)
            is_scatter = choice.chosen.strategy is Strategy.SCATTER
            self._scatter_plans[plan] = ScatterPlan(plan, choice.chosen.gap_bytes) if is_scatter else None
        return self._scatter_plans[plan]

    def close(self) -> None:
        """Close the connections."""
        for link in self.links.values():
            link.close()

    def _prove(self, plans: tuple[PairPlan, ...]) -> None:
        """Prove the templates on a small request before they move any other."""
        blocks = sample_requests(self._sources, self._destination)
        verify_destination([(plan.source, self._moved(plan, blocks)) for plan in plans], self._destination, blocks)
        self._proved.add(plans)

    def _moved(self, plan: PairPlan, blocks: Sequence[GroupBlocks]) -> Descriptors:
        """Return the descriptors from a pair's source to its destination, also where the bytes go through the stage."""
        scatter = self._scatter_plan(plan)
        if scatter is None:
            return plan.lower(blocks)
        return compose(*lay_out_round([(0, part) for part in scatter.staged_blocks(blocks)]), plan.source)
