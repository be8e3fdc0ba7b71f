"""The replacement of the yield in vLLM's message queues, and who asks for it."""

import resource
from pathlib import Path

import pytest
import zmq

from kvferry.errors import Reason, SettingsError
from kvferry.integrations.vllm.waiting_workers import VARIABLE, make_waits_sleep

shm_broadcast = pytest.importorskip("vllm.distributed.device_communicators.shm_broadcast")
NUM_WAITS = 200


def voluntary_switches_of_waits(context: zmq.Context[zmq.Socket[bytes]], address: str) -> int:
    """Wait as a reader of vLLM's queue does; return how often the process gave its core away to sleep."""
    condition = shm_broadcast.SpinCondition(is_reader=True, context=context, notify_address=address)
    try:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        condition.record_read()
        for _ in range(NUM_WAITS):
            condition.wait()
        return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before
    finally:
        for each in (condition.local_notify_socket, condition.write_cancel_socket, condition.read_cancel_socket):
            each.close(0)


@pytest.mark.parametrize("value", ["1", "0", None])
def test_a_reader_sleeps_between_looks_where_the_variable_is_set(
    value: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed import utils

    for module in (shm_broadcast, utils):
        monkeypatch.setattr(module, "sched_yield", module.sched_yield)
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    make_waits_sleep()
    with zmq.Context() as context:
        switches = voluntary_switches_of_waits(context, f"ipc://{tmp_path}/notify")
    # A wait that is preempted just before it would sleep is not counted.
    assert (switches > NUM_WAITS // 2) == (value == "1")


def test_an_unknown_value_is_refused_with_those_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(SettingsError, match=f"{VARIABLE} is 'yes'. Set it to 1") as found:
        make_waits_sleep()
    assert found.value.reason is Reason.INVALID_SETTING
