"""Spans of loads in vLLM's tracing: of vLLM's scheduler, the connector and real bytes, no model."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from vllm.tracing import otel

from .flows import to_prefill
from .handoff_engine import make_engine
from .test_forged_parameters import MODELS

__all__ = ["make_engine"]

PROMPT = [(11 * index) % 500 for index in range(79)]
TRACE, PARENT = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
HEADERS = {"traceparent": f"00-{TRACE:032x}-{PARENT:016x}-01"}
ENDPOINT = "http://127.0.0.1:9"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What vLLM's tracing would export."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter.get_finished_spans


def load(
    make_engine: Any,
    *,
    endpoint: str | None = ENDPOINT,
    is_lost: bool = False,
    before: Callable[[], None] = lambda: None,
    **parts: Any,
) -> Any:
    """Hand a prompt over to a decode engine, whose tracing is on where there is an endpoint; return its answer.

    ``before`` is called once both engines have started.
    """
    prefill = make_engine(MODELS["full attention"])
    decode = make_engine(MODELS["full attention"], otlp_traces_endpoint=endpoint)
    before()
    asked = prefill.ask("p1", PROMPT, to_prefill("sequential"), max_tokens=1)
    if is_lost:
        prefill.release()
        prefill.ask("last", [1, 2, 3], {})
    return decode.ask("d1", PROMPT, asked.params, **parts)


def test_a_load_is_a_span_of_the_trace_of_its_request(make_engine: Any, spans: Any) -> None:
    assert not load(make_engine, trace_headers=HEADERS).has_failed
    [span] = spans()
    assert span.name == "kvferry.load"
    assert (span.parent.span_id, span.context.trace_id) == (PARENT, TRACE)
    told = dict(span.attributes)
    assert told.pop("kvferry.bytes") > 0
    assert told.pop("kvferry.descriptors") > 0
    assert told == {"kvferry.request_id": "d1", "kvferry.rank": 0, "kvferry.transport": "cma"}
    assert 0 < span.end_time - span.start_time < 60e9


def test_the_span_of_a_failed_load_has_the_reason(make_engine: Any, spans: Any) -> None:
    assert load(make_engine, is_lost=True, trace_headers=HEADERS).has_failed
    [span] = spans()
    assert span.parent.span_id == PARENT
    assert span.attributes["error.type"]
    assert span.attributes["kvferry.bytes"] == 0


def test_a_request_without_a_trace_has_a_span(make_engine: Any, spans: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its own: vLLM leaves the trace of the engine's start in the environment of its processes."""
    monkeypatch.setenv("traceparent", HEADERS["traceparent"])
    load(make_engine)
    [span] = spans()
    assert span.parent is None


def test_without_tracing_or_opentelemetry_there_is_no_span(
    make_engine: Any, spans: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not load(make_engine, endpoint=None, trace_headers=HEADERS).has_failed
    remove = partial(monkeypatch.setattr, otel, "_IS_OTEL_AVAILABLE", False)
    assert not load(make_engine, before=remove, trace_headers=HEADERS).has_failed
    assert spans() == ()
