"""What tuning found is told in a few lines, and so is speculation that loses."""

from __future__ import annotations

from specbuild.cli.tuned import in_words


def test_a_tuning_in_words() -> None:
    assert in_words(None) == []
    assert in_words({"auto": 1.5}) == ["auto 1.50× plain decoding, measured; there is no draft, lookup alone is tuned"]
    found = {"auto": 0.9, "tree": "best:1", "speedup": 0.8, "measured": 0.85}
    choice, model, whole = in_words(found)
    assert choice == "auto 0.90× plain decoding, measured; best:1 of the draft model 0.80×, measured 0.85×"
    assert model == "the draft model loses here: best:1 promises 0.80× plain decoding"
    assert "speculation loses here" in whole


def test_what_breaks_even_does_not_lose() -> None:
    (line,) = in_words({"auto": 1.0, "tree": "best:8", "speedup": 1.0, "measured": 0.9})
    assert line == "auto 1.00× plain decoding, measured; best:8 of the draft model 1.00×, measured 0.90×"


def test_drafting_ahead_is_kept_or_left_with_its_reason() -> None:
    found = {"auto": 1.5, "tree": "best:8", "speedup": 1.4, "measured": 1.3}
    for on, gain, words in ((True, 1.051, "kept on: 1.05×"), (False, 0.994, "left off: 0.99×")):
        _, ahead = in_words(found | {"overlap": {"gain": gain, "hit_rate": 0.614, "on": on}})
        assert ahead == f"drafting ahead {words}, 61% of its trees were wanted"


def test_speculation_that_loses_is_said_last_whoever_drafts() -> None:
    lost = "speculation loses here: on these texts auto is 0.87× as fast as plain decoding"
    ahead = {"overlap": {"gain": 1.1, "hit_rate": 0.5, "on": True}}
    model = {"tree": "best:1", "speedup": 1.1, "measured": 1.0}
    assert in_words({"auto": 0.87})[1:] == [lost]
    assert [lines[-1] for lines in (in_words({"auto": 0.87} | model), in_words({"auto": 0.87} | model | ahead))] == [
        lost,
        lost,
    ]
