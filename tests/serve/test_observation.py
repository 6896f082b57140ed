"""Observations: what a request says, and when it says nothing."""

import ended
import pytest

from specbuild.runtime import SamplingParams
from specbuild.serve.request_outcome import observed

MODEL = ended.served()


def test_means_over_its_samples():
    one, other = ended.result(0.1, 0.01, 11, accepted=(0, 2)), ended.result(0.3, 0.03, 21, "length", accepted=(4,))
    means = {"errors": 0, "ttft": 0.2, "tpot": 0.02, "e2el": 0.55, "tokens": 16, "cut": 0.5, "acceptance": 0.5}
    assert observed(ended.generation(MODEL, one, other)) == pytest.approx(means)
    short = observed(ended.generation(MODEL, ended.result(tokens=1)))
    assert short
    assert short.keys() == {"errors", "ttft", "e2el", "tokens", "cut"}, "neither a time per token nor a draft"


@pytest.mark.parametrize(("reason", "invalid"), [("stop", 0), ("length", 1), ("deadline", 1)])
def test_structured_outputs_are_valid_where_they_end_by_themselves(reason, invalid):
    params = SamplingParams(structured_outputs={"regex": "a+"})
    found = observed(ended.generation(MODEL, ended.result(reason=reason), params=params))
    assert found
    assert found["invalid"] == invalid


@pytest.mark.parametrize(("status", "ours"), [(408, True), (503, True), (400, False), (499, False)])
def test_faults_of_the_server_are_errors_and_those_of_clients_say_nothing(status, ours):
    model = ended.served()
    assert observed(ended.generation(model, ended.result(), status=status)) == ({"errors": 1.0} if ours else None)
    model.admission.draining = True
    assert observed(ended.generation(model, status=status)) is None
    assert observed(ended.generation(model)) is None
