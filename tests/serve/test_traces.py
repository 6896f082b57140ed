"""Traces: spans and metrics by the semantic conventions, through providers of a test's own."""

import sys
from types import SimpleNamespace

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from specbuild.runtime import RequestMetrics, Result
from specbuild.serve.telemetry.traces import Traces

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OWN = RequestMetrics(3, 1, "auto", num_output_tokens=2, submitted=1.0, started=1.0, first_token=1.5, finished=2.0)
RESULT = Result("", [1, 2], "stop", OWN)


class Collected:
    """Traces whose spans and metrics stay here."""

    def __init__(self):
        self.exporter, self._reader, self.provider = InMemorySpanExporter(), InMemoryMetricReader(), TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self._measures = MeterProvider([self._reader])
        self.traces = Traces(self.provider, self._measures)

    @property
    def points(self):
        data = self._reader.get_metrics_data()
        (scope,) = data.resource_metrics[0].scope_metrics
        return {each.name.removeprefix("gen_ai.server."): each.data.data_points[0] for each in scope.metrics}

    def close(self):
        self.provider.shutdown()
        self._measures.shutdown()


@pytest.fixture
def collected():
    found = Collected()
    yield found
    found.close()


def traced(traces, exporter, results=(), error=None, headers=None, asked=None):
    """The span of a request."""
    begun = traces.begin("chat", "pycode", headers or {}, asked)
    assert begun
    begun.end(3, results, error)
    (span,) = exporter.get_finished_spans()
    return span


def test_a_request_is_a_span_of_its_callers_trace(collected):
    span = traced(collected.traces, collected.exporter, [RESULT], headers={"traceparent": PARENT})
    assert (span.name, span.status.is_unset) == ("chat pycode", True)
    assert f"{span.context.trace_id:032x}-{span.parent.span_id:016x}" == PARENT[3:-3]
    assert {name.removeprefix("gen_ai."): value for name, value in span.attributes.items()} == {
        **{"operation.name": "chat", "provider.name": "specbuild", "request.model": "pycode"},
        **{"usage.input_tokens": 3, "usage.output_tokens": 2, "response.finish_reasons": ("stop",)},
    }
    found = collected.points
    assert found["time_to_first_token"].sum == found["time_per_output_token"].sum == pytest.approx(0.5)
    assert found["request.duration"].count == 1
    bounds = {name: (each.explicit_bounds[0], each.explicit_bounds[-1]) for name, each in found.items()}
    wanted = {"time_to_first_token": (0.001, 10.0), "time_per_output_token": (0.01, 2.5)}
    assert bounds == wanted | {"request.duration": (0.01, 81.92)}


@pytest.mark.parametrize("header", ["", "zz", "00-0-0-01", PARENT.upper()])
def test_a_header_that_tells_no_trace_begins_one(collected, header):
    assert traced(collected.traces, collected.exporter, headers={"traceparent": header}).parent is None


def test_an_error_has_its_kind(collected):
    span = traced(collected.traces, collected.exporter, [RESULT], "draining")
    assert (span.attributes["error.type"], span.status.status_code) == ("draining", trace.StatusCode.ERROR)
    assert collected.points["request.duration"].attributes["error.type"] == "draining"
    assert "error.type" not in collected.points["time_to_first_token"].attributes


def test_what_was_asked_for_is_told_but_for_its_prompt(collected):
    asked = {"prompt": "secret", "stop": ["secret"], "n": 2, "seed": 2**64 - 1, "temperature": 0.0, "top_p": None}
    fields = SimpleNamespace(**asked, max_completion_tokens=9)
    told = traced(collected.traces, collected.exporter, asked=fields).attributes
    found = {name.partition(".request.")[2]: value for name, value in told.items() if ".request." in name}
    assert found == {"model": "pycode", "choice.count": 2, "temperature": 0.0, "max_tokens": 9}
    assert "secret" not in str(dict(told))


@pytest.mark.parametrize("lacking", ["opentelemetry", "opentelemetry.metrics"])
def test_without_the_package_there_is_none(monkeypatch, lacking):
    """Others put their modules into the folder `opentelemetry` too."""
    monkeypatch.setitem(sys.modules, lacking, None)
    if "." in lacking:
        monkeypatch.delattr(sys.modules["opentelemetry"], "metrics")
    assert Traces().begin("chat", "m", {}) is None
