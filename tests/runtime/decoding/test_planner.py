"""Who drafts in a round, within the operator's limits, and what is noted of it."""

import pytest
from hash_models import sequence_of

from specbuild.runtime.decoding.planner import Planner
from specbuild.runtime.errors import OptionError
from specbuild.runtime.sampling.sampler import SamplingParams
from specbuild.runtime.speculation.draft_limits import Limits


def ask(tree="best:8", slot=0, length=3, **fields):
    """A sequence whose prompt is read but for its last token."""
    params = SamplingParams(**{"max_new_tokens": 9, "speculation": tree} | fields)
    sequence = sequence_of(range(length), params, slot=slot)
    sequence.cached = length - 1
    return sequence


def test_who_drafts():
    """Not who reads a prompt, wants no tree, or needs one token only; the others in their order."""
    reading, last = ask(length=4), ask(max_new_tokens=1)
    reading.cached = 2
    batch = [ask(), reading, ask("off"), ask("chain:2"), last]
    assert Planner().drafting(batch) == [batch[0], batch[3]]
    assert Planner().drafting([]) == []
    assert ask(max_new_tokens=2).drafts


@pytest.mark.parametrize(
    ("drafting", "nodes"), [(1, [8]), (2, [5, 5]), (3, [2, 2, 2]), (4, [2, 2, 2, 2]), (5, []), (6, [])]
)
def test_limits_are_those_of_as_many_as_draft(drafting, nodes):
    """Those beside them who do not are not counted, and a size between two ranges has what the one before it has."""
    planner = Planner(Limits(num_speculative_tokens_per_batch_size=[[1, 1, 20], [2, 2, 5], [3, 3, 2], [5, 9, 0]]))
    batch = [ask() for _ in range(drafting)]
    found = planner.drafting([ask("off"), *batch, ask(max_new_tokens=1)])
    assert [s.shape.nodes for s in found if s.shape] == nodes
    assert len(found) == len(nodes)
    assert all((s.shape is None) == (not nodes) for s in batch)
    assert all(s.request.tree and s.request.tree.nodes == 8 for s in batch), (
        "what is asked for stays, for the next round"
    )


def test_a_limit_of_the_rounds_to_come_is_none_that_steps_have_no_room_for():
    """What is refused stays as it was, and so does the max that steps were made for, where none is asked."""
    planner, sequence = Planner(Limits(8)), ask("best:8")
    for limits, nodes in ((Limits(3, 1.5), 3), (Limits(0), 0), (Limits(), 8)):
        planner.limit(limits)
        planner.drafting([sequence])
        assert (sequence.shape.nodes if sequence.shape else 0) == nodes
        planner.check(sequence)
    with pytest.raises(OptionError, match="max_draft_tokens 9 is more than 8, what the engine was loaded with"):
        planner.limit(Limits(9))
    assert planner.current == planner.limits == Limits(8)
    with pytest.raises(OptionError, match="drafts 9 nodes, max_draft_tokens allows 8"):
        planner.check(ask("topk:3,3"))
