"""Attacks on `manifest.json`: any JSON in place of any other, with and without the digest that would make it right."""

import json

from specbuild.runtime import Engine

from . import golden
from .attack import Attack
from .bundle_copy import MANIFEST, copied, manifest, replace, sealed
from .mutations import mutate_bytes, mutate_json, to_bytes
from .outcome import Fault

DECIDE = {"eos_token_ids", "max_seq_len", "special_tokens", "tokenizer", "chat_template", "backend", "digest"}


def decides(place):
    """Whether what is there may change tokens."""
    return place[0] in DECIDE or place[:2] == ("models", "target") or place == ("models",)


class ManifestAttack(Attack):
    """Loads a bundle by a mutated manifest and decodes."""

    def attempt(self, rng, place):
        root = copied(self.bench.bundle, place)
        body, batch = manifest(root), rng.choice((1, 1, 2, 4))
        if rng.random() < 0.1:
            content, right, free = mutate_bytes(rng, (root / MANIFEST).read_bytes()), False, True
        else:
            part = rng.choice((*body, "models", "models", "models", "files", "anything"))
            changed, touched = mutate_json(rng, body, lambda at: part in (at[0], "anything"))
            right = rng.random() < 0.8
            content = to_bytes(sealed(changed) if right else changed)
            free = any(map(decides, touched))
        replace(root / MANIFEST, content)
        with Engine.load(root, batch_size=batch) as engine:
            if not right and _differs(content, body):
                raise Fault("wrong", "a manifest without the right digest was taken")
            if free:
                golden.run(engine)
            else:
                self.bench.golden.check(engine)


def _differs(content, body):
    return bool(json.loads(content) != body)
