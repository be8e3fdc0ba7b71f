"""The output of the commands."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

WIDTH_WITHOUT_TERMINAL = 120
DRAWN_PER_SECOND = 2.0


def open_console(*, stderr: bool = False) -> Console:
    """Return a console; a file or a pipe gets a width that fits every table.

    >>> open_console().width >= 40
    True
    """
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=WIDTH_WITHOUT_TERMINAL)


Announce = Callable[[str], None]
"""Called with a text about the current step of a command."""


@contextmanager
def progress(first: str) -> Iterator[Announce]:
    """Yield a function that shows the current step on standard error, in one line that vanishes; only on a terminal.

    The line is drawn ``DRAWN_PER_SECOND`` times a second, so that drawing does not disturb a benchmark.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(first, refresh_per_second=DRAWN_PER_SECOND) as status:
        yield status.update
