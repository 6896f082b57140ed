"""Attacks by structures: what cannot end is refused or an error; what ends is what was asked for."""

import json
import re

import jsonschema

from specbuild.runtime import Engine, SamplingParams

from .attack import Attack
from .golden import PROMPTS
from .outcome import Fault, check_error
from .parameters import TREES

LITERALS = ("<|endoftext|>", "<|", "|>", "a", '"', "\\", "\n", "é", "🦊", " ", "{", "yes", "\u0000", "</s>")
ATOMS = ("a", "b", "[a-f]", ".", r"\d", "(ab|a)", "é", r"\n", "x?", "(a|b)*a")


class StructuresAttack(Attack):
    """Decodes with one structure, with speculation and without."""

    def __init__(self, bench):
        super().__init__(bench)
        self.engine = Engine.load(bench.bundle, batch_size=2)

    def attempt(self, rng, place):
        outputs, holds = rng.choice((_schema, _regex, _choice, _grammar, _tag))(rng)
        how = {"structured_outputs": outputs, "temperature": rng.choice((0.0, 0.8, 2.0))}
        how |= {
            "seed": rng.randrange(2**64),
            "max_new_tokens": rng.choice((1, 8, 40)),
            "ignore_eos": rng.random() < 0.1,
        }
        how |= {"min_tokens": rng.choice((0, 0, 0, 1, 7)), "skip_special_tokens": rng.random() < 0.8}
        prompt, tree = rng.choice(PROMPTS), rng.choice(TREES)
        (place / "request.txt").write_text(repr((how, tree, prompt)))
        (plain,) = self.engine.generate(prompt, SamplingParams(**how, speculation="off"), errors="return")
        (found,) = self.engine.generate(prompt, SamplingParams(**how, speculation=tree), errors="return")
        if _told(plain) != _told(found):
            raise Fault("wrong", f"{outputs} with {tree} gave {_told(found)}, plain decoding {_told(plain)}")
        check_error(found.error)
        if found.finish_reason == "stop" and not how["ignore_eos"] and not holds(found.text):
            raise Fault("wrong", f"{outputs} gave {found.text!r}")

    def close(self):
        self.engine.close()


def _told(result):
    return result.text, list(result.token_ids), result.finish_reason, str(result.error or "")


def _schema(rng):
    """Definitions that contain each other, with an end or without."""
    names = [f"n{number}" for number in range(rng.randrange(1, 5))]
    ends = [True, {"type": "null"}, {"const": _text(rng)}, {"enum": [_text(rng), 1]}, {"maxLength": 3}]

    def part(depth):
        kind = rng.randrange(6 if depth else 2)
        if kind == 0:
            return rng.choice(ends)
        if kind == 1:
            return {"$ref": f"#/$defs/{rng.choice(names)}"}
        if kind == 2:
            return {rng.choice(("anyOf", "oneOf")): [part(depth - 1) for _ in range(rng.randrange(1, 4))]}
        if kind == 3:
            return {"type": "array", "items": part(depth - 1), "minItems": rng.randrange(3), "maxItems": 4}
        held = {_text(rng): part(depth - 1) for _ in range(rng.randrange(3))}
        asked = [name for name in held if rng.random() < 0.7]
        return {"type": "object", "properties": held, "required": asked, "additionalProperties": False}

    schema = {"$defs": {name: part(2) for name in names}, **{"$ref": "#/$defs/n0"}}

    def holds(text):
        try:
            return bool(jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)))
        except RecursionError:  # a definition that is itself, which jsonschema follows without an end
            return True

    return {"json": schema}, holds


def _regex(rng):
    pattern = "".join(rng.choice(ATOMS) for _ in range(rng.randrange(1, 4)))
    for _ in range(rng.randrange(3)):
        least = rng.choice((0, 1, 3, 500))
        pattern = f"({pattern}){{{least},{least + rng.choice((0, 1, 900))}}}"
    return {"regex": pattern}, lambda text: re.fullmatch(pattern, text) is not None


def _choice(rng):
    texts = sorted({_text(rng) for _ in range(rng.randrange(1, 4))})
    return {"choice": texts}, lambda text: text in texts


def _grammar(rng):
    """Rules that contain each other, with an end or without."""
    names = ["start", *(f"n{number}" for number in range(rng.randrange(4)))]
    parts = [*names, "T", "T*", '"b"', "/c+/", '("d" | "e")', "<|endoftext|>", "%json {}"]
    rules = [f"{name}: {' | '.join(_joined(rng, parts) for _ in range(rng.randrange(1, 4)))}" for name in names]
    return {"grammar": "\n".join([*rules, f"T: /{rng.choice(ATOMS)}f/"])}, lambda text: True


def _tag(rng):
    trigger = rng.choice(("a", " ", "(", "<|endoftext|>", "\n"))
    schema = _schema(rng)[0]["json"]
    one = {"begin": trigger + _text(rng), "schema": schema, "end": rng.choice(("", _text(rng)))}
    return {"structural_tag": {"structures": [one], "triggers": [trigger]}}, lambda text: True


def _joined(rng, parts):
    return " ".join(rng.choice(parts) for _ in range(rng.randrange(1, 4)))


def _text(rng):
    return "".join(rng.choice(LITERALS) for _ in range(rng.randrange(1, 4)))
