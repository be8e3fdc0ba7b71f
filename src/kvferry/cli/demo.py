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
from contextlib import contextmanager, suppress
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
    preemptions,
    prompt_tokens,
    spread_over_cores,
    start_engine,
    start_router,
    stop_servers,
    visible_devices,
    wait_until_ready,
    words_of,
)
from kvferry.harness.tiny_models import make_tiny_model
from kvferry.harness.virtual_hosts import VirtualHost, virtual_hosts
from kvferry.layout.named_layouts import NamedLayout
from kvferry.models.families import ModelCaches, model_caches, uniform_cache
from kvferry.models.groups import AttentionCache
from kvferry.transport.registry import check_setting

SEQUENTIAL, CONCURRENT, OFFLOAD = "sequential", "concurrent", "offload"
MODES = (SEQUENTIAL, CONCURRENT, OFFLOAD)
TRANSFER_LOG = "transfers.jsonl"
EXACT = "float32"
"""The type in which an engine computes the same tokens whatever shares a step."""
DTYPES = (EXACT, "bfloat16", "float16")
MODEL, ADAPTER = "model", "adapter"
"""What requests name."""
OWN_ARGUMENTS = {
    "--model": "--model",
    "--dtype": "--dtype",
    "--tensor-parallel-size": "--prefill-tp and --decode-tp",
    "-tp": "--prefill-tp and --decode-tp",
    "--gpu-memory-utilization": "--gpu-memory",
    "--block-size": "--block-size",
    "--lora-modules": "--adapter",
    **dict.fromkeys(("--host", "--port", "--served-model-name", "--kv-transfer-config"), ""),
}
"""Arguments of an engine that the demo chooses, and its options for these."""
LONG_LEASE = 180.0
"""With five computing processes on two cores, a process can get no core for half a minute."""
CACHE_BYTES = 768 << 20
"""Bytes of one engine's cache, over all ranks."""

OUTPUT_TOKENS = 16
REQUEST_SECONDS = 180.0
FREE_SECONDS = 2.0
POLL_SECONDS = 0.05
FEWEST_PROMPTS = 2
SHORTEST_PROMPT, LONGEST_PROMPT = 10, 3000
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """The options of the demo. With None the connector chooses ``layout`` and the engine ``block_size``.

    ``at_once`` requests are under way. Further ``arguments`` go to every engine, and requests name the LoRA adapter in
    the folder ``adapter``. ``compiled`` engines compile and capture CUDA graphs, as is vLLM's default.
    """

    prefill_tp: int = 2
    decode_tp: int = 1
    layout: str | None = None
    transport: str = "auto"
    mode: str = SEQUENTIAL
    num_prompts: int = 16
    block_size: int | None = None
    num_hosts: int = 1
    gpu_memory: float | None = None
    at_once: int = 4
    dtype: str = EXACT
    arguments: tuple[str, ...] = ()
    adapter: Path | None = None
    compiled: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether tokens are compared. Otherwise the decode engine compares digests of every byte."""
        return self.dtype == EXACT

    @property
    def requested(self) -> str:
        """The name that requests give: the model's or the adapter's."""
        return MODEL if self.adapter is None else ADAPTER

    @property
    def engine_arguments(self) -> tuple[str, ...]:
        """Arguments of every engine beside those that all demos have."""
        if self.adapter is None:
            return self.arguments
        return "--enable-lora", "--lora-modules", f"{ADAPTER}={self.adapter.absolute()}", *self.arguments

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
        for flag in (word.partition("=")[0] for word in self.arguments):
            if flag in OWN_ARGUMENTS:
                what = f"--engine-arguments has {flag}, which the demo chooses."
                option = OWN_ARGUMENTS[flag]
                raise SettingsError(Reason.INVALID_SETTING, what, f"Use {option}." if option else f"Leave out {flag}.")
        if self.adapter is not None and not (self.adapter / "adapter_config.json").is_file():
            what = f"--adapter {self.adapter} is no folder with an adapter_config.json."
            raise SettingsError(Reason.INVALID_SETTING, what, "Name the folder of a LoRA adapter of the model.")
        if self.dtype not in DTYPES:
            raise SettingsError(Reason.INVALID_SETTING, f"--dtype {self.dtype}.", f"Use: {', '.join(DTYPES)}.")
        if self.mode == OFFLOAD and not self.is_exact:
            what = f"--dtype {self.dtype} with --mode offload, which compares tokens: these depend on rounding."
            raise SettingsError(Reason.INVALID_SETTING, what, f"Use {EXACT}.")
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
        settings |= {} if self.is_exact else {"integrity": "full"}
        return EngineSettings(
            model,
            role=role,
            tensor_parallel_size=tp_size,
            connector_settings=settings | more,
            dtype=self.dtype,
            block_size=self.block_size,
            kv_cache_bytes=CACHE_BYTES // tp_size,
            cores=spread_over_cores(tp_size, from_last=role == "kv_consumer"),
            gpu_memory=self.gpu_memory,
            layout=self.layout,
            compiled=self.compiled,
            arguments=self.engine_arguments,
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
    """The model in the folder ``path``. ``caches`` is None where kvferry has no rule for their sizes."""

    path: Path
    caches: ModelCaches | None

    @classmethod
    def read(cls, path: Path, dtype: str = EXACT) -> Self:
        """Return the model in a folder. Raises :class:`SettingsError` for a configuration that cannot be read."""
        try:
            return cls(path, model_caches(path, dtype))
        except SettingsError as error:
            if error.reason is not Reason.UNSUPPORTED:
                raise
            return cls(path, None)

    @property
    def num_layers(self) -> int:
        """The number of layers. Raises :class:`SettingsError` as ``cache`` does."""
        return len(self._known().layers)

    @property
    def cache(self) -> AttentionCache:
        """The cache of one of the equal layers. Raises :class:`SettingsError` (``unsupported``) for others."""
        return uniform_cache(self._known())

    def _known(self) -> ModelCaches:
        return self.caches or model_caches(self.path)  # which raises its reason again

    def shape(self, settings: DemoSettings, block_size: int) -> CacheShape:
        """Return the sizes from which the bytes to move follow; without a cache where layers differ, or where an
        argument of the engines may change the caches.
        """
        num_layers, cache = 0, None
        if not settings.arguments:
            with suppress(SettingsError):
                num_layers, cache = self.num_layers, self.cache
        return CacheShape(num_layers, cache, block_size, settings.prefill_tp, settings.decode_tp)

    def check_ranks(self, *tp_sizes: int) -> None:
        """Raise :class:`LayoutError` where so many ranks cannot split the heads of a layer."""
        for cache in {cache for layer in (self.caches.layers if self.caches else ()) for cache in layer}:
            for tp_size in tp_sizes if isinstance(cache, AttentionCache) else ():
                cache.heads(0, tp_size)

    @property
    def vocabulary_size(self) -> int:
        """The number of token ids."""
        return int(json.loads((self.path / "config.json").read_text())["vocab_size"])


def send_prompts(
    settings: DemoSettings,
    url: str,
    prompts: Sequence[Sequence[int]],
    on_answer: Callable[[int], None],
    cache_salt: str | None = None,
) -> list[Answer]:
    """Send the prompts, ``at_once`` of them at a time, and return the answers in the same order.

    ``on_answer`` is called with the number of answers. An interrupt does not wait for running requests, which end with
    the servers.
    """
    pool = ThreadPoolExecutor(settings.at_once, thread_name_prefix="prompt")
    try:
        answers = []
        for answer in pool.map(lambda prompt: _send(url, settings.requested, prompt, cache_salt), prompts):
            answers.append(answer)
            on_answer(len(answers))
        return answers
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _send(url: str, model: str, prompt: Sequence[int], cache_salt: str | None) -> Answer:
    body = {"model": model, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0}
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
    at_once: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 4,
    dtype: Annotated[
        str, typer.Option(help="As vLLM's. Tokens are compared in float32; otherwise every byte is, where it arrives.")
    ] = EXACT,
    adapter: Annotated[Path | None, typer.Option(help="A LoRA adapter's folder: all requests name it.")] = None,
    engine_arguments: Annotated[str, typer.Option(help="Further arguments of all engines, as one text.")] = "",
    keep: Annotated[bool, typer.Option("--keep", help="Keep the folder with the model and the logs.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the report as JSON on standard output.")] = False,
) -> None:
    """Prefill on one vLLM engine, decode on another, and compare each answer with one engine alone.

    With --mode offload one engine with a small cache gets the same prompts twice, is killed, and gets them again after
    a restart with --decode-tp ranks: they come from host memory, and then from disk.

    With --hosts 2 prefill, decode and router run in network namespaces of their own, with other host names, boot ids
    and addresses, and with keys that are made for the run.

    On a GPU the engines compile and capture CUDA graphs, unless --engine-arguments has --enforce-eager. With engine
    arguments, and for layers that differ, the bytes that move are counted but not compared with the caches' sizes.

    Exit code 1: a token differs, an engine computed tokens that it should have received, or blocks or processes are
    left.

    Try:

    kvferry demo --mode concurrent --prefill-tp 1

    kvferry demo --mode offload

    kvferry demo --hosts 2

    kvferry demo --model path/to/model --prompts 4 --json

    kvferry demo --model gemma3-tiny --gpu-memory 0.45 --engine-arguments "--attention-backend TRITON_ATTN"
    """
    settings = DemoSettings(
        prefill_tp,
        decode_tp,
        layout,
        transport,
        mode,
        prompts,
        block_size,
        hosts,
        gpu_memory,
        at_once,
        dtype,
        words_of(engine_arguments),
        adapter,
    )
    settings.check()
    console = open_console(stderr=json_output)
    with interrupted_by_signals(), folder_for(keep, console) as folder:
        run: Callable[[DemoSettings, DemoModel, Path, Status], DemoReport | OffloadReport] = run_handoff
        if mode == OFFLOAD:
            from kvferry.cli.demo_offload import run_offload as run  # imports xxhash, maybe missing
        with console.status("making the model") as status:
            found = DemoModel.read(Path(model) if Path(model).is_dir() else make_tiny_model(model, folder), dtype)
            found.check_ranks(prefill_tp, decode_tp)
            settings = replace(settings, compiled=bool(visible_devices()))
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
        shape = model.shape(settings, cache_block_size(servers[1].url))
        report = _measure(settings, servers, prompts, shape, folder / TRANSFER_LOG, status.update)
    left = sum(len(server.process.process_ids()) for server in servers)
    return replace(report, mode=settings.mode, num_hosts=settings.num_hosts, processes_left=left)


def _measure(
    settings: DemoSettings,
    servers: Sequence[Server],
    prompts: Sequence[Sequence[int]],
    shape: CacheShape,
    log: Path,
    announce: Announce,
) -> DemoReport:
    prefill, decode, router = servers
    at_start = prompt_tokens(decode.metrics())
    answers = send_prompts(settings, router.url, prompts, lambda count: announce(f"router: {count} answers"))
    began_at = time.monotonic()
    usages = poll(
        lambda: {name: cache_usage(server.metrics()) for name, server in (("prefill", prefill), ("decode", decode))},
        lambda usages: not any(usages.values()),
        FREE_SECONDS,
    )
    seconds = time.monotonic() - began_at
    after_router = prompt_tokens(decode.metrics())
    alone = send_prompts(
        settings, decode.url, prompts, lambda count: announce(f"decode engine alone: {count} answers"), uuid.uuid4().hex
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
        is_exact=settings.is_exact,
        preemptions=sum(preemptions(server.metrics()) for server in (prefill, decode)),
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
