"""Prompt lookup: drafts what followed earlier occurrences of the text's last tokens; needs no model.

Source: Saxena, "Prompt Lookup Decoding" (2023); the n-gram drafter of vLLM and transformers. Two things differ: the
longest match comes first, whatever its length, and a continuation that reaches the end of the text goes on with what it
has drafted, so that a loop is drafted to any depth.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.policy import SequencePolicy
from specbuild.runtime.speculation.tree import Tree, TreeSpec

from .habits import Habits

LONGEST = 12  # maximum tokens compared
SURE = 4  # tokens that must match for the text to count as repeating itself
SURE_GREEDY = 2  # the same at temperature 0, where texts repeat themselves sooner and longer
_MAX_MATCHES = 32  # of each length


def from_text(
    sequence: Sequence, batch: int, looks_up: bool = True, drafts: bool = True, habits: Habits | None = None
) -> Tree | None:
    """Return the text's own continuation, or the root alone if nothing is worth drafting; None: ask the model.

    Args:
        sequence: The sequence to draft for.
        batch: How many sequences draft in this round.
        looks_up: Whether the text's repetitions are drafted.
        drafts: Whether there is a model; without one, the best matches' continuations make a tree of the asked shape.
        habits: See `look`.
    """
    tokens, shape, policy = sequence.tokens, sequence.shape, sequence.policy
    if not shape:
        return Tree([tokens[-1]])
    if sequence.sampler.foresees and (tree := forced(sequence, shape, batch)):
        return tree
    if not policy:
        if not drafts:
            return follow(sequence, lookup(tokens, sequence.string, shape), shape.nodes)
        sure = SURE if sequence.params.temperature else SURE_GREEDY
        tree = repeats(tokens, sequence.string, shape, sure) if looks_up else None
        return tree and follow(sequence, tree, shape.nodes)
    start, matched = look(sequence, policy, looks_up, habits)
    policy.choose(batch, matched, room(sequence), sequence.pending)
    return decided(sequence, policy, shape, start)


def look(sequence: Sequence, policy: SequencePolicy, looks_up: bool, habits: Habits | None = None) -> tuple[int, int]:
    """Return where the text's continuation begins and how many tokens before it match; the policy gets its first token.

    `habits` continue the text, as `policy.recalled`, if fewer than two tokens match.
    """
    tokens = sequence.tokens
    start, matched = longest(sequence.string) if looks_up else (0, 0)
    policy.recalled = habits.recall(tokens, sequence.params.cache_salt) if habits and matched < 2 else []
    if policy.recalled:
        matched = 0
    policy.guess = tokens[start] if matched else -1
    policy.guess = policy.recalled[0] if policy.recalled else policy.guess
    watched = [policy.guess]
    if policy.guess >= 0 and sequence.sampler.foresees and sequence.sampler.follow((), watched, 1) != watched:
        matched, policy.guess, policy.recalled = 0, -1, []  # the constraint forbids the guess
    return start, matched


def room(sequence: Sequence) -> int:
    """Return how many nodes may be drafted, before the text's end and within the sequence's part of a step."""
    return min(sequence.limit - len(sequence.tokens) - 1, sequence.room)


def decided(sequence: Sequence, policy: SequencePolicy, shape: TreeSpec, start: int) -> Tree | None:
    """Return the continuation that the policy decided on, from `start` on; None: ask the model."""
    if policy.now.kind in ("model", "probe"):
        return None
    nodes = policy.now.nodes
    following = policy.recalled[:nodes] if policy.recalled else continuation(sequence.tokens, start, nodes)
    tree = Tree.chain([sequence.tokens[-1], *following])
    if not sequence.sampler.foresees:
        return tree
    return follow(sequence, tree, min(room(sequence), shape.nodes, policy.room))


def forced(sequence: Sequence, shape: TreeSpec, batch: int) -> Tree | None:
    """Return the tokens about which the constraint leaves no choice, as a chain, or None. See `from_text`."""
    policy, nodes = sequence.policy, min(shape.nodes, room(sequence))
    found = sequence.sampler.follow((), (), min(nodes, policy.force(batch, nodes)) if policy else nodes)
    if found and policy:
        policy.forced(len(found))
    return Tree.chain([sequence.tokens[-1], *found]) if found else None


def follow(sequence: Sequence, tree: Tree, nodes: int) -> Tree:
    """Return a tree without what its constraint forbids, each branch extended by forced tokens, up to `nodes`."""
    if not sequence.sampler.foresees or len(tree) == 1:
        return tree
    grown, children, found = Tree(tree.tokens[:1]), dict[tuple[int, int], int](), list[int]()
    limit, inner = max(nodes, len(tree) - 1), {*tree.parents}
    for leaf in (node for node in range(len(tree)) if node not in inner):
        found, node = sequence.sampler.follow((), tree.path(leaf), limit), 0
        for token in found:
            if (node, token) not in children:
                if len(grown) > limit:
                    break
                children[node, token] = grown.add(token, node)
            node = children[node, token]
    if sequence.policy:  # with a policy, trees are chains
        drafted = tree.tokens[1:]
        same = next((at for at, pair in enumerate(zip(drafted, found, strict=False)) if pair[0] != pair[1]), None)
        sequence.policy.follow(min(len(drafted), len(found)) if same is None else same, len(found))
    return grown


def lookup(tokens: Seq[int], text: str, spec: TreeSpec) -> Tree:
    """Return the tree of continuations: at most `branch` matches, `width` nodes a level, `nodes` in all.

    A match of SURE tokens may fill a best:N tree alone, as a chain deeper than its levels.
    """
    tree = Tree([tokens[-1]])
    children: dict[tuple[int, int], int] = {}
    for rank, (start, length) in enumerate(matches(text, spec.branch)):
        alone = rank == 0 and length >= SURE and spec.fills_with_chain
        node = 0
        for token in continuation(tokens, start, spec.nodes if alone else spec.depth):
            child = children.get((node, token))
            if child is None:
                depth = tree.depths[node] + 1
                if len(tree) > spec.nodes or tree.depths.count(depth) >= spec.width:
                    break
                child = children[node, token] = tree.add(token, node)
            node = child
    return tree


def repeats(tokens: Seq[int], text: str, spec: TreeSpec, sure: int) -> Tree | None:
    """Return the continuation as a chain that fills the tree; None unless the last `sure` tokens occurred before."""
    start, matched = longest(text) if spec.fills_with_chain else (0, 0)
    return Tree.chain([tokens[-1], *continuation(tokens, start, spec.nodes)]) if matched >= sure else None


def matches(text: str, count: int) -> list[tuple[int, int]]:
    """Return earlier occurrences of a text's end, best first: (index of the token after it, tokens that match).

    The longest match is best; among equals, the most recent one. `text`: see `string_of`.
    """
    found = dict[int, int]()
    for length in range(longest(text)[1], 0, -1):
        end = len(text) - 1
        for _ in range(_MAX_MATCHES):
            if len(found) == count or (at := text.rfind(text[-length:], 0, end)) < 0:
                break
            found.setdefault(at + length, length)
            end = at + length - 1
    return list(found.items())


def longest(text: str) -> tuple[int, int]:
    """Return the best of `matches`; (0, 0) if there is none."""
    after = length = 0
    while length < LONGEST and (at := text.rfind(text[-length - 1 :], 0, len(text) - 1)) >= 0:
        after, length = at + length + 1, length + 1
    return after, length


def continuation(tokens: Seq[int], start: int, count: int) -> list[int]:
    """Return `count` tokens from `start` on; past the end of the text, those just drafted are repeated."""
    found, period = list(tokens[start : start + count]), len(tokens) - start
    while len(found) < count:
        found.append(found[len(found) - period])
    return found
