"""The weights of a Hugging Face model that can be quantized, and the simulation of the model with quantized weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .numbers import Quantized

Watch = Callable[[str, Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class Names:
    """Names, without ".weight", of a model's weights that can be quantized: all, the embedding and the head.

    `tied` tells whether head and embedding are one tensor.
    """

    weights: list[str]
    embedding: str
    head: str | None
    tied: bool

    @classmethod
    def of(cls, model: PreTrainedModel) -> Names:
        """Find the weights of a model, which may be on the meta device."""
        modules = dict(model.named_modules(remove_duplicate=False))
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        named = {id(module): name for name, module in modules.items()}
        linear = [name for name, module in modules.items() if isinstance(module, nn.Linear | Conv1D)]
        names = [named[id(embedding)], *linear]
        tied = head is not None and head.weight is embedding.weight  # the configuration may be wrong
        return cls(list(dict.fromkeys(names)), named[id(embedding)], named.get(id(head)), tied)


def rows(module: nn.Module) -> Tensor:
    """Return the weight of a linear layer or an embedding, with a row for each output or token."""
    weight: Tensor = module.weight.detach()  # type: ignore[operator]
    return weight.T if isinstance(module, Conv1D) else weight


@contextmanager
def simulated(model: PreTrainedModel, found: Mapping[str, Quantized], watch: Watch | None = None) -> Iterator[None]:
    """Make the model compute with quantized weights and inputs, in float32, while inside.

    Args:
        model: The float32 model; it is restored afterwards.
        found: Quantized weights, by name.
        watch: Called with each linear layer's name, its output, and its float32 output for the same input.
    """
    with ExitStack() as undo:
        weights = dict[int, Tensor]()  # a tied embedding and head share one
        for name, each in found.items():
            if id(each) not in weights:
                weights[id(each)] = each.restored()
            _replace(model.get_submodule(name), name, each, weights[id(each)], watch, undo)
        yield


def _replace(
    module: nn.Module, name: str, found: Quantized, weight: Tensor, watch: Watch | None, undo: ExitStack
) -> None:
    exact = module._parameters["weight"]
    assert exact is not None
    numbers = weight.T.contiguous() if isinstance(module, Conv1D) else weight
    module._parameters["weight"] = nn.Parameter(numbers, requires_grad=False)
    undo.callback(module._parameters.__setitem__, "weight", exact)
    if isinstance(module, nn.Embedding):
        return
    seen: list[Tensor] = []

    def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if watch is not None:
            seen.append(inputs[0])
        return (found.seen(inputs[0]), *inputs[1:])

    undo.callback(module.register_forward_pre_hook(before).remove)
    if watch is not None:

        def after(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> None:
            assert watch is not None
            kernel = exact if isinstance(module, Conv1D) else exact.T
            product = seen.pop() @ kernel
            watch(name, output, product if module.bias is None else product + module.bias)  # type: ignore[operator]

        undo.callback(module.register_forward_hook(after).remove)


def groups(model: PreTrainedModel, names: Sequence[str]) -> list[list[str]]:
    """Group linear layers that read the same tensor, as query, key and value do, since they are merged into one."""
    readers: list[tuple[Tensor, list[str]]] = []  # holds the tensors, so that no id is reused
    with ExitStack() as undo, no_grad(model):
        for name in names:

            def hook(_: nn.Module, inputs: tuple[Any, ...], name: str = name) -> None:
                found = next((each for tensor, each in readers if tensor is inputs[0]), None)
                if found is None:
                    readers.append((inputs[0], [name]))
                else:
                    found.append(name)

            undo.callback(model.get_submodule(name).register_forward_pre_hook(hook).remove)
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64))
    return [names for _, names in readers]


@contextmanager
def no_grad(model: PreTrainedModel) -> Iterator[None]:
    """Disable gradients and the model's KV cache while inside."""
    before, model.config.use_cache = model.config.use_cache, False
    try:
        with torch.no_grad():
            yield
    finally:
        model.config.use_cache = before
