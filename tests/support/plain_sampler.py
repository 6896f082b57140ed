"""The choice as it is defined, row by row and token by token: every noise, every processor, no shortcut.

It is what the runtime's sampler was before it computed no more than a choice needs; its tokens and scores are held
against this one bit for bit.
"""

import math
from collections import Counter

import numpy as np

from specbuild.runtime.sampling.constraint import unpack

SMALL = 8192  # a larger vocabulary's tokens run in races of 32


def gumbel(seed, position, vocab_size):
    """g(seed, t, ·) `float32[V]`."""
    race = 32 if vocab_size > SMALL else 1
    races, tokens = math.ceil(vocab_size / race / 8) * 8, np.arange(vocab_size)
    words = np.random.Philox(key=np.array([seed, position], dtype=np.uint64)).random_raw(races // 2 + 1)
    halves = np.stack((words[:-1] % 2**32, words[:-1] >> np.uint64(32)), axis=1).reshape(-1)[tokens % races]
    times = -np.log1p((halves // race + 0.5) * race * -(2.0**-32)) / race
    if race > 1:
        z = words[-1] + np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ z // 2**30) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z // 2**27) * np.uint64(0x94D049BB133111EB)
        own = -np.log1p(((z ^ z // 2**31) // 2**32 + 0.5) * -(2.0**-32))
        times[halves % race != tokens // races] += own[halves % race != tokens // races]
    return (-np.log(times)).astype(np.float32)


class PlainSampler:
    """Ranks and chooses as the runtime's sampler has to."""

    def __init__(self, params, seed, prompt, vocab_size):
        self.params, self.seed, self.vocab_size = params, seed, vocab_size
        self.prompt, self.output = list(prompt), list[int]()
        self.matcher = params.constraint.matcher(vocab_size) if params.constraint else None

    def emit(self, token, position):
        self.output.append(token)
        if self.matcher:
            self.matcher.emit(token)

    def processed(self, logits, path):
        p, out = self.params, logits.copy()
        if self.matcher is not None and (mask := self.matcher.mask(path)) is not None:
            out[~unpack(mask, len(out))] = -np.inf
        if p.repetition_penalty != 1:
            seen = np.unique(np.array([*self.prompt, *self.output, *path], dtype=np.int64))
            penalty = np.float32(p.repetition_penalty)
            out[seen] = np.where(out[seen] > 0, out[seen] / penalty, out[seen] * penalty)
        if p.frequency_penalty != 0 or p.presence_penalty != 0:
            for token, times in Counter([*self.output, *path]).items():
                out[token] -= np.float32(p.frequency_penalty) * np.float32(times) + np.float32(p.presence_penalty)
        for token, bias in p.logit_bias.items():
            out[token] += np.float32(bias)
        return out if p.temperature in (0, 1) else out / np.float32(p.temperature)

    def ranked(self, logits, position, path, misses=None):
        p, processed = self.params, self.processed(logits, path)
        if not np.isfinite(processed.max()):
            return
        scores = processed.copy()
        kth = weights = None
        if p.temperature > 0:
            scores = processed + gumbel(self.seed, position, self.vocab_size)
            if 0 < p.top_k < len(processed):
                kth = np.partition(processed, -p.top_k)[-p.top_k]
                scores[processed < kth] = -np.inf
            if p.min_p > 0:
                scores[processed < float(processed.max()) + math.log(p.min_p)] = -np.inf
            if p.top_p < 1:
                weights = np.exp(processed - processed.max())
                total = float((weights if kth is None else weights[processed >= kth]).sum(dtype=np.float64))
        while (score := scores[token := int(scores.argmax())]) > -np.inf:
            above = processed > processed[token]
            if weights is None or float(weights[above].sum(dtype=np.float64)) / total < p.top_p:
                yield token, float(score)
            elif misses is not None:
                misses -= 1
                if misses < 0:
                    return
            else:
                scores[~above] = -np.inf
            scores[token] = -np.inf

    def choose(self, logits, position, path):
        best = next(self.ranked(logits, position, path), None)
        return best[0] if best else int(logits.argmax())
