"""spread_logits puts the logits of a head that knows some tokens into the places of the whole vocabulary."""

import numpy as np
import pytest
from graphs import normal, parse, run

from specbuild.builder.passes.spread_logits import spread_logits

HEAD = """g (float[B, L, 3] x) => (float[B, L, 3] logits, float[B, L, 3] hidden) {
    hidden = Identity (x)
    logits = Neg (x)
}"""


def spread(text, tokens, vocab_size):
    model = parse(text)
    spread_logits(model.graph, tokens, vocab_size, -32768.0)
    return model


@pytest.mark.parametrize("tokens", [[1, 4, 5], [5, 0, 2]], ids=["in order", "in no order"])
def test_each_column_goes_to_its_token_and_all_others_are_lowest(tokens):
    x = normal(2, 4, 3)
    logits, hidden = run(spread(HEAD, tokens, 7), {"x": x})
    np.testing.assert_array_equal(logits[..., tokens], -x)
    (lowest,) = {*np.delete(logits, tokens, axis=-1).flat}
    assert np.float16(lowest) == lowest < -1e4, "in 16 bits too"
    np.testing.assert_array_equal(hidden, x)


def test_logits_that_are_read_inside_the_graph_stay_columns():
    text = HEAD.replace("hidden = Identity (x)\n    logits = Neg (x)", "logits = Neg (x)\n    hidden = Neg (logits)")
    x = normal(1, 2, 3)
    np.testing.assert_array_equal(run(spread(text, [6, 0, 3], 7), {"x": x})[1], x)


def test_a_token_beyond_the_vocabulary_is_refused():
    with pytest.raises(IndexError, match="7"):
        spread(HEAD, [1, 4, 7], 7)
