"""Texts to calibrate with, and held-out texts to measure the cost: the user's, or specbuild's, of English and code."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbuild.builder.frontend.checkpoint import encode
from specbuild.builder.strict_json import decode
from specbuild.runtime.errors import OptionError, one_line

LENGTH = 256  # maximum number of tokens in a text
SHORTEST = 8  # minimum number of tokens in a text
HELD_OUT = 4  # one text in HELD_OUT is held out
OURS = Path(__file__).with_name("texts.jsonl")  # from specbuild's own documentation and source


@dataclass(frozen=True, slots=True)
class Texts:
    """Token ids of calibration and held-out texts; `source` is a file or "ours", `sha256` that of all token ids."""

    calibration: list[list[int]]
    held_out: list[list[int]]
    source: str
    sha256: str

    def to_dict(self) -> dict[str, Any]:
        """Return the texts' source and sizes as report.json has them."""
        sizes = {name: sum(map(len, getattr(self, name))) for name in ("calibration", "held_out")}
        return {"source": self.source, "sha256": self.sha256, "tokens": sizes}


def read(path: Path | None, tokenizer: Any, length: int, size: int, seed: int) -> Texts:
    """Draw texts at random, and hold out one in HELD_OUT of them.

    Args:
        path: A file of JSON lines with `text`, `prompt`, `turns` or a chat's `messages`, other fields being ignored;
            None for specbuild's own texts.
        tokenizer: The target's tokenizer.
        length: Maximum number of tokens in a text, at most LENGTH; longer texts are cut into several.
        size: Maximum number of texts.
        seed: Seed of the draw.

    Raises:
        OptionError: The file cannot be read, a line is invalid, or no text has SHORTEST tokens.
    """
    source = str(path or "ours")
    ids = encode(tokenizer, list(lines(path or OURS, tokenizer)))
    longest = min(length, LENGTH)
    pieces = [each[at : at + longest] for each in ids for at in range(0, len(each), longest)]
    pieces = [piece for piece in pieces if len(piece) >= min(SHORTEST, longest)]
    pieces = [list(piece) for piece in dict.fromkeys(map(tuple, pieces))]  # no text is in both parts
    if not pieces:
        raise OptionError(f'{source} has no text of {SHORTEST} tokens or more: give lines like {{"text": "…"}}')
    random.Random(seed).shuffle(pieces)
    pieces = pieces[:size]
    if len(pieces) == 1:  # split it, so that both parts have a text
        middle = len(pieces[0]) // 2
        pieces = [pieces[0][:middle] or pieces[0], pieces[0][middle:]]
    held_out = pieces[::HELD_OUT]
    kept = [piece for number, piece in enumerate(pieces) if number % HELD_OUT]
    return Texts(kept, held_out, source, hashlib.sha256(json.dumps(pieces).encode()).hexdigest())


def lines(path: Path, tokenizer: Any) -> Iterator[str]:
    """Yield the texts of a file of JSON lines, as `read` takes it. Raises OptionError."""
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{path} cannot be read ({error.strerror}): give a file of JSON lines") from None
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is not UTF-8 ({error.reason}): give a file of JSON lines") from None
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            try:
                yield from _texts(decode(line), tokenizer)
            except ValueError as error:
                raise OptionError(f"{path}:{number}: {error}") from None


def _texts(fields: Any, tokenizer: Any) -> Iterator[str]:
    """Yield the texts of one line. Raises ValueError."""
    if not isinstance(fields, dict):
        raise ValueError('give a JSON object, like {"text": "…"}')
    given = [name for name in ("text", "prompt", "turns", "messages") if name in fields]
    if len(given) != 1:
        raise ValueError('give one of "text", "prompt", "turns" or "messages"')
    value = fields[given[0]]
    if given[0] == "messages":
        try:
            rendered = tokenizer.apply_chat_template(value, tokenize=False)
        except Exception as error:  # jinja2 and the templates raise many unrelated types
            raise ValueError(f"its messages cannot be rendered: {one_line(error)}") from None
        if not isinstance(rendered, str):
            raise ValueError("its messages are not those of one chat")
        yield rendered
        return
    parts = value if given[0] == "turns" else [value]
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise ValueError(f'"{given[0]}" is not text')
    yield from parts
