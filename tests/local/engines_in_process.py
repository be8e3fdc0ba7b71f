"""Prefill engines and decode ranks inside the test's process: real handshakes, guard words and bytes, no vLLM."""

import threading
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Protocol

import msgspec
import numpy as np
import pytest

from kvferry.errors import KVFerryError
from kvferry.execution.digests import DigestTable
from kvferry.execution.guard_words import GuardWords, Held, Scratch
from kvferry.execution.job import JobResult, Phase
from kvferry.execution.read import RankRead, Read
from kvferry.execution.source_engines import Compares, SourceEngine, SourceEngines
from kvferry.execution.stage import Stage
from kvferry.handoff.guard_word import HeldPrompt, guard_word
from kvferry.handoff.messages import (
    PROTOCOL_VERSION,
    Answer,
    Directory,
    DirectoryRequest,
    Handle,
    Identity,
    Question,
    RankEntry,
)
from kvferry.handoff.remote_holds import RemoteHold
from kvferry.handoff.wire.server import Server
from kvferry.layout.dense import shard_for
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import Shard, encode_shard
from kvferry.plan.digest_cells import Integrity
from kvferry.plan.request import GroupBlocks
from kvferry.plan.staging.strategy import Strategy
from kvferry.transport.protocol import Region
from kvferry.transport.registry import TransportSet, open_transports

from ..waits import wait_until
from . import cache_memory

HOST, EPOCH, GENERATION, SLOT = "127.0.0.1", 7, 3, 1


def word_of(epoch: int = EPOCH, generation: int = GENERATION) -> bytes:
    """Return the guard word of a hold of engine "p", for any prompt."""
    return guard_word("p", epoch, Handle("a", generation), HeldPrompt("digest", 1, [], []))


WORD = word_of()
HELD = Held(SLOT, WORD)
IDENTITY = Identity("model", "weights", "Qwen3ForCausalLM", "float32", 2, 4, 8, "none", "float32")
LAYERS, HEADS, HEAD_SIZE, ITEMSIZE, BLOCK_SIZE, NUM_BLOCKS = ["0", "1"], 4, 8, 4, 4, 6
ROW_BYTES = len(LAYERS) * HEADS * BLOCK_SIZE * HEAD_SIZE * 2 * ITEMSIZE


def filled_ranks(tp_size: int = 2, layout: NamedLayout = NamedLayout.BHLNC) -> "list[Rank]":
    """Return the ranks of a prefill engine, each filled with its own bytes."""
    return [Rank(tp_rank, tp_size, layout=layout).fill() for tp_rank in range(tp_size)]


class HoldsCache(Protocol):
    """A rank of either engine: its shard and its memory."""

    shard: Shard

    @property
    def regions(self) -> list[Region]: ...


class Rank:
    """Memory of one rank; in ``BHLNC`` a block's row is its heads one after the other."""

    def __init__(
        self,
        tp_rank: int,
        tp_size: int,
        layers: Sequence[str] = LAYERS,
        layout: NamedLayout = NamedLayout.BHLNC,
    ) -> None:
        self.cache, address, device = cache_memory.caches.allocate((NUM_BLOCKS, ROW_BYTES // min(tp_size, HEADS)))
        self.tp_rank = tp_rank
        self.shard: Shard = shard_for(
            layers=layers,
            num_kv_heads=HEADS,
            head_size=HEAD_SIZE,
            itemsize=ITEMSIZE,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            layout=layout,
            tp_rank=tp_rank,
            tp_size=tp_size,
            base_address=address,
            device=device,
        )

    @property
    def regions(self) -> list[Region]:
        return list(self.shard.regions)

    def fill(self) -> "Rank":
        """Fill the memory with bytes of this rank alone."""
        self.cache[:] = np.random.default_rng(self.tp_rank).integers(0, 256, self.cache.shape, dtype=np.uint8)
        return self


class PrefillEngine:
    """A prefill engine in this process: filled ranks, each with guard words, and a listener for handshakes."""

    def __init__(
        self,
        transport: str,
        ranks: Sequence[HoldsCache],
        port: int = 0,
        integrity: Integrity = Integrity.OFF,
    ) -> None:
        self.epoch = EPOCH
        self.transports = open_transports(transport)
        self.ranks = list(ranks)
        self.words = [GuardWords(num_slots=4) for _ in ranks]
        self.begin_hold()
        regions = [region for rank in ranks for region in rank.regions]
        regions += [words.region for words in self.words]
        self.tables = [] if integrity is Integrity.OFF else [DigestTable(rank.shard, integrity) for rank in ranks]
        regions += [region for table in self.tables for region in table.regions]
        self.end_points = self.transports.register(regions)
        self.answer: Callable[[Question], Answer] = lambda question: self.directory()
        self.num_handshakes = 0
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.listener = Server(HOST, port, self._answer)

    def _answer(self, question: Question) -> Answer:
        assert isinstance(question, DirectoryRequest)
        self.num_handshakes += 1
        self.may_answer.wait(20)
        return self.answer(question)

    def begin_hold(self) -> None:
        """Write the guard words of the hold, as every rank does when a prefill begins."""
        for words in self.words:
            words.set(SLOT, word_of(self.epoch))

    def digest(self, num_tokens: int, source_ids: Sequence[int]) -> None:
        """Fill the digests of a prompt in these blocks, as every rank does when the prompt has been computed."""
        for table in self.tables:
            table.fill(num_tokens, {"full": np.array(source_ids)})

    def directory(self, **changes: object) -> Directory:
        entries = tuple(
            RankEntry(
                tp_rank=rank.shard.tp_rank,
                pp_rank=rank.shard.pp_rank,
                shard=encode_shard(rank.shard),
                end_points=self.end_points,
                words_address=words.address,
                num_words=len(words.array),
                digests=table and table.entry,
            )
            for rank, words, table in zip_longest(self.ranks, self.words, self.tables)
        )
        directory = Directory(PROTOCOL_VERSION, "p", self.epoch, IDENTITY, entries)
        return msgspec.structs.replace(directory, **changes)

    def hold(self, epoch: int | None = None) -> RemoteHold:
        return RemoteHold("p", epoch or self.epoch, HOST, self.listener.port, Handle("a", GENERATION))

    def close(self) -> None:
        self.may_answer.set()
        self.listener.close()
        self.transports.close()


class DecodeRank:
    """One rank of a decode engine."""

    def __init__(
        self,
        transport: str,
        rank: HoldsCache,
        timeout_seconds: float = 20.0,
        strategy: Strategy | None = Strategy.DIRECT,
        stage_bytes: int = 1 << 16,
        integrity: Integrity = Integrity.OFF,
    ) -> None:
        self.rank = rank
        stage, self.digests = Stage(stage_bytes, cache_memory.caches.order), Stage(1 << 16)
        self.scratch = Scratch(num_words=16)
        self.transports: TransportSet = open_transports(transport)
        self.transports.register([*rank.regions, self.scratch.region, stage.region, self.digests.region])
        compares = None if integrity is Integrity.OFF else Compares(integrity, self.digests)
        self.engines = SourceEngines(
            rank.shard, IDENTITY, self.transports, "d/0", timeout_seconds, stage, strategy, compares=compares
        )

    def close(self) -> None:
        self.engines.close()
        self.transports.close()

    def engine(self, hold: RemoteHold) -> SourceEngine:
        """Poll until the handshake has ended."""
        engine = wait_until(lambda: self.engines.get(hold), "the handshake does not end")
        return engine

    def refusal(self, hold: RemoteHold) -> KVFerryError:
        """Poll until the handshake has failed."""
        with pytest.raises(KVFerryError) as caught:
            self.engine(hold)
        return caught.value

    def forget_failures(self) -> None:
        """As if ``FAILURE_SECONDS`` had passed."""
        self.engines._handshakes._known.clear()

    def load(self, hold: RemoteHold, source_ids: list[int], destination_ids: list[int]) -> JobResult:
        """Load whole blocks of the one group."""
        return self.load_blocks(hold, [whole_blocks("full", source_ids, destination_ids)])

    def load_blocks(self, hold: RemoteHold, blocks: Sequence[GroupBlocks]) -> JobResult:
        load = self.start(hold, blocks)
        while load.phase is not Phase.DONE:
            if not load.advance(self.scratch, time.monotonic()):
                time.sleep(0.001)
        return load.result(time.monotonic())

    def start(self, hold: RemoteHold, blocks: Sequence[GroupBlocks], seconds: float = 30.0) -> Read:
        """Return a load before its first turn."""

        def prepare() -> list[RankRead] | None:
            engine = self.engines.get(hold)
            return (
                None
                if engine is None
                else engine.reads(hold, Held(SLOT, word_of(hold.epoch, hold.handle.generation)), blocks)
            )

        return Read("a", prepare, deadline=time.monotonic() + seconds)


def whole_blocks(group: str, source_ids: Sequence[int], destination_ids: Sequence[int]) -> GroupBlocks:
    """Return the request for a prompt that fills its blocks."""
    return GroupBlocks(
        group=group,
        first_token=0,
        last_token=len(source_ids) * BLOCK_SIZE,
        source_block_ids=source_ids,
        destination_block_ids=destination_ids,
    )
