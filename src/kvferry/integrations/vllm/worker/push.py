"""A worker's parts for pushes: writes out of this rank's cache, and announcements of blocks that source ranks write."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kvferry.execution.destination import Announcer, Announcement, SourceRank
from kvferry.execution.device import Mark
from kvferry.execution.source import Writer
from kvferry.handoff.holds import engine_drains
from kvferry.handoff.messages import Answer, DigestTable, EndPoint, Met, Written, WriteFailed, Question, Release
from kvferry.handoff.source import Prompt
from kvferry.handoff.wire.keys import Keys
from kvferry.handoff.wire.server import Server
from kvferry.integrations.vllm.step import EPOCH_BITS, PromptLoad, StepMetadata
from kvferry.integrations.vllm.worker.parts import Destination, Rank, Source
from kvferry.plan.layer_spans import LayerSpans


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
        part = self.announcer if isinstance(question, Written | WriteFailed | Met) else self.writer
        assert part is not None, "no peer knows this end point before both parts are there"
        return part.answer(question)


def make_announcer(
    rank: Rank,
    end_point: RankEndPoint,
    answer_seconds: float,
    fence_seconds: float,
    keeps_events: bool,
    on_fence: Callable[[int, dict[str, bytes]], None] = lambda *_: None,
) -> Announcer:
    """Return the announcer of a rank, which answers at the end point."""
    end_point.announcer = Announcer(
        rank,
        end_point.answers_at,
        answer_seconds,
        keeps_events=keeps_events,
        fence_seconds=fence_seconds,
        on_fence=on_fence,
    )
    return end_point.announcer


def make_writer(
    rank: Rank,
    end_point: RankEndPoint,
    spans: LayerSpans,
    *,
    keeps_events: bool,
    digests: DigestTable | None,
    why_silent: Callable[[], str] = lambda: "",
    is_on_request: bool = False,
) -> Writer:
    """Return the writer of a rank, which answers at the end point."""
    end_point.writer = Writer(
        rank,
        end_point.answers_at.epoch,
        spans,
        keeps_events=keeps_events,
        digests=digests,
        why_silent=why_silent,
        is_on_request=is_on_request,
    )
    return end_point.writer


class PushSource(Source):
    """Writes this rank's computed blocks into the blocks that destination ranks announce."""

    def __init__(
        self,
        rank: Rank,
        end_point: RankEndPoint,
        spans: LayerSpans,
        keeps_events: bool,
        digests: DigestTable | None = None,
        why_silent: Callable[[], str] = lambda: "",
    ) -> None:
        self._end_point = end_point
        self._prompts: Sequence[tuple[str, Prompt]] = ()
        self.writer = make_writer(
            rank, end_point, spans, keeps_events=keeps_events, digests=digests, why_silent=why_silent
        )

    def void_transfers(self, orders: StepMetadata) -> None:
        """Void the writes out of blocks that the step may overwrite."""
        self.writer.engine = None if orders.engine is None else orders.engine.where
        self.writer.preempt(orders.preempted)
        self.writer.end(orders.ended_transfers)
        self.writer.end(orders.refused_transfers, engine_drains)

    def begin_step(self, orders: StepMetadata) -> None:
        """Tell the writer which prompts the step computes, layer by layer."""
        self._prompts = orders.prompts
        self.writer.begin_step(orders.prompts)

    def finish_layer(self, name: str) -> None:
        """Let a span whose last layer has run be written."""
        self.writer.reach(name)

    def finish_step(self) -> None:
        """Let the tokens that the step has computed be written."""
        self.writer.compute(self._prompts)

    def take_steps(self) -> Sequence[Mapping[str, Any]]:
        """Return the steps that computed pushed prompts, where events are kept."""
        return self.writer.take_steps()

    def end_epoch(self, names: Sequence[str]) -> None:
        """Void the writes of these transfers."""
        self.writer.end(names)

    def close(self) -> None:
        """Stop answering; where a write has not ended yet, the end point answers until the end of the process."""
        if self.writer.is_quiet:
            self._end_point.close()
        self.writer.close()


class PushDestination(Destination):
    """Announces the blocks of a load to the source ranks, and waits until all have written their parts."""

    def __init__(
        self, rank: Rank, end_point: RankEndPoint, answer_seconds: float, fence_seconds: float, keeps_events: bool
    ) -> None:
        self._rank = rank
        self._answer_seconds = answer_seconds
        self._num_fences = 0
        self.announcer = make_announcer(rank, end_point, answer_seconds, fence_seconds, keeps_events)

    def take_num_fences(self) -> int:
        """Return how many fences there were since the last call."""
        before, self._num_fences = self._num_fences, self.announcer.num_fences
        return self._num_fences - before

    def expect(self, order: PromptLoad, launched_before: Mark) -> None:
        """Announce the blocks before the step computes: the source may be computing the prompt already."""
        assert order.pushed is not None
        deadline = time.monotonic() + order.timeout_seconds
        pushed = order.pushed
        request = Announcement(
            order.request_id, pushed.transfer_id, pushed.num_tokens, pushed.digest, deadline, pushed.adapter
        )
        self.announcer.announce(request, partial(self._sources, order, launched_before))

    def fail(self, order: PromptLoad) -> None:
        """Release the hold, so that the pushes to this engine's other ranks fail too instead of waiting."""
        if (hold := order.hold) is not None:
            release, seconds = Release(hold.epoch, (hold.handle,)), self._answer_seconds
            self._rank.client.tell(hold.host, hold.port, release, seconds, is_trusted=hold.is_trusted)

    def _sources(self, order: PromptLoad, launched_before: Mark) -> Sequence[SourceRank] | None:
        assert order.hold is not None
        assert order.pushed is not None
        if not launched_before.is_over():
            return None
        route = self._rank.source_engines.get(order.hold)
        return None if route is None else route.sources(order.pushed.transfer_id, order.blocks)
