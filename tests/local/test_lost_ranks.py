"""An engine that has lost a rank is ended; one that shuts down is let alone."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

import pytest

from kvferry.integrations.vllm.engine_core import RankMonitor

SECONDS = 10.0


def sleep_until_killed() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    time.sleep(60)


@pytest.fixture
def ranks() -> Iterator[list[BaseProcess]]:
    context = multiprocessing.get_context("fork")
    found: list[BaseProcess] = [context.Process(target=sleep_until_killed, daemon=True) for _ in range(3)]
    for rank in found:
        rank.start()
    yield found
    for rank in found:
        rank.kill()
        rank.join()


def test_hole_11_one_rank_is_killed_and_the_others_follow(ranks: list[BaseProcess]) -> None:
    monitor = RankMonitor(ranks)
    assert ranks[1].pid is not None
    os.kill(ranks[1].pid, signal.SIGKILL)
    began_at = time.monotonic()
    for rank in ranks:
        rank.join(SECONDS)
        assert rank.exitcode == -signal.SIGKILL
    assert time.monotonic() - began_at < SECONDS / 2
    monitor.close()
    monitor.close()


def test_a_rank_that_exits_by_itself_is_a_shutdown(ranks: list[BaseProcess]) -> None:
    leaving: BaseProcess = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0.1,), daemon=True)
    leaving.start()
    monitor = RankMonitor([leaving, *ranks])
    leaving.join(SECONDS)
    assert leaving.exitcode == 0
    time.sleep(0.3)
    assert all(rank.is_alive() for rank in ranks)
    monitor.close()


@pytest.mark.parametrize("status", [1, 255])
def test_one_rank_exits_with_an_error_and_the_others_are_killed(
    status: int, ranks: list[BaseProcess], caplog: pytest.LogCaptureFixture
) -> None:
    failing: BaseProcess = multiprocessing.get_context("fork").Process(target=os._exit, args=(status,), daemon=True)
    failing.start()
    monitor = RankMonitor([*ranks, failing])
    for rank in ranks:
        rank.join(SECONDS)
        assert rank.exitcode == -signal.SIGKILL
    monitor.close()
    assert f"a rank of this engine has exited with status {status}" in caplog.text


def test_a_rank_that_fails_while_vllm_ends_the_ranks_ends_no_other(
    ranks: list[BaseProcess], caplog: pytest.LogCaptureFixture
) -> None:
    """They have a few seconds to close what they have opened; vLLM ends them before it closes the connector."""
    failing: BaseProcess = multiprocessing.get_context("fork").Process(target=os._exit, args=(1,), daemon=True)
    failing.start()
    monitor = RankMonitor([*ranks, failing], ends_ranks=lambda: True)
    failing.join(SECONDS)
    time.sleep(0.3)
    assert all(rank.is_alive() for rank in ranks)
    monitor.close()
    assert not caplog.messages


def test_a_closed_monitor_kills_nobody(ranks: list[BaseProcess]) -> None:
    RankMonitor(ranks).close()
    ranks[0].kill()
    ranks[0].join(SECONDS)
    time.sleep(0.3)
    assert all(rank.is_alive() for rank in ranks[1:])
