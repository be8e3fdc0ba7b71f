"""A worker's parts for pulls: guard words over this rank's cache, and guarded reads of other ranks' caches."""

import time
from collections.abc import Sequence
from functools import partial

from kvferry.execution.device import DeviceOrder, Mark
from kvferry.execution.digests import DigestTable
from kvferry.execution.guard_words import GuardWords, StepWords
from kvferry.execution.read import RankRead, Read
from kvferry.handoff.guard_word import HeldPrompt
from kvferry.integrations.vllm.step import MAX_HELD_REQUESTS, PromptLoad, StepMetadata
from kvferry.integrations.vllm.worker.parts import Destination, Rank, Source
from kvferry.layout.shard import Region

LATE_WORD_SECONDS = 10.0
"""How long a read waits for a word that comes with the prefill engine's next step: longer than a step takes."""


class PullSource(Source):
    """Changes guard words before a step can touch the blocks that they guard."""

    num_words = MAX_HELD_REQUESTS

    def __init__(self, order: DeviceOrder, table: DigestTable | None = None) -> None:
        self.words = GuardWords(self.num_words)
        self._table = table
        self._step_words = StepWords(self.words, order, None if table is None else self._keep_digests)

    @property
    def words_address(self) -> int:
        """Address of the first guard word."""
        return self.words.address

    @property
    def regions(self) -> list[Region]:
        """The memory of guard words and digests, to register beside the cache."""
        words = Region(self.words.address, self.words.array.nbytes)
        return [words] if self._table is None else [words, self._table.region]

    def begin_step(self, orders: StepMetadata) -> None:
        """Clear the words of ended holds, then set those of the requests that this step writes, and late ones.

        No other request has blocks of ended holds before this step.
        """
        self._step_words.begin(orders.ended_slots, orders.written, orders.late.values())

    def finish_step(self) -> None:
        """Set the words of the written requests once the device has done the step."""
        self._step_words.finish()

    def end_epoch(self, names: Sequence[str]) -> None:
        """Clear every word: all holds have ended."""
        self._step_words.clear_all()

    def end_holds(self) -> None:
        """Clear every word, so that reads in progress fail."""
        self._step_words.close()

    def _keep_digests(self, prompt: HeldPrompt) -> None:
        assert self._table is not None, "a rank without a table keeps no digests"
        self._table.fill(prompt.num_tokens, {str(index): ids for index, ids in enumerate(prompt.block_ids)})


class PullDestination(Destination):
    """Reads the caches of the source ranks of a load's route."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def start(self, order: PromptLoad, launched_before: Mark) -> None:
        """Read on the transfer thread."""
        now = time.monotonic()
        reads = partial(self._reads, order, launched_before)
        word_by = now + LATE_WORD_SECONDS if order.is_late else now
        self._rank.executor.submit(Read(order.request_id, reads, now + order.timeout_seconds, word_by))

    def _reads(self, order: PromptLoad, launched_before: Mark) -> Sequence[RankRead] | None:
        assert order.hold is not None
        assert order.held is not None
        if not launched_before.is_over():
            return None
        route = self._rank.source_engines.get(order.hold)
        return None if route is None else route.reads(order.hold, order.held, order.blocks)
