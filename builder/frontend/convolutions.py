"""Short convolutions over a text at export: the functions in `transformers`' modeling files that mix tokens themselves.

A convolution's cache has a row for each token, as attention's has: so a tree needs no states, and rows that were
rejected are forgotten. What keeps a state beside them is refused.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from specbuild.runtime.errors import CheckpointError

CONVOLUTION = "causal_conv1d_fn"
# `transformers`' names of functions whose result for a token depends on all tokens before it.
STATES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan", "mamba_selective_scan")

Convolve = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@contextlib.contextmanager
def replaced(model: PreTrainedModel, convolve: Convolve) -> Iterator[None]:
    """Replace the convolutions of a model while inside.

    Args:
        model: The model.
        convolve: Takes the tokens' numbers `[B, N, C]`, weights `[C, L]` and biases `[C]`, and returns `[B, N, C]`.
    """
    modeling = sys.modules[type(model).__module__]

    def convolution(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
    ) -> Tensor:
        out = convolve(x.transpose(1, 2), weight, bias).transpose(1, 2)
        return ACT2FN[activation](out) if activation else out

    functions = {CONVOLUTION: convolution} | {name: _refused(name) for name in STATES}
    with contextlib.ExitStack() as undo:
        for name in functions.keys() & vars(modeling).keys():
            undo.callback(setattr, modeling, name, getattr(modeling, name))
            setattr(modeling, name, functions[name])
        yield


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise CheckpointError(f"its layers keep a state ({name}), which is not supported yet")

    return refuse
