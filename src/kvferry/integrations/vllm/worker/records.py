"""A worker's records of its jobs: metrics for vLLM's log line and Prometheus, and a log with a line for each job."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvferry.execution.job import JobResult
from kvferry.integrations.vllm.step import LoadOrder
from kvferry.layout.named_layouts import NamedLayout

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SECONDS = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0]
_BYTES = [float(1 << shift) for shift in range(12, 38, 2)]
_COUNTS = [1.0, 4, 16, 64, 256, 1024, 4096, 16384, 65536]
_HISTOGRAMS = {
    "transfer_seconds": ("kvferry:transfer_seconds", "Seconds from the first to the last byte of a load.", _SECONDS),
    "wait_seconds": ("kvferry:wait_seconds", "Seconds from a load's order to its end on a rank.", _SECONDS),
    "bytes": ("kvferry:transfer_bytes", "Bytes of a load on a rank.", _BYTES),
    "descriptors": ("kvferry:transfer_descriptors", "Descriptors of a load on a rank.", _COUNTS),
}


class Statistics(KVConnectorStats):
    """Lists of observations by name, and failures by reason."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or {**{name: [] for name in _HISTOGRAMS}, "failures": {}})

    def record(self, result: JobResult) -> None:
        """Add one load."""
        if result.error is not None:
            reason = result.error.reason.value
            self.data["failures"][reason] = self.data["failures"].get(reason, 0) + 1
            return
        values = (result.transfer_seconds, result.wait_seconds, result.num_bytes, result.num_descriptors)
        for name, value in zip(_HISTOGRAMS, values, strict=True):
            self.data[name].append(value)

    def reset(self) -> None:
        """Forget all observations."""
        self.data = Statistics().data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another rank's or interval's observations to this one's."""
        for name in _HISTOGRAMS:
            self.data[name].extend(other.data[name])
        for reason, number in other.data["failures"].items():
            self.data["failures"][reason] = self.data["failures"].get(reason, 0) + number
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the figures for the engine's periodic log line."""
        failures = sum(self.data["failures"].values())
        loads = len(self.data["bytes"])
        if not loads:
            return {"loads": 0, "failed": failures}
        seconds, total = np.asarray(self.data["transfer_seconds"]), float(np.sum(self.data["bytes"]))
        return {
            "loads": loads,
            "failed": failures,
            "median transfer ms": round(float(np.median(seconds)) * 1e3, 3),
            "median wait ms": round(float(np.median(self.data["wait_seconds"])) * 1e3, 3),
            "median descriptors": float(np.median(self.data["descriptors"])),
            "MB": round(total / 1e6, 3),
            "GB/s": round(total / 1e9 / max(float(seconds.sum()), 1e-9), 3),
        }

    def is_empty(self) -> bool:
        """Return whether nothing was observed."""
        return not self.data["bytes"] and not self.data["failures"]


class PrometheusMetrics(KVConnectorPromMetrics):
    """The same observations as Prometheus histograms and a counter of failures by reason."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        histogram: Any = self._histogram_cls
        counter: Any = self._counter_cls
        self._histograms: dict[str, dict[int, Any]] = {
            key: create_metric_per_engine(
                histogram(name=name, documentation=text, buckets=buckets, labelnames=labelnames), per_engine_labelvalues
            )
            for key, (name, text, buckets) in _HISTOGRAMS.items()
        }
        self._failures: Any = counter(
            name="kvferry:failed_loads",
            documentation="Loads that ended without a commit on a rank, by reason.",
            labelnames=[*labelnames, "reason"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one interval's observations."""
        for name, histograms in self._histograms.items():
            for value in transfer_stats_data[name]:
                histograms[engine_idx].observe(value)
        for reason, number in transfer_stats_data["failures"].items():
            self._failures.labels(*self.per_engine_labelvalues[engine_idx], reason).inc(number)


class TransferLog:
    """Appends to ``<path>.rank<rank>``; an empty path logs nothing.

    Ranks are counted over the pipeline's stages, those of one stage by their tensor-parallel rank.
    """

    def __init__(self, path: str, rank: int, layout: NamedLayout) -> None:
        self._file: TextIO | None = open(f"{path}.rank{rank}", "a", buffering=1) if path else None  # noqa: SIM115
        self._rank = rank
        self._layout = layout

    def write(self, order: LoadOrder, result: JobResult) -> None:
        """Append one load."""
        hold = order.hold
        line = {
            "request_id": order.request_id,
            "remote_request_id": None if hold is None else hold.handle.request_id,
            "remote_engine_id": None if hold is None else hold.engine_id,
            "num_tokens": order.num_tokens,
            "staged_bytes": result.num_staged_bytes,
            "sources": result.num_sources,
            "wait_seconds": result.wait_seconds,
        }
        self._append(line | self._outcome(result))

    def write_push(self, result: JobResult) -> None:
        """Append one push of this rank to one destination rank."""
        self._append({"push": result.job_id} | self._outcome(result))

    def write_step(self, step: Mapping[str, Any]) -> None:
        """Append one step of this rank that has computed pushed prompts."""
        self._append(step)

    def close(self) -> None:
        """Close the file; twice is fine."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _outcome(self, result: JobResult) -> dict[str, Any]:
        outcome = {
            "bytes": result.num_bytes,
            "descriptors": result.num_descriptors,
            "transport": result.transport,
            "layout": self._layout.value,
            "transfer_seconds": result.transfer_seconds,
            "error": None if result.error is None else result.error.reason.value,
            "message": None if result.error is None else str(result.error),
        }
        return outcome if result.events is None else {**outcome, "events": result.events}

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"rank": self._rank, **line}) + "\n")
