"""Prompt lookup: matches against a naive search, continuations, and trees of the asked shape."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specbuild.runtime.drafting.lookup import continuation, longest, lookup, matches, repeats
from specbuild.runtime.requests.text import string_of
from specbuild.runtime.speculation.tree import Tree, TreeSpec

histories = st.lists(st.integers(0, 2), min_size=1, max_size=12)  # all of it is compared
specs = st.sampled_from(["chain:1", "chain:4", "chain:20", "topk:1,4", "topk:2,3", "topk:4,4", "best:1", "best:5"])


def naive_matches(tokens: list[int]) -> list[tuple[int, int]]:
    found = []
    for start in range(1, len(tokens)):
        length = 0
        while length < start and tokens[start - 1 - length] == tokens[-1 - length]:
            length += 1
        if length:
            found.append((start, length))
    return sorted(found, key=lambda match: (-match[1], -match[0]))


def naive_continuation(tokens: list[int], start: int, count: int) -> list[int]:
    text = list(tokens)
    for offset in range(count):  # the text goes on as it did after `start`
        text.append(text[start + offset])
    return text[len(tokens) :]


@given(histories, st.integers(1, 40))
def test_matches_against_a_naive_search(tokens: list[int], count: int) -> None:
    assert matches(string_of(tokens), count) == naive_matches(tokens)[:count]
    assert longest(string_of(tokens)) == (naive_matches(tokens) or [(0, 0)])[0]
    for start, _ in naive_matches(tokens):
        assert continuation(tokens, start, count) == naive_continuation(tokens, start, count)


@given(histories, specs)
def test_lookup_keeps_the_asked_shape(tokens: list[int], text: str) -> None:
    spec, tree = TreeSpec.parse(text), lookup(tokens, string_of(tokens), TreeSpec.parse(text))
    found = naive_matches(tokens)
    assert tree.tokens[0] == tokens[-1]
    assert len(tree) - 1 <= spec.nodes
    assert (len(tree) > 1) == bool(found)
    levels = [tree.depths.count(depth) for depth in range(1, max(tree.depths) + 1)]
    assert all(level <= spec.width for level in levels)
    edges = list(zip(tree.parents[1:], tree.tokens[1:], strict=True))
    assert len(set(edges)) == len(edges)  # siblings differ
    assert max(tree.depths) <= (spec.nodes if spec.fills_with_chain else spec.depth)
    if repeated := repeats(tokens, string_of(tokens), spec, 4):
        assert spec.fills_with_chain
        assert repeated == Tree.chain([tokens[-1], *naive_continuation(tokens, found[0][0], spec.nodes)])
    drafted = [naive_continuation(tokens, start, spec.nodes) for start, _ in found]
    for node in range(1, len(tree)):
        path = tree.path(node)
        assert any(other[: len(path)] == path for other in drafted)
