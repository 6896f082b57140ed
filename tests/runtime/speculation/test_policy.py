"""The policy, in units of the timing table: tokens are plain decoding's, and what it drafts is worth its time."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from made_up_chances import CHANCES
from odd_clocks import bewitch
from small_grammars import END, grammar

from specbuild.runtime import Limits, SamplingParams
from specbuild.runtime.decoding.host_loop import HostLoop
from specbuild.runtime.decoding.planner import Planner
from specbuild.runtime.drafting import text_drafts
from specbuild.runtime.drafting.lookup_first import LookupDrafter
from specbuild.runtime.drafting.model import ModelDrafter
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.live import FRESH
from specbuild.runtime.speculation.policy import Option, Policy, SequencePolicy
from specbuild.runtime.speculation.rest import RESTS
from specbuild.runtime.speculation.sessions import Session
from specbuild.runtime.speculation.timings import TimingTable
from specbuild.runtime.speculation.tree import Tree, TreeSpec
from specbuild.runtime.speculation.tree_growth import Growth
from specbuild.runtime.speculation.trust import CAUTION

VOCAB = 12
LEFT_WITHIN = 6  # rounds within which a tree that costs too much is left
LARGE = {"verify": [[1, 12.0], [64, 48.0]], "draft": [[1, 0.6], [64, 4.0]], "plain": 0.1, "round": 0.2, "level": 0.1}
SMALL = {"verify": [[1, 0.8], [64, 5.0]], "draft": [[1, 0.2], [64, 0.6]], "plain": 0.05, "round": 0.1, "level": 0.05}


def table_of(times: dict[str, Any]) -> TimingTable:
    chances = {"greedy": CHANCES, "sampled": CHANCES}
    return TimingTable.of(
        {"schema": 2, "machine": {}, "widest": "best:16", "times": {"1": times}, "chances": chances}, 64
    )


class Meter:
    """Runs one sequence, and counts what its rounds cost by the table: drafted tokens, emitted ones, seconds."""

    def __init__(self, target: Any, draft: Any, executor: Any, request_of: Any, times: dict[str, Any]) -> None:
        self.timings, self.seconds, self.rounds = table_of(times), 0.0, list[tuple[int, int, float]]()
        self.times = self.timings.at(1)
        self.model, self.draft = executor(target, 1, 600), executor(draft, 1, 600)
        self.loop = HostLoop(self.model, LookupDrafter(ModelDrafter(self.draft, 64), looks_up=False), 64, frozenset())
        self.policy, self._request_of = Policy(self.timings, drafts=True), request_of
        self.made = list[SequencePolicy]()
        self._meter(self.model, self.times.verify, 0.0)
        self._meter(self.draft, self.times.draft, self.times.level)

    def _meter(self, executor: Any, seconds: Any, more: float) -> None:
        step = executor.step

        def metered(shares: Any) -> Any:
            nodes = sum(len(share.tokens) for share in shares)
            self.seconds += float(seconds[nodes]) + more
            return step(shares)

        executor.step = metered

    def limit(self, limits: Limits) -> None:
        self.policy.limits, self.loop.planner = limits, Planner(limits)

    def run(self, prompt: list[int], count: int, before: Any = None, **params: Any) -> Sequence:
        chosen = SamplingParams(max_new_tokens=count, speculation="best:16", **params)
        request: Sequence = self._request_of(prompt, chosen)
        request.policy = self.policy.for_request(chosen.temperature, chosen.session)
        self.made = [request.policy]
        self.loop.round([request])
        self.seconds, self.rounds = 0.0, []
        while not request.finish_reason:
            if before:
                before(len(request.output))
            began, emitted = self.seconds, len(request.output)
            drafted = request.metrics.speculative_decoding.num_draft_tokens
            self.loop.round([request])
            drafted = request.metrics.speculative_decoding.num_draft_tokens - drafted
            self.seconds += self.times.round if drafted else self.times.plain
            self.rounds.append((drafted, len(request.output) - emitted, self.seconds - began))
        self.loop.release(0)
        return request


@pytest.fixture
def metered(hash_executor: Any, request_of: Any) -> Any:
    return lambda target, draft, times: Meter(target, draft, hash_executor, request_of, times)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("error", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("times", [LARGE, SMALL])
def test_tokens_are_plain_decodings(
    hash_model: Any,
    metered: Any,
    times: dict[str, Any],
    error: float,
    temperature: float,
    plain: Any,
) -> None:
    model = hash_model(3)
    done = metered(model, hash_model(3, error=error), times).run([1, 2, 3], 60, temperature=temperature, seed=5)
    assert done.output == plain(model, [1, 2, 3], done.params)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("times", [LARGE, SMALL])
def test_what_has_to_come_after_a_draft_pays(
    hash_model: Any,
    metered: Any,
    times: dict[str, Any],
    temperature: float,
    plain: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens are plain decoding's, and cost less than where each branch ends where the draft did."""
    made = grammar(regex="((a|b)(c|d)01,10,01,10,,)+")
    asked = {"temperature": temperature, "seed": 5, "constraint": made, "logit_bias": {END: -90.0}}
    seconds = list[float]()
    for prolongs in (True, False):
        if not prolongs:
            monkeypatch.setattr(Growth, "prolong", lambda *_: None)
        meter = metered(hash_model(3), hash_model(3, error=0.5), times)
        done = meter.run([1, 2, 3], 120, **asked)
        assert (done.error, done.output) == (None, plain(hash_model(3), [1, 2, 3], done.params))
        assert done.metrics.speculative_decoding.decisions["model"]
        seconds.append(meter.seconds)
    assert seconds[0] < 0.95 * seconds[1]


@pytest.mark.parametrize(("times", "least"), [(LARGE, 1.9), (SMALL, 1.15)])
def test_a_good_draft_pays(hash_model: Any, metered: Any, times: dict[str, Any], least: float) -> None:
    for seed in range(3):
        meter = metered(hash_model(seed), hash_model(seed, error=0.3), times)
        meter.run([1, 2, 3], 201)
        assert 200 * meter.times.alone / meter.seconds > least


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("times", [LARGE, SMALL])
def test_a_hostile_draft_costs_next_to_nothing(
    hash_model: Any, metered: Any, times: dict[str, Any], temperature: float
) -> None:
    """Twelve tokens, so one in twelve comes true by chance; and less in the next texts of the session."""
    spent = []
    for seed in range(6):
        meter = metered(hash_model(seed), hash_model(seed + 100), times)
        for text in range(2):
            meter.run([1, 2, text], 201, temperature=temperature, seed=seed)
            spent.append(meter.seconds / (200 * meter.times.alone) - 1)
    assert sum(spent[::2]) / 6 < 0.03
    assert sum(spent[1::2]) / 6 < 0.025


@pytest.mark.parametrize("times", [LARGE, SMALL])
def test_a_draft_that_turns_bad_is_left_and_taken_up_again(
    hash_model: Any,
    metered: Any,
    times: dict[str, Any],
    plain: Any,
) -> None:
    """From token 80 on it likes best what the target likes least, from token 180 on it is its own again."""
    good = hash_model(7, error=0.2)

    def bad(tokens: Any) -> Any:
        return -good(tokens)

    meter = metered(hash_model(7), good, times)

    def turn(emitted: int) -> None:
        meter.draft.model = bad if 80 <= emitted < 180 else good

    done = meter.run([1, 2, 3], 420, turn)
    emitted, trees = 1, list[tuple[int, int]]()  # tokens so far, nodes drafted
    for drafted, tokens, _ in meter.rounds:
        trees.append((emitted, drafted))
        emitted += tokens
    before, during, after = (
        [drafted for at, drafted in trees if begin <= at < end] for begin, end in ((0, 80), (80, 180), (300, 420))
    )
    assert min(before[1:]) > 2
    assert all(drafted <= 1 for drafted in during[5:])
    assert sum(map(bool, during[5:])) < 0.2 * len(during)
    assert sum(drafted > 2 for drafted in after) > 0.9 * len(after)
    assert done.output == plain(hash_model(7), [1, 2, 3], done.params)


@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_the_same_by_any_clock(hash_model: Any, metered: Any, plain: Any, seed: int) -> None:
    meter, model = metered(hash_model(3), hash_model(3, error=0.4), SMALL), hash_model(3)
    meter.loop.live = meter.loop.drafter.model.live = meter.policy.live
    bewitch(meter.model, seed)
    bewitch(meter.draft, 9 - seed)
    done = meter.run([1, 2, 3], 120, temperature=float(seed % 2), seed=5)
    assert done.output == plain(model, [1, 2, 3], done.params)
    assert meter.policy.live.took > 0


def test_a_machine_on_which_trees_take_long_is_left_and_taken_up_again(hash_model: Any, metered: Any) -> None:
    """Another process has taken the second core: from the 60th token to the 160th a row costs what a step does."""
    meter = metered(hash_model(3), hash_model(3, error=0.2), LARGE)
    meter.loop.live = meter.loop.drafter.model.live = meter.policy.live
    step, busy = meter.model.step, False
    meter.model.seconds = meter.draft.seconds = 0.0

    def timed(shares: Any) -> Any:
        rows = sum(len(share.tokens) for share in shares)
        meter.model.seconds += float(meter.times.verify[1]) * rows if busy else float(meter.times.verify[rows])
        return step(shares)

    meter.model.step = timed
    seen = list[tuple[int, int]]()

    def look(emitted: int) -> None:
        nonlocal busy
        busy = 60 <= emitted < 160
        seen.append((emitted, len(meter.rounds)))

    meter.run([1, 2, 3], 540, look)
    drafted = [(emitted, meter.rounds[number][0]) for emitted, number in seen]
    before, during, after = (
        [nodes for at, nodes in drafted if begin <= at < end]
        for begin, end in ((1, 60), (60, 160), (160 + 2 * FRESH, 540))
    )
    assert sum(nodes > 2 for nodes in before) > 0.8 * len(before)
    assert during[LEFT_WITHIN] == 0
    assert sum(nodes > 1 for nodes in during[LEFT_WITHIN:]) < 0.2 * len(during)
    assert sum(nodes > 2 for nodes in after) > 0.7 * len(after)


def test_where_nothing_can_pay_nothing_is_tried(hash_model: Any, metered: Any) -> None:
    slow = SMALL | {"draft": [[1, 3.0], [64, 9.0]]}
    meter = metered(hash_model(1), hash_model(1), slow)
    meter.run([1, 2, 3], 100)
    assert {drafted for drafted, *_ in meter.rounds} == {0}
    assert meter.seconds == pytest.approx(99 * meter.times.alone)


def test_lookup_goes_as_far_as_it_pays() -> None:
    """By the chance of what matched, and by how the text's continuations fared."""
    policy = Policy(table_of(LARGE), drafts=False).for_request(0.0)
    shorter, longer = policy.choose(1, 1, 60).nodes, policy.choose(1, 5, 60).nodes
    assert 0 < shorter < longer
    assert policy.choose(1, 5, 2).nodes == 2
    assert policy.choose(1, 0, 60) == Option("plain", 0, 1.0, policy.live.timings.at(1).alone)
    for _ in range(20):
        policy.choose(1, 5, 60)
        policy.record([0], 7)
    assert policy.choose(1, 5, 60).kind == "plain"
    assert policy.session.trusts["lookup"].ratio < 0.5
    for _ in range(60):  # what is not drafted is watched all the same
        option = policy.choose(1, 5, 60)
        policy.guess = 7
        policy.record(range(option.nodes + 1), 7)
    assert policy.choose(1, 5, 60).kind == "lookup"
    assert policy.session.trusts["lookup"].ratio > 1


def test_a_recomputed_row_takes_the_free_one() -> None:
    """A step of two rows is not padded up to two, and its drafts are priced from there."""
    stairs = LARGE | {"verify": [[1, 10.0], [2, 10.0], [3, 30.0], [64, 900.0]]}
    policy = Policy(table_of(stairs), drafts=False, free=1).for_request(0.0)
    assert (policy.choose(1, 5, 60, pending=1).kind, policy.left) == ("lookup", 1)
    assert (policy.choose(1, 5, 60, pending=2).kind, policy.left) == ("plain", 0)
    assert (policy.choose(1, 5, 60, pending=3).kind, policy.left) == ("lookup", 1)


def test_what_is_recalled_is_drafted_so_far_as_it_pays_and_believed_by_itself() -> None:
    policy = Policy(table_of(LARGE), drafts=False).for_request(0.0)
    policy.recalled, policy.guess = [7, 8, 9], 7
    option = policy.choose(1, 0, 60)
    assert (option.kind, option.nodes) == ("habit", 3)
    assert policy.choose(1, 0, 2).nodes == 2  # of the text no more are left
    policy.choose(1, 0, 60)
    policy.record([0, 1], 7)
    assert policy.session.trusts["habit"].ratio != 1
    assert policy.session.trusts["lookup"].ratio == 1
    for _ in range(20):
        policy.choose(1, 0, 60)
        policy.record([0], 5)
    assert policy.choose(1, 0, 60).kind == "plain"
    assert policy.session.trusts["habit"].ratio < 0.5
    for _ in range(60):  # it is watched all the same
        policy.choose(1, 0, 60)
        policy.record([0], 7)
    assert policy.choose(1, 0, 60).kind == "habit"
    policy.recalled = []
    assert policy.choose(1, 0, 60).kind == "plain"


def test_an_engine_remembers_its_draft(hash_model: Any, metered: Any) -> None:
    """And the next text begins with what the last one learnt."""
    for draft, hostile in ((hash_model(8), True), (hash_model(7), False)):
        meter = metered(hash_model(7), draft, LARGE)
        meter.run([1, 2, 3], 60)
        meter.run([4, 5, 6], 12)
        assert (meter.rounds[0][0] <= 1) == hostile


def drafted_of(rounds: list[tuple[int, int, float]]) -> list[int]:
    """Nodes that each round drafted."""
    return [drafted for drafted, *_ in rounds]


def after_two_sessions(hash_model: Any, metered: Any, **asked: Any) -> tuple[Any, dict[str, list[int]]]:
    """A meter whose session `good` had good drafts and `bad` bad ones, and what each session's next request drafts."""
    good, bad = hash_model(7, error=0.1), hash_model(8)
    meter, drafted = metered(hash_model(7), good, LARGE), {}
    for session in ("good", "bad", "good"):
        meter.draft.model = bad if session == "bad" else good
        meter.run([1, 2, 3], 61, session=session, **asked)
    for session in ("bad", "good", "a new one"):
        meter.draft.model = bad if session == "bad" else good
        meter.run([4, 5, 6], 21, session=session, **asked)
        drafted[session] = drafted_of(meter.rounds)
    return meter, drafted


def test_a_session_whose_drafts_fail_has_none_from_the_first_round_of_its_next_request_on(
    hash_model: Any, metered: Any
) -> None:
    """Another session, and a request without one, begin as cautiously as before; they learn it by themselves."""
    meter, drafted = after_two_sessions(hash_model, metered)
    failing, trusted = (meter.policy.for_request(0.0, name) for name in ("bad", "good"))
    assert failing.model.ratio < 0.5 < trusted.model.ratio
    assert drafted["bad"][0] == 0
    assert max(drafted["bad"]) <= 1, "a probe at most"
    assert drafted["good"][0] > 2
    assert drafted["a new one"][0] > 1


def test_when_sampling_too_a_session_whose_drafts_fail_begins_with_few(hash_model: Any, metered: Any) -> None:
    """In the mean of seeds: shared noise makes even a bad draft right now and then."""
    texts = [after_two_sessions(hash_model, metered, temperature=1.0, seed=seed)[1] for seed in range(12)]
    bad, good, new = (np.mean([drafted[name][0] for drafted in texts]) for name in ("bad", "good", "a new one"))
    assert 4 * bad < min(good, new)


def test_a_session_s_requests_share_what_is_learnt_at_once_and_others_do_not() -> None:
    made = Policy(table_of(LARGE), drafts=True)
    first, second, sampled, other, alone = (
        made.for_request(*asked) for asked in ((0.0, "a"), (0.0, "a"), (1.0, "a"), (0.0, "b"), (0.0,))
    )
    first.choose(1, 0, 60)
    first.below = [0.9]
    for _ in range(9):
        first.record([0], 7)
    assert second.model.ratio == first.model.ratio < 0.4
    assert [each.model.ratio for each in (sampled, other, alone)] == [CAUTION] * 3
    later = made.for_request(0.0)
    assert first.model.ratio < later.model.ratio < CAUTION, "the engine has seen it too, and forgets more slowly"


def test_the_background_teaches_nobody_and_learns_from_nobody() -> None:
    made = Policy(table_of(LARGE), drafts=True)
    quiet, loud = made.for_request(0.0, "a", background=True), made.for_request(0.0, "a")
    for each in (quiet, loud):
        each.choose(1, 0, 60)
        each.below = [0.9]
    for _ in range(9):
        quiet.record([0], 7)
    assert quiet.model.ratio < 0.4
    assert [made.for_request(0.0, name).model.ratio for name in ("a", None)] == [CAUTION] * 2
    for _ in range(9):
        loud.record([0], 7)
    assert made.for_request(0.0, "a", background=True).model.ratio == CAUTION


def test_the_better_it_goes_the_less_a_doubtful_node_is_worth() -> None:
    policy, scores = Policy(table_of(LARGE), drafts=True).for_request(0.0), np.log(np.linspace(0.9, 0.02, 23))
    counts = []
    for ratio in (0.7, 1.3):
        policy.model.accepted = ratio * policy.model.expected
        policy.choose(1, 0, 60)
        counts.append(policy.verifies(scores.tolist()))
    assert 3 <= counts[1] < counts[0]


def test_a_level_is_worth_its_draft_and_its_verification() -> None:
    scores = np.log([0.9, 0.5, 0.3]).tolist()

    def levels(**times: Any) -> int:
        policy = Policy(table_of(LARGE | times), drafts=True).for_request(0.0)
        policy.choose(1, 0, 60)
        return policy.expands(scores)

    assert levels() > 0
    assert levels(level=15.0) == 0
    assert levels(verify=[[1, 12.0], [64, 700.0]]) == 0


def test_limits_hold(hash_model: Any, metered: Any) -> None:
    meter = metered(hash_model(3), hash_model(3, error=0.2), LARGE)
    meter.limit(Limits(max_draft_tokens=2))
    done = meter.run([1, 2, 3], 60)
    assert max(drafted for drafted, *_ in meter.rounds) == 2
    meter.limit(Limits(min_expected_speedup=50))
    assert meter.run([1, 2, 3], 60).output == done.output
    assert {drafted for drafted, *_ in meter.rounds} == {0}


def test_decisions_are_counted(hash_model: Any, metered: Any) -> None:
    meter = metered(hash_model(3), hash_model(3, error=0.2), LARGE)
    drafting = meter.run([1, 2, 3], 60).metrics.speculative_decoding
    assert set(drafting.decisions) <= {"plain", "lookup", "model", "probe"}
    assert sum(drafting.decisions.values()) == len(meter.rounds) - (meter.rounds[-1][1] == 1)
    assert drafting.decisions["model"] == drafting.num_spec_steps


def test_scores_are_the_logarithms_of_chances(hash_model: Any, hash_executor: Any, request_of: Any) -> None:
    drafter = ModelDrafter(hash_executor(hash_model(1)), 8)
    request = request_of([1, 2, 3], SamplingParams(max_new_tokens=9, speculation="best:4"))
    drafter.propose([request])
    likely = drafter._growth[0].scores[1:5]
    drafter.release(0)
    drafter.keep(0, 0, 0)
    request.policy = Policy(table_of(LARGE), drafts=True).for_request(0.0)
    request.policy.choose(1, 0, 8)
    drafter.propose([request])
    found = drafter._growth[0].scores[1:5]
    chances = np.interp(likely, CHANCES["likely"], CHANCES["chance"])  # type: ignore[call-overload]
    assert np.exp(found) == pytest.approx(CAUTION * chances)


def test_a_row_that_costs_nothing_drafts_the_text_s_continuation() -> None:
    """Where nothing would be drafted; not where the limits allow nothing, and not without a match of two."""
    slow = {"verify": [[1, 1.0], [2, 3.0], [64, 90.0]], "draft": [[1, 9.0]], "plain": 0.1, "round": 0.2, "level": 0.1}
    for free, matched, limits, expected in (
        (0, 5, Limits(), ("plain", 0)),
        (1, 5, Limits(), ("lookup", 1)),
        (3, 5, Limits(), ("lookup", 3)),
        (1, 1, Limits(), ("plain", 0)),
        (1, 0, Limits(), ("plain", 0)),
        (1, 5, Limits(max_draft_tokens=0), ("plain", 0)),
    ):
        policy = Policy(table_of(slow), drafts=False, limits=limits, free=free).for_request(0.0)
        option = policy.choose(1, matched, 40)
        assert (option.kind, option.nodes) == expected


def test_what_has_to_come_is_drafted_and_teaches_nothing() -> None:
    policy = Policy(table_of(LARGE), drafts=True).for_request(0.0)
    before = policy.model.ratio, policy.session.trusts["lookup"].ratio
    assert policy.force(1, 9) == 9
    assert policy.force(1, 900) == 63
    policy.forced(4)
    assert (policy.now.kind, policy.now.nodes, policy.spare) == ("forced", 4, 0)
    assert policy.promised > 1
    policy.record(range(5), 7)
    assert (policy.model.ratio, policy.session.trusts["lookup"].ratio) == before
    assert Policy(table_of(LARGE), True, Limits(max_draft_tokens=3)).for_request(0.0).force(1, 9) == 3


@pytest.mark.parametrize(("kept", "accepted", "trials"), [(3, 3, 3), (3, 5, 3), (2, 1, 2), (0, 2, 0)])
def test_of_a_lookup_that_was_cut_and_went_on_only_its_own_tokens_are_trials(
    kept: int, accepted: int, trials: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy(table_of(LARGE), drafts=False).for_request(0.0)
    policy.choose(1, 5, 3)
    assert policy.now.kind == "lookup"
    seen = list[tuple[str, int, int]]()
    monkeypatch.setattr(Session, "record", lambda *called: seen.append((called[1], called[2], len(called[3]))))
    policy.follow(kept, 6)
    policy.record(range(accepted + 1), 7)
    assert seen == [("lookup", min(accepted, trials), trials)]


def test_of_a_tree_what_had_to_come_is_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """A root with two children, of which the first is followed by two tokens that have to come."""
    policy = Policy(table_of(LARGE), drafts=True).for_request(0.0)
    policy.choose(1, 0, 8)
    growth = Growth(TreeSpec.parse("best:4"), Tree([3]), policy=policy)
    growth.grow(np.array([[5, 6, 7, 8]]), np.array([[-0.2, -0.9, -np.inf, -np.inf]]))
    growth.prolong(lambda _, path, count: [*path, *([1, 2] if path == [5] else [])], 9)
    tree = growth.tree()
    assert (tree.tokens, tree.parents) == ([3, 5, 1, 2, 6], [-1, 0, 1, 2, 0])
    assert policy.below[0] > 0
    assert policy.below[1:] == [0.0] * 4
    seen = list[tuple[str, int, int]]()
    monkeypatch.setattr(Session, "record", lambda *called: seen.append((called[1], called[2], len(called[3]))))
    for path in ([0], [0, 4], [0, 1], [0, 1, 2, 3]):
        policy.record(path, 7)
    assert [each for each in seen if each[2]] == [("model", came, 1) for came in (0, 1, 1, 1)]


def test_where_deciding_takes_longer_than_drafts_bring_it_is_left(
    hash_model: Any, metered: Any, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft of another model, and a clock by which a decision takes a thirtieth of a step; the text is the same."""
    clock = itertools.count(0.0, 0.4)
    monkeypatch.setattr(text_drafts, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    meter, decided = metered(hash_model(3), hash_model(99), LARGE), list[int]()
    real = SequencePolicy.choose
    monkeypatch.setattr(SequencePolicy, "choose", lambda *given: decided.append(1) or real(*given))
    done = meter.run([1, 2, 3], 200)
    assert done.output == plain(hash_model(3), [1, 2, 3], done.params)
    assert len(decided) < 60
    assert meter.policy.sessions.of(None, False).shared.waits.rounds == RESTS[1]


def test_what_a_constraint_forces_is_drafted_at_rest_too(hash_model: Any, metered: Any) -> None:
    made, decided = grammar(regex="((a|b)(c|d)01,10,01,10,,)+"), dict[bool, int]()
    for constrained in (False, True):
        meter = metered(hash_model(3), hash_model(99), LARGE)
        asked = {"constraint": made, "logit_bias": {END: -90.0}} if constrained else {}
        done = meter.run([1, 2, 3], 100, before=lambda _, m=meter: rest_of(m), **asked)
        decided[constrained] = done.metrics.speculative_decoding.decisions.get("forced", 0)
        assert meter.made[0].rest.left > 0
    assert decided[True] > 2
    assert decided[False] == 0


@pytest.mark.parametrize("seen", [True, False])
def test_a_rest_ends_where_habits_foretell_the_text(hash_model: Any, metered: Any, plain: Any, seen: bool) -> None:
    """The draft is the target, so that the woken round gains; deciding takes hardly any of the table's time."""
    meter, model, first = metered(hash_model(3), hash_model(3), LARGE), hash_model(3), iter([True])
    if seen:
        meter.run([1, 2, 3], 60)
    done = meter.run([1, 2, 3], 60, before=lambda _: next(first, False) and rest_of(meter))
    assert done.output == plain(model, [1, 2, 3], done.params)
    assert (meter.made[0].rest.left == 0) is seen
    assert (done.metrics.speculative_decoding.num_spec_steps > 3) is seen
    assert sum(done.metrics.speculative_decoding.decisions.values()) >= len(meter.rounds) - 1  # none for the last token


def rest_of(meter: Any) -> None:
    """Its sequence rests from the next round on."""
    for policy in meter.made:
        policy.rest.left = RESTS[1]


@pytest.mark.parametrize(("matched", "learns"), [(5, True), (1, False), (0, False)])
def test_what_a_device_continued_is_judged_where_the_text_repeats_itself(matched: int, learns: bool) -> None:
    """Elsewhere it may have been a habit of the device, of which the host knows nothing."""
    policy = Policy(table_of(LARGE), drafts=False)
    for accepted in (0, 10):
        one = policy.for_request(0.0)
        one.choose(1, matched, 40)
        before = one.session.trusts["lookup"].ratio
        one.was_continued(10)
        one.record(range(1 + accepted), token=3)
        assert (one.now.kind, one.now.nodes, one.extra) == ("lookup", 10, 0.0)
        assert one.promised >= 1.0
        after = one.session.trusts["lookup"].ratio
        assert (after > before if accepted else after < before) if learns else after == before
    one.was_continued(0)
    assert (one.now.kind, one.below) == ("plain", [0.0])
