"""Versions of the protocol: which ones this process speaks, and which one two engines speak with each other.

An engine says in the first message of a handshake, and in what it hands to routers, from which version to which it
speaks. Both engines then speak the lower of their newest versions.
"""

from typing import NamedTuple

from kvferry.errors import HandoffError, Reason
from kvferry.handoff.messages import PROTOCOL_VERSION


class Versions(NamedTuple):
    """The versions that an engine speaks, from the ``oldest`` to the ``newest``, both included.

    >>> str(Versions(1, 2)), str(Versions(1, 1))
    ('1 to 2', '1')
    """

    oldest: int
    newest: int

    def __str__(self) -> str:
        return str(self.oldest) if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


OURS = Versions(PROTOCOL_VERSION, PROTOCOL_VERSION)


def agree(*, prefill: Versions = OURS, decode: Versions = OURS) -> int:
    """Return the version that both engines speak with each other.

    Raises :class:`HandoffError` (protocol-mismatch) where there is none, with the versions of both engines.

    >>> agree(prefill=Versions(1, 2), decode=Versions(1, 1)), agree(prefill=Versions(1, 2), decode=Versions(2, 3))
    (1, 2)
    """
    spoken = min(prefill.newest, decode.newest)
    if spoken >= max(prefill.oldest, decode.oldest):
        return spoken
    older = "prefill" if prefill.newest < decode.newest else "decode"
    raise HandoffError(
        Reason.PROTOCOL_MISMATCH,
        f"the engines speak no version of the protocol in common: protocol version: prefill speaks {prefill}, decode "
        f"speaks {decode}.",
        f"Update kvferry on the {older} engine.",
    )
