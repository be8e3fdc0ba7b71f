"""What ``kvferry plan`` finds out: the descriptors between two engines, and their proofs."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cached_property, partial
from typing import Any, NamedTuple, Self

import numpy as np

from kvferry.arrays import Descriptors
from kvferry.cli.console import Announce
from kvferry.errors import PlanError, Reason, SettingsError, VerificationError, did_you_mean
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import CacheKind, HeadRange, Shard
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
from kvferry.plan.match import GroupBlocks, canonical, common, first_token_to_move
from kvferry.plan.planner import NOTHING, GroupPlan, PairPlan, Planner
from kvferry.plan.proof import verify_destination, verify_pair
from kvferry.transport.protocol import Direction, RegionTable, check_descriptors

RANK_SPACING = 1 << 44
"""Distance of the ranks' invented base addresses, far above the size of any cache."""
MAX_RANKS = 1024
MAX_TOKENS = 1 << 26
LINKS = {
    "100g": 12.5,
    "200g": 25.0,
    "pcie4": 31.5,
    "400g": 50.0,
    "pcie5": 63.0,
    "800g": 100.0,
    "nvlink4": 450.0,
    "nvlink5": 900.0,
}
"""Nominal GB/s in one direction: of a network port, of 16 PCIe lanes, and of all NVLink lanes of a GPU."""


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
                f"layout {self.wanted.layout} is refused: pages of states and of attention differ in "
                f"shape, and each must be contiguous. Planned with {self.layout}, the nearest possible layout."
            )
        if self.block_size != self.wanted.block_size:
            found.append(
                f"attention blocks have {self.block_size} tokens instead of {self.wanted.block_size}, so "
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
    """The descriptors from one prefill rank to one decode rank, in total and by cache group.

    ``per_layer`` is the plan between the same ranks in per-layer layouts, ``per_layer_groups`` its number of
    descriptors by cache group; None and empty where these are too many to count.
    """

    pair: PairPlan
    per_layer: PairPlan | None
    per_layer_groups: Mapping[str, int]
    decode_rank: int
    descriptors: Descriptors
    summary: Summary
    groups: tuple[tuple[str, Summary], ...]
    failure: str

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        ranks = {"prefill_rank": self.pair.assignment.source_index, "decode_rank": self.decode_rank}
        groups = [
            {"group": name, **summary.as_json(), "per_layer_descriptors": self.per_layer_groups.get(name)}
            for name, summary in self.groups
        ]
        return {**ranks, **self.summary.as_json(), "verified": not self.failure, "groups": groups}


@dataclass(frozen=True, slots=True)
class Link:
    """What connects each rank: ``bandwidth`` in bytes per second, and the seconds that each descriptor adds."""

    bandwidth: float
    seconds_per_descriptor: float = 0.0


@dataclass(frozen=True, slots=True)
class Replicas:
    """Heads that equally many ranks of each engine hold, and how many times their bytes are sent.

    >>> print(Replicas(("mla",), "latent", (HeadRange(0, 1),), num_prefill_ranks=4, num_decode_ranks=2, times_sent=2))
    latent heads 0:1 of mla: on 4 prefill ranks, one of which sends to each receiver; on 2 decode ranks, so sent 2 times
    """

    groups: tuple[str, ...]
    component: str
    heads: tuple[HeadRange, ...]
    num_prefill_ranks: int
    num_decode_ranks: int
    times_sent: int

    @property
    def is_replicated(self) -> bool:
        """Whether several ranks of an engine hold these heads."""
        return self.num_prefill_ranks > 1 or self.num_decode_ranks > 1

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values; ``heads`` are (first, end)."""
        return {**asdict(self), "heads": [(head.start, head.end) for head in self.heads]}

    def __str__(self) -> str:
        heads = ", ".join(map(repr, self.heads))
        senders = "1 prefill rank" if self.num_prefill_ranks == 1 else f"{self.num_prefill_ranks} prefill ranks"
        receivers = "1 decode rank" if self.num_decode_ranks == 1 else f"{self.num_decode_ranks} decode ranks"
        chosen = ", one of which sends to each receiver" if self.num_prefill_ranks > 1 else ""
        sent = "once" if self.times_sent == 1 else f"{self.times_sent} times"
        return (
            f"{self.component} heads {heads} of {name_groups(self.groups)}: on {senders}{chosen}; "
            f"on {receivers}, so sent {sent}"
        )


@dataclass(frozen=True, eq=False)
class PlanReport:
    """All pairs of ranks, and the failures of their proofs. ``origin``: where the shapes of the caches come from.

    ``uncounted`` says why the descriptors of per-layer layouts were not counted; empty where they were.
    """

    origin: str
    tokens: int
    prefill: Engine
    decode: Engine
    sources: tuple[Shard, ...]
    destinations: tuple[Shard, ...]
    requests: tuple[GroupBlocks, ...]
    selector: int
    pairs: tuple[PairReport, ...]
    failures: tuple[str, ...]
    uncounted: str
    link: Link | None

    @property
    def descriptors(self) -> int:
        """The number of descriptors of all pairs."""
        return sum(pair.summary.descriptors for pair in self.pairs)

    @property
    def bytes(self) -> int:
        """The bytes of all pairs."""
        return sum(pair.summary.bytes for pair in self.pairs)

    @property
    def bytes_per_token(self) -> float:
        """The bytes of all pairs, divided by the tokens of the request."""
        return self.bytes / self.tokens

    @property
    def per_layer_descriptors(self) -> int | None:
        """The number of descriptors of all pairs in per-layer layouts; None where they were not counted."""
        if self.uncounted:
            return None
        return sum(number for pair in self.pairs for number in pair.per_layer_groups.values())

    @property
    def seconds(self) -> float | None:
        """The predicted time of the busiest rank; None without a link."""
        return self._seconds([pair.summary.descriptors for pair in self.pairs])

    @property
    def per_layer_seconds(self) -> float | None:
        """The same in per-layer layouts; None also where their descriptors were not counted."""
        return None if self.uncounted else self._seconds([sum(pair.per_layer_groups.values()) for pair in self.pairs])

    def _seconds(self, descriptors: Sequence[int]) -> float | None:
        """Return the time of the busiest rank, given the descriptors of each pair: the sender submits them."""
        if self.link is None:
            return None
        busy: defaultdict[tuple[str, int], float] = defaultdict(float)
        for pair, number in zip(self.pairs, descriptors, strict=True):
            moving = pair.summary.bytes / self.link.bandwidth
            busy["prefill", pair.pair.assignment.source_index] += moving + number * self.link.seconds_per_descriptor
            busy["decode", pair.decode_rank] += moving
        return max(busy.values(), default=0.0)

    @cached_property
    def replicas(self) -> tuple[Replicas, ...]:
        """All heads, by the number of ranks that hold them."""
        found: dict[tuple[str, tuple[int, int, int]], dict[str, set[HeadRange]]] = {}
        for group in self.prefill.groups:
            for component, head, counts in self._held(group.name):
                found.setdefault((component, counts), {}).setdefault(group.name, set()).add(head)
        alike: dict[tuple[str, tuple[HeadRange, ...], tuple[int, int, int]], list[str]] = {}
        for (component, counts), groups in found.items():
            for name, heads in groups.items():
                alike.setdefault((component, canonical(list(heads)), counts), []).append(name)
        return tuple(
            Replicas(tuple(names), component, heads, *counts) for (component, heads, counts), names in alike.items()
        )

    def _held(self, name: str) -> Iterator[tuple[str, HeadRange, tuple[int, int, int]]]:
        """Yield for each component, stretch of heads and pair of stages of a group how many ranks hold and send it."""
        sides = [
            [group for shard in shards if (group := shard.group(name))] for shards in (self.sources, self.destinations)
        ]
        sent = [(plan.destination_group.layers & plan.source_group.layers, plan.heads) for plan in self._plans(name)]
        stages = itertools.product(*({group.layers for group in side} for side in sides))
        for first, second in ((first, second) for first, second in stages if first & second):
            layer = min(first & second)
            for component in (each.name for each in sides[0][0].components if not each.is_padding):
                held = [[group.component(component).heads for group in side if layer in group.layers] for side in sides]
                moved = [heads[component] for layers, heads in sent if layer in layers and component in heads]
                for head in cut_heads([heads for each in (*held, moved) for heads in each]):
                    counts = [sum(bool(common(heads, [head])) for heads in each) for each in (*held, moved)]
                    yield component, head, (counts[0], counts[1], counts[2])

    def _plans(self, name: str) -> list[GroupPlan]:
        return [plan for pair in self.pairs if (plan := pair.pair.groups.get(name))]

    @property
    def notes(self) -> list[str]:
        """A sentence about each value that the model changes."""
        found: dict[str, list[str]] = {}
        for engine in (self.prefill, self.decode):
            for note in engine.notes():
                found.setdefault(note, []).append(engine.name)
        changed = [f"{' and '.join(engines)}: {note}" for note, engines in found.items()]
        return changed + [self.uncounted] * bool(self.uncounted)

    @property
    def verified(self) -> bool:
        """Whether no proof failed."""
        return not self.failures

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "descriptors": self.descriptors,
            "bytes": self.bytes,
            "bytes_per_token": self.bytes_per_token,
            "per_layer": {
                "layouts": {engine.name: engine.layout.per_layer.value for engine in (self.prefill, self.decode)},
                "descriptors": self.per_layer_descriptors,
            },
            "predicted": None if self.link is None else self._predicted(self.link),
            "replicas": [each.as_json() for each in self.replicas],
            "verified": self.verified,
            "shapes": self.origin,
            "failures": list(self.failures),
            "notes": self.notes,
            "groups": [_group_json(*pair) for pair in zip(self.prefill.groups, self.requests, strict=True)],
            "engines": {engine.name: engine.as_json() for engine in (self.prefill, self.decode)},
            "pairs": [pair.as_json() for pair in self.pairs],
        }

    def _predicted(self, link: Link) -> dict[str, Any]:
        link_json = {"bandwidth": link.bandwidth, "seconds_per_descriptor": link.seconds_per_descriptor}
        return {**link_json, "seconds": self.seconds, "per_layer_seconds": self.per_layer_seconds}


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


def cut_heads(held: Iterable[Sequence[HeadRange]]) -> list[HeadRange]:
    """Return the longest ranges that lie wholly inside or outside each of the given sets of heads.

    >>> cut_heads([[HeadRange(0, 8)], [HeadRange(0, 4)], [HeadRange(2, 6)]])
    [0:2, 2:4, 4:6, 6:8]
    """
    distinct = {head for heads in held for head in heads}
    bounds = sorted({bound for head in distinct for bound in (head.start, head.end)})
    cut = itertools.starmap(HeadRange, itertools.pairwise(bounds))
    return [piece for piece in cut if any(head.start <= piece.start < head.end for head in distinct)]


def name_groups(names: Iterable[str]) -> str:
    """Return names of cache groups, numbered ones as ranges.

    >>> name_groups(["state-0", "state-1", "state-2", "full", "sliding-window-3"])
    'state-0 to state-2, full, sliding-window-3'
    """
    stretches: list[list[str]] = []
    for name in names:
        stem, dash, number = name.rpartition("-")
        follows = dash and number.isdecimal() and stretches and stretches[-1][-1] == f"{stem}-{int(number) - 1}"
        stretches[-1].append(name) if follows else stretches.append([name])
    return ", ".join(each[0] if len(each) == 1 else f"{each[0]} to {each[-1]}" for each in stretches)


def per_layer_layouts(report: PlanReport) -> str:
    """Return the per-layer layouts of both engines with which the plan is compared."""
    return " to ".join(dict.fromkeys(engine.layout.per_layer for engine in (report.prefill, report.decode)))


def spans(numbers: Iterable[str]) -> str:
    """Return the numbers of layers as ranges.

    >>> spans(["0", "1", "2", "5", "7", "8"])
    '0-2 5 7-8'
    """
    ranges: list[list[int]] = []
    for number in sorted(set(map(layer_of, numbers))):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return " ".join(f"{first}-{last}" if first != last else str(first) for first, last in ranges)


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


def describe_links() -> str:
    """Return the named links with their GB/s, the fastest last."""
    return ", ".join(f"{name} {bandwidth:g}" for name, bandwidth in LINKS.items())


def parse_link(bandwidth: float | None, per_descriptor: float | None, name: str | None = None) -> Link | None:
    """Return the link of a name or of ``bandwidth`` in GB/s, and of microseconds for each descriptor; None for neither.

    Raises :class:`SettingsError` for a name that is unknown or beside ``bandwidth``, and for microseconds alone.

    >>> parse_link(25.0, 2.0) == parse_link(None, 2.0, "200g")
    True
    """
    if name is not None and bandwidth is not None:
        what = f"--link is {name}, --bandwidth is {bandwidth:g}: both say how fast the link is."
        raise SettingsError(Reason.INVALID_SETTING, what, "Give one of them.")
    if name is not None and name not in LINKS:
        raise SettingsError(Reason.INVALID_SETTING, f"--link: {name!r} is unknown.", did_you_mean(name, LINKS))
    if name is not None:
        bandwidth = LINKS[name]
    if bandwidth is not None:
        return Link(bandwidth * 1e9, (per_descriptor or 0.0) / 1e6)
    if per_descriptor is not None:
        what = f"--per-descriptor is {per_descriptor:g}, --bandwidth is not given: no time can be predicted."
        raise SettingsError(Reason.INVALID_SETTING, what, "Give --bandwidth or --link too.")
    return None


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
    link: Link | None = None,
    announce: Announce = lambda text: None,
) -> PlanReport:
    """Plan one request between two engines, check the lists as transports do, and prove them.

    The same request between engines with per-layer layouts is planned too, to count its descriptors.

    ``announce`` is called with each step: the proof of a million tokens takes many seconds.
    """
    engines = engine_of("prefill", prefill, caches), engine_of("decode", decode, caches)
    requests, num_blocks = make_requests(engines[0], engines[1], tokens, blocks, seed)
    bases = RANK_SPACING, RANK_SPACING * (prefill.num_ranks + 1)
    sources, destinations = _all_shards(engines, num_blocks, bases)
    apart = tuple(replace(engine, layout=engine.layout.per_layer) for engine in engines)
    apart_sources, apart_destinations = _all_shards(apart, num_blocks, bases)
    pairs: list[PairReport] = []
    failures: list[str] = []
    uncounted = ""
    for rank, destination in enumerate(destinations):
        requested = [blocks for blocks in requests if destination.group(blocks.group)]
        of_rank = f"decode rank {rank} of {len(destinations)}"
        announce(f"{of_rank}: planning")
        received: list[PairReport] = []
        for pair in Planner(sources, destination).plans(seed):
            announce(f"{of_rank}: the list from prefill rank {pair.assignment.source_index} of {len(sources)}")
            received.append(_pair_report(pair, rank, requested, verify=verify))
        announce(f"{of_rank}: all lists together")
        failures += [pair.failure for pair in received]
        if verify:
            lists = [(pair.pair.source, pair.descriptors) for pair in received]
            proof = partial(verify_destination, lists, destination, requested)
            failures.append(_failure(f"decode {destination.rank_name}", proof))
        announce(f"{of_rank}: the lists of per-layer layouts")
        try:
            counted = [_count(pair, requested) for pair in Planner(apart_sources, apart_destinations[rank]).plans(seed)]
        except PlanError as error:
            uncounted = f"The descriptors of per-layer layouts were not counted: {error.message}"
            pairs += received
        else:
            pairs += [
                replace(pair, per_layer=plan, per_layer_groups=groups)
                for pair, (plan, groups) in zip(received, counted, strict=True)
            ]
    return PlanReport(
        caches.origin,
        tokens,
        *engines,
        sources,
        destinations,
        tuple(requests),
        seed,
        tuple(pairs),
        tuple(filter(None, failures)),
        uncounted,
        link,
    )


def _all_shards(
    engines: Sequence[Engine], num_blocks: Sequence[int], bases: Sequence[int]
) -> tuple[tuple[Shard, ...], ...]:
    """Return the shards of both engines."""
    each = zip(engines, num_blocks, bases, strict=True)
    return tuple(tuple(engine.shards(number, base)) for engine, number, base in each)


def _count(pair: PairPlan, requested: Sequence[GroupBlocks]) -> tuple[PairPlan, dict[str, int]]:
    return pair, {name: len(rows) for name, rows in pair.lower_groups(requested).items()}


def _pair_report(pair: PairPlan, decode_rank: int, requested: Sequence[GroupBlocks], *, verify: bool) -> PairReport:
    lists = pair.lower_groups(requested)
    descriptors = np.concatenate([NOTHING, *lists.values()])
    regions = RegionTable(pair.source.regions), RegionTable(pair.destination.regions)
    check_descriptors(descriptors, Direction.WRITE, *regions)
    groups = tuple((name, Summary.of(rows)) for name, rows in lists.items())
    proof = partial(verify_pair, descriptors, pair.source, pair.destination, requested, pair.heads)
    failure = _failure(f"{pair.source.rank_name} to {pair.destination.rank_name}", proof) if verify else ""
    return PairReport(pair, None, {}, decode_rank, descriptors, Summary.of(descriptors), groups, failure)


def _failure(ranks: str, proof: Callable[[], object]) -> str:
    """Return the error of a proof after the names of its ranks; empty where the proof succeeds."""
    try:
        proof()
    except VerificationError as error:
        return f"{ranks}: {error}"
    return ""


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
