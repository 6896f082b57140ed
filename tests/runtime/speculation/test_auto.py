"""`auto`: tokens are plain decoding's, what it drafts is worth its seconds by the table, and limits hold."""

import pytest
from hash_models import HashModel, plain_text
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_chances import LARGE, SMALL, PricedLoop
from odd_clocks import bewitch
from small_grammars import END, grammar

from specbuild.runtime import Limits

FLAT = LARGE | {"verify": [[1, 10.0], [64, 11.0]]}  # rows cost next to nothing
STEEP = LARGE | {"verify": [[1, 10.0], [64, 640.0]]}  # a row costs a step
CYCLE = [1, 2, 3, 4, 5, 6, 7, 8] * 3


@pytest.mark.slow
@settings(max_examples=25)
@given(
    row=st.floats(0.0, 12.0),
    level=st.floats(0.02, 12.0),
    seed=st.integers(0, 99),
    error=st.sampled_from([None, 0.0, 0.4, 2.0]),
    slots=st.integers(1, 4),
    looks_up=st.booleans(),
    order=st.sampled_from([0, 2]),
    temperature=st.sampled_from([0.0, 1.0]),
    most=st.sampled_from([None, 0, 1, 3]),
    live=st.booleans(),
)
def test_tokens_are_plain_decodings_and_limits_hold(row, level, seed, error, **how):
    """On any machine, whoever drafts, beside each other; and no text takes much longer than plain decoding."""
    order, temperature, most = how.pop("order"), how.pop("temperature"), how.pop("most")
    times = LARGE | {"verify": [[1, 10.0], [64, 10.0 + 63 * row]], "draft": [[1, level], [64, 2 * level]]}
    draft = None if error is None else HashModel(seed, error, order)
    loop = PricedLoop(HashModel(seed, order=order), draft, times, limits=Limits(max_draft_tokens=most), **how)
    prompts = [[1, 2, 3 + slot] for slot in range(how["slots"])]
    for done in loop.run(*prompts, count=30, temperature=temperature, seed=seed):
        told = done.metrics.speculative_decoding
        assert done.output == plain_text(HashModel(seed, order=order), done.tokens[:3], done.params)
        assert told.num_draft_tokens <= (16 if most is None else most) * told.num_spec_steps
        assert sum(told.decisions.values()) > 0 or most == 0
    assert loop.seconds < 1.3 * 29 * loop.plain(how["slots"])


@pytest.mark.parametrize(("times", "gain"), [(LARGE, 1.9), (SMALL, 1.15)])
def test_a_good_draft_pays(times, gain):
    for seed in range(2):
        loop = PricedLoop(HashModel(seed), HashModel(seed, error=0.3), times)
        loop.run([1, 2, 3], count=151)
        assert 150 * loop.plain() / loop.seconds > gain


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("times", [LARGE, SMALL])
def test_a_hostile_draft_costs_next_to_nothing(times, temperature):
    """Twelve tokens, so one in twelve comes true by chance; and less in the next text of the engine."""
    spent = []
    for seed in range(4):
        loop = PricedLoop(HashModel(seed), HashModel(seed + 100), times)
        for text in range(2):
            loop.run([1, 2, text], count=201, temperature=temperature, seed=seed)
            spent.append(loop.seconds / (200 * loop.plain()) - 1)
    assert sum(spent[::2]) / 4 < 0.03
    assert sum(spent[1::2]) / 4 < 0.025


def test_a_draft_that_is_never_sure_is_left():
    """Its likelihoods say so, and trees that are cut to nothing are failures."""
    loop = PricedLoop(HashModel(7), HashModel(7), LARGE)
    loop.draft.model = lambda text: 0.01 * HashModel(99)(text)
    (done,) = loop.run([1, 2, 3], count=401)
    assert done.output == plain_text(HashModel(7), [1, 2, 3], done.params)
    assert done.metrics.speculative_decoding.decisions.get("model", 0) < 40
    assert loop.seconds < 1.03 * 400 * loop.plain()


def test_a_text_that_ends_fails_no_draft():
    loop = PricedLoop(HashModel(7), HashModel(7), LARGE)
    for _ in range(30):
        loop.run([1, 2, 3], count=6)
    drafters = loop.controller.for_request(0.0).session.drafters
    assert all(drafters[each].ratio >= 1.0 for each in ("model", "levels"))


def test_a_hostile_draft_of_several_costs_next_to_nothing():
    loop = PricedLoop(HashModel(1), HashModel(101), LARGE, slots=3)
    loop.run([1], [2], [3], count=201)
    assert loop.seconds < 1.03 * 200 * loop.plain(3)


def drafted_at(loop, emitted, begin, end):
    """The rounds' drafted tokens, of those that began with so many emitted ones."""
    return [drafted for at, drafted in zip(emitted, loop.drafted(), strict=True) if begin <= at < end]


@pytest.mark.slow
@pytest.mark.parametrize("times", [LARGE, SMALL])
def test_a_draft_that_turns_bad_is_left_and_taken_up_again(times):
    """From token 80 on it likes best what the target likes least, from token 180 on it is its own again."""
    good, emitted = HashModel(7, error=0.2), list[int]()
    loop = PricedLoop(HashModel(7), good, times)

    def turn(tokens):
        emitted.append(tokens)
        loop.draft.model = (lambda text: -good(text)) if 80 <= tokens < 180 else good

    (done,) = loop.run([1, 2, 3], count=420, before=turn)
    before, during, after = (drafted_at(loop, emitted, *span) for span in ((0, 80), (80, 180), (300, 420)))
    assert min(before[1:]) > 1
    assert max(during[25:]) <= 1
    assert sum(during[25:]) < 0.1 * len(during)
    assert sum(drafted > 1 for drafted in after) > 0.9 * len(after)
    assert done.output == plain_text(HashModel(7), [1, 2, 3], done.params)


@pytest.mark.slow
def test_a_machine_on_which_trees_take_long_is_left_and_taken_up_again():
    """Another process has taken the second core: from the 60th token to the 160th a row costs what a step does."""
    loop, emitted = PricedLoop(HashModel(3), HashModel(3, error=0.2), LARGE, live=True), list[int]()

    def look(tokens):
        emitted.append(tokens)
        busy, price = 60 <= tokens < 160, loop.times.verify
        loop.target.slowed = lambda rows: float(price[1]) * rows / float(price[rows]) if busy else 1.0

    loop.run([1, 2, 3], count=540, before=look)
    before, during, after = (drafted_at(loop, emitted, *span) for span in ((1, 60), (60, 160), (420, 540)))
    assert sum(drafted > 2 for drafted in before) > 0.8 * len(before)
    assert sum(drafted > 1 for drafted in during[24:]) <= 2
    assert sum(drafted > 2 for drafted in after) > 0.7 * len(after)


@pytest.mark.parametrize("seed", range(2))
def test_tokens_are_the_same_by_any_clock(seed):
    loop, model = PricedLoop(HashModel(3), HashModel(3, error=0.4), SMALL, live=True), HashModel(3)
    bewitch(loop.target, seed)
    bewitch(loop.draft, 9 - seed)
    (done,) = loop.run([1, 2, 3], count=120, temperature=float(seed % 2), seed=5)
    assert done.output == plain_text(model, [1, 2, 3], done.params)


def test_where_nothing_can_pay_nothing_is_tried():
    loop = PricedLoop(HashModel(1), HashModel(1), SMALL | {"draft": [[1, 3.0], [64, 9.0]]})
    loop.run([1, 2, 3], count=100)
    assert set(loop.drafted()) == {0}
    assert loop.seconds == pytest.approx(99 * loop.plain())


@pytest.mark.parametrize(("times", "drafts"), [(FLAT, True), (STEEP, False)])
def test_a_text_that_repeats_itself_is_continued_beside_others_where_rows_are_cheap(times, drafts):
    """And the others, who sample and do not repeat themselves, are not slowed by it."""
    model = HashModel(4, order=1)
    loop = PricedLoop(model, None, times, 3, looks_up=True)
    first, *_ = loop.run(CYCLE, [1, 2, 9], [3, 4, 10], count=80, temperature=[0.0, 2.0, 2.0], seed=[0, 1, 2])
    told = first.metrics.speculative_decoding
    assert (told.num_accepted_draft_tokens > 40) is drafts
    assert bool(told.decisions.get("lookup")) is drafts
    assert loop.seconds < 1.05 * 79 * loop.plain(3)


@pytest.mark.parametrize(("times", "temperature"), [(LARGE, 1.0), (SMALL, 0.0)])
def test_what_has_to_come_after_a_draft_pays(times, temperature):
    """What a grammar forces is drafted behind the draft's branches, and while nothing else is drafted."""
    asked = {"temperature": temperature, "seed": 5, "constraint": grammar(regex="((a|b)(c|d)01,10,01,10,,)+")}
    for seed in (3, 99):
        loop = PricedLoop(HashModel(3), HashModel(seed, error=0.5), times)
        (done,) = loop.run([1, 2, 3], count=120, logit_bias={END: -90.0}, **asked)
        assert (done.error, done.output) == (None, plain_text(HashModel(3), [1, 2, 3], done.params))
        assert loop.seconds < 0.5 * 119 * loop.plain()


def test_a_session_whose_drafts_fail_has_none_in_its_next_request():
    """Of two that decode by turns, one with good drafts; another session begins as cautiously as before."""
    loop, bad, first = PricedLoop(HashModel(7), HashModel(7, error=0.1), LARGE), HashModel(8), dict[str, int]()
    good = loop.draft.model
    asked = [(session, [1, 2, 3], 61) for session in ("good", "bad", "good")]
    asked += [(session, [4, 5, 6], 21) for session in ("bad", "good", "a new one")]
    for session, prompt, count in asked:
        loop.draft.model = bad if session == "bad" else good
        loop.run(prompt, count=count, session=session)
        first[session] = loop.drafted()[0]
        assert session != "bad" or count > 21 or max(loop.drafted()) <= 1, "a probe at most"
    assert first["bad"] == 0
    assert first["good"] > 2
    assert first["a new one"] > 1


def test_the_background_teaches_nobody_and_learns_from_nobody():
    loop = PricedLoop(HashModel(7), HashModel(8), LARGE)
    asked, background = loop.controller.for_request, {"background": True}
    loop.controller.for_request = lambda *names: asked(*names, **background)
    for forgets in (True, True, False, False):
        background["background"] = forgets
        loop.run([1, 2, 3], count=40)
        assert loop.drafted()[0] > 1 or not forgets
    assert loop.drafted()[0] <= 1, "the third text was the first to teach"
