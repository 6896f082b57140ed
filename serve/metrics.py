"""What a server measures, for Prometheus: vLLM's names after a prefix, and `specbuild:` names for what only it has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from specbuild.runtime import Engine, RequestMetrics, Result
from specbuild.runtime.errors import SpecbuildError

OURS = "specbuild:"
MAX_POSITIONS = 32  # of an accepted token in its round; later ones count for the last
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_WHOLE = (0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_REASONS = {"cancelled": "abort"}  # vLLM's word


class Metrics:
    """Counters and histograms of requests, and gauges of engines, which are read when somebody scrapes."""

    def __init__(self, engines: Mapping[str, Engine], prefix: str = OURS) -> None:
        self._registry, self._prefix = CollectorRegistry(auto_describe=True), prefix
        self._requests = self._counter("request_success", "Samples that ended, by why.", "finished_reason")
        self._rejections = self._counter("admission_rejections", "Requests that were not taken, by why.", "reason")
        self._prompts = self._counter("prompt_tokens", "Tokens of prompts.")
        self._tokens = self._counter("generation_tokens", "Tokens of texts.")
        self._queries = self._counter("prefix_cache_queries", "Tokens of prompts that were looked up in the caches.")
        self._hits = self._counter("prefix_cache_hits", "Tokens of prompts that the caches had.")
        self._drafts = self._counter("spec_decode_num_drafts", "Rounds that drafted, of each sequence.")
        self._drafted = self._counter("spec_decode_num_draft_tokens", "Drafted tokens.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Drafted tokens that came true.")
        self._positions = self._counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that came true, by place.",
            "position",
        )
        self._unsettled = self._counter("unsettled_steps", "Rounds that ended before a near-tie.", prefix=OURS)
        self._again = self._counter("recomputed_tokens", "Tokens of side branches, computed once more.", prefix=OURS)
        self._decisions = self._counter("decisions", "Rounds of `auto`, by what was decided.", "decision", prefix=OURS)
        self._promised = self._counter(
            "promised_speedup_sum", "What these rounds promised over plain decoding, by the timing table.", prefix=OURS
        )
        self._ttft = self._histogram("time_to_first_token_seconds", "From submission.", _FIRST)
        self._gaps = self._histogram("inter_token_latency_seconds", "Between two tokens of a stream.", _TOKEN)
        self._tpot = self._histogram("request_time_per_output_token_seconds", "Mean of a sample.", _TOKEN)
        self._e2e = self._histogram("e2e_request_latency_seconds", "From submission to the end.", _WHOLE)
        self._queue = self._histogram("request_queue_time_seconds", "From submission to the slot.", _WHOLE)
        self._prefill = self._histogram("request_prefill_time_seconds", "From the slot to the first token.", _WHOLE)
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the end.", _WHOLE)
        self._registry.register(_Gauges(engines, prefix))

    def _counter(self, name: str, told: str, *labels: str, prefix: str | None = None) -> Counter:
        name = (self._prefix if prefix is None else prefix) + name
        return Counter(name, told, ("model_name", *labels), registry=self._registry)

    def _histogram(self, name: str, told: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(
            self._prefix + name, told, ("model_name",), registry=self._registry, buckets=(*buckets, float("inf"))
        )

    def chunk(self, model: str, gap_seconds: float, tokens: int) -> None:
        """A sample's chunk of so many tokens came so long after its last: each of them took its share."""
        gaps = self._gaps.labels(model)
        for _ in range(tokens):
            gaps.observe(gap_seconds / tokens)

    def rejected(self, model: str, reason: str) -> None:
        """A request was not taken."""
        self._rejections.labels(model, reason).inc()

    def finished(self, model: str, result: Result) -> None:
        """A sample has ended, however; a deadline is its own reason."""
        reason = _REASONS.get(result.finish_reason, result.finish_reason)
        self._requests.labels(model, reason).inc()
        if result.metrics is None:
            return
        own, stats = result.metrics, result.metrics.speculative_decoding
        if own.started is not None:
            self._prompts.labels(model).inc(own.num_prompt_tokens)
            self._queries.labels(model).inc(own.num_prompt_tokens)
            self._hits.labels(model).inc(own.num_cached_tokens)
        self._tokens.labels(model).inc(own.num_output_tokens)
        self._times(model, own)
        self._drafts.labels(model).inc(stats.num_spec_steps)
        self._drafted.labels(model).inc(stats.num_draft_tokens)
        self._accepted.labels(model).inc(stats.num_accepted_draft_tokens)
        self._unsettled.labels(model).inc(stats.num_unsettled_steps)
        self._again.labels(model).inc(stats.num_recomputed_tokens)
        self._promised.labels(model).inc(stats.promised)
        for decision, times in stats.decisions.items():
            self._decisions.labels(model, decision).inc(times)
        for accepted, rounds in enumerate(stats.acceptance_histogram):
            for position in range(accepted if rounds else 0):
                self._positions.labels(model, str(min(position, MAX_POSITIONS - 1))).inc(rounds)

    def _times(self, model: str, own: RequestMetrics) -> None:
        self._queue.labels(model).observe(own.queue_time)
        self._e2e.labels(model).observe(own.e2el)
        if own.first_token is None or own.started is None:
            return
        self._ttft.labels(model).observe(own.ttft)
        self._prefill.labels(model).observe(max(own.first_token - own.started, 0.0))
        if own.num_output_tokens > 1:
            self._tpot.labels(model).observe(own.tpot)
            self._decode.labels(model).observe(own.tpot * (own.num_output_tokens - 1))

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The exposition and its content type, OpenMetrics where a client accepts it."""
        encode, kind = choose_encoder(accept)
        return encode(self._registry), kind


class _Gauges(Collector):
    """How engines are now."""

    def __init__(self, engines: Mapping[str, Engine], prefix: str) -> None:
        self._engines, self._prefix = dict(engines), prefix

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """See prometheus_client; an engine that is closed has none."""
        labels = ("model_name",)
        running = GaugeMetricFamily(f"{self._prefix}num_requests_running", "Samples that have a slot.", labels=labels)
        waiting = GaugeMetricFamily(f"{self._prefix}num_requests_waiting", "Samples without one.", labels=labels)
        cache = GaugeMetricFamily(f"{self._prefix}kv_cache_usage_perc", "Of the caches, 0 to 1.", labels=labels)
        for name, engine in self._engines.items():
            try:
                usage = engine.usage
            except SpecbuildError:
                continue
            running.add_metric([name], usage.running)
            waiting.add_metric([name], usage.waiting + usage.to_come)
            cache.add_metric([name], usage.cache_tokens / max(usage.cache_capacity_tokens, 1))
        yield from (running, waiting, cache)
