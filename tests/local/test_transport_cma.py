"""Cross-memory attach: which process it is, what the kernel refuses, partial calls."""

import ctypes
import errno
import threading
from collections.abc import Iterator
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from kvferry.errors import Reason, TransportError
from kvferry.layout.shard import Region
from kvferry.transport import cma
from kvferry.transport.cma import CmaTransport, CopyThreads
from kvferry.transport.protocol import Direction, ProcessEndPoint, Status, reach

from ..support.transport_peer import PeerProcess
from ..support.transport_suite import Pair, open_pair

BYTES = 1 << 20


@pytest.fixture
def pair() -> Iterator[Pair]:
    with open_pair("kvferry.transport.cma:CmaTransport", BYTES) as pair:
        pair.remote.fill(5)
        yield pair


def forged(end_point: bytes, **identity: object) -> bytes:
    decoded = msgspec.msgpack.decode(end_point, type=ProcessEndPoint)
    changed = msgspec.structs.replace(decoded.identity, **identity)
    return msgspec.msgpack.encode(msgspec.structs.replace(decoded, identity=changed))


@pytest.mark.parametrize(
    ("identity", "reason"),
    [
        ({"start_time": 1}, Reason.PEER_CHANGED),
        ({"boot_id": "another"}, Reason.TRANSPORT_UNAVAILABLE),
        ({"pid_namespace": 1}, Reason.TRANSPORT_UNAVAILABLE),
        ({"pid": (1 << 22) + 5}, Reason.PEER_DIED),
    ],
)
def test_end_point_of_another_process_is_refused(pair: Pair, identity: dict[str, object], reason: Reason) -> None:
    with pytest.raises(TransportError) as caught:
        reach(pair.transport, forged(pair.remote.end_point, **identity))
    assert caught.value.reason is reason
    assert caught.value.remedy


def test_wrong_nonce_is_refused(pair: Pair) -> None:
    decoded = msgspec.msgpack.decode(pair.remote.end_point, type=ProcessEndPoint)
    with pytest.raises(TransportError) as caught:
        reach(pair.transport, msgspec.msgpack.encode(msgspec.structs.replace(decoded, nonce=bytes(16))))
    assert caught.value.reason is Reason.PEER_CHANGED


def test_a_pid_reused_during_the_transfer_fails_it(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes have arrived, but the process that they came from is no longer the peer."""
    transfer = pair.submit(Direction.READ, np.array([[0, 0, BYTES]], np.uint64))
    times = iter([pair.peer.identity.start_time, 12345])
    monkeypatch.setattr(cma, "parse_start_time", lambda stat: next(times))
    assert pair.finish(transfer) is Status.FAILED
    assert transfer.bytes_done == BYTES
    assert transfer.error is not None
    assert transfer.error.reason is Reason.PEER_CHANGED


def test_hole_15_a_write_makes_no_call_after_its_peer_has_ended_whose_pid_another_process_may_have(pair: Pair) -> None:
    """The peer ends between two calls of one share; its pid is free from then on."""
    assert isinstance(pair.remote, PeerProcess)
    remote, write = pair.remote, pair.transport._calls[Direction.WRITE]
    sizes = []

    def write_and_end(*arguments: int) -> int:
        sizes.append(int(write(*arguments)))
        remote.kill()
        return sizes[-1]

    pair.transport._calls = dict.fromkeys(Direction, write_and_end)
    descriptors = np.array([[i * 300, i * 300, 200] for i in range(3000)], np.uint64)
    transfer = pair.submit(Direction.WRITE, descriptors)
    assert pair.finish(transfer) is Status.FAILED
    assert transfer.error is not None
    assert transfer.error.reason is Reason.PEER_DIED
    assert sizes == [cma.MAX_RANGES_PER_CALL * 200]


def test_without_pidfd_the_stat_file_shows_before_each_write_that_the_peer_has_ended(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(pair.remote, PeerProcess)
    monkeypatch.setattr(cma, "Process", Mock(side_effect=OSError("no pidfd")))
    peer = reach(pair.transport, pair.remote.end_point)
    assert isinstance(peer, cma.CmaPeer)
    assert (peer.process, peer.has_pid()) == (None, True)
    pair.remote.kill()
    assert not peer.has_pid()


def error_of_a_read(pair: Pair, reason: Reason) -> TransportError:
    """Read everything, which must fail for that reason."""
    transfer = pair.submit(Direction.READ, np.array([[0, 0, BYTES]], np.uint64))
    assert pair.finish(transfer) is Status.FAILED
    assert transfer.error is not None
    assert transfer.error.reason is reason
    return transfer.error


def test_permission_denied_names_the_remedy(pair: Pair) -> None:
    def refuse(*_: object) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    pair.transport._calls = dict.fromkeys(Direction, refuse)
    assert "ptrace_scope" in error_of_a_read(pair, Reason.PERMISSION_DENIED).remedy
    with pytest.raises(TransportError) as caught:
        reach(pair.transport, pair.remote.end_point)
    assert caught.value.reason is Reason.PERMISSION_DENIED


def test_partial_calls_are_continued_exactly(pair: Pair) -> None:
    """A kernel that moves at most 1000 bytes a call, so that every call ends inside a descriptor."""
    read = pair.transport._calls[Direction.READ]
    sizes = []

    def short(pid: int, local: int, num_local: int, remote: int, num_remote: int, flags: int) -> int:
        descriptors = np.ctypeslib.as_array((ctypes.c_uint64 * (2 * num_local)).from_address(local)).reshape(-1, 2)
        kept = int(np.searchsorted(np.cumsum(descriptors[:, 1]), 1000)) + 1
        before = int(descriptors[: kept - 1, 1].sum())
        descriptors[kept - 1, 1] = min(int(descriptors[kept - 1, 1]), 1000 - before)
        sizes.append(int(read(pid, local, kept, remote, num_remote, flags)))
        return sizes[-1]

    pair.transport._calls = dict.fromkeys(Direction, short)
    descriptors = np.array([[i * 700, 500_000 - i * 900, 650] for i in range(500)], np.uint64)
    assert pair.finish(pair.submit(Direction.READ, descriptors)) is Status.DONE
    assert max(sizes) == 1000
    pair.transport._calls = dict.fromkeys(Direction, read)
    check_same_again(pair, descriptors)


def check_same_again(pair: Pair, descriptors: np.ndarray) -> None:
    """What has landed must be what lands again, by calls that nothing disturbs."""
    landed = pair.local.copy()
    pair.local[:] = 0
    assert pair.finish(pair.submit(Direction.READ, descriptors)) is Status.DONE
    assert landed.any()
    assert np.array_equal(landed, pair.local)


def test_threads_copy_their_shares_exactly_though_calls_stop_short(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three shares ends early: what it left, and what lies behind, is copied by later polls."""
    monkeypatch.setattr(CopyThreads, "num_usable", 3)
    monkeypatch.setattr(cma, "MIN_BYTES_PER_THREAD", 1 << 16)
    read = pair.transport._calls[Direction.READ]
    threads = set()

    def record(pid: int, local: int, num_local: int, remote: int, num_remote: int, flags: int) -> int:
        threads.add(threading.get_ident())
        is_second = len(threads) == 2
        if is_second:
            (ctypes.c_uint64 * 2).from_address(local)[1] = 1000
        return int(read(pid, local, 1 if is_second else num_local, remote, num_remote, flags))

    pair.transport._calls = dict.fromkeys(Direction, record)
    everything = np.array([[0, 0, BYTES]], np.uint64)
    assert pair.finish(pair.submit(Direction.READ, everything)) is Status.DONE
    assert len(threads) >= 2
    pair.transport._calls = dict.fromkeys(Direction, read)
    monkeypatch.setattr(CopyThreads, "num_usable", 1)
    check_same_again(pair, everything)


def test_one_poll_makes_as_many_calls_as_its_share_needs(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three calls move 3000 descriptors; where the second stops short nothing behind it is taken for copied."""
    monkeypatch.setattr(CopyThreads, "num_usable", 1)
    read = pair.transport._calls[Direction.READ]
    descriptors = np.array([[i * 300, 1_000_000 - i * 300, 200] for i in range(3000)], np.uint64)
    sizes: list[int] = []

    def short_second(pid: int, local: int, num_local: int, *rest: int) -> int:
        sizes.append(int(read(pid, local, 10 if len(sizes) == 1 else num_local, *rest)))
        return sizes[-1]

    pair.transport._calls = dict.fromkeys(Direction, short_second)
    transfer = pair.submit(Direction.READ, descriptors)
    assert pair.transport.poll(transfer) is Status.PENDING
    assert sizes == [1024 * 200, 10 * 200]
    assert transfer.bytes_done == 1034 * 200
    assert pair.transport.poll(transfer) is Status.DONE
    assert len(sizes) == 4
    check_same_again(pair, descriptors)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_poll_ends_after_its_bytes_so_that_a_step_soon_has_its_cores_back(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    monkeypatch.setattr(CopyThreads, "num_usable", num_threads)
    monkeypatch.setattr(cma, "MIN_BYTES_PER_THREAD", 1 << 10)
    monkeypatch.setattr(cma, "MAX_BYTES_PER_POLL", BYTES // 4)
    transfer = pair.submit(Direction.WRITE, np.array([[0, 0, BYTES]], np.uint64))
    for quarter in range(1, 4):
        assert pair.transport.poll(transfer) is Status.PENDING
        assert transfer.bytes_done == quarter * BYTES // 4
    assert pair.transport.poll(transfer) is Status.DONE


def test_an_error_on_another_thread_is_explained(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of an error belongs to the thread that made the call."""
    monkeypatch.setattr(CopyThreads, "num_usable", 2)
    monkeypatch.setattr(cma, "MIN_BYTES_PER_THREAD", 1 << 16)
    own = threading.get_ident()
    read = pair.transport._calls[Direction.READ]

    def refuse_beside(*arguments: int) -> int:
        if threading.get_ident() == own:
            return int(read(*arguments))
        ctypes.set_errno(errno.EPERM)
        return -1

    pair.transport._calls = dict.fromkeys(Direction, refuse_beside)
    error_of_a_read(pair, Reason.PERMISSION_DENIED)


def test_unmapped_memory_is_an_error_not_a_crash(pair: Pair) -> None:
    transport = CmaTransport()
    transport.register([Region(4096, 4096)])
    peer = reach(transport, pair.remote.end_point)
    transfer = transport.submit(peer, Direction.READ, np.array([[pair.remote.address, 4096, 4096]], np.uint64))
    assert transport.poll(transfer) is Status.FAILED
    assert transfer.error is not None
    assert transfer.error.reason is Reason.TRANSFER_FAILED


def test_device_memory_is_refused() -> None:
    with pytest.raises(TransportError) as caught:
        CmaTransport().register([Region(4096, 4096, "cuda:0")])
    assert caught.value.reason is Reason.UNSUPPORTED
