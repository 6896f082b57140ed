"""The help of commands: every option once, in commands with many under a heading that exists."""

import re

import pytest
from commands import COMMANDS, options_of

LONG = {"generate", "chat", "serve", "build"}  # whose options have headings


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_listed_once_and_there_is_an_example(specbuild, name):
    shown = specbuild(name, "-h")
    assert (shown.status, shown.err) == (0, "")
    assert f"\n  specbuild {name} " in shown.out
    listed = re.findall(r"^  (-.*?)(?:  |$)", shown.out, re.MULTILINE)
    flags = [flag.split()[0] for line in listed for flag in re.split(r"[,/] ?", line) if flag.startswith("-")]
    assert sorted(flags) == sorted({*flags})
    assert {option.opts[0] for option in options_of(COMMANDS[name])} <= {*flags}
    if name in LONG:
        assert shown.out.partition("\nOptions:\n")[2].partition("\n\n")[0].count("\n  -") < 10, "the rest has headings"
