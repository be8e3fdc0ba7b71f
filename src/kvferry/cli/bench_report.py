"""What ``kvferry bench`` found: a row for each connector, prompt length and number of requests at once."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kvferry.errors import Reason, SettingsError, install_command

KVFERRY = "kvferry"
PLOTS = (".svg", ".png")


@dataclass(frozen=True, slots=True)
class Request:
    """One request: seconds of the prefill engine's answer, and of the decode engine's first token, from its sending.

    ``token_seconds`` is the mean time between the tokens that follow.
    """

    prefill_seconds: float
    first_token_seconds: float
    token_seconds: float


@dataclass(frozen=True, slots=True)
class Moved:
    """What a decode engine's own metrics count between two moments. ``wait_seconds`` is kvferry's alone.

    ``computed_tokens`` are those of prompts that the engine computed itself.
    """

    loads: float = 0.0
    num_bytes: float = 0.0
    descriptors: float = 0.0
    transfer_seconds: float = 0.0
    wait_seconds: float = 0.0
    computed_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Turn:
    """Requests of one connector that were sent at once, and the seconds until the last was answered.

    ``differing`` answers have other tokens than those of one engine that computed the prompt.
    """

    requests: tuple[Request, ...]
    seconds: float
    moved: Moved
    differing: int = 0


@dataclass(frozen=True, slots=True)
class Cell:
    """A prompt length, and how many requests are sent at once."""

    tokens: int
    at_once: int


@dataclass(frozen=True, slots=True)
class Row:
    """The medians of a connector's turns in one cell, or why there are none."""

    connector: str
    cell: Cell
    turns: int = 0
    first_token_ms: float | None = None
    """From the decode request to its first token."""
    whole_ms: float | None = None
    """From the prefill request to the first token of the decode engine."""
    slowest_ms: float | None = None
    """The slowest request's time from the prefill request to that token."""
    token_ms: float | None = None
    requests_per_second: float | None = None
    wait_ms: float | None = None
    transfer_ms: float | None = None
    descriptors: float | None = None
    gb_per_second: float | None = None
    computed_tokens: float = 0.0
    """Of a request's prompt, by the decode engine."""
    answers: int = 0
    differing: int = 0
    """Of the answers, those with other tokens than those of one engine that computed the prompt."""
    problem: str = ""

    @classmethod
    def of(cls, connector: str, cell: Cell, turns: Sequence[Turn]) -> "Row":
        """Return the row of these turns, of which there is one at least."""
        requests = [request for turn in turns for request in turn.requests]
        moved = [turn.moved for turn in turns]
        row = cls(
            connector,
            cell,
            len(turns),
            first_token_ms=1e3 * median(each.first_token_seconds for each in requests),
            whole_ms=1e3 * median(each.prefill_seconds + each.first_token_seconds for each in requests),
            slowest_ms=1e3 * max(each.prefill_seconds + each.first_token_seconds for each in requests),
            token_ms=1e3 * median(each.token_seconds for each in requests),
            requests_per_second=median(len(turn.requests) / turn.seconds for turn in turns),
            computed_tokens=median(each.computed_tokens for each in moved) / cell.at_once,
            answers=len(requests),
            differing=sum(turn.differing for turn in turns),
        )
        if not all(each.loads for each in moved):
            return row
        waits = [each.wait_seconds / each.loads for each in moved]
        return replace(
            row,
            wait_ms=1e3 * median(waits) if any(waits) else None,
            transfer_ms=1e3 * median(each.transfer_seconds / each.loads for each in moved),
            descriptors=median(each.descriptors / each.loads for each in moved),
            gb_per_second=median(each.num_bytes / max(each.transfer_seconds, 1e-9) for each in moved) / 1e9,
        )


@dataclass(frozen=True, slots=True)
class BenchReport:
    """All rows, what was compared, and on what. ``own`` is kvferry's connector."""

    rows: tuple[Row, ...]
    conditions: Mapping[str, Any]
    own: str = KVFERRY

    def ratio(self, row: Row) -> float | None:
        """Return kvferry's time to the first token divided by this row's, in the same cell; None for no time."""
        own = next((each for each in self.rows if each.connector == self.own and each.cell == row.cell), None)
        if own is None or row.connector == self.own or not (own.whole_ms and row.whole_ms):
            return None
        return own.whole_ms / row.whole_ms

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        rows = [{**asdict(row.cell), **asdict(row), "kvferry_ratio": self.ratio(row)} for row in self.rows]
        for row in rows:
            del row["cell"]
        return {"conditions": dict(self.conditions), "rows": rows}

    def print(self, console: Console) -> None:
        """Print the table, and below it what its columns mean and what could not be measured."""
        table = Table(
            title=", ".join(f"{name} {value}" for name, value in self.conditions.items()),
            box=box.SIMPLE,
            pad_edge=False,
        )
        for name in ("tokens", "at once", "connector", "TTFT ms", "decode ms", "worst ms", "ITL ms", "req/s"):
            table.add_column(name, justify="left" if name == "connector" else "right", no_wrap=name == "connector")
        for name in ("wait ms", "move ms", "GB/s", "descriptors", "ratio"):
            table.add_column(name, justify="right", no_wrap=True)
        measured = [row for row in self.rows if not row.problem]
        for row in measured:
            table.add_row(
                str(row.cell.tokens),
                str(row.cell.at_once),
                row.connector,
                *(_number(each) for each in (row.whole_ms, row.first_token_ms, row.slowest_ms, row.token_ms)),
                _number(row.requests_per_second, 2),
                *(_number(each) for each in (row.wait_ms, row.transfer_ms, row.gb_per_second)),
                _number(row.descriptors, 0),
                _number(self.ratio(row), 2),
            )
        console.print(table)
        for row in measured:
            if row.connector != "none" and row.computed_tokens > 1:
                told = f"{row.connector}, {row.cell.tokens} tokens: the decode engine computed {row.computed_tokens:g}"
                console.print(f"{told} tokens of each prompt, which it did not load.")
        for row in measured:
            if row.differing:
                cell = f"{row.cell.tokens} tokens, {row.cell.at_once} at once"
                told = f"{row.connector}, {cell}: {row.differing} of {row.answers} answers have other tokens than"
                console.print(f"{told} one engine alone gives (wrong bytes, or rounding between two near values).")
        for row in self.rows:
            if row.problem:
                cell = f"{row.cell.tokens} tokens, {row.cell.at_once} at once"
                console.print(f"{row.connector}, {cell}: {row.problem}", markup=False)
        console.print(
            "Medians. TTFT: from the prefill request to the decode engine's first token; decode: from the decode "
            "request; worst: the longest TTFT. ITL: between tokens. wait: from a load's order to its end; move: of its "
            "bytes; both by the connector's metrics, for each rank. ratio: kvferry's TTFT by this one. none: the "
            "decode engine computes the prompt.",
            style="dim",
        )

    def plot(self, path: Path) -> None:
        """Draw the time to the first token by prompt length, a line for each connector, into an SVG or a PNG.

        Raises :class:`SettingsError` as :func:`check_plot`.
        """
        check_plot(path)
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        counts = sorted({row.cell.at_once for row in self.rows})
        figure, axes = pyplot.subplots(1, len(counts), figsize=(5 * len(counts), 4), sharey=True, squeeze=False)
        for axis, at_once in zip(axes[0], counts, strict=True):
            for connector in dict.fromkeys(row.connector for row in self.rows):
                points = [
                    (row.cell.tokens, row.whole_ms)
                    for row in self.rows
                    if (row.connector, row.cell.at_once) == (connector, at_once) and row.whole_ms is not None
                ]
                if points:
                    axis.plot(*zip(*sorted(points), strict=True), marker="o", label=connector)
            axis.set(xscale="log", yscale="log", xlabel="tokens of the prompt", title=f"{at_once} at once")
            axis.grid(visible=True, alpha=0.3)
            if axis.lines:
                axis.legend()
        axes[0][0].set_ylabel("prefill and first token, ms")
        figure.suptitle(", ".join(f"{name} {value}" for name, value in self.conditions.items()), fontsize=9)
        figure.tight_layout()
        figure.savefig(path)
        pyplot.close(figure)


def check_plot(path: Path) -> None:
    """Raise :class:`SettingsError` where no such file can be drawn: another ending, no folder, no matplotlib."""
    if path.suffix not in PLOTS:
        problem = f"--plot {path}: a plot is a file that ends in {' or '.join(PLOTS)}."
        raise SettingsError(
            Reason.INVALID_SETTING, problem, f"Name {path.with_suffix('.svg') if path.name else 'bench.svg'}."
        )
    if path.is_dir():
        raise SettingsError(Reason.INVALID_SETTING, f"--plot {path} is a folder.", "Name a file.")
    if not path.absolute().parent.is_dir():
        problem = f"--plot {path}: there is no folder {path.absolute().parent}."
        raise SettingsError(Reason.INVALID_SETTING, problem, "Make the folder, or name a file in one that exists.")
    try:
        import matplotlib  # noqa: F401 # whether it is there
    except ImportError as error:
        remedy = f"Install it: {install_command('matplotlib')}, or leave out --plot."
        raise SettingsError(Reason.MISSING_DEPENDENCY, "--plot needs matplotlib.", remedy) from error


def _number(value: float | None, digits: int = 1) -> str:
    """Return a number for the table.

    >>> _number(None), _number(12.345), _number(0.5, 2)
    ('-', '12.3', '0.50')
    """
    return "-" if value is None else f"{value:.{digits}f}"
