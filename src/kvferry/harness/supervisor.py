"""Runs one command and ends all of its processes when the owner stops it or dies.

:mod:`child_process` starts ``python supervisor.py GRACE_SECONDS SCRATCH COMMAND...`` once per command. Standard input
is a pipe from the owner: end of file means that the owner stopped the command or died, by ``SIGKILL`` too. The
supervisor adopts orphans (``PR_SET_CHILD_SUBREAPER``), so that it also ends the workers of a crashed engine, and
removes the folder ``SCRATCH`` (their ``TMPDIR``) and their shared memory. It needs the standard library only and starts
in about 20 ms.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.02
SHARED_MEMORY = Path("/dev/shm")  # nosec B108 # only what ended children left is removed there
# Segments of multiprocessing, and of vLLM's tensor-parallel ranks on a CPU, which vLLM itself does not remove.
SEGMENT_PREFIXES = ("psm_", "vllm_dist_")


class Command(Protocol):
    """The child of this process; both methods return its exit status, or minus the signal that ended it."""

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status, or 128 plus the signal that ended it."""
    grace_seconds, scratch, command = float(arguments[0]), Path(arguments[1]), arguments[2:]
    libc = ctypes.CDLL(None)

    def start() -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )

    return supervise(grace_seconds, scratch, start)


def supervise(grace_seconds: float, scratch: Path, start: Callable[[], Command]) -> int:
    """Start a child, which ends with this process, as :func:`main` runs its command."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _forget_owner)
    wakeup, notify = os.pipe()
    os.set_blocking(notify, False)
    signal.set_wakeup_fd(notify, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    child = start()
    _wait_for_end(child, wakeup)
    segments = mapped_segments(living_descendants(os.getpid()))
    end_family(grace_seconds)
    remove_leftovers(scratch, segments)
    status = child.wait()
    return status if status >= 0 else 128 - status


def _forget_owner(_number: int, _frame: object) -> None:
    """Handle a signal like the end of the owner."""
    with contextlib.suppress(OSError):
        os.close(0)


def _wait_for_end(child: Command, wakeup: int) -> None:
    while child.poll() is None:
        try:
            readable, _, _ = select.select([0, wakeup], [], [])
        except OSError:  # standard input was closed by a signal
            return
        if 0 in readable and not os.read(0, 1):
            return
        if wakeup in readable:
            os.read(wakeup, 4096)


def end_family(grace_seconds: float) -> None:
    """End every descendant, of any process group: SIGTERM, then after ``grace_seconds`` SIGKILL."""
    deadline = time.monotonic() + grace_seconds
    _signal_descendants(signal.SIGTERM)
    while living_descendants(os.getpid()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    while _signal_descendants(signal.SIGKILL):
        time.sleep(POLL_SECONDS)


def _signal_descendants(number: signal.Signals) -> int:
    """Send a signal to every living descendant; return their number."""
    descendants = living_descendants(os.getpid())
    for process_id in descendants:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, number)
    return len(descendants)


def mapped_segments(process_ids: Iterable[int]) -> set[str]:
    """Return the names of the shared memory segments that the processes have mapped."""
    names = set()
    for process_id in process_ids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process_id}/maps").read_text().splitlines():
                name = line.partition(f"{SHARED_MEMORY}/")[2]
                if name.startswith(SEGMENT_PREFIXES):
                    names.add(name.removesuffix(" (deleted)"))
    return names


def remove_leftovers(scratch: Path, segments: Iterable[str]) -> None:
    """Remove the command's temporary folder and its shared memory. Twice is fine.

    vLLM names the segments of its ranks after a file in the folder, so they are found even after the processes' end.
    """
    named_after = [path.name for path in scratch.glob("vllm_dist_*")]
    segments = {*segments, *(path.name for name in named_after for path in SHARED_MEMORY.glob(f"{name}-*"))}
    for segment in segments:
        (SHARED_MEMORY / segment).unlink(missing_ok=True)
    shutil.rmtree(scratch, ignore_errors=True)


def living_descendants(ancestor_id: int) -> list[int]:
    """Return the living descendants of a process, of any process group."""
    family = [ancestor_id]
    for process_id in family:
        for children in Path(f"/proc/{process_id}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                family.extend(int(child) for child in children.read_text().split())
    return [process_id for process_id in family[1:] if not is_dead(process_id)]


def is_dead(process_id: int) -> bool:
    """Return whether the process has ended or is a zombie."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
