"""Runs everything that awaits a GPU, each part in a process of its own: a table, and JSON where --json names a file.

Nothing is left out in silence: a part that cannot run here has its reason. Exit code 0: all parts ran and passed; 1: a
part failed; 2: this machine has no CUDA device, and no part ran; 3: all that ran passed, and others could not run.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvferry.errors import KVFerryError
from kvferry.execution.device import find_device

ROOT = Path(__file__).absolute().parent.parent
DEVICE, SECOND_DEVICE = "cuda:0", "cuda:1"
PART_SECONDS = 1800.0
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
FAILED, NO_DEVICE, SOME_CANNOT_RUN = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Part:
    """A part: its name, what it shows, the arguments of Python, and why it cannot run here, empty where it can."""

    name: str
    shows: str
    arguments: Sequence[str]
    obstacle: Callable[[], str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a part: ``passed``, ``failed`` or ``cannot run``, and the last line or the reason."""

    name: str
    shows: str
    outcome: str
    seconds: float
    found: str


def _needs_device(name: str = DEVICE) -> str:
    try:
        find_device(name)
    except KVFerryError as error:
        return error.message
    return ""


def _needs_torch() -> str:
    if reason := _needs_device():
        return reason
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    return "" if "+cpu" not in version("torch") else f"the installed torch {version('torch')} is built for CPUs"


def _needs_nixl() -> str:
    return _needs_torch() or ("" if importlib.util.find_spec("nixl") else "nixl is not installed")


def _needs_second_device() -> str:
    return _needs_nixl() or _needs_device(SECOND_DEVICE)


def _needs_mooncake() -> str:
    from kvferry.transport.mooncake import is_built_with_cuda

    if reason := _needs_torch():
        return reason
    return "" if is_built_with_cuda() else "Mooncake's build for CUDA (mooncake-transfer-engine) is not installed"


def _needs_vllm() -> str:
    if reason := _needs_torch():
        return reason
    try:
        found = version("vllm")
    except PackageNotFoundError:
        return "no CUDA build of vLLM is installed"
    return f"the installed vLLM {found} is built for CPUs" if "cpu" in found else ""


def _needs_pair() -> str:
    """Return why no two engines can hand caches over here."""
    if reason := _needs_nixl() or _needs_vllm():
        return reason
    return "" if importlib.util.find_spec("vllm_router") else "vllm-router is not installed"


def _needs_pair_on_two_devices() -> str:
    return _needs_pair() or _needs_device(SECOND_DEVICE)


def _demo(mode: str, prefill_tp: int) -> tuple[str, ...]:
    """Return the demo with two engines at a time on the first device, each of which takes less than half of it."""
    ranks = ("--prefill-tp", str(prefill_tp), "--decode-tp", "1")
    return "-m", "kvferry.cli.main", "demo", "--mode", mode, *ranks, "--gpu-memory", "0.45"


def _tests(path: str, *more: str) -> tuple[str, ...]:
    return (*PYTEST, f"tests/gpu/{path}", *more)


PARTS = (
    Part(
        "trial",
        "labelled blocks, each layout: handoff and offload",
        ("-m", "kvferry.cli.main", "doctor", "--device", DEVICE),
        _needs_nixl,
    ),
    Part(
        "conformance",
        "the suite of transports, NIXL, two processes, one device",
        _tests("test_conformance.py", "-k", "OneDevice"),
        _needs_nixl,
    ),
    Part(
        "conformance, two devices",
        "the same suite, memory of the second device",
        _tests("test_conformance.py", "-k", "SecondDevice"),
        _needs_second_device,
    ),
    Part(
        "conformance, mooncake",
        "the same suite over Mooncake's build for CUDA",
        _tests("test_conformance.py", "-k", "Mooncake"),
        _needs_mooncake,
    ),
    Part(
        "cell sums",
        "digests that the device computes against those of the processor",
        _tests("test_cell_sums.py"),
        _needs_torch,
    ),
    Part(
        "graph capture",
        "vLLM's cache write, captured and replayed, on views of each layout",
        _tests("test_graph_capture.py"),
        _needs_vllm,
    ),
    Part(
        "offload copies",
        "stores and loads between caches of the device and a pinned slab, TP 1 to 2 and 2 to 1, behind running kernels",
        _tests("test_offload_copies.py"),
        _needs_torch,
    ),
    Part(
        "offload rate",
        "bytes per second to a pinned slab and back: through the buffer, piece by piece, and one large copy by torch",
        ("benchmarks/device_offload.py",),
        _needs_torch,
    ),
    Part(
        "decode beside transfers",
        "the time between tokens of 32 requests while prompts of 7,900 tokens arrive, beside NixlConnector",
        ("benchmarks/vllm_decode.py",),
        _needs_pair,
    ),
    Part("engines", "two vLLM engines share a device: tokens as one engine's", _demo("sequential", 1), _needs_pair),
    Part("engines, concurrent", "the same behind a concurrent router", _demo("concurrent", 1), _needs_pair),
    Part(
        "engines, two devices",
        "TP 2 on two devices to TP 1 on the first",
        _demo("sequential", 2),
        _needs_pair_on_two_devices,
    ),
    Part(
        "engines, concurrent, two devices",
        "the same behind a concurrent router",
        _demo("concurrent", 2),
        _needs_pair_on_two_devices,
    ),
    Part(
        "engines, offload",
        "an engine stores, is killed and started again, and loads: tokens as without offload",
        _demo("offload", 1),
        _needs_vllm,
    ),
)


def run(part: Part) -> Outcome:
    """Run a part, unless an obstacle forbids it."""
    if reason := part.obstacle():
        return Outcome(part.name, part.shows, "cannot run", 0.0, reason)
    began_at = time.monotonic()
    with tempfile.TemporaryFile(mode="w+") as output:
        try:
            status = subprocess.run(
                [sys.executable, *part.arguments],
                cwd=ROOT,
                env=_environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=PART_SECONDS,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            status = -1
        output.seek(0)
        text = output.read()
    lines = [line for line in text.splitlines() if line.strip()]
    outcome = "passed" if status == 0 else "failed"
    if status:
        print(text, file=sys.stderr)
    return Outcome(part.name, part.shows, outcome, time.monotonic() - began_at, lines[-1] if lines else "")


def _environment() -> dict[str, str]:
    return {**os.environ, "KVFERRY_GPU": "1", "KVFERRY_NO_SKIPS": "1"}


def main() -> int:
    """Run all parts, print the table, write the JSON, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--json", type=Path, help="Write the outcomes to this file.")
    json_path = parser.parse_args().json
    no_device = _needs_device()
    outcomes = [run(part) for part in PARTS]
    table = Table("part", "shows", "outcome", "found")
    for each in outcomes:
        table.add_row(each.name, each.shows, each.outcome, each.found)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    if no_device:
        console.print(f"Nothing ran: {no_device}", markup=False, highlight=False)
    if json_path is not None:
        described = {"device": DEVICE, "obstacle": no_device, "parts": [asdict(each) for each in outcomes]}
        json_path.write_text(json.dumps(described, indent=2) + "\n")
    return exit_code(outcomes, no_device)


def exit_code(outcomes: Sequence[Outcome], no_device: str) -> int:
    """Return the exit code of the whole."""
    if no_device:
        return NO_DEVICE
    found = {each.outcome for each in outcomes}
    return FAILED if "failed" in found else SOME_CANNOT_RUN if "cannot run" in found else 0


if __name__ == "__main__":
    sys.exit(main())
