"""The program of the process that compiles grammars: one that takes too long or too much memory ends only this process.

It is run by its path and imports nothing from specbuild. Standard input is a line of JSON with the tokenizer and the
limits, then a line per structured output; standard output answers each with a line of JSON.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
        return str(any_to_lark(outputs["grammar"]))
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


def compiled(tokenizer: Any, grammar: str) -> Any:
    """Return a matcher of a grammar; raise ValueError if it cannot be compiled or allows no text."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**FUEL))
    mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error():
        told = matcher.get_error()
        raise ValueError("it allows no text" if told.startswith("NoExtension") else told)
    if not any(mask):
        raise ValueError("it allows no text")
    return matcher


def tokenizer_of(text: str, vocab_size: int, ends: list[int]) -> Any:
    """Return llguidance's tokenizer for a tokenizer.json's text; raises ValueError or other errors of llguidance."""
    from llguidance import LLTokenizer

    return LLTokenizer(text, n_vocab=vocab_size, eos_token=ends)


def _answer(tokenizer: Any, line: str) -> dict[str, Any]:
    before = _memory(1)
    try:
        grammar = grammar_of(json.loads(line))
        matcher = compiled(tokenizer, grammar)
        return {"grammar": grammar, "bytes": max(_memory(1) - before, 0) * bool(matcher)}
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
    sys.path[:] = given["path"]
    tokenizer = tokenizer_of(given["tokenizer"], given["vocab_size"], given["ends"])
    limit = _memory(0) + given["bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    write("{}\n")
    sys.stdout.flush()
    while line := read():
        signal.alarm(given["seconds"])  # ends this process if its parent is gone and cannot kill it
        write(json.dumps(_answer(tokenizer, line)) + "\n")
        sys.stdout.flush()
        signal.alarm(0)


if __name__ == "__main__":
    main()
