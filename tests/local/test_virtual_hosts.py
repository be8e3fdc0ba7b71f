"""Two virtual hosts differ in all that the product looks at, and the network transports move bytes between them."""

import importlib
import json
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from socket import AF_INET, SOCK_DGRAM, create_connection, create_server, socket

import pytest

from kvferry.errors import Reason
from kvferry.harness import virtual_hosts as module
from kvferry.harness.child_process import LaunchError
from kvferry.harness.virtual_hosts import DEVICE, VirtualHost, virtual_hosts

from ..support.transport_peer import pattern
from ..virtual_network import Hosts, make_hosts
from ..waits import wait_until
from .moving_process import NUM_BYTES, WRITTEN_SEED

pytestmark = pytest.mark.slow

MOVING = "tests.local.moving_process"
IP_AND_UDP_HEADERS = 28
IDENTITY = "from kvferry.transport.protocol import own_identity; print(own_identity().boot_id)"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Two hosts."""
    yield from make_hosts(tmp_path_factory.mktemp("hosts"), "prefill-0", "decode-0")


def moving(host: VirtualHost, role: str, transport: str, address: str) -> list[str]:
    """Return the command of one side of a move on this host."""
    return host.command([sys.executable, "-m", MOVING, role, transport, address])


def mooncake_at(address: str) -> dict[str, str]:
    """Return the environment of a process that listens at this address with any transport."""
    return {**os.environ, "MC_TCP_BIND_ADDRESS": address}


@contextmanager
def serving(host: VirtualHost, transport: str, address: str) -> Iterator["subprocess.Popen[str]"]:
    """Run the side of a move that waits."""
    command = moving(host, "serve", transport, address)
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=mooncake_at(address)
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: "subprocess.Popen[str]") -> str:
    """Return the next line of JSON that a process prints; Mooncake prints others."""
    assert process.stdout is not None
    return next(line for line in process.stdout if line.startswith("{"))


def moved_between(hosts: Hosts, transport: str, addresses: tuple[str, str]) -> str:
    """Read from and write to the other host; check every byte and return the transport that did it."""
    with serving(hosts[1], transport, addresses[1]) as other:
        there = line_of(other)
        command = moving(hosts[0], "move", transport, addresses[0])
        environment = mooncake_at(addresses[0])
        done = subprocess.run(
            command, input=there, capture_output=True, text=True, env=environment, timeout=90, check=False
        )
        assert done.returncode == 0, done.stderr
        result = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
        assert result["is_right"]
        assert other.stdin is not None
        other.stdin.write("\n")
        other.stdin.flush()
        assert json.loads(line_of(other))["checksum"] == zlib.crc32(pattern(WRITTEN_SEED, NUM_BYTES).data)
    return str(result["transport"])


def test_hosts_have_names_boot_ids_and_addresses_of_their_own(hosts: Hosts) -> None:
    names = {host.run("hostname").strip() for host in hosts}
    boot_ids = {subprocess.check_output(host.command([sys.executable, "-c", IDENTITY])) for host in hosts}
    assert names == {"prefill-0", "decode-0"}
    assert len(boot_ids) == 2
    own = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    assert own not in boot_ids
    assert all(f"{DEVICE}" in host.run("ls", "/sys/class/net").split() for host in hosts)


@pytest.mark.parametrize("place", ["ipv4", "ipv6", "name"])
def test_hosts_reach_each_other_over_tcp_and_nobody_else_reaches_them(hosts: Hosts, place: str) -> None:
    prefill, decode = hosts
    address = getattr(decode, place)
    numeric = decode.ipv4 if place == "name" else address
    with decode.entered():
        family = 10 if ":" in numeric else 2
        listener = create_server((numeric, 0), family=family)
    with closing(listener):
        port = listener.getsockname()[1]
        connect = f"import socket; print(socket.create_connection(({address!r}, {port}), 5).getpeername()[0])"
        found = subprocess.check_output(prefill.command([sys.executable, "-c", connect]), text=True)
        # Elsewhere the name is unknown and the network has no such host.
        with pytest.raises(OSError):
            create_connection((address, port), timeout=0.5)
    assert found.strip() == numeric


def test_auto_moves_bytes_between_hosts_without_cross_memory_attach(hosts: Hosts) -> None:
    """The processes share a kernel and a user, so that only the boot id keeps ``cma`` away."""
    prefill, decode = hosts
    assert moved_between(hosts, "auto", (prefill.ipv4, decode.ipv4)) == "nixl"


@pytest.mark.mooncake
def test_mooncake_moves_bytes_between_hosts(hosts: Hosts) -> None:
    prefill, decode = hosts
    assert moved_between(hosts, "mooncake", (prefill.ipv4, decode.ipv4)) == "mooncake"


def test_nixl_moves_bytes_between_hosts_that_have_ipv6_addresses_only(tmp_path: Path) -> None:
    for prefill, decode in make_hosts(tmp_path, "prefill-6", "decode-6"):
        for host in (prefill, decode):
            host.run("ip", "-4", "address", "flush", "dev", DEVICE)
        assert moved_between((prefill, decode), "auto", (prefill.ipv6, decode.ipv6)) == "nixl"


def holders() -> set[int]:
    """Return the processes that are not in the network namespace of this one."""
    own = os.stat("/proc/self/ns/net").st_ino
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "ns/net").stat().st_ino != own:
                found.add(int(entry.name))
        except OSError:
            continue
    return found


OWNER = """
import sys, time
from pathlib import Path
from kvferry.harness.virtual_hosts import virtual_hosts
with virtual_hosts(["a", "b"], Path(sys.argv[1])) as hosts:
    print(*(host.holder_id for host in hosts), flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_hosts_end_with_their_owner(hosts: Hosts, tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as owner:
        assert owner.stdout is not None
        found = {int(word) for word in owner.stdout.readline().split()}
        assert len(found) == 2
        assert found <= holders()
        owner.send_signal(number)
    wait_until(lambda: not found & holders(), "a holder stays")


def test_hosts_end_with_a_failure_and_leave_this_thread_where_it_was(hosts: Hosts, tmp_path: Path) -> None:
    before, own = holders(), os.readlink("/proc/thread-self/ns/net")

    def fail() -> None:
        with virtual_hosts(["a"], tmp_path) as made, made[0].entered():
            assert os.readlink("/proc/thread-self/ns/net") != own
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert os.readlink("/proc/thread-self/ns/net") == own
    assert holders() <= before


def test_a_refusal_of_the_kernel_and_a_missing_program_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HOLD", "echo 'Operation not permitted' >&2; exit 1")
    with pytest.raises(LaunchError, match="Operation not permitted") as caught, virtual_hosts(["a"], tmp_path):
        pass
    assert caught.value.reason is Reason.PERMISSION_DENIED
    assert "CAP_SYS_ADMIN" in caught.value.remedy
    monkeypatch.setattr(module, "SYSTEM_PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="the program ip") as caught, virtual_hosts(["a"], tmp_path):
        pass
    assert caught.value.reason is Reason.MISSING_DEPENDENCY


@pytest.mark.parametrize("mtu", [9000, 65535, 1500])
def test_packets_of_the_length_that_a_benchmark_sets_reach_the_other_host(
    hosts: Hosts, mtu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The switch's end of a cable drops what is longer than its own length: a benchmark waited for ever."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    set_mtu = importlib.import_module("plain_tcp").set_mtu
    sender, receiver = hosts
    for host in hosts:
        set_mtu(host, mtu)
    with receiver.entered():
        receiving = socket(AF_INET, SOCK_DGRAM)
    with sender.entered():
        sending = socket(AF_INET, SOCK_DGRAM)
    with receiving, sending:
        receiving.bind((receiver.ipv4, 0))
        receiving.settimeout(10.0)
        packet = bytes(mtu - IP_AND_UDP_HEADERS)
        sending.sendto(packet, receiving.getsockname())
        assert len(receiving.recv(mtu)) == len(packet)
