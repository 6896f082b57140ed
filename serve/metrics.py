"""The server's Prometheus metrics: vLLM's names after a prefix, and `specbuild:` names for those that vLLM lacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from specbuild.runtime import Engine, RequestMetrics, Result, SpeculationStats
from specbuild.serve.cost.options import CostOptions

OURS = "specbuild:"
Outcome = Literal["equal", "different", "unfinished", "dropped", "failed"]  # of a text that is decoded again
MAX_POSITIONS = 32  # positions of accepted tokens in a round; later ones count as the last
_OPENMETRICS = "application/openmetrics-text"
_ASKED = f"{_OPENMETRICS}; version=1.0.0; escaping=allow-utf-8"  # else prometheus_client 0.26 turns ":" into "_"
# All of vLLM's buckets in seconds, and finer ones below them for models that answer faster.
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
FIRST = (*_FIRST, 640, 2560)
_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TOKEN = (0.001, 0.0025, 0.005, *_TOKEN)
_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
WHOLE = (0.01, 0.03, 0.1, *_WHOLE)
_COUNTERS = {
    "prompt_tokens": "Tokens of prompts, of each sample.",
    "generation_tokens": "Tokens of texts.",
    "prefix_cache_queries": "Tokens of prompts that were looked up in the caches.",
    "prefix_cache_hits": "Tokens of prompts that the caches had.",
    "spec_decode_num_drafts": "Rounds that drafted, of each sequence.",
    "spec_decode_num_draft_tokens": "Drafted tokens.",
    "spec_decode_num_accepted_tokens": "Drafted tokens that came true.",
}
_OWN_COUNTERS = {
    "promised_speedup_sum": "What rounds of `auto` promised over plain decoding, by the timing table.",
    "busy_seconds": "Shares of requests in the seconds of rounds.",
    "baseline_seconds": "What they would have been by plain decoding.",
}
_GAPS = "inter_token_latency_seconds"
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From submission.", FIRST),
    _GAPS: ("Between two tokens of a stream.", TOKEN),
    "request_time_per_output_token_seconds": ("Mean of a sample, its first token left out.", TOKEN),
    "e2e_request_latency_seconds": ("From submission to the end.", WHOLE),
    "request_queue_time_seconds": ("From submission to the slot.", WHOLE),
    "request_prefill_time_seconds": ("From the slot to the first token.", WHOLE),
    "request_decode_time_seconds": ("From the first token to the end.", WHOLE),
}
_GAUGES = {
    "num_requests_running": "Samples that have a slot.",
    "num_requests_waiting": "Samples without one.",
    "kv_cache_usage_perc": "Of the caches, 0 to 1.",
}
_OWN_GAUGES = {f"{OURS}timing_correction": "What steps take now over what the timing table says."}
_REASONS = {"cancelled": "abort"}  # vLLM's word
_ENDS = ("stop", "length", "deadline", "abort", "error")


class Metrics:
    """Counters and histograms of requests, and gauges of engines, which are read at each scrape.

    Any thread may call its methods. The series of engines begin at zero, so that rates include their first request.
    """

    def __init__(self, engines: Mapping[str, Engine], prefix: str = OURS, cost: CostOptions | None = None) -> None:
        self._cost_options = cost or CostOptions()
        self._registry, self._prefix = CollectorRegistry(auto_describe=True), prefix
        self._requests = self._counter(prefix, "request_success", "Samples that ended, by why.", "finished_reason")
        self._rejections = self._counter(prefix, "admission_rejections", "Requests that were not taken.", "reason")
        told = "Drafted tokens that came true, by place."
        self._positions = self._counter(prefix, "spec_decode_num_accepted_tokens_per_pos", told, "position")
        self._decisions = self._counter(OURS, "decisions", "Rounds of `auto`, by what was decided.", "decision")
        self._shadows = self._counter(OURS, "shadows", "Texts decoded again without speculation.", "outcome")
        priced = self._cost_options.price_per_hour is not None
        self._costs = self._counter(OURS, "cost", "Of requests' busy seconds.", "currency") if priced else None
        self._counters = {name: self._counter(prefix, name, told) for name, told in _COUNTERS.items()}
        self._counters |= {name: self._counter(OURS, name, told) for name, told in _OWN_COUNTERS.items()}
        self._histograms = {
            name: Histogram(prefix + name, told, ("model_name",), registry=self._registry, buckets=buckets)
            for name, (told, buckets) in _HISTOGRAMS.items()
        }
        self._engines, self._begun = dict[str, Engine](), set[str]()
        self._registry.register(_Gauges(self._engines, prefix))
        for name, engine in engines.items():
            self.add(name, engine)

    def _counter(self, prefix: str, name: str, told: str, *labels: str) -> Counter:
        return Counter(prefix + name, told, ("model_name", *labels), registry=self._registry)

    def add(self, model: str, engine: Engine) -> None:
        """Add an engine, whose series begin at zero."""
        self._engines[model] = engine
        self._begin(model)

    def _begin(self, model: str) -> None:
        """Let a model's series begin at zero."""
        self._begun.add(model)
        for reason in _ENDS:
            self._requests.labels(model, reason)
        for outcome in get_args(Outcome):
            self._shadows.labels(model, outcome)
        if self._costs:
            self._costs.labels(model, self._cost_options.currency)
        for each in (*self._counters.values(), *self._histograms.values()):
            each.labels(model)

    @property
    def registry(self) -> CollectorRegistry:
        """The registry, in which other collectors may register."""
        return self._registry

    def chunk(self, model: str, gap_seconds: float, tokens: int) -> None:
        """Record a sample's chunk: each of its tokens counts once, with its share of the gap since the last chunk.

        So the sum is the elapsed time and the count the tokens, as if every token had a chunk of its own.
        """
        gaps = self._histograms[_GAPS].labels(model)
        for _ in range(tokens):
            gaps.observe(gap_seconds / tokens)

    def rejected(self, model: str, reason: str) -> None:
        """Count a request that was not admitted."""
        self._rejections.labels(model, reason).inc()

    def shadowed(self, model: str, outcome: Outcome) -> None:
        """Count the outcome of decoding a text again without speculation; see `Oracle`."""
        self._shadows.labels(model, outcome).inc()

    def finished(self, model: str, result: Result) -> None:
        """Record a sample that has ended, in any way; background requests are not counted.

        A deadline is a reason of its own, which vLLM does not have. As in vLLM, each sample of a prompt counts the
        prompt's tokens, and those of them that were cached.
        """
        if result.metrics and result.metrics.background:
            return
        self._requests.labels(model, _REASONS.get(result.finish_reason, result.finish_reason)).inc()
        if result.metrics is None:
            return
        if model not in self._begun:
            self._begin(model)
        for name, count in _counts(result.metrics).items():
            self._counters[name].labels(model).inc(count)
        for name, seconds in _seconds(result.metrics).items():
            self._histograms[name].labels(model).observe(seconds)
        if self._costs:
            cost = max(result.metrics.busy_time, 0.0) * (self._cost_options.per_second or 0.0)
            self._costs.labels(model, self._cost_options.currency).inc(cost)
        stats = result.metrics.speculative_decoding
        for decision, times in stats.decisions.items():
            self._decisions.labels(model, decision).inc(times)
        for position, times in enumerate(_accepted(stats)):
            self._positions.labels(model, str(position)).inc(times)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the exposition and its content type; `accept`: the header, which may name OpenMetrics.

        The rest of the header is ignored, so that an unknown version in it is no error.
        """
        encode, kind = choose_encoder(_ASKED if _OPENMETRICS in accept.lower() else "")
        return encode(self._registry), kind.partition("; escaping")[0]


def _accepted(stats: SpeculationStats) -> list[int]:
    """Return how many rounds accepted a token at each position, beginning with the root's child."""
    least = list(accumulate(reversed(stats.acceptance_histogram[1:])))[::-1]  # [i]: rounds that accepted more than i
    return [*least[: MAX_POSITIONS - 1], sum(least[MAX_POSITIONS - 1 :])] if len(least) > MAX_POSITIONS else least


def _counts(own: RequestMetrics) -> dict[str, float]:
    """Return what a sample that has ended adds to each counter."""
    stats, began = own.speculative_decoding, own.started is not None
    return {
        "prompt_tokens": own.num_prompt_tokens if began else 0,
        "generation_tokens": own.num_output_tokens,
        "prefix_cache_queries": own.num_prompt_tokens if began else 0,
        "prefix_cache_hits": own.num_cached_tokens if began else 0,
        "spec_decode_num_drafts": stats.num_spec_steps,
        "spec_decode_num_draft_tokens": stats.num_draft_tokens,
        "spec_decode_num_accepted_tokens": stats.num_accepted_draft_tokens,
        "promised_speedup_sum": stats.promised,
        "busy_seconds": max(own.busy_time, 0.0),
        "baseline_seconds": own.plain_time if own.plain_time > 0 else 0.0,
    }


def _seconds(own: RequestMetrics) -> dict[str, float]:
    """Return the times of a sample that has ended, those that it came to have."""
    times = {"request_queue_time_seconds": own.queue_time, "e2e_request_latency_seconds": own.e2el}
    if own.first_token is None or own.started is None:
        return times
    times["time_to_first_token_seconds"] = own.ttft
    times["request_prefill_time_seconds"] = max(own.first_token - own.started, 0.0)
    if own.num_output_tokens > 1:
        times["request_time_per_output_token_seconds"] = own.tpot
        times["request_decode_time_seconds"] = own.tpot * (own.num_output_tokens - 1)
    return times


class _Gauges(Collector):
    """The current state of the engines."""

    def __init__(self, engines: Mapping[str, Engine], prefix: str) -> None:
        self._engines, self._prefix = engines, prefix

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """See prometheus_client; an engine that cannot report its state is left out."""
        about = {f"{self._prefix}{name}": told for name, told in _GAUGES.items()} | _OWN_GAUGES
        families = [GaugeMetricFamily(name, told, labels=("model_name",)) for name, told in about.items()]
        for model, engine in list(self._engines.items()):
            try:
                usage, correction = engine.usage, engine.correction
            except Exception:  # its worker may have died, which health reports; the other engines still have metrics
                continue
            share = usage.cache_tokens / max(usage.cache_capacity_tokens, 1)  # shared pages count for each text
            values = (usage.running, usage.waiting + usage.to_come, min(share, 1.0), correction)
            for family, value in zip(families, values, strict=True):
                family.add_metric([model], value)
        yield from families
