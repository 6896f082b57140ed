"""A tokenizer of a few tokens, and llguidance's grammars over it, which are easily enumerated."""

import json

import numpy as np

from specbuild.runtime.requests.tokenizer import Tokenizer
from specbuild.runtime.sampling.constraint import unpack
from specbuild.runtime.sampling.grammar import Grammar
from specbuild.runtime.sampling.grammar_process import FUEL, Tokenizers, compiled, grammar_of
from specbuild.runtime.sampling.structured import StructuredOutputs

TOKENS = ["a", "b", "c", "d", "0", "1", ",", "ab", "cd", "aba", "<s>", "</s>"]
VOCAB, START, END = len(TOKENS), 10, 11


def tokenizer_json():
    """Bytes, a few merges and two special tokens."""
    special = [{"id": place, "content": TOKENS[place], "special": True} for place in (START, END)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [each | flags for each in special],
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "vocab": {name: place for place, name in enumerate(TOKENS)},
                "merges": [["a", "b"], ["c", "d"], ["ab", "a"]],
            },
        }
    )


def vocabulary(ends=(END,), size=VOCAB):
    """Of a model that has more tokens, the others write nothing."""
    return Tokenizer(tokenizer_json().encode(), None, {}).vocabulary(size, ends)


def grammar(ends=(END,), vocab_size=VOCAB, fuel=FUEL, **fields):
    """Compiled in this process, within limits of llguidance."""
    outputs = StructuredOutputs(**fields).to_dict()
    tokenizer = Tokenizers(vocabulary(ends, vocab_size)).tokenizer(outputs)
    made = compiled(tokenizer, grammar_of(outputs), **({"fuel": fuel} if fuel else {}))
    return Grammar(made, tokenizer.vocab_size, ends)


def legal(matcher, path=(), vocab_size=VOCAB):
    return set(np.flatnonzero(unpack(matcher.mask(path), vocab_size)).tolist())


def ids(names):
    """Of tokens' names, with spaces between them."""
    return [TOKENS.index(name) for name in names.split()]


class Enumerable:
    """A grammar as `constraints.probabilities` asks about it."""

    def __init__(self, of, end=END):
        self._of, self.end = of, end

    def legal(self, text):
        return legal(self._of.matcher(VOCAB), text)
