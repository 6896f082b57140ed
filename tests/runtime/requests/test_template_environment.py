"""The environment of chat templates: jinja2's results stay the same, and what they take is charged."""
# ruff: noqa: E501

from __future__ import annotations

from typing import Any

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specbuild.runtime.requests.template_budget import WORK, OverBudgetError, budget
from specbuild.runtime.requests.template_budget import _budget as current
from specbuild.runtime.requests.template_environment import MAX_NODES, compiled, environment, parsed

GIVEN: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi  you\nthere"}, {"role": "tool", "content": "<b>1</b>"}],
    "words": ["b", "a", "c", "a"],
    "n": 5,
    "empty": [],
}
SAME = [
    "{{ messages | map(attribute='role') | join(', ') }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{% if messages | selectattr('role', 'equalto', 'none') %}lazy{% endif %}",
    "{{ (messages | rejectattr('role', 'in', ['user']) | first).content }}",
    "{{ words | sort | unique | join }}{{ words | min }}{{ words | max }}{{ [1, 2.5] | sum }}",
    "{% for group in words | groupby('0') %}{{ group.grouper }}{{ group.list | length }}{% endfor %}",
    "{% for row in words | batch(3, '-') %}{{ row }}{% endfor %}{% for row in words | slice(2) %}{{ row }}{% endfor %}",
    "{% for m in messages if m.role != 'user' %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{% else %}none{% endfor %}",
    "{% for x in [1, [2, [3]]] recursive %}{% if x is number %}{{ x }}{% else %}({{ loop(x) }}){% endif %}{% endfor %}",
    "{{ messages[0].content.split()[-1].upper() }}{{ messages[0]['content'][3:] | trim | indent(2) }}",
    "{{ '%s-%03d' % ('a', 7) }}{{ '%5.1f' | format(2.25) }}{{ '{:>5}|{a!r}'.format(1, a='x') }}{{ '{x}'.format_map({'x': 1}) }}",
    "{{ n ** 2 - n // 2 % 3 + n / 2 * -1 }}{{ 'ab' * 3 }}{{ [0] * 2 + [1] }}{{ 2 ** -1 }}",
    "{{ n ~ 'a' ~ none ~ 1.5 ~ words }}{{ words == ['b'] }}{{ 'a' in words }}{{ 'role' not in messages[0] }}{{ 1 < n <= 5 }}",
    "{{ {'a': [1, (2, 3)], 'b': n} }}{{ dict(a=1) }}{{ messages[0].items() | list }}{{ messages[0].get('x', 'y') }}",
    "{% macro m(a, b='x') %}{{ a }}{{ b }}{{ caller() if caller }}{{ varargs }}{{ kwargs }}{% endmacro %}"
    "{{ m(1) }}{{ m(1, 2, 3, c=4) }}{% call m(5) %}body{% endcall %}",
    "{% set ns = namespace(a=1) %}{% for i in range(3) %}{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }}",
    "{% set x %}a{{ n }}b{% endset %}{{ x | replace('a', 'z') }}{% filter upper %}{{ x }}{% endfilter %}",
    "{{ cycler('a', 'b').next() }}{% set j = joiner('|') %}{{ j() }}{{ j() }}{{ 'x' if empty }}{{ empty | default('d', true) }}",
    "{% block a %}{{ n }}{% endblock %}{{ self.a() }}{{ missing }}{{ missing is defined }}{{ (messages | last).role }}",
    "{{ messages[1].content | e }}{{ '<' | safe }}{% autoescape true %}{{ '<' }}{{ '<' ~ n }}{% endautoescape %}",
    "{{ words | reverse | list }}{{ 3.7 | round | int }}{{ '12' | int + 1 }}{{ 'a b' | title | wordcount }}{{ 'abcdef' | truncate(4) }}",
    "{{ words[::-1] }}{{ words[1:][0] }}{{ 'a,b'.split(',') | join('+') }}{{ ','.join(words) }}{{ 'x'.center(5) }}{{ '1'.zfill(3) }}",
    "{{ messages | map('upper') | list | length }}{{ words | map('replace', 'a', 'o') | list }}{{ range(2, 5) | list }}",
    "{{ {'b': 1, 'a': 2} | dictsort }}{{ {'a': 1} | items | list }}{{ n is divisibleby 5 }}{{ 'a' is lower }}{{ [n, 3] | max }}",
]


def rendered(source: str) -> tuple[str, int]:
    """A text, and the work that it took."""
    made = environment()
    template = compiled(made, parsed(made, source))
    with budget(0):
        return template.render(GIVEN), WORK - current.get().left


@pytest.mark.parametrize("source", SAME)
def test_a_template_gives_what_jinja2s_sandbox_gives(source: str) -> None:
    theirs = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    text, work = rendered(source)
    assert text == theirs.from_string(source).render(GIVEN)
    assert work > 0


def test_work_is_the_same_each_time_and_grows_with_the_rounds() -> None:
    few, many = (f"{{% for i in range({rounds}) %}}{{{{ i + 1 }}}}{{% endfor %}}" for rounds in (10, 1000))
    assert rendered(few) == rendered(few)
    assert 20 * rendered(few)[1] < rendered(many)[1]


def test_nothing_is_computed_when_a_template_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    made = environment()
    compiled(made, parsed(made, "{{ 'a' | center(10 ** 10) }}{{ 'a' * 10 ** 10 }}{{ [1] | batch(10 ** 9) }}"))
    with pytest.raises(OverBudgetError, match="parts"):
        parsed(made, "{{ a }}" * MAX_NODES)


@pytest.mark.parametrize("name", ["pprint", "striptags", "urlize", "wordwrap"])
def test_filters_without_a_bound_are_left_out(name: str) -> None:
    with pytest.raises(jinja2.TemplateAssertionError, match=name):
        rendered("{{ 'a' | " + name + " }}")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ ('<{}>' | safe).format(1) }}", "marked as safe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ '{0.__class__.__mro__}'.format(1) }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ words.sort() }}", "unsafe"),
        ("{{ 'a'.encode() }}", "str.encode"),
    ],
)
def test_what_is_not_safe_is_refused(source: str, said: str) -> None:
    with pytest.raises((jinja2.exceptions.SecurityError, OverBudgetError), match=said):
        rendered(source)
