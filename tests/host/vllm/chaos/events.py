"""The events of the chaos suite: what happens, at which moment of a load, and what must hold after it.

For every event: each response is right, or an explicit error within ``deadline_seconds``; every engine that lives has
all of its blocks back soon; the next requests are right, behind the same router. ``may_fail`` False is stronger: every
response is right.
"""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .load import Load, Prompt
from .relay import Trouble
from .scene import AT_ONCE, DEADLINE_SECONDS, LEASE_SECONDS, LONGEST_ANSWER, PROMPTS, Scene, Side, wait_for

MOMENT_SECONDS = 30.0
STOPPED_SECONDS = LEASE_SECONDS + 2.0
TROUBLED_SECONDS = 8.0
NUM_CUTS = 10
SLOW_BYTES_PER_SECOND = 150_000
"""A write of the longest prompts takes longer than the lease."""
LESS_BYTES_PER_SECOND = 500_000
"""Loads keep their blocks so long that the decode engine has none left, and end before their deadline."""
LONG: tuple[Prompt, ...] = tuple(prompt for prompt in PROMPTS if len(prompt) > 400)
MEDIUM: tuple[Prompt, ...] = tuple(prompt for prompt in LONG if len(prompt) < 800)
SHORT: tuple[Prompt, ...] = tuple(sorted(PROMPTS, key=len)[:AT_ONCE])

Deed = Callable[[Scene, Load], None]


@dataclass(frozen=True)
class Event:
    """One event: ``deed`` waits for its moment of the load, and does the harm."""

    name: str
    deed: Deed
    prompts: Sequence[Prompt] = PROMPTS
    max_tokens: int = 24
    at_once: int = AT_ONCE
    times: int | None = None
    """Requests in all; with None the clients go on until the deed is done."""
    deadline_seconds: float = DEADLINE_SECONDS
    may_fail: bool = True
    may_lose_connections: bool = False
    """Whether the clients' own connections may end: those to the router."""
    bytes_per_second: int | None = None
    defects: dict[str, str] = field(default_factory=dict)
    """Why the event is known to fail, by the name of the flow."""


# Moments.


def before_transfers(scene: Scene) -> None:
    """The first prompts are being computed, and the decode engine has no request."""
    wait_for(lambda: scene.prefill.alive.usage() > 0, MOMENT_SECONDS, "the prefill engine computes")


def in_the_middle(scene: Scene) -> None:
    """Bytes move: each prompt takes more than a second."""
    wait_for(scene.decode.is_loading, MOMENT_SECONDS, "the decode engine loads")


def after_transfers(scene: Scene) -> None:
    """Every prompt of the load has been loaded, and the decode engine computes answers."""
    loaded_before = scene.num_loaded()
    wait_for(lambda: scene.num_loaded() == loaded_before + AT_ONCE, MOMENT_SECONDS, "every prompt is loaded")


# Deeds.


def kill(which: str, moment: Callable[[Scene], None]) -> Deed:
    def deed(scene: Scene, load: Load) -> None:
        moment(scene)
        side(scene, which).kill()

    return deed


def kill_one_rank(scene: Scene, load: Load) -> None:
    """Nothing is left of an engine without one of its ranks: it must end by itself, and soon."""
    in_the_middle(scene)
    scene.prefill.kill_rank(1)
    load.stop()
    wait_for(lambda: not scene.prefill.is_alive, DEADLINE_SECONDS, "the engine ends that has lost a rank")


def stop_and_continue(which: str) -> Deed:
    """Stop an engine for longer than a lease; the requests that it has then go on, or are over."""

    def deed(scene: Scene, load: Load) -> None:
        in_the_middle(scene)
        side(scene, which).send(signal.SIGSTOP)
        load.stop()
        time.sleep(STOPPED_SECONDS)
        side(scene, which).send(signal.SIGCONT)

    return deed


def trouble(trouble: Trouble) -> Deed:
    """Trouble the control ports of both engines."""

    def deed(scene: Scene, load: Load) -> None:
        in_the_middle(scene)
        lost_before = [each.relay.num_lost for each in scene.sides]
        for each in scene.sides:
            each.relay.trouble = trouble
        time.sleep(TROUBLED_SECONDS)
        for each in scene.sides:
            each.relay.end_trouble()
        if trouble.loses:
            assert [each.relay.num_lost for each in scene.sides] != lost_before, "no message was lost"

    return deed


def cut_connections(scene: Scene, load: Load) -> None:
    relays = [each.relay for each in scene.sides]
    for _ in range(NUM_CUTS):
        in_the_middle(scene)
        wait_for(lambda: any(relay.num_open for relay in relays), MOMENT_SECONDS, "a connection to cut")
        for relay in relays:
            relay.cut_all()
        time.sleep(0.5)


def outlast_the_lease(scene: Scene, load: Load) -> None:
    """Writes are slow, and no renewal arrives."""
    in_the_middle(scene)
    scene.prefill.relay.trouble = Trouble(is_silent=True)
    load.stop()
    time.sleep(LEASE_SECONDS + 5.0)
    scene.prefill.relay.end_trouble()


def run_out_of_blocks(scene: Scene, load: Load) -> None:
    def is_full() -> bool:
        figures = scene.decode.figures()
        return figures["vllm:kv_cache_usage_perc"] > 0.8 and figures["vllm:num_requests_waiting"] > 0

    wait_for(is_full, MOMENT_SECONDS, "the decode engine has no block left, and requests wait")


def restart_router(scene: Scene, load: Load) -> None:
    in_the_middle(scene)
    assert scene.router is not None
    scene.router.process.kill()
    scene.start_router()


def side(scene: Scene, name: str) -> Side:
    return next(each for each in scene.sides if each.name == name)


EVENTS = (
    Event("every connection cut, ten times", cut_connections, LONG),
    Event("control messages delayed by 1 s", trouble(Trouble(delay_seconds=1.0)), may_fail=False),
    Event("control messages lost", trouble(Trouble(loses="questions"))),
    Event("answers lost, so that messages come twice", trouble(Trouble(loses="answers"))),
    Event("router restarted", restart_router, may_lose_connections=True),
    Event(
        "decode engine out of blocks",
        run_out_of_blocks,
        MEDIUM,
        at_once=16,
        times=32,
        may_fail=False,
        bytes_per_second=LESS_BYTES_PER_SECOND,
    ),
    Event(
        "lease ends in mid-write",
        outlast_the_lease,
        LONG,
        bytes_per_second=SLOW_BYTES_PER_SECOND,
    ),
    Event(
        "prefill engine stopped, then continued",
        stop_and_continue("prefill"),
        LONG,
        deadline_seconds=STOPPED_SECONDS + DEADLINE_SECONDS,
    ),
    Event(
        "decode engine stopped, then continued",
        stop_and_continue("decode"),
        LONG,
        deadline_seconds=STOPPED_SECONDS + DEADLINE_SECONDS,
    ),
    Event("one prefill rank killed", kill_one_rank, LONG),
    Event("prefill engine killed before transfers", kill("prefill", before_transfers)),
    Event("prefill engine killed in the middle", kill("prefill", in_the_middle), LONG),
    Event(
        "prefill engine killed after transfers",
        kill("prefill", after_transfers),
        SHORT,
        max_tokens=LONGEST_ANSWER,
        times=AT_ONCE,
        may_fail=False,
    ),
    Event("decode engine killed before transfers", kill("decode", before_transfers)),
    Event("decode engine killed in the middle", kill("decode", in_the_middle), LONG),
    Event(
        "decode engine killed after transfers",
        kill("decode", after_transfers),
        SHORT,
        max_tokens=LONGEST_ANSWER,
        times=AT_ONCE,
    ),
)
EVERYWHERE = tuple(event.name for event in EVENTS)
BYTES_MOVE = (
    "prefill engine killed in the middle",
    "decode engine killed in the middle",
    "prefill engine stopped, then continued",
    "decode engine stopped, then continued",
)
"""Where other transports differ from cma: bytes are moving as a process ends or stops."""
BY_FLOW = {
    "sequential": EVERYWHERE,
    "concurrent": EVERYWHERE,
    "sequential-nixl": BYTES_MOVE,
    "concurrent-nixl": BYTES_MOVE,
}
