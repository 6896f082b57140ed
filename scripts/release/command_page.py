"""Write docs/reference/commands.md, every command's own help: python scripts/release/command_page.py."""

from __future__ import annotations

from pathlib import Path

from specbuild.cli.application import cli

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "commands.md"
_TOP = """\
# Commands

This page is each command's `--help`, written by `python scripts/release/command_page.py`. All but
`chat` and `serve` print JSON for machines with `--json`. Exit status 2 is bad input, 1 a failure.

A flag of vLLM, llama.cpp or trtllm-build that means the same here works under their name too, such
as `--alias`, `-np` or `--temp`. Another of theirs, such as `-ngl`, is refused with what to use
here. In any flag `_` is `-`: `--max_seq_len` is `--max-seq-len`.

Shells complete commands and flags after this line in `~/.bashrc`; `zsh_source` and `fish_source`
are for other shells:

    eval "$(_SPECBUILD_COMPLETE=bash_source specbuild)"
"""


def page() -> str:
    """Return the page: a heading and the help of each command."""
    top = cli.make_context("specbuild", [], resilient_parsing=True)
    parts = [_TOP]
    for name in cli.list_commands(top):
        command = cli.get_command(top, name)
        if command is None:
            raise LookupError(f"{name} is listed and does not exist")
        context = command.context_class(command, info_name=name, parent=top, terminal_width=96, max_content_width=96)
        lines = (line.rstrip() for line in command.get_help(context).splitlines())
        parts.append(f"## {name}\n\n```text\n" + "\n".join(lines) + "\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
