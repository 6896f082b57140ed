"""Goodput: no other allocation that was tried brings more tokens a second, and what is drafted pays."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_chances import table_of

from specbuild.runtime.speculation.cost_model import CostModel
from specbuild.runtime.speculation.goodput import Candidate, allocate, cut

CHANCES = st.lists(st.floats(0.0, 1.0), max_size=4)


def prices(row, level=0.5, sequences=1, padded=False):
    times = {"verify": [[1, 10.0], [64, 10.0 + 63 * row]], "draft": [[1, level], [64, 2 * level]]}
    table = table_of({"plain": 0.1, "round": 0.2, "level": 0.1} | times, sequences)
    return CostModel(table, sequences, padded).of_round(sequences)


def reached(chances):
    return list(itertools.accumulate(chances, lambda so_far, chance: so_far * chance))


@given(st.lists(CHANCES, min_size=1, max_size=3), st.floats(0.0, 12.0), st.booleans())
def test_no_other_lengths_of_continuations_bring_more(chances, row, padded):
    """Of all lengths, unless a token is too unlikely to be weighed or the gain is within the margin."""
    cost = prices(row, sequences=len(chances), padded=padded)
    candidates = [Candidate(reached(each), nodes=9) for each in chances]
    found, plain = allocate(candidates, cost), cost.sequences / cost.plain
    best = plain
    for lengths in itertools.product(*(range(len(each) + 1) for each in chances)):
        if any(lengths):
            brought = sum(sum(each.path[:n]) for each, n in zip(candidates, lengths, strict=True))
            seconds = cost.verify(sum(lengths), max(lengths))
            best = max(best, (len(chances) + brought) / seconds)
    assert found.goodput <= best * (1 + 1e-9)
    assert found.goodput > 0.85 * best
    assert found.goodput > plain or not any(found.nodes)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8), st.integers(0, 3), st.floats(0.0, 12.0))
def test_a_tree_is_cut_where_its_next_node_does_not_pay(chances, texts, row):
    cost, ranked = prices(row), sorted(reached(chances), reverse=True)
    (count,) = cut([ranked], [texts], 1.5, 2.0, cost)

    def rate(nodes):
        return (1.5 + sum(ranked[:nodes])) / (2.0 + cost.verify(texts + nodes))

    assert rate(count) == pytest.approx(max(rate(nodes) for nodes in range(len(ranked) + 1)))


def test_nodes_go_to_the_sequence_that_is_sure():
    sure, unsure = Candidate(reached([0.95] * 6), nodes=9), Candidate(reached([0.2] * 6), nodes=9)
    found = allocate([unsure, sure], prices(1.0, sequences=2))
    assert found.nodes[0] < found.nodes[1]


@pytest.mark.parametrize(("level", "drafts"), [(0.3, True), (30.0, False)])
def test_the_model_is_asked_where_it_is_cheap(level, drafts):
    tree = [0.0, *itertools.accumulate(reached([0.8] * 6))]
    found = allocate([Candidate([], tree, nodes=12)], prices(0.5, level))
    assert (found.levels[0] > 1) is drafts
    assert sum(found.nodes) <= 12


def test_a_speedup_that_the_operator_asks_for_is_promised_or_nothing_is_drafted():
    candidate = Candidate(reached([0.6, 0.5]), nodes=9)
    assert allocate([candidate], prices(0.1)).nodes[0]
    assert not allocate([candidate], prices(0.1), min_speedup=3.0).nodes[0]
