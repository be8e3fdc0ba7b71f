"""Opens Mooncake's engine with one ordered connection per peer ("lane"), by default reachable on loopback only."""

import importlib
import logging
import os
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from ipaddress import ip_address
from typing import Any

from kvferry.errors import Reason, TransportError

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
MAX_QUEUED_DESCRIPTORS = 65535  # Mooncake's limit of one peer's queue; beyond it descriptors fail
_VERSION = "0.3.13"
_WITHOUT_CUDA, _WITH_CUDA = _DISTRIBUTIONS = "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"
_REMEDY = (
    'Install it: pip install "kvferry[mooncake]" (mooncake-transfer-engine-non-cuda==0.3.13.post1); '
    "on Debian also apt-get install libibverbs1 libnuma1."
)
_NUM_LISTENERS = 2  # one for handshakes, one for data
_INTERFACE = b"lo\0"
_ENVIRONMENT: dict[str, str | None] = {
    "MC_FORCE_TCP": "1",
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": str(MAX_QUEUED_DESCRIPTORS),
    "MC_TRANSFER_TIMEOUT": "86400",  # seconds after which a batch counts as failed; the caller has its own deadlines
    "MC_USE_TENT": None,
    "MC_USE_TEV1": None,
    "MC_DISABLE_METACACHE": None,
    "MC_USE_IPV6": None,
}
"""Variables that Mooncake reads on import and when an engine starts; None removes the variable."""

_opening = threading.Lock()


def open_engine(host: str, num_connections: int = 1) -> Any:
    """Start an engine that peers reach at ``host``, with ``num_connections`` connections to each peer.

    Several connections (Mooncake's "lanes") overtake each other: a fence proves nothing then.

    On loopback its two ports accept connections from this host only. Raises ``TransportError``
    (``TRANSPORT_UNAVAILABLE``) where the package or a library is missing or of another version, or the engine does not
    start.
    """
    with _opening:
        before = _listener_ids()
        with mooncake_environment({**_ENVIRONMENT, "MC_TCP_LANES_PER_PEER": str(num_connections)}):
            engine = _import_engine()()
            code = engine.initialize(host, "P2PHANDSHAKE", "tcp", "")
        if code:
            raise _unavailable(
                f"Mooncake's engine does not start on {host!r} (code {code}).",
                "It takes two TCP ports from MC_MIN_RPC_PORT (15000) to MC_MAX_RPC_PORT (17000): free some, or set "
                "these variables.",
            )
        if is_loopback(host):
            _confine_to_loopback(before)
            return engine
    logger.warning(
        "mooncake: every process that reaches TCP port %d of this host can read and write registered memory",
        engine.get_rpc_port(),
    )
    return engine


def is_built_with_cuda() -> bool:
    """Return whether the installed engine copies memory of CUDA devices: its other build takes any address for the
    host's, and would end the process.
    """
    return _installed_version(_WITH_CUDA) is not None and _installed_version(_WITHOUT_CUDA) is None


def is_loopback(host: str) -> bool:
    """Return whether only this host can reach an address.

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
            f"the mooncake transport needs the request order of Mooncake {_VERSION}; "
            f"the installed version is {', '.join(found) or 'unknown'}.",
            _REMEDY,
        )
    return engine_class


def _installed_version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


@contextmanager
def mooncake_environment(settings: dict[str, str | None]) -> Iterator[None]:
    """Set what Mooncake reads from the environment only, while a part of Mooncake starts; None removes a variable."""
    wanted = {"MC_LOG_LEVEL": os.environ.get("MC_LOG_LEVEL", "WARNING"), **settings}
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
    """Bind Mooncake's listeners to loopback: Mooncake listens on all interfaces and does not authenticate peers."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(found) for identity, found in _listeners() if identity not in before]
        if len(listeners) != _NUM_LISTENERS:
            raise _unavailable(
                f"{len(listeners)} listening sockets opened while Mooncake started, which opens {_NUM_LISTENERS}.",
                "Try again.",
            )
        try:
            for listener in listeners:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _INTERFACE)
        except OSError as error:
            raise _unavailable(
                f"Mooncake listens on all interfaces, and the kernel does not bind its sockets to loopback: {error}.",
                "In a trusted network, set MC_TCP_BIND_ADDRESS to this host's address.",
            ) from error


def _listener_ids() -> set[int]:
    identities = set()
    for identity, found in _listeners():
        identities.add(identity)
        found.close()
    return identities


def _listeners() -> Iterator[tuple[int, socket.socket]]:
    """Yield inode and duplicate of every TCP socket of this process that listens on all addresses."""
    seen = set()  # a listed file descriptor may meanwhile be one of the duplicates
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
        and ip_address(found.getsockname()[0]).is_unspecified
    )


def _unavailable(message: str, remedy: str) -> TransportError:
    return TransportError(Reason.TRANSPORT_UNAVAILABLE, message, remedy)
