"""Engines that write to each other inside the test's process: real listeners, messages, plans and writes, no vLLM."""

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvferry.execution import destination
from kvferry.execution.destination import NOTHING_COMPARED, Announcement, Announcer, Compares, SourceEngines
from kvferry.execution.digests import Integrity
from kvferry.execution.executor import Executor, JobResult
from kvferry.execution.peers import OwnRank
from kvferry.execution.source import Writer
from kvferry.handoff.handshake import NO_ADAPTER, Adapter
from kvferry.handoff.holds import transfer_of
from kvferry.handoff.messages import PROTOCOL_VERSION, Answer, Directory, EndPoint, Handle, Noted, Question, RankEntry
from kvferry.handoff.remote_holds import RemoteHold
from kvferry.handoff.source import BlockList, Prompt
from kvferry.handoff.wire.client import Client
from kvferry.handoff.wire.server import Server
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import encode_shard
from kvferry.plan.planner import SHORT_TOKENS, LayerSpans
from kvferry.transport.protocol import ProcessIdentity
from kvferry.transport.registry import TransportSet, open_transport

from ..support.faults import FaultPlan, FaultyTransport
from ..waits import wait_until
from . import cache_memory
from .engines_in_process import BLOCK_SIZE, EPOCH, HOST, IDENTITY, LAYERS, Rank, filled_ranks, whole_blocks

SECONDS = 20.0
FENCE_SECONDS = 60.0
TRANSFER, HELD = Handle("x", 0), Handle("x", 0x2B)
"""The handles of a router's transfer and of a hold of the prefill engine."""


class Batches(Enum):
    """The batches in which a prompt is written."""

    WHOLE = "a short prompt"
    CHUNKS = "layers that do not tell when they have run"
    SPANS = "each layer"


class Parts:
    """The parts of every rank: transports, a transfer thread, a client and a listener."""

    def __init__(self, rank: Any, faults: FaultPlan | None = None, transport: str = "cma") -> None:
        self.rank = rank
        opened = open_transport(transport)
        self.transports = TransportSet({transport: opened if faults is None else FaultyTransport(opened, faults)})
        self.end_points = self.transports.register(rank.regions)
        self.executor = Executor(order=cache_memory.caches.order)
        self.client = Client()  # each rank is a sender or a receiver
        self.epoch = secrets.randbits(40)
        self.listener = Server(HOST, 0, lambda question: self.answerer.answer(question))

    @property
    def answers_at(self) -> EndPoint:
        return EndPoint(HOST, self.listener.port, self.epoch)

    def own(self, name: str) -> OwnRank:
        return OwnRank(
            name,
            encode_shard(self.rank.shard),
            IDENTITY,
            self.end_points,
            self.transports,
            self.executor,
            cache_memory.caches.order,
            self.client,
        )

    def close(self) -> None:
        self.executor.close()
        self.listener.close()
        self.client.close()
        self.transports.close()


def recorded_questions(rank: Parts) -> list[Question]:
    """Return the questions that the rank is asked from now on, as they come."""
    asked: list[Question] = []
    answerer = rank.answerer

    def answer(question: Question) -> Answer:
        asked.append(question)
        return answerer.answer(question)

    rank.answerer = SimpleNamespace(answer=answer)
    return asked


class SendingRank(Parts):
    def __init__(
        self,
        rank: Any,
        faults: FaultPlan | None,
        batches: Batches,
        transport: str = "cma",
        process: ProcessIdentity | None = None,
        integrity: Integrity = Integrity.OFF,
    ) -> None:
        super().__init__(rank, faults, transport)
        shard = encode_shard(rank.shard)
        spans = LayerSpans({} if batches is Batches.CHUNKS else {"full": LAYERS}, layers_per_span=1)
        short_tokens = SHORT_TOKENS if batches is Batches.WHOLE else 0
        self.answerer = self.writer = Writer(
            self.own("p"), self.epoch, spans, keeps_events=True, short_tokens=short_tokens, digests=integrity
        )
        self.entry = RankEntry(
            rank.shard.tp_rank,
            rank.shard.pp_rank,
            shard,
            self.end_points,
            self.answers_at,
            process=process,
            digests=integrity.value,
        )


@contextmanager
def questions_to_own_engine(rank: SendingRank) -> Iterator[list[Question]]:
    """Give the rank an engine's scheduler to ask, and yield what it asks."""
    asked: list[Question] = []

    def answer(question: Question) -> Noted:
        asked.append(question)
        return Noted(EPOCH)

    with closing(Server(HOST, 0, answer)) as engine:
        rank.writer.engine = EndPoint(HOST, engine.port, EPOCH)
        yield asked


class SendingEngine:
    def __init__(
        self,
        tp_size: int,
        faults: FaultPlan | None,
        batches: Batches,
        layout: NamedLayout = NamedLayout.BHLNC,
        transport: str = "cma",
        process: ProcessIdentity | None = None,
        integrity: Integrity = Integrity.OFF,
        ranks: Sequence[Any] = (),
    ) -> None:
        """``process`` stands for the processes of the ranks, which are in this one; ``ranks`` are others than those of
        one pipeline stage.
        """
        every = ranks or filled_ranks(tp_size, layout)
        self.ranks = [SendingRank(rank, faults, batches, transport, process, integrity) for rank in every]
        entries = tuple(rank.entry for rank in self.ranks)
        self.listener = Server(HOST, 0, lambda _: Directory(PROTOCOL_VERSION, "p", EPOCH, IDENTITY, entries))

    def hold(self, handle: Handle = TRANSFER) -> RemoteHold:
        return RemoteHold("p", EPOCH, HOST, self.listener.port, handle)

    def compute(
        self,
        num_final: int,
        ids: Sequence[int],
        transfer_id: str = "x",
        digest: str = "prompt",
        adapter: Adapter = NO_ADAPTER,
    ) -> None:
        num_tokens = len(ids) * BLOCK_SIZE
        for rank in self.ranks:
            prompt = Prompt(num_tokens, digest, {"full": BlockList(0, ids)}, num_final, adapter)
            rank.writer.compute([(transfer_id, prompt)])

    def written(self, count: int) -> list[JobResult]:
        """Return the results of so many writes, from the first rank's own report."""
        results: list[JobResult] = []
        end = time.monotonic() + SECONDS
        while len(results) < count:
            assert time.monotonic() < end, "not so many writes end"
            results += self.ranks[0].executor.collect()
            time.sleep(0.002)
        return results

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.listener.close()


class ReceivingRank(Parts):
    def __init__(
        self,
        rank: Any,
        engine_id: str = "d",
        transport: str = "cma",
        fence_seconds: float = FENCE_SECONDS,
        compares: Compares = NOTHING_COMPARED,
    ) -> None:
        super().__init__(rank, transport=transport)
        self.engines = SourceEngines(rank.shard, IDENTITY, engine_id, SECONDS, compares=compares)
        name = f"{engine_id}/{rank.shard.tp_rank}"
        self.answerer = self.announcer = Announcer(
            self.own(name), self.answers_at, SECONDS, fence_seconds, keeps_events=True
        )

    def receive(
        self,
        hold: RemoteHold,
        ids: Sequence[int],
        transfer_id: str = "",
        job_id: str = "r",
        seconds: float = SECONDS,
        adapter: str = "",
        late_seconds: float = 0.0,
    ) -> None:
        """Load what is held, or what has this transfer id."""
        transfer_id = transfer_id or transfer_of(hold.handle)
        blocks = [whole_blocks("full", [0] * len(ids), ids)]
        deadline, num_tokens = time.monotonic() + seconds, len(ids) * BLOCK_SIZE
        request = Announcement(job_id, transfer_id, num_tokens, "prompt", deadline, hold.epoch, adapter, late_seconds)

        def find() -> list[destination.SourceRank] | None:
            engine = self.engines.get(hold)
            return None if engine is None else engine.sources(transfer_id, blocks)

        self.announcer.announce(request, find)

    def result(self, seconds: float = SECONDS) -> JobResult:
        results = wait_until(self.executor.collect, "no load ends", seconds=seconds)
        [result] = results
        return result

    def is_waiting(self, seconds: float = 0.15) -> bool:
        time.sleep(seconds)
        return not self.executor.collect()


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> "Iterator[Pairs]":
    # Ranks that are said to be on another host are in this process, where loopback reaches them.
    monkeypatch.setattr(destination, "is_on_this_host", lambda _: True)
    pairs = Pairs()
    yield pairs
    pairs.close()


class Pairs:
    def __init__(self) -> None:
        self.senders: list[SendingEngine] = []
        self.receivers: list[ReceivingRank] = []

    def open(
        self,
        source_tp: int = 1,
        target_tp: int = 1,
        faults: FaultPlan | None = None,
        batches: Batches = Batches.CHUNKS,
        layout: NamedLayout = NamedLayout.BHLNC,
        transport: str = "cma",
        process: ProcessIdentity | None = None,
        fence_seconds: float = FENCE_SECONDS,
        kept: Integrity = Integrity.OFF,
        compares: Compares = NOTHING_COMPARED,
        target_layout: NamedLayout | None = None,
    ) -> tuple[SendingEngine, list[ReceivingRank]]:
        """``kept`` are the digests that the senders have, ``compares`` what the receivers compare."""
        self.senders.append(SendingEngine(source_tp, faults, batches, layout, transport, process, kept))
        ranks = [Rank(tp_rank, target_tp, layout=target_layout or layout) for tp_rank in range(target_tp)]
        more = {"transport": transport, "fence_seconds": fence_seconds, "compares": compares}
        self.receivers = [ReceivingRank(rank, **more) for rank in ranks]  # type: ignore[arg-type]
        return self.senders[-1], self.receivers

    def close(self) -> None:
        for each in [*self.senders, *self.receivers]:
            each.close()


def check_arrived(sender: SendingEngine, receivers: list[ReceivingRank], source: list[int], target: list[int]) -> None:
    """Heads of a block's row lie one after the other, so ranks' rows join to the model's row."""
    sent = np.concatenate([rank.rank.cache[source] for rank in sender.ranks], axis=1)
    arrived = np.concatenate([rank.rank.cache[target] for rank in receivers], axis=1)
    assert np.array_equal(arrived, sent)
