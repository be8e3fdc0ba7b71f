"""Children end with their owner, however it ends, and leave nothing behind."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvferry.errors import Reason
from kvferry.harness.child_process import ChildProcess, group_processes, stop_all
from kvferry.harness.launch import LaunchError, Server, free_port, start_router, wait_until_ready
from kvferry.harness.supervisor import is_dead, living_descendants

# A command with a child and a grandchild; with "stubborn" all three ignore SIGTERM.
FAMILY = """
import os, signal, sys, time
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "own-group" in sys.argv:
    grandchild = os.fork() or os.setpgid(0, 0)
for _ in range(2):
    if os.fork() == 0:
        break
print("started", flush=True)
time.sleep(600)
"""
OWNER = """
import sys, time
from pathlib import Path
from kvferry.harness.child_process import ChildProcess
child = ChildProcess.start("family", [sys.executable, "-c", *sys.argv[2:]], Path(sys.argv[1]))
print(child.supervisor.pid, child.scratch, flush=True)
time.sleep(600)
"""


def wait_for(condition, seconds: float = 10.0) -> bool:
    """Return whether ``condition`` came true in time."""
    deadline = time.monotonic() + seconds
    while not (result := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(result)


def start_family(folder: Path, *options: str, grace_seconds: float = 0.3) -> ChildProcess:
    log = folder / "family.log"
    child = ChildProcess.start("family", [sys.executable, "-c", FAMILY, *options], log, grace_seconds=grace_seconds)
    assert wait_for(lambda: log.read_text().count("started") >= 3)
    return child


@pytest.mark.parametrize("options", [(), ("stubborn",), ("own-group",)])
def test_stop_ends_the_whole_family(tmp_path: Path, options: tuple[str, ...]) -> None:
    child = start_family(tmp_path, *options)
    family = child.process_ids()
    assert len(family) >= 3
    assert {os.getsid(member) for member in family} == {os.getsid(0)}, "Linux shares out cores between sessions first"
    assert (len({os.getpgid(member) for member in family}) > 1) == ("own-group" in options)
    child.stop()
    assert all(map(is_dead, family))
    assert group_processes(child.supervisor.pid) == ()
    assert child.exit_status() is not None
    assert not child.scratch.exists()
    child.stop()


@pytest.mark.parametrize("option", ["plain", "own-group"])
def test_kill_does_not_wait_for_the_grace_period(tmp_path: Path, option: str) -> None:
    child = start_family(tmp_path, "stubborn", option, grace_seconds=60.0)
    family, began_at = child.process_ids(), time.monotonic()
    child.kill()
    assert child.process_ids() == ()
    assert all(map(is_dead, family))
    assert time.monotonic() - began_at < 5.0


@pytest.mark.parametrize("option", ["plain", "own-group"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_family_ends_when_the_owner_is_killed(tmp_path: Path, number: signal.Signals, option: str) -> None:
    log = tmp_path / "family.log"
    command = [sys.executable, "-c", OWNER, str(log), FAMILY, option]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        supervisor_id, scratch = owner.stdout.readline().split()
        assert wait_for(lambda: log.read_text().count("started") >= 3)
        family = living_descendants(int(supervisor_id))
        assert len(family) >= 3
        owner.send_signal(number)
        owner.wait(10)
        assert wait_for(lambda: all(map(is_dead, family)))
        assert wait_for(lambda: group_processes(int(supervisor_id)) == ())
        assert not Path(scratch).exists()
    finally:
        owner.kill()


@pytest.mark.parametrize("option", ["plain", "own-group"])
def test_orphans_of_a_crashed_command_are_ended(tmp_path: Path, option: str) -> None:
    child = start_family(tmp_path, option)
    family = child.process_ids()
    command_id = min(family)
    os.kill(command_id, signal.SIGKILL)
    assert wait_for(lambda: child.exit_status() is not None)
    assert child.exit_status() == 128 + signal.SIGKILL
    assert all(map(is_dead, family))
    assert group_processes(child.supervisor.pid) == ()


def test_shared_memory_of_the_family_is_removed(tmp_path: Path) -> None:
    # Like vLLM's ranks: a segment named after a file in the temporary folder, and no process that has it mapped.
    name = f"vllm_dist_test{os.getpid()}"
    segment = Path("/dev/shm") / f"{name}-tp-0"
    program = (
        f"import os, pathlib, time; pathlib.Path(os.environ['TMPDIR'], '{name}').touch()\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    segment.write_bytes(b"left")
    log = tmp_path / "child.log"
    with contextlib.closing(segment.open("rb")), ChildProcess.start("child", [sys.executable, "-c", program], log):
        assert wait_for(lambda: "ready" in log.read_text())
    assert not segment.exists()


def test_mapped_segments_are_removed_after_a_kill(tmp_path: Path) -> None:
    program = (
        "import time; from multiprocessing.shared_memory import SharedMemory\n"
        "segment = SharedMemory(create=True, size=4096); print(segment.name, flush=True); time.sleep(600)"
    )
    log = tmp_path / "child.log"
    child = ChildProcess.start("child", [sys.executable, "-c", program], log)
    assert wait_for(lambda: log.read_text().endswith("\n"))
    segment = Path("/dev/shm") / log.read_text().strip()
    assert segment.exists()
    child.kill()
    assert not segment.exists()


def test_stop_all_stops_at_the_same_time(tmp_path: Path) -> None:
    folders = [tmp_path / str(index) for index in range(3)]
    for folder in folders:
        folder.mkdir()
    children = [start_family(folder, "stubborn", grace_seconds=2.0) for folder in folders]
    began_at = time.monotonic()
    stop_all(children)
    assert time.monotonic() - began_at < 5.5
    assert not any(child.process_ids() for child in children)


def test_a_server_that_ends_is_reported_with_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"]
    child = ChildProcess.start("engine", command, tmp_path / "engine.log")
    with pytest.raises(LaunchError, match=r"engine ended with exit status 3(.|\n)*the reason") as caught:
        wait_until_ready([Server(child, "http://127.0.0.1:9", time.monotonic())])
    assert caught.value.reason is Reason.PEER_DIED


def test_a_server_that_is_never_ready_is_reported(tmp_path: Path) -> None:
    seen = []
    child = ChildProcess.start(
        "engine", [sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "engine.log"
    )
    server = Server(child, f"http://127.0.0.1:{free_port()}", time.monotonic())
    with server, pytest.raises(LaunchError, match="not ready") as caught:
        wait_until_ready([server], timeout_seconds=0.3, on_progress=lambda name, seconds: seen.append(name))
    assert caught.value.reason is Reason.DEADLINE_EXCEEDED
    assert set(seen) == {"engine"}
    assert child.process_ids() == ()


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(LaunchError) as caught:
        start_router([], [], tmp_path, port=listener.getsockname()[1])
    assert caught.value.reason is Reason.PORT_IN_USE
    assert list(tmp_path.iterdir()) == []
