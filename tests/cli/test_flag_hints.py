"""Flags that other engines have are told by their names here; a mistyped one is told by the flag that looks alike."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from specbuild.cli.application import cli
from specbuild.cli.flag_hints import _HERE

from .conftest import Outcome

Specbuild = Callable[..., Outcome]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("build", "--ctx-size", "512"), "there is no --ctx-size; here it is specbuild build --max-seq-len"),
        (("build", "--quantization", "fp8"), "here it is specbuild build --precision"),
        (("serve", "x", "--tensor_parallel_size", "2"), "here it is not needed: a bundle runs on one device"),
        (("generate", "x", "--num-speculative-tokens", "4"), "--max-draft-tokens, or --tree chain:4"),
        (("generate", "x", "--temprature", "1"), "--temperature"),
        (("genrate", "x"), "generate"),
    ],
)
def test_what_was_meant_is_said(specbuild: Specbuild, arguments: tuple[str, ...], line: str) -> None:
    assert line.replace("chain:4", "chain:N") in specbuild(*arguments).refusal()


def test_every_flag_that_is_named_exists() -> None:
    context = cli.make_context("specbuild", [], resilient_parsing=True)
    commands = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    for text in _HERE.values():
        for flag in re.findall(r"--[a-z-]+", text):
            known = {name for command in commands.values() if command for each in command.params for name in each.opts}
            assert flag in known, (text, flag)


@pytest.mark.parametrize(
    ("command", "alias", "name"),
    [
        ("generate", "--draft-max", "max_draft_tokens"),
        ("generate", "--repeat-penalty", "repetition_penalty"),
        ("serve", "--draft-max", "max_draft_tokens"),
        ("build", "--model", "target"),
        ("build", "--draft-model", "draft"),
        ("build", "--max-model-len", "max_seq_len"),
    ],
)
def test_names_by_which_others_call_a_flag(command: str, alias: str, name: str) -> None:
    context = cli.make_context("specbuild", [], resilient_parsing=True)
    found = cli.get_command(context, command)
    assert found
    (option,) = [each for each in found.params if alias in each.opts]
    assert option.name == name
