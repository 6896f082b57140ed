"""Trees: the grammar, and a tree's own answers against a naive recomputation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import random_tree

from specbuild.runtime.errors import OptionError
from specbuild.runtime.speculation.tree import TreeSpec


@pytest.mark.parametrize(
    ("text", "branch", "width", "expand", "depth", "nodes", "fills"),
    [
        ("chain:1", 1, 1, 1, 1, 1, True),
        ("chain:63", 1, 1, 1, 63, 63, True),
        ("topk:2,3", 2, 2, 2, 3, 6, False),
        ("topk:1,5", 1, 1, 1, 5, 5, True),
        ("topk:7,1", 7, 7, 7, 1, 7, False),
        ("best:1", 1, 1, 1, 1, 1, True),
        ("best:5", 4, 5, 5, 5, 5, True),
        ("best:16", 4, 16, 8, 8, 16, True),
    ],
)
def test_grammar_counts_without_the_root(text, branch, width, expand, depth, nodes, fills):
    spec = TreeSpec.parse(text)
    assert spec == TreeSpec(text, branch, width, expand, depth, nodes)
    assert (str(spec), spec.longest_chain) == (text, nodes if fills else depth)
    assert spec.check(nodes + 1) is spec
    with pytest.raises(OptionError, match=f"{nodes} nodes.*at most {nodes - 1}"):
        spec.check(nodes)


@given(
    st.one_of(
        st.text(alphabet="chainbestopk:,0123456789 -\n", max_size=12),
        st.from_regex(r"(chain|best|topk):-?[0-9]{1,5}([0-9]{1,4})?\n?"),
        st.text(),
        st.sampled_from([None, 4, 4.0, b"chain:4", ["chain:4"], True, "Chain:4", "auto", "off", "chain:" + "9" * 5000]),
    )
)
def test_what_is_no_tree_is_refused_in_one_line(text):
    try:
        spec = TreeSpec.parse(text)
    except OptionError as error:
        message = str(error)
    else:
        kind, _, numbers = text.partition(":")
        values = [int(number) for number in numbers.split(",")]
        assert text == text.strip()
        assert len(values) == {"chain": 1, "best": 1, "topk": 2}[kind]
        assert 0 < min(values) <= max(values) <= 4096
        assert spec.nodes == int(np.prod(values))
        return
    assert " ".join(repr(text)[:99].split()) in message  # one line has no two spaces in a row


@pytest.mark.slow
@given(st.integers(0, 2**32), st.integers(1, 25))
def test_a_tree_against_a_naive_recomputation(seed, size):
    tree = random_tree(np.random.default_rng(seed), size, 10)
    assert size == len(tree) == len(tree.tokens) == len(tree.parents) == len(tree.depths)
    above = []  # per node, itself and its ancestors, root first
    for node in range(size):
        chain = [node]
        while tree.parents[chain[0]] >= 0:
            chain.insert(0, tree.parents[chain[0]])
        above.append(chain)
    assert tree.depths == [len(chain) - 1 for chain in above]
    assert [tree.path(node) for node in range(size)] == [[tree.tokens[n] for n in chain[1:]] for chain in above]
    assert tree.ancestors().tolist() == [[other in chain for other in range(size)] for chain in above]
    assert tree.is_chain == all(tree.parents[node] == node - 1 for node in range(size))
    children = tree.children()
    assert {key: node for key, node in children.items() if node} == {
        (tree.parents[node], tree.tokens[node]): node for node in range(1, size)
    }
    assert all(children.get((node, token)) != 0 for node in range(size) for token in range(10))
