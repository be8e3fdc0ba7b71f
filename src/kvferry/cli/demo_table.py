"""The demo's report as people read it."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvferry.cli.demo_report import DemoReport, RequestLine
from kvferry.units import format_bytes, format_rate

COLUMNS = ("tokens", "received", "computed", "bytes", "descriptors", "per layer", "wait ms", "GB/s", "by", "identical")

VERBS = {"pull": "moved", "push": "pushed"}


def print_report(report: DemoReport, console: Console) -> None:
    """Print a line per request, the totals beside a per-layer layout's, and what is wrong, if anything."""
    table = Table(
        title=f"KV cache {VERBS[report.mode]} from prefill (TP {report.shape.prefill_tp}) to decode (TP "
        f"{report.shape.decode_tp}), "
        f"layout {report.layout}, blocks of {report.shape.block_size} tokens",
        show_footer=True,
    )
    for column, footer in zip(COLUMNS, _totals(report), strict=True):
        table.add_column(column, footer, justify="right")
    for line in report.lines:
        table.add_row(*_cells(line, report))
    console.print(table)
    console.print(
        f"{report.total('descriptors')} descriptors; a per-layer layout would have needed "
        f"{report.per_layer_descriptors}, one for each layer, block and pair of ranks. "
        f"Expected bytes: {report.expected_bytes}, moved: {report.total('bytes')}."
    )
    if report.mode == "push":
        console.print("A push's wait begins when the decode engine has blocks: the prompt is computed meanwhile.")
    console.print(f"Both caches were free {report.seconds_until_free:.2f} s after the last answer.")
    for problem in report.problems:
        console.print(f"[red]problem:[/red] {escape(problem)}")


def _cells(line: RequestLine, report: DemoReport) -> list[str]:
    return [
        str(line.prompt_tokens),
        str(line.received_tokens),
        str(line.computed_tokens),
        format_bytes(line.bytes),
        str(line.descriptors),
        str(report.shape.per_layer_descriptors(line.prompt_tokens)),
        f"{line.wait_seconds * 1e3:.1f}",
        format_rate(line.bytes, line.transfer_seconds).removesuffix(" GB/s"),
        line.transport,
        "yes" if line.identical else "NO",
    ]


def _totals(report: DemoReport) -> list[str]:
    return [
        str(report.total("prompt_tokens")),
        str(report.received.received),
        str(report.received.computed),
        format_bytes(report.total("bytes")),
        str(report.total("descriptors")),
        str(report.per_layer_descriptors),
        "",
        format_rate(report.total("bytes"), report.total("transfer_seconds")).removesuffix(" GB/s"),
        "",
        f"{report.total('identical')} of {len(report.lines)}",
    ]
