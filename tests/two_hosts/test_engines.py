"""Real engines on two virtual hosts: the tokens of one engine alone, and under each fault of the network right tokens
or an error in time; then every block is free and the next prompts are right.
"""

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvferry.handoff.wire.client import FAILURE_SECONDS
from kvferry.harness.virtual_hosts import DEVICE, VirtualHost

from ..host.vllm.chaos.relay import Relay, listening_ports
from ..host.vllm.engine_pool import Engine, Reference
from ..host.vllm.handoffs import (
    FIRST_WAVE,
    Handoffs,
    Pair,
    check_tokens,
    random_prompt,
    random_prompts,
)
from ..virtual_network import Hosts, make_hosts
from ..waits import wait_until
from .engines import (
    DEADLINE_SECONDS,
    LEASE_SECONDS,
    LOAD_SECONDS,
    Answer,
    PoolOnHosts,
    asked,
    handoffs_of,
    is_concurrent,
    loading,
)
from .network_faults import dropped, known_as, lossy, no_way, unplugged

pytestmark = pytest.mark.vllm

GQA = (
    Pair("gqa-2-1", "gqa-tp2", "gqa-tp1-nixl", "nixl"),
    Pair("concurrent-2-1", "gqa-tp2", "gqa-tp1-nixl", "nixl"),
)
PAIRS = (
    *GQA,
    Pair("gemma-2-1", "gemma-tp2", "gemma-tp1", "nixl"),
    Pair("concurrent-gemma-2-1", "gemma-chunked", "gemma-tp1", "nixl"),
)
# The engine that has another name than its host: the prefill engine, whose control port decode engines look for, and
# the decode engine, to whose ranks the prefill engine connects.
ELSEWHERE = (
    Pair("elsewhere", "gqa-tp1", "gqa-tp1-nixl", "nixl"),
    Pair("concurrent-elsewhere", "gqa-tp2", "gqa-tp1-next", "nixl"),
)
OTHER_NAMES = {"gqa-tp1": "prefill-9", "gqa-tp1-next": "decode-9"}
SIX = (Pair("six", "gqa-tp2", "gqa-tp1-nixl", "nixl"), Pair("concurrent-six", "gqa-tp2", "gqa-tp1-nixl", "nixl"))
NOBODY = "198.18.0.77"
"""An address of the hosts' network that no host has."""

WAVE = random_prompts(seed=61, count=12, shortest=5, longest=2000)
UNDER_FAULTS = [random_prompt(6200 + number, 300) for number in range(4)]
OVER_A_LOSSY_WIRE = [random_prompt(6300 + number, 200) for number in range(2)]
NEXT = random_prompts(seed=64, count=4, shortest=60, longest=600)

SHORT_SECONDS = 3.0
FREE_SECONDS = 75.0
"""Within which a decode engine whose link was cut has its blocks back: docs/failures.md, a load's deadline, 10 s, and
the fence.
"""
SERVED_SECONDS = 90.0
"""Within which loads work again after data had no way while messages had one."""
RENEWED_SECONDS = 15.0
"""Within which a prefill engine whose link is back has its blocks back: 10 s after the last renewal."""
FAULTS: dict[str, Callable[[VirtualHost], AbstractContextManager[None]]] = {"unplugged": unplugged, "dropped": dropped}
for_faults = pytest.mark.parametrize("fault", FAULTS)


def over(pairs: tuple[Pair, ...]) -> Any:
    """Parametrize a test over pairs; the argument is ``handoffs``, a pair of engines that run."""
    return pytest.mark.parametrize(
        "handoffs", [pytest.param(pair, id=pair.name) for pair in pairs], indirect=True, scope="module"
    )


@pytest.fixture(scope="module")
def pool(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolOnHosts]:
    """Engines on the hosts; meanwhile the tests run on the host of the router, as the clients do."""
    models = tmp_path_factory.getbasetemp().parent / "kvferry-models"
    prefill_engines = frozenset(pair.prefill for pair in (*PAIRS, *ELSEWHERE))
    pool = PoolOnHosts(
        tmp_path_factory.mktemp("engines"),
        models,
        hosts=hosts,
        prefill_engines=prefill_engines,
        advertised=OTHER_NAMES,
    )
    with hosts[2].entered(), closing(pool):
        yield pool


@pytest.fixture(scope="module")
def reference(pool: PoolOnHosts) -> Reference:
    return Reference(pool)


@pytest.fixture(scope="module")
def handoffs(request: pytest.FixtureRequest, pool: PoolOnHosts) -> Handoffs:
    """The engines of the pair that the test's parameter names, started together with the one that computes alone."""
    pair: Pair = request.param
    names = {pair.prefill, pair.decode, f"{pair.model}-reference"}
    pool.stop_all_but(names)
    pool.need(sorted(names))
    return handoffs_of(pair, pool)


def check_wave(
    handoffs: Handoffs, prompts: list[list[int]], reference: Reference, *, is_after_cut: bool = False
) -> None:
    """Send prompts, all at once: tokens as one engine's, nothing computed that was to be received, and nothing left.

    After a cut a release may wait in a connection from before: then the hold ends 10 s after its last renewal.
    """
    pair = handoffs.pair
    expected = reference.tokens(pair.model, prompts)
    logs_before, before = handoffs.log_ends(), handoffs.decode.prompt_tokens()
    answers = handoffs.send_all(prompts)
    if is_after_cut:
        wait_until_free(handoffs.decode, 1.0)
        wait_until_free(handoffs.prefill, RENEWED_SECONDS)
    else:
        handoffs.check_released(logs_before)
    moved = handoffs.decode.prompt_tokens() - before
    check_tokens(answers, pair.model, prompts, reference)
    assert [answer[0] for answer in answers] == expected
    # Behind a sequential router, and of a hybrid always, the decode engine may compute the last token itself.
    num_computed = 0 if is_concurrent(pair) and not pair.is_hybrid else len(prompts)
    assert moved.cached == 0
    assert moved.computed <= num_computed
    assert moved.received + moved.computed == sum(map(len, prompts))


def check_answers(found: Sequence[Answer], pair: Pair, reference: Reference) -> None:
    """Each answer without an error must be what an engine computes that never received a cache."""
    right = [answer for answer in found if not answer.error]
    expected = reference.tokens(pair.model, [answer.prompt for answer in right])
    assert [answer.tokens for answer in right] == [[tokens] for tokens in expected]


def wait_until_free(engine: Engine, seconds: float) -> float:
    """Wait until the engine uses no block; return the seconds."""
    began_at = time.monotonic()
    while usage := engine.usage():
        assert time.monotonic() - began_at < seconds, f"{engine.name}: KV cache usage {usage} is left"
        time.sleep(0.1)
    return time.monotonic() - began_at


def wait_until_reached(handoffs: Handoffs, hosts: Hosts) -> None:
    """Wait until the decode engine's host reaches the prefill engine, and earlier failures answer for no new load.

    A kernel that found no neighbour answers "no route to host" for some seconds after the link is back. A bootstrap
    query that failed so just before is the answer to the next load too, for :data:`FAILURE_SECONDS`.
    """
    address = urlsplit(handoffs.prefill.server.url)

    def is_reached() -> bool:
        with suppress(OSError), socket.create_connection((address.hostname, address.port), timeout=1.0):
            return True
        return False

    with hosts[1].entered():
        wait_until(is_reached, "the hosts do not reach each other again", seconds=RENEWED_SECONDS)
    time.sleep(FAILURE_SECONDS)


@over(PAIRS)
def test_tokens_are_those_of_one_engine_alone(handoffs: Handoffs, reference: Reference) -> None:
    num_before = [len(rank) for rank in handoffs.decode.loads_of_ranks()]  # the engine has served other pairs
    check_wave(handoffs, WAVE if is_concurrent(handoffs.pair) else FIRST_WAVE, reference)
    ranks = zip_longest(handoffs.decode.loads_of_ranks(), num_before, fillvalue=0)
    loads = [load for rank, before in ranks for load in rank[before:]]
    assert loads
    assert {load["transport"] for load in loads} == {handoffs.pair.transport}
    assert {load["error"] for load in loads} == {None}


@over(GQA)
@for_faults
def test_a_link_that_fails_for_a_moment_delays_loads(
    handoffs: Handoffs, fault: str, hosts: Hosts, reference: Reference
) -> None:
    prefill = hosts[0]
    reference.tokens(handoffs.pair.model, UNDER_FAULTS)
    with loading(handoffs, prefill, UNDER_FAULTS) as loads:
        with FAULTS[fault](prefill):
            time.sleep(SHORT_SECONDS)
            assert not all(load.done() for load in loads), "all loads have ended before the link failed"
        found = [load.result(DEADLINE_SECONDS) for load in loads]
    assert [answer.error for answer in found] == [""] * len(found)
    check_answers(found, handoffs.pair, reference)
    print(f"{handoffs.pair.name}, {fault}: {max(answer.seconds for answer in found):.1f} s")
    check_wave(handoffs, NEXT, reference)


@over(GQA)
@for_faults
def test_a_link_that_stays_cut_fails_loads_in_time_and_every_block_comes_back(
    handoffs: Handoffs, fault: str, hosts: Hosts, reference: Reference
) -> None:
    prefill = hosts[0]
    reference.tokens(handoffs.pair.model, UNDER_FAULTS)
    with loading(handoffs, prefill, UNDER_FAULTS) as loads:
        with FAULTS[fault](prefill):
            cut_at = time.monotonic()
            wait(loads, DEADLINE_SECONDS)
            assert all(load.done() for load in loads), f"not answered {DEADLINE_SECONDS} s after the link failed"
            failed_at = time.monotonic()
            wait_until_free(handoffs.decode, cut_at + FREE_SECONDS - failed_at)
            free_at = time.monotonic()
        found = [load.result() for load in loads]
    errors = [answer.error for answer in found if answer.error]
    assert errors, "all loads have ended before the link failed"
    assert all(error.startswith("500") for error in errors), errors
    check_answers(found, handoffs.pair, reference)
    seconds = wait_until_free(handoffs.prefill, RENEWED_SECONDS)
    wait_until_reached(handoffs, hosts)
    print(
        f"{handoffs.pair.name}, {fault}: failed after {failed_at - cut_at:.1f} s, decode blocks free after "
        f"{free_at - cut_at:.1f} s, prefill blocks {seconds:.1f} s after the link was back"
    )
    check_wave(handoffs, NEXT, reference, is_after_cut=True)


@over(GQA)
def test_a_wire_of_20_ms_that_loses_a_packet_of_a_hundred_slows_loads(
    handoffs: Handoffs, hosts: Hosts, reference: Reference
) -> None:
    reference.tokens(handoffs.pair.model, OVER_A_LOSSY_WIRE)
    with lossy(hosts[0], delay_seconds=0.02, loss=0.01) as wire:
        began_at = time.monotonic()
        answers = handoffs.send_all(OVER_A_LOSSY_WIRE)
        print(f"{handoffs.pair.name}: {time.monotonic() - began_at:.1f} s, {wire.num_lost} packets lost")
        assert wire.num_lost > 5
    check_tokens(answers, handoffs.pair.model, OVER_A_LOSSY_WIRE, reference)
    check_wave(handoffs, NEXT, reference)


@contextmanager
def nat(host: VirtualHost, engine: Engine, hosts: Hosts) -> Iterator[Relay]:
    """Let the router's host forward connections to the engine's ports on a host."""
    relay = Relay(hosts[2].ipv4, host.ipv4)
    try:
        relay.open(listening_ports(engine.server.process.process_ids(), host.ipv4))
        yield relay
    finally:
        relay.close()


@over(ELSEWHERE)
def test_an_engine_that_advertises_another_address(handoffs: Handoffs, hosts: Hosts, reference: Reference) -> None:
    """A wrong one, and that of a NAT, beyond which the engine's data has no way or has one: an error in time, or right
    tokens, and right tokens as soon as the address is right. A decode engine asks after its writes itself, so a wrong
    address of its own delays a load.
    """
    is_decode = is_concurrent(handoffs.pair)
    engine = handoffs.decode if is_decode else handoffs.prefill
    there, here = (hosts[1], hosts[0]) if is_decode else (hosts[0], hosts[1])
    name = OTHER_NAMES[engine.name]
    with known_as(here, name, NOBODY):
        if is_decode:
            check_answers([answer_in_time(handoffs, "wrong address")], handoffs.pair, reference)
        else:
            check_fails(handoffs, "wrong address")
    with nat(there, engine, hosts) as relay, known_as(here, name, relay.address):
        if not is_decode:  # a prefill engine also answers the decode engine at its own address
            with no_way(here, there.ipv4):
                check_fails(handoffs, "NAT without a way for data")
            wait_until_served(handoffs, "NAT with a way again")
        check_wave(handoffs, NEXT, reference)
        assert relay.num_links
    with known_as(here, name, there.ipv4):
        check_wave(handoffs, NEXT, reference)


def wait_until_served(handoffs: Handoffs, what: str) -> None:
    """Send a prompt until the client gets no error. A connection of NIXL's that leads nowhere ends by UCX's own limits,
    and another one to the same rank cannot be opened before.
    """
    began_at = time.monotonic()
    while asked(NEXT[0], lambda: handoffs.send(NEXT[0])).error:
        assert time.monotonic() - began_at < SERVED_SECONDS
        time.sleep(FAILURE_SECONDS)
    print(f"{handoffs.pair.name}, {what}: served after {time.monotonic() - began_at:.1f} s")


def check_fails(handoffs: Handoffs, what: str) -> None:
    """Send a prompt: the client gets an error in time, and no block stays in use."""
    answer = answer_in_time(handoffs, what)
    assert answer.error.startswith("500"), answer


def answer_in_time(handoffs: Handoffs, what: str) -> Answer:
    """Send a prompt: the client gets an answer in time, and no block stays in use."""
    answer = asked(NEXT[0], lambda: handoffs.send(NEXT[0]))
    assert answer.seconds < DEADLINE_SECONDS
    seconds = [
        wait_until_free(handoffs.decode, FREE_SECONDS),
        wait_until_free(handoffs.prefill, LEASE_SECONDS + LOAD_SECONDS / 2),
    ]
    print(f"{handoffs.pair.name}, {what}: answered after {answer.seconds:.1f} s, blocks free {seconds} s later")
    return answer


def test_engines_on_hosts_that_have_ipv6_addresses_only(
    reference: Reference, tmp_path: Path, pool: PoolOnHosts
) -> None:
    reference.tokens("gqa", NEXT)
    pool.stop_all_but(())
    for made in make_hosts(tmp_path, "prefill-6", "decode-6", "router-6"):
        for host in made:
            host.run("ip", "-4", "address", "flush", "dev", DEVICE)
        hosts = tuple(replace(host, ipv4="") for host in made)
        prefill_engines = frozenset(pair.prefill for pair in SIX)
        engines = PoolOnHosts(tmp_path, pool.models, hosts=hosts, prefill_engines=prefill_engines)
        with hosts[2].entered():
            try:
                engines.need(sorted({name for pair in SIX for name in (pair.prefill, pair.decode)}))
                for pair in SIX:
                    handoffs = handoffs_of(pair, engines)
                    check_wave(handoffs, NEXT, reference)
                    assert handoffs.decode.loads()[-1]["transport"] == "nixl"
            finally:
                engines.close()
