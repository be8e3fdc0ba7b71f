"""A stopwatch around any vLLM KV connector, so that one clock, independent of the connectors, compares them.

In a worker the stopwatch measures from the ``start_load_kv`` whose metadata contain a request's load to the return of
the ``get_transfer_results`` that reports the request, and records the end of the last step that ran layers. Start the
engine with ``--worker-extension-cls vllm_stopwatch.StopwatchExtension``, ``VLLM_SERVER_DEV_MODE=1`` and this folder on
``PYTHONPATH``; then POST to ``/collective_rpc`` ``{"method": "install_stopwatch"}`` once, before the first request, and
``{"method": "read_stopwatch"}`` after each request.
"""

import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

PAGE_BYTES = 4096


class Lap(msgspec.Struct, frozen=True):
    """One request on one worker. ``start_call_seconds`` is the duration of the call of ``start_load_kv``.

    ``reported_at`` is on the monotonic clock, which all processes of one host share.
    """

    request_id: str
    seconds: float
    start_call_seconds: float
    num_polls: int
    reported_at: float


class Stopwatch:
    """Wraps methods of one connector object, and records the connector's own statistics.

    >>> from types import SimpleNamespace
    >>> connector = SimpleNamespace(
    ...     start_load_kv=lambda context: None,
    ...     get_transfer_results=lambda ids: SimpleNamespace(finished_recving={"r"}),
    ...     get_kv_connector_stats=lambda: SimpleNamespace(data={"bytes": [7]}),
    ...     save_kv_layer=lambda *layer: None, wait_for_save=lambda: None,
    ...     _get_connector_metadata=lambda: SimpleNamespace(reqs_to_recv={"r": "where to"}))
    >>> stopwatch = Stopwatch(connector)
    >>> connector.start_load_kv(None); _ = connector.get_transfer_results(set()); _ = connector.get_kv_connector_stats()
    >>> reading = stopwatch.read()
    >>> [lap["request_id"] for lap in reading["laps"]], reading["statistics"]
    (['r'], [{'bytes': [7]}])
    """

    def __init__(self, connector: Any) -> None:
        self._connector = connector
        self._started: dict[str, tuple[float, float]] = {}
        self._num_polls = 0
        self._laps: list[Lap] = []
        self._statistics: list[Any] = []
        self._has_run = False
        self._step_ended_at: float | None = None
        connector.start_load_kv = self._timing_start(connector.start_load_kv)
        connector.get_transfer_results = self._timing_end(connector.get_transfer_results)
        connector.get_kv_connector_stats = self._noting(connector.get_kv_connector_stats)
        connector.save_kv_layer = self._noting_layer(connector.save_kv_layer)
        connector.wait_for_save = self._noting_step(connector.wait_for_save)

    def read(self) -> dict[str, Any]:
        """Return the laps and the connector's own statistics since the last reading, and the end of the last step."""
        laps, self._laps = self._laps, []
        statistics, self._statistics = self._statistics, []
        return {
            "laps": [msgspec.to_builtins(lap) for lap in laps],
            "statistics": statistics,
            "step_ended_at": self._step_ended_at,
        }

    def _timing_start(self, call: Callable[..., None]) -> Callable[..., None]:
        def start_load_kv(*args: Any, **kwargs: Any) -> None:
            started_at = time.perf_counter()
            call(*args, **kwargs)
            called = time.perf_counter() - started_at
            for request_id in requests_to_load(self._connector._get_connector_metadata()):
                self._started[request_id] = (started_at, called)
                self._num_polls = 0

        return start_load_kv

    def _timing_end(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def get_transfer_results(*args: Any, **kwargs: Any) -> Any:
            results = call(*args, **kwargs)
            ended_at, reported_at = time.perf_counter(), time.monotonic()
            self._num_polls += 1
            for request_id in results.finished_recving or ():
                started_at, called = self._started.pop(request_id)
                self._laps.append(Lap(request_id, ended_at - started_at, called, self._num_polls, reported_at))
            return results

        return get_transfer_results

    def _noting_layer(self, call: Callable[..., None]) -> Callable[..., None]:
        def save_kv_layer(*args: Any, **kwargs: Any) -> None:
            self._has_run = True
            call(*args, **kwargs)

        return save_kv_layer

    def _noting_step(self, call: Callable[[], None]) -> Callable[[], None]:
        def wait_for_save() -> None:
            if self._has_run:
                self._has_run, self._step_ended_at = False, time.monotonic()
            call()

        return wait_for_save

    def _noting(self, call: Callable[[], Any]) -> Callable[[], Any]:
        def get_kv_connector_stats() -> Any:
            statistics = call()
            if statistics is not None:
                # A copy, since the engine adds to the statistics later.
                self._statistics.append(msgspec.json.decode(msgspec.json.encode(statistics.data)))
            return statistics

        return get_kv_connector_stats


class StopwatchExtension:
    """The worker extension: vLLM adds this class to the bases of its worker class."""

    model_runner: Any

    def install_stopwatch(self) -> None:
        """Put the stopwatch around this worker's connector, and let vLLM's attention compute."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        ask_for_amx()
        self._kvferry_stopwatch = Stopwatch(get_kv_transfer_group())

    def read_stopwatch(self) -> dict[str, Any]:
        """Return the measurements since the last reading."""
        return self._kvferry_stopwatch.read()

    def touch_cache(self) -> int:
        """Read a byte of each page of this worker's KV cache; return the number of pages.

        The first access after the kernel or a host has cleared a page's accessed bit is slower than the next.
        """
        storages = [tensor.untyped_storage() for tensor in tensors_in(self.model_runner.kv_caches)]
        storages = list({storage.data_ptr(): storage for storage in storages}.values())
        pages = [torch.empty(0, dtype=torch.uint8).set_(storage)[::PAGE_BYTES] for storage in storages]
        for first_bytes in pages:
            first_bytes.sum()
        return sum(map(len, pages))


def ask_for_amx() -> bool:
    """Ask Linux for AMX in this process; return whether it may use AMX.

    vLLM 0.32's attention in bfloat16 uses AMX where the processor has it, but of vLLM only products of matrices ask,
    and those with weights of up to 1 MiB ask with several tokens only. So a decode engine that computes one token of a
    received prompt with a small model ends by SIGILL. kvferry asks when it checks its kernels; other connectors do not.
    """
    return bool(torch.cpu._init_amx())


def tensors_in(caches: Any) -> list[torch.Tensor]:
    """Return the tensors of a list of tensors, or of lists of tensors."""
    return [caches] if isinstance(caches, torch.Tensor) else [each for item in caches for each in tensors_in(item)]


def requests_to_load(metadata: Any) -> list[str]:
    """Return the ids of the requests to load in a step's connector metadata (NIXL's or kvferry's)."""
    if hasattr(metadata, "reqs_to_recv"):
        return list(metadata.reqs_to_recv)
    return [order.request_id for order in metadata.loads]
