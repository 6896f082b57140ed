"""Attacks on `tokenizer.json`: parts of another kind, hostile patterns, vocabularies with holes."""

import json

from data_files import table

from specbuild.runtime import Engine, SamplingParams
from specbuild.runtime.requests.tokenizer import Tokenizer

from .attack import Attack
from .bundle_copy import copied, manifest, put
from .mutations import mutate_bytes, mutate_json, to_bytes
from .outcome import check_error

TEXTS = ("def main(argv):\n    return 0\n", "a" * 60 + "!", "naïve 😀 \u202e\x00 ﷺ", " " * 500, "x" * 3000)
PARTS = table("tokenizer_parts.json")
NAMES = PARTS["@name"]
SEQUENCES = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}


def drawn(rng, value):
    """A part with every text that names a list, "@name" or another, replaced by one of the list."""
    if isinstance(value, dict):
        return {key: drawn(rng, each) for key, each in value.items()}
    if isinstance(value, list):
        return [drawn(rng, each) for each in value]
    return drawn(rng, rng.choice(PARTS[value])) if isinstance(value, str) and value[:1] == "@" else value


def part(rng, name):
    """One of tokenizers' normalizers, pre-tokenizers, decoders or post-processors, or a sequence of a few."""
    kinds = drawn(rng, PARTS[name])
    several = SEQUENCES.get(name)
    if several and rng.random() < 0.15:
        return {"type": "Sequence", several: rng.sample(kinds, 3)}
    return rng.choice(kinds)


def vocabulary(rng, body):
    """Ids past the end, twice, or missing; merges of what is no token; added tokens that are in the way."""
    model, ids = body["model"], (4096, 5000, 2**31, 2**32 - 1, 0, 1, -1)
    names = list(model["vocab"])
    match rng.randrange(5):
        case 0:
            for name in rng.sample(names, rng.choice((1, 10, 1000))):
                model["vocab"][name] = rng.choice(ids)
        case 1:
            for name in rng.sample(names, rng.choice((1, 10, 1000))):
                del model["vocab"][name]
        case 2:
            model["merges"] = rng.choice(([], model["merges"] * 2, model["merges"][::-1], [["a", "zzzzz"]], ["a b c"]))
        case 3:
            added = {"single_word": rng.random() < 0.5, "lstrip": True, "rstrip": True, "normalized": True}
            added |= {"id": rng.choice(ids), "content": rng.choice((*NAMES, "def")), "special": rng.random() < 0.5}
            body["added_tokens"] = rng.choice(([added], body["added_tokens"] + [added] * rng.choice((1, 3000))))
        case _:
            model |= {"unk_token": rng.choice(NAMES), "byte_fallback": True, "dropout": rng.choice((0.5, 1.5, -1.0))}
            model |= {"continuing_subword_prefix": rng.choice(NAMES), "end_of_word_suffix": rng.choice(NAMES)}


def mutated(rng, content):
    """Another tokenizer.json."""
    body = json.loads(content)
    match rng.randrange(8):
        case 0:
            return mutate_bytes(rng, content)
        case 1:
            return to_bytes(mutate_json(rng, body, lambda at: at[:2] != ("model", "vocab") or rng.random() < 0.01)[0])
        case 2:
            vocabulary(rng, body)
        case 3:
            short = {"max_length": rng.choice((0, 1, 2**63)), "strategy": "LongestFirst", "stride": rng.choice((0, 9))}
            wide = {"strategy": {"Fixed": rng.choice((0, 9, 10**5))}, "direction": "Left", "pad_to_multiple_of": 0}
            wide |= {"pad_id": rng.choice((0, 2**32 - 1)), "pad_type_id": 0, "pad_token": "x"}
            body |= {"truncation": short | {"direction": "Right"}} if rng.random() < 0.5 else {"padding": wide}
        case _:
            for name in rng.sample([*SEQUENCES, "post_processor"], rng.choice((1, 1, 2))):
                body[name] = part(rng, name)
    return to_bytes(body)


class TokenizerAttack(Attack):
    """Loads a mutated tokenizer, encodes and decodes; now and then a whole engine does."""

    def __init__(self, bench):
        super().__init__(bench)
        body = manifest(bench.bundle)
        self.name, self.vocab = body["tokenizer"], body["models"]["target"]["vocab_size"]
        self.content = (bench.bundle / self.name).read_bytes()

    def attempt(self, rng, place):
        content, text = mutated(rng, self.content), rng.choice(TEXTS)
        ids = [rng.randrange(self.vocab) for _ in range(rng.choice((1, 5, 40)))]
        (place / "text.txt").write_text(repr((text, ids)))
        if rng.random() < 0.4:
            root = copied(self.bench.bundle, place)
            put(root, self.name, content, hashed=True)
            with Engine.load(root, batch_size=2) as engine:
                params = SamplingParams(max_new_tokens=8, ignore_eos=True, stop=rng.choice(((), ("zz",))))
                for result in engine.generate([ids, text], params, errors="return"):
                    check_error(result.error)
            return
        path = place / self.name
        path.write_bytes(content)
        tokenizer = Tokenizer(path, None, {})
        for count in (1, len(ids)):
            tokenizer.decode(ids[:count])
        tokenizer.encode(text)
