"""``kvferry plan``: the descriptors between two engines, proved and explained."""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
import typer
from rich.table import Table

from kvferry.arrays import Descriptors
from kvferry.cli.console import Announce, AsJson, open_console, progress, refused
from kvferry.errors import Reason, SettingsError, VerificationError, did_you_mean
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import CacheGroup, CacheKind, Shard
from kvferry.models.config import ITEM_SIZES
from kvferry.models.families import ModelCaches, caches_of, layer_of
from kvferry.models.groups import (
    AttentionCache,
    LayerGroup,
    RankMemory,
    form_groups,
    model_shard,
    page_bytes,
    possible_layout,
    resolve_block_size,
    split_layers,
)
from kvferry.plan.match import ComponentHeads
from kvferry.plan.planner import NOTHING, GroupPlan, PairPlan, Planner, StridedCopy
from kvferry.plan.proof import verify_destination, verify_pair
from kvferry.plan.request import GroupBlocks, first_token_to_move
from kvferry.transport.null import NullTransport
from kvferry.transport.protocol import Direction, Status, reach
from kvferry.units import format_bytes

RANK_SPACING = 1 << 44
"""Distance of the ranks' invented base addresses, far above the size of any cache."""
MAX_RANKS = 1024
MAX_TOKENS = 1 << 26
ENGINE_HELP = (
    "The {} engine, with any of: tp=2,pp=2,layout=LBHNC,block_size=32,layers=20+16 (of each pipeline stage). The "
    "layout is BHLNC unless given."
)
MAX_COPIES = 6
"""Patterns of one template in the explanation."""
MAX_RUN_LENGTHS = 4
"""Run lengths of one row of the table; the JSON object has all."""


@dataclass(frozen=True)
class EngineShape:
    """The sizes and layout of one engine. ``stages``: layers of each pipeline stage; empty for vLLM's split."""

    tp: int
    layout: NamedLayout
    block_size: int
    pp: int = 1
    stages: tuple[int, ...] = ()

    @property
    def num_ranks(self) -> int:
        """The number of ranks of all pipeline stages."""
        return self.tp * self.pp


@dataclass(frozen=True)
class Engine:
    """An engine with a model: its groups, and the block size and layout that the model requires."""

    name: str
    wanted: EngineShape
    layout: NamedLayout
    block_size: int
    groups: tuple[LayerGroup, ...]
    num_layers: int

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of one layer on one rank."""
        return page_bytes(self.groups, self.block_size, self.wanted.tp)

    def notes(self) -> list[str]:
        """Return a sentence about each wanted value that the model changes."""
        found = []
        if self.layout is not self.wanted.layout:
            found.append(
                f"{self.name}: layout {self.wanted.layout} is refused: pages of states and of attention differ in "
                f"shape, and each must be contiguous. Planned with {self.layout}, the nearest possible layout."
            )
        if self.block_size != self.wanted.block_size:
            found.append(
                f"{self.name}: attention blocks have {self.block_size} tokens instead of {self.wanted.block_size}, so "
                f"that a page of {self.page_bytes} bytes holds a state at TP {self.wanted.tp}."
            )
        return found

    def as_json(self) -> dict[str, Any]:
        """Return the engine as JSON values; a block takes ``block_bytes`` where one rank holds all layers."""
        return {
            "tp": self.wanted.tp,
            "pp": self.wanted.pp,
            "layout": self.layout.value,
            "block_size": self.block_size,
            "page_bytes": self.page_bytes,
            "block_bytes": self.page_bytes * max(len(group.layers) for group in self.groups),
        }

    def shards(self, num_blocks: int, base_address: int) -> list[Shard]:
        """Return the shards of all ranks, stage by stage, at invented addresses."""
        wanted, num_layers = self.wanted, self.num_layers
        stages = wanted.stages or split_layers(num_layers, wanted.pp)
        if sum(stages) != num_layers:
            what = f"{self.name}: layers={'+'.join(map(str, stages))} are {sum(stages)}, the model has {num_layers}."
            raise SettingsError(Reason.INVALID_SETTING, what, "Give the number of layers of every stage.")
        ends = [0, *itertools.accumulate(stages)]
        names = [name for group in self.groups for name in group.layers]
        held = [
            frozenset(name for name in names if first <= layer_of(name) < end)
            for first, end in itertools.pairwise(ends)
        ]
        ranks = itertools.product(enumerate(held), range(wanted.tp))
        return [
            model_shard(
                self.groups,
                layers,
                RankMemory(
                    layout=self.layout,
                    block_size=self.block_size,
                    num_blocks=num_blocks,
                    tp_rank=tp_rank,
                    tp_size=wanted.tp,
                    pp_rank=stage,
                    pp_size=wanted.pp,
                    base_address=base_address + index * RANK_SPACING,
                ),
            )
            for index, ((stage, layers), tp_rank) in enumerate(ranks)
        ]


class Blocks(StrEnum):
    """The order of a request's block ids in both engines."""

    CONTIGUOUS = "contiguous"
    DESCENDING = "descending"
    SCATTERED = "scattered"


@dataclass(frozen=True)
class Summary:
    """The descriptors of one pair of ranks: their number, bytes, and lengths.

    ``run_lengths`` are (length in bytes, number of runs), longest first. ``str`` is run-length encoded:

    >>> str(Summary(descriptors=3, bytes=20, run_lengths=((8, 2), (4, 1))))
    '3 descriptors, 20 bytes, 2x8 1x4'
    """

    descriptors: int
    bytes: int
    run_lengths: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, descriptors: Descriptors) -> Self:
        """Return the summary of a lowered list.

        >>> Summary.of(np.array([[0, 100, 8], [16, 200, 8]], dtype=np.uint64)).run_lengths
        ((8, 2),)
        """
        lengths, counts = np.unique(descriptors[:, 2], return_counts=True)
        runs = tuple(zip(lengths[::-1].tolist(), counts[::-1].tolist(), strict=True))
        return cls(len(descriptors), int(descriptors[:, 2].sum()), runs)

    def as_json(self) -> dict[str, Any]:
        """Return the summary as JSON values."""
        runs = [{"length": length, "count": count} for length, count in self.run_lengths]
        return {"descriptors": self.descriptors, "bytes": self.bytes, "run_lengths": runs}

    def __str__(self) -> str:
        runs = " ".join(f"{count}x{length}" for length, count in self.run_lengths)
        return f"{self.descriptors} descriptors, {self.bytes} bytes, {runs}"


@dataclass(frozen=True, eq=False)
class PairReport:
    """The descriptors from one prefill rank to one decode rank, in total and by cache group."""

    pair: PairPlan
    decode_rank: int
    descriptors: Descriptors
    summary: Summary
    groups: tuple[tuple[str, Summary], ...]
    failure: str

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        ranks = {"prefill_rank": self.pair.assignment.source_index, "decode_rank": self.decode_rank}
        groups = [{"group": name, **summary.as_json()} for name, summary in self.groups]
        return {**ranks, **self.summary.as_json(), "verified": not self.failure, "groups": groups}


@dataclass(frozen=True, eq=False)
class PlanReport:
    """All pairs of ranks, and the failures of their proofs. ``origin``: where the shapes of the caches come from."""

    origin: str
    prefill: Engine
    decode: Engine
    sources: tuple[Shard, ...]
    requests: tuple[GroupBlocks, ...]
    selector: int
    pairs: tuple[PairReport, ...]
    failures: tuple[str, ...]

    @property
    def descriptors(self) -> int:
        """The number of descriptors of all pairs."""
        return sum(pair.summary.descriptors for pair in self.pairs)

    @property
    def bytes(self) -> int:
        """The bytes of all pairs."""
        return sum(pair.summary.bytes for pair in self.pairs)

    @property
    def notes(self) -> list[str]:
        """A sentence about each value that the model changes."""
        return self.prefill.notes() + self.decode.notes()

    @property
    def verified(self) -> bool:
        """Whether no proof failed."""
        return not self.failures

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "descriptors": self.descriptors,
            "bytes": self.bytes,
            "verified": self.verified,
            "shapes": self.origin,
            "failures": list(self.failures),
            "notes": self.notes,
            "groups": [_group_json(*pair) for pair in zip(self.prefill.groups, self.requests, strict=True)],
            "engines": {engine.name: engine.as_json() for engine in (self.prefill, self.decode)},
            "pairs": [pair.as_json() for pair in self.pairs],
        }


def _group_json(group: LayerGroup, request: GroupBlocks) -> dict[str, Any]:
    cache = group.cache
    if isinstance(cache, AttentionCache):
        sizes = {"kv_heads": cache.num_kv_heads, "head_size": cache.head_size, "itemsize": cache.itemsize}
    else:
        recurrent = cache.state_itemsize
        sizes = {"state_heads": cache.num_heads, "itemsize": cache.itemsize, "recurrent_itemsize": recurrent}
    holds = {"group": group.name, "kind": group.kind.value, "window": cache.window}
    tokens = {"first_token": request.first_token, "last_token": request.last_token}
    return {**holds, **sizes, "layers": list(group.layers), **tokens}


def engine_of(name: str, shape: EngineShape, caches: ModelCaches) -> Engine:
    """Return the engine of a model with these caches.

    >>> from kvferry.models.families import alike
    >>> caches = alike(AttentionCache(num_kv_heads=2, head_size=64, itemsize=2), 4)
    >>> engine = engine_of("prefill", EngineShape(1, NamedLayout.BHLNC, 16, pp=2), caches)
    >>> [sorted(shard.groups[0].layers) for shard in engine.shards(num_blocks=8, base_address=0)]
    [['0', '1'], ['2', '3']]
    """
    groups = form_groups(caches.named())
    block_size = resolve_block_size(groups, shape.block_size, shape.tp)
    return Engine(name, shape, possible_layout(groups, shape.layout), block_size, groups, len(caches.layers))


def parse_engine(option: str, text: str, block_size: int) -> EngineShape:
    """Return the shape of an engine from text such as ``tp=2,pp=2,layout=BHLNC,block_size=32,layers=20+16``.

    >>> parse_engine("--prefill", "tp=2,layout=bhlnc", 16)
    EngineShape(tp=2, layout=<NamedLayout.BHLNC: 'BHLNC'>, block_size=16, pp=1, stages=())
    >>> parse_engine("--prefill", "layers=20+16", 16).pp
    2
    >>> parse_engine("--prefill", "blocksize=2", 16)
    Traceback (most recent call last):
        ...
    kvferry.errors.SettingsError: --prefill: 'blocksize' is unknown. Did you mean 'block_size'? [unknown-setting]
    """
    values = {"tp": "1", "layout": "BHLNC", "block_size": str(block_size), "pp": "", "layers": ""}
    for pair in filter(None, (pair.strip() for pair in text.split(","))):
        key, equals, value = (word.strip() for word in pair.partition("="))
        key = "block_size" if key == "block-size" else key
        if key == "dp":
            what = f"{option}: a plan has no data-parallel size."
            raise SettingsError(Reason.UNKNOWN_SETTING, what, "Leave dp out: each data-parallel rank is an engine.")
        if key not in values:
            what = f"{option}: {key!r} is unknown."
            meant = did_you_mean(key, values) if key[:1].isalpha() else "Write for example tp=2."
            raise SettingsError(Reason.UNKNOWN_SETTING, what, meant)
        if not equals or not value:
            raise SettingsError(Reason.INVALID_SETTING, f"{option}: {key!r} has no value.", f"Write {key}=VALUE.")
        values[key] = value
    layers = values["layers"]
    stages = tuple(_positive(option, "layers", number) for number in layers.split("+")) if layers else ()
    pp = _positive(option, "pp", values["pp"] or str(len(stages) or 1))
    if stages and len(stages) != pp:
        what = f"{option}: layers={layers} are {len(stages)} stages, pp is {pp}."
        raise SettingsError(Reason.INVALID_SETTING, what, "Give the number of layers of every stage.")
    tp, size = (_positive(option, key, values[key]) for key in ("tp", "block_size"))
    if tp * pp > MAX_RANKS:
        what = f"{option}: {tp} times {pp} ranks."
        raise SettingsError(Reason.INVALID_SETTING, what, f"At most {MAX_RANKS} ranks are possible.")
    return EngineShape(tp, NamedLayout.parse(values["layout"]), size, pp, stages)


def _positive(option: str, key: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal() and len(value) < 10) or int(value) == 0:
        what = f"{option}: {key} is {value!r}."
        raise SettingsError(Reason.INVALID_SETTING, what, "Use a whole number above zero.")
    return int(value)


def make_report(
    caches: ModelCaches,
    prefill: EngineShape,
    decode: EngineShape,
    tokens: int,
    blocks: Blocks,
    seed: int = 0,
    *,
    verify: bool = True,
    announce: Announce = lambda text: None,
) -> PlanReport:
    """Plan one request between two engines, submit the lists to the null transport, and prove them.

    ``announce`` is called with each step: the proof of a million tokens takes many seconds.
    """
    engines = engine_of("prefill", prefill, caches), engine_of("decode", decode, caches)
    requests, num_blocks = make_requests(engines[0], engines[1], tokens, blocks, seed)
    sources = engines[0].shards(num_blocks[0], RANK_SPACING)
    destinations = engines[1].shards(num_blocks[1], RANK_SPACING * (prefill.num_ranks + 1))
    pairs: list[PairReport] = []
    failures: list[str] = []
    for rank, destination in enumerate(destinations):
        requested = [blocks for blocks in requests if destination.group(blocks.group)]
        of_rank = f"decode rank {rank} of {len(destinations)}"
        announce(f"{of_rank}: planning")
        received: list[PairReport] = []
        for pair in Planner(sources, destination).plans(seed):
            announce(f"{of_rank}: the list from prefill rank {pair.assignment.source_index} of {len(sources)}")
            received.append(_pair_report(pair, rank, requested, verify=verify))
        announce(f"{of_rank}: all lists together")
        pairs += received
        failures += [pair.failure for pair in received]
        if verify:
            lists = [(pair.pair.source, pair.descriptors) for pair in received]
            proof = partial(verify_destination, lists, destination, requested)
            failures.append(_failure(f"decode {destination.rank_name}", proof))
    failed = tuple(filter(None, failures))
    return PlanReport(caches.origin, *engines, tuple(sources), tuple(requests), seed, tuple(pairs), failed)


def _pair_report(pair: PairPlan, decode_rank: int, requested: Sequence[GroupBlocks], *, verify: bool) -> PairReport:
    lists = pair.lower_groups(requested)
    descriptors = submitted(pair, np.concatenate([NOTHING, *lists.values()]))
    groups = tuple((name, Summary.of(rows)) for name, rows in lists.items())
    proof = partial(verify_pair, descriptors, pair.source, pair.destination, requested, pair.heads)
    failure = _failure(f"{pair.source.rank_name} to {pair.destination.rank_name}", proof) if verify else ""
    return PairReport(pair, decode_rank, descriptors, Summary.of(descriptors), groups, failure)


def _failure(ranks: str, proof: Callable[[], object]) -> str:
    """Return the error of a proof after the names of its ranks; empty where the proof succeeds."""
    try:
        proof()
    except VerificationError as error:
        return f"{ranks}: {error}"
    return ""


def submitted(pair: PairPlan, descriptors: Descriptors) -> Descriptors:
    """Submit the pair's list to the null transport, which checks the regions, and return the submitted list."""
    source, destination = NullTransport(), NullTransport()
    try:
        source.register(pair.source.regions)
        peer = reach(source, destination.register(pair.destination.regions))
        transfer = source.submit(peer, Direction.WRITE, descriptors)
        if source.poll(transfer) is not Status.DONE:
            raise SettingsError(Reason.TRANSFER_FAILED, f"the null transport failed: {transfer.error}.")
        return source.last_submitted
    finally:
        source.close()
        destination.close()


class GroupSizes(NamedTuple):
    """What decides the blocks of a request in one cache group; block sizes in tokens."""

    name: str
    kind: CacheKind
    window: int
    source_block_size: int
    destination_block_size: int


def make_requests(
    prefill: Engine, decode: Engine, tokens: int, blocks: Blocks, seed: int
) -> tuple[list[GroupBlocks], tuple[int, int]]:
    """Return as :func:`requests_for` for the groups of two engines."""
    sizes = prefill.block_size, decode.block_size
    return requests_for(
        [GroupSizes(group.name, group.kind, group.cache.window, *sizes) for group in prefill.groups],
        tokens,
        blocks,
        seed,
    )


def requests_for(
    groups: Iterable[GroupSizes], tokens: int, blocks: Blocks, seed: int
) -> tuple[list[GroupBlocks], tuple[int, int]]:
    """Return one request for each group, and the number of blocks that each engine needs.

    Block 0 is vLLM's null block. Groups share a pool of blocks, so no two groups have the same id. Of a sliding window
    the request has only the tokens that the next token needs, of a state the one block.
    """
    used = [1, 1]
    requests = []
    for group in groups:
        is_state = group.kind is CacheKind.STATE
        sizes = (1, 1) if is_state else (group.source_block_size, group.destination_block_size)
        last = 1 if is_state else tokens
        first = (
            first_token_to_move(
                num_computed_tokens=last,
                first_token=0,
                window=group.window,
                source_block_size=sizes[0],
                destination_block_size=sizes[1],
                whole_pages=False,
            )
            if group.window
            else 0
        )
        nulls = [first // size for size in sizes]
        counts = [-(-last // size) - null for size, null in zip(sizes, nulls, strict=True)]
        ids = block_ids(blocks, counts[0], counts[1], seed)
        lists = [
            [0] * null + [offset + number - 1 for number in numbers]
            for null, offset, numbers in zip(nulls, used, ids, strict=True)
        ]
        used = [offset + count for offset, count in zip(used, counts, strict=True)]
        named = {"source_block_ids": lists[0], "destination_block_ids": lists[1]}
        requests.append(GroupBlocks(group=group.name, first_token=first, last_token=last, **named))  # type: ignore[arg-type]
    return requests, (used[0], used[1])


def block_ids(blocks: Blocks, num_source: int, num_destination: int, seed: int) -> tuple[list[int], list[int]]:
    """Return the ids of a request's blocks at source and destination, from 1 on.

    No two scattered blocks are neighbours in both lists, where the number of blocks allows that.

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
    """Exchange source ids until no two blocks are neighbours in both lists. One exchange in n makes new neighbours."""
    order = np.argsort(destination)
    while len(order) > 1:
        neighbours = order[1:][np.diff(source[order]) == 1]
        if not len(neighbours):
            return
        for index in neighbours.tolist():
            other = int(generator.integers(len(order)))
            source[index], source[other] = source[other], source[index]


def plan(
    layers: Annotated[int | None, typer.Option(help="Layers of the model.", min=1, max=4096)] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads of the model, over all ranks.", min=1)] = None,
    head_size: Annotated[int | None, typer.Option(help="Channels of K, and of V, per head.", min=1)] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help=f"Of the cache: {', '.join(ITEM_SIZES)}. Default: the model's; without --model, bfloat16."),
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens of a block, unless an engine sets its own.", min=1)] = 16,
    tokens: Annotated[int, typer.Option(help="Tokens of the request.", min=1, max=MAX_TOKENS)] = 1024,
    prefill: Annotated[str, typer.Option(help=ENGINE_HELP.format("prefill"))] = "tp=1",
    decode: Annotated[str, typer.Option(help=ENGINE_HELP.format("decode"))] = "tp=1",
    blocks: Annotated[Blocks, typer.Option(help="Order of the block ids.")] = Blocks.SCATTERED,
    model: Annotated[Path | None, typer.Option(help="Hugging Face config.json, or a folder with one.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of scattered ids and of the choice among replicas.", min=0)] = 0,
    explain: Annotated[bool, typer.Option("--explain", help="Explain sources, runs, refusals.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the descriptors from a prefill to a decode engine, per pair of ranks and cache group.

    No bytes are moved. A proof that shares no code with the planner checks every list.

    Try:

    kvferry plan --layers 36 --kv-heads 8 --head-size 128 --prefill tp=2,layout=BHLNC --decode tp=1,layout=BHLNC

    kvferry plan --model path/to/config.json --tokens 10240 --prefill tp=4 --decode tp=2,pp=2 --explain
    """
    with refused(as_json):
        caches = caches_of(model, layers, kv_heads, head_size, dtype)
        engines = parse_engine("--prefill", prefill, block_size), parse_engine("--decode", decode, block_size)
        with progress("planning") as announce:
            report = make_report(caches, *engines, tokens, blocks, seed, announce=announce)
            announce("explaining")
            explanation = explain_plan(report) if explain else []
    if as_json:
        more = {"explanation": explanation} if explain else {}
        typer.echo(json.dumps({**report.as_json(), **more}, indent=2))
    else:
        _print_report(report, explanation)
    if not report.verified:
        raise typer.Exit(1)


def _print_report(report: PlanReport, explanation: list[str]) -> None:
    table = Table(title="Descriptors from prefill to decode", caption="run lengths: number x length")
    for column in ("prefill rank", "decode rank", "group", "descriptors", "bytes", "run lengths", "verified"):
        table.add_column(column, justify="left" if column in ("group", "run lengths", "verified") else "right")
    for pair in report.pairs:
        ranks = [_rank(report.prefill, pair.pair.assignment.source_index), _rank(report.decode, pair.decode_rank)]
        for group, summary in pair.groups:
            table.add_row(*ranks, group, *_cells(summary), "NO" if pair.failure else "yes")
            ranks = ["", ""]
        table.add_section()
    total = "yes" if report.verified else "NO"
    table.add_row("", "", "total", str(report.descriptors), format_bytes(report.bytes), "", total)
    console = open_console()
    for line in (f"shapes of the caches: {report.origin}", *report.notes):
        console.print(line, markup=False, highlight=False)
    console.print(table)
    for failure in report.failures:
        console.print(failure, style="red", markup=False)
    for line in explanation:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _rank(engine: Engine, index: int) -> str:
    stage, rank = divmod(index, engine.wanted.tp)
    return f"pp {stage} tp {rank}" if engine.wanted.pp > 1 else str(index)


def _cells(summary: Summary) -> list[str]:
    runs = [f"{count}x{format_bytes(length)}" for length, count in summary.run_lengths]
    more = [f"and {len(runs) - MAX_RUN_LENGTHS} more"] if len(runs) > MAX_RUN_LENGTHS else []
    return [str(summary.descriptors), format_bytes(summary.bytes), " ".join(runs[:MAX_RUN_LENGTHS] + more)]


def explain_plan(report: PlanReport) -> list[str]:
    """Return the explanation of a whole plan: engines and groups, then each pair, then refusals and changes."""
    lines = [f"shapes of the caches: {report.origin}"]
    for engine in (report.prefill, report.decode):
        sizes = f"TP {engine.wanted.tp}, PP {engine.wanted.pp}, blocks of {engine.block_size} tokens"
        lines.append(f"{engine.name}: {sizes}, layout {engine.layout}, cache groups: {len(engine.groups)}")
    for group, request in zip(report.prefill.groups, report.requests, strict=True):
        lines.append(_group_line(group, request))
    for pair in report.pairs:
        lines += _pair_lines(pair, report)
    refused = [*report.notes, *report.failures]
    lines.append("refused or changed:" if refused else "refused or changed: nothing")
    return [*lines, *(f"  {line}" for line in refused)]


def spans(numbers: Iterable[str]) -> str:
    """Return the numbers of layers as ranges.

    >>> spans(["0", "1", "2", "5", "7", "8"])
    '0-2 5 7-8'
    """
    ranges: list[list[int]] = []
    for number in sorted(map(layer_of, numbers)):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return " ".join(f"{first}-{last}" if first != last else str(first) for first, last in ranges)


def _group_line(group: LayerGroup, request: GroupBlocks) -> str:
    if group.kind is CacheKind.STATE:
        requested = "one block, which holds the last state"
    else:
        requested = f"tokens {request.first_token} to {request.last_token}"
    if group.cache.window:
        requested += f", from the first block that reaches into the window of {group.cache.window} tokens"
    return f"group {group.name}: {len(group.layers)} layers ({spans(group.layers)}), {requested}"


def _pair_lines(report: PairReport, plan: PlanReport) -> list[str]:
    pair = report.pair
    lines = [f"{pair.source.rank_name} (prefill) to {pair.destination.rank_name} (decode): {report.summary}"]
    for name, group in pair.groups.items():
        matched = spans(group.source_group.layers & group.destination_group.layers)
        components = [component for component in pair.assignment.components if component.group == name]
        lines.append(f"  {name}: layers {matched} match by name")
        lines += [f"    {_source_line(component, group, pair, plan)}" for component in components]
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, group in pair.groups.items():
        alike.setdefault(tuple(_template_lines(group)), []).append(name)
    for template, names in alike.items():
        lines += [f"  {', '.join(names)}:", *(f"    {line}" for line in template)]
    return lines


def _source_line(component: ComponentHeads, group: GroupPlan, pair: PairPlan, plan: PlanReport) -> str:
    replicas = _replicas(component, group.source_group, plan.sources)
    heads = " ".join(map(repr, component.heads))
    chosen = f"{component.component} heads {heads} from {pair.source.rank_name}"
    if replicas == 1:
        return f"{chosen}, the only rank that holds them"
    return f"{chosen}, one of {replicas} ranks that hold them, by selector {plan.selector}"


def _replicas(component: ComponentHeads, sent: CacheGroup, sources: Sequence[Shard]) -> int:
    """Return the number of source ranks that hold these heads of these layers."""
    groups = [found for source in sources if (found := source.group(component.group)) and found.layers == sent.layers]
    held = [group.component(component.component).heads for group in groups]
    return sum(
        all(any(one.start <= head.start and head.end <= one.end for one in heads) for head in component.heads)
        for heads in held
    )


def _template_lines(group: GroupPlan) -> list[str]:
    """Return the templates of whole blocks of a group; equal templates are told once, equal copies share a line."""
    found: dict[tuple[int, tuple[str, ...]], None] = {}
    for template in (template for phase in group.first_phases() for template in group.templates(phase)):
        counts = Counter(map(copy_line, template.copies))
        copies = tuple(f"{count} of: {line}" if count > 1 else line for line, count in counts.items())
        found[len(template.runs), copies] = None
    lines = []
    for num_runs, copies in found:
        lines.append(f"a block moves in {num_runs} run{'s' if num_runs > 1 else ''}:")
        lines += [f"  {line}" for line in copies[:MAX_COPIES]]
        lines += [f"  and {len(copies) - MAX_COPIES} other patterns"] if len(copies) > MAX_COPIES else []
    return lines


def copy_line(copy: StridedCopy) -> str:
    """Return a copy as its run and the loops around the run.

    >>> copy_line(StridedCopy(0, 0, 4096, ((8, 8192, 4096),)))
    'run of 4.0 KiB, times 8 (source every 8192 bytes, destination every 4096)'
    >>> copy_line(StridedCopy(0, 0, 4096))
    'run of 4.0 KiB, all joined'
    """
    run = f"run of {format_bytes(copy.run_bytes)}"
    loops = [f"times {count} (source every {one} bytes, destination every {other})" for count, one, other in copy.loops]
    return f"{run}, {', '.join(loops)}" if loops else f"{run}, all joined"
