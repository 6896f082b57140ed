"""How far a device continues texts: what pays is found by what rounds take."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from specbuild.runtime.speculation.depth import Depths


def simulated(
    depths: Depths, seconds: dict[int, float], chance: float, launches: int, sequences: int = 4, most: int = 24
) -> Counter[int]:
    """Rounds by bound of a device: what those of each bound take, and how often a drafted token comes true."""
    rng, found = random.Random(1), Counter[int]()
    for _ in range(launches):
        bound, rounds = depths.choose(sequences, most)
        for number in range(rounds or 32):
            accepted = [next((n for n in range(bound) if rng.random() > chance), bound) for _ in range(sequences)]
            took = seconds[bound] * rng.uniform(0.9, 1.1) if number else None
            depths.record(bound, accepted, took, sequences)
            found[bound] += 1
    return found


@pytest.mark.parametrize(
    ("seconds", "chance", "best"),
    [
        ({24: 1.0, 4: 1.0, 0: 1.0}, 0.5, (24, 4)),  # for nothing, but five tokens in a row hardly ever come true
        ({24: 1.05, 4: 1.02, 0: 1.0}, 0.9, (24,)),
        ({24: 1.6, 4: 1.1, 0: 1.0}, 0.4, (4,)),
        ({24: 1.6, 4: 1.3, 0: 1.0}, 0.2, (0,)),
    ],
)
def test_what_pays_is_found(seconds: dict[int, float], chance: float, best: tuple[int, ...]) -> None:
    found = simulated(Depths(), seconds, chance, 200)
    assert sum(found[bound] for bound in best) > 0.95 * found.total()


def test_what_can_hardly_be_better_is_not_tried() -> None:
    """A text that repeats itself: plain decoding would have to take a tenth of the time."""
    assert simulated(Depths(), {24: 1.0, 4: 1.0, 0: 1.0}, 0.99, 50)[0] == 0


@pytest.mark.slow
def test_texts_that_change_are_noticed() -> None:
    """Drafts that never came true do so from now on."""
    depths, seconds = Depths(), {24: 1.6, 4: 1.5, 0: 1.0}
    assert simulated(depths, seconds, 0.05, 100).most_common(1)[0][0] == 0
    simulated(depths, seconds, 0.95, 400)
    assert simulated(depths, seconds, 0.95, 100).most_common(1)[0][0] == 24


@pytest.mark.parametrize(("most", "bounds"), [(2, {0, 2}), (0, {0}), (24, {0, 4, 24}), (10, {0, 4, 10})])
def test_limits_hold(most: int, bounds: set[int]) -> None:
    seconds = dict.fromkeys(range(25), 1.0)
    assert set(simulated(Depths(), seconds, 0.1, 300, most=most)) == bounds
