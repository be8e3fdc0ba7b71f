"""Ends an engine that has lost a rank.

The ranks of an engine wait for one another inside collective operations, where no Python code runs. vLLM's monitor asks
the ranks that are left to end, and kills them many seconds later; on a CPU they keep their cores busy until then, and
may keep vLLM's own threads from running. A rank that died of a signal or exited with an error does not come back, so
the others are killed at once. Then vLLM ends the engine, and its clients get an error.
"""

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from kvferry.integrations.vllm.versions import Engine

logger = logging.getLogger(__name__)

RANK_NAME = "VllmWorker-"
"""How vLLM's executor names the processes of its ranks."""
STATUS_SECONDS = 1.0
"""How long the exit status of a rank that has ended may take to be known."""
PAUSE_SECONDS = 0.01


class RankMonitor:
    """Watches the ranks that this process has started, on a thread; kills all of them when one has failed.

    A rank has failed when a signal has ended it, or when its exit status is not 0, unless vLLM ``ends_ranks``: it does
    before it closes the connector, and kills those that take too long. Ranks that exit with status 0 are let alone.
    Ranks of other hosts, and those that another process has started, are not watched.
    """

    def __init__(self, ranks: Sequence[BaseProcess], ends_ranks: Callable[[], bool] = lambda: False) -> None:
        self._ranks, self._ends_ranks = list(ranks), ends_ranks
        self._stop: int | None = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, args=(self._stop,), name="kvferry-ranks", daemon=True)
        self._thread.start()

    @classmethod
    def of_this_process(cls) -> "RankMonitor | None":
        """Watch the ranks among the child processes of this process, vLLM's scheduler; None where there are none.

        The caller is the constructor of a connector, as for :class:`Engine`.
        """
        ranks = [child for child in multiprocessing.active_children() if child.name.startswith(RANK_NAME)]
        engine = Engine()
        return cls(ranks, lambda: engine.ends_ranks) if ranks else None

    def close(self) -> None:
        """Stop watching; twice is fine."""
        if self._stop is not None:
            os.eventfd_write(self._stop, 1)
            self._thread.join()
            os.close(self._stop)
            self._stop = None

    def _run(self, stop: int) -> None:
        living = {rank.sentinel: rank for rank in self._ranks}
        while living:
            ended = wait([*living, stop])
            if stop in ended:
                return
            for sentinel in ended:
                assert isinstance(sentinel, int)
                if (status := _status_of(living.pop(sentinel))) and not self._ends_ranks():
                    self._kill(list(living.values()), status)
                    return

    def _kill(self, living: Sequence[BaseProcess], status: int) -> None:
        logger.error(
            "kvferry: a rank of this engine %s: the engine cannot compute without it. Its other ranks are killed, so "
            "that vLLM ends the engine and every client gets an error.",
            f"was ended by {signal.Signals(-status).name}" if status < 0 else f"has exited with status {status}",
        )
        for rank in living:
            rank.kill()


def _status_of(rank: BaseProcess) -> int:
    """Return the exit status of a rank that has ended, below 0 for a signal; 0 where it does not become known."""
    deadline = time.monotonic() + STATUS_SECONDS
    # vLLM's monitor asks for the status too: whoever comes second sees it a moment later.
    while (status := rank.exitcode) is None and time.monotonic() < deadline:
        time.sleep(PAUSE_SECONDS)
    return status or 0
