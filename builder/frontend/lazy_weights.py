"""Weights that are read when they are needed, one at a time, and models that stand in for those that have none yet.

A model without weights (`skeleton`) has parameters of the right shapes in almost no memory: they overlap. It is traced
like any other; `reading` gives a module its weights for as long as it computes.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from specbuild.runtime.errors import CheckpointError, one_line

from .attention_layout import empty
from .gguf_blocks import Blocks, Format
from .quiet import quiet

Rows = slice | NDArray[np.int64]
ALL = slice(None)
_DTYPES = {  # of safetensors
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Weight(ABC):
    """A tensor of a model, which `read` makes whenever it is called.

    Attributes:
        shape: Its shape.
        format: How its numbers are quantized where it comes from; None if they are not, or not by rows.
    """

    shape: tuple[int, ...]
    format: Format | None = None

    @abstractmethod
    def read(self, rows: Rows = ALL) -> Tensor:
        """Return the weight, or some of its rows, in float32."""

    def blocks(self, rows: Rows = ALL) -> Blocks:
        """Return the quantized numbers of a weight that has a `format`."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Held(Weight):
    """A weight in memory."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Its shape."""
        return tuple(self.tensor.shape)

    def read(self, rows: Rows = ALL) -> Tensor:
        """See Weight."""
        return self.tensor.detach()[rows] if self.tensor.ndim else self.tensor.detach()


@dataclass(frozen=True, eq=False)
class Stored(Weight):
    """A weight in a safetensors file."""

    path: Path
    name: str
    shape: tuple[int, ...]

    def read(self, rows: Rows = ALL) -> Tensor:
        """See Weight: maps its own bytes alone, since a file may be larger than memory."""
        try:
            start, entries = _places(self.path, self.path.stat().st_mtime_ns)
            dtype, (first, _) = _DTYPES[entries[self.name]["dtype"]], entries[self.name]["data_offsets"]
            copied: Literal["c", "r"] = (
                "c" if isinstance(rows, slice) else "r"
            )  # what is written to such a map counts as memory
            mapped = np.memmap(self.path, f"i{dtype.itemsize}", copied, start + first, self.shape or 1)
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{self.path} cannot be read ({one_line(error)}): download it again") from None
        found = torch.from_numpy(mapped[rows] if self.shape else mapped).view(dtype).float()
        return found if self.shape else found[0]


@lru_cache(maxsize=256)
def _places(path: Path, _: int) -> tuple[int, dict[str, Any]]:
    """Return where the data of a safetensors file begins, and its header, which was checked when it was found."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return 8 + size, json.loads(file.read(size))


@dataclass(frozen=True, eq=False)
class Picked(Weight):
    """Rows of another weight; row −1 is the mean of all its rows."""

    whole: Weight
    rows: NDArray[np.int64]

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Its shape."""
        return (len(self.rows), *self.whole.shape[1:])

    @property
    def format(self) -> Format | None:  # type: ignore[override]
        """The whole's, unless a row is a mean."""
        return self.whole.format if (self.rows >= 0).all() else None

    def read(self, rows: Rows = ALL) -> Tensor:
        """See Weight."""
        wanted = self.rows[rows]
        found = self.whole.read(np.maximum(wanted, 0))
        if (wanted < 0).any():
            found[torch.from_numpy(wanted < 0)] = self.whole.read().mean(0)
        return found

    def blocks(self, rows: Rows = ALL) -> Blocks:
        """See Weight."""
        return self.whole.blocks(self.rows[rows])


@dataclass(frozen=True, eq=False)
class Cast(Weight):
    """Another weight in another type."""

    whole: Weight
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """The whole's."""
        return self.whole.shape

    def read(self, rows: Rows = ALL) -> Tensor:
        """See Weight."""
        return self.whole.read(rows).to(self.dtype)


def check_finite(name: str, weight: Tensor) -> None:
    """Raise CheckpointError if a weight has a number that is not finite."""
    if not torch.isfinite(weight).all():
        raise CheckpointError(f"there are NaN or infinite values in {name}: the weights are damaged")


def of_names(model: nn.Module, tensors: Mapping[str, Weight]) -> dict[str, Weight]:
    """Return a checkpoint's weights by a model's names, a tied one by each of them."""
    first = {weight: name for name, weight in model.named_parameters()}
    return {name: tensors[first[weight]] for name, weight in model.named_parameters(remove_duplicate=False)}


def of_model(model: nn.Module) -> dict[str, Weight]:
    """Return the weights that a model holds, by name; a tied one by each of its names."""
    each = {weight: Held(weight) for weight in model.parameters()}
    return {name: each[weight] for name, weight in model.named_parameters(remove_duplicate=False)}


def shape_only(shape: tuple[int, ...]) -> nn.Parameter:
    """Return a parameter of a shape in almost no memory: its numbers are drawn, and neighbouring rows share them."""
    numbers = torch.randn(sum(shape) + 1, generator=torch.Generator().manual_seed(0)) / 32
    return nn.Parameter(numbers.as_strided(shape, (1,) * len(shape)), requires_grad=False)


@quiet()
def skeleton(config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    """Return the model that `config` describes, in evaluation mode, with parameters that are `shape_only`.

    Raises CheckpointError if `transformers` cannot make it.
    """
    shapes = {name: tuple(weight.shape) for name, weight in empty(config)[1].named_parameters()}
    try:
        model: PreTrainedModel = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
            None,
            config=config,
            state_dict={name: shape_only(shape).data for name, shape in shapes.items()},
            dtype=torch.float32,
            attn_implementation=attention,
        )
    except Exception as error:  # transformers raises many unrelated types
        raise CheckpointError(f"{config.model_type!r} models do not load: {one_line(error)}") from None
    return model.eval()


@contextmanager
def reading(model: nn.Module, module: nn.Module, weights: Mapping[str, Weight], deep: bool = True) -> Iterator[None]:
    """Give a module of a model, and unless not `deep` those in it, its weights by the model's names while inside."""
    names = {id(each): name for name, each in model.named_parameters()}
    with ExitStack() as undo:
        for part in module.modules() if deep else (module,):
            for key, weight in part._parameters.items():
                if weight is not None:
                    name = names[id(weight)]
                    tensor = weights[name].read()
                    check_finite(name, tensor)
                    put(part, key, tensor, undo)
        yield


def put(module: nn.Module, key: str, tensor: Tensor, undo: ExitStack) -> None:
    """Replace a module's parameter until `undo` closes."""
    undo.callback(module._parameters.__setitem__, key, module._parameters[key])
    module._parameters[key] = nn.Parameter(tensor, requires_grad=False)


def fill(model: PreTrainedModel, weights: Mapping[str, Weight]) -> None:
    """Give a skeleton all its weights, for good."""
    made = dict[nn.Parameter, nn.Parameter]()
    for name, weight in list(model.named_parameters(remove_duplicate=False)):
        if weight not in made:
            made[weight] = nn.Parameter(weights[name].read(), requires_grad=False)
        parent, _, key = name.rpartition(".")
        model.get_submodule(parent)._parameters[key] = made[weight]
