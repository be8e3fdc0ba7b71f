"""Log lines that peers and clients can cause: printable, few, and with a count of the lines that are left out.

A peer chooses how often it asks and what its messages contain. Without a limit a loop of refused questions fills the
log with thousands of lines a second; without escapes a host name with a line break forges a line.
"""

import logging
import sys
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from numbers import Number
from traceback import TracebackException

logger = logging.getLogger(__name__)

LINES_PER_SECOND = 10
LINES_OF_A_KIND_PER_SECOND = 5
"""Less than all, so that a flood of one kind leaves room for others."""
REPORT_SECONDS = 10.0
"""How long lines are left out before one line says how many."""
MAX_LENGTH = 2000
"""Characters of one value in a line."""


def printable(value: object) -> str:
    r"""Return a value as one line of printable text: other characters are escaped, and long text is cut.

    >>> printable("prefill-0"), printable("a\nERROR forged\x1b[2J\u202e")
    ('prefill-0', 'a\\nERROR forged\\x1b[2J\\u202e')
    >>> printable("a" * 3000)[-8:]
    'aaaaa...'
    """
    text = str(value)
    is_cut = len(text) > MAX_LENGTH
    text = text[:MAX_LENGTH]
    if not text.isprintable():
        text = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
        is_cut, text = is_cut or len(text) > MAX_LENGTH, text[:MAX_LENGTH]
    return text + "..." if is_cut else text


class Limit:
    """Decides which lines are written.

    In any second these are at most :data:`LINES_PER_SECOND`, of them :data:`LINES_OF_A_KIND_PER_SECOND` of one kind,
    and one of a kind about one peer. It keeps no more than these lines and a count for each kind, however many peers
    there are.

    >>> limit = Limit()
    >>> [limit.admits("refused", "10.0.0.1", now) for now in (0.0, 0.5, 1.0)], limit.take_left_out()
    ([True, False, True], {'refused': 1})
    """

    def __init__(self) -> None:
        self._written: deque[tuple[float, str, str]] = deque()
        self._left_out: Counter[str] = Counter()

    def admits(self, kind: str, peer: str, now: float) -> bool:
        """Return whether a line of this kind about this peer is written, and count the line otherwise."""
        while self._written and now - self._written[0][0] >= 1:
            self._written.popleft()
        peers = [each for _, other, each in self._written if other == kind]
        is_admitted = (
            len(self._written) < LINES_PER_SECOND and len(peers) < LINES_OF_A_KIND_PER_SECOND and peer not in peers
        )
        if is_admitted:
            self._written.append((now, kind, peer))
        else:
            self._left_out[kind] += 1
        return is_admitted

    def take_left_out(self) -> dict[str, int]:
        """Return how many lines of each kind were left out since the last call, the most frequent kind first."""
        left_out, self._left_out = self._left_out, Counter()
        return dict(left_out.most_common())


class _Lines:
    """The limit of all logs of this process, and the report of the lines that were left out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._limit = Limit()
        self._report: threading.Timer | None = None

    def admits(self, kind: str, peer: str) -> bool:
        with self._lock:
            is_admitted = self._limit.admits(kind, peer, time.monotonic())
            # A forked process has its parent's report, whose thread it does not have.
            if not is_admitted and (self._report is None or not self._report.is_alive()):
                self._report = threading.Timer(REPORT_SECONDS, self._tell)
                self._report.daemon = True
                with suppress(RuntimeError):  # no more threads: the next line that is left out tries again
                    self._report.start()
            return is_admitted

    def close(self) -> None:
        """Drop the report."""
        with self._lock:
            if self._report is not None:
                self._report.cancel()

    def _tell(self) -> None:
        with self._lock:
            self._report = None
            left_out = self._limit.take_left_out()
        logger.warning(
            "kvferry: %d log lines were left out, because peers or clients caused too many: %s",
            sum(left_out.values()),
            "; ".join(f"{number} of {kind!r}" for kind, number in left_out.items()),
        )


lines = _Lines()
"""One for all logs of this process, since they share its log."""


class PeerLog:
    """Writes to ``log`` the lines that peers and clients can cause.

    Each line's ``kind`` is its text without values. ``peer`` names who caused the line: lines of one kind about
    several peers are not left out for each other's sake. Every value but a number is made :func:`printable`.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log

    def debug(self, kind: str, *values: object, peer: object = "") -> None:
        self._write(logging.DEBUG, kind, values, peer)

    def info(self, kind: str, *values: object, peer: object = "") -> None:
        self._write(logging.INFO, kind, values, peer)

    def warning(self, kind: str, *values: object, peer: object = "") -> None:
        self._write(logging.WARNING, kind, values, peer)

    def error(self, kind: str, *values: object, peer: object = "") -> None:
        self._write(logging.ERROR, kind, values, peer)

    def exception(self, kind: str, *values: object, peer: object = "") -> None:
        """Write a line with the traceback of the error that is being handled, whose text may be a peer's."""
        self._write(logging.ERROR, kind, values, peer, sys.exception())

    def _write(
        self, level: int, kind: str, values: tuple[object, ...], peer: object, error: BaseException | None = None
    ) -> None:
        if not self._log.isEnabledFor(level) or not lines.admits(kind, str(peer)):
            return
        shown = [value if isinstance(value, Number) else printable(value) for value in values]
        if error is not None:
            kind, shown = f"{kind}\n%s", [*shown, _traceback(error)]
        # The line's place in the source is that of the method's caller.
        self._log.log(level, kind, *shown, stacklevel=3)


def _traceback(error: BaseException) -> str:
    parts = [part.strip("\n") for part in TracebackException.from_exception(error).format()]
    # A frame has the source's own lines; all other parts may have text of a peer.
    return "\n".join(part if part.startswith("  File ") else printable(part) for part in parts if part)
