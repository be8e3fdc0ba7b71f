"""Registers this engine with vllm-router, in the one mode in which the router sends to both engines at once.

With ``--kv-connector moriio --vllm-discovery-address`` each engine sends the router a message about once a second, and
the router forgets an engine after five seconds without one. The first message waits until the engine's API server
listens, which is seconds after its scheduler has started: the router would send requests to it at once. The router puts
an engine's ``zmq_address`` into the id of every request, to both engines: so it has the bootstrap address, and the
engine's id with its epoch.
"""

import re
import socket
import threading
from contextlib import suppress

import msgspec
import zmq

from kvferry.errors import Reason, SettingsError
from kvferry.handoff.wire.trust import in_url, is_ipv6, parse_place
from kvferry.transport.protocol import bare

BEAT_SECONDS = 1.0
FORGOTTEN_SECONDS = 6.0
"""How long a router may still send requests to an engine that registers no longer."""
MAX_REQUEST_ID = 4096
"""Longest request id that is parsed: two addresses with the longest host names and engine ids are shorter."""
_ADDRESS = re.compile(r"host:([^,]+),handshake:([0-9]+),notify:[0-9]+,engine:(.+)", re.DOTALL)


def encode_zmq_address(host: str, bootstrap_port: int, control_port: int, engine_id: str) -> str:
    """Return the ``zmq_address`` to register; ``engine_id`` includes the epoch.

    >>> address = encode_zmq_address("127.0.0.1", 8998, 5600, "p@7")
    >>> decode_request_id(f"cmpl-___prefill_addr_{address}___decode_addr_host:d_0123-0")
    ('http://127.0.0.1:8998', 'p@7')
    >>> decode_request_id(f"___prefill_addr_{encode_zmq_address('::1', 8998, 5600, 'p@7')}___decode_addr_host:d")[0]
    'http://[::1]:8998'
    """
    return f"host:{host},handshake:{bootstrap_port},notify:{control_port},engine:{engine_id}"


def decode_request_id(request_id: str) -> tuple[str, str] | None:
    """Return the bootstrap address and id of the prefill engine that a request id names; None where it names none."""
    # Clients write request ids, and this runs on the scheduler's thread: each step below is linear.
    if len(request_id) > MAX_REQUEST_ID:
        return None
    _, _, behind = request_id.partition("___prefill_addr_")
    address, ends, _ = behind.partition("___decode_addr_")
    found = _ADDRESS.fullmatch(address) if ends else None
    return None if found is None else (f"http://{in_url(found[1])}:{found[2]}", found[3])


class RouterBeacon:
    """Sends this engine's registration to a router's discovery address (``host:port``) until closed.

    ``kind`` is ``P`` or ``D``, ``http_address`` where the engine's API server listens. Raises :class:`SettingsError`
    (invalid-setting) for an address that zmq refuses.
    """

    def __init__(self, router: str, kind: str, http_address: str, zmq_address: str, tp_size: int) -> None:
        registration = {
            "type": kind,
            "http_address": http_address,
            "zmq_address": zmq_address,
            "dp_size": 1,
            "tp_size": tp_size,
            "transfer_mode": "WRITE",
        }
        self._message = msgspec.msgpack.encode(registration)
        self._http_address = http_address
        self._stop = threading.Event()
        # A context of its own: zmq looks the router's name up on the thread that serves all sockets of a context.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, is_ipv6(router.rpartition(":")[0]))
        # Queue few messages: a router that was away needs only the latest.
        self._socket.setsockopt(zmq.SNDHWM, 2)
        try:
            self._socket.connect(f"tcp://{router}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise SettingsError(
                Reason.INVALID_SETTING,
                f"the router's discovery address {router!r} is not valid: {error.strerror}.",
                'Set "router_address" to the host:port of --vllm-discovery-address.',
            ) from error
        self._thread = threading.Thread(target=self._run, name="kvferry-beacon", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop sending; twice is fine."""
        self._stop.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        with self._context, self._socket:
            is_served = False
            while not self._stop.is_set():
                is_served = is_served or listens(self._http_address)
                if is_served:
                    with suppress(zmq.Again):
                        self._socket.send(self._message, zmq.NOBLOCK)
                self._stop.wait(BEAT_SECONDS)


def listens(address: str) -> bool:
    """Return whether ``host:port`` accepts a connection within a second.

    >>> listens("127.0.0.1:1"), listens("no address")
    (False, False)
    """
    try:
        host, port = parse_place(address)
        socket.create_connection((bare(host), port), BEAT_SECONDS).close()
    except (OSError, ValueError):
        return False
    return True
