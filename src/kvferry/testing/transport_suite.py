"""What every transport must do, as tests. Subclass it in a test module and name your transport's factory:

    class TestMyTransport(TransportSuite):
        factory = "my_package.my_transport:MyTransport"

Needs pytest. Peers are processes of their own (``kvferry.testing.transport_peer``) unless the transport's capabilities
say ``same_process_only``; every wait is bounded.
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
from kvferry.layout.shard import Region
from kvferry.testing.transport_peer import InProcessPeer, PeerProcess, pattern, start_peer
from kvferry.transport.probe import make
from kvferry.transport.protocol import Direction, Peer, Status, Transfer, Transport, reach

BUFFER_BYTES = 24 << 20
FINISH_SECONDS = 20.0
DEATH_SECONDS = 5.0
POLL_SECONDS = 1.0
"""No single call may hold its caller longer than this."""


@dataclass(slots=True)
class Pair:
    """One side: its transport and buffer, connected to a peer."""

    transport: Transport
    local: Bytes
    remote: PeerProcess | InProcessPeer
    peer: Peer

    def submit(self, direction: Direction, pieces: Descriptors) -> Transfer:
        """Submit pieces given as (remote offset, local offset, length)."""
        descriptors = pieces + np.array([self.remote.address, self.local.ctypes.data, 0], np.uint64)
        if direction is Direction.WRITE:
            descriptors[:, [0, 1]] = descriptors[:, [1, 0]]
        return self.transport.submit(self.peer, direction, descriptors)

    def finish(self, transfer: Transfer, seconds: float = FINISH_SECONDS) -> Status:
        """Poll to the end, and check that each call is short and that the end comes."""
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

    def start(self, direction: Direction, pieces: Descriptors) -> Transfer:
        """Submit and poll until some bytes, but not all, have moved."""
        transfer = self.submit(direction, pieces)
        deadline = time.monotonic() + FINISH_SECONDS
        while self.transport.poll(transfer) is Status.PENDING and not transfer.bytes_done:
            assert time.monotonic() < deadline
        assert transfer.status is Status.PENDING, "the transfer ended before anything could be done to it"
        return transfer


@contextmanager
def open_pair(factory: str, num_bytes: int = BUFFER_BYTES) -> Iterator[Pair]:
    """Open a transport, start a peer, connect."""
    transport = make(factory)
    local = np.zeros(num_bytes, np.uint8)
    try:
        transport.register([Region(int(local.ctypes.data), num_bytes)])
        with start_peer(factory, num_bytes, _is_local(transport)) as remote:
            yield Pair(transport, local, remote, reach(transport, remote.end_point))
    finally:
        transport.close()


def random_pieces(seed: int, lengths: npt.NDArray[np.int64]) -> Descriptors:
    """Return pieces (remote offset, local offset, length) in random order on both sides, with gaps."""
    generator = np.random.default_rng(seed)
    pieces = np.empty((len(lengths), 3), np.uint64)
    pieces[:, 2] = lengths
    for column in (0, 1):
        order = generator.permutation(len(lengths))
        room = lengths[order] + generator.integers(0, 8, len(lengths))
        pieces[order, column] = np.cumsum(room) - room
    assert int((pieces[:, :2].max(axis=1) + pieces[:, 2]).max()) <= BUFFER_BYTES
    return pieces


def many_pieces() -> Descriptors:
    """Return a long transfer: 1.6 GB as pieces of 8 KiB that overwrite each other."""
    offsets = np.random.default_rng(7).integers(0, BUFFER_BYTES // 8192, (200_000, 2)) * 8192
    return np.column_stack([offsets, np.full(len(offsets), 8192)]).astype(np.uint64)


def apply(pieces: Descriptors, source: Bytes, destination: Bytes, source_column: int) -> Bytes:
    """Return ``destination`` as it must look afterwards."""
    expected = destination.copy()
    for piece in pieces.tolist():
        start, target, length = piece[source_column], piece[1 - source_column], piece[2]
        expected[target : target + length] = source[start : start + length]
    return expected


PIECES = {
    "one": np.array([[5, 77, 1 << 20]], np.uint64),
    "one_of_all": np.array([[0, 0, BUFFER_BYTES]], np.uint64),
    "random_lengths": random_pieces(1, np.random.default_rng(2).integers(1, 30_000, 1500)),
    "pieces_of_1_kib": random_pieces(3, np.full(20_000, 1024)),
    "odd_equal_lengths": random_pieces(4, np.full(3000, 4097)),
    "large_unequal": random_pieces(5, np.array([9_000_001, 5_000_000, 3, 8_388_609])),
    "adjacent_on_both_sides": np.array([[i * 4096, 8192 + i * 4096, 4096] for i in range(3000)], np.uint64),
    "adjacent_remote_only": np.array([[i * 4096, (2999 - i) * 4096, 4096] for i in range(3000)], np.uint64),
    "adjacent_local_only": np.array([[(2999 - i) * 4096, i * 4096, 4096] for i in range(3000)], np.uint64),
}


class TransportSuite:
    """The tests; see the module's text."""

    factory: ClassVar[str]

    @pytest.fixture(scope="class")
    @classmethod
    def shared_pair(cls) -> Iterator[Pair]:
        """One pair for the tests that leave it intact."""
        with open_pair(cls.factory) as pair:
            yield pair

    @pytest.fixture
    def pair(self, shared_pair: Pair) -> Pair:
        """The shared pair, both buffers with known content."""
        shared_pair.local[:] = pattern(1, BUFFER_BYTES)
        shared_pair.remote.fill(2)
        return shared_pair

    @pytest.fixture
    def own_pair(self) -> Iterator[Pair]:
        """A pair whose peer may be harmed."""
        with open_pair(self.factory) as pair:
            pair.remote.fill(2)
            yield pair

    @pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES.keys())
    def test_read_is_exact(self, pair: Pair, pieces: Descriptors) -> None:
        """Every byte asked for, and no other, arrives."""
        _needs_bytes(pair.transport)
        transfer = pair.submit(Direction.READ, pieces)
        assert pair.finish(transfer) is Status.DONE
        assert (transfer.num_descriptors, transfer.bytes_done) == (len(pieces), int(pieces[:, 2].sum()))
        expected = apply(pieces, pattern(2, BUFFER_BYTES), pattern(1, BUFFER_BYTES), 0)
        assert np.array_equal(pair.local, expected)

    @pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES.keys())
    def test_write_is_exact(self, pair: Pair, pieces: Descriptors) -> None:
        """Every byte given, and no other, arrives; the source is untouched."""
        _needs_bytes(pair.transport)
        assert pair.finish(pair.submit(Direction.WRITE, pieces)) is Status.DONE
        expected = apply(pieces, pattern(1, BUFFER_BYTES), pattern(2, BUFFER_BYTES), 1)
        assert pair.remote.checksum() == zlib.crc32(expected.data)
        assert np.array_equal(pair.local, pattern(1, BUFFER_BYTES))

    def test_counts(self, pair: Pair) -> None:
        """A transfer says how much it is and, at its end, that all of it is done."""
        transfer = pair.submit(Direction.READ, PIECES["random_lengths"])
        assert transfer.num_descriptors == len(PIECES["random_lengths"])
        assert transfer.num_bytes == int(PIECES["random_lengths"][:, 2].sum())
        assert pair.finish(transfer) is Status.DONE
        assert transfer.bytes_done == transfer.num_bytes
        assert pair.transport.poll(transfer) is Status.DONE
        assert pair.transport.cancel(transfer) is Status.DONE

    def test_empty_list_is_done_at_once(self, pair: Pair) -> None:
        """Nothing to move is no error."""
        assert pair.transport.poll(pair.submit(Direction.READ, np.empty((0, 3), np.uint64))) is Status.DONE

    @pytest.mark.parametrize("direction", list(Direction))
    @pytest.mark.parametrize(
        "piece",
        [
            [BUFFER_BYTES - 8, 0, 9],
            [0, BUFFER_BYTES - 8, 9],
            [BUFFER_BYTES + (1 << 30), 0, 1],
            [0, BUFFER_BYTES + (1 << 30), 1],
            [0, 0, 1 << 63],
            [0, 0, (1 << 64) - 1],
        ],
    )
    def test_unregistered_memory_is_refused(self, pair: Pair, direction: Direction, piece: list[int]) -> None:
        """One bad range among good ones refuses the whole list before a byte moves."""
        pieces = np.array([[0, 0, 4096], piece, [8192, 8192, 4096]], np.uint64)
        with pytest.raises(TransportError) as caught:
            pair.submit(direction, pieces)
        assert caught.value.reason is Reason.UNREGISTERED_RANGE
        assert "descriptor 1" in str(caught.value)
        assert np.array_equal(pair.local, pattern(1, BUFFER_BYTES))

    def test_zero_length_is_refused(self, pair: Pair) -> None:
        """A piece of no bytes is a planner's mistake."""
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
        """Bytes that are no end point, or part of one, are refused and the transport lives on."""
        for wrong in (garbage, pair.remote.end_point[:-3], pair.remote.end_point + garbage[:1] + b"x"):
            with pytest.raises(TransportError) as caught:
                pair.transport.connect(wrong)
            assert caught.value.reason is Reason.MALFORMED_MESSAGE
        assert pair.finish(pair.submit(Direction.READ, PIECES["one"])) is Status.DONE

    def test_two_peers_and_two_transfers_at_once(self, pair: Pair) -> None:
        """Transfers from two peers advance side by side."""
        with start_peer(self.factory, BUFFER_BYTES, _is_local(pair.transport)) as other:
            other.fill(3)
            second = Pair(pair.transport, pair.local, other, reach(pair.transport, other.end_point))
            half = BUFFER_BYTES // 2
            transfers = [
                pair.submit(Direction.READ, np.array([[0, 0, half]], np.uint64)),
                second.submit(Direction.READ, np.array([[half, half, half]], np.uint64)),
            ]
            assert [pair.finish(transfer) for transfer in transfers] == [Status.DONE, Status.DONE]
            second.peer.close()
            second.peer.close()
        if pair.transport.capabilities.moves_bytes:
            assert np.array_equal(pair.local[:half], pattern(2, BUFFER_BYTES)[:half])
            assert np.array_equal(pair.local[half:], pattern(3, BUFFER_BYTES)[half:])

    @pytest.mark.parametrize("direction", list(Direction))
    def test_killed_peer_is_an_error(self, own_pair: Pair, direction: Direction) -> None:
        """A peer that dies in the middle fails the transfer in time, and connecting to it again is refused."""
        _needs_bytes(own_pair.transport)
        transfer = own_pair.start(direction, many_pieces())
        own_pair.remote.kill()
        assert own_pair.finish(transfer, DEATH_SECONDS) is Status.FAILED
        assert transfer.error is not None
        assert transfer.error.reason is Reason.PEER_DIED
        fresh = make(self.factory)
        for transport in (own_pair.transport, fresh):
            with pytest.raises(TransportError) as caught:
                reach(transport, own_pair.remote.end_point)
            assert caught.value.reason in (Reason.PEER_DIED, Reason.PEER_UNREACHABLE, Reason.PEER_CHANGED)
        fresh.close()

    def test_stopped_peer_does_not_hold_the_caller(self, own_pair: Pair) -> None:
        """With a stopped peer polls return at once; when it goes on, the transfer is done, or is quiet if cancelled."""
        if not isinstance(own_pair.remote, PeerProcess):
            pytest.skip("the peer is this process")
        _needs_bytes(own_pair.transport)
        transfer = own_pair.start(Direction.READ, many_pieces())
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
        """Every call returns at once, also ``cancel``, which ends it; when the peer goes on it is soon reached."""
        if not isinstance(own_pair.remote, PeerProcess):
            pytest.skip("the peer is this process")
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
        """``cancel`` ends in ``CANCELLED``, at once where the transport claims so, and memory is quiet from then on."""
        _needs_bytes(own_pair.transport)
        transfer = own_pair.start(Direction.READ, many_pieces())
        status = own_pair.transport.cancel(transfer)
        if own_pair.transport.capabilities.cancel_is_immediate:
            assert status is Status.CANCELLED
        assert own_pair.finish(transfer) is Status.CANCELLED
        assert transfer.bytes_done < transfer.num_bytes
        landed = own_pair.local.copy()
        own_pair.remote.fill(9)  # what lands late has other content
        time.sleep(0.2)
        assert np.array_equal(own_pair.local, landed)
        assert own_pair.finish(own_pair.submit(Direction.READ, PIECES["one"])) is Status.DONE

    def test_nothing_is_written_after_cancelled(self, own_pair: Pair) -> None:
        """A receiver gives its blocks back to its engine on this word."""
        _needs_bytes(own_pair.transport)
        transfer = own_pair.start(Direction.WRITE, many_pieces())
        own_pair.transport.cancel(transfer)
        assert own_pair.finish(transfer) is Status.CANCELLED
        landed = own_pair.remote.checksum()
        own_pair.local[:] = pattern(9, BUFFER_BYTES)  # what lands late has other content
        time.sleep(0.2)
        assert own_pair.remote.checksum() == landed

    def test_close_twice_and_nothing_afterwards(self, own_pair: Pair) -> None:
        """``close`` is idempotent, fails what was pending, and refuses what comes later."""
        transfer = own_pair.submit(Direction.READ, PIECES["one"])
        own_pair.transport.close()
        own_pair.transport.close()
        assert own_pair.transport.poll(transfer) is Status.FAILED
        assert transfer.error is not None
        assert transfer.error.reason is Reason.CLOSED
        for refused in (
            lambda: own_pair.submit(Direction.READ, PIECES["one"]),
            lambda: own_pair.transport.connect(own_pair.remote.end_point),
            lambda: own_pair.transport.register([]),
        ):
            with pytest.raises(TransportError) as caught:
                refused()
            assert caught.value.reason is Reason.CLOSED


Result = TypeVar("Result")


def _at_once(call: Callable[[], Result]) -> Result:
    """Return what the call returns, before long."""
    before = time.monotonic()
    result = call()
    seconds = time.monotonic() - before
    assert seconds < POLL_SECONDS, f"one call took {seconds:.2f} s"
    return result


def _reach_soon(transport: Transport, end_point: bytes) -> Peer:
    """Connect, again while the peer owes an answer to who asked before."""
    deadline = time.monotonic() + FINISH_SECONDS
    while True:
        try:
            return reach(transport, end_point)
        except TransportError as error:
            if error.reason is not Reason.PEER_UNREACHABLE or time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def _needs_bytes(transport: Transport) -> None:
    if not transport.capabilities.moves_bytes:
        pytest.skip("this transport moves nothing")


def _is_local(transport: Transport) -> bool:
    return transport.capabilities.same_process_only or not transport.capabilities.moves_bytes
