"""The help of commands: every option once, in commands with many under a heading that exists."""

from __future__ import annotations

import re

import pytest
from command_line import Specbuild
from commands import COMMANDS, options_of

from specbuild.cli import help_groups

HEADINGS = {
    "generate": help_groups.GENERATE,
    "chat": help_groups.GENERATE,
    "serve": help_groups.SERVE,
    "build": help_groups.BUILD,
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_listed_once_and_there_is_an_example(specbuild: Specbuild, name: str) -> None:
    shown = specbuild(name, "-h")
    assert (shown.status, shown.err) == (0, "")
    assert f"\n  specbuild {name} " in shown.out
    listed = re.findall(r"^  (-.*?)(?:  |$)", shown.out, re.MULTILINE)
    flags = [flag.split()[0] for line in listed for flag in re.split(r"[,/] ?", line) if flag.startswith("-")]
    assert sorted(flags) == sorted({*flags})
    assert {option.opts[0] for option in options_of(COMMANDS[name])} <= {*flags}
    if name in HEADINGS:
        assert shown.out.partition("\nOptions:\n")[2].partition("\n\n")[0].count("\n  -") < 10, "the rest has headings"


def test_no_heading_names_an_option_that_is_gone() -> None:
    known = {str(option.name) for command in COMMANDS.values() for option in options_of(command)}
    for names in (names for headings in HEADINGS.values() for names in headings.values()):
        for name in names:
            assert name in known or any(each.startswith(f"{name}_") for each in known), name
