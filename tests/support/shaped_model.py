"""A model on a `HostDevice` that computes otherwise for every number of nodes in a step, rows and logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from tiny_models import BUCKETS, CAPACITY, CHUNK, VOCAB

from specbuild.runtime.backends.executor import ModelSpec
from specbuild.runtime.backends.gpu.device import Pages
from specbuild.runtime.backends.gpu.executor import StandardExecutor
from specbuild.runtime.backends.gpu.step_tensors import StepTensors

WIDTH = 8


class ShapedModel:
    """See `Model`. A node's row is of its token, its place and the mean of the rows that it sees.

    `planted`: how much a row and a logit depend on the step's number of nodes. `error`: how far from another model of
    the same seed.
    """

    capturable = True
    pages: Pages | None = None

    def __init__(self, name, device, batch_size, planted, error=0.0):
        self.spec = ModelSpec(name, 1, 1, WIDTH, VOCAB, CAPACITY, BUCKETS[-1])
        self.batch_size, self.buckets, self.chunk, self.lengths = batch_size, BUCKETS, CHUNK, range(1, CHUNK + 1)
        cache = device.empty((2, batch_size, 1, CAPACITY, WIDTH), np.float32)
        self.tensors = StepTensors.allocate(device, self.spec, (batch_size, BUCKETS[-1], CHUNK), cache)
        self._device = device
        rng, off = np.random.default_rng(3), np.random.default_rng(4)
        shapes = {"tokens": (VOCAB, WIDTH), "places": (CAPACITY, WIDTH), "head": (WIDTH, VOCAB)}
        self._weights = {n: rng.normal(0, 1, s) + error * off.normal(0, 1, s) for n, s in shapes.items()}
        wide = max(*BUCKETS, CHUNK) + 1
        self._planted = {n: planted * np.random.default_rng(n).normal(0, 1, VOCAB + WIDTH) for n in range(wide)}

    def enqueue(self, nodes, stream):
        self._device.run(stream, lambda: self._step(range(self.batch_size), nodes, slice(None)))

    def prefill(self, slot, nodes, last, stream):
        self._device.run(stream, lambda: self._step([slot], nodes, slice(last, last + 1)))

    def close(self):
        """Its memory is the device's."""

    def _step(self, slots, nodes, wanted):
        tokens, positions, masks = (
            self._device.array(each).reshape(-1)[: len(slots) * nodes * size].reshape(len(slots), nodes, size)
            for each, size in ((self.tensors.tokens, 1), (self.tensors.positions, 1), (self.tensors.masks[0], CAPACITY))
        )
        cache, rows = self._device.array(self.tensors.cache)[0, :, 0], self._device.array(self.tensors.rows)
        out = [
            self._logits(self.write(cache[slot], rows[at], tokens[at, :, 0], positions[at, :, 0], masks[at]), nodes)
            for at, slot in enumerate(slots)
        ]
        found = np.stack(out)[:, wanted].astype(np.float32).reshape(-1)
        self._device.array(self.tensors.logits).reshape(-1)[: len(found)] = found

    def write(self, cache, first, tokens, positions, mask):
        """Write a sequence's rows, each after those that it sees; what the nodes made of them."""
        nodes, made = len(tokens), list[NDArray[np.float64]]()
        for node, (token, place) in enumerate(zip(tokens, positions, strict=True)):
            seen = np.flatnonzero(mask[node])
            if len(seen) == 1 and seen[0] != first + node:  # padding
                made.append(np.full(WIDTH, np.nan))
                continue
            around = cache[seen[:-1]].mean(0, dtype=np.float64) if len(seen) > 1 else 0.0  # the last is its own
            row = np.tanh(self._weights["tokens"][token] + self._weights["places"][place] + 2 * around)
            made.append(row)
            cache[first + node] = row + self._planted[nodes][VOCAB:]
        return np.stack(made)

    def _logits(self, made, nodes):
        return np.stack([row @ self._weights["head"] for row in made]) + self._planted[nodes][:VOCAB]


def executor(name, device, batch_size, planted, error=0.0):
    """Such a model on a stream of its own."""
    return StandardExecutor(device, ShapedModel(name, device, batch_size, planted, error), device.stream())
