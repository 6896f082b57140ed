"""`specbuild chat`: answers that stream, a history, what can be said besides, and Ctrl-C."""

import os
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from specbuild.runtime import Chat, Engine, SamplingParams

LIMIT = 60


def answers(bundle, turns):
    params = SamplingParams(max_new_tokens=12)
    with Engine.load(bundle) as engine:
        return "".join(f"{result.text}\n" for result in engine.generate([Chat(turn) for turn in turns], params))


def said(role, content):
    return {"role": role, "content": content}


def test_lines_of_a_pipe_are_messages_of_one_conversation(specbuild, chatty):
    outcome = specbuild("chat", chatty, "-n", 12, stdin=b"def main():\n\n  import os  \n")
    first = answers(chatty, [[said("user", "def main():")]])
    history = [said("user", "def main():"), said("assistant", first[:-1]), said("user", "import os")]
    assert (outcome.status, outcome.err) == (0, ""), "no prompts, no statistics"
    assert outcome.out == first + answers(chatty, [history])


def test_instructions_and_a_new_beginning(specbuild, chatty):
    typed = b"x = 1\n/reset\n/system Be brief.\ny = 2\n/system\n/reset\n/usr/bin is where\n/exit\nnever\n"
    outcome = specbuild("chat", chatty, "-n", 12, stdin=typed)
    brief = [said("system", "Be brief."), said("user", "y = 2")]
    turns = [[said("user", "x = 1")], brief, [said("user", "/usr/bin is where")]]
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out == answers(chatty, turns)
    given = specbuild("chat", chatty, "-n", 12, "--system", "Be brief.", stdin=b"y = 2")
    assert given.out == answers(chatty, [brief])


def test_statistics_and_the_next_turn_is_read_from_the_cache(specbuild, chatty):
    outcome = specbuild("chat", chatty, "-n", 12, "--stats", stdin=b"def main():\nimport os\n")
    pattern = (
        r"\[12 tokens, \d+ tokens/s, acceptance length [\d.]+, first token after \d+ ms, (\d+) of (\d+) prompt .*\]"
    )
    first, second = (re.fullmatch(pattern, line) for line in outcome.err.splitlines())
    assert first
    assert second
    assert int(second[1]) >= int(first[2]), "what was said before is not read again"


def test_what_cannot_be_answered_takes_nothing_with_it(specbuild, chatty):
    long = b"x " * 3000
    outcome = specbuild("chat", chatty, "-n", 12, stdin=b"x = 1\nforbidden\n/dance\n" + long + b"\ny = 2\n")
    first = answers(chatty, [[said("user", "x = 1")]])
    history = [said("user", "x = 1"), said("assistant", first[:-1]), said("user", "y = 2")]
    assert outcome.out == first + answers(chatty, [history])
    refused, unknown, much = outcome.err.splitlines()
    assert "not that" in refused
    assert unknown == "specbuild: there is no /dance: /help shows what there is"
    assert "tokens" in much
    assert much.endswith("/reset forgets what was said")
    assert outcome.status == 1


def test_what_is_no_text_is_refused(specbuild, chatty):
    assert "line 1 of standard input is not UTF-8" in specbuild("chat", chatty, stdin=b"\xff\n").refusal()


class Terminal:
    """A chat on a terminal of its own."""

    def __init__(self, *arguments):
        self.ours, theirs = os.openpty()
        command = [sys.executable, "-c", "from specbuild.cli import main; main()", "chat", *map(str, arguments)]
        environment = os.environ | {"TERM": "dumb", "PYTHONUNBUFFERED": "1"}
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        self.process = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
        os.close(theirs)
        self.seen = ""

    def see(self, words, number=None):
        """Read until these words; a signal is sent again until it was noticed: Python loses one before it reads."""
        deadline = time.monotonic() + LIMIT
        while words not in self.seen:
            assert time.monotonic() < deadline, f"no {words!r} in {self.seen!r}"
            if number:
                self.process.send_signal(number)
            if select.select([self.ours], [], [], 1)[0]:
                self.seen += os.read(self.ours, 1 << 16).decode(errors="replace")
        self.seen = self.seen.partition(words)[2]

    def type(self, text):
        os.write(self.ours, text.encode())


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_and_not_the_program(chatty):
    terminal = Terminal(chatty, "-n", 100_000, "--ignore-eos", "--no-speculation", "--threads", 1)
    terminal.see("> ")
    terminal.see("/exit or Ctrl-D leaves", signal.SIGINT)
    terminal.see("> ")
    terminal.type("def main():\n")
    terminal.see("\n")  # the echo's end
    terminal.see("\n")  # of the answer's first line
    terminal.process.send_signal(signal.SIGINT)
    terminal.see("until it was stopped")
    terminal.see("> ")
    terminal.type("/reset\n")
    terminal.see("> ")
    terminal.type("\x04")
    assert terminal.process.wait(LIMIT) == 0
    os.close(terminal.ours)


@pytest.mark.slow
def test_a_termination_stops_the_program(chatty):
    terminal = Terminal(chatty, "--threads", 1)
    terminal.see("> ")
    terminal.see("interrupted", signal.SIGTERM)
    assert terminal.process.wait(LIMIT) == 1
    os.close(terminal.ours)
