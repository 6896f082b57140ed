"""The device grows every sequence's tree as the host would, over a model that runs no more than it has to."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from device_requests import prompt_of, request_of
from host_device import HostDevice, HostQueue, QueuedModel
from numpy.typing import NDArray

from specbuild.runtime.backends.executor import ModelSpec
from specbuild.runtime.backends.gpu.executor import StandardExecutor
from specbuild.runtime.backends.kernels.abi import KernelLibrary
from specbuild.runtime.decoding.device.state import Block, ProcessorFlags, Slots, round_block
from specbuild.runtime.decoding.device.tree_grower import TreeGrower
from specbuild.runtime.drafting.model import ModelDrafter
from specbuild.runtime.errors import BundleError
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.tree import TreeSpec

BATCH, VOCAB, CAPACITY, BUCKETS, CHUNK = 3, 97, 64, (1, 2, 4, 8), 12
SPEC = ModelSpec("draft", 1, 1, 1, VOCAB, CAPACITY, CHUNK)


class Counting:
    """A `Model` whose cache is the tokens, and whose logits are a sum over those that a node sees.

    So a tree is wrong as soon as a row, a mask, a position or a token is.
    """

    capturable, tree, pages, hidden, hidden_in = True, None, None, None, None

    def __init__(self, device: HostDevice, buckets: Seq[int] = BUCKETS) -> None:
        self.spec, self.batch_size, self.buckets, self.chunk, self._device = SPEC, BATCH, buckets, CHUNK, device
        self.lengths = range(1, CHUNK + 1)
        size = BATCH * max(buckets[-1], CHUNK)
        self.tokens, self.positions = (device.empty((size,), np.int32) for _ in range(2))
        self.rows = device.empty((BATCH,), np.int32)
        self.masks = {0: device.empty((size * CAPACITY,), np.bool_)}
        self.logits = device.empty((size * VOCAB,), np.float32)
        self.cache = device.empty((2, BATCH, 1, CAPACITY, 1), np.float32)
        rng = np.random.default_rng(0)
        self._own, self._seen, self._place = (rng.normal(0, 2, (VOCAB, VOCAB)) for _ in range(3))

    def enqueue(self, nodes: int, stream: int) -> None:
        self._run(range(BATCH), nodes)

    def prefill(self, slot: int, nodes: int, last: int, stream: int) -> None:
        self._device.array(self.logits)[:VOCAB] = self._run([slot], nodes)[0, last]

    def _run(self, slots: Seq[int], nodes: int) -> NDArray[np.float64]:
        shape, array = (len(slots), nodes), self._device.array
        tokens, positions = (array(each)[: len(slots) * nodes].reshape(shape) for each in (self.tokens, self.positions))
        masks = array(self.masks[0])[: len(slots) * nodes * CAPACITY].reshape(*shape, CAPACITY)
        logits = self._own[tokens] + 0.1 * self._place[positions]
        for at, slot in enumerate(slots):
            row, cache = int(array(self.rows)[at]), array(self.cache)[0, slot, 0, :, 0]
            cache[row : row + nodes] = tokens[at]
            for node in range(nodes):
                logits[at, node] += 0.3 * self._seen[cache[masks[at, node]].astype(int)].sum(axis=0)
        array(self.logits)[: logits.size] = logits.ravel()
        return logits

    def close(self) -> None: ...


def executor_of(device: HostDevice, buckets: Seq[int] = BUCKETS) -> StandardExecutor:
    model: Any = QueuedModel(Counting(device, buckets), device)  # type: ignore[arg-type]
    return StandardExecutor(device, model, device.stream())


class Growing:
    """A grower with what it is made of, and a round's block."""

    def __init__(self, host: KernelLibrary) -> None:
        self.device = HostDevice()
        self.executor = executor_of(self.device)
        self.slots = Slots(self.device, BATCH, VOCAB)
        self.grower = TreeGrower(self.executor, HostQueue(host, self.device), self.slots, BUCKETS[-1])
        self.block: Block = round_block(self.executor, BUCKETS[-1])

    @property
    def steps(self) -> list[int]:
        """The nodes of each step that the model has run."""
        found: list[int] = self.executor.model.steps  # type: ignore[attr-defined]
        return found

    def draft(self, sequences: Seq[Sequence], nodes: int = BUCKETS[-1]) -> dict[int, tuple[list[int], list[int]]]:
        """Tokens and parents of each slot's tree."""
        stream = self.executor.stream
        self.grower.catch_up([s for s in sequences if s.tree])
        self.slots.update([(s, s.tree) for s in sequences], stream)
        asked = ProcessorFlags.of([s.params for s in sequences])
        self.grower.draft([s.tree for s in sequences if s.tree], asked, self.block, nodes)
        self.block.download("tokens", "fault", stream)
        self.executor.wait()
        host = self.block.host
        assert not host["fault"].any()
        return {
            s.slot: tuple(host[name].ravel()[s.slot * nodes :][: host["counts"][s.slot]].tolist() for name in names)
            for s in sequences
            for names in [("tokens", "parents")]
        }


def sequence(slot: int, length: int, tree: str, **fields: Any) -> Sequence:
    """A text in a slot, all of whose tokens but the last one the target has seen."""
    found = request_of(prompt_of(slot, length), speculation=tree, seed=slot, **fields)
    found.slot, found.cached = slot, length - 1
    return found


def by_the_host(sequences: Seq[Sequence]) -> dict[int, tuple[list[int], list[int]]]:
    """The trees that the host grows, with the same model on a device of its own."""
    drafter = ModelDrafter(executor_of(HostDevice()), BUCKETS[-1])
    return {s.slot: (t.tokens, t.parents) for s, t in zip(sequences, drafter.propose(sequences), strict=True)}


def paths(tokens: Seq[int], parents: Seq[int]) -> set[tuple[int, ...]]:
    """The tokens from the root down to each node: the host puts the likeliest branch first, the device levels."""
    found = [(tokens[0],)]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        found.append((*found[parent], token))
    return set(found)


@pytest.mark.parametrize(
    "trees", [("chain:4", "topk:2,3", "best:7"), ("best:1", "best:7", "topk:3,2"), ("chain:1",) * 3], ids=",".join
)
def test_trees_are_those_that_the_host_grows(host: KernelLibrary, trees: tuple[str, ...]) -> None:
    """Of every shape beside others, greedy and sampled, with cut-offs, penalties and a bias."""
    asked: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "top_k": 20, "repetition_penalty": 1.3},
        {"temperature": 1.1, "logit_bias": {4: 3.0, 9: -5.0}, "presence_penalty": 0.5},
    ]
    cases = list(enumerate(zip((30, 2, 17), trees, asked, strict=True)))
    ours, theirs = ([sequence(slot, length, tree, **more) for slot, (length, tree, more) in cases] for _ in range(2))
    found = Growing(host).draft(ours)
    assert {slot: paths(*tree) for slot, tree in found.items()} == {
        slot: paths(*tree) for slot, tree in by_the_host(theirs).items()
    }
    assert [len(found[s.slot][0]) for s in ours] == [1 + TreeSpec.parse(tree).nodes for tree in trees]


def test_a_text_is_read_once_but_for_its_last_two_tokens(host: KernelLibrary) -> None:
    """In steps of all slots; then a pair of nodes and a step for each further level, whatever the tree."""
    made, text = Growing(host), sequence(1, 31, "chain:3")
    first = made.draft([text])
    assert made.steps == [8, 8, 8, 8, 2, 1, 1]  # the last has five
    made.steps.clear()
    made.grower.commit(text, 30)
    assert made.draft([text]) == first
    assert made.steps == [2, 1, 1]


def test_a_draft_needs_a_step_of_two() -> None:
    device = HostDevice()
    executor, slots = executor_of(device, (1, 4, 8)), Slots(device, BATCH, VOCAB)
    kernels: Any = SimpleNamespace(workspace=lambda params: 0)
    with pytest.raises(BundleError, match=r"^the draft has no step of two nodes: build it with a bucket of 2$"):
        TreeGrower(executor, kernels, slots, 8)
