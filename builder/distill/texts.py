"""Reads the files and folders of text to learn from, as token ids."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from specbuild.builder.frontend.checkpoint import Checkpoint, encode
from specbuild.builder.quantize.texts import lines
from specbuild.runtime.errors import OptionError


def read(paths: Sequence[Path], target: Checkpoint) -> list[list[int]]:
    """Return the token ids of each text, with EOS at its end.

    Folders are searched recursively; each line of a .jsonl file is read as `quantize.texts.lines` does, any other file
    is one text. Raises OptionError if a path cannot be read or no text is found.
    """
    texts = [text for path in paths for text in _texts(path, target) if text.strip()]
    if not texts and paths:
        raise OptionError(f"{', '.join(map(str, paths))} has no text in it: give --text files with some, or drop it")
    ends = target.eos_token_ids()
    return [[*ids, *([] if ids[-1:] == ends[:1] else ends[:1])] for ids in encode(target.tokenizer, texts)]


def _texts(path: Path, target: Checkpoint) -> Iterator[str]:
    if not path.exists():
        raise OptionError(f"{path} does not exist: give --text a file or a folder")
    if not path.is_dir():
        try:
            yield from _file(path, target)
        except UnicodeDecodeError as error:
            raise OptionError(f"{path} is not UTF-8 ({error.reason}): give --text files of text") from None
        return
    visible = (file for file in path.rglob("*") if not any(p.startswith(".") for p in file.relative_to(path).parts))
    files = sorted(file for file in visible if file.is_file())
    unread = list[Path]()
    for file in files:
        try:
            yield from _file(file, target)
        except UnicodeDecodeError:
            unread.append(file)
    if unread:
        logging.getLogger("specbuild").warning(
            f"{len(unread)} of {len(files)} files in {path} are not UTF-8 and left out, like {unread[0].name}"
        )


def _file(path: Path, target: Checkpoint) -> Iterator[str]:
    """Yield a file's texts. Raises OptionError if it cannot be read, and UnicodeDecodeError if it is not UTF-8."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{path} cannot be read ({error.strerror}): give --text another file") from None
    if path.suffix == ".jsonl":
        yield from lines(path, target.tokenizer)
    else:
        yield text
