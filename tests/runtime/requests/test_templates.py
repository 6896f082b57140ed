"""Templates: jinja2's results stay the same, and what takes work without bound is refused before it runs."""
# ruff: noqa: E501

import json

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specbuild.runtime.errors import PromptError
from specbuild.runtime.requests.chat import Chat, ChatTemplate
from specbuild.runtime.requests.template_budget import budget
from specbuild.runtime.requests.template_environment import compiled, environment, parsed

GIVEN = {
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


DEEP = "{% set ns = namespace(a=[]) %}{% for i in range(200) %}{% set ns.a = [ns.a] %}{% endfor %}{{ ns.a | list }}"
DOUBLED = "{% set ns = namespace(a=[1]) %}{% for i in range(90) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a | string }}"


@pytest.mark.parametrize("source", SAME)
def test_a_template_gives_what_jinja2s_sandbox_gives(source):
    theirs = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    made = environment()
    template = compiled(made, parsed(made, source))
    with budget(0):
        assert template.render(GIVEN) == theirs.from_string(source).render(GIVEN)


@pytest.mark.parametrize("options", [{}, {"indent": 4}, {"sort_keys": True}, {"ensure_ascii": True}, {"indent": "\t"}])
def test_json_is_what_python_writes(options):
    value = {"b": ["é<", 1.5, None, True], "a": {}}
    called = ", ".join(f"{name}={given!r}" for name, given in options.items())
    made = ChatTemplate("{{ value | tojson(" + called + ") }}", {})
    chat = Chat([{"role": "user", "content": ""}], variables={"value": value})
    assert made.render(chat) == json.dumps(value, **{"ensure_ascii": False} | options)


@pytest.mark.slow(only=("source20-large|much work", "source32-parts"))
@pytest.mark.parametrize(
    ("source", "said"),
    [
        *[("{{ '" + text + "' % 1 }}", "wider") for text in ("%1000d", "%*d", "%.1000f", "%", "%(" + "a" * 65 + ")s")],
        *[("{{ " + sum + " }}", "bits") for sum in ("2 ** 9999", "2 ** 4095 * 2 ** 4095 * 1", "1 % 2 ** 9999")],
        *[("{{ 'a' | " + name + " }}", "No filter") for name in ("pprint", "striptags", "urlize", "wordwrap")],
        *[("{{ " + call + "() }}", "may not") for call in ("'a'.encode", "(1).to_bytes", "(1.5).hex")],
        *[("{{ " + call + "() }}", "unsafe") for call in ("{}.clear", "words.sort", "''.__class__.__mro__")],
        *[(source, "large|much work") for source in ("{{ 'a' | center(10 ** 10) }}", "{{ 'a' * 10 ** 10 }}", DOUBLED)],
        ("{{ [[1]] | batch(10 ** 9) | list }}", "large|much work"),
        ("{{ 'a\nb' | indent(10 ** 9) }}", "large|much work"),
        ("{{ ('a' * 10 ** 5) | replace('a', 'b' * 10 ** 5) }}", "large|much work"),
        ("{{ ([1] * 10 ** 5) | join('a' * 10 ** 5) }}", "large|much work"),
        ("{{ ([[1]] * 10 ** 4) | sum(start=[]) }}", "large|much work"),
        ("{{ 1.5 | round(309) }}", "digits|places|wider"),
        ("{{ '{:>1000}'.format(1) }}", "wider"),
        ("{{ [1] | tojson(indent=17) }}", "more than 16"),
        ("{{ [1] | tojson(separators=(',' * 17, ':')) }}", "more than 16"),
        ("{{ ('<{}>' | safe).format(1) }}", "marked as safe"),
        ("{{ '{0.__class__.__mro__}'.format(1) }}", "unsafe"),
        ("{{a.b}}" * 9_300, "parts"),
        (DEEP, "deep"),
    ],
)
def test_what_is_not_safe_or_has_no_bound_is_refused_in_one_line(source, said):
    with pytest.raises(PromptError, match=f"(?i)template.*({said})"):
        ChatTemplate(source, {}).render(Chat([{"role": "user", "content": "hi"}], variables={"words": ["b", "a"]}))
