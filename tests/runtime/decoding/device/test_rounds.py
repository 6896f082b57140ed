"""A round's memory: what the host sends lies there, what the kernels find comes back, and nothing is left of either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from device_requests import Made, prompt_of, request_of, run
from tiny_models import VOCAB

from specbuild.runtime.backends.kernels.abi import Fault, KernelLibrary
from specbuild.runtime.decoding.device.rounds import Draft
from specbuild.runtime.decoding.device.state import ProcessorFlags
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.tree import Tree

GREEDY = ProcessorFlags.of([])


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
    assert rounds.blocks[4].host["fault"].tolist() == [0, 0]
    assert there(made, 4, "fault") == [[0, 0]]
    assert other.tolist() == [7, 7]
    drafts[1].tree = Tree([sequences[1].tokens[-1]])
    rounds.draft(drafts, 4, GREEDY)
    rounds.verify(4, GREEDY)
    made.target.wait()
    assert rounds.blocks[4].host["fault"].tolist() == [0, 0]
    assert rounds.blocks[4].host["length"][1] == 1
