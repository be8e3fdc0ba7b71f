"""Connections that die while both processes live: the transfers fail or are tried anew, and no engine is restarted."""

import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from kvferry.errors import TransportError
from kvferry.execution.job import JobResult, Phase
from kvferry.handoff.messages import Handle
from kvferry.handoff.remote_holds import RemoteHold

from .engines_in_process import EPOCH, GENERATION, HOST, DecodeRank, Rank, filled_ranks, whole_blocks
from .engines_that_write import ReceivingRank
from .handing_process import SOURCE_IDS

pytestmark = pytest.mark.slow

TARGET_IDS = [1, 2, 4]
NUM_CUTS = 5
MAX_FAILED = 3
"""Transfers that may fail after each cut: the one under way, and those that a dead connection was made for."""


@contextmanager
def handing_process(transport: str, mode: str) -> Iterator[tuple[int, "subprocess.Popen[bytes]"]]:
    """Start a prefill engine, and return the port of its directory. Its UCX uses TCP only."""
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    arguments = [sys.executable, "-m", "tests.local.handing_process", transport, mode]
    child = subprocess.Popen(arguments, cwd=root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        yield int(child.stdout.readline()), child
    finally:
        child.kill()
        child.wait()


def tcp_connections() -> dict[int, int]:
    """Return a descriptor of each TCP connection of this process, by the number of its socket."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            status = os.fstat(int(name))
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as held:
                if held.family in (socket.AF_INET, socket.AF_INET6) and held.type == socket.SOCK_STREAM:
                    held.getpeername()
                    found[status.st_ino] = int(name)
    return found


@pytest.fixture
def cut_connections() -> Callable[[], int]:
    """Return what ends every TCP connection made since, as a firewall does, and returns their number.

    The processes live on. Connections from before, such as those of pytest's plugins, are left alone.
    """
    earlier = tcp_connections().keys()

    def cut() -> int:
        found = tcp_connections()
        for inode in found.keys() - earlier:
            with suppress(OSError), socket.socket(fileno=os.dup(found[inode])) as held:
                held.shutdown(socket.SHUT_RDWR)
        return len(found.keys() - earlier)

    return cut


@pytest.fixture
def tcp_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let UCX use TCP, as between hosts."""
    pytest.importorskip("nixl")
    monkeypatch.setenv("UCX_TLS", "tcp")


def expected() -> np.ndarray:
    return filled_ranks(1)[0].cache[SOURCE_IDS]


def read(decode: DecodeRank, hold: RemoteHold, cut: Callable[[], int] | None = None) -> JobResult:
    """Load, with the connections ``cut`` under the transfer, and do as a worker does with a failed load."""
    load = decode.start(hold, [whole_blocks("full", SOURCE_IDS, TARGET_IDS)], seconds=20.0)
    while load.phase is not Phase.DONE:
        moved = load.advance(decode.scratch, time.monotonic())
        if cut is not None and load.phase is Phase.MOVING:
            cut()
            cut = None
        if not moved:
            time.sleep(0.001)
    result = load.result(time.monotonic())
    if isinstance(result.error, TransportError):
        decode.engines.suspect(hold)
    return result


@pytest.mark.parametrize("moment", ["before", "during"])
def test_vllm_backport_33_a_connection_that_dies_under_a_living_peer_is_made_again_for_reads(
    moment: str, cut_connections: Callable[[], int], tcp_only: None
) -> None:
    """UCX connections died after three days, and both engines had to be restarted."""
    decode = DecodeRank("nixl", Rank(0, 1))
    cache = decode.rank.cache  # type: ignore[attr-defined]
    try:
        with handing_process("nixl", "pull") as (port, child):
            hold = RemoteHold("p", EPOCH, HOST, port, Handle("a", GENERATION))
            assert read(decode, hold).error is None
            num_cut = 0
            for _ in range(NUM_CUTS):
                cache[:] = 0
                if moment == "before":
                    num_cut += cut_connections()
                results = [read(decode, hold, cut_connections if moment == "during" else None)]
                while results[-1].error is not None and len(results) <= MAX_FAILED:
                    assert isinstance(results[-1].error, TransportError), results[-1].error
                    results.append(read(decode, hold))
                assert results[-1].error is None, "the connection is not made again"
                np.testing.assert_array_equal(cache[TARGET_IDS], expected())
            assert moment == "during" or num_cut >= NUM_CUTS, "nothing was cut"
            assert child.poll() is None
    finally:
        decode.close()


def test_vllm_backport_33_a_connection_that_dies_under_a_living_peer_is_made_again_for_pushes(
    cut_connections: Callable[[], int], tcp_only: None
) -> None:
    """Both the connection for the bytes and those for messages are cut. A write that fails so costs a fence, and one
    fence follows another after ``fence_seconds`` only.
    """
    receiver = ReceivingRank(Rank(0, 1), transport="nixl", fence_seconds=1.0)
    cache, number = receiver.rank.cache, 0
    try:
        with handing_process("nixl", "push") as (port, child):

            def push() -> JobResult:
                nonlocal number
                hold = RemoteHold("p", EPOCH, HOST, port, Handle(f"transfer {number}", 0))
                receiver.receive(hold, TARGET_IDS, f"transfer {number}", f"job {number}", seconds=20.0)
                number += 1
                return receiver.result(40.0)

            assert push().error is None
            for _ in range(NUM_CUTS):
                cache[:] = 0
                assert cut_connections() >= 1, "nothing was cut"
                results = [push()]
                while results[-1].error is not None and len(results) <= MAX_FAILED:
                    results.append(push())
                assert results[-1].error is None, results[-1].error
                np.testing.assert_array_equal(cache[TARGET_IDS], expected())
            assert child.poll() is None
    finally:
        receiver.close()
