"""Memory of devices over Mooncake, whose engine is faked, by each of its two distributions."""

import ctypes
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import ClassVar

import msgspec
import numpy as np
import pytest

from kvferry.errors import Reason, TransportError
from kvferry.layout.shard import Region
from kvferry.transport import mooncake
from kvferry.transport.mooncake import MooncakeEndPoint, MooncakeTransport
from kvferry.transport.protocol import Direction, Status, reach

from .untouchable import DEVICE, DeviceMemory, reachable, span_of

WITH_CUDA, WITHOUT_CUDA = "mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"
VERSION = "0.3.13.post1"
BYTES = 8192


class FakeEngine:
    """In the place of ``mooncake.engine.TransferEngine``: the same calls, copies by way of the second mapping.

    A build without CUDA takes every address for the host's: it would end the process. So here it is an error.
    """

    has_cuda = True
    engines: ClassVar[dict[str, "FakeEngine"]] = {}

    def initialize(self, host: str, *_: str) -> int:
        self._listeners = [socket.create_server(("", 0)) for _ in range(2)]
        self._place = f"{host}:{self.get_rpc_port()}"
        self._registered: list[tuple[int, int]] = []
        self._ended: dict[int, int] = {}
        self._num_batches = 0
        self.engines[self._place] = self
        threading.Thread(target=self._greet, daemon=True).start()
        return 0

    def get_rpc_port(self) -> int:
        return int(self._listeners[0].getsockname()[1])

    def register_memory(self, address: int, length: int) -> int:
        assert self.has_cuda or span_of(address, 1) is None, "this build does not know the device"
        self._registered.append((address, length))
        return 0

    def batch_transfer_async_read(self, place: str, here: list[int], there: list[int], lengths: list[int]) -> int:
        return self._move(place, there, here, lengths, there)

    def batch_transfer_async_write(self, place: str, here: list[int], there: list[int], lengths: list[int]) -> int:
        return self._move(place, here, there, lengths, there)

    def transfer_check_status(self, batch: int) -> int:
        return self._ended.pop(batch)

    def get_batch_transfer_status(self, batches: list[int]) -> int:
        return min(0 if self._ended.pop(batch) == 1 else -1 for batch in batches)

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()

    def _move(self, place: str, sources: list[int], to: list[int], lengths: list[int], there: list[int]) -> int:
        self._num_batches += 1
        batch, self._ended[self._num_batches] = self._num_batches, 1
        for source, destination, remote, length in zip(sources, to, there, lengths, strict=True):
            if not self.engines[place].has_registered(remote, length):
                self._ended[batch] = -1
                continue
            ctypes.memmove(reachable(destination, length), reachable(source, length), length)
        return batch

    def has_registered(self, address: int, length: int) -> bool:
        return any(begin <= address and address + length <= begin + size for begin, size in self._registered)

    def _greet(self) -> None:
        try:
            while True:
                self._listeners[0].accept()[0].close()
        except OSError:  # closed
            return


Opens = Callable[..., MooncakeTransport]


@pytest.fixture
def opens(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opens]:
    """Return a function that opens a transport with these distributions installed."""
    made: list[MooncakeTransport] = []
    monkeypatch.setattr(FakeEngine, "engines", {})
    for name in ("mooncake", "mooncake.engine"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(TransferEngine=FakeEngine))  # type: ignore[arg-type]

    def opened(*distributions: str, version: str = VERSION) -> MooncakeTransport:
        installed = dict.fromkeys(distributions, version)
        monkeypatch.setattr(mooncake, "_installed_version", installed.get)
        monkeypatch.setattr(FakeEngine, "has_cuda", distributions == (WITH_CUDA,))
        made.append(MooncakeTransport())
        return made[-1]

    yield opened
    for transport in made:
        transport.close()
    for engine in FakeEngine.engines.values():
        engine.close()


def end_point_of(encoded: bytes) -> MooncakeEndPoint:
    return msgspec.msgpack.decode(encoded, type=MooncakeEndPoint)


@pytest.mark.parametrize("direction", Direction)
def test_the_build_for_cuda_moves_memory_of_devices_and_of_the_host(direction: Direction, opens: Opens) -> None:
    theirs, ours = opens(WITH_CUDA), opens(WITH_CUDA)
    assert ours.capabilities.moves(DEVICE)
    on_device, to_device = DeviceMemory(BYTES), DeviceMemory(2 * BYTES)
    on_host = np.full(BYTES, 2, np.uint8)
    on_device.content[:] = 1
    there = [on_device.region, Region(int(on_host.ctypes.data), BYTES)]
    read = direction is Direction.READ
    side, other = (theirs, ours) if read else (ours, theirs)
    source, destination = side.register(there), other.register([to_device.region])
    peer = reach(ours, source if read else destination)
    to = to_device.region.base_address
    rows = [[region.base_address, to + BYTES * at, BYTES] for at, region in enumerate(there)]
    transfer = ours.submit(peer, direction, np.array(rows, np.uint64))
    while ours.poll(transfer) is Status.PENDING:
        pass
    assert transfer.status is Status.DONE, transfer.error
    assert to_device.content.reshape(2, -1)[:, [0, -1]].tolist() == [[1, 1], [2, 2]]


def test_an_end_point_names_the_device_of_each_region(opens: Opens) -> None:
    transport, memory = opens(WITH_CUDA), DeviceMemory(BYTES)
    host = np.zeros(64, np.uint8)
    address = int(host.ctypes.data)
    only_host = transport.register([Region(address, 64)])
    assert "devices" not in msgspec.msgpack.decode(only_host), "a peer of an earlier version does not know the field"
    both = end_point_of(transport.register([memory.region]))
    names = dict(zip(map(tuple, both.regions), both.devices, strict=True))
    assert names == {(address, 64): "cpu", (memory.region.base_address, BYTES): DEVICE}
    assert len(FakeEngine.engines) == 1
    [engine] = FakeEngine.engines.values()
    assert engine.has_registered(memory.region.base_address, BYTES)


def test_two_allocations_of_a_device_are_registered_each_for_itself(opens: Opens) -> None:
    theirs, ours, first = opens(WITH_CUDA), opens(WITH_CUDA), DeviceMemory(BYTES)
    second, here = DeviceMemory(BYTES, behind=first), DeviceMemory(BYTES)
    encoded, begin = theirs.register([second.region, first.region]), first.region.base_address
    assert [tuple(each) for each in end_point_of(encoded).regions] == [(begin, BYTES), (begin + BYTES, BYTES)]
    assert not any(engine.has_registered(begin, 2 * BYTES) for engine in FakeEngine.engines.values())
    ours.register([here.region])
    across = np.array([[begin + BYTES // 2, here.region.base_address, BYTES]], np.uint64)
    with pytest.raises(TransportError) as caught:
        ours.submit(reach(ours, encoded), Direction.READ, across)
    assert caught.value.reason is Reason.UNREGISTERED_RANGE


@pytest.mark.parametrize("changed", [{"devices": [DEVICE]}, {"devices": [DEVICE] * 3}, {"devices": ["npu:0", "cpu"]}])
def test_an_end_point_whose_devices_are_not_those_of_its_regions_is_malformed(
    changed: dict[str, list[str]], opens: Opens
) -> None:
    ours, theirs = opens(WITH_CUDA), opens(WITH_CUDA)
    encoded = msgspec.msgpack.decode(theirs.register([DeviceMemory(BYTES).region, Region(1 << 40, 64)]))
    with pytest.raises(TransportError) as caught:
        ours.connect(msgspec.msgpack.encode({**encoded, **changed}))
    assert caught.value.reason is Reason.MALFORMED_MESSAGE


@pytest.mark.parametrize("distributions", [(WITHOUT_CUDA,), (WITHOUT_CUDA, WITH_CUDA)], ids=["without CUDA", "both"])
def test_a_build_without_cuda_refuses_memory_of_devices(distributions: tuple[str, ...], opens: Opens) -> None:
    """Where both distributions are installed, the one that was installed last is the engine: nobody knows which."""
    transport, memory = opens(*distributions), DeviceMemory(BYTES)
    assert not transport.capabilities.moves(DEVICE)
    with pytest.raises(
        TransportError, match=r'processor makes its copies.*Set "transport" to "auto" or "nixl"'
    ) as caught:
        transport.register([memory.region])
    assert caught.value.reason is Reason.UNSUPPORTED
    [engine] = FakeEngine.engines.values()
    assert not engine.has_registered(memory.region.base_address, 1)
    host = np.zeros(64, np.uint8)
    assert end_point_of(transport.register([Region(int(host.ctypes.data), 64)])).devices == []


@pytest.mark.parametrize("distribution", [WITH_CUDA, WITHOUT_CUDA])
def test_each_distribution_is_accepted_in_the_version_that_was_read(distribution: str, opens: Opens) -> None:
    assert opens(distribution).capabilities.moves(DEVICE) is (distribution == WITH_CUDA)
    with pytest.raises(TransportError, match=r"0\.3\.12") as caught:
        opens(distribution, version="0.3.12")
    assert caught.value.reason is Reason.TRANSPORT_UNAVAILABLE
