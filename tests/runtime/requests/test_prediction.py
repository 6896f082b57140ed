"""A prediction is followed through edits: what comes next in it is known as soon as the output stands in it again."""

from hypothesis import given
from hypothesis import strategies as st

from specbuild.runtime.requests.prediction import Prediction

ALL = 1 << 20


def pushed(prediction, output):
    made = Prediction(prediction)
    for token in output:
        made.push(token)
    return made


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.data())
def test_an_output_that_is_as_predicted_is_followed_to_its_end(prediction, data):
    count = data.draw(st.integers(0, len(prediction)))
    made = pushed(prediction, prediction[:count])
    assert made.continuation(ALL) == prediction[count:]
    assert made.continuation(2) == prediction[count : count + 2]
    assert made.foretold == count


@given(st.lists(st.integers(0, 99), min_size=1, max_size=30, unique=True), st.data())
def test_every_edit_is_come_back_from_at_once_where_tokens_differ(prediction, data):
    """What was inserted, replaced, left out or moved; an unknown token is followed by nothing."""
    output = data.draw(st.lists(st.sampled_from([*prediction, 100, 101]), min_size=1, max_size=40))
    made = pushed(prediction, output)
    known = output[-1] < 100
    assert made.continuation(ALL) == (prediction[prediction.index(output[-1]) + 1 :] if known else [])
    assert 0 <= made.foretold <= len(output)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.lists(st.integers(0, 2), min_size=1, max_size=30))
def test_what_matches_stands_before_what_comes_next(prediction, output):
    made = pushed(prediction, output)
    place = len(prediction) - len(made.continuation(ALL))
    end = output[-min(made.matched, len(output)) :] if made.matched else []
    assert prediction[:place][max(place - len(end), 0) :] == end[-place:] if place else True
    assert bool(made.matched) == (output[-1] in prediction)


def test_a_line_that_is_there_often_is_the_next_one_after_what_was_certain():
    lines = [[10, 11, 12, 13, number, 1, 2] for number in (20, 21, 22, 23)]
    prediction = [token for line in lines for token in line]
    output = [*lines[0], *lines[1][:4], 99, 1, 2]  # the second line's number was changed
    assert pushed(prediction, output).continuation(5) == lines[2][:5]
