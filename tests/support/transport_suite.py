"""The tests that every transport must pass. Subclass the suite in a test module and set your transport's factory:

    class TestMyTransport(TransportSuite):
        factory = "my_package.my_transport:MyTransport"

``memory`` names the class of the memory that moves (:mod:`tests.support.transport_memory`): the host's by default.

Needs pytest. Peers are other processes (``tests.support.transport_peer``); every wait is bounded.
"""

import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from kvferry.arrays import Bytes, Descriptors
from kvferry.errors import Reason, TransportError
from kvferry.transport.protocol import Direction, Peer, Status, Transfer, Transport, reach
from kvferry.transport.registry import make

from .transport_memory import HOST_MEMORY, Memory, make_memory
from .transport_peer import InProcessPeer, OnHost, PeerProcess, pattern, start_peer

BUFFER_BYTES = 24 << 20
FINISH_SECONDS = 20.0
DEATH_SECONDS = 5.0
POLL_SECONDS = 5.0
"""Limit of the duration of one call, in seconds: a call that waits takes longer, a busy machine stalls one for less."""


@dataclass(slots=True)
class Pair:
    """A local transport and memory, connected to a peer."""

    transport: Transport
    memory: Memory
    remote: PeerProcess | InProcessPeer
    peer: Peer

    @property
    def local(self) -> Bytes:
        """The content of the local memory; of host memory the array itself."""
        return self.memory.get()

    def submit(self, direction: Direction, offsets: Descriptors) -> Transfer:
        """Submit rows of remote offset, local offset and length."""
        descriptors = offsets + np.array([self.remote.address, self.memory.region.base_address, 0], np.uint64)
        if direction is Direction.WRITE:
            descriptors[:, [0, 1]] = descriptors[:, [1, 0]]
        return self.transport.submit(self.peer, direction, descriptors)

    def finish(self, transfer: Transfer, seconds: float = FINISH_SECONDS) -> Status:
        """Poll until the transfer ends; check that each call is short and that the transfer ends in time."""
        deadline = time.monotonic() + seconds
        while True:
            before = time.monotonic()
            status = self.transport.poll(transfer)
            now = time.monotonic()
            assert now - before < POLL_SECONDS, f"one poll took {now - before:.2f} s"
            if status is not Status.PENDING:
                assert (transfer.error is not None) == (status is Status.FAILED)
                return status
            assert now < deadline, f"still pending after {seconds} s"

    def start(self, direction: Direction, offsets: Descriptors) -> Transfer:
        """Submit and poll until some bytes, but not all, have moved."""
        transfer = self.submit(direction, offsets)
        deadline = time.monotonic() + FINISH_SECONDS
        while self.transport.poll(transfer) is Status.PENDING and not transfer.bytes_done:
            assert time.monotonic() < deadline
        assert transfer.status is Status.PENDING, "the transfer ended before the test could act on it"
        return transfer


@contextmanager
def open_pair(
    factory: str, num_bytes: int = BUFFER_BYTES, on_host: OnHost = list, memory: str = HOST_MEMORY
) -> Iterator[Pair]:
    """Open a transport, start a peer, connect."""
    transport = make(factory)
    local = make_memory(memory, num_bytes)
    try:
        transport.register([local.region])
        with start_peer(factory, num_bytes, on_host, memory) as remote:
            yield Pair(transport, local, remote, reach(transport, remote.end_point))
    finally:
        transport.close()


def random_offsets(seed: int, lengths: npt.NDArray[np.int64]) -> Descriptors:
    """Return rows of remote offset, local offset and length, each in random order and with gaps."""
    generator = np.random.default_rng(seed)
    offsets = np.empty((len(lengths), 3), np.uint64)
    offsets[:, 2] = lengths
    for column in (0, 1):
        order = generator.permutation(len(lengths))
        room = lengths[order] + generator.integers(0, 8, len(lengths))
        offsets[order, column] = np.cumsum(room) - room
    assert int((offsets[:, :2].max(axis=1) + offsets[:, 2]).max()) <= BUFFER_BYTES
    return offsets


def many_offsets() -> Descriptors:
    """Return a long transfer: 1.6 GB in rows of 8 KiB that overwrite each other."""
    offsets = np.random.default_rng(7).integers(0, BUFFER_BYTES // 8192, (200_000, 2)) * 8192
    return np.column_stack([offsets, np.full(len(offsets), 8192)]).astype(np.uint64)


def apply(offsets: Descriptors, source: Bytes, destination: Bytes, source_column: int) -> Bytes:
    """Return the expected content of ``destination`` after the transfer."""
    expected = destination.copy()
    for row in offsets.tolist():
        start, target, length = row[source_column], row[1 - source_column], row[2]
        expected[target : target + length] = source[start : start + length]
    return expected


OFFSETS = {
    "one": np.array([[5, 77, 1 << 20]], np.uint64),
    "one_of_all": np.array([[0, 0, BUFFER_BYTES]], np.uint64),
    "random_lengths": random_offsets(1, np.random.default_rng(2).integers(1, 30_000, 1500)),
    "descriptors_of_1_kib": random_offsets(3, np.full(20_000, 1024)),
    "odd_equal_lengths": random_offsets(4, np.full(3000, 4097)),
    "large_unequal": random_offsets(5, np.array([9_000_001, 5_000_000, 3, 8_388_609])),
    "adjacent_on_both_sides": np.array([[i * 4096, 8192 + i * 4096, 4096] for i in range(3000)], np.uint64),
    "adjacent_remote_only": np.array([[i * 4096, (2999 - i) * 4096, 4096] for i in range(3000)], np.uint64),
    "adjacent_local_only": np.array([[(2999 - i) * 4096, i * 4096, 4096] for i in range(3000)], np.uint64),
}


class TransportSuite:
    """The tests; see the module's docstring."""

    factory: ClassVar[str]
    memory: ClassVar[str] = HOST_MEMORY

    @staticmethod
    def on_host(command: list[str]) -> list[str]:
        """Return the command line that runs a command on the host of the peers; override it for peers elsewhere."""
        return command

    def _held(self, num_bytes: int, seed: int | None = None) -> Memory:
        """Return memory of the suite, filled with a pattern where there is a seed."""
        memory = make_memory(self.memory, num_bytes)
        if seed is not None:
            memory.put(pattern(seed, num_bytes))
        return memory

    @pytest.fixture(scope="class")
    @classmethod
    def shared_pair(cls) -> Iterator[Pair]:
        """One pair for all tests that do not harm the peer."""
        with open_pair(cls.factory, on_host=cls.on_host, memory=cls.memory) as pair:
            yield pair

    @pytest.fixture
    def pair(self, shared_pair: Pair) -> Pair:
        """The shared pair, with known content in both buffers."""
        shared_pair.memory.put(pattern(1, BUFFER_BYTES))
        shared_pair.remote.fill(2)
        return shared_pair

    @pytest.fixture
    def own_pair(self) -> Iterator[Pair]:
        """A pair whose peer a test may stop or kill."""
        with open_pair(self.factory, on_host=self.on_host, memory=self.memory) as pair:
            pair.remote.fill(2)
            yield pair

    @pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS.keys())
    def test_read_is_exact(self, pair: Pair, offsets: Descriptors) -> None:
        """Every requested byte arrives, and no other byte changes."""
        transfer = pair.submit(Direction.READ, offsets)
        assert pair.finish(transfer) is Status.DONE
        assert (transfer.num_descriptors, transfer.bytes_done) == (len(offsets), int(offsets[:, 2].sum()))
        expected = apply(offsets, pattern(2, BUFFER_BYTES), pattern(1, BUFFER_BYTES), 0)
        assert np.array_equal(pair.local, expected)

    @pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS.keys())
    def test_write_is_exact(self, pair: Pair, offsets: Descriptors) -> None:
        """Every submitted byte arrives, and no other byte changes, at the source neither."""
        assert pair.finish(pair.submit(Direction.WRITE, offsets)) is Status.DONE
        expected = apply(offsets, pattern(1, BUFFER_BYTES), pattern(2, BUFFER_BYTES), 1)
        assert pair.remote.checksum() == zlib.crc32(expected.data)
        assert np.array_equal(pair.local, pattern(1, BUFFER_BYTES))

    def test_counts(self, pair: Pair) -> None:
        """A transfer has its number of descriptors and bytes, and at its end all bytes are done."""
        transfer = pair.submit(Direction.READ, OFFSETS["random_lengths"])
        assert transfer.num_descriptors == len(OFFSETS["random_lengths"])
        assert transfer.num_bytes == int(OFFSETS["random_lengths"][:, 2].sum())
        assert pair.finish(transfer) is Status.DONE
        assert transfer.bytes_done == transfer.num_bytes
        assert pair.transport.poll(transfer) is Status.DONE
        assert pair.transport.cancel(transfer) is Status.DONE

    def test_empty_list_is_done_at_once(self, pair: Pair) -> None:
        """An empty list is not an error."""
        assert pair.transport.poll(pair.submit(Direction.READ, np.empty((0, 3), np.uint64))) is Status.DONE

    @pytest.mark.parametrize("direction", list(Direction))
    @pytest.mark.parametrize(
        "row",
        [
            [BUFFER_BYTES - 8, 0, 9],
            [0, BUFFER_BYTES - 8, 9],
            [BUFFER_BYTES + (1 << 30), 0, 1],
            [0, BUFFER_BYTES + (1 << 30), 1],
            [0, 0, 1 << 63],
            [0, 0, (1 << 64) - 1],
        ],
    )
    def test_unregistered_memory_is_refused(self, pair: Pair, direction: Direction, row: list[int]) -> None:
        """One bad row among good ones refuses the whole list before a byte moves."""
        offsets = np.array([[0, 0, 4096], row, [8192, 8192, 4096]], np.uint64)
        with pytest.raises(TransportError) as caught:
            pair.submit(direction, offsets)
        assert caught.value.reason is Reason.UNREGISTERED_RANGE
        assert "descriptor 1" in str(caught.value)
        assert np.array_equal(pair.local, pattern(1, BUFFER_BYTES))

    def test_zero_length_is_refused(self, pair: Pair) -> None:
        """A descriptor of length 0 is refused."""
        with pytest.raises(TransportError) as caught:
            pair.submit(Direction.READ, np.array([[0, 0, 4], [0, 0, 0]], np.uint64))
        assert caught.value.reason is Reason.INVALID_REQUEST

    def test_what_is_no_descriptor_list_is_refused(self, pair: Pair) -> None:
        """Wrong shape or type."""
        for wrong in (np.zeros((3, 2), np.uint64), np.zeros((3, 3), np.int32), np.zeros(3, np.uint64)):
            with pytest.raises(TransportError) as caught:
                pair.transport.submit(pair.peer, Direction.READ, wrong)  # type: ignore[arg-type]
            assert caught.value.reason is Reason.INVALID_REQUEST

    @pytest.mark.parametrize("garbage", [b"", b"garbage", bytes(range(256)) * 40, b"\x81" * 100_000])
    def test_garbage_end_point_is_refused(self, pair: Pair, garbage: bytes) -> None:
        """Garbage, and an end point that is cut or extended, are refused; the transport still works."""
        for wrong in (garbage, pair.remote.end_point[:-3], pair.remote.end_point + garbage[:1] + b"x"):
            with pytest.raises(TransportError) as caught:
                pair.transport.connect(wrong)
            assert caught.value.reason is Reason.MALFORMED_MESSAGE
        assert pair.finish(pair.submit(Direction.READ, OFFSETS["one"])) is Status.DONE

    def test_two_peers_and_two_transfers_at_once(self, pair: Pair) -> None:
        """Two transfers from two peers both finish."""
        with start_peer(self.factory, BUFFER_BYTES, self.on_host, self.memory) as other:
            other.fill(3)
            second = Pair(pair.transport, pair.memory, other, reach(pair.transport, other.end_point))
            half = BUFFER_BYTES // 2
            transfers = [
                pair.submit(Direction.READ, np.array([[0, 0, half]], np.uint64)),
                second.submit(Direction.READ, np.array([[half, half, half]], np.uint64)),
            ]
            assert [pair.finish(transfer) for transfer in transfers] == [Status.DONE, Status.DONE]
            second.peer.close()
            second.peer.close()
        landed = pair.local
        assert np.array_equal(landed[:half], pattern(2, BUFFER_BYTES)[:half])
        assert np.array_equal(landed[half:], pattern(3, BUFFER_BYTES)[half:])

    @pytest.mark.parametrize("direction", list(Direction))
    def test_killed_peer_is_an_error(self, own_pair: Pair, direction: Direction) -> None:
        """A transfer fails in time when its peer dies, and a new connection to that peer is refused."""
        transfer = own_pair.start(direction, many_offsets())
        own_pair.remote.kill()
        assert own_pair.finish(transfer, DEATH_SECONDS) is Status.FAILED
        assert transfer.error is not None
        assert transfer.error.reason is Reason.PEER_DIED
        if own_pair.transport.capabilities.ends_with_process:
            assert not transfer.may_land, "the end of a call is the end of its bytes"
        fresh = make(self.factory)
        for transport in (own_pair.transport, fresh):
            with pytest.raises(TransportError) as caught:
                reach(transport, own_pair.remote.end_point)
            assert caught.value.reason in (Reason.PEER_DIED, Reason.PEER_UNREACHABLE, Reason.PEER_CHANGED)
        fresh.close()

    def test_stopped_peer_does_not_hold_the_caller(self, own_pair: Pair) -> None:
        """Polls return at once while the peer is stopped; when the peer resumes, the transfer is done or cancelled."""
        assert isinstance(own_pair.remote, PeerProcess)
        transfer = own_pair.start(Direction.READ, many_offsets())
        own_pair.remote.stop()
        try:
            deadline = time.monotonic() + 1.0
            while time.monotonic() < deadline and transfer.status is Status.PENDING:
                before = time.monotonic()
                own_pair.transport.poll(transfer)
                assert time.monotonic() - before < POLL_SECONDS
            own_pair.transport.cancel(transfer)
        finally:
            own_pair.remote.resume()
        assert own_pair.finish(transfer) in (Status.DONE, Status.CANCELLED)

    def test_connecting_to_a_stopped_peer_does_not_hold_the_caller(self, own_pair: Pair) -> None:
        """Every call returns at once; ``cancel`` ends the connection; a resumed peer can soon be reached."""
        assert isinstance(own_pair.remote, PeerProcess)
        transport, end_point = make(self.factory), own_pair.remote.end_point
        own_pair.remote.stop()
        try:
            connecting = _at_once(lambda: transport.connect(end_point))
            deadline = time.monotonic() + 1.0
            while _at_once(lambda: transport.poll(connecting)) is Status.PENDING and time.monotonic() < deadline:
                pass
            assert _at_once(lambda: transport.cancel(connecting)) in (Status.DONE, Status.CANCELLED)
        finally:
            own_pair.remote.resume()
        _reach_soon(transport, end_point)
        transport.close()

    def test_nothing_lands_after_cancelled(self, own_pair: Pair) -> None:
        """``cancel`` ends in ``CANCELLED``, at once where this process moves bytes, and no byte lands afterwards."""
        transfer = own_pair.start(Direction.READ, many_offsets())
        status = own_pair.transport.cancel(transfer)
        if own_pair.transport.capabilities.ends_with_process:
            assert status is Status.CANCELLED
        assert own_pair.finish(transfer) is Status.CANCELLED
        assert transfer.bytes_done < transfer.num_bytes
        landed = own_pair.local.copy()
        own_pair.remote.fill(9)  # a late byte has other content
        time.sleep(0.2)
        assert np.array_equal(own_pair.local, landed)
        assert own_pair.finish(own_pair.submit(Direction.READ, OFFSETS["one"])) is Status.DONE

    def test_nothing_is_written_after_cancelled(self, own_pair: Pair) -> None:
        """No byte is written after ``CANCELLED``: the decode engine then frees the blocks."""
        transfer = own_pair.start(Direction.WRITE, many_offsets())
        own_pair.transport.cancel(transfer)
        assert own_pair.finish(transfer) is Status.CANCELLED
        landed = own_pair.remote.checksum()
        own_pair.memory.put(pattern(9, BUFFER_BYTES))  # a late byte has other content
        time.sleep(0.2)
        assert own_pair.remote.checksum() == landed

    def test_memory_of_a_second_registration_joins_that_of_the_first(self, own_pair: Pair) -> None:
        """The second end point reaches the memory of both calls, the first one only its own; local memory likewise."""
        transport, source = own_pair.transport, make(self.factory)
        buffers = [self._held(4096, seed) for seed in (1, 2)]
        later = self._held(4096)
        moves = [(buffers[0], later), (buffers[1], later), (buffers[1], own_pair.memory)]
        rows = np.array([_row(start, end) for start, end in moves], np.uint64)
        try:
            first, second = (source.register([each.region]) for each in buffers)
            early = reach(transport, first)
            transport.register([later.region])
            with pytest.raises(TransportError) as caught:
                transport.submit(early, Direction.READ, rows)
            assert caught.value.reason is Reason.UNREGISTERED_RANGE
            peer = reach(transport, second)
            for (start, end), row in zip(moves, rows, strict=True):
                assert own_pair.finish(transport.submit(peer, Direction.READ, row[None])) is Status.DONE
                assert _are_equal(start, end)
        finally:
            source.close()

    @pytest.mark.parametrize("direction", list(Direction))
    def test_one_submission_moves_between_all_kinds_of_memory(self, own_pair: Pair, direction: Direction) -> None:
        """Memory of the suite and host memory, on both sides, in mixed order and in two registrations."""
        other = make(self.factory)
        num_moves, kinds = 300, (self.memory, HOST_MEMORY)
        pairs = [(theirs, ours) for theirs in kinds for ours in kinds]
        there = [make_memory(kind, 4096 * num_moves) for kind, _ in pairs]
        here = [make_memory(kind, 4096 * num_moves) for _, kind in pairs]
        content = pattern(4, 4096 * num_moves * 4).reshape(4, -1)
        sources, destinations = (there, here) if direction is Direction.READ else (here, there)
        for memory, each in zip(sources, content, strict=True):
            memory.put(each)
        order = np.random.default_rng(6).permutation(4 * num_moves)
        rows = np.array(
            [_row(sources[at % 4], destinations[at % 4], at // 4 * 4096) for at in order.tolist()], np.uint64
        )
        try:
            other.register([memory.region for memory in there[:2]])
            peer = reach(own_pair.transport, other.register([memory.region for memory in there[2:]]))
            own_pair.transport.register([memory.region for memory in here])
            transfer = own_pair.transport.submit(peer, direction, rows)
            assert own_pair.finish(transfer) is Status.DONE
            assert transfer.bytes_done == 4 * 4096 * num_moves
            for memory, each in zip(destinations, content, strict=True):
                assert np.array_equal(memory.get(), each)
        finally:
            other.close()

    def test_close_twice_and_nothing_afterwards(self, own_pair: Pair) -> None:
        """``close`` is idempotent, fails pending transfers, and refuses later calls."""
        transfer = own_pair.submit(Direction.READ, OFFSETS["one"])
        own_pair.transport.close()
        own_pair.transport.close()
        assert own_pair.transport.poll(transfer) is Status.FAILED
        assert transfer.error is not None
        assert transfer.error.reason is Reason.CLOSED
        for refused in (
            lambda: own_pair.submit(Direction.READ, OFFSETS["one"]),
            lambda: own_pair.transport.connect(own_pair.remote.end_point),
            lambda: own_pair.transport.register([]),
        ):
            with pytest.raises(TransportError) as caught:
                refused()
            assert caught.value.reason is Reason.CLOSED


def _row(source: Memory, destination: Memory, offset: int = 0) -> list[int]:
    """Return the descriptor of 4 KiB, at the same place in both."""
    return [source.region.base_address + offset, destination.region.base_address + offset, 4096]


def _are_equal(one: Memory, other: Memory) -> bool:
    return np.array_equal(one.get()[:4096], other.get()[:4096])


Result = TypeVar("Result")


def _at_once(call: Callable[[], Result]) -> Result:
    """Return the result of a call that must be short."""
    before = time.monotonic()
    result = call()
    seconds = time.monotonic() - before
    assert seconds < POLL_SECONDS, f"one call took {seconds:.2f} s"
    return result


def _reach_soon(transport: Transport, end_point: bytes) -> Peer:
    """Connect, again while the transport still waits for an earlier cancelled connection to the peer."""
    deadline = time.monotonic() + FINISH_SECONDS
    while True:
        try:
            return reach(transport, end_point)
        except TransportError as error:
            if error.reason is not Reason.PEER_UNREACHABLE or time.monotonic() > deadline:
                raise
        time.sleep(0.01)
