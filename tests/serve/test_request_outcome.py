"""What a request shows a canary, and when it shows nothing."""

import ended
import pytest

from specbuild.serve.canary.request_outcome import outcome_of

MODEL = ended.served()


def test_means_over_its_samples():
    one, other = ended.result(0.1, 0.01, 11), ended.result(0.3, 0.03, 21, "length")
    means = {"errors": 0, "ttft": 0.2, "tokens_per_second": 50}
    assert outcome_of(ended.generation(MODEL, one, other)) == pytest.approx(means)
    short = outcome_of(ended.generation(MODEL, ended.result(tokens=1)))
    assert short == pytest.approx({"errors": 0, "ttft": 0.1}), "one token has no speed"


@pytest.mark.parametrize(("status", "ours"), [(408, True), (503, True), (400, False), (499, False)])
def test_faults_of_the_server_are_errors_and_those_of_clients_show_nothing(status, ours):
    model = ended.served()
    assert outcome_of(ended.generation(model, ended.result(), status=status)) == ({"errors": 1.0} if ours else None)
    model.admission.draining = True
    assert outcome_of(ended.generation(model, status=status)) is None
    assert outcome_of(ended.generation(model)) is None
