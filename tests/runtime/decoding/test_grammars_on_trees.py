"""Texts of a grammar: plain decoding's tokens whatever is drafted, and the model's distribution among what is legal."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from constraints import OneOf, fits, loop_of, probabilities
from device_requests import run
from hash_models import HashExecutor, HashModel, plain_text, sequence_of
from small_grammars import END, START, VOCAB, Enumerable, grammar, ids

from specbuild.runtime import SamplingParams
from specbuild.runtime.decoding.host_loop import HostLoop
from specbuild.runtime.sampling.constraint import tree_masks
from specbuild.runtime.sampling.grammar import Free
from specbuild.runtime.sampling.min_tokens import MinTokens
from specbuild.runtime.speculation.proposal import Proposal
from specbuild.runtime.speculation.tree import Tree

EOS = frozenset({END})
MARKER = 6  # before which some texts are free


REGEXES = ("(ab(c|d|0+)1?,)*cd", "(a|b){4}(cd){2}0{3}[01]", "abcd01,abcd01,(ab|cd)1", "[ab]{1,9}")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("tree", "drafter"), [("chain:5", "lookup"), ("topk:3,3", "lookup"), ("topk:3,3", "model"), ("best:12", "both")]
)
def test_tokens_are_plain_decodings(tree, drafter, temperature):
    """Four at once, of which some are free at first and one is free for ever."""
    loop, wanted = loop_of(HashModel, HashExecutor, 0, drafter), []
    for index, regex in enumerate((*REGEXES, "")):
        made = grammar(regex=regex) if regex else None
        constraint = Free(MARKER, (END,), made) if made and index % 2 else made
        params = SamplingParams(20, temperature, seed=index, speculation=tree, constraint=constraint)
        wanted.append(sequence_of([1, 2, 3 + index], params))
    for s in run(loop, wanted):
        assert (s.error, s.output) == (None, plain_text(HashModel(0), s.tokens[: -len(s.output)], s.params, EOS))
    assert any(s.metrics.speculative_decoding.num_accepted_draft_tokens for s in wanted)
    loop.close()


ONE_OF = OneOf(((0, 1, 2), (0, 1, 3), (0, 4), (5, 6, 7, 8), (5, 6, 9), (5, 2), (10, 10), (3,)), END)


@pytest.mark.soak(only=("best:8-one of", "best:8-grammar"))
@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["one of", "grammar"])
@pytest.mark.parametrize("tree", ["off", "topk:2,3", "best:8"])
def test_the_distribution_is_the_model_s_among_what_is_legal(tree, kind):
    """χ² against the enumeration of all texts, token by token among what is legal."""
    model, draws = HashModel(4), 3000
    made = ONE_OF if kind == "one of" else grammar(regex="(a|ab|cd0?)(0|1)([ab])?")
    base = SamplingParams(temperature=1.0, seed=0, max_new_tokens=9, constraint=made)
    expected = probabilities(model, [7, 7], made if made is ONE_OF else Enumerable(made), base)
    assert sum(expected.values()) == pytest.approx(1)
    loop = loop_of(HashModel, HashExecutor, 4, "model")
    done = run(loop, [sequence_of([7, 7], replace(base, seed=n, speculation=tree)) for n in range(draws)])
    assert fits(Counter(tuple(s.output) for s in done), expected) > 5
    accepted = sum(s.metrics.speculative_decoding.num_accepted_draft_tokens for s in done)
    assert (accepted > draws / 4) == (tree != "off")


class Blind:
    """A proposer that knows what comes, and nothing of its grammar: `say` makes its windows of the next tokens."""

    model = None

    def __init__(self, texts, say, branched):
        self._texts, self._say, self._branched = texts, say, branched
        self.windows = list[tuple[list[int], list[int]]]()  # what was emitted, and what was drafted after it

    def propose(self, sequences, *_):
        trees = list[Tree]()
        for s in sequences:
            right = self._texts[s.request.index][len(s.output) :][:4]
            tree = Tree.chain([s.tokens[-1], *([] if self._branched else self._say(right))])
            for branch in [self._say(right), self._say(right)[1:]] if self._branched else ():
                node = 0
                for token in branch:  # the second branch is one token further than it should be
                    node = tree.children().get((node, token)) or tree.add(token, node)
            self.windows.append((list(s.output), tree.tokens[1:]))
            masks = np.full((len(tree), 1), 0xFFFFFFFF, dtype=np.uint32)
            tree_masks(s.sampler.matcher, tree, VOCAB, masks)  # as a device asks
            trees.append(tree)
        return [Proposal(tree) for tree in trees]

    def commit(self, *_):
        pass


def behind_the_marker(right):
    """Behind the token that ends the reasoning, what would have gone on with it, and then what is right."""
    place = right.index(MARKER) + 1 if MARKER in right else len(right)
    return [*right[:place], *ids("0 d"), *right[place:]]


@pytest.mark.parametrize("branched", [False, True])
@pytest.mark.parametrize(
    "say",
    [
        pytest.param(lambda right: [*right[:2], MARKER, *right[2:]], id="vllm-46118-marker"),
        pytest.param(lambda right: [*right[:2], START, *right[2:]], id="vllm-46118-special"),
        pytest.param(behind_the_marker, id="vllm-53046"),
        pytest.param(lambda right: [*right, END, *ids("a cd"), END], id="vllm-52805"),
        pytest.param(lambda right: ids(", d , d"), id="nothing-right"),
    ],
)
def test_drafts_that_know_nothing_of_the_grammar_harm_nothing(say, branched):
    """What went wrong in vLLM with a window that a draft had filled unaware of the grammar.

    46118: a special token, there the reasoning's end, amid a structure; the request was ended with it. 53046: drafts
    behind the reasoning's end, made before the grammar began; it was advanced with them. 52805: drafts behind the end
    of the text; it was advanced past its end. Here such nodes are no choice, whoever drafts them, and what was asked of
    the matcher on their paths leaves no trace: the texts are plain decoding's, and the others' in the batch.
    """
    params = [
        SamplingParams(
            24, temperature, seed=4, speculation="best:12", constraint=Free(MARKER, (END,), grammar(regex=r))
        )
        for temperature, r in ((0.0, "(a|b)+cd,(0|1),cd"), (1.0, "(ab|cd){2,3},(0|1){1,4}"), (0.0, "[ab]{1,3}"))
    ]
    params = [replace(each, logit_bias={MARKER: 3.0}) for each in params]
    texts = [plain_text(HashModel(2), [1, 2, place], each, EOS) for place, each in enumerate(params)]
    drafter = Blind(texts, say, branched)
    loop = HostLoop(HashExecutor(HashModel(2), 4), drafter, 16, EOS)
    done = run(loop, [sequence_of([1, 2, place], each, place) for place, each in enumerate(params)])
    assert [(s.error, s.output) for s in done] == [(None, text) for text in texts]
    assert any(MARKER in text and text.index(MARKER) < len(text) - 2 for text in texts)
    assert any(MARKER in window and MARKER not in text for text, window in drafter.windows)
    assert any(END in text for text in texts)


def test_stop_strings_lengths_and_samples_hold_beside_a_grammar():
    """A least length too, and a text that is cut off in its middle says so."""
    loop = loop_of(HashModel, HashExecutor, 1, "both")
    made = grammar(regex="(ab|cd){3,9}")
    cut = SamplingParams(2, speculation="best:8", constraint=made)
    stopped = SamplingParams(20, speculation="best:8", constraint=made, stop_token_ids=(8,), seed=3, temperature=1)
    long = SamplingParams(9, speculation="best:8", constraint=MinTokens(6, (END,), made), min_tokens=6)
    wanted = [sequence_of([1, 2, index], params) for index, params in enumerate((cut, stopped, long))]
    first, second, third = run(loop, wanted)
    assert (first.finish_reason, len(first.output)) == ("length", 2)
    assert second.finish_reason == "stop"
    assert END not in third.output[:6]
    for s in (first, third):
        assert s.output == plain_text(HashModel(1), s.tokens[: -len(s.output)], s.params, EOS)
