"""A timeline as one HTML page that needs no network: a drawing for each request, its spans' figures as tooltips.

Clients write the ids of requests, and peers the names of ranks: all text is escaped, and the page's own policy lets no
script run but the one that it holds.
"""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TextIO

from kvferry.cli.timeline_jobs import Job, Key, Kind, Shown, Span
from kvferry.cli.timeline_trace import ROWS, Rows
from kvferry.cli.transfer_records import PHASES
from kvferry.units import format_bytes

MOST_SPANS = 50_000
"""Spans of a page: a browser draws no more in reasonable time."""
ROW_HEIGHT, LABEL_HEIGHT, GAP = 16, 14, 6
COLORS = {
    Kind.STEP: ("#c9ced6", "#3d444d"),
    Kind.LAYERS: ("#7d8da3", "#8296b0"),
    Kind.HOLD: ("#e3e7ec", "#2b3138"),
    Kind.FIRST_TOKEN: ("#c7598c", "#b94f80"),
    Kind.KEPT: ("#a8b86a", "#7e8c45"),
    Kind.WRITE: ("#e3e7ec", "#2b3138"),
    Kind.WAIT: ("#f0c36a", "#b58a2e"),
    Kind.MOVE: ("#2f7dd1", "#4d9bf0"),
    Kind.REPORT: ("#8a63c9", "#a17fdc"),
    Kind.LOAD: ("#e3e7ec", "#2b3138"),
    Kind.FIND: ("#d98a5b", "#c9784a"),
    Kind.SOURCE: ("#5fb3b3", "#3f9494"),
    Kind.CONFIRM: ("#8a63c9", "#a17fdc"),
    Kind.NEXT_STEP: ("#58a55c", "#5fb364"),
    Kind.REQUEST: ("#e3e7ec", "#2b3138"),
}
"""The color of each kind of span, on a light and on a dark page."""
SCRIPT = (
    "document.addEventListener('input', event => {"
    "event.target.closest('section').querySelector('svg').style.width = event.target.value + '%'})"
)
STYLE = """:root{color-scheme:light dark;--text:#1d2329;--page:#fff;--line:#aab2bd}
@media(prefers-color-scheme:dark){:root{--text:#dfe4ea;--page:#14181d;--line:#59626e}}
body{font:14px/1.4 system-ui,sans-serif;color:var(--text);background:var(--page);margin:1.5em}
h2{font-size:1em;margin:1.5em 0 .3em;overflow-wrap:anywhere}
th,td{font-weight:400;text-align:right;padding:0 1em 0 0;font-variant-numeric:tabular-nums}
th:first-child,td:first-child,td:last-child{text-align:left}
.drawing{overflow-x:auto;border:1px solid var(--line)}
svg{display:block;width:100%;min-width:40em}
text{font-size:11px;fill:var(--text)}
.tick{stroke:var(--line);stroke-width:.5}
p>span{white-space:nowrap;margin-right:1em}
.key{display:inline-block;width:1em;height:1em;margin-right:.3em;vertical-align:-.15em}
"""


@dataclass
class Section:
    """One request: its loads, the writes and steps for them, the hold, and the request's first token."""

    request_id: str
    loads: list[Shown] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)


class Page:
    """Collects the jobs of the loads that are shown, and writes the page."""

    def __init__(self, shown: Sequence[Shown]) -> None:
        self._sections: dict[str, Section] = {}
        self._of: dict[Key, list[Section]] = {}
        self._num_spans = self._num_left_out = 0
        for each in shown:
            section = self._sections.setdefault(each.load.request_id, Section(each.load.request_id))
            section.loads.append(each)
            if (events := each.load.events) is not None:
                of_events = ("write", events.write), ("transfer", events.transfer_id)
                for key in (*of_events, ("request", each.load.request_id)):
                    sections = self._of.setdefault(key, [])
                    if section not in sections:
                        sections.append(section)

    def add(self, job: Job) -> None:
        """Keep a job for the drawings in which it belongs."""
        sections = {section.request_id: section for key in job.keys for section in self._of.get(key, ())}
        for section in sections.values():
            if self._num_spans + 1 + len(job.parts) > MOST_SPANS:
                self._num_left_out += 1
                continue
            self._num_spans += 1 + len(job.parts)
            section.jobs.append(job)

    def write(self, file: TextIO, notes: Sequence[str]) -> None:
        """Write the page, with these notes about all drawings."""
        digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
        policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
        file.write('<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">')
        file.write(f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">')
        file.write(f"<title>kvferry timeline</title><style>{STYLE}{_colors()}</style></head>\n")
        file.write("<body><h1>Timeline</h1>\n")
        if self._num_left_out:
            notes = [
                *notes,
                f"{self._num_left_out} more steps, holds, writes, loads and requests are not drawn; --trace has all.",
            ]
        file.writelines(f"<p>{_text(note)}</p>\n" for note in notes)
        swatches = ((f'<span class="key" style="background:var(--{kind.name})"></span>', kind.value) for kind in COLORS)
        file.write(f"<p>{' '.join(f'<span>{swatch}{name}</span>' for swatch, name in swatches)}</p>\n")
        for section in self._sections.values():
            _write_section(file, section)
        file.write(f"<script>{SCRIPT}</script></body></html>\n")


def _colors() -> str:
    light = "".join(f"--{kind.name}:{colors[0]};" for kind, colors in COLORS.items())
    dark = "".join(f"--{kind.name}:{colors[1]};" for kind, colors in COLORS.items())
    fills = "".join(f".{kind.name}{{fill:var(--{kind.name})}}" for kind in COLORS)
    return f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}{fills}"


def _write_section(file: TextIO, section: Section) -> None:
    file.write(f"<section><h2>{_text(section.request_id)}</h2>\n")
    file.write(f"<table>{_row('th', 'milliseconds', 'wait', *(name.replace('_', ' ') for name in PHASES), '')}\n")
    for each in section.loads:
        load, phases = each.load, each.load.phases or {}
        moved = f"{format_bytes(load.bytes)} by {load.transport}"
        ended = f"failed: {load.error}: {load.message}" if load.error else moved
        times = (f"{1e3 * phases[name]:.3f}" if name in phases else "-" for name in PHASES)
        file.write(_row("td", each.log, f"{1e3 * load.wait_seconds:.3f}", *times, ended) + "\n")
    file.write("</table>\n")
    if section.jobs:
        file.write('<p>Zoom <input type="range" min="100" max="10000" value="100" aria-label="zoom"></p>\n')
        file.write('<div class="drawing">')
        _draw(file, section.jobs)
        file.write("</div>\n")
    else:
        file.write("<p>Nothing to draw: the load was refused before it began.</p>\n")
    file.write("</section>\n")


def _row(tag: str, *cells: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{_text(cell)}</{tag}>' for cell in cells)}</tr>"


def _draw(file: TextIO, jobs: Sequence[Job]) -> None:
    """Write the drawing: time from left to right in percent, so that it can be made wider; a band for each job, and one
    for all steps of a rank.
    """
    began, ended = min(job.whole.began for job in jobs), max(job.whole.ended for job in jobs)
    scale = _Scale(began, max(ended - began, 1e-6))
    bands: dict[tuple[int, str, int], list[Job]] = {}
    kinds = list(ROWS)
    for number, job in enumerate(jobs):
        kind = kinds.index(job.whole.kind)
        bands.setdefault((kind, job.log, number if kind else 0), []).append(job)
    top, drawn = LABEL_HEIGHT + GAP, list[str]()
    for _, band in sorted(bands.items()):
        rows, of_band = Rows(), list[tuple[int, Span]]()
        for job in sorted(band, key=lambda job: job.whole.began):
            parts = sorted(job.parts, key=lambda part: part.began)
            of_band += [(rows.take(part.began, part.ended), part) for part in parts]
        height = ROW_HEIGHT * max(1, len(rows))
        label = f"{band[0].log}: {'steps' if band[0].whole.kind is Kind.STEP else band[0].whole.name}"
        drawn.append(f'<text x="4" y="{top + LABEL_HEIGHT - 3}">{_text(label)}</text>')
        top += LABEL_HEIGHT
        drawn += [scale.rectangle(job.whole, top, height) for job in band]
        drawn += [scale.rectangle(part, top + ROW_HEIGHT * row + 2, ROW_HEIGHT - 4) for row, part in of_band]
        top += height + GAP
    file.write(f'<svg xmlns="http://www.w3.org/2000/svg" height="{top}" role="img">{scale.ticks(top)}')
    file.writelines(f"{each}\n" for each in drawn)
    file.write("</svg>")


@dataclass(frozen=True)
class _Scale:
    """Where times are in a drawing that begins ``began`` and lasts ``seconds``."""

    began: float
    seconds: float

    def percent(self, time: float) -> float:
        """Return the distance from the left, within the drawing whatever the rounding."""
        return min(100.0, max(0.0, 100 * (time - self.began) / self.seconds))

    def rectangle(self, span: Span, top: int, height: int) -> str:
        """Return the rectangle of a span, with its name, times and details as tooltip."""
        left, right = round(self.percent(span.began), 6), round(self.percent(span.ended), 6)
        times = f"{1e3 * (span.began - self.began):.3f} ms + {1e3 * (span.ended - span.began):.3f} ms"
        lines = [f"{span.kind.value}: {span.name}", times, *(f"{name}: {value}" for name, value in span.details)]
        where = f'x="{left:.6f}%" y="{top}" width="{max(0.0, right - left):.6f}%" height="{height}"'
        return f'<rect class="{span.kind.name}" {where}><title>{_text(chr(10).join(lines))}</title></rect>'

    def ticks(self, height: int) -> str:
        """Return ten lines with their times."""
        return "".join(
            f'<line class="tick" x1="{tenth}0%" x2="{tenth}0%" y1="{LABEL_HEIGHT}" y2="{height}"/>'
            f'<text x="{tenth}0%" y="{LABEL_HEIGHT - 3}">{100 * tenth * self.seconds:.3f} ms</text>'
            for tenth in range(10)
        )


def _text(text: str) -> str:
    """Return text as HTML and XML; characters that neither may hold become question marks.

    >>> _text("<script>alert('x')</script>" + chr(0))
    '&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;?'
    """
    return escape("".join(char if char.isprintable() or char == "\n" else "?" for char in text))
