"""Virtual hosts on one machine: network namespaces with names, boot ids and addresses of their own, on one switch.

A holder, a child process that sleeps, keeps the namespaces of each host. The namespaces have no name outside, so they
end with the holders and the processes that run in them: nothing stays behind, not even after ``SIGKILL``. Linux lets
root make them (``CAP_SYS_ADMIN`` and ``CAP_NET_ADMIN``). For example::

    with virtual_hosts(["prefill-0", "decode-0"], Path(log_folder)) as (prefill, decode):
        subprocess.run(prefill.command(["kvferry", "doctor"]))
"""

import ctypes
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import Reason
from kvferry.harness.child_process import ChildProcess, LaunchError

DEVICE = "eth0"
"""The network interface of each host."""
SWITCH = "switch"
"""The namespaces in which all cables end, and the bridge there that joins them."""
PROGRAMS = ("ip", "unshare", "nsenter", "mount", "hostname")
SYSTEM_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
START_SECONDS = 10.0
READY = "ready "
CLONE_NEWNET = 0x40000000
IPV4, IPV6 = "198.18.0", "fd6b:7666::"
"""Networks of the hosts: for tests of network devices (RFC 2544), and local addresses (RFC 4193)."""
LOCALHOST = ("localhost", "127.0.0.1", "::1")
NEEDED = "Run as root, in a container with CAP_SYS_ADMIN and CAP_NET_ADMIN."

# sysfs shows the interfaces of the network namespace in which it was mounted, and UCX looks for interfaces there.
HOLD = f"""
set -e
hostname "$1"
mount -t sysfs sysfs /sys
printf '%s\\n' "$2" > "$TMPDIR/boot_id"
mount --bind "$TMPDIR/boot_id" /proc/sys/kernel/random/boot_id
printf '%s\\n' "$3" > "$TMPDIR/hosts"
mount --bind "$TMPDIR/hosts" /etc/hosts
ip link set lo up
echo {READY}$$
exec sleep infinity
"""


@dataclass(frozen=True, slots=True)
class VirtualHost:
    """One host. ``holder_id`` is the process that holds its namespaces.

    Its cable ends at ``switch_port`` of the ``switch``.
    """

    name: str
    ipv4: str
    ipv6: str
    holder_id: int
    switch: "VirtualHost | None" = None
    switch_port: str = ""

    @property
    def address(self) -> str:
        """The IPv4 address, or the IPv6 address of a host that has no other."""
        return self.ipv4 or self.ipv6

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command line that runs a command on this host, in the same working directory."""
        namespaces = ["--target", str(self.holder_id), "--net", "--uts", "--mount", f"--wd={Path.cwd()}"]
        return [_program("nsenter"), *namespaces, "--", *command]

    def run(self, *command: str) -> str:
        """Run a short command on this host and return its output. Raises :class:`LaunchError` where it fails."""
        return _run(self.command([_program(command[0]), *command[1:]]))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let this thread open its sockets on this host; threads and processes that it starts meanwhile do so too.

        The thread keeps its own host name and files.
        """
        with (
            open("/proc/thread-self/ns/net", "rb") as former,
            open(f"/proc/{self.holder_id}/ns/net", "rb") as own,
        ):
            _enter_network(own.fileno())
            try:
                yield
            finally:
                _enter_network(former.fileno())


@contextmanager
def virtual_hosts(names: Sequence[str], log_folder: Path) -> Iterator[tuple[VirtualHost, ...]]:
    """Make hosts of these names, which reach each other by name and address, and end them on every exit.

    Raises :class:`LaunchError` where a program is missing (``missing-dependency``), or where the kernel or this
    process's privileges do not allow namespaces (``permission-denied``).
    """
    for program in PROGRAMS:
        _program(program)
    places = [(name, f"{IPV4}.{number}", f"{IPV6}{number:x}") for number, name in enumerate(names, start=1)]
    hosts_file = "\n".join(f"{address} {name}" for name, *addresses in [LOCALHOST, *places] for address in addresses)
    with ExitStack() as stack:
        switch = VirtualHost(SWITCH, "", "", _hold(stack, SWITCH, hosts_file, log_folder))
        switch.run("ip", "link", "add", SWITCH, "type", "bridge")
        switch.run("ip", "link", "set", SWITCH, "up")
        hosts: list[VirtualHost] = []
        for name, ipv4, ipv6 in places:
            holder_id = _hold(stack, name, hosts_file, log_folder)
            hosts.append(VirtualHost(name, ipv4, ipv6, holder_id, switch, f"port{len(hosts)}"))
            _plug(hosts[-1], switch)
        yield tuple(hosts)


def _hold(stack: ExitStack, name: str, hosts_file: str, log_folder: Path) -> int:
    """Start the holder of a host's namespaces, without network so far, and return its id; the stack ends it."""
    command = [_program("unshare"), "--net", "--uts", "--mount", "sh", "-c", HOLD]
    command += ["sh", name, str(uuid.uuid4()), hosts_file]
    log = log_folder / f"host-{name}.log"
    holder = ChildProcess.start(f"host {name}", command, log, {"PATH": SYSTEM_PATH}, grace_seconds=0.1)
    stack.callback(holder.stop)
    deadline = time.monotonic() + START_SECONDS
    while not (lines := [line for line in log.read_text().splitlines() if line.startswith(READY)]):
        if holder.exit_status() is not None or time.monotonic() > deadline:
            raise LaunchError(
                Reason.PERMISSION_DENIED,
                f"Linux does not let this process make the virtual host {name}: {holder.log_tail() or 'no answer'}.",
                NEEDED,
            )
        time.sleep(0.01)
    return int(lines[0].removeprefix(READY))


def _plug(host: VirtualHost, switch: VirtualHost) -> None:
    """Connect a host to the switch and give it its addresses."""
    pair = ["type", "veth", "peer", "name", DEVICE, "netns", str(host.holder_id)]
    switch.run("ip", "link", "add", host.switch_port, *pair)
    switch.run("ip", "link", "set", host.switch_port, "master", SWITCH, "up")
    # An interface that goes down would lose its IPv6 address.
    host.run("sh", "-c", f"echo 1 > /proc/sys/net/ipv6/conf/{DEVICE}/keep_addr_on_down")
    host.run("ip", "address", "add", f"{host.ipv4}/24", "dev", DEVICE)
    host.run("ip", "address", "add", f"{host.ipv6}/64", "dev", DEVICE, "nodad")
    host.run("ip", "link", "set", DEVICE, "up")


def _enter_network(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET):
        number = ctypes.get_errno()
        raise LaunchError(Reason.PERMISSION_DENIED, f"cannot enter a host's network: {os.strerror(number)}.", NEEDED)


def _program(name: str) -> str:
    found = shutil.which(name, path=SYSTEM_PATH)
    if found is None:
        raise LaunchError(
            Reason.MISSING_DEPENDENCY,
            f"virtual hosts need the program {name}, which is not installed.",
            "On Debian: apt-get install iproute2 util-linux mount hostname.",
        )
    return found


def _run(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS, check=True).stdout
    except subprocess.CalledProcessError as error:
        raise LaunchError(Reason.PERMISSION_DENIED, f"{' '.join(command)}: {error.stderr.strip()}.") from error
