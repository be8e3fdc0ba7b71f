"""A plan as a picture: the memory of both engines as bars of blocks, and every run as a band between two bars.

Sources are on the left and destinations on the right, with one bar for each rank and region and byte 0 at the top. The
length of a cell is the stride from block to block: in a cross-layer layout a whole block, in any other layout the page
of a block in one layer. All cells have one height, so each bar is to scale.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt

from kvferry.arrays import Addresses, Descriptors, Flags
from kvferry.cli.plan_report import PlanReport
from kvferry.layout.shard import Region, Shard
from kvferry.units import format_bytes

MAX_BARS = 8
"""Limit of the bars of one engine."""
MAX_CELLS = 192
"""Limit of the cells of one bar."""
MAX_BANDS = 4096
CELL, BAR, GAP, TOP, SCALE = 14, 110, 46, 60, 90
LEFT_BAR, RIGHT_BAR, WIDTH = SCALE, 780, 1000
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#44bb99", "#bbcc33", "#7766cc")
FREE, NULL = "#eeeeee", "#bbbbbb"


@dataclass(frozen=True)
class Bar:
    """The bar of one region: its place in the picture, and its cells."""

    shard: Shard
    region: Region
    side: str
    index: int
    x: int
    y: int
    cell_bytes: int
    num_cells: int
    num_blocks: int

    @property
    def shown(self) -> int:
        """The number of drawn cells."""
        return min(self.num_cells, MAX_CELLS)

    @property
    def height(self) -> int:
        """The height of the drawn cells."""
        return self.shown * CELL

    def place(self, addresses: Addresses) -> npt.NDArray[np.float64]:
        """Return the y coordinates of addresses of this region."""
        offsets = (addresses - np.uint64(self.region.base_address)).astype(np.float64)
        return self.y + offsets / self.cell_bytes * CELL

    def shows(self, addresses: Addresses, lengths: Addresses) -> Flags:
        """Return which runs lie within the drawn cells."""
        base = np.uint64(self.region.base_address)
        end = base + np.uint64(min(self.shown * self.cell_bytes, self.region.length))
        return (addresses >= base) & (addresses + lengths <= end)


def draw_plan(report: PlanReport) -> str:
    """Return the plan as an SVG document. Equal plans give equal documents.

    Every band is a ``polygon`` of class ``band`` with its descriptor in ``data-source``, ``data-destination`` and
    ``data-length``. The element ``left-out`` counts the bars, cells and runs beyond the limits of the picture.
    """
    colours = {group.name: COLOURS[index % len(COLOURS)] for index, group in enumerate(report.prefill.groups)}
    sides = (
        _bars(report.sources, "source", LEFT_BAR),
        _bars(report.destinations, "destination", RIGHT_BAR),
    )
    bars = [*sides[0][:MAX_BARS], *sides[1][:MAX_BARS]]
    legend_y = max(bar.y + bar.height for bar in bars) + GAP
    height = legend_y + 24 * (len(colours) + 2) + 40
    svg = ElementTree.Element("svg", _numbers(width=WIDTH, height=height), xmlns="http://www.w3.org/2000/svg")
    svg.set("viewBox", f"0 0 {WIDTH} {height}")
    svg.set("font-family", "sans-serif")
    svg.set("font-size", "10")
    ElementTree.SubElement(svg, "rect", _numbers(width=WIDTH, height=height), fill="white")
    _text(svg, 10, 20, f"{report.descriptors} descriptors, {format_bytes(report.bytes)}", size=14)
    for bar in bars:
        _draw_bar(svg, bar, report, colours)
    drawn = _draw_bands(svg, bars, report, colours)
    left_out = _left_out(sides, report.descriptors - drawn)
    _draw_legend(svg, legend_y, colours, left_out)
    ElementTree.indent(svg)
    return ElementTree.tostring(svg, encoding="unicode") + "\n"


def _bars(shards: Sequence[Shard], side: str, x: int) -> list[Bar]:
    bars: list[Bar] = []
    y = TOP + 20
    for shard in shards:
        for number, region in enumerate(shard.regions):
            here = [(group, each) for group in shard.groups for each in group.components if each.region == number]
            cell = min(component.block_stride for _, component in here)
            cells = -(-region.length // cell)
            bars.append(
                Bar(shard, region, side, len(bars), x, y, cell, cells, max(group.num_blocks for group, _ in here))
            )
            y += bars[-1].height + GAP
    return bars


def _draw_bar(svg: ElementTree.Element, bar: Bar, report: PlanReport, colours: dict[str, str]) -> None:
    owners = {0: NULL}
    for request in report.requests:
        if bar.shard.group(request.group):
            ids = request.source_ids if bar.side == "source" else request.destination_ids
            owners.update({block: colours[request.group] for block in ids.tolist() if block})
    attributes = {"id": f"{bar.side}-{bar.index}", "class": "bar", "data-base": str(bar.region.base_address)}
    group = ElementTree.SubElement(svg, "g", attributes)
    side = "prefill" if bar.side == "source" else "decode"
    _text(group, bar.x, bar.y - 8, f"{side} {bar.shard.rank_name}, cells of {format_bytes(bar.cell_bytes)}", size=11)
    for cell in range(bar.shown):
        block, y = cell % bar.num_blocks, bar.y + cell * CELL
        box = {"id": f"{bar.side}-{bar.index}-cell-{cell}", "class": "cell", "data-block": str(block)}
        sizes = _numbers(x=bar.x, y=y, width=BAR, height=CELL)
        colour = owners.get(block, FREE)
        ElementTree.SubElement(group, "rect", {**box, **sizes, "fill": colour, "stroke": "white"})
        page = f" ({cell // bar.num_blocks})" if bar.num_cells > bar.num_blocks else ""
        _text(group, bar.x + 4, y + 11, f"{block}{page}")
    _draw_scale(group, bar)


def _draw_scale(svg: ElementTree.Element, bar: Bar) -> None:
    """Write byte offsets at the outer edge of the bar, at every eighth cell."""
    for cell in range(0, bar.shown + 1, 8):
        x, anchor = (bar.x - 6, "end") if bar.side == "source" else (bar.x + BAR + 6, "start")
        _text(svg, x, bar.y + cell * CELL + 4, format_bytes(cell * bar.cell_bytes), anchor=anchor)


def _draw_bands(svg: ElementTree.Element, bars: Sequence[Bar], report: PlanReport, colours: dict[str, str]) -> int:
    """Draw one band for each run between drawn cells; return the number of bands."""
    drawn = 0
    group = ElementTree.SubElement(svg, "g", {"id": "bands"})
    for pair in report.pairs:
        first = 0
        for name, summary in pair.groups:
            rows = pair.descriptors[first : first + summary.descriptors]
            first += summary.descriptors
            for left in (bar for bar in bars if bar.shard is pair.pair.source):
                for right in (bar for bar in bars if bar.shard is pair.pair.destination):
                    drawn += _draw_rows(group, left, right, rows, colours[name], MAX_BANDS - drawn)
    return drawn


def _draw_rows(svg: ElementTree.Element, left: Bar, right: Bar, rows: Descriptors, colour: str, at_most: int) -> int:
    shown = rows[left.shows(rows[:, 0], rows[:, 2]) & right.shows(rows[:, 1], rows[:, 2])][:at_most]
    ends = (
        left.place(shown[:, 0]),
        left.place(shown[:, 0] + shown[:, 2]),
        right.place(shown[:, 1] + shown[:, 2]),
        right.place(shown[:, 1]),
    )
    xs = (left.x + BAR, left.x + BAR, right.x, right.x)
    for row, corners in zip(shown.tolist(), np.stack(ends, axis=1).tolist(), strict=True):
        points = " ".join(f"{x},{y:.3f}" for x, y in zip(xs, corners, strict=True))
        data = dict(zip(("data-source", "data-destination", "data-length"), map(str, row), strict=True))
        look = {"fill": colour, "fill-opacity": "0.4", "stroke": colour, "stroke-width": "0.3"}
        ElementTree.SubElement(svg, "polygon", {"class": "band", "points": points, **data, **look})
    return len(shown)


def _left_out(sides: Sequence[Sequence[Bar]], num_bands: int) -> str:
    drawn = [bar for side in sides for bar in side[:MAX_BARS]]
    counts = {
        "bars": sum(max(0, len(side) - MAX_BARS) for side in sides),
        "cells": sum(bar.num_cells - bar.shown for bar in drawn),
        "runs": num_bands,
    }
    found = [f"{count} {name}" for name, count in counts.items() if count]
    return f"Left out: {', '.join(found)}." if found else ""


def _draw_legend(svg: ElementTree.Element, y: int, colours: dict[str, str], left_out: str) -> None:
    legend = ElementTree.SubElement(svg, "g", {"id": "legend"})
    names = {**{f"group {name}": colour for name, colour in colours.items()}, "block 0, the null block": NULL}
    names["block of no group"] = FREE
    for index, (name, colour) in enumerate(names.items()):
        ElementTree.SubElement(legend, "rect", _numbers(x=10, y=y + 24 * index, width=16, height=12), fill=colour)
        _text(legend, 34, y + 24 * index + 10, name)
    if left_out:
        _text(svg, 10, 40, left_out, identity="left-out")


def _text(
    parent: ElementTree.Element, x: int, y: int, text: str, *, size: int = 0, anchor: str = "", identity: str = ""
) -> None:
    element = ElementTree.SubElement(parent, "text", _numbers(x=x, y=y))
    for name, value in (("font-size", str(size or "")), ("text-anchor", anchor), ("id", identity)):
        if value:
            element.set(name, value)
    element.text = text


def _numbers(**values: int) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}
