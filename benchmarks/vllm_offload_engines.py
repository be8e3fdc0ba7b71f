"""Real vLLM engines for the offload benchmark: start, warm, pause, and time requests."""

import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from stall_watch import StallWatch
from vllm_handoff_engines import BenchmarkError, complete, extension_variables, post

from kvferry.errors import Reason
from kvferry.harness.child_process import LaunchError
from kvferry.harness.launch import (
    EngineSettings,
    PromptTokens,
    Role,
    Server,
    prompt_tokens,
    start_engine,
    stop_servers,
    wait_until_ready,
)
from kvferry.harness.tiny_models import VOCABULARY_SIZE, find_tiny_model, make_tiny_model

BLOCK_SIZE = 128
REQUESTS_AT_ONCE = 16
PROMPTS_IN_CACHE, PROMPTS_IN_TIER = 3, 12
SETTLE_SECONDS, RESET_SECONDS = 0.5, 10.0
WARM_UP_REQUESTS, WARM_UP_ROUNDS = 3, 8
MAX_STALLED_PART = 0.05
KVFERRY, ALWAYS, NONE = "kvferry", "kvferry-always", "no offload"
IN_TREE = "OffloadingConnector"
LAYOUT = "no offload cross-layer"
"""No connector, and the cache layout that kvferry asks for: what the layout alone costs."""
CONTESTANTS = (KVFERRY, NONE, ALWAYS, IN_TREE, LAYOUT)


@dataclass(frozen=True, slots=True)
class Sample:
    """What one measurement took, and the prompt tokens of its requests by origin, as the engine counts them.

    In ``stalled_seconds`` of the time the machine stood still.
    """

    seconds: float
    computed: int
    loaded: int
    stalled_seconds: float = 0.0

    @property
    def is_disturbed(self) -> bool:
        """Whether the machine stood still in a notable part of the time."""
        return self.stalled_seconds > MAX_STALLED_PART * self.seconds


@dataclass(slots=True)
class Engine:
    """One engine with a warm cache."""

    name: str
    server: Server
    generator: np.random.Generator
    watch: StallWatch
    kept: dict[int, list[int]] = field(default_factory=dict)
    """By length: a prompt whose blocks the tiers have."""

    def pause(self) -> None:
        """Stop all processes where they are, so that they take nothing from another engine."""
        self.server.process.pause()

    def resume(self) -> None:
        """Let them go on; twice is fine."""
        self.server.process.resume()

    def fresh(self, num_tokens: int) -> list[int]:
        """Return a prompt that no request has had."""
        prompt: list[int] = self.generator.integers(0, VOCABULARY_SIZE, num_tokens).tolist()
        return prompt

    def forget_own_cache(self) -> None:
        """Let the engine forget what its own cache has, not what the tiers have; then wait until nothing is copied.

        Raises :class:`BenchmarkError` where the engine keeps blocks in use.
        """
        deadline = time.monotonic() + RESET_SECONDS
        while not post(f"{self.server.url}/reset_prefix_cache", {})["success"]:
            if time.monotonic() > deadline:
                raise BenchmarkError(Reason.DEADLINE_EXCEEDED, f"{self.name}: blocks stay in use.")
            time.sleep(0.05)
        time.sleep(SETTLE_SECONDS)

    def first_tokens(self, prompts: Sequence[list[int]]) -> Sample:
        """Ask for one token of each prompt, all at once; the median time until a client has it."""

        def ask(prompt: list[int]) -> float:
            asked_at = time.perf_counter()
            complete(self.server, prompt, {})
            return time.perf_counter() - asked_at

        with self._counting() as counted, ThreadPoolExecutor(len(prompts)) as threads:
            seconds = statistics.median(threads.map(ask, prompts))
        return counted(seconds)

    def generate(self, num_requests: int, prompt_tokens_each: int, output_tokens: int) -> Sample:
        """Send fresh prompts, all at once, and decode from each; the time until the last answer."""
        bodies = [
            {
                "model": "model",
                "prompt": self.fresh(prompt_tokens_each),
                "max_tokens": output_tokens,
                "temperature": 0,
                "ignore_eos": True,
            }
            for _ in range(num_requests)
        ]
        with self._counting() as counted, ThreadPoolExecutor(num_requests) as threads:
            started = time.perf_counter()
            list(threads.map(lambda body: post(f"{self.server.url}/v1/completions", body), bodies))
            seconds = time.perf_counter() - started
        return counted(seconds)

    @contextmanager
    def _counting(self) -> Iterator[Callable[[float], Sample]]:
        """Yield a function that makes a sample of the seconds, to be called after the context."""
        before, started_at = prompt_tokens(self.server.metrics()), time.monotonic()

        def counted(seconds: float) -> Sample:
            moved: PromptTokens = prompt_tokens(self.server.metrics()) - before
            return Sample(seconds, moved.computed, moved.received, self.watch.stalled_seconds(started_at, ended_at))

        ended_at = started_at
        try:
            yield counted
        finally:
            ended_at = time.monotonic()

    def kept_prompt(self, num_tokens: int) -> list[int]:
        """Return a prompt of that length whose whole blocks are stored, the same at each call."""
        if num_tokens not in self.kept:
            self.kept[num_tokens] = self.fresh(num_tokens)
            self.store(self.kept[num_tokens])
        return self.kept[num_tokens]

    def store(self, prompt: list[int]) -> None:
        """Send a prompt until the tiers have its blocks, or for ``WARM_UP_ROUNDS``: who computes rather, has not to."""
        for _ in range(WARM_UP_ROUNDS):
            self.forget_own_cache()
            if self.first_tokens([prompt]).loaded >= len(prompt) // BLOCK_SIZE * BLOCK_SIZE:
                return


@dataclass(frozen=True, slots=True)
class Refused:
    """A contestant whose engine ended at its start, and what it said."""

    name: str
    message: str


def engine_settings(contestant: str, model: str, path: Path, longest: int, disk: Path | None) -> EngineSettings:
    """Return an engine's settings, which differ between contestants in the connector only.

    >>> settings = engine_settings(KVFERRY, "kv-heavy", Path("kv-heavy-1"), 3073, None)
    >>> settings.connector, settings.dtype, settings.kv_cache_bytes // (128 * 147456)
    ('KVFerryOffloadConnector', 'bfloat16', 92)
    """
    recipe = find_tiny_model(model)
    block_bytes = recipe.kv_bytes_per_token() * BLOCK_SIZE
    blocks = PROMPTS_IN_CACHE * -(-longest // BLOCK_SIZE) + REQUESTS_AT_ONCE + 1
    host_bytes = PROMPTS_IN_TIER * -(-longest // BLOCK_SIZE) * block_bytes
    connector, own = CONNECTORS[contestant]
    settings: dict[str, Any] = {**own, HOST_BYTES[contestant]: host_bytes} if connector else {}
    if disk is not None and contestant == KVFERRY:
        settings |= {"disk_path": str(disk), "disk_bytes": 4 * host_bytes}
    role: Role | None = "kv_both" if connector else None
    return EngineSettings(
        path,
        role=role,
        connector=connector or "KVFerryOffloadConnector",
        connector_settings=settings,
        dtype=recipe.dtype,
        max_model_len=4096,
        block_size=BLOCK_SIZE,
        cores=(str(max(os.sched_getaffinity(0))),),
        kv_cache_bytes=blocks * block_bytes,
        layout="BHLNC" if contestant == LAYOUT else None,
        variables=extension_variables(),
    )


CONNECTORS: dict[str, tuple[str | None, dict[str, Any]]] = {
    KVFERRY: ("KVFerryOffloadConnector", {}),
    NONE: (None, {}),
    LAYOUT: (None, {}),
    # Never computes what it could load.
    ALWAYS: ("KVFerryOffloadConnector", {"loads": "always"}),
    IN_TREE: ("OffloadingConnector", {"spec_name": "CPUOffloadingSpec"}),
}
HOST_BYTES = {
    KVFERRY: "host_bytes",
    ALWAYS: "host_bytes",
    IN_TREE: "cpu_bytes_to_use",
}
"""The setting that each connector has for its host memory."""


@contextmanager
def running_engine(
    contestant: str,
    model: str,
    longest: int,
    folder: Path,
    disk: Path | None,
    watch: StallWatch,
    announce: Callable[[str], None],
) -> Iterator[Engine | Refused]:
    """Start and warm one engine, or yield why it does not start; end it on leaving, however that happens."""
    path = make_tiny_model(model, folder / "models")
    name = f"{contestant.replace(' ', '-')}-{model}"
    settings = engine_settings(contestant, model, path, longest, disk)
    server = start_engine(name, settings, folder)
    engine: Engine | None = None
    try:
        try:
            wait_until_ready([server], on_progress=lambda _, age: announce(f"{name}: starting, {age:.0f} s"))
        except LaunchError:
            if contestant != IN_TREE or server.process.exit_status() is None:
                raise
            yield Refused(contestant, refusal_in(server.process.log_path.read_text(errors="replace")))
            return
        engine = Engine(contestant, server, np.random.default_rng(time.time_ns()), watch)
        for index in range(WARM_UP_REQUESTS):
            announce(f"{name}: warm-up prompt {index + 1}")
            engine.store(engine.fresh(longest)) if settings.role else engine.first_tokens([engine.fresh(longest)])
        yield engine
    finally:
        if engine is not None:
            engine.resume()
        stop_servers([server])


def refusal_in(log: str) -> str:
    r"""Return the first exception that an engine's log names, without what the logger puts before it.

    >>> refusal_in("WARNING may cause OSError: none\n(Worker pid=7) ERROR [w.py:3] Exception: only for GPUs\n")
    'only for GPUs'
    """
    found = re.search(r"ERROR .*?(?:Exception|Error): (.*)", log)
    return found[1].strip() if found else "no exception in its log"
