"""Observations: what a request says, and when it says nothing."""

from __future__ import annotations

import ended
import pytest

from specbuild.runtime import SamplingParams
from specbuild.serve.observation import observed


def test_means_over_its_samples() -> None:
    one, other = ended.result(0.1, 0.01, 11, accepted=(0, 2)), ended.result(0.3, 0.03, 21, "length", accepted=(4,))
    found = observed(ended.generation(ended.served(), one, other))
    assert found == pytest.approx(
        {"errors": 0, "ttft": 0.2, "tpot": 0.02, "e2el": 0.55, "tokens": 16, "cut": 0.5, "acceptance": 0.5}
        | {"acceptance_1": 2 / 3, "acceptance_2": 2 / 3, "acceptance_3": 1 / 3, "acceptance_4": 1 / 3}
    )


def test_one_token_has_no_time_per_token_and_no_draft_no_acceptance() -> None:
    found = observed(ended.generation(ended.served(), ended.result(tokens=1)))
    assert found is not None
    assert found.keys() == {"errors", "ttft", "e2el", "tokens", "cut"}


@pytest.mark.parametrize(("reason", "invalid"), [("stop", 0), ("length", 1), ("deadline", 1)])
def test_structured_outputs_are_valid_where_they_end_by_themselves(reason: str, invalid: float) -> None:
    params = SamplingParams(structured_outputs={"regex": "a+"})
    found = observed(ended.generation(ended.served(), ended.result(reason=reason), params=params))
    assert found is not None
    assert found["invalid"] == invalid


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_faults_of_the_server_are_errors_and_nothing_else(status: int) -> None:
    model = ended.served()
    assert observed(ended.generation(model, ended.result(), status=status)) == {"errors": 1.0}
    model.admission.draining = True
    assert observed(ended.generation(model, status=status)) is None


@pytest.mark.parametrize("status", [400, 404, 499])
def test_faults_of_the_client_say_nothing(status: int) -> None:
    assert observed(ended.generation(ended.served(), ended.result(), status=status)) is None
    assert observed(ended.generation(ended.served())) is None
