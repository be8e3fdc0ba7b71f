"""Messages between the two roles of ``KVFerryOffloadConnector``: orders once per engine step, and reports."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Literal

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvferry.errors import Reason
from kvferry.execution.executor import JobResult
from kvferry.integrations.vllm.worker.records import BYTES, SECONDS, Metric, ObservationMetrics, Observations
from kvferry.plan.match import GroupBlocks
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


HOST_MEMORY = "host_memory"
TIERS = (HOST_MEMORY, "remote_pool", "local_disk")
"""Names of tiers in labels of metrics and in events."""
TIER_FAILURES = (Reason.TIER_FAILED, Reason.CHECKSUM_MISMATCH, Reason.TRANSFER_FAILED, Reason.DEADLINE_EXCEEDED)
"""Reasons of failures that may come once."""


class ComputedCause(StrEnum):
    """Why an engine computes what a tier should have brought: the load of a rank failed or could not be ordered; a
    lower tier did not bring the blocks in time, or had lost them.
    """

    LOAD_FAILED = "load-failed"
    NOT_BROUGHT = "not-brought"


class OffloadStatistics(Observations):
    """Of ranks: copies between engine and host memory. Of the scheduler: everything else."""

    HISTOGRAMS: ClassVar[Mapping[str, Metric]] = {
        "copy_seconds": Metric(
            "kvferry:offload_copy_seconds", "Seconds in which a rank copied a store or load.", ("direction",), SECONDS
        ),
        "copy_wait_seconds": Metric(
            "kvferry:offload_copy_wait_seconds",
            "Seconds from the order of a store or load to its end on a rank.",
            ("direction",),
            SECONDS,
        ),
        "copy_bytes": Metric(
            "kvferry:offload_copy_bytes", "Bytes of a store or load on a rank.", ("direction",), BYTES
        ),
        "load_seconds": Metric(
            "kvferry:offload_load_seconds", "Seconds from a request's order of a load to its end.", buckets=SECONDS
        ),
        "tier_seconds": Metric(
            "kvferry:offload_tier_seconds",
            "Seconds of a copy between host memory and a tier.",
            ("tier", "direction"),
            SECONDS,
        ),
        "ask_seconds": Metric(
            "kvferry:offload_ask_seconds",
            "Seconds in which a request waited for lower tiers before its load.",
            buckets=SECONDS,
        ),
    }
    COUNTERS: ClassVar[Mapping[str, Metric]] = {
        "hit_tokens": Metric("kvferry:offload_hit_tokens", "Tokens of ordered loads, by where they lay.", ("tier",)),
        "hit_bytes": Metric("kvferry:offload_hit_bytes", "Bytes of ordered loads, by where they lay.", ("tier",)),
        "tier_bytes": Metric(
            "kvferry:offload_tier_bytes", "Bytes copied between host memory and a tier.", ("tier", "direction")
        ),
        "stored_blocks": Metric("kvferry:offload_stored_blocks", "Blocks that became visible in a tier.", ("tier",)),
        "refused_blocks": Metric(
            "kvferry:offload_refused_blocks",
            "Blocks that a tier did not store, though nothing has failed.",
            ("tier", "reason"),
            known=tuple((tier, Reason.TIER_FULL.value) for tier in TIERS),
        ),
        "evicted_blocks": Metric("kvferry:offload_evicted_blocks", "Blocks that a tier gave up for others.", ("tier",)),
        "failures": Metric(
            "kvferry:offload_failures",
            "Blocks, or a rank's copies, that failed, by tier and reason.",
            ("tier", "reason"),
            known=tuple((tier, reason.value) for tier in TIERS for reason in TIER_FAILURES),
        ),
        "decisions": Metric(
            "kvferry:offload_decisions", "Requests that load, wait or compute, and why.", ("choice", "because")
        ),
        "computed_tokens": Metric(
            "kvferry:offload_computed_tokens",
            "Tokens that a tier should have brought and this engine computed, by cause.",
            ("cause",),
            known=tuple((cause.value,) for cause in ComputedCause),
        ),
    }
    GAUGES: ClassVar[Mapping[str, Metric]] = {
        "tier_up": Metric(
            "kvferry:offload_tier_up", "1 where the engine uses a tier, 0 where it leaves the tier alone.", ("tier",)
        ),
        "tier_used_bytes": Metric("kvferry:offload_tier_used_bytes", "Bytes that a tier occupies.", ("tier",)),
        "tier_capacity_bytes": Metric(
            "kvferry:offload_tier_capacity_bytes", "The most bytes that a tier may occupy.", ("tier",)
        ),
    }

    def record(self, result: JobResult, direction: Literal["load", "store"]) -> None:
        """Add a rank's copy."""
        if result.error is not None:
            self.count("failures", 1, HOST_MEMORY, result.error.reason.value)
            return
        self.observe("copy_seconds", result.transfer_seconds, direction)
        self.observe("copy_wait_seconds", result.wait_seconds, direction)
        self.observe("copy_bytes", result.num_bytes, direction)

    def reduce(self) -> dict[str, int | float]:
        """Return the figures for the engine's periodic log line."""
        data = self.data
        loads = data["load_seconds"]
        figures: dict[str, int | float] = {
            "offload loads": len(loads),
            **{f"{tier} hit tokens": number for tier, number in sorted(data["hit_tokens"].items())},
            **{f"{tier} stored blocks": number for tier, number in sorted(data["stored_blocks"].items())},
            **{f"{tier} evicted blocks": number for tier, number in sorted(data["evicted_blocks"].items())},
            "refused blocks": sum(data["refused_blocks"].values()),
            "failed": sum(data["failures"].values()),
            **{f"decided {key.replace(',', ' ')}": number for key, number in sorted(data["decisions"].items())},
        }
        if loads:
            figures["median load ms"] = round(float(np.median(loads)) * 1e3, 3)
        for direction in ("load", "store"):
            seconds = sum(data["copy_seconds"].get(direction, ()))
            if num_bytes := sum(data["copy_bytes"].get(direction, ())):
                figures[f"{direction} GB/s of a rank"] = round(num_bytes / 1e9 / max(seconds, 1e-9), 3)
        return figures


class OffloadMetrics(ObservationMetrics):
    """The same observations for Prometheus."""

    OBSERVATIONS = OffloadStatistics
