"""The proposer: what constraints force comes first, and what they forbid is not drafted."""

import pytest
from hash_models import sequence_of
from small_grammars import grammar, ids

from specbuild.runtime.drafting.proposer import Proposer, constrained
from specbuild.runtime.sampling.sampler import SamplingParams
from specbuild.runtime.speculation.tree import Tree


def asked_of(regex, **fields):
    params = SamplingParams(**{"max_new_tokens": 20, "constraint": grammar(regex=regex)} | fields)
    made = sequence_of([1, 2, 0], params)
    return made


@pytest.mark.parametrize(
    ("regex", "tree", "drafted"),
    [
        ("abcd01", "chain:9", "ab cd 0 1"),
        ("abcd01", "chain:3", "ab cd 0"),
        ("abcd01", "best:2", "ab cd"),
        ("(a|0)cd", "chain:9", ""),
    ],
)
def test_what_has_to_come_is_drafted_before_anybody_is_asked(regex, tree, drafted):
    made = asked_of(regex, speculation=tree)
    (proposal,) = Proposer(looks_up=False).propose([made])
    assert proposal.tree.tokens[1:] == ids(drafted)


def test_a_lookup_is_cut_where_it_is_illegal_and_goes_on_with_what_has_to_come():
    """The text went on with a, 0 after what it ends with; of that a alone is legal, and cd has to come after it."""
    made = asked_of("(a|b)cd1", speculation="chain:6")
    found = constrained(made, Tree.chain([9, *ids("a 0 0")]), 6)
    assert found.tokens[1:] == ids("a cd 1")
    free = sequence_of([1, 2], SamplingParams(9, speculation="off"))
    assert constrained(free, (same := Tree.chain([9, 1, 2])), 6) is same


def test_each_branch_goes_on_with_what_has_to_come_while_there_is_room():
    """The first ones first; a branch that is illegal is left out, and what two have in common is there once."""
    made, branched = asked_of("((a|b)cd0)+1", speculation="best:9"), Tree([9])
    for token, parent in zip(ids("a cd b 0 1"), (0, 1, 0, 0, 2), strict=True):
        branched.add(token, parent)  # a cd 1, b, 0: neither 1 nor 0 is legal there
    found = constrained(made, branched, 9)
    assert {tuple(found.path(node)) for node in range(1, len(found))} == {
        *(tuple(ids("a cd 0")[:count]) for count in (1, 2, 3)),
        *(tuple(ids("b cd 0")[:count]) for count in (1, 2, 3)),
    }
    assert len(constrained(made, branched, 5)) == 6
