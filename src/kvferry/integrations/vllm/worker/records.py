"""A worker's records of its jobs: metrics for vLLM's log line and Prometheus, a log with a line for each job, and
spans of loads for OpenTelemetry.
"""

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from io import RawIOBase
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.tracing import extract_trace_context, instrument_manual

from kvferry.errors import Reason, helps_to_repeat
from kvferry.execution.executor import JobResult
from kvferry.handoff.holds import UNRELEASED
from kvferry.integrations.vllm.failed_loads import FAILED, MAX_FAILED
from kvferry.integrations.vllm.step import PromptLoad
from kvferry.layout.named_layouts import NamedLayout
from kvferry.peer_log import PeerLog
from kvferry.transport.registry import FACTORIES

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = PeerLog(logging.getLogger(__name__))
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
WAIT_SECONDS = (*SECONDS, 30.0, 60.0, 120.0)
"""Up to the default of ``load_timeout_seconds``."""
BYTES = tuple(float(1 << shift) for shift in range(12, 38, 2))
COUNTS = (1.0, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
PASSING = tuple((reason.value,) for reason in Reason if helps_to_repeat(reason))
"""Reasons of failures that may come once; others come with each request."""
MESSAGE_REFUSALS = tuple(
    (reason.value,)
    for reason in (
        Reason.MALFORMED_MESSAGE,
        Reason.PERMISSION_DENIED,
        Reason.PROTOCOL_MISMATCH,
        Reason.INVALID_REQUEST,
        Reason.UNSUPPORTED,
    )
)


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of Prometheus: its name and text, the names of its labels, and the bounds of a histogram's buckets.

    A counter counts from 0 for the labels' values in ``known``: Prometheus sees no increase in a series that begins
    with 1, so no alert could tell of the first failure.
    """

    name: str
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    known: tuple[tuple[str, ...], ...] = ()


class Observations(KVConnectorStats):
    """Observed values and counts by name; a subclass declares the names in ``HISTOGRAMS``, ``COUNTERS`` and ``GAUGES``.

    ``data`` has a list for a histogram and a number for a counter; with labels it has one for each, under the labels'
    values joined by commas. It has a gauge's values under such keys too, from the first one on.
    """

    HISTOGRAMS: ClassVar[Mapping[str, Metric]] = {}
    COUNTERS: ClassVar[Mapping[str, Metric]] = {}
    GAUGES: ClassVar[Mapping[str, Metric]] = {}

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or self._nothing())

    @classmethod
    def all_metrics(cls) -> dict[str, Metric]:
        """Return every metric by its name in ``data``."""
        return {**cls.HISTOGRAMS, **cls.COUNTERS, **cls.GAUGES}

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Add one value to a histogram."""
        if self.HISTOGRAMS[name].labels:
            self.data[name].setdefault(_joined(self.HISTOGRAMS[name], labels), []).append(value)
        else:
            self.data[name].append(value)

    def count(self, name: str, number: int = 1, *labels: str) -> None:
        """Add to a counter; to add 0 changes nothing."""
        if not number:
            return
        if self.COUNTERS[name].labels:
            key = _joined(self.COUNTERS[name], labels)
            self.data[name][key] = self.data[name].get(key, 0) + number
        else:
            self.data[name] += number

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge, which keeps its value until it is set again."""
        self.data[name][_joined(self.GAUGES[name], labels)] = value

    def reset(self) -> None:
        """Forget all observations."""
        self.data = self._nothing()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another rank's or interval's observations to this one's."""
        for name, metric in self.HISTOGRAMS.items():
            if not metric.labels:
                self.data[name].extend(other.data[name])
                continue
            for key, values in other.data[name].items():
                self.data[name].setdefault(key, []).extend(values)
        for name, metric in self.COUNTERS.items():
            if not metric.labels:
                self.data[name] += other.data[name]
                continue
            for key, number in other.data[name].items():
                self.data[name][key] = self.data[name].get(key, 0) + number
        for name in self.GAUGES:
            self.data[name].update(other.data[name])
        return self

    def is_empty(self) -> bool:
        """Return whether nothing was observed."""
        return not any(self.data.values())

    def _nothing(self) -> dict[str, Any]:
        histograms: dict[str, Any] = {name: {} if metric.labels else [] for name, metric in self.HISTOGRAMS.items()}
        counters: dict[str, Any] = {name: {} if metric.labels else 0 for name, metric in self.COUNTERS.items()}
        return {**histograms, **counters, **{name: {} for name in self.GAUGES}}


class ObservationMetrics(KVConnectorPromMetrics):
    """The same observations as Prometheus histograms, counters and gauges, for each engine of a front end."""

    OBSERVATIONS: ClassVar[type[Observations]]

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
        gauge: Any = self._gauge_cls
        self._metrics: dict[str, Any] = {}
        for name, metric in self.OBSERVATIONS.HISTOGRAMS.items():
            labels = [*labelnames, *metric.labels]
            self._metrics[name] = histogram(
                name=metric.name, documentation=metric.text, buckets=list(metric.buckets), labelnames=labels
            )
        for name, metric in self.OBSERVATIONS.COUNTERS.items():
            labels = [*labelnames, *metric.labels]
            self._metrics[name] = counter(name=metric.name, documentation=metric.text, labelnames=labels)
        for name, metric in self.OBSERVATIONS.GAUGES.items():
            labels = [*labelnames, *metric.labels]
            self._metrics[name] = gauge(
                name=metric.name, documentation=metric.text, labelnames=labels, multiprocess_mode="mostrecent"
            )
        for name, metric in self.OBSERVATIONS.all_metrics().items():
            for values in metric.known if metric.labels else [()]:  # seen before the first observation, as 0
                for engine in per_engine_labelvalues.values():
                    self._metrics[name].labels(*engine, *values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one interval's observations."""
        engine = self.per_engine_labelvalues[engine_idx]
        for name, metric in self.OBSERVATIONS.HISTOGRAMS.items():
            observed = transfer_stats_data[name]
            for labels, values in observed.items() if metric.labels else [("", observed)]:
                child = self._metrics[name].labels(*engine, *_separate(metric, labels))
                for value in values:
                    child.observe(value)
        for name, metric in self.OBSERVATIONS.COUNTERS.items():
            counted = transfer_stats_data[name]
            for labels, number in counted.items() if metric.labels else [("", counted)]:
                self._metrics[name].labels(*engine, *_separate(metric, labels)).inc(number)
        for name, metric in self.OBSERVATIONS.GAUGES.items():
            for labels, value in transfer_stats_data[name].items():
                self._metrics[name].labels(*engine, *_separate(metric, labels)).set(value)


def _joined(metric: Metric, labels: tuple[str, ...]) -> str:
    assert len(labels) == len(metric.labels), f"{metric.name} has the labels {metric.labels}, not {labels}"
    return ",".join(labels)


def _separate(metric: Metric, labels: str) -> list[str]:
    return labels.split(",") if metric.labels else []


def _transport_label(named: str) -> str:
    """Return the transport that moved a load, "none" where nothing had to move, else "several".

    Peers name the transport: another name would be a label, and so a series, of their choice.
    """
    return named if named in FACTORIES else "several" if named else "none"


class Cause(StrEnum):
    """Why an engine computes what a load should have brought: the load failed; the hold had ended before the load was
    ordered; the adapter's weights are not known, or are others; the request to a decode engine names no prefill engine.
    """

    LOAD_FAILED = "load-failed"
    HOLD_ENDED = "hold-ended"
    ADAPTER = "adapter"
    NO_PARAMETERS = "no-parameters"


class Statistics(Observations):
    """Of ranks: loads and writes, and the reasons of failed requests by the request's id. Of the scheduler: readiness,
    holds, quarantine and computed tokens. Of both: refused messages.
    """

    HISTOGRAMS: ClassVar[Mapping[str, Metric]] = {
        "transfer_seconds": Metric(
            "kvferry:transfer_seconds", "Seconds from the first to the last byte of a load.", buckets=SECONDS
        ),
        "wait_seconds": Metric(
            "kvferry:wait_seconds", "Seconds from a load's order to its end on a rank.", buckets=WAIT_SECONDS
        ),
        "bytes": Metric("kvferry:transfer_bytes", "Bytes of a load on a rank.", buckets=BYTES),
        "descriptors": Metric("kvferry:transfer_descriptors", "Descriptors of a load on a rank.", buckets=COUNTS),
        "compared_bytes": Metric(
            "kvferry:compared_bytes", "Bytes of a load on a rank whose digests were compared.", buckets=BYTES
        ),
        "compare_seconds": Metric(
            "kvferry:compare_seconds", "Seconds that a rank has compared digests of a load.", buckets=SECONDS
        ),
        "phase_seconds": Metric(
            "kvferry:phase_seconds",
            "Seconds of each phase of a load on a rank, by what moved its bytes.",
            ("phase", "transport"),
            WAIT_SECONDS,
        ),
    }
    COUNTERS: ClassVar[Mapping[str, Metric]] = {
        "failures": Metric(
            "kvferry:failed_loads",
            "Loads that ended without a commit on a rank, by reason.",
            ("reason",),
            known=PASSING,
        ),
        "loads": Metric("kvferry:loads", "Loads that were committed on a rank."),
        "fences": Metric(
            "kvferry:fences", "Times that a rank closed its memory to a lost peer and registered the memory anew."
        ),
        "failed_writes": Metric(
            "kvferry:failed_writes",
            "Writes of a rank into blocks of a decode rank that failed, by reason.",
            ("reason",),
            known=PASSING,
        ),
        "unheld": Metric("kvferry:unheld_prompts", "Prompts for a decode engine that this engine could not hold."),
        "expired_holds": Metric(
            "kvferry:expired_holds",
            "Held prompts that no decode engine has released, by how the hold ended.",
            ("ending",),
            known=tuple((ending.value,) for ending in UNRELEASED),
        ),
        "quarantined_blocks": Metric(
            "kvferry:quarantined_blocks", "Blocks that went into quarantine: a peer might still have written into them."
        ),
        "computed_tokens": Metric(
            "kvferry:computed_tokens",
            "Prompt tokens that a load should have brought and this engine computed, by cause.",
            ("cause",),
            known=tuple((cause.value,) for cause in Cause),
        ),
        "refused_messages": Metric(
            "kvferry:refused_messages",
            "Messages and connections of peers that a port of this engine has refused, by reason.",
            ("reason",),
            known=MESSAGE_REFUSALS,
        ),
    }
    GAUGES: ClassVar[Mapping[str, Metric]] = {
        "ready": Metric("kvferry:ready", "1 while this engine takes requests of routers, 0 while it starts or drains."),
        "holds": Metric("kvferry:holds", "Prompts and answers that this engine holds for other engines."),
        "in_quarantine": Metric(
            "kvferry:blocks_in_quarantine", "Blocks that are kept because a peer may still write into them."
        ),
    }

    def record(self, result: JobResult) -> None:
        """Add one load."""
        if (error := result.error) is not None:
            self.count("failures", 1, error.reason.value)
            if error.reason is not Reason.ABORTED:
                self._note_failed({result.job_id: error.reason.value})
            return
        values = {
            "transfer_seconds": result.transfer_seconds,
            "wait_seconds": result.wait_seconds,
            "bytes": result.num_bytes,
            "descriptors": result.num_descriptors,
            "compared_bytes": result.num_compared_bytes,
            "compare_seconds": result.compare_seconds,
        }
        for name, value in values.items():
            self.observe(name, value)
        transport = _transport_label(result.transport)
        for phase, seconds in (result.phases or {}).items():
            # Clocks of two hosts run apart, and a sum of Prometheus may not fall.
            self.observe("phase_seconds", max(seconds, 0.0), phase, transport)
        self.count("loads", 1)

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another rank's or interval's observations; of a request that failed on several ranks keep one reason."""
        super().aggregate(other)
        self._note_failed(other.data["failed_requests"])
        return self

    def _note_failed(self, reasons: Mapping[str, str]) -> None:
        known = self.data["failed_requests"]
        for request_id, reason in reasons.items():
            if len(known) < MAX_FAILED:
                known.setdefault(request_id, reason)

    def _nothing(self) -> dict[str, Any]:
        return {**super()._nothing(), "failed_requests": {}}

    def reduce(self) -> dict[str, int | float]:
        """Return the figures for the engine's periodic log line."""
        failures = sum(self.data["failures"].values())
        loads = len(self.data["bytes"])
        others = {
            "holds": self.data["holds"].get("", 0),
            "failed writes": sum(self.data["failed_writes"].values()),
            "expired holds": sum(self.data["expired_holds"].values()),
            "prompts not held": self.data["unheld"],
            "computed tokens": sum(self.data["computed_tokens"].values()),
            "refused messages": sum(self.data["refused_messages"].values()),
            "blocks in quarantine": self.data["in_quarantine"].get("", 0),
        }
        others = {name: number for name, number in others.items() if number}
        if not loads:
            return {"loads": 0, "failed": failures, **others}
        seconds, total = np.asarray(self.data["transfer_seconds"]), float(np.sum(self.data["bytes"]))
        return {
            "loads": loads,
            "failed": failures,
            "median transfer ms": round(float(np.median(seconds)) * 1e3, 3),
            "median wait ms": round(float(np.median(self.data["wait_seconds"])) * 1e3, 3),
            "median descriptors": float(np.median(self.data["descriptors"])),
            "MB": round(total / 1e6, 3),
            "GB/s": round(total / 1e9 / max(float(seconds.sum()), 1e-9), 3),
            **others,
        }


class PrometheusMetrics(ObservationMetrics):
    """The same observations for Prometheus in the API server's process, which also learns why requests have failed."""

    OBSERVATIONS = Statistics

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one interval's observations and failed requests."""
        super().observe(transfer_stats_data, engine_idx)
        FAILED.note(transfer_stats_data["failed_requests"])


class LineLog:
    """Appends JSON lines to a file; an empty path logs nothing.

    The file is for people who look for what is slow: where it takes no line, as on a full disk, requests go on, and the
    engine's log says so once.
    """

    def __init__(self, path: str) -> None:
        # Unbuffered: each line is one write, so that a process that ends leaves no half of a line.
        self._file: RawIOBase | None = open(path, "ab", buffering=0) if path else None  # noqa: SIM115
        self._path = path

    def append(self, line: Mapping[str, Any]) -> None:
        """Append one line."""
        if self._file is None:
            return
        try:
            self._file.write(msgspec.json.encode(line) + b"\n")
        except OSError as error:
            told = "kvferry: %s takes no more lines: %s. Free space there and restart the engine to have them again."
            logger.warning(told, self._path, error.strerror)
            self.close()

    @property
    def is_open(self) -> bool:
        """Whether lines are kept."""
        return self._file is not None

    def close(self) -> None:
        """Close the file; twice is fine."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None


class TransferLog:
    """Appends to ``<path>.rank<rank>``; an empty path logs nothing.

    Ranks are counted over the pipeline's stages, those of one stage by their tensor-parallel rank.
    """

    def __init__(self, path: str, rank: int, layout: NamedLayout) -> None:
        self._lines = LineLog(path and f"{path}.rank{rank}")
        self._rank = rank
        self._layout = layout

    def write(self, order: PromptLoad, result: JobResult) -> None:
        """Append one load."""
        if not self._lines.is_open:
            return
        hold = order.hold
        line: dict[str, Any] = {
            "request_id": order.request_id,
            "remote_request_id": None if hold is None else hold.handle.request_id,
            "remote_engine_id": None if hold is None else hold.engine_id,
            "num_tokens": order.num_tokens,
            "compared_bytes": result.num_compared_bytes,
            "compare_seconds": result.compare_seconds,
            "sources": result.num_sources,
            "wait_seconds": result.wait_seconds,
        }
        if result.phases is not None:
            line["phases"] = result.phases
        self._append(line | self._outcome(result))

    def write_one(self, result: JobResult) -> None:
        """Append one write of this rank to one destination rank."""
        if self._lines.is_open:
            self._append({"write": result.job_id} | self._outcome(result))

    def write_step(self, step: Mapping[str, Any]) -> None:
        """Append one step of this rank that has computed prompts of routers' transfers."""
        self._append(step)

    def close(self) -> None:
        """Close the file; twice is fine."""
        self._lines.close()

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
        self._lines.append({"rank": self._rank, **line})


class LoadTraces:
    """Makes a span ``kvferry.load`` of each load of a rank whose order has ``trace_headers``; others cost nothing.

    The span is a child of the client's, if the headers name one. It ends when the load has ended on this rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._began_at: dict[str, int] = {}
        """The time of day, in nanoseconds, at which each load began, by request."""

    def begin(self, order: PromptLoad) -> None:
        """A load begins now."""
        if order.trace_headers is not None:
            self._began_at[order.request_id] = time.time_ns()

    def end(self, order: PromptLoad, result: JobResult) -> None:
        """A load has ended, or was refused before it began. Does nothing where OpenTelemetry is not installed."""
        if order.trace_headers is None:
            return
        began_at = self._began_at.pop(order.request_id, time.time_ns())
        attributes: dict[str, str | int] = {
            "kvferry.request_id": order.request_id,
            "kvferry.rank": self._rank,
            "kvferry.bytes": int(result.num_bytes),
            "kvferry.descriptors": int(result.num_descriptors),
            "kvferry.transport": _transport_label(result.transport),
        }
        if result.error is not None:
            attributes["error.type"] = result.error.reason.value
        ended_at = began_at + int(1e9 * result.wait_seconds)
        # Without a header vLLM would take the trace of the engine's own start, which this process has inherited.
        context = extract_trace_context(order.trace_headers or {"traceparent": ""})
        instrument_manual("kvferry.load", began_at, ended_at, attributes, context)
