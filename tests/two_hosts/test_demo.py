"""The demo on two virtual hosts, as a user runs it."""

import json
from pathlib import Path

import pytest

from ..host.vllm.demo_process import folder, started_demo
from ..virtual_network import Hosts

__all__ = ["folder"]

pytestmark = pytest.mark.vllm
DEMO_SECONDS = 800


@pytest.mark.parametrize("mode", ["sequential", "concurrent"])
def test_demo_on_two_hosts(mode: str, folder: Path, hosts: Hosts) -> None:
    """The demo makes hosts of its own; those of the other tests only show that this machine can have some."""
    with started_demo(folder, "--hosts", "2", "--mode", mode) as process:
        output, _ = process.communicate(timeout=DEMO_SECONDS)
    errors = (folder / "stderr").read_text()
    assert process.returncode == 0, errors
    report = json.loads(output)
    assert (report["mode"], report["hosts"], report["problems"]) == (mode, 2, [])
    assert report["requests"] == report["identical"] == 16
    assert report["bytes"] == report["expected_bytes"]
    assert report["received_tokens"] + report["computed_tokens"] == report["prompt_tokens"]
    assert report["computed_tokens"] <= report["requests"]
    assert {line["transport"] for line in report["per_request"]} == {"nixl"}
    assert report["leaks"]["cache_usage"] == {"prefill": 0.0, "decode": 0.0}
    assert report["leaks"]["processes_left"] == 0
    assert [path.name for path in folder.iterdir()] == ["stderr"]
