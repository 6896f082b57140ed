"""The graph in standard operators computes what PyTorch does, and a graph that does not is refused."""

import numpy as np
import pytest
from small_models import fused, random_model, reference

from specbuild.builder.check.standard_chain import graph_difference, graph_logits
from specbuild.runtime.errors import ExecutionError

CAPACITY = 24
LOCAL = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "num_hidden_layers": 2}
LOGITS = [np.array([[1.0, 0.0, -2.0]] * length, np.float32) for length in (4, 1)]
TEXTS = [[7], list(range(3, 23)), [96] * 24]


@pytest.fixture(scope="module")
def model():
    """A layer that sees everything, and one with a window."""
    return random_model("qwen2", **LOCAL)


@pytest.mark.slow
def test_logits_are_pytorchs(model):
    """Each text in an empty cache, whatever was computed before; longer ones see less than all in the second layer."""
    found = graph_logits(fused(model, CAPACITY), CAPACITY, TEXTS)
    for text, logits in zip(TEXTS, found, strict=True):
        assert (logits.shape, logits.dtype) == ((len(text), 97), np.float32)
        np.testing.assert_allclose(logits, reference(model, text), rtol=1e-4, atol=1e-4)


def moved(by):
    """The logits with one of each text moved."""
    found = [each.copy() for each in LOGITS]
    for logits in found:
        logits[-1, 2] += by
    return found


@pytest.mark.parametrize(("by", "rounds"), [(0.0, False), (1e-3, False), (-1e-3, True), (0.02, True)])
def test_the_largest_distance_of_any_logit(by, rounds):
    """Where inputs are rounded a last bit may turn a step: what counts then are the distributions."""
    assert graph_difference(moved(by), LOGITS, rounds) == pytest.approx(abs(by), abs=1e-6)


@pytest.mark.parametrize(("by", "rounds"), [(0.02, False), (-0.5, False), (2.0, True)])
def test_another_model_is_refused(by, rounds):
    with pytest.raises(ExecutionError) as caught:
        graph_difference(moved(by), LOGITS, rounds)
    assert str(caught.value) == (
        f"the bundle's logits differ from Hugging Face's by up to {abs(by):.2g}: nothing was written"
    )
