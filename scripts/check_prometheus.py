"""Tries the alert rules and the dashboard of docs/deploy with Prometheus itself.

promtool tests the rules by their cases. Then Prometheus, with the configuration of docs/deploy, scrapes metrics that
the classes of an engine's API server make, of which all grow as in the worst hour: each query of the dashboard and each
rule must return data. Exit status 1 says that one does not, 2 that Prometheus is missing.
"""

import itertools
import json
import math
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from prometheus_client import Counter, Gauge, Histogram, start_http_server

from kvferry.cli.transfer_records import PHASES
from kvferry.errors import Reason
from kvferry.handoff.holds import UNRELEASED
from kvferry.integrations.vllm.offload_step import TIERS, ComputedCause, OffloadMetrics
from kvferry.integrations.vllm.request_checks import REFUSALS, refused_requests
from kvferry.integrations.vllm.worker.records import Cause, PrometheusMetrics
from kvferry.tiers.load_rule import Because, Choice
from kvferry.transport.registry import FACTORIES

DEPLOY = Path(__file__).absolute().parent.parent / "docs" / "deploy"
CONFIG, RULES, CASES = (
    DEPLOY / "prometheus" / name for name in ("prometheus.yaml", "kvferry-alerts.yaml", "kvferry-alerts-test.yaml")
)
DASHBOARD = DEPLOY / "grafana" / "kvferry.json"
PROGRAMS = ("prometheus", "promtool")
LABELS: dict[str, Iterable[str]] = {
    "reason": Reason,
    "ending": UNRELEASED,
    "cause": (*Cause, *ComputedCause),
    "tier": TIERS,
    "direction": ("load", "store", "up", "down"),
    "choice": Choice,
    "because": Because,
    "phase": PHASES,
    "transport": FACTORIES,
}
VARIABLES = {"$job": ".*", "$instance": ".*", "$__rate_interval": "30s"}
SCRAPES = 6
TIMEOUT_SECONDS = 120.0


def main() -> int:
    """Return 1 where a rule or query does not do what it should, 2 where Prometheus is missing."""
    found = {name: shutil.which(name) or "" for name in PROGRAMS}
    if missing := [name for name, path in found.items() if not path]:
        print(f"{' and '.join(missing)} missing (Debian: the package prometheus)", file=sys.stderr)
        return 2
    for check in (["check", "config", str(CONFIG)], ["test", "rules", str(CASES)]):
        if status := subprocess.run([found["promtool"], *check], check=False).returncode:
            return status
    ends = threading.Event()
    server, _ = start_http_server(0, addr="127.0.0.1")
    feeder = threading.Thread(target=feed, args=(ends,), daemon=True)
    feeder.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            return ask(Path(folder), server.server_port)
    finally:
        ends.set()
        feeder.join()
        server.shutdown()


def feed(ends: threading.Event) -> None:
    """Let every metric grow, with every value of its labels, until the end."""
    types: Any = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    engine = ["model_name", "engine"], {0: ["model", "0"]}
    kinds = [kind(config, types, *engine) for kind in (PrometheusMetrics, OffloadMetrics)]
    for number in itertools.count(1):
        for metrics in kinds:
            statistics = metrics.OBSERVATIONS()
            for name, metric in statistics.HISTOGRAMS.items():
                for values in label_values(metric.labels):
                    statistics.observe(name, 20.0, *values)
            for name, metric in statistics.COUNTERS.items():
                for values in label_values(metric.labels):
                    statistics.count(name, 5, *values)
            for name, metric in statistics.GAUGES.items():
                for values in label_values(metric.labels):
                    statistics.set(name, 0 if name == "tier_up" else number, *values)
            metrics.observe(statistics.to_dict())
        for reason in REFUSALS:
            refused_requests().labels(reason.value).inc()
        if ends.wait(0.5):
            return


def label_values(labels: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield every combination of the labels' values."""
    return itertools.product(*(map(str, LABELS[label]) for label in labels))


def ask(folder: Path, exposed_at: int) -> int:
    """Let Prometheus scrape that port, and return 1 where a query returns nothing."""
    config = yaml.safe_load(CONFIG.read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(CONFIG.parent / each) for each in config["rule_files"]]
    [scraped] = config["scrape_configs"]
    scraped["static_configs"] = [{"targets": [f"127.0.0.1:{exposed_at}"]}]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with subprocess.Popen(command) as prometheus:
        try:
            api = f"http://127.0.0.1:{port}/api/v1"
            wait_for_scrapes(api)
            queries = [*dashboard_queries(), *rule_queries()]
            silent = [f"{where} returns nothing: {query}" for where, query in queries if not has_data(api, query)]
            rules = [rule for group in get(f"{api}/rules")["groups"] for rule in group["rules"]]
            silent += [f"{rule['name']}: {rule['lastError']}" for rule in rules if rule["health"] != "ok"]
        finally:
            prometheus.terminate()
    for each in silent:
        print(each, file=sys.stderr)
    print(f"{len(queries)} queries of dashboard and rules in Prometheus: {len(queries) - len(silent)} return data")
    return int(bool(silent) or not queries)


def wait_for_scrapes(api: str) -> None:
    """Wait until there are enough samples for rates."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        try:
            if has_data(api, f"min(count_over_time(kvferry:loads_total[5m])) >= {SCRAPES}"):
                return
        except OSError:
            pass  # it does not listen yet
        time.sleep(0.5)
    raise TimeoutError(f"Prometheus has not scraped {SCRAPES} times in {TIMEOUT_SECONDS:g} s.")


def dashboard_queries() -> Iterator[tuple[str, str]]:
    """Yield the panel or variable and the query, with a value in the place of each variable."""
    dashboard = json.loads(DASHBOARD.read_text())
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"])
            assert found is not None, variable["query"]
            yield f"variable {variable['name']}", filled(f"group by ({found[2]}) ({found[1]})")
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']!r}", filled(target["expr"])


def filled(query: str) -> str:
    """Return a query of Grafana without variables."""
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    return query


def rule_queries() -> Iterator[tuple[str, str]]:
    """Yield each alert and its expression."""
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def has_data(api: str, query: str) -> bool:
    """Return whether a query returns a number."""
    found = get(f"{api}/query?{urllib.parse.urlencode({'query': query})}")["result"]
    return any(not math.isnan(float(each["value"][1])) for each in found)


def get(url: str) -> Any:
    """Return the data of an answer of Prometheus."""
    with urllib.request.urlopen(url, timeout=30.0) as response:  # nosec B310  # of the Prometheus started here
        return json.load(response)["data"]


if __name__ == "__main__":
    sys.exit(main())
