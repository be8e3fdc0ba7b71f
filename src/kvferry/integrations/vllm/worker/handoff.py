"""A worker's parts for the handoff: writes out of this rank's cache, and announcements of blocks that sources write."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvferry.execution.destination import Announcement, Announcer, SourceEngines, SourceRank
from kvferry.execution.device import Mark
from kvferry.execution.own_rank import OwnRank
from kvferry.execution.source import Writer
from kvferry.handoff.holds import TRANSFER_GENERATION, engine_drains
from kvferry.handoff.messages import Answer, EndPoint, Question, Release, WriteFailed, Written
from kvferry.handoff.source import Prompt
from kvferry.handoff.wire.server import Server
from kvferry.handoff.wire.trust import Keys
from kvferry.integrations.vllm.step import EPOCH_BITS, PromptLoad, StepMetadata
from kvferry.plan.digest_cells import Integrity
from kvferry.plan.planner import LayerSpans


@dataclass(frozen=True)
class Rank(OwnRank):
    """One rank, which the role and its parts share."""

    source_engines: SourceEngines


class RankEndPoint:
    """The control end point of a rank: its source part answers announcements, its destination part reports."""

    def __init__(self, host: str, reachable_host: str, ports: range, keys: Keys | None) -> None:
        self.writer: Writer | None = None
        self.announcer: Announcer | None = None
        self._server = Server(host, ports, self._answer, keys=keys)
        self.answers_at = EndPoint(reachable_host, self._server.port, secrets.randbits(EPOCH_BITS))

    def close(self) -> None:
        """Stop answering; twice is fine."""
        self._server.close()

    def _answer(self, question: Question) -> Answer:
        part = self.announcer if isinstance(question, Written | WriteFailed) else self.writer
        assert part is not None, "no peer knows this end point before both parts are there"
        return part.answer(question)


class Source:
    """Writes this rank's computed blocks into the blocks that destination ranks announce."""

    def __init__(
        self,
        rank: Rank,
        end_point: RankEndPoint,
        spans: LayerSpans,
        digests: Integrity,
        *,
        keeps_events: bool,
        why_silent: Callable[[], str],
    ) -> None:
        self._end_point = end_point
        self._prompts: Sequence[tuple[str, Prompt]] = ()
        self.writer = end_point.writer = Writer(
            rank,
            end_point.answers_at.epoch,
            spans,
            keeps_events=keeps_events,
            digests=digests,
            why_silent=why_silent,
        )

    def void_transfers(self, orders: StepMetadata) -> None:
        """Void the writes out of blocks that the step may overwrite, before the step writes any block: vLLM may clear
        or copy into blocks that it has given away, and those of a hold that yields may be among them.
        """
        self.writer.engine = None if orders.engine is None else orders.engine.where
        self.writer.preempt(orders.preempted)
        self.writer.end(orders.ended_transfers)
        self.writer.end(orders.refused_transfers, engine_drains)

    def begin_step(self, orders: StepMetadata) -> None:
        """The step is about to run: tell the writer what earlier steps have computed, and which prompts the step
        computes layer by layer.
        """
        if orders.held:
            self.writer.hold(orders.held)
        self._prompts = [*orders.prompts, *orders.finished]
        self.writer.begin_step(orders.prompts)

    def finish_layer(self, name: str) -> None:
        """The step has launched an attention layer: let a span of which it was the last be written."""
        self.writer.reach(name)

    def finish_step(self) -> None:
        """The step has launched all of its writes: let the tokens that it has computed be written."""
        self.writer.compute(self._prompts)

    def take_steps(self) -> Sequence[Mapping[str, Any]]:
        """Return the steps for the transfer log that have ended since the last call."""
        return self.writer.take_steps()

    def close(self) -> None:
        """Stop answering, once the executor has stopped; where a write has not ended yet, the end point answers until
        the end of the process.
        """
        if self.writer.is_quiet:
            self._end_point.close()
        self.writer.close()


class Destination:
    """Announces the blocks of a load to the source ranks, and waits until all have written their parts."""

    def __init__(
        self, rank: Rank, end_point: RankEndPoint, answer_seconds: float, fence_seconds: float, *, keeps_events: bool
    ) -> None:
        self._rank = rank
        self._answer_seconds = answer_seconds
        self._num_fences = 0
        self.announcer = end_point.announcer = Announcer(
            rank, end_point.answers_at, answer_seconds, keeps_events=keeps_events, fence_seconds=fence_seconds
        )

    def take_num_fences(self) -> int:
        """Return how many fences there were since the last call."""
        before, self._num_fences = self._num_fences, self.announcer.num_fences
        return self._num_fences - before

    def load(self, order: PromptLoad, launched_before: Mark) -> None:
        """Announce the blocks, which sources may fill once ``launched_before`` is over."""
        assert order.announced is not None
        assert order.hold is not None
        announced = order.announced
        announcement = Announcement(
            order.request_id,
            announced.transfer_id,
            announced.num_tokens,
            announced.digest,
            time.monotonic() + order.timeout_seconds,
            order.hold.epoch,
            announced.adapter,
            order.late_seconds,
        )
        self.announcer.announce(announcement, partial(self._sources, order, launched_before))

    def fail(self, order: PromptLoad) -> None:
        """The load has failed in this rank: release a router's transfer, so that the loads of this engine's other ranks
        fail too instead of waiting for the prompt.
        """
        if (hold := order.hold) is not None and hold.handle.generation == TRANSFER_GENERATION:
            release, seconds = Release(hold.epoch, (hold.handle,)), self._answer_seconds
            self._rank.client.tell(hold.host, hold.port, release, seconds, is_trusted=hold.is_trusted)

    def _sources(self, order: PromptLoad, launched_before: Mark) -> Sequence[SourceRank] | None:
        assert order.hold is not None
        assert order.announced is not None
        if not launched_before.is_over():
            return None
        engine = self._rank.source_engines.get(order.hold)
        if engine is None:
            return None
        if order.hold.handle.generation != TRANSFER_GENERATION:  # of a transfer the engine itself has offered both
            engine.check_parameters(order.hold.engine_id, order.source_block_sizes)
        return engine.sources(order.announced.transfer_id, order.blocks)
