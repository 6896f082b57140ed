"""`specbuild replay`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from specbuild.runtime import Chat, Engine, Receipt
from specbuild.runtime.errors import OptionError, PromptError
from specbuild.runtime.requests.tokenizer import Prompt

_MAX_FILE = 64 << 20  # bytes


@click.command(name="replay")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("receipt", type=click.Path(path_type=Path), metavar="RECEIPT.json")
@click.option("-p", "--prompt", metavar="TEXT", help="The prompt.")
@click.option(
    "--request", "file", type=click.Path(path_type=Path), metavar="FILE.json", help="The request that was sent."
)
@click.option("--choice", type=int, default=0, show_default=True, help="Of a response, whose receipt is meant.")
@click.option("-t", "--threads", type=int, help="Threads of the target; all cores by default.")
@click.option("--any-class", is_flag=True, help="Try a receipt of another exactness class too.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def command(
    bundle: Path,
    receipt: Path,
    prompt: str | None,
    file: Path | None,
    choice: int,
    threads: int | None,
    any_class: bool,
    as_json: bool,
) -> None:
    """Prove a text: decode it again, plainly and with speculation, and hold its tokens against its receipt.

    RECEIPT.json is a receipt, or a whole response of `specbuild serve` that has one.

    \b
    specbuild replay pycode.bundle response.json -p 'def main('
    """
    if (prompt is None) == (file is None):
        raise OptionError("give the prompt with -p TEXT, or the request that was sent with --request FILE")
    told = Receipt.parse(_receipt(_read(receipt), choice))
    asked = _prompt(_read(file), choice) if file else prompt or ""
    with Engine.load(bundle, threads=threads) as engine:
        replay = engine.replay(told, asked, any_class)
    if as_json:
        texts = {"plain": replay.plain.to_dict(), "speculated": replay.speculated.to_dict()}
        click.echo(json.dumps({"proven": replay.proven, **texts}, ensure_ascii=False))
    elif replay.proven:
        click.echo(f"proven: {told.count} tokens, plainly and with speculation")
    if not replay.proven:
        if not as_json:
            click.echo(f"specbuild: the tokens differ from the receipt's {told.count}", err=True)
        raise click.exceptions.Exit(1)


def _read(file: Path) -> Any:
    try:
        with file.open("rb") as source:
            return json.loads(source.read(_MAX_FILE))
    except (OSError, ValueError, RecursionError) as error:
        raise OptionError(f"{file} cannot be read as JSON ({getattr(error, 'strerror', None) or error})") from None


def _receipt(told: Any, choice: int) -> Any:
    """A receipt, or that of a response's choice."""
    if not isinstance(told, dict) or "choices" not in told:
        return told
    choices = told["choices"]
    own = [each for each in choices if isinstance(each, dict) and each.get("index") == choice]
    if not own or "receipt" not in own[0]:
        raise OptionError(f'choice {choice} has no receipt: ask for one with "receipt": true')
    return own[0]["receipt"]


def _prompt(request: Any, choice: int) -> Prompt:
    """The prompt that a choice of a request goes on from."""
    given = request if isinstance(request, dict) else {}
    if "messages" in given:
        begin = given.get("add_generation_prompt")
        return Chat(
            given["messages"],
            add_generation_prompt=True if begin is None else begin,
            variables=given.get("chat_template_kwargs") or {},
        )
    prompt = given.get("prompt")
    if isinstance(prompt, list) and not all(isinstance(each, int) for each in prompt):
        number = choice // (given.get("n") or 1)
        prompt = prompt[number] if 0 <= number < len(prompt) else None
    if not isinstance(prompt, str | list):
        raise PromptError("the request has no prompt and no messages: give the body that was sent")
    return prompt
