"""A round's memory: what the host sends lies there, what the kernels find comes back, and nothing is left of either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from device_requests import Made, prompt_of, request_of, run
from tiny_models import BUCKETS, VOCAB

from specbuild.runtime.backends.kernels.abi import Fault, KernelLibrary
from specbuild.runtime.decoding.device.rounds import Draft, Rounds
from specbuild.runtime.decoding.device.state import ProcessorFlags
from specbuild.runtime.errors import ExecutionError
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.tree import Tree, TreeSpec

GREEDY = ProcessorFlags.of([])
SPEC = TreeSpec.parse("topk:2,3")
BRANCHES = Tree([9, 4, 5, 6], [-1, 0, 0, 2], [0, 1, 1, 2])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def decoding(made: Made, slot: int, tree: str = "topk:2,3") -> Sequence:
    """A sequence in a slot whose prompt is in the target's cache but for the token that came last."""
    sequence = request_of(prompt_of(slot, 6), speculation=tree)
    sequence.slot = slot
    made.loop.admission.enter([sequence])
    made.loop.reader.run([sequence])
    return sequence


def there(made: Made, nodes: int, *names: str) -> list[Any]:
    """What lies on the device, once everything has run."""
    made.target.wait()
    return [made.device.array(made.loop.rounds.blocks[nodes].at[name]).tolist() for name in names]


@pytest.mark.parametrize(
    ("tree", "spec", "nodes"),
    [
        (BRANCHES, None, 4),
        (Tree([9]), None, 1),
        (None, SPEC, 7),
        (None, TreeSpec.parse("chain:1"), 2),
        (None, None, 1),  # the host grows it and has not yet: the root at least
        (BRANCHES, SPEC, 4),  # the host's tree goes before
    ],
)
def test_nodes_of_a_draft(tree: Tree | None, spec: TreeSpec | None, nodes: int) -> None:
    draft = Draft(request_of([1], speculation="off"), tree, spec)
    assert draft.nodes == nodes
    assert (draft.drafts, draft.drafter, draft.option) == (False, None, None)


def test_a_step_holds_the_largest_tree(host: KernelLibrary, folder: Path) -> None:
    rounds, one = Made(host, folder).loop.rounds, request_of([1], speculation="off")
    assert tuple(rounds.blocks) == BUCKETS
    for nodes, bucket in ((1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (9, 16), (16, 16)):
        chain = Draft(one, Tree.chain([1] * nodes))
        assert rounds.bucket([chain]) == rounds.bucket([Draft(one, Tree([1])), chain, Draft(one, None)]) == bucket
    assert rounds.bucket([Draft(one, BRANCHES), Draft(one, None, SPEC)]) == 8
    with pytest.raises(ExecutionError, match="17 nodes do not fit a step"):
        rounds.bucket([Draft(one, Tree.chain([1] * 17))])


@pytest.mark.parametrize("names", [("target",), ("target", "draft")], ids=["alone", "with a draft"])
@pytest.mark.parametrize("nodes", [4, 8])
def test_what_the_host_sends_lies_there(host: KernelLibrary, folder: Path, names: tuple[str, ...], nodes: int) -> None:
    """A slot without a tree has none of the last round's, and no nodes."""
    made = Made(host, folder, 3, names)
    rounds = made.loop.rounds
    first, last = decoding(made, 0), decoding(made, 2)
    every = [
        Draft(first, Tree.chain([1, 2, 3, 4])),
        Draft(decoding(made, 1), BRANCHES),
        Draft(last, Tree.chain([7, 8])),
    ]
    rounds.draft(every, nodes, GREEDY)
    assert there(made, nodes, "counts") == [[4, 4, 2]]
    rounds.draft([Draft(first, BRANCHES), Draft(last, Tree([11]))], nodes, GREEDY)
    tokens, parents, counts, rows = there(made, nodes, "tokens", "parents", "counts", "node_rows")
    rest = [0] * (nodes - 4), [-1] * (nodes - 4)
    assert counts == [4, 0, 1]
    assert tokens == [[9, 4, 5, 6, *rest[0]], [0] * nodes, [11] + [0] * (nodes - 1)]
    assert parents == [[-1, 0, 0, 2, *rest[1]], [-1] * nodes, [-1] * nodes]
    assert rows == [[-1] * nodes] * 3, "of what the host sends the draft's cache has nothing"


def test_what_the_host_sends_lies_beside_what_the_device_grows(host: KernelLibrary, folder: Path) -> None:
    made = Made(host, folder, 3)
    grown, sent = decoding(made, 0), decoding(made, 2)
    made.loop.rounds.draft([Draft(grown, None, SPEC, True), Draft(sent, BRANCHES)], 8, GREEDY)
    tokens, parents, counts = there(made, 8, "tokens", "parents", "counts")
    assert counts == [7, 0, 4]
    assert (tokens[2][:4], parents[2][:4]) == (BRANCHES.tokens, BRANCHES.parents)
    assert tokens[0][0] == grown.tokens[-1]
    assert (parents[0][0], min(parents[0][1:7])) == (-1, 0), "all but the root have a parent"
    assert all(parent < node for node, parent in enumerate(parents[0][:7]))


def test_a_round_walks_along_the_targets_choices(host: KernelLibrary, folder: Path) -> None:
    """Of three sequences one's tree comes true in part, one has the root alone, and one slot is empty."""
    made = Made(host, folder, 3, ("target",))
    (whole,) = run(Made(host, folder, 1, ("target",)).loop, [request_of(prompt_of(0, 6), speculation="off")])
    right, root = decoding(made, 0), decoding(made, 2)
    first, second, third, *_ = whole.output
    assert right.output == [first]
    tree = Tree([first])
    tree.add((second + 1) % VOCAB, 0)
    tree.add(third, tree.add(second, 0))
    rounds, drafts = made.loop.rounds, [Draft(right, tree), Draft(root, Tree([root.tokens[-1]]))]
    nodes = rounds.bucket(drafts)
    rounds.draft(drafts, nodes, GREEDY)
    rounds.verify(nodes, GREEDY)
    host_block = rounds.blocks[nodes].host
    assert not host_block["length"].any(), "it is only enqueued"
    made.target.wait()
    assert host_block["length"].tolist() == [3, 0, 1]
    assert host_block["emitted"][0, :3].tolist() == whole.output[1:4]
    assert host_block["path"][0, :3].tolist() == [0, 2, 3]
    assert host_block["counts"].tolist() == [4, 0, 1]
    assert not host_block["fault"].any()
    assert there(made, nodes, "length") == [[3, 0, 1]]


def test_faults_are_told_and_forgotten(host: KernelLibrary, folder: Path) -> None:
    """On both sides, and those of this step alone; the next round over the same slot is sound."""
    made = Made(host, folder, 2, ("target",))
    rounds, sequences = made.loop.rounds, [decoding(made, slot) for slot in range(2)]
    wrong = Tree([sequences[1].tokens[-1], 5, 6], [-1, 2, 0], [0, 1, 1])
    drafts = [Draft(sequences[0], Tree([sequences[0].tokens[-1]])), Draft(sequences[1], wrong)]
    rounds.draft(drafts, 4, GREEDY)
    rounds.verify(4, GREEDY)
    made.target.wait()
    assert rounds.blocks[4].host["fault"].tolist() == [0, int(Fault.PARENT)]
    other = rounds.blocks[8].host["fault"]
    other[:] = 7
    rounds.forget_faults(4)
    assert not made.device._streams[made.target.stream], "it has waited"
    assert rounds.blocks[4].host["fault"].tolist() == [0, 0]
    assert there(made, 4, "fault") == [[0, 0]]
    assert other.tolist() == [7, 7]
    drafts[1].tree = Tree([sequences[1].tokens[-1]])
    rounds.draft(drafts, 4, GREEDY)
    rounds.verify(4, GREEDY)
    made.target.wait()
    assert rounds.blocks[4].host["fault"].tolist() == [0, 0]
    assert rounds.blocks[4].host["length"][1] == 1


def graphs_of(rounds: Rounds) -> list[int]:
    """How many graphs there are: of steps, and of trees that grow."""
    return [len(graphs._made) for graphs in (rounds.graphs, *([rounds.grower.graphs] if rounds.grower else []))]


@pytest.mark.parametrize("names", [("target",), ("target", "draft")], ids=["alone", "with a draft"])
def test_a_graph_is_kept_for_each_step_and_what_it_is_asked(
    host: KernelLibrary, folder: Path, names: tuple[str, ...]
) -> None:
    made = Made(host, folder, 1, names)
    rounds, sampled = made.loop.rounds, ProcessorFlags(True, False, False)
    made.loop.rounds.draft([Draft(decoding(made, 0), Tree([1]))], 1, GREEDY)
    wanted = (1, GREEDY), (2, GREEDY), (1, sampled)
    for captured in (0, 3, 3):
        for nodes, asked in wanted:
            rounds.verify(nodes, asked)
        assert (graphs_of(rounds)[0], made.device.captured) == (3, captured), "the first use enqueues"


def test_settling_runs_what_is_enqueued_and_drops_the_graphs(host: KernelLibrary, folder: Path) -> None:
    """The loop still works afterwards: graphs are captured again."""
    made, texts = Made(host, folder, 1), [request_of(prompt_of(1, 5), speculation="chain:3") for _ in range(2)]
    run(made.loop, texts[:1])
    assert all(graphs_of(made.loop.rounds))
    ran = list[str]()
    made.device.run(made.target.stream, lambda: ran.append("target"))
    assert made.loop.draft_executor
    made.device.run(made.loop.draft_executor.stream, lambda: ran.append("draft"))
    made.loop.rounds.settle()
    assert sorted(ran) == ["draft", "target"]
    assert graphs_of(made.loop.rounds) == [0, 0]
    assert run(made.loop, texts[1:])[0].output == texts[0].output


@pytest.mark.parametrize("names", [("target",), ("target", "draft")], ids=["alone", "with a draft"])
def test_settling_survives_a_device_that_fails(
    host: KernelLibrary, folder: Path, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made(host, folder, 1, names)
    run(made.loop, [request_of(prompt_of(1, 5), speculation="chain:3")])
    waited = list[int]()

    def fail(stream: int) -> None:
        waited.append(stream)
        raise ExecutionError("out of luck")

    monkeypatch.setattr(made.device, "wait", fail)
    made.loop.rounds.settle()
    assert len(waited) == len(names), "each of them is waited for, whatever became of the others"
    assert not any(graphs_of(made.loop.rounds))
