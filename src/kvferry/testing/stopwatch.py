"""A stopwatch around any vLLM KV connector, for comparing connectors by one clock that is outside of both.

It times, in a worker, from the ``start_load_kv`` whose metadata brings a request's load to the return of the
``get_transfer_results`` that reports the request. Start the engine with ``--worker-extension-cls
kvferry.testing.stopwatch.StopwatchExtension`` and ``VLLM_SERVER_DEV_MODE=1``; then POST to ``/collective_rpc``
``{"method": "install_stopwatch"}`` once, and ``{"method": "read_stopwatch"}`` after each request.
"""

import time
from collections.abc import Callable
from typing import Any

import msgspec


class Lap(msgspec.Struct, frozen=True):
    """One request on one worker. ``start_call_seconds`` is how long ``start_load_kv`` held the engine."""

    request_id: str
    seconds: float
    start_call_seconds: float
    num_polls: int


class Stopwatch:
    """Wraps the two methods of one connector object, and notes the statistics that the connector gives itself.

    >>> from types import SimpleNamespace
    >>> connector = SimpleNamespace(
    ...     start_load_kv=lambda context: None,
    ...     get_transfer_results=lambda ids: SimpleNamespace(finished_recving={"r"}),
    ...     get_kv_connector_stats=lambda: SimpleNamespace(data={"bytes": [7]}),
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
        connector.start_load_kv = self._timing_start(connector.start_load_kv)
        connector.get_transfer_results = self._timing_end(connector.get_transfer_results)
        connector.get_kv_connector_stats = self._noting(connector.get_kv_connector_stats)

    def read(self) -> dict[str, list[Any]]:
        """Return the laps and the connector's own statistics since the last reading."""
        laps, self._laps = self._laps, []
        statistics, self._statistics = self._statistics, []
        return {"laps": [msgspec.to_builtins(lap) for lap in laps], "statistics": statistics}

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
            ended_at = time.perf_counter()
            self._num_polls += 1
            for request_id in results.finished_recving or ():
                started_at, called = self._started.pop(request_id)
                self._laps.append(Lap(request_id, ended_at - started_at, called, self._num_polls))
            return results

        return get_transfer_results

    def _noting(self, call: Callable[[], Any]) -> Callable[[], Any]:
        def get_kv_connector_stats() -> Any:
            statistics = call()
            if statistics is not None:
                # Copied: the engine goes on adding to it.
                self._statistics.append(msgspec.json.decode(msgspec.json.encode(statistics.data)))
            return statistics

        return get_kv_connector_stats


class StopwatchExtension:
    """The worker extension: vLLM makes it a base of its worker class."""

    def install_stopwatch(self) -> None:
        """Put the stopwatch around this worker's connector."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self._kvferry_stopwatch = Stopwatch(get_kv_transfer_group())

    def read_stopwatch(self) -> dict[str, list[Any]]:
        """Return what was measured since the last reading."""
        return self._kvferry_stopwatch.read()


def requests_to_load(metadata: Any) -> list[str]:
    """Return the ids of the requests whose loads a step's connector metadata brings (NIXL's or kvferry's)."""
    if hasattr(metadata, "reqs_to_recv"):
        return list(metadata.reqs_to_recv)
    return [order.request_id for order in metadata.loads]
