"""`specbuild replay`."""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from specbuild.runtime import Bundle, Chat, Engine, Limits, Prompt, Receipt, Replay
from specbuild.runtime.checked_json import JSON_BYTES, decode
from specbuild.runtime.engine.receipt import keyed_sha256, sha256
from specbuild.runtime.errors import BundleError, InputError, OptionError, PromptError, shown
from specbuild.runtime.requests.prompt_file import read

from .generate import command as generate

_GENERATES = {option.name: option for option in generate.params}
_MAX_KEY = 1 << 10  # characters
_CHAT = {"messages", "tools", "chat_template_kwargs", "add_generation_prompt"}


@click.command(name="replay")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("file", metavar="RECEIPT.json", type=click.Path(path_type=Path))
@click.option("-p", "--prompt", "text", metavar="TEXT", help="The prompt, a text.")
@click.option(
    "--prompts", metavar="FILE.jsonl", help="A prompt file that has the prompt, as for generate; - for stdin."
)
@click.option("--messages", metavar="FILE.json", type=click.Path(path_type=Path), help="The prompt, a chat's messages.")
@click.option(
    "--key",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The key of a shadow oracle's file that lacks its prompt.",
)
@click.option(
    "--choice", type=int, default=0, show_default=True, help="Which choice of a response has the receipt that is meant."
)
@click.option(
    "--any-class", is_flag=True, help="Try it in another exactness class, where a near-tie may fall otherwise."
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def command(
    bundle: Path,
    file: Path,
    text: str | None,
    prompts: str | None,
    messages: Path | None,
    key: Path | None,
    choice: int,
    any_class: bool,
    as_json: bool,
    batch_size: int,
    threads: int | None,
    max_draft_tokens: int | None,
) -> None:
    """Decode a receipt's text again, by plain decoding and by speculation, and say whether its tokens are the same.

    If they are not, the exit status is 1; a receipt of another bundle, prompt or exactness class is refused with 2. On
    another machine the class may be another. RECEIPT.json may be a whole response of `specbuild serve`, or a file that
    its shadow oracle kept, which may have the prompt; if not, it is told by the key beside it.

    \b
    specbuild replay pycode.bundle receipt.json -p 'def main('
    """
    body = _read(file, OptionError)
    prompt = body.get("prompt_token_ids") if _of_shadow(body) else None
    if sum(each is not None for each in (text, prompts, messages)) != (prompt is None):
        raise OptionError(
            f"{file} has the prompt: give no other"
            if prompt is not None
            else "give the prompt by one of --prompt, --prompts and --messages"
        )
    keyed = _Keyed.of(file, body, key)
    fields = _of_choice(body, choice)
    if keyed and isinstance(fields, dict):
        fields = fields | {"prompt_sha256": "0" * 64}  # until the prompt is known
    receipt = Receipt.from_dict(fields)
    if Bundle.open(bundle).manifest.digest != receipt.bundle:  # before its models are loaded
        raise BundleError(f"the receipt is of another bundle than {bundle}: give the one that made it")
    candidates: list[Prompt]
    if messages is not None:
        candidates = [_chat(messages)]
    else:
        candidates = (
            [request.prompt for request in read(prompts, {})] if prompts is not None else [prompt or text or ""]
        )
    with Engine.load(
        bundle,
        batch_size=batch_size,
        threads=threads,
        prefix_caching=False,  # so that plain decoding and speculation each prefill the prompt
        limits=Limits(max_draft_tokens),
    ) as engine:
        if keyed:
            candidates = [tokens := _the_one(engine, keyed.has_prompt, candidates)]
            receipt = replace(receipt, prompt_sha256=sha256(tokens))
        elif len(candidates) > 1:
            candidates = [_the_one(engine, receipt.has_prompt, candidates)]
        outcome = engine.replay(receipt, candidates[0], any_class=any_class)
    click.echo(json.dumps(outcome.to_dict()) if as_json else in_words(outcome))
    if not outcome.proven:
        raise click.exceptions.Exit(1)


command.params[-1:-1] = [_GENERATES[name] for name in ("batch_size", "threads", "max_draft_tokens")]


def in_words(outcome: Replay) -> str:
    """Describe on one line whether a receipt's tokens were reproduced."""
    receipt, fields = outcome.receipt, outcome.to_dict()
    tokens = f"{'the' if receipt.whole else 'the first'} {receipt.num_output_tokens} tokens"
    where = "" if outcome.same_class else ", in another exactness class"
    if outcome.proven:
        return f"proven: plain decoding and speculation give {tokens}{where}"
    others = " and ".join(
        name for way, name in (("plain", "plain decoding"), ("speculation", "speculation")) if not fields[way]
    )
    return f"DIFFERENT: {others} did not give {tokens}{where} (of specbuild {receipt.specbuild_version})"


def _read(path: Path, kind: type[InputError]) -> Any:
    """Return the value of a JSON file; raise an error of `kind` if it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(JSON_BYTES + 1)
        if len(data) > JSON_BYTES:
            raise ValueError(f"more than {JSON_BYTES >> 20} MiB")
        return decode(data)
    except OSError as error:
        raise kind(f"{path} cannot be read ({error.strerror or error}): give a file of JSON") from None
    except ValueError as error:
        raise kind(f"{path} cannot be read as JSON ({error}): give a file of JSON") from None


def _of_shadow(body: Any) -> bool:
    """Return whether a JSON value was written by a shadow oracle."""
    return isinstance(body, dict) and "plain_token_ids" in body


@dataclass(frozen=True, slots=True)
class _Keyed:
    """The keyed hash (HMAC-SHA-256) of an otherwise unknown prompt, and its key."""

    expected: str
    key: bytes

    @classmethod
    def of(cls, file: Path, body: Any, key: Path | None) -> _Keyed | None:
        """Return the keyed hash in a shadow oracle's file; None if the file has none.

        Args:
            file: The path of the file.
            body: Its JSON value.
            key: The file with the key; None for the one that `body` names, in the same folder.

        Raises:
            OptionError: A key is given but not needed, or none can be read.
        """
        expected, name = (body.get(each) if _of_shadow(body) else None for each in ("prompt_hmac_sha256", "key"))
        if expected is None:
            if key is not None:
                raise OptionError(f"{file} has no keyed hash of a prompt: drop --key")
            return None
        beside = file.with_name(name) if isinstance(name, str) and name == Path(name).name != "" else None
        path = key or beside
        if not isinstance(expected, str) or path is None:
            raise OptionError(f"{file} has no keyed hash, or names no key: it was changed, or give --key")
        try:
            return cls(expected, bytes.fromhex(path.read_text(encoding="ascii")[:_MAX_KEY]))
        except (OSError, ValueError) as error:
            said = getattr(error, "strerror", None) or error
            raise OptionError(f"the key {path} of {file} cannot be read ({said}): give it with --key") from None

    def has_prompt(self, tokens: Sequence[int]) -> bool:
        """Return whether these are the prompt's token ids."""
        return hmac.compare_digest(keyed_sha256(self.key, [*tokens]).encode(), self.expected.encode())


def _of_choice(body: Any, choice: int) -> Any:
    """Return the receipt in a shadow oracle's file or a response, or `body` itself if it is neither.

    Raises OptionError if the response's choice has no receipt.
    """
    if _of_shadow(body):
        return body.get("receipt")
    if not isinstance(body, dict) or not isinstance(body.get("choices"), list):
        return body
    for each in body["choices"]:
        if isinstance(each, dict) and each.get("index") == choice and "receipt" in each:
            return each["receipt"]
    raise OptionError(f'choice {choice} of the response has no receipt: ask with "receipt": true')


def _chat(path: Path) -> Chat:
    """Read a chat: a list of messages, or an object with `messages` and the other chat fields of a prompt file."""
    body = _read(path, PromptError)
    fields = body if isinstance(body, dict) else {"messages": body}
    if unknown := sorted(fields.keys() - _CHAT):
        raise PromptError(f"{path} has an unknown field {shown(unknown[0])}: use {', '.join(sorted(_CHAT))}")
    return Chat(
        fields.get("messages", []),
        fields.get("tools"),
        fields.get("add_generation_prompt", True),
        fields.get("chat_template_kwargs") or {},
    )


def _the_one(engine: Engine, wanted: Callable[[Sequence[int]], bool], candidates: Sequence[Prompt]) -> list[int]:
    """Return the token ids of the candidate that `wanted` accepts; raise PromptError if it accepts none."""
    for each in candidates:
        with suppress(PromptError):  # a prompt that cannot be encoded is not the receipt's
            tokens = engine.tokenizer.encode(each, engine.manifest.max_seq_len)
            if wanted(tokens):
                return tokens
    raise PromptError(f"none of the {len(candidates)} prompts is the receipt's: give the one it was made from")
