"""The trial at start: labelled blocks of a rank's cache go to a second agent of the same process, and come back.

They go the way of any load: engine's views, plan, transport and digests, in the transfer thread's device order. So what
no test without this machine's device can show is shown on it before the engine says that it is ready. The engine
writes, and so does the second agent. Where there is no engine, as for ``kvferry doctor --device``, a small cache of
one layout takes its place (:func:`try_device`).
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from kvferry.errors import HandoffError, KVFerryError, Reason, TransportError
from kvferry.execution.device import DeviceOrder
from kvferry.execution.digests import Integrity, PartCells, PartDigests, WrittenDigests
from kvferry.execution.memory import as_bytes, placed
from kvferry.handoff.messages import WriteKey
from kvferry.handoff.source import BlockList, Cut, Part, announced_blocks
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import CacheKind, Shard
from kvferry.layout.slab import slab_shard
from kvferry.models.groups import AttentionCache, RankMemory, form_groups, model_shard
from kvferry.peer_log import PeerLog
from kvferry.plan.match import GroupBlocks
from kvferry.plan.planner import PairPlan, Planner
from kvferry.transport.protocol import Direction, Status
from kvferry.transport.registry import TransportSet

if TYPE_CHECKING:
    import torch

logger = PeerLog(logging.getLogger(__name__))

TRIAL_SECONDS = 10.0
"""Limit of one move of the trial; all moves together take less than a second where nothing is wrong."""
BLOCKS_EACH = 2
"""Blocks of each cache group that are labelled; of a state one."""


class Side(NamedTuple):
    """One of the two sides of the trial: its cache, registered with ``transports``."""

    shard: Shard
    transports: TransportSet
    end_points: Mapping[str, bytes]

    def close(self) -> None:
        """Close the transports."""
        self.transports.close()


def open_side(shard: Shard, opens: Callable[[], TransportSet]) -> Side:
    """Return a side with this cache. Raises the errors of ``opens`` and of registration."""
    transports = opens()
    try:
        end_points = transports.register(shard.regions)
    except BaseException:
        transports.close()
        raise
    return Side(shard, transports, end_points)


class Trip(NamedTuple):
    """Blocks of one cache group: labelled ones of the engine, those of the second agent, and where they come back."""

    group: str
    num_tokens: int
    labelled: Sequence[int]
    away: Sequence[int]
    returned: Sequence[int]

    def request(self, source: Sequence[int], destination: Sequence[int]) -> GroupBlocks:
        """Return the blocks of a move out or back."""
        return GroupBlocks(
            group=self.group,
            first_token=0,
            last_token=self.num_tokens,
            source_block_ids=source,
            destination_block_ids=destination,
        )


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The transport, and how many bytes went there and back in how many seconds."""

    transport: str
    num_bytes: int
    seconds: float


class Trial:
    """The trial of one rank. ``views`` are the engine's own views of the layers, with the block as their first axis.

    ``opens`` opens the second agent's transports. An error names the ``layout``. Digests are compared as ``integrity``
    says.
    """

    def __init__(
        self,
        engine: Side,
        views: "Mapping[str, torch.Tensor]",
        order: DeviceOrder,
        opens: Callable[[], TransportSet],
        layout: NamedLayout,
        integrity: Integrity = Integrity.OFF,
    ) -> None:
        self._engine, self._views, self._order, self._opens = engine, views, order, opens
        self._layout, self._integrity = layout, integrity
        self._trips = choose_blocks(engine.shard)
        self._transport = "none"

    def run(self) -> TrialResult:
        """Move labelled blocks there and back; the blocks have their former bytes afterwards.

        Raises :class:`TransportError` (``trial-failed``): what differs or failed, and which setting to try.
        """
        began_at = time.monotonic()
        content = LabelledBlocks(self._views, self._engine.shard, self._trips)
        second = None
        try:
            # The memory must live as long as it is registered.
            shard, memory = placed(tier_shard(self._engine.shard, self._trips), self._order.device)
            second = open_side(shard, self._opens)
            content.label()
            launched, deadline = self._order.mark(), time.monotonic() + TRIAL_SECONDS
            while not launched.is_over():
                _wait(deadline)
            self._write(self._engine, second, [trip.request(trip.labelled, trip.away) for trip in self._trips])
            self._write(second, self._engine, [trip.request(trip.away, trip.returned) for trip in self._trips])
            content.compare()
        except KVFerryError as error:
            raise self._failed(error) from error
        finally:
            content.restore()
            if second is not None:
                second.close()
                del memory
        return TrialResult(self._transport, content.num_bytes, time.monotonic() - began_at)

    def _write(self, source: Side, destination: Side, blocks: Sequence[GroupBlocks]) -> None:
        deadline = time.monotonic() + TRIAL_SECONDS
        connecting = source.transports.connect(destination.end_points)
        while (link := connecting.poll()) is None:
            _wait(deadline)
        self._transport = link.name
        for plan in Planner([source.shard], destination.shard).proved_plans(0):
            transfer = link.transport.submit(link.peer, Direction.WRITE, plan.lower(blocks))
            while link.transport.poll(transfer) is Status.PENDING:
                _wait(deadline)
            if transfer.error is not None:
                raise transfer.error
            self._compare_digests(plan, blocks)
        link.close()

    def _compare_digests(self, plan: PairPlan, blocks: Sequence[GroupBlocks]) -> None:
        """Raise :class:`HandoffError` (integrity-mismatch) unless both ranks find the same digests."""
        if self._integrity is Integrity.OFF:
            return
        part, key = Part(plan, announced_blocks(plan, blocks)), WriteKey("trial", 1, 1)
        held = {each.group: BlockList(0, each.source_ids.tolist()) for each in blocks}
        batch = tuple(Cut(span, need.first_token, need.end_token) for span, need in part.needs.items())
        written, landed = (
            PartDigests(PartCells(plan, self._integrity, at_source=at_source), part.announced, key)
            for at_source in (True, False)
        )
        digests = WrittenDigests(written)
        digests.begin(part.cuts(batch, held))
        while not digests.advance():
            pass
        digests.changed_pages()
        digests.landed()
        for _ in landed.compare(digests.encoded()):
            pass

    def _failed(self, error: KVFerryError) -> TransportError:
        device = self._engine.shard.regions[0].device
        if error.reason is Reason.INTEGRITY_MISMATCH:
            remedy = 'Set "integrity" to "off" to see whether the bytes or their sums are wrong, and report it.'
        else:
            remedy = (
                f'Try another VLLM_KV_CACHE_LAYOUT or "transport" (`kvferry doctor --device {device}` tries every '
                f"layout), and leave UCX_TLS unset. {error.remedy}"
            )
        where = f"{device}, layout {self._layout}, transport {self._transport}"
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
            (layer, block): views[layer][block].clone()
            for name, layer in self._layers
            for block in (*self._trips[name].labelled, *self._trips[name].returned)
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


LAYERS, NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, HEAD_SIZE, ITEMSIZE = ("0", "1", "2", "3"), 8, 8, 16, 128, 2
"""Numbers of two bytes."""


def try_device(order: DeviceOrder, layout: NamedLayout, *, opens: Callable[[], TransportSet]) -> TrialResult:
    """Run the trial of a rank with a small cache of this layout.

    Raises :class:`TransportError` (``trial-failed``), and the errors of ``opens`` and of registration.
    """
    order.enter_thread()
    shard, memory = small_cache(layout, order.device)
    side = open_side(shard, opens)
    try:
        return Trial(side, views_of(shard), order, opens, layout, Integrity.FULL).run()
    finally:
        side.close()
        del memory


def small_cache(layout: NamedLayout, device: str) -> "tuple[Shard, torch.Tensor]":
    """Return a dense cache on a device, and its memory, which lives as long as the tensor."""
    cache = AttentionCache(num_kv_heads=NUM_HEADS, head_size=HEAD_SIZE, itemsize=ITEMSIZE)
    memory = RankMemory(layout=layout, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    return placed(model_shard(form_groups(dict.fromkeys(LAYERS, cache)), frozenset(LAYERS), memory), device)


def views_of(shard: Shard) -> "Mapping[str, torch.Tensor]":
    """Return the views of an engine: for each layer ``[block, head, token, channel]`` in numbers of two bytes."""
    import torch

    component = shard.groups[0].components[0]
    numbers = as_bytes(shard.regions[0]).view(torch.int16)
    strides = (component.block_stride, component.head_stride, component.token_stride, component.channel_stride)
    shape = NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, component.num_channels
    in_numbers = tuple(stride // ITEMSIZE for stride in strides)
    return {
        layer: torch.as_strided(numbers, shape, in_numbers, offset // ITEMSIZE)
        for layer, offset in zip(component.layers, component.layer_offsets, strict=True)
    }
