"""Decisions of a round for all its sequences: nodes where they are worth most, and never more than they bring."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_chances import CHANCES

from specbuild.runtime import Limits, SamplingParams
from specbuild.runtime.decoding.host_loop import HostLoop
from specbuild.runtime.drafting.lookup_first import LookupDrafter
from specbuild.runtime.drafting.model import ModelDrafter
from specbuild.runtime.speculation.batch import Batch, Wish
from specbuild.runtime.speculation.live import GAP, LiveTimings
from specbuild.runtime.speculation.policy import Policy, SequencePolicy
from specbuild.runtime.speculation.sessions import PROBES
from specbuild.runtime.speculation.timings import TimingTable
from specbuild.runtime.speculation.tree import TreeSpec

FLAT = {"verify": [[1, 10.0], [64, 20.0]], "draft": [[1, 0.2], [64, 2.0]], "plain": 0.4, "round": 0.4, "level": 0.04}
STEEP = FLAT | {"verify": [[1, 10.0], [2, 20.0], [64, 640.0]]}


def made(times: dict[str, Any], drafts: bool, free: int = 0, limits: Limits | None = None, lanes: int = 4) -> Policy:
    record = {"schema": 2, "machine": {}, "widest": "best:16", "times": {"1": times, str(lanes): times}}
    table = TimingTable.of(record | {"chances": {"greedy": CHANCES, "sampled": CHANCES}}, 64)
    return Policy(table, drafts, limits or Limits(), free=free, live=LiveTimings(table, lanes))


def decided(
    policy: Policy, matched: list[int], room: int = 40, pending: int = 1, padded: bool = False
) -> tuple[Batch, list[SequencePolicy]]:
    each = [policy.for_request(0.0) for _ in matched]
    batch = Batch([Wish(one, count, room, pending) for one, count in zip(each, matched, strict=True)], padded)
    batch.decide()
    return batch, each


def test_nodes_go_where_they_are_worth_most() -> None:
    """Who repeats itself drafts, by how much; who does not, does not; and where rows are dear hardly anybody does."""
    _, each = decided(made(FLAT, drafts=False), [5, 1, 0, 3])
    nodes = [one.now.nodes for one in each]
    assert nodes[0] > nodes[3] > nodes[1] >= nodes[2] == 0
    assert [one.now.kind for one in each][2] == "plain"
    _, each = decided(made(STEEP, drafts=False), [5, 1, 0, 3])
    assert sum(one.now.nodes for one in each) <= 1


def test_one_that_repeats_itself_is_drafted_for_beside_those_that_do_not() -> None:
    """The margin is asked of who drafts, not of all."""
    _, each = decided(made(FLAT, drafts=False), [5, 0, 0, 0])
    assert each[0].now.kind == "lookup"
    assert each[0].now.nodes > 2
    assert each[0].promised > 1


def promised(leads: list[tuple[float, float]], matched: list[int], times: dict[str, Any]) -> tuple[float, list[int]]:
    """A round's promised seconds over plain decoding's, and the nodes of each sequence, by how far each is ahead."""
    policy = made(times, drafts=False)
    each = [policy.for_request(0.0) for _ in matched]
    for one, lead in zip(each, leads, strict=True):
        one.leads = lead
    Batch([Wish(one, count, 40) for one, count in zip(each, matched, strict=True)]).decide()
    plain = policy.live.at(4).of_round(len(matched), len(matched), drafts=False)
    return max(one.now.seconds for one in each) / plain, [one.now.nodes for one in each]


SLOPE = FLAT | {"verify": [[1, 10.0], [2, 11.0], [64, 73.0]]}


def test_no_round_slows_those_who_draft_nothing_by_more_than_they_are_ahead() -> None:
    """Whether they decide or rest; the shorter draft is made that they can afford."""
    ahead, never = (9.0, math.inf), (0.0, math.inf)
    _, free = promised([ahead, ahead], [6, 0], SLOPE)
    assert free[0] > 3
    took, nodes = promised([ahead, never], [6, 0], SLOPE)
    assert took == 1
    assert nodes[0] < free[0], "only rows that the step has anyway"
    for lead in (0.1, 0.25, 0.5):
        for leads in ([ahead, (lead, math.inf)], [(9.0, lead), (9.0, lead)]):
            took, nodes = promised(leads, [6, 0], SLOPE)
            assert 1 < took <= 1 + lead + 1e-9
            assert 0 < nodes[0] <= free[0]


def test_who_drafts_is_slowed_by_no_more_than_its_draft_brings() -> None:
    """So two texts that repeat themselves draft at once, though neither is ahead."""
    took, nodes = promised([(0.0, math.inf)] * 2, [6, 6], SLOPE)
    assert took > 1
    assert min(nodes) > 0


@given(
    leads=st.lists(st.floats(-3.0, 3.0), min_size=3, max_size=3),
    matched=st.lists(st.integers(0, 12), min_size=3, max_size=3),
    others=st.floats(-1.0, 2.0),
)
@settings(max_examples=60, deadline=None)
def test_rounds_promise_to_slow_nobody(leads: list[float], matched: list[int], others: float) -> None:
    policy = made(SLOPE, drafts=True)
    each = [policy.for_request(0.0) for _ in leads]
    for one, lead in zip(each, leads, strict=True):
        one.leads = lead, others
    Batch([Wish(one, count, 40) for one, count in zip(each, matched, strict=True)]).decide()
    plain = policy.live.at(4).of_round(3, 3, drafts=False)
    for one, lead in zip(each, leads, strict=True):
        if one.now.kind in ("plain", "lookup"):
            brought = sum(one.reached()[: one.now.nodes])
            assert one.now.seconds <= plain * (1 + max(lead, 0.0) + brought) * (1 + 1e-9)
            assert one.now.seconds <= plain * min(GAP, 1 + max(others, 0.0)) * (1 + 1e-9)


def test_no_round_is_much_longer_than_plain_decoding() -> None:
    """Unless the engine may have long gaps, as on a GPU."""
    for gap, longer in ((GAP, False), (math.inf, True)):
        policy = made(STEEP | {"verify": [[1, 10.0], [2, 25.0], [64, 26.0]]}, drafts=False)
        policy.live.gap = gap
        _, each = decided(policy, [9] * 4)
        alone = policy.for_request(0.0)
        plain = policy.live.at(4).of_round(4, 4, drafts=False)
        assert (each[0].now.seconds > GAP * plain) is longer
        one = alone.choose(1, 9, 40)
        assert (one.nodes > 0) is longer


def test_without_a_model_a_table_has_no_draft_steps() -> None:
    policy = made(FLAT | {"draft": []}, drafts=False)
    _, each = decided(policy, [0, 5])
    assert [one.now.kind for one in each] == ["plain", "lookup"]
    assert [policy.for_request(0.0).choose(1, matched, 40).kind for matched in (0, 5)] == ["plain", "lookup"]


def test_the_model_drafts_for_those_whom_it_serves() -> None:
    """And for nobody where a level takes as long as a step of the target."""
    for level, models in ((0.2, [1]), (10.0, [])):
        policy = made(STEEP | {"draft": [[1, level], [64, 2 * level]], "verify": FLAT["verify"]}, drafts=True)
        each = [policy.for_request(0.0) for _ in range(3)]
        each[2].model.accepted = 0.0
        Batch([Wish(one, 5 * (not number), 40) for number, one in enumerate(each)]).decide()
        assert each[0].now.kind == "lookup"
        assert [number for number, one in enumerate(each) if one.now.kind == "model"] == models


@pytest.mark.parametrize("padded", [False, True])
def test_one_sequence_probes_in_a_round(padded: bool) -> None:
    """A failure is counted once, and the rest after it in rounds, however many sequences there are."""
    policy = made(FLAT | {"draft": [[1, 0.9], [64, 1.4]]}, drafts=True)
    each = [policy.for_request(0.0) for _ in range(4)]
    shared, probed = each[0].session.shared, list[int]()
    for one in each:
        one.model.accepted = 0.0
    for number in range(70):
        Batch([Wish(one, 0, 40) for one in each], padded).decide()
        kinds = [one.now.kind for one in each]
        assert kinds.count("probe") <= 1
        if "probe" in kinds:
            probed.append(number)
        for one in each:
            one.record([0], 5)
    assert probed == [0, 1 + PROBES[0], 2 + 3 * PROBES[0]]
    assert shared.probing.wait == 8 * PROBES[0]


@pytest.mark.parametrize("owed", [0, 4000])
def test_whose_probes_failed_lets_others_try(owed: int) -> None:
    """The first of four has a draft that never comes true, and perhaps a text that it would take too long to read."""
    policy = made(FLAT | {"draft": [[1, 0.9], [64, 1.4]]}, drafts=True)
    policy.live.gap = math.inf
    each = [policy.for_request(0.0) for _ in range(4)]
    models = [0] * 4
    each[0].owed = owed
    for one in each:
        one.model.accepted = 0.0
    for _ in range(300):
        Batch([Wish(one, 0, 40) for one in each]).decide()
        for number, one in enumerate(each):
            models[number] += one.now.kind == "model"
            nodes = one.now.nodes
            one.below = [0.9] * nodes + [0.0]
            one.record(range(1 + nodes if number else 1), 5)
    assert min(models[1:]) > 200
    assert models[0] == 0


def test_sessions_probe_beside_each_other() -> None:
    """Each session's rest goes on while others probe; two whose rest ends together probe in turn."""
    policy, count = made(FLAT | {"draft": [[1, 0.9], [64, 1.4]]}, drafts=True), 4
    each = [policy.for_request(0.0, f"session {number}") for number in range(count)]
    probed = [list[int]() for _ in each]
    for one in each:
        one.model.accepted = 0.0
    for number in range(3 * PROBES[0] + 10):
        Batch([Wish(one, 0, 40) for one in each]).decide()
        for at, one in enumerate(each):
            if one.now.kind == "probe":
                probed[at].append(number)
            one.record([0], 5)
    assert [len(rounds) for rounds in probed] == [3] * count
    assert len({number for rounds in probed for number in rounds}) == 3 * count


def test_a_probe_takes_a_whole_step_of_the_draft() -> None:
    """Not one sequence's share of it; where others may not be slowed by so much, it waits."""
    for step, probes in ((2.0, True), (9.0, False)):
        policy = made(FLAT | {"verify": [[1, 10.0], [64, 10.0]], "draft": [[1, step], [64, step]]}, drafts=True)
        each = [policy.for_request(0.0) for _ in range(4)]
        for one in each:
            one.model.accepted = 0.0
        Batch([Wish(one, 0, 40) for one in each]).decide()
        assert [one.now.kind == "probe" for one in each] == [probes, False, False, False]
        if probes:
            assert each[0].now.seconds > policy.live.at(4).of_round(5, 4, drafts=True) + step


@pytest.mark.parametrize("count", [1, 3])
def test_a_model_has_to_bring_more_than_a_device_that_continues_texts(count: int) -> None:
    """By itself and for nothing: what that brings is plain decoding's, in whose place the model would draft."""
    policy = made(STEEP | {"draft": [[1, 0.2], [64, 0.4]], "verify": FLAT["verify"]}, drafts=True)
    for brought, kind in ((0.0, "model"), (0.1, "model"), (20.0, "plain")):
        each = [policy.for_request(0.0) for _ in range(count)]
        for one in each:
            one.brought = brought
        if count == 1:
            each[0].choose(1, 0, 40)
        else:
            Batch([Wish(one, 0, 40) for one in each]).decide()
        assert {one.now.kind for one in each} == {kind}


def test_one_sequence_in_an_engine_of_several_pays_for_its_own_rows() -> None:
    """Not for rows of slots that are idle: so it drafts more than if all did as it does."""
    policy = made(STEEP | {"verify": [[1, 10.0], [64, 150.0]]}, drafts=False)
    together = policy.for_request(0.0)
    together.choose(1, 5, 40)
    _, (alone,) = decided(policy, [5])
    assert alone.now.nodes >= together.now.nodes > 0


def test_a_row_that_is_there_anyway_costs_nothing() -> None:
    dear = FLAT | {"verify": [[1, 10.0], [2, 30.0], [64, 900.0]]}
    _, each = decided(made(dear, drafts=False, free=1), [5, 0, 0])
    assert [(one.now.kind, one.now.nodes) for one in each] == [("lookup", 1), ("plain", 0), ("plain", 0)]
    assert [one.spare for one in each] == [0, 0, 0]
    _, each = decided(made(dear, drafts=False, free=1), [0, 0, 0])
    assert [one.spare for one in each] == [1, 0, 0]
    _, each = decided(made(dear, drafts=False, free=1, lanes=2), [5, 0])
    assert [(one.now.kind, one.spare) for one in each] == [("plain", 0), ("plain", 0)]


def test_whoever_is_beside_counts_as_one_that_decodes_plainly() -> None:
    """A second is worth what the whole step emits, so a row among rows of others has to bring more than one alone."""
    policy = made(FLAT | {"verify": [[1, 10.0], [2, 16.0], [64, 388.0]]}, drafts=False, lanes=8)
    batch, nodes = dict[int, Batch](), dict[int, int]()
    for together in (1, 2, 8):
        one = policy.for_request(0.0)
        one.together = together
        batch[together] = Batch([Wish(one, 5, 40)])
        batch[together].decide()
        nodes[together] = one.now.nodes
        assert batch[together].rows == together + one.now.nodes
    assert nodes[1] > nodes[2] > nodes[8]
    assert batch[1].rate < batch[2].rate < batch[8].rate


def test_in_a_padded_step_the_longest_draft_is_paid_for() -> None:
    """A row of every lane: too dear for one alone and not for four; and rows that pad every step are free."""
    dear = FLAT | {"verify": [[1, 10.0], [2, 12.8], [64, 186.4]]}
    for padded in (False, True):
        (_, alone), (_, all_four) = (
            decided(made(dear, False), each, padded=padded) for each in ([5, 0, 0, 0], [5] * 4)
        )
        assert (alone[0].now.nodes > 0) is not padded
        assert {one.now.nodes > 0 for one in all_four} == {True}
    _, each = decided(made(STEEP, drafts=False, free=6), [5, 0], padded=True)
    assert [(one.now.nodes, one.spare) for one in each] == [(6, 0), (0, 6)]


def test_a_device_has_few_depths_and_one_for_all() -> None:
    """A graph for each, so powers of two."""
    flat = {"verify": [[1, 10.0], [64, 10.1]]}
    depths = set()
    for level in (0.1, 0.4, 0.8, 1.6, 3.2):
        policy = made(FLAT | flat | {"draft": [[1, level], [64, level]]}, drafts=True)
        _, each = decided(policy, [0, 0, 0], padded=True)
        depths.add(each[0].now.levels)
        assert len({one.now.levels for one in each}) == 1
        shape = TreeSpec.parse("best:15")
        assert {one.grown(shape, (1, 4, 16)).depth for one in each if one.now.levels} <= {each[0].now.levels}
    assert depths <= {0, 1, 2, 4, 8}
    assert len(depths) > 2


@pytest.mark.parametrize("limits", [Limits(max_draft_tokens=2), Limits(min_expected_speedup=900)])
def test_limits_hold(limits: Limits) -> None:
    _, each = decided(made(FLAT, drafts=True, limits=limits), [5, 5, 0])
    most = limits.max_draft_tokens or 0
    assert max(one.now.nodes for one in each) == most


def test_a_schedule_of_limits_counts_who_drafts() -> None:
    """Not those beside them who rest or read, as the planner's does."""
    one = made(FLAT, drafts=False, limits=Limits(num_speculative_tokens_per_batch_size={"1-1": 8, "2-9": 0}))
    nodes = []
    for count in (1, 2):
        each = [one.for_request(0.0) for _ in range(count)]
        each[0].together = 2
        Batch([Wish(policy, 5, 40) for policy in each]).decide()
        nodes.append(each[0].now.nodes > 0)
    assert nodes == [True, False]


def test_verified_nodes_are_shared_out_by_chance() -> None:
    batch, each = decided(made(FLAT, drafts=True), [0, 0])
    good, bad = np.log(np.linspace(0.95, 0.5, 12)).tolist(), np.log(np.linspace(0.3, 0.001, 12)).tolist()
    batch.share([(each[0], good), (each[1], bad)])
    first, second = (one.verifies(scores) for one, scores in zip(each, (good, bad), strict=True))
    assert first == 12 > second
    batch.share([])


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=16),
    st.integers(0, 40),
    st.sampled_from([0, 1, 3]),
    st.booleans(),
    st.integers(1, 4),
    st.sampled_from([FLAT, STEEP]),
    st.booleans(),
)
def test_no_plan_promises_less_than_plain_decoding(
    matched: list[int], room: int, free: int, drafts: bool, pending: int, times: dict[str, Any], padded: bool
) -> None:
    batch, each = decided(made(times, drafts, free, lanes=16), matched, room, pending, padded)
    for one in each:
        assert one.now.nodes <= max(room, 0)
        assert one.promised >= 1 - 1e-9 or one.now.kind == "probe"
    assert batch.rows >= pending * len(matched)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("times", [FLAT, STEEP])
def test_tokens_are_plain_decodings(
    hash_model: Any, hash_executor: Any, request_of: Any, plain: Any, times: dict[str, Any], temperature: float
) -> None:
    """Three at once, of unlike lengths, one of them drafting a tree that it asked for."""
    model, draft = hash_model(3), hash_model(3, error=0.4)
    loop = HostLoop(
        hash_executor(model, 3, 400), LookupDrafter(ModelDrafter(hash_executor(draft, 3, 400), 64)), 64, frozenset()
    )
    policy = made(times, drafts=True, lanes=3)
    params = [
        SamplingParams(max_new_tokens=20 + 15 * slot, speculation="best:8", seed=slot, temperature=temperature)
        for slot in range(3)
    ]
    requests = [request_of([1, 2, slot + 3], each, slot=slot) for slot, each in enumerate(params)]
    for request in requests[:2]:
        request.policy = policy.for_request(temperature)
    while active := [request for request in requests if not request.finish_reason]:
        loop.round(active)
    for slot, request in enumerate(requests):
        assert request.output == plain(model, [1, 2, slot + 3], params[slot])
