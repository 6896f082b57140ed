"""What tuning found is told in a few lines, and so is speculation that loses."""

from specbuild.cli.tuned import in_words


def test_a_tuning_in_words():
    assert in_words(None) == []
    assert in_words({"auto": 1.5}) == ["auto 1.50× plain decoding, measured; there is no draft, lookup alone is tuned"]
    (even,) = in_words({"auto": 1.0, "tree": "best:8", "speedup": 1.0})
    assert even == "auto 1.00× plain decoding, measured; best:8 of the draft model promises 1.00×"
    lost = {"auto": 0.9, "tree": "best:1", "speedup": 0.8}
    _, model, whole = in_words(lost)
    assert model == "the draft model loses here: best:1 promises 0.80× plain decoding"
    assert whole == "speculation loses here: on these texts auto is 0.90× as fast as plain decoding"
