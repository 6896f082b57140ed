"""Check a served bundle's tool calls against their schemas, streamed and whole, with speculation and without.

PYTHONPATH=.:tests/support python tests/soak/tool_sweep.py smollm2-int8.bundle --out benchmarks/results/tools.json

Each conversation is a question answered by calls (`tool_choice` required, a named tool, or auto with strict tools, in
Hermes' form and in Llama 3's), then the tools' results and the model's reply to them. Every answer is requested in four
ways, and all four must be equal.
"""

import json
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path

import httpx
import jsonschema
from route_client import joined
from serving import Server

from benchmarks.common import machine, parser, save

WAYS = tuple(product((False, True), ("auto", "off")))  # (streamed, speculation)
CHOICES = ("required", "several", "named", "auto", "llama3_json")
HERMES = """<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>"""
LLAMA = '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}'
TEMPLATE = """\
{% for m in messages %}{% if loop.first %}<|im_start|>system
You call functions.{% for tool in tools or () %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% for call in m.tool_calls or () %}CALL{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
WORD = {"type": "string", "maxLength": 12, "pattern": "^[A-Za-z ]+$"}
FIELDS = {
    "city": {"enum": ["Rome", "Oslo", "Lima", "Kyoto"]},
    "days": {"type": "integer", "minimum": 1, "maximum": 14},
    "name": WORD,
    "active": {"type": "boolean"},
    "price": {"type": "number", "minimum": 0, "maximum": 100},
    "tags": {"type": "array", "items": {"enum": ["new", "old", "red"]}, "minItems": 1, "maxItems": 3},
    "place": {
        **{
            "type": "object",
            "properties": {"street": WORD, "number": {"type": "integer", "minimum": 1, "maximum": 99}},
        },
        **{"required": ["street", "number"], "additionalProperties": False},
    },
    "note": {"anyOf": [{"type": "null"}, WORD]},
}
ASKED = (
    "the weather in Rome",
    "a room for three days",
    "all red things",
    "my name and street",
    "the price of a ticket",
)


def conversation(number):
    """Return the request fields of a question with one to three tools, seeded by its number."""
    drawn, functions = random.Random(number), []
    for place in range(drawn.randint(1, 3)):
        names = drawn.sample(list(FIELDS), drawn.randint(1, 4))
        schema = {"type": "object", "properties": {name: FIELDS[name] for name in names}, "required": names}
        parameters = {**schema, "additionalProperties": False}
        told = {"name": f"find_{'_'.join(names[:2])}_{place}", "description": f"Finds by {', '.join(names)}."}
        functions.append({**told, "parameters": parameters, "strict": True})
    choice = CHOICES[number % len(CHOICES)]
    fields = {"tools": [{"type": "function", "function": each} for each in functions], "max_tokens": 160}
    fields |= {"temperature": number % 2, "seed": number, "parallel_tool_calls": choice != "required"}
    if choice == "named":
        fields["tool_choice"] = {"type": "function", "function": {"name": drawn.choice(functions)["name"]}}
    elif choice in ("required", "several"):
        fields["tool_choice"] = "required"
    asked = [{"role": "user", "content": f"Find {drawn.choice(ASKED)}."}]
    if choice in ("auto", "llama3_json"):  # unforced, a small model makes calls only after examples of them
        call = {"id": "call00000", "type": "function", "function": {"name": functions[0]["name"], "arguments": "{}"}}
        result = {"role": "tool", "content": '{"found": 1}', "tool_call_id": "call00000"}
        asked = 2 * [*asked, {"role": "assistant", "content": None, "tool_calls": [call]}, result] + asked
    return {**fields, "messages": asked, "choice": choice}


def answered(client, fields, streamed, speculation):
    """Request an answer; return its content, its calls (names and arguments) and its finish reason."""
    asked = {**fields, "speculation": speculation, "stream": streamed}
    reply = client.post("/v1/chat/completions", json=asked)
    reply.raise_for_status()
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")] if streamed else [reply.text]
    found = joined([choice for line in lines for choice in json.loads(line)["choices"]])
    calls = [(call["name"], call["arguments"]) for call in found["calls"]]
    return {"content": found["text"], "calls": calls, "ended": found["finish_reason"]}


def held(client, number):
    """Run a conversation in all ways; return its number of calls, how it ended, and what failed."""
    fields, failed = conversation(number), list[str]()
    choice = fields.pop("choice")
    answers = [answered(client, fields, *way) for way in WAYS]
    failed += [f"{way}: another answer" for way, each in zip(WAYS, answers, strict=True) if each != answers[0]]
    first = answers[0]
    whole = first["calls"] if first["ended"] == "tool_calls" else first["calls"][:-1]
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in fields["tools"]}
    for name, arguments in whole:
        try:
            jsonschema.validate(json.loads(arguments), schemas[name])
        except (ValueError, KeyError, jsonschema.ValidationError) as error:
            failed.append(f"{type(error).__name__}: {str(error)[:200]}")
    if whole:
        calls = [
            {"id": f"call{place:05}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for place, (name, arguments) in enumerate(whole)
        ]
        back = [{"role": "tool", "content": '{"found": 3}', "tool_call_id": call["id"]} for call in calls]
        said = [{"role": "assistant", "content": None, "tool_calls": calls}]
        after = {**fields, "messages": fields["messages"] + said + back, "tool_choice": "none", "max_tokens": 12}
        ends = [answered(client, after, *way) for way in WAYS]
        failed += [f"{way}: another end" for way, each in zip(WAYS, ends, strict=True) if each != ends[0]]
    return {"number": number, "choice": choice, "calls": len(whole), "ended": first["ended"], "failed": failed}


def unless(until, work, client, number):
    """Return the result of `work`; None if the time is up."""
    return work(client, number) if time.monotonic() < until else None


def main():
    """Run the conversations and write a summary; return 1 if any failed."""
    asked = parser(__doc__, None)
    asked.add_argument("bundle", type=Path)
    asked.add_argument("--conversations", type=int, default=300)
    asked.add_argument("--minutes", type=float, default=1e9, help="stop after so many, to go on later")
    asked.add_argument("--threads", type=int, help="of the model")
    options = asked.parse_args()
    until = time.monotonic() + 60 * options.minutes
    log = Path("build") / f"{options.out.stem}.progress.jsonl"
    done = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
    with tempfile.TemporaryDirectory() as folder, log.open("a", encoding="utf-8") as file:
        template = Path(folder) / "chat.jinja"
        for form in ("hermes", "llama3_json"):
            llamas, known = form == "llama3_json", {told["number"] for told in done}
            template.write_text(TEMPLATE.replace("CALL", LLAMA if llamas else HERMES))
            numbers = [n for n in range(options.conversations) if (CHOICES[n % len(CHOICES)] == form) == llamas]
            flags = ["--port", "0", "--max-num-seqs", "4", "--chat-template", str(template), "--tool-call-parser", form]
            flags += ["--threads", str(options.threads)] if options.threads else []
            with ExitStack() as stack:
                server = stack.enter_context(Server(str(options.bundle), *flags))
                client = stack.enter_context(server.client())
                client.timeout = httpx.Timeout(600)
                pool = stack.enter_context(ThreadPoolExecutor(4))
                for told in pool.map(partial(unless, until, held, client), [n for n in numbers if n not in known]):
                    if told is not None:
                        done.append(told)
                        file.write(json.dumps(told) + "\n")
                        file.flush()
    by = {choice: [told for told in done if told["choice"] == choice] for choice in CHOICES}
    summary = {
        "conversations": len(done),
        "answers": sum(len(WAYS) * (1 + bool(told["calls"])) for told in done),
        "calls": {choice: sum(told["calls"] for told in some) for choice, some in by.items()},
        "with_calls": {choice: f"{sum(bool(t['calls']) for t in some)} of {len(some)}" for choice, some in by.items()},
        "failed": [told for told in done if told["failed"]],
        **{"of": options.conversations, "bundle": options.bundle.name, "machine": machine()},
    }
    print(save(options.out, summary))
    return int(bool(summary["failed"]))


if __name__ == "__main__":
    sys.exit(main())
