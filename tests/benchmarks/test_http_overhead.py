"""The benchmark of the server on the reference pair: each contender's figures, and their ratios."""

import asyncio

import pytest

from benchmarks.common import serving
from benchmarks.serve import http_overhead

pytestmark = pytest.mark.nightly


def test_the_server_is_held_against_the_engine(bundle):
    with serving(bundle, "--max-num-seqs", "4") as server:
        found = asyncio.run(http_overhead.measure(bundle, server.url, requests=4, turns=1))
    assert list(found) == ["1", "4", "16"]
    for row in found.values():
        for name, value in row["server/engine"].items():
            assert value == row["server"][name] / row["engine"][name] > 0
    assert server.process.returncode == 0
