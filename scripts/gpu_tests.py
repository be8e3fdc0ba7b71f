"""Runs everything that awaits a GPU, each part in a process of its own: a table, and JSON where --json names a file.

Parts run beside each other, and after them, one at a time, those that measure. The JSON is written as each part ends.
Nothing is left out in silence: a part that cannot run here has its reason. Exit code 0: all parts ran and passed; 1: a
part failed; 2: this machine has no CUDA device, and no part ran; 3: all that ran passed, and others could not run.
"""

import argparse
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvferry.cli.demo import interrupted_by_signals
from kvferry.errors import KVFerryError
from kvferry.execution.device import find_device
from kvferry.harness.tiny_models import make_tiny_model

ROOT = Path(__file__).absolute().parent.parent
DEVICE, SECOND_DEVICE = "cuda:0", "cuda:1"
LIMIT_SECONDS, PART_SECONDS = 720.0, 400.0
"""The most that all parts take together, and that one takes."""
END_SECONDS = 20.0
"""What a part that is told to end has for ending its engines."""
SHARE, PART_OF_DEVICE = "@share@", 0.9
"""Stands for the part of a device's memory that an engine takes: a part starts two at a time."""
MOST_AT_ONCE, CORES_OF_PART = 4, 4
FILE = re.compile(r"@(tiny|small|adapter):([\w.-]+)@")
"""A tiny model, the small model of a published configuration, or an adapter of a tiny model; see ``Files``."""
HOPPER = 9
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
FAILED, NO_DEVICE, SOME_CANNOT_RUN = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Part:
    """A part: its name, what it shows, the arguments of Python, and why it cannot run here, empty where it can.

    A part that measures runs ``alone``. ``evidence`` is a pattern that the output of a part that passes must have.
    """

    name: str
    shows: str
    arguments: Sequence[str]
    obstacle: Callable[[], str]
    alone: bool = False
    evidence: str = ""


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


def _capability() -> int:
    """Return the first number of the device's compute capability."""
    import torch

    return int(torch.cuda.get_device_capability(DEVICE)[0])


def _needs_hopper() -> str:
    if reason := _needs_pair():
        return reason
    found = _capability()
    return "" if found == HOPPER else f"FlashAttention 3 is built for compute capability 9, the device has {found}"


def _needs_flashinfer() -> str:
    return _needs_pair() or ("" if importlib.util.find_spec("flashinfer") else "flashinfer is not installed")


def _needs_sparse() -> str:
    """Return why vLLM's indexer and sparse kernels cannot run here."""
    if reason := _needs_pair():
        return reason
    if (found := _capability()) < HOPPER:
        return f"sparse MLA needs compute capability 9, the device has {found}"
    vllm = importlib.util.find_spec("vllm")
    folders = [*(vllm.submodule_search_locations or ())] if vllm else []
    has_own = any((Path(folder) / "third_party/deep_gemm").is_dir() for folder in folders)
    return "" if has_own or importlib.util.find_spec("deep_gemm") else "deep_gemm is not installed"


def _demo(mode: str, prefill_tp: int, *more: str) -> tuple[str, ...]:
    """Return the demo with two engines at a time on the first device."""
    ranks = ("--prefill-tp", str(prefill_tp), "--decode-tp", "1")
    return "-m", "kvferry.cli.main", "demo", "--mode", mode, *ranks, "--gpu-memory", SHARE, *more


def _engines(
    name: str,
    shows: str,
    arguments: str = "",
    *,
    model: str = "qwen3-tiny",
    dtype: str = "float32",
    mode: str = "sequential",
    options: Sequence[str] = (),
    obstacle: Callable[[], str] = _needs_pair,
    evidence: str = "",
) -> Part:
    """Return a demo of a model with further arguments of both engines."""
    compared = "tokens" if dtype == "float32" else "every byte at the receiver"
    more = ("--model", model, "--dtype", dtype, *options)
    more += ("--engine-arguments", arguments) if arguments else ()
    return Part(f"engines, {name}", f"{shows}: {compared}", _demo(mode, 1, *more), obstacle, evidence=evidence)


def _speculative(**config: object) -> str:
    return shlex.join(("--speculative-config", json.dumps({"num_speculative_tokens": 3, **config})))


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
        alone=True,
    ),
    Part(
        "decode beside transfers",
        "the time between tokens of 32 requests while prompts of 7,900 tokens arrive, beside NixlConnector",
        ("benchmarks/vllm_decode.py",),
        _needs_pair,
        alone=True,
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
    _engines("Triton", "its attention", "--attention-backend TRITON_ATTN"),
    _engines(
        "FlashAttention 3",
        "its attention",
        "--attention-backend FLASH_ATTN --attention-config '{\"flash_attn_version\": 3}'",
        dtype="bfloat16",
        obstacle=_needs_hopper,
    ),
    _engines(
        "FlashInfer",
        "its attention",
        "--attention-backend FLASHINFER",
        dtype="bfloat16",
        obstacle=_needs_flashinfer,
    ),
    _engines("MLA", "DeepSeek V2", model="deepseek-mla-tiny", dtype="bfloat16"),
    _engines("MLA and experts", "DeepSeek V3", model="deepseek-v3-tiny", dtype="bfloat16"),
    _engines("FP8", "caches of 8 bits, scaled by tensor", "--kv-cache-dtype fp8", dtype="bfloat16"),
    _engines("FP8 MLA", "the same of MLA", "--kv-cache-dtype fp8", model="deepseek-mla-tiny", dtype="bfloat16"),
    _engines(
        "sparse MLA",
        "DeepSeek V3.2 and its indexer",
        model="@small:DeepSeek-V3.2@",
        dtype="bfloat16",
        obstacle=_needs_sparse,
    ),
    _engines(
        "sparse FP8 MLA",
        "the same in fp8_ds_mla",
        "--kv-cache-dtype fp8_ds_mla",
        model="@small:DeepSeek-V3.2@",
        dtype="bfloat16",
        obstacle=_needs_sparse,
    ),
    _engines("Gemma 3", "windows", model="gemma3-tiny"),
    _engines("gpt-oss", "windows and sinks", "--attention-backend TRITON_ATTN", model="gpt-oss-tiny"),
    _engines("Granite", "states of Mamba 2", "--no-enable-prefix-caching", model="granite-tiny"),
    _engines(
        "Qwen3-Next",
        "states of gated delta nets",
        "--no-enable-prefix-caching",
        model="qwen3-next-tiny",
        dtype="bfloat16",
    ),
    _engines(
        "LoRA",
        "all requests name an adapter",
        model="@tiny:qwen3-tiny@",
        options=("--adapter", "@adapter:qwen3-tiny@"),
    ),
    _engines("n-gram", "speculative decoding", _speculative(method="ngram", prompt_lookup_max=4)),
    _engines(
        "draft model",
        "speculative decoding",
        _speculative(method="draft_model", model="@tiny:qwen3-one-head@"),
    ),
    _engines("64 at once", "64 requests", mode="concurrent", options=("--prompts", "64", "--at-once", "64")),
    _engines(
        "preemption",
        "16 requests in half of the blocks that they need",
        "--num-gpu-blocks-override 300 --max-num-batched-tokens 256 --no-scheduler-reserve-full-isl",
        mode="concurrent",
        options=("--at-once", "16", "--block-size", "16"),
        evidence=r"[1-9]\d* preemptions",
    ),
)


@dataclass(frozen=True, slots=True)
class Files:
    """Makes the files that parts name, once each, below ``folder``."""

    folder: Path
    lock: threading.Lock

    def written(self, argument: str) -> str:
        """Return an argument with the paths of the files that it names, which exist then."""
        with self.lock:
            return FILE.sub(lambda found: str(self._make(*found.groups())), argument)

    def _make(self, kind: str, name: str) -> Path:
        if kind == "tiny":
            return make_tiny_model(name, self.folder)
        if str(ROOT) not in sys.path:
            sys.path.insert(0, str(ROOT))
        if kind == "small":
            from tests.small_models.weights import write_small_model

            return write_small_model(name, self.folder, "bfloat16", quantised=False)
        from tests.host.vllm.lora_adapter import make_adapter

        return make_adapter(make_tiny_model(name, self.folder), self.folder / f"adapter-{name}")


@dataclass(frozen=True, slots=True)
class Run:
    """One run of all parts: ``at_once`` of them beside each other, and none after ``deadline``, of the monotonic clock.

    ``processes`` are those that run now.
    """

    files: Files
    at_once: int
    deadline: float
    processes: "set[subprocess.Popen[str]]"

    def outcome(self, part: Part) -> Outcome:
        """Run a part, unless an obstacle forbids it or the time is over."""
        if reason := part.obstacle():
            return Outcome(part.name, part.shows, "cannot run", 0.0, reason)
        seconds = min(PART_SECONDS, self.deadline - time.monotonic())
        if seconds <= 0:
            return Outcome(part.name, part.shows, "cannot run", 0.0, "no time was left: see --seconds, --at-once")
        began_at = time.monotonic()
        try:
            status, text = self._run(part, seconds)
        except Exception as error:  # of the files: that part has failed, the others run
            status, text = 1, repr(error)
        lines = [line for line in text.splitlines() if line.strip()]
        found = lines[-1] if lines else ""
        if status == 0 and part.evidence and not re.search(part.evidence, text):
            status, found = 1, f"the output has no {part.evidence!r}"
        if status is None:
            found = f"had not ended after {seconds:.0f} s: {found}"
        if status != 0:
            print(f"--- {part.name}\n{text}", file=sys.stderr)
        outcome = "passed" if status == 0 else "failed"
        return Outcome(part.name, part.shows, outcome, time.monotonic() - began_at, found)

    def _run(self, part: Part, seconds: float) -> tuple[int | None, str]:
        """Return the exit status, None where the time was over, and the output."""
        share = f"{PART_OF_DEVICE / (2 * self.at_once):.3f}"
        arguments = [share if argument == SHARE else self.files.written(argument) for argument in part.arguments]
        with tempfile.TemporaryFile(mode="w+") as output:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                env=_environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                process_group=0,
            )
            self.processes.add(process)
            try:
                status: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                status = None
                end([process])
            self.processes.discard(process)
            output.seek(0)
            return status, output.read()

    def all(self, parts: Sequence[Part], on_end: Callable[[Outcome], None]) -> None:
        """Run all parts, those that run alone at last; tell each outcome as it comes."""
        beside, alone = ([part for part in parts if part.alone == is_alone] for is_alone in (False, True))
        try:
            for group, at_once in ((beside, self.at_once), (alone, 1)):
                with ThreadPoolExecutor(at_once) as pool:
                    try:
                        for future in as_completed([pool.submit(self.outcome, part) for part in group]):
                            on_end(future.result())
                    except BaseException:
                        pool.shutdown(wait=False, cancel_futures=True)
                        end([*self.processes])
                        raise
        finally:
            end([*self.processes])


def end(processes: "Sequence[subprocess.Popen[str]]") -> None:
    """End processes with all of their groups; those that can clean up first."""
    for process in processes:
        process.terminate()
    until = time.monotonic() + END_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _environment() -> dict[str, str]:
    return {**os.environ, "KVFERRY_GPU": "1", "KVFERRY_NO_SKIPS": "1"}


def main() -> int:
    """Run all parts, print the table, write the JSON, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--json", type=Path, help="Write the outcomes to this file, as each part ends.")
    default = max(1, min(MOST_AT_ONCE, len(os.sched_getaffinity(0)) // CORES_OF_PART))
    parser.add_argument("--at-once", type=int, default=default, help="Parts beside each other (%(default)s here).")
    parser.add_argument("--seconds", type=float, default=LIMIT_SECONDS, help="Limit of all parts (%(default)s).")
    options = parser.parse_args()
    if options.at_once < 1:
        parser.error("--at-once needs a number from 1 on")
    no_device = _needs_device()
    outcomes = {part.name: Outcome(part.name, part.shows, "cannot run", 0.0, "was not reached") for part in PARTS}
    console = Console(width=None if sys.stdout.isatty() else 160)

    def write(outcome: Outcome) -> None:
        outcomes[outcome.name] = outcome
        if outcome.outcome != "cannot run":
            console.print(f"{outcome.outcome} {outcome.seconds:4.0f} s {outcome.name}", markup=False, highlight=False)
        if options.json is not None:
            parts = [asdict(each) for each in outcomes.values()]
            options.json.write_text(
                json.dumps({"device": DEVICE, "obstacle": no_device, "parts": parts}, indent=2) + "\n"
            )

    with interrupted_by_signals(), tempfile.TemporaryDirectory(prefix="kvferry-gpu-") as folder:
        files = Files(Path(folder), threading.Lock())
        Run(files, options.at_once, time.monotonic() + options.seconds, set()).all(PARTS, write)
    table = Table("part", "shows", "outcome", "found")
    for each in outcomes.values():
        table.add_row(each.name, each.shows, each.outcome, each.found)
    console.print(table)
    if no_device:
        console.print(f"Nothing ran: {no_device}", markup=False, highlight=False)
    return exit_code([*outcomes.values()], no_device)


def exit_code(outcomes: Sequence[Outcome], no_device: str) -> int:
    """Return the exit code of the whole."""
    if no_device:
        return NO_DEVICE
    found = {each.outcome for each in outcomes}
    return FAILED if "failed" in found else SOME_CANNOT_RUN if "cannot run" in found else 0


if __name__ == "__main__":
    sys.exit(main())
