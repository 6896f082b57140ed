"""The golden tokens: what plain decoding makes of a few prompts, which nothing may change that does not decide them."""

from __future__ import annotations

from dataclasses import dataclass

from specbuild.runtime import Engine, SamplingParams

from .outcome import Fault, check_error

PROMPTS = ("def main(argv):\n", "import os", "class Reader:\n    def ")
TOKENS = 10
SAMPLING = ({}, {"temperature": 0.8, "top_p": 0.95, "seed": 7}, {"repetition_penalty": 1.2})


def params(speculation):
    """Of each prompt; the same whatever the speculation."""
    return [SamplingParams(max_new_tokens=TOKENS, speculation=speculation, **each) for each in SAMPLING]


@dataclass(frozen=True)
class Golden:
    """Token ids by prompt."""

    tokens: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, bundle):
        """Those of a sound bundle."""
        with Engine.load(bundle, drafter="ngram") as engine:
            return cls(tuple(tuple(_tokens(each)) for each in engine.generate(list(PROMPTS), params("off"))))

    def check(self, engine, speculation="auto"):
        """Raise Fault where an engine decodes something else, and what a result carries as its error."""
        results = engine.generate(list(PROMPTS), params(speculation))
        for prompt, wanted, result in zip(PROMPTS, self.tokens, results, strict=True):
            if _tokens(result) != list(wanted):
                raise Fault("wrong", f"{prompt!r} gave {result.token_ids}, plain decoding {list(wanted)}")


def _tokens(result):
    check_error(result.error)
    return result.token_ids


def run(engine):
    """Decode the same prompts where no tokens are known to be right."""
    for result in engine.generate(list(PROMPTS), params("auto")):
        check_error(result.error)
