"""Prefill engines that hold prompts and write them on request, and decode ranks that load them, without vLLM."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvferry.execution.destination import FENCE_SECONDS, Announcer, Announcement
from kvferry.execution.digests import DigestTable
from kvferry.execution.guard_words import GuardWords, Held, StepWords
from kvferry.execution.job import JobResult
from kvferry.execution.on_request import HeldRequest, HeldWrites, OnRequest, transfer_id_of
from kvferry.execution.pair_cells import pushed_digests
from kvferry.execution.read import Read
from kvferry.execution.source_engines import Compares, SourceEngines
from kvferry.execution.stage import Stage
from kvferry.execution.source import Writer
from kvferry.handoff.guard_word import HeldPrompt, guard_word
from kvferry.handoff.messages import PROTOCOL_VERSION, Directory, Handle, RankEntry
from kvferry.handoff.remote_holds import RemoteHold
from kvferry.handoff.wire.server import Server
from kvferry.layout.shard import encode_shard
from kvferry.plan.digest_cells import Integrity
from kvferry.plan.layer_spans import LayerSpans
from kvferry.plan.request import GroupBlocks
from kvferry.transport.end_points import ProcessIdentity
from kvferry.transport.faults import FaultPlan

from ..waits import wait_until
from . import cache_memory
from .engines_in_process import BLOCK_SIZE, EPOCH, GENERATION, HOST, IDENTITY, SLOT, HoldsCache
from .engines_that_write import SECONDS, Parts

PROMPT = "prompt"


class HoldingRank(Parts):
    """A rank that holds prompts under guard words, with digests, and writes them on request unless ``only_read``."""

    def __init__(
        self,
        rank: HoldsCache,
        faults: FaultPlan | None = None,
        transport: str = "cma",
        process: ProcessIdentity | None = None,
        integrity: Integrity = Integrity.OFF,
        only_read: bool = False,
        group_names: Sequence[str] = ("full",),
    ) -> None:
        super().__init__(rank, faults, transport)  # type: ignore[arg-type]
        self.group_names = list(group_names)
        self.words = GuardWords(num_slots=4)
        self.table = None if integrity is Integrity.OFF else DigestTable(rank.shard, integrity)
        fill = None if self.table is None else self._fill
        self.step_words = StepWords(self.words, cache_memory.caches.order, fill)
        regions = [self.words.region]
        regions += [] if self.table is None else self.table.regions
        self.end_points = self.transports.register(regions)
        shard = encode_shard(rank.shard)
        self.answerer = self.writer = Writer(
            self.own("p"),
            self.epoch,
            LayerSpans({}),
            keeps_events=True,
            digests=pushed_digests(integrity),
            is_on_request=True,
        )
        self.step_words.prompts = HeldWrites(self.writer, self.group_names.__getitem__)
        self.entry = RankEntry(
            rank.shard.tp_rank,
            rank.shard.pp_rank,
            shard,
            self.end_points,
            self.words.address,
            len(self.words.array),
            process=process,
            digests=self.table and self.table.entry,
            held_end_point=None if only_read else self.answers_at,
        )

    def _fill(self, prompt: HeldPrompt) -> None:
        assert self.table is not None
        self.table.fill(prompt.num_tokens, dict(zip(self.group_names, prompt.block_ids, strict=True)))

    def close(self) -> None:
        self.step_words.close()
        super().close()


class HoldingEngine:
    def __init__(
        self, ranks: Sequence[HoldsCache], faults: Mapping[int, FaultPlan] | None = None, **more: object
    ) -> None:
        """``faults`` are those of ranks, by their index."""
        self.ranks = [
            HoldingRank(rank, (faults or {}).get(index), **more)  # type: ignore[arg-type]
            for index, rank in enumerate(ranks)
        ]
        self.num_handshakes = 0
        self.listener = Server(HOST, 0, lambda _: self.directory())

    def directory(self) -> Directory:
        self.num_handshakes += 1
        return Directory(PROTOCOL_VERSION, "p", EPOCH, IDENTITY, tuple(rank.entry for rank in self.ranks))

    def hold(self, request_id: str = "a") -> RemoteHold:
        return RemoteHold("p", EPOCH, HOST, self.listener.port, Handle(request_id, GENERATION))

    def held(self, prompt: HeldPrompt, slot: int = SLOT, request_id: str = "a") -> Held:
        """Return the hold of a prompt as a decode engine knows it."""
        return Held(slot, guard_word("p", EPOCH, Handle(request_id, GENERATION), prompt), prompt)

    def step(self, written: Sequence[Held] = (), ended: Sequence[int] = (), late: Sequence[Held] = ()) -> None:
        """One step of every rank, which ends the holds of slots, and computes or holds others."""
        for rank in self.ranks:
            rank.step_words.begin(ended, written, late)
            rank.step_words.finish()

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.listener.close()


class LoadingRank(Parts):
    """A decode rank; ``is_forced`` is its setting "write", else it chooses."""

    def __init__(
        self,
        rank: HoldsCache,
        transport: str = "cma",
        is_forced: bool = True,
        fence_seconds: float = FENCE_SECONDS,
        integrity: Integrity = Integrity.OFF,
        name: str = "d/0",
        slow_reads: str = "",
    ) -> None:
        """``slow_reads`` is what the transport says of its reads."""
        super().__init__(rank, transport=transport)  # type: ignore[arg-type]
        opened: Any = self.transports.transports[transport]
        if slow_reads:
            opened.capabilities = replace(opened.capabilities, slow_reads=slow_reads)
        self.digests = Stage(1 << 20)
        self.end_points = self.transports.register([self.digests.region])
        compares = None if integrity is Integrity.OFF else Compares(integrity, self.digests)
        self.engines = SourceEngines(rank.shard, IDENTITY, self.transports, name, SECONDS, compares=compares)
        self.fences: list[dict[str, bytes]] = []
        self.answerer = self.announcer = Announcer(
            self.own(name),
            self.answers_at,
            SECONDS,
            keeps_events=True,
            fence_seconds=fence_seconds,
            on_fence=self._note_fence,
        )
        self.on_request = OnRequest(self.announcer, is_forced=is_forced)

    def _note_fence(self, _: int, end_points: dict[str, bytes]) -> None:
        self.fences.append(end_points)
        self.engines.connect_anew()

    def load(
        self,
        hold: RemoteHold,
        held: Held,
        blocks: Sequence[GroupBlocks],
        job_id: str = "r",
        seconds: float = SECONDS,
        late_seconds: float = 0.0,
    ) -> None:
        """Begin to load a held prompt of ``held.prompt``'s tokens."""
        assert held.prompt is not None
        now, transfer_id = time.monotonic(), transfer_id_of(held.word)

        def engine() -> object:
            return self.engines.get(hold)

        def reads() -> object:
            found = self.engines.get(hold)
            return None if found is None else found.reads(hold, held, blocks)

        def sources() -> object:
            found = self.engines.get(hold)
            return None if found is None else found.sources(transfer_id, blocks, is_held=True)

        read = Read(job_id, reads, now + seconds, now + late_seconds)  # type: ignore[arg-type]
        prompt = held.prompt
        push = Announcement(
            job_id, transfer_id, prompt.num_tokens, prompt.prompt_digest, now + seconds, "", late_seconds
        )
        request = HeldRequest(push, engine, sources)  # type: ignore[arg-type]
        self.executor.submit(self.on_request.load(read, request))

    def result(self, seconds: float = SECONDS) -> JobResult:
        [result] = wait_until(self.executor.collect, "no load ends", seconds=seconds)
        return result

    def is_waiting(self, seconds: float = 0.15) -> bool:
        time.sleep(seconds)
        return not self.executor.collect()

    def close(self) -> None:
        super().close()
        self.engines.close()


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> "Iterator[Engines]":
    opened = Engines(monkeypatch)
    yield opened
    opened.close()


class Engines:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.opened: list[HoldingEngine | LoadingRank] = []

    def open(
        self, sources: Sequence[HoldsCache], targets: Sequence[HoldsCache], **more: object
    ) -> tuple[HoldingEngine, list[LoadingRank]]:
        """``more`` goes to both sides, to one of them with ``source_`` or ``target_`` before its name."""
        both = {name: value for name, value in more.items() if not name.startswith(("source_", "target_"))}
        sides = []
        for side in ("source_", "target_"):
            own = {name.removeprefix(side): value for name, value in more.items() if name.startswith(side)}
            sides.append({**both, **own})
        engine = HoldingEngine(sources, **sides[0])  # type: ignore[arg-type]
        self.opened.append(engine)
        loading = [LoadingRank(rank, **sides[1]) for rank in targets]  # type: ignore[arg-type]
        self.opened += loading
        return engine, loading

    def close(self) -> None:
        for each in self.opened:
            each.close()


def prompt_in(ids: Sequence[int], digest: str = PROMPT) -> HeldPrompt:
    """Return a prompt that fills these blocks of the one group."""
    return HeldPrompt(digest, len(ids) * BLOCK_SIZE, [BLOCK_SIZE], [np.array(ids)])
