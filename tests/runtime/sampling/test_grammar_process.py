"""The process that compiles, in this process: one line of JSON for each."""

from __future__ import annotations

import json
import resource
import signal
from typing import Any

import pytest
from small_grammars import vocabulary

from specbuild.runtime.sampling import grammar_process


def answers(monkeypatch: pytest.MonkeyPatch, *asked: dict[str, Any]) -> list[Any]:
    limits, alarms, told = list[Any](), list[int](), list[str]()
    monkeypatch.setattr(resource, "setrlimit", lambda *given: limits.append(given))
    monkeypatch.setattr(signal, "alarm", alarms.append)
    first = {"vocabulary": vocabulary().to_dict()}
    lines = iter([first | {"bytes": 1 << 20, "seconds": 3}, *asked])
    grammar_process.main(lambda: json.dumps(line) if (line := next(lines, None)) is not None else "", told.append)
    assert [what for what, _ in limits] == [resource.RLIMIT_AS, resource.RLIMIT_CORE]
    assert alarms == [3, 0] * len(asked)
    assert told[0] == "{}\n"
    return [json.loads(line) for line in told[1:]]


def test_each_gets_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    found = answers(monkeypatch, {"regex": "a+"}, {"regex": "a("}, {"json": '{"not": {}}'}, {"grammar": 'root ::= "a"'})
    assert found[0]["grammar"]
    assert found[0]["bytes"] >= 0
    assert "unclosed group" in found[1]["error"]
    assert found[2] == {"error": 'Unimplemented keys: ["not"]'}
    assert "start" in found[3]["grammar"]


@pytest.mark.parametrize(
    "outputs",
    [{"json": '{"$ref": "#"}'}, {"json": '{"enum": []}'}, {"regex": "[^\\s\\S]"}, {"grammar": "start: start"}],
)
def test_what_allows_no_text_is_refused(monkeypatch: pytest.MonkeyPatch, outputs: dict[str, str]) -> None:
    (found,) = answers(monkeypatch, outputs)
    assert found["error"]


def test_a_tag_begins_a_structure_in_free_text() -> None:
    tag = {"structures": [{"begin": "<f=x>", "schema": {"type": "object"}, "end": "</f>"}], "triggers": ["<f"]}
    made = grammar_process.grammar_of({"structural_tag": json.dumps(tag)})
    assert "lazy" in made
    assert grammar_process.compiled(grammar_process.Tokenizers(vocabulary()).tokenizer({}), made)
