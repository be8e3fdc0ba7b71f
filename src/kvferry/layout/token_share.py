"""Which tokens a rank of context parallelism holds."""

import math

import msgspec

from kvferry.layout.component import require

MAX_SHARES = 2**16


class TokenShare(msgspec.Struct, frozen=True):
    """The tokens of rank ``rank`` of ``size``, dealt out in pieces of ``interleave`` consecutive tokens.

    Global token t lives on rank ``(t // interleave) % size``, at local index
    ``t // (interleave * size) * interleave + t % interleave``. An interleave of 1 is round-robin, one of the block size
    is blockwise. Ranks share their block ids: the id at a position of the list names a block on every rank, and
    these blocks together hold ``block_size * size`` consecutive tokens.

    Prefill- and decode-context parallelism are both this, the rank counted over both. By default all tokens are held.

    >>> [token for token in range(12) if token // 2 % 3 == 1], TokenShare(1, 3, 2).is_whole
    ([2, 3, 8, 9], False)
    >>> TokenShare(1, 3, 2)
    share 1/3 by 2
    """

    rank: int = 0
    size: int = 1
    interleave: int = 1

    def __post_init__(self) -> None:
        require(0 <= self.rank < self.size <= MAX_SHARES, f"token share {self.rank} of {self.size} does not exist.")
        require(self.interleave > 0, f"a token share has an interleave of {self.interleave} tokens.")
        require(not self.is_whole or self.interleave == 1, "a share of all tokens has an interleave of 1.")

    @property
    def is_whole(self) -> bool:
        """Whether every token is held."""
        return self.size == 1

    @property
    def dealing(self) -> tuple[int, int]:
        """What the ranks of one engine have in common: size and interleave."""
        return self.size, self.interleave

    def meets(self, other: "TokenShare") -> bool:
        """Return whether any token is held by both.

        Each share is a set of residues, modulo ``size * interleave``. By the Chinese remainder theorem two residues
        have a common token exactly where they agree modulo the greatest common divisor of both moduli, on which each
        share is an interval of a circle.

        >>> TokenShare(0, 2, 1).meets(TokenShare(1, 2, 1)), TokenShare(0, 2, 1).meets(TokenShare(1, 2, 2))
        (False, True)
        """
        circle = math.gcd(self.size * self.interleave, other.size * other.interleave)
        apart = other.rank * other.interleave - self.rank * self.interleave
        return apart % circle < self.interleave or -apart % circle < other.interleave

    def __repr__(self) -> str:
        return f"share {self.rank}/{self.size} by {self.interleave}"


WHOLE = TokenShare()
"""All tokens."""
