"""A request that waits for a disk read: in vLLM's own scheduler, with the disk tier and its threads."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvferry.tiers.disk.segments import SegmentFiles
from kvferry.tiers.local_disk import LocalDisk

from .offload_engine import Engine, prompt_of
from .test_offload_requests import PROMPT, configs, in_slab, make_engine, seen_before  # noqa: F401

# ruff: noqa: F811


@dataclass
class SlowDisk:
    """An engine whose disk alone has the blocks of ``PROMPT``, and whose disk reads wait for ``may_read``."""

    engine: Engine
    has_begun: threading.Event
    may_read: threading.Event

    def step_beside_others(self) -> None:
        """Let a request wait for the disk, and run another one to its end meanwhile."""
        engine = self.engine
        waits = engine.add("waits", PROMPT)
        engine.add("other", prompt_of(9), max_tokens=20)
        for _ in range(40):
            engine.now += 0.01
            engine.step()
        assert self.has_begun.wait(60.0)
        assert engine.finished.keys() >= {"other"}
        assert (waits.num_computed_tokens, waits.is_finished()) == (0, False)

    def settle(self) -> None:
        """Let the disk read, and step until nothing is under way."""
        self.may_read.set()
        self.engine.run(3000)
        for _ in range(3000):
            if not self.engine.role.has_pending_work():
                return
            time.sleep(0.001)
            self.engine.step(is_forced=True)


@pytest.fixture
def slow_disk(
    make_engine: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SlowDisk]:
    # Threads that wait here for long are no disk that hangs.
    monkeypatch.setitem(LocalDisk.__init__.__kwdefaults__, "stall_seconds", 120.0)  # type: ignore[index]
    engine = make_engine(
        num_blocks=40, host_blocks=12, disk_path=str(tmp_path / "disk"), disk_bytes=1 << 20, load_wait_seconds=60.0
    )
    found = SlowDisk(engine, threading.Event(), threading.Event())
    found.may_read.set()
    seen_before(engine)
    found.settle()
    assert in_slab(engine, 0, PROMPT) == [False] * 6
    found.may_read.clear()
    read = SegmentFiles.read

    def read_late(*arguments: Any) -> None:
        found.has_begun.set()
        assert found.may_read.wait(60.0)
        read(*arguments)

    monkeypatch.setattr(SegmentFiles, "read", read_late)
    yield found
    found.may_read.set()


def test_others_go_on_while_a_request_waits_for_the_disk(slow_disk: SlowDisk) -> None:
    """And then the request loads all of what it waited for, the last token computed."""
    slow_disk.step_beside_others()
    slow_disk.settle()
    engine = slow_disk.engine
    assert (engine.loaded["waits"], engine.computed["waits"]) == (96, 1)
    assert engine.state()["counts"]["asked_again"] > 20
    engine.check_at_rest()


def test_nothing_stays_pinned_of_a_request_that_is_aborted_while_it_waits_for_the_disk(slow_disk: SlowDisk) -> None:
    slow_disk.step_beside_others()
    engine = slow_disk.engine
    engine.abort("waits")
    state = engine.state()
    assert (state["promised"], state["requests"], state["tiers"]["requests"]) == (0, 0, {})
    disk = state["tiers"]["lower"]["local_disk"]
    assert disk["promotions"], "the read goes on"
    assert state["tiers"]["host_memory"]["num_loads"] == len(disk["writes"]), "of the other request's blocks"
    slow_disk.settle()
    engine.check_at_rest()
    engine.add("again", PROMPT)
    engine.run(3000)
    assert engine.loaded["again"] == 96
    engine.check_at_rest()


def test_a_request_that_joins_another_one_s_wait_loads_after_that_one_s_abort(slow_disk: SlowDisk) -> None:
    """The second waits for the promotion that the first has asked for."""
    slow_disk.step_beside_others()
    engine = slow_disk.engine
    engine.add("joins", PROMPT)
    for _ in range(3):
        engine.step()
    engine.abort("waits")
    slow_disk.settle()
    assert (engine.loaded["joins"], engine.computed["joins"]) == (96, 1)
    engine.check_at_rest()
