"""Hostile chat templates: what takes time, memory or the stack without bound is that prompt's error, and soon."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Any

import pytest

from specbuild.runtime.errors import PromptError
from specbuild.runtime.requests.chat import MAX_TEMPLATE, Chat, ChatTemplate

LIMIT = 60  # seconds for all of them, after which one hangs
USER = {"role": "user", "content": "hi"}
LOOP, END = "{% for i in range(100000) %}", "{% endfor %}"
GROWING = "{%% set ns = namespace(s=%s, t=%s) %%}{%% for i in range(%d) %%}{%% set ns.s = %s %%}{%% endfor %%}%s"


def growing(start: str, step: str, last: str = "{{ ns.s | length }}", rounds: int = 60) -> str:
    """A template that makes a value of itself again and again."""
    return GROWING % (start, start, rounds, step, last)


RENDERED = {
    "range": "{% for i in range(10 ** 9) %}x{% endfor %}",
    "nested loops": LOOP * 3 + "x" + END * 3,
    "nested empty loops": LOOP * 3 + END * 3,
    "a loop in a loop's condition": "{% for i in range(100000) if range(100000) | sum == 3 %}{% endfor %}",
    "loops that keep nothing": "{% for i in range(100000) if false %}{% endfor %}" * 50,
    "a recursive loop": "{% for i in range(9) recursive %}{{ loop(range(9)) }}{{ loop(range(9)) }}{% endfor %}",
    "a large body": LOOP * 2 + "{% if a %}{% endif %}" * 2000 + END * 2,
    "text in a loop": LOOP + "x" * 60000 + END,
    "lipsum": "{{ lipsum(n=10 ** 6) }}",
    "a printf width": "{{ '%1000000000d' % 1 }}",
    "a printf width from the arguments": "{{ '%*d' % (10 ** 9, 1) }}",
    "a printf precision": "{{ '%.1000000000f' % 1.0 }}",
    "the format filter": "{{ '%1000000000d' | format(1) }}",
    "names of printf": "{{ ('%(' * 500000) % {} }}",
    "str.format": "{{ '{:>1000000000}'.format(1) }}",
    "str.format with a computed width": "{{ '{:>{w}}'.format(1, w=10 ** 9) }}",
    "str.format of one text often": "{{ ('{0}' * 1000).format('a' * 100000) }}",
    "str.format_map": "{{ '{a:>1000000000}'.format_map({'a': 1}) }}",
    "a text times a number": "{{ 'a' * 10 ** 10 }}",
    "a list times a number": "{{ ([0] * 10 ** 10) | length }}",
    "center": "{{ 'a' | center(10 ** 10) }}",
    "center of a block": "{% filter center(10 ** 10) %}x{% endfilter %}",
    "str.center": "{{ 'a'.center(10 ** 10) }}",
    "str.ljust": "{{ 'a'.ljust(10 ** 10) }}",
    "str.zfill": "{{ '1'.zfill(10 ** 10) }}",
    "str.expandtabs": "{{ '\\t'.expandtabs(10 ** 10) }}",
    "indent": "{{ 'a\\nb' | indent(10 ** 10) }}",
    "doubling by +": growing("'a'", "ns.s + ns.s"),
    "doubling by ~": growing("'a'", "ns.s ~ ns.s"),
    "doubling by join": growing("'a'", "[ns.s, ns.s] | join"),
    "doubling by str.join": growing("'ab'", "ns.s.join(['a', 'b', 'c'])"),
    "doubling by replace": growing("'ab'", "ns.s.replace('a', ns.s)"),
    "doubling by a block": growing("'a'", "ns.s", "{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}").replace(
        "{% set ns.s = ns.s %}", "{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}"
    ),
    "doubling a list": growing("[1]", "ns.s + ns.s"),
    "lists of itself, printed": growing("[1]", "[ns.s, ns.s]", "{{ ns.s }}"),
    "dicts of itself, as JSON": growing("[1]", "{'a': ns.s, 'b': ns.s}", "{{ ns.s | tojson }}"),
    "lists of itself, compared": growing("[1]", "[ns.s, ns.s]", "{{ ns.s == ns.t }}"),
    "lists of itself, as an error": growing("[1]", "[ns.s, ns.s]", "{{ raise_exception(ns.s) }}"),
    "tuples of itself, as a key": growing("(1,)", "(ns.s, ns.s)", "{{ {ns.s: 1} | length }}"),
    "long tuples of long tuples, as a key": growing("(1,)", "(ns.s,) * 100", "{{ {ns.s: 1} | length }}", 10),
    "a deep tuple, as a key": growing("(1,)", "(ns.s,)", "{{ {ns.s: 1} | length }}", 100000),
    "a deep tuple, looked up": growing("(1,)", "(ns.s,)", "{{ messages[0].get(ns.s) }}", 100000),
    "a deep list of batches": growing("[1]", "ns.s | batch(1) | list", "{{ ns.s }}", 100000),
    "a deep dict": growing("1", "dict(a=ns.s)", "{{ ns.s }}", 100000),
    "a namespace in itself": "{% set n = namespace() %}{% set n.a = [n, n] %}{{ [n.a] | tojson }}",
    "a tower of powers": "{{ 10 ** (10 ** 10) }}",
    "squares": growing("3", "ns.s * ns.s", "{{ ns.s % 7 }}"),
    "a number of many digits": "{{ ('f' * 10000000) | int(base=16) % 7 }}",
    "round": "{{ 1.5 | round(10 ** 9, 'floor') }}",
    "tojson indents": "{{ [1] | tojson(indent=10 ** 9) }}",
    "tojson separates": "{{ ([1] * 9000) | tojson(separators=('a' * 90000, 'b')) }}",
    "a macro in itself": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(1) }}",
    "a macro twice in itself": "{% macro m(n) %}{% if n %}"
    + "{{ m(n - 1) }}" * 2
    + "{% endif %}{% endmacro %}{{ m(60) }}",
    "blocks in each other": "{% block a %}{{ self.b() }}{% endblock %}{% block b %}{{ self.a() }}{% endblock %}",
    "sum": LOOP + "{{ range(100000) | sum }}" + END,
    "sum of lists": "{{ (([[1] * 100] * 100000) | sum(start=[])) | length }}",
    "many lists kept": growing("[]", "ns.s + [range(10000) | list]", "", 100000),
    "batch": "{{ [1] | batch(10 ** 9, 0) | list }}",
    "slice": "{{ [1] | slice(10 ** 9, 0) | list }}",
    "strftime": "{{ strftime_now('%999999d' * 100000) }}",
    "cycler": LOOP + "{{ cycler(*range(100000)).next() }}" + END,
    "loop.changed": LOOP + "{{ loop.changed(range(100000) | list) }}" + END,
    "in a lazy list": LOOP + "{% if 'a' in range(100000) | select %}{% endif %}" + END,
    "in a range": LOOP + "{% if 'a' in range(100000) %}{% endif %}" + END,
    "in a text": "{% set s = 'a' * 1000000 %}" + LOOP + "{% if s + 'b' in s %}{% endif %}" + END,
    "long keys": "{% set t = (1,) * 100000 %}" + LOOP + "{% set d = {t: 1} %}" + END,
    "copies": "{% set t = [1] * 100000 %}" + LOOP + "{% set d = t[:] %}" + END,
    "sort": "{% set t = range(100000) | list %}" + LOOP + "{% set d = t | sort %}" + END,
    "a long attribute": "{{ (messages * 50000) | map(attribute='a.' * 100000) | list }}",
    "escapes": "{{ ('<' * 9000000) | e | e | e | e }}",
    "a punycode": "{{ ('ü' * 90000).encode('punycode') }}",
    "int.to_bytes": "{{ (1).to_bytes(10 ** 9, 'big') }}",
    "dict.fromkeys": "{{ {}.fromkeys(range(100000)) }}",
    "str.translate": "{{ ('a' * 9000).translate({97: 'b' * 90000}) }}",
    "striptags": "{{ ('<!---->' * 100000) | striptags }}",
    "urlize": "{{ ('http://a.' * 100000) | urlize }}",
    "a budget of its own": "{% set x = [-(10 ** 15)] | map(' tick') | list %}" + LOOP * 3 + END * 3,
    "include": "{% include 'x' %}",
}
COMPILED = {
    "too long": "x" * (MAX_TEMPLATE + 1),
    "10 MB": "{{ x }}" * 1_500_000,
    "too many parts": "{{a~a}}" * 9000,
    "nested blocks": "".join(f"{{% for i{i} in [1] %}}" for i in range(30)) + END * 30,
    "nested ifs": "{% if a %}" * 2000 + "{% endif %}" * 2000,
    "parentheses": "{{ " + "(" * 30000 + "1" + ")" * 30000 + " }}",
    "a long sum": "{{ " + "+".join(["1"] * 9000) + " }}",
    "not": "{{ " + "not " * 15000 + "1 }}",
    "filters": "{{ a" + "|e" * 9000 + " }}",
    "elif": "{% if a %}" + "{% elif a %}" * 3000 + "{% endif %}",
    "a long number": "{{ " + "1" * 60000 + " }}",
    "a long hexadecimal number": "{{ 0x" + "f" * 60000 + " }}",
    "an unknown filter": "{{ 1 | nonesuch }}",
    "an unknown test": "{{ 1 is nonesuch }}",
    "an open string": "{{ '" + "\\" * 60000,
    "an open comment": "{#" * 30000,
}
CHILD = """
import contextlib, json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
from specbuild.runtime.errors import PromptError
from specbuild.runtime.requests.chat import Chat, ChatTemplate
with contextlib.suppress(ImportError):
    from specbuild.runtime.requests import template_budget
    template_budget.WORK = 2**20  # each then ends sixteen times as soon
for name, source in json.load(sys.stdin).items():
    try:
        said = f"text of {len(ChatTemplate(source, {}).render(Chat([{'role': 'user', 'content': 'hi'}])))}"
    except PromptError as error:
        said = f"refused: {error}"
    print(json.dumps([name, said]), flush=True)
"""


def attacked(sources: dict[str, str]) -> dict[str, str]:
    """What came of each template, in a process that may hang, crash or have no memory left."""
    command = [sys.executable, "-c", CHILD]
    try:
        done = subprocess.run(command, input=json.dumps(sources), capture_output=True, text=True, timeout=LIMIT)
        out = done.stdout
    except subprocess.TimeoutExpired as error:
        out = (error.stdout or b"").decode()
    return dict(json.loads(line) for line in out.splitlines())


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return attacked(RENDERED | COMPILED)


@pytest.mark.parametrize("name", RENDERED)
def test_a_rendering_is_bounded(outcomes: dict[str, str], name: str) -> None:
    said = outcomes.get(name, "no end")
    assert said.startswith("refused: the chat template refuses") or "does not parse" in said, said
    assert "\n" not in said
    assert len(said) < 500


@pytest.mark.parametrize("name", COMPILED)
def test_a_template_that_does_not_compile_is_the_prompts_error(outcomes: dict[str, str], name: str) -> None:
    said = outcomes.get(name, "no end")
    assert said.startswith("refused: the bundle's chat template "), said
    assert "give the prompt as text" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    "source", [LOOP * 3 + END * 3, RENDERED["a macro twice in itself"], RENDERED["lists of itself, printed"]]
)
def test_the_whole_budget_is_spent_soon(source: str) -> None:
    """In any thread, with no signal; the join's limit is for a hang, not a bar."""
    said: list[str] = []

    def render() -> None:
        with pytest.raises(PromptError) as caught:
            ChatTemplate(source, {}).render(Chat([USER]))
        said.append(str(caught.value))

    thread = threading.Thread(target=render, daemon=True)
    thread.start()
    thread.join(30)
    assert said, "it hangs"


def test_a_refused_template_takes_no_other_with_it() -> None:
    """Not the next chat of the same template, nor a template that is rendered meanwhile."""
    template = ChatTemplate(
        "{{ messages[0].content }}{% if messages|length > 1 %}" + LOOP * 3 + END * 3 + "{% endif %}", {}
    )
    with pytest.raises(PromptError, match="too much work"):
        template.render(Chat([USER, USER]))
    assert template.render(Chat([USER])) == "hi"
    broken = ChatTemplate("{{ 1 | nonesuch }}", {})
    for _ in range(2):
        with pytest.raises(PromptError, match=r"does not parse.*nonesuch"):
            broken.render(Chat([USER]))


@pytest.mark.parametrize("error", [MemoryError, RecursionError, GeneratorExit, BaseException, OverflowError])
def test_whatever_jinja_raises_is_the_prompts_error(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    import jinja2

    def fail(*_: Any, **__: Any) -> None:
        raise error

    template = ChatTemplate("x", {})
    assert template.render(Chat([USER])) == "x"
    monkeypatch.setattr(jinja2.Template, "render", fail)
    with pytest.raises(PromptError, match=f"refuses these messages: {error.__name__}"):
        template.render(Chat([USER]))
    monkeypatch.setattr(jinja2.Environment, "parse", fail)
    with pytest.raises(PromptError, match=f"does not parse .*{error.__name__}"):
        ChatTemplate("x", {}).render(Chat([USER]))


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_none_of_them(monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]) -> None:
    import jinja2

    def fail(*_: Any, **__: Any) -> None:
        raise stop

    monkeypatch.setattr(jinja2.Template, "render", fail)
    with pytest.raises(stop):
        ChatTemplate("x", {}).render(Chat([USER]))
