"""Tells vllm-router of this engine, in the one mode in which it sends to both engines at once.

With ``--kv-connector moriio --vllm-discovery-address`` the router learns of engines by messages that each sends about
once a second, and forgets those that fall silent for five. What an engine calls its ``zmq_address`` comes back inside
the id of every request, to both engines: so it holds the bootstrap address and the life of the engine.
"""

import re
import threading
from contextlib import suppress

import msgspec
import zmq

from kvferry.errors import Reason, SettingsError
from kvferry.handoff.wire.addresses import in_url, is_ipv6

BEAT_SECONDS = 1.0
MAX_REQUEST_ID = 4096
"""Characters of a request id that is looked at: two places of the longest host names and engine ids are shorter."""
_PLACE = re.compile(r"host:([^,]+),handshake:([0-9]+),notify:[0-9]+,life:(.+)", re.DOTALL)


def encode_place(host: str, bootstrap_port: int, control_port: int, life: str) -> str:
    """Return what comes back in request ids.

    >>> place = encode_place("127.0.0.1", 8998, 5600, "p@7")
    >>> decode_place(f"cmpl-___prefill_addr_{place}___decode_addr_host:d_0123-0")
    ('http://127.0.0.1:8998', 'p@7')
    >>> decode_place(f"___prefill_addr_{encode_place('::1', 8998, 5600, 'p@7')}___decode_addr_host:d")[0]
    'http://[::1]:8998'
    """
    return f"host:{host},handshake:{bootstrap_port},notify:{control_port},life:{life}"


def decode_place(request_id: str) -> tuple[str, str] | None:
    """Return the bootstrap address and the life of the prefill engine that a request id names; None for no such id."""
    # Clients write request ids, and this runs on the scheduler's thread: each step below is linear.
    if len(request_id) > MAX_REQUEST_ID:
        return None
    _, _, behind = request_id.partition("___prefill_addr_")
    place, ends, _ = behind.partition("___decode_addr_")
    found = _PLACE.fullmatch(place) if ends else None
    return None if found is None else (f"http://{in_url(found[1])}:{found[2]}", found[3])


class RouterBeacon:
    """Sends this engine's registration to a router's discovery address (``host:port``) until closed.

    ``kind`` is ``P`` or ``D``, ``http_address`` where the engine's API server listens. Raises :class:`SettingsError`
    (invalid-setting) for what is no address.
    """

    def __init__(self, router: str, kind: str, http_address: str, place: str, tp_size: int) -> None:
        registration = {
            "type": kind,
            "http_address": http_address,
            "zmq_address": place,
            "dp_size": 1,
            "tp_size": tp_size,
            "transfer_mode": "WRITE",
        }
        self._message = msgspec.msgpack.encode(registration)
        self._stop = threading.Event()
        # One of its own, since zmq looks the router's name up on the thread that serves all sockets of a context.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, is_ipv6(router.rpartition(":")[0]))
        # A router that is away is not told old news when it comes back.
        self._socket.setsockopt(zmq.SNDHWM, 2)
        try:
            self._socket.connect(f"tcp://{router}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise SettingsError(
                Reason.INVALID_SETTING,
                f"{router!r} is no router's discovery address: {error.strerror}.",
                'Set "router_address" to the host:port of --vllm-discovery-address.',
            ) from error
        self._thread = threading.Thread(target=self._run, name="kvferry-beacon", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Fall silent; twice is fine."""
        self._stop.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        with self._context, self._socket:
            while not self._stop.is_set():
                with suppress(zmq.Again):
                    self._socket.send(self._message, zmq.NOBLOCK)
                self._stop.wait(BEAT_SECONDS)
