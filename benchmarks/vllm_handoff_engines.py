"""Pairs of real vLLM engines for the handoff benchmark: start, warm, pause, and measure one request."""

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import typer
from stall_watch import StallWatch

from kvferry.cli.demo import DemoPlaces
from kvferry.errors import KVFerryError, Reason
from kvferry.harness.launch import (
    EngineSettings,
    Role,
    Server,
    cache_usage,
    prompt_tokens,
    start_engine,
    stop_servers,
    wait_until_ready,
)
from kvferry.harness.tiny_models import VOCABULARY_SIZE, find_tiny_model, make_tiny_model

REQUEST_SECONDS = 180.0
RELEASE_SECONDS = 3.0
LEASE_SECONDS = 60.0
SETTLE_SECONDS = 0.5
PROMPTS_IN_CACHE = 6
FULL_USAGE = 0.6
MAX_WARM_UP_FAILURES = 2
MAX_STALLED_PART = 0.05
EXTENSION = "vllm_stopwatch.StopwatchExtension"
CONNECTOR_SETTINGS: dict[str, dict[str, Any]] = {"KVFerryConnector": {"transport": "cma"}, "NixlConnector": {}}

BETWEEN_HOSTS = {"transport": "nixl"}


class BenchmarkError(KVFerryError):
    """A run whose figures would mean nothing."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """A connector, the checkout of kvferry that provides it (None: the installed one), and settings of its own."""

    name: str
    connector: str
    checkout: Path | None = None
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, str]:
        """The environment in which workers import the stopwatch and this contestant's kvferry.

        >>> Contestant("old", "KVFerryConnector", Path("/old")).variables["PYTHONPATH"].split(os.pathsep)[0]
        '/old/src'
        """
        own = [] if self.checkout is None else [str(self.checkout / "src")]
        variables = extension_variables()
        return {**variables, "PYTHONPATH": os.pathsep.join([*own, variables["PYTHONPATH"]])}


KVFERRY = Contestant("kvferry", "KVFerryConnector")


def find_contestant(name: str) -> Contestant:
    """Return the contestant that an option names: NixlConnector, the folder of another checkout of kvferry, or this one
    with another setting, such as ``integrity=full``.
    """
    if name == "NixlConnector":
        return Contestant(name, name)
    setting, is_setting, value = name.partition("=")
    if is_setting:
        return Contestant(name, KVFERRY.connector, settings={setting: value})
    checkout = Path(name).resolve()
    if not (checkout / "src" / "kvferry").is_dir():
        raise typer.BadParameter(f"{name} is neither NixlConnector nor a checkout of kvferry (no src/kvferry there).")
    return Contestant(checkout.name, KVFERRY.connector, checkout)


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison. The targets are ratios, kvferry to in-tree, of the stopwatch's medians."""

    name: str
    title: str
    model: str
    tokens: int
    block_size: int
    prefill_tp: int
    decode_tp: int
    target_small_pages: float
    target_huge_pages: float

    @property
    def num_blocks(self) -> int:
        """Blocks of one prompt."""
        return -(-self.tokens // self.block_size)

    def cache_bytes(self, tp_size: int) -> int:
        """Bytes of one rank's cache: room for a handful of prompts."""
        block_bytes = find_tiny_model(self.model).kv_bytes_per_token() * self.block_size // tp_size
        return (PROMPTS_IN_CACHE * self.num_blocks + 1) * block_bytes


CASES = {
    "a": Case("a", "8 KV heads, TP 1 to 1", "kv-heavy", 1500, 128, 1, 1, 0.5, 1.0),
    "b": Case("b", "1 KV head, TP 1 to 1", "kv-heavy-one-head", 4000, 32, 1, 1, 0.4, 0.5),
    "c": Case("c", "8 KV heads, TP 2 to 1", "kv-heavy", 1500, 128, 2, 1, 0.5, 1.0),
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One request's figures. ``transfer_seconds`` is the connector's own metric, summed over source ranks.

    ``start_call_seconds`` is the time that the step of the decode engine waits for the connector. In
    ``stalled_seconds`` of the stopwatch's time the machine stood still.
    """

    stopwatch_seconds: float
    start_call_seconds: float
    num_polls: int
    transfer_seconds: float
    client_seconds: float
    num_bytes: int
    num_descriptors: int
    same_token: bool
    stalled_seconds: float = 0.0

    @property
    def is_disturbed(self) -> bool:
        """Whether the machine stood still in a notable part of the stopwatch's time."""
        return self.stalled_seconds > MAX_STALLED_PART * self.stopwatch_seconds


@dataclass(slots=True)
class Pair:
    """A prefill and a decode engine of one contestant."""

    name: str
    case: Case
    prefill: Server
    decode: Server
    generator: np.random.Generator
    watch: StallWatch

    def pause(self) -> None:
        """Stop all processes of both engines where they are, so that they take nothing from the other pair."""
        for server in (self.prefill, self.decode):
            server.process.pause()

    def resume(self) -> None:
        """Let them go on; twice is fine."""
        for server in (self.prefill, self.decode):
            server.process.resume()

    def warm_up(self, on_prompt: Callable[[int], None]) -> None:
        """Send prompts through both engines until every block of both caches has been used.

        A few may fail: a first handshake on a busy machine can take longer than its connector waits.
        """
        num_failures = 0
        for index in range(PROMPTS_IN_CACHE + 2):
            on_prompt(index)
            try:
                self.measure()
            except BenchmarkError:
                num_failures += 1
                if num_failures > MAX_WARM_UP_FAILURES:
                    raise
                call_workers(self.decode, "read_stopwatch")

    def measure(self) -> Sample:
        """Send one fresh prompt; the decode engine is stopped while the prefill engine computes.

        Raises :class:`BenchmarkError` when the decode engine received anything but the prompt's whole cache.
        """
        prompt = self.generator.integers(0, VOCABULARY_SIZE, self.case.tokens).tolist()
        received_before = prompt_tokens(self.decode.metrics())
        self.decode.process.pause()
        try:
            prefilled = complete(self.prefill, prompt, {"do_remote_decode": True})
        finally:
            self.decode.process.resume()
        for server in (self.prefill, self.decode):
            call_workers(server, "touch_cache")
        time.sleep(SETTLE_SECONDS)
        started = time.perf_counter()
        answer = complete(self.decode, prompt, prefilled["kv_transfer_params"])
        client_seconds = time.perf_counter() - started
        reading = call_workers(self.decode, "read_stopwatch")
        self._await_release()
        moved = prompt_tokens(self.decode.metrics()) - received_before
        if moved.received < self.case.tokens - 1 or moved.cached or moved.computed > 1:
            raise BenchmarkError(Reason.TRANSFER_FAILED, f"{self.name}: the prompt came as {moved}.")
        same = answer["choices"][0]["token_ids"] == prefilled["choices"][0]["token_ids"]
        return make_sample(reading, client_seconds, same, self.watch)

    def _await_release(self) -> None:
        """Wait until neither engine holds anything, or for a while only when there is room for more prompts.

        A NIXL agent that is idle may tell the prefill engine late that it has read; blocks then stay held until the
        lease ends.
        """
        started = time.monotonic()
        while usage := max(cache_usage(server.metrics()) for server in (self.prefill, self.decode)):
            waited = time.monotonic() - started
            if waited > RELEASE_SECONDS and usage < FULL_USAGE:
                return
            if waited > LEASE_SECONDS:
                raise BenchmarkError(Reason.DEADLINE_EXCEEDED, f"{self.name}: blocks stay in use.")
            time.sleep(0.05)


def make_sample(
    readings: Sequence[dict[str, Any]], client_seconds: float, same_token: bool, watch: StallWatch
) -> Sample:
    """Return one request's figures out of the stopwatches of the decode engine's ranks: the slowest rank counts.

    >>> lap = {"seconds": 0.02, "start_call_seconds": 0.001, "num_polls": 2, "reported_at": 7.0}
    >>> own = {"transfer_duration": [0.005, 0.007], "bytes_transferred": [10, 10], "num_descriptors": [2, 3]}
    >>> make_sample([{"laps": [lap], "statistics": [own]}], 0.1, True, StallWatch())
    Sample(stopwatch_seconds=0.02, start_call_seconds=0.001, num_polls=2, transfer_seconds=0.012, client_seconds=0.1, \
num_bytes=20, num_descriptors=5, same_token=True, stalled_seconds=0.0)
    """
    laps = [lap for reading in readings for lap in reading["laps"]]
    if len(laps) != len(readings):
        raise BenchmarkError(Reason.TRANSFER_FAILED, f"{len(readings)} ranks reported {len(laps)} loads.")
    slowest = max(laps, key=lambda lap: float(lap["seconds"]))
    own = [statistics for reading in readings for statistics in reading["statistics"]]
    return Sample(
        stopwatch_seconds=slowest["seconds"],
        start_call_seconds=slowest["start_call_seconds"],
        num_polls=slowest["num_polls"],
        transfer_seconds=total(own, "transfer_seconds", "transfer_duration"),
        client_seconds=client_seconds,
        num_bytes=int(total(own, "bytes", "bytes_transferred")),
        num_descriptors=int(total(own, "descriptors", "num_descriptors")),
        same_token=same_token,
        stalled_seconds=watch.stalled_seconds(slowest["reported_at"] - slowest["seconds"], slowest["reported_at"]),
    )


def total(statistics: Sequence[dict[str, Any]], *names: str) -> float:
    """Return the sum of one quantity, which each connector names in its own way."""
    return float(sum(sum(values) for entry in statistics for name, values in entry.items() if name in names))


def complete(server: Server, prompt: list[int], transfer_params: dict[str, Any]) -> dict[str, Any]:
    """Ask for one token and return the response."""
    body = {
        "model": "model",
        "prompt": prompt,
        "max_tokens": 1,
        "temperature": 0,
        "return_token_ids": True,
        "kv_transfer_params": transfer_params,
    }
    response: dict[str, Any] = post(f"{server.url}/v1/completions", body)
    return response


def call_workers(server: Server, method: str) -> list[Any]:
    """Call a method of the engine's worker extension in every rank."""
    results: list[Any] = post(f"{server.url}/collective_rpc", {"method": method})["results"]
    return results


def post(url: str, body: dict[str, Any]) -> Any:
    """Send JSON and return the JSON that is answered.

    Raises :class:`BenchmarkError` for an error status, and where nothing is answered for ``REQUEST_SECONDS``.
    """
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        found = error.read(500).decode(errors="replace")
        raise BenchmarkError(Reason.TRANSFER_FAILED, f"{url} answered {error.code}: {found}") from error
    except OSError as error:
        raise BenchmarkError(Reason.DEADLINE_EXCEEDED, f"{url} did not answer: {error}") from error


@contextmanager
def running_pair(
    contestant: Contestant,
    case: Case,
    thp: bool,
    variables: Mapping[str, str],
    folder: Path,
    watch: StallWatch,
    announce: Callable[[str], None],
    places: DemoPlaces,
) -> Iterator[Pair]:
    """Start both engines of one contestant and warm them; end them on leaving, however that happens."""
    servers: list[Server] = []
    pair: Pair | None = None
    model = make_tiny_model(case.model, folder / "models")
    try:
        roles: tuple[tuple[Role, str, int], ...] = (
            ("kv_producer", "prefill", case.prefill_tp),
            ("kv_consumer", "decode", case.decode_tp),
        )
        for role, place, tp_size in roles:
            settings = engine_settings(contestant, case, role, tp_size, model, thp, variables)
            if contestant.connector == KVFERRY.connector:
                own = {**BETWEEN_HOSTS, **contestant.settings} if places.hosts else {}
                own |= places.connector_settings(place)
                settings = replace(settings, connector_settings={**settings.connector_settings, **own})
            name = f"{contestant.name.replace('/', '-')}-{case.name}-{'thp' if thp else 'plain'}-{role}"
            servers.append(start_engine(name, settings, folder, host=places.hosts.get(place)))
        wait_until_ready(servers, on_progress=lambda name, age: announce(f"{name}: starting, {age:.0f} s"))
        generator = np.random.default_rng(time.time_ns())
        pair = Pair(contestant.name, case, servers[0], servers[1], generator, watch)
        call_workers(pair.decode, "install_stopwatch")
        pair.warm_up(lambda index: announce(f"{contestant.name}: warm-up prompt {index + 1}"))
        yield pair
    finally:
        if pair is not None:
            pair.resume()
        stop_servers(servers)


def engine_settings(
    contestant: Contestant, case: Case, role: Role, tp_size: int, model: Path, thp: bool, variables: Mapping[str, str]
) -> EngineSettings:
    """Return one engine's settings, which differ between contestants only in the connector and its code."""
    variables = {**contestant.variables, **({"THP_MEM_ALLOC_ENABLE": "1"} if thp else {}), **variables}
    return EngineSettings(
        model,
        role=role,
        tensor_parallel_size=tp_size,
        connector=contestant.connector,
        connector_settings={**CONNECTOR_SETTINGS[contestant.connector], **contestant.settings},
        dtype="bfloat16",
        block_size=case.block_size,
        cores=engine_cores(role, tp_size),
        kv_cache_bytes=case.cache_bytes(tp_size),
        arguments=("--worker-extension-cls", EXTENSION),
        variables=variables,
    )


def extension_variables() -> dict[str, str]:
    """Return what lets an engine's workers import an extension of this folder and be asked to call it."""
    folders = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": os.pathsep.join(folders)}


def engine_cores(role: Role, tp_size: int) -> tuple[str, ...] | None:
    """Return the cores that compute, by rank.

    A prefill engine of one rank computes on the first core and the decode engine on the last: there NixlConnector moves
    its worker's main thread whatever it was given, so both connectors' decode engines compute on equal terms. The
    spinning threads of two NIXL agents on one core can keep each other's messages waiting for seconds; so placed, they
    are apart. Several ranks take turns over the cores.
    """
    cores = os.sched_getaffinity(0)
    if tp_size > 1:
        return None
    return (str(min(cores) if role == "kv_producer" else max(cores)),)
