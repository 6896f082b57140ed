"""Traces: spans and metrics by the semantic conventions, through providers of a test's own."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from specbuild.runtime import RequestMetrics, Result
from specbuild.serve.traces import Traces

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> InMemoryMetricReader:
    reader = InMemoryMetricReader()
    monkeypatch.setattr(metrics, "get_meter", MeterProvider([reader]).get_meter)
    return reader


def result() -> Result:
    own = RequestMetrics(3, 1, "auto", num_output_tokens=2, submitted=1.0, started=1.0, first_token=1.5, finished=2.0)
    return Result("", [1, 2], "stop", own)


def test_a_request_is_a_span_of_its_callers_trace(exporter: InMemorySpanExporter, reader: InMemoryMetricReader) -> None:
    begun = Traces().begin("chat", "pycode", {"traceparent": PARENT})
    assert begun
    begun.end(3, [result()], None)
    (span,) = exporter.get_finished_spans()
    assert span.name == "chat pycode"
    assert span.context
    assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
    assert span.attributes
    assert span.attributes["gen_ai.usage.output_tokens"] == 2
    assert span.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert "error.type" not in span.attributes
    found = recorded(reader)
    assert found["gen_ai.server.time_to_first_token"] == pytest.approx(0.5)
    assert found["gen_ai.server.time_per_output_token"] == pytest.approx(0.5)
    assert "gen_ai.server.request.duration" in found


def recorded(reader: InMemoryMetricReader) -> dict[str, float]:
    data: Any = reader.get_metrics_data()
    (scope,) = data.resource_metrics[0].scope_metrics
    return {each.name: each.data.data_points[0].sum for each in scope.metrics}


def test_an_error_has_its_kind(exporter: InMemorySpanExporter, reader: InMemoryMetricReader) -> None:
    begun = Traces().begin("text_completion", "m", {})
    assert begun
    begun.end(0, [], "queue_full")
    (span,) = exporter.get_finished_spans()
    assert span.attributes
    assert span.attributes["error.type"] == "queue_full"


def test_without_the_package_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert Traces().begin("chat", "m", {}) is None
