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
from specbuild.runtime.decoding.device.tree_grower import Extent, TreeGrower
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


def test_what_drafts_nothing_has_no_tree_beside_others(host: KernelLibrary) -> None:
    made, drafts = Growing(host), sequence(2, 9, "topk:2,2")
    plain = [sequence(0, 5, "off"), sequence(1, 40, "off", temperature=1.0)]
    found = made.draft([*plain, drafts])
    assert [len(tokens) for tokens, _ in (found[0], found[1])] == [0, 0]
    assert paths(*found[2]) == paths(*by_the_host([sequence(2, 9, "topk:2,2")])[2])


def test_a_text_is_read_once_but_for_its_last_two_tokens(host: KernelLibrary) -> None:
    """In steps of all slots; then a pair of nodes and a step for each further level, whatever the tree."""
    made, text = Growing(host), sequence(1, 31, "chain:3")
    first = made.draft([text])
    assert made.steps == [8, 8, 8, 8, 2, 1, 1]  # the last has five
    made.steps.clear()
    made.grower.commit(text, 30)
    assert made.draft([text]) == first
    assert made.steps == [2, 1, 1]


def test_a_long_text_is_read_in_longer_steps(host: KernelLibrary) -> None:
    """While more than four steps of all slots are left; several texts share those."""
    made = Growing(host)
    made.draft([sequence(0, 38, "chain:2"), sequence(2, 20, "chain:2")])
    assert made.steps == [12, 8, 8, 8, 8, 2, 1]


def test_a_slot_goes_on_from_anothers_rows(host: KernelLibrary) -> None:
    """As many as that one's cache has; they are not read again."""
    made, text = Growing(host), sequence(0, 27, "chain:2")
    made.draft([text])
    made.grower.commit(text, 26)
    made.grower.release(0)
    other = request_of([*text.tokens[:20], 5, 6], speculation="best:5", seed=3)
    other.slot, other.cached = 2, 21
    made.grower.keep(2, 0, 20)
    made.steps.clear()
    found = made.draft([other])
    again = request_of(other.tokens, speculation="best:5", seed=3)
    again.slot = 2
    assert found == by_the_host([again])
    assert made.steps[0] == 2, "no chunk was read"


def test_the_same_extent_is_one_graph(host: KernelLibrary) -> None:
    """Trees of other shapes that take no more of anything, and other sequences, are grown by it as well."""
    made = Growing(host)
    for slot, captured in ((0, 0), (1, 1), (0, 1)):
        made.draft([sequence(slot, 2, "best:7")])
        assert made.device.captured == captured, "the first use enqueues"
    made.draft([sequence(0, 2, "best:7"), sequence(1, 2, "chain:2")])
    assert made.device.captured == 1
    for _ in range(2):
        made.draft([sequence(0, 2, "best:7", temperature=0.8, top_p=0.9)])
        made.draft([sequence(0, 2, "chain:2")])
    assert made.device.captured == 3


@pytest.mark.parametrize(
    ("trees", "extent"),
    [
        (["chain:4"], Extent(levels=4, branch=1, frontiers=1, pool=5, rows=3, nodes=8)),
        (["topk:3,2"], Extent(levels=2, branch=3, frontiers=4, pool=7, rows=4, nodes=8)),
        (["best:7"], Extent(levels=7, branch=4, frontiers=8, pool=50, rows=42, nodes=8)),
        (["chain:4", "topk:3,2"], Extent(levels=4, branch=3, frontiers=4, pool=7, rows=4, nodes=8)),
        (["chain:1"], Extent(levels=1, branch=1, frontiers=1, pool=2, rows=1, nodes=8)),
    ],
)
def test_a_graph_has_room_for_the_most_of_everything(trees: list[str], extent: Extent) -> None:
    """Frontiers are whole steps; a level's rows are at least those of a step."""
    specs = [TreeSpec.parse(tree) for tree in trees]
    assert Extent.of(specs, executor_of(HostDevice()), 8) == extent


def test_a_draft_needs_a_step_of_two() -> None:
    device = HostDevice()
    executor, slots = executor_of(device, (1, 4, 8)), Slots(device, BATCH, VOCAB)
    kernels: Any = SimpleNamespace(workspace=lambda params: 0)
    with pytest.raises(BundleError, match=r"^the draft has no step of two nodes: build it with a bucket of 2$"):
        TreeGrower(executor, kernels, slots, 8)
