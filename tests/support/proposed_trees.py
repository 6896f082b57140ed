"""Records what a proposer proposes, and checks that no proposal changes a text."""

from dataclasses import replace

from specbuild.runtime import Engine, SamplingParams

NEW_TOKENS = 16
TEXTS = ([5, 17, 300], [1001], [2, 3, 5, 7, 11, 13, 17, 19, 23])


def proposed_trees(proposer):
    """A list of texts and the trees after them, in the order in which they are proposed from now on."""
    trees, propose = [], proposer.propose

    def noted(sequences, *more):
        proposals = propose(sequences, *more)
        trees.extend((list(s.tokens), each.tree) for s, each in zip(sequences, proposals, strict=True))
        return proposals

    proposer.propose = noted
    return trees


def check_plain(bundle):
    """Texts are plain decoding's, greedy and sampled, alone and together, whatever is drafted."""
    for batch in (1, 2):
        with Engine.load(bundle, batch_size=batch, threads=1) as engine:
            for temperature in (0.0, 1.0):
                params = SamplingParams(NEW_TOKENS, temperature=temperature, seed=3, ignore_eos=True, speculation="off")
                expected = [result.token_ids for result in engine.generate(list(TEXTS), params)]
                for tree in ("chain:3", "topk:2,3", "best:16", "auto"):
                    each = engine.generate(list(TEXTS), replace(params, speculation=tree))
                    assert [result.token_ids for result in each] == expected, (batch, temperature, tree)
