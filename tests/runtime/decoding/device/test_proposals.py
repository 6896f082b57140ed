"""What the host decides that sequences draft on a device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from constraints import family
from device_requests import Made, prompt_of, request_of
from tiny_models import BUCKETS, TEXT, VOCAB

from specbuild.runtime import Limits
from specbuild.runtime.backends.kernels.abi import KernelLibrary
from specbuild.runtime.decoding.device.proposals import Proposals
from specbuild.runtime.decoding.planner import Planner
from specbuild.runtime.drafting.text_drafts import TextDrafts
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.policy import PLAIN, Option
from specbuild.runtime.speculation.rest import Rest, Waits
from specbuild.runtime.speculation.tree import Tree


@pytest.fixture
def proposals(host: KernelLibrary, tmp_path: Path) -> Proposals:
    return Made(host, tmp_path).loop.proposals


def ready(slot: int = 0, tokens: int = 6, **fields: Any) -> Sequence:
    """A sequence whose prompt has been read."""
    sequence = request_of(prompt_of(slot, tokens), **{"speculation": "chain:3"} | fields)
    sequence.slot, sequence.cached = slot, tokens - 1
    return sequence


class Decided:
    """A policy whose mind is made up."""

    free, rest, live, spare, owed, together = 0, Rest(Waits()), SimpleNamespace(lanes=1, settle=lambda: None), 0, 0, 1

    def __init__(self, option: Option) -> None:
        self.option, self.now, self.guess, self.passed = option, PLAIN, -1, 0

    def choose(self, *_: object) -> Option:
        self.now = self.option
        return self.now

    def grown(self, shape: Any, steps: Any) -> Any:
        return replace(shape, depth=self.option.levels, nodes=self.option.nodes)

    def pass_over(self) -> None:
        self.passed += 1
        self.now = PLAIN


def test_the_device_grows_what_nobody_on_the_host_does(proposals: Proposals) -> None:
    sequence = ready()
    (draft,) = proposals.plan([sequence])
    assert (draft.tree, draft.spec, draft.drafter, draft.drafts) == (None, sequence.tree, None, True)
    assert draft.nodes == 4


def test_who_wants_nothing_or_is_at_its_end_has_the_root(proposals: Proposals) -> None:
    for sequence in (ready(speculation="off"), ready(max_new_tokens=1)):
        (draft,) = proposals.plan([sequence])
        assert draft.tree
        assert (draft.tree.tokens, draft.spec, draft.drafts) == ([sequence.tokens[-1]], None, False)


def test_limits_are_those_of_all_who_draft(proposals: Proposals) -> None:
    limited = replace(proposals, planner=Planner(Limits(num_speculative_tokens_per_batch_size={"1-1": 3, "2-9": 2})))
    assert [draft.nodes for draft in limited.plan([ready()])] == [4]
    assert [draft.nodes for draft in limited.plan([ready(), ready(1)])] == [3, 3]


def test_constrained_trees_are_grown_on_the_host(proposals: Proposals) -> None:
    constrained, free = ready(constraint=family(1, VOCAB, VOCAB - 1)), ready(1)
    drafts = proposals.plan([constrained, free])
    assert drafts[0].drafter is proposals.for_constrained is not None
    assert (drafts[0].spec, drafts[1].drafter, drafts[1].spec) == (None, None, free.tree)
    proposals.grow(drafts)
    assert isinstance(drafts[0].tree, Tree)
    assert drafts[0].tree.tokens[0] == constrained.tokens[-1]
    assert drafts[1].tree is None


@pytest.mark.parametrize(
    ("option", "tokens", "nodes", "passed"),
    [
        (Option("model", 3, 2.0, 1.0, 2), TEXT - 20, 4, 0),
        (Option("model", 15, 2.0, 1.0, 8), TEXT - 20, 1, 1),
        (Option("probe", 1, 1.1, 1.0, 1), TEXT - 20, 2, 0),
        (Option("plain", 0, 1.0, 1.0), TEXT - 20, 1, 0),
        (Option("model", 15, 2.0, 1.0, 8), 6, 16, 0),
    ],
)
def test_a_policy_decides_and_room_is_for_what_it_decided(
    proposals: Proposals, option: Option, tokens: int, nodes: int, passed: int
) -> None:
    """A small tree where a large one would not fit any more; the root alone where nothing does."""
    sequence = ready(tokens=tokens, speculation="best:15", max_new_tokens=40)
    policy: Any = Decided(option)
    sequence.policy = policy
    (draft,) = proposals.plan([sequence])
    assert (draft.nodes, policy.passed) == (nodes, passed)
    assert draft.option is policy.now
    assert tuple(proposals.steps) == BUCKETS


def test_without_a_policy_the_tree_that_was_asked_for_has_to_fit(proposals: Proposals) -> None:
    (draft,) = proposals.plan([ready(tokens=TEXT - 20, speculation="best:15", max_new_tokens=40)])
    assert (draft.nodes, draft.drafts, draft.option) == (1, True, None)


def test_the_text_comes_first(proposals: Proposals) -> None:
    sequence = request_of([5, 6, 7, 8] * 6, speculation="chain:3")
    sequence.slot, sequence.cached = 0, 23
    (draft,) = replace(proposals, texts=TextDrafts(padded=True)).plan([sequence])
    assert draft.tree
    assert draft.tree.tokens == [8, 5, 6, 7]
    (draft,) = proposals.plan([sequence])
    assert draft.tree is None
