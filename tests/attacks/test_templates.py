"""Hostile chat templates: what takes time, memory or the stack without bound is that prompt's error, and soon."""

import json
import subprocess
import sys
import threading

import jinja2
import pytest
from campaign.templates import REFUSED

from specbuild.runtime.errors import PromptError
from specbuild.runtime.requests.chat import MAX_TEMPLATE, Chat, ChatTemplate

LIMIT = 60  # seconds for all of them, after which one hangs
USER = {"role": "user", "content": "hi"}
LOOP, END = "{% for i in range(100000) %}", "{% endfor %}"
ENDLESS = LOOP * 3 + END * 3
RENDERED = (
    *REFUSED,
    *("{% for i in range(100000) if false %}{% endfor %}" * 50, LOOP + "x" * 60000 + END),
    LOOP * 2 + "{% if a %}{% endif %}" * 2000 + END * 2,
)
COMPILED = (
    *("x" * (MAX_TEMPLATE + 1), "{{ x }}" * 1_500_000, "{{a~a}}" * 9000, "{% if a %}" * 2000 + "{% endif %}" * 2000),
    *("{{ " + "(" * 30000 + "1" + ")" * 30000 + " }}", "{{ " + "+".join(["1"] * 9000) + " }}", "{#" * 30000),
    *("{{ " + "not " * 15000 + "1 }}", "{{ a" + "|e" * 9000 + " }}", "{{ 1 | nonesuch }}", "{{ 1 is nonesuch }}"),
    *("{% if a %}" + "{% elif a %}" * 3000 + "{% endif %}", "{{ " + "1" * 60000 + " }}", "{{ '" + "\\" * 60000),
    *("{{ 0x" + "f" * 60000 + " }}", "".join(f"{{% for i{i} in [1] %}}" for i in range(30)) + END * 30),
)
CHILD = """
import contextlib, json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
from specbuild.runtime.errors import PromptError
from specbuild.runtime.requests.chat import Chat, ChatTemplate
with contextlib.suppress(ImportError):
    from specbuild.runtime.requests import template_budget
    template_budget.WORK = 2**20  # each then ends sixteen times as soon
for source in json.load(sys.stdin):
    try:
        said = f"text of {len(ChatTemplate(source, {}).render(Chat([{'role': 'user', 'content': 'hi'}])))}"
    except PromptError as error:
        said = f"refused: {error}"
    print(json.dumps(said), flush=True)
"""


@pytest.fixture(scope="module")
def outcomes():
    """What came of each template, in a process that may hang, crash or have no memory left."""
    command, sources = [sys.executable, "-c", CHILD], json.dumps(RENDERED + COMPILED)
    try:
        out = subprocess.run(command, input=sources, capture_output=True, text=True, timeout=LIMIT).stdout
    except subprocess.TimeoutExpired as error:
        out = (error.stdout or b"").decode()
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.parametrize(("place", "source"), [*enumerate(RENDERED + COMPILED)], ids=lambda value: f"{value!r:.40}")
def test_a_template_without_bounds_is_the_prompts_error(outcomes, place, source):
    said = outcomes[place] if place < len(outcomes) else "no end"
    assert said.startswith("refused: "), said
    assert "\n" not in said
    assert len(said) < 500
    if source in COMPILED:
        assert "give the prompt as text" in said


def render(source, *messages):
    return ChatTemplate(source, {}).render(Chat(messages or [USER]))


@pytest.mark.slow
@pytest.mark.parametrize("source", [ENDLESS, *(each for each in REFUSED if "m(n - 1)" in each)])
def test_the_whole_budget_is_spent_soon(source):
    """In any thread, with no signal; the join's limit is for a hang, not a bar."""
    said = []

    def run():
        with pytest.raises(PromptError) as caught:
            render(source)
        said.append(str(caught.value))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert said, "it hangs"


@pytest.mark.parametrize("error", [MemoryError, RecursionError, GeneratorExit, BaseException, KeyboardInterrupt])
def test_whatever_jinja_raises_is_the_prompts_error_but_for_an_interrupt(monkeypatch, error):
    def fail(*_, **__):
        raise error

    assert render("x") == "x"
    stops = error is KeyboardInterrupt
    for kind, name in ((jinja2.Template, "render"), (jinja2.Environment, "parse")):
        monkeypatch.setattr(kind, name, fail)
        with pytest.raises(error if stops else PromptError, match="" if stops else error.__name__):
            render("x")
