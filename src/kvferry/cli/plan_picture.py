"""A plan as a picture (SVG): what each rank has, what moves between ranks, and the runs of one block of each group.

A *cell* is a stretch of one block's memory that holds one layer of some heads. Cells stand in the order of memory. What
does not fit is folded into an ellipsis. A frame around cells is a run; it is open where an ellipsis hides more of it.
"""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any
from xml.etree import ElementTree as Xml  # nosec B405 # XML is written, never read

import numpy as np

from kvferry.arrays import Flags, Integers, Offsets
from kvferry.cli.plan_report import Engine, PairReport, PlanReport, cut_heads, name_groups, per_layer_layouts, spans
from kvferry.errors import Reason, SettingsError
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import CacheGroup, CacheKind, Component, HeadRange, Shard
from kvferry.models.families import layer_of
from kvferry.models.groups import LayerGroup
from kvferry.plan.match import common, without
from kvferry.plan.planner import GroupPlan, PairPlan
from kvferry.units import format_bytes, format_seconds

MAX_PAIRS = 128
WIDTH, MARGIN = 1000, 24
BOX_WIDTH, STRIP_WIDTH = 326, 110
COLUMN_WIDTH = 460
LINE = 17
PILL_HEIGHT, PILL_SPACING = 22, 30
CELL_HEIGHT = 24
GAP = 8
MAX_DRAWN_SOURCES = 4
CHARACTER = 0.6
"""Width of a character over the size of its font: no less than that of common sans-serif fonts, on average."""
TITLE, TEXT, SMALL = 20, 12, 10
FOLDS = (12, 8, 5, 4, 3, 2)
"""How many indices of one axis are shown, from the most to the fewest."""
COLOURS = (
    ("#cfe3f7", "#9cc6ee", "#1f5fa8"),
    ("#fbdcb5", "#f5bd78", "#a85c05"),
    ("#cdeccf", "#98d69c", "#2c7a36"),
    ("#e2d4f3", "#c3a7e6", "#6a3fb0"),
    ("#f8d0d4", "#ef9fa8", "#b0303f"),
    ("#c4ecea", "#86d3d0", "#157a78"),
    ("#f7f0b2", "#e8da68", "#7d6f00"),
    ("#e6d7c8", "#cbb093", "#70502f"),
)
"""For each source rank in turn: the fill of every other run, that of the runs between, and lines."""
GREY, DARK = "#eeeeee", "#555555"
STYLE = (
    "text{font-family:Helvetica,Arial,'DejaVu Sans',sans-serif;font-size:12px;fill:#222}"
    ".t{font-size:20px;font-weight:bold}.b{font-weight:bold}.c{font-size:10px;text-anchor:middle}"
    ".l{font-size:10px}.m{text-anchor:middle}"
)


def text_width(text: str, size: int) -> float:
    """Return the estimated width of a text in pixels."""
    return len(text) * size * CHARACTER


class Drawing:
    """SVG elements above one another. ``y`` is the lowest edge of what was drawn."""

    def __init__(self) -> None:
        self.root = Xml.Element("svg", xmlns="http://www.w3.org/2000/svg", role="img")
        self.y = float(MARGIN)
        self._add("style").text = STYLE
        self._background = self._add("rect", fill="#ffffff", width=WIDTH)

    def _add(self, tag: str, title: str = "", **attributes: Any) -> Xml.Element:
        written = {name.replace("_", "-"): _number(value) for name, value in attributes.items() if value != ""}
        element = Xml.SubElement(self.root, tag, written)
        if title:
            Xml.SubElement(element, "title").text = title
        return element

    def text(self, x: float, y: float, text: str, style: str = "") -> None:
        """Write a text whose baseline is at ``y``."""
        self._add("text", x=x, y=y, **{"class": style}).text = text
        self.y = max(self.y, y + 4)

    def rect(self, x: float, y: float, width: float, height: float, title: str = "", **style: Any) -> None:
        """Draw a rectangle."""
        self._add("rect", title, x=x, y=y, width=width, height=height, **style)
        self.y = max(self.y, y + height)

    def path(self, points: str, **style: Any) -> None:
        """Draw a line, in SVG's notation."""
        self._add("path", d=points, **style)

    def heading(self, text: str, style: str = "b") -> None:
        """Write a line of text below everything."""
        for line in textwrap.wrap(text, int((WIDTH - 2 * MARGIN) / (TEXT * CHARACTER))):
            self.text(MARGIN, self.y + LINE, line, style)

    def finish(self) -> str:
        """Return the document, as high as what was drawn."""
        height = _number(self.y + MARGIN)
        self._background.set("height", height)
        self.root.set("viewBox", f"0 0 {WIDTH} {height}")
        self.root.set("width", str(WIDTH))
        self.root.set("height", height)
        Xml.indent(self.root, space="")
        return Xml.tostring(self.root, encoding="unicode") + "\n"


def _number(value: Any) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, int | float) else str(value)


def draw_plan(report: PlanReport) -> str:
    """Return the picture as an SVG document. Raises :class:`SettingsError` for more than ``MAX_PAIRS`` pairs."""
    if len(report.pairs) > MAX_PAIRS:
        what = f"--svg: {len(report.pairs)} pairs of ranks send to each other."
        raise SettingsError(Reason.INVALID_SETTING, what, f"A picture has at most {MAX_PAIRS}: use fewer ranks.")
    drawing = Drawing()
    _draw_totals(drawing, report)
    _draw_ranks(drawing, report)
    for groups in _alike_groups(report):
        _draw_blocks(drawing, report, groups)
    _draw_legend(drawing, report)
    return drawing.finish()


def rank_label(engine: Engine, index: int) -> str:
    """Return the name of a rank."""
    stage, rank = divmod(index, engine.wanted.tp)
    return f"{engine.name} {f'pp {stage} ' if engine.wanted.pp > 1 else ''}tp {rank}"


def _draw_totals(drawing: Drawing, report: PlanReport) -> None:
    sizes = [
        f"{engine.name} TP {engine.wanted.tp}" + (f" PP {engine.wanted.pp}" if engine.wanted.pp > 1 else "")
        for engine in (report.prefill, report.decode)
    ]
    drawing.text(MARGIN, MARGIN + TITLE, f"The KV cache of {report.tokens:,} tokens, from {' to '.join(sizes)}", "t")
    drawing.y += 4
    beside = report.per_layer_descriptors
    layouts = per_layer_layouts(report)
    per_layer = "" if beside is None else f" In per-layer layouts ({layouts}): {_count(beside, 'descriptor')}."
    drawing.heading(
        f"{_count(report.descriptors, 'descriptor')} (contiguous copies) move {format_bytes(report.bytes)}, "
        f"{report.bytes_per_token:,.0f} bytes per token.{per_layer}"
    )
    if report.link and report.seconds is not None:
        seconds = report.per_layer_seconds
        slower = "" if seconds is None else f"; per layer {format_seconds(seconds)}"
        at = f"{report.link.bandwidth / 1e9:g} GB/s and {report.link.seconds_per_descriptor * 1e6:g} us per descriptor"
        drawing.heading(f"Predicted at {at}: {format_seconds(report.seconds)}{slower}.", "")
    for replicas in filter(lambda each: each.is_replicated, report.replicas):
        drawing.heading(f"Replicas: {replicas}.", "")
    failed = f"NOT proved: {_count(len(report.failures), 'failure')}."
    drawing.heading("" if report.verified else failed, "b")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


# The ranks and the arrows between them.


@dataclass(frozen=True)
class RankBox:
    """The lines of a rank's box; beside some of them a strip of all heads, of which (range, colour) are held."""

    title: str
    lines: tuple[tuple[str, tuple[tuple[HeadRange, str], ...], int], ...]

    @property
    def height(self) -> int:
        """The height in pixels."""
        return (1 + len(self.lines)) * LINE + 10


def _draw_ranks(drawing: Drawing, report: PlanReport) -> None:
    sending = {pair.pair.assignment.source_index for pair in report.pairs}
    source_boxes = [
        _rank_box(
            rank_label(report.prefill, index) + (" sends nothing of this request" if index not in sending else ""),
            shard,
            _own_colour(index),
        )
        for index, shard in enumerate(report.sources)
    ]
    destination_boxes = [
        _rank_box(rank_label(report.decode, index), shard, _received_colours(report, index))
        for index, shard in enumerate(report.destinations)
    ]
    heights = [sum(box.height + 10 for box in boxes) for boxes in (source_boxes, destination_boxes)]
    top, height = drawing.y + 18, max(*heights, PILL_SPACING * len(report.pairs))
    sources = _draw_boxes(drawing, source_boxes, MARGIN, top + (height - heights[0]) / 2)
    right = WIDTH - MARGIN - BOX_WIDTH
    destinations = _draw_boxes(drawing, destination_boxes, right, top + (height - heights[1]) / 2)
    _draw_arrows(drawing, report, (sources, destinations), top, height)
    drawing.y = max(drawing.y, top + height)


Colours = Callable[[str, str], list[tuple[HeadRange, str]]]
"""By group and component: stretches of heads and their colours."""


def _own_colour(index: int) -> Colours:
    return lambda _group, _component: [(HeadRange(0, 1 << 30), _colour(index)[1])]


def _received_colours(report: PlanReport, rank: int) -> Colours:
    """Return a function that colours heads as the source rank from which they come; one below the other for stages."""

    def find(group: str, component: str) -> list[tuple[HeadRange, str]]:
        return [
            (head, _colour(pair.pair.assignment.source_index)[1])
            for pair in report.pairs
            if pair.decode_rank == rank and group in pair.pair.groups
            for head in pair.pair.groups[group].heads.get(component, ())
        ]

    return find


def _colour(source_index: int) -> tuple[str, str, str]:
    return COLOURS[source_index % len(COLOURS)]


def _rank_box(title: str, shard: Shard, colours: Colours) -> RankBox:
    alike: dict[tuple[int, CacheKind, str], list[CacheGroup]] = {}
    for group in shard.groups:
        held = str([(each.name, each.heads) for each in group.components])
        alike.setdefault((len(group.layers), group.kind, held), []).append(group)
    lines: list[tuple[str, tuple[tuple[HeadRange, str], ...], int]] = []
    for groups in alike.values():
        layers = sorted({layer for group in groups for layer in group.layers}, key=layer_of)
        names, numbers = name_groups(group.name for group in groups), spans(layers)
        named = f" ({numbers})" if len(numbers) < 16 else ""
        lines.append((_fit(f"{names}: {_count(len(layers), 'layer')}{named}", BOX_WIDTH - 20), (), 0))
        components = [each for each in groups[0].components if not each.is_padding]
        channels = [each for each in components if each.name.startswith("conv.")]
        for component in components:
            if component not in channels:
                strip = [
                    (part, colour)
                    for head, colour in colours(groups[0].name, component.name)
                    for part in common([head], component.heads)
                ]
                lines.append((_held_heads(component), tuple(strip), component.total_heads))
        if channels:
            ranges = ", ".join(f"{each.name.removeprefix('conv.')} {_range(each.heads[0])}" for each in channels)
            lines.append((_fit(f"  conv {ranges}", BOX_WIDTH - 20), (), 0))
    return RankBox(title, tuple(lines))


def _fit(text: str, width: float) -> str:
    """Return a text, cut where it is wider than ``width`` pixels."""
    most = int(width / (TEXT * CHARACTER))
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _held_heads(component: Component) -> str:
    if component.name == "latent":
        return "  the whole latent"
    named = f"{'state' if component.name == 'ssm' else 'KV'} head{'' if component.num_heads == 1 else 's'}"
    return f"  {named} {' '.join(map(_range, component.heads))} of {component.total_heads}"


def _range(head: HeadRange) -> str:
    return str(head.start) if len(head) == 1 else f"{head.start}-{head.end - 1}"


def _draw_boxes(drawing: Drawing, boxes: Sequence[RankBox], x: float, y: float) -> list[tuple[float, float]]:
    """Draw boxes below one another and return the top and the height of each."""
    places: list[tuple[float, float]] = []
    for box in boxes:
        drawing.rect(x, y, BOX_WIDTH, box.height, rx=5, fill="#fafafa", stroke=DARK)
        drawing.text(x + 10, y + LINE, box.title, "b")
        for number, (line, strip, total) in enumerate(box.lines, 2):
            drawing.text(x + 10, y + LINE * number, line.strip(), "")
            if strip:
                _draw_strip(drawing, x + BOX_WIDTH - STRIP_WIDTH - 10, y + LINE * number - 10, strip, total)
        places.append((y, box.height))
        y += box.height + 10
    return places


def _draw_strip(drawing: Drawing, x: float, y: float, strip: Sequence[tuple[HeadRange, str]], total: int) -> None:
    each = STRIP_WIDTH / total
    drawing.rect(x, y, STRIP_WIDTH, 11, fill=GREY)
    for head, members in groupby(sorted(strip, key=lambda held: held[0].start), key=lambda held: held[0]):
        colours = [colour for _, colour in members]
        for number, colour in enumerate(colours):
            high = 11 / len(colours)
            drawing.rect(x + head.start * each, y + number * high, len(head) * each, high, fill=colour)
    for index in range(total if total <= 16 else 0):
        drawing.rect(x + index * each, y, each, 11, fill="none", stroke="#ffffff")


def _draw_arrows(
    drawing: Drawing,
    report: PlanReport,
    places: tuple[list[tuple[float, float]], list[tuple[float, float]]],
    top: float,
    height: float,
) -> None:
    """Draw an arrow for each pair of ranks through a label of its own."""
    ends = [(pair.pair.assignment.source_index, pair.decode_rank) for pair in report.pairs]
    order = sorted(range(len(ends)), key=lambda at: (sum(places[side][ends[at][side]][0] for side in (0, 1)), ends[at]))
    spacing = height / max(1, len(order))
    ports = [_ports([ends[at][side] for at in order], places[side]) for side in (0, 1)]
    for number, at in enumerate(order):
        pair, (source, destination) = report.pairs[at], ends[at]
        y = top + (number + 0.5) * spacing
        label = f"{format_bytes(pair.summary.bytes)}, {_count(pair.summary.descriptors, 'descriptor')}"
        half = text_width(label, TEXT) / 2 + 8
        first, last = MARGIN + BOX_WIDTH, WIDTH - MARGIN - BOX_WIDTH
        middle = (first + last) / 2
        fill, _, line = _colour(source)
        for start, end in (
            ((first, ports[0][number]), (middle - half, y)),
            ((middle + half, y), (last - 7, ports[1][number])),
        ):
            bend = (start[0] + end[0]) / 2
            curve = f"M{_at(*start)} C{_at(bend, start[1])} {_at(bend, end[1])} {_at(*end)}"
            drawing.path(curve, fill="none", stroke=line, stroke_width=1.5)
        head = ports[1][number]
        drawing.path(f"M{_at(last, head)} L{_at(last - 8, head - 4)} L{_at(last - 8, head + 4)} Z", fill=line)
        exact = (
            f"{rank_label(report.prefill, source)} to {rank_label(report.decode, destination)}: "
            f"{pair.summary.bytes} bytes in {pair.summary.descriptors} descriptors"
        )
        box = (middle - half, y - PILL_HEIGHT / 2, 2 * half, PILL_HEIGHT)
        drawing.rect(*box, title=exact, rx=10, fill=fill, stroke=line)
        drawing.text(middle, y + 4, label, "m")


def _ports(ranks: Sequence[int], places: Sequence[tuple[float, float]]) -> list[float]:
    """Return where each arrow touches its rank's box: the arrows of one box are spread over its height."""
    seen: dict[int, int] = {}
    found = []
    for rank in ranks:
        y, height = places[rank]
        number = seen[rank] = seen.get(rank, 0) + 1
        found.append(y + height * number / (ranks.count(rank) + 1))
    return found


def _at(x: float, y: float) -> str:
    return f"{_number(x)} {_number(y)}"


# One block of each group.


def _alike_groups(report: PlanReport) -> list[list[LayerGroup]]:
    """Return the groups; those whose blocks look the same stand together."""
    alike: dict[Any, list[LayerGroup]] = {}
    for group in report.prefill.groups:
        held = tuple(
            len(found.layers) if (found := shard.group(group.name)) else 0
            for shard in (*report.sources, *report.destinations)
        )
        moved = tuple(
            tuple(sorted(pair.pair.groups[group.name].heads.items())) if group.name in pair.pair.groups else ()
            for pair in report.pairs
        )
        alike.setdefault((group.cache, held, moved), []).append(group)
    return list(alike.values())


def _draw_blocks(drawing: Drawing, report: PlanReport, groups: Sequence[LayerGroup]) -> None:
    """Draw one block of the first of these groups, at the first decode rank that has the group and at its sources."""
    name = groups[0].name
    pairs = [pair for pair in report.pairs if name in pair.pair.groups]
    pairs = [pair for pair in pairs if pair.decode_rank == pairs[0].decode_rank]
    drawing.y += 12
    drawing.path(f"M{MARGIN} {_number(drawing.y)} H{WIDTH - MARGIN}", stroke="#cccccc", fill="none")
    drawing.heading(f"{name_groups(group.name for group in groups)}: {_what_moves(report, groups)}")
    layouts = report.prefill.layout, report.decode.layout
    _draw_sides(drawing, report, pairs, [pair.pair for pair in pairs], name, layouts)
    beside = [pair.per_layer for pair in pairs if pair.per_layer]
    if len(beside) < len(pairs):
        return
    if [_runs(plan.groups[name]) for plan in beside] == [_runs(pair.pair.groups[name]) for pair in pairs]:
        drawing.heading(f"In per-layer layouts ({per_layer_layouts(report)}) such a block has as many runs.", "")
        return
    drawing.heading("The same block in per-layer layouts, where each layer's memory is apart:")
    _draw_sides(drawing, report, pairs, beside, name, (layouts[0].per_layer, layouts[1].per_layer))


def _what_moves(report: PlanReport, groups: Sequence[LayerGroup]) -> str:
    group, request = groups[0], next(each for each in report.requests if each.group == groups[0].name)
    each = " each" if len(groups) > 1 else ""
    layers = f"{_count(len(group.layers), 'layer')}{each}"
    if group.kind is CacheKind.STATE:
        return f"{layers}; one block, which holds the last state"
    sizes = [report.prefill.block_size, report.decode.block_size]
    tokens = (
        f"{sizes[0]} tokens"
        if sizes[0] == sizes[1]
        else f"{sizes[0]} tokens at the source, of {sizes[1]} at the destination"
    )
    window = f", of a window of {group.cache.window}" if group.cache.window else ""
    moved = f"tokens {request.first_token:,} to {request.last_token:,} move{window}"
    return f"{layers}; {moved}; one block of {tokens}"


def _runs(plan: GroupPlan) -> int:
    return sum(len(template.runs) for template in plan.templates(plan.first_phases()[0]))


def _draw_sides(
    drawing: Drawing,
    report: PlanReport,
    pairs: Sequence[PairReport],
    plans: Sequence[PairPlan],
    name: str,
    layouts: tuple[NamedLayout, NamedLayout],
) -> None:
    """Draw the block at each source rank on the left, at the destination rank on the right."""
    moves = [Move.of(pair.pair.assignment.source_index, plan, name) for pair, plan in zip(pairs, plans, strict=True)]
    top = drawing.y + 10
    drawn = range(len(moves)) if len(moves) <= MAX_DRAWN_SOURCES else [*range(MAX_DRAWN_SOURCES - 1), len(moves) - 1]
    y = top
    for number, following in zip(drawn, [*drawn[1:], len(moves)], strict=True):
        move, plan = moves[number], plans[number]
        label = f"{rank_label(report.prefill, move.source_index)} (source, {layouts[0]}): {move.describe()}"
        y = _draw_bar(drawing, (MARGIN, y), label, Bar.of(plan.source, name, [move], SOURCE))
        if following > number + 1:
            y += LINE
            drawing.text(MARGIN, y, f"… and {_count(following - number - 1, 'more source rank')}", "")
            y += 8
    rank = rank_label(report.decode, pairs[0].decode_rank)
    label = f"{rank} (destination, {layouts[1]}): from {_count(len(moves), 'source rank')}"
    right = WIDTH - MARGIN - COLUMN_WIDTH
    _draw_bar(drawing, (right, top), label, Bar.of(plans[0].destination, name, moves, DESTINATION))


SOURCE, DESTINATION = 0, 1


@dataclass(frozen=True, eq=False)
class Move:
    """The runs of one pair of blocks from one source rank: rows of source address, destination address and length."""

    source_index: int
    layers: frozenset[str]
    heads: Mapping[str, Sequence[HeadRange]]
    slots: tuple[tuple[HeadRange, ...], tuple[HeadRange, ...]]
    """The token slots of the block that move, at the source and at the destination."""
    runs: Offsets

    @classmethod
    def of(cls, source_index: int, plan: PairPlan, name: str) -> "Move":
        """Return the runs of the first whole blocks of a group."""
        group = plan.groups[name]
        phase = group.first_phases()[0]
        slots = [
            tuple(HeadRange(run[side], run[side] + run.num_tokens) for run in phase) for side in (SOURCE, DESTINATION)
        ]
        runs = np.concatenate([template.runs for template in group.templates(phase)])
        layers = group.source_group.layers & group.destination_group.layers
        return cls(source_index, layers, group.heads, (slots[0], slots[1]), runs)

    def describe(self) -> str:
        """Return the number and the bytes of the runs."""
        lengths = set(self.runs[:, 2].tolist())
        total = format_bytes(int(self.runs[:, 2].sum()))
        sizes = f"of {format_bytes(lengths.pop())}" if len(lengths) == 1 else f"of {total} together"
        return f"{_count(len(self.runs), 'run')} {sizes}"

    def run_of(self, addresses: Integers, side: int) -> Integers:
        """Return which run holds each address; -1 where none does."""
        order = np.argsort(self.runs[:, side])
        starts, lengths = self.runs[order, side], self.runs[order, 2]
        position = np.maximum(np.searchsorted(starts, addresses, side="right") - 1, 0)
        inside = (addresses >= starts[position]) & (addresses < starts[position] + lengths[position])
        return np.where(inside, order[position], -1)


CellArrays = tuple[Integers, Integers, Integers, Integers, Integers]
"""The fields of :class:`Cells`."""


@dataclass(frozen=True, eq=False)
class Cells:
    """All cells of a block, in the order of memory, as arrays of equal length.

    ``indices`` and ``sizes``, of shape (number of axes, number of cells), count the layers, heads, tokens and channels
    that were not joined into one cell; layers are counted by source rank. ``parts`` are component, layer, first head,
    heads, first token, tokens.
    """

    address: Integers
    end: Integers
    indices: Integers
    sizes: Integers
    parts: Integers

    @classmethod
    def of(cls, shard: Shard, group: CacheGroup, moves: Sequence[Move], side: int) -> "Cells":
        """Return the cells of block 0 of a group. No cell has both heads or tokens that move and others."""
        found = [
            _cells(shard, number, component, heads, slots, moves, side)
            for number, component in enumerate(group.components)
            for heads in _cut(component.heads, [move.heads.get(component.name, ()) for move in moves])
            for slots in _cut([HeadRange(0, group.block_size)], [move.slots[side] for move in moves])
        ]
        joined = [np.concatenate(arrays, axis=-1) for arrays in zip(*found, strict=True)]
        order = np.argsort(joined[0], kind="stable")
        return cls(*(array[..., order] for array in joined))


def _cut(held: Sequence[HeadRange], moved: Sequence[Sequence[HeadRange]]) -> list[HeadRange]:
    """Return what is held, cut where what moves begins or ends."""
    return [piece for piece in cut_heads([held, *moved]) if not without([piece], held)]


def _cells(
    shard: Shard,
    number: int,
    component: Component,
    heads: HeadRange,
    slots: HeadRange,
    moves: Sequence[Move],
    side: int,
) -> CellArrays:
    """Return the arrays of :class:`Cells` for a stretch of heads and tokens of one component.

    Axes join into one cell as long as their strides equal what was joined so far and the cell is within one run; layers
    never join.
    """
    for most in (3, 2, 1, 0):
        address, end, indices, sizes, parts = _joined_cells(shard, number, component, heads, slots, most)
        if all((move.run_of(address, side) == move.run_of(end - 1, side)).all() for move in moves):
            break
    senders = [tuple(layer in move.layers for move in moves) for layer in component.layers]
    first = np.array([senders.index(sender) for sender in senders])
    held = np.array([senders.count(sender) for sender in senders])
    layer = indices[0]
    counted = np.concatenate([[layer - first[layer]], indices[1:]])
    return address, end, counted, np.concatenate([[held[layer]], sizes[1:]]), parts


def _joined_cells(
    shard: Shard, number: int, component: Component, heads: HeadRange, slots: HeadRange, most: int
) -> CellArrays:
    """Return cells of which at most ``most`` axes were joined, innermost first."""
    first = 0
    for held in component.heads:
        if held.start <= heads.start < held.end:
            break
        first += len(held)
    base = shard.regions[component.region].base_address
    base += (first + heads.start - held.start) * component.head_stride + slots.start * component.token_stride
    axes = [
        (1, len(heads), component.head_stride),
        (2, len(slots), component.token_stride),
        (3, component.num_channels, component.channel_stride),
    ]
    extent, counts = component.itemsize, [len(component.layers), 1, 1, 1]
    for position, (axis, count, stride) in enumerate(sorted(axes, key=lambda each: each[2])):
        if max(counts[1:]) == 1 and (count == 1 or (stride == extent and position < most)):
            extent *= count
        else:
            counts[axis] = count
    indices = np.indices(counts, dtype=np.int64).reshape(4, -1)
    offsets = np.array(component.layer_offsets, dtype=np.int64)
    address = base + offsets[indices[0]]
    for axis, _, stride in axes:
        address += indices[axis] * stride
    apart = [counts[axis] == count for axis, count, _ in axes]
    parts = np.array(
        [
            np.full(len(address), number),
            indices[0],
            heads.start + indices[1],
            np.full(len(address), 1 if apart[0] else len(heads)),
            slots.start + indices[2],
            np.full(len(address), 1 if apart[1] else len(slots)),
        ]
    )
    sizes = np.repeat(np.array(counts)[:, None], len(address), axis=1)
    return address, address + extent, indices, sizes, parts


@dataclass(slots=True)
class Item:
    """A cell or an ellipsis of a bar. ``run`` is (move, number of the run); None where nothing moves or runs differ."""

    text: str
    outer: str
    run: tuple[int, int] | None
    is_cell: bool = True
    gap: bool = False
    title: str = ""
    hidden: frozenset[tuple[int, int] | None] = frozenset()
    """The runs of which an ellipsis hides cells."""
    width: float = field(init=False)

    def __post_init__(self) -> None:
        self.width = max(18.0 if self.is_cell else 14.0, text_width(self.text, SMALL) + 4)


@dataclass(frozen=True, eq=False)
class Bar:
    """A block's memory on one rank, folded to the width of a column where that is possible."""

    items: tuple[Item, ...]
    moves: Sequence[Move]

    @classmethod
    def of(cls, shard: Shard, name: str, moves: Sequence[Move], side: int) -> "Bar":
        """Return the block of a group that the shard holds."""
        group = shard.group(name)
        assert group is not None, f"{shard.rank_name} holds no group {name}"
        cells = Cells.of(shard, group, moves, side)
        runs = np.full(len(cells.address), -1)
        for number, move in enumerate(moves):
            found = move.run_of(cells.address, side)
            runs = np.where(found >= 0, found * len(moves) + number, runs)
        limits = [FOLDS[0]] * 4
        while True:
            shown = _shown(cells, limits)
            items = _items(cells, shown, group, runs, len(moves)) if shown.sum() <= COLUMN_WIDTH else []
            shortest = [limit == FOLDS[-1] or size <= FOLDS[-1] for limit, size in _axes(cells, limits)]
            if all(shortest) or (items and sum(item.width + GAP * item.gap for item in items) <= COLUMN_WIDTH):
                return cls(tuple(items or _items(cells, shown, group, runs, len(moves))), moves)
            _, axis = max((min(limit, size), axis) for axis, (limit, size) in enumerate(_axes(cells, limits)))
            limits[axis] = FOLDS[FOLDS.index(limits[axis]) + 1]


def _axes(cells: Cells, limits: Sequence[int]) -> list[tuple[int, int]]:
    """Return the limit and the greatest size of each axis."""
    return list(zip(limits, cells.sizes.max(axis=1).tolist(), strict=True))


def _shown(cells: Cells, limits: Sequence[int]) -> Flags:
    """Return which cells are shown: of each axis the first ones and the last."""
    most = np.array(limits)[:, None]
    shown: Flags = ((cells.indices < most - 1) | (cells.indices == cells.sizes - 1)).all(axis=0)
    return shown


def _items(cells: Cells, shown: Flags, group: CacheGroup, runs: Integers, num_moves: int) -> list[Item]:
    """Return the cells that are shown, and an ellipsis wherever others lie between."""
    positions = np.flatnonzero(shown).tolist()
    labels = [_labels(cells, position, group) for position in positions]
    outer, inner = _nesting(labels)

    def key(run: int) -> tuple[int, int] | None:
        return None if run < 0 else (run % num_moves, run // num_moves)

    def gap(position: int) -> bool:
        return position > 0 and bool(cells.address[position] != cells.end[position - 1])

    items: list[Item] = []
    for number, position in enumerate(positions):
        before = positions[number - 1] if number else -1
        if position > before + 1:
            hidden = frozenset(map(key, np.unique(runs[before + 1 : position]).tolist()))
            more = hidden - {key(int(runs[before])), key(int(runs[position])), None}
            same = outer[number - 1] if outer[number - 1] == outer[number] else ""
            text = f"… {_count(len(more), 'run')} …" if more else "…"
            run = next(iter(hidden)) if len(hidden) == 1 else None
            title = _count(position - before - 1, "more cell")
            ellipsis = Item(text, same, run, is_cell=False, gap=gap(before + 1), title=title, hidden=hidden)
            items.append(ellipsis)
        items.append(Item(inner[number], outer[number], key(int(runs[position])), gap=gap(position)))
    return items


def _labels(cells: Cells, position: int, group: CacheGroup) -> tuple[str, str, str]:
    """Return the layer of a cell, and its part of the layer in words and in short."""
    number, layer_index, head, num_heads, token, num_tokens = cells.parts[:, position].tolist()
    component = group.components[number]
    layer = f"L{layer_of(component.layers[layer_index])}"
    heads = _range(HeadRange(head, head + num_heads))
    if component.name.startswith("conv."):
        tap = f"{component.name.removeprefix('conv.')}{int(cells.indices[3, position])}"
        return layer, tap, tap
    if component.is_padding or component.name == "latent":
        words, short = component.name, ""
    elif component.name == "ssm":
        words = short = f"S{heads}"
    else:
        words, short = f"head{'' if num_heads == 1 else 's'} {heads}", f"H{heads}"
    if num_tokens < group.block_size:
        tokens = f"T{_range(HeadRange(token, token + num_tokens))}"
        words, short = f"{words}, {tokens}", f"{short} {tokens}".strip()
    return layer, words, short or ("pad" if component.is_padding else "")


def _nesting(labels: Sequence[tuple[str, str, str]]) -> tuple[list[str], list[str]]:
    """Return for each cell a label above and a label inside: above stands what changes less often."""
    layers, words, short = (list(each) for each in zip(*labels, strict=True))
    if len(set(words)) == 1:
        return [""] * len(labels), [
            f"{layer} {part}".strip() if len(set(layers)) < 2 else layer
            for layer, part in zip(layers, short, strict=True)
        ]
    changes = [sum(one != other for one, other in pairwise(each)) for each in (layers, words)]
    return (words, layers) if changes[1] < changes[0] else (layers, short)


def _draw_bar(drawing: Drawing, place: tuple[float, float], label: str, bar: Bar) -> float:
    """Draw a bar below a label, in several rows where it is too wide, and return the lowest y."""
    x, y = place
    drawing.text(x, y + LINE, label, "")
    y += LINE + 4
    _widen(bar.items)
    rows = list(_rows(bar.items))
    for number, row in enumerate(rows):
        neighbours = (
            rows[number - 1][-1][0] if number else None,
            rows[number + 1][0][0] if number + 1 < len(rows) else None,
        )
        if any(item.outer for item, _ in row):
            y += 12
            _draw_outer(drawing, x, y, row)
        _draw_row(drawing, x, y, row, bar.moves, neighbours)
        y += CELL_HEIGHT + 16
    return y


def _widen(items: Sequence[Item]) -> None:
    """Widen the first cell under each label above, until the label fits."""
    for outer, members in groupby(items, key=lambda item: item.outer):
        under = list(members)
        width = sum(item.width + GAP * item.gap for item in under[1:]) + under[0].width
        under[0].width += max(0.0, text_width(outer, SMALL) + 4 - width) if outer else 0.0


def _rows(items: Sequence[Item]) -> Iterator[list[tuple[Item, float]]]:
    """Yield rows of items with the x of each."""
    row: list[tuple[Item, float]] = []
    x = 0.0
    for item in items:
        x += GAP * (item.gap and bool(row))
        if row and x + item.width > COLUMN_WIDTH:
            yield row
            row, x = [], 0.0
        row.append((item, x))
        x += item.width
    yield row


def _draw_outer(drawing: Drawing, x: float, y: float, row: Sequence[tuple[Item, float]]) -> None:
    for outer, members in groupby(row, key=lambda placed: placed[0].outer):
        if outer:
            under = list(members)
            first, last = under[0][1], under[-1][1] + under[-1][0].width
            drawing.path(f"M{_at(x + first + 1, y - 1)} H{_number(x + last - 1)}", stroke="#999999", fill="none")
            drawing.text(x + first + 1, y - 3, outer, "l")


def _draw_row(
    drawing: Drawing,
    x: float,
    y: float,
    row: Sequence[tuple[Item, float]],
    moves: Sequence[Move],
    neighbours: tuple[Item | None, Item | None],
) -> None:
    """Draw the cells of one row, then a frame around each run, which is open where the run goes on in another row."""
    y += 2
    for item, left in row:
        fill = "none" if not item.is_cell else GREY
        if item.run:
            fill = _colour(moves[item.run[0]].source_index)[item.run[1] % 2]
        edge = {} if fill == "none" else {"stroke": "#ffffff"}
        drawing.rect(x + left, y, item.width, CELL_HEIGHT, title=item.title, fill=fill, **edge)
        if item.text:
            drawing.text(x + left + item.width / 2, y + 16, item.text, "c")
    beside = [neighbours[0], *(item for item, _ in row), neighbours[1]]
    for run, members in groupby(enumerate(row, 1), key=lambda placed: placed[1][0].run):
        if run is None:
            continue
        inside = list(members)
        (first, (_, left)), (last, (item, end)) = inside[0], inside[-1]
        left, right = x + left, x + end + item.width
        goes_on = [
            neighbour is not None and (neighbour.run == run or run in neighbour.hidden)
            for neighbour in (beside[first - 1], beside[last + 1])
        ]
        stroke = _colour(moves[run[0]].source_index)[2]
        bottom = _number(y + CELL_HEIGHT)
        if not any(goes_on):
            drawing.rect(left, y, right - left, CELL_HEIGHT, fill="none", stroke=stroke, stroke_width=2)
        else:
            sides = [
                f"M{_at(edge, y)} V{bottom}" for edge, open_ in ((left, goes_on[0]), (right, goes_on[1])) if not open_
            ]
            lines = [f"M{_at(left, each)} H{_number(right)}" for each in (y, y + CELL_HEIGHT)]
            drawing.path(" ".join(lines + sides), fill="none", stroke=stroke, stroke_width=2)
        size = format_bytes(int(moves[run[0]].runs[run[1], 2]))
        if text_width(size, SMALL) <= right - left:
            drawing.text((left + right) / 2, y + CELL_HEIGHT + 11, size, "c")


def _draw_legend(drawing: Drawing, report: PlanReport) -> None:
    drawing.y += 12
    drawing.path(f"M{MARGIN} {_number(drawing.y)} H{WIDTH - MARGIN}", stroke="#cccccc", fill="none")
    y = drawing.y + 14
    x = float(MARGIN)
    samples = (
        ("#cfe3f7", "#1f5fa8", "a frame: one run, which moves as one descriptor of each block"),
        (GREY, "", "does not move here"),
    )
    for fill, stroke, meaning in samples:
        drawing.rect(x, y, 26, 14, fill=fill, stroke=stroke, stroke_width=2 if stroke else "")
        drawing.text(x + 32, y + 11, meaning, "")
        x += 48 + text_width(meaning, TEXT)
    sides = {
        index: rank_label(report.prefill, index)
        for index in sorted({p.pair.assignment.source_index for p in report.pairs})
    }
    for index, name in list(sides.items())[: len(COLOURS)]:
        if x + 48 + text_width(name, TEXT) > WIDTH - MARGIN:
            x, y = float(MARGIN), y + 20
        drawing.rect(x, y, 26, 14, fill=_colour(index)[1])
        drawing.text(x + 32, y + 11, f"from {name}", "")
        x += 54 + text_width(f"from {name}", TEXT)
    kinds = {group.kind for group in report.prefill.groups}
    words = ["L: layer", "H: KV head", "T: token of the block"]
    if CacheKind.STATE in kinds:
        words += ["x0, B0: a segment of the convolution, tap 0", "S: heads of the recurrent state"]
    drawing.heading(
        f"Cells stand in the order of memory, not to scale; between cells that do not touch lies other memory. "
        f"{'; '.join(words)}. Tints of a colour alternate from run to run.",
        "",
    )
