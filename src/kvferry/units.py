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
