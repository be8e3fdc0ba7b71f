"""Opens Mooncake's engine so that what its transport relies on holds: one ordered lane per peer, loopback only."""

import importlib
import logging
import os
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvferry.errors import Reason, TransportError

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
MAX_QUEUED_DESCRIPTORS = 65535  # the most that Mooncake lets a lane queue for one peer; a fuller lane fails them
_VERSION = "0.3.13"
_DISTRIBUTIONS = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
_REMEDY = (
    'Install it: pip install "kvferry[mooncake]" (mooncake-transfer-engine-non-cuda==0.3.13.post1); '
    "on Debian also apt-get install libibverbs1 libnuma1."
)
_NUM_LISTENERS = 2  # one for handshakes, one for data
_INTERFACE = b"lo\0"
_ENVIRONMENT: dict[str, str | None] = {
    "MC_FORCE_TCP": "1",
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TCP_LANES_PER_PEER": "1",  # more lanes overtake each other, and a fence would say nothing
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": str(MAX_QUEUED_DESCRIPTORS),
    "MC_TRANSFER_TIMEOUT": "86400",  # a batch that ends after more seconds counts as failed; deadlines are the caller's
    "MC_USE_TENT": None,
    "MC_USE_TEV1": None,
    "MC_DISABLE_METACACHE": None,
    "MC_USE_IPV6": None,
}
"""What Mooncake reads when it is imported or an engine starts; None removes."""

_opening = threading.Lock()


def open_engine(host: str) -> Any:
    """Start an engine whose peers reach it as ``host``.

    On loopback its two ports take connections from this host only. Raises ``TransportError``
    (``TRANSPORT_UNAVAILABLE``) where the package or a library is missing, of another version, or does not start.
    """
    with _opening:
        before = _listener_ids()
        with _environment():
            engine = _import_engine()()
            code = engine.initialize(host, "P2PHANDSHAKE", "tcp", "")
        if code:
            raise _unavailable(
                f"Mooncake's engine does not start on {host!r} (code {code}).", "Are TCP ports 15000 to 17000 free?"
            )
        if is_loopback(host):
            _confine_to_loopback(before)
            return engine
    logger.warning(
        "mooncake: whoever reaches TCP port %d of any address of this host can read and write registered memory",
        engine.get_rpc_port(),
    )
    return engine


def is_loopback(host: str) -> bool:
    """Return whether an address is one that only this host can reach.

    >>> is_loopback("127.0.0.1"), is_loopback("192.0.2.2")
    (True, False)
    """
    return host == "localhost" or host.startswith("127.")


def _import_engine() -> Any:
    try:
        engine_class = importlib.import_module("mooncake.engine").TransferEngine
    except ImportError as error:
        raise _unavailable(f"the mooncake transport cannot load Mooncake's engine: {error}.", _REMEDY) from error
    found = [installed for name in _DISTRIBUTIONS if (installed := _installed_version(name))]
    if not any(installed == _VERSION or installed.startswith(f"{_VERSION}.") for installed in found):
        raise _unavailable(
            f"the mooncake transport relies on the request order of Mooncake {_VERSION}; "
            f"installed is {', '.join(found) or 'an unknown version'}.",
            _REMEDY,
        )
    return engine_class


def _installed_version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


@contextmanager
def _environment() -> Iterator[None]:
    """Mooncake takes its settings from the environment only: set them while an engine starts."""
    wanted = {"MC_LOG_LEVEL": os.environ.get("MC_LOG_LEVEL", "WARNING"), **_ENVIRONMENT}
    saved = {name: os.environ.get(name) for name in wanted}
    _apply(wanted)
    try:
        yield
    finally:
        _apply(saved)


def _apply(settings: dict[str, str | None]) -> None:
    for name, value in settings.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _confine_to_loopback(before: set[int]) -> None:
    """Mooncake listens on all interfaces and asks nobody who they are, so its listeners are bound to one interface."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(found) for identity, found in _listeners() if identity not in before]
        if len(listeners) != _NUM_LISTENERS:
            raise _unavailable(
                f"Mooncake's {_NUM_LISTENERS} listening sockets cannot be told from others that were opened at the "
                f"same time: found {len(listeners)}.",
                "Try again.",
            )
        try:
            for listener in listeners:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _INTERFACE)
        except OSError as error:
            raise _unavailable(
                f"Mooncake listens on all interfaces, and the kernel does not let it be bound to loopback: {error}.",
                "In a trusted network, set MC_TCP_BIND_ADDRESS to the address that peers shall use.",
            ) from error


def _listener_ids() -> set[int]:
    identities = set()
    for identity, found in _listeners():
        identities.add(identity)
        found.close()
    return identities


def _listeners() -> Iterator[tuple[int, socket.socket]]:
    """Yield inode and a duplicate of every TCP socket of this process that listens on all addresses."""
    seen = set()  # a number listed may by now be one of the duplicates
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
            if not stat.S_ISSOCK(status.st_mode) or status.st_ino in seen:
                continue
            duplicate = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile
            continue
        seen.add(status.st_ino)
        if _listens_everywhere(duplicate):
            yield status.st_ino, duplicate
        else:
            duplicate.close()


def _listens_everywhere(found: socket.socket) -> bool:
    return (
        found.family in (socket.AF_INET, socket.AF_INET6)
        and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
        and found.getsockname()[0] in ("0.0.0.0", "::")
    )


def _unavailable(message: str, remedy: str) -> TransportError:
    return TransportError(Reason.TRANSPORT_UNAVAILABLE, message, remedy)
