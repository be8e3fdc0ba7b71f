"""``kvferry timeline``: where the time of a request went, at both engines on one clock."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.table import Table
from rich.text import Text

from kvferry.cli.console import AsJson, open_console, progress, refused
from kvferry.cli.timeline_jobs import Found, Shown, Wanted, find, jobs
from kvferry.cli.timeline_page import Page
from kvferry.cli.timeline_trace import Trace
from kvferry.cli.transfer_records import NAME_LOGS, PHASES, Log, open_logs
from kvferry.errors import KVFerryError, Reason
from kvferry.peer_log import printable


def timeline(
    logs: Annotated[
        list[Path], typer.Argument(help=f"The logs of both engines. {NAME_LOGS}", metavar="LOG...", show_default=False)
    ],
    request: Annotated[str, typer.Option(help="Only requests whose id contains this, such as an X-Request-Id.")] = "",
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all events here; ui.perfetto.dev opens the file.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with a drawing of each request of the table.")
    ] = None,
    most: Annotated[int, typer.Option(help="Loads in the table and the page, the slowest first.", min=1)] = 30,
    as_json: AsJson = False,
) -> None:
    """Merge the transfer logs of both engines on one clock, and say where the time of each load went.

    The clocks of two hosts are aligned by what cannot be otherwise: a message arrives after it was sent. The output
    says how far each clock may be off. Lines that are damaged are left out and counted.

    Try:

    kvferry timeline prefill.log.rank0 decode.log.rank0

    kvferry timeline prefill.log.rank0 decode.log.rank0 --request cmpl-7f2e --html request.html

    kvferry timeline prefill.log.rank0 decode.log.rank0 decode.log.rank1 --trace trace.json --json
    """
    with progress("reading the logs") as announce, refused(as_json):
        opened, wanted = open_logs(logs), Wanted(request, most)
        _check_output(trace, html, opened)
        found = find(opened, wanted)
        announce("merging the logs")
        _draw(opened, found, wanted, trace, html)
    _print(found, opened, as_json)


def _draw(opened: list[Log], found: Found, wanted: Wanted, trace: Path | None, html: Path | None) -> None:
    """Read the logs again, which also says how uncertain the clocks are, and write what is asked for."""
    page = Page(found.shown)
    with _written(trace) as trace_file:
        drawn = None if trace_file is None else Trace(trace_file)
        for job in jobs(opened, found, wanted):
            page.add(job)
            if drawn is not None:
                drawn.add(job)
        if drawn is not None:
            drawn.close({"clocks": clocks_of(found), "notes": notes(found, opened)})
    with _written(html) as page_file:
        if page_file is not None:
            page.write(page_file, notes(found, opened))


def _check_output(trace: Path | None, html: Path | None, logs: list[Log]) -> None:
    """Raise :class:`KVFerryError` (invalid-request) where output would replace a log, other output, or what is no
    file.
    """
    taken = {log.path.resolve() for log in logs}
    for path in (each for each in (trace, html) if each is not None):
        try:
            if path.exists() and not path.is_file():
                what = f"{str(path)!r} is to be written, and is no file."
                raise KVFerryError(Reason.INVALID_REQUEST, what, "Name another file.")
            files = {path.resolve(), _part_of(path).resolve()}
        except (OSError, RuntimeError) as error:  # of links in a circle
            raise _cannot_write(path, error) from error
        if taken & files:
            what = f"{str(path)!r} is to be written, and is a log or other output of this command."
            raise KVFerryError(Reason.INVALID_REQUEST, what, "Name another file.")
        taken |= files


def _part_of(path: Path) -> Path:
    """Return the name that an output has until it is whole."""
    return path.with_name(f"{path.name}.part")


def _cannot_write(path: Path, error: Exception) -> KVFerryError:
    what = f"{str(path)!r} cannot be written: {getattr(error, 'strerror', None) or error}."
    return KVFerryError(Reason.INVALID_REQUEST, what, "Name a file in a folder that exists and has room.")


@contextmanager
def _written(path: Path | None) -> Iterator[TextIO | None]:
    """Yield a file that takes its name once it is whole; None without a path. Raises :class:`KVFerryError`
    (invalid-request) where it cannot be written.
    """
    if path is None:
        yield None
        return
    part = _part_of(path)
    try:
        with part.open("w", encoding="utf-8", errors="replace") as file:
            yield file
        part.replace(path)
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        part.unlink(missing_ok=True)


def clocks_of(found: Found) -> list[dict[str, Any]]:
    """Return each clock: its logs, and by how many seconds its times on the axis may be wrong, null where that is not
    known.
    """
    rows = []
    for clock in found.alignment.clocks:
        worst = found.worst.get(clock)
        uncertain = None if worst is None or math.isinf(worst.uncertainty) else worst.uncertainty
        logs = [label for label, of_log in found.clock_of_log.items() if clock in of_log]
        is_reference = clock == found.alignment.reference
        rows.append({"boot": clock, "logs": logs, "reference": is_reference, "uncertain_seconds": uncertain})
    return rows


def notes(found: Found, logs: list[Log]) -> list[str]:
    """Return sentences about what the timeline rests on: clocks, records that lack the other side's, damaged lines."""
    told = []
    clocks = clocks_of(found)
    if len(clocks) == 1:
        told.append("All ranks share one clock.")
    for clock in clocks[1:]:
        if clock["boot"] not in found.worst:
            continue  # nothing of this clock is drawn
        uncertain = clock["uncertain_seconds"]
        so = "aligned by the time of day, since messages bound one side at most: it may be off by any time"
        if uncertain is not None:
            so = f"aligned by messages, off by at most {1e3 * uncertain:.3f} ms"
        of, reference = ", ".join(clock["logs"]), ", ".join(clocks[0]["logs"])
        told.append(f"The clock of {of} is {so}; times are those of {reference}.")
    for number, what in ((found.unpaired_loads, "loads"), (found.unpaired_writes, "writes")):
        if number:
            told.append(f"{number} parts of {what} lack the record of the other engine's rank.")
    for log in logs:
        lines = found.lines[log.label]
        if lines.broken + lines.half:
            told.append(f"{log.label}: {lines.broken} damaged and {lines.half} half-written lines are left out.")
    return told


def _print(found: Found, logs: list[Log], as_json: bool) -> None:
    if as_json:
        result = {
            "loads": [_as_json(shown) for shown in found.shown],
            "loads_found": found.num_loads,
            "pairs": found.num_pairs,
            "unpaired": {"loads": found.unpaired_loads, "writes": found.unpaired_writes},
            "clocks": clocks_of(found),
            "lines": {label: vars(lines) for label, lines in found.lines.items()},
        }
        typer.echo(json.dumps(result, indent=2))
        return
    console = open_console()
    if found.shown:
        table = Table(title=Text(f"{len(found.shown)} of {found.num_loads} loads, the slowest first; milliseconds"))
        for name in ("request", "log"):
            table.add_column(name, overflow="fold")
        for name in ("tokens", "MB", "wait", *PHASES):
            table.add_column(name.replace("_", " "), justify="right")
        table.add_column("error")
        for each in found.shown:
            table.add_row(*_cells(each))
        console.print(table)
    else:
        console.print("No load is in the logs: name those of the decode engine too.")
    for note in notes(found, logs):
        console.print(Text(printable(note)))


def _cells(shown: Shown) -> list[Text]:
    load, phases = shown.load, shown.load.phases or {}
    cells = [load.request_id, shown.log, "-" if load.num_tokens is None else str(load.num_tokens)]
    cells += [f"{load.bytes / 1e6:.3f}", f"{1e3 * load.wait_seconds:.3f}"]
    cells += [f"{1e3 * phases[name]:.3f}" if name in phases else "-" for name in PHASES]
    return [Text(printable(cell)) for cell in (*cells, load.error or "")]


def _as_json(shown: Shown) -> dict[str, Any]:
    load = shown.load
    return {
        "request_id": load.request_id,
        "remote_request_id": load.remote_request_id,
        "log": shown.log,
        "rank": load.rank,
        "num_tokens": load.num_tokens,
        "bytes": load.bytes,
        "descriptors": load.descriptors,
        "transport": load.transport,
        "wait_seconds": load.wait_seconds,
        "phases": load.phases,
        "error": load.error,
        "message": load.message,
    }
