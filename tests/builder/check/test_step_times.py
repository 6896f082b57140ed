"""Steps of two graphs, timed in turns: and which are timed."""

import pytest
from small_models import fused, random_model

from specbuild.builder.check.step_times import PLAIN, save_plain, step_times
from specbuild.builder.frontend.attention_layout import probe
from specbuild.runtime.backends.executor import ModelSpec

CAPACITY = 24


@pytest.mark.slow
@pytest.mark.parametrize(("largest", "sizes"), [(8, ["1", "8"]), (1, ["1"])])
def test_each_graph_is_timed_by_nodes(tmp_path, largest, sizes):
    model = random_model("llama", num_hidden_layers=1)
    layout = probe(model.config, CAPACITY)
    save_plain(fused(model, CAPACITY).clone(), CAPACITY, tmp_path)
    spec = ModelSpec("t", **layout.spec, vocab_size=97, capacity=CAPACITY, max_nodes=largest)
    found = step_times(dict.fromkeys("ab", tmp_path / PLAIN), spec, largest)
    assert {name: list(each) for name, each in found.items()} == {"a": sizes, "b": sizes}
    assert all(time > 0 for each in found.values() for time in each.values())
