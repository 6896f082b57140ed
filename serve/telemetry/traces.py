"""OpenTelemetry spans and metrics of generative servers; does nothing if its packages are not installed.

Names are those of the semantic conventions for generative AI. The process's own providers are used, which
`opentelemetry-instrument specbuild serve …` sets up.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from specbuild.runtime import Result

_NAME = "specbuild"
# The conventions' buckets, in seconds; an SDK's default buckets are meant for milliseconds.
_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_HISTOGRAMS = {
    "request.duration": ("Seconds of a request.", tuple(0.01 * 2**power for power in range(14))),
    "time_to_first_token": ("Seconds from submission to the first token.", _FIRST),
    "time_per_output_token": ("Mean seconds of a sample's token after the first.", _TOKEN),
}
_ASKED = {  # the conventions' attributes by the request's fields
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "seed": "seed",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "n": "choice.count",
}
_LARGEST = 2**63 - 1  # largest integer of OTLP


class Traces:
    """Begins the traces of requests."""

    def __init__(self, spans: Any = None, measures: Any = None) -> None:
        """Set up the tracer and the histograms.

        Args:
            spans: Provider of tracers; None: the process's.
            measures: Provider of meters; None: the process's.
        """
        self._tracer: Any = None
        try:
            from opentelemetry import metrics, propagate, trace
        except ImportError:
            return
        spans, measures = spans or trace.get_tracer_provider(), measures or metrics.get_meter_provider()
        self._propagate, self._kind, self._failed = propagate, trace.SpanKind.SERVER, trace.StatusCode.ERROR
        self._tracer, meter = spans.get_tracer(_NAME), measures.get_meter(_NAME)
        self._histograms = {
            name: meter.create_histogram(
                f"gen_ai.server.{name}", "s", told, explicit_bucket_boundaries_advisory=boundaries
            )
            for name, (told, boundaries) in _HISTOGRAMS.items()
        }

    def begin(self, operation: str, model: str, headers: Mapping[str, str], asked: object = None) -> Trace | None:
        """Begin a request's trace, which continues the caller's if its headers name one; None without OpenTelemetry.

        Args:
            operation: The operation's name in the conventions.
            model: The model's name.
            headers: The request's headers.
            asked: The request; its sampling parameters are recorded if it has any, its prompt is not.
        """
        if self._tracer is None:
            return None
        about = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": _NAME,
            "gen_ai.request.model": model,
        }
        parent = self._propagate.extract(headers)
        span = self._tracer.start_span(
            f"{operation} {model}", parent, kind=self._kind, attributes=about | _parameters(asked)
        )
        return Trace(span, self._histograms, about, self._failed)


class Trace:
    """The span and measurements of one request; `failed`: the status of a span that ends with an error."""

    def __init__(self, span: Any, histograms: Mapping[str, Any], about: dict[str, str], failed: Any) -> None:
        self._span, self._histograms, self._about, self._failed = span, histograms, about, failed
        self._began = time.perf_counter()

    def end(self, prompt_tokens: int, results: Sequence[Result], error: str | None) -> None:
        """End the trace; `error`: the kind of error, if any. Times of tokens are recorded for texts that ended."""
        about = self._about | ({"error.type": error} if error else {})
        self._histograms["request.duration"].record(time.perf_counter() - self._began, about)
        for own in [result.metrics for result in results if result.metrics]:
            if own.first_token is not None:
                self._histograms["time_to_first_token"].record(own.ttft, self._about)
            if own.num_output_tokens > 1:
                self._histograms["time_per_output_token"].record(own.tpot, self._about)
        told: dict[str, Any] = {
            "gen_ai.usage.input_tokens": prompt_tokens,
            "gen_ai.usage.output_tokens": sum(len(result.token_ids) for result in results),
            "gen_ai.response.finish_reasons": [result.finish_reason for result in results],
        }
        self._span.set_attributes(told | about)
        if error:
            self._span.set_status(self._failed)
        self._span.end()


def _parameters(asked: object) -> dict[str, Any]:
    """Return the sampling parameters of a request as attributes."""
    given = {field: getattr(asked, field, None) for field in _ASKED}
    return {
        f"gen_ai.request.{_ASKED[field]}": value
        for field, value in given.items()
        if value is not None and value <= _LARGEST
    }
