"""The trial at start of offload on a device: labelled blocks of a rank's cache go to pinned host memory and back.

They go the way of any store and load: the engine's views, plans, pinned memory of a slab, the buffer for short pieces,
the driver's batches, and the transfer thread's streams and marks. So what no test without this machine's device can
show is shown on it before the engine says that it is ready.
"""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from kvferry.errors import KVFerryError, Reason, TransportError
from kvferry.execution.device import DeviceOrder
from kvferry.execution.device_gather import GatherBuffer, take_buffer
from kvferry.execution.executor import Executor
from kvferry.execution.local_copy import LocalCopy, LocalRoute, PinnedMemory
from kvferry.execution.trial import (
    TRIAL_SECONDS,
    LabelledBlocks,
    TrialResult,
    choose_blocks,
    late,
    small_cache,
    tier_shard,
    views_of,
)
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import Shard
from kvferry.tiers.slab_memory import SlabMemory

if TYPE_CHECKING:
    import torch


class SlabTrial:
    """The trial of one rank. ``views`` are the engine's own views of the layers, with the block as their first axis.

    ``executor`` is the rank's, on whose thread and stream all its copies run. An error names the ``layout``.
    """

    def __init__(
        self,
        shard: Shard,
        views: "Mapping[str, torch.Tensor]",
        order: DeviceOrder,
        executor: Executor,
        layout: NamedLayout,
        buffer: GatherBuffer | None = None,
    ) -> None:
        self._shard, self._views, self._order, self._executor, self._layout = shard, views, order, executor, layout
        self._buffer = buffer
        self._trips = choose_blocks(shard)
        self._is_quiet = True

    def run(self) -> TrialResult:
        """Move labelled blocks there and back; the blocks have their former bytes afterwards.

        Raises :class:`TransportError` (``trial-failed``): what differs or failed, and which setting to try.
        """
        began_at = time.monotonic()
        content = LabelledBlocks(self._views, self._shard, self._trips)
        away = tier_shard(self._shard, self._trips)
        memory = pinned = None
        try:
            memory = SlabMemory(away.regions[0].length)
            pinned = PinnedMemory(memory.region, self._order, self._buffer)
            slab = msgspec.structs.replace(away, regions=(memory.region,))
            content.label()
            labelled = self._order.mark()
            stores, loads = LocalRoute([self._shard], slab, own=[0]), LocalRoute([slab], self._shard, own=[0])
            out = [trip.request(trip.labelled, trip.away) for trip in self._trips]
            self._await(LocalCopy("trial store", stores, 0, out, labelled, pinned.copying, fills_blocks=False))
            back = [trip.request(trip.away, trip.returned) for trip in self._trips]
            if self._buffer is not None:
                # The load would find there what the store has gathered, also where the driver has copied nothing.
                self._buffer.clear()
            stored = self._order.mark()
            self._await(LocalCopy("trial load", loads, 0, back, stored, pinned.copying, fills_blocks=True))
            content.compare()
        except KVFerryError as error:
            raise self._failed(error) from error
        finally:
            content.restore()
            # Copies that do not end keep their memory until the end of the process.
            for each in (pinned, memory) if self._is_quiet else ():
                if each is not None:
                    each.close()
        return TrialResult("cuda", content.num_bytes, time.monotonic() - began_at)

    def _await(self, copy: LocalCopy) -> None:
        self._executor.submit(copy)
        results = self._executor.collect(TRIAL_SECONDS)
        if not results:
            self._is_quiet = self._executor.close()
            raise late()
        if results[0].error is not None:
            raise results[0].error

    def _failed(self, error: KVFerryError) -> TransportError:
        device = self._shard.regions[0].device
        where = f"{device}, layout {self._layout}, to pinned host memory and back"
        remedy = (
            f"{error.remedy} Another VLLM_KV_CACHE_LAYOUT may work: `kvferry doctor --device {device}` tries every one."
        )
        return TransportError(
            Reason.TRIAL_FAILED, f"the trial at start failed ({where}): {error.message}", remedy.strip()
        )


def try_offload(order: DeviceOrder, layout: NamedLayout) -> TrialResult:
    """Run the trial in a small cache of this layout, without an engine. Raises :class:`TransportError`."""
    order.enter_thread()
    shard, memory = small_cache(layout, order.device)
    executor = Executor(order=order)
    try:
        return SlabTrial(shard, views_of(shard), order, executor, layout, take_buffer(order)).run()
    finally:
        executor.close()
        del memory
