"""What moving costs here, measured in some tenths of a second on a peer's own memory, and the choice that follows."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from kvferry.errors import Reason, TransportError
from kvferry.execution.copy_costs import MIN_PROBE_BYTES, PROBE_BYTES, measure_copies
from kvferry.execution.device import OVER, Mark
from kvferry.execution.stage import Stage
from kvferry.plan.describe import describe_choice
from kvferry.plan.planner import PairPlan
from kvferry.plan.staging.staged_plan import GatherPlan, ScatterPlan
from kvferry.plan.staging.strategy import Choice, Costs, Strategy, choose, typical_costs
from kvferry.transport.protocol import Descriptors, Direction, Peer, Region, Status, Transfer, Transport

logger = logging.getLogger(__name__)

PIECE_BYTES = 2 << 10
REPEAT = 3
LONGEST_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Packing:
    """A source that packs: the bytes of its stage, and what measures how many seconds its answers take, if it can."""

    stage_bytes: int
    time_an_answer: Callable[[], float | None] = lambda: None


class Strategist:
    """Chooses for each pair of ranks, with costs that were given or are measured once for each transport.

    ``keep`` is called with the costs that were measured, for another start.
    Without a stage here only ``gather`` can be wished for, and without such a wish everything goes directly.
    """

    def __init__(
        self,
        stage: Stage | None = None,
        wish: Strategy | None = None,
        costs: Mapping[str, Costs] | None = None,
        keep: Callable[[Costs], None] = lambda costs: None,
    ) -> None:
        self.stage, self._wish, self._keep = stage, wish, keep
        self._costs = dict(costs or {})

    def close(self) -> None:
        """Stop copying out of the stage; twice is fine."""
        if self.stage is not None:
            self.stage.close()

    def staged_plan(
        self,
        plan: PairPlan,
        transport: Transport,
        peer: Peer,
        packing: Packing | None = None,
    ) -> ScatterPlan | GatherPlan | None:
        """Return the plan by way of a stage where that is the choice, None for the direct way.

        ``packing`` is None where the source does not pack. Raises :class:`PlanError` (``unsupported``) for a strategy
        that was wished for and cannot be had.
        """
        choice = self.choice(plan, transport, peer, packing)
        if choice is None or choice.chosen.strategy is Strategy.DIRECT:
            return None
        if choice.chosen.strategy is Strategy.GATHER:
            return GatherPlan(plan)
        return ScatterPlan(plan, choice.chosen.gap_bytes)

    def choice(
        self,
        plan: PairPlan,
        transport: Transport,
        peer: Peer,
        packing: Packing | None = None,
    ) -> Choice | None:
        """Return the choice and what was rejected; None where there is nothing to choose."""
        if self.stage is None and self._wish is not Strategy.GATHER:
            return None
        name, size = transport.capabilities.name, None if self.stage is None else self.stage.region.length
        packing_bytes = None if packing is None else packing.stage_bytes
        choice = choose(plan, self._costs.get(name, typical_costs(name)), self._wish, size, packing_bytes)
        better = [found for found in choice.rejected if found.num_descriptors < choice.chosen.num_descriptors]
        is_open = self._wish is None and name not in self._costs
        if self.stage is not None and is_open and (better or choice.chosen.strategy is not Strategy.DIRECT):
            # Measured only where a stage could save descriptors: most pairs need none.
            measured = self._measured(plan, transport, peer, packing)
            if measured is not None:
                self._costs[name] = measured
                choice = choose(plan, measured, self._wish, size, packing_bytes)
        logger.info("kvferry: %s to %s %s", plan.source.rank_name, plan.destination.rank_name, describe_choice(choice))
        return choice

    def _measured(self, plan: PairPlan, transport: Transport, peer: Peer, packing: Packing | None) -> Costs | None:
        """Return what was measured, and keep it, or what is typical of a peer too slow for that; None to try again."""
        assert self.stage is not None
        try:
            measured = measure_costs(transport, peer, plan.source.regions, self.stage)
        except SlowPeerError as error:
            # No reason to fail a request, which has a deadline of its own; nor to wait again for each pair.
            logger.warning("kvferry: what moving costs was not measured: %s", error)
            return typical_costs(transport.capabilities.name)
        if measured is None:
            return None
        seconds = None if packing is None else packing.time_an_answer()
        if seconds is not None:
            measured = replace(measured, seconds_per_part=seconds)
        self._keep(measured)
        return measured


def measure_costs(transport: Transport, peer: Peer, regions: Sequence[Region], stage: Stage) -> Costs | None:
    """Measure over a connection, by reading the peer's caches into the stage; what they hold is ignored.

    Every read is of other memory, spread over the peer's largest region: what was read before is in a cache. Returns
    None while the stage has no room for that, or the peer not enough memory, and for a stage on a GPU, whose copies
    are not measured. Raises :class:`TransportError`, and :class:`SlowPeerError` where a read takes too long.
    """
    if stage.region.device != "cpu":
        return None
    owner = object()
    remote = max(regions, key=lambda region: region.length)
    num_bytes = 1 << min(PROBE_BYTES, 2 * remote.length, stage.region.length).bit_length() - 1
    begin = stage.take(owner, num_bytes) if num_bytes >= MIN_PROBE_BYTES else None
    quiet: Mark = OVER
    try:
        return None if begin is None else _measure(transport, peer, remote, stage, begin, num_bytes)
    except SlowPeerError as error:
        quiet = error.quiet
        raise
    finally:
        # Memory into which bytes may still come is not given to another before that is over.
        stage.give_back(owner, after=quiet)


class _Stopped(NamedTuple):
    """The end of a read that is being stopped."""

    transport: Transport
    transfer: Transfer

    def is_over(self) -> bool:
        return self.transport.cancel(self.transfer) is not Status.PENDING

    def wait(self) -> None:
        while not self.is_over():
            time.sleep(0.001)


class SlowPeerError(TransportError):
    """A read took too long and is being stopped; nothing of it can come any more once ``quiet`` is over."""

    def __init__(self, transfer: Transfer, quiet: Mark) -> None:
        what = f"{transfer.peer.name} did not answer a read of {transfer.num_bytes} bytes within {LONGEST_SECONDS:g} s."
        super().__init__(Reason.PEER_UNREACHABLE, what, "Check the prefill engine.")
        self.quiet = quiet


def _measure(transport: Transport, peer: Peer, remote: Region, stage: Stage, begin: int, num_bytes: int) -> Costs:
    """Measure with the first half of these bytes of the stage for long reads, the second for short ones."""
    half = num_bytes // 2
    address = stage.region.base_address + begin
    areas = np.linspace(0, remote.length - half, 1 + 3 * REPEAT).astype(np.uint64) // 64 * 64 + remote.base_address
    for landing in (address, address + half):
        _read(transport, peer, _whole(areas[0], landing, half))
    copies = measure_copies(stage, begin, num_bytes)
    # As many as a transport moves at its best: cma copies what is large by several threads.
    apart = [_small_pieces(area, address + half, half) for area in areas[1::3]]
    # The same pieces of here out of memory that is contiguous there, as heads are that are merged.
    joined = [_joined_there(area, rows) for area, rows in zip(areas[2::3], apart, strict=True)]
    fixed = min(_read(transport, peer, rows[:1]) for rows in apart)
    seconds, together = (min(_read(transport, peer, rows) for rows in lists) - fixed for lists in (apart, joined))
    whole = min(_read(transport, peer, _whole(area, address, half)) for area in areas[3::3]) - fixed
    num_pieces, num_small = len(apart[0]), int(apart[0][:, 2].sum())
    per_byte = max(min(whole / half, seconds / num_small, together / num_small), 1e-12)
    per_descriptor = max((min(together, seconds) - num_small * per_byte) / num_pieces, 1e-9)
    per_run = max((seconds - together) / num_pieces, 0.0)
    costs = Costs(transport.capabilities.name, per_descriptor, 1 / per_byte, *copies)
    return replace(costs, seconds_per_remote_run=per_run)


def _whole(remote: int, local: int, num_bytes: int) -> Descriptors:
    return np.array([[remote, local, num_bytes]], dtype=np.uint64)


def _small_pieces(remote: int, local: int, num_bytes: int) -> Descriptors:
    """Return pieces that no transport can merge: scattered, with gaps."""
    places = np.random.default_rng(0).permutation(num_bytes // (2 * PIECE_BYTES)).astype(np.uint64)
    offsets = places * np.uint64(2 * PIECE_BYTES)
    length = np.full(len(places), PIECE_BYTES, dtype=np.uint64)
    return np.stack((offsets + np.uint64(remote), offsets[::-1] + np.uint64(local), length), axis=1)


def _joined_there(remote: int, apart: Descriptors) -> Descriptors:
    """Return pieces of the same places here, which lie one behind the other there."""
    begins = np.arange(len(apart), dtype=np.uint64) * np.uint64(PIECE_BYTES) + np.uint64(remote)
    return np.stack((begins, apart[:, 1], apart[:, 2]), axis=1)


def _read(transport: Transport, peer: Peer, descriptors: Descriptors) -> float:
    started_at = time.perf_counter()
    transfer = transport.submit(peer, Direction.READ, descriptors)
    while transport.poll(transfer) is Status.PENDING:
        if time.perf_counter() - started_at > LONGEST_SECONDS:
            raise _stopped(transport, transfer)
    if transfer.error is not None:
        raise transfer.error
    return time.perf_counter() - started_at


def _stopped(transport: Transport, transfer: Transfer) -> SlowPeerError:
    """Stop a transfer and return the error that says so."""
    deadline = time.perf_counter() + LONGEST_SECONDS
    quiet = _Stopped(transport, transfer)
    while not quiet.is_over() and time.perf_counter() < deadline:
        time.sleep(0.001)
    return SlowPeerError(transfer, quiet)
