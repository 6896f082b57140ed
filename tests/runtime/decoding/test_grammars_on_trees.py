"""Texts of a grammar: plain decoding's tokens whatever is drafted, and the model's distribution among what is legal."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from constraints import fits, loop_of, probabilities
from device_requests import run
from small_grammars import END, VOCAB, Enumerable, grammar, legal

from specbuild.runtime import SamplingParams
from specbuild.runtime.drafting import lookup
from specbuild.runtime.drafting.model import ModelDrafter
from specbuild.runtime.sampling.grammar import Free
from specbuild.runtime.sampling.min_tokens import MinTokens
from specbuild.runtime.speculation.tree_growth import Growth

EOS = frozenset({END})
REGEXES = ("(ab(c|d|0+)1?,)*cd", "(a|b){4}(cd){2}0{3}[01]", "abcd01,abcd01,(ab|cd)1", "[ab]{1,9}")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["model", "both", "ahead", "lookup"])
@pytest.mark.parametrize("tree", ["chain:5", "topk:3,3", "best:12"])
def test_tokens_are_plain_decodings(
    hash_model: Any, hash_executor: Any, request_of: Any, plain: Any, tree: str, drafter: str, temperature: float
) -> None:
    """Four at once, of which some are free at first and some are free for ever; each keeps to its grammar."""
    accepted = 0
    for seed in range(2):
        loop, wanted = loop_of(hash_model, hash_executor, seed, drafter), []
        for index, regex in enumerate((*REGEXES, "")):
            made = grammar(regex=regex) if regex else None
            constraint = Free(6, (END,), made) if made and index % 2 else made
            params = SamplingParams(20, temperature, seed=index, speculation=tree, constraint=constraint)
            wanted.append(request_of([1, 2, 3 + index], params))
        for s in run(loop, wanted):
            assert s.error is None
            assert s.output == plain(hash_model(seed), s.tokens[: -len(s.output)], s.params, EOS)
            if s.params.constraint:
                matcher = s.params.constraint.matcher(VOCAB)
                for token in s.output:
                    assert token in legal(matcher)
                    matcher.emit(token)
            accepted += s.metrics.speculative_decoding.num_accepted_draft_tokens
        loop.close()
    assert accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("tree", ["off", "topk:2,3", "best:8"])
def test_the_distribution_is_the_model_s_among_what_is_legal(
    hash_model: Any, hash_executor: Any, request_of: Any, tree: str
) -> None:
    """χ² against the enumeration of all texts, token by token among what is legal."""
    model, made, draws = hash_model(4), grammar(regex="(a|ab|cd0?)(0|1)(,[ab])?"), 3000
    base = SamplingParams(temperature=1.0, seed=0, max_new_tokens=9, constraint=made)
    expected = probabilities(model, [7, 7], Enumerable(made), base)  # type: ignore[arg-type]
    assert sum(expected.values()) == pytest.approx(1)
    loop = loop_of(hash_model, hash_executor, 4, "model")
    wanted = [request_of([7, 7], replace(base, seed=n, speculation=tree)) for n in range(draws)]
    seen = Counter(tuple(s.output) for s in run(loop, wanted))
    assert fits(seen, expected) > 5


def test_a_text_whose_rest_is_forced_ends_without_the_draft_model(
    hash_model: Any, hash_executor: Any, request_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every drafted token comes true, and the model is asked for none."""
    monkeypatch.setattr(ModelDrafter, "propose", lambda *_: 1 / 0)
    loop = loop_of(hash_model, hash_executor, 1, "both")
    constraint = grammar(regex="abcd01,abcd01,")
    (done,) = run(loop, [request_of([1, 2], SamplingParams(20, speculation="chain:5", constraint=constraint))])
    assert (done.error, done.finish_reason, done.output[-1]) == (None, "stop", END)
    told = done.metrics.speculative_decoding
    assert told.num_accepted_draft_tokens == told.num_draft_tokens
    assert loop.stats.rounds <= 3 + len(done.output) // 6


@pytest.mark.parametrize("drafter", ["model", "ahead"])
def test_a_model_s_chain_goes_on_with_what_has_to_come(
    hash_model: Any, hash_executor: Any, request_of: Any, plain: Any, drafter: str
) -> None:
    """Where the draft guesses the free token, the forced ones behind it come with it, in the draft's last level."""
    loop, constraint = loop_of(hash_model, hash_executor, 2, drafter), grammar(regex="((a|b|c|d)01,10,)*")
    params = SamplingParams(40, speculation="chain:6", constraint=constraint)
    (done,) = run(loop, [request_of([1, 2], params)])
    assert done.error is None
    assert done.output == plain(hash_model(2), [1, 2], params, EOS)
    assert loop.stats.rounds < len(done.output) / 3


@pytest.mark.parametrize("drafter", ["model", "ahead", "lookup"])
def test_a_side_branch_goes_on_with_what_has_to_come(
    hash_model: Any, hash_executor: Any, request_of: Any, plain: Any, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two branches, each followed by more than a tree has levels: fewer rounds than with branches that are as grown."""
    params = SamplingParams(60, speculation="best:30", constraint=grammar(regex="((a|b)(c|d)01,10,01,10,,)+"))
    rounds = list[int]()
    for prolongs in (True, False):
        if not prolongs:
            monkeypatch.setattr(Growth, "prolong", lambda *_: None)
            monkeypatch.setattr(lookup, "follow", lambda _, tree, nodes: tree)
        loop = loop_of(hash_model, hash_executor, 3, drafter)
        (done,) = run(loop, [request_of([1, 2], params)])
        loop.close()
        assert (done.error, done.output) == (None, plain(hash_model(3), [1, 2], params, EOS))
        rounds.append(loop.stats.rounds)
    assert rounds[0] < rounds[1]


def test_stop_strings_lengths_and_samples_hold_beside_a_grammar(
    hash_model: Any, hash_executor: Any, request_of: Any, plain: Any
) -> None:
    """A least length too, and a text that is cut off in its middle says so."""
    loop = loop_of(hash_model, hash_executor, 1, "both")
    made = grammar(regex="(ab|cd){3,9}")
    cut = SamplingParams(2, speculation="best:8", constraint=made)
    stopped = SamplingParams(20, speculation="best:8", constraint=made, stop_token_ids=(8,), seed=3, temperature=1)
    long = SamplingParams(9, speculation="best:8", constraint=MinTokens(6, (END,), made), min_tokens=6)
    wanted = [request_of([1, 2, index], params) for index, params in enumerate((cut, stopped, long))]
    first, second, third = run(loop, wanted)
    assert (first.finish_reason, len(first.output)) == ("length", 2)
    assert second.finish_reason == "stop"
    assert END not in third.output[:6]
    for s in (first, third):
        assert s.output == plain(hash_model(1), s.tokens[: -len(s.output)], s.params, EOS)
