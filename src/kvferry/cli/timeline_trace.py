"""A timeline as a file that ui.perfetto.dev and chrome://tracing open, written job by job."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, TextIO

from kvferry.cli.timeline_jobs import Job, Kind, Span

ROWS = {Kind.STEP: "steps", Kind.HOLD: "holds", Kind.WRITE: "writes", Kind.LOAD: "loads", Kind.REQUEST: "requests"}
"""The kinds of jobs, in the order of a drawing."""
FEW_ROWS = 1000
"""Rows of one kind for which a thread number is set apart."""


class Rows:
    """Rows for spans, of which those in one row do not overlap.

    >>> rows = Rows()
    >>> rows.take(0.0, 2.0), rows.take(1.0, 3.0), rows.take(2.0, 4.0)
    (0, 1, 0)
    """

    def __init__(self) -> None:
        self._ends: list[float] = []

    def __len__(self) -> int:
        return len(self._ends)

    def take(self, began: float, ended: float) -> int:
        """Return the first row that is free from ``began`` on, and take it until ``ended``."""
        for row, end in enumerate(self._ends):
            if end <= began:
                self._ends[row] = ended
                return row
        self._ends.append(ended)
        return len(self._ends) - 1


class Trace:
    """Writes jobs as Trace Event Format, times in microseconds of the reference clock.

    A log is a process, a row of it a thread. Parts that overlap, as those of several sources do, have rows of their
    own: spans of one thread must lie within one another.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._processes: dict[str, int] = {}
        self._rows: dict[tuple[str, str], Rows] = {}
        self._named: set[tuple[int, int]] = set()
        self._is_first = True
        file.write('{"displayTimeUnit":"ms","traceEvents":[')

    def add(self, job: Job) -> None:
        """Write one job."""
        kind = ROWS[job.whole.kind]
        thread = self._thread(job.log, kind, job.whole)
        self._slice(thread, job.whole)
        end = job.whole.began
        for part in sorted(job.parts, key=lambda part: part.began):
            overlaps = part.began < end
            self._slice(self._thread(job.log, f"{kind}, other sources", part) if overlaps else thread, part)
            end = end if overlaps else part.ended
        for arrow in job.arrows:
            # A number that a double holds exactly, equal at both ends.
            number = int.from_bytes(hashlib.blake2b(arrow.name.encode(errors="replace"), digest_size=6).digest())
            event = {"ph": "s" if arrow.is_sent else "f", "bp": "e", "id": number, "cat": "message", "name": "message"}
            self._write(event | self._where(thread, arrow.at))

    def close(self, about: Mapping[str, Any]) -> None:
        """Write the end, with what the file says about itself."""
        self._file.write(f'\n],"otherData":{json.dumps(about)}}}\n')

    def _slice(self, thread: tuple[int, int], span: Span) -> None:
        event = {"ph": "X", "cat": span.kind, "name": span.name, "dur": _micro(span.ended) - _micro(span.began)}
        values: dict[str, list[str]] = {}
        for name, value in span.details:
            values.setdefault(name, []).append(value)
        arguments = {name: "; ".join(of_name) for name, of_name in values.items()}
        self._write(event | self._where(thread, span.began) | {"args": arguments})

    def _where(self, thread: tuple[int, int], at: float) -> dict[str, Any]:
        return {"pid": thread[0], "tid": thread[1], "ts": _micro(at)}

    def _thread(self, log: str, kind: str, span: Span) -> tuple[int, int]:
        """Return the process and thread of a span, named before it is used first."""
        process = self._processes.setdefault(log, len(self._processes) + 1)
        kinds = [*ROWS.values(), *(f"{each}, other sources" for each in ROWS.values())]
        row = self._rows.setdefault((log, kind), Rows()).take(span.began, span.ended)
        thread = process, FEW_ROWS * kinds.index(kind) + row + 1
        if thread not in self._named:
            self._named.add(thread)
            names = {"process_name": log, "thread_name": kind if not row else f"{kind} {row + 1}"}
            for what, name in names.items():
                self._write({"ph": "M", "name": what, "pid": process, "tid": thread[1], "args": {"name": name}})
        return thread

    def _write(self, event: Mapping[str, Any]) -> None:
        self._file.write(("\n" if self._is_first else ",\n") + json.dumps(event))
        self._is_first = False


def _micro(seconds: float) -> float:
    """Return microseconds in whole units of 1/1024: their differences are exact, so that what lies within a span stays.

    >>> _micro(2000000.000003)
    2000000000003.0
    """
    return round(seconds * 1e6 * 1024) / 1024
