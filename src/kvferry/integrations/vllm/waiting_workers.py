"""Lets vLLM's processes sleep, not yield, while they wait for a message of one another.

For a second after each message vLLM's workers call ``sched_yield`` in a loop, and while a load is under way there is
always a next message. With more such processes than cores Linux 6.18 lets one of them keep its core and the programs
of other sessions get nothing on it, for seconds and up to a minute: an engine then answers no handshake in time. See
docs/decisions/sleeping-workers.md.
"""

import os
import time

from kvferry.errors import Reason, SettingsError

VARIABLE = "KVFERRY_SLEEPING_WORKERS"
SLEEP_SECONDS = 50e-6


def make_waits_sleep() -> None:
    """Replace the yield in vLLM's message queues of this process where ``KVFERRY_SLEEPING_WORKERS`` is 1.

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


def sleep_shortly() -> None:
    """Give the core away for about a tenth of a millisecond."""
    time.sleep(SLEEP_SECONDS)
