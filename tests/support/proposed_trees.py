"""Records what a proposer proposes."""


def proposed_trees(proposer):
    """A list of texts and the trees after them, in the order in which they are proposed from now on."""
    trees, propose = [], proposer.propose

    def noted(sequences, *more):
        proposals = propose(sequences, *more)
        trees.extend((list(s.tokens), each.tree) for s, each in zip(sequences, proposals, strict=True))
        return proposals

    proposer.propose = noted
    return trees
