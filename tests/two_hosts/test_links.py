"""A transfer between two hosts whose link fails: right bytes, or an error, and never a transfer that does not end."""

import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Thread
from typing import Any

import pytest

from kvferry.harness.virtual_hosts import VirtualHost

from ..local.moving_process import NUM_BYTES, WRITTEN_SEED
from ..support.transport_peer import pattern
from ..virtual_network import Hosts
from .network_faults import dropped, lossy, slow, unplugged

MOVING = "tests.local.moving_process"
SLOW_MEGABITS = 16
"""The 8 MiB of a move take 4 s."""
SHORT_SECONDS = 3.0
END_SECONDS = 90.0
"""UCX and Mooncake give a silent connection up after 30 to 60 s."""
FAULTS: dict[str, Callable[[VirtualHost], AbstractContextManager[None]]] = {"unplugged": unplugged, "dropped": dropped}
for_transports = pytest.mark.parametrize("transport", ["nixl", pytest.param("mooncake", marks=pytest.mark.mooncake)])


def lines_of(process: "subprocess.Popen[str]") -> Iterator[Any]:
    """Yield the lines of JSON that a process prints; Mooncake prints others."""
    assert process.stdout is not None
    return (json.loads(line) for line in process.stdout if line.startswith("{"))


@contextmanager
def moving(host: VirtualHost, role: str, transport: str, *more: str) -> Iterator["subprocess.Popen[str]"]:
    """Run one side of a move on this host."""
    with subprocess.Popen(
        host.command([sys.executable, "-m", MOVING, role, transport, host.ipv4, *more]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "MC_TCP_BIND_ADDRESS": host.ipv4},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def begin(serving: "subprocess.Popen[str]", mover: "subprocess.Popen[str]") -> Iterator[Any]:
    """Let a move begin; yield what the moving process says from then on."""
    tell(mover, json.dumps(next(lines_of(serving))))
    said = lines_of(mover)
    assert next(said) == {"has_begun": True}
    return said


def tell(process: "subprocess.Popen[str]", line: str) -> None:
    """Write a line to a process."""
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def is_right(found: Any, direction: str, serving: "subprocess.Popen[str]") -> bool:
    """Return whether the bytes that moved are right: those that were read, or those in the buffer of the other side."""
    if direction == "READ":
        return bool(found["is_right"])
    tell(serving, "")
    return bool(next(lines_of(serving))["checksum"] == zlib.crc32(pattern(WRITTEN_SEED, NUM_BYTES).data))


def moved_over(hosts: Hosts, transport: str, direction: str, fault: str, seconds: float) -> tuple[Any, float]:
    """Let the link of the serving host fail in mid-transfer, for so long or until the transfer ends.

    Return what the moving process says, and the seconds from the fault to the end.
    """
    prefill, decode, _ = hosts
    sender = prefill if direction == "READ" else decode
    with (
        moving(prefill, "serve", transport) as serving,
        slow(sender, SLOW_MEGABITS),
        moving(decode, "move-once", transport, direction) as mover,
    ):
        said = begin(serving, mover)
        found: list[Any] = []
        waiting = Thread(target=lambda: found.extend(said))
        began_at = time.monotonic()
        with FAULTS[fault](prefill):
            waiting.start()
            waiting.join(seconds)
            assert found or seconds < END_SECONDS, f"not ended {seconds} s after the link failed"
        waiting.join(END_SECONDS)
        seconds = time.monotonic() - began_at
        return {**found[0], "is_right": is_right(found[0], direction, serving)}, seconds


@for_transports
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("direction", ["READ", "WRITE"])
def test_a_link_that_fails_for_a_moment_delays_a_transfer(
    transport: str, direction: str, fault: str, hosts: Hosts
) -> None:
    found, seconds = moved_over(hosts, transport, direction, fault, SHORT_SECONDS)
    assert (found["status"], found["is_right"]) == ("done", True)
    assert seconds > SHORT_SECONDS, "the transfer ended before the link failed"


@for_transports
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("direction", ["READ", "WRITE"])
def test_a_link_that_stays_cut_ends_a_transfer_with_an_error(
    transport: str, direction: str, fault: str, hosts: Hosts
) -> None:
    found, seconds = moved_over(hosts, transport, direction, fault, END_SECONDS)
    print(f"{transport}, {direction}, {fault}: {found['error']} after {seconds:.0f} s")
    assert found["status"] == "failed"


@for_transports
@pytest.mark.parametrize("direction", ["READ", "WRITE"])
def test_a_wire_of_20_ms_that_loses_a_packet_of_a_hundred_slows_a_transfer(
    transport: str, direction: str, hosts: Hosts
) -> None:
    prefill, decode, _ = hosts
    with (
        lossy(prefill, delay_seconds=0.02, loss=0.01) as wire,
        moving(prefill, "serve", transport) as serving,
        slow(prefill if direction == "READ" else decode, SLOW_MEGABITS),
        moving(decode, "move-once", transport, direction) as mover,
    ):
        found = next(begin(serving, mover))
        assert wire.num_lost > 5
        assert wire.num_carried > 1000
        assert found["status"] == "done"
        assert is_right(found, direction, serving)
