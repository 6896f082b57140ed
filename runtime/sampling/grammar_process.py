"""The program of the process that compiles grammars: one that takes too long or too much memory ends only this process.

Standard input is a line of JSON with the vocabulary and the limits, then a line per structured output; standard output
answers each with a line of JSON.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import lark, schemas
from .spelling import Spelling
from .vocabulary import Vocabulary

FUEL = {  # limits of one matcher: about 100 MB, and 10 ms per mask; messages quote no schema
    "max_lexer_states": 50_000,
    "step_max_items": 200_000,
    "verbose_errors": False,
}


def grammar_of(outputs: dict[str, Any]) -> str:
    """Return the grammar, as llguidance reads it, for the fields of a `StructuredOutputs`; raises ValueError."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    options: Any = {"whitespace_flexible": bool(outputs.get("any_whitespace")), "lenient": False}
    if "regex" in outputs:
        return str(LLMatcher.grammar_from_regex(outputs["regex"]))
    if "choice" in outputs:
        texts = (json.dumps(text, ensure_ascii=False) for text in outputs["choice"])
        return f"start: {' | '.join(texts)}"
    if "grammar" in outputs:
        return lark.unforced(str(any_to_lark(outputs["grammar"])))
    if "structural_tag" in outputs:
        return _tags(json.loads(outputs["structural_tag"]), options)
    return str(LLMatcher.grammar_from_json_schema(outputs.get("json", '{"type": "object"}'), overrides=options))


def _tags(tag: dict[str, Any], options: Any) -> str:
    """Return a grammar of free text in which triggers begin structures, by the first trigger that fits."""
    rules, names = list[str](), list[str]()
    for number, each in enumerate(tag["structures"]):
        trigger = next(one for one in tag["triggers"] if each["begin"].startswith(one))
        schema = each.get("schema", True)
        given = {**(schema if isinstance(schema, dict) else {}), "x-guidance": options}
        parts = [each["begin"][len(trigger) :], each["end"]]
        begin, end = (json.dumps(part, ensure_ascii=False) if part else "" for part in parts)
        names.append(f"tag_{number}")
        rules.append(f"open_{number}[lazy]: TEXT {json.dumps(trigger, ensure_ascii=False)}")
        rules.append(f"tag_{number}: open_{number} {begin} %json {json.dumps(given)} {end}")
    return "\n".join(
        ["%llguidance {}", f"start: ({' | '.join(names)})* rest", "rest: TEXT", "TEXT: /(.|\\n)*/", *rules]
    )


def compiled(tokenizer: Any, grammar: str, fuel: Mapping[str, Any] = FUEL) -> Any:
    """Return a matcher of a grammar; raise ValueError if it cannot be compiled."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**fuel))
    if matcher.is_error():
        raise ValueError(error_of(matcher))
    return matcher


def check_beginning(matcher: Any, vocab_size: int) -> None:
    """Raise ValueError if a text comes to nothing where it begins, or where the tokens that it must begin with end.

    Args:
        matcher: A matcher that has consumed nothing; it consumes those tokens.
        vocab_size: Number of tokens of the model.
    """
    forced = matcher.compute_ff_tokens()
    while forced and max(forced) < vocab_size and matcher.try_consume_tokens(forced) == len(forced):
        forced = [] if matcher.is_stopped() else matcher.compute_ff_tokens()
    legal = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(error_of(matcher))
    if not int.from_bytes(legal, "little") & ((1 << vocab_size) - 1):
        raise ValueError("this model's tokens cannot write it")


def error_of(matcher: Any) -> str:
    """Return why a matcher can go no further."""
    error: str = matcher.get_error().replace("<non-verbose/>", "").strip()
    return "it allows no text" if error.startswith("NoExtension") else error


class Tokenizers:
    """llguidance's tokenizers of a vocabulary, each made when it is first needed; safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary, self._made, self._lock = vocabulary, dict[bool, Any](), threading.Lock()

    def tokenizer(self, outputs: Mapping[str, Any]) -> Any:
        """Return the tokenizer for the fields of a `StructuredOutputs`; raises errors of llguidance and tokenizers."""
        from llguidance import LLTokenizer

        names = lark.names_tokens(outputs.get("grammar", ""))
        with self._lock:
            if names not in self._made:
                spelling = Spelling(self._vocabulary, names)
                self._made[names] = LLTokenizer(spelling, eos_token=list(self._vocabulary.ends))
            return self._made[names]


def is_finite(outputs: Mapping[str, Any], grammar: str, tokenizer: Any) -> bool:
    """Return whether a structured output may have a finite text; False only if it surely has none.

    Args:
        outputs: The fields of a `StructuredOutputs`.
        grammar: Its grammar, as llguidance reads it.
        tokenizer: llguidance's tokenizer.
    """
    if "json" in outputs:
        return schemas.is_finite(json.loads(outputs["json"]))
    if "structural_tag" in outputs:
        structures = json.loads(outputs["structural_tag"])["structures"]
        return all(schemas.is_finite(each.get("schema", True)) for each in structures)

    def accepts_nothing(text: str) -> bool | None:
        try:
            return bool(compiled(tokenizer, text).is_accepting())
        except ValueError:
            return None

    return "grammar" not in outputs or lark.is_finite(grammar, accepts_nothing)


def _grammar(outputs: dict[str, Any], vocabulary: Vocabulary, tokenizer: Any) -> str:
    """Return the grammar of a structured output, which compiles and may have a text; raises ValueError."""
    grammar = grammar_of(outputs)
    matcher = compiled(tokenizer, grammar)
    if not is_finite(outputs, grammar, tokenizer):
        raise ValueError("no text of it ever ends: give its recursion an end")
    check_beginning(matcher, len(vocabulary.tokens))
    return grammar


def _answer(vocabulary: Vocabulary, tokenizers: Tokenizers, line: str) -> dict[str, Any]:
    before, outputs = _memory(1), json.loads(line)
    try:
        grammar = _grammar(outputs, vocabulary, tokenizers.tokenizer(outputs))
        return {"grammar": grammar, "bytes": max(_memory(1) - before, 0)}
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a Rust panic is not an Exception
        return {"error": str(error) or type(error).__name__}


def _memory(field: int) -> int:
    """Return bytes of this process, by field of /proc/self/statm: 0 is address space, 1 is resident memory."""
    return int(Path("/proc/self/statm").read_text().split()[field]) * resource.getpagesize()


def main(read: Callable[[], str] = sys.stdin.readline, write: Callable[[str], object] = sys.stdout.write) -> None:
    """Answer lines until `read` returns none; `read` and `write` are standard input's and output's."""
    given = json.loads(read())
    vocabulary = Vocabulary.from_dict(given["vocabulary"])
    tokenizers = Tokenizers(vocabulary)
    tokenizers.tokenizer({})
    limit = _memory(0) + given["bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    write("{}\n")
    sys.stdout.flush()
    while line := read():
        signal.alarm(given["seconds"])  # ends this process if its parent is gone and cannot kill it
        write(json.dumps(_answer(vocabulary, tokenizers, line)) + "\n")
        sys.stdout.flush()
        signal.alarm(0)
