"""The weights of a Hugging Face model that can be quantized, and the simulation of the model with quantized weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from specbuild.builder.frontend.layer_by_layer import LayeredModel
from specbuild.builder.frontend.lazy_weights import ALL, Rows, Weight

from .numbers import Numbers

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


@dataclass(frozen=True, eq=False)
class Turned(Weight):
    """The transpose of another weight."""

    whole: Weight

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Its shape."""
        return self.whole.shape[::-1]

    def read(self, rows: Rows = ALL) -> Tensor:
        """See Weight."""
        return self.whole.read().T[rows]


@dataclass(frozen=True, eq=False)
class Restored(Weight):
    """A quantized weight's numbers in float32."""

    numbers: Numbers

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Its shape."""
        rows, blocks, size = self.numbers.shape
        return rows, blocks * size

    def read(self, rows: Rows = ALL) -> Tensor:
        """See Weight."""
        return self.numbers.whole(rows).restored()


def row_weight(model: LayeredModel, name: str) -> Weight:
    """Return the weight of a linear layer or an embedding, with a row for each output or token."""
    weight = model.weights[f"{name}.weight"]
    return Turned(weight) if isinstance(model.net.get_submodule(name), Conv1D) else weight


@contextmanager
def simulated(model: LayeredModel, found: Mapping[str, Numbers], watch: Watch | None = None) -> Iterator[LayeredModel]:
    """Yield the model with quantized weights, whose inputs are rounded while inside, all in float32.

    Args:
        model: The float32 model.
        found: Quantized weights, by name.
        watch: Called with each linear layer's name, its output, and its float32 output for the same input, by the
            weight that it has at first; not with the head's.
    """
    weights = dict(model.weights)
    with ExitStack() as undo:
        for name, each in found.items():
            module, restored = model.net.get_submodule(name), Restored(each)
            weights[f"{name}.weight"] = Turned(restored) if isinstance(module, Conv1D) else restored
            if not isinstance(module, nn.Embedding):
                _round_inputs(module, name, each, watch if module is not model.head else None, undo)
        yield replace(model, weights=weights)


def _round_inputs(module: nn.Module, name: str, found: Numbers, watch: Watch | None, undo: ExitStack) -> None:
    seen: list[Tensor] = []

    def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if watch is not None:
            seen.append(inputs[0])
        return (found.seen(inputs[0]), *inputs[1:])

    undo.callback(module.register_forward_pre_hook(before).remove)
    if watch is not None:
        exact: Tensor = module._parameters["weight"]  # type: ignore[assignment]

        def after(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> None:
            product = seen.pop() @ (exact if isinstance(module, Conv1D) else exact.T)
            watch(name, output, product if module.bias is None else product + module.bias)  # type: ignore[operator]

        undo.callback(module.register_forward_hook(after).remove)


def groups(model: LayeredModel, names: Sequence[str]) -> list[list[str]]:
    """Group linear layers that read the same tensor, as query, key and value do, since they are merged into one."""
    found = [[name for name in group if name in names] for group in model.readers]
    return [group for group in found if group]
