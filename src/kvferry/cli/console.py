"""What all commands share: their output, the option ``--json``, and how an error ends them."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated

import typer
from rich.console import Console

from kvferry.errors import KVFerryError

WIDTH_WITHOUT_TERMINAL = 120
DRAWN_PER_SECOND = 2.0
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON object.")]


def open_console(*, stderr: bool = False) -> Console:
    """Return a console; a file or a pipe gets a width that fits every table.

    >>> open_console().width >= 40
    True
    """
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=WIDTH_WITHOUT_TERMINAL)


Announce = Callable[[str], None]
"""Called with a text about the current step of a command."""


def _nowhere(_text: str) -> None:
    """Announce nothing."""


@contextmanager
def progress(first: str, *, prints_elsewhere: bool = False) -> Iterator[Announce]:
    """Yield a function that shows the current step on standard error: on a terminal in one line that vanishes.

    Elsewhere each step is a line with ``prints_elsewhere``, else nothing. The line on a terminal is drawn
    ``DRAWN_PER_SECOND`` times a second, so that drawing does not disturb a benchmark.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        announce = partial(typer.echo, err=True) if prints_elsewhere else _nowhere
        announce(first)
        yield announce
        return
    with console.status(first, refresh_per_second=DRAWN_PER_SECOND) as status:
        yield status.update


def help_alone(context: typer.Context) -> None:
    """Print the help of a group of commands that was called without one; a callback of the group."""
    # Typer's own no_args_is_help prints nothing where a group has no rich markup.
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@contextmanager
def refused(as_json: bool) -> Iterator[None]:
    """Where ``as_json`` asks for JSON, print an error as a JSON object and exit with code 2."""
    try:
        yield
    except KVFerryError as error:
        if not as_json:
            raise
        reasons = {"reason": error.reason.value, "message": error.message, "remedy": error.remedy}
        typer.echo(json.dumps({"error": reasons}, indent=2))
        raise typer.Exit(2) from None
