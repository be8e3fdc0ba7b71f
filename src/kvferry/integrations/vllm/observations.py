"""What a connector counts and times, as vLLM's statistics and as Prometheus metrics: one declaration makes both.

vLLM carries ``data`` from every rank and from the scheduler to the front end, adds the parts together there, and asks
the connector's class to read the sum. So ``data`` is plain: lists of observed values and numbers, by name and labels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BYTES = tuple(float(1 << shift) for shift in range(12, 38, 2))
COUNTS = (1.0, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of Prometheus: its name and text, the names of its labels, and the bounds of a histogram's buckets."""

    name: str
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


class Observations(KVConnectorStats):
    """Observed values and counts by name; a subclass declares the names in ``HISTOGRAMS`` and ``COUNTERS``.

    ``data`` has a list for a histogram and a number for a counter; with labels it has one for each, under the labels'
    values joined by commas.
    """

    HISTOGRAMS: ClassVar[Mapping[str, Metric]] = {}
    COUNTERS: ClassVar[Mapping[str, Metric]] = {}

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or self._nothing())

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
        return self

    def is_empty(self) -> bool:
        """Return whether nothing was observed."""
        return not any(self.data.values())

    def _nothing(self) -> dict[str, Any]:
        histograms: dict[str, Any] = {name: {} if metric.labels else [] for name, metric in self.HISTOGRAMS.items()}
        counters: dict[str, Any] = {name: {} if metric.labels else 0 for name, metric in self.COUNTERS.items()}
        return {**histograms, **counters}


class ObservationMetrics(KVConnectorPromMetrics):
    """The same observations as Prometheus histograms and counters, for each engine of a front end."""

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
        self._metrics: dict[str, Any] = {}
        for name, metric in self.OBSERVATIONS.HISTOGRAMS.items():
            labels = [*labelnames, *metric.labels]
            self._metrics[name] = histogram(
                name=metric.name, documentation=metric.text, buckets=list(metric.buckets), labelnames=labels
            )
        for name, metric in self.OBSERVATIONS.COUNTERS.items():
            labels = [*labelnames, *metric.labels]
            self._metrics[name] = counter(name=metric.name, documentation=metric.text, labelnames=labels)
        for name, metric in (*self.OBSERVATIONS.HISTOGRAMS.items(), *self.OBSERVATIONS.COUNTERS.items()):
            if not metric.labels:  # seen before the first observation, as 0
                create_metric_per_engine(self._metrics[name], per_engine_labelvalues)

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


def _joined(metric: Metric, labels: tuple[str, ...]) -> str:
    assert len(labels) == len(metric.labels), f"{metric.name} has the labels {metric.labels}, not {labels}"
    return ",".join(labels)


def _separate(metric: Metric, labels: str) -> list[str]:
    return labels.split(",") if metric.labels else []
