"""A model around TensorRT's plugin does what an executor has to; decoding over pages is in test_paged_admission.py."""

import numpy as np
import pytest
from device_requests import prompt_of, run
from executor_contract import chain, check_levels, check_trees_and_commits
from host_device import HostDevice
from plugin_executors import BOUND, HEAD, loop_of, lowered, made, requests, spec, torch_model  # noqa: F401
from small_models import reference
from tiny_models import BUCKETS, CHUNK

from specbuild.runtime.backends.executor import StepInput
from specbuild.runtime.errors import ExecutionError

pytestmark = pytest.mark.nightly


def test_a_plan_with_small_trees_drafts_none_that_are_larger(host):
    """best:7 may run 42 nodes in the draft, and such a model takes 16."""
    plain = run(loop_of(host, 2), requests("off")[:2])
    done = run(loop_of(host, 2, tree_nodes=BUCKETS[-1]), [requests("best:7")[0], requests("chain:4")[1]])
    assert [s.output for s in done] == [s.output for s in plain]
    drafted = [s.metrics.speculative_decoding.num_spec_steps for s in done]
    assert drafted[0] == 0 < drafted[1]


def test_its_executor_does_what_every_one_has_to():
    """Prompts, trees from the host, commits and a draft's levels; whoever has no share in a step keeps every row."""
    model, target = torch_model("target"), made("target", HostDevice(), 3)
    target.step([chain(1, prompt_of(1, 5), 0, 1)])
    cache = target.device.array(target.model.tensors.cache)
    kept = cache[:, 1].copy()
    assert kept[:, :, :5].any()
    target.step([chain(0, prompt_of(0, CHUNK), 0, 1), chain(2, prompt_of(2, 20), 0, 0)])
    np.testing.assert_array_equal(cache[:, 1], kept)
    assert not cache[:, 2, :, 20:].any()
    assert target.model.steps == [8, CHUNK, 20], "short chunks together, long ones alone"
    for slot in range(3):
        target.commit(slot, (), 0)

    def last(text):
        return reference(model, list(text))[-1]

    check_trees_and_commits(target, [prompt_of(3, 11), prompt_of(4, 3), prompt_of(5, 1)], last, BOUND)
    check_levels(target, 1, prompt_of(6, 9), last, BOUND)
    with pytest.raises(ExecutionError, match="the tree has more than 64 nodes: ask for a smaller one"):
        target.step([StepInput(1, 80, 9, [1] * 8, [9] * 8, np.ones((8, 79), dtype=np.bool_), 8)])
