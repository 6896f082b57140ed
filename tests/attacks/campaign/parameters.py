"""Attacks by parameters: hostile ones are refused when made; valid ones give what plain decoding gives."""

import dataclasses

from specbuild.runtime import Engine, Limits, LoadOptions, SamplingParams
from specbuild.runtime.errors import OptionError

from .attack import Attack
from .golden import PROMPTS
from .mutations import HOSTILE
from .outcome import Fault, check_error

ODD = (
    *HOSTILE,
    float("nan"),
    float("inf"),
    float("-inf"),
    10**5000,
    b"x",
    (),
    (1,),
    {1},
    object(),
    str,
    [""],
    ["a"] * 9,
    [f"stop {number}" for number in range(20_000)],
)
TREES = ("auto", "auto", "chain:1", "chain:4", "chain:16", "topk:2,2", "topk:3,3", "best:1", "best:5", "best:30")
SCHEDULES = (
    (),
    {"1-4": 8},
    [[1, 4, 8]],
    '{"1": 2}',
    {"1-": 3},
    [[1, 2]],
    "x",
    {"4-1": 1},
    {"1-4": -1},
    [[1, 10**30, 5]],
)


def hostile(rng, kind):
    """Fields of a dataclass with values of any kind."""
    names = [field.name for field in dataclasses.fields(kind)]
    return {name: rng.choice(ODD) for name in rng.sample(names, rng.choice((1, 1, 2, 3)))}


def valid(rng):
    """Sampling parameters that are as they should be, near their bounds too."""
    temperature = rng.choice((0.0, 0.0, 0.01, 0.5, 1.0, 1.7, 100.0))
    given = {
        "max_new_tokens": rng.choice((1, 2, 8, 20)),
        "temperature": temperature,
        "top_k": rng.choice((0, 0, 1, 2, 50, 4096, 10**9, 2**70)),
        "top_p": rng.choice((1.0, 1.0, 0.95, 0.5, 1e-9, 5e-324)),
        "min_p": rng.choice((0.0, 0.0, 0.05, 1.0)),
        "repetition_penalty": rng.choice((1.0, 1.0, 1.3, 0.5, 100, 1e-300)),
        "frequency_penalty": rng.choice((0.0, 0.0, 0.7, -2.0, 100)),
        "presence_penalty": rng.choice((0.0, 0.0, 0.7, -100)),
        "logit_bias": rng.choice(({}, {}, {5: 3.0, 17: -100}, {0: 100}, dict.fromkeys(range(2000), -50.0))),
        "seed": rng.choice((0, 1, 2**63, 2**64 - 1, rng.randrange(2**64))),
        "stop": rng.choice(((), (), ("\n",), ("e", "import os"), ["x" * 500], "a")),
        "ignore_eos": rng.random() < 0.5,
        "logprobs": rng.choice((None, None, 0, 3, 20)),
        "prompt_logprobs": rng.choice((None, None, 0, 3, 20)),
        "session": rng.choice((None, None, "s", "é" * 256)),
    }
    if temperature > 0 and rng.random() < 0.2:
        given["n"] = 3
    return given


class ParametersAttack(Attack):
    """Holds speculation against plain decoding, in engines of one slot and of four that live as long as the worker."""

    def __init__(self, bench):
        super().__init__(bench)
        self.engines = [Engine.load(bench.bundle, batch_size=size) for size in (1, 4)]

    def attempt(self, rng, place):
        engine, kind = rng.choice(self.engines), rng.randrange(5)
        if kind == 0:
            given = hostile(rng, SamplingParams) | {"max_new_tokens": rng.choice((2, *ODD))}
            _note(place, given)
            self._decode(engine, SamplingParams(**given))
        elif kind == 1:
            self._load(rng, place)
        else:
            given, tree = valid(rng), rng.choice(TREES)
            _note(place, given | {"speculation": tree})
            prompts = rng.sample(PROMPTS, rng.choice((1, 3)))
            plain = engine.generate(prompts, SamplingParams(**given, speculation="off"))
            speculated = engine.generate(prompts, SamplingParams(**given, speculation=tree))
            if list(map(_tokens, plain)) != list(map(_tokens, speculated)):
                said = [[each.token_ids for each in results] for results in (plain, speculated)]
                raise Fault("wrong", f"{tree} gave {said[1]}, plain decoding {said[0]}")

    def _decode(self, engine, params):
        if params.max_new_tokens > 100 or params.n > 8:
            params = dataclasses.replace(params, max_new_tokens=min(params.max_new_tokens, 8), n=min(params.n, 3))
        for result in engine.generate(PROMPTS[1], params, errors="return"):
            check_error(result.error)

    def _load(self, rng, place):
        """Options and limits, hostile ones or valid ones; those that load decode as they should."""
        if rng.random() < 0.5:
            limits = {"max_draft_tokens": rng.choice((None, 0, 1, 5, 10**6)), "min_expected_speedup": 1.0}
            limits |= {"num_speculative_tokens_per_batch_size": rng.choice(SCHEDULES)}
            given = {"batch_size": rng.choice((1, 2, 3, 4)), "threads": rng.choice((None, 1, 2))}
            given |= {"prefix_caching": rng.random() < 0.5}
            given |= {"max_waiting": rng.choice((1, 2, 10**30))}
        else:
            limits = hostile(rng, Limits) if rng.random() < 0.5 else {}
            given = hostile(rng, LoadOptions)
        _note(place, {"limits": limits} | given)
        options = LoadOptions(**given | ({"limits": Limits(**limits)} if limits else {}))
        if options.batch_size > 64:
            raise OptionError("more than there is memory for, were it built so")
        with Engine.load(self.bench.bundle, options) as engine:
            self.bench.golden.check(engine)

    def close(self):
        for engine in self.engines:
            engine.close()


def _tokens(result):
    """What must be equal: a result's tokens, text and end."""
    check_error(result.error)
    return tuple(result.token_ids), result.text, result.finish_reason


def _note(place, given):
    told = {
        name: "10**5000" if isinstance(value, int) and abs(value) > 10**400 else value for name, value in given.items()
    }
    try:
        text = f"{told!r:.50000}"
    except ValueError:  # Python prints no number of 5,000 digits
        text = ", ".join(told)
    (place / "parameters.txt").write_text(text, errors="backslashreplace")
