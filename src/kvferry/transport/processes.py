"""A process of this host, held by a file descriptor: a later process with its pid is not taken for it."""

import os
import select
import signal

from kvferry.transport.end_points import ProcessIdentity, own_identity, read_stat, start_time_in


class Process:
    """The process that has this pid now. Raises ``ProcessLookupError`` where there is none, else ``OSError``.

    >>> process = Process(os.getpid())
    >>> process.has_pid, process.has_ended
    (True, False)
    >>> process.close()
    """

    _descriptor = -1

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid)

    @property
    def has_pid(self) -> bool:
        """Whether the process keeps its pid: it runs, or its parent has not yet taken notice of its end."""
        try:
            signal.pidfd_send_signal(self._descriptor, 0)
        except ProcessLookupError:
            return False
        return True

    @property
    def has_ended(self) -> bool:
        """Whether every thread of the process has ended, so that none of its system calls runs."""
        poller = select.poll()
        poller.register(self._descriptor, select.POLLIN)
        return bool(poller.poll(0))

    def close(self) -> None:
        """Let the process go; twice is fine."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    __del__ = close


def is_visible(identity: ProcessIdentity) -> bool:
    """Return whether the process is, or was, on this host and in this pid namespace, so that its pid means it here."""
    own = own_identity()
    return (own.boot_id, own.pid_namespace) == (identity.boot_id, identity.pid_namespace)


def is_on_this_host(identity: ProcessIdentity) -> bool:
    """Return whether the process is, or was, on this host, in whichever container."""
    return own_identity().boot_id == identity.boot_id


def hold_process(identity: ProcessIdentity) -> Process | None:
    """Return the process; None where nothing can be known of it: it is elsewhere, or the kernel has no pidfd.

    Raises ``ProcessLookupError`` where the process has ended, also where another process has its pid.
    """
    if not is_visible(identity):
        return None
    try:
        process = Process(identity.pid)
    except ProcessLookupError:
        raise
    except (OSError, AttributeError):
        return None
    try:
        # After the descriptor is open: the start time is that of the process that it holds, or of a later one.
        if start_time_in(read_stat(identity.pid)) == identity.start_time:
            return process
    except (FileNotFoundError, ProcessLookupError):
        pass
    except BaseException:
        process.close()
        raise
    process.close()
    raise ProcessLookupError(f"process {identity.pid} has ended")
