"""The folder of the tiny models' graphs, which all loops share."""

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Where `tiny_models.executor` saves a model's graph, and finds it again."""
    return tmp_path_factory.mktemp("models")
