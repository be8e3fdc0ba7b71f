"""Prefill engines as a decode rank knows them: handshaken once, planned once, read many times."""

import logging
import queue
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.execution.announce import SourceRank
from kvferry.execution.read import GuardedRead
from kvferry.execution.stage import Stage
from kvferry.handoff.handshake import decode_shards, fetch_directory
from kvferry.handoff.messages import Directory, Identity
from kvferry.handoff.pull_read import WORD_BYTES, word_bytes
from kvferry.handoff.push.part import Part, announced_blocks, selector_of
from kvferry.handoff.remote_holds import RemoteHold
from kvferry.handoff.wire.background import BackgroundCall, BackgroundCalls, unforeseen
from kvferry.layout.shard import Shard
from kvferry.plan.describe import describe_choice
from kvferry.plan.planner import Descriptors, PairPlan, Planner
from kvferry.plan.proof.scattered import composed
from kvferry.plan.proof.verify import verify_destination
from kvferry.plan.request import GroupBlocks, of_rank, refuse_incomplete
from kvferry.plan.sample import sample_requests
from kvferry.plan.staging.scatter import NOTHING, ScatterPlan, laid_out
from kvferry.plan.staging.strategy import Strategy, choose, typical_costs
from kvferry.transport.registry import Connecting, Link, TransportSet

logger = logging.getLogger(__name__)

MAX_ENGINES = 1024


class Route:
    """One prefill engine in one epoch, seen from one decode rank.

    Everything that can be refused is refused before a request waits: shards that do not fit raise
    :class:`PlanError` here, ranks that are out of reach or are read wrongly in :meth:`is_ready`.
    """

    def __init__(
        self,
        directory: Directory,
        shard: Shard,
        transports: TransportSet,
        stage: Stage | None,
        strategy: Strategy | None,
        connects: bool = True,
    ) -> None:
        self._connects = connects
        self._directory = directory
        self._shard = shard
        self._transports = transports
        self._sources = decode_shards(directory)
        self._stage, self._strategy = stage, strategy
        self._connecting: dict[int, Connecting] = {}
        self._links: dict[int, Link] = {}
        self._scatter_plans: dict[PairPlan, ScatterPlan | None] = {}
        self._verified: set[tuple[PairPlan, ...]] = set()
        self._planner = Planner(self._sources, shard)

    def is_ready(self, selector: int = 0) -> bool:
        """Go on connecting to the ranks that the selector chooses; return whether they are connected and proved.

        On the thread that uses the transports, again and again until it is true: it waits for no peer's answer.
        Raises :class:`TransportError`, :class:`PlanError` and :class:`VerificationError`.
        """
        plans = self._planner.plans(selector)
        if plans in self._verified:
            return True
        if self._connects and None in [self._link(plan.assignment.source_index) for plan in plans]:
            return False
        self._verify(plans)
        return True

    def reads(self, hold: RemoteHold, slot: int, blocks: Sequence[GroupBlocks]) -> list[GuardedRead] | None:
        """Return one guarded read per source rank that this rank needs for the request, None until it is ready.

        ``blocks`` are those of every cache group of the model; of a group that this rank's pipeline stage does not
        have, other ranks read. Which ranks are read depends on the request; those that no request has read before are
        connected and proved first. Raises as :meth:`is_ready`, and :class:`HandoffError` (invalid-request).
        """
        blocks = of_rank(blocks, self._shard)
        selector = selector_of(hold.handle.request_id)
        expected = word_bytes(hold.epoch, hold.handle.generation)
        if not self.is_ready(selector):
            return None
        reads = []
        for plan in self._planner.plans(selector):
            source_index = plan.assignment.source_index
            entry = self._directory.ranks[source_index]
            if slot >= entry.num_words:
                raise HandoffError(
                    Reason.INVALID_REQUEST,
                    f"slot {slot} of {hold.handle.request_id}: the rank has {entry.num_words}.",
                    "Check that the router copies the prefill engine's kv_transfer_params whole.",
                )
            link = self._links[source_index]
            word_address = entry.words_address + slot * WORD_BYTES
            scatter = self._scatter_plan(plan)
            reads.append(
                GuardedRead(
                    transport=link.transport,
                    peer=link.peer,
                    word_address=word_address,
                    expected_word=expected,
                    descriptors=plan.lower(blocks) if scatter is None else NOTHING,
                    parts=() if scatter is None else scatter.parts(blocks),
                    stage=self._stage,
                )
            )
        return reads

    def sources(self, transfer_id: str, blocks: Sequence[GroupBlocks]) -> list[SourceRank] | None:
        """Return the source ranks that are to push a request to this rank, with what each is to write.

        None until it is ready, as with :meth:`reads`. Of ``blocks`` only the receiver's side counts. Raises as
        :meth:`is_ready`, and :class:`HandoffError` (unsupported) where the engine does not push.
        """
        blocks = of_rank(blocks, self._shard)
        refuse_incomplete(blocks, self._shard)
        selector = selector_of(transfer_id)
        if not self.is_ready(selector):
            return None
        shards = tuple(entry.shard for entry in self._directory.ranks)
        ranks = []
        for plan in self._planner.plans(selector):
            index = plan.assignment.source_index
            answers_at = self._directory.ranks[index].push_end_point
            if answers_at is None:
                raise HandoffError(
                    Reason.UNSUPPORTED,
                    f"engine {self._directory.engine_id} does not push.",
                    'Set "mode": "push" on both engines.',
                )
            part = Part(plan, announced_blocks(plan, blocks))
            ranks.append(SourceRank(index, answers_at, part, shards))
        return ranks

    def close(self) -> None:
        """Forget the connections."""
        for connecting in self._connecting.values():
            connecting.cancel()
        for link in self._links.values():
            link.peer.close()

    def _link(self, source_index: int) -> Link | None:
        """Go on connecting to this rank; return how it is reached once it is."""
        if source_index not in self._links:
            if source_index not in self._connecting:
                end_points = self._directory.ranks[source_index].end_points
                self._connecting[source_index] = self._transports.connect(end_points)
            link = self._connecting[source_index].poll()
            if link is None:
                return None
            del self._connecting[source_index]
            self._links[source_index] = link
        return self._links[source_index]

    def _verify(self, plans: tuple[PairPlan, ...]) -> None:
        """Prove the templates on a small request before any other is read by them."""
        blocks = sample_requests(self._sources, self._shard)
        verify_destination([(plan.source, self._moved(plan, blocks)) for plan in plans], self._shard, blocks)
        self._verified.add(plans)

    def _moved(self, plan: PairPlan, blocks: Sequence[GroupBlocks]) -> Descriptors:
        """Return from where to where a pair's bytes go, by way of the stage or not."""
        scatter = self._scatter_plan(plan)
        if scatter is None:
            return plan.lower(blocks)
        return composed(*laid_out([(0, part) for part in scatter.parts(blocks)]), plan.source)

    def _scatter_plan(self, plan: PairPlan) -> ScatterPlan | None:
        """Return the pair's plan by way of the stage, None where its bytes go directly."""
        if self._stage is None:
            return None
        if plan not in self._scatter_plans:
            costs = typical_costs(self._links[plan.assignment.source_index].name)
            choice = choose(plan, costs, self._strategy, self._stage.region.length)
            pair = f"{plan.source.rank_name} to {plan.destination.rank_name}"
            logger.info("kvferry: %s %s", pair, describe_choice(choice))
            is_scatter = choice.chosen.strategy is Strategy.SCATTER
            self._scatter_plans[plan] = ScatterPlan(plan, choice.chosen.gap_bytes) if is_scatter else None
        return self._scatter_plans[plan]


class Routes:
    """All prefill engines that a rank reads from; handshakes run beside, on threads of their own.

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
        self._engines: dict[tuple[str, int, int], Route] = {}
        self._handshakes: BackgroundCalls[tuple[str, int, int], Directory] = BackgroundCalls("handshake")
        # By the handshake, with which they are forgotten.
        self._connecting: WeakKeyDictionary[BackgroundCall[Directory], Route] = WeakKeyDictionary()
        self._suspects: queue.SimpleQueue[tuple[str, int, int]] = queue.SimpleQueue()

    def get(self, hold: RemoteHold) -> Route | None:
        """Return the engine, or None while its handshake is under way or its ranks are being connected.

        Raises what these came to when they failed, to all that waited for them and for
        ``beside.FAILURE_SECONDS``; a later request tries again.
        """
        self._drop_suspects()
        key = hold.destination
        if key in self._engines:
            self._engines[key] = self._engines.pop(key)  # behind those that were asked for longer ago
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
        """A transfer from this engine failed: the next request handshakes and connects anew. From any thread."""
        self._suspects.put(hold.destination)

    def close(self) -> None:
        """Stop copying out of the stage, once no load runs; twice is fine."""
        if self._stage is not None:
            self._stage.close()

    def _drop_suspects(self) -> None:
        while not self._suspects.empty():
            self._forget(self._suspects.get_nowait())

    def _forget(self, key: tuple[str, int, int]) -> None:
        """Not closed: loads may still be reading over the same connections, which end with the last of these."""
        self._engines.pop(key, None)

    def _build(self, handshake: BackgroundCall[Directory]) -> Route | None:
        """Return the engine once it is ready. Why it never will be is remembered."""
        try:
            return self._ready(handshake)
        except KVFerryError as error:
            handshake.fail(error)
            raise
        except Exception as error:
            # Remembered as well: else every load would plan anew what cannot be planned.
            logger.exception("kvferry: a plan failed unexpectedly")
            refused = unforeseen("plan", error)
            handshake.fail(refused)
            raise refused from error

    def _ready(self, handshake: BackgroundCall[Directory]) -> Route | None:
        engine = self._connecting.pop(handshake, None)
        if engine is None:
            engine = Route(
                handshake.result(), self._shard, self._transports, self._stage, self._strategy, self._connects
            )
        try:
            is_ready = engine.is_ready()
        except Exception:
            engine.close()
            raise
        if not is_ready:
            self._connecting[handshake] = engine
        return engine if is_ready else None

    def _fetch(self, hold: RemoteHold) -> Directory:
        return fetch_directory(hold.host, hold.port, self._sender, hold.epoch, self._identity, self._timeout_seconds)

    def _make_room(self, hold: RemoteHold) -> None:
        """Forget the former lives of this engine, and beyond the bound the one that was asked for longest ago."""
        stale = [key for key in self._engines if key[:2] == hold.destination[:2]]
        if not stale and len(self._engines) >= MAX_ENGINES:
            stale.append(next(iter(self._engines)))
        for key in stale:
            self._forget(key)
