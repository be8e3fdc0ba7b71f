"""The registry: names, ``auto``, the choice between transports, probes, injected faults, traces."""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kvferry.arrays import Descriptors
from kvferry.errors import Reason, SettingsError, TransportError
from kvferry.layout.shard import Region
from kvferry.transport.cma import CmaTransport
from kvferry.transport.probe import probe, probe_all
from kvferry.transport.protocol import Direction, Peer, Status, Transfer, Transport, reach
from kvferry.transport.registry import AUTO, FACTORIES, TransportSet, open_transports

from ..support.faults import FaultPlan, FaultyTransport, SwapRanges, ZeroRange
from ..support.null_transport import NullTransport
from ..support.transport_peer import pattern
from ..support.transport_suite import Pair, TransportSuite, many_offsets, open_pair

BYTES = 1 << 16


def memory() -> tuple[np.ndarray, Region]:
    array = np.zeros(BYTES, np.uint8)
    return array, Region(int(array.ctypes.data), BYTES)


class Refusing(NullTransport):
    """Refuses every connection."""

    def connect(self, end_point: bytes) -> Transfer:
        raise TransportError(Reason.PERMISSION_DENIED, "no entry.", "Ask the doorman.")


class Hesitating(NullTransport):
    """Connects on command, or fails with a given error."""

    def __init__(self) -> None:
        super().__init__()
        self.answer: Status | TransportError = Status.PENDING

    def connect(self, end_point: bytes) -> Transfer:
        transfer = super().connect(end_point)
        transfer.status = Status.PENDING
        return transfer

    def poll(self, transfer: Transfer) -> Status:
        if isinstance(self.answer, TransportError):
            return transfer.fail(self.answer)
        if transfer.status is Status.PENDING:
            transfer.status = self.answer
        return transfer.status


def test_unknown_name_is_refused_and_the_nearest_named() -> None:
    with pytest.raises(SettingsError, match=r"Did you mean 'nixl'.*unknown-setting"):
        open_transports("nixxl")


def test_cma_is_chosen_between_processes_of_one_host(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("nixl")
    caplog.set_level(logging.INFO)
    with open_pair("kvferry.transport.cma:CmaTransport", BYTES) as pair:
        side = open_transports("auto")
        offered = side.register([])
        assert list(offered) == ["cma", "nixl"]
        link = side.connect({"cma": pair.remote.end_point, "nixl": offered["nixl"]}).poll()
        side.close()
        side.close()
    assert link is not None
    assert link.name == link.transport.capabilities.name == "cma"
    assert "using the cma transport" in caplog.text


def test_the_next_transport_is_used_when_the_first_does_not_reach(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    end_points = TransportSet({"null": NullTransport()}).register([])
    side = TransportSet({"cma": Refusing(), "null": NullTransport()})
    connecting = side.connect({"cma": end_points["null"], **end_points})
    link = connecting.poll()
    assert connecting.poll() is link
    assert link is not None
    assert link.name == "null"
    assert "no entry" in caplog.text.partition("a preferred transport failed:")[2]


def test_a_transport_may_take_its_time_to_connect() -> None:
    end_point, slow = NullTransport().register([]), Hesitating()
    connecting = TransportSet({"cma": slow, "null": NullTransport()}).connect({"cma": end_point, "null": end_point})
    assert [connecting.poll() for _ in range(3)] == [None] * 3
    slow.answer = Status.DONE
    link = connecting.poll()
    assert link is not None
    assert link.name == "cma"


def test_the_next_transport_is_used_when_the_first_fails_late(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    end_point, slow = NullTransport().register([]), Hesitating()
    connecting = TransportSet({"cma": slow, "null": NullTransport()}).connect({"cma": end_point, "null": end_point})
    assert connecting.poll() is None
    slow.answer = TransportError(Reason.PEER_UNREACHABLE, "it did not answer.", "Wake it.")
    link = connecting.poll()
    assert link is not None
    assert link.name == "null"
    assert "a preferred transport failed: it did not answer" in caplog.text


def test_a_connection_that_is_given_up_is_cancelled() -> None:
    slow = Hesitating()
    connecting = TransportSet({"cma": slow}).connect({"cma": NullTransport().register([])})
    connecting.close()
    assert connecting.poll() is None
    begun = connecting._transfer
    connecting.close()
    connecting.close()
    assert begun is not None
    assert begun.status is Status.CANCELLED


def test_when_no_transport_connects_every_reason_is_named() -> None:
    end_point = NullTransport().register([])
    with pytest.raises(TransportError, match=r"no entry\. no entry\. Ask the doorman") as caught:
        TransportSet({"cma": Refusing(), "nixl": Refusing()}).connect({"cma": end_point, "nixl": end_point}).poll()
    assert caught.value.reason is Reason.PERMISSION_DENIED


def test_nothing_in_common_and_garbage() -> None:
    side = TransportSet({"null": NullTransport()})
    with pytest.raises(TransportError) as caught:
        side.connect({"cma": b""}).poll()
    assert caught.value.reason is Reason.TRANSPORT_UNAVAILABLE
    with pytest.raises(TransportError) as caught:
        TransportSet({"cma": NullTransport(), "null": NullTransport()}).connect(
            {"cma": b"garbage", "null": NullTransport().register([])}
        ).poll()
    assert caught.value.reason is Reason.MALFORMED_MESSAGE


def test_auto_goes_on_without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    side = open_transports("auto")
    assert list(side.transports) == ["cma"]
    side.close()
    with pytest.raises(TransportError, match="pip install nixl==") as caught:
        open_transports("nixl")
    assert caught.value.reason is Reason.MISSING_DEPENDENCY


def test_mooncake_is_opened_by_name_only_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "mooncake" not in AUTO
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(TransportError, match="pip install mooncake-transfer-engine-non-cuda==") as caught:
        open_transports("mooncake")
    assert caught.value.reason is Reason.TRANSPORT_UNAVAILABLE


def test_probes_say_what_works() -> None:
    pytest.importorskip("nixl")
    assert [(result.name, result.works, result.reason) for result in probe_all()] == [
        ("cma", True, ""),
        ("nixl", True, ""),
    ]


def test_a_probe_writes_as_a_handoff_does(monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[Direction] = []
    submit = CmaTransport.submit

    def record(transport: CmaTransport, peer: Peer, direction: Direction, descriptors: Descriptors) -> Transfer:
        submitted.append(direction)
        return submit(transport, peer, direction, descriptors)

    monkeypatch.setattr(CmaTransport, "submit", record)
    assert probe("cma", FACTORIES["cma"]).works
    assert submitted == [Direction.WRITE]


def test_a_probe_whose_child_ends_in_the_middle_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.transport.probe._write_pattern", lambda *_: time.sleep(0.5))
    result = probe("cma", "tests.local.test_transport_choice:EndsAtOnce")
    assert not result.works
    assert "ends here" in result.reason


class EndsAtOnce(CmaTransport):
    """Ends the probe's child once it has told its end point."""

    def register(self, regions: Sequence[Region]) -> bytes:
        threading.Timer(0.2, self._end).start()
        return super().register(regions)

    def _end(self) -> None:
        print("ends here", file=sys.stderr, flush=True)
        os._exit(1)


def test_a_probe_says_why_not() -> None:
    result = probe("null", "tests.support.null_transport:NullTransport")
    assert not result.works
    assert "bytes differ" in result.reason
    assert "another transport" in result.remedy


@pytest.fixture
def remote_memory() -> Iterator[tuple[Transport, np.ndarray, bytes]]:
    transport, (source, region) = CmaTransport(), memory()
    source[:] = pattern(1, BYTES)
    yield transport, source, transport.register([region])
    transport.close()


def read_with(plan: FaultPlan, end_point: bytes, source: np.ndarray) -> tuple[Transfer, np.ndarray, FaultyTransport]:
    """Read the whole buffer backwards by 16 descriptors, for at most a quarter second."""
    transport, (local, region) = FaultyTransport(CmaTransport(), plan), memory()
    transport.register([region])
    starts = np.arange(16, dtype=np.uint64) * np.uint64(BYTES // 16)
    sources, destinations = starts + np.uint64(source.ctypes.data), starts[::-1] + np.uint64(local.ctypes.data)
    descriptors = np.column_stack([sources, destinations, np.full(16, BYTES // 16, np.uint64)])
    transfer = transport.submit(reach(transport, end_point), Direction.READ, descriptors)
    deadline = time.monotonic() + 0.25
    while transport.poll(transfer) is Status.PENDING and time.monotonic() < deadline:
        pass
    return transfer, local.reshape(16, -1)[::-1].reshape(-1), transport


DESCRIPTOR_BYTES = BYTES // 16


@pytest.mark.parametrize(
    ("plan", "wrong"),
    [
        (FaultPlan(), []),
        (FaultPlan(zero=ZeroRange(DESCRIPTOR_BYTES - 10, 20)), [(DESCRIPTOR_BYTES - 10, DESCRIPTOR_BYTES + 10)]),
        (FaultPlan(swap=SwapRanges(0, DESCRIPTOR_BYTES, DESCRIPTOR_BYTES)), [(0, 2 * DESCRIPTOR_BYTES)]),
        (FaultPlan(drop=3), [(3 * DESCRIPTOR_BYTES, 4 * DESCRIPTOR_BYTES)]),
        (FaultPlan(zero=ZeroRange(0, 20), min_bytes=BYTES + 1), []),
    ],
)
def test_faults_harm_exactly_what_they_name(
    remote_memory: tuple[Transport, np.ndarray, bytes], plan: FaultPlan, wrong: list[tuple[int, int]]
) -> None:
    _, source, end_point = remote_memory
    transfer, landed, transport = read_with(plan, end_point, source)
    assert transfer.status is Status.DONE
    assert transport.num_injected == (plan.min_bytes <= BYTES)
    differs = np.flatnonzero(source != landed)
    assert bool(len(differs)) == bool(wrong)
    for start, stop in wrong:
        assert differs.min() >= start
        assert differs.max() < stop
        assert len(differs) > 0.9 * (stop - start)


def test_faults_that_fail_hang_and_delay(remote_memory: tuple[Transport, np.ndarray, bytes]) -> None:
    _, source, end_point = remote_memory
    failed, landed, _ = read_with(FaultPlan(fail_after=2), end_point, source)
    assert failed.status is Status.FAILED
    assert np.array_equal(landed[: 2 * DESCRIPTOR_BYTES], source[: 2 * DESCRIPTOR_BYTES])
    assert not landed[2 * DESCRIPTOR_BYTES :].any()
    hanging, landed, transport = read_with(FaultPlan(hang=True), end_point, source)
    assert hanging.status is Status.PENDING
    assert not landed.any()
    assert transport.cancel(hanging) is Status.CANCELLED
    started = time.monotonic()
    delayed, _, _ = read_with(FaultPlan(delay_seconds=0.1), end_point, source)
    assert delayed.status is Status.DONE
    assert time.monotonic() - started >= 0.1


def test_a_slow_submission_moves_in_order_and_stops_in_the_middle(
    remote_memory: tuple[Transport, np.ndarray, bytes],
) -> None:
    _, source, end_point = remote_memory
    began_at = time.monotonic()
    slow, landed, _ = read_with(FaultPlan(bytes_per_second=10 * BYTES), end_point, source)
    assert slow.status is Status.DONE
    assert np.array_equal(landed, source)
    assert 0.08 < time.monotonic() - began_at < 5.0
    slower, landed, transport = read_with(FaultPlan(bytes_per_second=2 * BYTES), end_point, source)
    assert slower.status is Status.PENDING
    num_landed = slower.bytes_done
    assert 0.3 * BYTES < num_landed < 0.7 * BYTES
    assert np.array_equal(landed[:num_landed], source[:num_landed])
    assert transport.cancel(slower) is Status.CANCELLED
    assert transport.poll(slower) is Status.CANCELLED
    assert not landed[num_landed:].any()


class Dropping(FaultyTransport):
    """Loses the second descriptor."""

    def __init__(self) -> None:
        super().__init__(CmaTransport(), FaultPlan(drop=1))


class Unchecked(CmaTransport):
    """Cuts off what is outside, and so accepts everything."""

    def submit(self, peer: Peer, direction: Direction, descriptors: Descriptors) -> Transfer:
        return super().submit(peer, direction, descriptors[:1])


class CancelsLater(CmaTransport):
    """Answers a cancel as if the transfer still ran."""

    def cancel(self, transfer: Transfer) -> Status:
        return Status.PENDING


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (Dropping, lambda pair: TransportSuite().test_read_is_exact(pair, many_offsets()[:3])),
        (
            Unchecked,
            lambda pair: TransportSuite().test_unregistered_memory_is_refused(pair, Direction.READ, [1 << 40, 0, 9]),
        ),
        (CancelsLater, lambda pair: TransportSuite().test_nothing_lands_after_cancelled(pair)),
    ],
)
def test_the_suite_catches_a_broken_transport(broken: type, check: object) -> None:
    with open_pair("kvferry.transport.cma:CmaTransport") as pair:
        pair.local[:] = pattern(1, len(pair.local))
        pair.remote.fill(2)
        transport = broken()
        transport.register([Region(int(pair.local.ctypes.data), len(pair.local))])
        harmed = Pair(transport, pair.memory, pair.remote, reach(transport, pair.remote.end_point))
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            check(harmed)  # type: ignore[operator]
