"""Attacks by chat templates: programs from a grammar, bombs of time and memory, ways out, mutated real templates."""

from data_files import lines, table

from specbuild.runtime import Chat, Engine, SamplingParams
from specbuild.runtime.requests.tokenizer import Tokenizer

from .attack import Attack
from .bundle_copy import copied, manifest, put
from .outcome import Fault, check_error

MAX_TEXT = 64 << 20  # characters that no chat may come to
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
REAL, ESCAPES, NAMES, FILTERS, FRAGMENTS = table("template_parts.json").values()
REFUSED = tuple(lines("template_bombs.txt"))
BOMBS = (
    *REFUSED,
    "{{ 'a\n' * 9999 | indent(99999999) }}",
    "{{ 9 ** 9 ** 9 ** 9 }}",
    "{% filter indent(99999999) %}a\nb\n{% endfilter %}",
)


NAME = "chat_template.jinja"


def expression(rng, depth):
    """An expression of the grammar."""
    if depth <= 0:
        return rng.choice((*NAMES, "1", "0", "-1", "'a'", "1.5", "[]", "{}", "'%s'", str(10 ** rng.randrange(20))))
    one, other = expression(rng, depth - 1), expression(rng, depth - 2)
    kinds = f"{one} {rng.choice(('+', '-', '*', '/', '//', '%', '**', '~', 'and', 'in', '==', '<', 'is'))} {other}"
    test = rng.choice(("defined", "mapping", "string", "none", "number"))
    return rng.choice(
        (
            *(
                kinds,
                f"({one} | {rng.choice(FILTERS)})",
                f"{one}[{other}]",
                f"{one}.{rng.choice(NAMES)}",
            ),
            *(f"[{one}, {other}]", f"{{{one}: {other}}}", f"({one} if {other} else {one})", f"{one}({other})"),
            *(f"not {one}", f"{one}[{other}:]", f"range({one})", f"{one} is {test}", f"({one})"),
        )
    )


def program(rng, depth):
    """A template of the grammar."""
    if depth <= 0:
        return rng.choice(("text", "", "\n", f"{{{{ {expression(rng, 2)} }}}}"))
    one, other, what = program(rng, depth - 1), program(rng, depth - 2), expression(rng, rng.randrange(4))
    return rng.choice(
        (
            f"{one}{other}",
            f"{{% for message in {what} %}}{one}{{% else %}}{other}{{% endfor %}}",
            f"{{%- for x in messages recursive -%}}{one}{{{{ loop({what}) }}}}{{%- endfor -%}}",
            f"{{% if {what} %}}{one}{{% else %}}{other}{{% endif %}}",
            f"{{% set x = {what} %}}{one}",
            f"{{% set ns = namespace(x={what}) %}}{{% set ns.x = {what} %}}{one}",
            f"{{% macro f(x) %}}{one}{{% endmacro %}}{{{{ f({what}) }}}}{other}",
            f"{{% filter {rng.choice(FILTERS)} %}}{one}{{% endfilter %}}",
            f"{{% with x = {what} %}}{one}{{% endwith %}}{{% break %}}",
            f"{{% call(x) f({what}) %}}{one}{{% endcall %}}",
        )
    )


def deep(rng):
    """Nesting that compilers stumble over."""
    count = rng.choice((30, 150, 3000))
    opened, closed = rng.choice(
        (("{% if 1 %}", "{% endif %}"), ("{{ " + "(" * count, ")" * count + " }}"), ("{{ [", "] }}"))
    )
    if opened == "{{ [":
        return "{{ " + "[" * count + "]" * count + " }}"
    return opened * (count if "%" in opened else 1) + rng.choice(("1", "x")) + closed * (count if "%" in closed else 1)


def template(rng):
    """A template of any kind."""
    match rng.randrange(10):
        case 0 | 1:
            return rng.choice(BOMBS)
        case 2:
            return rng.choice(ESCAPES)
        case 3:
            return deep(rng)
        case 4 | 5:
            source = rng.choice((*REAL, *BOMBS))
            for _ in range(rng.choice((1, 2, 5))):
                at = rng.randrange(len(source) + 1)
                source = source[:at] + rng.choice((*FRAGMENTS, "")) + source[at + rng.choice((0, 1, 5)) :]
            return source
        case _:
            return program(rng, rng.choice((2, 4, 6)))


def messages(rng):
    """A chat, mostly an ordinary one."""
    content = rng.choice(("hello", "", "x" * 10000, "{{ 1 }}", None, 5, [{"type": "text", "text": "a"}], "\x00😀"))
    return [{"role": rng.choice(("user", "system", "", "tool")), "content": content}] * rng.choice((1, 2, 30))


class TemplatesAttack(Attack):
    """Renders a chat by a hostile template."""

    def __init__(self, bench):
        super().__init__(bench)
        self.tokenizer = bench.bundle / manifest(bench.bundle)["tokenizer"]

    def attempt(self, rng, place):
        source = template(rng)
        chat = Chat(messages(rng), tools=rng.choice((None, None, [{"type": "function"}])))
        if rng.random() < 0.1:
            return self._serve(rng, place, source.encode(), chat)
        path = place / NAME
        path.write_text(source, encoding="utf-8")
        text = Tokenizer(self.tokenizer, path, SPECIAL).chat_text(chat)
        if len(text) > MAX_TEXT:
            raise Fault("memory", f"a chat came to {len(text)} characters")
        if source in ESCAPES and any(sign in text for sign in ("<class", "function ", "module '", "root:x", "uid=")):
            raise Fault("wrong", f"the template got out of its sandbox: {text[:100]}")

    def _serve(self, rng, place, content, chat):
        """The template in a bundle, beside a request that has nothing to do with it; now and then it is no text."""
        if rng.random() < 0.3:
            content = rng.choice((b"\xff\xfe" + content, content + b"\xed\xa0\x80", content[::-1], b""))
        root = copied(self.bench.bundle, place)
        put(root, NAME, content, hashed=True, chat_template=NAME)
        with Engine.load(root, batch_size=2) as engine:
            params = SamplingParams(max_new_tokens=2)
            refused, sound = engine.generate([chat, "import os"], params, errors="return")
            if sound.error:
                raise Fault("wrong", f"a prompt without a chat failed: {sound.error}")
            check_error(refused.error)
