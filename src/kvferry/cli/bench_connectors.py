"""What ``kvferry bench`` compares: each connector's engines, how a client asks them, and what they count.

A client asks each connector by the connector's own protocol, as vLLM's example proxies do. In a sequential flow the
prefill engine's answer has the parameters of the decode engine's request. In a concurrent flow both engines get the
request at once, and the decode engine is told at whose prefill it waits: by a transfer id and the engine id that the
prefill engine's bootstrap server names (MooncakeConnector, kvferry), or by one ``X-Request-Id`` for both requests and
the address at which the decode engine registers its blocks (NixlPushConnector).

A connector that offloads has one engine, which gets each prompt twice and forgets its own cache in between.
"""

import json
import operator
import re
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.cli.bench_report import KVFERRY, Cell, Moved, Request, Turn
from kvferry.errors import Reason, TransportError
from kvferry.harness.launch import HOST, Role, Server, prompt_tokens

NONE, NIXL, PUSH, MOONCAKE = "none", "NixlConnector", "NixlPushConnector", "MooncakeConnector"
CONCURRENT, OFFLOAD, IN_TREE_OFFLOAD = "kvferry-concurrent", "kvferry-offload", "OffloadingConnector"
COMPLETIONS = "/v1/completions"
REQUEST_SECONDS = 300.0
SETTLE_SECONDS = 0.2
"""How long an engine has to store blocks whose request has been answered, before it is asked to forget them."""
WARM_UP_SECONDS, WARM_UP_TOKENS = 120.0, 64
QUERY_SECONDS = 10.0
METRIC_SECONDS = 2.0
"""How long an engine may take to count a load that it has answered."""
RDMA_DEVICES = Path("/sys/class/infiniband")
TO_HOLD: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
TO_LOAD: dict[str, Any] = {"do_remote_decode": False, "do_remote_prefill": True}
OFFER = TO_HOLD | dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
"""The parameters with which a router asks for a prompt to be held."""
WHERE_TO_REGISTER = ("remote_engine_id", "remote_host", "remote_port", "tp_size", "pp_size")
ERROR = re.compile(r"\b\w*(?:Error|Exception): \S.*")


class Flow(Enum):
    """How a client asks for one answer; the module's first lines say more."""

    ALONE = auto()
    SEQUENTIAL = auto()
    BOOTSTRAP = auto()
    PUSH = auto()
    TWICE = auto()


@dataclass(frozen=True, slots=True)
class Connector:
    """A connector by vLLM's name. ``metrics`` names the metrics of a :class:`Moved`, which ``counted_by`` counts."""

    vllm_name: str
    flow: Flow
    metrics: Mapping[str, str] = field(default_factory=dict)
    counted_by: Role = "kv_consumer"

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles of its engines; an engine without a connector has the decode engine's place."""
        match self.flow:
            case Flow.ALONE:
                return ("kv_consumer",)
            case Flow.TWICE:
                return ("kv_both",)
        return ("kv_producer", "kv_consumer")


KVFERRY_METRICS = {
    "loads": "kvferry:loads_total",
    "num_bytes": "kvferry:transfer_bytes_sum",
    "descriptors": "kvferry:transfer_descriptors_sum",
    "transfer_seconds": "kvferry:transfer_seconds_sum",
    "wait_seconds": "kvferry:wait_seconds_sum",
}
NIXL_METRICS = {
    "loads": "vllm:nixl_bytes_transferred_count",
    "num_bytes": "vllm:nixl_bytes_transferred_sum",
    "descriptors": "vllm:nixl_num_descriptors_sum",
    "transfer_seconds": "vllm:nixl_xfer_time_seconds_sum",
}
CONNECTORS = {
    KVFERRY: Connector("KVFerryConnector", Flow.SEQUENTIAL, KVFERRY_METRICS),
    CONCURRENT: Connector("KVFerryConnector", Flow.BOOTSTRAP, KVFERRY_METRICS),
    NIXL: Connector(NIXL, Flow.SEQUENTIAL, NIXL_METRICS),
    PUSH: Connector(PUSH, Flow.PUSH, NIXL_METRICS, counted_by="kv_producer"),
    MOONCAKE: Connector(MOONCAKE, Flow.BOOTSTRAP),  # vLLM publishes no metrics of its transfers
    OFFLOAD: Connector("KVFerryOffloadConnector", Flow.TWICE),
    IN_TREE_OFFLOAD: Connector(IN_TREE_OFFLOAD, Flow.TWICE),
    NONE: Connector("", Flow.ALONE),
}
OFFLOADING = tuple(name for name, connector in CONNECTORS.items() if connector.flow in (Flow.TWICE, Flow.ALONE))
HANDING_OVER = tuple(name for name, connector in CONNECTORS.items() if connector.flow is not Flow.TWICE)


def engine_needs(name: str, role: Role, port: int, host_bytes: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Return an engine's ``kv_connector_extra_config`` and variables.

    ``port`` is for its bootstrap server, and ``host_bytes`` are for what it offloads.

    >>> engine_needs("kvferry-concurrent", "kv_producer", 20001, 1 << 30)
    ({'bootstrap_port': 20001}, {})
    """
    if CONNECTORS[name].flow is Flow.TWICE:
        has_tier = {OFFLOAD: {"host_bytes": host_bytes}, IN_TREE_OFFLOAD: {"cpu_bytes_to_use": host_bytes}}
        return has_tier[name], {"VLLM_SERVER_DEV_MODE": "1"}  # for /reset_prefix_cache
    if name == CONCURRENT and role == "kv_producer":
        return {"bootstrap_port": port}, {}
    if name == MOONCAKE:
        has_rdma = RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir())
        variables = {"VLLM_HOST_IP": HOST, "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port)}
        return {"mooncake_protocol": "rdma" if has_rdma else "tcp"}, variables
    return {}, {}


@dataclass(slots=True)
class Contestant:
    """A connector's engines; without a connector one engine, which computes each prompt itself.

    ``bootstrap_port`` is that of the prefill engine's bootstrap server, where the connector has one.
    """

    name: str
    decode: Server
    prefill: Server | None
    vocabulary_size: int
    output_tokens: int
    bootstrap_port: int = 0
    generator: np.random.Generator = field(default_factory=np.random.default_rng)
    _source: dict[str, Any] = field(default_factory=dict)
    """What each decode request of a concurrent flow says of the prefill engine."""

    @property
    def connector(self) -> Connector:
        """What is known of the connector."""
        return CONNECTORS[self.name]

    @property
    def servers(self) -> list[Server]:
        """The engines."""
        return [self.decode] if self.prefill is None else [self.prefill, self.decode]

    def pause(self) -> None:
        """Stop the processes: an idle engine is not idle, and would take cores from the one whose turn it is."""
        for server in self.servers:
            server.process.pause()

    def resume(self) -> None:
        """Let the processes go on; twice is fine."""
        for server in self.servers:
            server.process.resume()

    def warm_up(self) -> None:
        """Let each engine compute a prompt itself, and learn what decode requests say of the prefill engine.

        On a processor with AMX, vLLM 0.32 for CPUs asks Linux for AMX when it computes several tokens. Before that an
        engine of a small model ends at the first token after a received prompt, unless its connector asks.
        """
        for server in self.servers:
            self.complete(server, self._prompt(), 2, WARM_UP_SECONDS)
        if self.connector.flow is Flow.BOOTSTRAP:
            self._source = bootstrapped(self.bootstrap_port)
        elif self.connector.flow is Flow.PUSH:
            # The prefill engine's address is in its answers alone; the first prompt is handed over in turn.
            prompt, request_id = self._prompt(), str(uuid.uuid4())
            held = self._hold(prompt, OFFER, request_id, WARM_UP_SECONDS)
            self._source = TO_LOAD | {name: held[name] for name in WHERE_TO_REGISTER if name in held}
            self.load(prompt, self._source | {"remote_request_id": request_id}, request_id, WARM_UP_SECONDS)

    def turn(self, cell: Cell, seconds: float = REQUEST_SECONDS) -> Turn:
        """Send fresh prompts at once; afterwards, and not measured, the prefill engine answers each of them alone.

        An engine that offloads has answered the prompts before, which is not measured either, and has forgotten them.
        An engine may be silent for ``seconds``. Raises :class:`TransportError` where a prompt has no whole answer, and
        where the decode engine computed every prompt itself.
        """
        prompts = self.generator.integers(0, self.vocabulary_size, (cell.at_once, cell.tokens)).tolist()
        with _threads(cell.at_once) as pool:

            def answers() -> tuple[tuple[Request, ...], list[list[int]]]:
                requests, tokens = zip(*pool.map(lambda prompt: self.request(prompt, seconds), prompts), strict=True)
                return requests, list(tokens)

            expected = None
            if self.connector.flow is Flow.TWICE:
                _, expected = answers()
                self._forget(seconds)
            before = self.counted()
            began_at = time.perf_counter()
            requests, found = answers()
            took = time.perf_counter() - began_at
            moved = self.moved_since(before, cell.at_once)
            if (prefill := self.prefill) is not None:
                if moved.computed_tokens >= cell.tokens * cell.at_once:
                    problem = f"{self.name}: nothing moved; the decode engine computed all {cell.tokens} tokens itself."
                    raise TransportError(Reason.TRANSFER_FAILED, problem, "Look into the engines' logs.")
                alone = pool.map(lambda each: self.complete(prefill, each, self.output_tokens, seconds), prompts)
                expected = [answer["choices"][0]["token_ids"] for answer in alone]
        return Turn(requests, took, moved, sum(map(operator.ne, found, expected or found)))

    def _forget(self, seconds: float) -> None:
        """Let the engine forget what its own cache has, not what it has offloaded, once all blocks are free."""
        deadline = time.monotonic() + seconds
        while True:
            time.sleep(SETTLE_SECONDS)
            with _post(f"{self.decode.url}/reset_prefix_cache", {}, str(uuid.uuid4()), seconds) as response:
                if json.load(response)["success"]:
                    return
            if time.monotonic() >= deadline:
                problem = f"{self.name}: the engine keeps blocks in use for {seconds:.0f} s."
                raise TransportError(Reason.DEADLINE_EXCEEDED, problem, "Look into the engine's log.")

    def moved_since(self, before: Mapping[str, float], num_loads: int) -> Moved:
        """Return what has moved since :meth:`counted`, once so many loads are counted, or some seconds later."""
        deadline = time.monotonic() + METRIC_SECONDS
        while True:
            moved = Moved(**{name: value - before[name] for name, value in self.counted().items()})
            if moved.loads >= num_loads or not self.connector.metrics or time.monotonic() >= deadline:
                return moved
            time.sleep(0.05)

    def counted(self) -> dict[str, float]:
        """Return what the engines have counted until now of loads and computed tokens."""
        metrics = self.decode.metrics()
        computed = prompt_tokens(metrics).computed
        if self.prefill is not None and self.connector.counted_by == "kv_producer":
            metrics = self.prefill.metrics()
        counted = {name: metrics.get(metric, 0.0) for name, metric in self.connector.metrics.items()}
        return counted | {"computed_tokens": computed}

    def request(self, prompt: Sequence[int], seconds: float) -> tuple[Request, list[int]]:
        """Send one prompt by the connector's flow; return its times and the decode engine's tokens."""
        request_id = str(uuid.uuid4())
        began_at = decode_at = time.perf_counter()
        match self.connector.flow:
            case Flow.ALONE | Flow.TWICE:
                answer = self.load(prompt, None, request_id, seconds)
            case Flow.SEQUENTIAL:
                held = self._hold(prompt, OFFER, request_id, seconds)
                decode_at = time.perf_counter()
                answer = self.load(prompt, held, request_id, seconds)
            case Flow.BOOTSTRAP:
                named = {"transfer_id": request_id}
                answer = self._at_once(prompt, TO_HOLD | named, self._source | named, request_id, seconds)
            case Flow.PUSH:
                to_decode = self._source | {"remote_request_id": request_id}
                answer = self._at_once(prompt, OFFER, to_decode, request_id, seconds)
        times, tokens = [when for when, _ in answer], [token for _, token in answer]
        if len(times) != self.output_tokens:
            problem = f"{self.name}: the decode engine sent {len(times)} tokens of {self.output_tokens}."
            raise TransportError(Reason.TRANSFER_FAILED, problem, "Look into the engines' logs.")
        token_seconds = (times[-1] - times[0]) / (len(times) - 1)
        return Request(decode_at - began_at, times[0] - decode_at, token_seconds), tokens

    def _at_once(
        self,
        prompt: Sequence[int],
        to_prefill: Mapping[str, Any],
        to_decode: Mapping[str, Any],
        request_id: str,
        seconds: float,
    ) -> list[tuple[float, int]]:
        """Send a prompt to both engines; where both fail, raise the prefill engine's error, which is the cause."""
        with ThreadPoolExecutor(1) as thread:
            prefilled = thread.submit(self._hold, prompt, to_prefill, request_id, seconds)
            try:
                return self.load(prompt, to_decode, request_id, seconds)
            finally:
                prefilled.result()

    def _prompt(self) -> list[int]:
        return [int(token) for token in self.generator.integers(0, self.vocabulary_size, WARM_UP_TOKENS)]

    def complete(self, server: Server, prompt: Sequence[int], max_tokens: int, seconds: float) -> dict[str, Any]:
        """Return an engine's answer to a prompt with which no connector has to do."""
        with _post(f"{server.url}{COMPLETIONS}", _body(prompt, max_tokens), str(uuid.uuid4()), seconds) as response:
            return dict(json.load(response))

    def _hold(
        self, prompt: Sequence[int], params: Mapping[str, Any], request_id: str, seconds: float
    ) -> dict[str, Any]:
        """Return the ``kv_transfer_params`` of the prefill engine's answer; a concurrent flow may have none."""
        assert self.prefill is not None
        body = _body(prompt, 1) | {"kv_transfer_params": params}
        with _post(f"{self.prefill.url}{COMPLETIONS}", body, request_id, seconds) as response:
            held = json.load(response).get("kv_transfer_params") or {}
        if not held and self.connector.flow is not Flow.BOOTSTRAP:
            problem = f"{self.name}: the prefill engine holds no prompt."
            raise TransportError(Reason.TRANSFER_FAILED, problem, "Look into the engines' logs.")
        return dict(held)

    def load(
        self, prompt: Sequence[int], params: Mapping[str, Any] | None, request_id: str, seconds: float
    ) -> list[tuple[float, int]]:
        """Return the decode engine's tokens, each with the time of its arrival on the clock of ``perf_counter``."""
        body = _body(prompt, self.output_tokens) | {"stream": True}
        if params is not None:
            body["kv_transfer_params"] = params
        return list(_timed_tokens(_post(f"{self.decode.url}{COMPLETIONS}", body, request_id, seconds)))


@contextmanager
def _threads(number: int) -> Iterator[ThreadPoolExecutor]:
    """Yield threads that end at the exit, except at an interrupt: their requests then end with the engines."""
    pool, waits = ThreadPoolExecutor(number), True
    try:
        yield pool
    except BaseException as error:
        waits = isinstance(error, Exception)
        raise
    finally:
        pool.shutdown(wait=waits, cancel_futures=not waits)


def bootstrapped(port: int) -> dict[str, Any]:
    """Return what decode requests say of a prefill engine, as a router reads it at its start."""
    address = f"http://{HOST}:{port}"
    # The URL is that of an engine which this command started.
    with urllib.request.urlopen(f"{address}/query", timeout=QUERY_SECONDS) as response:  # nosec B310
        engine_id = json.load(response)["0"]["engine_id"]
    return TO_LOAD | {"remote_bootstrap_addr": address, "remote_engine_id": engine_id}


def cause_of_end(servers: Sequence[Server]) -> str | None:
    """Return why an engine has ended, by its log or its exit status; None while all run."""
    for server in servers:
        if (status := server.process.exit_status()) is not None:
            cause = last_error(server.process.log_path.read_text(errors="replace"))
            return f"{server.process.name} ended: {cause or f'exit status {status}'}"
    return None


def last_error(log: str) -> str | None:
    r"""Return the last error of an engine's log that names a cause: vLLM ends it with errors that refer to others.

    >>> last_error("ERROR RuntimeError: no such device\nRuntimeError: Engine failed. See root cause above.")
    'RuntimeError: no such device'
    >>> last_error("INFO all is well") is None
    True
    """
    errors = [found[0] for found in ERROR.finditer(log) if "root cause" not in found[0]]
    return errors[-1][:600] if errors else None


def _body(prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    body = {"model": "model", "prompt": prompt, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return body | {"max_tokens": max_tokens}


def _post(url: str, body: Mapping[str, Any], request_id: str, seconds: float) -> Any:
    """Send a request and return the response. Raises :class:`TransportError` for an error status."""
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        # The URL is that of an engine which this command started.
        return urllib.request.urlopen(request, timeout=seconds)  # nosec B310
    except urllib.error.HTTPError as error:
        problem = f"{url} answered {error.code}: {error.read(500).decode(errors='replace')}"
        raise TransportError(Reason.TRANSFER_FAILED, problem, "Look into the engines' logs.") from error
    except OSError as error:
        raise TransportError(Reason.TRANSFER_FAILED, f"{url} did not answer: {error}", "Look into its log.") from error


def _timed_tokens(response: Any) -> Iterator[tuple[float, int]]:
    with response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            now, chunk = time.perf_counter(), json.loads(line.removeprefix(b"data: "))
            if "error" in chunk:
                found = str(chunk["error"])[:500]
                raise TransportError(Reason.TRANSFER_FAILED, f"a stream broke: {found}", "Look into the engines' logs.")
            for choice in chunk.get("choices", ()):
                yield from ((now, token) for token in choice.get("token_ids") or ())
