"""`generate --show`: coloured in a terminal, plain elsewhere, and the same text in both."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from specbuild.runtime import Engine, SamplingParams

PROMPT = "def parse_arguments(argv):"
GREEN = re.compile(r"\x1b\[32m\x1b\[1m(.*?)\x1b\[0m", re.DOTALL)


def at_a_terminal(*arguments):
    """What a command prints on a terminal, its line ends as they were written."""
    master, slave = pty.openpty()
    command = [Path(sys.executable).with_name("specbuild"), *map(str, arguments)]
    with subprocess.Popen(command, stdout=slave, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL) as process:
        os.close(slave)
        printed = b""
        try:
            while part := os.read(master, 65536):
                printed += part
        except OSError:  # the end of a terminal
            pass
        os.close(master)
    assert process.returncode == 0
    return printed.decode().replace("\r\n", "\n")


def test_accepted_tokens_are_coloured_in_a_terminal(bundle):
    with Engine.load(bundle) as engine:
        (want,) = engine.generate(PROMPT, SamplingParams(max_new_tokens=40, speculation="best:5"))
        text = engine.tokenizer.token_text
        accepted = "".join(text(token) for token, drafted in zip(want.token_ids, want.drafted, strict=True) if drafted)
    shown = at_a_terminal("generate", bundle, "-p", PROMPT, "-n", 40, "--tree", "best:5", "--show")
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown) == want.text + "\n"
    assert accepted
    assert "".join(GREEN.findall(shown)) == accepted
    plain = at_a_terminal("generate", bundle, "-p", PROMPT, "-n", 40, "--no-speculation", "--show")
    assert plain == want.text + "\n"


def test_several_texts_are_coloured_and_the_counts_add_up(specbuild, bundle):
    outcome = specbuild("generate", bundle, "-p", PROMPT, "-p", "import os", "-n", 20, "--show")
    plain = specbuild("generate", bundle, "-p", PROMPT, "-p", "import os", "-n", 20)
    assert (outcome.status, outcome.out) == (0, plain.out)
    accepted, own, _rejected = map(int, re.findall(r"\d+", re.sub(r"\x1b\[[0-9;]*m", "", outcome.err)))
    assert accepted > 0
    assert accepted + own == 40


def test_json_has_no_colours(specbuild, bundle):
    outcome = specbuild("generate", bundle, "-p", "x", "--show", "--json")
    assert outcome.status == 2
    assert "--show" in outcome.err
