"""Routes: how bytes move from some ranks to one rank, planned, connected and proved once."""

import logging
from collections.abc import Mapping, Sequence

from kvferry.arrays import Descriptors
from kvferry.execution.stage import Stage
from kvferry.layout.shard import Shard
from kvferry.plan.planner import PairPlan, Planner
from kvferry.plan.proof.verify import compose, verify_destination
from kvferry.plan.request import GroupBlocks, sample_requests
from kvferry.plan.staging.scatter import ScatterPlan, lay_out_round
from kvferry.plan.staging.strategy import Strategy, choose, typical_costs
from kvferry.transport.registry import Connecting, Link, TransportSet

logger = logging.getLogger(__name__)


class Connections:
    """Connections to a peer's ranks, each opened when a job first needs it. Only the transfer thread uses them."""

    def __init__(self, transports: TransportSet, end_points: Sequence[Mapping[str, bytes]]) -> None:
        self._transports, self._end_points = transports, end_points
        self._connecting: dict[int, Connecting] = {}
        self._links: dict[int, Link] = {}

    def poll(self, index: int) -> Link | None:
        """Go on connecting to this rank; return the link once there is one. Raises :class:`TransportError`."""
        if index not in self._links:
            if index not in self._connecting:
                self._connecting[index] = self._transports.connect(dict(self._end_points[index]))
            link = self._connecting[index].poll()
            if link is None:
                return None
            del self._connecting[index]
            self._links[index] = link
        return self._links[index]

    def forget(self, index: int) -> None:
        """Connect anew for the next job; running jobs keep their connection."""
        self._connecting.pop(index, None)
        self._links.pop(index, None)

    def close(self) -> None:
        """Cancel and close the connections."""
        for connecting in self._connecting.values():
            connecting.cancel()
        for link in self._links.values():
            link.peer.close()


class Route:
    """How bytes move from source ranks to one destination: plans, connections and their proof.

    ``peers`` are the connections to the sources. A route without ``peers`` is planned and proved but not connected: its
    sources write. With a ``stage``, each pair of ranks moves its bytes by the ``strategy``; None leaves the choice
    to typical costs.
    """

    def __init__(
        self,
        sources: Sequence[Shard],
        destination: Shard,
        peers: Connections | None = None,
        stage: Stage | None = None,
        strategy: Strategy | None = None,
    ) -> None:
        self.peers, self.stage = peers, stage
        self._sources, self._destination = sources, destination
        self._strategy = strategy
        self._scatter_plans: dict[PairPlan, ScatterPlan | None] = {}
        self._proved: set[tuple[PairPlan, ...]] = set()
        self._planner = Planner(sources, destination)

    def plans(self, selector: int) -> tuple[PairPlan, ...]:
        """Return the plans of the source ranks that the selector chooses. Raises :class:`PlanError`."""
        return self._planner.plans(selector)

    def is_ready(self, selector: int = 0) -> bool:
        """Go on connecting to the ranks that the selector chooses; return whether they are connected and proved.

        Call it until it is true; no call waits for a peer. Raises :class:`TransportError`, :class:`PlanError` and
        :class:`VerificationError`.
        """
        plans = self.plans(selector)
        if plans in self._proved:
            return True
        if self.peers is not None and None in [self.peers.poll(plan.assignment.source_index) for plan in plans]:
            return False
        self._prove(plans)
        return True

    def link(self, plan: PairPlan) -> Link:
        """Return the link to a plan's source; the route must be ready."""
        link = None if self.peers is None else self.peers.poll(plan.assignment.source_index)
        assert link is not None, "a route that is ready is connected"
        return link

    def scatter_plan(self, plan: PairPlan) -> ScatterPlan | None:
        """Return the pair's plan through the stage, None where its bytes go directly."""
        if self.stage is None:
            return None
        if plan not in self._scatter_plans:
            choice = choose(plan, typical_costs(self.link(plan).name), self._strategy, self.stage.region.length)
            pair = f"{plan.source.rank_name} to {plan.destination.rank_name}"
            logger.info("kvferry: %s %s", pair, choice)
            is_scatter = choice.chosen.strategy is Strategy.SCATTER
            self._scatter_plans[plan] = ScatterPlan(plan, choice.chosen.gap_bytes) if is_scatter else None
        return self._scatter_plans[plan]

    def close(self) -> None:
        """Close the connections."""
        if self.peers is not None:
            self.peers.close()

    def _prove(self, plans: tuple[PairPlan, ...]) -> None:
        """Prove the templates on a small request before they move any other."""
        blocks = sample_requests(self._sources, self._destination)
        verify_destination([(plan.source, self._moved(plan, blocks)) for plan in plans], self._destination, blocks)
        self._proved.add(plans)

    def _moved(self, plan: PairPlan, blocks: Sequence[GroupBlocks]) -> Descriptors:
        """Return the descriptors from a pair's source to its destination, also where the bytes go through the stage."""
        scatter = self.scatter_plan(plan)
        if scatter is None:
            return plan.lower(blocks)
        return compose(*lay_out_round([(0, part) for part in scatter.staged_blocks(blocks)]), plan.source)
