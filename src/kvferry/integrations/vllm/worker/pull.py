"""A worker's parts for pulls: guard words over this rank's cache, and guarded reads of other ranks' caches."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kvferry.execution.device import DeviceOrder, Mark
from kvferry.execution.guard_words import GuardWords, StepWords
from kvferry.execution.read import GuardedRead, Read
from kvferry.integrations.vllm.step import MAX_HELD_REQUESTS, LoadOrder, StepMetadata
from kvferry.integrations.vllm.worker.parts import Rank
from kvferry.layout.shard import Region


class PullSource:
    """Changes guard words before a step can touch the blocks that they guard."""

    num_words = MAX_HELD_REQUESTS

    def __init__(self, order: DeviceOrder) -> None:
        self._words = GuardWords(self.num_words)
        self._step_words = StepWords(self._words, order)

    @property
    def region(self) -> Region:
        """The memory of the guard words, to register beside the cache."""
        return Region(self._words.address, self._words.array.nbytes)

    def void_transfers(self, orders: StepMetadata) -> None:
        """Do nothing: no other request has blocks of ended holds before this step, so :meth:`begin_step` is in time."""

    def begin_step(self, orders: StepMetadata) -> None:
        """Clear the words of ended holds, then set those of the requests that this step writes."""
        self._step_words.begin(orders.ended_slots, orders.written)

    def finish_layer(self, name: str) -> None:
        """Do nothing: a pull reads whole prompts."""

    def finish_step(self) -> None:
        """Set the words of the written requests once the device has done the step."""
        self._step_words.finish()

    def take_steps(self) -> Sequence[Mapping[str, Any]]:
        """Return none: a pull's log needs no steps."""
        return ()

    def end_holds(self) -> None:
        """Clear every word, so that reads in progress fail."""
        self._step_words.close()

    def close(self) -> None:
        """Do nothing: :meth:`end_holds` has stopped all that runs."""


class PullDestination:
    """Reads the caches of the source ranks of a load's route."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def expect(self, order: LoadOrder, launched_before: Mark) -> None:
        """Do nothing: a read needs no announcement."""

    def start(self, order: LoadOrder, launched_before: Mark) -> None:
        """Read on the transfer thread."""
        deadline = time.monotonic() + order.timeout_seconds
        self._rank.executor.submit(Read(order.request_id, partial(self._reads, order, launched_before), deadline))

    def fail(self, order: LoadOrder) -> None:
        """Do nothing: the scheduler releases the hold when all ranks have reported."""

    def close(self) -> None:
        """Do nothing: reads end with the executor."""

    def _reads(self, order: LoadOrder, launched_before: Mark) -> Sequence[GuardedRead] | None:
        assert order.hold is not None
        if not launched_before.is_over():
            return None
        route = self._rank.source_engines.get(order.hold)
        return None if route is None else route.reads(order.hold, order.slot, order.blocks)
