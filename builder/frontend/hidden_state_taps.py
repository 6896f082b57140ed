"""Taps: the hidden states between a target's layers that an EAGLE-3 head reads, captured during a forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from specbuild.runtime.errors import CheckpointError, shown

TAPS = "eagle_aux_hidden_state_layer_ids"  # their field in a head's config.json
OUTPUT = -1  # the place of what the model's head reads: the last layer's output after the norm


@dataclass
class Taps:
    """The n hidden states that a head reads from its target.

    `places` are the layers whose inputs are read; the number of layers stands for the last one's output, OUTPUT for
    the model's. `fuse` maps the concatenated states `[.., n · H]` to one hidden state `[.., H]`.
    """

    places: tuple[int, ...]
    fuse: nn.Module
    _seen: dict[int, Tensor] = field(default_factory=dict)

    def states(self) -> Tensor:
        """Return the concatenated hidden states of the model's last forward pass: `[B, N, n · H]`."""
        return torch.cat([self._seen[place] for place in self.places], dim=-1)

    @contextmanager
    def watching(self, model: PreTrainedModel) -> Iterator[None]:
        """Capture hidden states in every forward pass inside; raise CheckpointError if the layers are not found."""
        layers = decoder_layers(model)
        if not layers or len(layers) < max(self.places):
            raise CheckpointError(f"{type(model).__name__} has no list of layers to read hidden states from")

        def before(place: int) -> Any:
            def hook(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
                self._seen[place] = inputs[0] if inputs else named["hidden_states"]

            return hook

        def after(place: int) -> Any:
            def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
                self._seen[place] = output if isinstance(output, Tensor) else output[0]

            return hook

        with ExitStack() as undo:
            for place in self.places:
                if 0 <= place < len(layers):
                    handle = layers[place].register_forward_pre_hook(before(place), with_kwargs=True)
                else:
                    module = model.get_decoder() if place == OUTPUT else layers[-1]
                    handle = module.register_forward_hook(after(place))
                undo.callback(handle.remove)
            yield
        self._seen.clear()


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the model's layers in order, or [] if no module list holds all of them."""
    count = model.config.get_text_config().num_hidden_layers
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == count]
    with_products = (each for each in lists if any(isinstance(m, nn.Linear | Conv1D) for m in each.modules()))
    return list(next(with_products, ()))


def default_taps(layers: int) -> tuple[int, ...]:
    """Return the layers to read if a head's config.json names none: the paper's, for targets of 8 layers or more."""
    if layers >= 8:
        return 2, layers // 2, layers - 3
    return tuple(sorted({2, layers // 2, layers - 1} if layers >= 4 else {0, layers - 1}))


def read_taps(ids: Any, layers: int) -> list[int]:
    """Return the layers whose inputs a head reads; raises CheckpointError if `ids` is not a list of integers.

    A list that begins with 1 counts layer outputs, as SGLang reads it (its #25454), so it is shifted by 1.
    """
    if not ids:
        return list(default_taps(layers))
    if not isinstance(ids, list) or not all(isinstance(place, int) for place in ids):
        raise CheckpointError(f"{TAPS} is {shown(ids)}: it must be a list of layers")
    return [place + (ids[0] == 1) for place in ids]
