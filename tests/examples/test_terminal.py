"""The terminal: the text on stdout, the rest on stderr, and an interrupt that leaves nothing hanging."""

import io
import sys

from specbuild.runtime import Engine, SamplingParams


def test_the_text_and_what_became_of_it(example, bundle, capsys):
    with Engine.load(bundle) as engine:
        (want,) = engine.generate("def main(", SamplingParams(max_new_tokens=20))
    assert example("terminal").main(str(bundle), "def main(", 20) == 0
    out, err = capsys.readouterr()
    assert out == want.text
    assert "[length: 20 tokens, " in err
    assert "tokens/s" in err


def test_an_interrupt_keeps_what_there_is(example, bundle, monkeypatch, capsys):
    class Interrupted(io.StringIO):
        def flush(self):
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdout", shown := Interrupted())
    assert example("terminal").main(str(bundle), "x", 900) == 0
    assert len(shown.getvalue()) < 200
    assert "[cancelled: " in capsys.readouterr().err
