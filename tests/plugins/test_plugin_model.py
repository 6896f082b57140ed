"""A model around TensorRT's plugin, driven as one in standard operators is: plain decoding's tokens, its own cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import pytest
from device_requests import prompt_of, run
from executor_contract import chain, check_levels, check_trees_and_commits
from host_device import HostDevice, QueuedModel
from numpy.typing import NDArray
from plugin_executors import BOUND, HEAD, _in_float32, loop_of, lowered, made, requests, spec, torch_model  # noqa: F401
from small_models import reference
from tiny_models import BUCKETS, CAPACITY, CHUNK, lower_model

from specbuild.runtime.backends.executor import StepInput
from specbuild.runtime.backends.gpu.executor import StandardExecutor
from specbuild.runtime.backends.gpu.onnxruntime_cuda import OrtModel
from specbuild.runtime.backends.kernels.abi import KernelLibrary
from specbuild.runtime.decoding.device.proposals import Proposals
from specbuild.runtime.decoding.device.rounds import Draft
from specbuild.runtime.decoding.host_loop import HostLoop
from specbuild.runtime.errors import ExecutionError
from specbuild.runtime.requests.sequence import Sequence as Request
from specbuild.runtime.speculation.tree import Tree

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The requests' tokens by plain decoding of the same model in standard operators, one by one."""
    path, device = tmp_path_factory.mktemp("standard") / "target.onnx", HostDevice()
    ir.save(lower_model(torch_model("target"), CAPACITY), path)
    stream = device.stream()
    model = QueuedModel(OrtModel(path, spec("target"), device, 1, BUCKETS, CHUNK, "cpu", stream), device)
    loop = HostLoop(StandardExecutor(device, model, stream), None, CHUNK, frozenset())
    return [s.output for s in run(loop, requests("off"))]


def test_a_fault_ends_its_sequence_alone(
    host: KernelLibrary, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plugin reports none; who checks the tree for it does."""
    loop, batch = loop_of(host, 2), requests("chain:3", 2)
    plan = Proposals.plan

    def wrong(proposals: Proposals, sequences: list[Request]) -> list[Draft]:
        drafts = plan(proposals, sequences)
        for draft, sequence in zip(drafts, sequences, strict=True):
            if sequence is batch[0] and len(sequence.output) > 2:
                draft.tree, draft.spec = Tree([sequence.tokens[-1], 5, 6], [-1, 2, 0], [0, 1, 1]), None
        return drafts

    monkeypatch.setattr(Proposals, "plan", wrong)
    run(loop, batch)
    assert "fault PARENT" in str(batch[0].error)
    assert batch[0].output == expected[0][: len(batch[0].output)]
    assert batch[1].output == expected[1]


def test_a_plan_with_small_trees_drafts_none_that_are_larger(host: KernelLibrary, expected: list[list[int]]) -> None:
    """best:7 may run 42 nodes in the draft, and such a model takes 16."""
    loop = loop_of(host, 2, tree_nodes=BUCKETS[-1])
    done = run(loop, [*requests("best:7", 1), *requests("chain:4", 2)[1:]])
    assert [s.output for s in done] == expected[:2]
    drafted = [s.metrics.speculative_decoding.num_spec_steps for s in done]
    assert drafted[0] == 0 < drafted[1]


def test_its_executor_does_what_every_one_has_to() -> None:
    """Prompts, trees from the host, commits and a draft's levels; whoever has no share in a step keeps every row."""
    model, target = torch_model("target"), made("target", HostDevice(), 3)
    target.step([chain(1, prompt_of(1, 5), 0, 1)])
    cache = target.device.array(target.model.cache)
    kept = cache[:, 1].copy()
    assert kept[:, :, :5].any()
    target.step([chain(0, prompt_of(0, CHUNK), 0, 1), chain(2, prompt_of(2, 20), 0, 0)])
    np.testing.assert_array_equal(cache[:, 1], kept)
    assert not cache[:, 2, :, 20:].any()
    assert target.model.steps == [8, CHUNK, 20], "short chunks together, long ones alone"
    for slot in range(3):
        target.commit(slot, (), 0)

    def last(text: Sequence[int]) -> NDArray[np.float32]:
        return reference(model, list(text))[-1]

    check_trees_and_commits(target, [prompt_of(3, 11), prompt_of(4, 3), prompt_of(5, 1)], last, BOUND)
    check_levels(target, 1, prompt_of(6, 9), last, BOUND)
    with pytest.raises(ExecutionError, match="the tree has more than 64 nodes: ask for a smaller one"):
        target.step([StepInput(1, 80, 9, [1] * 8, [9] * 8, np.ones((8, 79), dtype=np.bool_), 8)])
