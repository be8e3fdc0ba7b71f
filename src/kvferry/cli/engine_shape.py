"""One engine of a plan: its parallel sizes, its layout, and the memory of its ranks at made-up addresses."""

import difflib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.errors import Reason, SettingsError
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import Shard
from kvferry.models.groups import (
    LayerGroup,
    form_groups,
    page_bytes,
    possible_layout,
    resolve_block_size,
    split_layers,
)
from kvferry.models.layer_caches import LayerCache
from kvferry.models.shards import RankMemory, model_shard

RANK_SPACING = 1 << 44
"""Distance of the ranks' made-up base addresses, far above any cache."""
MAX_RANKS = 1024


@dataclass(frozen=True)
class EngineShape:
    """How one engine keeps its cache. ``stages`` are the layers of each pipeline stage; vLLM's split where empty."""

    tp: int
    layout: NamedLayout
    block_size: int
    pp: int = 1
    stages: tuple[int, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Ranks, all pipeline stages together."""
        return self.tp * self.pp


@dataclass(frozen=True)
class Engine:
    """An engine with a model: its groups, and what the model made of the wanted block size and layout."""

    name: str
    wanted: EngineShape
    layout: NamedLayout
    block_size: int
    groups: tuple[LayerGroup, ...]

    def notes(self) -> list[str]:
        """Return in sentences what the model changed of what was wanted."""
        said = []
        if self.layout is not self.wanted.layout:
            said.append(
                f"{self.name}: layout {self.wanted.layout} is refused: pages of states and of attention differ in "
                f"shape, and each must lie in one piece. Planned with {self.layout}, the nearest that can hold them."
            )
        if self.block_size != self.wanted.block_size:
            page = page_bytes(self.groups, self.block_size, self.wanted.tp)
            said.append(
                f"{self.name}: attention blocks have {self.block_size} tokens instead of {self.wanted.block_size}, so "
                f"that a page, {page} bytes, holds a state at TP {self.wanted.tp}."
            )
        return said

    def shards(self, num_blocks: int, base_address: int) -> list[Shard]:
        """Return the shards of all ranks, stage by stage, at made-up addresses."""
        wanted, num_layers = self.wanted, sum(len(group.layers) for group in self.groups)
        stages = wanted.stages or split_layers(num_layers, wanted.pp)
        if sum(stages) != num_layers:
            what = f"{self.name}: layers={'+'.join(map(str, stages))} are {sum(stages)}, the model has {num_layers}."
            raise SettingsError(Reason.INVALID_SETTING, what, "Name the layers of every stage.")
        ends = [0, *itertools.accumulate(stages)]
        held = [frozenset(map(str, range(*bounds))) for bounds in itertools.pairwise(ends)]
        memory = {"layout": self.layout, "block_size": self.block_size, "num_blocks": num_blocks}
        ranks = itertools.product(enumerate(held), range(wanted.tp))
        return [
            model_shard(
                self.groups,
                layers,
                RankMemory(
                    **memory,  # type: ignore[arg-type]
                    tp_rank=tp_rank,
                    tp_size=wanted.tp,
                    pp_rank=stage,
                    pp_size=wanted.pp,
                    base_address=base_address + index * RANK_SPACING,
                ),
            )
            for index, ((stage, layers), tp_rank) in enumerate(ranks)
        ]


def engine_of(name: str, shape: EngineShape, caches: Sequence[LayerCache]) -> Engine:
    """Return the engine that holds a model whose layers, named by their numbers, keep this.

    >>> from kvferry.models.layer_caches import AttentionCache
    >>> caches = [AttentionCache(num_kv_heads=2, head_size=64, itemsize=2)] * 4
    >>> engine = engine_of("prefill", EngineShape(1, NamedLayout.BHLNC, 16, pp=2), caches)
    >>> [sorted(shard.groups[0].layers) for shard in engine.shards(num_blocks=8, base_address=0)]
    [['0', '1'], ['2', '3']]
    """
    groups = form_groups({str(layer): cache for layer, cache in enumerate(caches)})
    block_size = resolve_block_size(groups, shape.block_size, shape.tp)
    return Engine(name, shape, possible_layout(groups, shape.layout), block_size, groups)


def parse_engine(option: str, text: str, block_size: int) -> EngineShape:
    """Return the engine that ``tp=2,pp=2,layout=BHLNC,block_size=32,layers=20+16`` describes.

    >>> parse_engine("--prefill", "tp=2,layout=bhlnc", 16)
    EngineShape(tp=2, layout=<NamedLayout.BHLNC: 'BHLNC'>, block_size=16, pp=1, stages=())
    >>> parse_engine("--prefill", "layers=20+16", 16).pp
    2
    >>> parse_engine("--prefill", "pt=2", 16)
    Traceback (most recent call last):
        ...
    kvferry.errors.SettingsError: --prefill: 'pt' is unknown. Did you mean 'tp'? [unknown-setting]
    """
    values = {"tp": "1", "layout": "BHLNC", "block_size": str(block_size), "pp": "", "layers": ""}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        key = "block_size" if key == "block-size" else key
        if key not in values:
            nearest = difflib.get_close_matches(key, values, n=1, cutoff=0.0)[0]
            what = f"{option}: {key!r} is unknown."
            raise SettingsError(Reason.UNKNOWN_SETTING, what, f"Did you mean {nearest!r}?")
        if not equals or not value:
            raise SettingsError(Reason.INVALID_SETTING, f"{option}: {key!r} has no value.", f"Write {key}=VALUE.")
        values[key] = value
    layers = values["layers"]
    stages = tuple(_positive(option, "layers", part) for part in layers.split("+")) if layers else ()
    pp = _positive(option, "pp", values["pp"] or str(len(stages) or 1))
    if stages and len(stages) != pp:
        what = f"{option}: layers={layers} are {len(stages)} stages, pp is {pp}."
        raise SettingsError(Reason.INVALID_SETTING, what, "Name the layers of every stage.")
    tp, size = (_positive(option, key, values[key]) for key in ("tp", "block_size"))
    if tp * pp > MAX_RANKS:
        what = f"{option}: {tp} times {pp} ranks."
        raise SettingsError(Reason.INVALID_SETTING, what, f"At most {MAX_RANKS} are planned.")
    return EngineShape(tp, NamedLayout.parse(values["layout"]), size, pp, stages)


def _positive(option: str, key: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal() and len(value) < 10) or int(value) == 0:
        what = f"{option}: {key} is {value!r}."
        raise SettingsError(Reason.INVALID_SETTING, what, "Use a whole number above zero.")
    return int(value)
