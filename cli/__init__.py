"""The `specbuild` command. Each subcommand is a module of its own, imported when it is called."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
from types import FrameType

import click

from specbuild.runtime.errors import SpecbuildError

DEBUG = "SPECBUILD_DEBUG"  # set: an unexpected error shows its traceback
_COMMANDS = {
    "distill": "Train a draft for a target.",
    "build": "Compile a target and a draft into a bundle.",
    "pair": "Say whether a draft can be used with a target, and what it is worth here.",
    "inspect": "Show what a bundle holds.",
    "generate": "Generate text from a bundle.",
    "verify": "Check a bundle's tokens against plain decoding and Hugging Face.",
    "tune": "Measure what rounds take here, so that `auto` drafts what pays.",
    "profile": "Measure each step against the device's roofline, and where a round's time goes.",
    "bench": "Compare speculation with plain decoding: latency, speedup, acceptance.",
    "doctor": "Show what this machine has, and what that enables.",
}


class _Lazy(click.Group):
    """Finds subcommands by module, so that `generate` never imports what `build` needs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f".{cmd_name}", __package__).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="specbuild-trt", prog_name="specbuild")
def cli() -> None:
    """Compile models for speculative decoding, and run them exactly."""


class _Warnings(logging.Handler):
    """A library's warnings, each as one line on stderr, and told once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._told: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        message = " ".join(record.getMessage().split())
        if message not in self._told:
            self._told.add(message)
            click.echo(f"specbuild: {message}", err=True)


def main() -> None:
    """Run the command; every error is one line on stderr, its status 2 for bad input and 1 for a failure."""
    signal.signal(signal.SIGTERM, _interrupt)
    logging.getLogger("specbuild").handlers = [_Warnings()]
    try:
        status = cli.main(prog_name="specbuild", standalone_mode=False)
    except SpecbuildError as error:
        status = _fail(str(error), error.exit_status)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "", err=True)
        status = 2
    except click.ClickException as error:
        status = _fail(error.format_message(), 2)
    except (click.exceptions.Abort, KeyboardInterrupt):
        status = _fail("interrupted: nothing was left behind", 1)
    except click.exceptions.Exit as stop:
        status = stop.exit_code
    except BrokenPipeError:  # whoever read our output has what they wanted
        sys.stderr.close()
        status = 0
    except ModuleNotFoundError as error:
        status = _fail(f"this needs {error.name}, which is not installed: pip install 'specbuild-trt[build]'", 2)
    except MemoryError:
        status = _fail("out of memory: use a smaller model, or a smaller --max-seq-len or --max-batch-size", 1)
    except OSError as error:
        status = _fail(f"{error.filename or 'the system'}: {error.strerror or error}", 1)
    except Exception as error:
        if os.environ.get(DEBUG):
            raise
        status = _fail(f"a bug in specbuild, {type(error).__name__}: {error} ({DEBUG}=1 shows where)", 1)
    sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str, status: int) -> int:
    click.echo("specbuild: " + " ".join(message.split()), err=True)
    return status


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
