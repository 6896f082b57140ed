"""Traces: spans and metrics by the semantic conventions, through providers of a test's own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from specbuild.runtime import RequestMetrics, Result
from specbuild.serve.traces import ENDPOINT, Traces

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_SERVICE_NAME", "OTEL_TRACES_EXPORTER"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def reader() -> InMemoryMetricReader:
    return InMemoryMetricReader()


@pytest.fixture
def traces(exporter: InMemorySpanExporter, reader: InMemoryMetricReader) -> Iterator[Traces]:
    spans, measures = TracerProvider(), MeterProvider([reader])
    spans.add_span_processor(SimpleSpanProcessor(exporter))
    yield Traces(spans, measures)
    spans.shutdown()
    measures.shutdown()


def result() -> Result:
    own = RequestMetrics(3, 1, "auto", num_output_tokens=2, submitted=1.0, started=1.0, first_token=1.5, finished=2.0)
    return Result("", [1, 2], "stop", own)


def points(reader: InMemoryMetricReader) -> dict[str, Any]:
    data: Any = reader.get_metrics_data()
    (scope,) = data.resource_metrics[0].scope_metrics
    return {each.name: each.data.data_points[0] for each in scope.metrics}


def test_a_request_is_a_span_of_its_callers_trace(
    traces: Traces, exporter: InMemorySpanExporter, reader: InMemoryMetricReader
) -> None:
    begun = traces.begin("chat", "pycode", {"traceparent": PARENT})
    assert begun
    begun.end(3, [result()], None)
    (span,) = exporter.get_finished_spans()
    assert span.name == "chat pycode"
    assert span.context
    assert span.parent
    assert f"{span.context.trace_id:032x}-{span.parent.span_id:016x}" == PARENT[3:-3]
    assert span.status.is_unset
    assert dict(span.attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "specbuild",
        "gen_ai.request.model": "pycode",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.response.finish_reasons": ("stop",),
    }
    found = points(reader)
    assert found["gen_ai.server.time_to_first_token"].sum == pytest.approx(0.5)
    assert found["gen_ai.server.time_per_output_token"].sum == pytest.approx(0.5)
    assert found["gen_ai.server.request.duration"].count == 1


@pytest.mark.parametrize("header", ["", "zz", "00-0-0-01", PARENT.upper()])
def test_a_header_that_tells_no_trace_begins_one(traces: Traces, exporter: InMemorySpanExporter, header: str) -> None:
    begun = traces.begin("chat", "m", {"traceparent": header})
    assert begun
    begun.end(0, [], None)
    (span,) = exporter.get_finished_spans()
    assert span.parent is None


def test_buckets_are_the_conventions(traces: Traces, reader: InMemoryMetricReader) -> None:
    begun = traces.begin("chat", "m", {})
    assert begun
    begun.end(3, [result()], None)
    found = {name.removeprefix("gen_ai.server."): each.explicit_bounds for name, each in points(reader).items()}
    assert found["request.duration"] == pytest.approx(
        (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
    )
    assert (found["time_to_first_token"][0], found["time_to_first_token"][-1]) == (0.001, 10.0)
    assert (found["time_per_output_token"][0], found["time_per_output_token"][-1]) == (0.01, 2.5)


def test_an_error_has_its_kind(traces: Traces, exporter: InMemorySpanExporter, reader: InMemoryMetricReader) -> None:
    begun = traces.begin("text_completion", "m", {})
    assert begun
    begun.end(3, [result()], "draining")
    (span,) = exporter.get_finished_spans()
    assert span.attributes
    assert span.attributes["error.type"] == "draining"
    assert span.status.status_code is trace.StatusCode.ERROR
    found = points(reader)
    assert found["gen_ai.server.request.duration"].attributes["error.type"] == "draining"
    assert "error.type" not in found["gen_ai.server.time_to_first_token"].attributes


def test_what_was_asked_for_is_told_but_for_its_prompt(traces: Traces, exporter: InMemorySpanExporter) -> None:
    asked = SimpleNamespace(
        prompt="secret", stop=["secret"], n=2, seed=2**64 - 1, temperature=0.0, top_p=None, max_completion_tokens=9
    )
    begun = traces.begin("chat", "m", {}, asked)
    assert begun
    begun.end(0, [], None)
    (span,) = exporter.get_finished_spans()
    told = dict(span.attributes or {})
    assert {name: value for name, value in told.items() if ".request." in name} == {
        "gen_ai.request.model": "m",
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.max_tokens": 9,
    }
    assert "secret" not in str(told)


@pytest.mark.parametrize("lacking", ["opentelemetry", "opentelemetry.metrics"])
def test_without_the_package_there_is_none(monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    """Others put their modules into the folder `opentelemetry` too."""
    monkeypatch.setitem(sys.modules, lacking, None)
    if "." in lacking:
        monkeypatch.delattr(sys.modules["opentelemetry"], "metrics")
    assert Traces().begin("chat", "m", {}) is None


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> dict[str, InMemorySpanExporter]:
    """Spans by the protocol that they were exported by."""
    found: dict[str, InMemorySpanExporter] = {}
    for kind in ("http", "grpc"):
        found[kind] = InMemorySpanExporter()
        for signal, name, made in (("trace", "OTLPSpanExporter", found[kind]), ("metric", "OTLPMetricExporter", None)):
            module: Any = ModuleType(f"{signal}_exporter")
            setattr(module, name, lambda made=made: made)
            monkeypatch.setitem(sys.modules, f"opentelemetry.exporter.otlp.proto.{kind}.{signal}_exporter", module)
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    return found


@pytest.mark.parametrize(("protocol", "kind"), [(None, "http"), ("http/protobuf", "http"), ("grpc", "grpc")])
def test_an_endpoint_is_sent_to(
    monkeypatch: pytest.MonkeyPatch, sent: dict[str, InMemorySpanExporter], protocol: str | None, kind: str
) -> None:
    monkeypatch.setenv(ENDPOINT, "http://collector:4318")
    if protocol:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    traces = Traces()
    begun = traces.begin("chat", "m", {})
    assert begun
    begun.end(0, [], None)
    traces.close()
    assert [name for name, each in sent.items() if each.get_finished_spans()] == [kind]
    (span,) = sent[kind].get_finished_spans()
    assert span.resource.attributes["service.name"] == "specbuild"


def test_a_service_has_the_name_it_was_given(
    monkeypatch: pytest.MonkeyPatch, sent: dict[str, InMemorySpanExporter]
) -> None:
    monkeypatch.setenv(ENDPOINT, "http://collector:4318")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    traces = Traces()
    begun = traces.begin("chat", "m", {})
    assert begun
    begun.end(0, [], None)
    traces.close()
    (span,) = sent["http"].get_finished_spans()
    assert span.resource.attributes["service.name"] == "mine"


def test_who_has_a_provider_keeps_it(
    monkeypatch: pytest.MonkeyPatch, sent: dict[str, InMemorySpanExporter], exporter: InMemorySpanExporter
) -> None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    monkeypatch.setenv(ENDPOINT, "http://collector:4318")
    begun = Traces().begin("chat", "m", {})
    assert begun
    begun.end(0, [], None)
    assert len(exporter.get_finished_spans()) == 1
    assert not sent["http"].get_finished_spans()


def test_an_endpoint_without_an_exporter_is_told(monkeypatch: pytest.MonkeyPatch, logged: Any) -> None:
    monkeypatch.setenv(ENDPOINT, "http://collector:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    begun = Traces().begin("chat", "m", {})
    assert begun
    begun.end(0, [], None)
    (record,) = logged()
    assert "install opentelemetry-sdk and opentelemetry-exporter-otlp" in record.getMessage()
