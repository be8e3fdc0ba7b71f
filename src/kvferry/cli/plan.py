"""``kvferry plan``: what would move between two engines, in how many pieces, checked."""

import json
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.table import Table

from kvferry.cli.console import open_console
from kvferry.cli.plan_drawing import draw_plan
from kvferry.cli.plan_explanation import explain_plan
from kvferry.cli.plan_report import Blocks, PlanReport, make_report, parse_engine
from kvferry.errors import KVFerryError, Reason, SettingsError
from kvferry.models.config import ITEM_SIZES
from kvferry.models.shapes import caches_of
from kvferry.plan.describe import Summary
from kvferry.plan.staging.strategy import TYPICAL_COSTS
from kvferry.units import format_bytes

MAX_TOKENS = 1 << 26
COSTS = [TYPICAL_COSTS[name] for name in ("cma", "nixl")]
"""Of the transports whose choices are shown."""
ENGINE_HELP = "tp=,pp=,layout=,block_size=,layers=20+16 of the {} engine."
MAX_RUN_LENGTHS = 4
"""Run lengths shown of one row of the table; JSON has all."""


def plan(
    layers: Annotated[int | None, typer.Option(help="Layers of the model.", min=1, max=4096)] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads of the model, over all ranks.", min=1)] = None,
    head_size: Annotated[int | None, typer.Option(help="Channels of K, and of V, per head.", min=1)] = None,
    dtype: Annotated[str | None, typer.Option(help=f"One of {', '.join(ITEM_SIZES)}.")] = None,
    block_size: Annotated[int, typer.Option(help="Tokens in a block, unless an engine names its own.", min=1)] = 16,
    tokens: Annotated[int, typer.Option(help="Tokens of the request.", min=1, max=MAX_TOKENS)] = 1024,
    prefill: Annotated[str, typer.Option(help=ENGINE_HELP.format("prefill"))] = "tp=1",
    decode: Annotated[str, typer.Option(help=ENGINE_HELP.format("decode"))] = "tp=1",
    blocks: Annotated[Blocks, typer.Option(help="Order of the block ids.")] = Blocks.SCATTERED,
    model: Annotated[Path | None, typer.Option(help="Hugging Face config.json, or a folder with one.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of scattered ids and of the choice among replicas.", min=0)] = 0,
    explain: Annotated[bool, typer.Option("--explain", help="Say why: sources, runs, strategy, refusals.")] = False,
    draw: Annotated[Path | None, typer.Option(help="Draw both sides' memory into this SVG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Print what would move from a prefill to a decode engine: per pair of ranks and cache group.

    Nothing is moved. Every list is checked by arithmetic that shares no code with the planner.

    Try:

    kvferry plan --layers 36 --kv-heads 8 --head-size 128 --prefill tp=2,layout=BHLNC --decode tp=1,layout=BHLNC

    kvferry plan --model path/to/config.json --tokens 10240 --prefill tp=4 --decode tp=2,pp=2 --explain --draw plan.svg
    """
    try:
        caches = caches_of(model, layers, kv_heads, head_size, dtype)
        engines = parse_engine("--prefill", prefill, block_size), parse_engine("--decode", decode, block_size)
        report = make_report(caches, *engines, tokens, blocks, seed)
        explanation = explain_plan(report, COSTS) if explain else []
        if draw is not None:
            _write(draw, draw_plan(report))
    except KVFerryError as error:
        refuse(error, as_json)
    if as_json:
        said = {"explanation": explanation} if explain else {}
        typer.echo(json.dumps({**report.as_json(), **said}, indent=2))
    else:
        _print_report(report, explanation)
    if not report.verified:
        raise typer.Exit(1)


def refuse(error: KVFerryError, as_json: bool) -> NoReturn:
    """Print an error as JSON and exit with code 2; without JSON leave it to the command line, which does the same."""
    if not as_json:
        raise error
    reasons = {"reason": error.reason.value, "message": error.message, "remedy": error.remedy}
    typer.echo(json.dumps({"error": reasons}, indent=2))
    raise typer.Exit(2)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        what = f"--draw: {path} cannot be written: {error}."
        raise SettingsError(Reason.INVALID_SETTING, what, "Name a file in a folder that exists.") from None


def _print_report(report: PlanReport, explanation: list[str]) -> None:
    table = Table(title="What would move", caption="run lengths: how many x how long")
    for column in ("prefill rank", "decode rank", "group", "descriptors", "bytes", "run lengths", "verified"):
        table.add_column(column, justify="left" if column in ("group", "run lengths", "verified") else "right")
    for pair in report.pairs:
        ranks = _rank(report.prefill.wanted.tp, report.prefill.wanted.pp, pair.prefill_rank)
        ranks += _rank(report.decode.wanted.tp, report.decode.wanted.pp, pair.decode_rank)
        for turn, (group, summary) in enumerate(pair.groups):
            shown = ranks if turn == 0 else ["", ""]
            table.add_row(*shown, group, *_cells(summary), "NO" if pair.failure else "yes")
        table.add_section()
    total = "yes" if report.verified else "NO"
    table.add_row("", "", "total", str(report.descriptors), format_bytes(report.bytes), "", total)
    console = open_console()
    for note in report.prefill.notes() + report.decode.notes():
        console.print(note, markup=False, highlight=False)
    console.print(table)
    for failure in report.failures:
        console.print(failure, style="red", markup=False)
    for line in explanation:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _rank(tp: int, pp: int, index: int) -> list[str]:
    return [f"pp {index // tp} tp {index % tp}" if pp > 1 else str(index)]


def _cells(summary: Summary) -> list[str]:
    runs = [f"{count}x{format_bytes(length)}" for length, count in summary.run_lengths]
    more = [f"and {len(runs) - MAX_RUN_LENGTHS} more"] if len(runs) > MAX_RUN_LENGTHS else []
    return [str(summary.descriptors), format_bytes(summary.bytes), " ".join(runs[:MAX_RUN_LENGTHS] + more)]
