"""The picture of a plan: its bands are the descriptors, and it stays small."""

from typing import Any
from xml.etree import ElementTree

import pytest

from kvferry.cli.plan_drawing import BAR, CELL, MAX_BANDS, MAX_BARS, MAX_CELLS, draw_plan
from kvferry.cli.plan_report import Blocks, EngineShape, PlanReport, make_report
from kvferry.layout.named_layouts import NamedLayout
from kvferry.models.layer_caches import AttentionCache

SVG = "{http://www.w3.org/2000/svg}"


def planned(layout: str, tokens: int, prefill_tp: int, decode_tp: int, layers: int = 3) -> PlanReport:
    caches = [AttentionCache(num_kv_heads=4, head_size=8, itemsize=2)] * layers
    engines = [EngineShape(tp, NamedLayout(layout), 4) for tp in (prefill_tp, decode_tp)]
    return make_report(caches, *engines, tokens, Blocks.SCATTERED)


def bands_of(svg: ElementTree.Element) -> list[ElementTree.Element]:
    return [element for element in svg.iter(f"{SVG}polygon") if element.get("class") == "band"]


def data_of(band: ElementTree.Element) -> tuple[int, ...]:
    return tuple(int(band.get(f"data-{name}", "")) for name in ("source", "destination", "length"))


def rows_of(report: PlanReport) -> list[tuple[int, ...]]:
    return sorted(tuple(row) for pair in report.pairs for row in pair.descriptors.tolist())


def text_of(svg: ElementTree.Element, identity: str) -> str:
    return next((element.text or "" for element in svg.iter() if element.get("id") == identity), "")


@pytest.mark.parametrize("layout", list(NamedLayout))
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 2)], ids=str)
def test_bands_are_the_descriptors(layout: NamedLayout, sizes: tuple[int, int]) -> None:
    report = planned(layout, 32, *sizes)
    svg = ElementTree.fromstring(draw_plan(report))
    assert sorted(map(data_of, bands_of(svg))) == rows_of(report)
    assert text_of(svg, "left-out") == ""


def bars_of(svg: ElementTree.Element, side: str) -> list[tuple[int, ElementTree.Element]]:
    groups = [element for element in svg.iter(f"{SVG}g") if element.get("class") == "bar"]
    return [(int(bar.get("data-base", "")), bar) for bar in groups if str(bar.get("id")).startswith(side)]


def test_bands_end_where_their_bytes_lie() -> None:
    """Each end is found again from the cells: the bar by its base address, the height by the cell's bytes."""
    report = planned("BHLNC", 32, 2, 1)
    svg = ElementTree.fromstring(draw_plan(report))
    cell_bytes = {"source": 3 * 2 * 4 * 16 * 2, "destination": 3 * 4 * 4 * 16 * 2}
    for band in bands_of(svg):
        points = [tuple(map(float, point.split(","))) for point in str(band.get("points")).split()]
        source, destination, length = data_of(band)
        for side, address, ends in (("source", source, points[:2]), ("destination", destination, points[:1:-1])):
            base, bar = max(pair for pair in bars_of(svg, side) if pair[0] <= address)
            cells = bar.findall(f"{SVG}rect")
            top, x = float(cells[0].get("y", "")), float(cells[0].get("x", ""))
            scale = CELL / cell_bytes[side]
            assert [y for _, y in ends] == pytest.approx(
                [top + (address - base) * scale, top + (address - base + length) * scale], abs=0.01
            )
            assert {px for px, _ in ends} == {x + BAR if side == "source" else x}


def test_cells_name_their_blocks() -> None:
    svg = ElementTree.fromstring(draw_plan(planned("BHLNC", 16, 1, 1)))
    cells = [element for element in svg.iter(f"{SVG}rect") if element.get("class") == "cell"]
    assert [cell.get("data-block") for cell in cells] == ["0", "1", "2", "3", "4"] * 2
    assert text_of(svg, "left-out") == ""
    texts = {element.text for element in svg.iter(f"{SVG}text")}
    assert {"0 B", "group full", "block of no group"} <= texts


def test_equal_plans_give_equal_pictures() -> None:
    assert draw_plan(planned("LBNHC", 40, 2, 1)) == draw_plan(planned("LBNHC", 40, 2, 1))


@pytest.mark.parametrize(
    ("arguments", "left_out"),
    [
        ({"layout": "BHLNC", "tokens": 4000, "prefill_tp": 1, "decode_tp": 1}, "runs"),
        ({"layout": "LBHNC", "tokens": 400, "prefill_tp": 1, "decode_tp": 1, "layers": 40}, "cells"),
        ({"layout": "BHLNC", "tokens": 16, "prefill_tp": 1, "decode_tp": 16}, "bars"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_left_out_and_said(arguments: dict[str, Any], left_out: str) -> None:
    report = planned(**arguments)
    picture = draw_plan(report)
    svg = ElementTree.fromstring(picture)
    drawn = list(map(data_of, bands_of(svg)))
    assert set(drawn) < set(rows_of(report))
    assert left_out in text_of(svg, "left-out")
    assert f"{report.descriptors - len(drawn)} runs" in text_of(svg, "left-out")
    assert len(drawn) <= MAX_BANDS
    bars = bars_of(svg, "source") + bars_of(svg, "destination")
    assert len(bars) <= 2 * MAX_BARS
    assert all(len(bar.findall(f"{SVG}rect")) <= MAX_CELLS for _, bar in bars)
    assert len(picture) < 3_000_000
    lowest = max(float(cell.get("y", "")) + CELL for cell in svg.iter(f"{SVG}rect") if cell.get("class") == "cell")
    corners = [float(point.split(",")[1]) for band in bands_of(svg) for point in str(band.get("points")).split()]
    assert max(corners, default=0.0) <= lowest
