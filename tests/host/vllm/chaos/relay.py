"""A relay in front of an engine's control ports: it forwards connections, and delays, loses or cuts them on command.

An engine listens on 127.0.0.1, or on a virtual host, and advertises the relay's address (``advertised_host``), where
the relay listens on the same ports. The relay knows nothing of the messages: a chunk is what one ``recv`` returns. TCP
itself loses no byte, so a connection of which the relay loses a chunk ends with that chunk, as where a host vanishes. A
question whose answer is lost is sent again: the engine gets the message twice.
"""

import os
import re
import socket
import struct
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal

ENGINE_HOST = "127.0.0.1"
CHUNK_BYTES = 64 << 10
CONNECT_SECONDS = 5.0
LISTENING = "0A"
_SOCKET = re.compile(r"socket:\[(\d+)\]")

Kind = Literal["questions", "answers"]


@dataclass(frozen=True)
class Trouble:
    """What the relay does to all connections.

    ``delay_seconds`` passes before a chunk is forwarded; of the chunks of the kind that ``loses`` names, each
    ``one_in``-th is lost with its connection; ``is_silent`` takes all bytes and forwards none.
    """

    delay_seconds: float = 0.0
    loses: Kind | None = None
    one_in: int = 3
    is_silent: bool = False


NO_TROUBLE = Trouble()


class _Link:
    """One connection through the relay: two sockets and a thread for each direction."""

    def __init__(self, relay: "Relay", client: socket.socket, engine: socket.socket) -> None:
        self._relay, self._sockets = relay, (client, engine)
        self._running = 2
        self._lock = threading.Lock()
        self.has_gap = False
        """Whether bytes are missing, so that what follows would be misread."""
        kinds: tuple[Kind, Kind] = ("questions", "answers")
        for kind, source, sink in zip(kinds, self._sockets, reversed(self._sockets), strict=True):
            threading.Thread(target=self._forward, args=(kind, source, sink), daemon=True).start()

    def cut(self) -> None:
        """End the connection on both sides, with a reset; twice is fine."""
        for each in self._sockets:
            with suppress(OSError):
                # Without lingering, closing sends a reset.
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                each.shutdown(socket.SHUT_RDWR)

    def _forward(self, kind: Kind, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while chunk := source.recv(CHUNK_BYTES):
                if not self._relay.may_pass(kind):
                    break
                if self._relay.trouble.is_silent or self.has_gap:
                    self.has_gap = True
                    continue
                sink.sendall(chunk)
        self.cut()
        with self._lock:
            self._running -= 1
            if not self._running:
                for each in self._sockets:
                    each.close()
                self._relay.forget(self)


class Relay:
    """Listens on ``address``; :meth:`open` names the ports. Threads of this process carry the connections.

    Peers see this address in place of the engine's, and the engine sees it in place of theirs, as behind a NAT.
    """

    def __init__(self, address: str, engine_host: str = ENGINE_HOST) -> None:
        self.address = address
        self._engine_host = engine_host
        self.trouble = NO_TROUBLE
        self.num_links = self.num_lost = self.num_cut = 0
        """Connections, chunks lost, and connections cut, since the start."""
        self._numbers = count(1)
        self._links: set[_Link] = set()
        self._listeners: dict[int, socket.socket] = {}
        self._lock = threading.Lock()

    @property
    def num_open(self) -> int:
        """Connections that there are now."""
        return len(self._links)

    def open(self, ports: Iterable[int]) -> None:
        """Accept connections for these ports of the engine."""
        for port in ports:
            listener = socket.create_server((self.address, port))
            self._listeners[port] = listener
            threading.Thread(target=self._accept, args=(port, listener), daemon=True).start()

    def close(self) -> None:
        """Refuse connections, as where no engine listens, and cut those that there are; twice is fine."""
        while self._listeners:
            with suppress(KeyError):
                self._shut(next(iter(self._listeners)))
        self.cut_all()

    def cut_all(self) -> int:
        """Cut every connection at once; return how many."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.cut()
        self.num_cut += len(links)
        return len(links)

    def end_trouble(self) -> None:
        """Forward again; connections that have lost bytes are cut."""
        self.trouble = NO_TROUBLE
        with self._lock:
            links = [link for link in self._links if link.has_gap]
        for link in links:
            link.cut()

    def may_pass(self, kind: Kind) -> bool:
        """Wait as long as the chunk is delayed; return False where it is lost."""
        trouble = self.trouble
        if trouble.delay_seconds:
            time.sleep(trouble.delay_seconds)
        if kind == trouble.loses and next(self._numbers) % trouble.one_in == 0:
            self.num_lost += 1
            return False
        return True

    def forget(self, link: _Link) -> None:
        """The connection has ended."""
        with self._lock:
            self._links.discard(link)

    def _accept(self, port: int, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                try:
                    engine = socket.create_connection((self._engine_host, port), CONNECT_SECONDS)
                except ConnectionRefusedError:
                    # Nothing listens there any more, and a peer must see that.
                    client.close()
                    break
                except OSError:
                    client.close()
                    continue
                for each in (client, engine):
                    each.settimeout(None)
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self.num_links += 1
                    self._links.add(_Link(self, client, engine))
        self._shut(port)

    def _shut(self, port: int) -> None:
        listener = self._listeners.pop(port, None)
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()


def listening_ports(process_ids: Iterable[int], engine_host: str = ENGINE_HOST) -> set[int]:
    """Return the ports on which these processes listen on an address of their host.

    >>> with socket.create_server((ENGINE_HOST, 0)) as listener:
    ...     listener.getsockname()[1] in listening_ports([os.getpid()])
    True
    """
    inodes, tables = set(), set()
    for process_id in process_ids:
        for descriptor in Path(f"/proc/{process_id}/fd").glob("*"):
            with suppress(OSError):
                found = _SOCKET.fullmatch(os.readlink(descriptor))
                inodes |= {found[1]} if found else set()
        with suppress(OSError):
            tables.add(Path(f"/proc/{process_id}/net/tcp").read_text())
    ports = set()
    for line in (line for table in tables for line in table.splitlines()[1:]):
        fields = line.split()
        address, _, port = fields[1].partition(":")
        if fields[3] == LISTENING and fields[9] in inodes and address == _in_table(engine_host):
            ports.add(int(port, 16))
    return ports


def _in_table(address: str) -> str:
    """Return the address as the kernel's table writes it: hexadecimal, the last byte first."""
    return socket.inet_aton(address)[::-1].hex().upper()
