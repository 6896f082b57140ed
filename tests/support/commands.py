"""The commands of `specbuild`, and what their help lists."""

import click
from command_line import own_signals

from specbuild.cli.application import cli

GROUP = cli.make_context("specbuild", [], resilient_parsing=True)
with own_signals():
    COMMANDS = {name: command for name in cli.list_commands(GROUP) if (command := cli.get_command(GROUP, name))}


def options_of(command):
    """The options that a command's help lists."""
    return [each for each in command.params if isinstance(each, click.Option) and not each.hidden]


FLAGS = {
    name: {flag for each in options_of(command) for flag in (*each.opts, *each.secondary_opts)}
    for name, command in COMMANDS.items()
}
