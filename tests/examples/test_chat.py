"""The chat: answers on stdout, each with what was said before, and an interrupt that ends one answer alone."""

import io
import sys
from unittest.mock import Mock

import pytest
from campaign.bundle_copy import copied, put
from serving import CHAT_TEMPLATE

from specbuild.runtime import Engine, SamplingParams


@pytest.fixture
def chatting(bundle, tmp_path):
    """The reference pair's bundle with a chat template."""
    root = copied(bundle, tmp_path)
    put(root, "chat.jinja", CHAT_TEMPLATE.encode(), hashed=True, chat_template="chat.jinja")
    return root


def said(role, content):
    return {"role": role, "content": content}


def test_each_answer_knows_what_was_said_before(example, chatting, monkeypatch, capsys):
    monkeypatch.setattr("builtins.input", Mock(side_effect=["main(argv)", "read(path)", EOFError]))
    example("chat").main(str(chatting), "Be brief.", 20)
    out, err = capsys.readouterr()
    messages, answers = [said("system", "Be brief.")], []
    with Engine.load(chatting) as engine:
        for line in ("main(argv)", "read(path)"):
            messages.append(said("user", line))
            (result,) = engine.generate([messages], SamplingParams(max_new_tokens=20))
            messages.append(said("assistant", result.text))
            answers.append(result.text)
    assert out == f"{answers[0]}\n{answers[1]}\n"
    assert err == "[length: 20 tokens]\n" * 2


def test_an_interrupt_ends_one_answer_alone(example, chatting, monkeypatch, capsys):
    class Interrupted(io.StringIO):
        def flush(self):
            monkeypatch.setattr(self, "flush", lambda: None)
            raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", Mock(side_effect=["x", "y", EOFError]))
    monkeypatch.setattr(sys, "stdout", Interrupted())
    example("chat").main(str(chatting), "", 400)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("[cancelled: ")
    assert second == "[length: 400 tokens]"
