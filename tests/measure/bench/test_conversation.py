"""Questions of several turns: what each turn's prompt holds, and that it is the same for every contender."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from campaign.bundle_copy import put

from specbuild.measure.bench.conversation import answers_needed, converse, in_words
from specbuild.measure.bench.measure import prepare
from specbuild.runtime import Chat, Engine, SamplingParams
from specbuild.runtime.errors import ExecutionError, PromptError
from specbuild.runtime.requests.prompt_file import Request

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TURNS = ("import os", "import re", "def main():")
PARAMS = SamplingParams(max_new_tokens=5, seed=0)


def question(*turns, params=PARAMS, where="f:1"):
    return Request(turns[0], params, turns, "writing", where)


@pytest.fixture(scope="module")
def engine(bundle):
    with Engine.load(bundle, prefix_caching=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def chatting(bundle, tmp_path_factory):
    """An engine of the same models with a chat template."""
    path, name = Path(shutil.copytree(bundle, tmp_path_factory.mktemp("chat") / "b")), "chat_template.jinja"
    put(path, name, TEMPLATE.encode(), hashed=True, chat_template=name)
    with Engine.load(path, prefix_caching=False) as engine:
        yield engine


def texts(engine, cases):
    return [engine.tokenizer.decode(case.tokens) for case in cases]


def answer(engine, prompt):
    (result,) = engine.generate([prompt], replace(PARAMS, speculation="off"))
    return result.text


def test_without_a_template_the_text_goes_on(engine):
    told, questions = list[int](), [question(*TURNS), question("y")]
    first = TURNS[0]
    second = f"{first}{answer(engine, first)}\n\n{TURNS[1]}"
    third = f"{second}{answer(engine, second)}\n\n{TURNS[2]}"
    cases = converse(engine, questions, told.append)
    assert texts(engine, cases) == [first, second, third, "y"]
    assert [(case.params, case.category) for case in cases] == [(PARAMS, "writing")] * 4
    assert told == [1, answers_needed(questions)] == [1, 2]


@pytest.mark.slow
def test_with_a_template_turns_are_a_user_s_messages(chatting):
    messages = list[dict[str, str]]()
    for turn, case in zip(TURNS, converse(chatting, [question(*TURNS)]), strict=True):
        messages.append({"role": "user", "content": turn})
        (expected,) = prepare(chatting, [Request(Chat(messages), PARAMS)])
        assert case.tokens == expected.tokens
        messages.append({"role": "assistant", "content": answer(chatting, Chat(messages))})


@pytest.mark.slow
def test_answers_end_where_the_text_ends(chatting):
    """`--ignore-eos` makes what is measured longer, not what was said before."""
    ending = replace(PARAMS, ignore_eos=True, logit_bias={chatting.manifest.eos_token_ids[0]: 100.0})
    _, second = converse(chatting, [question("import os", "x", params=ending)])
    assert texts(chatting, [second]) == ["<user>import os\n<assistant>\n<user>x\n<assistant>"]
    assert second.params == ending


def test_a_turn_that_does_not_fit_is_named(engine):
    with pytest.raises(PromptError, match=r"^f:1, turn 2: "):
        converse(engine, [question("import os", "x " * 5000)])
    with pytest.raises(PromptError, match=r"^f:1: the prompt is empty"):
        converse(engine, [question("")])


def test_an_answer_that_fails_is_raised(engine, monkeypatch):
    failed = SimpleNamespace(error=ExecutionError("planted"))
    monkeypatch.setattr(engine, "generate", lambda *_: [failed])
    with pytest.raises(ExecutionError, match=r"^f:1: planted"):
        converse(engine, [question("import os", "x")])


def test_how_it_was_done_is_told(engine, chatting):
    assert in_words([Request("import os", PARAMS)], chatting) is None
    assert "as text" in str(in_words([question("x")], engine))
    told = str(in_words([question("x", "y")], chatting))
    assert "chat template" in told
    assert "for every contender" in told
