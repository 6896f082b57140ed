"""Texts are decoded one by one, whoever drafts, and tell where the time went and what would have come true."""

import pytest

from specbuild.measure.tuning.chances import begun
from specbuild.measure.tuning.decode import OFF, Decoder, drafted, seconds
from specbuild.runtime import Engine
from specbuild.runtime.errors import ExecutionError
from specbuild.runtime.sampling.sampler import Sampler


@pytest.mark.slow
def test_a_replayed_text_tells_what_was_accepted(bundle):
    """Of rounds with such trees, decoded for real: as many, with as many tokens in all, greedy and sampled."""
    with Engine.load(bundle, prefix_caching=False) as engine, engine.scheduler.exclusive() as loop:
        decoder, prompt = Decoder(engine, loop, 40), engine.tokenizer.encode("def main(argv):\n")
        for temperature in (0.0, 0.8):
            plain = decoder.decode(prompt, "off", temperature)
            every, along = (decoder.replay(plain, "best:16", every=each) for each in (True, False))
            real = decoder.decode(prompt, "best:16", temperature)
            assert [record.orders for record in begun(every, 16)] == [record.orders for record in along]
            assert len(along) == real.stats.rounds
            assert sum(1 + record.accepted_of(16) for record in along) == real.stats.emitted


def test_plain_rounds_are_one_token_each_and_leave_the_slot_free(bundle):
    """A text ends with the round that brings the last wanted token; plainly it goes on for a tree's depth."""
    with Engine.load(bundle, prefix_caching=False) as engine, engine.scheduler.exclusive() as loop:
        decoder, prompt = Decoder(engine, loop, 6), engine.tokenizer.encode("def main(argv):\n")
        before = loop.stats.rounds
        plain, tree = decoder.decode(prompt, OFF), decoder.decode(prompt, "chain:3")
        assert (plain.stats.rounds, plain.stats.emitted, len(plain.text.output)) == (13, 13, 14)
        assert tree.text.output == plain.text.output[: len(tree.text.output)]
        assert 6 <= len(tree.text.output) < 6 + 4
        assert tree.stats.emitted == len(tree.text.output) - 1, "the first token is the prompt's round's"
        assert loop.stats.rounds == before, "the engine's own statistics know nothing of it"
        assert plain.of("total") == pytest.approx(sum(plain.of(part) for part in ("draft", "verify", "loop")))


def test_without_a_model_nothing_is_replayed(bundle):
    with Engine.load(bundle, drafter="ngram") as engine, engine.scheduler.exclusive() as loop:
        decoder = Decoder(engine, loop, 2)
        plain = decoder.decode([5, 6, 7], OFF)
        assert decoder.replay(plain, "best:4", every=True) == []


def test_a_request_that_fails_is_raised(bundle, monkeypatch):
    with Engine.load(bundle) as engine, engine.scheduler.exclusive() as loop:
        decoder = Decoder(engine, loop, 2)
        monkeypatch.setattr(Sampler, "choose", lambda *_: 1 / 0)
        with pytest.raises(ExecutionError, match="ZeroDivisionError"):
            decoder.decode([5, 6, 7], OFF)


def test_a_parts_seconds_are_told_by_plain_rounds_of_the_same_prompt(decoded):
    """A prompt whose every round is five times as slow moves nothing; one that was disturbed is outvoted."""
    texts = [{OFF: decoded(9, 9, slow), "best:2": decoded(3, 9, 2 * slow, 0.5 * slow)} for slow in (1.0, 5.0, 1.0)]
    assert [seconds(texts, "best:2", part) for part in ("verify", "draft", "loop")] == pytest.approx([2.0, 0.25, 0.25])
    texts[2]["best:2"] = decoded(3, 9, 40.0)
    assert seconds(texts, "best:2", "verify") == pytest.approx(2.0)
    assert drafted(texts) == ["best:2"]
