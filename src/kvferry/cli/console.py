"""Where the commands print."""

from rich.console import Console

WIDTH_WITHOUT_TERMINAL = 120


def open_console(*, stderr: bool = False) -> Console:
    """Return a console; one that is no terminal (a file, a pipe) is wide enough for every table.

    >>> open_console().width >= 40
    True
    """
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=WIDTH_WITHOUT_TERMINAL)
