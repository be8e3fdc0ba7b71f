"""``kvferry tiers``: what a disk tier holds, whether its blocks are intact, and how to remove them."""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvferry.cli.console import AsJson, help_alone, open_console, refused
from kvferry.errors import Reason, TierError
from kvferry.tiers.disk.inspection import SegmentReport, existing_directory, inspect, verify
from kvferry.tiers.disk.segments import Directory, errors_of
from kvferry.tiers.local_disk import open_directory
from kvferry.units import format_bytes, format_rate

tiers = typer.Typer(
    name="tiers",
    invoke_without_command=True,
    callback=help_alone,
    add_completion=False,
    rich_markup_mode=None,
    help="Show, verify or clear the blocks that KVFerryOffloadConnector keeps on disk.\n\nDIR is the connector's "
    "setting disk_path; each further data-parallel rank has a folder dp<rank> in it.\n\nTry:\n\n"
    "kvferry tiers show /var/cache/kvferry\n\nkvferry tiers verify /var/cache/kvferry",
)

DirectoryArgument = Annotated[Path, typer.Argument(help="The folder of one engine's blocks on disk.", metavar="DIR")]
MAX_DAMAGED_SHOWN = 20


@tiers.command("show")
def show(directory: DirectoryArgument, as_json: AsJson = False) -> None:
    """List the segments, sizes and blocks of a directory. An engine may be using it.

    Try:

    kvferry tiers show /var/cache/kvferry

    kvferry tiers show /var/cache/kvferry --json
    """
    with refused(as_json):
        opened = existing_directory(directory)
        reports = inspect(opened)
        opened.close()
    if as_json:
        typer.echo(json.dumps(as_object(reports), indent=2))
        return
    table = Table(title=str(directory))
    for column in ("block size", "segments", "blocks", "bytes of blocks", "bytes on disk"):
        table.add_column(column, justify="right")
    for row in as_object(reports)["sizes"]:
        cells = (format_bytes(row["cell_bytes"]), str(row["segments"]), str(row["blocks"]))
        table.add_row(*cells, format_bytes(row["block_bytes"]), format_bytes(row["bytes_on_disk"]))
    console = open_console()
    console.print(table)
    print_unusable(console, reports)


@tiers.command("verify")
def verify_command(directory: DirectoryArgument, as_json: AsJson = False) -> None:
    """Compare every block with its checksum. Exit code 1: one is damaged or unusable. No engine may be using it.

    Try:

    kvferry tiers verify /var/cache/kvferry
    """
    with refused(as_json), locked(directory) as opened:
        reports = inspect(opened)
        num_blocks = sum(len(report.headers) for report in reports)
        began_at = time.monotonic()
        with progress_bar(num_blocks) as advance:
            damaged = verify(opened, reports, advance)
        seconds = time.monotonic() - began_at
    num_bytes = sum(len(report.headers) * report.shape.cell_bytes for report in reports if report.shape)
    unusable = sum(report.refused.total() + (report.error is not None) for report in reports)
    if as_json:
        rows = [{"segment": one.name, "cell": one.cell, "key": one.key, "reason": one.reason} for one in damaged]
        result = {"damaged": rows, "bytes_read": num_bytes, "seconds": seconds}
        typer.echo(json.dumps({**as_object(reports), **result}, indent=2))
    else:
        console = open_console()
        for one in damaged[:MAX_DAMAGED_SHOWN]:
            console.print(f"{one.name} cell {one.cell}: {one.reason}, key {one.key}", style="red", markup=False)
        print_unusable(console, reports)
        rate = format_rate(num_bytes, seconds)
        console.print(f"{num_blocks} blocks read, {len(damaged)} damaged ({format_bytes(num_bytes)}, {rate})")
    if damaged or unusable:
        raise typer.Exit(1)


@tiers.command("clear")
def clear(
    directory: DirectoryArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove all blocks of a directory. No engine may be using it. Files that are not the tier's stay.

    Try:

    kvferry tiers clear /var/cache/kvferry --yes
    """
    with refused(as_json), locked(directory) as opened:
        names = opened.segment_names()
        with errors_of(directory):
            num_bytes = sum(map(opened.occupied_bytes, names))
        if not yes:
            question = f"Remove {len(names)} segments of {format_bytes(num_bytes)} in {directory}?"
            typer.confirm(question, abort=True, err=True)
        for name in names:
            with errors_of(directory / name):
                opened.remove_segment(name)
    if as_json:
        typer.echo(json.dumps({"segments_removed": len(names), "bytes_removed": num_bytes}, indent=2))
    else:
        typer.echo(f"{len(names)} segments removed, {format_bytes(num_bytes)}")


def as_object(reports: list[SegmentReport]) -> dict[str, Any]:
    """Return the reports as plain data: a row for each size of blocks, and what cannot be used, by reason."""
    sizes: dict[int, dict[str, int]] = {}
    unusable: Counter[Reason] = Counter()
    for report in reports:
        unusable += report.refused
        if report.error is not None:
            unusable[report.error.reason] += 1
        if report.shape is not None:
            names = ("segments", "blocks", "block_bytes", "bytes_on_disk")
            row = sizes.setdefault(report.shape.cell_bytes, dict.fromkeys(names, 0))
            row["segments"] += 1
            row["blocks"] += len(report.headers)
            row["block_bytes"] += sum(header.num_bytes for header in report.headers)
            row["bytes_on_disk"] += report.occupied_bytes
    return {
        "blocks": sum(row["blocks"] for row in sizes.values()),
        "bytes_on_disk": sum(report.occupied_bytes for report in reports),
        "sizes": [{"cell_bytes": cell_bytes, **row} for cell_bytes, row in sorted(sizes.items())],
        "unusable": {reason.value: count for reason, count in unusable.items()},
    }


def print_unusable(console: Console, reports: list[SegmentReport]) -> None:
    """Print why files and headers cannot be used."""
    for report in reports:
        if report.error is not None:
            console.print(f"{report.name}: {report.error}", style="red", markup=False)
        for reason, count in report.refused.items():
            console.print(f"{report.name}: {count} unusable headers [{reason}]", style="red", markup=False)


@contextmanager
def locked(path: Path) -> Iterator[Directory]:
    """Own the directory of a disk tier. Raises :class:`TierError` ``tier-in-use`` while an engine owns it."""
    existing_directory(path).close()
    try:
        directory, lock = open_directory(path, of_anybody=True)
    except TierError as error:
        if error.reason is not Reason.TIER_IN_USE:
            raise
        remedy = 'End the engine first. "kvferry tiers show" works beside an engine.'
        raise TierError(error.reason, error.message, remedy) from None
    try:
        yield directory
    finally:
        os.close(lock)
        directory.close()


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that advances a bar on standard error; only on a terminal."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("verifying blocks", total=total)
        yield lambda count: bar.advance(task, count)
