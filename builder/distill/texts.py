"""Files and folders of text to learn from, as tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...runtime.errors import OptionError
from ..checkpoint import Checkpoint
from ..quantize.texts import lines


def read(paths: Sequence[Path], target: Checkpoint) -> list[list[int]]:
    """A list of tokens for each text, EOS at its end. Folders are walked; lines of a .jsonl are texts of their own.

    Raises OptionError.
    """
    texts = [text for path in paths for text in _texts(path, target) if text.strip()]
    if not texts and paths:
        raise OptionError(f"{', '.join(map(str, paths))} has no text in it: give --text files with some, or drop it")
    ends = target.eos_token_ids()
    found = target.tokenizer(texts)["input_ids"] if texts else []
    return [[*ids, *([] if ids[-1:] == ends[:1] else ends[:1])] for ids in found]


def _texts(path: Path, target: Checkpoint) -> Iterator[str]:
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and not _hidden(file.relative_to(path)))
        unread = [file for file in files if not _is_text(file)]
        if unread:
            logging.getLogger("specbuild").warning(
                f"{len(unread)} of {len(files)} files in {path} are not UTF-8 and left out, like {unread[0].name}"
            )
        for file in files:
            if file not in unread:
                yield from _file(file, target)
    elif path.exists():
        yield from _file(path, target)
    else:
        raise OptionError(f"{path} does not exist: give --text a file or a folder")


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _is_text(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _file(path: Path, target: Checkpoint) -> Iterator[str]:
    if path.suffix == ".jsonl":
        yield from lines(path, target.tokenizer)
        return
    try:
        yield path.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{path} cannot be read ({error.strerror}): give --text another file") from None
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is not UTF-8 ({error.reason}): give --text files of text") from None
