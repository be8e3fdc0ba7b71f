"""Where the commands print."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

WIDTH_WITHOUT_TERMINAL = 120
DRAWN_PER_SECOND = 2.0


def open_console(*, stderr: bool = False) -> Console:
    """Return a console; one that is no terminal (a file, a pipe) is wide enough for every table.

    >>> open_console().width >= 40
    True
    """
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=WIDTH_WITHOUT_TERMINAL)


Announce = Callable[[str], None]
"""Called with what a command does now."""


@contextmanager
def progress(first: str) -> Iterator[Announce]:
    """Yield a function that shows on standard error what is done now, in one line that vanishes; only on a terminal.

    The line is drawn seldom, since benchmarks measure beside it.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(first, refresh_per_second=DRAWN_PER_SECOND) as status:
        yield status.update
