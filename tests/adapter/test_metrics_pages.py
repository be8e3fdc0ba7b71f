"""The pages name every metric and every field of the transfer log, and no other; so do alert rules and dashboard."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from kvferry.execution.executor import JobResult
from kvferry.integrations.vllm.offload_step import OffloadStatistics
from kvferry.integrations.vllm.request_checks import REFUSALS, refused_requests
from kvferry.integrations.vllm.step import PromptLoad
from kvferry.integrations.vllm.worker.records import Metric, Observations, Statistics, TransferLog
from kvferry.layout.named_layouts import NamedLayout

DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD = DOCS / "deploy" / "grafana" / "kvferry.json"
RULES, CASES = (DOCS / "deploy" / "prometheus" / f"kvferry-alerts{end}.yaml" for end in ("", "-test"))
OF_SCRAPES = {"job", "instance"}
KINDS = (Statistics, OffloadStatistics)


def names(text: str) -> set[str]:
    """The metrics that a page's tables name, without the suffix of counters."""
    rows = "\n".join(line for line in text.splitlines() if line.startswith("| `kvferry:"))
    return {name.removesuffix("_total") for name in re.findall(r"`(kvferry:\w+)`", rows)}


@pytest.mark.parametrize(("page", "kind"), [("metrics.md", Statistics), ("offload.md", OffloadStatistics)])
def test_the_page_names_every_metric(page: str, kind: type[Observations]) -> None:
    known = {metric.name for metric in kind.all_metrics().values()}
    if kind is Statistics:
        known.add(refused_requests()._name)
    assert names((DOCS / page).read_text()) == known


def test_every_metric_says_what_it_means() -> None:
    metrics = [metric for kind in KINDS for metric in kind.all_metrics().values()]
    texts = [*(metric.text for metric in metrics), refused_requests()._documentation]
    assert all(re.fullmatch(r"[A-Z0-9][^.]*\.", text) for text in texts)
    assert len(set(texts)) == len(texts)
    for metric in metrics:
        assert all(len(values) == len(metric.labels) for values in metric.known)


def series() -> Iterator[tuple[str, set[str]]]:
    """Yield each series that Prometheus has of the metrics, and its labels."""
    for kind in KINDS:
        for metric in kind.HISTOGRAMS.values():
            yield from ((f"{metric.name}_{end}", {*metric.labels}) for end in ("sum", "count"))
            yield f"{metric.name}_bucket", {*metric.labels, "le"}
        yield from ((f"{metric.name}_total", {*metric.labels}) for metric in kind.COUNTERS.values())
        yield from ((metric.name, {*metric.labels}) for metric in kind.GAUGES.values())
    yield f"{refused_requests()._name}_total", {*refused_requests()._labelnames}


def rules() -> list[dict[str, str]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    targets = [target for panel in panels for target in panel.get("targets", ())]
    cases = [series["series"] for case in yaml.safe_load(CASES.read_text())["tests"] for series in case["input_series"]]
    return [*(target["expr"] for target in targets), *(rule["expr"] for rule in rules()), *cases]


def test_every_query_names_metrics_and_labels_that_exist() -> None:
    known = dict(series())
    for query in expressions():
        selected = re.findall(r"(kvferry:\w+)(?:\{([^}]*)\})?", query)
        assert selected, query
        of_query: set[str] = set()
        for name, matchers in selected:
            assert name in known, query
            labels = known[name] | OF_SCRAPES
            assert set(re.findall(r"(\w+)(?:=~|!~|!=|=)\"", matchers)) <= labels, query
            of_query |= labels
        grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(",")}
        assert grouped <= of_query, query


def test_an_alert_of_one_failure_counts_from_zero() -> None:
    """Prometheus sees no increase in a series that begins with 1."""
    metrics = {f"{metric.name}_total": metric for kind in KINDS for metric in kind.COUNTERS.values()}
    metrics["kvferry:refused_requests_total"] = Metric("", "", ("reason",), known=tuple((each,) for each in REFUSALS))
    comes_with_each_request = {"KVFerryEnginesDoNotFit"}
    for rule in rules():
        increases = re.findall(r"increase\((kvferry:\w+)(?:\{([^}]*)\})?", rule["expr"])
        for name, matchers in increases if rule["alert"] not in comes_with_each_request else ():
            metric = metrics[name]
            assert metric.known or not metric.labels, rule["alert"]
            for label, operator, wanted in re.findall(r"(\w+)(=~|=)\"([^\"]*)\"", matchers):
                values = {each[metric.labels.index(label)] for each in metric.known}
                assert set(wanted.split("|") if operator == "=~" else [wanted]) <= values, rule["alert"]


def test_every_alert_has_cases_and_leads_to_a_section() -> None:
    fired = re.findall(r'alertname="(\w+)"', CASES.read_text())
    assert sorted(set(fired)) == sorted(rule["alert"] for rule in rules())
    for rule in rules():
        assert rule["annotations"].keys() == {"summary", "action", "page"}  # type: ignore[attr-defined]
        page, _, anchor = rule["annotations"]["page"].partition("#")  # type: ignore[index]
        headings = re.findall(r"^#+ (.*)$", (DOCS.parent / page).read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in anchors, rule["alert"]


def test_the_page_names_every_field_of_a_load_in_the_transfer_log(tmp_path: Path) -> None:
    log = TransferLog(str(tmp_path / "log"), 0, NamedLayout.BHLNC)
    log.write(PromptLoad("a", 1.0), JobResult("a", None, phases={}))
    log.close()
    written = set(json.loads((tmp_path / "log.rank0").read_text())) - {"events"}
    page = (DOCS / "metrics.md").read_text().partition("## One line for each load")[2]
    rows = "\n".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`(\w+)`", rows)) == written - {"events"}
