"""Trees: the grammar, and a tree's own answers against a naive recomputation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime.errors import OptionError
from specbuild.runtime.speculation.tree import Tree, TreeSpec


@st.composite
def trees(draw: st.DrawFn, most: int = 24) -> Tree:
    tree = Tree([draw(st.integers(0, 9))])
    for _ in range(draw(st.integers(0, most))):
        parent, token = draw(st.integers(0, len(tree) - 1)), draw(st.integers(0, 9))
        if (parent, token) not in tree.children():
            tree.add(token, parent)
    return tree


@pytest.mark.parametrize(
    ("text", "branch", "width", "expand", "depth", "nodes"),
    [
        ("chain:1", 1, 1, 1, 1, 1),
        ("chain:4", 1, 1, 1, 4, 4),
        ("chain:63", 1, 1, 1, 63, 63),
        ("topk:2,3", 2, 2, 2, 3, 6),
        ("topk:4,4", 4, 4, 4, 4, 16),
        ("topk:1,5", 1, 1, 1, 5, 5),
        ("topk:7,1", 7, 7, 7, 1, 7),
        ("best:1", 1, 1, 1, 1, 1),
        ("best:5", 4, 5, 5, 5, 5),
        ("best:16", 4, 16, 8, 8, 16),
    ],
)
def test_grammar_counts_without_the_root(
    text: str, branch: int, width: int, expand: int, depth: int, nodes: int
) -> None:
    spec = TreeSpec.parse(text)
    assert spec == TreeSpec(text, branch, width, expand, depth, nodes)
    assert str(spec) == text
    assert spec.check(nodes + 1) is spec
    with pytest.raises(OptionError, match=f"{nodes} nodes.*at most {nodes - 1}"):
        spec.check(nodes)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            ":",
            "chain",
            "chain:",
            "chain:0",
            "chain:-1",
            "chain:+1",
            "chain:1.5",
            "chain:1,2",
            "chain:x",
            "chain: 4",
        ),
        *(" chain:4", "chain:4 ", "chain:4\n", "\nchain:4", "chain:4\nbest:2", "Chain:4", "chain4", "chain:1e3"),
        *("chain:4097", "chain:99999999999999999999", "topk:2", "topk:2,", "topk:,3", "topk:0,3", "topk:2,0"),
        *("topk:2,3,4", "topk:2;3", "topk:-2,3", "best", "best:0", "best:", "best:1,2", "auto", "off", "none", "[1,2]"),
    ],
)
def test_malformed_text_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(OptionError) as caught:
        TreeSpec.parse(text)
    message = str(caught.value)
    assert "\n" not in message
    assert repr(text) in message


@pytest.mark.parametrize("text", [None, 4, 4.0, b"chain:4", ["chain:4"], True])
def test_what_is_no_text_is_refused(text: object) -> None:
    with pytest.raises(OptionError):
        TreeSpec.parse(text)  # type: ignore[arg-type]


def test_a_number_too_long_to_read_is_refused() -> None:
    with pytest.raises(OptionError):
        TreeSpec.parse("chain:" + "9" * 5000)


@settings(deadline=None)
@given(st.text(alphabet="chainbestopk:,0123456789 -", max_size=12))
def test_any_text_parses_or_is_refused(text: str) -> None:
    try:
        spec = TreeSpec.parse(text)
    except OptionError:
        return
    kind, _, numbers = text.partition(":")
    values = [int(number) for number in numbers.split(",")]
    assert kind in ("chain", "topk", "best")
    assert spec.nodes == int(np.prod(values))
    assert len(values) == (2 if kind == "topk" else 1)


@pytest.mark.parametrize(
    ("text", "fills"),
    [
        ("chain:1", True),
        ("chain:8", True),
        ("best:1", True),
        ("best:5", True),
        ("best:16", True),
        ("topk:1,4", True),
        ("topk:2,3", False),
        ("topk:4,4", False),
        ("topk:4,1", False),
    ],
)
def test_which_shapes_a_chain_fills(text: str, fills: bool) -> None:
    assert TreeSpec.parse(text).fills_with_chain is fills


@settings(deadline=None)
@given(st.lists(st.integers(0, 99), min_size=1, max_size=20))
def test_chain(tokens: list[int]) -> None:
    tree, grown = Tree.chain(tokens), Tree(tokens[:1])
    for token in tokens[1:]:
        grown.add(token, len(grown) - 1)
    assert tree == grown
    assert tree.is_chain
    assert tree.path(len(tree) - 1) == tokens[1:]
    assert np.array_equal(tree.ancestors(), np.tri(len(tokens), dtype=np.bool_))


@settings(deadline=None)
@given(trees())
def test_a_tree_against_a_naive_recomputation(tree: Tree) -> None:
    size = len(tree)
    assert size == len(tree.tokens) == len(tree.parents) == len(tree.depths)
    above: list[list[int]] = []  # per node, itself and its ancestors, root first
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


def test_add_returns_the_index() -> None:
    tree = Tree([5])
    assert tree.add(6, 0) == 1
    assert tree.add(7, 0) == 2
    assert tree.add(8, 1) == 3
    assert (tree.tokens, tree.parents, tree.depths) == ([5, 6, 7, 8], [-1, 0, 0, 1], [0, 1, 1, 2])
    assert not tree.is_chain
