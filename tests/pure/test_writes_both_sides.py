"""Both sides of a write, a network that drops, doubles, delays and reorders, and memory that is reused at once.

Time is logical. A write reads and writes one token at a time, from blocks that the source's engine overwrites the
moment it may, into blocks that the destination's engine uses the moment it may: whatever is written there later is a
failure. What a source has sent before it ends, or before a write fails, may land later, unless the source writes into
the destination's memory itself; where it has a GPU's memory mapped, behind a fence too. Two replicas of the destination
have one name. A seed determines the whole simulation.
"""

from collections.abc import Callable
from enum import Enum
from functools import partial
from random import Random

import msgspec
import pytest

from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.handoff.destination import DestinationLoad, Step
from kvferry.handoff.messages import EndPoint, WriteKey
from kvferry.handoff.source import END, Cut, Need, Outcome, Prompt, SourceWrites, WriteRequest
from kvferry.plan.planner import Span

SPANS = {Span("full"): Need(1, 7, 2), Span("window"): Need(4, 7, 2), Span("state"): Need(0, 1, 9)}
NUM_TOKENS, NUM_SOURCES, SECONDS, NUM_STEPS = 7, 2, 40.0, 720
FENCE_SECONDS = 3.0
ANSWERS_AT = {rank: EndPoint("10.0.0.1", 5601 + rank, 1) for rank in range(NUM_SOURCES)}
OVERWRITTEN = ("overwritten", 0)


class Place(Enum):
    """Where a source is, and who puts its bytes into the destination's memory."""

    BESIDE = "on the destination's host; it writes there itself"
    BUFFERED = "on the destination's host; the destination takes the bytes out of a connection"
    MAPPED = "on the destination's host; it has the memory mapped, whatever is closed there, and copies may land late"
    FAR = "on another host: nothing proves its end"


class Write(msgspec.Struct):
    """A batch on its way: tokens still to be written, to one registration of the destination's memory."""

    key: WriteKey
    transfer_id: str
    registration: int
    tokens: list[tuple[Span, int]]


class Source:
    """One rank of the source: its memory by transfer and what it writes."""

    def __init__(self, epoch: int, place: Place) -> None:
        self.epoch, self.place = epoch, place
        self.side = SourceWrites()
        self.memory: dict[str, dict[tuple[Span, int], tuple[str, int]]] = {}
        self.writes: list[Write] = []
        self.keys: dict[WriteKey, tuple[str, int]] = {}
        self.introduced: dict[int, int] = {}
        self.reported: set[WriteKey] = set()


class Sent(msgspec.Struct):
    """Bytes of a source that has ended, or of a write that has failed: they lie in the buffers of a connection."""

    rank: int
    write: Write
    memory: dict[tuple[Span, int], tuple[str, int]]


class Target(msgspec.Struct):
    """A load as the destination holds it: its blocks, and whether its engine uses them again."""

    load: DestinationLoad
    transfer_id: str
    key: WriteKey
    told_epoch: list[int]
    registration: dict[int, int]
    unanswered: set[int]
    blocks: dict[int, dict[tuple[Span, int], tuple[str, int]]]
    landed: set[int] = msgspec.field(default_factory=set)
    is_given_back: bool = False


class BothSides:
    """A source of two ranks (that may restart) and two replicas of a destination with one rank (that may too)."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.epoch, self.last_destination_epoch = 1, 2
        self.registrations = {1: 0, 2: 0}
        self.sources = [Source(self.epoch, self.random.choice(list(Place))) for _ in range(NUM_SOURCES)]
        self.sent: list[Sent] = []
        self.final: dict[str, int] = {}
        self.targets: dict[WriteKey, Target] = {}
        self.network: list[Callable[[], None]] = []
        self.num_transfers = self.num_loads = self.num_commits = self.num_failures = 0
        self.num_fences = self.num_broken = self.num_waited = self.num_learned = 0

    def run(self) -> None:
        events = {
            self.begin: 4,
            self.compute: 40,
            self.preempt: 2,
            self.end_prompt: 1,
            self.reset: 0.3,
            self.announce: 6,
            self.tell_again: 6,
            self.start_write: 60,
            self.write_a_token: 160,
            self.break_write: 2,
            self.report: 20,
            self.abort: 1,
            self.step_destination: 20,
            self.deliver: 70,
            self.drop: 6,
            self.pass_time: 6,
            self.land: 20,
            self.compare: 40,
            self.notice_ends: 10,
            self.refuse: 0.15,
            self.restart_source: 0.3,
            self.restart_destination: 0.3,
        }
        for event in self.random.choices(list(events), list(events.values()), k=NUM_STEPS):
            event()
        for turn in range(60):
            if turn == 40:
                open_targets = [target for target in self.targets.values() if not target.load.is_over]
                assert all(self.waits_for_an_end(target) for target in open_targets), "a load does not end"
                self.num_waited += len(open_targets)
                self.restart_source()
            self.now += 2 * SECONDS
            self.notice_ends()
            self.step_destination()
            self.report()
            while any(target.landed for target in self.targets.values()):
                self.compare()
            for _ in range(40):
                self.start_write()
                self.write_a_token()
            while self.network:
                self.deliver(may_double=False)
        assert all(target.load.is_over for target in self.targets.values()), "a load never ends"
        assert all(source.side.num_open == 0 for source in self.sources), "a source never ends a write"
        assert not any(source.side._requests or source.side._requests_of for source in self.sources), (
            "something is kept"
        )

    def waits_for_an_end(self, target: Target) -> bool:
        """No word, and no fence, frees what a failed copy into mapped memory was for, while its process lives."""
        may_land = target.load.may_land
        return all(self.sources[i].place is Place.MAPPED and target.load.is_broken(i) for i in may_land)

    # The source's engine: both ranks in step.

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

    def reset(self) -> None:
        """The engine's cache is reset: all blocks may be overwritten."""
        self.final.clear()
        for source in self.sources:
            source.side.fail_all(HandoffError(Reason.WEIGHTS_CHANGED, "reset"))
            for transfer_id in source.memory:
                self.overwrite(source, transfer_id)

    def overwrite(self, source: Source, transfer_id: str) -> None:
        source.memory[transfer_id] = dict.fromkeys(source.memory[transfer_id], OVERWRITTEN)

    def restart_source(self) -> None:
        self.epoch += 1
        for rank, source in enumerate(self.sources):
            if source.place not in (Place.BESIDE, Place.MAPPED):
                self.sent += [Sent(rank, write, dict(source.memory[write.transfer_id])) for write in source.writes]
            if source.place is Place.MAPPED:
                self.sent = [sent for sent in self.sent if sent.rank != rank]
        self.sources = [Source(self.epoch, source.place) for source in self.sources]
        self.final.clear()

    # The source's writes.

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
                if (over := source.side.outcome(key)) is not None and key not in source.reported:
                    source.reported.add(key)
                    self.network.append(partial(self.arrive_report, rank, key, over))

    # The destination.

    def announce(self) -> None:
        if not self.num_transfers:
            return
        transfer_id = f"x{self.random.randrange(max(0, self.num_transfers - 4), self.num_transfers + 1)}"
        self.num_loads += 1
        key = WriteKey("d", self.random.choice(list(self.registrations)), self.num_loads)
        expected = dict.fromkeys(range(NUM_SOURCES), "digest")
        deadline = self.now + SECONDS
        load = DestinationLoad("r", transfer_id, expected, ANSWERS_AT, deadline, FENCE_SECONDS)
        blocks: dict[int, dict[tuple[Span, int], tuple[str, int]]] = {rank: {} for rank in range(NUM_SOURCES)}
        epochs = [source.epoch for source in self.sources]
        self.targets[key] = Target(load, transfer_id, key, epochs, {}, set(range(NUM_SOURCES)), blocks)
        for rank in range(NUM_SOURCES):
            self.introduce(rank, key.receiver_epoch)
            if self.random.random() < 0.9 or rank == 0:
                self.tell(self.targets[key], rank)

    def introduce(self, rank: int, destination_epoch: int) -> None:
        """As a rule it is answered before anything is announced; an earlier one may still be under way."""
        registration = self.registrations[destination_epoch]
        arrive = partial(self.arrive_introduction, rank, self.sources[rank].epoch, destination_epoch, registration)
        if self.random.random() < 0.9:
            arrive()
        self.network.append(arrive)

    def tell(self, target: Target, rank: int) -> None:
        # The client sends the same message again.
        target.registration.setdefault(rank, self.registrations[target.key.receiver_epoch])
        target.load.announcing(rank)
        self.network.append(partial(self.arrive_announcement, target, rank))

    def tell_again(self) -> None:
        for target in self.targets.values():
            if target.load.error is None:
                for rank in target.unanswered:
                    self.tell(target, rank)

    def step_destination(self) -> None:
        for target in self.targets.values():
            for step, rank in target.load.due(self.now):
                if step is Step.ASK_AGAIN:
                    self.network.append(partial(self.arrive_announcement, target, rank, is_again=True))
                if step is Step.FENCE and rank in target.load.may_land and self.is_kept_out(target, rank):
                    if target.registration[rank] == self.registrations[target.key.receiver_epoch]:
                        self.fence(target.key.receiver_epoch)
                    else:
                        target.load.fenced(rank, HandoffError(Reason.FENCED, "fenced before"))
            if target.load.error is not None:
                for rank in target.load.writers:
                    self.network.append(partial(self.arrive_revocation, target, rank))
            if target.load.is_over and not target.is_given_back:
                self.give_back(target)

    def is_kept_out(self, target: Target, rank: int) -> bool:
        """On the destination's host a source is kept out once its process has ended, or what it sends is cut off."""
        place = self.sources[rank].place
        is_cut_off = target.load.is_broken(rank) and place is not Place.MAPPED
        return place is Place.FAR or self.has_ended(target, rank) or is_cut_off

    def has_ended(self, target: Target, rank: int) -> bool:
        return target.told_epoch[rank] != self.sources[rank].epoch

    def fence(self, destination_epoch: int) -> None:
        self.registrations[destination_epoch] += 1
        self.num_fences += 1
        error = HandoffError(Reason.FENCED, "fenced")
        for target in self.targets.values():
            for rank in range(NUM_SOURCES):
                if target.key.receiver_epoch == destination_epoch and self.is_kept_out(target, rank):
                    target.load.fenced(rank, error)

    def notice_ends(self) -> None:
        """The kernel shows which processes of the destination's host have ended, and nothing of other hosts."""
        error = HandoffError(Reason.PEER_DIED, "ended")
        for target in self.targets.values():
            for rank, source in enumerate(self.sources):
                if source.place is not Place.FAR and self.has_ended(target, rank):
                    may_land = source.place in (Place.BUFFERED, Place.MAPPED) or self.random.random() < 0.3
                    target.load.ended(rank, error, may_land=may_land)

    def refuse(self) -> None:
        """A firewall refuses connections for a moment."""
        for target in self.targets.values():
            if target.load.writers:
                target.load.fail(HandoffError(Reason.PEER_UNREACHABLE, "refused"))

    def give_back(self, target: Target) -> None:
        target.is_given_back = True
        if target.load.error is not None:
            self.num_failures += 1
            return
        self.num_commits += 1
        for rank in range(NUM_SOURCES):
            wanted = _tokens(tuple(Cut(span, need.first_token, need.end_token) for span, need in SPANS.items()))
            assert target.blocks[rank] == dict.fromkeys(wanted, (target.transfer_id, rank))

    def compare(self) -> None:
        """The destination has compared a part with the digests of its source; now and then a byte differs."""
        for target in self.targets.values():
            if target.landed:
                rank = target.landed.pop()
                if self.random.random() < 0.02:
                    target.load.fail(HandoffError(Reason.INTEGRITY_MISMATCH, "damaged"))
                else:
                    target.load.done(rank, "digest")
                return

    def abort(self) -> None:
        if self.targets:
            target = self.random.choice(list(self.targets.values()))
            target.load.fail(HandoffError(Reason.ABORTED, "aborted"))

    def restart_destination(self) -> None:
        """One replica restarts, and nothing tells the sources but its new epoch."""
        former = self.random.choice(list(self.registrations))
        self.last_destination_epoch += 1
        self.registrations = {epoch: n for epoch, n in self.registrations.items() if epoch != former}
        self.registrations[self.last_destination_epoch] = 0
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
        """A source in another epoch answers the destination that it is another one, which proves nothing."""
        if not self.has_ended(target, rank):
            return False
        self.network.append(partial(self.arrive_refusal, target, rank, HandoffError(Reason.PEER_CHANGED, "restarted")))
        return True

    def arrive_introduction(self, rank: int, epoch: int, destination_epoch: int, registration: int) -> None:
        source = self.sources[rank]
        if source.epoch == epoch:
            source.introduced[destination_epoch] = max(registration, source.introduced.get(destination_epoch, 0))

    def arrive_announcement(self, target: Target, rank: int, *, is_again: bool = False) -> None:
        if self.is_gone(target, rank):
            return
        source = self.sources[rank]
        if source.introduced.get(target.key.receiver_epoch) != target.registration[rank]:
            error = HandoffError(Reason.UNKNOWN_REQUEST, "introduce yourself")
            source.side.refuse(target.key, error)
            self.network.append(partial(self.arrive_refusal, target, rank, error))
            return
        request = WriteRequest(target.key, target.transfer_id, NUM_TOKENS, "p", SPANS, self.now + SECONDS)
        try:
            source.side.announce(request, self.now)
        except KVFerryError as error:
            source.side.refuse(target.key, error)
            self.network.append(partial(self.arrive_refusal, target, rank, error))
            return
        source.keys[target.key] = target.transfer_id, target.registration[rank]
        over = source.side.outcome(target.key)
        self.network.append(partial(self.arrive_answer, target, rank, over, is_again=is_again))

    def arrive_answer(self, target: Target, rank: int, over: Outcome | None, *, is_again: bool) -> None:
        target.unanswered.discard(rank)
        target.load.answered(rank, self.now)
        if over is not None:
            self.num_learned += is_again and rank in target.load.writers and target.load.error is None
            self.arrive_report(rank, target.key, over)

    def arrive_revocation(self, target: Target, rank: int) -> None:
        if self.is_gone(target, rank):
            return
        side = self.sources[rank].side
        if side.revoke(target.key, self.now):
            self.network.append(partial(target.load.quiet, rank))
        elif (over := side.outcome(target.key)) is not None:
            error = HandoffError(Reason.TRANSFER_FAILED, "broken")
            self.network.append(partial(self.stop, target, rank, over, error, self.now))

    def arrive_refusal(self, target: Target, rank: int, error: KVFerryError) -> None:
        target.load.fail(error)

    def arrive_report(self, rank: int, key: WriteKey, over: Outcome) -> None:
        target = self.targets.get(key)
        if target is None:
            return
        if over.error is None and target.load.landed(rank, "digest"):
            target.landed.add(rank)
        elif over.error is not None:
            fence_at = self.now + self.random.choice([0.0, FENCE_SECONDS])
            self.stop(target, rank, over, over.error, fence_at)

    def stop(self, target: Target, rank: int, over: Outcome, error: KVFerryError, fence_at: float) -> None:
        """The source says that it writes no more."""
        is_closed = target.registration.get(rank) != self.registrations.get(target.key.receiver_epoch)
        if not over.may_land or (is_closed and self.sources[rank].place is not Place.MAPPED):
            target.load.refused(rank, error)
        else:
            target.load.broke(rank, error, fence_at=fence_at)


def _tokens(batch: tuple[Cut, ...]) -> list[tuple[Span, int]]:
    return [(cut.span, token) for cut in batch for token in range(cut.first_token, cut.end_token)]


@pytest.mark.parametrize("part", range(8))
def test_only_whole_loads_commit_and_blocks_are_given_back_untouched(part: int) -> None:
    """Over many seeds: what commits is whole and right, nothing is written afterwards, everything ends."""
    commits = failures = fences = broken = waited = learned = 0
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
        learned += world.num_learned
    assert commits > 15
    assert failures > 100
    assert fences > 20
    assert broken > 5
    assert waited > 0
    assert learned > 3
