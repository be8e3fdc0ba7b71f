"""Prefill engines and decode ranks inside the test's process: real handshakes and plans, no vLLM."""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np
import pytest

from kvferry.errors import KVFerryError
from kvferry.execution.destination import Compares, SourceEngine, SourceEngines
from kvferry.execution.digests import Integrity
from kvferry.handoff.messages import (
    PROTOCOL_VERSION,
    Answer,
    Directory,
    DirectoryRequest,
    EndPoint,
    Handle,
    Identity,
    Question,
    RankEntry,
)
from kvferry.handoff.remote_holds import RemoteHold
from kvferry.handoff.wire.server import Server
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import Region, Shard, encode_shard
from kvferry.plan.match import GroupBlocks

from ..support.dense import shard_for
from ..waits import wait_until
from . import cache_memory

HOST, EPOCH, GENERATION = "127.0.0.1", 7, 3

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
    """A prefill engine in this process: ranks whose end points nobody answers, and a listener for handshakes."""

    def __init__(self, ranks: Sequence[HoldsCache], port: int = 0, integrity: Integrity = Integrity.OFF) -> None:
        self.epoch, self._integrity = EPOCH, integrity
        self.ranks = list(ranks)
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

    def directory(self, **changes: object) -> Directory:
        entries = tuple(
            RankEntry(
                tp_rank=rank.shard.tp_rank,
                pp_rank=rank.shard.pp_rank,
                shard=encode_shard(rank.shard),
                end_points={},
                answers_at=EndPoint(HOST, 1 + index, self.epoch),
                digests=self._integrity.value,
            )
            for index, rank in enumerate(self.ranks)
        )
        directory = Directory(PROTOCOL_VERSION, "p", self.epoch, IDENTITY, entries)
        return msgspec.structs.replace(directory, **changes)

    def hold(self, epoch: int | None = None) -> RemoteHold:
        return RemoteHold("p", epoch or self.epoch, HOST, self.listener.port, Handle("a", GENERATION))

    def close(self) -> None:
        self.may_answer.set()
        self.listener.close()


class DecodeRank:
    """One rank of a decode engine, which plans loads."""

    def __init__(self, rank: HoldsCache, timeout_seconds: float = 20.0, integrity: Integrity = Integrity.OFF) -> None:
        self.rank = rank
        self.engines = SourceEngines(rank.shard, IDENTITY, "d/0", timeout_seconds, compares=Compares(integrity))

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


def whole_blocks(group: str, source_ids: Sequence[int], destination_ids: Sequence[int]) -> GroupBlocks:
    """Return the request for a prompt that fills its blocks."""
    return GroupBlocks(
        group=group,
        first_token=0,
        last_token=len(source_ids) * BLOCK_SIZE,
        source_block_ids=source_ids,
        destination_block_ids=destination_ids,
    )
