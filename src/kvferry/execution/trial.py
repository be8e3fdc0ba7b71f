"""The trial at start: labelled blocks of a rank's cache go to a second agent of the same process, and come back.

They go the way of any load: engine's views, transport, guard words, digests, stage and merge, in the transfer thread's
device order. So what no test without this machine's device can show is shown on it before the engine says that it is
ready. A rank that pushes writes instead of reading, and so does the second agent.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from kvferry.errors import HandoffError, KVFerryError, PlanError, Reason, TransportError
from kvferry.execution import device_memory
from kvferry.execution.device import DeviceOrder, Mark
from kvferry.execution.digests import PairDigests
from kvferry.execution.executor import Executor
from kvferry.execution.guard_words import GuardWords, Scratch
from kvferry.execution.read import Guard, RankRead, Read
from kvferry.execution.registered_memory import RegisteredMemory
from kvferry.execution.route import Route
from kvferry.handoff.guard_word import WORD_BYTES, HeldPrompt, guard_word
from kvferry.handoff.messages import Handle
from kvferry.layout.group import CacheKind
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import Shard
from kvferry.layout.slab import slab_shard
from kvferry.peer_log import PeerLog
from kvferry.plan.digest_cells import Integrity
from kvferry.plan.planner import PairPlan
from kvferry.plan.request import GroupBlocks
from kvferry.plan.staging.strategy import Strategy
from kvferry.transport.protocol import Direction, Status
from kvferry.transport.registry import TransportSet

if TYPE_CHECKING:
    import torch

logger = PeerLog(logging.getLogger(__name__))

TRIAL_SECONDS = 10.0
"""Limit of one move of the trial; all moves together take less than a second where nothing is wrong."""
BLOCKS_EACH = 2
"""Blocks of each cache group that are labelled; of a state one."""
SLOT = 0
COMPARED_BYTES = 1 << 20
"""Of a side that :func:`open_side` opens."""


class Side(NamedTuple):
    """One of the two sides of the trial: its memory, registered with ``transports``.

    With guard words on both sides the destination reads the bytes, else the source writes them.
    """

    memory: RegisteredMemory
    transports: TransportSet
    end_points: Mapping[str, bytes]

    def close(self) -> None:
        """Close the transports and the stage."""
        self.transports.close()
        if self.memory.stage is not None:
            self.memory.stage.close()


def open_side(
    shard: Shard,
    order: DeviceOrder,
    opens: Callable[[], TransportSet],
    integrity: Integrity,
    *,
    reads: bool,
    stage_bytes: int = 0,
) -> Side:
    """Return a side with this cache: it ``reads`` and is read from, or writes and is written to.

    With ``stage_bytes`` it has a stage of so many. Raises the errors of ``opens`` and of registration.
    """
    memory = RegisteredMemory.of(
        shard,
        order,
        integrity,
        num_scratch_words=1,
        num_slots=1 if reads else 0,
        stage_bytes=stage_bytes,
        compared_bytes=COMPARED_BYTES,
    )
    transports = opens()
    try:
        end_points = transports.register(memory.regions)
    except BaseException:
        transports.close()
        raise
    return Side(memory, transports, end_points)


class Trip(NamedTuple):
    """Blocks of one cache group: labelled ones of the engine, those of the second agent, and where they come back."""

    group: str
    num_tokens: int
    labelled: Sequence[int]
    away: Sequence[int]
    returned: Sequence[int]

    def out(self) -> GroupBlocks:
        """Return the request of the second agent."""
        return self._request(self.labelled, self.away)

    def back(self) -> GroupBlocks:
        """Return the request of the engine."""
        return self._request(self.away, self.returned)

    def _request(self, source: Sequence[int], destination: Sequence[int]) -> GroupBlocks:
        return GroupBlocks(
            group=self.group,
            first_token=0,
            last_token=self.num_tokens,
            source_block_ids=source,
            destination_block_ids=destination,
        )


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The strategies that have passed, the transport, and how many bytes went there and back in how many seconds."""

    strategies: tuple[Strategy, ...]
    transport: str
    num_bytes: int
    seconds: float


class Trial:
    """The trial of one rank. ``views`` are the engine's own views of the layers, with the block as their first axis.

    ``opens`` opens the second agent's transports. ``strategies`` are tried one after the other; ``scatter`` needs the
    engine's stage, and is left out behind a strategy that has passed where this cache cannot use it: then loads do not
    choose it either. An error names the ``layout``.
    Digests are compared where the engine keeps them.
    """

    def __init__(
        self,
        engine: Side,
        views: "Mapping[str, torch.Tensor]",
        order: DeviceOrder,
        opens: Callable[[], TransportSet],
        strategies: Sequence[Strategy],
        layout: NamedLayout,
        cores: Collection[int] = (),
    ) -> None:
        self._engine, self._views, self._order, self._opens = engine, views, order, opens
        self._strategies, self._layout, self._cores = strategies, layout, cores
        self._trips = choose_blocks(engine.memory.shard)
        self._transport = "none"

    def run(self) -> TrialResult:
        """Move labelled blocks there and back by each strategy; the blocks have their former bytes afterwards.

        Raises :class:`TransportError` (``trial-failed``): what differs or failed, and which setting to try.
        """
        began_at = time.monotonic()
        done: list[Strategy] = []
        content = LabelledBlocks(self._views, self._engine.memory.shard, self._trips)
        second = None
        try:
            second = self._open_second()
            for strategy in self._strategies:
                if self._moves_there_and_back(content, second, strategy, is_required=not done):
                    done.append(strategy)
        except KVFerryError as error:
            raise self._failed(error, done) from error
        finally:
            content.restore()
            if self._engine.memory.words is not None:
                self._engine.memory.words.clear(SLOT)
            if second is not None:
                second.close()
        return TrialResult(tuple(done), self._transport, content.num_bytes, time.monotonic() - began_at)

    def _moves_there_and_back(
        self, content: "LabelledBlocks", second: Side, strategy: Strategy, *, is_required: bool
    ) -> bool:
        """Return whether the blocks have come back, False for a strategy that this cache cannot use."""
        content.label()
        _await_mark(self._order.mark())
        try:
            self._move(self._engine, second, [trip.out() for trip in self._trips], strategy)
            self._move(second, self._engine, [trip.back() for trip in self._trips], strategy)
        except PlanError as error:
            if is_required or error.reason is not Reason.UNSUPPORTED:
                raise
            logger.info("kvferry: the trial at start leaves out the strategy %s: %s", strategy, error)
            return False
        content.compare()
        return True

    def _open_second(self) -> Side:
        """Return a small cache on the same device, in another layout, with transports of its own."""
        engine = self._engine.memory
        # The memory must live as long as it is registered.
        shard, self._cache = device_memory.placed(tier_shard(engine.shard, self._trips), self._order.device)
        integrity = Integrity.OFF if engine.table is None else engine.integrity
        stage_bytes = 0 if engine.stage is None else engine.stage.region.length
        reads = engine.words is not None
        return open_side(shard, self._order, self._opens, integrity, reads=reads, stage_bytes=stage_bytes)

    def _move(self, source: Side, destination: Side, blocks: Sequence[GroupBlocks], strategy: Strategy) -> None:
        words = source.memory.words
        if words is None or destination.memory.words is None:
            self._write(source, destination, blocks)
        else:
            self._read(source, destination, blocks, strategy, words)

    def _write(self, source: Side, destination: Side, blocks: Sequence[GroupBlocks]) -> None:
        deadline = time.monotonic() + TRIAL_SECONDS
        route = Route(
            [source.memory.shard], destination.memory.shard, {0: source.transports.connect(destination.end_points)}
        )
        while not route.is_ready():
            _wait(deadline)
        link = route.links[0].poll()
        assert link is not None
        self._transport = link.name
        for plan in route.own_plans(0):
            transfer = link.transport.submit(link.peer, Direction.WRITE, plan.lower(blocks))
            while link.transport.poll(transfer) is Status.PENDING:
                _wait(deadline)
            if transfer.error is not None:
                raise transfer.error
        route.close()

    def _read(
        self,
        source: Side,
        destination: Side,
        blocks: Sequence[GroupBlocks],
        strategy: Strategy,
        words: GuardWords,
    ) -> None:
        word = guard_word("trial", 1, Handle("trial", 1), HeldPrompt("trial", 1, [], []))
        if (table := source.memory.table) is not None:
            for each in blocks:
                table.fill_group(each.group, each.source_ids, 0, (0, each.last_token))
        words.set(SLOT, word)
        stage = destination.memory.stage if strategy is Strategy.SCATTER else None
        links = {0: destination.transports.connect(source.end_points)}
        route = Route([source.memory.shard], destination.memory.shard, links, stage, strategy)
        guard = Guard(words.address + SLOT * WORD_BYTES, word)

        def reads() -> Sequence[RankRead] | None:
            if not route.is_ready():
                return None
            return [
                self._compared(route.read(plan, blocks, guard), plan, source, destination, blocks)
                for plan in route.own_plans(0)
            ]

        self._await(Read("trial", reads, time.monotonic() + TRIAL_SECONDS), destination.memory.scratch)
        self._transport = links[0].name
        route.close()

    def _compared(
        self, read: RankRead, plan: PairPlan, source: Side, destination: Side, blocks: Sequence[GroupBlocks]
    ) -> RankRead:
        table, compared = source.memory.table, destination.memory.compared
        if table is None or compared is None:
            return read
        comparison = PairDigests(plan, table.entry, source.memory.integrity).comparison(blocks)
        return replace(read, comparison=comparison, digests=compared)

    def _await(self, read: Read, scratch: Scratch) -> None:
        """Run the read on a transfer thread, and wait until the device has put all bytes in place: the transport that
        reads them next waits for no stream.
        """
        executor = Executor(scratch, self._cores, self._order)
        try:
            executor.submit(read)
            results = executor.collect(TRIAL_SECONDS + 1.0)
        finally:
            executor.close()
        if not results:
            raise late()
        if results[0].error is not None:
            raise results[0].error
        _await_mark(results[0].landing)

    def _failed(self, error: KVFerryError, done: Sequence[Strategy]) -> TransportError:
        strategy = self._strategies[len(done)]
        device = self._engine.memory.shard.regions[0].device
        if done:
            remedy = f'Set "strategy" to "{done[-1]}": that has passed.'
        elif error.reason is Reason.INTEGRITY_MISMATCH:
            remedy = 'Set "integrity" to "off" to see whether the bytes or their sums are wrong, and report it.'
        else:
            remedy = (
                f'Try another "layout" or "transport" (`kvferry doctor --device {device}` tries every layout), and '
                f"leave UCX_TLS unset. {error.remedy}"
            )
        where = f"{device}, layout {self._layout}, strategy {strategy}, transport {self._transport}"
        return TransportError(Reason.TRIAL_FAILED, f"the trial at start failed ({where}): {error.message}", remedy)


def choose_blocks(shard: Shard) -> tuple[Trip, ...]:
    """Return the blocks of each group; none of a block's bytes belong to another group's blocks, or to the null block.

    Raises :class:`TransportError` (``trial-failed``) for a cache that has too few blocks.
    """
    trips, at, away = [], 1, 0
    for group in shard.groups:
        is_state = group.kind is CacheKind.STATE
        count = 1 if is_state else BLOCKS_EACH
        tokens = 1 if is_state else count * group.block_size
        labelled, returned = range(at, at + count), range(at + count, at + 2 * count)
        trips.append(Trip(group.name, tokens, labelled, range(away, away + count), returned))
        at, away = at + 2 * count, away + count
    if at > (fewest := min(group.num_blocks for group in shard.groups)):
        raise TransportError(
            Reason.TRIAL_FAILED,
            f"a cache of {fewest} blocks is too small for the trial at start, which needs {at}.",
            "Give the engine more memory for its cache.",
        )
    return tuple(trips)


def tier_shard(shard: Shard, trips: Sequence[Trip]) -> Shard:
    """Return the blocks that leave the engine, with this rank's heads, as a tier would lay them out; at address 0."""
    num_blocks = sum(len(trip.away) for trip in trips)
    slab = slab_shard([shard], {trip.group: num_blocks for trip in trips})
    held = {(group.name, part.name): part.heads for group in shard.groups for part in group.components}
    groups = tuple(
        msgspec.structs.replace(
            group,
            components=tuple(
                msgspec.structs.replace(part, heads=held[group.name, part.name]) for part in group.components
            ),
        )
        for group in slab.groups
    )
    ranks = {"tp_rank": shard.tp_rank, "tp_size": shard.tp_size, "pp_rank": shard.pp_rank, "pp_size": shard.pp_size}
    return Shard(regions=slab.regions, groups=groups, **ranks)


class LabelledBlocks:
    """The blocks of the trial through the engine's own views."""

    def __init__(self, views: "Mapping[str, torch.Tensor]", shard: Shard, trips: Sequence[Trip]) -> None:
        self._views = views
        self._trips = {trip.group: trip for trip in trips}
        self._layers = [(group.name, layer) for group in shard.groups for layer in group.layers]
        last = max(block for trip in trips for block in trip.returned)
        self._others = [0, *([last + 1] if last + 1 < min(group.num_blocks for group in shard.groups) else [])]
        self._before = {
            (layer, block): views[layer][block].clone() for name, layer in self._layers for block in self._touched(name)
        }
        self._unchanged = {
            (layer, block): _bytes_of(views[layer][block]) for _, layer in self._layers for block in self._others
        }
        self._labels: dict[tuple[str, int], Any] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes that go there and back."""
        return sum(len(label) for label in self._labels.values())

    def label(self) -> None:
        """Write new random bytes into the labelled blocks."""
        generator = np.random.default_rng()
        for name, layer in self._layers:
            for block in self._trips[name].labelled:
                self._labels[layer, block] = _fill(self._views[layer][block], generator)

    def compare(self) -> None:
        """Raise :class:`HandoffError` (``bytes-foreign``) unless each block has come back and no other has changed."""
        for name, layer in self._layers:
            trip = self._trips[name]
            for labelled, returned in zip(trip.labelled, trip.returned, strict=True):
                for block in (labelled, returned):
                    self._check(layer, block, self._labels[layer, labelled])
            for block in self._others:
                self._check(layer, block, self._unchanged[layer, block])

    def restore(self) -> None:
        """Give all blocks the bytes that they had."""
        for (layer, block), content in self._before.items():
            self._views[layer][block].copy_(content)

    def _touched(self, name: str) -> list[int]:
        return [*self._trips[name].labelled, *self._trips[name].returned]

    def _check(self, layer: str, block: int, expected: Any) -> None:
        wrong = np.flatnonzero(_bytes_of(self._views[layer][block]) != expected)
        if wrong.size:
            raise HandoffError(
                Reason.BYTES_FOREIGN,
                f"layer {layer!r}, block {block}: {wrong.size} of {len(expected)} bytes are wrong, the first is byte "
                f"{wrong[0]} of the block in the engine's view.",
            )


def _fill(view: "torch.Tensor", generator: np.random.Generator) -> Any:
    """Write random bytes; return them in the view's order."""
    import torch

    content = generator.integers(0, 256, view.numel() * view.element_size(), np.uint8)
    view.copy_(torch.from_numpy(content.copy()).view(view.dtype).reshape(view.shape))
    return content


def _bytes_of(view: "torch.Tensor") -> Any:
    """Return a copy of a view's bytes, in the view's order."""
    import torch

    return view.cpu().contiguous().view(torch.uint8).numpy().reshape(-1).copy()


def _await_mark(mark: Mark) -> None:
    deadline = time.monotonic() + TRIAL_SECONDS
    while not mark.is_over():
        _wait(deadline)


def _wait(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise late()
    time.sleep(0.0002)


def late() -> HandoffError:
    """Return the error of a trial whose blocks do not arrive."""
    return HandoffError(
        Reason.DEADLINE_EXCEEDED,
        f"the blocks did not arrive within {TRIAL_SECONDS:.0f} s.",
        "Check that the transport's library works on this machine.",
    )
