"""Source engines as one destination rank knows them: handshaken and planned once, used by every request."""

import logging
import queue
import threading
from collections.abc import Sequence
from typing import NamedTuple

from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.execution.destination import SourceRank
from kvferry.execution.digests import PartCells, check_computes
from kvferry.handoff.handshake import decode_shards, fetch_directory, tell_refusal
from kvferry.handoff.messages import FIRST_WEIGHTS, Directory, Identity
from kvferry.handoff.remote_holds import RemoteHold
from kvferry.handoff.source import Part, announced_blocks
from kvferry.handoff.wire.background import BackgroundCall, BackgroundCalls, unexpected_error
from kvferry.handoff.wire.trust import THIS_MACHINE, Trust
from kvferry.layout.shard import Shard
from kvferry.peer_log import PeerLog
from kvferry.plan.digest_cells import Integrity
from kvferry.plan.match import selector_of
from kvferry.plan.planner import PairPlan, Route
from kvferry.plan.request import GroupBlocks, of_rank, refuse_incomplete

logger = PeerLog(logging.getLogger(__name__))

MAX_ENGINES = 1024
MAX_DIRECTORY_BYTES = 256 << 20
"""Of the directories of all engines that a rank remembers, and again of those that it does not yet know to be of use:
each may have as many as an answer."""


class Compares(NamedTuple):
    """How much a rank compares of what it loads. Where ``is_required`` is false, nothing is compared with an engine
    that computes no digests, such as one whose cache is not comparable.
    """

    wanted: Integrity
    is_required: bool = True


NOTHING_COMPARED = Compares(Integrity.OFF)


class SourceEngine:
    """A prefill engine in one epoch, as one decode rank knows it: its directory, and the route from its ranks.

    ``compares`` says how much of what they write is compared. Raises :class:`PlanError` (unsupported) where this rank
    could not compare it, and as :meth:`Route.proved_plans`.
    """

    def __init__(self, directory: Directory, shard: Shard, compares: Compares) -> None:
        self._sources = decode_shards(directory)
        self._route = Route(self._sources, shard)
        self._directory, self._shard, self._compares = directory, shard, compares
        self._shards = tuple(entry.shard for entry in directory.ranks)
        self.num_bytes = _num_bytes(directory)
        self._cells: dict[PairPlan, PartCells | None] = {}
        for plan in self._route.proved_plans(0):
            self._cells_of(plan)

    def sources(self, transfer_id: str, blocks: Sequence[GroupBlocks]) -> list[SourceRank]:
        """Return the source ranks that write a request to this rank, each with its part.

        ``blocks`` are those of every cache group of the model; other ranks load the groups that this rank's pipeline
        stage does not have. Source blocks are not used. Raises as the constructor.
        """
        blocks = of_rank(blocks, self._shard)
        refuse_incomplete(blocks, self._shard)
        ranks = []
        for plan in self._route.proved_plans(selector_of(transfer_id)):
            index = plan.assignment.source_index
            entry = self._directory.ranks[index]
            part, cells = Part(plan, announced_blocks(plan, blocks)), self._cells_of(plan)
            ranks.append(
                SourceRank(index, entry.answers_at, part, self._shards, self._directory.version, entry.process, cells)
            )
        return ranks

    def check_parameters(self, engine_id: str, block_sizes: Sequence[int]) -> None:
        """Refuse what the parameters of a request say, where the engine says otherwise: its id, and its block sizes by
        cache group. Raises :class:`HandoffError` (wrong-parameters).
        """
        if engine_id != self._directory.engine_id:
            raise HandoffError(
                Reason.WRONG_PARAMETERS,
                f"the request's parameters name engine {engine_id!r} at the address of {self._directory.engine_id!r}.",
                "Check that the router copies the prefill engine's kv_transfer_params whole.",
            )
        said = {str(index): size for index, size in enumerate(block_sizes)}
        for shard in self._sources:
            for group in shard.groups:
                if group.block_size != said.get(group.name):
                    raise HandoffError(
                        Reason.WRONG_PARAMETERS,
                        f"the request's parameters say block sizes {list(block_sizes)} of engine "
                        f"{self._directory.engine_id!r}, whose cache group {group.name} has blocks of "
                        f"{group.block_size} tokens.",
                        "Check that the router copies the prefill engine's kv_transfer_params whole.",
                    )

    def _cells_of(self, plan: PairPlan) -> PartCells | None:
        """Return the cells of a write that are compared; None where none are."""
        if plan not in self._cells:
            self._cells[plan] = self._compared(plan)
        return self._cells[plan]

    def _compared(self, plan: PairPlan) -> PartCells | None:
        computed = Integrity(self._directory.ranks[plan.assignment.source_index].digests)
        wanted, is_required = self._compares
        if wanted is Integrity.OFF:
            return None
        if computed is Integrity.OFF and not is_required:
            engine_id = self._directory.engine_id
            told = "kvferry: what engine %s writes is not compared: the engine computes no digests."
            logger.warning(told, engine_id, peer=engine_id)
            return None
        check_computes(computed, wanted)
        return PartCells(plan, wanted, at_source=False)


def _num_bytes(directory: Directory) -> int:
    """Return the bytes of a directory's shards and end points."""
    return sum(len(part) for entry in directory.ranks for part in (entry.shard, *entry.end_points.values()))


def _no_room(num_bytes: int) -> HandoffError:
    return HandoffError(
        Reason.INVALID_REQUEST,
        f"the directory, of {num_bytes} bytes, was the largest of more than {MAX_DIRECTORY_BYTES} bytes of engines "
        "for which no request has come.",
        "Check the hosts that this engine is told to ask: no engine needs so many.",
    )


class SourceEngines:
    """The routes of one decode rank, by prefill engine. Handshakes run on other threads.

    ``compares`` says how much of what is written is compared.
    """

    def __init__(
        self,
        shard: Shard,
        identity: Identity,
        sender: str,
        timeout_seconds: float,
        trust: Trust = THIS_MACHINE,
        compares: Compares = NOTHING_COMPARED,
    ) -> None:
        self._trust = trust
        self._compares = compares
        self._weights_version = FIRST_WEIGHTS
        self._shard = shard
        self._identity = identity
        self._sender = sender
        self._timeout_seconds = timeout_seconds
        self._engines: dict[tuple[str, int, int], SourceEngine] = {}
        self._has_ended = threading.Event()
        # By this rank's weights too: a handshake that runs during a reset compares with those of before.
        self._handshakes: BackgroundCalls[tuple[str, int, int, str], Directory]
        self._handshakes = BackgroundCalls("handshake", self._has_ended.set)
        self._refusals: BackgroundCalls[tuple[str, int, int], None] = BackgroundCalls("refusal")
        self._suspects: queue.SimpleQueue[tuple[str, int, int]] = queue.SimpleQueue()

    def get(self, hold: RemoteHold) -> SourceEngine | None:
        """Return the engine, or None while its handshake runs.

        Raises the error of the handshake or of the plan in every request that waits for it, and for
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
        self._handshakes.forget((*key, weights_version))
        self._make_room(hold, engine.num_bytes)
        self._engines[key] = engine
        if weights_version != self._weights_version:
            # The reset, on another thread, may not have seen the engine.
            self._forget(key)
            return None
        return engine

    def suspect(self, hold: RemoteHold) -> None:
        """A transfer from this engine failed: the next request handshakes anew. Any thread may call it."""
        self._suspects.put(hold.engine)

    def forget_all(self, weights_version: str) -> None:
        """Compare every engine anew, since the weights of this rank are of this version now. Any thread may call it."""
        self._weights_version = weights_version
        for key in list(self._engines):
            self._suspects.put(key)

    def _drop_suspects(self) -> None:
        while not self._suspects.empty():
            self._forget(self._suspects.get_nowait())

    def _drop_surplus(self) -> None:
        """Fail the largest of the directories beyond :data:`MAX_DIRECTORY_BYTES` for which no request has come yet,
        once a handshake has ended.
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

    def _forget(self, key: tuple[str, int, int]) -> None:
        self._engines.pop(key, None)

    def _build(self, handshake: BackgroundCall[Directory], hold: RemoteHold) -> SourceEngine:
        """Return the engine. Its handshake keeps the error of an engine that cannot be."""
        try:
            return SourceEngine(handshake.result(), self._shard, self._compares)
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
