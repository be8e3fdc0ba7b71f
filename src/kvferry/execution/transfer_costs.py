"""What moving costs here, measured in some ten milliseconds on a peer's own memory, and the choice that follows."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from kvferry.errors import Reason, TransportError
from kvferry.execution.staging import Stage
from kvferry.plan.describe import describe_choice
from kvferry.plan.staged import Merge, ScatterPlan
from kvferry.plan.strategy import TYPICAL_COSTS, Choice, Costs, Strategy, choose
from kvferry.plan.transfer_plan import PairPlan
from kvferry.transport.protocol import Descriptors, Direction, Peer, Region, Status, Transfer, Transport

logger = logging.getLogger(__name__)

PROBE_BYTES = 8 << 20
PIECE_BYTES = 2 << 10
SMALL_COPIES = 64
REPEAT = 3
LONGEST_SECONDS = 1.0


class Strategist:
    """Chooses for each pair of ranks, with costs that were given or are measured once for each transport.

    Without a stage, or with the wish for it, everything goes directly.
    """

    def __init__(
        self, stage: Stage | None = None, wish: Strategy | None = None, costs: Mapping[str, Costs] | None = None
    ) -> None:
        self.stage, self._wish = stage, wish
        self._costs = dict(costs or {})

    def scatter_plan(self, plan: PairPlan, transport: Transport, peer: Peer) -> ScatterPlan | None:
        """Return the plan by way of the stage where that is the choice, None for the direct way.

        Raises :class:`PlanError` (``unsupported``) for a strategy that was wished for and cannot be had.
        """
        choice = self.choice(plan, transport, peer)
        if choice is None or choice.chosen.strategy is Strategy.DIRECT:
            return None
        return ScatterPlan(plan, choice.chosen.gap_bytes)

    def choice(self, plan: PairPlan, transport: Transport, peer: Peer) -> Choice | None:
        """Return the choice and what was rejected; None where there is nothing to choose."""
        if self.stage is None:
            return None
        name, size = transport.capabilities.name, self.stage.region.length
        typical = TYPICAL_COSTS.get(name, replace(TYPICAL_COSTS["nixl"], transport=name))
        choice = choose(plan, self._costs.get(name, typical), self._wish, size)
        better = [found for found in choice.rejected if found.num_descriptors < choice.chosen.num_descriptors]
        if self._wish is None and name not in self._costs and (better or choice.chosen.strategy is Strategy.SCATTER):
            # Measured only where a stage could save descriptors: most pairs need none.
            measured = measure_costs(transport, peer, plan.source.regions, self.stage)
            if measured is not None:
                self._costs[name] = measured
                choice = choose(plan, measured, self._wish, size)
        logger.info("kvferry: %s to %s %s", plan.source.rank_name, plan.destination.rank_name, describe_choice(choice))
        return choice


def measure_costs(transport: Transport, peer: Peer, regions: Sequence[Region], stage: Stage) -> Costs | None:
    """Measure over a connection, by reading the peer's caches into the stage; what they hold is ignored.

    Returns None while the stage or the peer has no room for that. Raises :class:`TransportError` where the peer does
    not answer.
    """
    owner = object()
    remote = max(regions, key=lambda region: region.length)
    num_bytes = min(PROBE_BYTES, remote.length, stage.region.length) // (4 * PIECE_BYTES) * 4 * PIECE_BYTES
    begin = stage.take(owner, num_bytes) if num_bytes else None
    is_quiet = True
    try:
        return None if begin is None else _measure(transport, peer, remote, stage, begin, num_bytes)
    except _StillMovingError:
        is_quiet = False
        raise
    finally:
        # Memory into which bytes may still come is never given to another.
        if is_quiet:
            stage.give_back(owner)


class _StillMovingError(TransportError):
    """A transfer was stopped but is not quiet."""


def _measure(transport: Transport, peer: Peer, remote: Region, stage: Stage, begin: int, num_bytes: int) -> Costs:
    address = stage.region.base_address + begin
    whole = np.array([[remote.base_address, address, num_bytes]], dtype=np.uint64)
    per_byte = _best(lambda: _read(transport, peer, whole)) / num_bytes
    small = _small_pieces(remote.base_address, address, num_bytes)
    pieces = _best(lambda: _read(transport, peer, small)) - int(small[:, 2].sum()) * per_byte
    per_descriptor = max(pieces / len(small), 1e-9)
    return Costs(transport.capabilities.name, per_descriptor, 1 / per_byte, *_copy_costs(stage, begin, num_bytes))


def _small_pieces(remote: int, local: int, num_bytes: int) -> Descriptors:
    """Return pieces that no transport can merge: scattered, with gaps."""
    places = np.random.default_rng(0).permutation(num_bytes // (2 * PIECE_BYTES)).astype(np.uint64)[:1024]
    offsets = places * np.uint64(2 * PIECE_BYTES)
    length = np.full(len(places), PIECE_BYTES, dtype=np.uint64)
    return np.stack((offsets + np.uint64(remote), offsets[::-1] + np.uint64(local), length), axis=1)


def _copy_costs(stage: Stage, begin: int, num_bytes: int) -> tuple[float, float, float]:
    """Return bytes a second, seconds for each run and for each copy, within memory of the stage."""
    half, run = num_bytes // 2, PIECE_BYTES
    address = stage.region.base_address + begin
    one = np.zeros(1, dtype=np.int64)
    whole = Merge(begin, half, address + half, half, one, half, ())
    # Short runs, so that what each costs shows.
    short = Merge(begin, half, address + half, half, one, run // 32, ((half // run, run, run),))
    tiny = Merge(begin, 64, address + half, 64, one, 64, ())
    copying = _best(lambda: _copy(stage, whole, 1)) / half
    each = _best(lambda: _copy(stage, tiny, SMALL_COPIES)) / SMALL_COPIES
    runs = _best(lambda: _copy(stage, short, 1)) - each
    return 1 / copying, max(runs / (half // run), 1e-10), each


def _copy(stage: Stage, merge: Merge, times: int) -> float:
    started_at = time.perf_counter()
    for _ in range(times):
        stage.put_in_place([merge]).wait()
    return time.perf_counter() - started_at


def _best(measure: Callable[[], float]) -> float:
    """Measure once to touch the memory, then take the shortest: other work only ever adds."""
    measure()
    return min(measure() for _ in range(REPEAT))


def _read(transport: Transport, peer: Peer, descriptors: Descriptors) -> float:
    started_at = time.perf_counter()
    transfer = transport.submit(peer, Direction.READ, descriptors)
    while transport.poll(transfer) is Status.PENDING:
        if time.perf_counter() - started_at > LONGEST_SECONDS:
            raise _stopped(transport, transfer)
    if transfer.error is not None:
        raise transfer.error
    return time.perf_counter() - started_at


def _stopped(transport: Transport, transfer: Transfer) -> TransportError:
    """Stop a transfer and return the error that says so."""
    deadline = time.perf_counter() + LONGEST_SECONDS
    while transport.cancel(transfer) is Status.PENDING and time.perf_counter() < deadline:
        time.sleep(0.001)
    kind = _StillMovingError if transfer.status is Status.PENDING else TransportError
    what = f"{transfer.peer.name} did not answer a read of {transfer.num_bytes} bytes within {LONGEST_SECONDS:g} s."
    return kind(Reason.PEER_UNREACHABLE, what, "Check the prefill engine.")
