"""The workers' roles: vLLM's steps, real messages and bytes, no engine."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.logging_utils.dump_input import prepare_object_to_dump
from vllm.v1.worker import kv_connector_model_runner_mixin
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.worker_base import WorkerBase

from kvferry.cli.timeline_jobs import Wanted, find
from kvferry.cli.transfer_records import open_logs
from kvferry.errors import HandoffError, Reason, TransportError
from kvferry.execution import destination, digests, executor, peers
from kvferry.execution.device import HostOrder
from kvferry.execution.executor import JobResult
from kvferry.handoff.handshake import NO_ADAPTER, Adapter
from kvferry.handoff.holds import is_of_hold, transfer_of
from kvferry.handoff.messages import (
    PROTOCOL_VERSION,
    Answer,
    Directory,
    EndPoint,
    Handle,
    Noted,
    Question,
    Release,
    StillWriting,
)
from kvferry.handoff.remote_holds import RemoteHold
from kvferry.handoff.source import END, BlockList, Prompt
from kvferry.handoff.wire.server import Server
from kvferry.handoff.wire.trust import Keys, make_keys
from kvferry.integrations.vllm.connector import KVFerryConnector
from kvferry.integrations.vllm.engine_core import FIRST_WAIT_SECONDS, IdleSteps
from kvferry.integrations.vllm.scheduler.blocks import group_name
from kvferry.integrations.vllm.settings import Settings
from kvferry.integrations.vllm.step import AnnouncedPrompt, EngineEndPoint, PromptLoad, StepMetadata
from kvferry.integrations.vllm.translate import decode_rank_entry
from kvferry.integrations.vllm.worker import role as worker_role
from kvferry.integrations.vllm.worker.role import Source
from kvferry.layout.shard import CacheKind
from kvferry.transport.protocol import own_identity

from ..local.engines_in_process import BLOCK_SIZE, EPOCH, HOST, IDENTITY, Rank, filled_ranks, whole_blocks
from ..waits import wait_until
from .worker_roles import make_worker_role

SECONDS = 20.0
SOURCE_IDS, TARGET_IDS = [5, 1, 4], [0, 3, 2]
TRANSFER, HOLD = Handle("x", 0), Handle("x", 3)
GROUP = group_name(0)


def named(rank: Rank) -> Rank:
    """Give the rank's cache group the name that those of vLLM's engines have."""
    [group] = rank.shard.groups
    rank.shard = msgspec.structs.replace(rank.shard, groups=(msgspec.structs.replace(group, name=GROUP),))
    return rank


class Workers:
    """A prefill engine of two ranks with these settings and a decode engine of one."""

    def __init__(
        self, patch: pytest.MonkeyPatch, folder: Path, keys: str = "", handle: Handle = TRANSFER, **settings: Any
    ) -> None:
        self.folder, self._keys = folder, keys
        decode_integrity = settings.pop("decode_integrity", settings.get("integrity", "auto"))
        self.sources, self.target = [named(rank) for rank in filled_ranks(2)], named(Rank(0, 1))
        self.senders = [self._role(patch, "p", rank, **settings) for rank in self.sources]
        ports = settings.get("rank_ports", "")
        self.receiver = self._role(patch, "d", self.target, integrity=decode_integrity, rank_ports=ports)
        entries = tuple(decode_rank_entry(role.get_handshake_metadata().entry) for role in self.senders)
        directory = Directory(PROTOCOL_VERSION, "p", EPOCH, IDENTITY, entries)
        self.released: list[Release] = []

        def answer(question: Question) -> Answer:
            if isinstance(question, Release):
                self.released.append(question)
                return Noted(EPOCH)
            return directory

        self.listener = Server(HOST, 0, answer, keys=Keys(keys) if keys else None)
        self.hold = RemoteHold("p", EPOCH, HOST, self.listener.port, handle)
        self.transfer_id = transfer_of(handle)

    def _role(self, patch: pytest.MonkeyPatch, engine_id: str, rank: Rank, **more: Any) -> Any:
        log = str(self.folder / engine_id)
        settings = Settings(transport="cma", transfer_log=log, keys=self._keys, **more)
        return make_worker_role(patch, settings, rank.shard, engine_id)

    def announce(self, request_id: str = "r", seconds: float = SECONDS, adapter: str = "") -> None:
        blocks = (whole_blocks(GROUP, [0] * 3, TARGET_IDS),)
        prompt = AnnouncedPrompt(self.transfer_id, 3 * BLOCK_SIZE, "prompt", adapter)
        order = PromptLoad(
            request_id,
            seconds,
            self.hold,
            3 * BLOCK_SIZE,
            blocks,
            announced=prompt,
            source_block_sizes=(BLOCK_SIZE,),
        )
        self.step([self.receiver], StepMetadata(loads=[order]))

    def step(self, roles: list[Any], orders: StepMetadata) -> None:
        """One step in vLLM's order of calls."""
        for role in roles:
            role.void_transfers(orders)
            role.begin_step(orders)
            role.end_loads(orders)
            role.finish_step()

    def compute(self, num_final: int, adapter: Adapter = NO_ADAPTER) -> None:
        num_tokens = 3 * BLOCK_SIZE
        prompt = Prompt(num_tokens, "prompt", {GROUP: BlockList(0, SOURCE_IDS)}, num_final, adapter)
        told = [(self.transfer_id, prompt)]
        is_transfer = not is_of_hold(self.transfer_id)
        self.step(self.senders, StepMetadata(prompts=told) if is_transfer else StepMetadata(finished=told))

    def finished(self) -> tuple[set[str], set[str]]:
        found: tuple[set[str], set[str]] = set(), set()

        def is_reported() -> bool:
            received, failed = self.receiver.take_finished()
            found[0].update(received)
            found[1].update(failed)
            return bool(received)

        wait_until(is_reported)
        return found

    def close(self) -> None:
        for role in (*self.senders, self.receiver):
            role.shutdown()
        self.listener.close()


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Workers]:
    made = Workers(monkeypatch, tmp_path)
    yield made
    made.close()


def arrived(workers: Workers) -> bool:
    sent = np.concatenate([rank.cache[SOURCE_IDS] for rank in workers.sources], axis=1)
    return np.array_equal(workers.target.cache[TARGET_IDS], sent)


def test_a_rank_of_a_draining_engine_refuses_announcements_by_that_reason(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    workers.step(workers.senders, StepMetadata(refused_transfers=["x"]))
    workers.announce()
    assert workers.finished() == ({"r"}, {"r"})
    assert "[draining]" in caplog.text
    assert "to another prefill engine" in caplog.text


@pytest.mark.parametrize("is_announced_first", [True, False])
def test_a_prompt_of_another_adapter_is_not_written_and_both_logs_say_why(
    is_announced_first: bool, workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of it is written, in whichever order the two engines come to know of each other."""
    before = workers.target.cache.copy()
    steps = [lambda: workers.announce(adapter="d" * 32), lambda: workers.compute(END, Adapter("sql", "f" * 32))]
    for step in steps if is_announced_first else reversed(steps):
        step()
    assert workers.finished() == ({"r"}, {"r"})
    told = f"the adapter 'sql' has other weights on each engine: prefill has '{'f' * 32}', decode has '{'d' * 32}'"
    for line in ("failed to load r", " to d/0 failed"):
        assert any(line in each and told in each and "[adapter-mismatch]" in each for each in caplog.messages), line
    assert np.array_equal(workers.target.cache, before)
    workers.announce("again", adapter="f" * 32)
    assert workers.finished() == ({"again"}, set())


def test_a_load_that_ends_while_the_engine_is_paused_for_new_weights_fails(workers: Workers) -> None:
    """The engine collects nothing while it is paused: the load is done, and its prompt is of the former weights."""
    workers.announce()
    workers.compute(END)
    wait_until(lambda: len(workers.receiver._rank.executor._results))
    workers.step([workers.receiver], StepMetadata(outdated=["r"]))
    assert workers.finished() == ({"r"}, {"r"})
    workers.announce()
    assert workers.receiver._outdated == set(), "a later load under this id is another one"


def test_ranks_of_all_engines_of_a_host_share_a_range_of_ports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    taken = Server(HOST, 0, lambda _: Noted(EPOCH))
    ports = range(taken.port, taken.port + 50)
    workers = Workers(monkeypatch, tmp_path, rank_ports=f"{ports[0]}-{ports[-1]}")
    try:
        roles = [*workers.senders, workers.receiver]
        entries = [decode_rank_entry(role.get_handshake_metadata().entry) for role in roles]
        found = [entry.answers_at.port for entry in entries]
        assert len(set(found)) == 3
        assert set(found) <= set(ports) - {taken.port}
        workers.announce()
        workers.compute(END)
        assert workers.finished() == ({"r"}, set())
        assert arrived(workers)
        with pytest.raises(HandoffError, match=f"each port from {taken.port} to {taken.port} is in use"):
            workers._role(monkeypatch, "other", Rank(0, 1), rank_ports=f"{taken.port}-{taken.port}")
    finally:
        workers.close()
        taken.close()


def test_the_secret_of_reports_is_in_no_log_of_a_failed_step() -> None:
    orders = StepMetadata(engine=EngineEndPoint(EndPoint(HOST, 1, 7), b"unguessable"))
    assert HOST in prepare_object_to_dump(orders)
    assert "unguessable" not in prepare_object_to_dump(orders)


def test_a_prompt_in_chunks_is_received_once_all_ranks_have_written(workers: Workers) -> None:
    workers.announce()
    for num_final in (BLOCK_SIZE + 1, END):
        assert workers.receiver.take_finished() == (set(), set())
        workers.compute(num_final)
    assert workers.finished() == ({"r"}, set())
    assert arrived(workers)
    # The senders report to their receivers, not to their own engine.
    assert [role.take_finished() for role in workers.senders] == [(set(), set())] * 2


@pytest.mark.parametrize("integrity", ["auto", "sample", "full"])
def test_a_written_block_that_never_arrived_fails_the_request(
    integrity: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The transport loses the last source's part of one block; the request after the next write is right."""
    workers = Workers(monkeypatch, tmp_path, integrity=integrity)
    note, lost = destination.AwaitedLoad._note_written, [TARGET_IDS[1]]

    def lose(job: Any, load: Any, event: Any) -> None:
        if event.source_index == 1:
            columns = workers.target.cache.shape[1] // 2
            workers.target.cache[lost, columns:] = 0
        note(job, load, event)

    monkeypatch.setattr(destination.AwaitedLoad, "_note_written", lose)
    try:
        workers.announce()
        workers.compute(END)
        assert workers.finished() == ({"r"}, {"r"})
        assert "[integrity-mismatch]" in caplog.text
        assert f"block {TARGET_IDS[1]}: the bytes that arrived are not those of rank tp 1/2" in caplog.text
        lost.clear()
        workers.announce("s")
        assert workers.finished() == ({"s"}, set())
        statistics = workers.receiver.take_statistics().data
        assert statistics["failures"] == {"integrity-mismatch": 1}
        [compared], [moved] = statistics["compared_bytes"], statistics["bytes"]
        assert compared == moved if integrity == "full" else 0 < compared < moved
    finally:
        workers.close()


@pytest.mark.parametrize(("prefill", "decode"), [("off", "sample"), ("sample", "full"), ("off", "auto")])
def test_writes_of_an_engine_that_has_fewer_digests(
    prefill: str, decode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Refused, but where nobody has asked for digests: an engine may have none."""
    workers = Workers(monkeypatch, tmp_path, integrity=prefill, decode_integrity=decode)
    try:
        workers.announce()
        workers.compute(END)
        assert workers.finished() == ({"r"}, set() if decode == "auto" else {"r"})
        assert ("is not compared: the engine computes no digests" in caplog.text) == (decode == "auto")
        assert (f'"integrity": "{decode}", the prefill engine "{prefill}"' in caplog.text) == (decode != "auto")
    finally:
        workers.close()


def test_a_write_of_numbers_that_have_no_digests_compares_nothing_by_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The engines say so, and do not refuse each request."""
    monkeypatch.setattr(digests, "_ITEM_SIZES", (1, 2))
    workers = Workers(monkeypatch, tmp_path)
    try:
        workers.announce()
        workers.compute(END)
        assert workers.finished() == ({"r"}, set())
        assert "nothing is compared" in caplog.text
        assert workers.receiver.take_statistics().data["compared_bytes"] == [0]
    finally:
        workers.close()


def test_a_prompt_is_written_between_engines_with_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every rank's end point has the keys: the handshake, introductions, announcements and reports are encrypted."""
    workers = Workers(monkeypatch, tmp_path, str(make_keys(tmp_path / "keys").folder))
    try:
        assert all(role._source._end_point.server._keys is not None for role in workers.senders)
        workers.announce()
        workers.compute(END)
        assert workers.finished() == ({"r"}, set())
        assert arrived(workers)
    finally:
        workers.close()


def test_llm_d_2368_both_engines_log_a_line_per_request_and_rank_and_the_sender_one_per_step(workers: Workers) -> None:
    workers.announce()
    workers.compute(END)
    assert workers.finished() == ({"r"}, set())
    wait_until(lambda: not any(role._rank.executor._active for role in workers.senders))
    workers.step(workers.senders, StepMetadata())
    assert [role.take_finished() for role in workers.senders] == [(set(), set())] * 2
    [line] = lines(workers.folder / "d.rank0")
    assert line["request_id"] == "r"
    assert line["events"]["committed_at"] > max(line["events"]["announced_at"].values())
    assert list(line["phases"]) == ["find", "announce", "post", "move", "confirm", "next_step"]
    assert sum(line["phases"].values()) - line["phases"]["next_step"] == pytest.approx(line["wait_seconds"])
    assert line["phases"]["next_step"] > 0
    assert line["transport"] == "cma"
    statistics = workers.receiver.take_statistics().data
    assert statistics["phase_seconds"] == {f"{phase},cma": [seconds] for phase, seconds in line["phases"].items()}
    assert statistics["compare_seconds"] == [line["compare_seconds"]]
    for tp_rank in (0, 1):
        step, sent = sorted(lines(workers.folder / f"p.rank{tp_rank}"), key=lambda line: "write" in line)
        [batch] = sent["events"]["batches"]
        assert (sent["events"]["transfer_id"], sent["rank"], sent["error"]) == ("x", tp_rank, None)
        assert (sent["bytes"], sent["descriptors"]) == (batch["bytes"], batch["descriptors"])
        [span] = batch["spans"]
        assert (span["tokens"], span["layers"]) == ([0, 3 * BLOCK_SIZE], [])
        assert (step["rank"], step["prompts"], step["ran_at"]) == (tp_rank, {"x": 3 * BLOCK_SIZE}, {})
        assert step["step_began_at"] <= step["step_ended_at"] <= batch["posted_at"] <= batch["landed_at"]
    found = find(open_logs([workers.folder / name for name in ("d.rank0", "p.rank0", "p.rank1")]), Wanted("r", 1))
    assert [(each.records, each.broken) for each in found.lines.values()] == [(1, 0), (2, 0), (2, 0)]
    assert (found.num_pairs, len(found.alignment.clocks)) == (2, 1)


def lines(path: Path) -> list[Any]:
    return [json.loads(text) for text in path.read_text().splitlines()]


@pytest.mark.parametrize("use_ubatching", [False, True])
def test_layers_of_states_and_of_micro_batches_report_nothing(
    use_ubatching: bool, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    role = workers.receiver
    names = [["m.layers.10.attn", "m.layers.9.attn"], ["m.layers.1"]]
    kinds = [SimpleNamespace(kind=CacheKind.ATTENTION), SimpleNamespace(kind=CacheKind.STATE)]
    monkeypatch.setattr(worker_role, "group_shapes", lambda _: kinds)
    role._kv_cache_config.kv_cache_groups = [SimpleNamespace(layer_names=each) for each in names]
    role._vllm_config.parallel_config.use_ubatching = use_ubatching
    layers = role._layers_that_report()
    assert layers == ({} if use_ubatching else {"0": ["m.layers.9.attn", "m.layers.10.attn"]})


def test_an_announcement_after_the_prompt_catches_up(workers: Workers) -> None:
    workers.compute(END)
    workers.announce()
    assert workers.finished() == ({"r"}, set())
    assert arrived(workers)


def test_trap_2_blocks_are_announced_only_when_what_clears_them_is_done(workers: Workers) -> None:
    """New blocks are zeroed at the begin of the step that orders the load, on a GPU perhaps after the call returned."""
    cleared = threading.Event()
    mark = SimpleNamespace(is_over=cleared.is_set, wait=cleared.wait)
    workers.receiver._order = SimpleNamespace(is_immediate=False, mark=lambda: mark)
    workers.compute(END)
    workers.announce()
    time.sleep(0.3)
    assert workers.receiver.take_finished() == (set(), set())
    assert not workers.target.cache.any()
    cleared.set()
    assert workers.finished() == ({"r"}, set())
    assert arrived(workers)


def test_a_prompt_that_one_rank_gives_up_fails(workers: Workers) -> None:
    workers.announce()
    workers.compute(BLOCK_SIZE)
    workers.step(workers.senders[1:], StepMetadata(ended_transfers=["x"]))
    assert workers.finished() == ({"r"}, {"r"})


def test_a_rank_whose_load_fails_releases_a_routers_transfer(workers: Workers) -> None:
    """VLLM fails a request when all of its ranks have ended: others would wait for a prompt that nobody takes."""
    workers.announce(seconds=0.2)
    assert workers.finished() == ({"r"}, {"r"})
    wait_until(lambda: workers.released == [Release(EPOCH, (TRANSFER,))])


@pytest.fixture
def holding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Workers]:
    """Workers of engines for which a router sends the prefill engine's answer on."""
    made = Workers(monkeypatch, tmp_path, handle=HOLD, integrity="full")
    yield made
    made.close()


def test_a_held_prompt_is_written_and_its_blocks_stay_as_they_were(holding: Workers) -> None:
    """A hold serves each load until it ends."""
    holding.compute(END)
    for request_id in ("r", "again"):
        holding.target.cache[:] = 0
        holding.announce(request_id)
        assert holding.finished() == ({request_id}, set())
        assert arrived(holding)


def test_a_prompt_that_earlier_steps_have_computed_is_written(holding: Workers) -> None:
    prompt = Prompt(3 * BLOCK_SIZE, "prompt", {GROUP: BlockList(0, SOURCE_IDS)}, END)
    holding.step(holding.senders, StepMetadata(held=[(holding.transfer_id, prompt)]))
    holding.announce()
    assert holding.finished() == ({"r"}, set())
    assert arrived(holding)


def test_no_step_of_either_engine_lies_between_an_announcement_and_its_commit(
    holding: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dynamo#13327: two steps and a round trip more for each prompt. The loading engine's next step finds all done."""
    holding.compute(END)
    holding.announce()

    def refuse(*_: Any) -> None:
        raise AssertionError("a step")

    with monkeypatch.context() as patch:
        for name in ("void_transfers", "begin_step", "end_loads", "finish_step", "take_finished"):
            patch.setattr(worker_role.WorkerRole, name, refuse)
        wait_until(lambda: len(holding.receiver._rank.executor._results))
        assert arrived(holding)
    assert holding.receiver.take_finished() == ({"r"}, set())


@pytest.mark.parametrize("call", ["void_transfers", "begin_step"])
def test_a_step_that_ends_a_hold_ends_its_writes_before_vllm_clears_new_blocks(call: str, holding: Workers) -> None:
    """Blocks of a hold that yields are among them: vLLM calls ``handle_preemptions`` first."""
    holding.compute(END)
    for role in holding.senders:
        getattr(role, call)(StepMetadata(ended_transfers=[holding.transfer_id]))
    holding.announce()
    is_ended = call == "void_transfers"
    assert holding.finished() == ({"r"}, {"r"} if is_ended else set())
    assert holding.target.cache.any() != is_ended


def test_a_hold_that_no_rank_knows_fails_at_once_and_is_not_released_by_a_rank(
    holding: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    """The scheduler releases it, once all ranks have ended."""
    holding.announce()
    assert holding.finished() == ({"r"}, {"r"})
    assert Reason.DEADLINE_EXCEEDED.value not in caplog.text
    assert not holding.target.cache.any()
    time.sleep(0.1)
    assert not holding.released


def test_a_silent_source_does_not_keep_the_request(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host may be gone, or it stopped: the engine keeps the blocks, and the request fails without them."""
    monkeypatch.setattr(executor, "QUIET_SECONDS", 0.1)
    monkeypatch.setattr(peers, "nothing_listens", lambda *_: False)
    monkeypatch.setattr(peers.Peers, "has_ended", lambda *_: is_gone)
    is_gone, reports = False, list[StillWriting]()

    def answer(question: Question) -> Answer:
        assert isinstance(question, StillWriting)
        reports.append(question)
        return Noted(EPOCH)

    engine = Server(HOST, 0, answer)
    orders = {"engine": EngineEndPoint(EndPoint(HOST, engine.port, EPOCH), b"secret")}
    try:
        workers.announce(seconds=0.5)
        wait_until(lambda: any(role._source.writer.destinations.known for role in workers.senders))
        for role in workers.senders:
            monkeypatch.setattr(role._rank.client, "tell", lambda *_: None)
            role._source._end_point.close()
        workers.step([workers.receiver], StepMetadata(**orders))
        wait_until(lambda: bool(reports))
        assert (reports[0].rank, reports[0].number, reports[0].request_ids) == (0, 1, ("r",))
        workers.step([workers.receiver], StepMetadata(**orders, quarantined=[(1, "r")]))
        assert workers.receiver.take_finished(0.1) == (set(), set()), "another rank's"
        workers.step([workers.receiver], StepMetadata(**orders, quarantined=[(0, "r")]))
        assert workers.finished() == ({"r"}, {"r"})
        is_gone = True
        wait_until(lambda: len(reports) == 2)
        assert (reports[1].number, reports[1].request_ids) == (2, ())
        assert workers.receiver.take_finished() == (set(), set())
    finally:
        engine.close()


@pytest.mark.parametrize("is_quiet", [True, False])
def test_an_end_point_closes_only_when_its_rank_writes_no_more(is_quiet: bool) -> None:
    """A destination asks there whether the rank has stopped writing."""
    source = object.__new__(Source)
    source.writer, source._end_point = Mock(is_quiet=is_quiet), Mock()
    source.close()
    assert source._end_point.close.called == is_quiet
    source.writer.close.assert_called_once_with()


def test_fences_are_counted_once(workers: Workers) -> None:
    role = workers.receiver
    assert role.take_statistics() is None
    role._destination.announcer.introductions.registration = 2
    assert role.take_statistics().data["fences"] == 2
    assert role.take_statistics() is None
    role._destination.announcer.introductions.registration = 3
    assert role.take_statistics().data["fences"] == 1


def test_writes_that_failed_are_counted_by_reason(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    role = workers.senders[0]
    results = [JobResult("write", TransportError(Reason.PEER_DIED, "it ended.")), JobResult("write", None)]
    monkeypatch.setattr(role._rank.executor, "collect", lambda seconds: results)
    assert role.take_finished() == (set(), set())
    assert role.take_statistics().data["failed_writes"] == {"peer-died": 1}


def test_a_rank_names_its_process_and_fences_after_half_of_a_loads_time(workers: Workers) -> None:
    entry = decode_rank_entry(workers.senders[0].get_handshake_metadata().entry)
    assert entry.process == own_identity()
    assert workers.receiver._destination.announcer.fence_seconds == Settings().fence_seconds == 60.0


def test_a_rank_of_a_later_stage_names_its_stage_and_its_place_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that plan from the directory take its layers and heads for those of this place."""
    stage = SimpleNamespace(rank_in_group=1)
    rank = Rank(1, 2)
    role = make_worker_role(monkeypatch, Settings(transport="cma"), rank.shard, get_pp_group=stage)
    entry = decode_rank_entry(role.get_handshake_metadata().entry)
    assert (entry.pp_rank, entry.tp_rank) == (1, 1)
    role.shutdown()


def test_the_transfer_thread_runs_on_the_cores_that_do_not_compute_and_reports_to_its_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine keeps the blocks of the transfers that the thread reports as still writing."""
    core = max(os.sched_getaffinity(0))
    free = {"cores_that_do_not_compute": {core}}
    role = make_worker_role(monkeypatch, Settings(transport="cma"), Rank(0, 1).shard, **free)
    executor = role._rank.executor
    assert os.sched_getaffinity(executor._thread.native_id) == {core}
    assert executor._report_still_writing == role._report_still_writing
    role.shutdown()


def test_a_rank_lends_its_cores_to_the_transfer_thread_but_while_its_runner_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every = os.sched_getaffinity(0)
    cores = {"cores_that_do_not_compute": {min(every)}, "cores_that_compute": every - {min(every)}}
    engine = ComputingEngine(monkeypatch, **cores)
    executor = engine.role._rank.executor
    assert executor._all_cores == every
    computes = {"forward": True, "sample": True, "dummy": True, "empty": False}
    assert engine.run() == computes
    assert not executor._num_computing
    engine.role.shutdown()


def test_a_rank_that_computes_on_a_device_leaves_cores_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL binds threads of its own: they would send the transfer thread to the socket far from the device."""
    cores = {"cores_that_do_not_compute": {0}, "cores_that_compute": {1}}
    order = HostOrder()
    order.is_immediate = False
    monkeypatch.setattr("kvferry.integrations.vllm.worker.role.WorkerRole._try", lambda *_: None)
    engine = ComputingEngine(monkeypatch, device_order=order, **cores)
    executor = engine.role._rank.executor
    assert os.sched_getaffinity(executor._thread.native_id) == os.sched_getaffinity(0)
    assert set(engine.run().values()) == {False}
    engine.role.shutdown()


class ComputingEngine(WorkerBase):
    """A rank of vLLM's with a runner that notes whether the transfer thread takes it for computing."""

    def __init__(self, patch: pytest.MonkeyPatch, **replaced: Any) -> None:
        self.model_runner: Any = SimpleNamespace(
            execute_model=lambda output: self._note("forward" if output.total_num_scheduled_tokens else "empty"),
            sample_tokens=lambda grammar: self._note("sample"),
            _dummy_run=lambda num_tokens: self._note("dummy"),
        )
        self._found: dict[str, bool] = {}
        self.role = make_worker_role(patch, Settings(transport="cma"), Rank(0, 1).shard, **replaced)

    def _note(self, what: str) -> None:
        self._found[what] = self.role._rank.executor._num_computing > 0

    def run(self) -> dict[str, bool]:
        for num_tokens in (0, 3):
            self.model_runner.execute_model(SimpleNamespace(total_num_scheduled_tokens=num_tokens))
        self.model_runner.sample_tokens(None)
        self.model_runner._dummy_run(1)
        return self._found


def test_a_rank_that_is_written_to_connects_to_no_source(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sources write: a way from here to them need not exist."""
    connect = Mock(wraps=workers.receiver._transports.connect)
    monkeypatch.setattr(workers.receiver._transports, "connect", connect)
    workers.announce()
    workers.compute(END)
    assert workers.finished() == ({"r"}, set())
    assert arrived(workers)
    assert not connect.called


def test_hole_15_no_transport_is_closed_beside_a_transfer_thread_that_does_not_stop(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A transport is for one thread at a time: the thread hangs in a call of it."""
    role = workers.receiver
    close = role._rank.executor.close
    monkeypatch.setattr(role._rank.executor, "close", lambda: False)
    role.shutdown()
    assert "does not stop" in caplog.text
    assert not role._transports.transports["cma"]._closed
    monkeypatch.setattr(role._rank.executor, "close", close)
    role.shutdown()
    assert role._transports.transports["cma"]._closed


def test_vllm_ascend_16662_an_aborted_request_is_reported_when_no_rank_writes_any_more(workers: Workers) -> None:
    workers.announce()
    workers.compute(BLOCK_SIZE)
    workers.step([workers.receiver], StepMetadata(aborted=["r"]))
    assert workers.finished() == ({"r"}, {"r"})
    workers.target.cache[:] = 7
    workers.compute(END)
    time.sleep(0.1)
    assert (workers.target.cache == 7).all()


def test_a_prompt_that_never_comes_fails_in_time(workers: Workers, caplog: pytest.LogCaptureFixture) -> None:
    workers.announce(seconds=0.3)
    assert workers.finished() == ({"r"}, {"r"})
    assert Reason.DEADLINE_EXCEEDED.value in caplog.text


def test_a_step_that_fails_vouches_for_nothing() -> None:
    """A connector ends its step in a ``finally`` of vLLM: a receiver must not take for whole what was not computed."""
    worker = Mock()
    connector: Any = object.__new__(KVFerryConnector)
    connector._worker = connector._side = worker
    connector._connector_metadata = StepMetadata()
    connector._idle_steps = IdleSteps()

    def run(step: Callable[[], None]) -> None:
        metadata = SimpleNamespace(
            kv_connector_metadata=StepMetadata(), has_sync_kv_loads=False, finished_req_ids=set[str]()
        )
        with KVConnectorModelRunnerMixin._get_kv_connector_output(metadata):  # type: ignore[arg-type]
            step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_connector_model_runner_mixin, "get_kv_transfer_group", lambda: connector)
        patch.setattr(kv_connector_model_runner_mixin, "get_forward_context", lambda: None)
        worker.take_finished.return_value = (set(), set())
        with pytest.raises(ZeroDivisionError):
            run(lambda: divmod(1, 0))  # type: ignore[arg-type]
        assert worker.finish_step.call_count == 0
        run(lambda: None)
        assert worker.finish_step.call_count == 1


@pytest.mark.parametrize("computes", [True, False])
def test_only_a_step_that_computes_nothing_waits_for_what_moves(computes: bool) -> None:
    worker = Mock()
    connector: Any = object.__new__(KVFerryConnector)
    connector._worker = connector._side = worker
    connector._connector_metadata = StepMetadata(computes=computes)
    connector._idle_steps = IdleSteps()
    for received in (set(), set(), {"r"}, set()):
        worker.take_finished.return_value = (received, set())
        assert connector.get_transfer_results(set()).finished_recving == received
    waits = [call.args[0] / FIRST_WAIT_SECONDS for call in worker.take_finished.call_args_list]
    assert waits == ([0, 0, 0, 0] if computes else [1, 2, 4, 1])


def recorded(collect: Callable[[], list[Any]], waits: list[float]) -> Callable[[float], list[Any]]:
    return lambda seconds: waits.append(seconds) or collect()  # type: ignore[func-returns-value]


def test_a_step_does_not_wait_where_nothing_moves(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    for role in (workers.receiver, *workers.senders):
        monkeypatch.setattr(role._rank.executor, "collect", recorded(role._rank.executor.collect, waits))
        role.take_finished(5.0)
    assert waits == [0.0] * 3
    workers.announce()
    workers.receiver.take_finished(5.0)
    assert waits[3:] == [5.0]
    for role in workers.senders:
        role.take_finished(5.0)
    assert waits[4:] == [0.0] * 2, "a write is no request that this engine waits for"
    workers.compute(END)
    assert workers.finished() == ({"r"}, set())
    workers.receiver.take_finished(5.0)
    assert waits[-1] == 0.0


def test_a_report_that_the_engine_refuses_is_logged(workers: Workers, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(question: Question) -> Answer:
        raise HandoffError(Reason.PEER_CHANGED, "the report is for another epoch.", "Restart it.")

    engine = Server(HOST, 0, refuse)
    try:
        where = EngineEndPoint(EndPoint(HOST, engine.port, EPOCH), b"secret")
        workers.step([workers.receiver], StepMetadata(engine=where))
        workers.receiver._report_still_writing(frozenset({"r"}))
        expected = "a stillwriting to 127.0.0.1:%d was not acknowledged: the report is for another epoch. Restart it."
        wait_until(lambda: expected % engine.port in caplog.text)
    finally:
        engine.close()


def test_a_source_may_take_as_long_to_answer_as_a_handshake(workers: Workers) -> None:
    announcer = workers.receiver._destination.announcer
    assert announcer._answer_seconds == workers.receiver._settings.handshake_timeout_seconds


def test_a_rank_may_write_and_be_written_to_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Reports of its writes do not take the answers to its announcements."""
    workers = Workers(monkeypatch, tmp_path)
    back = Server(HOST, 0, lambda _: Directory(PROTOCOL_VERSION, "d", EPOCH, IDENTITY, (entry,)))
    try:
        entry = decode_rank_entry(workers.receiver.get_handshake_metadata().entry)
        hold = RemoteHold("d", EPOCH, HOST, back.port, Handle("y", 0))
        for number in range(6):
            workers.announce(f"r{number}")
            # Not those that the same ranks write.
            blocks = (whole_blocks(GROUP, [0], [TARGET_IDS[number % 3]]),)
            order = PromptLoad(
                f"s{number}", SECONDS, hold, BLOCK_SIZE, blocks, announced=AnnouncedPrompt("y", 4, "prompt")
            )
            workers.step(workers.senders, StepMetadata(loads=[order]))
        prompt = Prompt(BLOCK_SIZE, "prompt", {GROUP: BlockList(0, [5])}, END)
        workers.step([workers.receiver], StepMetadata(prompts=[("y", prompt)]))
        workers.compute(END)
        roles, ended = [*workers.senders, workers.receiver], [set[str]() for _ in range(3)]

        def all_ended() -> bool:
            for role, names in zip(roles, ended, strict=True):
                received, failed = role.take_finished()
                assert not failed
                names |= received
            return [len(names) for names in ended] == [6] * 3

        wait_until(all_ended)
    finally:
        back.close()
        workers.close()
