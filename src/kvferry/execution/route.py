"""Routes: how bytes move from the ranks of a source engine to one rank, planned, connected and proved once."""

import logging
import queue
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

from kvferry.arrays import Descriptors
from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.execution.announce import SourceRank
from kvferry.execution.read import GuardedRead
from kvferry.execution.stage import Stage
from kvferry.handoff.handshake import decode_shards, fetch_directory
from kvferry.handoff.messages import Directory, Identity
from kvferry.handoff.pull_read import WORD_BYTES, word_bytes
from kvferry.handoff.push.part import Part, announced_blocks, selector_of
from kvferry.handoff.remote_holds import RemoteHold
from kvferry.handoff.wire.background import BackgroundCall, BackgroundCalls, unexpected_error
from kvferry.layout.shard import Shard
from kvferry.plan.describe import describe_choice
from kvferry.plan.planner import PairPlan, Planner
from kvferry.plan.proof.scattered import composed
from kvferry.plan.proof.verify import verify_destination
from kvferry.plan.request import GroupBlocks, of_rank, refuse_incomplete
from kvferry.plan.sample import sample_requests
from kvferry.plan.staging.scatter import NOTHING, ScatterPlan, laid_out
from kvferry.plan.staging.strategy import Strategy, choose, typical_costs
from kvferry.transport.registry import Connecting, Link, TransportSet

logger = logging.getLogger(__name__)

MAX_ENGINES = 1024


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
            logger.info("kvferry: %s %s", pair, describe_choice(choice))
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
        return composed(*laid_out([(0, part) for part in scatter.parts(blocks)]), plan.source)


class SourceEngine:
    """A prefill engine in one epoch, as one decode rank knows it: its directory, and the route from its ranks."""

    def __init__(self, directory: Directory, shard: Shard, route: Route) -> None:
        self.route = route
        self._directory, self._shard = directory, shard

    def reads(self, hold: RemoteHold, slot: int, blocks: Sequence[GroupBlocks]) -> list[GuardedRead] | None:
        """Return one guarded read per source rank that this rank needs for the request, None until the route is ready.

        ``blocks`` are those of every cache group of the model; other ranks read the groups that this rank's pipeline
        stage does not have. The request chooses the source ranks; source ranks that no request has read before are
        connected and proved first. Raises as :meth:`Route.is_ready`, and :class:`HandoffError` (invalid-request).
        """
        blocks = of_rank(blocks, self._shard)
        selector = selector_of(hold.handle.request_id)
        if not self.route.is_ready(selector):
            return None
        return [self._read(plan, hold, slot, blocks) for plan in self.route.plans(selector)]

    def sources(self, transfer_id: str, blocks: Sequence[GroupBlocks]) -> list[SourceRank] | None:
        """Return the source ranks that push a request to this rank, each with its part; None until the route is ready.

        ``blocks`` are as for :meth:`reads`, without source blocks. Raises as
        :meth:`Route.is_ready`, and :class:`HandoffError` (unsupported) where the engine does not push.
        """
        blocks = of_rank(blocks, self._shard)
        refuse_incomplete(blocks, self._shard)
        selector = selector_of(transfer_id)
        if not self.route.is_ready(selector):
            return None
        shards = tuple(entry.shard for entry in self._directory.ranks)
        ranks = []
        for plan in self.route.plans(selector):
            index = plan.assignment.source_index
            answers_at = self._directory.ranks[index].push_end_point
            if answers_at is None:
                raise HandoffError(
                    Reason.UNSUPPORTED,
                    f"engine {self._directory.engine_id} does not push.",
                    'Set "mode": "push" on both engines.',
                )
            ranks.append(SourceRank(index, answers_at, Part(plan, announced_blocks(plan, blocks)), shards))
        return ranks

    def _read(self, plan: PairPlan, hold: RemoteHold, slot: int, blocks: Sequence[GroupBlocks]) -> GuardedRead:
        entry = self._directory.ranks[plan.assignment.source_index]
        if slot >= entry.num_words:
            raise HandoffError(
                Reason.INVALID_REQUEST,
                f"{hold.handle.request_id} names guard word {slot}, but the source rank has {entry.num_words}.",
                "Check that the router copies the prefill engine's kv_transfer_params whole.",
            )
        link, scatter = self.route.link(plan), self.route.scatter_plan(plan)
        return GuardedRead(
            transport=link.transport,
            peer=link.peer,
            word_address=entry.words_address + slot * WORD_BYTES,
            expected_word=word_bytes(hold.epoch, hold.handle.generation),
            descriptors=plan.lower(blocks) if scatter is None else NOTHING,
            parts=() if scatter is None else scatter.parts(blocks),
            stage=self.route.stage,
        )


class Routes:
    """The routes of one decode rank, by prefill engine. Handshakes run on other threads.

    With a ``stage``, each pair of ranks moves its bytes by the ``strategy``; None leaves the choice to typical costs.
    """

    def __init__(
        self,
        shard: Shard,
        identity: Identity,
        transports: TransportSet,
        sender: str,
        timeout_seconds: float,
        stage: Stage | None = None,
        strategy: Strategy | None = None,
        connects: bool = True,
    ) -> None:
        self._connects = connects
        self._shard = shard
        self._identity = identity
        self._transports = transports
        self._sender = sender
        self._timeout_seconds = timeout_seconds
        self._stage, self._strategy = stage, strategy
        self._engines: dict[tuple[str, int, int], SourceEngine] = {}
        self._handshakes: BackgroundCalls[tuple[str, int, int], Directory] = BackgroundCalls("handshake")
        # Weak keys: an engine is forgotten with its handshake.
        self._connecting: WeakKeyDictionary[BackgroundCall[Directory], SourceEngine] = WeakKeyDictionary()
        self._suspects: queue.SimpleQueue[tuple[str, int, int]] = queue.SimpleQueue()

    def get(self, hold: RemoteHold) -> SourceEngine | None:
        """Return the engine, or None while its handshake runs or its ranks are being connected.

        Raises the error of the handshake or connection in every request that waits for it, and for
        :data:`kvferry.handoff.wire.background.FAILURE_SECONDS`; a later request tries again.
        """
        self._drop_suspects()
        key = hold.engine
        if key in self._engines:
            self._engines[key] = self._engines.pop(key)  # to the end: used last
            return self._engines[key]
        handshake = self._handshakes.get(key, lambda: self._fetch(hold))
        if handshake is None:
            return None
        engine = self._build(handshake)
        if engine is None:
            return None
        self._handshakes.forget(key)
        self._make_room(hold)
        self._engines[key] = engine
        return engine

    def suspect(self, hold: RemoteHold) -> None:
        """A transfer from this engine failed: the next request handshakes and connects anew. Any thread may call it."""
        self._suspects.put(hold.engine)

    def close(self) -> None:
        """Stop the stage's copying thread; no job may run any more. Twice is fine."""
        if self._stage is not None:
            self._stage.close()

    def _drop_suspects(self) -> None:
        while not self._suspects.empty():
            self._forget(self._suspects.get_nowait())

    def _forget(self, key: tuple[str, int, int]) -> None:
        """Forget an engine without closing its connections: jobs may still use them, and they end with the last job."""
        self._engines.pop(key, None)

    def _build(self, handshake: BackgroundCall[Directory]) -> SourceEngine | None:
        """Return the engine once it is ready. Its handshake keeps the error of an engine that cannot be."""
        try:
            return self._ready(handshake)
        except KVFerryError as error:
            handshake.fail(error)
            raise
        except Exception as error:
            # Kept as well: else every request would make the same plan again, and fail.
            logger.exception("kvferry: a plan failed unexpectedly")
            refused = unexpected_error("plan", error)
            handshake.fail(refused)
            raise refused from error

    def _ready(self, handshake: BackgroundCall[Directory]) -> SourceEngine | None:
        engine = self._connecting.pop(handshake, None)
        if engine is None:
            engine = self._plan(handshake.result())
        try:
            is_ready = engine.route.is_ready()
        except Exception:
            engine.route.close()
            raise
        if not is_ready:
            self._connecting[handshake] = engine
        return engine if is_ready else None

    def _plan(self, directory: Directory) -> SourceEngine:
        end_points = [entry.end_points for entry in directory.ranks]
        peers = Connections(self._transports, end_points) if self._connects else None
        route = Route(decode_shards(directory), self._shard, peers, self._stage, self._strategy)
        return SourceEngine(directory, self._shard, route)

    def _fetch(self, hold: RemoteHold) -> Directory:
        return fetch_directory(hold.host, hold.port, self._sender, hold.epoch, self._identity, self._timeout_seconds)

    def _make_room(self, hold: RemoteHold) -> None:
        """Forget earlier epochs of this engine, and beyond :data:`MAX_ENGINES` the engine that was used longest ago."""
        stale = [key for key in self._engines if key[:2] == hold.engine[:2]]
        if not stale and len(self._engines) >= MAX_ENGINES:
            stale.append(next(iter(self._engines)))
        for key in stale:
            self._forget(key)
