"""Makes vLLM's processes sleep instead of yield while they wait for messages of one another.

For a second after each message vLLM's workers call ``sched_yield`` in a loop, and while a load is under way there is
always a next message. With more such processes than cores, Linux 6.18 lets one of them keep its core: programs of other
sessions get no time on this core for seconds, up to a minute, and an engine answers no handshake in time. See
docs/decisions/sleeping-workers.md.
"""

import os
import time
from typing import Any

from kvferry.errors import Reason, SettingsError

VARIABLE = "KVFERRY_SLEEPING_WORKERS"
SLEEP_SECONDS = 50e-6
POLLING_SECONDS = 0.002
"""How long a waiting process polls before it sleeps until a message is announced."""
SHORT_SLEEP_MILLISECONDS = 20
QUIET_SECONDS = 1.0
"""A socket that still counts the last notice drops the next one. After so long without a message no notice is counted,
and a waiting process sleeps as long as vLLM asks; before, ``SHORT_SLEEP_MILLISECONDS`` at a time."""


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

        # Both modules have imported the function by its name.
        for module in (utils, shm_broadcast):
            vars(module)["sched_yield"] = sleep_shortly
        if shm_broadcast.SpinCondition.__module__ != __name__:  # the first call
            vars(shm_broadcast)["SpinCondition"] = sleeping_condition(shm_broadcast.SpinCondition)


def sleeping_condition(base: Any) -> Any:
    """Return a subclass of vLLM's condition that polls for a shorter time before it sleeps."""

    class SleepingCondition(base):  # type: ignore[misc]
        """Polls for ``POLLING_SECONDS`` from the start of each wait; vLLM's polls for a second after each message."""

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self._waits = False
            if self.is_reader:
                self.busy_loop_s = POLLING_SECONDS

        def record_read(self) -> None:
            """A message has come."""
            super().record_read()
            self._waits = False

        def wait(self, timeout_ms: int | None = None) -> None:
            """Sleep shortly, until the writer's notice or ``timeout_ms`` at most; then the caller polls again."""
            if not self._waits:
                self._waits, self.last_read = True, time.monotonic()
            if time.monotonic() < self.last_read + QUIET_SECONDS:
                short = SHORT_SLEEP_MILLISECONDS
                timeout_ms = short if timeout_ms is None else min(short, timeout_ms)
            super().wait(timeout_ms)

    return SleepingCondition


def sleep_shortly() -> None:
    """Free the core for about a tenth of a millisecond."""
    time.sleep(SLEEP_SECONDS)
