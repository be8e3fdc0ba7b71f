"""``kvferry plan --svg``: what is drawn is the plan, inside the picture, and readable."""

import itertools
import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as Xml

import pytest
import typer
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvferry.cli import plan_picture
from kvferry.cli.plan import explain_plan, plan
from kvferry.cli.plan_picture import (
    CHARACTER,
    DESTINATION,
    SOURCE,
    Bar,
    Cells,
    Move,
    draw_plan,
)
from kvferry.cli.plan_report import Blocks, EngineShape, PlanReport, make_report
from kvferry.errors import KVFerryError, Reason
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.states import mamba2_segments
from kvferry.models.families import BY_HAND, ModelCaches, alike
from kvferry.models.groups import AttentionCache, LayerCache, StateCache
from kvferry.units import format_bytes

from .refusals import refused

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"
FONT_SIZES = {"t": 20, "c": 10, "l": 10}
MIDDLE = ("c", "m")
MAX_PICTURE_BYTES = 40 << 10
ATTENTION = AttentionCache(num_kv_heads=4, head_size=4, itemsize=2)
WINDOW = AttentionCache(num_kv_heads=4, head_size=4, itemsize=2, window=40)
LATENT = AttentionCache(num_kv_heads=1, head_size=6, itemsize=2, is_latent=True)
STATE = StateCache(
    split=mamba2_segments,
    sizes=(16, 1, 4),
    num_heads=8,
    num_channels=8,
    kernel_size=4,
    itemsize=2,
    recurrent_itemsize=4,
)
PATTERNS: list[tuple[LayerCache, ...]] = [
    (ATTENTION,),
    (LATENT,),
    (WINDOW, WINDOW, ATTENTION),
    (STATE, ATTENTION, STATE),
]


def caches(pattern: tuple[LayerCache, ...], num_layers: int) -> ModelCaches:
    return ModelCaches(tuple((cache,) for _, cache in zip(range(num_layers), itertools.cycle(pattern))), BY_HAND)


@st.composite
def engines(draw: st.DrawFn) -> EngineShape:
    tp, pp = draw(st.sampled_from([1, 1, 2, 4, 8])), draw(st.sampled_from([1, 1, 2]))
    return EngineShape(tp, draw(st.sampled_from(NamedLayout)), draw(st.sampled_from([16, 16, 8, 24])), pp)


@st.composite
def reports(draw: st.DrawFn) -> PlanReport:
    """Return plans between any two engines of a model with up to 30 layers. No proof: other tests have those."""
    of_model = caches(draw(st.sampled_from(PATTERNS)), draw(st.integers(3, 30)))
    shapes, tokens = (draw(engines()), draw(engines())), draw(st.integers(1, 100))
    blocks, seed = draw(st.sampled_from(Blocks)), draw(st.integers(0, 3))
    try:
        return make_report(of_model, *shapes, tokens, blocks, seed, verify=False)
    except KVFerryError:
        reject()


class Box(NamedTuple):
    """A rectangle in pixels, and what is in it."""

    left: float
    top: float
    right: float
    bottom: float
    what: str

    def overlaps(self, other: "Box") -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


def boxes_of(element: Xml.Element) -> list[Box]:
    """Return what an element covers; the points of a path, each as a box of its own."""
    get = element.get
    if element.tag == f"{SVG}rect":
        x, y = float(get("x", 0)), float(get("y", 0))
        return [Box(x, y, x + float(get("width", 0)), y + float(get("height", 0)), "rect")]
    if element.tag == f"{SVG}text":
        style, text = get("class", ""), element.text or ""
        size = FONT_SIZES.get(style, 12)
        width, x, y = len(text) * size * CHARACTER, float(get("x", 0)), float(get("y", 0))
        left = x - width / 2 if style in MIDDLE else x
        return [Box(left, y - size * 0.75, left + width, y + size * 0.2, text)]
    if element.tag == f"{SVG}path":
        words = re.findall(r"[A-Za-z]|[-0-9.]+", get("d", ""))
        found, x, y = [], 0.0, 0.0
        while words:
            word = words.pop(0)
            if word in "MCLZ":
                continue
            if word in "HV":
                x, y = (float(words.pop(0)), y) if word == "H" else (x, float(words.pop(0)))
            else:
                x, y = float(word), float(words.pop(0))
            found.append(Box(x, y, x, y, get("d", "")))
        return found
    return []


@settings(max_examples=12)
@given(reports())
def test_the_picture_is_the_plan(report: PlanReport) -> None:
    root = Xml.fromstring(draw_plan(report))
    left, top, width, height = map(float, root.get("viewBox", "").split())
    assert (left, top, width, height) == (0, 0, float(root.get("width", 0)), float(root.get("height", 0)))
    boxes = [box for element in root for box in boxes_of(element)]
    outside = [box for box in boxes if box.left < 0 or box.top < 0 or box.right > width or box.bottom > height]
    assert outside == []
    texts = [box for element in root.findall(f"{SVG}text") for box in boxes_of(element)]
    assert [(one.what, other.what) for one, other in itertools.combinations(texts, 2) if one.overlaps(other)] == []
    titles = [title.text or "" for title in root.iter(f"{SVG}title")]
    exact = [found for title in titles if (found := re.search(r": (\d+) bytes in (\d+) descriptors", title))]
    moved = [(int(found[1]), int(found[2])) for found in exact]
    assert [sum(column) for column in zip(*moved, strict=True)] == [report.bytes, report.descriptors]
    written = {box.what for box in texts}
    for num_bytes, number in moved:
        assert f"{format_bytes(num_bytes)}, {number:,} descriptor{'s' if number > 1 else ''}" in written


@settings(max_examples=12)
@given(reports())
def test_every_run_of_a_block_is_drawn_once(report: PlanReport) -> None:
    """Cells cover the bytes of all runs, each in one run; a bar has each run in one stretch, on both sides."""
    for pair in report.pairs:
        for name in pair.pair.groups:
            move = Move.of(pair.pair.assignment.source_index, pair.pair, name)
            for side, shard in ((SOURCE, pair.pair.source), (DESTINATION, pair.pair.destination)):
                group = shard.group(name)
                assert group is not None
                cells = Cells.of(shard, group, [move], side)
                first, last = move.run_of(cells.address, side), move.run_of(cells.end - 1, side)
                assert first.tolist() == last.tolist()
                assert (cells.address[1:] >= cells.end[:-1]).all()
                lengths = [int((cells.end - cells.address)[first == run].sum()) for run in range(len(move.runs))]
                assert lengths == move.runs[:, 2].tolist()
                items = Bar.of(shard, name, [move], side).items
                drawn = [run for run, _ in itertools.groupby(item.run for item in items if item.is_cell)]
                framed = [run for run in drawn if run]
                assert len(framed) == len(set(framed))
                hidden = {run for item in items for run in item.hidden if run}
                assert {number for _, number in hidden.union(framed)} == set(range(len(move.runs)))


@settings(max_examples=8)
@given(reports())
def test_no_sentence_of_the_explanation_is_repeated(report: PlanReport) -> None:
    lines = explain_plan(report)
    subjects = [line for line in lines if line.startswith("  ") and not line.startswith("   ")]
    assert len(subjects) == len(set(subjects))


def equal_layers(num_layers: int, **shape: int) -> PlanReport:
    cache = AttentionCache(num_kv_heads=8, head_size=128, itemsize=2)
    engine = EngineShape(layout=NamedLayout.BHLNC, block_size=16, **shape)
    return make_report(alike(cache, num_layers), engine, engine, 1000, Blocks.SCATTERED, verify=False)


def test_large_models_fold() -> None:
    text = draw_plan(equal_layers(80, tp=8))
    assert len(text.encode()) < MAX_PICTURE_BYTES
    assert "L79" in text
    assert "L40" not in text


def test_too_many_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_picture, "MAX_PAIRS", 3)
    draw_plan(equal_layers(2, tp=2))
    report = equal_layers(2, tp=4)
    assert "at most 3" in refused(Reason.INVALID_SETTING, lambda: draw_plan(report))


def run_plan(arguments: list[str]) -> str:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(plan)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


COMMANDS = {
    target: command
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    for command, target in re.findall(r"`kvferry (plan [^`]*--svg ([^` ]+)[^`]*)`", page.read_text())
}


@pytest.mark.parametrize("target", sorted(COMMANDS))
def test_committed_pictures_are_what_the_command_draws(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The configurations have every field, so transformers is not needed, and its import is long.
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.chdir(ROOT)
    drawn = tmp_path / "drawn.svg"
    command, name, *arguments = shlex.split(COMMANDS[target])
    run_plan([str(drawn) if argument == target else argument for argument in (name, *arguments)])
    assert command == "plan"
    assert (ROOT / target).read_text() == drawn.read_text(), f"draw it again: kvferry {COMMANDS[target]}"
    assert len(drawn.read_bytes()) < MAX_PICTURE_BYTES


def test_every_committed_picture_stands_beside_its_command() -> None:
    # Those of a benchmark are named for it, and can be drawn again only by running the benchmark.
    pictures = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.svg")}
    measured = {picture for picture in pictures if Path(picture).name.startswith("bench-")}
    assert pictures - measured == set(COMMANDS)
    assert len(COMMANDS) == 2
    assert all(Path(picture).name in (ROOT / "docs" / "measured.md").read_text() for picture in measured)


def test_a_picture_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(plan)
    arguments = f"--layers 2 --kv-heads 2 --head-size 64 --tokens 16 --svg {tmp_path}/none/plan.svg"
    error = CliRunner().invoke(app, arguments.split()).exception
    assert isinstance(error, KVFerryError)
    assert "cannot be written: No such file" in error.message
