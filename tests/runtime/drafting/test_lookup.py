"""Prompt lookup: matches against a naive search, continuations, and trees of the asked shape."""

from __future__ import annotations

from typing import Any

import pytest
from hash_models import sequence_of
from hypothesis import given, settings
from hypothesis import strategies as st
from small_grammars import grammar, ids

from specbuild.runtime.drafting.lookup import (
    continuation,
    follow,
    forced,
    from_text,
    longest,
    lookup,
    matches,
    repeats,
)
from specbuild.runtime.requests.sequence import Sequence, string_of
from specbuild.runtime.sampling.sampler import SamplingParams
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


@settings(deadline=None)
@given(histories, st.integers(1, 40))
def test_matches_against_a_naive_search(tokens: list[int], count: int) -> None:
    assert matches(string_of(tokens), count) == naive_matches(tokens)[:count]
    assert longest(string_of(tokens)) == (naive_matches(tokens) or [(0, 0)])[0]
    for start, _ in naive_matches(tokens):
        assert continuation(tokens, start, count) == naive_continuation(tokens, start, count)


@settings(deadline=None)
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


def asked_of(regex: str, policy: Any = None, **fields: Any) -> Sequence:
    params = SamplingParams(**{"max_new_tokens": 20, "constraint": grammar(regex=regex)} | fields)
    made: Sequence = sequence_of([1, 2, 0], params)
    made.shape, made.policy = made.tree, policy
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
def test_what_has_to_come_is_drafted_before_anybody_is_asked(regex: str, tree: str, drafted: str) -> None:
    made = asked_of(regex, speculation=tree)
    found = forced(made, made.shape or TreeSpec.parse(tree), 1)
    assert (found.tokens[1:] if found else []) == ids(drafted)
    if drafted:
        again = from_text(made, 1, looks_up=False)
        assert again
        assert again.tokens == found.tokens  # type: ignore[union-attr]


def test_a_lookup_is_cut_where_it_is_illegal_and_goes_on_with_what_has_to_come() -> None:
    """The text went on with a, 0 after what it ends with; of that a alone is legal, and cd has to come after it."""
    made = asked_of("(a|b)cd1", speculation="chain:6")
    found = follow(made, Tree.chain([9, *ids("a 0 0")]), 6)
    assert found.tokens[1:] == ids("a cd 1")
    free = sequence_of([1, 2], SamplingParams(9, speculation="off"))
    assert follow(free, (same := Tree.chain([9, 1, 2])), 6) is same


def test_each_branch_goes_on_with_what_has_to_come_while_there_is_room() -> None:
    """The first ones first; a branch that is illegal is left out, and what two have in common is there once."""
    made, branched = asked_of("((a|b)cd0)+1", speculation="best:9"), Tree([9])
    for token, parent in zip(ids("a cd b 0 1"), (0, 1, 0, 0, 2), strict=True):
        branched.add(token, parent)  # a cd 1, b, 0: neither 1 nor 0 is legal there
    found = follow(made, branched, 9)
    assert {tuple(found.path(node)) for node in range(1, len(found))} == {
        *(tuple(ids("a cd 0")[:count]) for count in (1, 2, 3)),
        *(tuple(ids("b cd 0")[:count]) for count in (1, 2, 3)),
    }
    assert len(follow(made, branched, 5)) == 6
    assert follow(made, branched, 5).trunk == 4
