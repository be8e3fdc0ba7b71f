"""The page of a timeline in Chromium: what a person sees, and that the page runs and asks for nothing else."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.timeline import timeline
from kvferry.cli.timeline_jobs import Kind
from kvferry.cli.transfer_records import PHASES, Log

from ..support.browser import MISSING, Browser, find_browser, open_browser
from ..support.transfer_logs import Host, Line, load_lines, sample_lines, write_logs

SECTIONS = """(() => {
    const box = of => of.getBoundingClientRect().toJSON()
    const seen = rect => {
        const {left, right, bottom, width} = box(rect), edge = Math.min(1, width / 2)
        const at = [left + edge, left + width / 2, right - edge]
        return at.some(x => document.elementFromPoint(x, bottom - 1) === rect)
    }
    return [...document.querySelectorAll('section')].map(section => ({
        request: section.querySelector('h2').innerText,
        table: [...section.querySelectorAll('tr')].map(row => [...row.cells].map(cell => cell.innerText)),
        drawing: box(section.querySelector('svg')),
        texts: [...section.querySelectorAll('text')].map(text => text.textContent),
        spans: [...section.querySelectorAll('rect')].map(rect => ({
            kind: rect.className.baseVal, told: rect.querySelector('title').textContent,
            color: getComputedStyle(rect).fill, box: box(rect), seen: seen(rect)}))
    }))
})()"""
LEGEND = """Object.fromEntries([...document.querySelectorAll('.key')].map(
    key => [key.nextSibling.textContent.trim(), getComputedStyle(key).backgroundColor]))"""
END_KEY = ("End", 35)
OF_SCHEDULERS = (Kind.HOLD, Kind.FIRST_TOKEN, Kind.KEPT, Kind.REQUEST)
"""What no log of a rank tells."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip(MISSING)
    with open_browser(program) as opened:
        yield opened


def page_of(folder: Path, lines: list[Line]) -> Path:
    """Write the logs of the records, and the page that the command makes of them."""
    logs: list[Log] = write_logs(folder, lines)
    timeline([log.path for log in logs], html=folder / "page.html")
    return folder / "page.html"


def test_a_person_sees_each_request_its_phases_and_when_they_were(browser: Browser, tmp_path: Path) -> None:
    lines = sample_lines()
    page = page_of(tmp_path, lines)
    browser.open(page)
    assert browser.messages == []
    assert browser.requests == [page.as_uri()]
    loads = [line for _, _, line in lines if "request_id" in line]
    slowest_first = sorted(loads, key=lambda load: -load["wait_seconds"])
    sections, legend = browser.evaluate(SECTIONS), browser.evaluate(LEGEND)
    assert [section["request"] for section in sections] == [load["request_id"] for load in slowest_first]
    assert list(legend) == [kind.value for kind in Kind]
    for section, load in zip(sections, slowest_first, strict=True):
        check_table(section["table"], load)
        check_drawing(section, load, legend)


def check_table(table: list[list[str]], load: dict[str, Any]) -> None:
    head, row = table
    assert head == ["milliseconds", "wait", *(name.replace("_", " ") for name in PHASES), ""]
    times = [load["wait_seconds"], *(load["phases"][name] for name in PHASES)]
    assert row == ["decode.log.rank0", *(f"{1e3 * each:.3f}" for each in times), "512.0 MiB by nixl"]


def check_drawing(section: dict[str, Any], load: dict[str, Any], legend: dict[str, str]) -> None:
    """Assert that each span is as long and as far from the left as its times say, and can be pointed at."""
    drawing, spans = section["drawing"], section["spans"]
    assert {span["kind"] for span in spans} == {kind.name for kind in Kind if kind not in OF_SCHEDULERS}
    assert {f"prefill.log.rank{rank}: steps" for rank in range(2)} < set(section["texts"])
    assert f"decode.log.rank0: {load['request_id']}" in section["texts"]
    whole = load["wait_seconds"] + load["phases"]["next_step"]
    assert f"{100 * whole:.3f} ms" in section["texts"], "the second of ten ticks"
    for span in spans:
        kind, began, lasted = re.match(r"(.*?): .*\n([\d.]+) ms \+ ([\d.]+) ms", span["told"]).groups()
        assert span["color"] == legend[kind] == legend[Kind[span["kind"]].value]
        left, width = (float(each) / 1e3 / whole * drawing["width"] for each in (began, lasted))
        assert span["box"]["left"] - drawing["left"] == pytest.approx(left, abs=0.1)
        assert span["box"]["width"] == pytest.approx(width, abs=0.1)
        assert drawing["top"] < span["box"]["top"]
        assert span["box"]["top"] + span["box"]["height"] <= drawing["top"] + drawing["height"]
        assert span["seen"] or span["box"]["width"] < 1, span["told"]
    [load_span] = [span for span in spans if span["kind"] == Kind.LOAD.name]
    assert load_span["box"]["width"] == pytest.approx(drawing["width"], abs=0.1), "all else is within the load"


def test_the_zoom_makes_a_drawing_wider_and_scrolls_it(browser: Browser, tmp_path: Path) -> None:
    browser.open(page_of(tmp_path, sample_lines()))
    widths = "[...document.querySelectorAll('.drawing')].map(each => [each.clientWidth, each.scrollWidth])"
    [[width, inner], other] = browser.evaluate(widths)
    assert width == inner
    browser.evaluate("document.querySelector('input').focus()")
    browser.press(*END_KEY)
    assert browser.evaluate(widths) == [[width, 100 * width], other]
    assert browser.messages == []


def test_what_clients_write_is_text(browser: Browser, tmp_path: Path) -> None:
    evil = "</title></h2></svg><script>console.log('ran')</script><img src=http://127.0.0.1:9/ onerror=alert(1)>\"'&"
    page = page_of(tmp_path, load_lines(1, 1.0, Host("d", 5.0), [Host("p", 9.0)], lambda: 0.001, evil))
    browser.open(page)
    assert browser.messages == []
    assert browser.requests == [page.as_uri()]
    assert browser.evaluate("document.querySelector('h2').innerText") == evil


def test_the_policy_of_the_page_keeps_out_what_gets_into_it(browser: Browser, tmp_path: Path) -> None:
    """The control of the tests above: a script and a picture that are in the page are heard of."""
    page = page_of(tmp_path, sample_lines())
    more = "<script>console.log('ran')</script><img src='http://127.0.0.1:9/picture' onerror='alert(1)'>"
    text = page.read_text().replace("</body>", f"{more}</body>")
    page.write_text(text)
    browser.open(page)
    assert {"ran", "1"}.isdisjoint(browser.messages)
    assert len([message for message in browser.messages if "Content Security Policy" in message]) == 3
    page.write_text(re.sub(r"<meta http-equiv=[^>]*>", "", text))
    browser.open(page)
    assert {"ran", "1"} <= set(browser.messages)
    assert "http://127.0.0.1:9/picture" in browser.requests
