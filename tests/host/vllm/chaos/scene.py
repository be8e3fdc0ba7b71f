"""A prefill engine with two ranks and a decode engine with one, behind vllm-router, each at an address of its own.

Both engines advertise the address of a :class:`~.relay.Relay`, at which their control ports can be troubled. An engine
that was killed starts again at the same address, as a new process.
"""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvferry.handoff.holds import RENEWED_LEASE_SECONDS
from kvferry.harness.launch import EngineSettings, Server, free_port, start_engine, start_router, wait_until_ready

from ..engine_pool import WATCH_FILE, Engine, EnginePool, paths_in_engine, tokens_of
from ..handoffs import random_prompt, random_prompts
from .load import Clients, Prompt
from .relay import Relay, listening_ports

LEASE_SECONDS, LOAD_SECONDS = 25.0, 20.0
DEADLINE_SECONDS = LOAD_SECONDS + 10.0 + 15.0
"""Within which a client has its answer: docs/failures.md promises 10 s after a load's time, then steps follow."""
FREE_SECONDS = LEASE_SECONDS + 10.0
"""Within which a survivor has all of its blocks back."""
RENEWED_SECONDS = RENEWED_LEASE_SECONDS + 5.0
"""The same where a decode engine had come for every prompt that was held."""
NOBODY_CAME = "no decode engine came"
ENDED = {
    NOBODY_CAME: f"no decode engine came within the first lease (lease_seconds, {LEASE_SECONDS:g} s)",
    "not renewed": "the decode engine has not renewed",
    "too old": "the hold reached the greatest age",
}
"""Why a prefill engine ends a hold by itself, and what its log says then."""
BACK_SECONDS = 60.0
"""Within which the router sends to an engine that is back."""
AT_ONCE = 8
"""Requests in flight."""
BYTES_PER_SECOND = 4_000_000
"""Of each write to a rank: a prompt of 1,000 tokens takes more than a second."""
LONGEST_ANSWER = 150
PROMPTS: tuple[Prompt, ...] = tuple(
    tuple(each) for each in random_prompts(seed=600, count=16, shortest=60, longest=1200)
)
CACHE_BYTES = 128 << 20
"""Of the decode engine, in all: 64 blocks of 128 tokens. The prefill engine has twice as many."""
ROUTER = ("--policy", "round_robin", "--disable-circuit-breaker", "--health-check-interval-secs", "2")
ROUTER += ("--health-failure-threshold", "2", "--health-success-threshold", "1")


@dataclass(frozen=True)
class Flow:
    """The router's flow and the transport of a scene."""

    name: str
    transport: str

    @property
    def is_concurrent(self) -> bool:
        return self.name.startswith("concurrent")


FLOWS = (
    Flow("sequential", "cma"),
    Flow("concurrent", "cma"),
    Flow("sequential-nixl", "nixl"),
    Flow("concurrent-nixl", "nixl"),
)


@dataclass
class Side:
    """One engine at one address, in several lives."""

    name: str
    model: str
    settings: EngineSettings
    folder: Path
    relay: Relay
    port: int = field(default_factory=free_port)
    engine: Engine | None = None
    num_lives: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def control_port(self) -> int:
        """Where the engine answers other engines, and ``kvferry drain``."""
        return int(self.settings.connector_settings["port"])

    @property
    def is_alive(self) -> bool:
        return self.engine is not None and self.engine.server.process.exit_status() is None

    @property
    def alive(self) -> Engine:
        assert self.engine is not None, f"{self.name} does not run"
        return self.engine

    def start(self) -> Server:
        """Start the next life and return at once."""
        self.num_lives += 1
        name = f"{self.name}-{self.num_lives}"
        server = start_engine(name, self.settings, self.folder, self.port)
        self.engine = Engine(name, self.model, server, self.settings)
        return server

    def process_ids(self, title: str = "") -> list[int]:
        """Return the engine's processes, those whose title has these words."""
        found = []
        for process_id in self.alive.server.process.process_ids():
            with suppress(OSError):
                if title.encode() in Path(f"/proc/{process_id}/cmdline").read_bytes():
                    found.append(process_id)
        return found

    def kill(self) -> None:
        """End all processes by SIGKILL, at once."""
        self.alive.server.process.kill()
        self.relay.close()

    def kill_rank(self, rank: int) -> None:
        """End one worker by SIGKILL."""
        [process_id] = self.process_ids(f"Worker_TP{rank}")
        os.kill(process_id, signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all processes."""
        for process_id in self.process_ids():
            with suppress(ProcessLookupError):
                os.kill(process_id, number)

    def stop(self) -> None:
        """End the engine, if it lives."""
        if self.engine is not None:
            self.send(signal.SIGCONT)
            self.engine.server.stop()
            self.engine = None
        self.relay.close()

    def figures(self) -> dict[str, float]:
        return self.alive.server.metrics()

    def is_loading(self) -> bool:
        """Whether a request has blocks and waits for its prompt."""
        figures = self.figures()
        return figures["vllm:kv_cache_usage_perc"] > 0 and figures["vllm:num_requests_waiting"] > 0

    def what_is_left(self) -> dict[str, int]:
        """Return what the engine's scheduler keeps for requests, by name, without what is 0."""
        self.alive.complete(random_prompt(1, 3), 1)  # the scheduler writes it after a step
        found = json.loads(Path(self.settings.variables[WATCH_FILE]).read_text())
        return {name: number for name, number in found.items() if number}


@dataclass
class Scene:
    """Both engines and their router."""

    flow: Flow
    prefill: Side
    decode: Side
    folder: Path
    router_port: int = field(default_factory=free_port)
    router: Server | None = None
    expected: dict[Prompt, list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, flow: Flow, pool: EnginePool, folder: Path) -> "Scene":
        folder.mkdir(parents=True, exist_ok=True)
        sides = [
            make_side(flow.transport, pool, folder, "prefill", "gqa-tp2", "127.0.0.2", 2 * CACHE_BYTES),
            make_side(flow.transport, pool, folder, "decode", "gqa-tp1-nixl", "127.0.0.3", CACHE_BYTES),
        ]
        return cls(flow, *sides, folder=folder)

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.prefill, self.decode

    @property
    def clients(self) -> Clients:
        return Clients(f"http://127.0.0.1:{self.router_port}", self.expected)

    def restore(self) -> None:
        """Bring everything into the state in which an event begins: all live, nothing stopped, no trouble."""
        for side in self.sides:
            side.relay.end_trouble()
            if side.is_alive:
                side.send(signal.SIGCONT)
        self.start_engines()
        if self.router is None or self.router.process.exit_status() is not None:
            self.start_router()
        if not self.expected:
            self.compute_expected()

    def start_engines(self) -> None:
        """Start the engines that do not live, together, at their addresses."""
        dead = [side for side in self.sides if not side.is_alive]
        for side in dead:
            side.stop()
        servers = [side.start() for side in dead]
        wait_until_ready(servers, timeout_seconds=400)
        for side in dead:
            if side is self.prefill:
                self.set_speed(BYTES_PER_SECOND)
            side.relay.open(listening_ports(side.process_ids()) - {side.port})

    def loads(self) -> list[dict[str, Any]]:
        """Return the decode engine's log of its loads, in all of its lives."""
        log = Path(str(self.decode.settings.connector_settings["transfer_log"]) + ".rank0")
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return [line for line in lines if "request_id" in line]

    def num_loaded(self) -> int:
        """Return how many loads have been committed."""
        return sum(line["error"] is None for line in self.loads())

    def failed_loads(self) -> Counter[str]:
        """Return the loads that have failed, by reason."""
        return Counter(line["error"] for line in self.loads() if line["error"])

    def ended_holds(self) -> Counter[str]:
        """Return the holds that the prefill engine's present life has ended by itself, by the reason in its log."""
        log = self.prefill.alive.server.process.log_path.read_text(errors="replace")
        return Counter({name: log.count(text) for name, text in ENDED.items() if text in log})

    def set_speed(self, bytes_per_second: int) -> None:
        """Let the prefill engine's transport move so many bytes of each submission; only while it moves none."""
        self.prefill.alive.set_faults({"bytes_per_second": bytes_per_second})

    def start_router(self) -> None:
        """Start the router at its address."""
        arguments = [*ROUTER]
        prefill_urls = [self.prefill.url]
        if self.flow.is_concurrent:
            port = str(self.prefill.settings.connector_settings["bootstrap_port"])
            arguments += ["--prefill", self.prefill.url, port, "--kv-connector", "mooncake"]
            prefill_urls = []
        self.router = start_router(prefill_urls, [self.decode.url], self.folder, self.router_port, arguments)
        wait_until_ready([self.router])

    def compute_expected(self) -> None:
        """Let the decode engine compute every prompt by itself: the tokens that every answer must have."""
        self.expected = tokens_alone(self.decode.alive)

    def wait_until_unused(self) -> float:
        """Wait until no engine that lives uses a block; return the seconds. Asserts :data:`FREE_SECONDS`."""
        began_at = time.monotonic()
        while used := {side.name: usage for side in self.sides if side.is_alive and (usage := side.alive.usage())}:
            assert time.monotonic() - began_at < FREE_SECONDS, f"KV cache usage is left: {used}"
            time.sleep(0.1)
        return time.monotonic() - began_at

    def wait_until_served(self) -> float:
        """Wait until the router serves a request; return the seconds. Asserts :data:`BACK_SECONDS`."""
        began_at = time.monotonic()
        while (response := self.clients.send(PROMPTS[0], 2, DEADLINE_SECONDS)).outcome != "right":
            assert time.monotonic() - began_at < BACK_SECONDS, f"no request succeeds: {response}"
            time.sleep(0.5)
        return time.monotonic() - began_at

    def check_nothing_is_left(self, seconds: float = 10.0) -> None:
        """Both schedulers soon keep nothing for any request: no block, hold, lease or load."""
        deadline = time.monotonic() + seconds
        while left := {side.name: found for side in self.sides if (found := side.what_is_left())}:
            assert time.monotonic() < deadline, f"left for requests that have ended: {left}"
            time.sleep(0.3)

    def stop(self) -> None:
        """End everything."""
        for side in self.sides:
            side.stop()
        if self.router is not None:
            self.router.stop()

    def log_lines(self) -> Iterator[str]:
        return log_lines(self.sides, self.router)


def log_lines(sides: Iterable[Side], router: Server | None) -> Iterator[str]:
    """Yield the last lines of importance of each process's log."""
    logs = [(side.name, side.engine.server) for side in sides if side.engine is not None]
    for name, server in [*logs, *([("router", router)] if router is not None else [])]:
        lines = server.process.log_path.read_text(errors="replace").splitlines()
        important = [line for line in lines if any(word in line for word in ("kvferry", "ERROR", "WARN", "Error"))]
        yield f"--- {name} ({server.process.log_path.name})"
        yield from important[-30:]


def make_side(
    transport: str, pool: EnginePool, folder: Path, name: str, like: str, address: str, cache_bytes: int
) -> Side:
    """Return a side whose engine is like one of the pool, by this transport, at an address of its own.

    The engine holds no answer for a next turn: nothing may be left of a request.
    """
    settings = pool.settings(like)
    watch_file = folder / f"{name}.under-way"
    connector = {
        **{name: value for name, value in settings.connector_settings.items() if name != "turn_seconds"},
        "transport": transport,
        "lease_seconds": LEASE_SECONDS,
        "load_timeout_seconds": LOAD_SECONDS,
        "port": free_port(),
        "bootstrap_port": free_port(),
        "advertised_host": address,
        "transfer_log": str(folder / f"{name}.transfers"),
    }
    settings = replace(
        settings,
        connector_settings=connector,
        max_model_len=2048,
        kv_cache_bytes=cache_bytes // settings.tensor_parallel_size,
        arguments=(*settings.arguments, "--scheduler-cls", "watched_scheduler.WatchedScheduler"),
        variables={**settings.variables, "PYTHONPATH": paths_in_engine(), WATCH_FILE: str(watch_file)},
    )
    return Side(name, "gqa", settings, folder, Relay(address))


def tokens_alone(engine: Engine) -> dict[Prompt, list[int]]:
    """Return the tokens that an engine computes for each prompt without a transfer."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        answers = threads.map(lambda prompt: engine.complete(prompt, LONGEST_ANSWER), PROMPTS)
        return {prompt: tokens_of(answer)[0] for prompt, answer in zip(PROMPTS, answers, strict=True)}


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until the condition holds. Asserts that this takes at most ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.03)
