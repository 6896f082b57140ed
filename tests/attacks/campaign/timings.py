"""Attacks on a tuned bundle's table of timings: whatever it says, only speed may depend on it."""

import json
import math

from specbuild.runtime import Engine, Limits
from specbuild.runtime.speculation import timing_table

from .attack import Attack
from .bundle_copy import copied, manifest, put
from .mutations import mutate_bytes, mutate_json, to_bytes


class TimingsAttack(Attack):
    """Loads a bundle by a mutated table and decodes."""

    def __init__(self, bench):
        super().__init__(bench)
        if timing_table.FILE not in manifest(bench.bundle)["files"]:
            raise RuntimeError(f"{bench.bundle} was never tuned: run specbuild tune {bench.bundle}")
        self.content = (bench.bundle / timing_table.FILE).read_bytes()

    def attempt(self, rng, place):
        root, body = copied(self.bench.bundle, place), json.loads(self.content)
        match rng.randrange(8):
            case 0:
                content = mutate_bytes(rng, self.content)
            case 1 | 2:
                content = to_bytes(scaled(rng, body))
            case _:
                content = to_bytes(mutate_json(rng, body)[0])
        put(root, timing_table.FILE, content, hashed=True)
        limits = Limits(min_expected_speedup=rng.choice((1.0, 1.0, 1.5)))
        with Engine.load(root, batch_size=rng.choice((1, 2, 4)), limits=limits) as engine:
            self.bench.golden.check(engine)


def scaled(rng, body):
    """A table of other numbers, mostly such as could have been measured."""
    extreme = 0.02 if rng.random() < 0.4 else 0.0

    def other(value, name=""):
        if isinstance(value, dict):
            return {key: other(each, key) for key, each in value.items()}
        if isinstance(value, list):
            return [other(each, name) for each in value]
        if not isinstance(value, float) or name == "likely":
            return value
        if rng.random() < extreme:
            return rng.choice((0.0, 1e-300, 1e300, -1.0, 1.0, 5e-324, math.nan, math.inf))
        return rng.random() if name in ("chance", "step", "reach", "lookup") else value * 10 ** rng.uniform(-3, 3)

    return other(body)
