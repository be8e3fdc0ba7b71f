"""Two ranks of engines, each in a process of its own: one holds a prompt, the other loads it, read and written in turn.

``between_hosts.py`` starts both sides. A time is that of a whole load: guard words or announcement, data, "done".
"""

import json
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence

import numpy as np
from transport_movers import allocate

from kvferry.arrays import Bytes
from kvferry.execution.announce import Announcer, Announcement
from kvferry.execution.device import HOST
from kvferry.execution.executor import Executor
from kvferry.execution.guard_words import GuardWords, Held, Scratch, StepWords
from kvferry.execution.job import Job
from kvferry.execution.on_request import HeldRequest, HeldWrites, OnRequest, transfer_id_of
from kvferry.execution.own_rank import OwnRank
from kvferry.execution.read import Read
from kvferry.execution.source_engines import SourceEngines
from kvferry.execution.writer import Writer
from kvferry.handoff.guard_word import HeldPrompt, guard_word
from kvferry.handoff.messages import PROTOCOL_VERSION, Directory, EndPoint, Handle, Identity, RankEntry
from kvferry.handoff.remote_holds import RemoteHold
from kvferry.handoff.wire.client import Client
from kvferry.handoff.wire.server import Server
from kvferry.handoff.wire.trust import Trust
from kvferry.layout.dense import shard_for
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import Region, Shard, encode_shard
from kvferry.plan.layer_spans import LayerSpans
from kvferry.plan.request import GroupBlocks
from kvferry.transport.network import Network
from kvferry.transport.registry import TransportSet, open_transport

NUM_BLOCKS, BLOCK_SIZE, LAYERS, HEADS, HEAD_SIZE, ITEMSIZE = 64, 16, 16, 8, 128, 2
NUM_TOKENS = NUM_BLOCKS * BLOCK_SIZE
NUM_BYTES = NUM_TOKENS * LAYERS * HEADS * HEAD_SIZE * ITEMSIZE * 2
PIECES = {NamedLayout.BHLNC: NUM_BYTES // NUM_BLOCKS, NamedLayout.LBHNC: NUM_BYTES // NUM_BLOCKS // LAYERS}
"""Layouts, and the bytes of a block that lie side by side."""
IDENTITY = Identity("model", "weights", "model", "bfloat16", LAYERS, HEADS, HEAD_SIZE, "none", "bfloat16")
TRUST = Trust(anywhere=True)
SECONDS = 60.0


class Rank:
    """The parts of either side, which listens at ``address``."""

    def __init__(self, name: str, address: str, layout: NamedLayout, words: Sequence[Region] = ()) -> None:
        self.memory = allocate(2 * NUM_BYTES, huge=True)
        self.shard: Shard = shard_for(
            layers=[str(layer) for layer in range(LAYERS)],
            num_kv_heads=HEADS,
            head_size=HEAD_SIZE,
            itemsize=ITEMSIZE,
            block_size=BLOCK_SIZE,
            num_blocks=2 * NUM_BLOCKS,
            layout=layout,
            base_address=int(self.memory.ctypes.data),
        )
        self.scratch = Scratch(16)
        self.transports = TransportSet({name: open_transport(name, network=Network(address))})
        self.end_points = self.transports.register([*self.shard.regions, self.scratch.region, *words])
        self.executor, self.client = Executor(self.scratch), Client(TRUST)
        self.address = address

    def own(self, name: str) -> OwnRank:
        """Return the rank as its peers know it."""
        encoded = encode_shard(self.shard)
        return OwnRank(name, encoded, IDENTITY, self.end_points, self.transports, self.executor, HOST, self.client)


def scattered(seed: int) -> np.ndarray:
    """Return blocks in random order; every second one is left out, so that none lie side by side."""
    return np.random.default_rng(seed).permutation(np.arange(1, 2 * NUM_BLOCKS, 2))


def blocks_of(memory: Bytes, layout: str, blocks: np.ndarray) -> np.ndarray:
    """Return the bytes of blocks, in their order."""
    num_layers = LAYERS if NamedLayout(layout) is NamedLayout.LBHNC else 1
    return memory.reshape(num_layers, 2 * NUM_BLOCKS, -1)[:, blocks]


def prompt() -> HeldPrompt:
    """Return the held prompt."""
    return HeldPrompt("prompt", NUM_TOKENS, [BLOCK_SIZE], [scattered(1)])


def hold(name: str, layout: str, address: str) -> None:
    """Hold a prompt, print where, and wait for the end of the input."""
    words = GuardWords(num_slots=1)
    rank = Rank(name, address, NamedLayout(layout), [words.region])
    server = Server(address, 0, lambda question: writer.answer(question))
    epoch = secrets.randbits(40)
    encoded = encode_shard(rank.shard)
    writer = Writer(rank.own("p/0"), epoch, LayerSpans({}), keeps_events=False, is_on_request=True)
    step_words = StepWords(words, HOST)
    step_words.prompts = HeldWrites(writer, lambda _: "full")
    handle = Handle("a", secrets.randbits(60))
    step_words.begin([], [Held(0, guard_word("p", epoch, handle, prompt()), prompt())])
    where = EndPoint(address, server.port, epoch)
    entry = RankEntry(0, 0, encoded, rank.end_points, words.address, 1, held_end_point=where)
    directory = Directory(PROTOCOL_VERSION, "p", epoch, IDENTITY, (entry,))
    engine = Server(address, 0, lambda _: directory)
    named = {"port": engine.port, "epoch": epoch, "generation": handle.generation, "host": address}
    print(json.dumps(named), flush=True)
    sys.stdin.read()


def load(name: str, layout: str, repeat: str, address: str) -> None:
    """Load the prompt, read and written in turn; print the seconds of each way."""
    there = json.loads(sys.stdin.readline())
    rank = Rank(name, address, NamedLayout(layout))
    server = Server(address, 0, lambda question: announcer.answer(question))
    answers_at = EndPoint(address, server.port, secrets.randbits(40))
    engines = SourceEngines(rank.shard, IDENTITY, rank.transports, "d/0", SECONDS, trust=TRUST)
    announcer = Announcer(rank.own("d/0"), answers_at, SECONDS)
    jobs = Jobs(there, engines, announcer)
    # Both sides' memory begins with the same bytes.
    expected = blocks_of(rank.memory, layout, scattered(1)).copy()
    seconds: dict[str, list[float]] = {"read": [], "written": []}
    for number in range(2 * (int(repeat) + 1)):
        way = ("read", "written")[number % 2]
        rank.memory[:] = 0
        began_at = time.perf_counter()
        rank.executor.submit(jobs.read(number) if way == "read" else jobs.written(number))
        [result] = rank.executor.collect(SECONDS)
        taken = time.perf_counter() - began_at
        if result.error is not None:
            raise result.error
        assert (result.way, result.num_bytes) == (way, NUM_BYTES)
        assert np.array_equal(blocks_of(rank.memory, layout, scattered(2)), expected)
        if number >= 2:
            seconds[way].append(taken)
    print(json.dumps({"piece": PIECES[NamedLayout(layout)], "seconds": seconds}), flush=True)
    os._exit(0)


class Jobs:
    """Loads of the prompt that is held ``there``."""

    def __init__(self, there: Mapping[str, int], engines: SourceEngines, announcer: Announcer) -> None:
        handle = Handle("a", there["generation"])
        self._hold = RemoteHold("p", there["epoch"], str(there["host"]), there["port"], handle, is_trusted=True)
        self._held = Held(0, guard_word("p", there["epoch"], handle, prompt()))
        self._blocks = [
            GroupBlocks(
                group="full",
                first_token=0,
                last_token=NUM_TOKENS,
                source_block_ids=scattered(1),
                destination_block_ids=scattered(2),
            )
        ]
        self._engines, self._on_request = engines, OnRequest(announcer, is_forced=True)

    def read(self, number: int) -> Read:
        """Return a load that is read."""

        def reads() -> object:
            engine = self._engines.get(self._hold)
            return None if engine is None else engine.reads(self._hold, self._held, self._blocks)

        return Read(str(number), reads, time.monotonic() + SECONDS)  # type: ignore[arg-type]

    def written(self, number: int) -> Job:
        """Return a load that is written."""
        transfer_id = transfer_id_of(self._held.word)

        def sources() -> object:
            engine = self._engines.get(self._hold)
            return None if engine is None else engine.sources(transfer_id, self._blocks, is_held=True)

        push = Announcement(str(number), transfer_id, NUM_TOKENS, "prompt", time.monotonic() + SECONDS)
        request = HeldRequest(push, lambda: self._engines.get(self._hold), sources)  # type: ignore[arg-type]
        return self._on_request.load(self.read(number), request)


if __name__ == "__main__":
    {"hold": hold, "load": load}[sys.argv[1]](*sys.argv[2:])
