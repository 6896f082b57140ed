"""Prompt lookup: matches against a naive search, continuations, and trees of the asked shape."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_grammars import grammar, ids

from specbuild.runtime.drafting.lookup import (
    LONGEST,
    SURE,
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

histories = st.lists(st.integers(0, 3), min_size=1, max_size=30)
specs = st.sampled_from(["chain:1", "chain:4", "chain:20", "topk:1,4", "topk:2,3", "topk:4,4", "best:1", "best:5"])


def naive_matches(tokens: list[int]) -> list[tuple[int, int]]:
    found = []
    for start in range(1, len(tokens)):
        length = 0
        while length < min(LONGEST, start) and tokens[start - 1 - length] == tokens[-1 - length]:
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


@settings(deadline=None)
@given(histories, st.integers(1, 40))
def test_continuation_goes_on_through_itself(tokens: list[int], count: int) -> None:
    for start, _ in naive_matches(tokens):
        assert continuation(tokens, start, count) == naive_continuation(tokens, start, count)


def test_a_short_history_has_no_or_one_match() -> None:
    assert matches(string_of([5]), 4) == []
    assert matches(string_of([5, 6]), 4) == []
    assert matches(string_of([5, 5]), 4) == [(1, 1)]
    assert lookup([5], string_of([5]), TreeSpec.parse("best:5")).tokens == [5]
    assert lookup([5, 6], string_of([5, 6]), TreeSpec.parse("chain:3")).tokens == [6]
    assert lookup([5, 5], string_of([5, 5]), TreeSpec.parse("chain:3")).tokens == [5, 5, 5, 5]
    assert repeats([5], string_of([5]), TreeSpec.parse("chain:3"), 1) is None
    assert repeats([5, 6], string_of([5, 6]), TreeSpec.parse("chain:3"), 1) is None


def test_a_match_is_no_longer_than_the_longest_compared() -> None:
    assert matches(string_of([7] * 40), 1) == [(39, LONGEST)]


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_a_loop_is_drafted_to_any_depth(period: int) -> None:
    loop = list(range(period)) * 80
    tokens = loop[: 4 * period + 2]
    spec = TreeSpec.parse("chain:50")
    assert lookup(tokens, string_of(tokens), spec).tokens == loop[len(tokens) - 1 : len(tokens) + 50]
    drafted = repeats(tokens, string_of(tokens), spec, 2)
    assert drafted is not None
    assert drafted.tokens == loop[len(tokens) - 1 : len(tokens) + 50]


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
    sure = bool(found) and found[0][1] >= SURE
    assert max(tree.depths) <= (spec.nodes if sure and not text.startswith("topk") else spec.depth)
    drafted = [naive_continuation(tokens, start, spec.nodes) for start, _ in found]
    for node in range(1, len(tree)):
        path = tree.path(node)
        assert any(other[: len(path)] == path for other in drafted)


def test_a_sure_match_fills_best_alone() -> None:
    tokens = [1, 2, 3, 4, 9, 8, 7, 6, 5, 1, 1, 2, 3, 4]
    tree = lookup(tokens, string_of(tokens), TreeSpec.parse("best:10"))
    assert tree.is_chain
    assert tree.tokens == [4, 9, 8, 7, 6, 5, 1, 1, 2, 3, 4]


def test_several_matches_branch_the_longest_first() -> None:
    tokens = [1, 2, 8, 2, 9, 1, 2]
    tree = lookup(tokens, string_of(tokens), TreeSpec.parse("topk:2,2"))
    assert tree.path(1) == [8]
    assert {tuple(tree.path(node)) for node in range(1, len(tree))} == {(8,), (8, 2), (9,), (9, 1)}


@pytest.mark.parametrize("text", ["topk:2,3", "topk:4,4", "topk:4,1"])
def test_a_wide_shape_is_never_one_deep_chain(text: str) -> None:
    tokens, spec = [3] * 30, TreeSpec.parse(text)
    assert repeats(tokens, string_of(tokens), spec, 2) is None
    assert max(lookup(tokens, string_of(tokens), spec).depths) <= spec.depth


def test_repeats_wants_as_many_tokens_as_it_is_told() -> None:
    tokens, spec = [1, 2, 3, 7, 7, 1, 2, 3], TreeSpec.parse("best:4")
    assert repeats(tokens, string_of(tokens), spec, 4) is None
    tree = repeats(tokens, string_of(tokens), spec, 3)
    assert tree is not None
    assert tree.is_chain
    assert tree.tokens == [3, 7, 7, 1, 2]


def asked_of(request_of: Any, regex: str, policy: Any = None, **fields: Any) -> Sequence:
    params = SamplingParams(**{"max_new_tokens": 20, "constraint": grammar(regex=regex)} | fields)
    made: Sequence = request_of([1, 2, 0], params)
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
def test_what_has_to_come_is_drafted_before_anybody_is_asked(
    request_of: Any, regex: str, tree: str, drafted: str
) -> None:
    made = asked_of(request_of, regex, speculation=tree)
    found = forced(made, made.shape or TreeSpec.parse(tree), 1)
    assert (found.tokens[1:] if found else []) == ids(drafted)
    if drafted:
        again = from_text(made, 1, looks_up=False)
        assert again
        assert again.tokens == found.tokens  # type: ignore[union-attr]


def test_the_last_token_is_never_drafted(request_of: Any) -> None:
    made = asked_of(request_of, "abcd01", speculation="chain:9", max_new_tokens=3)
    found = from_text(made, 1)
    assert found
    assert found.tokens[1:] == ids("ab cd")


def test_a_lookup_is_cut_where_it_is_illegal_and_goes_on_with_what_has_to_come(request_of: Any) -> None:
    """The text went on with a, 0 after what it ends with; of that a alone is legal, and cd has to come after it."""
    made = asked_of(request_of, "(a|b)cd1", speculation="chain:6")
    found = follow(made, Tree.chain([9, *ids("a 0 0")]), 6)
    assert found.tokens[1:] == ids("a cd 1")
    free = request_of([1, 2], SamplingParams(9, speculation="off"))
    assert follow(free, (same := Tree.chain([9, 1, 2])), 6) is same


def test_each_branch_goes_on_with_what_has_to_come_while_there_is_room(request_of: Any) -> None:
    """The first ones first; a branch that is illegal is left out, and what two have in common is there once."""
    made, branched = asked_of(request_of, "((a|b)cd0)+1", speculation="best:9"), Tree([9])
    for token, parent in zip(ids("a cd b 0 1"), (0, 1, 0, 0, 2), strict=True):
        branched.add(token, parent)  # a cd 1, b, 0: neither 1 nor 0 is legal there
    found = follow(made, branched, 9)
    assert {tuple(found.path(node)) for node in range(1, len(found))} == {
        *(tuple(ids("a cd 0")[:count]) for count in (1, 2, 3)),
        *(tuple(ids("b cd 0")[:count]) for count in (1, 2, 3)),
    }
    assert len(follow(made, branched, 5)) == 6
    assert follow(made, branched, 5).trunk == 4
