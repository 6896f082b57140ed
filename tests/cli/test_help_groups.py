"""The help of commands with many options: every option once, under a heading that exists."""

from __future__ import annotations

import re
from collections.abc import Callable

import click
import pytest

from specbuild.cli import help_groups
from specbuild.cli.application import cli

from .conftest import Outcome

Specbuild = Callable[..., Outcome]
HEADINGS = {
    "generate": help_groups.GENERATE,
    "chat": help_groups.GENERATE,
    "serve": help_groups.SERVE,
    "build": help_groups.BUILD,
}


def params(command: str) -> dict[str, str]:
    """Names of a command's options, by their first flag."""
    context = cli.make_context("specbuild", [], resilient_parsing=True)
    found = cli.get_command(context, command)
    assert found
    shown = [each for each in found.params if isinstance(each, click.Option) and not each.hidden]
    return {each.name or "": each.opts[0] for each in shown}


@pytest.mark.parametrize("command", HEADINGS)
def test_every_option_is_listed_once(specbuild: Specbuild, command: str) -> None:
    text = specbuild(command, "--help").out
    listed = re.findall(r"^  (-.*?)(?:  |$)", text, re.MULTILINE)
    flags = [flag.split()[0].rstrip(",") for line in listed for flag in re.split(r"[,/] ?", line)]
    for name, flag in params(command).items():
        assert flags.count(flag) == 1, (name, flag)


@pytest.mark.parametrize("command", HEADINGS)
def test_headings_hold_what_belongs_together(specbuild: Specbuild, command: str) -> None:
    text = specbuild(command, "--help").out
    blocks = dict(re.findall(r"^(\S[^\n]*):\n((?:  .*\n|\n)+)", text + "\n", re.MULTILINE))
    assert len(blocks) > 2
    few = blocks["Options"].count("\n  -")
    assert few < 10, "the rest has headings"


@pytest.mark.parametrize("command", ["serve", "build", "generate"])
def test_no_heading_names_an_option_that_is_gone(command: str) -> None:
    known = {name for each in ("serve", "build", "generate", "chat", "bench") for name in params(each)}
    for names in HEADINGS[command].values():
        for name in names:
            assert name in known or any(each.startswith(f"{name}_") for each in known), name


def test_every_command_has_an_example(specbuild: Specbuild) -> None:
    context = cli.make_context("specbuild", [], resilient_parsing=True)
    for name in cli.list_commands(context):
        assert f"\n  specbuild {name} " in specbuild(name, "--help").out, name
