"""Objectives: how they are written, which requests count, and how many keep to them."""

import ended
import pytest

from specbuild.runtime import RequestMetrics, Result
from specbuild.runtime.errors import OptionError
from specbuild.serve.request.models import Models
from specbuild.serve.slo.attainment import COUNT, SECONDS, Attainment
from specbuild.serve.slo.objectives import parse


def test_how_they_are_written():
    for texts, found in (
        (["ttft=0.5,tpot=0.05,p99"], "ttft_p99 0.5 tpot_p99 0.05"),
        (["ttft=0.2,p50,ttft=1,e2el=9,p99.9"], "ttft_p50 0.2 ttft_p99.9 1 e2el_p99.9 9"),
        ([" tpot = 0.05 , p50, p95 "], "tpot_p50 0.05 tpot_p95 0.05"),
        (["ttft=1,p50,tpot=2", "ttft=2,p99"], "ttft_p50 1 tpot_p99 2 ttft_p99 2"),
    ):
        assert " ".join(f"{each.name} {each.seconds:g}" for each in parse(texts)) == found


WRONG = (
    "p99 ttft=1,p0 ttft=1,p100 ttft=fast ttft=0 ttft=inf tps=3 ttft ttft=1,ttft=2,p99 ttft=1,p99,ttft=2 {'ttft':0.5}"
)


@pytest.mark.parametrize("text", ["", *WRONG.split()])
def test_what_is_refused(text):
    with pytest.raises(OptionError) as refused:
        parse([text])
    assert "\n" not in str(refused.value)


class Watched:
    """Objectives of one model, at times of a test's own."""

    def __init__(self, *objectives):
        self.model, self.now = ended.served(), 100.0
        self._attainment = Attainment(Models([self.model]), parse(objectives), lambda: self.now)

    def end(self, count=1, **times):
        """Texts that have ended now, of five tokens; one that failed has none."""
        times = {"submitted": self.now - 9, "started": self.now - 8, "first_token": self.now - 4} | times
        metrics = RequestMetrics(1, 1, "auto", **{"num_output_tokens": 5, "finished": self.now} | times)
        results = [Result("", [1] * 5, "length", metrics)] * count
        self._attainment.ended(ended.generation(self.model, *results, Result("", [], "error", None)))

    @property
    def shares(self):
        (family,) = self._attainment.collect()
        return {sample.labels["objective"]: sample.value for sample in family.samples}


def test_the_share_of_requests_that_keep_to_an_objective():
    """Each took 5 s to its first token, 1 s a token, and 9 s in all."""
    watched = Watched("ttft=5,tpot=0.9,e2el=9,p99")
    assert set(watched.shares.values()) == {1.0}, "there are no requests yet"
    watched.end()
    assert watched.shares == {"ttft_p99": 1.0, "tpot_p99": 0.0, "e2el_p99": 1.0}
    watched.end(3, submitted=80.0, first_token=99.0)
    assert watched.shares == {"ttft_p99": 0.25, "tpot_p99": 0.75, "e2el_p99": 0.25}
    watched.end(first_token=None)
    watched.end(num_output_tokens=1)
    assert watched.shares["tpot_p99"] == 0.75, "one token has no time per token, and a text without any has no times"


def test_the_latest_requests_count():
    watched = Watched("e2el=9,p50")
    watched.end(submitted=0.0)
    assert watched.shares == {"e2el_p50": 0.0}
    watched.end(2 * COUNT)
    assert watched.shares == {"e2el_p50": 1.0}, f"{COUNT} at most"
    watched.end(submitted=0.0)
    watched.now += SECONDS + 1
    watched.end()
    assert watched.shares == {"e2el_p50": 1.0}, f"none older than {SECONDS:g} s"
