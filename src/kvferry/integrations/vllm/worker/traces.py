"""Spans of loads for vLLM's tracing with OpenTelemetry (``--otlp-traces-endpoint``)."""

import time

from vllm.tracing import extract_trace_context, instrument_manual

from kvferry.execution.executor import JobResult
from kvferry.integrations.vllm.step import PromptLoad


class LoadTraces:
    """Makes a span ``kvferry.load`` of each load of a rank whose order has ``trace_headers``, others cost nothing.

    The span is a child of the span that the request's client has named in its headers; it ends when the load ended on
    this rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._began_at: dict[str, int] = {}
        """The time of day, in nanoseconds, at which each load began, by request."""

    def begin(self, order: PromptLoad) -> None:
        """A load begins now."""
        if order.trace_headers is not None:
            self._began_at[order.request_id] = time.time_ns()

    def end(self, order: PromptLoad, result: JobResult) -> None:
        """A load has ended, or was refused before it began. Does nothing where OpenTelemetry is not installed."""
        if order.trace_headers is None:
            return
        began_at = self._began_at.pop(order.request_id, time.time_ns())
        attributes: dict[str, str | int] = {
            "kvferry.request_id": order.request_id,
            "kvferry.rank": self._rank,
            "kvferry.bytes": int(result.num_bytes),
            "kvferry.descriptors": int(result.num_descriptors),
            "kvferry.transport": result.transport,
        }
        if result.error is not None:
            attributes["error.type"] = result.error.reason.value
        ended_at = began_at + int(1e9 * result.wait_seconds)
        context = extract_trace_context(order.trace_headers)
        instrument_manual("kvferry.load", began_at, ended_at, attributes, context)
