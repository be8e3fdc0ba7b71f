"""Child processes that end with their owner, with a log file and a bounded time to end."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from kvferry.errors import KVFerryError, Reason
from kvferry.harness.supervisor import living_descendants, mapped_segments, remove_leftovers

SUPERVISOR = Path(__file__).with_name("supervisor.py")
GRACE_SECONDS = 5.0
KILL_SECONDS = 5.0
TRIAL_SECONDS = 180.0
TAIL_LINES = 20


class LaunchError(KVFerryError):
    """A child process could not start, ended early, or was not ready in time."""


@dataclass(slots=True)
class ChildProcess:
    """A command in its own process group, below a supervisor.

    The command has no session of its own: Linux divides a core between sessions first (autogroups), and gave all of a
    core to a session whose workers yield in a loop, see docs/decisions/sleeping-workers.md.

    The command and all of its processes end when :meth:`stop` or :meth:`kill` is called, when the command ends, and
    when the owner ends for any reason. ``log_path`` is the file of standard output and error; ``scratch`` is the
    folder of temporary files, which is removed at the end.
    """

    name: str
    log_path: Path
    scratch: Path
    supervisor: "subprocess.Popen[bytes]"
    _paused: tuple[int, ...] = field(default=(), init=False)

    @classmethod
    def start(
        cls,
        name: str,
        command: Sequence[str],
        log_path: Path,
        environment: Mapping[str, str] | None = None,
        grace_seconds: float = GRACE_SECONDS,
    ) -> Self:
        """Start ``command`` with the owner's environment, updated by ``environment``."""
        scratch = Path(tempfile.mkdtemp(prefix="kvferry-"))
        with log_path.open("wb") as log:
            supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", str(SUPERVISOR), str(grace_seconds), str(scratch), *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {}), "TMPDIR": str(scratch)},
                process_group=0,
            )
        return cls(name, log_path, scratch, supervisor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def exit_status(self) -> int | None:
        """Return the command's exit status (128 plus the number of a signal), or None while it runs."""
        return self.supervisor.poll()

    def process_ids(self) -> tuple[int, ...]:
        """Return the ids of all living processes of the command, without the supervisor."""
        own = self.supervisor.pid
        # A process may have left the group. After the supervisor's end another process may have its id.
        below = living_descendants(own) if self.supervisor.poll() is None else []
        return tuple(sorted({*group_processes(own), *below} - {own}))

    def pause(self) -> None:
        """Stop all processes of the command where they are, so that they take no core from another's."""
        self._paused = self.process_ids()
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the paused processes go on. Twice is fine."""
        self._signal(signal.SIGCONT)
        self._paused = ()

    def _signal(self, number: signal.Signals) -> None:
        for process_id in self._paused:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, number)

    def log_tail(self) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-TAIL_LINES:])

    def request_stop(self) -> None:
        """Ask the command to end, without waiting, so that several children can end at the same time."""
        if self.supervisor.stdin is not None:
            self.supervisor.stdin.close()

    def stop(self) -> None:
        """End the command and all of its processes: by ``SIGTERM``, then by ``SIGKILL``. Twice is fine."""
        self.request_stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.supervisor.wait(GRACE_SECONDS + KILL_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End all processes by ``SIGKILL`` and wait for them. Twice is fine."""
        deadline = time.monotonic() + KILL_SECONDS
        segments = mapped_segments(self.process_ids())
        while remaining := self.process_ids():
            for process_id in remaining:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise LaunchError(Reason.DEADLINE_EXCEEDED, f"{self.name}: processes {remaining} do not end.")
            time.sleep(0.02)
        self.request_stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.supervisor.wait(KILL_SECONDS)
        remove_leftovers(self.scratch, segments)


def stop_all(children: Sequence[ChildProcess]) -> None:
    """Stop all ``children`` at the same time, even if one of them raises."""
    with contextlib.ExitStack() as stack:
        for child in children:
            stack.callback(child.stop)
            child.request_stop()


def group_processes(group_id: int) -> tuple[int, ...]:
    """Return the living processes of a process group, without zombies.

    >>> os.getpid() in group_processes(os.getpgid(0))
    True
    """
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, _parent, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(group) == group_id and state not in "ZX":
                    found.append(int(entry.name))
    return tuple(sorted(found))


def error_of(
    *command: str, environment: Mapping[str, str] | None = None, timeout_seconds: float = TRIAL_SECONDS
) -> str | None:
    """Run ``command`` to its end; return the last line of its standard error where it fails, None where it works.

    >>> error_of("sh", "-c", "echo no model >&2; exit 3"), error_of("sh", "-c", "kill -9 $$"), error_of("true")
    ('no model', 'ended by SIGKILL', None)
    """
    try:
        everything = {**os.environ, **(environment or {})}
        trial = subprocess.run(command, env=everything, capture_output=True, text=True, timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        return f"did not end within {timeout_seconds:.0f} s"
    if trial.returncode < 0:
        return f"ended by {signal.Signals(-trial.returncode).name}"
    if trial.returncode:
        return (trial.stderr.strip().splitlines() or [f"exit status {trial.returncode}"])[-1]
    return None
