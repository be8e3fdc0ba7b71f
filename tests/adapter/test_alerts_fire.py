"""Each of these alerts fires by what causes it, and stays silent where the same requests go well.

Engines serve requests before and after something goes wrong. What their metrics' classes expose to Prometheus after
each request becomes a series, a few minutes for each exposition, and Prometheus's own promtool says which alerts of
docs/deploy fire.
"""

import errno
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

pytest.importorskip("vllm")

import json

from filelock import FileLock
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvferry.execution import executor
from kvferry.integrations.vllm.offload_step import OffloadMetrics
from kvferry.integrations.vllm.worker.records import ObservationMetrics, PrometheusMetrics
from kvferry.layout.shard import Region
from kvferry.tiers.local_disk import LocalDisk

from ..support.faults import FaultPlan
from ..waits import wait_until
from .handoff_engine import WRONG_BYTES, HandoffEngine, make_engine
from .model_files import CONFIG
from .offload_engine import Engine, make_config, prompt_of
from .test_forged_parameters import UNIFORM

__all__ = ["make_engine"]

ROOT = Path(__file__).absolute().parents[2]
RULES = ROOT / "docs" / "deploy" / "prometheus" / "kvferry-alerts.yaml"
UNPACKED = ROOT / "build" / "prometheus"
"""Where `make check-deploy` unpacks Debian's package too."""
QUIET_MINUTES, MINUTES = 10, 3
"""How long the first exposition stays, and each of the others."""


@pytest.fixture(scope="module")
def promtool() -> str:
    """Prometheus's promtool; Debian's, where there is none."""
    if found := shutil.which("promtool"):
        return found
    unpacked = UNPACKED / "usr" / "bin" / "promtool"
    UNPACKED.parent.mkdir(exist_ok=True)
    with FileLock(f"{UNPACKED}.lock"):
        if not unpacked.exists():
            command = [str(ROOT / "scripts" / "debian"), "unpack", str(UNPACKED), "prometheus"]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
            if not unpacked.exists():
                pytest.skip(f"no promtool, and Debian's package prometheus cannot be had: {done.stderr[-300:]}")
    return str(unpacked)


class Exposition:
    """What Prometheus scrapes of an engine's API server."""

    def __init__(self, kind: type[ObservationMetrics]) -> None:
        self._registry = CollectorRegistry()

        def made(metric: Any) -> Any:
            return lambda multiprocess_mode="", **named: metric(registry=self._registry, **named)

        types: Any = {Gauge: made(Gauge), Counter: made(Counter), Histogram: made(Histogram)}
        config: Any = SimpleNamespace(kv_transfer_config=None)
        self._metrics = kind(config, types, ["engine"], {0: ["0"]})

    def observe(self, statistics: Any) -> Any:
        """Take what vLLM would send to the API server, as far as there is something, and return it."""
        if statistics is not None:
            self._metrics.observe(json.loads(json.dumps(statistics.to_dict())))
        return statistics

    def text(self) -> str:
        return generate_latest(self._registry).decode()


def values_by_series(expositions: Sequence[str]) -> dict[str, str]:
    """Return promtool's values of each series, a sample each minute."""
    found: list[dict[str, float]] = []
    for text in expositions:
        samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
        labels = [{**each.labels, "job": "vllm", "instance": "decode:8200"} for each in samples]
        names = ["{" + ",".join(f'{name}="{value}"' for name, value in each.items()) + "}" for each in labels]
        found.append({sample.name + name: sample.value for sample, name in zip(samples, names, strict=True)})
    minutes = [found[0]] * QUIET_MINUTES + [each for each in found[1:] for _ in range(MINUTES)]
    every = {name for each in found for name in each if name.startswith("kvferry:")}
    return {name: " ".join(str(each.get(name, "_")) for each in minutes) for name in every}


def check_alerts(promtool: str, folder: Path, expositions: Sequence[str], alert: str | None) -> None:
    """Let promtool say that the alert fires behind the last exposition and not before the second; None: no alert."""
    series = values_by_series(expositions)
    assert series, "the engine exposes nothing"
    last = QUIET_MINUTES + MINUTES * (len(expositions) - 2) + 1
    chosen = "" if alert is None else f',alertname="{alert}"'
    fires = [{"labels": f'{{alertname="{alert}"}}', "value": 1}]
    expected = [(QUIET_MINUTES - 1, []), (last, [] if alert is None else fires)]
    queries = [
        {
            "expr": f'count by (alertname) (ALERTS{{alertstate="firing"{chosen}}})',
            "eval_time": f"{minute}m",
            "exp_samples": samples,
        }
        for minute, samples in expected
    ]
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": queries,
    }
    cases = folder / "cases.yaml"
    cases.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [case]}))
    done = subprocess.run([promtool, "test", "rules", str(cases)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


class Pair:
    """A prefill and a decode engine, and what Prometheus scrapes of the decode engine."""

    def __init__(self, make_engine: Any, **given: Any) -> None:
        self.prefill: HandoffEngine = make_engine(UNIFORM, integrity="full")
        self.decode: HandoffEngine = make_engine(UNIFORM, num_blocks=60, integrity="full", **given)
        self.exposition = Exposition(PrometheusMetrics)
        self.goes_on = threading.Event()
        """Whether a prefill engine that was stopped goes on."""
        take = self.decode.connector.get_kv_connector_stats
        self.decode.connector.get_kv_connector_stats = lambda: self.exposition.observe(take())

    def hold(self, number: int) -> tuple[list[int], dict[str, Any]]:
        """Return a prompt that the prefill engine holds, and its answer's parameters."""
        prompt = [(7 * each + number) % 500 for each in range(64)]
        return prompt, self.prefill.ask(f"p{number}", prompt, {"do_remote_decode": True}, max_tokens=1).params

    def text(self) -> str:
        self.exposition.observe(self.decode.worker.get_kv_connector_stats())
        self.exposition.observe(self.decode.connector._scheduler.take_statistics())
        return self.exposition.text()


def peer_gone(pair: Pair, number: int, goes_wrong: bool) -> None:
    prompt, params = pair.hold(number)
    if goes_wrong:
        pair.prefill.connector.shutdown()
        pair.prefill.worker.shutdown()
    assert pair.decode.ask(f"d{number}", prompt, params).has_failed is goes_wrong


def digests_fail(pair: Pair, number: int, goes_wrong: bool) -> None:
    prompt, params = pair.hold(number)
    with pair.prefill.writes_with(WRONG_BYTES if goes_wrong else FaultPlan()):
        assert pair.decode.ask(f"d{number}", prompt, params).has_failed is goes_wrong


def quarantine_grows(pair: Pair, number: int, goes_wrong: bool) -> None:
    """The prefill engine's process is stopped: its port takes messages, and nobody answers them."""
    prompt, params = pair.hold(number)
    if goes_wrong:
        pair.prefill.worker._worker._source._end_point.server._answer = lambda _: pair.goes_on.wait(60)
    assert pair.decode.ask(f"d{number}", prompt, params).has_failed is goes_wrong


def loads_fail_and_are_computed(pair: Pair, number: int, goes_wrong: bool) -> None:
    prompt, params = pair.hold(number)
    if goes_wrong:
        pair.prefill.release()
        pair.prefill.ask(f"o{number}", [7, 8, 9], {})
    assert not pair.decode.ask(f"d{number}", prompt, params).has_failed


def the_router_names_no_engine(pair: Pair, number: int, goes_wrong: bool) -> None:
    prompt, params = pair.hold(number)
    assert not pair.decode.ask(f"d{number}", prompt, {} if goes_wrong else params).has_failed


Cause = tuple[Callable[[Pair, int, bool], None], str, int, dict[str, Any]]
"""A function that serves a request of this number, and lets it go wrong where the last argument says so; the alert;
how many requests it takes; settings of the decode engine."""
CAUSES: dict[str, Cause] = {
    "a peer gone": (peer_gone, "KVFerryPeerGone", 1, {}),
    "digests failing": (digests_fail, "KVFerryDigestsDiffer", 1, {}),
    "quarantine growing": (quarantine_grows, "KVFerryQuarantineGrows", 3, {"load_timeout_seconds": 1.0}),
    "failed loads are computed": (
        loads_fail_and_are_computed,
        "KVFerryComputesPrompts",
        5,
        {"failure_policy": "recompute"},
    ),
    "no parameters": (the_router_names_no_engine, "KVFerryComputesPrompts", 5, {"kv_role": "kv_consumer"}),
}


@pytest.mark.parametrize("goes_wrong", [False, True], ids=["well", "wrong"])
@pytest.mark.parametrize("name", CAUSES)
def test_an_alert_of_a_decode_engine_fires_by_its_cause(
    name: str, goes_wrong: bool, make_engine: Any, promtool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "QUIET_SECONDS", 0.1)
    serve, alert, num_requests, given = CAUSES[name]
    pair = Pair(make_engine, **given)
    serve(pair, 0, False)
    expositions = [pair.text()]
    for number in range(1, num_requests + 1):
        serve(pair, number, goes_wrong)
        expositions.append(pair.text())
    pair.goes_on.set()
    check_alerts(promtool, tmp_path, expositions, alert if goes_wrong else None)


@pytest.fixture
def with_disk(tmp_path: Path) -> Iterator[Engine]:
    """An engine with the offload connector and a disk."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def disk(region: Region) -> LocalDisk:
        return LocalDisk(tmp_path / "disk", 4 << 20, region)

    engine = Engine(make_config(tmp_path), host_blocks=100, lower=disk)
    yield engine
    engine.role.shutdown()


@pytest.mark.parametrize("is_full", [False, True], ids=["room", "full"])
def test_the_alert_of_a_full_disk_fires_where_its_file_system_is_full(
    is_full: bool, with_disk: Engine, promtool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exposition, role = Exposition(OffloadMetrics), with_disk.role
    connector: Any = with_disk.scheduler.connector
    take = connector.get_kv_connector_stats
    connector.get_kv_connector_stats = lambda: exposition.observe(take())

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if is_full:
        monkeypatch.setattr(os, "posix_fallocate", refuse)
    expositions = [exposition.text()]
    for number in range(1, 6):
        with_disk.add(f"r{number}", prompt_of(number, -number), max_tokens=1)
        wait_until(lambda: not (with_disk.scheduler.has_requests() or role.has_pending_work()), each=with_disk.step)
        time.sleep(0.01)
        with_disk.step(is_forced=True)
        expositions.append(exposition.text())
    used = "kvferry:offload_tier_used_bytes", {"engine": "0", "tier": "local_disk"}
    assert exposition._registry.get_sample_value(*used)
    check_alerts(promtool, tmp_path, expositions, "KVFerryTierFull" if is_full else None)
