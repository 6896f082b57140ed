"""Models on a CPU: any batch of a bundle's one graph, or one line."""

import logging

import pytest

from specbuild.runtime import Bundle
from specbuild.runtime.backends.cpu.cores import cores
from specbuild.runtime.backends.cpu.load import load_model
from specbuild.runtime.errors import BundleError


@pytest.fixture(scope="module")
def opened(bundle):
    return Bundle.open(bundle)


def test_a_graph_that_is_not_there_is_said_in_one_line(opened, tmp_path):
    with pytest.raises(BundleError, match=r"target/model\.onnx cannot be read"):
        load_model(Bundle(tmp_path, opened.manifest), "target", 1, threads=1)


def test_more_threads_than_cores_are_warned_of(opened, caplog, logged):
    with caplog.at_level(logging.WARNING, "specbuild"):
        load_model(opened, "draft", 1, threads=cores()).close()
        assert not logged()
        load_model(opened, "draft", 1, threads=cores() + 2).close()
    (record,) = logged()
    assert record.getMessage().startswith(f"{cores() + 2} threads on {cores()} cores")
