"""Both sides of a pull, a network that drops, doubles, delays and reorders, and memory that is reused at once.

Time is logical and the two clocks are apart. The holds, the guard words, the effect of a step on them and the decode
engine's conclusions are the product's. The memory model has what a one-sided read meets: the step that lets blocks go
overwrites them, and reads see one value at a time. A seed determines the whole simulation.
"""

from collections.abc import Callable
from functools import partial
from random import Random

import msgspec
import pytest

from kvferry.errors import HandoffError, Reason
from kvferry.execution.device import HOST
from kvferry.execution.guard_words import GuardWords, Held, StepWords
from kvferry.handoff.guard_word import HeldPrompt, guard_word
from kvferry.handoff.holds import Ending, Hold, Holds
from kvferry.handoff.messages import Handle
from kvferry.handoff.pull_read import Action, PullRead
from kvferry.handoff.remote_holds import RemoteHold, RemoteHolds

NUM_SLOTS, LEASE, LINGER, SHARE, STALLED = 2, 60.0, 0.5, 0.25, 100.0
CLOCK_OFFSET = 12345.0
NUM_VALUES = 3
OVERWRITTEN = -1
NUM_STEPS = 300


def word_bytes(epoch: int, handle: Handle) -> bytes:
    return guard_word("p", epoch, handle, HeldPrompt("digest", 1, [], []))


class Answered(msgspec.Struct, frozen=True):
    """What the prefill engine answered its client: a hold, where its word lies, and which prompt it is of."""

    remote: RemoteHold
    slot: int
    prompt: int


class Read(msgspec.Struct):
    """A load in progress, and the values seen so far."""

    pull: PullRead
    held_prompt: Answered
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
        self.decode = RemoteHolds(LINGER, SHARE, STALLED)
        self.held_prompts: list[Answered] = []
        self.network: list[Callable[[], None]] = []
        self.waiting: dict[str, Answered] = {}
        self.reads: list[Read] = []
        self.let_go: set[RemoteHold] = set()
        self.confirmed_ends: dict[RemoteHold, float] = {}
        self.num_requests = 0
        self.num_commits = 0
        self.num_caught = 0

    def run(self) -> None:
        """Let anything happen in any order, then nothing more arrive: everything must end."""
        events = {
            self.begin_prompt: 10,
            self.step_prefill: 15,
            self.arrive: 10,
            self.start_read: 12,
            self.read_a_value: 40,
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
        self.prefill = Holds(self.epoch, NUM_SLOTS, LEASE)
        self.words = GuardWords(NUM_SLOTS)
        self.step_words = StepWords(self.words, HOST)
        self.blocks = dict.fromkeys(self.blocks, OVERWRITTEN)
        self.prompt_of = {}
        self.begun: list[Hold] = []

    def begin_prompt(self) -> None:
        """A prompt gets fresh blocks, which the next step writes, and maybe the slot of a hold that has just ended."""
        hold = self.prefill.begin(self.random.choice(["a", "0_c", "1_c"]))
        if hold is None or hold in self.begun:
            return
        self.prompt_of[hold.handle] = len(self.blocks)
        self.blocks[len(self.blocks)] = OVERWRITTEN
        self.begun.append(hold)

    def step_prefill(self) -> None:
        """The words change, then the step writes: the blocks of holds that ended are others' in this very step."""
        self.prefill.expire(self.now)
        ended = self.prefill.take_ended()
        begun, self.begun = self.begun, []
        self.step_words.begin([each.hold.slot for each in ended], [self.word_of(hold) for hold in begun])
        for each in ended:
            self.check_ending(each.hold, each.ending)
            self.blocks[self.prompt_of.pop(each.handle)] = OVERWRITTEN
            assert not self.word_is_right(self.epoch, each.handle, each.hold.slot), "a hold ended and its word stands"
        for hold in begun:
            prompt = self.blocks[self.prompt_of[hold.handle]] = self.prompt_of[hold.handle]
            assert self.word_is_right(self.epoch, hold.handle, hold.slot), "a hold began without its word"
            self.prefill.hold(hold.request_id, self.now)
            self.held_prompts.append(
                Answered(RemoteHold("p", self.epoch, "127.0.0.1", 5600, hold.handle), hold.slot, prompt)
            )
        self.step_words.finish()

    def word_of(self, hold: Hold) -> Held:
        assert hold.slot is not None
        return Held(hold.slot, word_bytes(self.epoch, hold.handle))

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

    def start_read(self) -> None:
        if not self.waiting:
            return
        request_id = self.random.choice(list(self.waiting))
        held_prompt = self.waiting.pop(request_id)
        lease = self.decode.lease_of(request_id)
        if lease is None or lease.is_over(self.decode_now):
            self.decode.finish(request_id, self.decode_now)
            return
        pull = PullRead(request_id, self.decode_now, lease.end)
        pull.begin([word_bytes(held_prompt.remote.epoch, held_prompt.remote.handle)], num_rounds=1)
        if Action.READ_DATA in pull.words_read([self.word(held_prompt.slot)], self.decode_now):
            pull.round_begun()
            self.reads.append(Read(pull, held_prompt, []))
        else:
            self.decode.finish(request_id, self.decode_now)

    def read_a_value(self) -> None:
        if not self.reads:
            return
        read = self.random.choice(self.reads)
        if len(read.values) < NUM_VALUES:
            read.values.append(self.blocks[read.held_prompt.prompt])
            return
        self.reads.remove(read)
        read.pull.data_read()
        read.pull.words_read([self.word(read.held_prompt.slot)], self.decode_now)
        if Action.COMMIT not in read.pull.copied():
            self.num_caught += 1
        elif not read.is_aborted:
            assert read.values == [read.held_prompt.prompt] * NUM_VALUES, "committed bytes of another request"
            self.num_commits += 1
        self.decode.finish(read.pull.job_id, self.decode_now)

    def abort(self) -> None:
        """A waiting request goes at once; the values of one that reads still land before its hold is let go."""
        if self.reads:
            self.random.choice(self.reads).is_aborted = True
        if self.waiting:
            request_id = self.random.choice(list(self.waiting))
            del self.waiting[request_id]
            self.decode.finish(request_id, self.decode_now)

    def step_decode(self) -> None:
        self.decode.step(self.decode_now)
        for remote in self.decode.take_releases(self.decode_now):
            assert not self.requests_of(remote), "released while a request reads"
            self.let_go.add(remote)
            self.confirmed_ends.pop(remote, None)
            self.network.append(partial(self.receive_release, remote))
        for remote in self.decode.take_renewals(self.decode_now):
            self.network.append(partial(self.receive_renew, remote, self.decode_now))

    def requests_of(self, remote: RemoteHold) -> list[str]:
        waiting = [request_id for request_id, held_prompt in self.waiting.items() if held_prompt.remote == remote]
        return waiting + [read.pull.job_id for read in self.reads if read.held_prompt.remote == remote]

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
        for read in self.reads:
            read.is_aborted |= read.pull.job_id in lost

    def word(self, slot: int) -> bytes:
        return bytes(self.words.array[slot].tobytes())

    def word_is_right(self, epoch: int, handle: Handle, slot: int) -> bool:
        return self.word(slot) == word_bytes(epoch, handle)

    def pass_time(self) -> None:
        self.now += self.random.choice([0.1, 0.3, 1.0, 1.0, 3.0, 9.0, 29.0, 61.0])

    def come_to_rest(self) -> None:
        while self.reads:
            self.read_a_value()
        while self.waiting:
            self.abort()
        self.now += LEASE
        self.step_decode()
        assert self.decode.snapshot(0.0) == {}
        self.step_prefill()  # what had begun ends as late as this
        self.now += LEASE
        self.step_prefill()
        assert self.prefill.num_holds == 0
        assert not self.words.array.any()


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
