"""A chat's lines: commands, messages, and what is kept of them."""

import pytest

from specbuild.runtime import ChatSession
from specbuild.runtime.errors import PromptError
from specbuild.runtime.requests.chat_session import COMMANDS


def said(role, content):
    return {"role": role, "content": content}


TALK = ChatSession("Be brief.", (said("user", "a"), said("assistant", "b")))


@pytest.mark.parametrize("line", ["c", "/usr/bin is where", "/Help", "/", "// x", "a /help"])
def test_a_message_is_asked_behind_all_that_was_said(line):
    """Also what only looks like a command; it is kept with its answer."""
    turn = TALK.take(line)
    assert turn.chat
    assert list(turn.chat.messages) == [said("system", "Be brief."), *TALK.said, said("user", line)]
    assert (turn.session, turn.notice) == (TALK, None), "kept only once it has an answer"
    assert TALK.answered(line, "d").said == (*TALK.said, said("user", line), said("assistant", "d"))


@pytest.mark.parametrize(
    ("line", "session"),
    [
        ("/system Be long.", ChatSession("Be long.", TALK.said)),
        ("/system two\nlines", ChatSession("two\nlines", TALK.said)),
        ("/system", ChatSession(None, TALK.said)),
        ("/reset", ChatSession("Be brief.")),
        ("/help", TALK),
    ],
)
def test_a_command_is_not_asked(line, session):
    turn = TALK.take(line)
    assert (turn.session, turn.chat) == (session, None)
    assert turn.notice == (COMMANDS if line == "/help" else None)


def test_there_are_no_other_commands():
    with pytest.raises(PromptError, match="there is no /dance: /help shows what there is"):
        TALK.take("/dance")
