"""The group of commands, and how each of them ends: with at most one line of error and an exit status."""

from __future__ import annotations

import difflib
import errno
import functools
import importlib
import logging
import os
import resource
import sys

import click

from specbuild.runtime.errors import SpecbuildError

from . import flag_hints, interrupts, standard_streams
from .standard_streams import tell

_STARVED = "bad_alloc", "cannot allocate memory", "failed to map segment"
DEBUG = "SPECBUILD_DEBUG"  # if set, an unexpected error shows its traceback
_COMMANDS = {  # in the order of work
    "build": "Compile a target and a draft into a bundle.",
    "inspect": "Show what a bundle holds.",
    "verify": "Check a bundle's tokens against plain decoding and Hugging Face.",
    "generate": "Generate text from a bundle.",
    "chat": "Chat with a bundle.",
    "serve": "Serve bundles by OpenAI's API.",
    "bench": "Compare speculation with plain decoding: latency, speedup, acceptance.",
    "tune": "Measure what rounds take here, so that `auto` drafts what pays.",
    "profile": "Measure each step against the device's roofline, and where a round's time goes.",
    "pair": "Say whether a draft can be used with a target, and what it is worth here.",
    "distill": "Train a draft for a target.",
    "canary": "Show what a server's canary has found.",
    "cost": "Say what requests cost, and what speculation saved, from a server's ledger.",
    "replay": "Prove a text that a server gave, by its receipt.",
    "sign": "Sign a bundle.",
    "doctor": "Show what this machine has, and what that enables.",
}
_MEANT = {  # names that other tools have for these commands
    **dict.fromkeys(("compile", "convert", "quantize", "trtllm-build"), "build"),
    **dict.fromkeys(("info", "show"), "inspect"),
    **dict.fromkeys(("check", "eval", "test"), "verify"),
    **dict.fromkeys(("run", "complete", "completion"), "generate"),
    "server": "serve",
    "benchmark": "bench",
    "train": "distill",
    "version": "--version",
}


class _Lazy(click.Group):
    """A group that imports a subcommand's module when it is called: `generate` does not import what `build` needs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = _loaded(cmd_name)
        interrupts.raise_exceptions()
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in _COMMANDS or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        for similar in difflib.get_close_matches(args[0], [*_COMMANDS, *_MEANT], 1):
            raise click.UsageError(f"there is no command {args[0]!r}: did you mean {_MEANT.get(similar, similar)}?")
        raise click.UsageError(f"there is no command {args[0]!r}: specbuild --help lists what there is")

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, EOFError) as stop:  # click would print an empty line
            raise click.Abort from stop

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@functools.cache
def _loaded(name: str) -> click.Command:
    """Import a command, and add the hints for flags that it does not have."""
    command: click.Command = importlib.import_module(f".{name}", __package__).command
    command.params += flag_hints.hints(command)
    return command


def _dashed(name: str) -> str:
    """Return a flag's name with dashes, as `--max_seq_len` is written for trtllm-build."""
    return name.replace("_", "-")


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": _dashed})
@click.version_option(package_name="specbuild-trt", prog_name="specbuild")
def cli() -> None:
    """Compile models for speculative decoding, and run them exactly."""


class _Warnings(logging.Handler):
    """A log handler that prints each distinct warning once, as one line on stderr."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._told: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message not in self._told:
            self._told.add(message)
            tell(message)


def run() -> None:
    """Run the command and exit; an error is one line on stderr, its status 2 for bad input and 1 for a failure."""
    standard_streams.prepare()
    logging.getLogger("specbuild").handlers = [_Warnings()]
    try:
        status, message = _outcome()
        interrupts.ignore()
    except KeyboardInterrupt:  # after the command, before signals were ignored
        interrupts.ignore()
        status, message = 1, "interrupted"
    if message:
        tell(message)
    standard_streams.lost()
    sys.exit(status)


def _outcome() -> tuple[int, str]:
    """Run the command; return its exit status and an error message, "" if there is none."""
    try:
        status = cli.main(prog_name="specbuild", standalone_mode=False)
        if lost := standard_streams.lost():
            return _of_lost_output(lost)
        return status if isinstance(status, int) else 0, ""
    except SpecbuildError as error:
        return error.exit_status, str(error)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "", err=True)
        return 2, ""
    except click.NoSuchOption as error:
        return 2, flag_hints.unknown(error)
    except click.ClickException as error:
        return 2, error.format_message()
    except (click.Abort, KeyboardInterrupt):
        return 1, interrupts.STOPPED
    except click.exceptions.Exit as stop:
        lost = standard_streams.lost()
        return _of_lost_output(lost) if lost else (stop.exit_code, "")
    except SystemExit:  # click and rich raise it when standard output is a closed pipe
        return _of_lost_output(standard_streams.lost() or BrokenPipeError())
    except Exception as error:
        return _of_unexpected(error)


def _of_lost_output(error: OSError) -> tuple[int, str]:
    """Return status and message for lost output; a reader that closes its pipe is no failure."""
    if isinstance(error, BrokenPipeError):
        return 0, ""
    return 1, f"standard output cannot be written ({error.strerror or error})"


def _starved(error: Exception) -> bool:
    """Return whether memory ran out; libraries report that in many ways while they are loaded."""
    limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    told = any(words in str(error).lower() for words in _STARVED)
    return told or isinstance(error, MemoryError) or (limited and isinstance(error, SystemError))


def _of_unexpected(error: Exception) -> tuple[int, str]:
    """Return status and message for an error that no command handles."""
    if interrupts.interrupted(error):  # a library that was being imported turned the interrupt into its own error
        return 1, interrupts.STOPPED
    if isinstance(error, ModuleNotFoundError):
        return 2, f"this needs {error.name}, which is not installed: pip install 'specbuild-trt[build]'"
    if _starved(error):
        return 1, "out of memory: use a smaller model, or a smaller --max-seq-len or --max-batch-size"
    if isinstance(error, OSError):
        if lost := standard_streams.lost():
            return _of_lost_output(lost)
        impossible = error.errno in (errno.ENAMETOOLONG, errno.ELOOP)  # the path itself is bad input
        return 1 + impossible, f"{error.filename or 'the system'}: {error.strerror or error}"
    if os.environ.get(DEBUG):
        raise error
    return 1, f"a bug in specbuild, {type(error).__name__}: {error} ({DEBUG}=1 shows where)"
