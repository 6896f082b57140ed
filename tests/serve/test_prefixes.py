"""Where a prompt goes: to whoever has its beginning, unless it has too much to do."""

from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specbuild.serve.ray.prefixes import Places, chain

BLOCK = 16  # tokens; see docs/guides/scale-out.md
SHARE, SLACK = 1.5, 64  # of the load, and waiting tokens, by which a holder may have more than the lightest


def places(count=3, routing="prefix", slots=0, **held):
    """Replicas by number; `held`: what `r0`, `r1`, … report."""
    made = Places(Random(7), routing, slots)
    made.keep(range(count))
    for name, blocks in held.items():
        made.report(int(name[1:]), blocks)
    return made


def first(known, *blocks):
    """Whom a prompt of these blocks goes to."""
    return int(known.choose(range(3), blocks)[0])


def test_a_chain_has_a_hash_of_each_whole_block_and_depends_on_all_before_it():
    tokens = list(range(3 * BLOCK + 5))
    hashes = chain(tokens, "model")
    assert (len(hashes), chain(tokens[: 2 * BLOCK], "model")) == (3, hashes[:2])
    assert not {*chain([99, *tokens[1:]], "model")} & {*hashes}
    assert all(0 <= each < 1 << 64 for each in hashes)
    salted = [chain(tokens[:BLOCK], name)[0] for name in ("a\0None", "a\0salt", "b\0None")]
    assert len({*salted}) == 3, "another salt or model shares no block"
    assert chain(tokens, "model", known=hashes[:2]) == hashes
    assert chain([1, 23] * BLOCK, "m") != chain([12, 3] * BLOCK, "m"), "tokens are not run together"


def test_who_holds_the_longest_beginning_comes_first_and_of_equals_the_lighter():
    known = places(r1=[10, 11], r2=[10, 11, 12])
    assert first(known, 10, 11, 12, 13) == 2
    assert (known.depth(2, [10, 11, 12, 13]), known.depth(0, [10])) == (3, 0)
    known = places(r0=[10], r2=[10])
    known.sent(0, "a", [10], BLOCK, 8)
    assert first(known, 10) == 2


def test_a_prompt_counts_for_what_its_replica_has_yet_to_read():
    known = places(r0=[10, 11])
    known.sent(0, "a", [10, 11], 2 * BLOCK + 5, None)
    known.sent(1, "b", [10, 11], 2 * BLOCK + 5, 7)
    assert known.load(0) > 5 + 7, "some output is assumed"
    assert known.load(1) == 2 * BLOCK + 5 + 7
    for replica in range(3):
        for name in "ab":
            known.ended(replica, name)
    assert [known.load(each) for each in range(3)] == [0, 0, 0]


def test_what_was_sent_is_believed_for_one_report_and_what_is_reported_until_it_is_not():
    known = places()
    known.sent(0, "a", [10], BLOCK, 1)
    depths = []
    for reported in ([], [], [10, 11], [10]):
        known.report(0, reported)
        depths.append(known.depth(0, [10, 11]))
    assert depths == [1, 0, 2, 1], "the first report may be older than the request"


def test_the_dead_are_forgotten_with_all_they_held():
    known = places(r1=[10])
    known.sent(1, "a", [10], BLOCK, 1)
    known.drop(1)
    known.drop(1)
    assert (known.load(1), known.depth(1, [10])) == (0, 0)
    known.ended(1, "a")
    known.report(1, [10])
    known.sent(1, "b", [10], BLOCK, 1)
    assert 1 not in known.choose([0, 2], [10])
    known.keep([0, 1, 2])
    assert known.depth(1, [10]) == 0, "one that is new holds nothing"
    known.report(2, [10])
    for replicas in ([0, 1], [0, 1, 2]):
        known.keep(replicas)
        assert known.depth(2, [10]) == 0, "it has gone, and comes back with nothing"


def test_what_is_remembered_is_bounded_and_the_oldest_goes():
    known = places(1)
    count = 1 << 18
    known.report(0, range(count))
    held = [known.depth(0, [each]) for each in range(count)]
    assert sum(held) < count
    assert held == sorted(held), "the oldest goes"


@pytest.mark.parametrize("routing", ["prefix", "balanced"])
def test_without_holders_two_are_drawn_and_the_lighter_leads(routing):
    known = places(2, routing)
    known.sent(0, "a", [], 10, 10)
    assert [known.choose(range(2), [5]) for _ in range(8)] == [[1, 0]] * 8


def test_random_routing_learns_nothing():
    known = places(3, "random", r1=[10])
    firsts = [first(known, 10) for _ in range(300)]
    assert all(60 < firsts.count(each) < 140 for each in range(3))


events = st.lists(
    st.tuples(
        st.sampled_from("rssed"), st.integers(0, 4), st.lists(st.integers(0, 6), max_size=4), st.integers(1, 200)
    ),
    max_size=40,
)


@given(events, st.lists(st.integers(0, 6), max_size=5), st.sets(st.integers(0, 4), min_size=1), st.integers(0, 2))
@example([("r", 0, [5], 1), ("s", 0, [5], SLACK - 1)], [5], {0, 1}, 0)  # nearly too much
@example([("r", 0, [5], 1), ("s", 0, [5], SLACK - 1), ("s", 0, [5], 2)], [5], {0, 1}, 0)  # too much
@example([("r", 0, [5], 1), ("s", 0, [5], 200), ("s", 0, [5], 200)], [5], {0, 1}, 2)  # two slots are enough for them
def test_whatever_happens_a_choice_is_of_those_offered_and_never_of_one_too_full(happened, blocks, offered, slots):
    known = places(5, slots=slots)
    for place, (kind, replica, hashes, tokens) in enumerate(happened):
        if kind == "r":
            known.report(replica, hashes)
        elif kind == "s":
            known.sent(replica, str(place), hashes, tokens, tokens)
        elif kind == "e":
            known.ended(replica, str(place // 2))
        else:
            known.drop(replica)
            known.keep(range(5))
    chosen = known.choose(sorted(offered), blocks)
    assert {*chosen} <= offered
    assert len({*chosen}) == len(chosen) > 0
    assert all(known.load(each) >= 0 for each in offered)
    deepest = max(known.depth(each, blocks) for each in offered)
    least = min(sorted(offered), key=known.load)
    fits = [
        each
        for each in offered
        if known.depth(each, blocks) == deepest
        and not (known.load(each) > SHARE * known.load(least) and known.queue(each) - known.queue(least) > SLACK)
    ]
    assert not deepest or (chosen[0] in fits) == bool(fits), "the beginning is there, and there is room"
