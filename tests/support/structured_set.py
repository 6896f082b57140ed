"""The set of schemas, regexes and grammars, and whether a text is what its row says."""

import json
import re
from pathlib import Path

import jsonschema
import numpy as np

from specbuild.runtime import StructuredOutputs

SET = Path(__file__).resolve().parents[1] / "data" / "structured.jsonl"


def rows(path=SET):
    """Each with a name, and one of json, regex and grammar."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def outputs(row):
    return StructuredOutputs(**{kind: value for kind, value in row.items() if kind != "name"})


def check(row, text):
    """Raise ValueError or jsonschema's ValidationError for a whole text that is not what was asked for."""
    if "json" in row:
        jsonschema.validate(json.loads(text), row["json"], format_checker=jsonschema.FormatChecker())
    if "regex" in row and not re.fullmatch(row["regex"], text):
        raise ValueError(f"{text!r} does not match {row['regex']!r}")


def check_tokens(constraint, tokens, vocab_size):
    """Raise ValueError where a token is not what a new matcher allows."""
    matcher = constraint.matcher(vocab_size)
    for place, token in enumerate(tokens):
        mask = matcher.mask(())
        if mask is None or not mask[token // 32] >> np.uint32(token % 32) & 1:
            raise ValueError(f"token {place}, {token}, is not legal")
        matcher.emit(token)
