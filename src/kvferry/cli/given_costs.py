"""Costs of moving that a benchmark has measured, for plans that are made elsewhere."""

from dataclasses import astuple
from pathlib import Path

import msgspec

from kvferry.errors import Reason, SettingsError
from kvferry.plan.strategy import TYPICAL_COSTS, Costs

ASSUMED = ("cma", "nixl")
"""Transports whose typical costs are shown where none are given."""
MAX_REPORT_BYTES = 1 << 20


class _Row(msgspec.Struct):
    costs: Costs


class _Report(msgspec.Struct):
    rows: list[_Row]


def read_costs(path: Path | None) -> tuple[Costs, ...]:
    """Return the costs in a report of ``kvferry bench transport --strategy --json``; without one, typical ones.

    Raises :class:`SettingsError` (``invalid-setting``) for a file that is no such report.

    >>> [costs.transport for costs in read_costs(None)]
    ['cma', 'nixl']
    """
    if path is None:
        return tuple(TYPICAL_COSTS[name] for name in ASSUMED)
    try:
        with path.open("rb") as file:
            rows = msgspec.json.decode(file.read(MAX_REPORT_BYTES), type=_Report).rows
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise _no_report(path, str(error)) from None
    if not rows or any(min(astuple(row.costs)[1:]) <= 0 for row in rows):
        raise _no_report(path, "it holds no costs, or some that are not above zero")
    # A report has the costs of a transport with each move that was measured over it.
    return tuple({row.costs.transport: row.costs for row in rows}.values())


def _no_report(path: Path, why: str) -> SettingsError:
    what = f"--costs: {path} is no report of costs: {why}."
    return SettingsError(Reason.INVALID_SETTING, what, "Make one with kvferry bench transport --strategy --json.")
