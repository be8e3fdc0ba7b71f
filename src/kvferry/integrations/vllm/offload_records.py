"""What both roles of the offload connector count and time: hits, bytes, seconds and waits by tier, and decisions.

vLLM adds the scheduler's statistics to those of the ranks, so both roles have this one class.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from kvferry.execution.job import JobResult
from kvferry.integrations.vllm.observations import BYTES, SECONDS, Metric, ObservationMetrics, Observations
from kvferry.tiers.load_rule import Decision


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
        "refused_blocks": Metric("kvferry:offload_refused_blocks", "Blocks that were not stored.", ("reason",)),
        "evicted_blocks": Metric("kvferry:offload_evicted_blocks", "Blocks that a tier gave up for others.", ("tier",)),
        "failures": Metric(
            "kvferry:offload_failures",
            "Blocks, or a rank's copies, that failed, by tier and reason.",
            ("tier", "reason"),
        ),
        "decisions": Metric(
            "kvferry:offload_decisions", "Requests that load, wait or compute, and why.", ("choice", "because")
        ),
    }

    def record(self, result: JobResult, direction: Literal["load", "store"]) -> None:
        """Add a rank's copy."""
        if result.error is not None:
            self.count("failures", 1, "host_memory", result.error.reason.value)
            return
        self.observe("copy_seconds", result.transfer_seconds, direction)
        self.observe("copy_wait_seconds", result.wait_seconds, direction)
        self.observe("copy_bytes", result.num_bytes, direction)

    def record_decision(self, decision: Decision) -> None:
        """Add what was decided for a request."""
        self.count("decisions", 1, decision.choice.value, decision.because.value)

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


def difference(now: Mapping[Any, int], before: Mapping[Any, int]) -> dict[Any, int]:
    """Return what counters have gained, without those that have not changed.

    >>> difference({"a": 3, "b": 1}, {"a": 1, "b": 1})
    {'a': 2}
    """
    return {key: number - before.get(key, 0) for key, number in now.items() if number != before.get(key, 0)}
