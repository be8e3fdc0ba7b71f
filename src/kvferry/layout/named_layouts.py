"""The axes of an attention cache, and the six memory orders of them that vLLM names (vLLM RFC #42082)."""

from enum import StrEnum

from kvferry.errors import LayoutError, Reason, did_you_mean


class Axis(StrEnum):
    """One axis of a KV cache."""

    L = "L"
    """Layer."""
    B = "B"
    """Block: the unit that the engine's allocator hands out."""
    H = "H"
    """KV head."""
    N = "N"
    """Token slot within a block."""
    C = "C"
    """Content of one head and token."""


class NamedLayout(StrEnum):
    """A memory order of the axes, outermost first.

    In a *cross-layer* layout a block's bytes of all layers are contiguous.

    >>> NamedLayout.BHLNC.is_cross_layer, NamedLayout.LBHNC.is_cross_layer
    (True, False)
    """

    LBHNC = "LBHNC"
    LBNHC = "LBNHC"
    LHBNC = "LHBNC"
    BLHNC = "BLHNC"
    BLNHC = "BLNHC"
    BHLNC = "BHLNC"

    @classmethod
    def parse(cls, name: str) -> "NamedLayout":
        """Return the layout of that name, in upper or lower case.

        >>> NamedLayout.parse("bhlnc").value
        'BHLNC'
        >>> NamedLayout.parse("BHLCN")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        kvferry.errors.LayoutError: layout 'BHLCN' is unknown. ...
        """
        found = cls.__members__.get(name.upper())
        if found is not None:
            return found
        # vLLM's earlier names say the order of heads and tokens alone; layers lie outermost.
        meant = {"HND": "LBHNC", "NHD": "LBNHC"}.get(name.upper(), name.upper())
        raise LayoutError(Reason.UNKNOWN_LAYOUT, f"layout {name!r} is unknown.", did_you_mean(meant, cls.__members__))

    @property
    def order(self) -> tuple[Axis, ...]:
        """The axes, outermost first."""
        return tuple(Axis(letter) for letter in self.value)

    @property
    def is_cross_layer(self) -> bool:
        """Whether a block's bytes of all layers are contiguous."""
        return self.order[0] is Axis.B

    @property
    def per_layer(self) -> "NamedLayout":
        """The layout in which each layer's memory is apart, with the same order of the other axes.

        >>> NamedLayout.BHLNC.per_layer.value, NamedLayout.BLNHC.per_layer.value
        ('LBHNC', 'LBNHC')
        """
        return NamedLayout("L" + self.value.replace("L", ""))
