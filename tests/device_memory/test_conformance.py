"""The transport for device memory passes the shipped conformance suite between processes; others refuse that memory."""

import ctypes
import faulthandler
import os
import signal

import numpy as np
import pytest

from kvferry.errors import KVFerryError, Reason, SettingsError, TransportError
from kvferry.layout.shard import Region
from kvferry.transport.cma import CmaTransport
from kvferry.transport.protocol import Direction, Status, reach
from kvferry.transport.registry import TransportSet, make

from ..support.faults import FaultPlan, FaultyTransport, ZeroRange
from ..support.null_transport import NullTransport
from ..support.transport_suite import Pair, TransportSuite, open_pair
from . import standin_nixl
from .standin_transport import FACTORY, MEMORY, SuiteMemory
from .untouchable import DeviceMemory


class TestDeviceMemory(TransportSuite):
    factory = FACTORY
    memory = MEMORY


def test_a_touch_of_device_memory_ends_the_process() -> None:
    memory = DeviceMemory(4096)
    memory.content[:] = 7
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        os._exit(ctypes.string_at(memory.region.base_address, 1)[0])
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV
    with pytest.raises(OSError, match="Bad address"):
        os.write(1, (ctypes.c_uint8 * 8).from_address(memory.region.base_address))


def test_each_pair_of_kinds_of_memory_is_a_submission_of_its_own() -> None:
    with open_pair(FACTORY, memory=MEMORY) as pair:
        standin_nixl.submissions.clear()
        TransportSuite.test_one_submission_moves_between_all_kinds_of_memory.__get__(suite())(pair, Direction.READ)
        kinds = {(local, remote) for _, local, remote in standin_nixl.submissions}
        assert kinds == {("VRAM", "VRAM"), ("VRAM", "DRAM"), ("DRAM", "VRAM"), ("DRAM", "DRAM")}


def suite() -> TransportSuite:
    return TestDeviceMemory()


def test_a_device_has_its_number_on_each_side() -> None:
    """A range of another device at the same end point is not taken for one of this device."""
    source, destination = make(FACTORY), make(FACTORY)
    there, here = [DeviceMemory(8192, f"cuda:{number}") for number in (3, 1)], DeviceMemory(16384, "cuda:2")
    for number, memory in enumerate(there):
        memory.content[:] = number + 1
    peer = reach(destination, source.register([memory.region for memory in there]))
    destination.register([here.region])
    rows = [[memory.region.base_address, here.region.base_address + 8192 * at, 8192] for at, memory in enumerate(there)]
    pair = Pair(destination, SuiteMemory(1), None, peer)  # type: ignore[arg-type]
    assert pair.finish(destination.submit(peer, Direction.READ, np.array(rows, np.uint64))) is Status.DONE
    assert here.content.reshape(2, -1)[:, 0].tolist() == [1, 2]
    for transport in (source, destination):
        transport.close()


def test_allocations_that_lie_side_by_side_are_registered_each_for_itself() -> None:
    """As caches that are allocated one after the other may: the end of one is the begin of the other."""
    source, destination = make(FACTORY), make(FACTORY)
    there, here = DeviceMemory(8192), DeviceMemory(16384)
    behind = DeviceMemory(8192, behind=there)
    assert there.region.base_address + 8192 == behind.region.base_address
    there.content[:], behind.content[:] = 1, 2
    peer = reach(destination, source.register([behind.region, there.region]))
    destination.register([here.region])
    begin, to = there.region.base_address, here.region.base_address
    pair = Pair(destination, SuiteMemory(1), None, peer)  # type: ignore[arg-type]
    rows = np.array([[begin, to, 8192], [begin + 8192, to + 8192, 8192]], np.uint64)
    assert pair.finish(destination.submit(peer, Direction.READ, rows)) is Status.DONE
    assert here.content.reshape(2, -1)[:, [0, -1]].tolist() == [[1, 1], [2, 2]]
    with pytest.raises(TransportError) as caught:
        destination.submit(peer, Direction.READ, np.array([[begin + 4096, to, 8192]], np.uint64))
    assert caught.value.reason is Reason.UNREGISTERED_RANGE
    for transport in (source, destination):
        transport.close()


def test_a_transport_of_the_processor_refuses_device_memory_and_says_what_to_set() -> None:
    transport = CmaTransport()
    with pytest.raises(
        TransportError, match=r'processor makes its copies.*Set "transport" to "auto" or "nixl"'
    ) as caught:
        transport.register([DeviceMemory(4096).region])
    assert caught.value.reason is Reason.UNSUPPORTED
    transport.close()


@pytest.mark.parametrize("device", ["npu:0", "cuda", "cuda:1234"])
def test_memory_that_is_neither_of_the_host_nor_of_a_numbered_cuda_device_is_refused(device: str) -> None:
    transport = make(FACTORY)
    with pytest.raises(TransportError, match="is neither") as caught:
        transport.register([Region(1 << 40, 4096, device)])
    assert caught.value.reason is Reason.UNSUPPORTED
    transport.close()


def test_memory_that_nixl_does_not_find_on_the_device_says_what_to_set() -> None:
    transport, memory = make(FACTORY), np.zeros(4096, np.uint8)
    with pytest.raises(TransportError, match="UCX_TLS") as caught:
        transport.register([Region(int(memory.ctypes.data), 4096, "cuda:0")])
    assert caught.value.reason is Reason.TRANSPORT_UNAVAILABLE
    transport.close()


def test_of_several_transports_those_that_do_not_move_the_memory_are_left_out() -> None:
    able, unable = make(FACTORY), CmaTransport()
    side = TransportSet({"cma": unable, "nixl": able})
    host = np.zeros(4096, np.uint8)
    assert list(side.register([Region(int(host.ctypes.data), 4096)])) == ["cma", "nixl"]
    assert list(side.register([DeviceMemory(4096).region, Region(int(host.ctypes.data), 4096)])) == ["nixl"]
    with pytest.raises(TransportError) as caught:
        unable.register([])
    assert caught.value.reason is Reason.CLOSED
    side.close()
    with pytest.raises(KVFerryError, match="cma moves host memory only"):
        TransportSet({"cma": CmaTransport(), "other": CmaTransport()}).register([DeviceMemory(4096).region])


def test_faults_that_the_processor_makes_are_refused_on_a_device() -> None:
    faulty = FaultyTransport(NullTransport(), FaultPlan(zero=ZeroRange(0, 8)))
    with pytest.raises(SettingsError, match="this memory is a device's"):
        faulty.register([DeviceMemory(4096).region])
