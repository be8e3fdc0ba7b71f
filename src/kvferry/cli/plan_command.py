"""``kvferry plan``: what would move between two engines, in how many pieces, checked."""

import difflib
import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from kvferry.cli.model_shapes import ModelShapes, read_model_shapes
from kvferry.errors import KVFerryError, Reason, SettingsError, VerificationError
from kvferry.layout.cache_group import CacheKind
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shapes import shard_for
from kvferry.layout.shard import Shard
from kvferry.plan.describe import Summary, summarize
from kvferry.plan.request import GroupBlocks
from kvferry.plan.transfer_plan import Descriptors, PairPlan, Planner
from kvferry.plan.verify import verify_destination, verify_pair
from kvferry.transport.null import NullTransport
from kvferry.transport.protocol import Direction, Status
from kvferry.units import format_bytes

ITEM_SIZES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "fp8": 1,
    "int8": 1,
}
"""Bytes of one number of each dtype."""

RANK_SPACING = 1 << 44
"""Distance of the ranks' made-up base addresses, far above any cache."""


class Blocks(StrEnum):
    """In which order the engines' allocators handed out the block ids."""

    CONTIGUOUS = "contiguous"
    DESCENDING = "descending"
    SCATTERED = "scattered"


@dataclass(frozen=True)
class EngineShape:
    """How one engine keeps its cache."""

    tp: int
    layout: NamedLayout
    block_size: int


@dataclass(frozen=True)
class PairReport:
    """What one prefill rank sends to one decode rank."""

    prefill_rank: int
    decode_rank: int
    summary: Summary
    verified: bool


@dataclass(frozen=True)
class PlanReport:
    """All pairs, and whether every decode rank gets exactly what it needs."""

    pairs: tuple[PairReport, ...]
    descriptors: int
    bytes: int
    verified: bool
    failures: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        pairs = []
        for pair in self.pairs:
            runs = [{"length": length, "count": count} for length, count in pair.summary.run_lengths]
            ranks = {"prefill_rank": pair.prefill_rank, "decode_rank": pair.decode_rank}
            pairs.append({**ranks, **asdict(pair.summary), "run_lengths": runs, "verified": pair.verified})
        totals = {"descriptors": self.descriptors, "bytes": self.bytes, "verified": self.verified}
        return {**totals, "failures": list(self.failures), "pairs": pairs}


def plan(
    layers: Annotated[int | None, typer.Option(help="Layers of the model.", min=1)] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads of the model, over all ranks.", min=1)] = None,
    head_size: Annotated[int | None, typer.Option(help="Channels of K, and of V, per head.", min=1)] = None,
    dtype: Annotated[str | None, typer.Option(help=f"One of {', '.join(ITEM_SIZES)}.")] = None,
    block_size: Annotated[int, typer.Option(help="Tokens in a block, unless an engine names its own.", min=1)] = 16,
    tokens: Annotated[int, typer.Option(help="Tokens of the request.", min=1)] = 1024,
    prefill: Annotated[str, typer.Option(help="tp=,layout=,block_size= of the prefill engine.")] = "tp=1",
    decode: Annotated[str, typer.Option(help="tp=,layout=,block_size= of the decode engine.")] = "tp=1",
    blocks: Annotated[Blocks, typer.Option(help="Order of the block ids.")] = Blocks.SCATTERED,
    model: Annotated[Path | None, typer.Option(help="Hugging Face config.json to take the shapes from.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of scattered ids and of the choice among replicas.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Print what would move from a prefill to a decode engine: per pair of ranks descriptors, bytes and run lengths.

    Nothing is moved. Every list is checked by arithmetic that shares no code with the planner.

    Try:

    kvferry plan --layers 36 --kv-heads 8 --head-size 128 --prefill tp=2,layout=BHLNC --decode tp=1,layout=BHLNC

    kvferry plan --model path/to/config.json --tokens 1024 --prefill tp=4 --decode tp=2,block_size=32 --json
    """
    try:
        shapes = _model_shapes(model, layers, kv_heads, head_size, dtype)
        engines = parse_engine("--prefill", prefill, block_size), parse_engine("--decode", decode, block_size)
        report = make_report(shapes, *engines, tokens, blocks, seed)
    except KVFerryError as error:
        refuse(error, as_json)
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2))
    else:
        _print_table(report)
    if not report.verified:
        raise typer.Exit(1)


def refuse(error: KVFerryError, as_json: bool) -> NoReturn:
    """Print an error as JSON and exit with code 2; without JSON leave it to the command line, which does the same."""
    if not as_json:
        raise error
    reasons = {"reason": error.reason.value, "message": error.message, "remedy": error.remedy}
    typer.echo(json.dumps({"error": reasons}, indent=2))
    raise typer.Exit(2)


def parse_engine(option: str, text: str, block_size: int) -> EngineShape:
    """Return the engine that ``tp=2,layout=BHLNC,block_size=32`` describes.

    >>> parse_engine("--prefill", "tp=2,layout=bhlnc", 16)
    EngineShape(tp=2, layout=<NamedLayout.BHLNC: 'BHLNC'>, block_size=16)
    >>> parse_engine("--prefill", "pt=2", 16)
    Traceback (most recent call last):
        ...
    kvferry.errors.SettingsError: --prefill: 'pt' is unknown. Did you mean 'tp'? [unknown-setting]
    """
    values: dict[str, str] = {"tp": "1", "layout": "BHLNC", "block_size": str(block_size)}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in values:
            nearest = difflib.get_close_matches(key, values, n=1, cutoff=0.0)[0]
            what = f"{option}: {key!r} is unknown."
            raise SettingsError(Reason.UNKNOWN_SETTING, what, f"Did you mean {nearest!r}?")
        if not equals or not value:
            raise SettingsError(Reason.INVALID_SETTING, f"{option}: {key!r} has no value.", f"Write {key}=VALUE.")
        values[key] = value
    sizes = [_positive(option, key, values[key]) for key in ("tp", "block_size")]
    return EngineShape(sizes[0], NamedLayout.parse(values["layout"]), sizes[1])


def _positive(option: str, key: str, value: str) -> int:
    if not value.isdecimal() or int(value) == 0:
        what = f"{option}: {key} is {value!r}."
        raise SettingsError(Reason.INVALID_SETTING, what, "Use a whole number above zero.")
    return int(value)


def item_size(dtype: str) -> int:
    """Return the bytes of one number. Raises :class:`SettingsError` naming the nearest dtype."""
    found = ITEM_SIZES.get(dtype.removeprefix("torch."))
    if found is None:
        nearest = difflib.get_close_matches(dtype, ITEM_SIZES, n=1, cutoff=0.0)[0]
        raise SettingsError(Reason.INVALID_SETTING, f"dtype {dtype!r} is unknown.", f"Did you mean {nearest!r}?")
    return found


def _model_shapes(
    model: Path | None, layers: int | None, kv_heads: int | None, head_size: int | None, dtype: str | None
) -> ModelShapes:
    """Return the shapes from the model's configuration, overridden by those given by hand."""
    found = read_model_shapes(model) if model else None
    by_hand = {"--layers": layers, "--kv-heads": kv_heads, "--head-size": head_size}
    missing = [option for option, value in by_hand.items() if value is None]
    if found is None and missing:
        what = f"{', '.join(missing)} must be given."
        raise SettingsError(Reason.INVALID_SETTING, what, "Or name a model's config.json with --model.")
    return ModelShapes(
        num_layers=layers or (found.num_layers if found else 0),
        num_kv_heads=kv_heads or (found.num_kv_heads if found else 0),
        head_size=head_size or (found.head_size if found else 0),
        dtype=dtype or (found.dtype if found else "bfloat16"),
        kind=found.kind if found else CacheKind.ATTENTION,
    )


def make_report(
    shapes: ModelShapes, prefill: EngineShape, decode: EngineShape, tokens: int, blocks: Blocks, seed: int = 0
) -> PlanReport:
    """Plan one request between two engines, hand the lists to the counting transport, and check them."""
    num_blocks = -(-tokens // prefill.block_size), -(-tokens // decode.block_size)
    sources = engine_shards(shapes, prefill, num_blocks[0] + 1, RANK_SPACING)
    destinations = engine_shards(shapes, decode, num_blocks[1] + 1, RANK_SPACING * (prefill.tp + 1))
    source_ids, destination_ids = block_ids(blocks, *num_blocks, seed)
    request = GroupBlocks(
        group="full",
        first_token=0,
        last_token=tokens,
        source_block_ids=source_ids,
        destination_block_ids=destination_ids,
    )
    pairs: list[PairReport] = []
    failures: list[str] = []
    for destination in destinations:
        plans = Planner(sources, destination).plans(seed)
        lists = [(pair, submitted(pair, request)) for pair in plans]
        for pair, descriptors in lists:
            failure = _failure(pair, descriptors, request)
            failures += [failure] if failure else []
            pairs.append(
                PairReport(pair.assignment.source_index, destination.tp_rank, summarize(descriptors), not failure)
            )
        try:
            verify_destination([(pair.source, rows) for pair, rows in lists], destination, [request])
        except VerificationError as error:
            failures.append(f"decode rank {destination.tp_rank}: {error}")
    totals = sum(pair.summary.descriptors for pair in pairs), sum(pair.summary.bytes for pair in pairs)
    return PlanReport(tuple(pairs), *totals, verified=not failures, failures=tuple(failures))


def engine_shards(shapes: ModelShapes, engine: EngineShape, num_blocks: int, base_address: int) -> list[Shard]:
    """Return the shards of all tensor-parallel ranks of an engine, at made-up addresses."""
    return [
        shard_for(
            layers=[str(layer) for layer in range(shapes.num_layers)],
            num_kv_heads=shapes.num_kv_heads,
            head_size=shapes.head_size,
            itemsize=item_size(shapes.dtype),
            block_size=engine.block_size,
            num_blocks=num_blocks,
            layout=engine.layout,
            tp_rank=rank,
            tp_size=engine.tp,
            kind=shapes.kind,
            base_address=base_address + rank * RANK_SPACING,
        )
        for rank in range(engine.tp)
    ]


def block_ids(blocks: Blocks, num_source: int, num_destination: int, seed: int) -> tuple[list[int], list[int]]:
    """Return the ids of a request's blocks on both sides, from 1 on: block 0 is the engine's own.

    Scattered ids are such that no two blocks are neighbours on both sides, as far as there is a choice.

    >>> block_ids(Blocks.DESCENDING, 3, 3, 0)
    ([3, 2, 1], [3, 2, 1])
    """
    source, destination = np.arange(1, num_source + 1), np.arange(1, num_destination + 1)
    if blocks is Blocks.DESCENDING:
        source, destination = source[::-1], destination[::-1]
    if blocks is Blocks.SCATTERED:
        generator = np.random.default_rng(seed)
        source, destination = generator.permutation(source), generator.permutation(destination)
        if num_source == num_destination:
            _part_neighbours(source, destination, generator)
    return source.tolist(), destination.tolist()


def _part_neighbours(source: Any, destination: Any, generator: np.random.Generator) -> None:
    """Exchange source ids until no two pairs are neighbours on both sides. One exchange in n makes a new pair."""
    order = np.argsort(destination)
    while len(order) > 1:
        neighbours = order[1:][np.diff(source[order]) == 1]
        if not len(neighbours):
            return
        for index in neighbours.tolist():
            other = int(generator.integers(len(order)))
            source[index], source[other] = source[other], source[index]


def submitted(pair: PairPlan, request: GroupBlocks) -> Descriptors:
    """Hand the pair's list to the transport that only counts, and return what it was handed."""
    holder, receiver = NullTransport(), NullTransport(keep_descriptors=True)
    try:
        receiver.register(pair.destination.regions)
        peer = receiver.connect(holder.register(pair.source.regions))
        transfer = receiver.submit(peer, Direction.READ, pair.lower([request]))
        if receiver.poll(transfer) is not Status.DONE:
            raise SettingsError(Reason.TRANSFER_FAILED, f"the counting transport said {transfer.error}.")
        return receiver.descriptor_lists[-1]
    finally:
        holder.close()
        receiver.close()


def _failure(pair: PairPlan, descriptors: Descriptors, request: GroupBlocks) -> str:
    try:
        verify_pair(descriptors, pair.source, pair.destination, [request], pair.heads)
    except VerificationError as error:
        return f"{pair.source.rank_name} to {pair.destination.rank_name}: {error}"
    return ""


def _print_table(report: PlanReport) -> None:
    table = Table(title="What would move", caption="run lengths: how many x how long")
    for column in ("prefill rank", "decode rank", "strategy", "descriptors", "bytes", "run lengths", "verified"):
        table.add_column(column, justify="left" if column in ("strategy", "run lengths", "verified") else "right")
    for pair in report.pairs:
        runs = " ".join(f"{count}x{format_bytes(length)}" for length, count in pair.summary.run_lengths)
        sizes = pair.summary.strategy, str(pair.summary.descriptors), format_bytes(pair.summary.bytes)
        table.add_row(str(pair.prefill_rank), str(pair.decode_rank), *sizes, runs, "yes" if pair.verified else "NO")
    table.add_section()
    total = "yes" if report.verified else "NO"
    table.add_row("", "", "total", str(report.descriptors), format_bytes(report.bytes), "", total)
    console = Console()
    console.print(table)
    for failure in report.failures:
        console.print(failure, style="red", markup=False)
