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

    def take_back(self, orders: StepMetadata) -> None:
        """Blocks of ended holds are given away in this step at the earliest: :meth:`begin_step` is in time."""

    def begin_step(self, orders: StepMetadata) -> None:
        """Clear the words of ended holds, then set those of the requests that this step writes."""
        self._step_words.begin(orders.ended_slots, orders.written)

    def finish_layer(self, name: str) -> None:
        """A reader waits for the whole prompt."""

    def finish_step(self) -> None:
        """Let readers believe what the step wrote, once it is done on the device."""
        self._step_words.finish()

    def take_steps(self) -> Sequence[Mapping[str, Any]]:
        """A pull needs no record of the steps that computed its prompt."""
        return ()

    def end_holds(self) -> None:
        """Clear every word: a reader that is still reading fails."""
        self._step_words.close()

    def close(self) -> None:
        """Nothing runs but the step's words."""


class PullDestination:
    """Reads the caches of the source ranks that a load's route names."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def expect(self, order: LoadOrder, launched_before: Mark) -> None:
        """A read needs no announcement."""

    def start(self, order: LoadOrder, launched_before: Mark) -> None:
        """Read on the transfer thread."""
        deadline = time.monotonic() + order.timeout_seconds
        self._rank.executor.submit(Read(order.request_id, partial(self._reads, order, launched_before), deadline))

    def fail(self, order: LoadOrder) -> None:
        """The scheduler releases the hold when all ranks have reported."""

    def close(self) -> None:
        """Loads end with the executor."""

    def _reads(self, order: LoadOrder, launched_before: Mark) -> Sequence[GuardedRead] | None:
        assert order.hold is not None
        if not launched_before.is_over():
            return None
        route = self._rank.routes.get(order.hold)
        return None if route is None else route.reads(order.hold, order.slot, order.blocks)
