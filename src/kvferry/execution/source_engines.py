"""Source engines as one destination rank knows them: handshaken and planned once, used by every request."""

import logging
import queue
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.execution.destination import SourceRank
from kvferry.execution.digests import PairDigests
from kvferry.execution.guard_words import Held
from kvferry.execution.pair_cells import check_kept
from kvferry.execution.digests import PartCells
from kvferry.execution.read import Guard, RankRead
from kvferry.execution.route import Route
from kvferry.execution.stage import Stage
from kvferry.handoff.guard_word import WORD_BYTES
from kvferry.handoff.handshake import decode_shards, fetch_directory, tell_refusal
from kvferry.handoff.messages import FIRST_WEIGHTS, Directory, EndPoint, Identity
from kvferry.handoff.pull_read import wrong_parameters
from kvferry.handoff.part import Part, announced_blocks
from kvferry.handoff.remote_holds import RemoteHold
from kvferry.handoff.wire.background import BackgroundCall, BackgroundCalls, unexpected_error
from kvferry.handoff.wire.trust import THIS_MACHINE, Trust
from kvferry.layout.shard import HOST_DEVICE, Shard
from kvferry.peer_log import PeerLog
from kvferry.plan.digest_cells import Integrity
from kvferry.plan.match import selector_of
from kvferry.plan.planner import PairPlan
from kvferry.plan.request import GroupBlocks, of_rank, refuse_incomplete
from kvferry.plan.staging.strategy import Strategy
from kvferry.transport.registry import TransportSet

logger = PeerLog(logging.getLogger(__name__))

MAX_ENGINES = 1024
MAX_DIRECTORY_BYTES = 256 << 20
"""Of the directories of all engines that a rank remembers, and again of those that it does not yet know to be of use:
each may have as many as an answer."""


class Compares(NamedTuple):
    """How a rank compares what it loads: how much, and the registered memory into which it reads the digests.

    A rank that is pushed to reads none. Where ``is_required`` is false, nothing is compared with an engine that pushes
    without digests, such as one of an earlier version.
    """

    wanted: Integrity
    memory: Stage | None = None
    is_required: bool = True


class SourceEngine:
    """A prefill engine in one epoch, as one decode rank knows it: its directory, and the route from its ranks."""

    def __init__(self, directory: Directory, shard: Shard, route: Route, compares: Compares | None) -> None:
        self.route = route
        self._directory, self._shard = directory, shard
        self.num_bytes = _num_bytes(directory)
        self._compares = compares
        self._pairs: dict[PairPlan, PairDigests] = {}
        self._cells: dict[PairPlan, PartCells | None] = {}
        for plan in route.plans(0):
            self._check_digests(plan)

    def reads(self, hold: RemoteHold, held: Held, blocks: Sequence[GroupBlocks]) -> list[RankRead] | None:
        """Return one guarded read per source rank that this rank needs for the request, None until the route is ready.

        Each of these ranks must show the guard word ``held``. ``blocks`` are those of every cache group of the model;
        other ranks read the groups that this rank's pipeline stage does not have. The request chooses the source ranks;
        source ranks that no request has read before are connected and proved first. Raises as :meth:`Route.is_ready`,
        and :class:`HandoffError` (wrong-parameters).
        """
        blocks = of_rank(blocks, self._shard)
        selector = selector_of(hold.handle.request_id)
        if not self.route.is_ready(selector):
            return None
        request_id, engine_id = hold.handle.request_id, self._directory.engine_id
        if hold.engine_id != engine_id:
            found = (
                f"remote_engine_id: they have {hold.engine_id!r}, the engine at {hold.host}:{hold.port} {engine_id!r}"
            )
            raise wrong_parameters(request_id, found)
        plans = self.route.plans(selector)
        return [
            self._with_digests(self.route.read(plan, blocks, self._guard(plan, hold, held)), plan, blocks)
            for plan in plans
        ]

    def _check_digests(self, plan: PairPlan) -> None:
        """Raise :class:`PlanError` (unsupported) where this rank could not compare what the plan moves."""
        if self._compares is not None and self._compares.memory is not None:
            self._digests_of(plan)
        elif self._compares is not None:
            self._cells_of(plan)

    def _cells_of(self, plan: PairPlan) -> PartCells | None:
        """Return the cells of a push that are compared; None where none are."""
        if plan not in self._cells:
            table, compares = self._directory.ranks[plan.assignment.source_index].digests, self._compares
            if compares is None or (table is None and not compares.is_required):
                self._cells[plan] = None
                if compares is not None:
                    engine_id = self._directory.engine_id
                    told = "kvferry: what engine %s pushes is not compared: the engine has no digests."
                    logger.warning(told, engine_id, peer=engine_id)
            else:
                check_kept(table, compares.wanted)
                assert table is not None, "a rank that keeps digests has a table"
                is_sliced = compares.wanted is Integrity.SAMPLE and table.slices is not None
                self._cells[plan] = PartCells(plan, compares.wanted, at_source=False, is_sliced=is_sliced)
        return self._cells[plan]

    def _with_digests(self, read: RankRead, plan: PairPlan, blocks: Sequence[GroupBlocks]) -> RankRead:
        """Return the read with the comparison of its bytes, where this rank compares."""
        if self._compares is None:
            return read
        comparison = self._digests_of(plan).comparison(blocks)
        return replace(read, comparison=comparison, digests=self._compares.memory)

    def _digests_of(self, plan: PairPlan) -> PairDigests:
        assert self._compares is not None, "only a rank that compares asks for digests"
        found = self._pairs.get(plan)
        if found is None:
            entry = self._directory.ranks[plan.assignment.source_index]
            found = self._pairs[plan] = PairDigests(plan, entry.digests, self._compares.wanted)
        return found

    def slow_reads(self, transfer_id: str) -> str | None:
        """Return why reads of a held prompt are slower than writes, empty where they are not; None until the route is
        ready. Raises as :meth:`Route.is_ready`.

        Host memory is read as fast as written: see docs/decisions/written-on-request.md.
        """
        selector = selector_of(transfer_id)
        if not self.route.is_ready(selector):
            return None
        for plan in self.route.plans(selector):
            devices = {region.device for shard in (plan.source, plan.destination) for region in shard.regions}
            if devices != {HOST_DEVICE}:
                capabilities = self.route.link(plan).transport.capabilities
                if capabilities.slow_reads:
                    return capabilities.slow_reads
        return ""

    @property
    def shards(self) -> tuple[bytes, ...]:
        """The encoded shards of all ranks."""
        return tuple(entry.shard for entry in self._directory.ranks)

    @property
    def version(self) -> int:
        """The version of the handshake."""
        return self._directory.version

    def writers(self, transfer_id: str) -> list[EndPoint]:
        """Return where the source ranks of a held prompt are asked to write it; empty where one of them does not."""
        plans = self.route.plans(selector_of(transfer_id))
        found = [self._directory.ranks[plan.assignment.source_index].held_end_point for plan in plans]
        writers = [where for where in found if where is not None]
        return writers if len(writers) == len(found) else []

    def sources(
        self, transfer_id: str, blocks: Sequence[GroupBlocks], *, is_held: bool = False
    ) -> list[SourceRank] | None:
        """Return the source ranks that push a request to this rank, each with its part; None until the route is ready.

        Where the prompt ``is_held``, they write it on request. ``blocks`` are as for :meth:`reads`; source blocks are
        not used. Raises as :meth:`Route.is_ready`, and :class:`HandoffError` (unsupported) where the engine does not
        push or write.
        """
        blocks = of_rank(blocks, self._shard)
        refuse_incomplete(blocks, self._shard)
        selector = selector_of(transfer_id)
        if not self.route.is_ready(selector):
            return None
        ranks = []
        for plan in self.route.plans(selector):
            index = plan.assignment.source_index
            entry = self._directory.ranks[index]
            answers_at = entry.held_end_point if is_held else entry.push_end_point
            if answers_at is None:
                raise _no_writer(self._directory.engine_id, is_held=is_held)
            part = Part(plan, announced_blocks(plan, blocks))
            cells = self._cells_of(plan)
            ranks.append(SourceRank(index, answers_at, part, self.shards, self.version, entry.process, cells))
        return ranks

    def _guard(self, plan: PairPlan, hold: RemoteHold, held: Held) -> Guard:
        entry = self._directory.ranks[plan.assignment.source_index]
        if held.slot >= entry.num_words:
            found = f"slot: they have {held.slot}, the prefill engine has {entry.num_words} slots, from 0 on"
            raise wrong_parameters(hold.handle.request_id, found)
        return Guard(entry.words_address + held.slot * WORD_BYTES, held.word)


def _num_bytes(directory: Directory) -> int:
    """Return the bytes of a directory's shards and end points."""
    return sum(len(part) for entry in directory.ranks for part in (entry.shard, *entry.end_points.values()))


def _no_room(num_bytes: int) -> HandoffError:
    return HandoffError(
        Reason.INVALID_REQUEST,
        f"the directory, of {num_bytes} bytes, was the largest of more than {MAX_DIRECTORY_BYTES} bytes of engines "
        "that have not been connected.",
        "Check the hosts that this engine is told to ask: no engine needs so many.",
    )


def _no_writer(engine_id: str, *, is_held: bool) -> HandoffError:
    if is_held:
        return HandoffError(
            Reason.UNSUPPORTED,
            f"engine {engine_id} does not write the prompts that it holds.",
            'Set "held_prompts" to "write" on that engine, or to "auto" on this one, which then reads; or update '
            "kvferry there.",
        )
    return HandoffError(Reason.UNSUPPORTED, f"engine {engine_id} does not push.", 'Set "mode": "push" on both engines.')


class SourceEngines:
    """The routes of one decode rank, by prefill engine. Handshakes run on other threads.

    With a ``stage``, each pair of ranks moves its bytes by the ``strategy``; None leaves the choice to typical costs.
    ``compares`` says which digests are compared; None compares none.
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
        trust: Trust = THIS_MACHINE,
        compares: Compares | None = None,
    ) -> None:
        self._trust = trust
        self._connects, self._compares = connects, compares
        self._weights_version = FIRST_WEIGHTS
        self._shard = shard
        self._identity = identity
        self._transports = transports
        self._sender = sender
        self._timeout_seconds = timeout_seconds
        self._stage, self._strategy = stage, strategy
        self._engines: dict[tuple[str, int, int], SourceEngine] = {}
        self._has_ended = threading.Event()
        # By this rank's weights too: a handshake that runs during a reset compares with those of before.
        self._handshakes: BackgroundCalls[tuple[str, int, int, str], Directory]
        self._handshakes = BackgroundCalls("handshake", self._has_ended.set)
        self._refusals: BackgroundCalls[tuple[str, int, int], None] = BackgroundCalls("refusal")
        # Weak keys: an engine is forgotten with its handshake.
        self._connecting: WeakKeyDictionary[BackgroundCall[Directory], SourceEngine] = WeakKeyDictionary()
        self._suspects: queue.SimpleQueue[tuple[str, int, int]] = queue.SimpleQueue()

    def get(self, hold: RemoteHold) -> SourceEngine | None:
        """Return the engine, or None while its handshake runs or its ranks are being connected.

        Raises the error of the handshake or connection in every request that waits for it, and for
        :data:`kvferry.handoff.wire.background.FAILURE_SECONDS`; a later request tries again.
        """
        self._drop_suspects()
        self._drop_surplus()
        key = hold.engine
        if key in self._engines:
            self._engines[key] = self._engines.pop(key)  # to the end: used last
            return self._engines[key]
        weights_version = self._weights_version
        handshake = self._handshakes.get((*key, weights_version), lambda: self._fetch(hold, weights_version))
        if handshake is None:
            return None
        engine = self._build(handshake, hold)
        if engine is None:
            return None
        self._handshakes.forget((*key, weights_version))
        self._make_room(hold, engine.num_bytes)
        self._engines[key] = engine
        if weights_version != self._weights_version:
            # The reset, on another thread, may not have seen the engine.
            self._forget(key)
            return None
        return engine

    def suspect(self, hold: RemoteHold) -> None:
        """A transfer from this engine failed: the next request handshakes and connects anew. Any thread may call it."""
        self._suspects.put(hold.engine)

    def forget_all(self, weights_version: str) -> None:
        """Compare every engine anew, since the weights of this rank are of this version now. Any thread may call it."""
        self._weights_version = weights_version
        self.connect_anew()

    def connect_anew(self) -> None:
        """The transports were closed and opened anew: the next requests handshake and connect anew."""
        for key in list(self._engines):
            self._suspects.put(key)

    def close(self) -> None:
        """Stop the stage's copying thread; no job may run any more. Twice is fine."""
        if self._stage is not None:
            self._stage.close()

    def _drop_suspects(self) -> None:
        while not self._suspects.empty():
            self._forget(self._suspects.get_nowait())

    def _drop_surplus(self) -> None:
        """Fail the largest of the directories beyond :data:`MAX_DIRECTORY_BYTES` whose engines are being connected or
        whose requests have not come for them, once a handshake has ended.
        """
        if not self._has_ended.is_set():
            return
        self._has_ended.clear()
        sizes = {handshake: _num_bytes(handshake.result()) for handshake in self._handshakes.with_results()}
        num_bytes = sum(sizes.values())
        for handshake in sorted(sizes, key=sizes.__getitem__, reverse=True)[:-1]:
            if num_bytes <= MAX_DIRECTORY_BYTES:
                return
            num_bytes -= sizes[handshake]
            handshake.fail(_no_room(sizes[handshake]))
            if (engine := self._connecting.pop(handshake, None)) is not None:
                engine.route.close()

    def _forget(self, key: tuple[str, int, int]) -> None:
        """Forget an engine without closing its connections: jobs may still use them, and they end with the last job."""
        self._engines.pop(key, None)

    def _build(self, handshake: BackgroundCall[Directory], hold: RemoteHold) -> SourceEngine | None:
        """Return the engine once it is ready. Its handshake keeps the error of an engine that cannot be."""
        try:
            return self._ready(handshake)
        except KVFerryError as error:
            self._tell_refusal(handshake, hold, error)
            handshake.fail(error)
            raise
        except Exception as error:
            # Kept as well: else every request would make the same plan again, and fail.
            logger.exception("kvferry: a plan failed unexpectedly")
            refused = unexpected_error("plan", error)
            handshake.fail(refused)
            raise refused from error

    def _tell_refusal(self, handshake: BackgroundCall[Directory], hold: RemoteHold, error: KVFerryError) -> None:
        """Tell the engine why it cannot be loaded from, on another thread."""
        try:
            directory = handshake.result()
        except KVFerryError:  # the handshake itself failed, or the engine was told before
            return
        kept = error.without_traceback()
        told = hold.host, hold.port, self._sender, directory.version, directory.epoch, kept, self._trust
        self._refusals.get(hold.engine, lambda: tell_refusal(*told, is_trusted=hold.is_trusted))

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
        connected = directory.ranks if self._connects else ()
        links = {index: self._transports.connect(entry.end_points) for index, entry in enumerate(connected)}
        route = Route(decode_shards(directory), self._shard, links, self._stage, self._strategy)
        return SourceEngine(directory, self._shard, route, self._compares)

    def _fetch(self, hold: RemoteHold, weights_version: str) -> Directory:
        return fetch_directory(
            hold.host,
            hold.port,
            self._sender,
            hold.epoch,
            self._identity,
            self._timeout_seconds,
            weights_version,
            self._trust,
            is_trusted=hold.is_trusted,
        )

    def _make_room(self, hold: RemoteHold, num_bytes: int) -> None:
        """Forget earlier epochs of an engine that comes with so many bytes, and beyond :data:`MAX_ENGINES` and
        :data:`MAX_DIRECTORY_BYTES` the engines that were used longest ago.
        """
        for key in [key for key in self._engines if key[:2] == hold.engine[:2]]:
            self._forget(key)
        num_bytes += sum(each.num_bytes for each in self._engines.values())
        while self._engines and (len(self._engines) >= MAX_ENGINES or num_bytes > MAX_DIRECTORY_BYTES):
            key, oldest = next(iter(self._engines.items()))
            num_bytes -= oldest.num_bytes
            self._forget(key)
