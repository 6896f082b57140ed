"""What the builder's tests compare random models by."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from specbuild.runtime.tree import Tree

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def reference(model: Any, tokens: list[int]) -> np.ndarray:
    """transformers' logits after each token of a text, `[T, V]`."""
    with torch.no_grad():
        return np.asarray(model(input_ids=torch.tensor([tokens])).logits[0])


def branching(seed: int, nodes: int) -> Tree:
    """A random tree of the random models' 97 tokens."""
    rng = np.random.default_rng(seed)
    tree = Tree([int(rng.integers(97))])
    while len(tree) < nodes:
        tree.add(int(rng.integers(97)), int(rng.integers(len(tree))))
    return tree
