"""Statistics of both roles: what vLLM's own classes make of them, and what Prometheus shows."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from kvferry.errors import Reason, TransportError
from kvferry.execution.executor import JobResult
from kvferry.integrations.vllm.offload_step import OffloadMetrics, OffloadStatistics
from kvferry.integrations.vllm.worker.records import PrometheusMetrics, Statistics
from kvferry.tiers.load_rule import Because, Choice

LOAD = JobResult("a", None, num_bytes=4_000_000, wait_seconds=0.02, transfer_seconds=0.004)
FAILED = JobResult("b", TransportError(Reason.TRANSFER_FAILED, "it failed."))


def observed() -> OffloadStatistics:
    statistics = OffloadStatistics()
    statistics.record(LOAD, "load")
    statistics.record(FAILED, "store")
    statistics.count("hit_tokens", 96, "host_memory")
    statistics.observe("load_seconds", 0.03)
    statistics.count("decisions", 1, Choice.LOAD.value, Because.QUICKEST.value)
    return statistics


def metrics(kind: type[KVConnectorPromMetrics], registry: CollectorRegistry) -> KVConnectorPromMetrics:
    def made(metric: Any) -> Any:
        return lambda **named: metric(registry=registry, **named)

    types = {Gauge: made(Gauge), Counter: made(Counter), Histogram: made(Histogram)}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    return kind(config, types, ["engine"], {0: ["0"], 1: ["1"]})  # type: ignore[arg-type]


def test_statistics_travel_as_plain_data_and_add_up() -> None:
    assert OffloadStatistics().is_empty()
    there = json.loads(json.dumps(observed().to_dict()))
    both = OffloadStatistics(there).aggregate(observed())
    assert both.data["copy_bytes"] == {"load": [4_000_000, 4_000_000]}
    assert both.data["hit_tokens"] == {"host_memory": 192}
    assert both.data["failures"] == {"host_memory,transfer-failed": 2}
    assert both.data["load_seconds"] == [0.03, 0.03]
    assert not both.is_empty()
    both.reset()
    assert both.is_empty()


def test_one_interval_does_not_change_another() -> None:
    first, second = observed(), observed()
    OffloadStatistics().aggregate(first).aggregate(second)
    assert first.to_dict() == observed().to_dict()


def test_a_count_alone_is_not_empty() -> None:
    statistics = OffloadStatistics()
    statistics.count("evicted_blocks", 0, "host_memory")
    assert statistics.is_empty()
    statistics.count("evicted_blocks", 1, "host_memory")
    assert not statistics.is_empty()


def test_the_log_line_has_hits_failures_and_decisions() -> None:
    figures = observed().reduce()
    assert figures["host_memory hit tokens"] == 96
    assert figures["failed"] == 1
    assert figures["decided load quickest"] == 1
    assert figures["load GB/s of a rank"] == 1.0
    assert OffloadStatistics().reduce()["offload loads"] == 0


def test_prometheus_shows_each_label() -> None:
    registry = CollectorRegistry()
    metrics(OffloadMetrics, registry).observe(observed().to_dict(), engine_idx=1)

    def sample(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"engine": "1", **labels})

    assert sample("kvferry:offload_hit_tokens_total", tier="host_memory") == 96
    assert sample("kvferry:offload_failures_total", tier="host_memory", reason="transfer-failed") == 1
    assert sample("kvferry:offload_decisions_total", choice="load", because="quickest") == 1
    assert sample("kvferry:offload_copy_bytes_sum", direction="load") == 4_000_000
    assert sample("kvferry:offload_load_seconds_count") == 1
    assert registry.get_sample_value("kvferry:offload_load_seconds_count", {"engine": "0"}) == 0


def test_both_connectors_of_an_engine_can_have_metrics() -> None:
    registry = CollectorRegistry()
    metrics(OffloadMetrics, registry)
    transfers = Statistics()
    transfers.record(LOAD)
    transfers.record(FAILED)
    metrics(PrometheusMetrics, registry).observe(transfers.to_dict())
    assert registry.get_sample_value("kvferry:transfer_bytes_sum", {"engine": "0"}) == 4_000_000
    failed = {"engine": "0", "reason": "transfer-failed"}
    assert registry.get_sample_value("kvferry:failed_loads_total", failed) == 1


@pytest.mark.parametrize(
    ("named", "label"), [("nixl", "nixl"), ("", "none"), ("cma,nixl", "several"), ("x,y,z", "several")]
)
def test_a_peer_chooses_no_label_of_a_phase(named: str, label: str) -> None:
    registry = CollectorRegistry()
    transfers = Statistics()
    transfers.record(replace(LOAD, transport=named, compare_seconds=0.002, phases={"move": 0.25, "announce": -1e-6}))
    metrics(PrometheusMetrics, registry).observe(transfers.to_dict())
    sums = {
        phase: registry.get_sample_value(
            "kvferry:phase_seconds_sum", {"engine": "0", "phase": phase, "transport": label}
        )
        for phase in ("move", "announce", "find")
    }
    assert sums == {"move": 0.25, "announce": 0.0, "find": None}
    assert registry.get_sample_value("kvferry:compare_seconds_sum", {"engine": "0"}) == 0.002
