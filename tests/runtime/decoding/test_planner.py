"""Who drafts in a round, within the operator's limits, and what is noted of it."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from specbuild.runtime.decoding.planner import Planner
from specbuild.runtime.errors import OptionError
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.sampling.sampler import SamplingParams
from specbuild.runtime.speculation.draft_limits import NO_LIMITS, Limits
from specbuild.runtime.speculation.policy import SequencePolicy
from specbuild.runtime.speculation.rest import Rest, Waits


def ask(request_of: Any, tree: str = "best:8", slot: int = 0, length: int = 3, **fields: Any) -> Sequence:
    """A sequence whose prompt is read but for its last token."""
    params = SamplingParams(**{"max_new_tokens": 9, "speculation": tree} | fields)
    sequence: Sequence = request_of(range(length), params, slot=slot)
    sequence.cached = length - 1
    return sequence


class Policy:
    """What a sequence's policy is told."""

    promised, free, together, rest, leads = 1.5, 0, 1, Rest(Waits()), (math.inf, math.inf)

    def __init__(self, kind: str) -> None:
        self.now, self.told = SimpleNamespace(kind=kind), list[tuple[list[int], int]]()

    def record(self, path: Any, token: int) -> None:
        self.told.append((list(path), token))


def test_nothing_is_limited_unless_it_is_said(request_of: Any) -> None:
    planner, sequence = Planner(), ask(request_of, "best:4096")
    assert planner.limits is NO_LIMITS
    planner.check(sequence)
    assert planner.drafting([sequence]) == [sequence]
    assert sequence.shape is sequence.tree


def test_a_round_that_drafts_nothing_has_no_tree(request_of: Any) -> None:
    """In the round of a text's last token a shape is not left over from the round before."""
    planner, sequence = Planner(), ask(request_of, "best:8")
    planner.drafting([sequence])
    assert sequence.shape
    sequence.limit = len(sequence.tokens) + 1
    assert planner.drafting([sequence]) == []
    assert sequence.shape is None


@pytest.mark.parametrize(("tree", "nodes"), [("best:9", 9), ("topk:3,3", 9), ("chain:9", 9), ("best:60", 60)])
def test_a_larger_tree_than_is_allowed_is_refused(request_of: Any, tree: str, nodes: int) -> None:
    with pytest.raises(OptionError) as caught:
        Planner(Limits(max_draft_tokens=8)).check(ask(request_of, tree))
    assert str(caught.value) == f"tree {tree} drafts {nodes} nodes, max_draft_tokens allows 8: ask for fewer"
    Planner(Limits(max_draft_tokens=nodes)).check(ask(request_of, tree))


def test_auto_is_never_refused(request_of: Any) -> None:
    """Its tree is the bundle's, and whatever is allowed of it is drafted."""
    sequence, planner = ask(request_of, "best:9"), Planner(Limits(max_draft_tokens=2))
    sequence.params = replace(sequence.params, speculation="auto")
    planner.check(sequence)
    assert planner.drafting([sequence]) == [sequence]
    assert sequence.shape
    assert sequence.shape.nodes == 2


def test_a_schedule_refuses_nobody(request_of: Any) -> None:
    """Who will be in a batch, nobody knows beforehand; nor does a sequence that drafts nothing ask for too much."""
    Planner(Limits(num_speculative_tokens_per_batch_size=[[1, 9, 0]])).check(ask(request_of, "best:9"))
    Planner(Limits(max_draft_tokens=0)).check(ask(request_of, "off"))


def test_a_policy_knows_how_many_sequences_share_the_step(request_of: Any) -> None:
    """Also those that read prompts, or do not draft."""
    reading, mine = ask(request_of, length=4), ask(request_of)
    reading.cached = 2
    mine.policy = cast(SequencePolicy, Policy("plain"))
    Planner().drafting([ask(request_of, "off"), mine, reading])
    assert mine.policy.together == 3


def lagging(request_of: Any, lead: float, tree: str = "off") -> Sequence:
    """A sequence that drafts nothing, so many tokens ahead of plain decoding."""
    sequence = ask(request_of, tree)
    sequence.lead = lead
    return sequence


def drafter(request_of: Any) -> tuple[Sequence, Policy]:
    """A sequence with a policy that has just drafted."""
    sequence, policy = ask(request_of), Policy("lookup")
    policy.rest = Rest(Waits())
    sequence.policy = cast(SequencePolicy, policy)
    return sequence, policy


@pytest.mark.parametrize("beside", ["reads", "drafts", "on a device"])
def test_who_need_not_be_spared(request_of: Any, beside: str) -> None:
    """One that still reads its prompt, or drafts itself; on a device nobody."""
    sequence, policy = drafter(request_of)
    other = lagging(request_of, -5.0 if beside != "drafts" else 5.0, "best:8" if beside == "drafts" else "off")
    if beside == "reads":
        other.cached = 0
    Planner(on_host=beside != "on a device").drafting([sequence, other])
    assert policy.leads == (math.inf if beside == "on a device" else 0.0, math.inf)


def test_a_policy_knows_who_is_least_ahead(request_of: Any) -> None:
    sequence, policy = drafter(request_of)
    sequence.lead = 3.0
    Planner().drafting([sequence, lagging(request_of, 2.0), lagging(request_of, 1.0)])
    assert policy.leads == (3.0, 1.0)


@pytest.mark.parametrize("beside", [0, 1])
def test_only_one_that_decodes_alone_has_a_free_row_that_keeps_it_from_rest(request_of: Any, beside: int) -> None:
    """Another one takes the row, even if it drafts nothing."""
    sequence, policy = drafter(request_of)
    policy.free, policy.rest.left = 1, 5
    Planner().drafting([sequence, *[lagging(request_of, 9.0)] * beside])
    assert (sequence.shape is None) is bool(beside)


@pytest.mark.parametrize("cost", [0.0, 0.3])
@pytest.mark.parametrize("behind", ["another", "itself", "nobody", "alone", "reads", "on a device"])
def test_no_policy_decides_while_a_sequence_is_behind(request_of: Any, behind: str, cost: float) -> None:
    """Or would be, by what deciding costs, beside others on a host; a fixed tree is drafted all the same.

    What it emits meanwhile is looked at later.
    """
    sequence, policy = drafter(request_of)
    policy.rest.waits.cost = cost
    sequence.lead, other = cost - 0.1 if behind in ("itself", "alone") else cost + 0.1, lagging(request_of, 0.0)
    other.lead = cost if behind in ("itself", "nobody") else cost - 0.1
    if behind == "reads":
        other.cached = 0
    fixed = ask(request_of, "chain:2")
    fixed.lead = cost
    batch = [sequence] if behind == "alone" else [sequence, other, fixed]
    spared = behind in ("another", "itself")
    found = Planner(on_host=behind != "on a device").drafting(batch)
    assert found == [each for each in batch[:1] + batch[2:] if not (spared and each is sequence)]
    assert policy.rest.dozed == int(spared)
    assert (sequence.shape is None) is spared


def test_who_drafts(request_of: Any) -> None:
    """Not who reads a prompt, wants no tree, or needs one token only; the others in their order."""
    reading, last = ask(request_of, length=4), ask(request_of, max_new_tokens=1)
    reading.cached = 2
    batch = [ask(request_of), reading, ask(request_of, "off"), ask(request_of, "chain:2"), last]
    assert Planner().drafting(batch) == [batch[0], batch[3]]
    assert Planner().drafting([]) == []
    assert ask(request_of, max_new_tokens=2).drafts


@pytest.mark.parametrize(
    ("drafting", "nodes"), [(1, [8]), (2, [5, 5]), (3, [2, 2, 2]), (4, [2, 2, 2, 2]), (5, []), (6, [])]
)
def test_limits_are_those_of_as_many_as_draft(request_of: Any, drafting: int, nodes: list[int]) -> None:
    """Those beside them who do not are not counted, and a size between two ranges has what the one before it has."""
    planner = Planner(Limits(num_speculative_tokens_per_batch_size=[[1, 1, 20], [2, 2, 5], [3, 3, 2], [5, 9, 0]]))
    batch = [ask(request_of) for _ in range(drafting)]
    found = planner.drafting([ask(request_of, "off"), *batch, ask(request_of, max_new_tokens=1)])
    assert [s.shape.nodes for s in found if s.shape] == nodes
    assert len(found) == len(nodes)
    assert all((s.shape is None) == (not nodes) for s in batch)
    assert all(s.tree and s.tree.nodes == 8 for s in batch), "what is asked for stays, for the next round"


def test_a_limit_lasts_for_a_round(request_of: Any) -> None:
    planner = Planner(Limits(num_speculative_tokens_per_batch_size={"1-1": 8, "2-4": 3}))
    one, other = ask(request_of), ask(request_of, "chain:2")
    planner.drafting([one, other])
    assert [s.shape.nodes for s in (one, other) if s.shape] == [3, 2]
    planner.drafting([one])
    assert one.shape == one.tree


def test_the_lower_of_both_limits_holds(request_of: Any) -> None:
    schedule = [[1, 1, 6], [2, 4, 2]]
    planner = Planner(Limits(max_draft_tokens=4, num_speculative_tokens_per_batch_size=schedule))
    for count, nodes in ((1, 4), (2, 2)):
        found = planner.drafting([ask(request_of) for _ in range(count)])
        assert [s.shape.nodes for s in found if s.shape] == [nodes] * count


def test_nothing_is_drafted_where_nothing_may_be(request_of: Any) -> None:
    sequence = ask(request_of)
    assert Planner(Limits(max_draft_tokens=0)).drafting([sequence]) == []
    assert sequence.shape is None


def test_limits_of_the_rounds_to_come(request_of: Any) -> None:
    """They hold for `auto` as well; what is refused stays as it was, and so does the max that steps were made for."""
    planner, sequence, policy = Planner(Limits(8)), ask(request_of, "best:8"), Policy("model")
    sequence.policy = policy  # type: ignore[assignment]
    for limits, nodes in ((Limits(3, 1.5), 3), (Limits(0), 0), (Limits(), 8)):
        planner.limit(limits)
        planner.drafting([sequence])
        assert (sequence.shape.nodes if sequence.shape else 0) == nodes
        assert policy.limits is planner.now  # type: ignore[attr-defined]
        planner.check(sequence)
    assert planner.now == planner.limits == Limits(8)
    planner.limit(Limits(2))
    with pytest.raises(OptionError, match="max_draft_tokens 9 is more than 8, what the engine was loaded with"):
        planner.limit(Limits(9))
    assert planner.now == Limits(2)
    with pytest.raises(OptionError, match="drafts 9 nodes"):
        planner.check(ask(request_of, "best:9"))


def test_a_round_is_counted(request_of: Any) -> None:
    sequence = ask(request_of)
    told = sequence.metrics.speculative_decoding
    Planner.record(sequence, 6, [0, 2, 5], 7, 3)
    assert (told.num_spec_steps, told.num_draft_tokens, told.num_accepted_draft_tokens) == (1, 6, 2)
    assert (told.acceptance_histogram, told.depth_histogram) == ([0, 0, 1], [0, 0, 0, 1])
    Planner.record(sequence, 4, [0], 7)
    assert (told.num_spec_steps, told.num_draft_tokens, told.num_accepted_draft_tokens) == (2, 10, 2)
    assert (told.acceptance_histogram, told.depth_histogram) == ([1, 0, 1], [0, 0, 0, 1]), "nobody knows how deep"
    assert told.decisions == {}


@pytest.mark.parametrize(("nodes", "path", "steps"), [(0, [0], 0), (4, [0, 1], 1), (4, [0], 1)])
def test_a_policy_is_told_of_every_round_that_it_decided(
    request_of: Any, nodes: int, path: list[int], steps: int
) -> None:
    """Also where it decided against drafting: the round is counted by what was decided, and not as a draft."""
    sequence, policy = ask(request_of), Policy("model" if nodes else "plain")
    sequence.policy = policy  # type: ignore[assignment]
    for token in (7, 8):
        Planner.record(sequence, nodes, path, token)
    told = sequence.metrics.speculative_decoding
    assert policy.told == [(path, 7), (path, 8)]
    assert told.decisions == {policy.now.kind: 2}
    assert told.promised == 2 * policy.promised
    assert (told.num_spec_steps, told.num_draft_tokens) == (2 * steps, 2 * nodes)
    policy.now = SimpleNamespace(kind="lookup")
    Planner.record(sequence, 1, [0], 9)
    assert told.decisions == {"model" if nodes else "plain": 2, "lookup": 1}


def test_without_a_policy_a_round_that_drafted_nothing_is_not_counted(request_of: Any) -> None:
    sequence = ask(request_of)
    Planner.record(sequence, 0, [0], 7)
    told = sequence.metrics.speculative_decoding
    assert (told.num_spec_steps, told.decisions, told.acceptance_histogram) == (0, {}, [])
