"""Steps of two graphs, timed in turns: and which are timed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_models import fused, random_model

from specbuild.builder.check.step_times import PLAIN, save_plain, step_times
from specbuild.builder.frontend.attention_layout import probe
from specbuild.runtime.backends.executor import ModelSpec

CAPACITY = 24


class Fake:
    """An executor of which each step takes as long as its graph's name says."""

    made: list[Fake]
    spec = SimpleNamespace(reads_hidden=False)

    def __init__(self, graph: Path) -> None:
        self.seconds, self.each, self.closed = 0.0, float(graph.name), False
        self.batch_size, self.calls = 1, list[tuple[int, int]]()
        Fake.made.append(self)

    def step(self, shares: Any) -> None:
        (share,) = shares
        self.calls.append((len(share.tokens), share.start))
        self.seconds += self.each * len(share.tokens)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Fake]]:
    Fake.made = []
    monkeypatch.setattr("specbuild.builder.check.step_times.OrtExecutor", lambda graph, *args, **options: Fake(graph))
    return lambda: Fake.made


def spec(capacity: int) -> ModelSpec:
    return ModelSpec("t", 1, 2, 16, 97, capacity, 64)


@pytest.mark.parametrize(("largest", "capacity", "sizes"), [(64, 1000, [1, 8, 32]), (1, 1000, [1]), (16, 12, [1, 8])])
def test_medians_by_graph_and_nodes(
    fakes: Callable[[], list[Fake]], largest: int, capacity: int, sizes: list[int]
) -> None:
    found = step_times({"a": Path("0.001"), "b": Path("0.25")}, spec(capacity), largest)
    assert found == {
        "a": {str(n): pytest.approx(1.0 * n) for n in sizes},
        "b": {str(n): pytest.approx(250.0 * n) for n in sizes},
    }
    assert all(each.closed for each in fakes())
    assert max(nodes + start for each in fakes() for nodes, start in each.calls) <= capacity


def test_executors_are_closed_whatever_happens(
    fakes: Callable[[], list[Fake]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specbuild.builder.check.step_times.timed_step", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step_times({"a": Path("1"), "b": Path("2")}, spec(40), 8)
    assert [each.closed for each in fakes()] == [True, True]


def test_a_real_graph_takes_its_time(tmp_path: Path) -> None:
    model = random_model("llama", num_hidden_layers=1)
    layout = probe(model.config, CAPACITY)
    save_plain(fused(model, CAPACITY).clone(), CAPACITY, tmp_path)
    real = ModelSpec("t", 1, layout.kv_heads, layout.head_dim, 97, CAPACITY, 8)
    found = step_times({"float32": tmp_path / PLAIN}, real, 8)
    assert list(found["float32"]) == ["1", "8"]
    assert all(each > 0 for each in found["float32"].values())
