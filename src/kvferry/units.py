"""Sizes and rates as people read and write them."""

import re

_UNIT_BYTES: dict[str, int] = {"": 1, "b": 1} | {
    f"{prefix}{kind}".lower(): base ** (power + 1)
    for kind, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT")
}


def parse_bytes(text: str) -> int:
    """Return the bytes that a size names; ``KiB`` to ``TiB`` are binary, ``KB`` to ``TB`` decimal. Raises ValueError.

    >>> parse_bytes("8 GiB") == 8 << 30, parse_bytes("1.5kB"), parse_bytes("4096")
    (True, 1500, 4096)
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2].lower() not in _UNIT_BYTES:
        raise ValueError(f"{text!r} is no size")
    return round(float(found[1]) * _UNIT_BYTES[found[2].lower()])


def format_bytes(num_bytes: float) -> str:
    """Return bytes in binary units.

    >>> format_bytes(512), format_bytes(73728), format_bytes(237_000_000)
    ('512 B', '72.0 KiB', '226.0 MiB')
    """
    value = float(num_bytes)
    if value < 1024:
        return f"{value:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1024:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"


def format_rate(num_bytes: float, seconds: float) -> str:
    """Return a rate in decimal GB/s, the unit of memory and network specifications.

    >>> format_rate(15_000_000_000, 1.0)
    '15.00 GB/s'
    """
    return f"{num_bytes / seconds / 1e9:.2f} GB/s" if seconds > 0 else "-"


def format_seconds(seconds: float) -> str:
    """Return a time in the unit that leaves one to three digits before the point.

    >>> format_seconds(2.5), format_seconds(0.0123), format_seconds(4.2e-5)
    ('2.5 s', '12.3 ms', '42.0 us')
    """
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.1f} {unit}"
    return f"{seconds * 1e6:.1f} us"
