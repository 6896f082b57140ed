"""Who drafts in a round, within the operator's limits, and what is noted of it."""

from __future__ import annotations

from typing import Any

import pytest

from specbuild.runtime.decoding.planner import Planner
from specbuild.runtime.errors import OptionError
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.sampling.sampler import SamplingParams
from specbuild.runtime.speculation.draft_limits import Limits


def ask(request_of: Any, tree: str = "best:8", slot: int = 0, length: int = 3, **fields: Any) -> Sequence:
    """A sequence whose prompt is read but for its last token."""
    params = SamplingParams(**{"max_new_tokens": 9, "speculation": tree} | fields)
    sequence: Sequence = request_of(range(length), params, slot=slot)
    sequence.cached = length - 1
    return sequence


@pytest.mark.parametrize(("tree", "nodes"), [("best:9", 9), ("topk:3,3", 9), ("chain:9", 9), ("best:60", 60)])
def test_a_larger_tree_than_is_allowed_is_refused(request_of: Any, tree: str, nodes: int) -> None:
    with pytest.raises(OptionError) as caught:
        Planner(Limits(max_draft_tokens=8)).check(ask(request_of, tree))
    assert f"{nodes} nodes, max_draft_tokens allows 8" in str(caught.value)
    Planner(Limits(max_draft_tokens=nodes)).check(ask(request_of, tree))


def test_who_drafts(request_of: Any) -> None:
    """Not who reads a prompt, wants no tree, or needs one token only; the others in their order."""
    reading, last = ask(request_of, length=4), ask(request_of, max_new_tokens=1)
    reading.cached = 2
    batch = [ask(request_of), reading, ask(request_of, "off"), ask(request_of, "chain:2"), last]
    assert Planner().drafting(batch) == [batch[0], batch[3]]
    assert Planner().drafting([]) == []
    assert ask(request_of, max_new_tokens=2).drafts


@pytest.mark.parametrize(
    ("drafting", "nodes"), [(1, [8]), (2, [5, 5]), (3, [2, 2, 2]), (4, [2, 2, 2, 2]), (5, []), (6, [])]
)
def test_limits_are_those_of_as_many_as_draft(request_of: Any, drafting: int, nodes: list[int]) -> None:
    """Those beside them who do not are not counted, and a size between two ranges has what the one before it has."""
    planner = Planner(Limits(num_speculative_tokens_per_batch_size=[[1, 1, 20], [2, 2, 5], [3, 3, 2], [5, 9, 0]]))
    batch = [ask(request_of) for _ in range(drafting)]
    found = planner.drafting([ask(request_of, "off"), *batch, ask(request_of, max_new_tokens=1)])
    assert [s.shape.nodes for s in found if s.shape] == nodes
    assert len(found) == len(nodes)
    assert all((s.shape is None) == (not nodes) for s in batch)
    assert all(s.tree and s.tree.nodes == 8 for s in batch), "what is asked for stays, for the next round"


def test_limits_of_the_rounds_to_come(request_of: Any) -> None:
    """What is refused stays as it was, and so does the max that steps were made for."""
    planner, sequence = Planner(Limits(8)), ask(request_of, "best:8")
    for limits, nodes in ((Limits(3, 1.5), 3), (Limits(0), 0), (Limits(), 8)):
        planner.limit(limits)
        planner.drafting([sequence])
        assert (sequence.shape.nodes if sequence.shape else 0) == nodes
        planner.check(sequence)
    assert planner.now == planner.limits == Limits(8)
    planner.limit(Limits(2))
    with pytest.raises(OptionError, match="max_draft_tokens 9 is more than 8, what the engine was loaded with"):
        planner.limit(Limits(9))
    assert planner.now == Limits(2)
    with pytest.raises(OptionError, match="drafts 9 nodes"):
        planner.check(ask(request_of, "best:9"))


def test_a_round_is_counted(request_of: Any) -> None:
    sequence = ask(request_of)
    told = sequence.metrics.speculative_decoding
    Planner.record(sequence, 6, [0, 2, 5], 7, 3)
    assert (told.num_spec_steps, told.num_draft_tokens, told.num_accepted_draft_tokens) == (1, 6, 2)
    assert (told.acceptance_histogram, told.depth_histogram) == ([0, 0, 1], [0, 0, 0, 1])
    Planner.record(sequence, 4, [0], 7)
    Planner.record(sequence, 0, [0], 7)  # it drafted nothing, and no policy decided that
    assert (told.num_spec_steps, told.num_draft_tokens, told.num_accepted_draft_tokens) == (2, 10, 2)
    assert (told.acceptance_histogram, told.depth_histogram) == ([1, 0, 1], [0, 0, 0, 1]), "nobody knows how deep"
    assert told.decisions == {}
