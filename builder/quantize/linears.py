"""The weights of a Hugging Face model that can be quantized, by name; and the model with other numbers for them."""

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
    """Of a model's weights, without ".weight": all that can be quantized; which is the embedding, which the head."""

    weights: list[str]
    embedding: str
    head: str | None
    tied: bool

    @classmethod
    def of(cls, model: PreTrainedModel) -> Names:
        """Also of one without weights."""
        modules = dict(model.named_modules(remove_duplicate=False))
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        named = {id(module): name for name, module in modules.items()}
        linear = [name for name, module in modules.items() if isinstance(module, nn.Linear | Conv1D)]
        names = [named[id(embedding)], *linear]
        tied = head is not None and head.weight is embedding.weight  # whatever the configuration says
        return cls(list(dict.fromkeys(names)), named[id(embedding)], named.get(id(head)), tied)


def rows(module: nn.Module) -> Tensor:
    """A product's or an embedding's weight, a row for each output or token."""
    weight: Tensor = module.weight.detach()  # type: ignore[operator]
    return weight.T if isinstance(module, Conv1D) else weight


@contextmanager
def simulated(model: PreTrainedModel, found: Mapping[str, Quantized], watch: Watch | None = None) -> Iterator[None]:
    """The model computing with quantized weights and inputs, in float32; as it was afterwards.

    watch: told each product's name, its output, and what it was of the same input before.
    """
    with ExitStack() as undo:
        weights = dict[int, Tensor]()  # one of a tied embedding and head
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
    """Products that read one tensor, together, as query, key and value do: those become one product."""
    readers: list[tuple[Tensor, list[str]]] = []  # holds the tensors, so that no other has their identity
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
    """Evaluation without gradients or caches."""
    before, model.config.use_cache = model.config.use_cache, False
    try:
        with torch.no_grad():
            yield
    finally:
        model.config.use_cache = before
