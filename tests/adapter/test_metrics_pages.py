"""The pages name every metric and every field of the transfer log, and no other."""

import json
import re
from pathlib import Path

import pytest

from kvferry.execution.executor import JobResult
from kvferry.integrations.vllm.offload_step import OffloadStatistics
from kvferry.integrations.vllm.step import PromptLoad
from kvferry.integrations.vllm.worker.records import Observations, Statistics, TransferLog
from kvferry.layout.named_layouts import NamedLayout

DOCS = Path(__file__).parents[2] / "docs"


def names(text: str) -> set[str]:
    """The metrics that a page's tables name, without the suffix of counters."""
    rows = "\n".join(line for line in text.splitlines() if line.startswith("| `kvferry:"))
    return {name.removesuffix("_total") for name in re.findall(r"`(kvferry:\w+)`", rows)}


@pytest.mark.parametrize(("page", "kind"), [("metrics.md", Statistics), ("offload.md", OffloadStatistics)])
def test_the_page_names_every_metric(page: str, kind: type[Observations]) -> None:
    known = {metric.name for metric in (*kind.HISTOGRAMS.values(), *kind.COUNTERS.values())}
    assert names((DOCS / page).read_text()) == known


def test_the_page_names_every_field_of_a_load_in_the_transfer_log(tmp_path: Path) -> None:
    log = TransferLog(str(tmp_path / "log"), 0, NamedLayout.BHLNC)
    log.write(PromptLoad("a", 1.0), JobResult("a", None, events={"phases": {}, "committed_at": 0.0}))
    log.close()
    written = set(json.loads((tmp_path / "log.rank0").read_text())) - {"events"}
    page = (DOCS / "metrics.md").read_text().partition("## One line for each load")[2]
    rows = "\n".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`(\w+)`", rows)) == written - {"events"}
