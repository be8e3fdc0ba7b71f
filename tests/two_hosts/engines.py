"""Real engines on virtual hosts, and prompts that they hand over while something goes wrong with the network."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from kvferry.harness.launch import EngineSettings, Server, start_engine
from kvferry.harness.virtual_hosts import DEVICE, VirtualHost

from ..host.vllm.concurrent_flow import ConcurrentHandoffs, to_prefill
from ..host.vllm.engine_pool import EnginePool, RequestFailed, described, fresh_salt
from ..host.vllm.handoffs import Handoffs, Pair
from ..virtual_network import Hosts
from .network_faults import slow

LOAD_SECONDS = 30.0
LEASE_SECONDS = 25.0
LIMITS = {"transport": "auto", "lease_seconds": LEASE_SECONDS, "load_timeout_seconds": LOAD_SECONDS}
DEADLINE_SECONDS = LOAD_SECONDS + 10.0 + 15.0
"""Within which a client has its answer: docs/failures.md promises 10 s after a load's time, then steps follow."""
MEGABITS = 24
"""The prompts of a load take eight seconds or more."""
BEGUN_BYTES = 2 << 20
BEGUN_SECONDS = 30.0
MOMENT_SECONDS = 0.05


@dataclass
class PoolOnHosts(EnginePool):
    """Prefill engines on the first host, decode engines on the second, and engines without connector on the third.

    ``advertised`` has the names that engines give for their host, where these are not the host's own.
    """

    hosts: Hosts = ()
    prefill_engines: frozenset[str] = frozenset()
    advertised: Mapping[str, str] = field(default_factory=dict)

    def host_of(self, name: str) -> VirtualHost:
        """Return the host on which an engine runs."""
        prefill, decode, router = self.hosts
        if described(name)[1].get("role", "kv_both") is None:
            return router
        return prefill if name in self.prefill_engines else decode

    def settings(self, name: str) -> EngineSettings:
        settings, here = super().settings(name), self.host_of(name)
        if settings.role is None:
            return settings
        of_host = {
            "host": here.address,
            "advertised_host": self.advertised.get(name, here.name),
            "keys": str(self.keys_folder()),
            "allowed_hosts": [host.name for host in self.hosts if host != here],
        }
        connector = {**settings.connector_settings, **LIMITS, **of_host}
        return replace(settings, connector_settings=connector)

    def start(self, name: str, settings: EngineSettings) -> Server:
        return start_engine(name, settings, self.folder, host=self.host_of(name))


def handoffs_of(pair: Pair, pool: EnginePool) -> Handoffs:
    """Return the pair's engines behind a tiny router, concurrent where the pair's name says so."""
    return (ConcurrentHandoffs if is_concurrent(pair) else Handoffs).of(pair, pool)


def is_concurrent(pair: Pair) -> bool:
    return pair.name.startswith("concurrent")


@dataclass(frozen=True)
class Answer:
    """What a client got from the decode engine for a prompt: tokens, or the text of an error."""

    prompt: Sequence[int]
    tokens: list[list[int]]
    error: str
    seconds: float


def asked(prompt: Sequence[int], ask: Callable[[], list[list[int]]]) -> Answer:
    """Return what the decode engine answers, an error too."""
    began_at = time.monotonic()
    try:
        tokens, error = ask(), ""
    except RequestFailed as failed:
        tokens, error = [], str(failed)
    return Answer(prompt, tokens, error, time.monotonic() - began_at)


def begin(handoffs: Handoffs, prompts: Sequence[Sequence[int]], threads: ThreadPoolExecutor) -> list[Future[Answer]]:
    """Send prompts through both engines; return the answers to come when the prefill engine has answered.

    So a link that fails from then on cuts no client off, only the two engines.
    """

    def decode(prompt: Sequence[int], params: dict[str, Any], salt: str) -> Future[Answer]:
        return threads.submit(asked, prompt, lambda: handoffs.decode.decode(prompt, params, 8, salt))

    salt = fresh_salt()
    if isinstance(handoffs, ConcurrentHandoffs):
        transfers = [f"xfer-{uuid4()}" for _ in prompts]
        answers = [
            decode(prompt, handoffs.to_decode(transfer), salt)
            for prompt, transfer in zip(prompts, transfers, strict=True)
        ]
        computed = [
            threads.submit(handoffs.prefill.complete, prompt, 1, salt, kv_transfer_params=to_prefill(transfer))
            for prompt, transfer in zip(prompts, transfers, strict=True)
        ]
        for each in computed:
            each.result()
        return answers
    params = list(threads.map(lambda prompt: handoffs.prefill.prefill(prompt, salt), prompts))
    return [decode(prompt, of_prompt, salt) for prompt, of_prompt in zip(prompts, params, strict=True)]


@contextmanager
def loading(handoffs: Handoffs, host: VirtualHost, prompts: Sequence[Sequence[int]]) -> Iterator[list[Future[Answer]]]:
    """Let prompts be loaded from a host over a slow link; yield the answers of loads whose bytes move."""
    before = sent_bytes(host)
    with ThreadPoolExecutor(2 * len(prompts)) as threads, slow(host, MEGABITS):
        answers = begin(handoffs, prompts, threads)
        deadline = time.monotonic() + BEGUN_SECONDS
        while sent_bytes(host) - before < BEGUN_BYTES:
            assert time.monotonic() < deadline, "no bytes move"
            time.sleep(MOMENT_SECONDS)
        loads = [answer for answer in answers if not answer.done()]
        assert loads, "all loads have ended too soon"
        yield loads


def sent_bytes(host: VirtualHost) -> int:
    """Return how many bytes a host has sent."""
    return int(host.run("cat", f"/sys/class/net/{DEVICE}/statistics/tx_bytes"))
