"""Holds and leases, a network that drops, doubles, delays and reorders, and memory that is reused at once.

Time is logical and the two clocks are apart. The holds, the writes of the prefill engine's rank and the decode
engine's conclusions are the product's. The memory model has what a write meets: the step that lets blocks go overwrites
them, and a write takes one value at a time. A seed determines the whole simulation.
"""

from collections.abc import Callable
from functools import partial
from random import Random

import msgspec
import pytest

from kvferry.errors import HandoffError, Reason
from kvferry.handoff.holds import Ending, Hold, Holds, transfer_of
from kvferry.handoff.messages import Handle, WriteKey
from kvferry.handoff.remote_holds import RemoteHold, RemoteHolds
from kvferry.handoff.source import END, Need, Prompt, SourceWrites, WriteRequest, no_longer_held
from kvferry.plan.planner import Span

MAX_HOLDS, LEASE, STALLED = 2, 60.0, 100.0
CLOCK_OFFSET = 12345.0
NUM_VALUES = 3
OVERWRITTEN = -1
NUM_STEPS = 300


SPAN = Span("full")


class Answered(msgspec.Struct, frozen=True):
    """What the prefill engine answered its client: a hold, and which prompt it is of."""

    remote: RemoteHold
    prompt: int


class Load(msgspec.Struct):
    """A load in progress, its write, and the values written so far."""

    request_id: str
    key: WriteKey
    held_prompt: Answered
    writes: SourceWrites
    values: list[int]
    is_aborted: bool = False


class TwoSides:
    """One prefill engine (that may restart) and one decode engine."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.blocks: dict[int, int] = {}
        self.prompt_of: dict[Handle, int] = {}
        self.epoch = 0
        self.restart()
        self.decode = RemoteHolds(STALLED)
        self.held_prompts: list[Answered] = []
        self.network: list[Callable[[], None]] = []
        self.waiting: dict[str, Answered] = {}
        self.loads: list[Load] = []
        self.let_go: set[RemoteHold] = set()
        self.confirmed_ends: dict[RemoteHold, float] = {}
        self.num_requests = self.num_loads = 0
        self.num_commits = 0
        self.num_caught = 0

    def run(self) -> None:
        """Let anything happen in any order, then nothing more arrive: everything must end."""
        events = {
            self.begin_prompt: 10,
            self.step_prefill: 15,
            self.arrive: 10,
            self.start_load: 12,
            self.write_a_value: 40,
            self.abort: 3,
            self.step_decode: 15,
            self.deliver: 25,
            self.drop: 4,
            self.pass_time: 10,
            self.restart: 1,
        }
        for event in self.random.choices(list(events), list(events.values()), k=NUM_STEPS):
            event()
        self.come_to_rest()

    @property
    def decode_now(self) -> float:
        return self.now + CLOCK_OFFSET

    # The prefill engine.

    def restart(self) -> None:
        """Everything that the earlier epoch held is gone and overwritten."""
        self.epoch += 1
        self.prefill = Holds(self.epoch, MAX_HOLDS, LEASE)
        self.writes = SourceWrites()
        self.blocks = dict.fromkeys(self.blocks, OVERWRITTEN)
        self.prompt_of = {}
        self.begun: list[Hold] = []

    def begin_prompt(self) -> None:
        """A prompt gets fresh blocks, which the next step writes, and maybe the room of a hold that has just ended."""
        hold = self.prefill.begin(self.random.choice(["a", "0_c", "1_c"]))
        if hold is None or hold in self.begun:
            return
        self.prompt_of[hold.handle] = len(self.blocks)
        self.blocks[len(self.blocks)] = OVERWRITTEN
        self.begun.append(hold)

    def step_prefill(self) -> None:
        """The writes of ended holds end, then the step writes: their blocks are others' in this very step."""
        self.prefill.expire(self.now)
        begun, self.begun = self.begun, []
        for each in self.prefill.take_ended():
            assert each.hold is not None
            self.check_ending(each.hold, each.ending)
            self.writes.end(transfer_of(each.handle), no_longer_held("a prompt"))
            self.blocks[self.prompt_of.pop(each.handle)] = OVERWRITTEN
        for hold in begun:
            prompt = self.blocks[self.prompt_of[hold.handle]] = self.prompt_of[hold.handle]
            self.writes.compute(hold.transfer_id, Prompt(NUM_VALUES, "digest", {}, END))
            self.prefill.hold(hold.request_id, self.now)
            self.held_prompts.append(Answered(RemoteHold("p", self.epoch, "127.0.0.1", 5600, hold.handle), prompt))

    def check_ending(self, hold: Hold, ending: Ending) -> None:
        remote = RemoteHold("p", self.epoch, "127.0.0.1", 5600, hold.handle)
        if ending is Ending.RELEASED and hold.handle.request_id == "a":
            assert remote in self.let_go, "released although no request released it"
        if ending in (Ending.EXPIRED, Ending.ABANDONED):
            assert self.confirmed_ends.get(remote, 0.0) <= self.decode_now, "a lease outlived its hold"

    # The decode engine.

    def arrive(self) -> None:
        if not self.held_prompts:
            return
        held_prompt = self.random.choice(self.held_prompts[-3:])
        self.num_requests += 1
        request_id = self.random.choice(["r{}", "{}_s"]).format(self.num_requests)
        self.decode.arrive(request_id, held_prompt.remote, LEASE, self.decode_now)
        self.waiting[request_id] = held_prompt

    def start_load(self) -> None:
        if not self.waiting:
            return
        request_id = self.random.choice(list(self.waiting))
        held_prompt = self.waiting.pop(request_id)
        lease = self.decode.lease_of(request_id)
        if lease is None or lease.is_over(self.decode_now):
            self.decode.finish(request_id, self.decode_now)
            return
        self.num_loads += 1
        key = WriteKey("d", 1, self.num_loads)
        needs, transfer_id = {SPAN: Need(0, NUM_VALUES, 1)}, transfer_of(held_prompt.remote.handle)
        deadline = self.now + lease.remaining(self.decode_now)
        request = WriteRequest(key, transfer_id, NUM_VALUES, "digest", needs, deadline, known_by=self.now)
        try:
            if held_prompt.remote.epoch != self.epoch:
                raise HandoffError(Reason.PEER_CHANGED, "the engine was restarted")
            self.writes.announce(request, self.now)
        except HandoffError as error:
            if error.reason not in (Reason.PEER_CHANGED, Reason.LEASE_EXPIRED):
                raise AssertionError("refused for no such reason") from error
            self.num_caught += 1
            self.decode.finish(request_id, self.decode_now)
            return
        self.loads.append(Load(request_id, key, held_prompt, self.writes, []))

    def write_a_value(self) -> None:
        if not self.loads:
            return
        load = self.random.choice(self.loads)
        if load.writes is not self.writes:
            self.num_caught += 1  # the process that wrote has ended
            self.finish(load)
            return
        load.writes.take(load.key)
        if load.writes.is_stopping(load.key):
            load.writes.stopped(load.key, None)
        elif len(load.values) < NUM_VALUES and load.writes.outcome(load.key) is None:
            load.values.append(self.blocks[load.held_prompt.prompt])
        else:
            load.writes.landed(load.key)
        if (over := load.writes.outcome(load.key)) is None:
            return
        if over.error is not None:
            self.num_caught += 1
        elif not load.is_aborted:
            assert load.values == [load.held_prompt.prompt] * NUM_VALUES, "committed bytes of another request"
            self.num_commits += 1
        self.finish(load)

    def finish(self, load: Load) -> None:
        self.loads.remove(load)
        self.decode.finish(load.request_id, self.decode_now)

    def abort(self) -> None:
        """A waiting request goes at once; the values of one that loads still land before its hold is let go."""
        if self.loads:
            self.random.choice(self.loads).is_aborted = True
        if self.waiting:
            request_id = self.random.choice(list(self.waiting))
            del self.waiting[request_id]
            self.decode.finish(request_id, self.decode_now)

    def step_decode(self) -> None:
        self.decode.step(self.decode_now)
        for remote in self.decode.take_releases(self.decode_now):
            assert not self.requests_of(remote), "released while a request loads"
            self.let_go.add(remote)
            self.confirmed_ends.pop(remote, None)
            self.network.append(partial(self.receive_release, remote))
        for remote in self.decode.take_renewals(self.decode_now):
            self.network.append(partial(self.receive_renew, remote, self.decode_now))

    def requests_of(self, remote: RemoteHold) -> list[str]:
        waiting = [request_id for request_id, held_prompt in self.waiting.items() if held_prompt.remote == remote]
        return waiting + [load.request_id for load in self.loads if load.held_prompt.remote == remote]

    # The network.

    def deliver(self) -> None:
        """Any message, in any order; one in four comes again."""
        if self.network:
            position = self.random.randrange(len(self.network))
            message = self.network[position]
            if self.random.random() < 0.75:
                del self.network[position]
            message()

    def drop(self) -> None:
        if self.network:
            del self.network[self.random.randrange(len(self.network))]

    def receive_release(self, remote: RemoteHold) -> None:
        try:
            self.prefill.release(remote.epoch, [remote.handle])
        except HandoffError as error:
            self.check_refusal(remote, error)

    def receive_renew(self, remote: RemoteHold, sent_at: float) -> None:
        try:
            lost = self.prefill.renew(remote.epoch, [remote.handle], self.now)
        except HandoffError as error:
            self.check_refusal(remote, error)
            lost = [remote.handle]
        if lost:
            self.network.append(partial(self.receive_lost, remote))
        else:
            assert remote.epoch == self.epoch, "a hold of an earlier epoch was renewed"
            assert self.blocks[self.prompt_of[remote.handle]] != OVERWRITTEN, "renewed although its blocks are reused"
            self.network.append(partial(self.receive_renewed, remote, sent_at))

    def check_refusal(self, remote: RemoteHold, error: HandoffError) -> None:
        assert error.reason is Reason.PEER_CHANGED
        assert remote.epoch != self.epoch

    def receive_renewed(self, remote: RemoteHold, sent_at: float) -> None:
        self.decode.renewed([remote], sent_at, self.prefill.renewed_lease_seconds)
        for request_id in self.requests_of(remote):
            if lease := self.decode.lease_of(request_id):
                self.confirmed_ends[remote] = lease.end

    def receive_lost(self, remote: RemoteHold) -> None:
        lost = self.decode.lost([remote])
        assert sorted(lost) == sorted(self.requests_of(remote))
        assert not any(self.decode.lease_of(request_id) for request_id in lost)
        for load in self.loads:
            load.is_aborted |= load.request_id in lost

    def pass_time(self) -> None:
        self.now += self.random.choice([0.1, 0.3, 1.0, 1.0, 3.0, 9.0, 29.0, 61.0])

    def come_to_rest(self) -> None:
        while self.loads:
            self.write_a_value()
        while self.waiting:
            self.abort()
        self.now += LEASE
        self.step_decode()
        assert not self.decode._uses
        self.step_prefill()  # what had begun ends as late as this
        self.now += LEASE
        self.step_prefill()
        assert self.prefill.num_holds == 0
        assert self.writes.num_open == 0
        assert not self.writes._prompts


@pytest.mark.parametrize("first_seed", range(0, 400, 100))
def test_nothing_wrong_is_committed_and_everything_ends(first_seed: int) -> None:
    num_commits = num_caught = 0
    for seed in range(first_seed, first_seed + 100):
        sides = TwoSides(seed)
        try:
            sides.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        num_commits += sides.num_commits
        num_caught += sides.num_caught
    # The simulation is of use only while both happen often.
    assert num_commits > 200
    assert num_caught > 100
