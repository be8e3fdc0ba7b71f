"""Two prefill engines and a decode engine, each on a virtual host of its own: the link to one prefill host is cut for
good while it writes, and no load from the other one is disturbed.
"""

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvferry.execution.executor import QUIET_SECONDS
from kvferry.harness.launch import EngineSettings, PromptTokens
from kvferry.harness.virtual_hosts import VirtualHost

from ..host.vllm.engine_pool import EXPLAINED, Engine, Reference, fresh_salt
from ..host.vllm.handoffs import random_prompt
from ..virtual_network import Hosts, make_hosts
from ..waits import wait_until
from .engines import (
    BEGUN_BYTES,
    BEGUN_SECONDS,
    MEGABITS,
    MOMENT_SECONDS,
    Answer,
    PoolOnHosts,
    asked,
    sent_bytes,
)
from .network_faults import slow, unplugged

pytestmark = pytest.mark.vllm

MODEL = "gqa"
LOST, OTHER, DECODE, ALONE = "gqa-tp1-next", "gqa-chunked", "gqa-tp1-nixl", "gqa-reference"
LOAD_SECONDS = 32.0
FENCE_SECONDS = LOAD_SECONDS / 2
"""Longer than the client of a lost engine waits for its answer, so that the blocks are in quarantine by then."""
HELD_SECONDS = 200.0
STEPS_SECONDS = 15.0
"""For some steps of the decode engine and the close of a transport, on a machine that does other things too."""

# 2 MiB for each 128 tokens, at 3 MB a second: 11 s, 13 s, 5 s, 11 s and 14 s.
OF_LOST = random_prompt(6500, 1900)
UNDER_WAY = [random_prompt(6510 + number, 700) for number in range(3)]
AFTER_CUT = [random_prompt(6520, 700)]
OVER_FENCE = [random_prompt(6530 + number, 1000) for number in range(2)]
AFTER_FENCE = [random_prompt(6540 + number, 1200) for number in range(2)]
OF_OTHER = [*UNDER_WAY, *AFTER_CUT, *OVER_FENCE, *AFTER_FENCE]
FENCED = re.compile(r"a fence: .* closed to (\S+) once (\d+) other loads are over")
FREED = re.compile(r"no peer writes into the blocks of (\S+) any more: they are free after")


@dataclass
class PoolOnThreeHosts(PoolOnHosts):
    """Each engine with a connector on a host of its own; all hold their prompts until they are asked for."""

    def host_of(self, name: str) -> VirtualHost:
        return dict(zip((LOST, OTHER, DECODE, ALONE), (*self.hosts, self.hosts[-1]), strict=True))[name]

    def settings(self, name: str) -> EngineSettings:
        settings = super().settings(name)
        limits = {"lease_seconds": HELD_SECONDS, "load_timeout_seconds": LOAD_SECONDS} if settings.role else {}
        connector = {**settings.connector_settings, **limits}
        return replace(settings, connector_settings=connector, arguments=(*settings.arguments, *EXPLAINED))


@dataclass(frozen=True)
class Held:
    """A prompt that a prefill engine has computed and holds; ``params`` are its answer's."""

    prompt: list[int]
    salt: str
    params: dict[str, Any]

    @classmethod
    def by(cls, engine: Engine, prompt: list[int]) -> "Held":
        salt = fresh_salt()
        return cls(prompt, salt, engine.prefill(prompt, salt))

    def loaded(self, decode: Engine) -> Answer:
        """Return the answer of the decode engine, which loads the prompt."""
        return asked(self.prompt, lambda: decode.decode(self.prompt, self.params, 8, self.salt))


@pytest.fixture(scope="module")
def three_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    yield from make_hosts(tmp_path_factory.mktemp("three-hosts"), "lost-0", "other-0", "decode-0")


@pytest.fixture(scope="module")
def pool(three_hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolOnThreeHosts]:
    """The engines; meanwhile the tests run on the host of the decode engine, as the clients do."""
    models = tmp_path_factory.getbasetemp().parent / "kvferry-models"
    pool = PoolOnThreeHosts(tmp_path_factory.mktemp("engines"), models, hosts=three_hosts)
    with three_hosts[-1].entered(), closing(pool):
        pool.need([LOST, OTHER, DECODE, ALONE])
        yield pool


def test_the_link_to_one_prefill_host_is_cut_and_no_load_of_the_other_is_disturbed(
    pool: PoolOnThreeHosts, three_hosts: Hosts
) -> None:
    lost_host, other_host, _ = three_hosts
    lost, other, decode = (pool.running[name] for name in (LOST, OTHER, DECODE))
    expected = Reference(pool).tokens(MODEL, OF_OTHER)
    held_by_lost = Held.by(lost, OF_LOST)
    held = [Held.by(other, prompt) for prompt in OF_OTHER]
    before, log_before = decode.prompt_tokens(), len(decode.log())
    sent_before = {host: sent_bytes(host) for host in (lost_host, other_host)}
    waiting = iter(held)

    def fences() -> list[tuple[str, str]]:
        return FENCED.findall(decode.log()[log_before:])

    with (
        ThreadPoolExecutor(1 + len(held)) as threads,
        slow(lost_host, MEGABITS),
        slow(other_host, MEGABITS),
    ):

        def begin(prompts: list[list[int]]) -> list[Future[Answer]]:
            return [threads.submit(next(waiting).loaded, decode) for _ in prompts]

        failing = threads.submit(held_by_lost.loaded, decode)
        loads = begin(UNDER_WAY)
        come_to_pass(
            lambda: all(sent_bytes(host) - sent > BEGUN_BYTES for host, sent in sent_before.items()),
            "no bytes move",
            BEGUN_SECONDS,
        )
        with unplugged(lost_host):
            cut_at = time.monotonic()
            assert not any(load.done() for load in (failing, *loads)), "a load has ended before the link was cut"
            loads += begin(AFTER_CUT)
            failed = failing.result(LOAD_SECONDS + QUIET_SECONDS + STEPS_SECONDS)
            failed_at = time.monotonic()
            assert [load.result(LOAD_SECONDS).error for load in loads] == [""] * len(loads)
            assert decode.usage() > 0.0, "the blocks of the failed load are in no quarantine"
            assert not fences(), "a fence has come too soon"
            over_fence = begin(OVER_FENCE)
            come_to_pass(fences, "no fence has come", FENCE_SECONDS)
            fenced_at = time.monotonic()
            assert not all(load.done() for load in over_fence), "the loads have ended before the fence"
            loads += over_fence + begin(AFTER_FENCE)
            answers = [load.result(2 * LOAD_SECONDS) for load in loads]
            over_at = time.monotonic()
            come_to_pass(lambda: decode.usage() == 0.0, "blocks of the failed load are left", STEPS_SECONDS)
            free_at = time.monotonic()
            print(
                f"\nafter the cut: the lost load failed after {failed_at - cut_at:.1f} s, the fence came after "
                f"{fenced_at - cut_at:.1f} s, the other loads were over after {over_at - cut_at:.1f} s, the blocks "
                f"free after {free_at - cut_at:.1f} s; the lost load: {failed.error}"
            )

    assert failed.error.startswith("503")
    assert "[deadline-exceeded]" in failed.error
    assert [answer.error for answer in answers] == [""] * len(OF_OTHER)
    assert [answer.tokens for answer in answers] == [[tokens] for tokens in expected]
    assert decode.prompt_tokens() - before == PromptTokens(received=sum(map(len, OF_OTHER)), cached=0, computed=0)
    check_first_attempts(decode, other, held)
    check_times(decode, held, cut_at, fenced_at)
    [of_lost] = [line for line in decode.loads() if line["error"]]
    assert lost_host.name in of_lost["message"]
    given_up_at = of_lost["events"]["ordered_at"] + LOAD_SECONDS
    assert given_up_at + FENCE_SECONDS < free_at < given_up_at + FENCE_SECONDS + LOAD_SECONDS + STEPS_SECONDS
    [(closed_to, num_others)] = fences()
    assert closed_to.startswith(lost_host.name)
    assert int(num_others) > 0, "the fence has not waited for a load"
    assert FREED.findall(decode.log()[log_before:]) == [of_lost["request_id"]]


def come_to_pass(condition: Callable[[], object], otherwise: str, seconds: float) -> None:
    """Wait until ``condition`` is true, and ask rarely: cores are few."""
    wait_until(condition, otherwise, seconds=seconds, each=lambda: time.sleep(MOMENT_SECONDS))


def check_first_attempts(decode: Engine, other: Engine, held: list[Held]) -> None:
    """Each of these prompts was written and loaded once, at the first attempt, and one other load has failed."""
    loaded = [line for line in decode.loads() if line["remote_engine_id"] == held[0].params["remote_engine_id"]]
    assert sorted(line["num_tokens"] for line in loaded) == sorted(len(each.prompt) for each in held)
    assert {(line["transport"], line["error"]) for line in loaded} == {("nixl", None)}
    assert [line["error"] for line in other.loads() if "write" in line] == [None] * len(held)
    metrics = decode.server.metrics()
    assert metrics["kvferry:loads_total"] == len(held)
    assert sum(value for name, value in metrics.items() if name.startswith("kvferry:failed_loads_total")) == 1
    assert metrics["kvferry:fences_total"] == 1


def check_times(decode: Engine, held: list[Held], cut_at: float, fenced_at: float) -> None:
    """Loads were under way when the link was cut, when the fence came, and when the former memory was closed.

    The engines' logs have their times on the clock of this process.
    """
    events = {line["remote_request_id"]: line["events"] for line in decode.loads()}
    of_loads = [events[each.params["remote_request_id"]] for each in held]
    announced = [announced_at for of_load in of_loads for announced_at in of_load["announced_at"].values()]
    done = [done_at for of_load in of_loads for done_at in of_load["done_at"].values()]
    num_before_cut, num_before_fence = len(UNDER_WAY), len(held) - len(AFTER_FENCE)
    assert [announced_at < cut_at for announced_at in announced] == [n < num_before_cut for n in range(len(held))]
    assert [announced_at < fenced_at for announced_at in announced] == [n < num_before_fence for n in range(len(held))]
    assert min(done) > cut_at
    closed_at = max(done[:num_before_fence])
    assert closed_at > fenced_at
    assert max(done) > closed_at, "no load was under way when the former memory was closed"
