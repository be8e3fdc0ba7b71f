"""A worker's parts for pulls: guard words over this rank's cache, and guarded reads of other ranks' caches.

Where reads are slow, the source writes what it holds instead: see docs/decisions/written-on-request.md.
"""

import time
from collections.abc import Sequence
from functools import partial

from kvferry.execution.destination import Announcer, Announcement, SourceRank
from kvferry.execution.device import DeviceOrder, Mark
from kvferry.execution.digests import DigestTable
from kvferry.execution.guard_words import GuardWords, StepWords
from kvferry.execution.on_request import HeldRequest, HeldWrites, OnRequest, transfer_id_of
from kvferry.execution.read import RankRead, Read
from kvferry.execution.source_engines import SourceEngine
from kvferry.execution.source import LATE_WORD_SECONDS
from kvferry.handoff.guard_word import HeldPrompt
from kvferry.handoff.messages import DigestTable as TableEntry
from kvferry.integrations.vllm.scheduler.blocks import group_name
from kvferry.integrations.vllm.step import PromptLoad, StepMetadata
from kvferry.integrations.vllm.worker.parts import Destination, Rank, Source
from kvferry.integrations.vllm.worker.push import RankEndPoint, make_writer
from kvferry.plan.layer_spans import LayerSpans


class PullSource(Source):
    """Changes guard words before a step can touch the blocks that they guard."""

    def __init__(self, order: DeviceOrder, words: GuardWords, table: DigestTable | None = None) -> None:
        self._table = table
        self._step_words = StepWords(words, order, None if table is None else self._keep_digests)
        self._end_point: RankEndPoint | None = None

    def write_on_request(self, rank: Rank, end_point: RankEndPoint, digests: TableEntry | None) -> None:
        """Write held prompts from now on, whenever a destination announces its blocks at the end point.

        The rank tells nobody of a hold before its first step.
        """
        self._end_point = end_point
        writer = make_writer(rank, end_point, LayerSpans({}), keeps_events=False, digests=digests, is_on_request=True)
        self._step_words.prompts = HeldWrites(writer, group_name)

    def void_transfers(self, orders: StepMetadata) -> None:
        """Clear the words of ended holds: before the step begins, vLLM may clear or copy into blocks that it has given
        away, and those of a hold that yields may be among them.
        """
        self._step_words.void(orders.ended_slots)

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

    def close(self) -> None:
        """Stop answering; where a write has not ended yet, the end point answers until the end of the process."""
        if self._end_point is not None and self._end_point.writer is not None:
            if self._end_point.writer.is_quiet:
                self._end_point.close()
            self._end_point.writer.close()

    def _keep_digests(self, prompt: HeldPrompt) -> None:
        assert self._table is not None, "a rank without a table keeps no digests"
        self._table.fill(prompt.num_tokens, {group_name(index): ids for index, ids in enumerate(prompt.block_ids)})


class PullDestination(Destination):
    """Loads from the caches of the source ranks of a load's route: reads them, or with an ``announcer`` lets the
    sources write where reads are slow, and always where that ``is_forced``.
    """

    def __init__(self, rank: Rank, announcer: Announcer | None = None, *, is_forced: bool = False) -> None:
        self._rank = rank
        self._on_request = None if announcer is None else OnRequest(announcer, is_forced=is_forced)
        self._announcer = announcer
        self._num_fences = 0

    def take_num_fences(self) -> int:
        """Return how many fences there were since the last call."""
        before, self._num_fences = self._num_fences, 0 if self._announcer is None else self._announcer.num_fences
        return self._num_fences - before

    def start(self, order: PromptLoad, launched_before: Mark) -> None:
        """Load on the transfer thread."""
        now = time.monotonic()
        deadline, late_seconds = now + order.timeout_seconds, LATE_WORD_SECONDS if order.is_late else 0.0
        reads = partial(self._reads, order, launched_before)
        read = Read(order.request_id, reads, deadline, now + late_seconds)
        # The hold of a turn yields to the steps of its engine.
        if self._on_request is None or order.pushed is None or order.is_optional:
            self._rank.executor.submit(read)
            return
        pushed = order.pushed
        request = Announcement(
            order.request_id,
            pushed.transfer_id,
            pushed.num_tokens,
            pushed.digest,
            deadline,
            pushed.adapter,
            late_seconds,
        )
        sources = partial(self._sources, order, launched_before)
        held = HeldRequest(request, partial(self._engine, order, launched_before), sources)
        self._rank.executor.submit(self._on_request.load(read, held))

    def _engine(self, order: PromptLoad, launched_before: Mark) -> SourceEngine | None:
        assert order.hold is not None
        return self._rank.source_engines.get(order.hold) if launched_before.is_over() else None

    def _reads(self, order: PromptLoad, launched_before: Mark) -> Sequence[RankRead] | None:
        assert order.hold is not None
        assert order.held is not None
        engine = self._engine(order, launched_before)
        return None if engine is None else engine.reads(order.hold, order.held, order.blocks)

    def _sources(self, order: PromptLoad, launched_before: Mark) -> Sequence[SourceRank] | None:
        assert order.held is not None
        engine = self._engine(order, launched_before)
        if engine is None:
            return None
        return engine.sources(transfer_id_of(order.held.word), order.blocks, is_held=True)
