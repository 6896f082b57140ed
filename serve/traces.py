"""OpenTelemetry's spans and metrics of generative servers, where its package is installed; else nothing.

Names are those of the semantic conventions for generative AI. Providers are the process's own:
`opentelemetry-instrument specbuild serve …` sets them up from the environment.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from specbuild.runtime import Result

_NAME = "specbuild"
_HISTOGRAMS = {
    "request.duration": "Seconds of a request.",
    "time_to_first_token": "Seconds from submission to the first token.",
    "time_per_output_token": "Mean seconds of a sample's token after the first.",
}


class Traces:
    """Begins the trace of a request."""

    def __init__(self) -> None:
        self._tracer: Any = None
        if find_spec("opentelemetry") is None:
            return
        from opentelemetry import metrics, propagate, trace

        self._propagate, self._kind = propagate, trace.SpanKind.SERVER
        self._tracer, meter = trace.get_tracer(_NAME), metrics.get_meter(_NAME)
        self._histograms = {
            name: meter.create_histogram(f"gen_ai.server.{name}", "s", told) for name, told in _HISTOGRAMS.items()
        }

    def begin(self, operation: str, model: str, headers: Mapping[str, str]) -> Trace | None:
        """The trace of a request, which goes on with the caller's where its headers tell one."""
        if self._tracer is None:
            return None
        about = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": _NAME,
            "gen_ai.request.model": model,
        }
        parent = self._propagate.extract(headers)
        span = self._tracer.start_span(f"{operation} {model}", parent, kind=self._kind, attributes=about)
        return Trace(span, self._histograms, about)


class Trace:
    """One request's span, and what is measured of it."""

    def __init__(self, span: Any, histograms: Mapping[str, Any], about: dict[str, str]) -> None:
        self._span, self._histograms, self._about = span, histograms, about
        self._began = time.perf_counter()

    def end(self, prompt_tokens: int, results: Sequence[Result], error: str | None) -> None:
        """The request has ended; `error`: what kind of error it ended by."""
        about = self._about | ({"error.type": error} if error else {})
        self._histograms["request.duration"].record(time.perf_counter() - self._began, about)
        for own in [result.metrics for result in results if result.metrics]:
            if own.first_token is not None:
                self._histograms["time_to_first_token"].record(own.ttft, about)
            if own.num_output_tokens > 1:
                self._histograms["time_per_output_token"].record(own.tpot, about)
        told: dict[str, Any] = {
            "gen_ai.usage.input_tokens": prompt_tokens,
            "gen_ai.usage.output_tokens": sum(len(result.token_ids) for result in results),
            "gen_ai.response.finish_reasons": [result.finish_reason for result in results],
        }
        self._span.set_attributes(told | about)
        self._span.end()
