"""Messages between the two roles of ``KVFerryOffloadConnector``: orders once per engine step, and reports."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvferry.plan.request import GroupBlocks
from kvferry.tiers.slab_memory import SlabHandle


@dataclass(frozen=True, slots=True)
class SlabOrder:
    """Map the slab and prove the copies to it and from it.

    ``ranks`` are the encoded shards of all ranks, by pipeline stage and then tensor-parallel rank. Every process makes
    the slab's shard from them, ``num_blocks`` of each group and ``engine_blocks``, at the address of its own mapping.
    """

    handle: SlabHandle
    ranks: tuple[bytes, ...]
    num_blocks: Mapping[str, int]
    engine_blocks: int


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """Copy blocks of the engine, the sources, to blocks of the slab, once the device has done this step's writes."""

    job_id: int
    blocks: tuple[GroupBlocks, ...]


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Copy blocks of the slab, the sources, to blocks of the engine that a request waits for.

    A load that ``is_refused`` copies nothing: ranks report the request as failed, which waits for a load by now.
    """

    request_id: str
    job_id: int
    blocks: tuple[GroupBlocks, ...]
    is_refused: bool = False


@dataclass
class OffloadStep(KVConnectorMetadata):
    """Orders of one step. ``computes`` is false for a step that computes no token.

    ``wait_seconds``: how long the step waits where nothing but the copies of lower tiers is under way; else 0. With
    ``unmaps`` a rank has refused the slab: nothing will be offloaded, and all ranks unmap it.
    """

    computes: bool = True
    wait_seconds: float = 0.0
    slab: SlabOrder | None = None
    unmaps: bool = False
    stores: list[StoreOrder] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)


@dataclass
class RankReport(KVConnectorWorkerMetadata):
    """What ranks report after a step; vLLM aggregates the reports of all ranks of a step into one.

    ``shards`` are encoded, by pipeline stage and tensor-parallel rank, and come once. ``num_ready`` ranks have just
    mapped the slab and proved their copies; a rank that cannot says why in ``refused``, and then nothing is offloaded.
    ``stored`` counts, for each store, the ranks that have copied their part; ``failed`` those whose part did not land.
    """

    shards: dict[tuple[int, int], bytes] = field(default_factory=dict)
    num_ready: int = 0
    refused: str = ""
    stored: Counter[int] = field(default_factory=Counter)
    failed: Counter[int] = field(default_factory=Counter)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "RankReport":
        """Return the report of the ranks of both."""
        assert isinstance(other, RankReport)
        return RankReport(
            shards=self.shards | other.shards,
            num_ready=self.num_ready + other.num_ready,
            refused=self.refused or other.refused,
            stored=self.stored + other.stored,
            failed=self.failed + other.failed,
        )
