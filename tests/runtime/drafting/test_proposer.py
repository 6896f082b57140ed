"""The proposer: what constraints force comes first, and what they forbid is not drafted."""

import pytest
from hash_models import sequence_of
from small_grammars import grammar, ids

from specbuild.runtime.drafting.proposer import Proposer, legal
from specbuild.runtime.sampling.sampler import SamplingParams


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
    assert legal(made, ids("a 0 0"), 6) == ids("a cd 1")
    assert legal(made, ids("a 0"), 2) == ids("a cd")
    free = sequence_of([1, 2], SamplingParams(9, speculation="off"))
    assert legal(free, [1, 2], 6) == [1, 2]
