"""Random batches to choose from, and their comparison with the runtime's sampler."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import numpy as np
import oracles
from calls import choose, history, noise, tree_arrays
from hypothesis import strategies as st

from specbuild.runtime.sampling.cut_offs import CutOffs
from specbuild.runtime.sampling.noise import Noise
from specbuild.runtime.sampling.row import Row
from specbuild.runtime.sampling.sampler import Sampler, SamplingParams

MASS_BOUND = 1e-6  # of top-p's mass, which sums float32 exponentials


def masks(legal):
    """`uint32[…, ⌈V / 32⌉]` of `bool[…, V]`; the bits past the vocabulary, which have no meaning, are set."""
    width = [(0, 0)] * (legal.ndim - 1) + [(0, -legal.shape[-1] % 32)]
    padded = np.pad(legal, width, constant_values=True)
    return np.packbits(padded, axis=-1, bitorder="little").view("<u4").astype(np.uint32)


class MaskedSampler(Sampler):
    """What a sampler does at a node where some tokens alone are legal: the others' processed logits are −∞."""

    def __init__(self, made, legal):
        vars(self).update(vars(made))  # its text and noise too
        self.legal, self._plain = legal, False

    def adjusted(self, logits, path):
        return np.where(self.legal, super().adjusted(logits, path), np.float32(-np.inf))


class GivenNoise(Noise):
    """Noise that somebody else computed, `float32[V]`."""

    def __init__(self, values):
        super().__init__(0, 0, len(values))
        self.all = values

    @property
    def bounds(self):
        return self.best_of(self.all)

    def of(self, tokens):
        return self.all[tokens]


class Case:
    """A batch of ragged trees with logits, texts and parameters; `legal`: None, or `bool[B, N, V]`."""

    legal: Any = None

    def __init__(self, seed, params, vocab, nodes, dtype, best, spread=4):
        rng = np.random.default_rng(seed)
        self.params, self.vocab, self.best = params, vocab, best
        self.trees = [oracles.random_tree(rng, int(rng.integers(1, nodes + 1)), vocab) for _ in params]
        self.seeds = [int(rng.integers(0, 2**64, dtype=np.uint64)) for _ in params]
        self.positions = rng.integers(0, 5000, len(params)).tolist()
        self.logits = (rng.normal(0, spread, (len(params), nodes, vocab))).astype(dtype)
        self.texts = [(rng.integers(0, vocab, 12).tolist(), rng.integers(0, vocab, 9).tolist()) for _ in params]

    def arguments(self):
        """What `choose` takes."""
        tokens, parents, counts = tree_arrays(self.trees, self.logits.shape[1])
        past = np.stack([history(self.vocab, *text) for text in self.texts])
        plain = self.logits, self.params, self.seeds, self.positions, tokens, parents, self.best
        masked = {} if self.legal is None else {"masks": masks(self.legal)}
        return plain, {"counts": counts, "history": past} | masked

    def _kernel_noise(self, kernels, seed, position):
        key = (np.array([each], dtype=np.uint64) for each in (seed, position))
        return GivenNoise(noise(kernels, *key, self.vocab)[0])

    def expected(self, kernels):
        """Per row: sequence, node, sampler, tokens and scores; with kernels, from the kernel's own noise."""
        rows = []
        for b, tree in enumerate(self.trees):
            plain = oracles.sampler(self.params[b], self.seeds[b], self.vocab, *self.texts[b])
            if kernels:
                plain.noise = functools.cache(partial(self._kernel_noise, kernels, self.seeds[b]))
            for node in range(len(tree)):
                made = plain if self.legal is None else MaskedSampler(plain, self.legal[b, node])
                position = self.positions[b] + tree.depths[node]
                found = [-1] * self.best, [-np.inf] * self.best
                if self.legal is None or self.legal[b, node].any():
                    found = oracles.best(made, self.logits[b, node], position, tree.path(node), self.best)
                rows.append((b, node, made, *found))
        return rows


def drawn_params(data, vocab):
    """Every processor and cut-off, on or off."""
    return SamplingParams(
        temperature=data.draw(st.sampled_from([0.0, 0.3, 1.0, 1.7])),
        top_k=data.draw(st.sampled_from([0, 0, 1, 5, 5000])),
        top_p=data.draw(st.sampled_from([1.0, 1.0, 0.2, 0.9])),
        min_p=data.draw(st.sampled_from([0.0, 0.0, 0.1, 1.0])),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.3, 0.6])),
        frequency_penalty=data.draw(st.sampled_from([0.0, 0.4])),
        presence_penalty=data.draw(st.sampled_from([0.0, -0.7])),
        logit_bias=data.draw(st.dictionaries(st.integers(0, vocab - 1), st.floats(-9, 9, width=32), max_size=4)),
    )


def check(kernels, case):
    """Tokens and scores are bit for bit the sampler's, given the kernel's noise; padding is −1."""
    arguments, more = case.arguments()
    choices, scores = choose(kernels, *arguments, **more)
    for b, node, made, tokens, values in case.expected(kernels):
        got, wanted = choices[b, node].tolist(), tokens
        assert case.legal is None or all(case.legal[b, node, token] for token in got if token >= 0)
        if got != wanted:  # only where top-p's mass is on the edge
            tree, logits = case.trees[b], case.logits[b, node].astype(np.float32)
            odd = (set(got) ^ set(wanted)) - {-1}
            processed = made.processed(logits, tree.path(node))
            cuts = CutOffs(Row(processed), case.params[b].top_k, case.params[b].top_p, case.params[b].min_p)
            assert case.params[b].top_p < 1
            assert min(abs(slack) for token in odd for slack in cuts.slacks(token)) < MASS_BOUND
        else:
            assert scores[b, node].tobytes() == np.array(values, dtype=np.float32).tobytes()
    for b, tree in enumerate(case.trees):
        assert (choices[b, len(tree) :] == -1).all()
        assert np.isneginf(scores[b, len(tree) :]).all()


def rows(*values, dtype=np.float32):
    """Logits `[1, rows, V]` of a chain of as many nodes."""
    return np.array([values], dtype=dtype)


def simple(kernels, logits, params, best=1, **more):
    tokens = np.zeros(logits.shape[:2], dtype=np.int32)
    return choose(kernels, logits, [params], [3], [10], tokens, None, best, **more)
