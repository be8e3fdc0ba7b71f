"""Counts the descriptors of one request for well-known models, with a cross-layer layout and with a per-layer layout.

    python benchmarks/plan_models.py tests/model_configs --json models.json

Each ``*.json`` in the folder is a Hugging Face configuration; those that cannot be planned are named and left out. Both
engines use one layout; block ids are scattered, so that no two blocks are neighbours in both engines. The per-layer
layout is LBHNC. The cross-layer layout is BHLNC, or the nearest that the model allows. Plans of up to ``--verify``
tokens are proved.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kvferry.cli.console import open_console
from kvferry.cli.plan_report import Blocks, EngineShape, make_report
from kvferry.errors import KVFerryError
from kvferry.layout.named_layouts import NamedLayout
from kvferry.models.families import ModelCaches, caches_of
from kvferry.units import format_bytes


@dataclass(frozen=True)
class Row:
    """The descriptors of one model and request by layout. ``verified``: both plans were proved."""

    model: str
    groups: str
    tokens: int
    layout: str
    bytes: int
    cross_layer: int
    per_layer: int
    verified: bool


def main(
    folder: Annotated[Path, typer.Argument(help="Folder of model configurations.")],
    tokens: Annotated[str, typer.Option(help="Tokens of the request, with commas.")] = "1024,10240,102400",
    prefill_tp: Annotated[int, typer.Option(min=1)] = 4,
    decode_tp: Annotated[int, typer.Option(min=1)] = 2,
    dtype: Annotated[str | None, typer.Option(help="Of the caches; else each model's.")] = None,
    verify: Annotated[int, typer.Option(min=0, help="Prove plans of up to so many tokens.")] = 1024,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
) -> None:
    """Print the table. Exit code 1 if a proof fails."""
    configs = sorted(folder.glob("*.json"))
    if not configs:
        raise typer.BadParameter(f"{folder} holds no *.json.")
    rows = [
        count(path.stem, caches, int(number), (prefill_tp, decode_tp), verify=int(number) <= verify)
        for path in configs
        if (caches := caches_or_refusal(path, dtype))
        for number in tokens.split(",")
    ]
    print_rows(rows, f"TP {prefill_tp} to TP {decode_tp}")
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(row) for row in rows], indent=2))


def caches_or_refusal(path: Path, dtype: str | None) -> ModelCaches | None:
    """Return a model's caches, or say why it cannot be planned."""
    try:
        return caches_of(path, None, None, None, dtype)
    except KVFerryError as error:
        typer.echo(f"{path.stem} is left out: {error.message}", err=True)
        return None


def count(model: str, caches: ModelCaches, tokens: int, tp_sizes: tuple[int, int], *, verify: bool) -> Row:
    """Plan one request in both layouts."""
    reports = []
    for layout in (NamedLayout.BHLNC, NamedLayout.LBHNC):
        prefill, decode = (EngineShape(tp, layout, 16) for tp in tp_sizes)
        reports.append(make_report(caches, prefill, decode, tokens, Blocks.SCATTERED, verify=verify))
    failures = [failure for report in reports for failure in report.failures]
    if failures:
        typer.echo(f"{model}: {failures[0]}", err=True)
        raise typer.Exit(1)
    kinds = [group.kind.value for group in reports[0].prefill.groups]
    groups = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    cross_layer, per_layer = reports
    return Row(
        model=model,
        groups=groups,
        tokens=tokens,
        layout=cross_layer.prefill.layout.value,
        bytes=cross_layer.bytes,
        cross_layer=cross_layer.descriptors,
        per_layer=per_layer.descriptors,
        verified=verify,
    )


def print_rows(rows: list[Row], engines: str) -> None:
    """Print one line for each model and request."""
    table = Table(title=f"Descriptors of one request, {engines}, scattered blocks")
    for column in ("model", "cache groups", "tokens", "bytes", "layout", "cross-layer", "LBHNC", "fewer", "verified"):
        table.add_column(column, justify="left" if column in ("model", "cache groups", "layout") else "right")
    for row in rows:
        fewer = f"{row.per_layer / row.cross_layer:.1f}x"
        counts = str(row.cross_layer), str(row.per_layer), fewer, "yes" if row.verified else "-"
        table.add_row(row.model, row.groups, str(row.tokens), format_bytes(row.bytes), row.layout, *counts)
    open_console().print(table)


if __name__ == "__main__":
    typer.run(main)
