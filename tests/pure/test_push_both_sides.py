"""Both sides of a push, a network that drops, doubles, delays and reorders, and memory that is reused at once.

Time is logical. A write reads and writes one token at a time, from blocks that the sender's engine overwrites the
moment it may, into blocks that the receiver's engine uses the moment it may: whatever is written there later is a
failure. What a sender has sent before it ends, or before a write fails, may land later, unless the sender writes into
the receiver's memory itself; where it has a GPU's memory mapped, behind a fence too. Two replicas of the receiver have
one name. A seed determines the whole simulation.
"""

from collections.abc import Callable
from enum import Enum
from functools import partial
from random import Random

import msgspec
import pytest

from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.handoff.messages import WriteKey
from kvferry.handoff.destination import DestinationLoad, Step
from kvferry.handoff.source import END, Cut, Need, Outcome, Prompt, WriteRequest, SourceWrites
from kvferry.plan.layer_spans import Span

SPANS = {Span("full"): Need(1, 7, 2), Span("window"): Need(4, 7, 2), Span("state"): Need(0, 1, 9)}
NUM_TOKENS, NUM_SOURCES, SECONDS, NUM_STEPS = 7, 2, 40.0, 720
FENCE_SECONDS = 3.0
OVERWRITTEN = ("overwritten", 0)


class Place(Enum):
    """Where a source is, and who puts its bytes into the receiver's memory."""

    BESIDE = "on the receiver's host; it writes there itself"
    BUFFERED = "on the receiver's host; the receiver takes the bytes out of a connection"
    MAPPED = "on the receiver's host; it has the memory mapped, whatever the receiver closes, and copies may land late"
    FAR = "on another host: nothing proves its end"


class Write(msgspec.Struct):
    """A batch on its way: tokens still to be written, to one registration of the receiver's memory."""

    key: WriteKey
    transfer_id: str
    registration: int
    tokens: list[tuple[Span, int]]


class Source:
    """One rank of the sender: its memory by transfer and what it writes."""

    def __init__(self, epoch: int, place: Place) -> None:
        self.epoch, self.place = epoch, place
        self.side = SourceWrites()
        self.memory: dict[str, dict[tuple[Span, int], tuple[str, int]]] = {}
        self.writes: list[Write] = []
        self.keys: dict[WriteKey, tuple[str, int]] = {}
        self.introduced: dict[int, int] = {}


class Sent(msgspec.Struct):
    """Bytes of a sender that has ended, or of a write that has failed: they lie in the buffers of a connection."""

    rank: int
    write: Write
    memory: dict[tuple[Span, int], tuple[str, int]]


class Target(msgspec.Struct):
    """A push as the receiver holds it: its blocks, and whether its engine uses them again."""

    receiving: DestinationLoad
    transfer_id: str
    key: WriteKey
    told_epoch: list[int]
    registration: dict[int, int]
    unanswered: set[int]
    blocks: dict[int, dict[tuple[Span, int], tuple[str, int]]]
    landed: set[int] = msgspec.field(default_factory=set)
    is_given_back: bool = False


class BothSides:
    """A sender of two ranks (that may restart) and two replicas of a receiver with one rank (that may too)."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.epoch, self.last_receiver_epoch = 1, 2
        self.registrations = {1: 0, 2: 0}
        self.sources = [Source(self.epoch, self.random.choice(list(Place))) for _ in range(NUM_SOURCES)]
        self.sent: list[Sent] = []
        self.final: dict[str, int] = {}
        self.targets: dict[WriteKey, Target] = {}
        self.network: list[Callable[[], None]] = []
        self.num_transfers = self.num_pushes = self.num_commits = self.num_failures = 0
        self.num_fences = self.num_broken = self.num_waited = 0

    def run(self) -> None:
        events = {
            self.begin: 4,
            self.compute: 40,
            self.preempt: 2,
            self.end_prompt: 1,
            self.announce: 6,
            self.tell_again: 6,
            self.start_write: 60,
            self.write_a_token: 160,
            self.break_write: 1,
            self.report: 20,
            self.abort: 1,
            self.step_receiver: 20,
            self.deliver: 70,
            self.drop: 6,
            self.pass_time: 6,
            self.land: 20,
            self.compare: 40,
            self.notice_ends: 10,
            self.refuse: 0.15,
            self.restart_sender: 0.3,
            self.restart_receiver: 0.3,
        }
        for event in self.random.choices(list(events), list(events.values()), k=NUM_STEPS):
            event()
        for turn in range(60):
            if turn == 40:
                open_targets = [target for target in self.targets.values() if not target.receiving.is_over]
                assert all(self.waits_for_an_end(target) for target in open_targets), "a push does not end"
                self.num_waited += len(open_targets)
                self.restart_sender()
            self.now += 2 * SECONDS
            self.notice_ends()
            self.step_receiver()
            self.report()
            while any(target.landed for target in self.targets.values()):
                self.compare()
            for _ in range(40):
                self.start_write()
                self.write_a_token()
            while self.network:
                self.deliver(may_double=False)
        assert all(target.receiving.is_over for target in self.targets.values()), "a push never ends"
        assert all(source.side.num_open == 0 for source in self.sources), "a sender never ends a push"
        assert not any(source.side._requests or source.side._requests_of for source in self.sources), (
            "something is kept"
        )

    def waits_for_an_end(self, target: Target) -> bool:
        """No word, and no fence, frees what a failed copy into mapped memory was for, while its process lives."""
        may_land = target.receiving.may_land
        return all(self.sources[i].place is Place.MAPPED and target.receiving.is_broken(i) for i in may_land)

    # The sender's engine: both ranks in step.

    def begin(self) -> None:
        transfer_id = f"x{self.num_transfers}"
        self.num_transfers += 1
        self.final[transfer_id] = 0
        for source in self.sources:
            source.memory[transfer_id] = {}

    def compute(self) -> None:
        if not self.final:
            return
        transfer_id = self.random.choice(list(self.final))
        final = min(NUM_TOKENS, self.final[transfer_id] + self.random.randint(1, 4))
        self.final[transfer_id] = final
        for rank, source in enumerate(self.sources):
            tokens = [(span, token) for span in SPANS for token in range(final)]
            source.memory[transfer_id] = dict.fromkeys(tokens, (transfer_id, rank))
            if final < NUM_TOKENS:
                # A state moves on with every token.
                source.memory[transfer_id][Span("state"), 0] = OVERWRITTEN
            done = END if final == NUM_TOKENS else final
            source.side.compute(transfer_id, Prompt(NUM_TOKENS, "p", {}, done))

    def preempt(self) -> None:
        running = [transfer_id for transfer_id, final in self.final.items() if final < NUM_TOKENS]
        if running:
            transfer_id = self.random.choice(running)
            self.final[transfer_id] = 0
            for source in self.sources:
                source.side.preempt(transfer_id)
                self.overwrite(source, transfer_id)

    def end_prompt(self) -> None:
        if self.final:
            transfer_id = self.random.choice(list(self.final))
            del self.final[transfer_id]
            for source in self.sources:
                source.side.end(transfer_id, HandoffError(Reason.ABORTED, "aborted"))
                self.overwrite(source, transfer_id)

    def overwrite(self, source: Source, transfer_id: str) -> None:
        source.memory[transfer_id] = dict.fromkeys(source.memory[transfer_id], OVERWRITTEN)

    def restart_sender(self) -> None:
        self.epoch += 1
        for rank, source in enumerate(self.sources):
            if source.place not in (Place.BESIDE, Place.MAPPED):
                self.sent += [Sent(rank, write, dict(source.memory[write.transfer_id])) for write in source.writes]
            if source.place is Place.MAPPED:
                self.sent = [sent for sent in self.sent if sent.rank != rank]
        self.sources = [Source(self.epoch, source.place) for source in self.sources]
        self.final.clear()

    # The sender's writes.

    def start_write(self) -> None:
        source = self.random.choice(self.sources)
        for key, (transfer_id, registration) in source.keys.items():
            if batch := source.side.take(key):
                source.writes.append(Write(key, transfer_id, registration, _tokens(batch)))

    def write_a_token(self) -> None:
        source = self.random.choice(self.sources)
        if not source.writes:
            return
        write = self.random.choice(source.writes)
        target = self.targets.get(write.key)
        if target is None:
            source.writes.remove(write)
            source.side.stopped(write.key, HandoffError(Reason.PEER_DIED, "gone"))
            return
        if source.side.is_stopping(write.key) and self.random.random() < 0.3:
            source.writes.remove(write)
            source.side.stopped(write.key, None)
            return
        is_open = write.registration == self.registrations[write.key.receiver_epoch]
        if source.place not in (Place.BESIDE, Place.MAPPED) and not is_open:
            source.writes.remove(write)
            source.side.stopped(write.key, HandoffError(Reason.TRANSFER_FAILED, "closed"), may_land=True)
            return
        assert not target.is_given_back, "written after the engine had the blocks back"
        at = write.tokens.pop()
        rank = self.sources.index(source)
        target.blocks[rank][at] = source.memory[write.transfer_id].get(at, OVERWRITTEN)
        if not write.tokens:
            source.writes.remove(write)
            source.side.landed(write.key)

    def break_write(self) -> None:
        """A connection breaks under a write: what the source has sent lands later."""
        rank = self.random.randrange(NUM_SOURCES)
        source = self.sources[rank]
        if not source.writes:
            return
        write = self.random.choice(source.writes)
        source.writes.remove(write)
        may_land = source.place is not Place.BESIDE
        if may_land:
            self.sent.append(Sent(rank, write, dict(source.memory.get(write.transfer_id, {}))))
        is_stopping = source.side.is_stopping(write.key)
        error = None if is_stopping else HandoffError(Reason.TRANSFER_FAILED, "broken")
        source.side.stopped(write.key, error, may_land=may_land)
        self.num_broken += may_land

    def land(self) -> None:
        """Take bytes out of a connection whose other end is gone."""
        if not self.sent:
            return
        sent = self.random.choice(self.sent)
        target = self.targets.get(sent.write.key)
        is_mapped = self.sources[sent.rank].place is Place.MAPPED
        is_open = target is not None and sent.write.registration == self.registrations[target.key.receiver_epoch]
        if target is None or not (is_open or is_mapped) or not sent.write.tokens:
            self.sent.remove(sent)
            return
        assert not target.is_given_back, "bytes in a connection land after the engine had the blocks back"
        at = sent.write.tokens.pop()
        target.blocks[sent.rank][at] = sent.memory.get(at, OVERWRITTEN)

    def report(self) -> None:
        for rank, source in enumerate(self.sources):
            for key in source.keys:
                source.side.tick(key, self.now)
                if (over := source.side.outcome(key)) is not None:
                    self.network.append(partial(self.arrive_report, rank, key, over))

    # The receiver.

    def announce(self) -> None:
        if not self.num_transfers:
            return
        transfer_id = f"x{self.random.randrange(max(0, self.num_transfers - 4), self.num_transfers + 1)}"
        self.num_pushes += 1
        key = WriteKey("d", self.random.choice(list(self.registrations)), self.num_pushes)
        receiving = DestinationLoad("r", dict.fromkeys(range(NUM_SOURCES), "digest"), self.now + SECONDS, FENCE_SECONDS)
        blocks: dict[int, dict[tuple[Span, int], tuple[str, int]]] = {rank: {} for rank in range(NUM_SOURCES)}
        epochs = [source.epoch for source in self.sources]
        self.targets[key] = Target(receiving, transfer_id, key, epochs, {}, set(range(NUM_SOURCES)), blocks)
        for rank in range(NUM_SOURCES):
            self.introduce(rank, key.receiver_epoch)
            if self.random.random() < 0.9 or rank == 0:
                self.tell(self.targets[key], rank)

    def introduce(self, rank: int, receiver_epoch: int) -> None:
        """As a rule it is answered before anything is announced; an earlier one may still be under way."""
        registration = self.registrations[receiver_epoch]
        arrive = partial(self.arrive_introduction, rank, self.sources[rank].epoch, receiver_epoch, registration)
        if self.random.random() < 0.9:
            arrive()
        self.network.append(arrive)

    def tell(self, target: Target, rank: int) -> None:
        # The client sends the same message again.
        target.registration.setdefault(rank, self.registrations[target.key.receiver_epoch])
        target.receiving.announcing(rank)
        self.network.append(partial(self.arrive_announcement, target, rank))

    def tell_again(self) -> None:
        for target in self.targets.values():
            if target.receiving.error is None:
                for rank in target.unanswered:
                    self.tell(target, rank)

    def step_receiver(self) -> None:
        for target in self.targets.values():
            for step, rank in target.receiving.due(self.now):
                if step is Step.FENCE and rank in target.receiving.may_land and self.is_kept_out(target, rank):
                    if target.registration[rank] == self.registrations[target.key.receiver_epoch]:
                        self.fence(target.key.receiver_epoch)
                    else:
                        target.receiving.fenced(rank, HandoffError(Reason.FENCED, "fenced before"))
            if target.receiving.error is not None:
                for rank in target.receiving.writers:
                    self.network.append(partial(self.arrive_revocation, target, rank))
            if target.receiving.is_over and not target.is_given_back:
                self.give_back(target)

    def is_kept_out(self, target: Target, rank: int) -> bool:
        """A source on the receiver's host is kept out only once its process has ended, or what it sends is cut off."""
        place = self.sources[rank].place
        is_cut_off = target.receiving.is_broken(rank) and place is not Place.MAPPED
        return place is Place.FAR or self.has_ended(target, rank) or is_cut_off

    def has_ended(self, target: Target, rank: int) -> bool:
        return target.told_epoch[rank] != self.sources[rank].epoch

    def fence(self, receiver_epoch: int) -> None:
        self.registrations[receiver_epoch] += 1
        self.num_fences += 1
        error = HandoffError(Reason.FENCED, "fenced")
        for target in self.targets.values():
            for rank in range(NUM_SOURCES):
                if target.key.receiver_epoch == receiver_epoch and self.is_kept_out(target, rank):
                    target.receiving.fenced(rank, error)

    def notice_ends(self) -> None:
        """The kernel shows which processes of the receiver's host have ended, and nothing of other hosts."""
        error = HandoffError(Reason.PEER_DIED, "ended")
        for target in self.targets.values():
            for rank, source in enumerate(self.sources):
                if source.place is not Place.FAR and self.has_ended(target, rank):
                    may_land = source.place in (Place.BUFFERED, Place.MAPPED) or self.random.random() < 0.3
                    target.receiving.ended(rank, error, may_land=may_land)

    def refuse(self) -> None:
        """A firewall refuses connections for a moment."""
        for target in self.targets.values():
            if target.receiving.writers:
                target.receiving.fail(HandoffError(Reason.PEER_UNREACHABLE, "refused"))

    def give_back(self, target: Target) -> None:
        target.is_given_back = True
        if target.receiving.error is not None:
            self.num_failures += 1
            return
        self.num_commits += 1
        for rank in range(NUM_SOURCES):
            wanted = _tokens(tuple(Cut(span, need.first_token, need.end_token) for span, need in SPANS.items()))
            assert target.blocks[rank] == dict.fromkeys(wanted, (target.transfer_id, rank))

    def compare(self) -> None:
        """The receiver has compared a part with the digests of its source; now and then a byte differs."""
        for target in self.targets.values():
            if target.landed:
                rank = target.landed.pop()
                if self.random.random() < 0.02:
                    target.receiving.fail(HandoffError(Reason.INTEGRITY_MISMATCH, "damaged"))
                else:
                    target.receiving.done(rank, "digest")
                return

    def abort(self) -> None:
        if self.targets:
            target = self.random.choice(list(self.targets.values()))
            target.receiving.fail(HandoffError(Reason.ABORTED, "aborted"))

    def restart_receiver(self) -> None:
        """One replica restarts, and nothing tells the sources but its new epoch."""
        former = self.random.choice(list(self.registrations))
        self.last_receiver_epoch += 1
        self.registrations = {epoch: n for epoch, n in self.registrations.items() if epoch != former}
        self.registrations[self.last_receiver_epoch] = 0
        self.targets = {key: target for key, target in self.targets.items() if key.receiver_epoch != former}

    # The network.

    def deliver(self, *, may_double: bool = True) -> None:
        if self.network:
            index = self.random.randrange(len(self.network))
            message = self.network[index] if may_double and self.random.random() < 0.2 else self.network.pop(index)
            message()

    def drop(self) -> None:
        if self.network:
            self.network.pop(self.random.randrange(len(self.network)))

    def pass_time(self) -> None:
        self.now += self.random.random() * 5

    def is_gone(self, target: Target, rank: int) -> bool:
        """A sender in another epoch answers the receiver that it is another one, which proves nothing."""
        if not self.has_ended(target, rank):
            return False
        self.network.append(partial(self.arrive_refusal, target, rank, HandoffError(Reason.PEER_CHANGED, "restarted")))
        return True

    def arrive_introduction(self, rank: int, epoch: int, receiver_epoch: int, registration: int) -> None:
        source = self.sources[rank]
        if source.epoch == epoch:
            source.introduced[receiver_epoch] = max(registration, source.introduced.get(receiver_epoch, 0))

    def arrive_announcement(self, target: Target, rank: int) -> None:
        if self.is_gone(target, rank):
            return
        source = self.sources[rank]
        if source.introduced.get(target.key.receiver_epoch) != target.registration[rank]:
            error = HandoffError(Reason.UNKNOWN_REQUEST, "introduce yourself")
            source.side.refuse(target.key, error)
            self.network.append(partial(self.arrive_refusal, target, rank, error))
            return
        push_request = WriteRequest(target.key, target.transfer_id, NUM_TOKENS, "p", SPANS, self.now + SECONDS)
        try:
            source.side.announce(push_request, self.now)
        except KVFerryError as error:
            source.side.refuse(target.key, error)
            self.network.append(partial(self.arrive_refusal, target, rank, error))
            return
        source.keys[target.key] = target.transfer_id, target.registration[rank]
        self.network.append(partial(target.unanswered.discard, rank))

    def arrive_revocation(self, target: Target, rank: int) -> None:
        if self.is_gone(target, rank):
            return
        side = self.sources[rank].side
        if side.revoke(target.key, self.now):
            self.network.append(partial(target.receiving.quiet, rank))
        elif (over := side.outcome(target.key)) is not None:
            error = HandoffError(Reason.TRANSFER_FAILED, "broken")
            self.network.append(partial(self.stop, target, rank, over, error, self.now))

    def arrive_refusal(self, target: Target, rank: int, error: KVFerryError) -> None:
        target.receiving.fail(error)

    def arrive_report(self, rank: int, key: WriteKey, over: Outcome) -> None:
        target = self.targets.get(key)
        if target is None:
            return
        if over.error is None and target.receiving.landed(rank, "digest"):
            target.landed.add(rank)
        elif over.error is not None:
            fence_at = self.now + self.random.choice([0.0, FENCE_SECONDS])
            self.stop(target, rank, over, over.error, fence_at)

    def stop(self, target: Target, rank: int, over: Outcome, error: KVFerryError, fence_at: float) -> None:
        """The source says that it writes no more."""
        is_closed = target.registration.get(rank) != self.registrations.get(target.key.receiver_epoch)
        if not over.may_land or (is_closed and self.sources[rank].place is not Place.MAPPED):
            target.receiving.refused(rank, error)
        else:
            target.receiving.broke(rank, error, fence_at=fence_at)


def _tokens(batch: tuple[Cut, ...]) -> list[tuple[Span, int]]:
    return [(cut.span, token) for cut in batch for token in range(cut.first_token, cut.end_token)]


@pytest.mark.parametrize("part", range(8))
def test_only_whole_pushes_commit_and_blocks_are_given_back_untouched(part: int) -> None:
    """Over many seeds: what commits is whole and right, nothing is written afterwards, everything ends."""
    commits = failures = fences = broken = waited = 0
    for seed in range(part * 60, part * 60 + 60):
        world = BothSides(seed)
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        commits += world.num_commits
        failures += world.num_failures
        fences += world.num_fences
        broken += world.num_broken
        waited += world.num_waited
    assert commits > 20
    assert failures > 100
    assert fences > 20
    assert broken > 5
    assert waited > 0
