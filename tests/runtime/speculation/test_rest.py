"""A sequence that deciding gains nothing rests, for longer each time, and wakes where habits foretell what it emits."""

from __future__ import annotations

import pytest

from specbuild.runtime.speculation.rest import BESIDE, DEAREST, FRESH, PEEKS, RESTS, WATCH, Rest, Waits

TOKEN = 1e-3  # seconds of plain decoding


def resting(waits: Waits | None = None) -> Rest:
    """One that has watched nothing pay, and rests."""
    rest = Rest(waits or Waits())
    for _ in range(WATCH):
        assert not rest.rests
        rest.took = 1e-4
        rest.decided(0, 0.0, TOKEN)
    assert rest.rests
    return rest


def pass_rounds(rest: Rest, most: int = 1000) -> int:
    """Rounds until it decides again, none of which habits foretell."""
    for rounds in range(most):
        if not rest.dozes():
            return rounds
    raise AssertionError("it never wakes")


def test_rests_become_longer_and_shorter_again_where_drafts_pay() -> None:
    waits, lengths = Waits(), []
    for _ in range(5):
        lengths.append(pass_rounds(resting(waits) if waits.rounds < RESTS[1] else brief(waits)))
    assert lengths == [16, 32, 64, 128, 128]
    paying = Rest(waits)
    for _ in range(4 * WATCH):
        paying.took = 1e-4
        paying.decided(2, TOKEN, TOKEN)
    assert not paying.rests
    assert waits.rounds == RESTS[0]


def brief(waits: Waits) -> Rest:
    """Where others rest for longest, a new one watches half as many rounds."""
    rest = Rest(waits)
    for _ in range(WATCH // 2):
        assert not rest.rests
        rest.took = 1e-4
        rest.decided(0, 0.0, TOKEN)
    assert rest.rests
    return rest


def test_what_drafts_gain_is_held_against_what_deciding_takes() -> None:
    took = BESIDE * 1e-4
    for extra, expected in ((TOKEN - 0.9 * took, True), (TOKEN - 1.1 * took, False)):
        rest = Rest(Waits())
        for _ in range(WATCH):
            rest.took = 1e-4
            rest.decided(1, extra, TOKEN)
        assert rest.rests == expected


def test_what_costs_next_to_nothing_is_no_reason_to_rest() -> None:
    """Beside a large model's round."""
    rest = Rest(Waits())
    for _ in range(10 * WATCH):
        rest.took = 1e-4
        rest.decided(0, 0.0, 1e-2)
    assert not rest.rests


@pytest.mark.parametrize(("share", "cost"), [(0.1, 0.1 * BESIDE), (3.0, DEAREST)])
def test_what_deciding_costs_is_told_in_rounds_of_plain_decoding(share: float, cost: float) -> None:
    """For all sequences of a round together, and within a bound, for an engine's first times are longer."""
    rest = Rest(Waits())
    rest.took, rest.waits.took = share * TOKEN, 2 * share * TOKEN
    rest.decided(0, 0.0, 2 * TOKEN, 2)
    assert rest.waits.cost == pytest.approx(cost)


def test_where_nobody_measures_deciding_nobody_rests() -> None:
    rest = Rest(Waits())
    for _ in range(10 * WATCH):
        rest.decided(0, 1.0, TOKEN)
    assert not rest.rests


def test_a_wake_is_for_a_round_and_for_good_if_the_round_gains() -> None:
    rest = resting()
    rest.looked(False)
    assert rest.dozes()
    for accepted, extra in ((0, 0.0), (1, TOKEN)):  # it looked, and drafted nothing, or what brought nothing
        rest.looked(True)
        assert not rest.dozes()
        rest.took = 1e-4
        rest.decided(accepted, extra, TOKEN)
        assert rest.dozes()
    rest.looked(True)
    rest.took = 1e-4
    rest.decided(2, TOKEN, TOKEN)
    assert not rest.rests
    assert pass_rounds(rest) == 0


def test_looks_at_rest_become_rarer_until_another_rest_begins() -> None:
    rest, looks = resting(), list[int]()
    while rest.dozes():
        if rest.due:
            looks.append(RESTS[0] - rest.left)
            rest.looked(False)
    assert looks == [*range(PEEKS[0], RESTS[0], PEEKS[1])]
    for _ in range(WATCH):
        rest.took = 1e-4
        rest.decided(0, 0.0, TOKEN)
    assert rest.rests
    rest.dozed = 0  # what was emitted while it decided is learnt
    for _ in range(PEEKS[0]):
        assert not rest.due
        assert rest.dozes()
    assert rest.due


def test_each_wake_in_vain_makes_looks_rarer() -> None:
    rest, rounds = resting(), list[int]()
    for _ in range(3):
        rest.left = RESTS[1]
        rounds.append(0)
        while not rest.due:
            assert rest.dozes()
            rounds[-1] += 1
        rest.looked(True)
        rest.took = 1e-4
        rest.decided(0, 0.0, TOKEN)
    assert rounds == [PEEKS[0], 2 * PEEKS[1], 4 * PEEKS[1]]


def test_who_decides_in_all_rounds_was_not_woken() -> None:
    """One that decodes alone with a free row: once others join, it rests, and is looked at, as before."""
    rest = resting()
    for _ in range(50):
        rest.took = 1e-4
        rest.decided(0, 0.0, TOKEN)
    for _ in range(PEEKS[0]):
        assert not rest.due
        assert rest.dozes()
    assert rest.due


def test_while_others_rest_for_longest_most_begin_with_a_rest() -> None:
    waits = Waits()
    assert not any(waits.rest().rests for _ in range(2 * FRESH))
    waits.rounds = RESTS[1]
    begun = [waits.rest() for _ in range(2 * FRESH)]
    assert [each.left for each in begun].count(0) == 2
    assert {each.left for each in begun} == {0, RESTS[1]}
