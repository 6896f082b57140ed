"""A process compiles; what takes too long or too much is killed with it, and the next one has another."""

import json
import os
import resource
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import psutil
import pytest
from small_grammars import vocabulary

from specbuild.runtime.errors import ExecutionError, OptionError
from specbuild.runtime.sampling import grammar_process
from specbuild.runtime.sampling.grammar_compiler import Compiler
from specbuild.runtime.sampling.structured import StructuredOutputs

SOUND = StructuredOutputs(regex="a{3}")


ENDLESS = {"begin": "a", "schema": {"allOf": [{"$ref": "#"}]}, "end": "b"}
WRONG = [
    ({"json": {"if": {}, "then": {}}}, 'Unimplemented keys: ["if", "then"]: leave it out'),
    ({"json": {"type": "string", "format": "colour"}}, "Unknown format: colour: leave it out"),
    ({"regex": "a("}, "unclosed group"),
    *[({"json": wrong}, "") for wrong in ({"$ref": "#"}, {"enum": []})],  # these allow no text
    *[(wrong, "") for wrong in ({"regex": "[^\\s\\S]"}, {"grammar": "start: start"})],
    ({"choice": ["\n"]}, "this model's tokens cannot write it"),
    ({"structural_tag": {"structures": [ENDLESS], "triggers": ["a"]}}, "no text of it ever ends"),
]


def test_one_process_for_all_and_one_line_for_what_is_wrong():
    compiler = Compiler(vocabulary)
    assert running() == []
    assert compiler.check(SOUND)[0]
    (first,) = running()
    assert os.getpriority(os.PRIO_PROCESS, first) >= os.getpriority(os.PRIO_PROCESS, 0)
    assert "start" in compiler.check(StructuredOutputs(grammar='root ::= "a"'))[0]
    free = {"structures": [{"begin": "a", "end": "b"}], "triggers": ["a"]}
    assert compiler.check(StructuredOutputs(structural_tag=free))[0], "what has no schema is any JSON"
    for fields, said in WRONG:
        with pytest.raises(OptionError, match=r"^structured_outputs cannot be used: .") as caught:
            compiler.check(StructuredOutputs(**fields))
        assert said in str(caught.value)
    assert running() == [first]
    compiler.close()
    assert running() == []


def test_each_line_has_its_answer(monkeypatch):
    """In this process, and so without the limits."""
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(signal, "alarm", lambda _: None)
    asked = [SOUND, *(StructuredOutputs(**fields) for fields, _ in WRONG)]
    first = {"vocabulary": vocabulary().to_dict(), "bytes": 1 << 20, "seconds": 3}
    lines, told = iter([first, *(each.to_dict() for each in asked)]), list[str]()
    grammar_process.main(lambda: json.dumps(line) if (line := next(lines, None)) else "", told.append)
    ready, made, *refused = map(json.loads, told)
    assert (ready, made["bytes"] >= 0) == ({}, True)
    for (_, said), found in zip(WRONG, refused, strict=True):
        assert said.removesuffix(": leave it out") in found["error"]


@pytest.mark.slow
def test_what_takes_too_long_is_killed_and_others_go_on():
    compiler = Compiler(vocabulary, seconds=0.3)
    compiler.check(SOUND)
    (first,) = running()
    os.kill(first, signal.SIGSTOP)
    with pytest.raises(OptionError, match=r"takes more than 0\.3 s or 512 MiB to compile"):
        compiler.check(StructuredOutputs(regex="b"))
    assert compiler.check(SOUND)[0]
    assert first not in running()
    del compiler
    assert running() == [], "whoever drops it leaves no process"


@pytest.mark.slow
def test_a_grammar_does_not_wait_for_slow_ones():
    compiler = Compiler(vocabulary, seconds=60.0)
    compiler.check(SOUND)
    with ThreadPoolExecutor() as pool:
        slow = list[Future]()
        for _ in range(3):
            (idle,) = set(running()) - stopped()
            os.kill(idle, signal.SIGSTOP)
            slow.append(pool.submit(compiler.check, SOUND))
            assert compiler.check(StructuredOutputs(regex="b"))[0]
        assert not any(each.done() for each in slow)
        for each in stopped():
            os.kill(each, signal.SIGCONT)
        assert all(each.result(30)[0] for each in slow)
    assert len(running()) == 2, "two stay for later grammars"
    compiler.close()
    assert running() == []


def test_what_takes_too_much_memory_is_refused():
    """4,096 long choices, in 4 MiB."""
    compiler = Compiler(vocabulary, memory=4 << 20)
    long = StructuredOutputs(choice=[f"{number}{'abcd' * 14}" for number in range(4096)])
    with pytest.raises(OptionError):
        compiler.check(long)
    assert compiler.check(SOUND)[0]
    compiler.close()


def test_a_tokenizer_that_is_none():
    compiler = Compiler(lambda: replace(vocabulary(), tokenizer="{}"))
    with pytest.raises(ExecutionError, match="did not start"):
        compiler.check(SOUND)


HOSTILE = [
    {"regex": "(a{1,1000}){1,1000}"},
    {"regex": "((a{0,100}){0,100}){0,100}"},
    {"regex": "[ab]*a[ab]{2000}"},
    {"regex": "(a?){5000}a{5000}"},
    {"regex": "(" * 5000 + "a" + ")" * 5000},
    {"regex": "a{1000000000}"},
    {"grammar": "start: x\nx: x x x x | start*"},
    {"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000},
    {"json": {"$ref": "#"}},
    {"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    {"json": {"allOf": [{"anyOf": [{"const": n * k} for n in range(20)]} for k in range(8)]}},
    {"json": {"type": "array", "minItems": 10**9}},
    {"json": {"type": "string", "pattern": "^(a|aa)+$", "maxLength": 10**9}},
    {"json": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(6000)}}},
]


@pytest.mark.nightly
@pytest.mark.parametrize("fields", HOSTILE)
def test_hostile_ones_are_taken_or_refused_in_time(fields):
    """Within the limit and the time to start another process, and the next one is served."""
    compiler, began = Compiler(vocabulary, seconds=2.0), time.monotonic()
    with suppress(OptionError):
        compiler.check(StructuredOutputs(**fields))
    assert time.monotonic() - began < 20
    assert compiler.check(SOUND)[0]
    compiler.close()


@pytest.mark.slow
def test_a_forked_child_does_not_wait_for_a_lock_that_nobody_gives_back():
    compiler = Compiler(vocabulary, seconds=1.0)
    compiler.check(SOUND)
    os.kill(running()[0], signal.SIGSTOP)
    with ThreadPoolExecutor() as pool:
        compiling = pool.submit(compiler.check, SOUND)
        time.sleep(0.2)
        child = os.fork()
        if child == 0:
            compiler.close()
            os._exit(7)
        assert not compiling.done()
        deadline = time.monotonic() + 20
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.01)
        assert os.waitstatus_to_exitcode(ended[1]) == 7
        with pytest.raises(OptionError):
            compiling.result()


def running():
    """The processes of all compilers."""
    found = psutil.Process().children()
    return [each.pid for each in found if "grammar_process" in " ".join(each.cmdline())]


def stopped():
    """Those of them that are stopped."""
    return {each for each in running() if psutil.Process(each).status() == psutil.STATUS_STOPPED}
