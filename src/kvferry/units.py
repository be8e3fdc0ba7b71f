"""Sizes and rates as people read them."""


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
    """Return a duration in the largest unit that keeps it above one.

    >>> format_seconds(2.5), format_seconds(0.0125), format_seconds(4.2e-5)
    ('2.50 s', '12.50 ms', '42.0 us')
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds * 1e6:.1f} us"
