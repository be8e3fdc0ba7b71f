"""Costs in a file: a report of ``kvferry bench transport --strategy``, or what an engine has measured."""

import fcntl
import logging
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from kvferry.errors import Reason, SettingsError
from kvferry.plan.staging.strategy import Costs

logger = logging.getLogger(__name__)

MAX_REPORT_BYTES = 1 << 20
SHORTEST, LONGEST = 1e-15, 60.0
"""In seconds."""
LEAST_RATE, LARGEST_RATE = 1.0, 1e15
"""In bytes per second."""
LOCK_SECONDS = 1.0


class _Row(msgspec.Struct):
    costs: Costs


class _Report(msgspec.Struct):
    rows: list[_Row]


def read_costs(path: Path, option: str) -> dict[str, Costs]:
    """Return by transport the costs in a report of ``kvferry bench transport --strategy --json``.

    Raises :class:`SettingsError` (``invalid-setting``), which names ``option`` and the file, where it cannot be read
    or is no such report.
    """
    costs = _find_costs(path, option)
    if costs is None:
        raise _no_report(path, option, "it does not exist")
    return costs


def decode_costs(report: bytes) -> dict[str, Costs]:
    """Return by transport the costs in a report, the last of each. Raises :class:`ValueError` that says what is wrong.

    >>> decode_costs(b'{"rows": []}')
    Traceback (most recent call last):
    ValueError: it holds no costs
    """
    if len(report) > MAX_REPORT_BYTES:
        raise ValueError(f"it is larger than {MAX_REPORT_BYTES} bytes")
    try:
        rows = msgspec.json.decode(report, type=_Report).rows
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not rows:
        raise ValueError("it holds no costs")
    for row in rows:
        _check_range(row.costs)
    # A report has the costs of a transport with each move that was measured over it.
    return {row.costs.transport: row.costs for row in rows}


class KeptCosts:
    """The costs in a file that is there at start; where none is, those that are measured go into it.

    An empty path keeps nothing. Raises :class:`SettingsError` (``invalid-setting``) for a file that cannot be read or
    is no report of costs. ``given`` has by transport the costs in the file.
    """

    def __init__(self, path: str) -> None:
        found = _find_costs(Path(path), "costs_file") if path else None
        self.given = found or {}
        # As it is now: a later change of folder changes nothing, and what a link points to is written.
        self._path = Path(os.path.realpath(path)) if path and found is None else None

    def keep(self, costs: Costs) -> None:
        """Add the costs of a transport, unless the file was there at start or has some by now; a failure is logged."""
        if self._path is None:
            return
        try:
            with _locked(self._path.parent):
                _add(self._path, costs)
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("kvferry: the costs of %s are not kept in %s: %s", costs.transport, self._path, error)


def _find_costs(path: Path, option: str) -> dict[str, Costs] | None:
    try:
        return decode_costs(_read(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _no_report(path, option, str(error)) from None


def _no_report(path: Path, option: str, why: str) -> SettingsError:
    what = f"{option}: {path} is no report of costs: {why}."
    return SettingsError(Reason.INVALID_SETTING, what, "Make one with kvferry bench transport --strategy --json.")


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_REPORT_BYTES + 1)


def _check_range(costs: Costs) -> None:
    for name, value in asdict(costs).items():
        if name == "transport" or (name == "seconds_per_remote_run" and value == 0):
            continue
        least, most = (LEAST_RATE, LARGEST_RATE) if name.endswith("bytes_per_second") else (SHORTEST, LONGEST)
        if not least <= value <= most:
            raise ValueError(f"{name} is {value:g}, which is not from {least:g} to {most:g}")


def _add(path: Path, costs: Costs) -> None:
    """Put a row behind those that others have written since the start; nothing else of theirs is changed."""
    report: dict[str, Any] = {"rows": []}
    if path.exists():
        there = _read(path)
        if costs.transport in decode_costs(there):
            return
        report = msgspec.json.decode(there)
    report["rows"].append({"costs": asdict(costs)})
    content = msgspec.json.format(msgspec.json.encode(report)) + b"\n"
    # What the next start would refuse is never written.
    decode_costs(content)
    _replace(path, content)
    logger.info("kvferry: the costs of %s are kept in %s", costs.transport, path)


def _replace(path: Path, content: bytes) -> None:
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with draft.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that nothing is written between a read of a file and its replacement.

    Raises :class:`TimeoutError` where another holds it for long.
    """
    deadline = time.monotonic() + LOCK_SECONDS
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{folder} was locked by another for {LOCK_SECONDS:g} s")
            time.sleep(0.005)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
