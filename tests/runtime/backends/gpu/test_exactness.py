"""A device's exactness class: one shape for all steps, where that is enough."""

import plugin_executors
import pytest
from host_device import HostDevice
from shaped_model import ShapedModel, executor

from specbuild.runtime.backends.exactness import ExactnessClass
from specbuild.runtime.backends.gpu.exactness import find
from specbuild.runtime.backends.tensorrt.pages import PageTable


@pytest.mark.parametrize(("nodes", "step"), [(1, 1), (2, 2), (5, 8), (16, 16)])
def test_one_shape_is_a_class(nodes, step):
    made = executor("target", HostDevice(), 2, planted=0.2)
    assert find(made, nodes) == made.exactness == ExactnessClass(2 * step, step)
    assert list(made.buckets) == [step]


def test_a_class_has_a_digest_of_its_bits():
    """Equal for equal models, another where a model computes otherwise or steps have another shape."""
    classes = [
        find(executor("target", HostDevice(), 2, planted=planted), nodes)
        for planted, nodes in ((0.2, 8), (0.2, 8), (0.3, 8), (0.2, 2))
    ]
    first, same, other, shape = (found.digest if found else "" for found in classes)
    assert len(first) == 64
    assert first == same
    assert len({first, other, shape}) == 3


@pytest.mark.slow
@pytest.mark.nightly(only=("30",))
@pytest.mark.parametrize("count", [4, 30])
def test_pages_are_taken_and_given_back(count):
    """As many as there are; the texts are shorter where they are few."""
    device = HostDevice()
    pages = PageTable(device, 2, plugin_executors.CAPACITY, 16, count)
    made = plugin_executors.made("target", device, 2, "fp16", pages=pages)
    assert find(made, 4) == ExactnessClass(8, 4)
    assert pages.of == [[], []]
    assert not made.model.pages.stale


@pytest.mark.parametrize("where", ["steps", "texts"])
def test_what_depends_on_more_has_none(where, monkeypatch, caplog):
    """On where a step begins, be it one of several nodes or of a text."""
    write = ShapedModel.write

    def rows(self, cache, first, tokens, *more):
        return write(self, cache, first, tokens, *more) + 0.1 * (first % 3) * ((len(tokens) == 8) == (where == "steps"))

    monkeypatch.setattr(ShapedModel, "write", rows)
    made = executor("target", HostDevice(), 2, planted=0.0)
    assert find(made, 8) is made.exactness is None
    assert made.buckets == made.model.buckets
    assert "do not agree" in caplog.text
