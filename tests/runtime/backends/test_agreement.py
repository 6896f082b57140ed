"""Steps agree or they do not: a device's model of one shape, and one whose steps depend on what is in them."""

import numpy as np
import pytest
from host_device import HostDevice
from shaped_model import executor
from tiny_models import CAPACITY, VOCAB

from specbuild.runtime.backends.agreement import agree, read, texts
from specbuild.runtime.backends.exactness import ExactnessClass
from specbuild.runtime.backends.gpu.executor import StandardExecutor


@pytest.mark.parametrize(("planted", "kept", "found"), [(0.0, False, True), (0.1, False, False), (0.1, True, True)])
def test_shapes_matter_where_kernels_differ_by_them(planted, kept, found):
    made = executor("target", HostDevice(), 2, planted)
    made.keep_to(ExactnessClass(16, 8) if kept else None)
    assert (agree(made, 2, 8, every=4) is not None) is found
    assert found or agree(made, 2, 8) is None, "what is read again differs already"


def test_a_text_may_end_where_steps_begin(monkeypatch):
    """No step is of nothing."""
    made, step = executor("target", HostDevice(), 1, 0.0), StandardExecutor.step
    seen = list[int]()

    def noted(self, inputs):
        seen.extend(len(each.tokens) for each in inputs)
        return step(self, inputs)

    monkeypatch.setattr(StandardExecutor, "step", noted)
    for count in range(12, 20):
        assert agree(made, 0, 8, several=[list(range(count))]) is not None
    assert min(seen) >= 1


def test_a_text_is_read_in_steps():
    made = executor("target", HostDevice(), 2, 0.0)
    long, short = (read(made, 1, texts(made)[1], most) for most in (16, 8))
    assert 0 < len(long) < CAPACITY
    assert long.shape[1] == VOCAB
    assert np.array_equal(long, short)
