"""Whatever bytes arrive, nothing but a refusal comes of them: no other error, no memory that grows, no deaf server.

:mod:`tests.fuzzed_messages` says how long these tests take, and how one long run is started.
"""

import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from threading import Thread
from typing import Any

import msgspec
import pytest

from kvferry.errors import KVFerryError
from kvferry.handoff import messages as protocol
from kvferry.handoff.handshake import decode_shards
from kvferry.handoff.messages import Answer, Directory, Noted, Question, Release
from kvferry.handoff.source import END, BlockList, Prompt
from kvferry.handoff.wire import bootstrap
from kvferry.handoff.wire.client import ask
from kvferry.handoff.wire.server import Server
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import Region, decode_shard, encode_shard
from kvferry.tiers.disk.segments import RECORD_BYTES, RecordHeader, SegmentShape, read_table
from kvferry.tiers.protocol import KEY_BYTES
from kvferry.transport.cma import CmaTransport
from kvferry.transport.mooncake import MooncakeEndPoint
from kvferry.transport.nixl import NixlEndPoint
from kvferry.transport.protocol import ProcessEndPoint, decode_end_point

from ..fuzzed_messages import Fuzzer, run
from ..support.dense import shard_for
from .engines_in_process import BLOCK_SIZE
from .engines_that_write import Batches, Pairs, ReceivingRank, check_arrived

HOST = "127.0.0.1"
SHARD = shard_for(
    layers=["0", "1"], num_kv_heads=2, head_size=8, itemsize=2, block_size=4, num_blocks=10, layout=NamedLayout.BHLNC
)


def test_messages_decode_or_are_refused() -> None:
    """Of every kind of message: whole, with wrong fields, damaged, and random bytes."""

    def case(fuzzer: Fuzzer) -> None:
        if fuzzer.random.random() < 0.7:
            protocol.encode(protocol.decode_question(fuzzer.encoded(Question)))
        else:
            protocol.encode(protocol.decode_answer(fuzzer.encoded(Answer)))

    number = run(case, 0.4, allowed=KVFerryError)
    print(f"{number} messages")


def test_directories_and_shards_of_peers_are_taken_or_refused() -> None:
    encoded = encode_shard(SHARD)

    def case(fuzzer: Fuzzer) -> None:
        draw = fuzzer.random.random()
        if draw < 0.4:
            fuzzer.last = fuzzer.damaged(encoded)
            decode_shard(fuzzer.last)
        elif draw < 0.8:
            fuzzer.last = msgspec.msgpack.encode(fuzzer.ill_formed(SHARD))
            decode_shard(fuzzer.last)
        else:
            directory = fuzzer.valid(Directory)
            directory = msgspec.structs.replace(directory, ranks=directory.ranks[:4])
            decode_shards(directory)

    run(case, 0.1, known=[encoded, 0, 1, 2], allowed=KVFerryError)


def test_end_points_of_transports_are_taken_or_refused() -> None:
    transport = CmaTransport()
    end_point = transport.register([Region(1 << 20, 1 << 12)])
    kinds: dict[str, Any] = {"cma": ProcessEndPoint, "nixl": NixlEndPoint, "mooncake": MooncakeEndPoint}

    def case(fuzzer: Fuzzer) -> None:
        name = fuzzer.random.choice(list(kinds))
        fuzzer.last = fuzzer.damaged(end_point) if fuzzer.random.random() < 0.5 else fuzzer.random.randbytes(50)
        decode_end_point(fuzzer.last, kinds[name], name)

    try:
        run(case, 0.05, allowed=KVFerryError)
    finally:
        transport.close()


def test_records_of_a_disk_are_read_or_counted_as_damaged() -> None:
    shape = SegmentShape(1, 4096, 4)
    rows = b"".join(RecordHeader(cell, bytes(KEY_BYTES), 4000, 7, cell).pack(1) for cell in range(4))
    header = shape.pack()

    def case(fuzzer: Fuzzer) -> None:
        fuzzer.last = table = fuzzer.damaged(rows).ljust(4 * RECORD_BYTES, b"\0")[: 4 * RECORD_BYTES]
        headers, refused = read_table(table, shape)
        assert len(headers) + sum(refused.values()) <= 4
        assert all(each.key == bytes(KEY_BYTES) and each.checksum == 7 for each in headers), "a forged record is taken"
        fuzzer.last = fuzzer.damaged(header)
        SegmentShape.unpack(fuzzer.last)

    run(case, 0.05, allowed=KVFerryError)


class Answering:
    """Answers every bootstrap query with what the test says."""

    def __init__(self) -> None:
        self.body, self.head = b"", b"HTTP/1.1 200 OK\r\n\r\n"
        self._socket = socket.create_server((HOST, 0), backlog=64)
        self.address = f"http://{HOST}:{self._socket.getsockname()[1]}"

    def answer(self) -> None:
        """Answer the next query."""
        connected, _ = self._socket.accept()
        with connected, suppress(OSError):
            connected.sendall(self.head + self.body)

    def close(self) -> None:
        self._socket.close()


def test_answers_of_a_bootstrap_server_are_taken_or_refused() -> None:
    server = Answering()
    offer = {"engine_id": "p@7", "kvferry": None}
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"

    def case(fuzzer: Fuzzer) -> None:
        entry = {**offer, "kvferry": msgspec.to_builtins(fuzzer.valid(bootstrap.Offer))}
        body = msgspec.json.encode({"0": entry})
        draw = fuzzer.random.random()
        if draw < 0.3:
            body = fuzzer.damaged(body)
        elif draw < 0.35:
            body = b"[" * 60_000
        elif draw < 0.4:
            body = b'{"0": {"engine_id": "' + b"\xff\xfe" + b'"}}'
        server.head = fuzzer.damaged(head) if 0.4 < draw < 0.7 else head
        server.body = fuzzer.last = body
        answering = Thread(target=server.answer)
        answering.start()
        try:
            bootstrap.query(server.address)
        finally:
            answering.join()

    try:
        run(case, 0.05, allowed=KVFerryError)
    finally:
        server.close()


@pytest.fixture
def answering() -> Iterator[Server]:
    def answer(question: Question) -> Answer:
        return Noted(question.epoch if isinstance(question, Release) else 1)

    server = Server(HOST, 0, answer)
    yield server
    server.close()


def test_a_server_answers_beside_fuzzed_frames(answering: Server) -> None:
    """Frames with wrong lengths, wrong messages, cut in the middle, and bytes that are no frames."""
    latencies: list[float] = []

    def case(fuzzer: Fuzzer) -> None:
        frames = []
        for _ in range(fuzzer.random.choice((1, 2, 20))):
            data = fuzzer.encoded(Question)
            length = len(data) if fuzzer.random.random() < 0.8 else fuzzer.random.choice((0, 1, len(data) + 5, 1 << 31))
            frames.append(length.to_bytes(4, "big") + fuzzer.random.randbytes(8) + data)
        fuzzer.last = sent = b"".join(frames) if fuzzer.random.random() < 0.9 else fuzzer.damaged(b"".join(frames))
        with suppress(OSError), socket.create_connection((HOST, answering.port), timeout=20) as peer:
            peer.sendall(sent)
            if fuzzer.random.random() < 0.5:
                peer.settimeout(0.02)
                peer.recv(1 << 16)
        if fuzzer.random.random() < 0.05:
            began_at = time.monotonic()
            assert ask(HOST, answering.port, Release(7, ()), timeout_seconds=20) == Noted(7)
            latencies.append(time.monotonic() - began_at)

    run(case, 0.15)
    assert ask(HOST, answering.port, Release(7, ()), timeout_seconds=20) == Noted(7)
    assert len(answering._connections) < 600


def test_ranks_that_push_survive_well_formed_messages_with_random_fields() -> None:
    """A hostile peer introduces, announces, revokes and reports; then a rank that it does not know is pushed to."""
    pairs = Pairs()
    try:
        sender, [receiver] = pairs.open(batches=Batches.WHOLE)
        [rank] = sender.ranks
        shard, name = encode_shard(rank.rank.shard), "d/0"
        known = [
            shard,
            name,
            "x",
            "prompt",
            "full",
            "cma",
            "nixl",
            HOST,
            rank.epoch,
            receiver.epoch,
            0,
            1,
            2,
            BLOCK_SIZE,
        ]
        known += [protocol.PROTOCOL_VERSION, *msgspec.structs.astuple(rank.writer.destinations._rank.identity)]

        def case(fuzzer: Fuzzer) -> None:
            question = fuzzer.valid(Question)
            answerer = fuzzer.random.choice((rank.writer, receiver.announcer))
            with suppress(KVFerryError):
                protocol.encode(answerer.answer(question))
            if fuzzer.random.random() < 0.02:
                prompt = Prompt(2 * BLOCK_SIZE, "prompt", {"full": BlockList(0, [1, 2])}, END)
                rank.writer.compute([(fuzzer.random.choice(("x", "a")), prompt)])
                rank.writer.end(["x", "a"])

        number = run(case, 0.2, known=known)
        assert number > 100
        pairs.receivers.append(new := ReceivingRank(receiver.rank, "new"))
        new.receive(sender.hold(), [3, 4], transfer_id="after")
        sender.compute(END, [5, 1], transfer_id="after")
        assert new.result().error is None
        check_arrived(sender, [new], [5, 1], [3, 4])
    finally:
        pairs.close()
