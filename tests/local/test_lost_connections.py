"""Connections that die while both processes live: the transfers fail or are tried anew, and no engine is restarted."""

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from kvferry.execution.executor import JobResult
from kvferry.handoff.messages import Handle
from kvferry.handoff.remote_holds import RemoteHold

from ..waits import wait_until
from .engines_in_process import EPOCH, HOST, Rank, filled_ranks
from .engines_that_write import ReceivingRank
from .handing_process import SOURCE_IDS

pytestmark = pytest.mark.slow

TARGET_IDS = [1, 2, 4]
NUM_CUTS = 5
SLOWLY = "20000"
"""Bytes per second: a load takes some tenths of a second."""
MAX_FAILED = 3
"""Loads that may fail after each cut: the one under way, and those that a dead connection was made for."""


@contextmanager
def handing_process(transport: str, bytes_per_second: str) -> Iterator[tuple[int, "subprocess.Popen[bytes]"]]:
    """Start a prefill engine, and return the port of its directory. Its UCX uses TCP only."""
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    arguments = [sys.executable, "-m", "tests.local.handing_process", transport, bytes_per_second]
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


@pytest.mark.parametrize("moment", ["before", "during"])
def test_vllm_backport_33_a_connection_that_dies_under_a_living_peer_is_made_again(
    moment: str, cut_connections: Callable[[], int], tcp_only: None
) -> None:
    """UCX connections died after three days, and both engines had to be restarted. Both the connection for the bytes
    and those for messages are cut. A write that fails so costs a fence, and one fence follows another after
    ``fence_seconds`` only.
    """
    receiver = ReceivingRank(Rank(0, 1), transport="nixl", fence_seconds=1.0)
    cache, number = receiver.rank.cache, 0
    try:
        with handing_process("nixl", SLOWLY if moment == "during" else "") as (port, child):

            def load(cut: Callable[[], int] | None = None) -> JobResult:
                nonlocal number
                hold = RemoteHold("p", EPOCH, HOST, port, Handle(f"transfer {number}", 0))
                receiver.receive(hold, TARGET_IDS, f"transfer {number}", f"job {number}", seconds=20.0)
                number += 1
                if cut is not None:
                    wait_until(lambda: bool(cache.any()), "nothing is written")
                    assert cut() >= 1, "nothing was cut"
                return receiver.result(40.0)

            assert load().error is None
            for _ in range(NUM_CUTS):
                cache[:] = 0
                if moment == "before":
                    assert cut_connections() >= 1, "nothing was cut"
                results = [load(cut_connections if moment == "during" else None)]
                while results[-1].error is not None and len(results) <= MAX_FAILED:
                    results.append(load())
                assert results[-1].error is None, results[-1].error
                np.testing.assert_array_equal(cache[TARGET_IDS], expected())
            assert child.poll() is None
    finally:
        receiver.close()
