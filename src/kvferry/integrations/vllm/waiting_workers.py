"""Lets vLLM's processes sleep, not yield, while they wait for a message of one another.

For a second after each message vLLM's workers call ``sched_yield`` in a loop, and while a load is under way there is
always a next message. With more such processes than cores Linux 6.18 lets one of them keep its core and the programs
of other sessions get nothing on it, for seconds and up to a minute: an engine then answers no handshake in time. See
docs/decisions/sleeping-workers.md.
"""

import os
import time
from typing import Any

from kvferry.errors import Reason, SettingsError

VARIABLE = "KVFERRY_SLEEPING_WORKERS"
SLEEP_SECONDS = 50e-6
LOOKING_SECONDS = 0.002
"""So long a process that waits looks again and again; then it sleeps until it is told."""
SHORT_SLEEP_MILLISECONDS = 20
QUIET_SECONDS = 1.0
"""A socket that still counts the last notice drops the next one. After so long without a message none is counted, and
who waits sleeps as long as vLLM has it; before that for ``SHORT_SLEEP_MILLISECONDS`` at a time."""


def make_waits_sleep() -> None:
    """Replace the waits in vLLM's message queues of this process where ``KVFERRY_SLEEPING_WORKERS`` is 1.

    Safe to call again. Raises :class:`SettingsError` (``invalid-setting``) for any other value but 0.
    """
    value = os.environ.get(VARIABLE, "0")
    if value not in ("0", "1"):
        raise SettingsError(
            Reason.INVALID_SETTING,
            f"{VARIABLE} is {value!r}.",
            "Set it to 1 where engines have fewer cores than ranks, else to 0.",
        )
    if value == "1":
        from vllm.distributed import utils
        from vllm.distributed.device_communicators import shm_broadcast

        # The queues took the function by its name.
        for module in (utils, shm_broadcast):
            vars(module)["sched_yield"] = sleep_shortly
        if not hasattr(shm_broadcast.SpinCondition, "begin_looking"):
            vars(shm_broadcast)["SpinCondition"] = sleeping_condition(shm_broadcast.SpinCondition)


def sleeping_condition(base: Any) -> Any:
    """Return vLLM's condition of a reader, which looks for a shorter while before it waits to be told."""

    class SleepingCondition(base):  # type: ignore[misc]
        """Looks for ``LOOKING_SECONDS`` from the beginning of each wait; vLLM's for a second after each message."""

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self._waits = False
            if self.is_reader:
                self.busy_loop_s = LOOKING_SECONDS

        def begin_looking(self) -> None:
            """Count the time of looking from now on."""
            if not self._waits:
                self._waits, self.last_read = True, time.monotonic()

        def record_read(self) -> None:
            """A message has come."""
            super().record_read()
            self._waits = False

        def wait(self, timeout_ms: int | None = None) -> None:
            """Sleep shortly, or until the writer tells or ``timeout_ms`` are over; whoever waits looks again."""
            self.begin_looking()
            if time.monotonic() < self.last_read + QUIET_SECONDS:
                timeout_ms = min(
                    SHORT_SLEEP_MILLISECONDS, SHORT_SLEEP_MILLISECONDS if timeout_ms is None else timeout_ms
                )
            super().wait(timeout_ms)

    return SleepingCondition


def sleep_shortly() -> None:
    """Give the core away for about a tenth of a millisecond."""
    time.sleep(SLEEP_SECONDS)
