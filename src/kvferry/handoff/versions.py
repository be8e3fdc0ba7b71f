"""Versions of the protocol: which ones this process speaks, and which one two engines speak with each other.

An engine says in the first message of a handshake, and in what it hands to routers, from which version to which it
speaks. Both engines then speak the lower of their newest versions.
"""

from typing import NamedTuple

from kvferry.errors import HandoffError, Reason
from kvferry.handoff.messages import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION


class Versions(NamedTuple):
    """The versions that an engine speaks, from the ``oldest`` to the ``newest``, both included.

    >>> str(Versions(9, 10)), str(Versions.said(9, 0))
    ('9 to 10', '9')
    """

    oldest: int
    newest: int

    @classmethod
    def said(cls, oldest: int, newest: int) -> "Versions":
        """Return what a peer has said in ``version`` and ``newest``; one of version 9 says no ``newest``."""
        return cls(oldest, max(oldest, newest))

    def __str__(self) -> str:
        return str(self.oldest) if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


OURS = Versions(OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION)


def agree(*, prefill: Versions = OURS, decode: Versions = OURS) -> int:
    """Return the version that both engines speak with each other.

    Raises :class:`HandoffError` (protocol-mismatch) where there is none, with the versions of both engines.

    >>> agree(prefill=Versions(9, 10), decode=Versions(9, 9)), agree(prefill=Versions(9, 10), decode=Versions(10, 11))
    (9, 10)
    """
    spoken = min(prefill.newest, decode.newest)
    if spoken >= max(prefill.oldest, decode.oldest):
        return spoken
    older = "prefill" if prefill.newest < decode.newest else "decode"
    raise HandoffError(
        Reason.PROTOCOL_MISMATCH,
        f"the engines speak no version of the protocol in common: protocol version: prefill speaks {prefill}, decode "
        f"speaks {decode}.",
        f"Update kvferry on the {older} engine: a release speaks its own version and the one before.",
    )
