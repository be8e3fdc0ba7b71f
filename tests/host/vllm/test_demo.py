"""The demo as a user runs it: its verdict, and that nothing is left of it, interrupted or not."""

import contextlib
import json
import signal
import time
from pathlib import Path

import pytest

from .demo_process import folder, started_demo

__all__ = ["folder"]

# The pool stops the shared engines for a test that names it and none of them.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.usefixtures("engine_pool")]


def descendants(process_id: int) -> set[int]:
    """Return the processes below one."""
    family = [process_id]
    for member in family:
        for children in Path(f"/proc/{member}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                family.extend(int(child) for child in children.read_text().split())
    return set(family[1:])


def is_alive(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("vllm_dist_*")}


def test_demo(folder: Path) -> None:
    before = segments()
    with started_demo(folder) as process:
        output, _ = process.communicate(timeout=560)
    errors = (folder / "stderr").read_text()
    report = json.loads(output)
    assert process.returncode == 0, errors
    assert report["problems"] == []
    assert report["requests"] == report["identical"] == 16
    assert report["bytes"] == report["expected_bytes"] == sum(line["bytes"] for line in report["per_request"])
    assert report["received_tokens"] + report["computed_tokens"] == report["prompt_tokens"]
    assert report["computed_tokens"] <= report["requests"]
    assert report["reference_computed_tokens"] == report["prompt_tokens"]
    assert report["layout"] == "BHLNC"
    assert report["descriptors"] < report["per_layer_descriptors"] / 4
    assert report["leaks"]["cache_usage"] == {"prefill": 0.0, "decode": 0.0}
    assert "of 16" in errors
    assert [path.name for path in folder.iterdir()] == ["stderr"]
    assert segments() <= before


@pytest.mark.parametrize("moment", ["engines start", pytest.param("Engines ready", marks=pytest.mark.matrix)])
def test_interrupted_demo_leaves_nothing(folder: Path, moment: str) -> None:
    before = segments()
    with started_demo(folder) as process:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and process.poll() is None:
            family = descendants(process.pid)
            if len(family) >= 6 and (moment == "engines start" or moment in (folder / "stderr").read_text()):
                break
            time.sleep(0.1)
        time.sleep(1.0)
        family |= descendants(process.pid)
        assert process.poll() is None, (folder / "stderr").read_text()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert [member for member in family if is_alive(member)] == []
    assert [path.name for path in folder.iterdir()] == ["stderr"]
    assert segments() <= before


@pytest.mark.matrix
def test_demo_of_offload(folder: Path) -> None:
    """The engine that loads after the restart has one rank; the one that stored had two."""
    before = segments()
    with started_demo(folder, "--mode", "offload", "--prompts", "8") as process:
        output, _ = process.communicate(timeout=560)
    report = json.loads(output)
    assert process.returncode == 0, (folder / "stderr").read_text()
    assert (report["mode"], report["problems"]) == ("offload", [])
    alone, first, second, restarted = report["passes"]
    assert {line["requests"] for line in report["passes"]} == {line["identical"] for line in report["passes"]} == {8}
    assert alone["loaded"] == 0
    assert alone["computed"] > first["computed"] > 5 * second["computed"]
    assert restarted["from_disk"] > 0
    assert report["leaks"] == {"cache_usage": 0.0, "processes_left": 0}
    assert [path.name for path in folder.iterdir()] == ["stderr"]
    assert segments() <= before


@pytest.mark.matrix
def test_demo_behind_a_concurrent_router(folder: Path) -> None:
    with started_demo(folder, "--mode", "concurrent", "--prompts", "6") as process:
        output, _ = process.communicate(timeout=560)
    report = json.loads(output)
    assert process.returncode == 0, (folder / "stderr").read_text()
    assert (report["mode"], report["problems"]) == ("concurrent", [])
    assert report["requests"] == report["identical"] == 6
    assert report["bytes"] == report["expected_bytes"]
    assert report["received_tokens"] == report["prompt_tokens"]
    assert report["leaks"]["cache_usage"] == {"prefill": 0.0, "decode": 0.0}
