"""``kvferry keys``: makes the keys with which engines authenticate each other, and shows whom an engine trusts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kvferry.cli.console import AsJson, help_alone, open_console, refused
from kvferry.handoff.wire.trust import Keys, make_keys

keys = typer.Typer(
    name="keys",
    invoke_without_command=True,
    callback=help_alone,
    add_completion=False,
    rich_markup_mode=None,
    help="Make and show the keys with which engines authenticate each other, encrypt their messages, and sign "
    'kv_transfer_params.\n\nFOLDER is the connector\'s setting "keys". It has key.pem, certificate.pem and trusted/.'
    "\n\nTry:\n\nkvferry keys new /etc/kvferry/keys\n\nkvferry keys show /etc/kvferry/keys",
)

FolderArgument = Annotated[
    Path, typer.Argument(help="The folder with key.pem, certificate.pem and trusted/.", metavar="FOLDER")
]


@keys.command("new")
def new(folder: FolderArgument, as_json: AsJson = False) -> None:
    """Make a folder with a key and its certificate. Nothing is overwritten.

    One folder for all engines: make it once and copy it, with its modes, to every host. Each engine then trusts the
    others because they have the same key. Whoever reads key.pem is an engine.

    kvferry keys new /etc/kvferry/keys

    scp -rp /etc/kvferry/keys decode-0.example:/etc/kvferry/keys

    One folder for each engine: make one on every host, and copy its certificate.pem, never key.pem, into trusted/ on
    the hosts that it talks to. To end the trust in one engine, remove its certificate there and restart.

    kvferry keys new /etc/kvferry/keys

    scp /etc/kvferry/keys/certificate.pem decode-0.example:/etc/kvferry/keys/trusted/prefill-0.pem
    """
    _show(lambda: make_keys(folder), as_json)
    if not as_json:
        typer.echo(f'Give every engine the setting "keys": "{folder.absolute()}".')


@keys.command("show")
def show(folder: FolderArgument, as_json: AsJson = False) -> None:
    """Check a folder as an engine does at its start, and list the certificates that it trusts.

    Of trusted/ an engine reads the files whose names end in .pem, when it starts.

    Try:

    kvferry keys show /etc/kvferry/keys

    kvferry keys show /etc/kvferry/keys --json
    """
    _show(lambda: Keys(folder), as_json)


def _show(read: Callable[[], Keys], as_json: bool) -> None:
    with refused(as_json):
        found = read()
    trusted = {fingerprint: str(path) for fingerprint, path in found.trusted.items()}
    if as_json:
        own = {"folder": str(found.folder), "fingerprint": found.fingerprint}
        typer.echo(json.dumps({**own, "trusted": trusted}, indent=2))
        return
    table = Table(title=f"An engine with {found.folder} trusts")
    table.add_column("certificate (SHA-256)", no_wrap=True, min_width=64)
    table.add_column("file", overflow="fold")
    for fingerprint, path in trusted.items():
        table.add_row(fingerprint, f"{path} (its own)" if fingerprint == found.fingerprint else path)
    console = open_console()
    console.print(table)
    for name in found.unread:
        console.print(f"Not read, because the name does not end in .pem: {name}", style="yellow", markup=False)
