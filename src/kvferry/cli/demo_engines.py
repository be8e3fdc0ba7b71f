"""The demo's processes: a prefill engine, a decode engine, and an unmodified vllm-router before them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvferry.integrations.vllm.engine_metrics import cache_usage
from kvferry.integrations.vllm.launch import (
    EngineSettings,
    Role,
    Server,
    spread_over_cores,
    start_engine,
    start_router,
    stop_servers,
    wait_until_ready,
)

CONNECTOR = "KVFerryConnector"
TRANSFER_LOG = "transfers.jsonl"
MAX_MODEL_LEN = 4096
LEASE_SECONDS = 120.0
CACHE_BYTES = 768 << 20
"""Of one engine, over its ranks."""

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

    def engine(self, role: Role, tp_size: int, model: Path, folder: Path) -> EngineSettings:
        """Return the settings of the engine with ``role``."""
        settings = {"mode": self.mode, "transport": self.transport, "lease_seconds": LEASE_SECONDS}
        if self.layout is not None:
            settings["layout"] = self.layout
        if role == "kv_consumer":
            settings["transfer_log"] = str(folder / TRANSFER_LOG)
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
        for name, engine in (
            ("prefill", settings.engine("kv_producer", settings.prefill_tp, model, folder)),
            ("decode", settings.engine("kv_consumer", settings.decode_tp, model, folder)),
        ):
            announce(name, "starting")
            servers.append(start_engine(name, engine, folder))
        wait_until_ready(servers, on_progress=announce_age)
        servers.append(start_router([servers[0].url], [servers[1].url], folder))
        wait_until_ready(servers[2:], timeout_seconds=60.0, on_progress=announce_age)
        announce("engines", "ready")
        yield DemoEngines(*servers)
    finally:
        announce("engines", "stopping")
        stop_servers(servers)
