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
from typing import Annotated, Any, NoReturn, Self, TypeVar

import numpy as np
import typer
from rich.console import Console
from rich.status import Status

from kvferry.cli.console import Announce, open_console
from kvferry.cli.demo_report import (
    CacheShape,
    DemoReport,
    MovedCache,
    OffloadReport,
    RequestLine,
    read_failures,
    read_log_problems,
    read_transfer_log,
)
from kvferry.errors import Reason, SettingsError
from kvferry.handoff.wire.trust import make_keys
from kvferry.harness.child_process import LaunchError
from kvferry.harness.launch import (
    READY_SECONDS,
    EngineSettings,
    Role,
    Server,
    cache_block_size,
    cache_usage,
    free_port,
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
from kvferry.models.groups import AttentionCache
from kvferry.transport.registry import check_setting

SEQUENTIAL, CONCURRENT, OFFLOAD = "sequential", "concurrent", "offload"
MODES = (SEQUENTIAL, CONCURRENT, OFFLOAD)
TRANSFER_LOG = "transfers.jsonl"
DTYPE = "float32"  # as the engines are started
LONG_LEASE = 180.0
"""With five computing processes on two cores, a process can get no core for half a minute."""
CACHE_BYTES = 768 << 20
"""Bytes of one engine's cache, over all ranks."""

OUTPUT_TOKENS = 16
CONCURRENT_REQUESTS = 4
REQUEST_SECONDS = 180.0
FREE_SECONDS = 2.0
POLL_SECONDS = 0.05
FEWEST_PROMPTS = 2
SHORTEST_PROMPT, LONGEST_PROMPT = 10, 3000
Value = TypeVar("Value")


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

    def check(self) -> None:
        """Raise :class:`SettingsError` for an option that cannot be followed."""
        if self.gpu_memory is not None and not 0 < self.gpu_memory <= 1:
            what = f"--gpu-memory {self.gpu_memory} is no part of a GPU's memory."
            raise SettingsError(Reason.INVALID_SETTING, what, "Name a number above 0, 1 at most: 0.45 for two engines.")
        if self.mode not in MODES:
            what = f"mode {self.mode!r} does not exist."
            raise SettingsError(Reason.INVALID_SETTING, what, f"Use: {', '.join(MODES)}.")
        if self.layout is not None:
            NamedLayout.parse(self.layout)
        if self.transport != "auto":
            check_setting(self.transport)
        if self.mode == OFFLOAD and (self.transport != "auto" or self.num_hosts > 1):
            option, named = (
                ("--hosts",) * 2 if self.transport == "auto" else ("--transport", f"transport {self.transport!r}")
            )
            what = f"{named}: an engine that offloads moves caches to memory of its own host."
            raise SettingsError(Reason.INVALID_SETTING, what, f"Leave out {option}.")

    def engine(self, role: Role, tp_size: int, model: Path, folder: Path, **more: Any) -> EngineSettings:
        """Return the settings of the engine with ``role``; ``more`` are settings of its connector."""
        settings: dict[str, Any] = {"transport": self.transport, "lease_seconds": LONG_LEASE}
        settings |= {"transfer_log": str(folder / TRANSFER_LOG)} if role == "kv_consumer" else {}
        return EngineSettings(
            model,
            role=role,
            tensor_parallel_size=tp_size,
            connector_settings=settings | more,
            block_size=self.block_size,
            kv_cache_bytes=CACHE_BYTES // tp_size,
            cores=spread_over_cores(tp_size, from_last=role == "kv_consumer"),
            gpu_memory=self.gpu_memory,
            layout=self.layout,
        )


@dataclass(frozen=True, slots=True)
class DemoPlaces:
    """The engines' virtual hosts by engine, and the keys made for them; without hosts all run on loopback."""

    hosts: dict[str, VirtualHost] = field(default_factory=dict)
    keys: Path | None = None

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
        yield DemoPlaces({"prefill": prefill, "decode": decode}, keys)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a server: the tokens, or an error."""

    request_id: str
    token_ids: tuple[int, ...]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class DemoModel:
    """The model in the folder ``path``, whose layers have equal caches."""

    path: Path
    num_layers: int
    cache: AttentionCache

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the model in a folder. Raises :class:`SettingsError` as :func:`uniform_cache` does."""
        caches = model_caches(path, DTYPE)
        return cls(path, len(caches.layers), uniform_cache(caches))

    @property
    def vocabulary_size(self) -> int:
        """The number of token ids."""
        return int(json.loads((self.path / "config.json").read_text())["vocab_size"])


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
    body = {"model": "model", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    body |= {"cache_salt": cache_salt} if cache_salt is not None else {}
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
    settings = DemoSettings(prefill_tp, decode_tp, layout, transport, mode, prompts, block_size, hosts, gpu_memory)
    settings.check()
    console = open_console(stderr=json_output)
    with interrupted_by_signals(), folder_for(keep, console) as folder:
        run: Callable[[DemoSettings, DemoModel, Path, Status], DemoReport | OffloadReport] = run_handoff
        if mode == OFFLOAD:
            from kvferry.cli.demo_offload import run_offload as run  # imports xxhash, maybe missing
        with console.status("making the model") as status:
            found = DemoModel.read(Path(model) if Path(model).is_dir() else make_tiny_model(model, folder))
            for tp_size in (prefill_tp, decode_tp):
                found.cache.heads(0, tp_size)  # raises before the engines start where ranks cannot split the heads
            started_at = time.monotonic()
            report = run(settings, found, folder, status)
            console.print(f"The whole run took {time.monotonic() - started_at:.0f} s.")
        report.print(console)
        if json_output:
            print(json.dumps(report.to_json(), indent=2))
        if report.problems:
            for line in read_log_problems(sorted(folder.glob("*.log"))):
                console.print(line, markup=False, highlight=False, style="dim")
            raise typer.Exit(1)


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
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
def folder_for(keep: bool, console: Console) -> Iterator[Path]:
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


def run_handoff(settings: DemoSettings, model: DemoModel, folder: Path, status: Status) -> DemoReport:
    """Run the demo of two engines and a router in ``folder``. Raises :class:`KVFerryError`."""
    prompts = make_prompts(settings.num_prompts, model.vocabulary_size)
    started_at = time.monotonic()
    with (
        demo_places(settings.num_hosts, folder) as places,
        _engines_and_router(settings, places, model.path, folder, status.update) as servers,
    ):
        status.console.print(f"Engines ready after {time.monotonic() - started_at:.0f} s.")
        shape = CacheShape(
            model.num_layers, model.cache, cache_block_size(servers[1].url), settings.prefill_tp, settings.decode_tp
        )
        report = _measure(servers, prompts, shape, folder / TRANSFER_LOG, status.update)
    left = sum(len(server.process.process_ids()) for server in servers)
    return replace(report, mode=settings.mode, num_hosts=settings.num_hosts, processes_left=left)


def _measure(
    servers: Sequence[Server], prompts: Sequence[Sequence[int]], shape: CacheShape, log: Path, announce: Announce
) -> DemoReport:
    prefill, decode, router = servers
    at_start = prompt_tokens(decode.metrics())
    answers = send_prompts(router.url, prompts, lambda count: announce(f"through the router: {count} answers"))
    began_at = time.monotonic()
    usages = poll(
        lambda: {name: cache_usage(server.metrics()) for name, server in (("prefill", prefill), ("decode", decode))},
        lambda usages: not any(usages.values()),
        FREE_SECONDS,
    )
    seconds = time.monotonic() - began_at
    after_router = prompt_tokens(decode.metrics())
    alone = send_prompts(
        decode.url, prompts, lambda count: announce(f"decode engine alone: {count} answers"), uuid.uuid4().hex
    )
    after_alone = prompt_tokens(decode.metrics())
    moved = read_transfer_log(log)
    return DemoReport(
        lines=tuple(_line(*parts, moved) for parts in zip(prompts, answers, alone, strict=True)),
        shape=shape,
        layout="+".join(sorted({cache.layout for cache in moved.values()})) or "-",
        received=after_router - at_start,
        reference=after_alone - after_router,
        cache_usages=usages,
        seconds_until_free=seconds,
        failures=read_failures(log),
    )


def _line(prompt: Sequence[int], answer: Answer, alone: Answer, moved: dict[str, MovedCache]) -> RequestLine:
    found = [
        cache for request_id, cache in moved.items() if answer.request_id and request_id.startswith(answer.request_id)
    ]
    cache = found[0] if len(found) == 1 else MovedCache()
    identical = bool(answer.token_ids) and answer.token_ids == alone.token_ids
    error = answer.error or alone.error
    return RequestLine(**asdict(cache), prompt_tokens=len(prompt), identical=identical, error=error)


@contextmanager
def _engines_and_router(
    settings: DemoSettings, places: DemoPlaces, model: Path, folder: Path, announce: Announce
) -> Iterator[list[Server]]:
    """Start prefill and decode engine at the same time, then the router; end all of them on every exit."""
    is_concurrent, bootstrap_port = settings.mode == CONCURRENT, free_port()
    roles: tuple[tuple[str, Role, int], ...] = (
        ("prefill", "kv_producer", settings.prefill_tp),
        ("decode", "kv_consumer", settings.decode_tp),
    )
    with running_servers(announce) as servers:
        for name, role, tp_size in roles:
            more = places.connector_settings(name)
            if is_concurrent and role == "kv_producer":
                more |= {"bootstrap_port": bootstrap_port}
            engine = settings.engine(role, tp_size, model, folder, **more)
            servers.append(start_engine(name, engine, folder, host=places.hosts.get(name)))
        wait_for(servers, announce)
        prefill, decode = servers
        if is_concurrent:  # the router names the transfer, before the prompt is computed
            arguments = ("--kv-connector", "mooncake", "--prefill", prefill.url, str(bootstrap_port))
            servers.append(start_router([], [decode.url], folder, arguments=arguments))
        else:
            servers.append(start_router([prefill.url], [decode.url], folder))
        wait_for(servers[2:], announce, 60.0)
        yield servers


@contextmanager
def running_servers(announce: Announce) -> Iterator[list[Server]]:
    """Yield a list for servers, and end those that are in it on every exit."""
    servers: list[Server] = []
    try:
        yield servers
    finally:
        announce("stopping the engines")
        stop_servers(servers)


def wait_for(servers: Sequence[Server], announce: Announce, timeout_seconds: float = READY_SECONDS) -> None:
    """Wait until every server answers. Raises :class:`LaunchError` as :func:`wait_until_ready` does."""
    wait_until_ready(servers, timeout_seconds, lambda name, age: announce(f"{name}: starting, {age:.0f} s"))


def poll(read: Callable[[], Value], is_done: Callable[[Value], bool], seconds: float) -> Value:
    """Return the first value that is done, or the last one after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not is_done(found := read()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return found


def make_prompts(num_prompts: int, vocabulary_size: int) -> list[list[int]]:
    """Return prompts of random tokens; their lengths are a geometric series from 10 to 3000.

    >>> [len(prompt) for prompt in make_prompts(5, vocabulary_size=100)]
    [10, 42, 173, 721, 3000]
    """
    generator = np.random.default_rng(0)
    lengths = np.rint(np.geomspace(SHORTEST_PROMPT, LONGEST_PROMPT, num_prompts)).astype(int)
    return [generator.integers(0, vocabulary_size, length).tolist() for length in lengths]
