"""Every engine of a deployment is replaced, one after the other, while clients go on: no request fails.

Two prefill and two decode engines serve behind one router, which asks each whether it is ready. docs/failures.md
describes the same steps for operators. Afterwards every cache is reset under load, as after new weights.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from kvferry.harness.launch import Server, start_router, wait_until_ready
from kvferry.harness.supervisor import living_descendants

from ..engine_pool import CONNECTOR_SETTINGS, LAST_CORE, EnginePool, post
from .load import CONNECTION_LOST, NO_ANSWER, RIGHT, WRONG, Clients, Load, Prompt, counted
from .runner import in_words
from .scene import PROMPTS, Side, log_lines, make_side, tokens_alone, wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.chaos]

FLOWS = ("sequential", "concurrent")
NAMES = ("prefill-a", "prefill-b", "decode-a", "decode-b")
READINESS = "kvferry.integrations.vllm.readiness.Readiness"
"""The engine of the pool brings the other middleware, which explains failed loads."""
# As docs/failures.md tells operators: the router notices within the time that a draining engine gives it.
HEALTH = ("--health-check-endpoint", "/ready", "--health-check-interval-secs", "5")
HEALTH += ("--health-failure-threshold", "2", "--health-success-threshold", "1", "--disable-circuit-breaker")
AT_ONCE = 4
MAX_TOKENS = 24
START_SECONDS = 1200.0
PATIENCE_SECONDS = 180.0
"""For an answer, and for each step but a start. Engines start beside those that serve, on the same cores."""
FREE_SECONDS = 30.0
"""Less than a first lease, and than the longest wait of a load."""
CACHE_BYTES = 128 << 20
NUM_RESETS = 3
"""Of each engine."""


@dataclass
class Deployment:
    """The engines and their router."""

    flow: str
    sides: dict[str, Side]
    folder: Path
    router: Server | None = None
    expected: dict[Prompt, list[int]] = field(default_factory=dict)

    @property
    def clients(self) -> Clients:
        assert self.router is not None
        return Clients(self.router.url, self.expected)

    def start(self) -> None:
        wait_until_ready([side.start() for side in self.sides.values()], timeout_seconds=START_SECONDS)
        self.expected |= tokens_alone(self.sides["decode-a"].alive)
        self.router = start_router([], [], self.folder, arguments=("--policy", "round_robin", *self.router_arguments()))
        wait_until_ready([self.router])
        for name in NAMES:
            self.wait_until_routed(name)

    def router_arguments(self) -> list[str]:
        arguments = [*HEALTH, *(["--kv-connector", "mooncake"] if self.flow == "concurrent" else [])]
        for name, side in self.sides.items():
            port = [str(side.settings.connector_settings["bootstrap_port"])] if self.flow == "concurrent" else []
            arguments += ["--prefill", side.url, *port] if "prefill" in name else ["--decode", side.url]
        return arguments

    def replace(self, name: str) -> float:
        """Drain an engine, end it, start another at its address, and wait for the router; return the seconds."""
        side, began_at = self.sides[name], time.monotonic()
        program = [sys.executable, "-m", "kvferry.cli.main", "drain", f"127.0.0.1:{side.control_port}"]
        subprocess.run([*program, "--timeout", str(PATIENCE_SECONDS)], check=True, timeout=2 * PATIENCE_SECONDS)
        process = side.alive.server.process
        os.kill(living_descendants(process.supervisor.pid)[0], signal.SIGTERM)
        wait_for(lambda: process.exit_status() is not None, PATIENCE_SECONDS, f"{name} ends")
        side.stop()
        wait_until_ready([side.start()], timeout_seconds=START_SECONDS)
        self.wait_until_routed(name)
        return time.monotonic() - began_at

    def wait_until_routed(self, name: str) -> None:
        """Wait until the router sends to the engine."""
        assert self.router is not None
        url = f"{self.router.url}/workers"

        def is_routed() -> bool:
            with urllib.request.urlopen(url, timeout=5) as answer:
                workers = {each["url"]: each["is_healthy"] for each in json.load(answer)["workers"]}
            return bool(workers[self.sides[name].url])

        wait_for(is_routed, PATIENCE_SECONDS, f"the router sends to {name}")

    def num_served(self, name: str) -> float:
        """Return how many requests this life of an engine has finished."""
        figures = self.sides[name].figures()
        return sum(number for title, number in figures.items() if title.startswith("vllm:request_success_total"))

    def num_loaded(self) -> int:
        """Return how many prompts the decode engines have loaded, in all of their lives."""
        sides = [side for name, side in self.sides.items() if "decode" in name]
        logs = [Path(f"{side.settings.connector_settings['transfer_log']}.rank0") for side in sides]
        lines = [json.loads(line) for log in logs if log.exists() for line in log.read_text().splitlines()]
        return sum("request_id" in line and line["error"] is None for line in lines)

    def wait_until_unused(self) -> None:
        for side in self.sides.values():
            wait_for(lambda side=side: side.alive.usage() == 0, FREE_SECONDS, f"{side.name} has its blocks back")
            wait_for(lambda side=side: not side.what_is_left(), FREE_SECONDS, f"{side.name} keeps nothing")

    def stop(self) -> None:
        for side in self.sides.values():
            side.stop()
        if self.router is not None:
            self.router.stop()

    def log_lines(self) -> Iterator[str]:
        return log_lines(self.sides.values(), self.router)


@pytest.fixture(scope="module", params=FLOWS)
def deployment(request: pytest.FixtureRequest, engine_pool: EnginePool) -> Iterator[Deployment]:
    flow = request.param
    folder = engine_pool.folder / f"rolling-{flow}"
    folder.mkdir()
    deployment = Deployment(flow, {name: one_side(name, engine_pool, folder) for name in NAMES}, folder)
    try:
        deployment.start()
        yield deployment
    finally:
        deployment.stop()


def one_side(name: str, pool: EnginePool, folder: Path) -> Side:
    side = make_side("cma", pool, folder, name, "gqa-tp1", "127.0.0.1", CACHE_BYTES)
    seconds = {name: CONNECTOR_SETTINGS[name] for name in ("lease_seconds", "load_timeout_seconds")}
    settings = replace(
        side.settings,
        connector_settings={**side.settings.connector_settings, **seconds},
        cores=LAST_CORE if name.endswith("b") else None,
        arguments=(*side.settings.arguments, "--middleware", READINESS),
    )
    return replace(side, settings=settings)


@pytest.mark.timeout(7200)
def test_a_rolling_restart_fails_no_request(deployment: Deployment) -> None:
    loaded_before = deployment.num_loaded()
    with Load(deployment.clients, PROMPTS, MAX_TOKENS, PATIENCE_SECONDS, AT_ONCE) as load:
        for name in NAMES:
            seconds, before = deployment.replace(name), len(load.responses)
            print(f"{name} replaced in {seconds:.0f} s; {before} responses: {in_words(counted(load.responses))}")
            wait_for(lambda name=name: deployment.num_served(name) > 2, PATIENCE_SECONDS, f"{name} serves")
    failed = [str(response) for response in load.responses if response.outcome != RIGHT]
    assert not failed, "\n".join(failed)
    assert deployment.num_loaded() - loaded_before >= len(load.responses), "decode engines have computed prompts"
    deployment.wait_until_unused()


@pytest.mark.timeout(900)
def test_the_reset_of_every_cache_under_load_gives_no_wrong_token(deployment: Deployment) -> None:
    clients = deployment.clients
    with Load(clients, PROMPTS, MAX_TOKENS, PATIENCE_SECONDS, AT_ONCE) as load:
        for side in NUM_RESETS * tuple(deployment.sides.values()):
            before = len(load.responses)
            post(f"{side.url}/reset_prefix_cache?reset_external=true", {})
            wait_for(lambda before=before: len(load.responses) > before, PATIENCE_SECONDS, "the load goes on")
    outcomes = counted(load.responses)
    print(f"caches reset under load: {in_words(outcomes)}")
    assert not {WRONG, NO_ANSWER, CONNECTION_LOST} & outcomes.keys(), "\n".join(map(str, load.responses))
    afterwards = clients.send_all(PROMPTS, MAX_TOKENS, PATIENCE_SECONDS, AT_ONCE)
    assert counted(afterwards) == {RIGHT: len(PROMPTS)}, "\n".join(map(str, afterwards))
    deployment.wait_until_unused()
