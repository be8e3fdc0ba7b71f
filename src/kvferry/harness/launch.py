"""Starts vLLM API servers and vllm-router as child processes, reads their metrics, and ends them.

>>> settings = EngineSettings(Path("/models/tiny"), role="kv_producer", tensor_parallel_size=2)
>>> settings.environment(port=20001)["VLLM_CPU_OMP_THREADS_BIND"].count("|")
1
>>> pipeline = EngineSettings(Path("/models/tiny"), pipeline_parallel_size=2)
>>> "--enforce-eager" in pipeline.command(port=20001), pipeline.environment(port=20001)["VLLM_CPU_CI_ENV"]
(False, '0')
"""

import json
import os
import random
import shlex
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from kvferry.errors import Reason, SettingsError
from kvferry.handoff.wire.trust import in_url
from kvferry.harness.child_process import ChildProcess, LaunchError, stop_all
from kvferry.harness.virtual_hosts import VirtualHost
from kvferry.integrations.vllm.waiting_workers import VARIABLE as SLEEPING_WORKERS

HOST = "127.0.0.1"
FIRST_PORT = 20000
READY_SECONDS = 240.0
POLL_SECONDS = 0.1
DROPPED_LABELS = frozenset({"model_name", "engine", "le", "created"})
ANSWER_SECONDS = 10.0
# On a CPU vLLM allocates the buffers between pipeline stages during warm-up, which --enforce-eager and VLLM_CPU_CI_ENV
# switch off. The eager back end needs no installed compiler.
PIPELINE_WITHOUT_COMPILER = ("--compilation-config", '{"mode": "DYNAMO_TRACE_ONCE", "backend": "eager"}')
# With -m each of vLLM's processes would import the module of the API server again, which takes some seconds.
API_SERVER = ("-c", "from vllm.entrypoints.launchers.api_server.entry import main; main()")
Role = Literal["kv_producer", "kv_consumer", "kv_both"]
Progress = Callable[[str, float], None]
"""Called with a server's name and the seconds since its start, about ten times a second and when it is ready."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """One vLLM engine, with numbers for the CPU; on GPUs vLLM ignores what is about cores.

    Without ``role`` the engine has no connector. ``kv_cache_bytes`` is per rank. ``cores`` lists the cores of each rank
    in vLLM's form (``("0", "1")``, ``("0,1",)``); by default each rank has one core, and the ranks take turns over the
    cores. Unless ``compiled``, as vLLM does by default, an engine runs eagerly; one with a pipeline is traced and
    warmed up, which takes some more seconds.
    ``data_parallel_size`` engine cores serve behind one API server, or behind as many as ``program`` starts.
    ``connector_module`` is the module of the connector (``kv_connector_module_path``), for use without the plugin.
    ``gpu_memory`` is the part of a GPU's memory that the engine may take (0.92 by default): vLLM does not start with
    less free memory than that, however small its cache is. ``layout`` is the layout that the user sets
    (``VLLM_KV_CACHE_LAYOUT``); with None the connector chooses. Further command line ``arguments`` and environment
    ``variables`` are passed to the engine. ``python`` is the interpreter of the environment whose vLLM runs.
    """

    model: Path
    role: Role | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    program: tuple[str, ...] = API_SERVER
    connector: str = "KVFerryConnector"
    connector_module: str | None = None
    connector_settings: Mapping[str, Any] = field(default_factory=dict)
    load_failure_policy: Literal["fail", "recompute"] = "fail"
    dtype: str = "float32"
    max_model_len: int = 4096
    block_size: int | None = None
    kv_cache_bytes: int = 256 << 20
    prefix_caching: bool = True
    gpu_memory: float | None = None
    layout: str | None = None
    compiled: bool = False
    cores: tuple[str, ...] | None = None
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    python: str = sys.executable

    @property
    def num_ranks(self) -> int:
        """The number of workers of the engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    def command(self, port: int, address: str = HOST) -> list[str]:
        """Return the command line of an API server that listens on ``port`` of an address of its host."""
        command = [self.python, *self.program, "--host", address, "--port", str(port)]
        command += ["--model", str(self.model), "--served-model-name", "model", "--dtype", self.dtype]
        command += ["--skip-tokenizer-init", "--max-model-len", str(self.max_model_len)]
        if not self.compiled:
            command += PIPELINE_WITHOUT_COMPILER if self.pipeline_parallel_size > 1 else ["--enforce-eager"]
        command += ["--kv-cache-memory-bytes", str(self.kv_cache_bytes)]
        command += ["--tensor-parallel-size", str(self.tensor_parallel_size)]
        command += ["--pipeline-parallel-size", str(self.pipeline_parallel_size)]
        command += ["--data-parallel-size", str(self.data_parallel_size)] if self.data_parallel_size > 1 else []
        command += ["--enable-prefix-caching" if self.prefix_caching else "--no-enable-prefix-caching"]
        command += ["--no-enable-log-requests", "--disable-uvicorn-access-log"]
        if self.block_size is not None:
            command += ["--block-size", str(self.block_size)]
        if self.gpu_memory is not None:
            command += ["--gpu-memory-utilization", str(self.gpu_memory)]
        if self.role is not None:
            command += ["--kv-transfer-config", json.dumps(self.transfer_config())]
        return [*command, *self.arguments]

    def transfer_config(self) -> dict[str, Any]:
        """Return the value of ``--kv-transfer-config``."""
        config: dict[str, Any] = {
            "kv_connector": self.connector,
            "kv_role": self.role,
            "kv_load_failure_policy": self.load_failure_policy,
            "kv_connector_extra_config": dict(self.connector_settings),
        }
        if self.connector_module is not None:
            config["kv_connector_module_path"] = self.connector_module
        return config

    def environment(self, port: int, address: str = HOST) -> dict[str, str]:
        """Return the environment variables of the API server."""
        traced = self.compiled or self.pipeline_parallel_size > 1
        variables = {
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(self.cores or spread_over_cores(self.num_ranks)),
            "VLLM_CPU_CI_ENV": "0" if traced else "1",
            # Otherwise the first request of a rank with a part of the vocabulary waits 40 s for a C++ compiler.
            "TORCHDYNAMO_DISABLE": "0" if traced else "1",
            SLEEPING_WORKERS: "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if self.connector.startswith("Nixl"):
            variables["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port(avoid=port))
        if address != HOST:
            variables |= dict.fromkeys(("VLLM_HOST_IP", "VLLM_NIXL_SIDE_CHANNEL_HOST", "MC_TCP_BIND_ADDRESS"), address)
        if self.layout is not None:
            variables["VLLM_KV_CACHE_LAYOUT"] = self.layout
        return variables | dict(self.variables)


def words_of(arguments: str) -> tuple[str, ...]:
    """Return the words of ``--engine-arguments``. Raises :class:`SettingsError` for an open quotation mark.

    >>> words_of("--attention-backend TRITON_ATTN")
    ('--attention-backend', 'TRITON_ATTN')
    """
    try:
        return tuple(shlex.split(arguments))
    except ValueError as error:
        problem = f"--engine-arguments {arguments!r}: {error}."
        raise SettingsError(Reason.INVALID_SETTING, problem, "Close the quotes.") from error


def visible_devices() -> tuple[str, ...]:
    """Return the CUDA devices that vLLM would use, by the names of CUDA_VISIBLE_DEVICES where that is set; none where
    vLLM is built for CPUs.
    """
    import torch

    if not torch.cuda.is_available():
        return ()
    num_devices = torch.cuda.device_count()  # CUDA sees none after the first name that is none
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return tuple(map(str, range(num_devices)))
    return tuple(part.strip() for part in named.split(",") if part.strip())[:num_devices]


def spread_over_cores(num_ranks: int, *, from_last: bool = False) -> tuple[str, ...]:
    """Return one core for each rank; the ranks take turns over the cores of this process.

    Two engines disturb each other least when one starts with the first core and the other with the last: a rank with
    several threads stalls at every barrier while another engine's rank spins on one of the cores.

    >>> len(spread_over_cores(3)), spread_over_cores(1)[0] == str(min(os.sched_getaffinity(0)))
    (3, True)
    """
    cores = sorted(os.sched_getaffinity(0), reverse=from_last)
    return tuple(str(cores[rank % len(cores)]) for rank in range(num_ranks))


@dataclass(frozen=True, slots=True)
class Server:
    """A child process that serves HTTP at ``url``."""

    process: ChildProcess
    url: str
    started_at: float

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def metrics(self) -> dict[str, float]:
        """Return the server's current metrics; see :func:`scrape_metrics`."""
        return scrape_metrics(self.url)

    def is_ready(self) -> bool:
        """Return whether the server answers. Raises :class:`LaunchError` where its process has ended."""
        status = self.process.exit_status()
        if status is not None:
            raise self.failure(Reason.PEER_DIED, f"ended with exit status {status}")
        try:
            # The URL is that of the server which this object started.
            with urllib.request.urlopen(f"{self.url}/health", timeout=2.0) as response:  # nosec B310
                return bool(response.status == 200)
        except OSError:
            return False

    def failure(self, reason: Reason, what: str) -> LaunchError:
        """Return an error with the end of the server's log."""
        what = f"{self.process.name} {what}; its log ends:\n{self.process.log_tail()}\n"
        return LaunchError(reason, what, f"The whole log is {self.process.log_path}.")

    def stop(self) -> None:
        """End the server and all of its processes."""
        self.process.stop()


def start_engine(
    name: str, settings: EngineSettings, log_folder: Path, port: int | None = None, host: VirtualHost | None = None
) -> Server:
    """Start an API server and return at once; :func:`wait_until_ready` waits for it.

    With ``host`` the engine runs on this virtual host, and the caller must be on a host of the same network. Raises
    :class:`LaunchError` when ``port`` is in use. Without ``port`` the engine gets a free port.
    """
    port = _usable_port(name, port)
    address = HOST if host is None else host.address
    command = settings.command(port, address)
    process = ChildProcess.start(
        name,
        command if host is None else host.command(command),
        log_folder / f"{name}.log",
        settings.environment(port, address),
    )
    return Server(process, f"http://{in_url(address)}:{port}", time.monotonic())


def start_router(
    prefill_urls: Sequence[str],
    decode_urls: Sequence[str],
    log_folder: Path,
    port: int | None = None,
    arguments: Sequence[str] = (),
) -> Server:
    """Start a vllm-router for prefill/decode disaggregation and return at once."""
    port = _usable_port("router", port)
    program = Path(sys.executable).with_name("vllm-router")
    command = [str(program), "--host", HOST, "--port", str(port), "--vllm-pd-disaggregation"]
    command += [part for url in prefill_urls for part in ("--prefill", url)]
    command += [part for url in decode_urls for part in ("--decode", url)]
    command += ["--prometheus-port", str(free_port(avoid=port)), "--disable-retries", *arguments]
    process = ChildProcess.start("router", command, log_folder / "router.log", grace_seconds=1.0)
    return Server(process, f"http://{HOST}:{port}", time.monotonic())


def wait_until_ready(
    servers: Sequence[Server], timeout_seconds: float = READY_SECONDS, on_progress: Progress | None = None
) -> None:
    """Wait until every server answers.

    Raises :class:`LaunchError` with the end of the log as soon as a server has ended, or is not ready
    ``timeout_seconds`` after its start. The caller stops the servers.
    """
    waiting = list(servers)
    while waiting:
        for server in tuple(waiting):
            age = time.monotonic() - server.started_at
            if on_progress is not None:
                on_progress(server.process.name, age)
            if server.is_ready():
                waiting.remove(server)
            elif age > timeout_seconds:
                raise server.failure(Reason.DEADLINE_EXCEEDED, f"was not ready after {age:.0f} s")
        time.sleep(POLL_SECONDS if waiting else 0.0)


def stop_servers(servers: Sequence[Server]) -> None:
    """End several servers at the same time."""
    stop_all([server.process for server in servers])


def free_port(avoid: int | None = None) -> int:
    """Return a port on which no process listens.

    The port lies below the kernel's range for outgoing connections, so that no outgoing connection takes the port
    before the engine binds it some seconds later.

    >>> 20000 <= free_port() < 61000
    True
    """
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = range(FIRST_PORT, end) if end > FIRST_PORT + 1000 else range(FIRST_PORT, 61000)
    generator = random.SystemRandom()
    while True:
        port = generator.choice(candidates)
        if port != avoid and port_is_free(port):
            return port


def port_is_free(port: int) -> bool:
    """Return whether a process can listen on ``port`` now."""
    with closing(socket.socket()) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except OSError:
            return False
    return True


def _usable_port(name: str, port: int | None) -> int:
    if port is None:
        return free_port()
    if not port_is_free(port):
        raise LaunchError(Reason.PORT_IN_USE, f"{name}: port {port} is in use.", "Choose another port.")
    return port


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """An engine's prompt tokens by origin, since its start or between two scrapes.

    ``received`` by transfer, ``cached`` from the engine's own prefix cache, ``computed`` by the engine.

    >>> PromptTokens(received=7, cached=0, computed=3) - PromptTokens(received=5, cached=0, computed=2)
    PromptTokens(received=2, cached=0, computed=1)
    """

    received: int
    cached: int
    computed: int

    def __sub__(self, earlier: "PromptTokens") -> "PromptTokens":
        return PromptTokens(
            self.received - earlier.received, self.cached - earlier.cached, self.computed - earlier.computed
        )


def scrape_metrics(url: str) -> dict[str, float]:
    """Return the samples at ``url``/metrics, by name and labels.

    The keys omit the model's name and the engine's index; samples with the same key are added. Buckets of histograms
    are omitted. Needs ``prometheus_client``, which vLLM installs.
    """
    return parse_metrics(_scrape(url))


def _scrape(url: str) -> str:
    # The URL is that of an engine which the caller started.
    with urllib.request.urlopen(f"{url}/metrics", timeout=ANSWER_SECONDS) as response:  # nosec B310
        return str(response.read().decode())


def parse_metrics(text: str) -> dict[str, float]:
    r"""Return the samples in Prometheus' text format; see :func:`scrape_metrics`.

    >>> parse_metrics('# TYPE a counter\na_total{source="disk",engine="0"} 2\na_total{source="disk",engine="1"} 3\n')
    {'a_total{source="disk"}': 5.0}
    """
    from prometheus_client.parser import text_string_to_metric_families

    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith(("_bucket", "_created")):
                labels = sorted(sample.labels.items())
                kept = ",".join(f'{label}="{value}"' for label, value in labels if label not in DROPPED_LABELS)
                key = f"{sample.name}{{{kept}}}" if kept else sample.name
                samples[key] = samples.get(key, 0.0) + sample.value
    return samples


def _by_source(metrics: Mapping[str, float], name: str) -> dict[str, int]:
    prefix = f'{name}{{source="'
    return {key.removeprefix(prefix)[:-2]: int(value) for key, value in metrics.items() if key.startswith(prefix)}


def prompt_tokens(metrics: Mapping[str, float]) -> PromptTokens:
    """Return the prompt tokens by origin from an engine's metrics."""
    found = _by_source(metrics, "vllm:prompt_tokens_by_source_total")
    return PromptTokens(found["external_kv_transfer"], found["local_cache_hit"], found["local_compute"])


def cached_tokens(metrics: Mapping[str, float]) -> dict[str, int]:
    """Return the prompt tokens that an engine did not compute, by tier: ``device``, ``host``, ``disk``.

    Counted when a request is admitted, so a request that is preempted before its load counts twice.

    >>> cached_tokens({'vllm:prompt_tokens_cached_by_source_total{source="host"}': 384.0})
    {'host': 384}
    """
    return _by_source(metrics, "vllm:prompt_tokens_cached_by_source_total")


def preemptions(metrics: Mapping[str, float]) -> int:
    """Return how often an engine has preempted a request since its start."""
    return int(metrics["vllm:num_preemptions_total"])


def cache_usage(metrics: Mapping[str, float]) -> float:
    """Return the used fraction of an engine's KV cache blocks, 0 to 1."""
    return metrics["vllm:kv_cache_usage_perc"]


def cache_block_size(url: str) -> int:
    """Return the tokens of a block of the engine at ``url``, which may have chosen the size itself."""
    from prometheus_client.parser import text_string_to_metric_families

    samples = (sample for family in text_string_to_metric_families(_scrape(url)) for sample in family.samples)
    return int(next(sample.labels["block_size"] for sample in samples if "cache_config_info" in sample.name))
