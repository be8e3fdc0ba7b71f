"""The part of ZeroMQ's wire protocol that a server needs (ZMTP 3.0 without security, rfc.zeromq.org/spec/23).

Pure: bytes in, messages out. A zmq socket would keep every frame of a message until the last one comes, for any number
of connections. An inbox keeps a bounded number of bytes, and clients can still be zmq sockets.
"""

from kvferry.errors import HandoffError, Reason

MORE, LONG, COMMAND = 1, 2, 4
"""Flags of a frame: the message goes on in another frame; the length has 8 bytes instead of 1; it is a command."""
_SHORTEST_LONG = 256
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
"""A peer may choose all of these bytes but the first."""
_GREETING_BYTES = 64
_MAJOR_VERSION = 3
_MECHANISM = b"NULL".ljust(20, b"\0")


def encode_message(*frames: bytes) -> bytes:
    r"""Return a message as bytes of the protocol.

    >>> encode_message(b"one", b"")
    b'\x01\x03one\x00\x00'
    """
    flags = [MORE] * (len(frames) - 1) + [0]
    return b"".join(_frame(flag, body) for flag, body in zip(flags, frames, strict=True))


def _frame(flags: int, body: bytes) -> bytes:
    if len(body) < _SHORTEST_LONG:
        return bytes((flags, len(body))) + body
    return bytes((flags | LONG,)) + len(body).to_bytes(8, "big") + body


def _hello(socket_type: bytes) -> bytes:
    metadata = b"\x0bSocket-Type" + len(socket_type).to_bytes(4, "big") + socket_type
    greeting = _SIGNATURE + bytes((_MAJOR_VERSION, 0)) + _MECHANISM
    return greeting.ljust(_GREETING_BYTES, b"\0") + _frame(COMMAND, b"\x05READY" + metadata)


HELLO, DEALERS_HELLO = _hello(b"ROUTER"), _hello(b"DEALER")
"""The first bytes that each side of a connection sends, before it reads any."""


class Inbox:
    """The bytes of one peer as messages of at most ``max_frames`` frames of at most ``max_bytes`` each.

    >>> inbox = Inbox(max_frames=2, max_bytes=1000)
    >>> inbox.add(DEALERS_HELLO + encode_message(b"one", b"two") + encode_message(b"three", b"four")[:3])
    >>> inbox.take(), inbox.take(), inbox.num_bytes
    ([b'one', b'two'], None, 3)
    """

    def __init__(self, max_frames: int, max_bytes: int) -> None:
        self._max_frames, self._max_bytes = max_frames, max_bytes
        self._data = bytearray()
        self._frames: list[bytes] = []
        self._is_greeted = False

    @property
    def num_bytes(self) -> int:
        """Bytes kept: at most ``max_frames`` frames and the data of the last :meth:`add`."""
        return len(self._data) + sum(map(len, self._frames))

    def add(self, data: bytes) -> None:
        """Append received bytes."""
        self._data += data

    def take(self) -> list[bytes] | None:
        """Return the next message, None while it is not whole.

        Raises :class:`HandoffError` (``malformed-message``) as soon as the peer announces more frames or bytes than
        allowed, or bytes that are not of the protocol; then the connection must be closed.
        """
        if not self._is_greeted and not self._take_greeting():
            return None
        while (found := self._take_frame()) is not None:
            flags, body = found
            if flags & COMMAND:
                continue
            self._frames.append(body)
            if flags & MORE and len(self._frames) == self._max_frames:
                raise _malformed(f"a message has more than {self._max_frames} frames")
            if not flags & MORE:
                message, self._frames = self._frames, []
                return message
        return None

    def _take_greeting(self) -> bool:
        first, version = self._data[:1], self._data[len(_SIGNATURE) : len(_SIGNATURE) + 1]
        if (first and first[0] != _SIGNATURE[0]) or (version and version[0] < _MAJOR_VERSION):
            raise _malformed("the peer does not speak ZMTP 3")
        if len(self._data) < _GREETING_BYTES:
            return False
        if self._data[12:32] != _MECHANISM:
            raise _malformed("the peer asks for a security mechanism, this server has none")
        del self._data[:_GREETING_BYTES]
        self._is_greeted = True
        return True

    def _take_frame(self) -> tuple[int, bytes] | None:
        if len(self._data) < 2:
            return None
        flags = self._data[0]
        begin = 9 if flags & LONG else 2
        if len(self._data) < begin:
            return None
        length = int.from_bytes(self._data[1:begin], "big")
        if flags > MORE | LONG | COMMAND or length > self._max_bytes:
            raise _malformed(f"a frame has the flags {flags} and {length} bytes; at most {self._max_bytes} are allowed")
        if len(self._data) < begin + length:
            return None
        with memoryview(self._data) as view:
            body = bytes(view[begin : begin + length])
        del self._data[: begin + length]
        return flags, body


def _malformed(what: str) -> HandoffError:
    remedy = "Check which program connects to this port: it is for kvferry's decode engines."
    return HandoffError(Reason.MALFORMED_MESSAGE, f"{what}.", remedy)
