"""The demo's processes: a prefill engine, a decode engine, and an unmodified vllm-router before them."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvferry.harness.engine_metrics import cache_usage
from kvferry.harness.launch import (
    HOST,
    EngineSettings,
    Role,
    Server,
    free_port,
    spread_over_cores,
    start_engine,
    start_router,
    stop_servers,
    wait_until_ready,
)

CONNECTOR = "KVFerryConnector"
TRANSFER_LOG = "transfers.jsonl"
MAX_MODEL_LEN = 4096
PATIENCE = {"lease_seconds": 180.0, "load_timeout_seconds": 120.0}
"""Long: with five processes that compute on two cores, one may get none for half a minute."""
CACHE_BYTES = 768 << 20
"""Of one engine, over its ranks."""

TELL_SECONDS = 3.0
"""Within this an engine has told a new router of itself."""

Announce = Callable[[str, str], None]
"""Called with the name of a part and what it does now."""


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What the demo was asked to run. ``layout`` and ``block_size`` None leave the choice to connector and engine."""

    prefill_tp: int = 2
    decode_tp: int = 1
    layout: str | None = None
    transport: str = "auto"
    mode: str = "pull"
    num_prompts: int = 16
    block_size: int | None = None

    @property
    def is_push(self) -> bool:
        """Whether the prefill engine writes while it computes."""
        return self.mode == "push"

    def engine(self, role: Role, tp_size: int, model: Path, folder: Path, **more: str) -> EngineSettings:
        """Return the settings of the engine with ``role``; ``more`` goes to its connector."""
        settings: dict[str, str | float] = {"mode": self.mode, "transport": self.transport, **PATIENCE}
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
        )


@dataclass(frozen=True, slots=True)
class DemoEngines:
    """The running processes."""

    prefill: Server
    decode: Server
    router: Server

    def cache_usages(self) -> dict[str, float]:
        """Return the part of each engine's cache blocks that is in use now."""
        return {
            name: cache_usage(server.metrics()) for name, server in (("prefill", self.prefill), ("decode", self.decode))
        }

    def remaining_processes(self) -> int:
        """Return how many of their processes live."""
        return sum(len(server.process.process_ids()) for server in (self.prefill, self.decode, self.router))


@contextmanager
def running_engines(settings: DemoSettings, model: Path, folder: Path, announce: Announce) -> Iterator[DemoEngines]:
    """Start both engines at the same time, then the router; end all of them on leaving, however that happens."""
    servers: list[Server] = []

    def announce_age(name: str, seconds: float) -> None:
        announce(name, f"starting, {seconds:.0f} s")

    try:
        discovery = f"{HOST}:{free_port()}"
        roles: tuple[tuple[str, Role, int], ...] = (
            ("prefill", "kv_producer", settings.prefill_tp),
            ("decode", "kv_consumer", settings.decode_tp),
        )
        for name, role, tp_size in roles:
            announce(name, "starting")
            port = free_port()
            places = {"router_address": discovery, "http_address": f"{HOST}:{port}"} if settings.is_push else {}
            servers.append(start_engine(name, settings.engine(role, tp_size, model, folder, **places), folder, port))
        wait_until_ready(servers, on_progress=announce_age)
        servers.append(_start_router(settings, servers, discovery, folder))
        wait_until_ready(servers[2:], timeout_seconds=60.0, on_progress=announce_age)
        if settings.is_push:
            time.sleep(TELL_SECONDS)
        announce("engines", "ready")
        yield DemoEngines(*servers)
    finally:
        announce("engines", "stopping")
        stop_servers(servers)


def _start_router(settings: DemoSettings, servers: Sequence[Server], discovery: str, folder: Path) -> Server:
    """Start the router; for pushes in the one mode in which it sends to both engines at once."""
    if settings.is_push:
        arguments = ("--kv-connector", "moriio", "--vllm-discovery-address", discovery)
        return start_router([], [], folder, arguments=arguments)
    return start_router([servers[0].url], [servers[1].url], folder)
