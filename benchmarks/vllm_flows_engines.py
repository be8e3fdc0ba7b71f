"""Pairs of real vLLM engines for the benchmark of flows: start, warm, and measure one request."""

import json
import os
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from stall_watch import StallWatch
from vllm_handoff_engines import (
    KVFERRY,
    SETTLE_SECONDS,
    BenchmarkError,
    Contestant,
    Pair,
    call_workers,
    complete,
    engine_cores,
)

from kvferry.errors import Reason
from kvferry.harness.launch import (
    HOST,
    EngineSettings,
    Role,
    Server,
    free_port,
    prompt_tokens,
    start_engine,
    stop_servers,
    wait_until_ready,
)
from kvferry.harness.tiny_models import VOCABULARY_SIZE, find_tiny_model, make_tiny_model
from kvferry.integrations.vllm.waiting_workers import VARIABLE as SLEEPING_WORKERS

MODEL = "kv-heavy"
BLOCK_SIZE = 128
PROMPTS_IN_CACHE = 2
EXTENSION = "vllm_stopwatch.StopwatchExtension"
LOG_SECONDS = 5.0
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts of ``tokens`` tokens. The target: the concurrent ``figure`` is at most ``target`` times the other."""

    name: str
    title: str
    tokens: int
    engines: str
    figure: str
    target: float


CASES = {
    "chunks": Case("chunks", "chunks of 256", 2048, "chunked", "wait_seconds", 0.3),
    "one-chunk": Case("one-chunk", "one chunk", 2048, "unchunked", "wait_seconds", 0.3),
    "short": Case("short", "one chunk", 64, "unchunked", "first_token_seconds", 1.1),
}
SEQUENTIAL, CONCURRENT = FLOWS = ("sequential", "concurrent")
WAITS: dict[str, dict[str, str]] = {"sleep": {}, "yield": {SLEEPING_WORKERS: "0"}}
MAX_BATCHED_TOKENS = {"chunked": 256, "unchunked": 4096}


@dataclass(frozen=True, slots=True)
class Engines:
    """One pair of engines: a flow, and the kvferry that provides it. Samples are kept by ``name``."""

    flow: str
    contestant: Contestant = KVFERRY

    @property
    def name(self) -> str:
        """The flow, and the checkout where it is another one.

        >>> before = Contestant("before", "KVFerryConnector", Path("/before"))
        >>> Engines(CONCURRENT).name, Engines(CONCURRENT, before).name
        ('concurrent', 'concurrent (before)')
        """
        return self.flow if self.contestant == KVFERRY else f"{self.flow} ({self.contestant.name})"


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. ``wait_seconds`` is from the end of its last step of prefill to the decode engine's commit.

    ``decode_cores`` is the processor time of the decode engine from the request to its first token, per second.
    ``num_batches`` counts the batches of a write.
    """

    wait_seconds: float
    first_token_seconds: float
    prefill_seconds: float
    decode_cores: float
    num_bytes: int
    num_descriptors: int
    same_token: bool
    num_batches: int = 0

    @property
    def handoff_seconds(self) -> float:
        """The time from the end of the last step of prefill to the client's first token.

        Two engines started alike compute one prompt up to 1.3 times apart, each at its own speed until its end; the
        whole time to the first token therefore compares engines, and this part compares handoffs.
        """
        return self.first_token_seconds - self.prefill_seconds


@dataclass(slots=True)
class MeasuredPair(Pair):
    """A prefill and a decode engine behind one flow."""

    flow: str = SEQUENTIAL
    log: Path = Path()
    bootstrap_port: int = 0
    engine_id: str = ""

    def warm_up_with(self, cases: Sequence[Case], on_prompt: Callable[[int], None]) -> None:
        """Send prompts of every case until every block of both caches has been used."""
        for index in range(PROMPTS_IN_CACHE + 2):
            on_prompt(index)
            for case in cases:
                self.measure_case(case)

    def measure_case(self, case: Case) -> Sample:
        """Send one fresh prompt by the flow of the pair.

        Raises :class:`BenchmarkError` unless the decode engine received the prompt's whole cache.
        """
        for server in (self.prefill, self.decode):
            call_workers(server, "touch_cache")
        time.sleep(SETTLE_SECONDS)
        prompt = self.generator.integers(0, VOCABULARY_SIZE, case.tokens).tolist()
        transfer_id = f"xfer-{uuid.uuid4()}"
        received_before, cpu_before = prompt_tokens(self.decode.metrics()), cpu_seconds(self.decode)
        started_at = time.monotonic()
        prefilled, answer = self._at_once(prompt, transfer_id) if self.flow == CONCURRENT else self._in_turn(prompt)
        ended_at = time.monotonic()
        cores = (cpu_seconds(self.decode) - cpu_before) / (ended_at - started_at)
        decoded, computed = (call_workers(each, "read_stopwatch") for each in (self.decode, self.prefill))
        self._await_release()
        moved = prompt_tokens(self.decode.metrics()) - received_before
        if moved.received < case.tokens - 1 or moved.cached or moved.computed > 1:
            raise BenchmarkError(Reason.TRANSFER_FAILED, f"{self.flow}: the prompt's tokens were {moved}.")
        prefill_ended_at = max(reading["step_ended_at"] for reading in computed)
        own = [statistics for reading in decoded for statistics in reading["statistics"]]
        return Sample(
            wait_seconds=max(lap["reported_at"] for reading in decoded for lap in reading["laps"]) - prefill_ended_at,
            first_token_seconds=ended_at - started_at,
            prefill_seconds=prefill_ended_at - started_at,
            decode_cores=cores,
            num_bytes=int(sum(sum(entry["bytes"]) for entry in own)),
            num_descriptors=int(sum(sum(entry["descriptors"]) for entry in own)),
            same_token=answer["choices"][0]["token_ids"] == prefilled["choices"][0]["token_ids"],
            num_batches=self._num_batches(transfer_id) if self.flow == CONCURRENT else 0,
        )

    def _in_turn(self, prompt: list[int]) -> tuple[dict[str, Any], dict[str, Any]]:
        prefilled = complete(self.prefill, prompt, {"do_remote_decode": True})
        return prefilled, complete(self.decode, prompt, prefilled["kv_transfer_params"])

    def _at_once(self, prompt: list[int], transfer_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
        address = f"http://{HOST}:{self.bootstrap_port}"
        to_decode = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": transfer_id,
            "remote_bootstrap_addr": address,
            "remote_engine_id": self.engine_id,
        }
        found: list[dict[str, Any]] = []

        def prefill() -> None:
            with suppress(BenchmarkError):
                params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
                found.append(complete(self.prefill, prompt, params))

        thread = threading.Thread(target=prefill, daemon=True)
        thread.start()
        answer = complete(self.decode, prompt, to_decode)
        thread.join()
        if not found:
            raise BenchmarkError(Reason.TRANSFER_FAILED, "concurrent: the prefill engine did not answer.")
        return found[0], answer

    def _num_batches(self, transfer_id: str) -> int:
        """Return the number of a write's batches from the prefill engine's log; 0 where an older checkout logs none.

        The engine logs a write in its next step, so this method sends one more request.
        """
        end = time.monotonic() + LOG_SECONDS
        while (events := self._logged(transfer_id)) is None:
            if time.monotonic() > end:
                raise BenchmarkError(Reason.DEADLINE_EXCEEDED, "concurrent: the prefill engine does not log the write.")
            time.sleep(0.2)
            if self._logged(transfer_id) is None:
                complete(self.prefill, [0], {})
        return len(events.get("batches", ()))

    def _logged(self, transfer_id: str) -> dict[str, Any] | None:
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if transfer_id in line]
        return next((line.get("events", {}) for line in lines if "write" in line), None)


def bootstrapped_id(port: int) -> str:
    """Return the engine id, as a router reads it at its start."""
    with urllib.request.urlopen(f"http://{HOST}:{port}/query", timeout=LOG_SECONDS) as response:
        return str(json.load(response)["0"]["engine_id"])


def cpu_seconds(server: Server) -> float:
    """Return the processor time of all processes of a server."""
    total = 0
    for process_id in server.process.process_ids():
        with suppress(OSError):
            fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / CLOCK_TICKS


@contextmanager
def running_pair(
    which: Engines,
    engines: str,
    cases: Sequence[Case],
    waits: str,
    folder: Path,
    watch: StallWatch,
    announce: Callable[[str], None],
) -> Iterator[MeasuredPair]:
    """Start and warm both engines of one flow; end them on every exit."""
    flow, name = which.flow, which.name
    servers: list[Server] = []
    pair: MeasuredPair | None = None
    model = make_tiny_model(MODEL, folder / "models")
    file_name = f"{flow}-{which.contestant.name.replace('/', '-')}-{engines}"
    log, port = folder / f"{file_name}.transfers", free_port()
    try:
        roles: tuple[Role, ...] = ("kv_producer", "kv_consumer")
        for role in roles:
            connector: dict[str, Any] = {"transport": "cma"}
            if flow == CONCURRENT and role == "kv_producer":
                connector |= {"bootstrap_port": port, "transfer_log": str(log)}
            variables = {**which.contestant.variables, **WAITS[waits]}
            settings = engine_settings(role, connector, model, cases, MAX_BATCHED_TOKENS[engines], variables)
            servers.append(start_engine(f"{file_name}-{role}", settings, folder))
        wait_until_ready(servers, on_progress=lambda name, age: announce(f"{name}: starting, {age:.0f} s"))
        generator = np.random.default_rng(time.time_ns())
        longest: Any = max(cases, key=lambda case: case.tokens)
        logged = Path(f"{log}.rank0")
        prefill, decode = servers
        pair = MeasuredPair(
            name, longest, prefill, decode, generator, watch, flow=flow, log=logged, bootstrap_port=port
        )
        if flow == CONCURRENT:
            pair.engine_id = bootstrapped_id(port)
        for server in servers:
            call_workers(server, "install_stopwatch")
        pair.warm_up_with(cases, lambda index: announce(f"{name}: warm-up round {index + 1}"))
        yield pair
    finally:
        if pair is not None:
            pair.resume()
        stop_servers(servers)


def engine_settings(
    role: Role,
    connector: dict[str, Any],
    model: Path,
    cases: Sequence[Case],
    max_batched_tokens: int,
    variables: dict[str, str],
) -> EngineSettings:
    """Return one engine's settings, which differ between the flows only in the connector's settings."""
    num_blocks = PROMPTS_IN_CACHE * max(-(-case.tokens // BLOCK_SIZE) for case in cases)
    # A decode engine computes no prompts.
    chunk = max_batched_tokens if role == "kv_producer" else max(MAX_BATCHED_TOKENS.values())
    return EngineSettings(
        model,
        role=role,
        connector_settings=connector,
        dtype="bfloat16",
        block_size=BLOCK_SIZE,
        prefix_caching=False,
        cores=engine_cores(role, 1),
        max_model_len=num_blocks * BLOCK_SIZE,
        kv_cache_bytes=(num_blocks + 1) * BLOCK_SIZE * find_tiny_model(MODEL).kv_bytes_per_token(),
        arguments=("--worker-extension-cls", EXTENSION, "--max-num-batched-tokens", str(chunk)),
        variables=variables,
    )
