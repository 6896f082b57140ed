"""Steering, in simulated time: it ends what breaks an objective, comes back, and leaves alone what helps."""

from itertools import pairwise

import pytest
from simulated_queue import SimulatedQueue

from specbuild.serve.slo.draft_throttle import Steering
from specbuild.serve.slo.objectives import Sample, parse

PROBE, RAREST = 60.0, 960.0  # seconds until the first probe, and between probes that keep failing at most
STEP, END = 60.0, 180.0  # when the load comes and goes
BACK = 15.0  # seconds after the step within which the tail is below the objective
RETURNS = 45.0  # seconds after the load within which all may be drafted again


def stepped(slo, rate, guarded=True, **queue):
    """A quiet minute, two with a load, and two that are quiet again."""
    queued = SimulatedQueue(parse([slo]), **queue)
    queued.run(STEP, 1.0, guarded)
    queued.run(END - STEP, rate, guarded)
    queued.run(120.0, 0.5, guarded)
    return queued


@pytest.mark.parametrize("knows", [True, False])
def test_the_tail_returns_and_speculation_does(knows):
    """A load at which trees make rounds long: p99 is below the objective 15 s later, and stays there for a minute."""
    slo = "tpot=0.035,p99"
    queue, alone = stepped(slo, 8.0, knows=knows), stepped(slo, 8.0, guarded=False)
    (objective,) = queue.objectives
    assert queue.tail(objective, 0, STEP) < objective.seconds
    assert alone.tail(objective, STEP + BACK, END) > 1.4 * objective.seconds
    assert queue.tail(objective, STEP + BACK, STEP + BACK + PROBE) < objective.seconds
    assert queue.level_at(STEP - 1) == 0
    assert queue.level_at(STEP + BACK) > 0
    assert queue.level_at(END + RETURNS) == queue.level_at(END + 119) == 0
    changes = [step for _, step in queue.steps if step.changed]
    assert len(changes) < 10
    first = changes[0]
    assert (first.level, first.nodes, first.message) == (1, 4, "the objective is broken: drafting less")
    assert first.told["objective"] == "tpot_p99"
    assert first.told["tail"] > objective.seconds


@pytest.mark.slow
def test_probes_beside_a_load_that_stays_become_rare():
    queue = SimulatedQueue(parse(["tpot=0.035,p99"]))
    queue.run(1800.0, 8.0)
    broke = [at for at, step in queue.steps if step.message.startswith("it broke again")]
    assert 2 <= len(broke) <= 6
    gaps = [later - at for at, later in pairwise(broke)]
    assert max(gaps) > 2 * PROBE
    kept = [level > 0 for at, level in queue.levels if at > BACK]
    assert sum(kept) > 0.9 * len(kept)


def test_a_first_token_that_waits_for_slots_is_helped_where_rounds_are_what_is_slow():
    slo = "ttft=0.4,p95"
    queue, alone = stepped(slo, 9.5), stepped(slo, 9.5, guarded=False)
    (objective,) = queue.objectives
    assert alone.tail(objective, 150, END) > 10
    assert queue.tail(objective, 150, END) < 1
    assert queue.steps[0][1].told["cause"] == "queue"
    assert queue.level_at(END + 119) == 0


def test_speculation_that_helps_is_not_ended():
    """More comes than anything can serve, and plain decoding would be slower: the table says so, and that is logged."""
    queue = stepped("ttft=0.4,p95", 25.0, row=0.0002)
    assert {level for _, level in queue.levels} == {0}
    assert not any(step.changed for _, step in queue.steps)
    (_, said) = queue.steps[0]
    assert said.message.startswith("the objective is out of reach at this load: plain decoding takes 0.0216 s a token")


def by_hand(plain=lambda: None, slo="tpot=1,p99"):
    """A steering, `at(seconds)` to look at a time, and `ends(tpot, nodes)` for three requests that end then."""
    clock = [0.0]
    steering = Steering(parse([slo]), plain, lambda: 1, lambda: clock[0])

    def at(seconds):
        clock[0] = seconds
        return steering.look()

    def ends(tpot, nodes=8, queue=0.0):
        for _ in range(3):
            now = clock[0]
            steering.window.add(Sample(now, now, now, tpot + queue, queue, tpot, 1, nodes))

    return steering, at, ends


def test_where_nothing_is_drafted_nothing_is_to_be_ended():
    steering, at, ends = by_hand()
    ends(2.0, nodes=0)
    said = at(1.0)
    assert (said.changed, steering.level) == (False, 0)
    assert said.message == "the objective is out of reach at this load: nothing is drafted"
    assert at(2.0) is None, "once in a while"


def test_levels_that_change_nothing_are_passed_over():
    for nodes, levels in ((16, [1, 2, 3]), (3, [1, 3]), (1, [3])):
        _, at, ends = by_hand()
        ends(8.0, nodes)
        found, now, tpot = [at(1.0)], 1.0, 8.0
        while found[-1] and found[-1].changed and found[-1].nodes:
            now, tpot = now + 4, tpot / 1.2
            at(now - 1)
            ends(tpot, nodes)
            found.append(at(now))
        assert [step.level for step in found] == levels, nodes
        assert found[-1].nodes == 0


@pytest.mark.parametrize(
    ("tails", "levels"),
    [
        # Levels are held against where it all began: what helped is not given up because the next helps no more.
        (((1.0, 4.0), (5.0, 2.0), (9.0, 1.99), (13.0, 1.98)), [1, 2, 3, 3]),
        # Of few requests the third slowest says too little of the tail: one that is hardly below is left for less.
        (((1.0, 1.2), (5.0, 0.97), (9.0, 0.7), (18.0, 0.7)), [1, 2, None, None]),
    ],
)
def test_levels_by_the_tail_at_a_time(tails, levels):
    _, at, ends = by_hand()
    found = []
    for now, tpot in tails:
        at(now - 0.5)
        ends(tpot)
        step = at(now)
        found.append(step and step.level)
    assert found == levels


@pytest.mark.parametrize(("slower", "level"), [(1.0, 0), (1.5, 2)])
def test_less_that_does_not_help_on_a_machine_that_became_slower_is_no_reason_to_draft_more(slower, level):
    plain = [0.1]
    steering, at, ends = by_hand(lambda: plain[0])
    for now, tpot in ((1.0, 2.0), (12.0, 2.1)):
        at(now - 0.5)
        ends(tpot)
        at(now)
        plain[0] *= slower
    assert steering.level == level


@pytest.mark.slow
def test_what_never_helps_is_tried_ever_more_rarely():
    steering, at, ends = by_hand()
    tried, now = list[float](), 0.0
    while now < 4000:
        now += 1
        step = at(now)
        ends(2.0)
        if step and step.level == 1:
            tried.append(now)
    gaps = [later - one for one, later in pairwise(tried)]
    assert all(later > 1.5 * one for one, later in pairwise(gaps[1:5])), gaps
    assert PROBE <= gaps[0] < gaps[-1] <= RAREST + 10
    assert len(tried) < 12
    assert steering.level == 0


@pytest.mark.parametrize(("queue", "cause"), [(5.0, "queue"), (0.0, "prompts")])
def test_why_a_first_token_is_late(queue, cause):
    _, at, ends = by_hand(lambda: 9.0, "ttft=1,p99")
    ends(2.0, queue=queue)
    said = at(1.0)
    assert said.told["cause"] == cause
    assert said.changed == (cause == "prompts"), "a slot comes no sooner by slower rounds"
