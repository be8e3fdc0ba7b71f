"""The longest messages that UCX sends and receives over TCP. UCX neither exchanges nor checks these sizes, and a longer
message overruns its receiver's buffer.
"""

import os
import re
from collections.abc import Mapping
from typing import Annotated, NamedTuple

import msgspec

from kvferry.errors import Reason, TransportError

SENT_VARIABLE, RECEIVED_VARIABLE = "UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE"
SENT_BYTES = 64 << 10
"""UCX's own 8 KiB make reads a quarter as fast as writes. No peer receives more than 64 KiB, unless its variable says
so. See docs/decisions/reads-over-tcp.md."""
UCX_SENT_BYTES, UCX_RECEIVED_BYTES = 8 << 10, 64 << 10
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}

_Bytes = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]


class TcpMessages(NamedTuple):
    """The longest message that one side sends, and the longest that it receives, in bytes."""

    sent: _Bytes = SENT_BYTES
    received: _Bytes = UCX_RECEIVED_BYTES

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> "TcpMessages":
        """Return the sizes with these variables of the environment.

        Who sets one size alone gets UCX's own value of the other: UCX does not start with send buffers that are larger
        than its receive buffers. Raises :class:`TransportError` (transport-unavailable).

        >>> TcpMessages.of({}), TcpMessages.of({"UCX_TCP_RX_SEG_SIZE": "128k"})
        (TcpMessages(sent=65536, received=65536), TcpMessages(sent=8192, received=131072))
        """
        is_default = RECEIVED_VARIABLE not in variables
        sent = _size(variables, SENT_VARIABLE, SENT_BYTES if is_default else UCX_SENT_BYTES)
        return cls(sent, _size(variables, RECEIVED_VARIABLE, UCX_RECEIVED_BYTES))

    def check(self, peer: "TcpMessages", name: str) -> None:
        """Raise :class:`TransportError` (unsupported) unless each side receives what the other sends.

        >>> TcpMessages().check(TcpMessages(sent=8192), "a peer")
        """
        if self.sent > peer.received or peer.sent > self.received:
            raise TransportError(
                Reason.UNSUPPORTED,
                f"over TCP UCX sends messages of up to {self.sent} bytes here and receives {self.received}; {name} "
                f"sends {peer.sent} and receives {peer.received}. A longer message overruns its receiver's buffer.",
                f"Set {SENT_VARIABLE} and {RECEIVED_VARIABLE} to the same values for all engines, or for none.",
            )


def ucx_settings(variables: Mapping[str, str] = os.environ) -> list[str]:
    """Return what UCX is told of these sizes. Where UCX's variable of a setting is set, UCX takes that value."""
    return [] if RECEIVED_VARIABLE in variables else [f"TCP_TX_SEG_SIZE={SENT_BYTES}"]


def _size(variables: Mapping[str, str], name: str, default: int) -> int:
    """Return a size as UCX writes it.

    >>> [_size({"": text}, "", 0) for text in ("8kb", "256K", "65536", "1m", "64b")]
    [8192, 262144, 65536, 1048576, 64]
    """
    if name not in variables:
        return default
    found = re.fullmatch(r"(\d{1,9})([kmg]?)b?", variables[name].lower())
    if found is None:
        raise TransportError(
            Reason.TRANSPORT_UNAVAILABLE,
            f"{name} is {variables[name]!r}, which names no number of bytes.",
            "Write it as 256k, or unset it.",
        )
    return int(found[1]) * _UNITS[found[2]]
