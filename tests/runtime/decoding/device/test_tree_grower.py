"""A device's draft model runs no more than it has to; that its trees are the host's is the contract of loops."""

from types import SimpleNamespace

import pytest
from device_requests import Made, check_plain, prompt_of, request_of, run

from specbuild.runtime.decoding.device.tree_grower import TreeGrower
from specbuild.runtime.errors import BundleError


@pytest.mark.slow
def test_a_text_is_read_once_but_for_its_last_two_tokens(host, folder):
    """In as few steps as there may be; then a pair of nodes and a step for each further level, whatever came true."""
    made = Made(host, folder, 1)
    done = run(made.loop, [request_of(prompt_of(1, 31), speculation="chain:3")])
    check_plain(folder, done)
    steps = made.loop.draft_executor.model.steps
    reading, drafting = steps[: steps.index(2)], steps[steps.index(2) :]
    assert 30 <= sum(reading) < 30 + 8
    assert drafting == [2, 1, 1] * done[0].metrics.speculative_decoding.num_spec_steps


def test_a_draft_needs_a_step_of_two():
    executor = SimpleNamespace(model=SimpleNamespace(buckets=(1, 4, 8)))
    with pytest.raises(BundleError, match=r"^the draft has no step of two nodes: build it with a bucket of 2$"):
        TreeGrower(executor, SimpleNamespace(), SimpleNamespace(), 8)
