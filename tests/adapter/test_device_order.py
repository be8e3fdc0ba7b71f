"""Device order, with streams that a test runs: without the wait the test sees the race, with the wait it does not."""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from kvferry.errors import Reason, TransportError
from kvferry.execution import device_merge
from kvferry.execution.device import HOST, OVER, CudaOrder, DeferredActions, DeviceOrder, device_order
from kvferry.execution.guard_words import GuardWords, Held, Scratch, StepWords
from kvferry.execution.job import Phase
from kvferry.execution.read import Read
from kvferry.execution.stage import Stage, put_in_place
from kvferry.handoff.guard_word import CLEARED, WORD_BYTES, HeldPrompt, being_written
from kvferry.handoff.messages import RankEntry
from kvferry.plan.staging.scatter import Merge

from ..local.engines_in_process import (
    HELD,
    SLOT,
    WORD,
    DecodeRank,
    PrefillEngine,
    Rank,
    filled_ranks,
    whole_blocks,
    word_of,
)
from ..local.fake_cuda import FakeCuda, FakeStream
from ..waits import wait_until

DEVICE = "cpu"
"""Memory that every transport reaches, with a device that is not: the fake's."""
NEXT_WORD = word_of(generation=4)
SOURCE_IDS, DESTINATION_IDS = [3, 1], [2, 5]


@pytest.fixture
def cuda() -> FakeCuda:
    """The test's thread is the engine's."""
    return FakeCuda.of_this_thread(DEVICE)


@pytest.fixture
def forward(cuda: FakeCuda) -> FakeStream:
    return cuda.current_stream(DEVICE)


@pytest.fixture
def order(cuda: FakeCuda) -> CudaOrder:
    return CudaOrder(DEVICE, cuda)


def settle(words: StepWords) -> None:
    """Return once everything that waited for marks that are over has been done."""
    done = threading.Event()
    words._deferred.add(OVER, done.set)
    assert done.wait(30)


# The source: a hold's word says "being written" until what its step wrote is done.


@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_source_is_read_only_once_its_step_is_done_on_the_device(
    order: CudaOrder, forward: FakeStream, is_ordered: bool
) -> None:
    prefill, decode = PrefillEngine("memcpy", [Rank(0, 1)]), DecodeRank("memcpy", Rank(0, 1))
    cache = prefill.ranks[0].cache  # type: ignore[attr-defined]
    words = StepWords(prefill.words[0], order if is_ordered else HOST)
    words.begin([], [HELD])
    forward.launch(prefill.ranks[0].fill)  # type: ignore[attr-defined]
    words.finish()
    decode.engine(prefill.hold())
    load = Read(
        "a", lambda: decode.engines.get(prefill.hold()).reads(prefill.hold(), HELD, blocks()), time.monotonic() + 20
    )  # type: ignore[union-attr]
    for _ in range(50):
        if load.phase is not Phase.DONE:
            load.advance(decode.scratch, time.monotonic())
    assert (load.phase is Phase.DONE) is not is_ordered
    forward.run()
    advance_to_the_end(load, decode.scratch)
    assert load.error is None
    is_exact = (decode.rank.cache[DESTINATION_IDS] == cache[SOURCE_IDS]).all()  # type: ignore[attr-defined]
    assert is_exact == is_ordered, "without the wait, what was there before the step is believed"
    words.close()
    prefill.close()


def blocks() -> list[Any]:
    return [whole_blocks("full", SOURCE_IDS, DESTINATION_IDS)]


def advance_to_the_end(load: Read, scratch: Scratch) -> None:
    while load.phase is not Phase.DONE:
        if not load.advance(scratch, time.monotonic()):
            time.sleep(0.001)


def test_a_step_that_never_ends_is_a_deadline_before_any_data(order: CudaOrder) -> None:
    prefill, decode = PrefillEngine("memcpy", filled_ranks(1)), DecodeRank("memcpy", Rank(0, 1))
    words = StepWords(prefill.words[0], order)
    words.begin([], [HELD])
    words.finish()
    engine = decode.engine(prefill.hold())
    load = Read("a", lambda: engine.reads(prefill.hold(), HELD, blocks()), time.monotonic() + 0.05)
    advance_to_the_end(load, decode.scratch)
    assert load.error is not None
    assert load.error.reason is Reason.DEADLINE_EXCEEDED
    assert "before the data" in load.error.message
    assert not decode.rank.cache.any()  # type: ignore[attr-defined]
    prefill.close()


def test_a_word_waits_for_the_last_of_the_steps_that_write(order: CudaOrder, forward: FakeStream) -> None:
    guard = GuardWords(4)
    words = StepWords(guard, order)
    words.begin([], [HELD])
    words.finish()
    words.begin([], [HELD])
    assert word_in(guard) == being_written(WORD)
    forward.run()
    settle(words)
    assert word_in(guard) == being_written(WORD), "the first step is done, the second is not"
    words.finish()
    settle_after(words, forward)
    assert word_in(guard) == WORD
    words.begin([], [])
    words.finish()
    assert word_in(guard) == WORD, "later steps of others change nothing"
    words.close()


def word_in(guard: GuardWords) -> bytes:
    return bytes(guard.array[SLOT].tobytes())


def settle_after(words: StepWords, stream: FakeStream) -> None:
    stream.run()
    settle(words)


def test_the_next_owner_of_a_slot_waits_for_its_own_step(order: CudaOrder, forward: FakeStream) -> None:
    guard = GuardWords(4)
    words = StepWords(guard, order)
    words.begin([], [HELD])
    words.finish()
    words.begin([SLOT], [])
    assert word_in(guard) == CLEARED, "cleared at once: the blocks are given away behind it"
    words.begin([], [Held(SLOT, NEXT_WORD)])
    settle_after(words, forward)
    assert word_in(guard) == being_written(NEXT_WORD)
    words.close()


def test_digests_that_fail_end_no_hold_that_has_got_the_slot_meanwhile(
    order: CudaOrder, forward: FakeStream, caplog: pytest.LogCaptureFixture
) -> None:
    """Its announced writes would fail, and its readers find no word until its step is done."""
    prompt = HeldPrompt("prompt", 16, [16], [np.array([0])])

    def keep(_: HeldPrompt) -> None:
        words.begin([SLOT], [Held(SLOT, NEXT_WORD)])
        raise RuntimeError("no digests")

    guard = GuardWords(4)
    words = StepWords(guard, order, keep)
    words.prompts = Mock()
    words.begin([], [Held(SLOT, WORD, prompt)])
    words.finish()
    settle_after(words, forward)
    assert "no digests" in caplog.text
    assert word_in(guard) == being_written(NEXT_WORD)
    assert [call.args[0] for call in words.prompts.end.call_args_list] == [[WORD]]
    words.close()


def test_a_late_word_waits_for_the_steps_before_it_and_not_for_its_own(order: CudaOrder, forward: FakeStream) -> None:
    """An idle engine's step reports no end, and the word must not wait for a later one."""
    guard = GuardWords(4)
    words = StepWords(guard, order)
    words.begin([], [HELD])
    words.finish()
    words.begin([], [], [Held(SLOT, NEXT_WORD)])
    assert word_in(guard) == being_written(NEXT_WORD)
    settle_after(words, forward)
    assert word_in(guard) == NEXT_WORD
    words.close()


def test_what_has_ended_stays_ended(order: CudaOrder, forward: FakeStream) -> None:
    guard = GuardWords(4)
    words = StepWords(guard, order)
    words.begin([], [HELD])
    words.finish()
    words.begin([SLOT], [])
    settle_after(words, forward)
    assert word_in(guard) == CLEARED
    words.close()


def test_at_the_end_nothing_is_held_even_where_a_step_is_done_later(order: CudaOrder, forward: FakeStream) -> None:
    guard = GuardWords(4)
    words = StepWords(guard, order)
    guard.set(0, WORD)
    words.begin([], [HELD])
    words.finish()
    closing = threading.Thread(target=words.close)
    closing.start()
    wait_until(lambda: not guard.array.any())
    forward.run()
    closing.join(20)
    assert not guard.array.any()
    words.close()


def test_a_step_without_a_reported_end_is_done_with_the_next(order: CudaOrder, forward: FakeStream) -> None:
    guard = GuardWords(4)
    words = StepWords(guard, order)
    words.begin([], [HELD])
    words.begin([], [])
    words.finish()
    settle_after(words, forward)
    assert word_in(guard) == WORD
    words.close()


def test_on_a_cpu_a_word_is_set_at_once_and_no_thread_starts() -> None:
    guard, num_threads = GuardWords(4), threading.active_count()
    words = StepWords(guard, HOST)
    words.begin([], [HELD])
    assert word_in(guard) == WORD
    words.finish()
    words.begin([SLOT], [])
    assert word_in(guard) == CLEARED
    assert threading.active_count() == num_threads
    words.close()


PROMPT = HeldPrompt("digest", 8, [4], [np.array(SOURCE_IDS)])
HELD_PROMPT = HELD._replace(prompt=PROMPT)


def test_digests_are_kept_once_the_device_is_done_and_before_the_word_counts(
    order: CudaOrder, forward: FakeStream
) -> None:
    guard, kept = GuardWords(4), []
    words = StepWords(guard, order, lambda prompt: kept.append((prompt, word_in(guard))))
    words.begin([], [HELD_PROMPT])
    words.finish()
    assert not kept, "the device has not written the blocks"
    settle_after(words, forward)
    assert kept == [(PROMPT, being_written(WORD))]
    assert word_in(guard) == WORD
    words.begin([SLOT], [HELD_PROMPT._replace(word=NEXT_WORD)])
    words.finish()
    words.begin([SLOT], [])
    settle_after(words, forward)
    assert len(kept) == 1, "another prompt may have the blocks of a hold that has ended"
    words.close()


def test_on_a_cpu_digests_are_kept_with_the_end_of_the_step() -> None:
    guard, kept = GuardWords(4), []
    words = StepWords(guard, HOST, kept.append)
    words.begin([], [HELD_PROMPT])
    assert not kept
    words.finish()
    assert kept == [PROMPT]
    words.begin([], [], [HELD_PROMPT._replace(word=NEXT_WORD)])
    assert (kept, word_in(guard)) == ([PROMPT, PROMPT], NEXT_WORD)
    words.close()


def test_a_prompt_whose_digests_cannot_be_kept_is_not_readable(order: CudaOrder, forward: FakeStream) -> None:
    def fail(prompt: HeldPrompt) -> None:
        raise MemoryError

    for each in (HOST, order):
        guard = GuardWords(4)
        words = StepWords(guard, each, fail)
        words.begin([], [HELD_PROMPT])
        words.finish()
        settle_after(words, forward)
        assert word_in(guard) == CLEARED
        words.close()


def test_what_waits_for_a_failed_device_is_not_done_and_the_rest_is(order: CudaOrder) -> None:
    class Failed:
        def is_over(self) -> bool:
            return True

        def wait(self) -> None:
            raise RuntimeError("an illegal memory access was encountered")

    deferred, done = DeferredActions(order), []
    deferred.add(Failed(), lambda: done.append("failed"))
    deferred.add(OVER, lambda: done.append("over"))
    deferred.close()
    assert done == ["over"]


def test_what_waits_for_a_device_that_the_thread_cannot_turn_to_is_dropped(
    order: CudaOrder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Actions that no thread runs would pile up."""
    entered: list[bool] = []

    def enter() -> None:
        entered.append(bool(entered))
        if not entered[-1]:
            raise RuntimeError("no device")

    monkeypatch.setattr(order, "enter_thread", enter)
    deferred, done = DeferredActions(order), []
    for name in ("first", "second", "third"):
        deferred.add(OVER, lambda name=name: done.append(name))
    deferred.close()
    assert done == ["second", "third"]
    assert entered == [False, True]
    assert "the device failed" in caplog.text


def test_what_waits_for_a_device_is_done_later_where_the_process_can_start_no_thread_now(
    order: CudaOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread adds it: an exception there would end the engine."""
    deferred, done = DeferredActions(order), []

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        deferred.add(OVER, lambda: done.append("first"))
        deferred.close()
    deferred.add(OVER, lambda: done.append("second"))
    deferred.close()
    assert done == ["first", "second"]


# The decode engine's worker: its own threads, real handshake, guard words and bytes.


class Worker:
    """A decode engine's worker on the fake device, and the prefill engine that it reads from."""

    def __init__(self, order: DeviceOrder, strategy: str, patch: pytest.MonkeyPatch) -> None:
        from kvferry.integrations.vllm.settings import Settings
        from kvferry.integrations.vllm.step import PromptLoad, StepMetadata
        from kvferry.integrations.vllm.worker import memory
        from kvferry.integrations.vllm.worker import role as worker_role

        from .worker_roles import make_worker_role

        self.prefill, self.rank = PrefillEngine("memcpy", filled_ranks(2)), Rank(0, 1)
        patch.setattr(memory, "DEFAULT_STAGE_BYTES", 1 << 16)
        # Streams here do nothing until the test runs them.
        patch.setattr(worker_role.WorkerRole, "_try", lambda *_: None)
        settings = Settings(transport="memcpy", strategy=strategy, integrity="off")  # type: ignore[arg-type]
        self.role = make_worker_role(patch, settings, self.rank.shard, device_order=order)
        self.orders = StepMetadata(loads=[PromptLoad("a", 30.0, self.prefill.hold(), HELD, 8, tuple(blocks()))])

    def begin_load(self) -> None:
        self.role.begin_step(self.orders)
        self.role.start_loads(self.orders)

    def finish_load(self, each: Callable[[], None] = lambda: None) -> None:
        """Ask, as the engine does in each step, until the load is reported."""

        def is_reported() -> bool:
            each()
            received, failed = self.role.take_finished()
            assert not failed
            return bool(received)

        wait_until(is_reported)

    @property
    def is_stage_free(self) -> bool:
        """Whether the whole stage can be taken at once."""
        assert self.role._rank is not None
        stage = self.role._rank.source_engines._stage
        assert stage is not None
        taken = stage.take("probe", stage.region.length)
        stage.give_back("probe")
        return taken == 0

    @property
    def is_exact(self) -> bool:
        return self.is_exact_in(self.rank.cache)

    def is_exact_in(self, cache: np.ndarray) -> bool:
        sources = [rank.cache[SOURCE_IDS] for rank in self.prefill.ranks]  # type: ignore[attr-defined]
        return bool((cache[DESTINATION_IDS] == np.concatenate(sources, axis=1)).all())

    def close(self) -> None:
        self.role.shutdown()
        self.prefill.close()


@pytest.fixture
def make_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[DeviceOrder, str], Worker]]:
    workers: list[Worker] = []

    def make(order: DeviceOrder, strategy: str = "direct") -> Worker:
        workers.append(Worker(order, strategy, monkeypatch))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()


def test_a_worker_changes_the_words_at_the_published_address(make_worker: Callable[..., Worker]) -> None:
    from kvferry.integrations.vllm.step import StepMetadata

    role = make_worker(HOST).role
    metadata = role.get_handshake_metadata()
    assert metadata is not None
    entry = msgspec.msgpack.decode(metadata.entry, type=RankEntry)

    def word_after(ended: list[int], written: list[Held]) -> bytes:
        """Return the word in memory when a step with these orders begins."""
        role.begin_step(StepMetadata(ended_slots=ended, written=written))
        return ctypes.string_at(entry.words_address + SLOT * WORD_BYTES, WORD_BYTES)

    assert word_after([], [HELD]) == WORD
    assert word_after([], []) == WORD
    following = Held(SLOT, NEXT_WORD)
    assert word_after([SLOT], [following]) == NEXT_WORD, "the slot's next hold"
    assert word_after([SLOT], []) == CLEARED


@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_load_waits_for_what_was_launched_when_it_got_its_blocks(
    make_worker: Callable[..., Worker], order: CudaOrder, forward: FakeStream, is_ordered: bool
) -> None:
    worker = make_worker(order if is_ordered else HOST)
    forward.launch(lambda: worker.rank.cache.fill(0))
    worker.begin_load()
    if is_ordered:
        time.sleep(0.1)
        assert worker.role.take_finished() == (set(), set())
        assert not worker.rank.cache.any()
        forward.run()
    worker.finish_load()
    forward.run()
    assert worker.is_exact == is_ordered, "without the wait, the engine's zeros come after what was loaded"


@pytest.fixture
def launches(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Instead of the kernel, the same copies by the CPU, when the stream on which they are launched is run."""
    found: list[int] = []

    def launch(merges: Sequence[Merge], stage_address: int, device: str) -> None:
        found.append(len(merges))
        every = list(merges)
        cuda.current_stream(device).launch(lambda: [put_in_place(merge, stage_address) for merge in every])

    monkeypatch.setattr(device_merge, "merge", launch)
    return found


@pytest.mark.parametrize("is_ordered", [True, False])
def test_the_engine_waits_for_the_last_copy_into_its_cache(
    make_worker: Callable[..., Worker],
    order: CudaOrder,
    cuda: FakeCuda,
    forward: FakeStream,
    launches: list[int],
    is_ordered: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not is_ordered:
        monkeypatch.setattr(CudaOrder, "wait_for", lambda *_: None)
    worker = make_worker(order, "scatter")
    launches.clear()
    worker.begin_load()
    worker.finish_load(forward.run)
    assert len(launches) == 1
    assert not worker.is_stage_free, "bytes could come into what is still copied from"
    seen: list[bool] = []
    forward.launch(lambda: seen.append(worker.is_exact_in(worker.rank.cache)))
    # The forward stream goes first, and as far as it may.
    forward.run()
    for stream in cuda.streams:
        stream.run()
    forward.run()
    assert seen == [is_ordered], "without the wait, the engine reads before the copy is done"
    assert worker.is_exact
    assert worker.is_stage_free


def test_a_stage_is_given_to_the_next_only_once_the_copies_out_of_it_are_done(
    order: CudaOrder, forward: FakeStream
) -> None:
    stage = Stage(4096, order=order)
    assert stage.take("a", 4096) == 0
    stage.give_back("a", after=order.mark())
    assert stage.take("b", 64) is None
    forward.run()
    assert stage.take("b", 64) == 0


def test_a_thread_of_its_own_needs_its_device(order: CudaOrder, cuda: FakeCuda) -> None:
    found: list[object] = []

    def use(enter: bool) -> None:
        try:
            if enter:
                order.enter_thread()
            order.mark()
            found.append(cuda.current_stream(DEVICE))
        except AssertionError as error:
            found.append(str(error))

    for enter in (False, True):
        thread = threading.Thread(target=use, args=(enter,))
        thread.start()
        thread.join()
    assert found == ["this thread has not set its device", cuda.streams[-1]]
    assert cuda.streams[-1] is not cuda.current_stream(DEVICE)


@pytest.mark.parametrize("devices", [["cpu", "cuda:0"], ["cuda:0", "cuda:1"], ["npu:0"], []])
def test_regions_on_several_devices_or_others_are_refused(devices: list[str]) -> None:
    with pytest.raises(TransportError) as caught:
        device_order(devices)
    assert caught.value.reason is Reason.UNSUPPORTED


def test_a_gpu_gets_an_order_of_its_own() -> None:
    found = device_order(["cuda:1", "cuda:1"])
    assert isinstance(found, CudaOrder)
    assert found.device == "cuda:1"
    assert not found.is_immediate
