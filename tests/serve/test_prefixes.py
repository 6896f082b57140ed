"""Where a prompt goes: to whoever has its beginning, unless it has too much to do."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from specbuild.serve.prefixes import BLOCK, HELD, OUTPUT, SHARE, SLACK, Places, Routing, chain


def places(count: int = 3, routing: Routing = "prefix") -> Places:
    made = Places(Random(7), routing)
    made.keep(range(count))
    return made


def test_a_chain_has_a_hash_of_each_whole_block_and_depends_on_all_before_it() -> None:
    tokens = list(range(3 * BLOCK + 5))
    hashes = chain(tokens, "model")
    assert len(hashes) == 3
    assert chain(tokens[: 2 * BLOCK], "model") == hashes[:2]
    other = chain([99, *tokens[1:]], "model")
    assert not {*other} & {*hashes}
    assert all(0 <= each < 1 << 64 for each in hashes)


def test_another_salt_or_model_shares_no_block() -> None:
    tokens = list(range(BLOCK))
    assert len({*chain(tokens, "a\0None"), *chain(tokens, "a\0salt"), *chain(tokens, "b\0None")}) == 3


def test_tokens_are_not_run_together() -> None:
    assert chain([1, 23] * BLOCK, "m") != chain([12, 3] * BLOCK, "m")


def test_who_holds_the_longest_beginning_comes_first() -> None:
    known = places()
    known.report(1, [10, 11])
    known.report(2, [10, 11, 12])
    assert known.choose(range(3), [10, 11, 12, 13])[0] == 2
    assert (known.depth(2, [10, 11, 12, 13]), known.depth(0, [10])) == (3, 0)


def test_who_has_a_free_slot_is_not_passed_over() -> None:
    known = Places(Random(7), slots=2)
    known.keep(range(2))
    known.report(0, [10])
    known.sent(0, "a", [10], BLOCK, 500)
    known.sent(0, "b", [10], BLOCK, 500)
    assert (known.load(0), known.queue(0), known.queue(1)) == (1002, 0, 0)
    assert known.choose(range(2), [10])[0] == 0
    known.sent(0, "c", [10], BLOCK, SLACK)
    assert known.queue(0) == SLACK + 1
    assert known.choose(range(2), [10])[0] == 1


def test_of_equals_the_lighter_comes_first() -> None:
    known = places()
    for each in (0, 2):
        known.report(each, [10])
    known.sent(0, "a", [10], BLOCK, 8)
    assert known.choose(range(3), [10])[0] == 2


def test_one_that_has_too_much_to_do_is_passed_over_and_taken_again() -> None:
    known = places(2)
    known.report(0, [10])
    known.sent(0, "long", [10], BLOCK, SLACK - 1)
    assert known.choose(range(2), [10])[0] == 0, "64 tokens ahead, which is not more than 64"
    known.sent(0, "more", [10], BLOCK, 1)
    assert known.choose(range(2), [10])[0] == 1
    known.sent(1, "theirs", [], 200, 0)
    assert known.choose(range(2), [10])[0] == 0, "not 1.5 times as much"
    known.ended(1, "theirs")
    known.ended(0, "long")
    assert known.choose(range(2), [10])[0] == 0


def test_a_prompt_counts_for_what_its_replica_has_yet_to_read() -> None:
    known = places()
    known.report(0, [10, 11])
    known.sent(0, "a", [10, 11], 2 * BLOCK + 5, None)
    known.sent(1, "b", [10, 11], 2 * BLOCK + 5, 7)
    assert (known.load(0), known.load(1)) == (5 + OUTPUT, 2 * BLOCK + 5 + 7)
    for each in (0, 1, 2):
        known.ended(each, "a")
        known.ended(each, "b")
    assert [known.load(each) for each in (0, 1, 2)] == [0, 0, 0]


def test_what_was_sent_is_believed_for_one_report_and_what_is_reported_until_it_is_not() -> None:
    known = places()
    known.sent(0, "a", [10], BLOCK, 1)
    known.report(0, [])
    assert known.depth(0, [10]) == 1, "the report may be older than the request"
    known.report(0, [])
    assert known.depth(0, [10]) == 0
    known.report(0, [10, 11])
    known.report(0, [10])
    assert known.depth(0, [10, 11]) == 1


def test_the_dead_are_forgotten_with_all_they_held() -> None:
    known = places()
    known.report(1, [10])
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


def test_what_is_remembered_is_bounded_and_the_oldest_goes() -> None:
    known = places(1)
    known.report(0, range(HELD + 10))
    assert sum(known.depth(0, [each]) for each in range(HELD + 10)) == HELD


def test_without_holders_two_are_drawn_and_the_lighter_leads() -> None:
    for routing in ("prefix", "balanced"):
        known = places(2, routing)
        known.sent(0, "a", [], 10, 10)
        assert [known.choose(range(2), [5]) for _ in range(8)] == [[1, 0]] * 8


def test_random_routing_learns_nothing() -> None:
    known = places(3, "random")
    known.report(1, [10])
    firsts = [known.choose(range(3), [10])[0] for _ in range(300)]
    assert all(60 < firsts.count(each) < 140 for each in range(3))


events = st.lists(
    st.tuples(st.sampled_from("rsed"), st.integers(0, 4), st.lists(st.integers(0, 6), max_size=4), st.integers(1, 200)),
    max_size=40,
)


@given(events, st.lists(st.integers(0, 6), max_size=5), st.sets(st.integers(0, 4), min_size=1), st.integers(0, 99))
def test_whatever_happens_a_choice_is_of_those_offered_and_never_of_one_too_full(
    happened: list[tuple[str, int, list[int], int]], blocks: list[int], offered: set[int], seed: int
) -> None:
    known = Places(Random(seed), slots=seed % 3)
    known.keep(range(5))
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
    if deepest and fits:
        assert known.depth(chosen[0], blocks) == deepest, "the beginning is there, and there is room"
        assert chosen[0] in fits


def test_a_holder_with_more_to_do_and_less_of_it_waiting_is_taken() -> None:
    """The other has a long queue of short requests; this one's few long ones all have slots."""
    known = Places(Random(0), slots=2)
    known.keep(range(3))
    for number in range(6):
        known.sent(1, f"short {number}", [], 100, 0)
    for number in range(2):
        known.sent(2, f"long {number}", [], 500, 0)
    for each in (1, 2):
        known.report(each, [10])
    assert known.load(1) < known.load(2)
    assert {known.choose(range(3), [10])[0] for _ in range(20)} == {2}
