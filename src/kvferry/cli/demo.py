"""``kvferry demo``: prefill on one vLLM engine, decode on another, and compare with one engine alone.

Requests go through vllm-router: with ``--mode sequential`` by what the prefill engine answers, with ``--mode
concurrent`` by a transfer id that the router makes. With ``--mode offload`` one engine loads what it computed before.
"""

import json
import os
import shutil
import signal
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import numpy as np
import typer
from rich.console import Console
from rich.status import Status

from kvferry.cli.console import open_console
from kvferry.cli.demo_report import (
    CacheShape,
    DemoReport,
    MovedCache,
    OffloadReport,
    RequestLine,
    find_offload_problems,
    find_problems,
    print_offload_report,
    print_report,
    read_failures,
    read_log_problems,
    read_transfer_log,
)
from kvferry.errors import Reason, SettingsError
from kvferry.handoff.wire.keys import make_keys
from kvferry.harness.child_process import LaunchError
from kvferry.harness.launch import (
    HOST,
    EngineSettings,
    Role,
    Server,
    cache_block_size,
    cache_usage,
    free_port,
    gpu_memory_arguments,
    prompt_tokens,
    spread_over_cores,
    start_engine,
    start_router,
    stop_servers,
    wait_until_ready,
)
from kvferry.harness.tiny_models import make_tiny_model
from kvferry.harness.virtual_hosts import VirtualHost, virtual_hosts
from kvferry.layout.named_layouts import NamedLayout
from kvferry.models.families import model_caches, uniform_cache
from kvferry.transport.registry import check_setting

CONNECTOR = "KVFerryConnector"
SEQUENTIAL, CONCURRENT, OFFLOAD = "sequential", "concurrent", "offload"
MODES = (SEQUENTIAL, CONCURRENT, OFFLOAD)
TRANSFER_LOG = "transfers.jsonl"
MAX_MODEL_LEN = 4096
DTYPE = "float32"  # as the engines are started
LONG_LIMITS = {"lease_seconds": 180.0}
"""With five computing processes on two cores, a process can get no core for half a minute."""
CACHE_BYTES = 768 << 20
"""Bytes of one engine's cache, over all ranks."""

OUTPUT_TOKENS = 16
CONCURRENT_REQUESTS = 4
REQUEST_SECONDS = 180.0
FREE_SECONDS = 2.0
FEWEST_PROMPTS = 2
SHORTEST_PROMPT, LONGEST_PROMPT = 10, 3000

Announce = Callable[[str, str], None]
"""Called with the name of a server and a text about its current step."""


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """The options of the demo. With None the connector chooses ``layout`` and the engine ``block_size``."""

    prefill_tp: int = 2
    decode_tp: int = 1
    layout: str | None = None
    transport: str = "auto"
    mode: str = SEQUENTIAL
    num_prompts: int = 16
    block_size: int | None = None
    num_hosts: int = 1
    gpu_memory: float | None = None

    @property
    def is_concurrent(self) -> bool:
        """Whether the router names the transfer, before the prompt is computed."""
        return self.mode == CONCURRENT

    def engine(self, role: Role, tp_size: int, model: Path, folder: Path, **more: Any) -> EngineSettings:
        """Return the settings of the engine with ``role``; ``more`` are settings of its connector."""
        settings: dict[str, Any] = {"transport": self.transport, **LONG_LIMITS}
        if self.layout is not None:
            settings["layout"] = self.layout
        if role == "kv_consumer":
            settings["transfer_log"] = str(folder / TRANSFER_LOG)
        settings |= more
        return EngineSettings(
            model,
            role=role,
            tensor_parallel_size=tp_size,
            connector=CONNECTOR,
            connector_settings=settings,
            max_model_len=MAX_MODEL_LEN,
            block_size=self.block_size,
            kv_cache_bytes=CACHE_BYTES // tp_size,
            cores=spread_over_cores(tp_size, from_last=role == "kv_consumer"),
            arguments=gpu_memory_arguments(self.gpu_memory),
        )


@dataclass(frozen=True, slots=True)
class DemoPlaces:
    """The engines' virtual hosts by engine, and the keys made for them; without hosts all run on loopback."""

    hosts: dict[str, VirtualHost] = field(default_factory=dict)
    router_address: str = HOST
    keys: Path | None = None

    def address(self, engine: str) -> str:
        """Return the address at which an engine's API server listens."""
        return self.hosts[engine].ipv4 if engine in self.hosts else HOST

    def connector_settings(self, engine: str) -> dict[str, Any]:
        """Return the settings with which an engine's connector reaches the other engine's host and is reached there."""
        if engine not in self.hosts:
            return {}
        host = self.hosts[engine]
        others = [other.name for other in self.hosts.values() if other != host]
        return {"host": host.ipv4, "advertised_host": host.name, "keys": str(self.keys), "allowed_hosts": others}


@contextmanager
def demo_places(num_hosts: int, folder: Path) -> Iterator[DemoPlaces]:
    """Yield the places of the demo, with ``num_hosts`` of 2 on virtual hosts; the caller is then on the router's.

    Raises :class:`LaunchError` as :func:`virtual_hosts` does.
    """
    if num_hosts == 1:
        yield DemoPlaces()
        return
    keys = make_keys(folder / "keys").folder
    with virtual_hosts(("prefill-0", "decode-0", "router-0"), folder) as (prefill, decode, router), router.entered():
        yield DemoPlaces({"prefill": prefill, "decode": decode}, router.ipv4, keys)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a server: the tokens, or an error."""

    request_id: str
    token_ids: tuple[int, ...]
    error: str | None = None


def vocabulary_size(model: Path) -> int:
    """Return the number of token ids of the model in a folder."""
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


def send_prompts(
    url: str,
    prompts: Sequence[Sequence[int]],
    on_answer: Callable[[int], None],
    cache_salt: str | None = None,
) -> list[Answer]:
    """Send the prompts, four at a time, and return the answers in the same order.

    ``on_answer`` is called with the number of answers. An interrupt does not wait for running requests, which end with
    the servers.
    """
    pool = ThreadPoolExecutor(CONCURRENT_REQUESTS, thread_name_prefix="prompt")
    try:
        answers = []
        for answer in pool.map(lambda prompt: _send(url, prompt, cache_salt), prompts):
            answers.append(answer)
            on_answer(len(answers))
        return answers
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _send(url: str, prompt: Sequence[int], cache_salt: str | None) -> Answer:
    body = {
        "model": "model",
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        # The URL is that of a server which the demo started.
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as response:  # nosec B310
            answer = json.load(response)
        return Answer(answer["id"], tuple(answer["choices"][0]["token_ids"]))
    except urllib.error.HTTPError as error:
        return Answer("", (), f"HTTP {error.code}: {error.read(500).decode(errors='replace')}")
    except (OSError, ValueError, KeyError) as error:
        return Answer("", (), repr(error))


@dataclass(frozen=True, slots=True)
class DemoEngines:
    """The running processes."""

    prefill: Server
    decode: Server
    router: Server

    def cache_usages(self) -> dict[str, float]:
        """Return the used fraction of each engine's cache blocks."""
        return {
            name: cache_usage(server.metrics()) for name, server in (("prefill", self.prefill), ("decode", self.decode))
        }

    def remaining_processes(self) -> int:
        """Return the number of their living processes."""
        return sum(len(server.process.process_ids()) for server in (self.prefill, self.decode, self.router))


def demo(
    model: Annotated[str, typer.Option(help="A tiny model's name, or the folder of a model.")] = "qwen3-tiny",
    prefill_tp: Annotated[
        int, typer.Option(min=1, help="Tensor parallel size of the prefill engine; of the first one with offload.")
    ] = 2,
    decode_tp: Annotated[
        int, typer.Option(min=1, help="Tensor parallel size of the decode engine; after the restart with offload.")
    ] = 1,
    layout: Annotated[str | None, typer.Option(help="KV cache layout; the connector chooses by default.")] = None,
    transport: Annotated[str, typer.Option(help="auto, cma, nixl or mooncake.")] = "auto",
    prompts: Annotated[int, typer.Option(min=FEWEST_PROMPTS, help="Number of prompts.")] = 16,
    block_size: Annotated[int | None, typer.Option(help="Tokens of a block; the engine chooses by default.")] = None,
    mode: Annotated[str, typer.Option(help="The router's flow, sequential or concurrent; or offload.")] = SEQUENTIAL,
    hosts: Annotated[
        int, typer.Option(min=1, max=2, help="2: each engine on a virtual host of its own. Needs root.")
    ] = 1,
    gpu_memory: Annotated[
        float | None,
        typer.Option(help="Part of each GPU's memory that an engine may take, for engines that share a GPU: 0.45."),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the folder with the model and the logs.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the report as JSON on standard output.")] = False,
) -> None:
    """Prefill on one vLLM engine, decode on another, and compare each answer with one engine alone.

    With --mode offload one engine with a small cache gets the same prompts twice, is killed, and gets them again after
    a restart with --decode-tp ranks: they come from host memory, and then from disk.

    With --hosts 2 prefill, decode and router run in network namespaces of their own, with other host names, boot ids
    and addresses, and with keys that are made for the run.

    Exit code 1: a token differs, an engine computed tokens that it should have received, or blocks or processes are
    left.

    Try:

    kvferry demo --mode concurrent --prefill-tp 1

    kvferry demo --mode offload

    kvferry demo --hosts 2

    kvferry demo --model path/to/model --prompts 4 --json
    """
    _check(mode, layout, transport, hosts, gpu_memory)
    console = open_console(stderr=json_output)
    with _interrupted_by_signals(), _folder(keep, console) as folder:
        report: DemoReport | OffloadReport
        if mode == OFFLOAD:
            from kvferry.cli.demo_offload import OffloadOptions, run_offload_demo  # imports xxhash, maybe missing

            options = OffloadOptions(prefill_tp, decode_tp, layout, prompts, block_size, gpu_memory)
            report = run_offload_demo(model, folder, options, console)
            report = replace(report, problems=tuple(find_offload_problems(report)))
            print_offload_report(report, console)
        else:
            settings = DemoSettings(
                prefill_tp, decode_tp, layout, transport, mode, prompts, block_size, hosts, gpu_memory
            )
            report = _run(model, settings, folder, console)
            report = replace(report, problems=tuple(find_problems(report)))
            print_report(report, console)
        if json_output:
            print(json.dumps(report.to_json(), indent=2))
        if report.problems:
            for line in read_log_problems(sorted(folder.glob("*.log"))):
                console.print(line, markup=False, highlight=False, style="dim")
            raise typer.Exit(1)


def _check(mode: str, layout: str | None, transport: str, num_hosts: int, gpu_memory: float | None) -> None:
    """Raise :class:`SettingsError` for an option that cannot be followed."""
    if gpu_memory is not None and not 0 < gpu_memory <= 1:
        what = f"--gpu-memory {gpu_memory} is no part of a GPU's memory."
        raise SettingsError(Reason.INVALID_SETTING, what, "Name a number above 0, 1 at most: 0.45 for two engines.")
    if mode not in MODES:
        raise SettingsError(Reason.INVALID_SETTING, f"mode {mode!r} does not exist.", f"Use: {', '.join(MODES)}.")
    if layout is not None:
        NamedLayout.parse(layout)
    if transport != "auto":
        check_setting(transport)
        if mode == OFFLOAD:
            what = f"transport {transport!r}: an engine that offloads moves caches to memory of its own host."
            raise SettingsError(Reason.INVALID_SETTING, what, "Leave out --transport.")
    if mode == OFFLOAD and num_hosts > 1:
        what = "--hosts: an engine that offloads moves caches to memory of its own host."
        raise SettingsError(Reason.INVALID_SETTING, what, "Leave out --hosts.")


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Handle SIGTERM and SIGHUP like Ctrl-C, so that servers and files are cleaned up."""

    def interrupt(_number: int, _frame: Any) -> NoReturn:
        raise KeyboardInterrupt

    earlier = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


@contextmanager
def _folder(keep: bool, console: Console) -> Iterator[Path]:
    """Yield a temporary folder for the model and the logs. The folder stays with ``keep`` and after a failure."""
    folder = Path(tempfile.mkdtemp(prefix="kvferry-demo-"))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "torchinductor")  # importing torch creates this folder
    try:
        yield folder
    except (LaunchError, typer.Exit):
        keep = True
        raise
    finally:
        if keep:
            console.print(f"The model and the logs are in {folder}.")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _run(model: str, settings: DemoSettings, folder: Path, console: Console) -> DemoReport:
    with console.status("making the model") as status:
        path = Path(model) if Path(model).is_dir() else make_tiny_model(model, folder)
        caches = model_caches(path, DTYPE)
        cache, tp_sizes = uniform_cache(caches), (settings.prefill_tp, settings.decode_tp)
        for tp_size in tp_sizes:
            cache.heads(0, tp_size)  # raises before the engines start where so many ranks cannot split the heads
        prompts = make_prompts(settings.num_prompts, vocabulary_size(path))
        started_at = time.monotonic()

        def announce(name: str, what: str) -> None:
            status.update(f"{name}: {what}")

        with (
            demo_places(settings.num_hosts, folder) as places,
            running_engines(settings, places, path, folder, announce) as engines,
        ):
            console.print(f"Engines ready after {time.monotonic() - started_at:.0f} s.")
            shape = CacheShape(len(caches.layers), cache, cache_block_size(engines.decode.url), *tp_sizes)
            report = _measure(engines, prompts, shape, folder / TRANSFER_LOG, status)
        console.print(f"The whole run took {time.monotonic() - started_at:.0f} s.")
        left = engines.remaining_processes()
        return replace(report, mode=settings.mode, num_hosts=settings.num_hosts, processes_left=left)


def _measure(
    engines: DemoEngines, prompts: Sequence[Sequence[int]], shape: CacheShape, log: Path, status: Status
) -> DemoReport:
    at_start = prompt_tokens(engines.decode.metrics())
    answers = send_prompts(
        engines.router.url, prompts, on_answer=lambda count: status.update(f"through the router: {count} answers")
    )
    usages, seconds = _wait_until_free(engines)
    after_router = prompt_tokens(engines.decode.metrics())
    alone = send_prompts(
        engines.decode.url,
        prompts,
        cache_salt=uuid.uuid4().hex,
        on_answer=lambda count: status.update(f"decode engine alone: {count} answers"),
    )
    after_alone = prompt_tokens(engines.decode.metrics())
    moved = read_transfer_log(log)
    lines = [_line(*parts, moved) for parts in zip(prompts, answers, alone, strict=True)]
    return DemoReport(
        lines=tuple(lines),
        shape=shape,
        layout="+".join(sorted({cache.layout for cache in moved.values()})) or "-",
        received=after_router - at_start,
        reference=after_alone - after_router,
        cache_usages=usages,
        seconds_until_free=seconds,
        failures=read_failures(log),
    )


def _wait_until_free(engines: DemoEngines) -> tuple[dict[str, float], float]:
    """Wait up to two seconds for both caches to be free; return their usage and the waited seconds."""
    began_at = time.monotonic()
    while True:
        usages, seconds = engines.cache_usages(), time.monotonic() - began_at
        if not any(usages.values()) or seconds > FREE_SECONDS:
            return usages, seconds
        time.sleep(0.05)


def _line(prompt: Sequence[int], answer: Answer, alone: Answer, moved: dict[str, MovedCache]) -> RequestLine:
    found = [
        cache for request_id, cache in moved.items() if answer.request_id and request_id.startswith(answer.request_id)
    ]
    cache = found[0] if len(found) == 1 else MovedCache()
    identical = bool(answer.token_ids) and answer.token_ids == alone.token_ids
    error = answer.error or alone.error
    return RequestLine(**asdict(cache), prompt_tokens=len(prompt), identical=identical, error=error)


@contextmanager
def running_engines(
    settings: DemoSettings, places: DemoPlaces, model: Path, folder: Path, announce: Announce
) -> Iterator[DemoEngines]:
    """Start both engines at the same time, then the router; end all of them on every exit."""
    servers: list[Server] = []

    def announce_age(name: str, seconds: float) -> None:
        announce(name, f"starting, {seconds:.0f} s")

    try:
        bootstrap_port = free_port()
        roles: tuple[tuple[str, Role, int], ...] = (
            ("prefill", "kv_producer", settings.prefill_tp),
            ("decode", "kv_consumer", settings.decode_tp),
        )
        for name, role, tp_size in roles:
            announce(name, "starting")
            port = free_port()
            more = places.connector_settings(name)
            if settings.is_concurrent and role == "kv_producer":
                more |= {"bootstrap_port": bootstrap_port}
            engine = settings.engine(role, tp_size, model, folder, **more)
            servers.append(start_engine(name, engine, folder, port, places.hosts.get(name)))
        wait_until_ready(servers, on_progress=announce_age)
        servers.append(_start_router(settings, servers, bootstrap_port, folder))
        wait_until_ready(servers[2:], timeout_seconds=60.0, on_progress=announce_age)
        announce("engines", "ready")
        yield DemoEngines(*servers)
    finally:
        announce("engines", "stopping")
        stop_servers(servers)


def _start_router(settings: DemoSettings, servers: Sequence[Server], bootstrap_port: int, folder: Path) -> Server:
    """Start the router of the flow."""
    prefill, decode = servers
    if settings.is_concurrent:
        arguments = ("--kv-connector", "mooncake", "--prefill", prefill.url, str(bootstrap_port))
        return start_router([], [decode.url], folder, arguments=arguments)
    return start_router([prefill.url], [decode.url], folder)


def make_prompts(num_prompts: int, vocabulary_size: int) -> list[list[int]]:
    """Return prompts of random tokens; their lengths are a geometric series from 10 to 3000.

    >>> [len(prompt) for prompt in make_prompts(5, vocabulary_size=100)]
    [10, 42, 173, 721, 3000]
    """
    generator = np.random.default_rng(0)
    lengths = np.rint(np.geomspace(SHORTEST_PROMPT, LONGEST_PROMPT, num_prompts)).astype(int)
    return [generator.integers(0, vocabulary_size, length).tolist() for length in lengths]
