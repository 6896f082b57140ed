"""`specbuild chat`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from specbuild.runtime import Bundle, Chat, ChatSession, Engine, Result, SamplingParams
from specbuild.runtime.errors import BundleError, PromptError

from . import interrupts
from .generate import command as generate
from .help_groups import GENERATE, grouped
from .interrupts import Terminated
from .standard_streams import tell

LEAVING = "/exit         leave; Ctrl-D does too, and Ctrl-C stops an answer"
_LEAVE = "/exit or Ctrl-D leaves"
_UNSEEN = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_GENERATES = {option.name: option for option in generate.params}
_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("seed", "stop", "ignore_eos", "no_speculation", "drafter", "tree", "threads"),
)


@click.command(name="chat", cls=grouped(GENERATE))
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("-sys", "--system", "--system-prompt", metavar="TEXT", help="Instructions for every answer.")
@click.option(
    "-n",
    "--max-new-tokens",
    "--max-tokens",
    "--n-predict",
    type=int,
    default=512,
    show_default=True,
    help="Tokens of an answer at most.",
)
@click.option(
    "--stats/--no-stats", default=None, help="Whether each answer's statistics are shown; on a terminal they are."
)
def command(
    bundle: Path,
    system: str | None,
    stats: bool | None,
    no_speculation: bool,
    drafter: Any,
    tree: str | None,
    threads: int | None,
    **sampling: Any,
) -> None:
    """Chat with a bundle whose target has a chat template. /help shows what else can be said.

    Ctrl-C stops an answer; what came of it stays in the conversation. Where standard input is no terminal, each line
    of it is a message, and only the answers are printed.

    \b
    specbuild chat smollm2.bundle --temperature 0.7
    """
    sampling |= {"stop": list(sampling["stop"]), "speculation": "off" if no_speculation else tree or "auto"}
    params = SamplingParams(**sampling)
    if not Bundle.open(bundle).manifest.chat_template:
        raise BundleError(f"{bundle} has no chat template: its model knows no chats, use specbuild generate")
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    with Engine.load(bundle, drafter=drafter, threads=threads) as engine:
        shows = at_terminal if stats is None else stats
        talk = Conversation(engine, params, at_terminal, shows, ChatSession(system))
        if at_terminal:
            talk.take("/help")
        failed = [line for line in _lines(at_terminal) if not talk.take(line)]
    if failed and not at_terminal:
        raise click.exceptions.Exit(1)


command.params += [_GENERATES[name] for name in _SAMPLING]


@dataclass
class Conversation:
    """A conversation: the engine that answers, its settings, and the messages so far (`said`)."""

    engine: Engine
    params: SamplingParams
    at_terminal: bool
    stats: bool
    session: ChatSession

    def take(self, line: str) -> bool:
        """Run a line's command or answer its message; return whether that succeeded."""
        try:
            turn = self.session.take(line)
            self.session = turn.session
            if turn.notice:
                click.echo(f"{turn.notice}\n{LEAVING}", err=True)
            return turn.chat is None or self._answer(line, turn.chat)
        except PromptError as error:
            tell(str(error))
            return False
        except KeyboardInterrupt as error:  # before the answer began
            if isinstance(error, Terminated) or not self.at_terminal:
                raise
            interrupts.handled()
            click.echo(f"\n{_LEAVE}", err=True)
            return False

    def _answer(self, message: str, chat: Chat) -> bool:
        """Print the answer as it comes; return whether there was one. A message without an answer is forgotten."""
        try:
            result = self._stream(chat)
        except PromptError as error:
            tell(f"{error}; /reset forgets what was said" if self.session.said else str(error))
            return False
        if result.error:
            tell(str(result.error))
            return False
        if result.token_ids:
            self.session = self.session.answered(message, result.text)
        if self.stats:
            click.echo(in_words(result), err=True)
        return True

    def _stream(self, chat: Chat) -> Result:
        """Print an answer and return its result; at a terminal Ctrl-C ends it."""
        handle, shown = self.engine.submit(chat, self.params), 0
        try:
            for chunk in handle:
                shown += len(chunk.text)
                self._print(chunk.text)
        except KeyboardInterrupt as error:
            if isinstance(error, Terminated) or not self.at_terminal:
                raise
            interrupts.handled()
            handle.cancel()
        result = handle.result()
        self._print(result.text[shown:] + "\n")
        return result

    def _print(self, text: str) -> None:
        """Print text; at a terminal without control characters, so that a model cannot move the cursor."""
        click.echo(text.translate(_UNSEEN) if self.at_terminal else text, nl=False)


def in_words(result: Result) -> str:
    """Describe on one line the speed of an answer and the effect of speculation."""
    metrics, tokens = result.metrics, len(result.token_ids)
    words = [f"{tokens} tokens" + (" until it was stopped" if result.finish_reason == "cancelled" else "")]
    assert metrics is not None, "a result that is no error has run"
    if tokens and metrics.e2el:
        words.append(f"{tokens / metrics.e2el:.0f} tokens/s")
    if metrics.speculative_decoding.num_spec_steps:
        words.append(f"acceptance length {metrics.speculative_decoding.mean_acceptance_length:.2f}")
    if metrics.ttft:
        words.append(f"first token after {metrics.ttft * 1e3:.0f} ms")
    words.append(f"{metrics.num_cached_tokens} of {metrics.num_prompt_tokens} prompt tokens cached")
    return f"[{', '.join(words)}]"


def _lines(at_terminal: bool) -> Iterator[str]:
    """Yield the stripped non-empty lines of standard input until its end or /exit."""
    for line in _typed() if at_terminal else _piped():
        if line.strip() == "/exit":
            return
        if line.strip():
            yield line.strip()


def _typed() -> Iterator[str]:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives `input` line editing and a history
    while True:
        try:
            yield input("> ")
        except EOFError:
            click.echo(err=True)
            return
        except Terminated:
            raise
        except KeyboardInterrupt:
            interrupts.handled()
            click.echo(f"\n{_LEAVE}", err=True)


def _piped() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError:
            raise PromptError(f"line {number} of standard input is not UTF-8: give text") from None
