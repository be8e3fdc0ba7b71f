"""What ``kvferry plan`` finds out: the descriptors between two engines, and their proofs."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Self

import numpy as np

from kvferry.arrays import Descriptors
from kvferry.cli.console import Announce
from kvferry.errors import Reason, SettingsError, VerificationError, did_you_mean
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import CacheKind, Shard
from kvferry.models.families import ModelCaches, layer_of
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
from kvferry.plan.planner import NOTHING, PairPlan, Planner
from kvferry.plan.proof import verify_destination, verify_pair
from kvferry.plan.request import GroupBlocks, first_token_to_move
from kvferry.transport.null import NullTransport
from kvferry.transport.protocol import Direction, Status, reach

RANK_SPACING = 1 << 44
"""Distance of the ranks' invented base addresses, far above the size of any cache."""
MAX_RANKS = 1024
MAX_TOKENS = 1 << 26


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


def make_requests(
    prefill: Engine, decode: Engine, tokens: int, blocks: Blocks, seed: int
) -> tuple[list[GroupBlocks], tuple[int, int]]:
    """Return one request for each group, and the number of blocks that each engine needs.

    Block 0 is vLLM's null block. Groups share a pool of blocks, so no two groups have the same id. Of a sliding window
    the request has only the tokens that the next token needs, of a state the one block.
    """
    used = [1, 1]
    requests = []
    for group in prefill.groups:
        sizes = (1, 1) if group.kind is CacheKind.STATE else (prefill.block_size, decode.block_size)
        last = 1 if group.kind is CacheKind.STATE else tokens
        first = (
            first_token_to_move(
                num_computed_tokens=last,
                first_token=0,
                window=group.cache.window,
                source_block_size=sizes[0],
                destination_block_size=sizes[1],
                whole_pages=False,
            )
            if group.cache.window
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
